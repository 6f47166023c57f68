"""`p2ptrain bootstrap`: a rendezvous node that does not train."""

from __future__ import annotations

import dataclasses
import time
from contextlib import ExitStack
from pathlib import Path

import click

from p2ptrain.cli.options import settings_command
from p2ptrain.settings.table import NETWORK_SETTINGS, Settings

DEFAULT_IDENTITY = Path("p2ptrain-bootstrap/identity.key")
# Network settings that only matter to a peer that joins a run.
OF_A_RUN = ("run_key", "founder", "anchor", "bulk", "bulk_port")
# How often to check for Ctrl-C, in seconds.
POLL_S = 0.2


@settings_command(*[setting.name for setting in NETWORK_SETTINGS if setting.name not in OF_A_RUN], "run_id")
def bootstrap(settings: Settings) -> None:
    """Run a node that connects peers, but does not train.

    Peers come and go; a bootstrap node gives a run one stable address, through which they find each other. It keeps its
    identity in a file (p2ptrain-bootstrap/identity.key); give it a fixed port. With a public address it also relays
    traffic between peers behind NAT (--relay-peers).

    \b
    On a machine that the peers can reach:
        p2ptrain bootstrap --host-maddrs /ip4/0.0.0.0/tcp/4001
    On each machine that trains, the line that it prints:
        p2ptrain join --initial-peers /ip4/203.0.113.7/tcp/4001/p2p/Qm…
    """
    from p2ptrain.network.lan import Announcement, local_maddrs
    from p2ptrain.peer.session import NetworkSession
    from p2ptrain.protocol.membership.reachability import best_first
    from p2ptrain.settings.initial_peers import join_line, ticket_line, write_addresses
    from p2ptrain.signals import stop_on_signals
    from p2ptrain.training.output_dir import make_directory

    network = settings.network_config().without_bulk
    identity = Path(network.identity or DEFAULT_IDENTITY)
    if network.identity is None:
        make_directory(identity.parent)
    with ExitStack() as stack:
        session = stack.enter_context(NetworkSession(dataclasses.replace(network, identity=str(identity))))
        session.accept_nobody()
        stop = stack.enter_context(stop_on_signals())
        if network.write_addresses:
            write_addresses(Path(network.write_addresses), session.network.maddrs)
        click.echo(f"bootstrap node {session.network.peer_id}")
        for maddr in session.network.maddrs:
            click.echo(f"listening on {maddr}")
        click.echo("peers join with:")
        run_id = str(settings.values["run_id"])
        click.echo(join_line(session.network.maddrs, run_id))
        if (line := ticket_line(best_first(session.network.maddrs), run_id)) is not None:
            click.echo("or with this ticket:")
            click.echo(line)
        node = session.network
        # The node serves any run, and does not know whether this one is closed: announced only if the user says so.
        if network.lan == "on":
            session.announce(
                lambda: Announcement(run_id=run_id, peer_id=node.peer_id, addresses=local_maddrs(node.maddrs))
            )
        while not stop():
            if session.network.failure is not None:
                raise session.network.failure
            time.sleep(POLL_S)
    click.echo("stopped")
