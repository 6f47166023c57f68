"""A quick check of this machine when a peer starts. It only warns; it never keeps a peer from starting."""

from __future__ import annotations

import logging
from pathlib import Path

from p2ptrain.monitor.doctor.finding import Finding, Mark
from p2ptrain.monitor.doctor.local import check_machine
from p2ptrain.monitor.doctor.machine import read_machine

logger = logging.getLogger(__name__)


def quick_look(out: Path, model: str, device: str, *, num_parameters: int | None) -> list[Finding]:
    """Return the problems of this machine that can be found without the network; never raises.

    Args:
        out: the peer's output directory.
        model: name of the model.
        device: value of `--device`.
        num_parameters: of the model; None if unknown before it is built.
    """
    try:
        machine = read_machine(out, gpu=device != "cpu")
        found = list(check_machine(machine, out=out, model=model, num_parameters=num_parameters, device=device))
    except Exception as error:  # a failing check must not keep a peer from training
        logger.debug("the quick check of this machine failed: %r", error)
        return []
    return [finding for finding in found if finding.mark is not Mark.OK]
