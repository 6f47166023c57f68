"""What is wrong with this machine as far as an instant tells: said when a peer starts, and no reason not to."""

from __future__ import annotations

import logging
from pathlib import Path

from p2ptrain.monitor.doctor.finding import Finding, Mark
from p2ptrain.monitor.doctor.local import check_machine
from p2ptrain.monitor.doctor.machine import read_machine

logger = logging.getLogger(__name__)


def quick_look(out: Path, model: str, device: str, *, num_parameters: int | None) -> list[Finding]:
    """What is wrong with this machine, as far as an instant tells; never raises.

    Args:
        out: the peer's directory.
        model: what it is about to train.
        device: of `--device`.
        num_parameters: of the model; None where they are not known before it is built.
    """
    try:
        machine = read_machine(out, gpu=device != "cpu")
        found = list(check_machine(machine, out=out, model=model, num_parameters=num_parameters, device=device))
    except Exception as error:  # a look that fails must not keep a peer from training
        logger.debug("the quick look at this machine failed: %r", error)
        return []
    return [finding for finding in found if finding.mark is not Mark.OK]
