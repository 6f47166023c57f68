"""The records of a simulation: every peer's metrics stream, measures over all peers, and tables of the measures."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from p2ptrain.algorithms.metrics import disagreement, pairwise_correlation
from p2ptrain.monitor.run_audit import RunAudit
from p2ptrain.simulation.experiment import Experiment

COLUMNS = ("step", "t", "peers", "training_loss", "held_out_loss", "correlation", "disagreement", "bytes_sent")


@dataclass(frozen=True)
class Records:
    """The records of one experiment.

    Attributes:
        experiment: the simulated experiment.
        events: by peer (a restarted peer is a new one), the events of a real peer's metrics file; `t` is in virtual
            seconds.
        began_s: when training began.
        run_audit: faults, rounds and joins.
    """

    experiment: Experiment
    events: dict[str, list[dict[str, Any]]]
    began_s: float
    run_audit: RunAudit

    def of(self, *kinds: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """All events of these kinds, each with its peer."""
        for peer, events in self.events.items():
            for event in events:
                if event["event"] in kinds:
                    yield peer, event

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """Committed rounds, each once, in order."""
        found = {(e["lineage"], e["round"]): e for _, e in self.of("round") if e["status"] != "skipped"}
        return sorted(found.values(), key=lambda event: (event["t"], event["round"]))

    @property
    def bytes_sent(self) -> int:
        """Bytes of fragments and rounds on the wire, all peers together."""
        return sum(event["bytes_sent"] for _, event in self.of("fragments", "round", "pair"))

    @property
    def final_loss(self) -> float:
        """Mean held-out loss of the peers that finished, after the last round (a plain average)."""
        return self._merge_loss(-1)

    @property
    def loss_before_merge(self) -> float:
        """Mean held-out loss of the peers that finished, before the run's last round."""
        return self._merge_loss(-2)

    def _merge_loss(self, index: int) -> float:
        """The mean of one held-out loss of each finished peer: its last one (-1), or the one before (-2)."""
        losses = [
            [event["loss"] for event in events if event["event"] == "eval" and event["loss"] is not None][index]
            for events in self.events.values()
            if any(event.get("reason") == "finished" for event in events)
        ]
        return _mean(losses) or math.nan

    def by_step(self, kind: str) -> dict[int, list[dict[str, Any]]]:
        """Each peer's first event of one kind at each step. Those after the last round are repeats, and left out."""
        found: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
        for peer, event in self.of(kind):
            found[event["step"]].setdefault(peer, event)
        return {step: list(events.values()) for step, events in sorted(found.items())}

    def correlations(self) -> list[tuple[int, float]]:
        """Average pairwise correlation of the weights (SPARTA, A.3), at steps with samples of two or more peers."""
        samples = ((step, [event["values"] for event in events]) for step, events in self.by_step("sample").items())
        return [(step, pairwise_correlation(values)) for step, values in samples if len(values) > 1]

    def table(self) -> list[dict[str, Any]]:
        """A row for each step with evaluations; see COLUMNS. None where nothing was measured."""
        rows = []
        losses, samples, training = self.by_step("eval"), self.by_step("sample"), self.by_step("step")
        sent = [(event["t"], event["bytes_sent"]) for _, event in self.of("fragments", "round", "pair")]
        since = 0
        for step, events in losses.items():
            values = [event["values"] for event in samples.get(step, [])]
            recent = [e["loss"] for at in range(since + 1, step + 1) for e in training.get(at, ())]
            since = step
            measured = [event["loss"] for event in events if event["loss"] is not None]
            t = max(event["t"] for event in events)
            rows.append(
                {
                    "step": step,
                    "t": round(t - self.began_s, 6),
                    "peers": len(events),
                    "training_loss": _mean([loss for loss in recent if loss is not None]),
                    "held_out_loss": _mean(measured),
                    "correlation": pairwise_correlation(values) if len(values) > 1 else None,
                    "disagreement": disagreement(values) if len(values) > 1 else None,
                    "bytes_sent": sum(size for at, size in sent if at <= t),
                }
            )
        return rows

    @property
    def goodput(self) -> float:
        """Inner steps as a share of those that the initial peers would make without faults in the same virtual time.

        It is measured until the first peer reaches the end of the run, or the last step.
        """
        experiment = self.experiment
        steps = [event for _, event in self.of("step")]
        at_end = (event["t"] for event in steps if event["step"] >= experiment.run.total_steps)
        end_s: float = min(at_end, default=max(event["t"] for event in steps))
        speeds = (*experiment.speeds, *[1.0] * (experiment.peers - len(experiment.speeds)))
        whole = sum((end_s - self.began_s) * speed / experiment.step_s for speed in speeds)
        return float(sum(event["t"] <= end_s for event in steps) / whole)

    @property
    def steps_lost(self) -> int:
        """Steps that no round contains, because their peer crashed or replaced its weights."""
        tokens = next((event["tokens"] for _, event in self.of("step")), 1)
        lost: int = sum(event.get("tokens_discarded", 0) for _, event in self.of("round")) // tokens
        for events in self.events.values():
            if not any(event["event"] == "stop" for event in events):
                rounds = [e for e in events if e["event"] == "round" and e["status"] != "skipped" and not e["late"]]
                last_s = max((e["t"] for e in rounds), default=0.0)
                lost += sum(e["event"] == "step" and e["t"] > last_s for e in events)
        return lost

    def write(self, directory: Path) -> None:
        """Write every peer's stream as `PEER.jsonl`, `table.csv`, and the scheduled events as `schedule.csv`."""
        directory.mkdir(parents=True, exist_ok=True)
        for peer, events in self.events.items():
            lines = "".join(json.dumps(event, sort_keys=True) + "\n" for event in events)
            (directory / f"{peer}.jsonl").write_text(lines, encoding="utf-8")
        with (directory / "table.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.table())
        with (directory / "schedule.csv").open("w", encoding="utf-8", newline="") as file:
            schedule = csv.writer(file, lineterminator="\n")
            schedule.writerow(("t", "action", "peer", "value"))
            for event in self.experiment.scheduled_events:
                t = round(event.step * self.experiment.step_s, 6)
                schedule.writerow((t, event.action, f"peer-{event.peer}", event.value))


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def format_table(variants: Sequence[Records]) -> str:
    """Results of all variants, a line each."""
    rows = []
    for records in variants:
        steps = records.experiment.run.total_steps
        correlations = [value for step, value in records.correlations() if step < steps]
        rows.append(
            {
                "variant": records.experiment.name,
                "loss before": f"{records.loss_before_merge:.4f}",
                "merged": f"{records.final_loss:.4f}",
                "correlation": f"{correlations[-1]:.4f}" if correlations else "-",
                "rounds": str(len(records.rounds)),
                "MB sent": f"{records.bytes_sent / 1e6:.2f}",
                "kB a step and peer": f"{records.bytes_sent / 1e3 / steps / len(records.events):.2f}",
            }
        )
    return as_text(rows)


def format_run_audits(variants: Sequence[Records]) -> str:
    """Faults and rounds of all variants, a line each."""
    rows = []
    for records in variants:
        run_audit = records.run_audit
        joins = [join for join in run_audit.joins if join.started_s >= records.began_s]
        times = sorted(join.step_s for join in joins if join.step_s is not None)
        sizes = list(run_audit.participation.elements())
        rows.append(
            {
                "variant": records.experiment.name,
                "faults": str(len(records.experiment.faults_drawn)),
                "goodput": f"{records.goodput:.2%}",
                "steps lost": str(records.steps_lost),
                "committed": str(len(run_audit.committed)),
                "skipped": str(run_audit.skipped),
                "contributors": f"{statistics.fmean(sizes):.2f} of {records.experiment.peers}" if sizes else "-",
                "repairs": str(run_audit.repairs),
                "joins": str(len(joins)),
                "s to first step": f"{statistics.median(times):.1f}, most {times[-1]:.1f}" if times else "-",
                "hashes agree": f"{run_audit.agreement:.0%}",
            }
        )
    return as_text(rows)


def as_text(rows: Sequence[Mapping[str, str]], *, numbers: bool = True, width: int = 130) -> str:
    """A plain table of at most `width` columns, with the rows' keys as titles; `numbers` are on the right."""
    table = Table(box=None, pad_edge=False)
    for column in rows[0]:
        right = numbers and table.columns
        table.add_column(column, justify="right" if right else "left", overflow="ellipsis" if numbers else "fold")
    for row in rows:
        table.add_row(*row.values())
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip()
