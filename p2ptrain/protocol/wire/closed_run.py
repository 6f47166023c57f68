"""Cryptography of a closed run, all from its key: proofs for the handshake, names and values in the directory.

Both sides of a stream send a random nonce and then prove that they have the key, with an HMAC over both nonces, both
peer ids and the run id (as in SKID3; Menezes et al., "Handbook of Applied Cryptography", 10.17). The roles have
different labels, so a proof cannot be sent back to its maker. The transport authenticates the peer ids, so a proof is
of no use to a third peer. The run digest is not in it, as observers do not know the digest: Hello has it, after the
proofs.

Pure functions, except that nonces come from a source of random bytes.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from p2ptrain.protocol.wire.transport import PeerId
from p2ptrain.settings.run_key import RunKey

DIALLER, ACCEPTOR = b"dialler", b"acceptor"
NONCE_BYTES = 32
# Length of the nonce before a sealed value; the cipher's tag is at the end.
SEAL_NONCE_BYTES = 12


@dataclass(frozen=True)
class ClosedRun:
    """A run and its key. `random_bytes` must be unpredictable outside of simulations."""

    key: RunKey
    run_id: str
    random_bytes: Callable[[int], bytes]

    def nonce(self) -> bytes:
        return self.random_bytes(NONCE_BYTES)

    def proof(self, role: bytes, nonces: tuple[bytes, bytes], ids: tuple[PeerId, PeerId]) -> bytes:
        """The proof of the side with this role. Nonces and peer ids are the dialler's, then the acceptor's."""
        return _mac(self._subkey(b"handshake"), role, *nonces, *(peer_id.encode() for peer_id in ids))

    def is_proof(self, proof: bytes, role: bytes, nonces: tuple[bytes, bytes], ids: tuple[PeerId, PeerId]) -> bool:
        """Whether this proves that the side with this role has the key. Takes equally long for all wrong proofs."""
        return hmac.compare_digest(proof, self.proof(role, nonces, ids))

    def hidden_name(self, name: str) -> str:
        """The name in the directory that stands for `name`. Strangers cannot compute it, or link it to the run."""
        return _mac(self._subkey(b"directory name"), name.encode()).hex()

    def seal(self, value: bytes, name: str, owner: PeerId) -> bytes:
        """Encrypt and authenticate a value that `owner` stores under `name`."""
        nonce = self.random_bytes(SEAL_NONCE_BYTES)
        return nonce + self._cipher().encrypt(nonce, value, _joined(name.encode(), owner.encode()))

    def unseal(self, sealed: bytes, name: str, owner: PeerId) -> bytes | None:
        """The value of `seal`; None if it was made with another key, for another name, or for another owner."""
        nonce, rest = sealed[:SEAL_NONCE_BYTES], sealed[SEAL_NONCE_BYTES:]
        try:
            return self._cipher().decrypt(nonce, rest, _joined(name.encode(), owner.encode()))
        except (InvalidTag, ValueError):
            return None

    def _cipher(self) -> ChaCha20Poly1305:
        return ChaCha20Poly1305(self._subkey(b"directory value"))

    def _subkey(self, purpose: bytes) -> bytes:
        """A key for one purpose, as in the second step of HKDF (RFC 5869); the secret is uniformly random."""
        return _mac(self.key.secret, b"p2ptrain/1", purpose, self.run_id.encode())


def _mac(key: bytes, *items: bytes) -> bytes:
    return hmac.digest(key, _joined(*items), hashlib.sha256)


def _joined(*items: bytes) -> bytes:
    """The items, each after its length: no two lists have the same bytes."""
    return b"".join(len(item).to_bytes(4, "big") + item for item in items)
