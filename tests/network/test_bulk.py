"""TLS connections for bulk bytes: who may open one, and what strangers get."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from p2ptrain.errors import ConfigError, PeerLostError, WireError
from p2ptrain.network import bulk
from p2ptrain.network.bulk import HANDSHAKE_S, MAX_HANDSHAKES_PER_ADDRESS, NOT_AFTER, NOT_BEFORE, PORT, TlsBulk
from p2ptrain.network.socket_stream import RECEIVE_BUFFER_BYTES
from p2ptrain.protocol.wire.messages import MAX_OFFER_BYTES
from tests.network.local import read

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
TLS_CLIENT = ssl.PROTOCOL_TLS_CLIENT
HERE = ("/ip4/127.0.0.1/tcp/1/p2p/Qm",)


@contextlib.asynccontextmanager
async def two(path: Path) -> AsyncIterator[tuple[TlsBulk, TlsBulk]]:
    """The bulk transports of "a" and "b", which have each other's Hello."""
    for name in "ab":
        (path / name).mkdir()
    a, b = TlsBulk("a", LOOPBACK, 0, path / "a"), TlsBulk("b", LOOPBACK, 0, path / "b")
    async with a.listening(), b.listening():
        a.admit("b", b.offer)
        b.admit("a", a.offer)
        yield a, b


def port_of(transport: TlsBulk) -> int:
    return int(PORT.unpack(transport.offer[: PORT.size])[0])


def test_bytes_arrive_in_both_directions(run: Callable[..., Any], tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path) as (a, b):
            ours = await a.open("b", b.offer, HERE)
            theirs = await b.accept()
            assert (ours.remote, theirs.remote) == ("b", "a")
            data = bytes(range(256)) * 40_000  # several times what the buffers hold
            assert len(data) > 8 * RECEIVE_BUFFER_BYTES
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ours.send_all, data)
                nursery.start_soon(theirs.send_all, data[::-1])
                assert await read(theirs, len(data)) == data
                assert await read(ours, len(data)) == data[::-1]
            await ours.send_all(b"the last")
            await ours.aclose()
            assert await read(theirs, 8) == b"the last"
            assert await theirs.receive_some() == b""

    run(main)


async def is_refused(stream: Any) -> bool:
    """Whether a connection is closed before a byte has come. With TLS 1.3 a client learns that only when it reads."""
    try:
        return await stream.receive_some() == b""
    except PeerLostError:
        return True


async def refuses(client: TlsBulk, server: TlsBulk, offer: bytes | None = None) -> bool:
    try:
        stream = await client.open("b", offer or server.offer, HERE)
    except PeerLostError:
        return True
    return await is_refused(stream)


def test_only_who_has_a_link_gets_a_connection(run: Callable[..., Any], tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path) as (a, b):
            (tmp_path / "c").mkdir()
            stranger = TlsBulk("c", LOOPBACK, 0, tmp_path / "c")
            async with stranger.listening():
                assert await refuses(stranger, b)
            # After the link has ended, and after the peer came again with another certificate.
            b.admit("a", b"")
            assert await refuses(a, b)
            (tmp_path / "again").mkdir()
            restarted = TlsBulk("a", LOOPBACK, 0, tmp_path / "again")
            b.admit("a", PORT.pack(1) + restarted._own_certificate)
            assert await refuses(a, b)
            b.admit("a", a.offer)
            assert not await _is_closed_at_once(await a.open("b", b.offer, HERE))
            assert (await b.accept()).remote == "a"

    run(main)


async def _is_closed_at_once(stream: Any) -> bool:
    with trio.move_on_after(0.2):
        return await is_refused(stream)
    return False


def test_a_server_with_another_certificate_is_refused(run: Callable[..., Any], tmp_path: Path) -> None:
    """Whoever listens at the address of a peer is not taken for it."""

    async def main() -> None:
        async with two(tmp_path) as (a, b):
            (tmp_path / "c").mkdir()
            imposter = TlsBulk("c", LOOPBACK, 0, tmp_path / "c")
            async with imposter.listening():
                imposter.admit("a", a.offer)
                with pytest.raises(PeerLostError, match="certificate"):
                    await a.open("b", PORT.pack(port_of(imposter)) + b._own_certificate, HERE)

    run(main)


def test_who_names_the_certificate_of_another_peer_needs_its_key(run: Callable[..., Any], tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path) as (a, b):
            (tmp_path / "c").mkdir()
            thief = TlsBulk("c", LOOPBACK, 0, tmp_path / "c")
            thief._server_name = a._server_name
            assert await refuses(thief, b)

    run(main)


def test_no_peer_can_claim_the_certificate_of_another(run: Callable[..., Any], tmp_path: Path) -> None:
    """Else its bytes would count as the claimer's."""

    async def main() -> None:
        async with two(tmp_path) as (a, b):
            with pytest.raises(WireError, match="another peer"):
                b.admit("copy", a.offer)
            await a.open("b", b.offer, HERE)
            assert (await b.accept()).remote == "a"

    run(main)


@pytest.mark.parametrize(
    "offer", [b"x", b"\x00\x00abc", b"\x10\x00", b"\x10\x00" + b"not a certificate", b"\xff" * MAX_OFFER_BYTES]
)
def test_a_malformed_offer_is_a_wire_error(run: Callable[..., Any], tmp_path: Path, offer: bytes) -> None:
    async def main() -> None:
        async with two(tmp_path) as (a, _):
            with pytest.raises(WireError):
                a.admit("b", offer)

    run(main)


def test_an_address_at_which_no_program_listens(run: Callable[..., Any], tmp_path: Path) -> None:
    """A dead one among the peer's addresses costs nothing, and the error names the last one tried."""

    async def main() -> None:
        async with two(tmp_path) as (a, b):
            dead = PORT.pack(1) + b._own_certificate
            with pytest.raises(PeerLostError, match=r"127\.0\.0\.1"):
                await a.open("b", dead, HERE)
            with pytest.raises(PeerLostError, match="no address"):
                await a.open("b", b.offer, ["/memory/b", "/ip4/127.0.0.1/tcp/1/p2p/Qm/p2p-circuit"])
            nowhere = "/ip4/127.1.1.1/tcp/1/p2p/Qm"
            assert (await a.open("b", b.offer, [nowhere, *HERE])).remote == "b"

    run(main)


def test_silent_strangers_are_few_and_end(run: Callable[..., Any], tmp_path: Path) -> None:
    """A peer with a link gets through once they are gone."""

    async def main() -> None:
        async with two(tmp_path) as (a, b):
            strangers = []
            for _ in range(MAX_HANDSHAKES_PER_ADDRESS + 8):
                strangers.append(socket.create_connection(("127.0.0.1", port_of(b))))
            with trio.fail_after(4 * HANDSHAKE_S):
                for stranger in strangers:
                    stranger.setblocking(False)
                    while not await trio.to_thread.run_sync(_has_ended, stranger):
                        await trio.sleep(0.05)
                    stranger.close()
                assert b._handshakes.total() == 0
                await a.open("b", b.offer, HERE)
                assert (await b.accept()).remote == "a"

    run(main)


def _has_ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_plain_bytes_end_the_connection(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "HANDSHAKE_S", 60.0)

    async def main() -> None:
        async with two(tmp_path) as (_, b):
            with socket.create_connection(("127.0.0.1", port_of(b))) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
                stranger.setblocking(False)
                with trio.fail_after(30):
                    while not _has_ended(stranger):
                        await trio.sleep(0.05)

    run(main)


def test_a_taken_port_is_an_error_for_the_user(run: Callable[..., Any], tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path) as (a, _):
            (tmp_path / "c").mkdir()
            with pytest.raises(ConfigError, match=rf"--bulk-port {port_of(a)}.*choose another port"):
                async with TlsBulk("c", LOOPBACK, port_of(a), tmp_path / "c").listening():
                    pass

    run(main)


def test_only_its_owner_can_read_the_key(tmp_path: Path) -> None:
    TlsBulk("a", LOOPBACK, 0, tmp_path)
    assert (tmp_path / "bulk.pem").stat().st_mode & 0o077 == 0


def test_old_tls_is_refused(run: Callable[..., Any], tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path) as (a, b):
            context = a._context(ssl.PROTOCOL_TLS_CLIENT, b.offer)
            context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
            with pytest.raises((ConnectionError, ssl.SSLError)):
                await a._dial("b", "127.0.0.1", port_of(b), context)

    run(main)


def test_it_listens_on_the_hosts_of_libp2p_and_no_others(run: Callable[..., Any], tmp_path: Path) -> None:
    async def main() -> None:
        hosts = ("/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.2/tcp/4001", "/ip4/127.0.0.1/udp/0/quic", "/ip6zone/lo/ip6/::1")
        transport = TlsBulk("a", hosts, 0, tmp_path)
        async with transport.listening():
            for host in ("127.0.0.1", "127.0.0.2"):
                socket.create_connection((host, port_of(transport))).close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.3", port_of(transport)))
        (tmp_path / "none").mkdir()
        async with TlsBulk("a", ["/ip6zone/lo/ip6/::1/tcp/1"], 0, tmp_path / "none").listening() as _:
            pass

    run(main)


def test_a_connection_that_ends_right_after_its_handshake_leaves_nothing(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    """Its end may be noticed before its handshake is."""

    async def main() -> None:
        async with two(tmp_path) as (a, b):
            for _ in range(60):
                await trio.to_thread.run_sync(_shake_hands_and_end, a, port_of(b), a._context(TLS_CLIENT, b.offer))
            with trio.fail_after(10):
                while b._streams or b._handshakes:
                    with trio.move_on_after(0.05):
                        await (await b.accept()).aclose()

    run(main)


def _shake_hands_and_end(client: TlsBulk, port: int, context: ssl.SSLContext) -> None:
    """As an attacker does: its last bytes of the handshake come with the end."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname=client._server_name)
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                connection.sendall(outgoing.read())
                if not (answer := connection.recv(65536)):
                    return  # too many at once
                incoming.write(answer)
        with contextlib.suppress(ssl.SSLError):
            tls.unwrap()
        connection.sendall(outgoing.read())


def test_a_server_name_that_cannot_be_decoded_is_refused_without_a_word(
    run: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Python would write a traceback to the terminal for each."""

    async def main() -> None:
        async with two(tmp_path) as (a, b):
            hello = _client_hello(a, a._context(TLS_CLIENT, b.offer))
            name = a._server_name.encode()
            assert name in hello
            for bad in (hello.replace(name, b"\xff" * len(name)), hello[:100], b"\x16\x03\x01\xff\xff" + bytes(9000)):
                with socket.create_connection(("127.0.0.1", port_of(b))) as stranger:
                    stranger.sendall(bad)
                    stranger.setblocking(False)
                    with trio.fail_after(60):
                        while not _has_ended(stranger):
                            await trio.sleep(0.05)
            assert not b._handshakes

    run(main)
    assert capfd.readouterr().err == ""


def _client_hello(client: TlsBulk, context: ssl.SSLContext) -> bytes:
    outgoing = ssl.MemoryBIO()
    tls = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=client._server_name)
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def test_only_ed25519_is_taken(run: Callable[..., Any], tmp_path: Path) -> None:
    """Other keys can make a handshake take ten times as long."""

    async def main() -> None:
        async with two(tmp_path) as (a, _):
            key = ec.generate_private_key(ec.SECP256R1())
            name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "b")])
            builder = x509.CertificateBuilder(name, name, key.public_key(), 1, NOT_BEFORE, NOT_AFTER)
            certificate = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)
            with pytest.raises(WireError, match="Ed25519"):
                a.admit("b", PORT.pack(1) + certificate)

    run(main)
