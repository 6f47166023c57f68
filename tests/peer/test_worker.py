"""Work in the worker thread yields to training, and training keeps its priority."""

from __future__ import annotations

import os
import sys
import threading

from p2ptrain.peer.worker import NICER, at_low_priority


def own_nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id() if sys.platform == "linux" else 0)


def test_only_the_worker_thread_yields_and_only_once() -> None:
    before, seen = own_nice(), list[int]()

    def run() -> None:
        seen.extend(at_low_priority(own_nice) for _ in range(2))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    nicer = min(19, before + NICER) if sys.platform == "linux" else before
    assert seen == [nicer, nicer]
    assert own_nice() == before


def test_arguments_and_result_are_passed_on() -> None:
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(at_low_priority(divmod, 7, 2)[1]))
    thread.start()
    thread.join()
    assert seen == [1]
