"""Once faults stop, linked peers come into one lineage and commit together, whatever the interval between rounds.

The limit is max(10 s, 3 intervals), and the time of three downloads of the state to each other peer. The rules are
under "Progress" in docs/understand/protocol.md.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection

import msgspec
import pytest
import trio

from p2ptrain.memory_network import PacketFault
from p2ptrain.protocol.wire import messages
from p2ptrain.protocol.wire.messages import KIND_OF, Message
from tests.protocol.swarm import RUN, Shapes, Swarm, common, run_virtual, swarm

# The walk of these tests drifts far in seconds of rounds alone; whom the guard leaves out then is not their question.
# Few steps in an interval: it lasts as long, and rounds take most of the work.
PLAIN = dataclasses.replace(RUN, fragment_fraction=0.0, round_guard="off", sync_every=5)
SHAPES: Shapes = [("embedding", (40, 64)), ("bias", (70,)), ("head", (500, 64))]
STATE_BYTES = 2 * 4 * 64 * 542
FAST_S, SLOW_S = 0.06, 60.0
# A state takes 9 s, a round's mean 1.2 s.
SLOW_BYTES_S = 30e3


def limit_s(interval_s: float, rate: float = math.inf, peers: int = 2) -> float:
    """Of several peers, one may have to give its state to all others over its one link."""
    return max(10.0, 3 * interval_s) + 3 * (peers - 1) * STATE_BYTES / rate


async def started(s: Swarm, names: str, interval_s: float, *, rounds: int = 2) -> None:
    """All have committed these rounds together; their nodes are rebuilt when they fail."""
    for name in names:
        s.start(name, founder=name == names[0], step_s=interval_s / s.run.sync_every, restarts=True)
    await s.until(lambda: all(p.current.ready.is_set() for p in s.peers.values()))
    await s.until(lambda: common(s, rounds, len(names)), within_s=20 * interval_s + 60)


def fail(s: Swarm, names: Collection[str]) -> None:
    for name in names:
        if s.peers[name].current.ready.is_set():
            s.peers[name].current._fail(ZeroDivisionError("a bug"))


async def together(s: Swarm, within_s: float) -> None:
    """From now on: one lineage, and a round of everybody lands everywhere."""
    now, count = trio.current_time(), len(s.peers)
    await s.until(
        lambda: all(
            p.current.ready.is_set() and any(r["t"] > now and r["group_size"] == count for r in p.rounds("committed"))
            for p in s.peers.values()
        ),
        within_s=within_s,
    )
    assert len({p.current.driver.head.lineage for p in s.peers.values()}) == 1


def majority(names: str, *, lowest: bool) -> str:
    return names[: len(names) // 2 + 1] if lowest else names[-(len(names) // 2) - 1 :]


RESTARTED = [
    ("ab", "a"), ("ab", "b"), ("ab", "ab"), ("abc", "ab"), ("abc", "bc"), ("abc", "abc"), ("abcde", "abc"),
    ("abcde", "cde"), ("abcdefgh", "abcde"), ("abcdefgh", "defgh"),
]  # fmt: skip


@pytest.mark.parametrize(("names", "victims"), RESTARTED)
@pytest.mark.parametrize("interval_s", [FAST_S, 2.0, pytest.param(SLOW_S, marks=pytest.mark.long)])
def test_restarted_nodes_and_the_others_commit_together_again(names: str, victims: str, interval_s: float) -> None:
    async def main() -> None:
        async with swarm(PLAIN, shapes=SHAPES) as s:
            await started(s, names, interval_s)
            fail(s, victims)
            await together(s, limit_s(interval_s))

    run_virtual(main)


@pytest.mark.parametrize(
    ("names", "victims", "interval_s"),
    [
        ("ab", "a", FAST_S), ("ab", "b", 0.5), ("abc", "ab", 0.5), ("abc", "bc", 2.0),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (("abc", "ab", 0.02), ("ab", "b", 0.02), ("ab", "ab", 0.02), ("abc", "bc", SLOW_S))
        ),
    ],
)  # fmt: skip
def test_so_do_those_whose_state_takes_longer_than_many_rounds(names: str, victims: str, interval_s: float) -> None:
    async def main() -> None:
        async with swarm(PLAIN, shapes=SHAPES) as s:
            await started(s, names, interval_s)
            for name in names:
                s.network.narrow(name, SLOW_BYTES_S)
            fail(s, victims)
            await together(s, limit_s(interval_s, SLOW_BYTES_S, len(names)))

    run_virtual(main)


PHASES = (
    messages.Due, messages.Call, messages.Join, messages.Roster, messages.Contribution, messages.Mean,
    messages.Propose, messages.Ready, messages.Commit, messages.Landed,
)  # fmt: skip


@pytest.mark.parametrize("kind", PHASES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("victims", ["source", "target", "both"])
def test_at_any_message_of_a_round_nodes_may_be_restarted(kind: type[Message], victims: str) -> None:
    async def main() -> None:
        async with swarm(PLAIN, shapes=SHAPES) as s:
            await started(s, "abc", 0.5)
            failed: list[str] = []

            def fault(source: str, target: str, packet: bytes) -> PacketFault:
                if packet[1] == KIND_OF[kind] and not failed:
                    failed.extend({"source": [source], "target": [target], "both": [source, target]}[victims])
                    fail(s, failed)
                return PacketFault.NONE

            s.network.fault = fault
            await s.until(lambda: bool(failed))
            await together(s, limit_s(0.5))

    run_virtual(main)


@pytest.mark.parametrize("names", ["ab", "abc", "abcde"])
@pytest.mark.parametrize("pause_s", [0.55, 0.8, 2.1])
def test_restarts_in_quick_succession_cost_no_more_than_the_last(names: str, pause_s: float) -> None:
    async def main() -> None:
        async with swarm(PLAIN, shapes=SHAPES) as s:
            await started(s, names, 0.5)
            for victims in (majority(names, lowest=True), majority(names, lowest=False), names[0], names[-1]):
                fail(s, victims)
                await trio.sleep(pause_s)
            # The third and fourth restart of a node come after 2 s and 4 s.
            await together(s, 4.0 + limit_s(0.5))

    run_virtual(main)


@pytest.mark.parametrize(
    ("apart", "rate"),
    [
        ("a/b", math.inf), ("ab/cd", math.inf), ("a/bcd", math.inf), ("a/b", SLOW_BYTES_S),
        pytest.param("ab/cd", SLOW_BYTES_S, marks=pytest.mark.long),
        pytest.param("a/bcd", SLOW_BYTES_S, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_two_lineages_of_any_strength_become_one(apart: str, rate: float) -> None:
    """Each side goes on from one head alone, at a pace at which none can be downloaded between two rounds."""

    async def main() -> None:
        sides = apart.split("/")
        async with swarm(PLAIN, shapes=SHAPES) as s:
            names = "".join(sides)
            await started(s, names, FAST_S)
            s.network.partition(*map(list, sides))
            for side in sides:
                driver = s.peers[side[0]].current.driver
                driver.found_lineage(driver.head, driver.history, "a test")
            await trio.sleep(12.0)
            assert len({s.peers[side[0]].current.driver.head.lineage for side in sides}) == 2
            for name in names:
                s.network.narrow(name, rate)
            s.network.partition()
            for transport in s.network.transports.values():
                for stream in list(transport.streams):
                    await stream.aclose()  # they dial each other anew
            await s.until(lambda: all(len(p.current.links.live) == len(names) - 1 for p in s.peers.values()))
            await together(s, limit_s(FAST_S, rate, len(names)))

    run_virtual(main)


@pytest.mark.parametrize("names", ["ab", "ba", "abc", "cab"])
@pytest.mark.parametrize("after_s", [0.0, 0.3, 1.0])
def test_a_founder_that_is_restarted_before_the_first_round_does_not_start_a_second_run(
    names: str, after_s: float
) -> None:
    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, sync_every=10), shapes=SHAPES) as s:
            founder = s.start(names[0], founder=True, step_s=0.5, restarts=True)
            await s.until(founder.current.ready.is_set)
            for name in names[1:]:
                s.start(name, step_s=0.5, restarts=True)
            await trio.sleep(after_s)
            fail(s, names[0])
            await together(s, limit_s(5.0))
            assert len({p.current.driver.head.genesis for p in s.peers.values()}) == 1

    run_virtual(main)


def test_a_newcomer_of_a_lower_id_waits_for_a_peer_that_goes_on_from_its_state() -> None:
    """It has no state, so what it founded would be a second start of the run."""

    async def main() -> None:
        async with swarm(PLAIN, shapes=SHAPES) as s:
            await started(s, "bc", 0.5)
            genesis = s.peers["b"].current.driver.head.genesis
            fail(s, "bc")
            await trio.sleep(0.1)
            s.start("a", step_s=0.5 / s.run.sync_every, restarts=True)
            await together(s, limit_s(0.5))
            assert {p.current.driver.head.genesis for p in s.peers.values()} == {genesis}

    run_virtual(main)


def test_rounds_of_a_group_do_not_outrun_a_joiner() -> None:
    """Over its link a round's mean takes twenty intervals. The others wait once it was overtaken; training goes on."""

    async def main() -> None:
        async with swarm(PLAIN, shapes=SHAPES) as s:
            await started(s, "abc", FAST_S)
            s.network.narrow("d", SLOW_BYTES_S)
            steps, step_s = s.peers["a"].exchange.steps, FAST_S / s.run.sync_every
            joined = trio.current_time()
            s.start("d", step_s=step_s, restarts=True)
            await together(s, limit_s(FAST_S, SLOW_BYTES_S))
            took_s = trio.current_time() - joined
            assert s.peers["a"].exchange.steps - steps > 0.97 * took_s / step_s - 2
            # And once it is here, rounds are no longer held up.
            s.network.narrow("d", None)
            await together(s, limit_s(FAST_S))
            before = len(s.peers["a"].rounds())
            await trio.sleep(3.0)
            assert len(s.peers["a"].rounds()) - before > 0.5 * 3.0 / FAST_S

    run_virtual(main)


def test_a_partner_that_was_refused_in_its_own_lineage_is_followed_in_ours() -> None:
    """Its claims of the one kind say nothing on those of the other."""

    async def main() -> None:
        async with swarm(PLAIN, shapes=SHAPES) as s:
            await started(s, "ab", 2.0)
            a, b = (s.peers[name].current for name in "ab")
            link = a.links.live["b"]
            beat = link.beat
            assert beat is not None
            link.beat = msgspec.structs.replace(beat, lineage="9-" + "0" * 16)
            for _ in range(3):
                a.driver.ignore_claims(link, 40.0)
            assert not a.driver.may_follow(link)
            link.beat = msgspec.structs.replace(beat, round=a.driver.head.round + 5)
            assert a.driver.may_follow(link)
            assert b.driver.head.lineage == a.driver.head.lineage

    run_virtual(main)


def test_a_round_waits_for_a_voter_that_has_not_landed_the_last_one_but_not_for_long() -> None:
    """It says so by Landed. Without the wait, the parts that it is fetching would be gone."""

    async def main() -> None:
        async with swarm(PLAIN, shapes=SHAPES) as s:
            await started(s, "abc", FAST_S)
            s.network.fault = lambda source, target, packet: (
                PacketFault.DROP if source == "b" and packet[1] == KIND_OF[messages.Landed] else PacketFault.NONE
            )
            await trio.sleep(1.0)
            rounds = [r["t"] for r in s.peers["a"].rounds()]
            await trio.sleep(60.0)
            times = [r["t"] for r in s.peers["a"].rounds()][len(rounds) :]
            gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
            assert gaps
            assert min(gaps[1:]) > 5.0
            assert max(gaps) < 15.0

    run_virtual(main)
