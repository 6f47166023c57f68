"""Runs the demo: trains, measures, reports. Only the next demo replaces its output directory."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console

from p2ptrain.demo.display import open_display
from p2ptrain.demo.orchestrator import (
    BOOTSTRAP,
    DemoFailedError,
    Orchestrator,
    peer_directory,
    running_processes,
    start_bootstrap,
)
from p2ptrain.demo.plan import RUN_ID, make_plan, measure_step_s
from p2ptrain.demo.plot import save_plot
from p2ptrain.demo.report import CURVES, SUMMARY, format_report, measure
from p2ptrain.errors import ConfigError
from p2ptrain.formatting import count
from p2ptrain.monitor.swarmview import SwarmView
from p2ptrain.signals import stop_on_signals
from p2ptrain.training.output_dir import claim_out

MARKER = ".p2ptrain-demo"
RESULTS = "results.json"
# Files that a demo writes, and that the next demo removes. Other files are the user's.
_WRITTEN = ("peer-*", "checkpoint-*", ".checkpoint-*", BOOTSTRAP, CURVES, SUMMARY, RESULTS)


def run_demo(
    console: Console, *, peers: int, minutes: float, seed: int, out: Path, plain: bool, began_s: float
) -> None:
    """Run the demo and show it.

    Args:
        console: where to show it.
        peers: number of peers, at least 2.
        minutes: approximate duration.
        seed: seed of the initial weights and of each peer's text.
        out: output directory.
        plain: print lines instead of a live table.
        began_s: start of the command, in seconds since the epoch.

    Raises:
        ConfigError: the directory cannot be used.
        DemoFailedError: a process failed, or the peers' anchors differ.
        KeyboardInterrupt: Ctrl-C; all processes have ended by then.
    """
    torch.set_num_threads(1)
    with claim_demo_directory(out):
        with stop_on_signals() as stop, running_processes() as processes:
            start_s = time.monotonic()
            addresses = start_bootstrap(out, processes, stop)
            bootstrap_s = time.monotonic() - start_s
            bootstrap_id = addresses.read_text(encoding="utf-8").split()[0].rpartition("/")[2]
            step_s = measure_step_s(peers)
            if stop():
                raise KeyboardInterrupt
            time_left_s = 60 * minutes - (time.time() - began_s)
            plan = make_plan(peers=peers, seed=seed, step_s=step_s, time_left_s=time_left_s, bootstrap_s=bootstrap_s)
            swarm = SwarmView(began_s, plan.steps)
            swarm.add_notice(
                time.time(),
                f"a step takes {1e3 * step_s:.0f} ms with {count(peers, 'peer')} here: {plan.steps:,} steps, "
                f"a round every {plan.sync_every:,}",
            )
            with open_display(console, plain=plain) as show:
                Orchestrator(plan, out, addresses, processes, swarm).run(show, stop)
        results = measure(out, swarm, peers_at_once=peers)
        save_plot(swarm, out / CURVES)
        took_s = time.time() - began_s
        report = format_report(results, swarm, plan, out, bootstrap_id=bootstrap_id, took_s=took_s)
        (out / SUMMARY).write_text(report, encoding="utf-8")
        (out / RESULTS).write_text(json.dumps(dataclasses.asdict(results), indent=1, default=str), encoding="utf-8")
        console.print()
        # Not wrapped, so that the commands can be copied.
        console.out(report, highlight=False, end="")
        if not results.same_anchor:
            raise DemoFailedError(
                "the peers ended with different anchors; on a busy machine give more --minutes or fewer --peers, "
                f"and see the logs in {peer_directory(out, 1)} and so on"
            )


@contextmanager
def claim_demo_directory(out: Path) -> Iterator[None]:
    """Make `out`, lock it, and remove what an earlier demo left in it.

    Raises:
        ConfigError: it is in use or not writable, or holds files but no earlier demo.
    """
    if out.is_dir() and any(out.iterdir()) and not (out / MARKER).exists():
        foreign = f"--out {out} is not empty, and no earlier demo wrote it"
        raise ConfigError(f"{foreign}; give another directory, or remove this one")
    with claim_out(str(out), RUN_ID, joins=False):
        (out / MARKER).write_text("Written by `p2ptrain demo`; the next one replaces it.\n", encoding="utf-8")
        for pattern in _WRITTEN:
            for path in out.glob(pattern):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        yield
