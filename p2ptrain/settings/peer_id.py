"""What a peer id is, as text."""

from __future__ import annotations

import re

# Base58 of a multihash: of an RSA key's SHA-256, or of a shorter key itself.
_PEER_ID = re.compile(r"Qm[1-9A-HJ-NP-Za-km-z]{44}|1[1-9A-HJ-NP-Za-km-z]{51,52}")


def is_peer_id(text: str) -> bool:
    """Whether a text has the form of a peer id."""
    return _PEER_ID.fullmatch(text) is not None
