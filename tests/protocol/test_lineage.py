"""A lineage ends only after its voters were unreachable for long, as seen by a peer that was running."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio

from p2ptrain.errors import WireError
from p2ptrain.protocol.rounds.lineage import (
    MAX_JUMPS,
    QUORUM_LOST_S,
    LineageWatch,
    PastHeads,
    check_head,
    generation_of,
    new_lineage,
)
from p2ptrain.protocol.rounds.liveness import Liveness
from p2ptrain.protocol.wire.messages import Head
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


def test_with_a_quorum_it_never_ends() -> None:
    async def main() -> None:
        lineage = watch(Swarm("b"))
        await trio.sleep(10 * QUORUM_LOST_S)
        assert not lineage.has_ended(HEAD, 0.0, trio.current_time())

    run_virtual(main)


def test_it_ends_when_the_voters_were_away_for_the_patience_and_three_intervals() -> None:
    async def main() -> None:
        lineage = watch(Swarm())
        await trio.sleep(QUORUM_LOST_S + 1)
        assert not lineage.has_ended(HEAD, 100.0, trio.current_time())
        assert lineage.has_ended(HEAD, 0.0, trio.current_time())

    run_virtual(main)


def test_it_ends_at_once_when_all_missing_voters_left_or_were_started_anew() -> None:
    async def main() -> None:
        swarm = Swarm("c", gone=("b",))
        swarm.linked["c"] = _link("c", incarnation="2")
        assert watch(swarm).has_ended(HEAD, 1000.0, trio.current_time())

    run_virtual(main)


def test_who_was_paused_gives_its_links_time_to_come_back() -> None:
    async def main() -> None:
        swarm = Swarm()
        lineage = watch(swarm)
        await trio.sleep(5 * QUORUM_LOST_S)  # in which it was not awake
        lineage.reset(trio.current_time())
        assert not lineage.has_ended(HEAD, 0.0, trio.current_time())
        swarm.linked["b"] = _link("b")
        await trio.sleep(5 * QUORUM_LOST_S)
        assert not lineage.has_ended(HEAD, 0.0, trio.current_time())

    run_virtual(main)


def test_of_several_survivors_the_lowest_id_goes_on_or_else_the_next() -> None:
    async def main() -> None:
        swarm = Swarm("0")
        head = Head("g", HEAD.lineage, 3, "s", "a", (("x", "1"), ("y", "1"), ("z", "1"), ("0", "1")), 1, 1, None)
        lineage = watch(swarm)
        await trio.sleep(QUORUM_LOST_S + 1)
        assert not lineage.has_ended(head, 0.0, trio.current_time())
        await trio.sleep(QUORUM_LOST_S)
        assert lineage.has_ended(head, 0.0, trio.current_time()), "the other one does not begin a lineage"
        swarm.linked.clear()
        swarm.linked["b"] = _link("b")
        lineage.reset(trio.current_time())
        await trio.sleep(QUORUM_LOST_S + 1)
        assert lineage.has_ended(head, 0.0, trio.current_time())

    run_virtual(main)


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
    assert len(history._heads) == 5
    history.note(at("x", 20))
    assert not history.may_adopt(at("x", 13)), "behind us"
    assert history.may_adopt(at("x", 21))


def test_where_we_stood_takes_a_bounded_room() -> None:
    history = PastHeads()
    for number in range(MAX_JUMPS):
        assert history.may_adopt(at(str(number), 3))
        history.note(at(str(number), 3))
    assert not history.may_adopt(at("another", 3))
    assert not history.may_adopt(at(str(number), 5))
    for round_ in range(4, 20):  # rounds go on
        assert history.may_adopt(at(str(number), round_))
        history.note(at(str(number), round_))
    assert len(history._heads) == MAX_JUMPS


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
