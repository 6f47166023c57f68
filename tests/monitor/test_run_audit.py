"""The audit of a run: its counts, and the check of every round."""

from __future__ import annotations

from typing import Any

from p2ptrain.monitor.run_audit import RunAudit


def round_event(round_: int = 3, state: str = "x", **changes: Any) -> dict[str, Any]:
    event = {"event": "round", "t": 1.0, "status": "committed", "lineage": "L", "round": round_, "state_hash": state}
    return {**event, "contributors": ["a", "b"], "late": False, **changes}


def adopt(state: str = "x", **changes: Any) -> dict[str, Any]:
    return {
        "event": "adopt", "t": 1.0, "reason": "adopted the swarm's state", "lineage": "L", "round": 3,
        "state_hash": state, **changes,
    }  # fmt: skip


def test_a_second_state_of_one_round_is_a_disagreement() -> None:
    run_audit = RunAudit()
    run_audit.note("a", round_event())
    run_audit.note("b", round_event())
    run_audit.note("b", round_event(4, "y"))
    run_audit.note("c", adopt())
    run_audit.note("c", round_event(3, "z", lineage="another"))
    assert (run_audit.disagreements, run_audit.agreement) == ([], 1.0)
    run_audit.note("c", round_event(4, "z"))
    assert run_audit.disagreements == ["round 4 of lineage L: c has state z, b has y"]
    assert run_audit.agreement == 2 / 3
    run_audit.note("d", adopt("q"))
    assert len(run_audit.disagreements) == 2


def test_rounds_are_counted_once_and_skipped_ones_by_each_peer() -> None:
    run_audit = RunAudit()
    for peer in "ab":
        run_audit.note(peer, round_event())
        run_audit.note(peer, round_event(4, "y", contributors=["a", "b", "c"]))
        run_audit.note(peer, {"event": "round", "status": "skipped", "round": 5})
    run_audit.note("a", round_event(5, "s", status="solo", contributors=["a"]))
    assert (len(run_audit.rounds.applied), len(run_audit.committed), run_audit.skipped) == (3, 2, 2)
    assert run_audit.participation == {2: 1, 3: 1}


def test_a_join_takes_its_time_and_a_later_adoption_is_a_repair() -> None:
    run_audit = RunAudit()
    run_audit.note("a", {"event": "start", "t": 0.0})
    run_audit.note("a", adopt(founded=True))
    assert run_audit.joins == []
    for start_s in (10.0, 50.0):
        run_audit.note("b", {"event": "start", "t": start_s})
        run_audit.note("b", adopt(t=start_s + 2))
        run_audit.note("b", {"event": "step", "t": start_s + 3, "exchange_s": 0.25})
        run_audit.note("b", {"event": "step", "t": start_s + 4, "exchange_s": 0.25})
        run_audit.note("b", round_event(t=start_s + 6, late=True))
        run_audit.note("b", round_event(4, "y", t=start_s + 9))
    assert [(j.state_s, j.step_s, j.round_s) for j in run_audit.joins] == [(2.0, 3.0, 9.0)] * 2
    assert (run_audit.steps, run_audit.held_s, run_audit.repairs) == (4, 1.0, 0)
    run_audit.note("b", adopt("w", reason="lineage K has more tokens than ours", lineage="K"))
    assert run_audit.repairs == 1
