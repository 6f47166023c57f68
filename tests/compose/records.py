"""What the workers of the compose demo record, read from outside: who is who, and which rounds they agree on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.compose.docker import CheckFailedError, Demo

Event = dict[str, Any]

# A worker holds its metrics file open: first its path, then the few lines in it that matter here.
READ_METRICS = """
metrics=$(readlink /proc/1/fd/* | grep -m 1 /metrics.jsonl) || exit 0
echo "$metrics"
grep -E '"event": "(start|round)"' "$metrics"
"""


@dataclass(frozen=True)
class Worker:
    """A worker that runs.

    Attributes:
        container: its name.
        directory: where it keeps what it keeps.
        events: its starts and rounds so far, those before it was started anew included.
    """

    container: str
    directory: str
    events: tuple[Event, ...]

    @property
    def peer_id(self) -> str:
        """Its identity now; empty before it has one."""
        starts = [event["peer_id"] for event in self.events if event["event"] == "start"]
        return str(starts[-1]) if starts else ""

    @property
    def rounds(self) -> list[Event]:
        """Every round that has landed here."""
        return [event for event in self.events if event["event"] == "round" and event["status"] != "skipped"]


def read_worker(demo: Demo, container: str) -> Worker:
    """Read the records of a worker from its container. One that has only just started has none."""
    path, *lines = demo.docker("exec", container, "sh", "-c", READ_METRICS).splitlines() or [""]
    return Worker(container, path.rpartition("/")[0], tuple(parse(lines)))


def parse(lines: Sequence[str]) -> list[Event]:
    """The events of whole lines; the last one may be about to be written."""
    try:
        return [json.loads(line) for line in lines]
    except ValueError:
        return [json.loads(line) for line in lines[:-1]]


def check_agreement(workers: Sequence[Worker]) -> int:
    """How many rounds two or more of the workers have recorded, all of them with the same hash.

    Raises:
        CheckFailedError: two workers recorded different hashes for one round, or share an identity.
    """
    ids = [worker.peer_id for worker in workers if worker.peer_id]
    if len(set(ids)) < len(ids):
        raise CheckFailedError(f"workers share an identity: {ids}")
    hashes: dict[tuple[str, int], list[str]] = {}
    for worker in workers:
        for event in worker.rounds:
            hashes.setdefault((event["lineage"], event["round"]), []).append(event["state_hash"])
    for (lineage, number), seen in hashes.items():
        if len(set(seen)) > 1:
            raise CheckFailedError(f"round {number} of lineage {lineage} has several hashes: {sorted(set(seen))}")
    return sum(len(seen) > 1 for seen in hashes.values())


def common_round(workers: Sequence[Worker], since_s: float) -> Event | None:
    """The newest round that exactly these workers committed together, and all have recorded, since a time."""
    ids = {worker.peer_id for worker in workers}
    landed = [
        {
            (event["lineage"], event["round"]): event
            for event in worker.rounds
            if event["t"] > since_s and set(event["contributors"]) == ids
        }
        for worker in workers
    ]
    common = set.intersection(*map(set, landed))
    return landed[0][max(common, key=lambda key: landed[0][key]["t"])] if common else None
