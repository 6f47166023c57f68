"""Runs the libp2p daemon (p2pd) that comes with hivemind, as a child process that ends with its owner.

`hivemind.P2P.create` is not used: it leaves processes and sockets behind when a start fails, lets Ctrl-C in a terminal
kill the daemon before we have left the run, and takes over SIGCHLD. Our sockets are in a private directory, so other
users of the machine cannot control the daemon.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import trio

from p2ptrain.errors import ConfigError, TransientError
from p2ptrain.network import launcher
from p2ptrain.network._hivemind import cli_path
from p2ptrain.network.thread import open_background
from p2ptrain.protocol.wire.text import escaped
from p2ptrain.settings.peer_config import NetworkConfig

logger = logging.getLogger(__name__)

# Normally milliseconds; a UPnP router that is slow to drop its port mapping can delay it.
TERMINATE_TIMEOUT_S = 2.0
COMMON_FLAGS = {
    "tls": "1",
    # Ends the daemon if we vanish before our first connection.
    "idleTimeout": "30s",
    # For DHT requests and responses; hivemind's own limit.
    "persistentConnMaxMsgSize": str(4 * 1024 * 1024),
}


@dataclass
class Daemon:
    """A running p2pd: its process, the unix socket for requests, whether it has ended, and the end of its output."""

    process: subprocess.Popen[bytes]
    control_path: str
    exited: trio.Event = field(default_factory=trio.Event)
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    _ready: trio.Event = field(default_factory=trio.Event)

    async def _watch(self) -> None:
        """Log the output and wait for the end of the process."""
        async with trio.open_nursery() as nursery:
            printed_all = trio.Event()
            nursery.start_soon(self._read_output, printed_all)
            # Popen.wait in a thread works on every system and in any thread, unlike SIGCHLD or a pidfd.
            await trio.to_thread.run_sync(self.process.wait, abandon_on_cancel=True)
            # Another child of the user's program may have inherited the pipe and keep it open.
            with trio.move_on_after(0.2):
                await printed_all.wait()
            nursery.cancel_scope.cancel()
        self.exited.set()
        self._ready.set()

    async def _read_output(self, printed_all: trio.Event) -> None:
        assert self.process.stdout is not None
        unfinished = b""
        async with trio.lowlevel.FdStream(os.dup(self.process.stdout.fileno())) as output:
            async for data in output:
                *lines, unfinished = (unfinished + data).split(b"\n")
                for line in lines:
                    text = escaped(line.decode(errors="replace"))
                    logger.debug("p2pd: %s", text)
                    self.last_lines.append(text)
                    if text.startswith("Peer ID:"):
                        self._ready.set()
        printed_all.set()


def peer_flags(config: NetworkConfig, identity_path: Path) -> dict[str, str]:
    """p2pd's flags for a full peer. Initial peers are not among them: see `bootstrap`."""
    return {
        "id": str(identity_path),
        "hostAddrs": ",".join(config.host_maddrs),
        "announceAddrs": ",".join(config.announce_maddrs),
        # libp2p's own DHT, where daemons find each other's addresses; "server" works without internet.
        "dhtServer": "1",
        # Behind NAT: learn our public address, ask the router for a port, and use relays.
        "autonat": "1",
        "natPortMap": "1",
        "relay": "1",
        "connManager": "1",
        # See relay.py.
        "relayService": "0",
    }


def probe_flags() -> dict[str, str]:
    """p2pd's flags for a short-lived daemon that cannot be dialled and has a temporary identity."""
    return {"noListenAddrs": "1", "dhtClient": "1"}


@contextlib.asynccontextmanager
async def run_daemon(flags: dict[str, str], control_path: Path, timeout_s: float) -> AsyncIterator[Daemon]:
    """Run p2pd until the block ends. Leaves nothing behind, also when entering fails or is cancelled.

    `timeout_s` limits the start. The socket of a killed daemon at `control_path` is replaced. Raises ConfigError if the
    daemon does not start.
    """
    control_path.unlink(missing_ok=True)
    process = _spawn({**flags, **COMMON_FLAGS, "listen": f"/unix{control_path}"})
    daemon = Daemon(process, str(control_path))
    try:
        async with open_background() as background:
            background.start_soon(daemon._watch)
            try:
                with trio.move_on_after(timeout_s):
                    await daemon._ready.wait()
                if daemon.exited.is_set():
                    output = "; ".join(daemon.last_lines) or "it ended without output"
                    raise ConfigError(f"the libp2p daemon did not start: {output}")
                if not daemon._ready.is_set():
                    raise TransientError(
                        f"the libp2p daemon did not start within {timeout_s:g} s; the machine may be overloaded: "
                        "raise startup_timeout_s, or run fewer programs"
                    )
                yield daemon
            finally:
                await _end(daemon)
    finally:
        assert process.stdout is not None
        process.stdout.close()


def _spawn(flags: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start p2pd in its own session, so that Ctrl-C in a terminal does not reach it.

    On Linux the kernel kills it when this thread ends, also after a kill -9 of the process. So this must run on the
    network thread, not on a worker thread.
    """
    command = [str(Path(cli_path[0]) / "p2pd"), *(f"-{name}={value}" for name, value in flags.items() if value)]
    if sys.platform == "linux" and sys.executable:
        command = [sys.executable, "-I", "-S", launcher.__file__, str(os.getpid()), *command]
    environment = {"GOLOG_LOG_LEVEL": "error", **os.environ}
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0,
            env=environment, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(
            f"the libp2p daemon {command[0]} cannot be started ({error.strerror}); reinstall hivemind for this machine"
        ) from None


async def _end(daemon: Daemon) -> None:
    """Terminate, then kill. Returns within seconds, with the process reaped."""
    process = daemon.process
    with trio.CancelScope(shield=True):
        for end in (process.terminate, process.kill):
            if process.poll() is None:
                end()
            # Not `exited`: a cancellation also cancels the task that sets it.
            with trio.move_on_after(TERMINATE_TIMEOUT_S):
                while process.poll() is None:
                    await trio.sleep(0.005)
