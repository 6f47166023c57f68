"""Run the demo: train, measure, report."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from p2ptrain.demo.calibration import measure_step_s
from p2ptrain.demo.directory import CURVES, RESULTS, SUMMARY, claim_demo_directory
from p2ptrain.demo.display import open_display
from p2ptrain.demo.orchestrator import Orchestrator, start_bootstrap
from p2ptrain.demo.plan import DemoPlan, make_plan
from p2ptrain.demo.plot import save_plot
from p2ptrain.demo.processes import running_processes
from p2ptrain.demo.report import format_report
from p2ptrain.demo.results import Results, measure
from p2ptrain.monitor.formatting import count
from p2ptrain.monitor.swarmview import SwarmView
from p2ptrain.signals import stop_on_signals


@dataclass(frozen=True)
class DemoOptions:
    """Options of the demo.

    Attributes:
        peers: number of peers, at least 2.
        minutes: approximate duration.
        seed: seed of the initial weights and of each peer's text.
        out: output directory.
        plain: print lines instead of a live table.
    """

    peers: int
    minutes: float
    seed: int
    out: Path
    plain: bool


def run_demo(options: DemoOptions, console: Console, *, began_s: float) -> Results:
    """Run the demo and show it.

    Args:
        options: options of the demo.
        console: where to show it.
        began_s: start of the command, in seconds since the epoch.

    Raises:
        ConfigError: the directory cannot be used.
        DemoFailedError: a process failed.
        KeyboardInterrupt: Ctrl-C; all processes have ended by then.
    """
    torch.set_num_threads(1)
    with claim_demo_directory(options.out):
        with stop_on_signals() as stop:
            plan, swarm, bootstrap_id = _train(options, console, began_s, stop)
        results = measure(options.out, swarm, peers_at_once=plan.peers)
        save_plot(swarm, options.out / CURVES)
        took_s = time.time() - began_s
        report = format_report(results, swarm, plan, options.out, bootstrap_id=bootstrap_id, took_s=took_s)
        (options.out / SUMMARY).write_text(report, encoding="utf-8")
        (options.out / RESULTS).write_text(
            json.dumps(dataclasses.asdict(results), indent=1, default=str), encoding="utf-8"
        )
        console.print()
        # Not wrapped, so that the commands can be copied.
        console.out(report, highlight=False, end="")
        return results


def _train(
    options: DemoOptions, console: Console, began_s: float, stop: Callable[[], bool]
) -> tuple[DemoPlan, SwarmView, str]:
    with running_processes() as processes:
        start_s = time.monotonic()
        addresses = start_bootstrap(options.out, processes, stop)
        bootstrap_s = time.monotonic() - start_s
        step_s = measure_step_s(options.peers)
        if stop():
            raise KeyboardInterrupt
        time_left_s = 60 * options.minutes - (time.time() - began_s)
        plan = make_plan(
            peers=options.peers, seed=options.seed, step_s=step_s, time_left_s=time_left_s, bootstrap_s=bootstrap_s
        )
        swarm = SwarmView(began_s, plan.steps)
        swarm.add_notice(
            time.time(),
            f"a step takes {1e3 * step_s:.0f} ms with {count(plan.peers, 'peer')} here: {plan.steps:,} steps, "
            f"a round every {plan.sync_every:,}",
        )
        with open_display(console, plain=options.plain) as show:
            Orchestrator(plan, options.out, addresses, processes, swarm).run(show, stop)
        bootstrap_id = addresses.read_text(encoding="utf-8").split()[0].rpartition("/")[2]
    return plan, swarm, bootstrap_id
