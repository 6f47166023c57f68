"""Who votes, in a swarm: newcomers do soon, those that have left do not, and whom a voter says it sees."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from msgspec.structs import replace

from p2ptrain.protocol.rounds.deciding.policy import RECENT_ROUNDS, drawn
from p2ptrain.protocol.rounds.deciding.record import MAX_CONTRIBUTORS
from p2ptrain.protocol.rounds.deciding.voters import Voter, seen_of
from p2ptrain.protocol.rounds.lineage_watch import HUNG_S, QUORUM_LOST_S
from p2ptrain.protocol.rounds.moving.member import Participation
from p2ptrain.protocol.wire.messages import MAX_SEEN, MAX_VOTERS, VOTER_HASH_BYTES, Attempt, Call, View, pack, unpack
from tests.protocol.swarm import RUN, Swarm, common, run_virtual, start_all, swarm


def test_a_newcomer_votes_soon_and_one_that_has_left_votes_no_more() -> None:
    async def main() -> None:
        async with swarm(RUN) as s:
            start_all(s, "abcd")
            await s.until(lambda: common(s, 2, 4))
            s.start("e")
            a = s.peers["a"].node.driver

            def voters() -> str:
                return "".join(sorted(name for name, _ in a.head.voters))

            await s.until(lambda: voters() == "abcde", within_s=60)
            s.kill("b")
            await s.until(lambda: voters() == "acde", within_s=60)
            s.start("b")
            await s.until(lambda: voters() == "abcde", within_s=60)
            b = s.peers["b"].node.driver.context.liveness.own
            assert b in a.head.voters
            s.kill("b")
            s.start("b")
            await s.until(lambda: voters() == "abcde" and b not in a.head.voters, within_s=60)

    run_virtual(main)


@pytest.mark.parametrize("num_voters", [30, MAX_VOTERS])
def test_a_view_names_voters_and_while_there_is_room_who_may_be_drawn(num_voters: int) -> None:
    async def main() -> None:
        async with swarm(RUN) as s:
            start_all(s, "a")
            await s.until_joined()
            driver = s.peers["a"].node.driver
            context = driver.context
            others = [(f"p{number:03}", "1") for number in range(120)]
            voters = (context.liveness.own, *others[: num_voters - 1])
            context.liveness.present = lambda: {context.liveness.own, *others}  # type: ignore[method-assign]
            attempt = Attempt(1, "a", "1")

            def view_of(voters: tuple[Voter, ...]) -> View | None:
                head = replace(driver.head, voters=voters)
                return Participation(context, attempt, head, Any, Any, Any)._view()  # type: ignore[arg-type]

            view = view_of(voters)
            assert view is not None
            likely = drawn(driver.head.state_hash, ["a", *(peer for peer, _ in others)], MAX_CONTRIBUTORS)
            room = {voter for voter in others if voter[0] in likely} if num_voters < MAX_VOTERS else set()
            assert view.seen == seen_of(room.union(voters))
            assert len(view.seen) <= MAX_SEEN * VOTER_HASH_BYTES
            assert unpack(View, pack(view)) == view
            assert view_of(tuple(others[:3])) is None

    run_virtual(main)


def test_a_voter_that_is_linked_but_joins_no_round_votes_no_more_after_some_rounds() -> None:
    async def main() -> None:
        async with swarm(RUN) as s:
            start_all(s, "abcd")
            await s.until(lambda: common(s, 2, 4))
            d, a = s.peers["d"].node.driver, s.peers["a"].node.driver
            d._attempts._on_call = lambda *_: None  # type: ignore[method-assign]
            d._schedule.is_ours_to_lead = lambda *_: False  # type: ignore[method-assign]
            first = a.head.round
            await s.until(lambda: "d" not in {name for name, _ in a.head.voters})
            assert a.head.round <= first + RECENT_ROUNDS + 2
            assert a.context.liveness.is_linked("d")

    run_virtual(main)


def rounds_of(s: Swarm, names: str) -> int:
    """In how many rounds each of these took part, and nobody else."""
    together = [r for r in s.peers[names[0]].rounds("committed") if sorted(r["contributors"]) == list(names)]
    return min(sum(r["round"] == t["round"] for r in s.peers[n].rounds("committed") for t in together) for n in names)


def test_who_founds_a_lineage_while_another_voter_hangs_for_a_while_is_not_followed() -> None:
    async def main() -> None:
        async with swarm(RUN) as s:
            start_all(s, "abx")
            await s.until(lambda: common(s, 3, 3))
            a, x = (s.peers[name].node.driver for name in "ax")
            s.peers["b"].paused = s.peers["x"].paused = True
            await s.until(lambda: ("b", "b.2") in a._lineage_watch.hung, within_s=HUNG_S + 10.0)
            lineage = a.head.lineage
            x.found_lineage(x.head, x.history, "a lie")
            await trio.sleep(30.0)
            assert a.head.lineage == lineage
            s.peers["b"].paused = False
            began = a.head.round
            await s.until(lambda: a.head.round > began + 3)
            assert a.head.lineage == lineage

    run_virtual(main)


def test_a_peer_that_becomes_due_in_an_attempt_says_so() -> None:
    """Else its leader could make others take it for one that hangs, as it makes no steps at the end of the run."""

    async def main() -> None:
        async with swarm(RUN) as s:
            start_all(s, "abc")
            await s.until(lambda: common(s, 3, 3))
            b = s.peers["b"].node.driver
            round_ = b.head.round
            await s.until(lambda: b.head.round > round_)
            leader = next(name for name in "ac" if name not in b._rotation._barred)
            leading = s.peers[leader].node.driver
            attempt = Attempt(99, *leading.context.liveness.own)
            leading._attempts.tell("b", Call(b.head.lineage, b.head.round + 1, attempt, 60.0))
            await s.until(lambda: b.round_state.member is not None, within_s=1)
            assert not b._exchange.round_due
            other = s.peers["ca"["ac".index(leader)]].node.driver
            await s.until(lambda: "b" in other._rotation.due_for(other.head), within_s=10)
            assert b.round_state.member is not None

    run_virtual(main)


def test_rounds_go_on_without_a_voter_that_hangs_and_with_it_when_it_trains_again() -> None:
    """c has crashed, and still votes, as three do. b is linked, but its training stands still."""

    async def main() -> None:
        async with swarm(RUN) as s:
            start_all(s, "abc")
            await s.until(lambda: common(s, 3, 3))
            s.kill("c")
            await trio.sleep(30.0)
            s.peers["b"].paused = True
            s.start("d")
            a = s.peers["a"].node.driver
            founded = a.head.lineage
            began = trio.current_time()
            await s.until(lambda: a.head.lineage != founded, within_s=HUNG_S + QUORUM_LOST_S + 30.0)
            assert trio.current_time() > began + HUNG_S
            await s.until(lambda: rounds_of(s, "ad") >= 3, within_s=60)
            s.peers["b"].paused = False
            await s.until(lambda: rounds_of(s, "abd") >= 3, within_s=60)

    run_virtual(main)
