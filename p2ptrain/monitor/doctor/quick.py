"""What is wrong with this machine as far as an instant tells: said when a peer starts, and no reason not to."""

from __future__ import annotations

import logging
from pathlib import Path

from p2ptrain.monitor.doctor.finding import Finding, Mark
from p2ptrain.monitor.doctor.local import check_machine
from p2ptrain.monitor.doctor.machine import read_machine
from p2ptrain.training.data import VOCAB_SIZE
from p2ptrain.training.models import PRESETS, count_parameters

logger = logging.getLogger(__name__)


def quick_look(out: Path, model: str, device: str) -> list[Finding]:
    """What is wrong with this machine, as far as an instant tells; never raises.

    Args:
        out: the peer's directory.
        model: what it is about to train.
        device: of `--device`.
    """
    try:
        parameters = count_parameters(model, vocab_size=VOCAB_SIZE) if model in PRESETS else None
        machine = read_machine(out, gpu=device != "cpu")
        found = list(check_machine(machine, out=out, model=model, num_parameters=parameters, device=device))
    except Exception as error:  # a look that fails must not keep a peer from training
        logger.debug("the quick look at this machine failed: %r", error)
        return []
    return [finding for finding in found if finding.mark is not Mark.OK]
