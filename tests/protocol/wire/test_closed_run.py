"""Closed runs: who has the key links and finds the others; who has not learns nothing, and its user is told why."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
import pytest
import trio

from p2ptrain.errors import PeerLostError, RunKeyError, RunMismatchError
from p2ptrain.memory_network import MemoryNetwork, PacketFault
from p2ptrain.protocol.event_log.observer import Observer
from p2ptrain.protocol.links.links import MAX_STRIKES
from p2ptrain.protocol.membership.directory import ClosedDirectory, bucket_of, member_key
from p2ptrain.protocol.membership.lookup import ask_settings, check_key
from p2ptrain.protocol.membership.status import list_members
from p2ptrain.protocol.wire.closed_run import ACCEPTOR, DIALLER, ClosedRun
from p2ptrain.protocol.wire.frames import encode_frame
from p2ptrain.protocol.wire.messages import KINDS, Challenge, Hello, Message, Proof
from p2ptrain.settings.run_key import RunKey
from tests.protocol.swarm import RUN, common, inline, run_virtual, swarm
from tests.protocol.wiring import Endpoint, hello_of, start_endpoint, until

KEY, OTHER = RunKey(bytes(range(32))), RunKey(bytes(32))
CLOSED = "the run is closed: peer b asks for its key; give --run-key FILE"
OPEN = "peer b has no run key: its run is open, and ours is closed; leave --run-key out"
WRONG = "wrong run key: peer b has another run key or run id"


def closed_run(key: RunKey | None, seed: int = 0, run_id: str = "test") -> ClosedRun | None:
    return None if key is None else ClosedRun(key, run_id, random.Random(seed).randbytes)


def frame_of(data: bytes) -> str:
    return KINDS[data[1]].__name__


class Tap:
    """Sees all packets of a network."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.packets: list[tuple[str, str, bytes]] = []
        network.fault = self.see

    def see(self, source: str, target: str, packet: bytes) -> PacketFault:
        self.packets.append((source, target, packet))
        return PacketFault.NONE

    def kinds(self, source: str) -> list[str]:
        return [frame_of(packet) for sender, _, packet in self.packets if sender == source]


# --- derivations -------------------------------------------------------------------------------------------------


def test_a_proof_holds_for_one_key_run_role_pair_of_nonces_and_pair_of_peers() -> None:
    closed = closed_run(KEY)
    assert closed is not None
    nonces, ids = (b"x" * 32, b"y" * 32), ("a", "b")
    proof = closed.proof(DIALLER, nonces, ids)
    assert len(proof) == 32
    assert closed.is_proof(proof, DIALLER, nonces, ids)
    swapped = nonces[::-1]
    for other, role, other_nonces, other_ids in (
        (closed_run(OTHER), DIALLER, nonces, ids),
        (closed_run(KEY, run_id="test2"), DIALLER, nonces, ids),
        (closed, ACCEPTOR, nonces, ids),
        (closed, DIALLER, swapped, ids),
        (closed, ACCEPTOR, swapped, ("b", "a")),
        (closed, DIALLER, nonces, ("a", "c")),
        (closed, DIALLER, nonces, ("ab", "")),
    ):
        assert other is not None
        assert not other.is_proof(proof, role, other_nonces, other_ids)
    for bad in (b"", proof[:-1], bytes(32)):
        assert not closed.is_proof(bad, DIALLER, nonces, ids)


def test_names_and_values_of_the_directory_say_nothing_without_the_key() -> None:
    closed, other = closed_run(KEY), closed_run(OTHER)
    assert closed is not None
    assert other is not None
    name = closed.hidden_name("p2ptrain/test/members/3")
    assert "test" not in name
    assert len({name, closed.hidden_name("p2ptrain/test/members/4"), other.hidden_name("p2ptrain/test/members/3")}) == 3
    sealed = closed.seal(b"/ip4/10.0.0.1", name, "a")
    assert b"/ip4" not in sealed
    assert sealed != closed.seal(b"/ip4/10.0.0.1", name, "a")
    assert closed.unseal(sealed, name, "a") == b"/ip4/10.0.0.1"
    for bad, at, owner, by in (
        (sealed, name, "a", other), (sealed, name, "b", closed), (sealed, name + "x", "a", closed),
        (sealed[:-1], name, "a", closed), (b"", name, "a", closed), (sealed[:12], name, "a", closed),
        (sealed[:-1] + bytes([sealed[-1] ^ 1]), name, "a", closed),
    ):  # fmt: skip
        assert by.unseal(bad, at, owner) is None


# --- the handshake -----------------------------------------------------------------------------------------------


async def two(
    network: MemoryNetwork, nursery: trio.Nursery, *keys: RunKey | None, run_id: str = "test"
) -> list[Endpoint]:
    return [
        await start_endpoint(
            network, nursery, hello_of(name, run_id=run_id), chosen="ab", closed=closed_run(key, seed, run_id)
        )
        for seed, (name, key) in enumerate(zip("ab", keys, strict=True))
    ]


@pytest.mark.parametrize("run_id", ["test", "x" * 128])
def test_two_that_have_the_key_are_linked_after_the_proofs(run_id: str) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        tap = Tap(network)
        async with trio.open_nursery() as nursery:
            a, b = await two(network, nursery, KEY, KEY, run_id=run_id)
            await a.links.connect("b", [])
            await until(lambda: b.links.get("a") is not None)
            assert tap.kinds("a")[:3] == ["Challenge", "Proof", "Hello"]
            assert tap.kinds("b")[:2] == ["Challenge", "Hello"]
            assert (a.linked, b.linked) == (["b"], ["a"])
            nursery.cancel_scope.cancel()

    run_virtual(main)


@pytest.mark.parametrize(
    ("ours", "theirs", "message"), [(None, KEY, CLOSED), (KEY, None, OPEN), (KEY, OTHER, WRONG), (OTHER, KEY, WRONG)]
)
def test_a_peer_without_the_key_is_told_why_and_no_peer_gets_a_strike(
    ours: RunKey | None, theirs: RunKey | None, message: str
) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        tap = Tap(network)
        async with trio.open_nursery() as nursery:
            a, b = await two(network, nursery, ours, theirs)
            for _ in range(2 * MAX_STRIKES):
                with pytest.raises(RunKeyError, match=message):
                    await a.links.connect("b", [])
                await trio.sleep(2)
            assert message in str(a.links.mismatch)
            assert not a.linked
            assert not b.linked
            assert not a.links.strikes
            assert not b.links.strikes
            assert not network.transports["a"].streams
            # Who has a key sends no Hello.
            for name, key in (("a", ours), ("b", theirs)):
                if key is not None:
                    assert "Hello" not in tap.kinds(name)
                    sent = b"".join(packet for source, _, packet in tap.packets if source == name)
                    for secret in (b"test", b"digest", f"{name}.1".encode(), b"trainer", b"/memory", key.secret):
                        assert secret not in sent
            # The side that was dialled knows it too, if it has proof.
            if ours is not None and theirs is not None:
                assert "wrong run key: peer a" in str(b.links.mismatch)
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_another_run_id_counts_as_another_key() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with trio.open_nursery() as nursery:
            a = await start_endpoint(network, nursery, hello_of("a"), closed=closed_run(KEY))
            hello = hello_of("b", run_id="other")
            await start_endpoint(network, nursery, hello, closed=closed_run(KEY, 1, run_id="other"))
            with pytest.raises(RunKeyError, match=WRONG):
                await a.links.connect("b", [])
            assert a.links.mismatch is None  # nobody's choice
            nursery.cancel_scope.cancel()

    run_virtual(main)


async def stranger_frames(network: MemoryNetwork, *frames: Message) -> list[str]:
    """The kinds of frames that a peer of the closed run sends to a stranger that says this."""
    tap = Tap(network)
    stream = await network.transports["stranger"].open_stream("a", [])
    for frame in frames:
        await stream.send_all(encode_frame(frame))
    while await stream.receive_some():
        pass
    return tap.kinds("a")


def forged() -> Iterator[tuple[str, list[Message]]]:
    nonce = bytes(range(32))
    hello = hello_of("stranger")
    yield "says Hello", [hello]
    yield "guesses", [Challenge(nonce, b""), Proof(bytes(32)), hello]
    yield "sends no proof", [Challenge(nonce, b""), Proof(b""), hello]
    yield "goes on without a proof", [Challenge(nonce, b""), hello]
    yield "has a short nonce", [Challenge(nonce[:31], b""), hello]
    yield "challenges twice", [Challenge(nonce, b""), Challenge(nonce, b""), hello]


@pytest.mark.parametrize("frames", [frames for _, frames in forged()], ids=[name for name, _ in forged()])
def test_a_stranger_gets_nothing_but_challenges(frames: list[Message]) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        network.transport("stranger")
        async with trio.open_nursery() as nursery:
            a = await start_endpoint(network, nursery, hello_of("a"), closed=closed_run(KEY))
            assert set(await stranger_frames(network, *frames)) <= {"Challenge"}
            assert not a.linked
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_a_proof_sent_back_or_replayed_is_worth_nothing() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        stranger = network.transport("stranger")
        async with trio.open_nursery() as nursery:
            a = await start_endpoint(network, nursery, hello_of("a"), closed=closed_run(KEY))
            tap = Tap(network)
            # It sends the challenges and proofs of "a" back to it, in a second stream and in the same.
            for reflected in range(2):
                streams = [await stranger.open_stream("a", []) for _ in range(2)]
                await streams[0].send_all(encode_frame(Challenge(bytes(32), b"")))
                told = await streams[0].receive_some()
                challenge = msgspec.msgpack.decode(told[24:], type=Challenge)
                assert len(challenge.proof) == 32
                if reflected:
                    await streams[1].send_all(encode_frame(Challenge(challenge.nonce, b"")))
                    told = await streams[1].receive_some()
                    challenge = msgspec.msgpack.decode(told[24:], type=Challenge)
                await streams[0].send_all(encode_frame(Proof(challenge.proof)) + encode_frame(hello_of("stranger")))
                with trio.move_on_after(5):
                    while await streams[0].receive_some():
                        pass
                for stream in streams:
                    await stream.aclose()
            assert not a.linked
            assert "Hello" not in tap.kinds("a")
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_a_handshake_that_stops_ends_and_frees_its_place() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        stranger = network.transport("stranger")
        async with trio.open_nursery() as nursery:
            a = await start_endpoint(network, nursery, hello_of("a"), closed=closed_run(KEY))
            stream = await stranger.open_stream("a", [])
            await stream.send_all(encode_frame(Challenge(bytes(32), b"")))
            while await stream.receive_some():
                pass
            await until(lambda: not a.links._greeting)
            with pytest.raises(PeerLostError, match="no Hello within 8 s"):
                await a.links.connect("stranger", [])
            nursery.cancel_scope.cancel()

    run_virtual(main)


# --- a swarm -----------------------------------------------------------------------------------------------------


def test_a_closed_run_trains_and_cannot_be_found_listed_or_entered_without_its_key() -> None:
    async def main() -> None:
        async with swarm(RUN) as s:
            tap = Tap(s.network)
            for name in "abc":
                s.start(name, founder=name == "a", key=KEY)
            await s.until(lambda: common(s, 2, 3))

            # Two without the key, one that knows everybody's address and one that looks for the run.
            outsiders = [s.start("x"), s.start("y", key=OTHER)]
            for outsider in outsiders:
                for name in "abc":
                    outsider.node.membership.hint(name, (f"/memory/{name}/p2p/{name}",))
            await trio.sleep(20)
            for outsider in outsiders:
                assert not outsider.node.alive
                assert not outsider.node.links.strikes
            for name in "abc":
                assert sorted(s.peers[name].node.alive) == sorted(set("abc") - {name})
                assert not s.peers[name].node.links.strikes

            # The directory holds neither names nor addresses of the run.
            assert s.network._records is not None
            plain = {member_key("test", bucket_of(name)) for name in "xy"}
            hidden = {key: records for key, records in s.network._records.items() if key not in plain}
            assert {name for records in hidden.values() for name in records} >= set("abc")
            for key, records in hidden.items():
                assert "test" not in key
                for value, _ in records.values():
                    assert b"memory" not in value
                    assert b"trainer" not in value

            # No frame of a handshake and nobody's events hold the key.
            for _, _, packet in tap.packets:
                assert KEY.secret not in packet
            for peer in s.peers.values():
                assert KEY.secret.hex() not in repr(peer.events)
                assert repr(KEY.secret) not in repr(peer.events)

            for outsider in outsiders:
                assert s.kill(outsider.peer_id).error is None
            before = len(s.peers["a"].rounds())
            await s.until(lambda: all(len(s.peers[name].rounds()) > before + 2 for name in "abc"))

    run_virtual(main)


@pytest.mark.parametrize(("key", "message"), [(None, "the run is closed"), (OTHER, "wrong run key")])
def test_observers_need_the_key_too(key: RunKey | None, message: str) -> None:
    async def main() -> None:
        async with swarm(RUN) as s:
            for name in "ab":
                s.start(name, founder=name == "a", key=KEY)
            await s.until(lambda: common(s, 1, 2))
            transport, directory = s.network.transport("observer"), s.network.directory("observer")
            with pytest.raises(RunKeyError, match=message):
                await list_members(transport, directory, "test", chosen="a", closed=closed_run(key))
            with pytest.raises(RunKeyError, match=message):
                await ask_settings(
                    transport, directory, "test", timeout_s=5, rng=random.Random(0), chosen="a", closed=closed_run(key)
                )
            with pytest.raises(RunKeyError, match=message):
                await check_key(transport, "test", chosen="a", closed=closed_run(key))
            # Nobody that the user chose: no such run.
            assert await list_members(transport, directory, "test", closed=closed_run(key)) == []

            closed = closed_run(KEY)
            await check_key(transport, "test", chosen="a", closed=closed)
            infos = await list_members(transport, directory, "test", chosen="a", closed=closed)
            assert [info.peer_id for info in infos] == ["a", "b"]
            assert (
                await ask_settings(transport, directory, "test", timeout_s=5, rng=random.Random(0), closed=closed)
                == RUN
            )
            observer = Observer("test", inline, trio.current_time)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(observer.watch_as_observer, transport, directory, closed)
                await s.until(lambda: sum(member.linked for member in observer.take().members) == 2)
                nursery.cancel_scope.cancel()

    run_virtual(main)


def test_a_keyed_user_at_an_open_run_is_told() -> None:
    async def main() -> None:
        async with swarm(RUN) as s:
            s.start("a", founder=True)
            await s.until(lambda: s.peers["a"].node.ready.is_set())
            transport, directory = s.network.transport("observer"), s.network.directory("observer")
            with pytest.raises(RunKeyError, match="peer a has no run key: its run is open"):
                await ask_settings(
                    transport, directory, "test", timeout_s=5, rng=random.Random(0), chosen="a", closed=closed_run(KEY)
                )

    run_virtual(main)


def test_records_of_strangers_and_damaged_ones_are_ignored() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        closed = closed_run(KEY)
        assert closed is not None
        own = ClosedDirectory(network.directory("a"), closed, "a")
        assert await own.announce("key", b"value", 30)
        name = closed.hidden_name("key")
        ((sealed, _),) = network._records[name].values()  # type: ignore[index]
        await network.directory("copycat").announce(name, sealed, 30)
        await network.directory("guess").announce(name, b"value", 30)
        other = ClosedDirectory(network.directory("b"), closed, "b")
        assert await other.lookup("key") == {"a": b"value"}
        assert await network.directory("b").lookup("key") == {}

    run_virtual(main)


def test_the_handshake_sends_hello_as_the_open_one_does() -> None:
    """After the proofs, what is refused for other reasons is told to both as before."""

    async def main() -> None:
        network = MemoryNetwork()
        async with trio.open_nursery() as nursery:
            ends = []
            for seed, (name, digest) in enumerate((("a", "1" * 64), ("b", "2" * 64))):
                hello: Hello = hello_of(name, digest=digest)
                ends.append(await start_endpoint(network, nursery, hello, chosen="ab", closed=closed_run(KEY, seed)))
            with pytest.raises(RunMismatchError, match="with other settings"):
                await ends[0].links.connect("b", [])
            await trio.sleep(2)
            for end in ends:
                assert "with other settings" in str(end.links.mismatch)
            nursery.cancel_scope.cancel()

    run_virtual(main)
