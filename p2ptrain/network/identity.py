"""A peer's identity: an RSA key in a file, and signatures with it. The peer id is the hash of the public key.

hivemind's record signatures support only RSA. The file has libp2p's own format, as hivemind writes it.

To check a signature, only the signer's peer id is needed: the signature holds the public key, whose hash is that id,
and the RSA-PSS signature of the bytes. With a key of 2048 bits (hivemind makes no others), signing takes 0.28 ms of
CPU, checking 0.03 ms.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import filelock
import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

from p2ptrain.errors import ConfigError
from p2ptrain.network._hivemind import PeerID, RSAPrivateKey, RSAPublicKey, crypto_pb2
from p2ptrain.settings.files import open_file, user_path

logger = logging.getLogger(__name__)

# Limits of others' keys. Smaller ones are made a hundred times faster, so a flood of them would be cheap; libp2p has
# the same limit. Signatures of larger ones take longer to check.
MIN_KEY_BITS, MAX_KEY_BITS = 2048, 4096
# With a larger exponent, checking a signature may take a hundred times as long.
PUBLIC_EXPONENT = 65537
# A public key of 4096 bits has 550 bytes in DER. Longer ones than this are not parsed.
MAX_KEY_BYTES = 1024
# How many public keys are remembered; parsing one takes as long as checking a signature.
REMEMBERED_KEYS = 1024
# A key of 4096 bits has 2.4 kB.
MAX_FILE_BYTES = 2**16
# Multihash prefix of a SHA-256 digest: code and length.
_SHA256_MULTIHASH = b"\x12\x20"
_PADDING = padding.PSS(mgf=padding.MGF1(hashes.SHA256()), salt_length=padding.PSS.DIGEST_LENGTH)


@dataclass(frozen=True)
class Identity:
    """A peer's private key, the file from which p2pd reads it, the peer id, and whether the key was just made."""

    path: Path
    key: RSAPrivateKey
    peer_id: str
    is_new: bool


@contextlib.contextmanager
def hold_identity(path: str | None, scratch: Path) -> Iterator[Identity]:
    """Read or create the identity, and lock it against other processes of this machine.

    `path` None makes a temporary identity in `scratch`. Raises ConfigError if the file cannot be read, written or
    parsed, or another process uses it.
    """
    if path is None:
        yield _make(scratch / "identity.key")
        return
    file = user_path(path)
    if not file.parent.is_dir():
        raise ConfigError(
            f"identity {file}: the directory {file.parent} does not exist; create it, or choose another file"
        )
    if file.exists():
        _read(file)  # reject a file that is not a key before a lock file is created beside it
    with _locked(file):
        yield _read(file) if file.exists() else _make(file)


def is_allowed(key: rsa.RSAPublicKey) -> bool:
    """Whether a peer may have this key."""
    return MIN_KEY_BITS <= key.key_size <= MAX_KEY_BITS and key.public_numbers().e == PUBLIC_EXPONENT


def peer_id_of(public_key: RSAPublicKey) -> str:
    """The base58 peer id of a public key: the SHA-256 of its protobuf form (libp2p's peer id specification)."""
    return peer_id_of_der(_der_of(serialization.load_ssh_public_key(public_key.to_bytes())))


def peer_id_of_der(der: bytes) -> str:
    """As `peer_id_of`, for an RSA key in DER (SubjectPublicKeyInfo)."""
    encoded = crypto_pb2.PublicKey(key_type=crypto_pb2.RSA, data=der).SerializeToString()
    return str(PeerID(_SHA256_MULTIHASH + hashlib.sha256(encoded).digest()).to_base58())


def _der_of(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    lock = filelock.FileLock(f"{file}.lock", thread_local=False)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise ConfigError(
            f"identity {file} is in use by another process on this machine; stop that process, "
            "or give each peer its own --identity file"
        ) from None
    except OSError as error:
        # A key may be in a read-only place, such as a container's secret.
        logger.debug("identity %s cannot be locked: %s", file, error)
    try:
        yield
    finally:
        lock.release()


def _make(file: Path) -> Identity:
    key = RSAPrivateKey()
    message = crypto_pb2.PrivateKey(key_type=crypto_pb2.RSA, data=key.to_bytes())
    unfinished = file.with_name(file.name + ".new")
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as output:
            output.write(message.SerializeToString())
        unfinished.replace(file)
    except OSError as error:
        raise ConfigError(f"identity {file} cannot be written: {error.strerror}; choose another file") from None
    return Identity(file, key, peer_id_of(key.get_public_key()), is_new=True)


def _read(file: Path) -> Identity:
    try:
        with open_file(file) as stream:
            content = stream.read(MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"identity {file} cannot be read: {error.strerror}; choose another file") from None
    try:
        message = crypto_pb2.PrivateKey.FromString(content)
        if message.key_type != crypto_pb2.RSA:
            raise ValueError("not an RSA key")
        key = RSAPrivateKey.__new__(RSAPrivateKey)
        key.__setstate__({"_private_key": message.data})
        peer_id = peer_id_of(key.get_public_key())
    except Exception as error:  # protobuf, cryptography and hivemind raise different types
        raise ConfigError(
            f"identity {file} is not an RSA private key in libp2p's format ({error}); "
            "remove the file to create a new key, or choose another file"
        ) from None
    return Identity(file, key, peer_id, is_new=False)


@functools.lru_cache(maxsize=REMEMBERED_KEYS)
def _key_of(public: bytes, peer_id: str) -> rsa.RSAPublicKey | None:
    """Parse an RSA key in DER; None unless it is allowed, and its hash is this peer id."""
    try:
        key = serialization.load_der_public_key(public)
    except Exception:  # untrusted bytes; cryptography raises several types
        return None
    if not isinstance(key, rsa.RSAPublicKey) or not is_allowed(key):
        return None
    return key if peer_id_of_der(public) == peer_id else None


class Signatures:
    """Signs as one identity: implements `protocol.wire.transport.Signer`."""

    def __init__(self, identity: Identity) -> None:
        self.peer_id = identity.peer_id
        self._private = serialization.load_der_private_key(identity.key.to_bytes(), password=None)
        self._public = _der_of(self._private.public_key())

    def sign(self, data: bytes) -> bytes:
        """The public key and a signature of `data`: about 560 bytes for a key of 2048 bits."""
        assert isinstance(self._private, rsa.RSAPrivateKey)
        return msgspec.msgpack.encode((self._public, self._private.sign(data, _PADDING, hashes.SHA256())))

    def verify(self, peer_id: str, data: bytes, signature: bytes) -> bool:
        """Whether the owner of this peer id has signed `data`. Never raises."""
        try:
            public, signed = msgspec.msgpack.decode(signature, type=tuple[bytes, bytes])
        except ValueError:
            return False
        key = _key_of(public, peer_id) if len(public) <= MAX_KEY_BYTES else None
        if key is None:
            return False
        try:
            key.verify(signed, data, _PADDING, hashes.SHA256())
        except InvalidSignature:
            return False
        return True
