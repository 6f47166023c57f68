"""Any member may fail at any message of a round.

Every swarm checks that no two peers commit different states for one (lineage, round). These tests also check that the
survivors continue, and that they commit the mean of the contributors in the record.
"""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace

import pytest
import trio
import trio.testing

from p2ptrain.memory_network import PacketFault
from p2ptrain.protocol.rounds.deciding import policy
from p2ptrain.protocol.rounds.moving.member import Participation
from p2ptrain.protocol.rounds.moving.snapshot import OwnContribution
from p2ptrain.protocol.wire import messages
from p2ptrain.protocol.wire.messages import KIND_OF
from tests.protocol.swarm import RUN, Swarm, Witness, after, common, kind_of, run_virtual, start_all, swarm, when

PLAIN = dataclasses.replace(RUN, round_codec="none", fragment_fraction=0.0)
ROUND_MESSAGES = [
    messages.Due, messages.Call, messages.Join, messages.Roster, messages.Contribution, messages.Arrived,
    messages.Reduce, messages.Reduced, messages.Propose, messages.Mean, messages.Ready, messages.Commit,
]  # fmt: skip

# Bulk is counted: who repeats it breaks the protocol of links, and loses them.
CONTROL = [kind for kind in ROUND_MESSAGES if kind not in (messages.Contribution, messages.Mean)]


@pytest.fixture(autouse=True)
def leaders_order_where_the_order_is_hit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaders tell reducers whom to average, as where others contribute than were expected."""
    if messages.Reduce in getattr(request.node, "callspec", SimpleNamespace(params={})).params.values():
        monkeypatch.setattr(policy, "without_roots", lambda contributors: None)


@pytest.mark.parametrize("size", [2, 3, 5, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ROUND_MESSAGES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("victim", ["sender", "receiver"])
def test_a_member_killed_at_a_message_is_left_out_and_the_others_go_on(
    size: int, kind: type[messages.Message], victim: str
) -> None:
    async def main() -> None:
        witness = Witness()
        rng = random.Random(f"{size}/{kind.__name__}/{victim}")
        async with swarm(PLAIN, seed=rng.randrange(2**31)) as s:
            start_all(s, "abcdefgh"[:size], witness)
            await s.until(lambda: common(s, 1, size))

            def kill(source: str, target: str) -> PacketFault:
                s.kill(source if victim == "sender" else target)
                return PacketFault.DROP

            happened = when(s, kind, rng.randint(1, 2 * size), kill)
            await s.until(happened, within_s=60)
            s.network.fault = lambda *_: PacketFault.NONE
            died, checked = trio.current_time(), witness.check_values()
            survivors = list(s.peers.values())
            # Of two voters, the second listed alone is no quorum: it waits for the new-lineage rule.
            await s.until(
                lambda: all(any(r["t"] > died and not r["late"] for r in p.rounds()) for p in survivors),
                within_s=120 if size == 2 else 40,
            )
            assert witness.check_values() > checked or size == 2

    run_virtual(main)


async def leave_then_go_on(s: Swarm, leaver: str) -> None:
    """A peer sends Leave; the next round of the others must not wait for a timeout."""
    s.peers[leaver].node.leave("done")
    await trio.sleep(0.2)
    s.kill(leaver)
    left = trio.current_time()
    await s.until(
        lambda: all(any(r["t"] > left and not r["late"] for r in p.rounds()) for p in s.peers.values()), within_s=15
    )


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ROUND_MESSAGES, ids=lambda kind: kind.__name__)
def test_a_member_that_leaves_at_a_message_delays_no_peer(size: int, kind: type[messages.Message]) -> None:
    async def main() -> None:
        rng = random.Random(f"{size}/{kind.__name__}")
        async with swarm(PLAIN, seed=rng.randrange(2**31)) as s:
            start_all(s, "abc"[:size])
            await s.until(lambda: common(s, 1, size))
            happened = when(s, kind, rng.randint(1, 2 * size), lambda source, target: PacketFault.NONE)
            await s.until(happened, within_s=60)
            await leave_then_go_on(s, rng.choice("abc"[:size]))

    run_virtual(main)


@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.1, 0.15])
def test_a_member_that_contributes_nothing_and_leaves_delays_no_peer(rounds: int, after_s: float) -> None:
    """One whose training has stopped joins without a snapshot: it votes, but neither sends nor averages."""

    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "ab")
            await s.until(lambda: common(s, rounds, 2))
            # The first listed voter: without it there is no quorum.
            s.peers["a"].paused, s.worker.work_s = True, 0.1
            await s.until(when(s, messages.Join, 1, lambda source, target: PacketFault.NONE), within_s=60)
            await trio.sleep(after_s)
            await leave_then_go_on(s, "a")

    run_virtual(main)


@pytest.mark.parametrize("kind", ROUND_MESSAGES, ids=lambda kind: kind.__name__)
def test_a_paused_member_costs_a_round_at_most_and_catches_up(kind: type[messages.Message]) -> None:
    """The network falls silent around one peer, for longer than every timeout, as under SIGSTOP."""

    async def main() -> None:
        rng = random.Random(kind.__name__)
        async with swarm(PLAIN, seed=rng.randrange(2**31)) as s:
            start_all(s, "abcd")
            await s.until(lambda: common(s, 1, 4))
            victims: list[str] = []

            def pause(source: str, target: str) -> PacketFault:
                victims.append(source)
                s.peers[source].paused = True
                s.network.partition([source])
                return PacketFault.DROP

            await s.until(when(s, kind, rng.randint(1, 8), pause), within_s=60)
            start = trio.current_time()
            others = [p for p in s.peers.values() if p.peer_id not in victims]
            await s.until(lambda: all(any(r["t"] > start + 12 for r in p.rounds("committed")) for p in others))
            s.network.partition()
            s.peers[victims[0]].paused = False
            woke = trio.current_time()
            await s.until(
                lambda: all(
                    any(r["t"] > woke and r["group_size"] == 4 for r in p.rounds("committed")) for p in s.peers.values()
                ),
                within_s=90,
            )

    run_virtual(main)


@pytest.mark.parametrize("kind", CONTROL, ids=lambda kind: kind.__name__)
def test_a_message_that_arrives_twice_ends_no_peer(kind: type[messages.Message]) -> None:
    """Links do not repeat frames, but a leader or member gone wrong may."""

    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "abc")
            await s.until(lambda: common(s, 1, 3))
            s.network.fault = lambda source, target, packet: (
                PacketFault.DUPLICATE if kind_of(packet) == KIND_OF[kind] else PacketFault.NONE
            )
            await trio.sleep(10)
            s.network.fault = lambda *_: PacketFault.NONE
            calm = trio.current_time()
            await s.until(
                lambda: all(
                    any(r["t"] > calm and r["group_size"] == 3 for r in p.rounds("committed")) for p in s.peers.values()
                ),
                within_s=60,
            )

    run_virtual(main)


@pytest.mark.parametrize("kind", ROUND_MESSAGES, ids=lambda kind: kind.__name__)
def test_after_a_sleep_of_the_whole_machine_the_run_goes_on_where_it_was(kind: type[messages.Message]) -> None:
    """All timeouts expire at once, and no peer was gone: no lineage begins, no member is forgotten."""

    async def main() -> None:
        rng = random.Random(kind.__name__)
        async with swarm(PLAIN, seed=rng.randrange(2**31)) as s:
            start_all(s, "abc")
            await s.until(lambda: common(s, 2, 3))
            lineage = s.peers["a"].node.driver.head.lineage
            known = [set(p.node.membership.known) for p in s.peers.values()]
            s.network.latency_s = 0.3  # it takes a while to link again
            clock = trio.lowlevel.current_clock()
            assert isinstance(clock, trio.testing.MockClock)

            def sleep(source: str, target: str) -> PacketFault:
                clock.jump(200)
                return PacketFault.NONE

            await s.until(when(s, kind, rng.randint(1, 6), sleep), within_s=300)
            woke = trio.current_time()
            await s.until(lambda: all(set(p.node.links.live) for p in s.peers.values()))
            assert [set(p.node.membership.known) for p in s.peers.values()] == known
            await s.until(lambda: after(s, woke, 3))
            assert {r["lineage"] for p in s.peers.values() for r in p.rounds()} == {lineage}

    run_virtual(main)


def test_a_voter_without_a_snapshot_says_where_its_training_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record goes no further than a quorum of the voters accepts, so it must not count as at step 0."""
    joins: list[tuple[bool, int, int]] = []
    make = Participation._join

    def noted(self: Participation, own: OwnContribution | None) -> messages.Join:
        join = make(self, own)
        joins.append((own is None, join.run_step, self._context.exchange.run_step))
        return join

    monkeypatch.setattr(Participation, "_join", noted)

    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "ab")
            await s.until(lambda: common(s, 3, 2))
            s.peers["a"].paused = True
            await s.until(lambda: any(is_without for is_without, _, _ in joins))

    run_virtual(main)
    assert all(said == at > 0 for is_without, said, at in joins if is_without)
