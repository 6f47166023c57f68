"""The soak: its faults follow from the seed, its verdict finds each failure, and its model is the paced demo model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from benchmarks import paced as pace
from benchmarks.soak.peers import Usage, _disk_bytes
from benchmarks.soak.plan import BACK_S, CUT, KINDS, Fault, plan_faults
from benchmarks.soak.storm import Soak
from benchmarks.soak.verdict import LEAST_USAGES, SETTLED_S, failures, growths
from p2ptrain.monitor.run_audit import RunAudit
from p2ptrain.training.models import build

MINUTES = 200
OVER_S = 1000.0


def _plan(seed: int, per_minute: float = 1, kinds: tuple[str, ...] = (*KINDS, CUT)) -> list[Fault]:
    return plan_faults(seed=seed, peers=4, minutes=MINUTES, per_minute=per_minute, kinds=kinds)


def test_faults_come_from_the_seed_at_the_rate_that_is_asked_for() -> None:
    assert _plan(1) == _plan(1) != _plan(2)
    faults = _plan(1)
    assert 140 < len(faults) < 250
    assert set(Counter(fault.kind for fault in faults)) == {*KINDS, CUT}
    assert {len(fault.peers) for fault in faults if fault.kind == CUT} == {1, 2}
    assert all(fault.at_s + fault.lasts_s <= MINUTES * 60 for fault in faults)


def test_a_plan_without_partitions_has_none() -> None:
    assert {fault.kind for fault in _plan(1, kinds=KINDS)} == set(KINDS)


def test_a_peer_has_one_fault_at_a_time_one_peer_has_none_and_one_is_never_killed() -> None:
    free_from = [0.0] * 4
    for fault in _plan(3, per_minute=4):
        for peer in fault.peers:
            assert fault.at_s >= free_from[peer]
            free_from[peer] = fault.at_s + fault.lasts_s + BACK_S
        assert min(free_from) <= fault.at_s
        assert 3 not in fault.peers or fault.kind in ("pause", CUT)


@dataclass
class Seat:
    """The part of a peer that the verdict reads."""

    name: str
    usage: list[Usage] = field(default_factory=list)


def _soak(*rounds: tuple[str, str, int, float]) -> Soak:
    """A soak of two peers that landed rounds, each given by peer, lineage, number and seconds after the storm."""
    soak = Soak([Seat("a"), Seat("b")], RunAudit(), over_s=OVER_S, end_s=OVER_S + 180)
    for peer, lineage, number, later_s in rounds:
        soak.run_audit.note(
            peer,
            {"event": "round", "status": "committed", "lineage": lineage, "round": number, "t": OVER_S + later_s,
             "state_hash": f"{lineage}/{number}", "contributors": ["a", "b"], "late": False},
        )  # fmt: skip
    return soak


def test_a_soak_is_come_through_when_all_land_a_round_after_the_storm() -> None:
    soak = _soak(("a", "x", 1, -9.0), ("b", "x", 1, -9.0), ("a", "x", 2, 5.0), ("a", "x", 3, 9.0), ("b", "x", 3, 9.5))
    assert failures(soak) == []
    assert soak.together is soak.run_audit.rounds.by_key["x", 3]


@pytest.mark.parametrize(
    ("rounds", "last"),
    [
        ([("a", "x", 2, 5.0), ("b", "y", 2, 5.0)], "a: round 2 of lineage x; b: round 2 of lineage y"),
        ([("a", "x", 1, -5.0), ("b", "x", 1, -5.0), ("a", "x", 2, 5.0)],
         "a: round 2 of lineage x; b: round 1 of lineage x"),
        ([("a", "x", 2, 5.0)], "a: round 2 of lineage x; b: none"),
    ],
)  # fmt: skip
def test_a_swarm_in_two_lineages_and_a_peer_that_did_not_come_back_fail_a_soak(
    rounds: list[tuple[str, str, int, float]], last: str
) -> None:
    assert failures(_soak(*rounds)) == [
        f"no round of the 180 s after the storm was landed by all peers (the last of {last})"
    ]


def test_a_soak_without_rounds_fails() -> None:
    assert failures(_soak())[0] == "no round was committed"


def _usage(**more: float) -> list[Usage]:
    """The usage of an hour, with more of some resource in the second half."""
    plain = {"resident_bytes": 500e6, "files": 40, "threads": 15, "disk_bytes": 6.7e6}
    return [
        Usage(t=t, **{name: value + more.get(name, 0) * (t > 1800) for name, value in plain.items()})
        for t in range(0, 3600, 10)
    ]


@pytest.mark.parametrize(
    ("more", "resource"),
    [
        ({"resident_bytes": 101e6}, "memory: 500 → 601 MB (rule: ≤ 20% more)"),
        ({"files": 11}, "open files: 40 → 51 (rule: ≤ 10 more)"),
        ({"threads": 11}, "threads: 15 → 26 (rule: ≤ 10 more)"),
        ({"disk_bytes": 2.2e6}, "disk without metrics, log and manifests: 6700 → 8900 kB (rule: ≤ 20% more)"),
        ({"resident_bytes": 99e6, "files": 10, "threads": 10, "disk_bytes": 1.3e6}, ""),
    ],
)
def test_a_peer_that_needs_more_and_more_fails_a_soak(more: dict[str, float], resource: str) -> None:
    soak = _soak(("a", "x", 2, 5.0), ("b", "x", 2, 5.0))
    soak.peers[-1].usage = _usage(**more)
    assert failures(soak) == ([f"b needs more and more {resource}"] if resource else [])


def test_the_disk_of_a_peer_is_without_what_grows_by_design(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-7").mkdir()
    for name in ("metrics.jsonl", "log.txt", "checkpoint-7/manifest.json", "checkpoint-7/trainer.safetensors", "key"):
        (tmp_path / name).write_bytes(bytes(1000))
    assert _disk_bytes(tmp_path) == 2000


def test_growth_is_reported_only_from_enough_samples() -> None:
    usage = _usage()
    settled = next(i for i, one in enumerate(usage) if one.t > SETTLED_S)
    assert not growths([])
    assert not growths(usage[: settled + LEAST_USAGES - 1])
    assert growths(usage[: settled + LEAST_USAGES])


def test_a_paced_model_is_the_demo_model_at_a_pace() -> None:
    torch.manual_seed(5)
    paced, plain = pace.evenly(vocab_size=100), build("gpt-demo", vocab_size=100, seed=5)
    assert paced.context == plain.context
    tokens = torch.zeros((1, 8), dtype=torch.int64)
    torch.testing.assert_close(paced.eval()(tokens), plain.eval()(tokens))
    assert paced._next_s == 0.0
    paced.train()(tokens)
    assert paced._next_s > 0.0
