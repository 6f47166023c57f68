"""Learning rates that follow the position in the run, for schedules that count steps."""

from __future__ import annotations

from torch.optim.lr_scheduler import LambdaLR


def set_position(scheduler: object, position: int) -> None:
    """Set a LambdaLR to a step of the run, so that a late joiner continues with the rate of the other peers.

    Other schedulers cannot be moved, and are left alone.
    """
    if isinstance(scheduler, LambdaLR) and scheduler.last_epoch != position:
        scheduler.load_state_dict(scheduler.state_dict() | {"last_epoch": position - 1, "_step_count": position + 1})
        scheduler.step()
