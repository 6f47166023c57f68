"""`p2ptrain dashboard`: show a run on a web page."""

from __future__ import annotations

import click

from p2ptrain.cli.options import OBSERVING, settings_command
from p2ptrain.errors import ConfigError
from p2ptrain.settings.extras import require_extra
from p2ptrain.settings.table import Settings


@settings_command("host", "port", "page_names", *OBSERVING, "peer_timeout_s")
def dashboard(settings: Settings) -> None:
    """Show a run on a web page.

    The page shows peers, losses, rounds, traffic and events. The dashboard is an observer: it asks the peers for their
    state and is not a member of the run. Only browsers on this machine can open the page, unless you give --host.
    Ctrl-C ends it.

    \b
    Show the run of a peer at this address:
        p2ptrain dashboard --initial-peers /ip4/192.168.1.5/tcp/4001/p2p/Qm…
    Serve the page to the whole network, on another port:
        p2ptrain dashboard --initial-peers addresses.txt --host 0.0.0.0 --port 9000
    """
    require_extra("dashboard", "p2ptrain dashboard")
    if not settings.network_config().initial_peers:
        raise ConfigError("--initial-peers is required; give the address of a peer of the run, or a ticket")
    from p2ptrain.monitor.dashboard.serve import serve_dashboard

    try:
        serve_dashboard(settings, say=click.echo)
    except KeyboardInterrupt:
        click.echo("stopped")
