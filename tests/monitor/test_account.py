"""An account of a run: what is counted, and that the promise is checked with every event."""

from __future__ import annotations

from typing import Any

from p2ptrain.monitor.account import Account


def round_event(round_: int = 3, state: str = "x", **changes: Any) -> dict[str, Any]:
    event = {"event": "round", "t": 1.0, "status": "committed", "lineage": "L", "round": round_, "state_sha256": state}
    return {**event, "contributors": ["a", "b"], "late": False, **changes}


def adopt(state: str = "x", **changes: Any) -> dict[str, Any]:
    return {
        "event": "adopt", "t": 1.0, "reason": "adopted the swarm's state", "lineage": "L", "round": 3,
        "state_sha256": state, **changes,
    }  # fmt: skip


def test_a_second_state_of_one_round_breaks_the_promise() -> None:
    account = Account()
    account.note("a", round_event())
    account.note("b", round_event())
    account.note("b", round_event(4, "y"))
    account.note("c", adopt())
    account.note("c", round_event(3, "z", lineage="another"))
    assert (account.disagreements, account.agreement) == ([], 1.0)
    account.note("c", round_event(4, "z"))
    assert account.disagreements == ["round 4 of lineage L: c stands on state z, b on y"]
    assert account.agreement == 2 / 3
    account.note("d", adopt("q"))
    assert len(account.disagreements) == 2


def test_rounds_are_counted_once_and_skipped_ones_by_each_peer() -> None:
    account = Account()
    for peer in "ab":
        account.note(peer, round_event())
        account.note(peer, round_event(4, "y", contributors=["a", "b", "c"]))
        account.note(peer, {"event": "round", "status": "skipped", "round": 5})
    account.note("a", round_event(5, "s", status="solo", contributors=["a"]))
    assert (len(account.rounds), len(account.committed), account.skipped) == (3, 2, 2)
    assert account.participation == {2: 1, 3: 1}


def test_a_join_takes_its_time_and_a_later_adoption_is_a_repair() -> None:
    account = Account()
    account.note("a", {"event": "start", "t": 0.0})
    account.note("a", adopt(reason="founded the run"))
    assert account.joins == []
    for start_s in (10.0, 50.0):
        account.note("b", {"event": "start", "t": start_s})
        account.note("b", adopt(t=start_s + 2))
        account.note("b", {"event": "step", "t": start_s + 3, "exchange_s": 0.25})
        account.note("b", {"event": "step", "t": start_s + 4, "exchange_s": 0.25})
        account.note("b", round_event(t=start_s + 6, late=True))
        account.note("b", round_event(4, "y", t=start_s + 9))
    assert [(j.state_s, j.step_s, j.round_s) for j in account.joins] == [(2.0, 3.0, 9.0)] * 2
    assert (account.steps, account.held_s, account.repairs) == (4, 1.0, 0)
    account.note("b", adopt("w", reason="lineage K has more tokens than ours", lineage="K"))
    assert account.repairs == 1
