"""One network thread for all tests of this directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from p2ptrain.network.thread import NetworkThread


@pytest.fixture(scope="package")
def thread() -> Iterator[NetworkThread]:
    thread = NetworkThread()
    yield thread
    assert thread.stop(10.0)
    assert thread.failure is None


@pytest.fixture
def run(thread: NetworkThread) -> Callable[..., Any]:
    """Run an async test function on the network thread."""
    return lambda async_fn, *args: thread.run(async_fn, *args, timeout_s=60.0)
