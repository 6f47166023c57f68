"""The lines that a peer prints once it has joined: the run, its addresses, and the commands with which others join."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

from p2ptrain.protocol.membership.reachability import best_first
from p2ptrain.settings.config import RunConfig
from p2ptrain.settings.initial_peers import join_line, ticket_line
from p2ptrain.settings.peer_config import NetworkConfig

if TYPE_CHECKING:
    from p2ptrain.peer.peer import Peer

# 61 columns with its border, which fit into a terminal (version 10 of a QR code).
MAX_QR_CHARS = 395


def announce(
    peer: Peer,
    run: RunConfig,
    network: NetworkConfig,
    *,
    processes: int,
    continues: bool,
    share_key: bool,
    qr: bool,
    say: Callable[[str], None],
) -> None:
    """Print what a peer trains and how others join it.

    Args:
        processes: how many processes this peer has.
        continues: whether it continues from a checkpoint.
        share_key: put the run key into the ticket.
        qr: show the ticket as a QR code, too.
        say: prints one line.
    """
    shared = network.key if share_key else None
    verb = "continuing" if continues else "started" if peer.founded else "joined"
    several = f" of {processes} processes" if processes > 1 else ""
    length = f"{run.total_steps or 'endless'} steps"
    say(f"{verb} run {run.run_id!r} (model {run.model}, {length}) as peer {peer.peer_id}{several}")
    for maddr in peer.maddrs:
        say(f"listening on {maddr}")
    say("other peers join with:")
    say(join_line(peer.maddrs, run.run_id, run.model, network.key_file))
    addresses, founder, key_file = best_first(peer.maddrs), peer.run_founder, network.key_file
    line = ticket_line(addresses, run.run_id, run.model, founder=founder, run_key=key_file, shared=shared)
    if line is not None:
        note = "; it holds the run key: whoever has it can join, so send it over a safe channel" if shared else ""
        say(f"or with this ticket{note}:")
        say(line)
        word = line.split()[2]
        if qr and len(word) > MAX_QR_CHARS:
            say(f"the ticket is too long for a QR code in a terminal: {len(word)} characters")
        elif qr:
            for row in qr_rows(word):
                say(row)
    if network.key is not None and network.run_key is None and shared is None:
        say("FILE is the run's key file; with --share-key a ticket is printed that holds the key, and needs no file")
    if run.data == "text":
        say("each peer adds --data with text of its own")


def qr_rows(ticket: str) -> list[str]:
    """The ticket as a QR code of half blocks, for a dark terminal. In upper case the code is smaller."""
    import segno

    shown = io.StringIO()
    segno.make_qr(ticket.upper(), error="l").terminal(shown, compact=True, border=2)
    return shown.getvalue().splitlines()
