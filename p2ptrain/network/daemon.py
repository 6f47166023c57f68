"""The libp2p daemon (p2pd) that comes with hivemind: its process, and requests to it.

It is a child process that ends with its owner. `hivemind.P2P.create` is not used: it leaves processes and sockets
behind when a start fails, lets Ctrl-C in a terminal kill the daemon before we have left the run, and takes over
SIGCHLD. A peer has a private directory for its sockets and the key of a temporary identity, so other users of the
machine cannot control its daemon.

p2pd takes requests on a unix socket, as length-prefixed protobuf: a client connects, sends a request and gets a
response. After a STREAM_OPEN the same socket carries the stream. For an incoming stream, p2pd connects to our socket,
names the peer, and the bytes follow. In both cases a `SocketStream` reads one message and then raw bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import re
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from p2ptrain.errors import ConfigError, PeerLostError, TransientError
from p2ptrain.network._hivemind import Multiaddr, PeerID, cli_path, p2pd_pb2
from p2ptrain.network.addresses import dialable, hints, peer_id_bytes
from p2ptrain.network.process_lifetime import killed_with_us
from p2ptrain.network.socket_stream import SocketStream, send_message
from p2ptrain.network.thread import from_asyncio, open_background
from p2ptrain.protocol.membership.reachability import is_direct_public, relay_of
from p2ptrain.protocol.wire.text import escaped
from p2ptrain.settings.peer_config import NetworkConfig

logger = logging.getLogger(__name__)

# p2pd normally ends within milliseconds, and later if a UPnP router is slow to drop its port mapping.
TERMINATE_TIMEOUT_S = 2.0
# It takes 30 to 170 MiB (measured).
MOST_BYTES = 2**30
# p2pd answers control requests within a millisecond, except on a machine under heavy load.
CONTROL_TIMEOUT_S = 10.0
# libp2p gives each address 5 s; through a relay it takes longer.
DIAL_TIMEOUT_S = 10.0
# p2pd's messages about a failed dial, and their meaning; the first match counts.
_DIAL_REASONS = (
    (r"peer id mismatch.* key matches (\w+)", r"another peer answers there, with the id \1"),
    (r"connection refused", "connection refused: nothing listens on that port"),
    (r"no such host|failed to resolve|no (good )?addresses", "the host name or address cannot be resolved"),
    (r"unreachable|no route", "there is no route to that address"),
    (r"deadline exceeded|timeout|timed out", "no answer"),
    (r"failed to negotiate", "the program that answers there is not a libp2p peer"),
)
COMMON_FLAGS = {
    "tls": "1",
    # Ends the daemon if we vanish before our first connection.
    "idleTimeout": "30s",
    # For DHT requests and responses; hivemind's own limit.
    "persistentConnMaxMsgSize": str(4 * 1024 * 1024),
}


@dataclass
class Daemon:
    """A running p2pd: its process, its socket for requests, whether it has ended, and its last lines of output.

    `has_outgrown`: whether `end_if_outgrown` has killed it.
    """

    process: subprocess.Popen[bytes]
    control_path: str
    exited: trio.Event = field(default_factory=trio.Event)
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    has_outgrown: bool = False
    _ready: trio.Event = field(default_factory=trio.Event)

    def end_if_outgrown(self) -> None:
        """Kill it above MOST_BYTES, on Linux: any stranger may store records in libp2p's DHT, which bounds none."""
        try:
            pages = Path(f"/proc/{self.process.pid}/statm").read_text(encoding="ascii").split()[1]
        except OSError:
            return
        if int(pages) * os.sysconf("SC_PAGE_SIZE") > MOST_BYTES:
            logger.warning("the libp2p daemon (p2pd) has more than %d MiB; replacing it", MOST_BYTES >> 20)
            self.has_outgrown = True
            self.process.kill()

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
    """p2pd's flags for a full peer. Initial peers are not among them: see `dial_initial_peers`."""
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
    environment = {"GOLOG_LOG_LEVEL": "error", **os.environ}
    try:
        process = subprocess.Popen(
            killed_with_us(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            env=environment,
            start_new_session=True,
        )
        # If memory runs out, Linux kills it before its peer, which replaces it.
        with contextlib.suppress(OSError):
            Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000", encoding="ascii")
        return process
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


def identify(stream: SocketStream, info: Any) -> None:
    """Set a stream's remote and relay from p2pd's StreamInfo."""
    stream.remote, stream.relay = PeerID(info.peer).to_base58(), relay_of(maddr_text(info.addr))


async def ask(control_path: str, request: Any, timeout_s: float) -> Any:
    """Send a `p2pd_pb2.Request` on a new connection, and return the `p2pd_pb2.Response`.

    Raises PeerLostError if p2pd is gone, reports a failure, or does not answer in time.
    """
    response, socket = await _ask(control_path, request, timeout_s)
    socket.fail("done")
    return response


async def _ask(
    control_path: str, request: Any, timeout_s: float, among: set[SocketStream] | None = None
) -> tuple[Any, SocketStream]:
    """As `ask`; also returns the socket, which carries the stream after a STREAM_OPEN. The caller closes it."""
    loop = asyncio.get_running_loop()
    with trio.move_on_after(timeout_s):
        try:
            connecting = loop.create_unix_connection(lambda: SocketStream(among=among), control_path)  # type: ignore[type-var]
            _, socket = await from_asyncio(connecting)
        except OSError as error:
            raise PeerLostError(f"the libp2p daemon does not answer: {error}") from None
        try:
            await send_message(socket, request)
            response = p2pd_pb2.Response.FromString(await socket.first_message())
            if response.type == p2pd_pb2.Response.ERROR:
                raise PeerLostError(escaped(response.error.msg))
        except BaseException:
            socket.fail("the request failed")
            raise
        return response, socket
    raise PeerLostError(f"timeout: no answer within {timeout_s:g} s")


async def open_stream(
    control_path: str, peer_id: str, protocol: str, timeout_s: float, *, among: set[SocketStream] | None = None
) -> SocketStream:
    """Open a stream to a peer that p2pd is connected to or has an address of. The caller closes it.

    `among`: as for `SocketStream`. Raises PeerLostError if the peer cannot be reached in time, or does not speak the
    protocol.
    """
    opening = p2pd_pb2.StreamOpenRequest(peer=peer_id_bytes(peer_id), proto=[protocol], timeout=math.ceil(timeout_s))
    request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=opening)
    response, stream = await _ask(control_path, request, timeout_s, among)
    identify(stream, response.streamInfo)
    return stream


async def connections(control_path: str, timeout_s: float) -> list[tuple[str, str]]:
    """All connections of p2pd: peer ids, and the multiaddrs of the other ends. Raises PeerLostError.

    The multiaddr is empty if hivemind's parser does not know its type.
    """
    response = await ask(control_path, p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS), timeout_s)
    return [(PeerID(info.id).to_base58(), maddr_text(info.addrs[0])) for info in response.peers]


async def public_peers(control_path: str, timeout_s: float) -> dict[str, str]:
    """The peers that p2pd is connected to at a public address, with that address. Raises PeerLostError."""
    return {
        peer_id: maddr
        for peer_id, maddr in await connections(control_path, timeout_s)
        if maddr and is_direct_public(maddr)
    }


async def own_maddrs(control_path: str, peer_id: str, relayed: Sequence[Multiaddr] = ()) -> list[str]:
    """The daemon's own and relayed addresses, loopback last. Raises PeerLostError."""
    response = await ask(control_path, p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY), CONTROL_TIMEOUT_S)
    found = []
    for address in response.identify.addrs:
        with contextlib.suppress(Exception):  # an address type that hivemind's parser does not know
            found.append(Multiaddr(address))
    return dialable([*found, *relayed], peer_id)


async def dial(control_path: str, peer_id: str, maddrs: list[str], timeout_s: float) -> None:
    """Have p2pd connect to a peer unless it is connected. Raises PeerLostError if the peer is not reached in time.

    Malformed addresses in `maddrs` are ignored. If there are none, p2pd asks libp2p's own DHT for addresses.
    """
    connecting = p2pd_pb2.ConnectRequest(
        peer=peer_id_bytes(peer_id), addrs=hints(maddrs, peer_id), timeout=math.ceil(timeout_s)
    )
    await ask(control_path, p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=connecting), timeout_s)


def explain_dial(message: str) -> str:
    """Translate p2pd's message about a failed dial into a few words."""
    for pattern, reason in _DIAL_REASONS:
        if match := re.search(pattern, message):
            return match.expand(reason)
    return message.strip().rpartition("\n")[2]


def maddr_text(maddr: bytes) -> str:
    """A multiaddr of p2pd as text; empty if hivemind's parser does not know its type."""
    with contextlib.suppress(Exception):  # it raises many types
        return str(Multiaddr(maddr))
    return ""


class Connections:
    """Remembers the connections of p2pd for a while, because listing them takes half a millisecond."""

    def __init__(self, control_path: str, timeout_s: float) -> None:
        self._control_path = control_path
        self._timeout_s = timeout_s
        self._listed_s = -math.inf
        self._found: list[tuple[str, str]] = []
        self._lock = trio.Lock()

    async def listed(self, most_s: float) -> list[tuple[str, str]]:
        """As `connections`, at most `most_s` seconds ago. Raises PeerLostError."""
        asked_s = trio.current_time()
        async with self._lock:
            if asked_s - self._listed_s > most_s:
                began_s = trio.current_time()
                self._found = await connections(self._control_path, self._timeout_s)
                self._listed_s = began_s
            return self._found
