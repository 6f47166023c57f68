"""A port is free once its listener is closed, although a process that was forked before has a copy of the socket."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from p2ptrain.monitor.dashboard.page_state import PageState
from p2ptrain.monitor.dashboard.server import showing
from p2ptrain.monitor.prometheus import PrometheusSink
from p2ptrain.network.bulk import PORT, TlsBulk
from p2ptrain.settings.peer_config import PageConfig

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")]


def fork(until: ExitStack) -> None:
    """Start a process with copies of all our sockets, as a worker of a DataLoader has, that lives until then."""
    process = multiprocessing.get_context("fork").Process(target=signal.pause)
    process.start()
    until.callback(process.join)
    until.callback(process.kill)


def test_the_port_of_prometheus() -> None:
    sink = PrometheusSink("0")
    with ExitStack() as forked:
        fork(forked)
        sink.close()
        again = PrometheusSink(str(urlsplit(sink.url).port))
        again.close()
        assert again.url == sink.url


def test_the_port_of_the_dashboard() -> None:
    with ExitStack() as forked:
        with showing(PageState("novels"), PageConfig(port=0)) as url:
            fork(forked)
        with showing(PageState("novels"), PageConfig(port=urlsplit(url).port or 0)) as again:
            assert again == url


def test_the_port_of_bulk_connections(run: Callable[..., Any], tmp_path: Path) -> None:
    async def main() -> None:
        hosts, offers = ("/ip4/127.0.0.1/tcp/0",), list[bytes]()
        with ExitStack() as forked:
            for _ in range(2):
                port = PORT.unpack(offers[0][: PORT.size])[0] if offers else 0
                bulk = TlsBulk("a", hosts, port, tmp_path)
                async with bulk.listening():
                    offers.append(bulk.offer)
                    fork(forked)
        assert offers[0][: PORT.size] == offers[1][: PORT.size]

    run(main)
