"""`p2ptrain find` lists runs, `p2ptrain peers` the peers of one.

Also what `p2ptrain join` asks before it joins a run that it has found on the local network.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from p2ptrain.cli.options import OBSERVING, settings_command
from p2ptrain.errors import ConfigError, TransientError
from p2ptrain.formatting import count, speed_text
from p2ptrain.protocol.wire.text import shown
from p2ptrain.settings.initial_peers import ticket_line
from p2ptrain.settings.peer_config import NetworkConfig
from p2ptrain.settings.table import Settings
from p2ptrain.settings.ticket import ticket_text
from p2ptrain.training.output_dir import has_run

if TYPE_CHECKING:
    from p2ptrain.network.lan import LanRun

# Addresses shown of a run: enough to recognize the machine.
MAX_HOSTS = 3
# A longer name of a run is cut.
MAX_NAME_CHARS = 40
NO_PRIVATE = "no private address: 10.…, 172.16.… to 172.31.…, 192.168.… or 169.254.…"
WIDTH_OF_FILES = 160
NONE_FOUND = 1  # as grep, and as kubectl for a name that it does not find
SPLIT = (
    "{} lineages: the swarm is split. Peers of one lineage commit rounds with each other only. They become one lineage "
    "when they reach each other, unless the run was started twice; if the split stays for minutes, run p2ptrain doctor "
    "on both sides."
)


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
        rows = [{**dataclasses.asdict(run), "ticket": ticket_text(run.ticket)} for run in runs]
        click.echo(json.dumps(rows, indent=2))
    else:
        for run in runs:
            _say_with_command(run)
    if closed:
        click.echo(f"closed runs: {count(closed, 'peer')} announced; ask their owners for a ticket", err=True)
    if not runs:
        why = "runs in containers are announced only with --lan on" if hosts else f"this machine has {NO_PRIVATE}"
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
    if not lan.looks(network, in_container=False):
        return settings
    if not (hosts := lan.hosts_of(network.host_maddrs)):
        if network.lan != "auto":
            click.echo(f"--lan {network.lan}: runs are not looked for, because this peer listens on {NO_PRIVATE}")
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
            one = len(runs) == 1
            what = "a run was" if one else f"{len(runs)} runs were"
            how = "join it with p2ptrain join --lan join" if one else "join one of them with p2ptrain join TICKET"
            raise TransientError(f"{what} found on the local network; {how}, or start another with p2ptrain join --new")
    return settings if chosen is None else settings.with_ticket(chosen.ticket, "the local network")


def described(run: LanRun) -> str:
    """A run in one line. It is safe to print, but nothing in it has been checked."""
    hosts = list(dict.fromkeys(address.split("/")[2] for address in run.addresses))[:MAX_HOSTS]
    parts = [f"model {run.model}"] if run.model else []
    if run.parameters:
        parts += [count(run.parameters, "parameter")]
    parts += [count(run.peers, "peer"), f"step {run.step:,}"] if run.peers else ["a bootstrap node"]
    # Many spaces could push the rest of the line to where it looks like the next entry.
    name = shown(" ".join(run.run_id.split()), MAX_NAME_CHARS)
    return f"run {name!r}: {', '.join(parts)}, at {' and '.join(hosts)}"


def _ask(runs: Sequence[LanRun]) -> LanRun | None:
    """The run that the user wants to join; None to start one."""
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


@settings_command(*OBSERVING)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list instead of a table.")
def peers(settings: Settings, as_json: bool) -> None:
    """List the peers of a run, with status, speed and addresses.

    Below the table: whether the swarm is split into several lineages; which peers are linked through a relay only, or
    without a direct connection for rounds and state; and whom each peer has struck in the last ten minutes, for broken
    rules or false work. The exit status is 1 if the run has no peers that can be listed, and 2 if the peer that
    you gave belongs to another run.

    \b
    As a table, and as JSON for scripts:
        p2ptrain peers --initial-peers /ip4/192.168.1.5/tcp/4001/p2p/Qm…
        p2ptrain peers --initial-peers /ip4/192.168.1.5/tcp/4001/p2p/Qm… --json
    """
    network = settings.network_config().without_bulk
    if not network.initial_peers:
        raise ConfigError("--initial-peers is required; give the address of a peer of the run, or a ticket")
    from p2ptrain.monitor.waiting import saying_what_for
    from p2ptrain.peer.session import MEMBERS_TIMEOUT_S, OPEN_TIMEOUT_S, NetworkSession

    run_id = str(settings.values["run_id"])
    with ExitStack() as stack:
        with saying_what_for("connecting to the initial peers", OPEN_TIMEOUT_S):
            session = stack.enter_context(NetworkSession(network))
        with saying_what_for(f"asking the peers of run {run_id!r}", MEMBERS_TIMEOUT_S):
            members = [dataclasses.asdict(member) for member in session.members(run_id)]
    if as_json:
        click.echo(json.dumps(members, indent=2))
    elif not members:
        click.echo(f"no peers found for run {run_id!r}", err=True)
    else:
        lineages = {member["lineage"] for member in members} - {""}  # empty: not in the run yet, or not reached
        is_split = len(lineages) > 1
        _print_table(run_id, members, is_split=is_split)
        if is_split:
            click.echo(SPLIT.format(len(lineages)))
        _print_relayed(members)
        _print_strikes(members)
    if not members:
        sys.exit(NONE_FOUND)


def _print_table(run_id: str, members: list[dict[str, Any]], *, is_split: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(f"run {run_id}: {count(len(members), 'peer')}", "table.title"), title_justify="left")
    titles = ("peer", "role", "status", *(["lineage"] if is_split else []), "step", "round", "steps/s", "addresses")
    for title in titles:
        table.add_column(title, overflow="fold", justify="right" if title in ("step", "round", "steps/s") else "left")
    for member in members:
        addresses = [maddr.rpartition("/p2p/")[0] for maddr in member["maddrs"]]
        speed, round_ = speed_text(member["speed"]) or "0", "–" if member["round"] < 0 else member["round"]
        shown_as = {"peer": member["peer_id"], "round": round_, "steps/s": speed, "addresses": "\n".join(addresses)}
        cells = {**member, **shown_as}
        # As text: of a str, rich reads what other peers wrote as markup.
        table.add_row(*(Text(str(cells[title])) for title in titles))
    # A file or a pipe has no width: use enough for one line per peer.
    Console(width=None if sys.stdout.isatty() else WIDTH_OF_FILES).print(table)


def _print_relayed(members: list[dict[str, Any]]) -> None:
    """Print a line for each pair of members without a bulk connection, as one of the two reports."""
    told = {
        tuple(sorted((member["peer_id"], other))): relay
        for member in members
        for other, relay in (member["relayed"] or {}).items()
    }
    for (one, other), relay in sorted(told.items()):
        way = f"relayed through {relay}" if relay else "no direct TLS connection; libp2p carries rounds and state"
        click.echo(f"{one} and {other}: {way}")


def _print_strikes(members: list[dict[str, Any]]) -> None:
    """Print a line for each strike, as members report it; nobody checks it."""
    given = [(struck, member["peer_id"]) for member in members for struck in member["strikes"]]
    if given:
        click.echo("strikes of the last ten minutes:")
    for struck, by in sorted(given, key=lambda pair: (pair[0]["peer_id"], pair[1])):
        minutes = struck["age_s"] / 60
        click.echo(f"{struck['peer_id']}: {struck['count']} by {by}, {minutes:.0f} min ago: {struck['reason']}")
