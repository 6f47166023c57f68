"""Where the time of a soak's peers goes: every second of a diary has a use, each loss the right one."""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from pathlib import Path

import pytest

from benchmarks.soak import peers
from benchmarks.soak import time_use as of
from benchmarks.soak.environment import Place
from benchmarks.soak.time_use import Entry, format_time_use, shares, spans
from p2ptrain.monitor.run_audit import RunAudit

STEP_S = 0.03
START: list[Entry] = [
    (100.0, of.IMPORTING, 0.0), (104.0, of.OPENING, 0.0), (105.0, of.FINDING, 0.0), (106.5, of.JOINING, 0.0),
    (106.7, of.DOWNLOADING, 0.0), (106.8, of.DOWNLOADING, 0.0), (107.0, of.FIRST_STEP, 0.0), (107.25, of.STEP, 0.0),
]  # fmt: skip


def _seconds(diary: list[Entry], start_s: float, end_s: float, *pauses: tuple[float, float]) -> dict[str, float]:
    found = shares([spans(diary, pauses, STEP_S)], start_s, end_s)
    return {use: pytest.approx(share * (end_s - start_s), abs=1e-6) for use, share in found.items() if share > 1e-9}


def _steps(from_s: float, *gaps_s: float) -> list[Entry]:
    return [(from_s + so_far_s, of.STEP, 0.0) for so_far_s in itertools.accumulate(gaps_s)]


def test_each_phase_of_a_start_has_its_time() -> None:
    assert _seconds(START, 100.0, 107.25) == {
        of.IMPORTING: 4.0, of.OPENING: 1.0, of.FINDING: 1.5, of.JOINING: 0.2, of.DOWNLOADING: 0.3, of.FIRST_STEP: 0.25,
    }  # fmt: skip


def test_a_paced_step_is_training_and_what_is_longer_is_slower() -> None:
    assert _seconds([*START, *_steps(107.25, 0.03, 0.05)], 107.25, 107.33) == {of.TRAINING: 0.06, of.SLOWER: 0.02}


def test_a_late_step_that_the_next_pause_makes_up_for_has_lost_nothing() -> None:
    assert _seconds([*START, *_steps(107.25, 0.04, 0.02)], 107.25, 107.31) == {of.TRAINING: 0.06}


def test_exchanges_and_evaluations_cost_what_they_delay() -> None:
    late = [(107.5, of.EVALUATION, 0.0), (107.6, of.STEP, 0.04)]
    assert _seconds([*START, *late], 107.25, 107.6) == {
        of.TRAINING: STEP_S, of.BLOCKED: 0.04, of.EVALUATING: 0.25, of.SLOWER: 0.03,
    }  # fmt: skip
    short = [(107.28, of.STEP, 0.02)]
    assert _seconds([*START, *short], 107.25, 107.28) == {of.TRAINING: STEP_S}


def test_a_kill_a_leave_and_a_pause_are_down() -> None:
    killed: list[Entry] = [*START, *_steps(107.25, 0.03), (107.5, of.DOWN, 0.0), (110.0, of.IMPORTING, 0.0)]
    assert _seconds(killed, 107.25, 110.0) == {of.TRAINING: 0.03, of.DOWN: 2.72}
    # Steps after it was asked to leave are not counted.
    assert _seconds([*killed, (107.6, of.STEP, 0.0)], 107.25, 110.0) == {of.TRAINING: 0.03, of.DOWN: 2.72}
    assert _seconds([*START, (112.3, of.STEP, 0.01)], 107.25, 112.3, (107.26, 112.26)) == {
        of.DOWN: 5.0, of.TRAINING: 0.03, of.BLOCKED: 0.01, of.SLOWER: 0.01,
    }  # fmt: skip
    assert _seconds(START, 100.0, 104.0, (99.0, 101.0)) == {of.DOWN: 1.0, of.IMPORTING: 3.0}


def _random_life(rng: random.Random) -> list[Entry]:
    """Starts, steps and kills, until after second 300."""
    diary: list[Entry] = []
    t = 0.0
    while t < 300:
        diary += [(t + at_s - 100.0, what, seconds) for at_s, what, seconds in START]
        t += 7.25
        for _ in range(rng.randint(0, 2000)):
            if rng.random() < 0.01:
                diary.append((t + 0.01, of.EVALUATION, 0.0))
            t += STEP_S * rng.uniform(0.5, 2.5)
            diary.append((t, of.STEP, 0.01 * rng.random()))
        diary.append((t + 0.2, of.DOWN, 0.0))
        t += rng.uniform(3, 15)
    rng.shuffle(diary)
    return [entry for entry in diary if entry[0] > 0 or entry[1] == of.IMPORTING]


@pytest.mark.parametrize("seed", range(20))
def test_all_uses_add_up_to_all_time(seed: int) -> None:
    rng = random.Random(seed)
    pauses = [(t, t + rng.uniform(2, 25)) for t in range(20, 300, 40)]
    lives = [spans(_random_life(rng), pauses, STEP_S) for _ in range(4)]
    for life in lives:
        for span in life:
            assert sum(span.parts.values()) == pytest.approx(span.end_s - span.start_s)
            assert min(span.parts.values()) > -1e-9
        assert all(before.end_s == after.start_s for before, after in itertools.pairwise(life))
    start_s, end_s = sorted(rng.uniform(1, 299) for _ in range(2))
    assert sum(shares(lives, start_s, end_s).values()) == pytest.approx(1)


class NoProcess:
    """Stands for a peer's process, whose files the test writes."""

    def __init__(self, *arguments: object, **options: object) -> None:
        self.pid = os.getpid()

    def kill(self) -> None: ...


def test_a_diary_is_read_from_what_a_peer_records_at_each_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "Process", NoProcess)
    directory = tmp_path / "peer-0"
    directory.mkdir()
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])

    def start(at_s: float) -> None:
        lock, ports = directory / peers.LOCK, directory / peers.PORTS
        if not lock.exists():  # as the lock leaves a file that is there
            lock.touch()
            os.utime(lock, (at_s + 4, at_s + 4))
        ports.touch()
        os.utime(ports, (at_s + 5, at_s + 5))
        adopt = {"lineage": "x", "round": 1, "state_hash": "y"}
        events = [
            {"event": "start", "t": at_s + 6.5},
            {"event": "status", "t": at_s + 6.7, "status": "downloading state 0 %"},
            {"event": "adopt", "t": at_s + 7, **adopt},
            {"event": "eval", "t": at_s + 7.2},
            {"event": "step", "t": at_s + 7.25, "exchange_s": 0.0},
            {"event": "status", "t": at_s + 7.26, "status": "downloading state 0 %"},
            {"event": "adopt", "t": at_s + 7.27, **adopt},
            {"event": "eval", "t": at_s + 7.45},
            {"event": "step", "t": at_s + 7.5, "exchange_s": 0.02},
        ]
        with (directory / peers.METRICS_FILE).open("a") as file:
            file.writelines(json.dumps(event) + "\n" for event in events)

    peer = peers.SoakPeer(0, Place(), peers.Scene(tmp_path, tmp_path, [], RunAudit(), STEP_S))
    for at_s in (1000.0, 1010.0):
        start(at_s)
        peer.read()
        now[0] = at_s + 7.6
        peer.kill()
        now[0] = at_s + 10
        peer.restart()
    start_uses = {
        of.IMPORTING: 4.0, of.OPENING: 1.0, of.FINDING: 1.5, of.JOINING: 0.2, of.DOWNLOADING: 0.3, of.FIRST_STEP: 0.25,
    }  # fmt: skip
    for at_s in (1000.0, 1010.0):
        assert _seconds(peer.diary, at_s, at_s + 7.25) == start_uses
        assert _seconds(peer.diary, at_s + 7.25, at_s + 10) == {
            of.TRAINING: STEP_S, of.BLOCKED: 0.02, of.EVALUATING: 0.2, of.DOWN: 2.5,
        }  # fmt: skip


def test_the_table_and_its_bar() -> None:
    calm = dict.fromkeys(of.USES, 0.0) | {of.TRAINING: 0.98, of.BLOCKED: 0.02}
    storm = dict.fromkeys(of.USES, 0.0) | {of.TRAINING: 0.92, of.DOWN: 0.0, of.IMPORTING: 0.05, of.SLOWER: 0.03}
    text = format_time_use(calm, storm, 1000.0).splitlines()
    assert f"| {of.IMPORTING} | i | 0.0% | 5.0% | 50.0 s |" in text
    assert "| all |  | 100.0% | 100.0% | 1000.0 s |" in text
    assert "What is lost, a letter for 0.10%:" in text
    assert text[-2:] == [f"    calm  {20 * 'b'}", f"    storm {50 * 'i'}{30 * 's'}"]
