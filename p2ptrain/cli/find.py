"""`p2ptrain find`, and what `p2ptrain join` asks before it joins a run that it has found on the local network."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from p2ptrain.cli.peers import NONE_FOUND
from p2ptrain.errors import TransientError
from p2ptrain.monitor.formatting import count
from p2ptrain.protocol.wire.text import shown
from p2ptrain.settings.initial_peers import ticket_line
from p2ptrain.settings.peer_config import NetworkConfig
from p2ptrain.settings.table import Settings
from p2ptrain.settings.ticket import ticket_text
from p2ptrain.training.output_dir import has_run

if TYPE_CHECKING:
    from p2ptrain.network.lan import LanRun

# Enough to know the machine by.
MAX_HOSTS = 3
# Of a run's name, which may be longer.
MAX_NAME_CHARS = 40


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list instead of lines.")
def find(as_json: bool) -> None:
    """List the runs on the local network, with a ticket for each.

    Peers on other machines announce the open runs that they train. Nobody checks what they say: join only runs of
    machines that you know. The exit status is 1 if no open run was found.

    \b
    As lines, and as JSON for scripts:
        p2ptrain find
        p2ptrain find --json
    """
    from p2ptrain.network.lan import CLOSED, hosts_of, look, runs_of

    hosts = hosts_of(NetworkConfig.host_maddrs)
    announcements = look(hosts)
    runs, closed = runs_of(announcements), announcements.count(CLOSED)
    if as_json:
        rows = [
            {
                "run_id": run.run_id,
                "model": run.model,
                "parameters": run.parameters,
                "peers": run.peers,
                "step": run.step,
                "founder": run.founder,
                "addresses": run.addresses,
                "ticket": ticket_text(run.ticket),
            }
            for run in runs
        ]
        click.echo(json.dumps(rows, indent=2))
    else:
        for run in runs:
            _say_with_command(run)
    if closed:
        click.echo(f"closed runs: {count(closed, 'peer')} announced; ask their owners for a ticket", err=True)
    if not runs:
        why = "runs in containers are announced only with --lan on" if hosts else "this machine has no private address"
        click.echo(f"no open run found on the local network ({why})", err=True)
        sys.exit(NONE_FOUND)


def choose_nearby(settings: Settings) -> Settings:
    """Look for runs, and ask which one to join; for `p2ptrain join` without initial peers.

    Returns:
        The settings, with the ticket of the run that was chosen, if any.

    Raises:
        TransientError: there are runs, and no terminal to ask at.
    """
    from p2ptrain.network import lan

    network = settings.network_config()
    run_id, out = str(settings.values["run_id"]), settings.values["out"]
    if has_run(None if out is None else str(out), run_id):
        return settings
    if not lan.looks(network, in_container=False) or not (hosts := lan.hosts_of(network.host_maddrs)):
        return settings
    if not lan.looks(network, in_container=lan.in_container()):
        click.echo(
            "this seems to be a container: runs on the local network are not looked for, and this one is not announced "
            "there (--lan on does both)"
        )
        return settings
    click.echo("looking for runs on the local network (--new skips this)")
    runs = lan.matching(
        lan.runs_of(lan.look(hosts)), run_id if settings.explicit("run_id") else None, founder=network.founder
    )
    can_ask = sys.stdin.isatty() and sys.stdout.isatty()
    match lan.decide(len(runs), lan=network.lan, can_ask=can_ask):
        case "start":
            click.echo("no run found there; starting one")
            return settings
        case "join":
            click.echo(f"joining {described(runs[0])}")
            chosen: LanRun | None = runs[0]
        case "ask":
            chosen = _ask(runs)
        case "refuse":
            for run in runs:
                _say_with_command(run)
            raise TransientError(_choices(len(runs)))
    return settings if chosen is None else settings.with_ticket(chosen.ticket, "the local network")


def described(run: LanRun) -> str:
    """A run in one line. All of it is safe to print, and none of it is certain."""
    hosts = list(dict.fromkeys(address.split("/")[2] for address in run.addresses))[:MAX_HOSTS]
    parts = [f"model {run.model}"] if run.model else []
    if run.parameters:
        parts += [count(run.parameters, "parameter")]
    parts += [count(run.peers, "peer"), f"step {run.step:,}"] if run.peers else ["a bootstrap node"]
    # Spaces could push the rest to where the next entry seems to begin.
    name = shown(" ".join(run.run_id.split()), MAX_NAME_CHARS)
    return f"run {name!r}: {', '.join(parts)}, at {' and '.join(hosts)}"


def _ask(runs: Sequence[LanRun]) -> LanRun | None:
    """The run that the user wants to join; None for one of the user's own."""
    click.echo("found on the local network:")
    if len(runs) == 1:
        click.echo(f"  {described(runs[0])}")
        return runs[0] if click.confirm("Join it?", default=True) else None
    for number, run in enumerate(runs, start=1):
        click.echo(f"  {number}  {described(run)}")
    click.echo("  0  none of them: start another")
    number = click.prompt(f"Join which one (0 to {len(runs)})", type=click.IntRange(0, len(runs)))
    return runs[number - 1] if number else None


def _say_with_command(run: LanRun) -> None:
    click.echo(described(run))
    # Without --model: what a stranger announces must not choose code that is run here.
    click.echo(f"    {ticket_line(run.addresses, run.run_id, founder=run.founder)}")


def _choices(found: int) -> str:
    one = found == 1
    what = "a run was" if one else f"{found} runs were"
    join = "join it with p2ptrain join --lan join" if one else "join one of them with p2ptrain join TICKET"
    return f"{what} found on the local network; {join}, or start another with p2ptrain join --new"
