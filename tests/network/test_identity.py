"""Signatures with libp2p identities: readers need the peer id alone, and any other bytes are refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from p2ptrain.network import identity
from p2ptrain.network.identity import Signatures, hold_identity, peer_id_of_der


@pytest.fixture(scope="module")
def signers(tmp_path_factory: pytest.TempPathFactory) -> list[Signatures]:
    made = []
    for name in "ab":
        with hold_identity(str(tmp_path_factory.mktemp(name) / "identity.key"), Path()) as identity:
            made.append(Signatures(identity))
    return made


def test_a_signature_is_checked_by_the_peer_id_alone(signers: list[Signatures]) -> None:
    a, b = signers
    signature = a.sign(b"statement")
    assert b.verify(a.peer_id, b"statement", signature)
    assert not b.verify(b.peer_id, b"statement", signature)
    assert not b.verify(a.peer_id, b"another", signature)
    assert 500 < len(signature) < 600


def test_other_bytes_are_refused_and_raise_nothing(signers: list[Signatures]) -> None:
    a, b = signers
    good = a.sign(b"data")
    public, signed = msgspec.msgpack.decode(good)
    for bad in (
        b"", b"\xc1", good[:-1], good + b"x", bytes(2048), msgspec.msgpack.encode(7), msgspec.msgpack.encode([public]),
        msgspec.msgpack.encode([public, b""]), msgspec.msgpack.encode([b"", signed]),
        msgspec.msgpack.encode([public[:-1], signed]), msgspec.msgpack.encode([public + bytes(2000), signed]),
        msgspec.msgpack.encode([public, bytes(len(signed))]), msgspec.msgpack.encode(["text", "text"]),
    ):  # fmt: skip
        assert not b.verify(a.peer_id, b"data", bad)


@pytest.mark.parametrize("kind", ["small", "exponent", "elliptic"])
def test_keys_that_are_too_small_or_of_another_kind_are_refused(kind: str, signers: list[Signatures]) -> None:
    key = {
        "small": lambda: rsa.generate_private_key(65537, 1024),
        "exponent": lambda: rsa.generate_private_key(3, 2048),
        "elliptic": lambda: ec.generate_private_key(ec.SECP256R1()),
    }[kind]()
    public = key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    signed = (
        key.sign(b"data", identity._PADDING, hashes.SHA256())
        if isinstance(key, rsa.RSAPrivateKey)
        else key.sign(b"data", ec.ECDSA(hashes.SHA256()))
    )
    assert not signers[0].verify(peer_id_of_der(public), b"data", msgspec.msgpack.encode((public, signed)))
