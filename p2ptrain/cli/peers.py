"""`p2ptrain peers`: list the peers of a run."""

from __future__ import annotations

import dataclasses
import json
import sys
from contextlib import ExitStack
from typing import Any

import click

from p2ptrain.cli.options import settings_command
from p2ptrain.errors import ConfigError
from p2ptrain.settings.table import Settings

WIDTH_OF_FILES = 160
NONE_FOUND = 1  # as grep, and as kubectl for a name that it does not find
SPLIT = (
    "{} lineages: the swarm is split. Peers of one lineage commit rounds with each other only. They become one lineage "
    "when they reach each other; if the split stays for minutes, they cannot: run p2ptrain doctor on both sides."
)


@settings_command("run_id", "initial_peers", "run_key", "identity", "host_maddrs", "startup_timeout_s")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list instead of a table.")
def peers(settings: Settings, as_json: bool) -> None:
    """List the peers of a run, with status, speed and addresses.

    Below the table: whether the swarm is split into several lineages; which peers are linked through a relay only, or
    without a direct connection for rounds and state; and whom each peer has struck in the last ten minutes, for broken
    rules or false work. The exit status is 1 if the run has no peers that can be listed.

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

    from p2ptrain.monitor.formatting import count

    table = Table(title=Text(f"run {run_id}: {count(len(members), 'peer')}", "table.title"), title_justify="left")
    titles = ("peer", "role", "status", *(["lineage"] if is_split else []), "step", "round", "steps/s", "addresses")
    for title in titles:
        table.add_column(title, overflow="fold", justify="right" if title in ("step", "round", "steps/s") else "left")
    for member in members:
        addresses = [maddr.rpartition("/p2p/")[0] for maddr in member["maddrs"]]
        cells = {
            "peer": member["peer_id"], "role": member["role"], "status": member["status"],
            "lineage": member["lineage"], "step": str(member["step"]),
            "round": "–" if member["round"] < 0 else str(member["round"]),
            "steps/s": f"{member['speed']:.1f}", "addresses": "\n".join(addresses),
        }  # fmt: skip
        # As text: of a str, rich reads what other peers wrote as markup.
        table.add_row(*(Text(cells[title]) for title in titles))
    # A file or a pipe has no width: use enough for one line per peer.
    Console(width=None if sys.stdout.isatty() else WIDTH_OF_FILES).print(table)


def _print_relayed(members: list[dict[str, Any]]) -> None:
    """One line for each pair of members whose bulk bytes have no connection of their own, as one of the two says."""
    told = {
        tuple(sorted((member["peer_id"], other))): relay
        for member in members
        for other, relay in (member["relayed"] or {}).items()
    }
    for (one, other), relay in sorted(told.items()):
        way = f"relayed through {relay}" if relay else "no direct TLS connection; libp2p carries rounds and state"
        click.echo(f"{one} and {other}: {way}")


def _print_strikes(members: list[dict[str, Any]]) -> None:
    """One line for each peer that a member has struck: the members say so, nobody checks it."""
    given = [(struck, member["peer_id"]) for member in members for struck in member["strikes"]]
    if given:
        click.echo("strikes of the last ten minutes:")
    for struck, by in sorted(given, key=lambda pair: (pair[0]["peer_id"], pair[1])):
        minutes = struck["age_s"] / 60
        click.echo(f"{struck['peer_id']}: {struck['count']} by {by}, {minutes:.0f} min ago: {struck['reason']}")
