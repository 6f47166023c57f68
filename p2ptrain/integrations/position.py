"""For the callbacks of all trainers: a rate that follows the run's position, checkpoints, and the end of a run."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from p2ptrain.peer.group_peer import GroupPeer
from p2ptrain.peer.peer import Peer
from p2ptrain.settings.config import RunConfig

logger = logging.getLogger(__name__)


def set_position(scheduler: object, position: int) -> None:
    """Set a LambdaLR to a step of the run, so that a late joiner continues with the rate of the other peers.

    Other schedulers cannot be moved, and are left alone.
    """
    if isinstance(scheduler, LambdaLR) and scheduler.last_epoch != position:
        scheduler.load_state_dict(scheduler.state_dict() | {"last_epoch": position - 1, "_step_count": position + 1})
        scheduler.step()


def warn_of_schedulers(schedulers: Iterable[object], run: RunConfig) -> None:
    """In a run with a length, name the schedulers that `set_position` leaves alone."""
    others = {type(scheduler).__name__ for scheduler in schedulers if not isinstance(scheduler, LambdaLR)}
    if run.total_steps and others:
        logger.warning(
            "%s does not follow the run, only LambdaLR does: a late joiner begins its schedule anew, and a peer that "
            "takes more steps than others goes beyond its end, which some refuse",
            ", ".join(sorted(others)),
        )


def state_or_nothing(peer: Peer | GroupPeer) -> dict[str, Any]:
    """`peer.state_dict()`, or an empty one with a warning if a round cannot be landed now: training goes on."""
    try:
        return peer.state_dict()
    except TimeoutError as error:
        logger.warning("this checkpoint is without the peer's part: %s", error)
        return {}


def wait_for_last_round(peer: Peer | GroupPeer) -> None:
    """At the end of a run with a length, wait for its last round, after which all peers have the same weights.

    Blocks for up to the run's `round_timeout_s`, and warns if the round has not landed.
    """
    if peer.run.is_over_at(peer.run_step) and not peer.wait_finished():
        logger.warning("the run's last round has not landed: these weights are this peer's own")
