"""Looking at a run from outside: an observer sees the settings and the members, and is not counted."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Awaitable, Callable, Mapping

import pytest
import trio

from p2ptrain.errors import ConfigError, OtherRunError, PeerLostError
from p2ptrain.memory_network import MemoryNetwork
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.links.outbox import Traffic
from p2ptrain.protocol.membership.directory import RECORD_TTL_S, bucket_of, encode_record, find_members, member_key
from p2ptrain.protocol.membership.lookup import MAX_SETTINGS_BYTES, SettingsAnswers, ask_settings, check_key
from p2ptrain.protocol.membership.neighbours import DIALLED_AT_ONCE
from p2ptrain.protocol.membership.status import list_members
from p2ptrain.protocol.wire.messages import Answer, Request
from p2ptrain.protocol.wire.transport import Directory
from p2ptrain.settings.config import RunConfig, agrees
from tests.protocol.swarm import RUN, Swarm, run_virtual, swarm
from tests.protocol.wiring import hello_of, start_endpoint

TIMEOUT_S = 10.0
RELAY = "/ip4/5.188.7.1/tcp/4001/p2p/QmRelay"


async def settings_of(
    network: MemoryNetwork,
    run_id: str = "test",
    name: str = "observer",
    chosen: str = "",
    ours: RunConfig | None = None,
    **explicit: object,
) -> RunConfig | None:
    transport, directory = network.transport(name), network.directory(name)
    try:
        return await ask_settings(
            transport, directory, run_id, timeout_s=TIMEOUT_S, rng=random.Random(0), chosen=chosen, ours=ours,
            fits=lambda run: agrees(explicit, run),
        )  # fmt: skip
    finally:
        network.crash(name)


async def announce(network: MemoryNetwork, peer_id: str, run_id: str = "test", *maddrs: str) -> None:
    record = encode_record(list(maddrs) or [f"/memory/{peer_id}"], "trainer")
    await network.directory(peer_id).announce(member_key(run_id, bucket_of(peer_id)), record, RECORD_TTL_S)


def answer_with(payload: bytes) -> Callable[[Link, Request], Awaitable[None]]:
    async def on_request(link: Link, request: Request) -> None:
        await link.send_bulk(Answer(request.request, True, "settings"), payload, Traffic.STATE)

    return on_request


# --- settings ----------------------------------------------------------------------------------------------------


def test_an_observer_learns_the_settings_before_it_has_any() -> None:
    async def main() -> None:
        run = dataclasses.replace(RUN, lr=0.0123, sync_every=17, model="gpt", model_layout="f" * 64)
        async with swarm(run, latency_s=0.01) as s:
            s.start("a", founder=True)
            await trio.sleep(3)
            assert await settings_of(s.network) == run

    run_virtual(main)


def test_a_run_without_members_has_no_settings() -> None:
    async def main() -> None:
        async with swarm(RUN) as s:
            s.start("a", founder=True)
            await trio.sleep(3)
            start = trio.current_time()
            assert await settings_of(s.network, "another run") is None
            assert trio.current_time() - start < 3

    run_virtual(main)


def test_a_chosen_peer_of_another_run_is_an_error_and_no_new_run() -> None:
    """Whoever mistypes the run's name would train alone. A peer that knows its run is not kept from it."""

    async def main() -> None:
        async with swarm(RUN) as s:
            s.start("a", founder=True)
            await trio.sleep(3)
            with pytest.raises(OtherRunError, match="peer a belongs to run 'test', not 'rum'; choose that run id, or"):
                await settings_of(s.network, "rum", chosen="a")
            assert await settings_of(s.network, "rum", chosen="a", ours=RUN) is None
            transport = s.network.transport("observer")
            with pytest.raises(OtherRunError):
                await list_members(transport, s.network.directory("observer"), "rum", chosen="a")
            await check_key(transport, "rum", chosen="a")  # asks whether there is another key

    run_virtual(main)


def test_settings_are_had_from_a_peer_that_only_just_starts() -> None:
    """Two people type their commands at the same moment."""

    async def main() -> None:
        async with swarm(RUN) as s:
            async with trio.open_nursery() as nursery:
                found = []

                async def look() -> None:
                    found.append(await settings_of(s.network))

                nursery.start_soon(look)
                await trio.sleep(1)
                s.start("a", founder=True)
            assert found == [RUN]

    run_virtual(main)


class Slow:
    """A directory that answers late for some keys."""

    def __init__(self, directory: Directory, late_s: float, is_late: Callable[[str], bool]) -> None:
        self._directory, self._late_s, self._is_late = directory, late_s, is_late

    async def announce(self, key: str, value: bytes, expires_in_s: float) -> bool:
        return await self._directory.announce(key, value, expires_in_s)

    async def lookup(self, key: str) -> Mapping[str, bytes]:
        if self._is_late(key):
            await trio.sleep(self._late_s)
        return await self._directory.lookup(key)


@pytest.mark.parametrize("late_s", [2.5, 30.0])
def test_an_initial_peer_is_asked_before_the_directory_answers(late_s: float) -> None:
    """A joiner that finds nobody would start a run of its own."""

    async def main() -> None:
        network = MemoryNetwork(latency_s=0.2)
        async with trio.open_nursery() as nursery:
            endpoint = await start_endpoint(network, nursery, hello_of("a"))
            endpoint.on_request = answer_with(json.dumps(RUN.to_dict()).encode())
            slow = Slow(network.directory("me"), late_s, lambda key: True)
            found = await ask_settings(
                network.transport("me"), slow, "test", timeout_s=TIMEOUT_S, rng=random.Random(0), chosen="a"
            )
            assert found == RUN
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_an_initial_peer_has_two_seconds_also_when_others_take_its_place_at_first() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with trio.open_nursery() as nursery:
            endpoint = await start_endpoint(network, nursery, hello_of("z"))
            endpoint.on_request = answer_with(json.dumps(RUN.to_dict()).encode())
            names = [f"mute {number}" for number in range(DIALLED_AT_ONCE)]
            for name in names:
                network.transport(name)
            found = await ask_settings(
                network.transport("me"), network.directory("me"), "test", timeout_s=TIMEOUT_S, rng=random.Random(0),
                chosen=[*names, "z"],
            )  # fmt: skip
            assert found == RUN
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_a_key_that_answers_late_hides_no_members_of_others() -> None:
    async def main() -> None:
        async with swarm(RUN) as s:
            s.start("a", founder=True)
            await trio.sleep(3)
            start, late = trio.current_time(), member_key("test", bucket_of("b"))
            assert late != member_key("test", bucket_of("a"))
            slow = Slow(s.network.directory("me"), 30.0, lambda key: key == late)
            transport = s.network.transport("me")
            found = await ask_settings(transport, slow, "test", timeout_s=TIMEOUT_S, rng=random.Random(0))
            assert found == RUN
            assert trio.current_time() - start < 3

    run_virtual(main)


@pytest.mark.parametrize("trouble", ["gone", "mute", "of another run", "of other minds"])
def test_one_member_in_trouble_does_not_keep_the_settings_away(trouble: str) -> None:
    async def main() -> None:
        async with swarm(RUN) as s, trio.open_nursery() as nursery:
            s.start("z", founder=True)
            await trio.sleep(3)
            # Of those that do not answer at all, fewer than are asked at once.
            for name in "abc" if trouble == "mute" else "abcdefgh":
                await announce(s.network, name)
                if trouble == "mute":
                    s.network.transport(name)
                elif trouble == "of another run":
                    # It left this run for another; its record here has not expired yet.
                    await start_endpoint(s.network, nursery, hello_of(name, run_id="another"))
                elif trouble == "of other minds":
                    endpoint = await start_endpoint(s.network, nursery, hello_of(name))
                    endpoint.on_request = answer_with(b"\xff not json")
            start = trio.current_time()
            found = await settings_of(s.network)
            assert trio.current_time() - start < 3
            assert found == RUN
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_unreachable_members_are_given_up_within_the_timeout() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        for name in "abcdefgh":
            await announce(network, name)
            network.transport(name)
        start = trio.current_time()
        assert await settings_of(network) is None
        assert trio.current_time() - start == pytest.approx(TIMEOUT_S, abs=0.4)

    run_virtual(main)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"[]",
        b"null",
        b"{" * 10_000,
        b"[" * 60_000,
        b'{"lr": NaN}'[:-1],
        b" " * (MAX_SETTINGS_BYTES + 1) + json.dumps(RUN.to_dict()).encode(),
        "{\ud800}".encode("utf-8", "surrogatepass"),
    ],
)
def test_hostile_settings_are_ignored(payload: bytes) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with trio.open_nursery() as nursery:
            endpoint = await start_endpoint(network, nursery, hello_of("a"))
            endpoint.on_request = answer_with(payload)
            await announce(network, "a")
            assert await settings_of(network) is None
            nursery.cancel_scope.cancel()

    run_virtual(main)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({**RUN.to_dict(), "quantum": True}, "unknown run setting 'quantum'"),
        ({**RUN.to_dict(), "lr": float("nan")}, "lr = nan"),
        ({**RUN.to_dict(), "sync_every": 0}, "sync_every = 0"),
        ({**RUN.to_dict(), "sync_every": "0"}, "must be of type int"),
        ({**RUN.to_dict(), "outer_lr": 10**400}, "outer_lr = 10+…: must be"),
        ({**RUN.to_dict(), "outer_momentum": -(10**400)}, "outer_momentum = -10+…: must be"),
        ({**RUN.to_dict(), "max_staleness": 10**400}, "max_staleness = 10+…: must be"),
    ],
)
def test_settings_of_another_version_are_told_to_the_user(settings: dict[str, object], complaint: str) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with trio.open_nursery() as nursery:
            endpoint = await start_endpoint(network, nursery, hello_of("a"))
            endpoint.on_request = answer_with(json.dumps(settings).encode())
            await announce(network, "a")
            with pytest.raises(ConfigError, match=complaint) as caught:
                await settings_of(network, chosen="a")
            assert "run's settings from peer a" in str(caught.value)
            nursery.cancel_scope.cancel()

    run_virtual(main)


@pytest.mark.parametrize("alone", [False, True])
def test_settings_of_strangers_that_do_not_fit_are_skipped(alone: bool, caplog: pytest.LogCaptureFixture) -> None:
    """However many they are, and whoever else is there."""

    async def main() -> None:
        async with swarm(RUN) as s, trio.open_nursery() as nursery:
            for name in "abcdefghijklmnopqrst":
                endpoint = await start_endpoint(s.network, nursery, hello_of(name))
                endpoint.on_request = answer_with(b'{"quantum": true}')
                await announce(s.network, name)
            if not alone:
                s.start("z", founder=True)
                await trio.sleep(3)
            assert await settings_of(s.network, chosen="z") == (None if alone else RUN)
            nursery.cancel_scope.cancel()

    run_virtual(main)
    skipped = caplog.text.count("unknown run setting 'quantum'")
    # Beside the chosen one, whose answer ends the asking, as many are asked as at once.
    assert skipped == 20 if alone else skipped < DIALLED_AT_ONCE


@pytest.mark.parametrize("chosen", ["", "a"])
def test_a_bug_in_reading_one_answer_costs_only_that_answer(
    chosen: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from_stated = RunConfig.from_stated

    def fails_for_one(values: dict[str, object]) -> RunConfig:
        if values.get("run_id") == "a bug":
            raise KeyError("a bug")
        return from_stated(values)

    async def main() -> None:
        async with swarm(RUN) as s, trio.open_nursery() as nursery:
            monkeypatch.setattr(RunConfig, "from_stated", fails_for_one)
            endpoint = await start_endpoint(s.network, nursery, hello_of("a"))
            endpoint.on_request = answer_with(b'{"run_id": "a bug"}')
            await announce(s.network, "a")
            # No other peer answers: it is asked again until the time is over, and the bug is logged once.
            assert await settings_of(s.network, chosen=chosen) is None
            (error,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
            assert error.startswith("reading the settings of a; other members are asked: KeyError('a bug')")
            assert caplog.text.count("Traceback") == 1
            s.start("z", founder=True)
            await trio.sleep(3)
            assert await settings_of(s.network, chosen=chosen) == RUN
            nursery.cancel_scope.cancel()

    run_virtual(main)


@pytest.mark.parametrize(("chosen", "there"), [("", "z"), ("", ""), ("a", "z")])
def test_only_a_chosen_member_contradicts_what_is_known_of_a_run(chosen: str, there: str) -> None:
    """A restarted peer knows its run's settings from its checkpoint."""

    async def main() -> None:
        other = dataclasses.replace(RUN, lr=0.5)
        async with swarm(RUN) as s, trio.open_nursery() as nursery:
            for name in "abcdef":
                endpoint = await start_endpoint(s.network, nursery, hello_of(name, digest=other.digest))
                endpoint.on_request = answer_with(json.dumps(other.to_dict()).encode())
                await announce(s.network, name)
            for name in there:
                s.start(name, founder=True)
                await trio.sleep(3)
            found = await settings_of(s.network, chosen=chosen, ours=RUN)
            assert found == (other if chosen else RUN if there else None)
            nursery.cancel_scope.cancel()

    run_virtual(main)


@pytest.mark.parametrize("there", ["z", ""])
def test_what_fits_the_users_settings_is_preferred_and_the_rest_is_told(there: str) -> None:
    """Other settings of one peer are ignored if another peer can be joined, else they are reported to the user."""

    async def main() -> None:
        other = dataclasses.replace(RUN, lr=0.5)
        async with swarm(RUN) as s, trio.open_nursery() as nursery:
            for name in "abcdef":
                endpoint = await start_endpoint(s.network, nursery, hello_of(name, digest=other.digest))
                endpoint.on_request = answer_with(json.dumps(other.stated()).encode())
                await announce(s.network, name)
            for name in there:
                s.start(name, founder=True)
                await trio.sleep(3)
            start = trio.current_time()
            assert await settings_of(s.network, lr=RUN.lr) == (RUN if there else other)
            assert trio.current_time() - start < 3
            assert await settings_of(s.network, lr=0.5) == other
            nursery.cancel_scope.cancel()

    run_virtual(main)


@pytest.mark.parametrize("chosen", ["z", "y"])
def test_a_member_that_the_user_chose_is_believed_before_strangers(chosen: str) -> None:
    """Where the chosen one is not there, the first of them is believed."""

    async def main() -> None:
        other = dataclasses.replace(RUN, lr=0.5)
        async with swarm(RUN, latency_s=0.2) as s, trio.open_nursery() as nursery:
            s.start("z", founder=True)
            await trio.sleep(3)
            for name in "abcdef":
                endpoint = await start_endpoint(s.network, nursery, hello_of(name, digest=other.digest))
                endpoint.on_request = answer_with(json.dumps(other.to_dict()).encode())
                await announce(s.network, name)
            await announce(s.network, "y")
            assert await settings_of(s.network, chosen=chosen) in ((RUN,) if chosen == "z" else (RUN, other))
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_keys_for_which_nobody_answers_hide_no_other_members(caplog: pytest.LogCaptureFixture) -> None:
    class Deaf:
        def __init__(self, directory: Directory) -> None:
            self._directory = directory

        async def announce(self, key: str, value: bytes, expires_in_s: float) -> bool:
            return False

        async def lookup(self, key: str) -> Mapping[str, bytes]:
            if key == member_key("test", bucket_of("a")):
                raise PeerLostError("no other node of the DHT answers")
            return await self._directory.lookup(key)

    async def main() -> None:
        network = MemoryNetwork()
        for name in "abc":
            await announce(network, name)
        assert bucket_of("a") not in (bucket_of("b"), bucket_of("c"))
        assert (await find_members(Deaf(network.directory("me")), "test", "me")).keys() == {"b", "c"}

    run_virtual(main)
    assert "Traceback" not in caplog.text


# --- members -----------------------------------------------------------------------------------------------------


async def started(s: Swarm, names: str = "abc") -> None:
    s.start(names[0], founder=True)
    for name in names[1:]:
        s.start(name)
    await s.until(lambda: all(p.rounds("committed") for p in s.peers.values()))


def test_an_observer_sees_every_member_and_where_it_stands() -> None:
    async def main() -> None:
        async with swarm(RUN, latency_s=0.01) as s:
            await started(s)
            s.peers["c"].paused = True
            transport = s.network.transport("observer")
            infos = await list_members(transport, s.network.directory("observer"), "test")
            assert [info.peer_id for info in infos] == ["a", "b", "c"]
            head = s.peers["a"].node.driver.head
            for info in infos:
                peer = s.peers[info.peer_id]
                assert info.maddrs == (f"/memory/{info.peer_id}/p2p/{info.peer_id}",)
                assert (info.role, info.lineage) == ("trainer", head.lineage)
                assert info.round in (head.round, head.round - 1)
                assert info.step == pytest.approx(peer.exchange.run_step, abs=2)
                assert info.speed == pytest.approx(10, rel=0.01)
                assert info.status

    run_virtual(main)


def test_members_that_are_gone_are_not_listed() -> None:
    async def main() -> None:
        async with swarm(RUN) as s:
            await started(s)
            s.kill("b")
            await announce(s.network, "never there")
            transport = s.network.transport("observer")
            infos = await list_members(transport, s.network.directory("observer"), "test")
            assert [info.peer_id for info in infos] == ["a", "c"]
            assert await list_members(transport, s.network.directory("observer"), "no such run") == []

    run_virtual(main)


def test_members_behind_a_nat_are_listed_though_they_cannot_be_reached() -> None:
    """Their record says that they take part; who has a public address and does not answer there is gone."""

    async def main() -> None:
        async with swarm(RUN) as s:
            await started(s)
            await announce(s.network, "private", "test", "/ip4/192.168.1.5/tcp/4001", "/ip4/127.0.0.1/tcp/4001")
            await announce(s.network, "public", "test", "/ip4/5.188.7.1/tcp/4001")
            await announce(s.network, "relayed", "test", "/ip4/192.168.1.5/tcp/4001", f"{RELAY}/p2p-circuit")
            infos = {info.peer_id: info for info in await list_members(
                s.network.transport("observer"), s.network.directory("observer"), "test"
            )}  # fmt: skip
            assert sorted(infos) == ["a", "b", "c", "private"]
            assert infos.pop("private").status == "cannot be reached from here"
            assert all(info.status == "training" for info in infos.values())

    run_virtual(main)


def test_an_observer_is_never_counted_and_leaves_no_trace() -> None:
    async def main() -> None:
        async with swarm(RUN, latency_s=0.01) as s, trio.open_nursery() as nursery:
            await started(s)
            # One that stays, and one that comes and goes.
            hello = hello_of("stays", digest="", role="observer")
            observer = await start_endpoint(s.network, nursery, hello)
            for name in "abc":
                await observer.links.connect(name, [])
            for _ in range(3):
                await list_members(s.network.transport("observer"), s.network.directory("observer"), "test")
                await trio.sleep(3)
            for name, peer in s.peers.items():
                others = sorted(set("abc") - {name})
                assert list(peer.node.alive) == others
                assert sorted(peer.node.lineage_peers()) == others
                assert sorted(peer.node.membership.known) == others
                assert "stays" in peer.node.links.live
                assert "observer" not in peer.node.links.live
                assert all(set(e["alive"]) <= set("abc") for e in peer.events if e["event"] == "peers")
                assert all(set(r["contributors"]) <= set("abc") for r in peer.rounds())
                assert len(peer.rounds()) >= 4
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_an_observer_can_become_a_member_under_the_same_identity() -> None:
    """That is how everybody joins: first as an observer, for the settings."""

    async def main() -> None:
        async with swarm(RUN) as s:
            await started(s, "ab")
            assert await settings_of(s.network, name="c") == RUN
            s.start("c")
            await s.until(lambda: len(s.peers["c"].rounds("committed")) >= 1, within_s=10)

    run_virtual(main)


FITTING, OTHER = RunConfig(sync_every=50), RunConfig(sync_every=70)


FOUND = ("a", "b", "c")


def answers(*chosen: str, ours: RunConfig | None = None) -> SettingsAnswers:
    return SettingsAnswers(chosen, ours, lambda run: run == FITTING)


def test_a_chosen_peer_counts_first_even_if_its_settings_cannot_be_used() -> None:
    asked = answers("a")
    asked.add("b", FITTING)
    assert not asked.is_enough(FOUND)
    useless = ConfigError("sync_every = 0")
    asked.add("a", useless)
    assert asked.best is useless
    assert asked.is_enough(FOUND)


def test_a_chosen_peer_that_failed_or_is_not_announced_is_not_waited_for() -> None:
    asked = answers("a", "x")
    asked.add("b", FITTING)
    assert not asked.is_enough(FOUND)
    asked.failures["a"] += 1
    assert asked.is_enough(FOUND)
    assert asked.best == FITTING


def test_settings_that_do_not_fit_count_when_all_have_answered() -> None:
    asked = answers()
    asked.add("a", OTHER)
    asked.failures["b"] += 1
    assert not asked.is_enough(FOUND)
    assert asked.untried(FOUND) == {"c"}
    asked.add("b", ConfigError("of another version"))
    asked.add("c", OTHER)
    assert asked.is_enough(FOUND)
    assert asked.best == OTHER
    asked.add("d", FITTING)
    assert asked.best == FITTING


def test_known_settings_are_changed_by_chosen_peers_only(caplog: pytest.LogCaptureFixture) -> None:
    asked = answers("a", ours=FITTING)
    asked.add("b", OTHER)
    assert asked.best is None
    assert "peer b trains run" in caplog.text
    asked.add("a", OTHER)
    assert asked.best == OTHER
