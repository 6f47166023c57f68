"""A libp2p daemon that dies is restarted with the same identity, a limited number of times."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from p2ptrain.errors import ConfigError, PeerLostError
from p2ptrain.network import addresses, daemon, host
from p2ptrain.network.addresses import with_ports_of
from p2ptrain.network.host import Network, open_network
from p2ptrain.network.transport import LibP2P
from p2ptrain.protocol.wire.transport import Stream
from tests.network.local import config, daemons_of, read

pytestmark = pytest.mark.processes

Run = Callable[..., Any]


class Seen:
    """Events about a network's daemon."""

    def __init__(self, network: Network) -> None:
        self.events: list[str] = []
        self._more = trio.Event()
        self._recording = network.recording(self.write)
        self._recording.__enter__()  # as long as the network

    def write(self, event: str, /, **fields: object) -> None:
        assert event == "daemon"
        self.events.append(str(fields["status"]))
        self._more.set()

    async def until(self, *events: str) -> None:
        while self.events != list(events):
            self._more = trio.Event()
            await self._more.wait()


@contextlib.asynccontextmanager
async def network_and_pid(*initial: Network, **settings: Any) -> Any:
    """A network and the pid of its first daemon."""
    before = set(daemons_of(os.getpid()))
    async with open_network(config(*initial, **settings)) as network:
        (pid,) = set(daemons_of(os.getpid())) - before
        yield network, pid


async def opened(network: Network, other: Network) -> tuple[Stream, Stream]:
    """Both ends of a stream; dials until it opens, as membership does."""
    while True:
        with contextlib.suppress(PeerLostError):
            stream = await network.transport.open_stream(other.peer_id, other.maddrs)
            await stream.send_all(b"hello")
            theirs = await other.transport.accept()
            assert await read(theirs, 5) == b"hello"
            return stream, theirs


async def found(network: Network, key: str, expected: dict[str, bytes]) -> None:
    while True:
        with contextlib.suppress(PeerLostError):
            if await network.directory.lookup(key) == expected:
                return
        await trio.sleep(0.05)


def test_everything_works_again_with_another_daemon(run: Run) -> None:
    async def main() -> None:
        async with open_network(config()) as other, network_and_pid(other) as (network, pid):
            seen = Seen(network)
            peer_id, maddrs = network.peer_id, network.maddrs
            ours, theirs = await opened(network, other)
            os.kill(pid, signal.SIGKILL)
            # A stream that has ended looks the same whether the daemon or the other peer ended it.
            with contextlib.suppress(PeerLostError):
                assert await ours.receive_some() == b""
            with pytest.raises(PeerLostError):
                await ours.send_all(b"x")
            assert await theirs.receive_some() == b""
            await seen.until("died", "restarted")
            assert (network.peer_id, network.maddrs, network.failure) == (peer_id, maddrs, None)
            await opened(network, other)
            await opened(other, network)
            while not await network.directory.announce("run", b"here", 60.0):
                await trio.sleep(0.05)  # on a busy machine the first search may be too late
            await found(other, "run", {network.peer_id: b"here"})

    run(main)


def test_one_that_hangs_is_ended_and_replaced(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2ptrain.network.transport.REFRESH_MADDRS_S", 0.05)

    async def main() -> None:
        async with open_network(config()) as other, network_and_pid(other) as (network, pid):
            seen = Seen(network)
            monkeypatch.setattr(daemon, "CONTROL_TIMEOUT_S", 0.5)
            os.kill(pid, signal.SIGSTOP)
            await seen.until("died")
            monkeypatch.undo()
            await seen.until("died", "restarted")
            await opened(network, other)

    run(main)


def test_one_without_initial_peers_comes_back_through_those_who_dial_it(run: Run) -> None:
    async def main() -> None:
        async with network_and_pid() as (first, pid), open_network(config(first)) as second:
            seen = Seen(first)
            os.kill(pid, signal.SIGKILL)
            await seen.until("died", "restarted")
            await opened(second, first)
            assert await second.directory.announce("run", b"second", 60.0)
            await found(first, "run", {second.peer_id: b"second"})

    run(main)


def test_a_stream_asked_for_during_the_restart_waits_for_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "RESTART_AFTER_S", (0.3, 0.3))

    async def main() -> None:
        async with open_network(config()) as other, network_and_pid(other) as (network, pid):
            seen = Seen(network)
            os.kill(pid, signal.SIGKILL)
            await seen.until("died")
            stream = await network.transport.open_stream(other.peer_id, other.maddrs)
            assert stream.remote == other.peer_id
            assert seen.events == ["died", "restarted"]

    run(main)


def test_its_port_taken_meanwhile_costs_one_restart(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "RESTART_AFTER_S", (0.0, 0.0))
    asked: list[tuple[str, ...]] = []

    def taken(host_maddrs: tuple[str, ...]) -> None:
        asked.append(host_maddrs)
        if len(asked) == 1:
            raise ConfigError("another program uses that port")

    async def main() -> None:
        async with network_and_pid() as (network, pid):
            monkeypatch.setattr(addresses, "check_host_maddrs", taken)
            seen = Seen(network)
            had = network.maddrs[0].rpartition("/p2p/")[0]
            os.kill(pid, signal.SIGKILL)
            await seen.until("died", "died", "restarted")
            assert asked == [(had,), ("/ip4/127.0.0.1/tcp/0",)]

    run(main)


def test_one_that_keeps_dying_is_given_up(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "RESTART_AFTER_S", (0.0, 0.0))
    script = tmp_path / "p2pd"
    script.write_text("#!/bin/sh\necho out of luck; exit 1\n")
    script.chmod(0o755)

    async def main() -> None:
        async with network_and_pid() as (network, pid):
            seen = Seen(network)
            with monkeypatch.context() as patch:
                patch.setattr(daemon, "cli_path", [str(tmp_path)])
                os.kill(pid, signal.SIGKILL)
                await seen.until("died", "died", "failed")
            assert "2 restarts did not help" in str(network.failure)
            assert "out of luck" in str(network.failure)
            with pytest.raises(PeerLostError, match="no DHT node"):
                await network.directory.lookup("key")
            assert not await network.directory.announce("key", b"x", 10.0)

    run(main)


def test_one_that_lived_long_has_all_its_restarts_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "RESTART_AFTER_S", (0.0,))
    monkeypatch.setattr(host, "STABLE_S", 0.0)

    async def main() -> None:
        async with network_and_pid() as (network, pid):
            seen = Seen(network)
            for deaths in (1, 2, 3):
                others = set(daemons_of(os.getpid())) - {pid}
                os.kill(pid, signal.SIGKILL)
                await seen.until(*["died", "restarted"] * deaths)
                (pid,) = set(daemons_of(os.getpid())) - others

    run(main)


def test_a_bug_while_a_daemon_works_costs_that_daemon(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the first daemon and the next one; the event callback may fail too."""
    monkeypatch.setattr(host, "RESTART_AFTER_S", (0.0, 0.0, 0.0))
    watch, lives, bugs = LibP2P._watch, 0, [trio.Event(), trio.Event()]

    async def fail(transport: LibP2P, running: daemon.Daemon) -> None:
        nonlocal lives
        lives += 1
        if lives > len(bugs):
            return await watch(transport, running)
        await bugs[lives - 1].wait()
        raise ZeroDivisionError("a bug of ours")

    async def main() -> None:
        async with open_network(config()) as other:
            monkeypatch.setattr(LibP2P, "_watch", fail)
            async with open_network(config(other)) as network:
                seen = Seen(network)

                def tell_and_fail(event: str, /, **fields: object) -> None:
                    seen.write(event, **fields)
                    raise LookupError("the listener has a bug as well")

                with network.recording(tell_and_fail):
                    for count, bug in enumerate(bugs, start=1):
                        bug.set()
                        await seen.until(*["died", "restarted"] * count)
                    assert network.failure is None
                    await opened(network, other)
                    assert caplog.text.count("Traceback") >= 2
                    assert "ZeroDivisionError" in caplog.text
                    assert "LookupError" in caplog.text

    run(main)


@pytest.mark.parametrize(
    ("host", "found", "fixed"),
    [
        ("/ip4/0.0.0.0/tcp/0", ["/ip4/8.8.8.8/tcp/9/p2p/Q", "/ip4/127.0.0.1/tcp/7/p2p/Q"], "/ip4/0.0.0.0/tcp/7"),
        ("/ip4/127.0.0.1/tcp/0", ["/ip4/127.0.0.1/tcp/7/p2p/Q"], "/ip4/127.0.0.1/tcp/7"),
        ("/ip6/::/tcp/0", ["/ip4/127.0.0.1/tcp/6/p2p/Q", "/ip6/::1/tcp/7/p2p/Q"], "/ip6/::/tcp/7"),
        ("/ip4/127.0.0.1/udp/0/quic", ["/ip4/127.0.0.1/udp/7/quic/p2p/Q"], "/ip4/127.0.0.1/udp/7/quic"),
        ("/ip4/127.0.0.1/tcp/0", ["/ip4/127.0.0.1/udp/7/quic/p2p/Q"], "/ip4/127.0.0.1/tcp/0"),
        ("/ip4/0.0.0.0/tcp/4001", ["/ip4/127.0.0.1/tcp/7/p2p/Q"], "/ip4/0.0.0.0/tcp/4001"),
        ("/ip4/0.0.0.0/tcp/0", ["/dns4/example.org/tcp/7/p2p/Q"], "/ip4/0.0.0.0/tcp/0"),
        ("/ip4/0.0.0.0/tcp/0", ["/ip4/127.0.0.1/tcp", ""], "/ip4/0.0.0.0/tcp/0"),
        ("/ip4/0.0.0.0/tcp/0", [], "/ip4/0.0.0.0/tcp/0"),
    ],
)
def test_an_open_port_is_the_one_that_was_chosen(host: str, found: list[str], fixed: str) -> None:
    assert with_ports_of([host], found) == (fixed,)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_daemon_that_strangers_have_filled_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdout=subprocess.PIPE)
    try:
        one = daemon.Daemon(process, "")
        one.end_if_outgrown()
        assert not one.has_outgrown
        monkeypatch.setattr(daemon, "MOST_BYTES", 1)
        one.end_if_outgrown()
        assert one.has_outgrown
        assert process.wait(30) == -signal.SIGKILL
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_if_memory_runs_out_the_daemon_goes_before_its_peer(tmp_path: Path) -> None:
    process = daemon._spawn({"listen": f"/unix{tmp_path / 'p2pd.sock'}", "noListenAddrs": "1"})
    try:
        assert Path(f"/proc/{process.pid}/oom_score_adj").read_text().strip() == "1000"
        assert Path("/proc/self/oom_score_adj").read_text().strip() != "1000"
    finally:
        process.kill()
        process.communicate()
