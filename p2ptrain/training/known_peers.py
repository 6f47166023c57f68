"""The addresses of the peers last seen alive, in `--out`, and the network that is opened through them.

A restarted peer finds the run through them if its initial peers are gone, or if it started the run and has none.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.errors import ConfigError, UnreachableError
from p2ptrain.settings.initial_peers import write_addresses
from p2ptrain.settings.peer_config import NetworkConfig
from p2ptrain.training.checkpoint import Checkpoint
from p2ptrain.training.output_dir import KNOWN_PEERS_FILE

if TYPE_CHECKING:
    from p2ptrain.peer.session import NetworkSession

logger = logging.getLogger(__name__)


def read_known_peers(out: Path) -> tuple[str, ...]:
    """Addresses of peers seen before the restart; empty if the file is missing or unreadable."""
    from p2ptrain.network.addresses import is_initial_peer  # imports hivemind, as open_session does next

    path = out / KNOWN_PEERS_FILE
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return ()
    except OSError as error:
        logger.warning("%s: %s; the peers noted there are not asked", path, error.strerror)
        return ()
    for line in lines:
        if not is_initial_peer(line):
            logger.warning("%s: %.200r is not an address; the line is skipped", path, line)
    return tuple(dict.fromkeys(filter(is_initial_peer, lines)))


def write_known_peers(out: Path, maddrs: list[str]) -> None:
    """Save the addresses of the live peers that parse. If that fails, log a warning and keep the earlier file."""
    from p2ptrain.network.addresses import is_initial_peer

    if usable := [maddr for maddr in maddrs if is_initial_peer(maddr)]:
        try:
            write_addresses(out / KNOWN_PEERS_FILE, usable)
        except ConfigError as error:
            logger.warning("the addresses of the other peers could not be saved: %s", error)


def open_session(
    network: NetworkConfig, out: Path, saved: Checkpoint | None, say: Callable[[str], None]
) -> NetworkSession:
    """Open the network through the user's initial peers and the addresses saved in `out`.

    If no peer answers, a peer with a checkpoint starts alone and keeps looking for the others: all peers may have been
    stopped, and one of them must start first. Without a checkpoint, only the user's initial peers are tried again.
    Raises UnreachableError if none of the user's initial peers answered, and there is no checkpoint.
    """
    # Imports hivemind, which is slow; earlier errors need not wait for it.
    from p2ptrain.peer.session import NetworkSession

    remembered = read_known_peers(out)
    known = dataclasses.replace(network, remembered_peers=remembered)
    try:
        return NetworkSession(known)
    except UnreachableError as error:
        if saved:
            named = str(error) if network.initial_peers else f"none of the peers saved in {KNOWN_PEERS_FILE} answers"
            say(f"{named}. Continuing from the checkpoint of step {saved.step}, alone until a peer is found")
            return NetworkSession(known, alone=True)
        if not remembered:
            raise
        text = f"none of the peers saved in {KNOWN_PEERS_FILE} can be reached"
        if not network.initial_peers:
            text += ", and this peer has no checkpoint: the run starts again at step 0. To continue it, stop this "
            text += "peer, and start one that has a checkpoint first"
        say(text)
        return NetworkSession(network)
