"""One run of real peers on loopback: `p2ptrain join` with the flags that a user would give, and what it measured."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.shakespeare.cells import CONTEXT, TOGETHER, Cell
from benchmarks.shakespeare.data import ALPHABET, held_out_loss
from benchmarks.shakespeare.events import measures
from benchmarks.shakespeare.model import GATE_VARIABLE, nanogpt_cpu
from p2ptrain.demo.orchestrator import LOG, LOOPBACK, EventReader, Process, running_processes, start_bootstrap
from p2ptrain.settings.table import RUN_SETTINGS
from p2ptrain.training import checkpoint
from p2ptrain.training.join import METRICS_FILE

MODEL = "benchmarks.shakespeare.model:nanogpt_cpu"
POLL_S = 0.2
# A peer without new events for so long hangs: a step takes a second on a machine with much else to do.
SILENCE_S = 300.0


class RunFailedError(RuntimeError):
    """A peer ended early or hangs, and the message has its last lines; or peers did not end with one anchor."""


def flags(cell: Cell, data: Path) -> list[str]:
    """What all peers of a run give to `p2ptrain join`."""
    given = ["--run-id", cell.name, "--model", MODEL, "--data", str(data), "--tokenizer", f"ids:{ALPHABET}"]
    flag_of = {setting.field_name: setting.flag for setting in RUN_SETTINGS}
    for name, value in cell.settings.items():
        given += [flag_of[name], f"{value:g}" if isinstance(value, float) else str(value)]
    return [*given, "--batch-tokens", str(cell.batch * CONTEXT), "--eval-every", str(cell.eval_every)]


def machine_flags(cell: Cell, number: int, out: Path) -> list[str]:
    """What each peer gives beside them."""
    # A fifth of the CPU time for gossip: by default it pushes more rarely where steps are as short as here.
    gossip = ["--gossip-budget", "0.2"] if cell.p else []
    return [
        *gossip, "--seed", str(1000 * cell.seed + number), "--threads", "1", "--device", "cpu",
        "--checkpoint-minutes", "10000", "--host-maddrs", LOOPBACK, "--out", str(out),
    ]  # fmt: skip


def run(cell: Cell, data: Path, out: Path) -> dict[str, Any]:
    """Run all peers of a cell below `out`, which does not exist yet. Raises RunFailedError."""
    gate = out / "start"
    directories = [out / f"peer-{number}" for number in range(1, cell.peers + 1)]
    with running_processes() as processes:
        initial = []
        if cell.arm == TOGETHER:
            initial = ["--initial-peers", str(start_bootstrap(out, processes, lambda: False))]
        peers = [
            Process(
                ["join", *flags(cell, data), *machine_flags(cell, number, directory), *initial], directory / LOG,
                enter=("env", f"{GATE_VARIABLE}={gate}"),
            )
            for number, directory in enumerate(directories, 1)
        ]  # fmt: skip
        processes += peers
        events = _watch(peers, directories, gate)
    anchors = {checkpoint.load_given(directory, ()).info["anchor_hash"] for directory in directories}
    if len(anchors) != 1:
        raise RunFailedError(f"the peers end with {len(anchors)} anchors")
    models = [_model(directory) for directory in directories]
    losses = [round(held_out_loss(model, data), 4) for model in models]
    return {
        **measures(events, started_s=gate.stat().st_mtime, eval_every=cell.eval_every),
        "loss": round(statistics.fmean(losses), 4),
        "losses": losses,
    }


def _watch(peers: list[Process], directories: list[Path], gate: Path) -> list[list[dict[str, Any]]]:
    """Wait for the end of all peers; let them start once all are in the run. Returns the events of each."""
    readers = [EventReader(directory / METRICS_FILE) for directory in directories]
    events: list[list[dict[str, Any]]] = [[] for _ in readers]
    heard_s = time.monotonic()
    while True:
        running = [process for process in peers if process.exit_status is None]
        for found, reader in zip(events, readers, strict=True):
            if new := [dict(event) for event in reader.new_events()]:
                found += new
                heard_s = time.monotonic()
        if not gate.exists() and all(any(event["event"] == "eval" for event in found) for found in events):
            gate.touch()
        for process in peers:
            if process.exit_status not in (None, 0) or time.monotonic() - heard_s > SILENCE_S:
                raise RunFailedError("\n".join([f"{process.log}:", *process.last_lines]))
        if not running:
            return events
        time.sleep(POLL_S)


def _model(directory: Path) -> nn.Module:
    """What a user has at the end: the weights of the last checkpoint."""
    model = nanogpt_cpu(ALPHABET)
    model.load_state_dict(checkpoint.load_given(directory, {"model"}).state["model"])
    return model
