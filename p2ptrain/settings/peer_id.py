"""What a peer id is, as text."""

from __future__ import annotations

import re

# The multihash of a public key in base58: 46 characters (RSA) to 53 (others).
_PEER_ID = re.compile(r"(Qm|1)[1-9A-HJ-NP-Za-km-z]{44,51}")


def is_peer_id(text: str) -> bool:
    """Whether a text has the form of a peer id."""
    return _PEER_ID.fullmatch(text) is not None
