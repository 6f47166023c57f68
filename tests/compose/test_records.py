"""What `make compose-test` calls agreement, and what it does where there is no Docker."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.compose.docker import CheckFailedError
from tests.compose.records import Worker, check_agreement, common_round, parse

ROOT = Path(__file__).parents[2]


def _round(number: int, by: str = "ABC", *, state: str = "same", status: str = "committed") -> dict[str, Any]:
    return {
        "event": "round", "t": float(number), "lineage": "L", "round": number, "status": status,
        "contributors": list(by), "state_hash": state,
    }  # fmt: skip


def _worker(peer_id: str, *rounds: dict[str, Any]) -> Worker:
    return Worker(f"worker-{peer_id}", f"/state/{peer_id}", ({"event": "start", "peer_id": peer_id}, *rounds))


def test_a_round_that_all_recorded_with_one_hash_is_common() -> None:
    workers = [_worker(peer_id, _round(1), _round(2)) for peer_id in "ABC"]
    assert check_agreement(workers) == 2
    newest = common_round(workers, since_s=0.0)
    assert newest is not None
    assert newest["round"] == 2
    assert common_round(workers, since_s=2.0) is None


def test_a_round_that_one_has_not_recorded_is_not_common() -> None:
    workers = [_worker("A", _round(1)), _worker("B", _round(1)), _worker("C", _round(1, status="skipped"))]
    assert common_round(workers, since_s=0.0) is None


@pytest.mark.parametrize("contributors", ["AB", "ABCD"])
def test_a_round_of_others_is_not_common(contributors: str) -> None:
    workers = [_worker(peer_id, _round(1, contributors)) for peer_id in "ABC"]
    assert common_round(workers, since_s=0.0) is None


def test_two_hashes_of_one_round_are_a_failure() -> None:
    with pytest.raises(CheckFailedError, match="round 1 of lineage L has several hashes"):
        check_agreement([_worker("A", _round(1)), _worker("B", _round(1, state="other"))])
    assert check_agreement([_worker("A", _round(1)), _worker("B", _round(1, state="other", status="skipped"))]) == 0


def test_two_workers_with_one_identity_are_a_failure() -> None:
    with pytest.raises(CheckFailedError, match="share an identity"):
        check_agreement([_worker("A"), _worker("A")])


def test_who_was_started_anew_is_who_it_is_now() -> None:
    again = Worker("worker-1", "/state", ({"event": "start", "peer_id": "A"}, {"event": "start", "peer_id": "B"}))
    assert again.peer_id == "B"
    assert Worker("worker-2", "", ()).peer_id == ""


def test_a_line_that_is_being_written_is_left_out() -> None:
    assert parse([json.dumps(_round(1)), '{"event": "rou']) == [_round(1)]
    with pytest.raises(ValueError, match="Expecting"):
        parse(['{"event": ', json.dumps(_round(1))])


@pytest.mark.processes
def test_without_docker_it_says_what_is_missing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.compose"], cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("compose-test: error: there is no `docker` on this machine; install Docker, and try again\n")
