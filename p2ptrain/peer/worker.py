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

# Added to the nice value. Of a core that training and a worker thread both want, training gets nine tenths instead of
# half. So where training keeps all cores busy, the work of a round takes up to five times as long. Both are computed
# from the kernel's weights, 1024 and 110.
NICER = 10


def at_low_priority(work: Callable[..., Any], /, *args: Any) -> Any:
    """Run `work` in this thread, at a lower priority than the process's main thread. Call it in a worker thread.

    The thread keeps that priority, because raising it again takes privileges. Linux only: there every thread has a nice
    value of its own. Elsewhere the priority stays.
    """
    if sys.platform == "linux":
        lowered = min(19, os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICER)
        if os.getpriority(os.PRIO_PROCESS, 0) < lowered:
            # A sandbox may forbid it.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, 0, lowered)
    return work(*args)
