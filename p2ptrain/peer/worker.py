"""The priority of the worker thread: training comes first where cores are busy.

A snapshot and a landing take about 10 ms of the training thread at 25M parameters. On two busy cores with four peers
they waited twice to ten times as long for a core, mostly while worker threads encoded and hashed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

# Added to the nice value. A thread of training then gets nine tenths of a core that both want, instead of half. Where
# all cores train, the work of a round takes ten times as long: about a step of 1000 tokens (computed).
NICER = 10


def after_training(work: Callable[..., Any], /, *args: Any) -> Any:
    """Run `work` in this thread, at a lower priority than the process's main thread. For worker threads only.

    On Linux every thread has a nice value of its own; elsewhere the priority stays.
    """
    if sys.platform == "linux":
        lowered = min(19, os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICER)
        if os.getpriority(os.PRIO_PROCESS, 0) < lowered:
            # A sandbox may forbid it.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, 0, lowered)
    return work(*args)
