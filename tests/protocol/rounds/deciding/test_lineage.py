"""A lineage ends only after its voters were unreachable for long, as seen by a peer that was running."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio

from p2ptrain.errors import WireError
from p2ptrain.protocol.rounds.deciding.lineage import (
    PastHeads,
    check_head,
    generation_of,
    is_our_turn,
    new_lineage,
)
from p2ptrain.protocol.rounds.lineage_watch import HUNG_S, QUORUM_LOST_S, LineageWatch
from p2ptrain.protocol.rounds.liveness import Liveness
from p2ptrain.protocol.wire.messages import MAX_COUNT, Head
from tests.protocol.swarm import run_virtual

HEAD = Head("g", "0-x", 3, "s", "a", (("a", "1"), ("b", "1"), ("c", "1")), 100, 1000, None)


class Swarm:
    """The links of peer `a`, and the peers that sent it Leave."""

    def __init__(self, *linked: str, gone: tuple[str, ...] = ()) -> None:
        self.linked = {name: _link(name) for name in linked}
        links: Any = SimpleNamespace(get=self.linked.get, live=self.linked)
        self.liveness = Liveness(("a", "1"), links, lambda: sorted(self.linked))
        for name in gone:
            self.liveness.note_departed(name)


def _link(name: str, incarnation: str = "1") -> Any:
    return SimpleNamespace(
        hello=SimpleNamespace(incarnation=incarnation), beat=SimpleNamespace(lineage=HEAD.lineage, round=HEAD.round)
    )


def watch(swarm: Swarm) -> LineageWatch:
    watch = LineageWatch(swarm.liveness)
    watch.reset(trio.current_time())
    return watch


def test_peers_with_the_same_links_count_the_same_reach() -> None:
    """c is still linked, in another lineage: nobody reaches it, whatever each says of itself."""
    swarm = Swarm("b", "c")
    for link in swarm.linked.values():
        link.beat.reach = 3
    swarm.linked["c"].beat.lineage = "0-y"
    reaches = swarm.liveness.reaches(HEAD, ())
    assert (reaches["a"], reaches["b"]) == (2, 2)


@pytest.mark.parametrize(("speed", "hung_s"), [(1.0, HUNG_S), (0.0, HUNG_S), (0.01, 400.0)])
def test_a_voter_that_makes_no_step_while_we_are_due_and_it_is_not_does_not_count(speed: float, hung_s: float) -> None:
    swarm, now = Swarm("b"), 100.0
    beat, lineage = swarm.linked["b"].beat, LineageWatch(swarm.liveness)
    beat.step, beat.speed = 7, speed

    def is_hung(later_s: float, due: str = "a") -> bool:
        nonlocal now
        now += later_s
        lineage.note_steps(HEAD, due, now)
        assert lineage.hung in (set(), {("b", "1")})
        assert lineage.sees_quorum(HEAD, now) == (not lineage.hung)
        return bool(lineage.hung)

    assert not is_hung(0.0)
    assert not is_hung(hung_s - 0.1)
    assert is_hung(0.1)
    beat.step += 1
    assert not is_hung(hung_s)
    # Due, as those that wait for the run's last round; or we are not.
    for due in ("ab", "b", ""):
        assert is_hung(hung_s)
        assert not is_hung(0.0, due)
        assert not is_hung(0.0)
    assert is_hung(hung_s)
    lineage.reset(now)  # as we were held up ourselves
    assert not is_hung(0.0)


def test_with_a_quorum_it_never_ends() -> None:
    async def main() -> None:
        lineage = watch(Swarm("b"))
        await trio.sleep(10 * QUORUM_LOST_S)
        assert not lineage.is_our_turn(HEAD, 0.0, trio.current_time(), awaits=lambda: False, takes_turns=lambda _: True)

    run_virtual(main)


def test_it_ends_when_the_voters_were_away_for_the_patience_and_three_intervals() -> None:
    async def main() -> None:
        lineage = watch(Swarm())
        await trio.sleep(QUORUM_LOST_S + 1)
        assert not lineage.is_our_turn(
            HEAD, 100.0, trio.current_time(), awaits=lambda: False, takes_turns=lambda _: True
        )
        assert lineage.is_our_turn(HEAD, 0.0, trio.current_time(), awaits=lambda: False, takes_turns=lambda _: True)

    run_virtual(main)


def test_it_ends_at_once_when_all_missing_voters_left_or_were_started_anew() -> None:
    async def main() -> None:
        swarm = Swarm("c", gone=("b",))
        swarm.linked["c"] = _link("c", incarnation="2")
        assert watch(swarm).is_our_turn(
            HEAD, 1000.0, trio.current_time(), awaits=lambda: False, takes_turns=lambda _: True
        )

    run_virtual(main)


def test_who_was_paused_gives_its_links_time_to_come_back() -> None:
    async def main() -> None:
        swarm = Swarm()
        lineage = watch(swarm)
        await trio.sleep(5 * QUORUM_LOST_S)  # in which it was not awake
        lineage.reset(trio.current_time())
        assert not lineage.is_our_turn(HEAD, 0.0, trio.current_time(), awaits=lambda: False, takes_turns=lambda _: True)
        swarm.linked["b"] = _link("b")
        await trio.sleep(5 * QUORUM_LOST_S)
        assert not lineage.is_our_turn(HEAD, 0.0, trio.current_time(), awaits=lambda: False, takes_turns=lambda _: True)

    run_virtual(main)


def test_of_several_survivors_the_lowest_id_goes_on_or_else_the_next() -> None:
    async def main() -> None:
        swarm = Swarm("0")
        head = Head("g", HEAD.lineage, 3, "s", "a", (("x", "1"), ("y", "1"), ("z", "1"), ("0", "1")), 1, 1, None)
        lineage = watch(swarm)
        await trio.sleep(QUORUM_LOST_S + 1)
        assert not lineage.is_our_turn(head, 0.0, trio.current_time(), awaits=lambda: False, takes_turns=lambda _: True)
        await trio.sleep(QUORUM_LOST_S)
        # The other one does not begin a lineage.
        assert lineage.is_our_turn(head, 0.0, trio.current_time(), awaits=lambda: False, takes_turns=lambda _: True)
        swarm.linked.clear()
        swarm.linked["b"] = _link("b")
        lineage.reset(trio.current_time())
        await trio.sleep(QUORUM_LOST_S + 1)
        assert lineage.is_our_turn(head, 0.0, trio.current_time(), awaits=lambda: False, takes_turns=lambda _: True)

    run_virtual(main)


@pytest.mark.parametrize(
    ("ended_s", "lost_s", "lower", "awaits", "begins"),
    [
        (0.0, 1.0, 0, False, True),
        (None, 1.0, 0, False, False),  # voters may come back
        (None, 59.0, 0, False, False), (None, 61.0, 0, False, True), (None, 61.0, 1, False, False),
        (None, 121.0, 1, False, True),
        (2.9, 3.0, 1, False, False), (3.0, 3.0, 1, False, True),
        (3.0, 3.0, 2, False, False), (6.0, 6.0, 2, False, True),
        # Another state may be the one to adopt, unless its peer does not answer.
        (0.0, 1.0, 0, True, False), (9.9, 10.0, 0, True, False), (10.0, 10.0, 0, True, True),
        (None, 61.0, 0, True, False), (None, 69.9, 0, True, False), (None, 70.1, 0, True, True),
        # Anybody can claim to be there: not more than three turns.
        (8.9, 9.0, 255, False, False), (9.0, 9.0, 255, False, True), (None, 241.0, 255, False, True),
    ],
)  # fmt: skip
def test_whose_turn_it_is(ended_s: float | None, lost_s: float, lower: int, awaits: bool, begins: bool) -> None:
    turn = is_our_turn(ended_s=ended_s, lost_s=lost_s, patience_s=60.0, lower=lower, awaits=awaits)
    assert turn is begins


def test_a_voter_that_went_on_in_another_lineage_is_not_waited_for() -> None:
    async def main() -> None:
        swarm = Swarm("b", "c")
        swarm.linked["b"].beat.lineage = swarm.linked["c"].beat.lineage = "1-y"
        liveness = swarm.liveness
        assert liveness.is_gone_for_good(("b", "1"), HEAD.lineage)
        assert not liveness.is_gone_for_good(("b", "1"), "1-y")
        # Joining, it may have been a voter of ours that is restarted; its incarnation tells.
        swarm.linked["b"].beat.lineage = ""
        assert not liveness.is_gone_for_good(("b", "1"), HEAD.lineage)
        assert liveness.is_gone_for_good(("b", "0"), HEAD.lineage)

    run_virtual(main)


def test_peers_that_may_not_begin_a_lineage_take_no_turn() -> None:
    async def main() -> None:
        swarm = Swarm("0", gone=("x",))
        head = Head("g", HEAD.lineage, 3, "s", "a", (("x", "1"), ("y", "1"), ("a", "1")), 1, 1, None)
        swarm.liveness.note_departed("y")
        now = trio.current_time()
        for takes_turns, begins in ((True, False), (False, True)):
            turn = watch(swarm).is_our_turn(head, 0.0, now, awaits=lambda: False, takes_turns=lambda _: takes_turns)
            assert turn is begins

    run_virtual(main)


def test_the_user_is_told_once_that_there_are_no_rounds_and_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def main() -> None:
        swarm = Swarm("b")
        lineage = watch(swarm)
        swarm.linked.clear()
        for _ in range(8):
            await trio.sleep(1)
            lineage.is_our_turn(HEAD, 0.0, trio.current_time(), awaits=lambda: False, takes_turns=lambda _: True)
            lineage.tell(HEAD, 0.0, trio.current_time())
        assert lineage.why(HEAD, trio.current_time()) == "no word from b, c for 8 s"
        swarm.liveness.note_departed("b")
        swarm.liveness.note_departed("c")
        assert lineage.why(HEAD, trio.current_time()) == "b, c left, was restarted, or went on without us"

    run_virtual(main)
    (told,) = (record.getMessage() for record in caplog.records if "no rounds for now" in record.getMessage())
    assert told.startswith(
        "no rounds for now: too few of the peers that decide round 4 are here and train (missing: b, c);"
    )
    assert told.endswith("If they do not come back within 55 s, rounds go on without them")


def at(lineage: str, round_: int) -> Head:
    return msgspec.structs.replace(HEAD, lineage=lineage, round=round_)


def test_no_head_is_had_twice() -> None:
    history, stood = PastHeads(), []
    # The second is in a far future that somebody made up: it closes no way back to where we have not been.
    for lineage, rounds in (("x", range(5, 9)), ("x", [10**9]), ("y", [8]), ("x", range(9, 12)), ("z", [-1, 0])):
        for round_ in rounds:
            assert history.may_adopt(at(lineage, round_))
            history.note(at(lineage, round_))
            stood.append(at(lineage, round_))
        assert not any(map(history.may_adopt, stood))
    assert history._jumps == 5
    history.note(at("x", 20))
    assert not history.may_adopt(at("x", 13)), "behind us"
    assert history.may_adopt(at("x", 21))


def test_where_we_stood_takes_a_bounded_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2ptrain.protocol.rounds.deciding.lineage.MAX_JUMPS", 1000)
    history = PastHeads()
    for number in range(1000):
        assert history.may_adopt(at(str(number), 3))
        history.note(at(str(number), 3))
    assert not history.may_adopt(at("another", 3))
    assert not history.may_adopt(at(str(number), 5))
    for round_ in range(4, 20):  # rounds go on
        assert history.may_adopt(at(str(number), round_))
        history.note(at(str(number), round_))
    assert history._jumps == 1000
    assert sum(map(len, history._rounds.values())) == 1000


@pytest.mark.parametrize("parent", ["abc-def", "9" * 4000 + "-a", "-", "-1-a", "٣-a", "1-\x1b[2J", "ab" * 32, ""])
def test_a_lineage_after_one_of_another_form_is_a_first_one(parent: str) -> None:
    assert generation_of(parent) == -1
    assert generation_of(new_lineage(parent, 3, "a", "1")) == 0


def test_generations_are_counted_up_to_the_most_that_others_read() -> None:
    assert generation_of(new_lineage("7-a", 3, "a", "1")) == 8
    assert generation_of(new_lineage(f"{999_999_999}-a", 3, "a", "1")) == 999_999_999


@pytest.mark.parametrize(
    "lie",
    [
        {"lineage": "abc-def"}, {"genesis": "9" * 4000 + "-a"}, {"lineage": ""}, {"round": -2}, {"round": 2**63 - 1},
        {"run_step": -1}, {"run_step": 2**63 - 1}, {"tokens_total": -1}, {"tokens_total": 2**63 - 1},
    ],
)  # fmt: skip
def test_a_head_that_no_lineage_can_have_is_refused(lie: dict[str, Any]) -> None:
    head = msgspec.structs.replace(HEAD, genesis="0-g")
    check_head(head)
    with pytest.raises(WireError):
        check_head(msgspec.structs.replace(head, **lie))


@pytest.mark.parametrize("count", [0, MAX_COUNT])
def test_a_head_may_have_the_least_and_the_most_counts(count: int) -> None:
    head = Head("0-g", "0-g", count - 1, "s", "a", (), count, count, None)
    check_head(head)
    beyond = -1 if count == 0 else count + 1
    for lie in ({"round": beyond - 1}, {"run_step": beyond}, {"tokens_total": beyond}):
        with pytest.raises(WireError, match="a head at round"):
            check_head(msgspec.structs.replace(head, **lie))
