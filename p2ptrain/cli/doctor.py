"""`p2ptrain doctor`: check whether a peer works on this machine, and whether other peers can reach it."""

from __future__ import annotations

import json
import logging
import sys
from functools import partial

import click

from p2ptrain.cli.options import settings_command
from p2ptrain.settings.table import Settings

WOULD_NOT_WORK = 1
OF_THE_NETWORK = ("host_maddrs", "announce_maddrs", "startup_timeout_s", "peer_timeout_s", "relay_peers")


@settings_command("run_id", "model", "initial_peers", "run_key", *OF_THE_NETWORK, "device", "threads", "out")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
def doctor(settings: Settings, as_json: bool) -> None:
    """Check whether a peer works on this machine.

    Also checks whether other peers can reach it. Prints one line per check (✓ good, ! works with limits, ✗ would not
    work) and below it what to do. Changes nothing and joins no run. Uploads up to 8 MiB to each initial peer through
    each network interface, to measure its rate. Takes about ten seconds, 3 s more for each initial peer and interface
    (30 at most), and 20 more if no initial peer can dial back. Exit status 1 means that a peer would not work.

    \b
    Before a first run:
        p2ptrain doctor
    Before joining, or when joining fails:
        p2ptrain doctor --initial-peers /ip4/192.168.1.5/tcp/4001/p2p/Qm…
    """
    from p2ptrain.monitor.doctor.examine import examine
    from p2ptrain.monitor.doctor.finding import Mark, texts, works
    from p2ptrain.training.models import count_parameters

    logging.getLogger("p2ptrain").setLevel(logging.ERROR)
    findings = list(examine(settings, partial(count_parameters, vocab_size=None)))
    if as_json:
        report = {"works": works(findings), "checks": [finding.to_dict() for finding in findings]}
        click.echo(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        click.echo("\n".join(texts(findings)))
        failed, warned = (sum(finding.mark is mark for finding in findings) for mark in (Mark.FAILED, Mark.WARNING))
        verdict = "a peer works here" if not failed else "a peer would not work here"
        click.echo(f"{verdict}: {len(findings)} checks, {failed} failed, {warned} with a warning")
    if not works(findings):
        sys.exit(WOULD_NOT_WORK)
