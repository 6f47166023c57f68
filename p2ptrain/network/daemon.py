"""The libp2p daemon (p2pd), which hivemind brings along: a process that lives exactly as long as its owner.

It is started here and not by `hivemind.P2P.create`, which leaves processes and sockets behind when a start fails, lets
a terminal's Ctrl-C kill the daemon before we have said goodbye, and takes over the process's SIGCHLD. Its sockets are
in a directory of our own, so that no other user of the machine can drive it, and that removing is enough.
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

from p2ptrain.errors import ConfigError
from p2ptrain.network import launcher
from p2ptrain.network._hivemind import cli_path
from p2ptrain.network.background import open_background
from p2ptrain.network.diagnosis import explain_start_failure, explain_start_timeout
from p2ptrain.settings.peer_config import NetworkConfig

logger = logging.getLogger(__name__)

# It goes within milliseconds; a UPnP router that is slow to drop its port mapping can hold it up.
TERMINATE_TIMEOUT_S = 2.0
COMMON_FLAGS = {
    "tls": "1",
    # Were we to vanish before our first connection, it would end by itself.
    "idleTimeout": "30s",
    # Requests and responses of the DHT: hivemind's own limit.
    "persistentConnMaxMsgSize": str(4 * 1024 * 1024),
}


@dataclass
class Daemon:
    """A running p2pd.

    Attributes:
        process: the child process.
        control_path: the unix socket that it takes requests on.
        exited: set once it has ended, for whatever reason.
        last_lines: the end of what it printed.
    """

    process: subprocess.Popen[bytes]
    control_path: str
    exited: trio.Event = field(default_factory=trio.Event)
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    _ready: trio.Event = field(default_factory=trio.Event)

    async def _watch(self) -> None:
        """Log and keep what it prints, and note its end."""
        async with trio.open_nursery() as nursery:
            printed_all = trio.Event()
            nursery.start_soon(self._read_output, printed_all)
            # Popen.wait in a thread: unlike SIGCHLD or a pidfd it works on every system, and in any thread.
            await trio.to_thread.run_sync(self.process.wait, abandon_on_cancel=True)
            # A child that the user's program forked at the wrong moment may keep the pipe open.
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
                    text = line.decode(errors="replace")
                    logger.debug("p2pd: %s", text)
                    self.last_lines.append(text)
                    if text.startswith("Peer ID:"):
                        self._ready.set()
        printed_all.set()


def peer_flags(config: NetworkConfig, identity_path: Path) -> dict[str, str]:
    """p2pd's flags for a full peer. It dials nobody by itself: see `bootstrap`."""
    return {
        "id": str(identity_path),
        "hostAddrs": ",".join(config.host_maddrs),
        "announceAddrs": ",".join(config.announce_maddrs),
        # libp2p's own DHT, in which daemons look up each other's addresses; "server" works without internet.
        "dhtServer": "1",
        # Behind NAT: learn our public address, ask the router for a port, and dial and be dialled over relays.
        "autonat": "1",
        "natPortMap": "1",
        "relay": "1",
        "connManager": "1",
        # See relay.py.
        "relayService": "0",
    }


def probe_flags() -> dict[str, str]:
    """p2pd's flags for a look around: no identity of its own, nobody can dial it."""
    return {"noListenAddrs": "1", "dhtClient": "1"}


@contextlib.asynccontextmanager
async def run_daemon(flags: dict[str, str], control_path: Path, timeout_s: float) -> AsyncIterator[Daemon]:
    """Start p2pd, and end it on the way out; when entering fails or is cancelled, nothing is left.

    Args:
        flags: `peer_flags` or `probe_flags`.
        control_path: where its control socket is made; that of one that was killed is replaced.
        timeout_s: how long the start may take.

    Raises:
        ConfigError: it did not start; the message says why and what to do.
    """
    control_path.unlink(missing_ok=True)  # one that was killed leaves its socket behind
    process = _spawn({**flags, **COMMON_FLAGS, "listen": f"/unix{control_path}"})
    daemon = Daemon(process, str(control_path))
    try:
        async with open_background() as background:
            background.start_soon(daemon._watch)
            try:
                with trio.move_on_after(timeout_s):
                    await daemon._ready.wait()
                if daemon.exited.is_set():
                    raise explain_start_failure(daemon.last_lines)
                if not daemon._ready.is_set():
                    raise explain_start_timeout(timeout_s)
                yield daemon
            finally:
                await _end(daemon)
    finally:
        assert process.stdout is not None
        process.stdout.close()


def _spawn(flags: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start p2pd in a session of its own, so that a terminal's Ctrl-C does not reach it.

    On Linux it is killed when this thread ends, which covers a kill -9 of the process. It must be the network thread
    itself, not a worker thread, that does this.
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
    """Terminate, then kill. Returns within seconds whatever happens, with the process reaped."""
    process = daemon.process
    with trio.CancelScope(shield=True):
        for end in (process.terminate, process.kill):
            if process.poll() is None:
                end()
            # Not `exited`: when we are cancelled, so is the task that sets it.
            with trio.move_on_after(TERMINATE_TIMEOUT_S):
                while process.poll() is None:
                    await trio.sleep(0.005)
