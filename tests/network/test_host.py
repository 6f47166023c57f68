"""Opening and closing the network: error messages for users, and no leftovers."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from p2ptrain.errors import ConfigError
from p2ptrain.network import daemon
from p2ptrain.network.host import open_network
from p2ptrain.network.process_lifetime import killed_with_us
from p2ptrain.settings.peer_config import NetworkConfig
from tests.network.local import config, daemons_of, is_running, keep_open, open_pair

pytestmark = pytest.mark.processes

Run = Callable[..., Any]
ANOTHER_STRANGER = "QmNnooDu7bfjPFoTZYxMNLWUQJyrVwtbZg5gBMjTezGAJN"
STRANGER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@pytest.fixture(autouse=True)
def sockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The directory for sockets, also of child processes. Its path is short; it must be empty at the end."""
    with tempfile.TemporaryDirectory(prefix="t-") as directory:
        monkeypatch.setenv("TMPDIR", directory)
        monkeypatch.setattr(tempfile, "tempdir", directory)
        before = daemons_of(os.getpid()), sockets_of_hivemind()
        yield Path(directory)
        assert (daemons_of(os.getpid()), sockets_of_hivemind()) == before


def sockets_of_hivemind() -> list[Path]:
    """Those that did not go to the directory for sockets."""
    return sorted(Path("/tmp").glob("hivemind-*.sock"))


def refusal(run: Run, settings: NetworkConfig) -> str:
    """The message of the ConfigError when a network with these settings is opened."""

    async def main() -> None:
        async with open_network(settings):
            pytest.fail("the network opened")

    with pytest.raises(ConfigError) as caught:
        run(main)
    assert list(Path(tempfile.gettempdir()).iterdir()) == []
    return str(caught.value)


@pytest.fixture
def listener() -> Iterator[int]:
    """The port of a listener on 127.0.0.1 that accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"initial_peers": ("127.0.0.1:4001",)}, ["'127.0.0.1:4001' is not a multiaddr", "expected"]),
        ({"initial_peers": ("/ip4/127.0.0.1/tcp/4001",)}, ["must be an address that ends in /p2p/"]),
        ({"initial_peers": (f"/p2p/{STRANGER}",)}, ["must be an address that ends in /p2p/"]),
        (
            {"initial_peers": ("/ip4/127.0.0.1/tcp/4001/p2p/junk",)},
            ["the id after /p2p/ is not complete: copy the whole address", "junk"],
        ),
        (
            {"initial_peers": ("/ip4/127.0.0.1/tcp/4001/p2p/QmYyQSo1c",)},
            ["QmYyQSo1c'", "the id after /p2p/ is not complete: copy the whole address"],
        ),
        ({"initial_peers": ("",)}, ["'' is not a multiaddr"]),
        ({"host_maddrs": ("0.0.0.0",)}, ["--host-maddrs '0.0.0.0' is not a multiaddr"]),
        (
            {"host_maddrs": ("/ip4/0.0.0.0",)},
            ["--host-maddrs '/ip4/0.0.0.0'", "must be an IP address and a port of /tcp"],
        ),
        ({"host_maddrs": ("/ip4/127.0.0.1/udp/0",)}, ["--host-maddrs '/", "must be an IP address and a port of /tcp"]),
        ({"host_maddrs": ("/dns4/localhost/tcp/0",)}, ["--host-maddrs '/", "must be an IP address"]),
        ({"host_maddrs": (f"/ip4/0.0.0.0/tcp/0/p2p/{STRANGER}",)}, ["--host-maddrs '/", "must be an IP address"]),
        (
            {"host_maddrs": ("/ip4/198.51.100.7/tcp/0",)},
            ["--host-maddrs '/", "198.51.100.7", "does not have that address"],
        ),
        ({"announce_maddrs": ("/ip4/1.2.3.4/tcp/0",)}, ["--announce-maddrs '/", "must have a port"]),
        ({"announce_maddrs": ("/dns4/example.org",)}, ["--announce-maddrs '/", "must have a port"]),
        ({"announce_maddrs": (f"/ip4/1.2.3.4/tcp/1/p2p/{STRANGER}",)}, ["must not contain /p2p/"]),
    ],
)
def test_addresses_that_cannot_work(run: Run, settings: dict[str, Any], parts: list[str]) -> None:
    message = refusal(run, config(**settings))
    for part in parts:
        assert part in message
    assert "\n" not in message


def test_an_initial_peer_at_which_no_program_listens(run: Run) -> None:
    maddr = f"/ip4/127.0.0.1/tcp/9/p2p/{STRANGER}"
    message = refusal(run, config(initial_peers=(maddr,)))
    assert f"{maddr} (connection refused: nothing listens on that port)" in message
    assert "firewall" in message


def test_initial_peers_that_are_something_else(run: Run, listener: int) -> None:
    async def main() -> str:
        async with open_network(config()) as other:
            wrong_id = other.maddrs[0].replace(other.peer_id, STRANGER)
            silent = f"/ip4/127.0.0.1/tcp/{listener}/p2p/{other.peer_id}"
            unknown = f"/dns4/no-such-host.invalid/tcp/4001/p2p/{ANOTHER_STRANGER}"
            with pytest.raises(ConfigError) as caught:
                async with open_network(config(initial_peers=(wrong_id, silent, unknown))):
                    pass
            message = str(caught.value)
            assert f"{wrong_id} (another peer answers there, with the id {other.peer_id})" in message
            assert f"{silent} (no answer)" in message
            assert f"{unknown} (the host name or address cannot be resolved)" in message
            assert "\n" not in message
            return message

    run(main)


def test_a_restarted_peer_listens_on_the_port_that_others_remember(run: Run, tmp_path: Path) -> None:
    settings = config(identity=str(tmp_path / "identity.key"))

    async def ports() -> list[str]:
        async with open_network(settings) as network:
            return [maddr.split("/")[4] for maddr in network.maddrs]

    (first,) = run(ports)
    assert run(ports) == [first]
    with socket.create_server(("127.0.0.1", int(first))):
        (second,) = run(ports)
    assert second != first
    (tmp_path / "identity.key.ports").write_bytes(b"\xff junk\n/ip4/127.0.0.1/tcp/99999/p2p/Q\n")
    assert len(run(ports)) == 1


def test_one_reachable_initial_peer_is_enough(run: Run) -> None:
    async def main() -> None:
        async with open_network(config()) as other:
            dead = f"/ip4/127.0.0.1/tcp/9/p2p/{STRANGER}"
            async with open_network(config(initial_peers=(dead, *other.maddrs))) as network:
                assert await network.directory.announce("run", b"here", 60.0)
                assert await other.directory.lookup("run") == {network.peer_id: b"here"}

    run(main)


def test_own_address_among_the_initial_peers_is_left_out(run: Run, tmp_path: Path) -> None:
    settings = config(identity=str(tmp_path / "peer.key"))

    async def main() -> None:
        async with open_network(settings) as network:
            maddrs = network.maddrs
        async with open_network(dataclasses.replace(settings, initial_peers=tuple(maddrs))) as network:
            assert await network.directory.announce("run", b"here", 60.0)

    run(main)


def test_port_in_use(run: Run, listener: int) -> None:
    taken = f"/ip4/127.0.0.1/tcp/{listener}"
    message = refusal(run, config(host_maddrs=("/ip4/127.0.0.1/tcp/0", taken)))
    assert f"'{taken}': Address already in use; another program uses that port" in message


def test_port_in_use_by_another_peer(run: Run) -> None:
    async def main() -> None:
        async with open_network(config()) as other:
            host = other.maddrs[0].rpartition("/p2p/")[0]
            with pytest.raises(ConfigError, match="another program uses that port"):
                async with open_network(config(host_maddrs=(host,))):
                    pass
        # Free again at once.
        async with open_network(config(host_maddrs=(host,))) as again:
            assert again.maddrs[0].startswith(host)

    run(main)


def test_identity_is_made_once_and_kept(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "peer.key"

    async def peer_id() -> str:
        async with open_network(config(identity=str(file))) as network:
            return network.peer_id

    first = run(peer_id)
    assert file.stat().st_mode & 0o077 == 0
    assert run(peer_id) == first


def test_identities_that_do_not_work(run: Run, tmp_path: Path) -> None:
    corrupt = tmp_path / "corrupt.key"
    corrupt.write_bytes(b"junk")
    assert f"identity {corrupt} is not an RSA private key" in refusal(run, config(identity=str(corrupt)))
    assert list(tmp_path.iterdir()) == [corrupt]
    missing = tmp_path / "no such directory" / "peer.key"
    assert f"the directory {missing.parent} does not exist" in refusal(run, config(identity=str(missing)))
    assert f"identity {tmp_path} cannot be read: Is a directory" in refusal(run, config(identity=str(tmp_path)))


def test_identity_in_use_on_this_machine(run: Run, tmp_path: Path) -> None:
    settings = config(identity=str(tmp_path / "peer.key"))

    async def main() -> None:
        async with open_network(settings):
            with pytest.raises(ConfigError, match=r"peer\.key is in use by another process on this machine"):
                async with open_network(settings):
                    pass

    run(main)


def test_identity_in_use_in_the_network(run: Run, tmp_path: Path) -> None:
    original, copy = tmp_path / "original.key", tmp_path / "copy.key"

    async def main() -> None:
        async with trio.open_nursery() as nursery, open_network(config()) as first:
            _, close_second = await nursery.start(keep_open, config(first, identity=str(original)))
            copy.write_bytes(original.read_bytes())
            with pytest.raises(ConfigError, match=r"copy\.key is already taken by a peer in this network"):
                async with open_network(config(first, identity=str(copy))):
                    pass
            await close_second()
            async with open_network(config(first, identity=str(copy))):
                pass

    run(main)


def test_identity_of_the_very_peer_that_is_joined_through(run: Run, tmp_path: Path) -> None:
    """The own address is skipped as an initial peer, but the peer that answers there has the same key."""
    original, copy = tmp_path / "original.key", tmp_path / "copy.key"

    async def main() -> None:
        async with open_network(config(identity=str(original))) as first:
            maddrs = tuple(first.maddrs)
            copy.write_bytes(original.read_bytes())
            with pytest.raises(ConfigError, match=r"copy\.key is already taken by a peer in this network"):
                async with open_network(config(identity=str(copy), initial_peers=maddrs)):
                    pass
        async with open_network(config(identity=str(copy), initial_peers=maddrs)):
            pass

    run(main)


def test_daemon_that_does_not_get_ready(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _fake_p2pd(monkeypatch, tmp_path, "sleep 60")
    message = refusal(run, config(startup_timeout_s=0.3))
    assert "did not start within 0.3 s" in message


def test_daemon_that_ends_at_once(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _fake_p2pd(monkeypatch, tmp_path, "echo some reason; exit 1")
    assert "did not start: some reason" in refusal(run, config())


def test_daemon_that_ignores_sigterm_is_killed(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(daemon, "TERMINATE_TIMEOUT_S", 0.2)
    _fake_p2pd(monkeypatch, tmp_path, "trap '' TERM; while true; do sleep 0.05; done")
    assert "did not start within" in refusal(run, config(startup_timeout_s=0.3))


def test_daemon_that_cannot_run(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(daemon, "cli_path", [str(tmp_path)])
    monkeypatch.setattr(sys, "executable", "")
    assert "reinstall hivemind" in refusal(run, config())


def test_start_cancelled_half_way_leaves_nothing(run: Run, sockets: Path) -> None:
    async def main(after_s: float) -> None:
        with trio.move_on_after(after_s):
            async with open_pair():
                await trio.sleep_forever()

    for after_s in (0.0, 0.05, 0.15, 0.25, 0.4, 0.6):
        run(main, after_s)
        assert list(sockets.iterdir()) == []


def test_exception_of_the_block_comes_out_as_it_is(run: Run) -> None:
    async def main() -> None:
        async with open_network(config()):
            raise LookupError("of the block")

    with pytest.raises(LookupError, match="of the block"):
        run(main)


def test_no_file_descriptors_are_left(run: Run) -> None:
    async def open_and_close() -> None:
        async with open_pair() as (first, second):
            stream = await first.transport.open_stream(second.peer_id, [])
            await stream.send_all(b"x")
            await second.transport.accept()

    def count() -> int:
        return len(os.listdir("/dev/fd"))

    run(open_and_close)
    before = count()
    run(open_and_close)
    assert count() <= before


PEER = """
import signal, sys, trio
from p2ptrain.settings.peer_config import NetworkConfig
from p2ptrain.network.host import open_network
from p2ptrain.network.thread import NetworkThread

async def main():
    try:
        async with open_network(NetworkConfig(host_maddrs=("/ip4/127.0.0.1/tcp/0",))) as network:
            print(network.maddrs, flush=True)
            await trio.sleep_forever()
    finally:
        print("closed", flush=True)

# Shells start background jobs with Ctrl-C ignored, and the tests may run in one.
signal.signal(signal.SIGINT, signal.default_int_handler)
thread = NetworkThread()
if sys.argv[1] == "forget":
    thread.start_soon(main)
    input()
else:
    thread.run(main, timeout_s=600)
"""


@pytest.fixture
def start_peer(tmp_path: Path) -> Iterator[Callable[[str], tuple[subprocess.Popen[str], int]]]:
    """Start a peer in its own process and session. Returns the process and its daemon's pid."""
    script = tmp_path / "peer.py"
    script.write_text(PEER)
    processes: list[subprocess.Popen[str]] = []

    def start(how: str) -> tuple[subprocess.Popen[str], int]:
        process = subprocess.Popen(
            [sys.executable, str(script), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            text=True, start_new_session=True,
        )  # fmt: skip
        processes.append(process)
        assert process.stdout is not None
        assert "/p2p/" in process.stdout.readline()
        (pid,) = daemons_of(process.pid)
        return process, pid

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def wait_until_gone(pid: int) -> None:
    while is_running(pid):  # the test's time limit is the deadline
        time.sleep(0.01)


def test_killed_peer_takes_its_daemon_along(start_peer: Any) -> None:
    process, pid = start_peer("wait")
    process.kill()
    process.wait()
    wait_until_gone(pid)


def test_ctrl_c_reaches_the_peer_and_not_its_daemon(start_peer: Any, sockets: Path) -> None:
    process, pid = start_peer("wait")
    assert os.getsid(pid) != os.getsid(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate()
    assert error.splitlines()[-1] == "KeyboardInterrupt"
    assert not is_running(pid)
    assert list(sockets.iterdir()) == []


def test_a_peer_that_was_not_closed_closes_itself_at_exit(start_peer: Any, sockets: Path) -> None:
    process, pid = start_peer("forget")
    output, error = process.communicate("\n")
    assert (process.returncode, output, error) == (0, "closed\n", "")
    assert not is_running(pid)
    assert list(sockets.iterdir()) == []


if sys.platform == "linux":  # the kernel of no other system kills them

    def test_a_process_to_be_killed_with_a_peer_that_is_already_gone_starts_nothing(tmp_path: Path) -> None:
        script = tmp_path / "touch.sh"
        script.write_text("#!/bin/sh\ntouch started\n")
        script.chmod(0o755)
        not_our_pid = os.getpid() + 1
        for parent, started in ((not_our_pid, False), (os.getpid(), True)):
            command = killed_with_us([str(script)])
            command[command.index(str(os.getpid()))] = str(parent)
            subprocess.run(command, cwd=tmp_path, check=True)
            assert (tmp_path / "started").exists() is started

    def test_a_process_is_killed_with_the_peer(tmp_path: Path) -> None:
        # p2pd also ends when its last client is gone, but not during its start.
        script = tmp_path / "peer.py"
        script.write_text("""
import subprocess
from p2ptrain.network.process_lifetime import killed_with_us
command = killed_with_us(["/bin/sh", "-c", "echo started; sleep 60"])
child = subprocess.Popen(command, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
""")
        with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            pid = int(process.stdout.readline())
            assert is_running(pid)
            process.kill()
        wait_until_gone(pid)


def test_importing_hivemind_changes_nothing_for_the_user() -> None:
    check = """
import logging, multiprocessing, signal, sys
import p2ptrain.network.host
assert logging.getLevelName(logging.WARNING) == "WARNING"
assert logging.getLogger().handlers == [] and logging.getLogger("hivemind").handlers == []
assert multiprocessing.get_start_method(allow_none=True) is None
multiprocessing.set_start_method("spawn")
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
assert "scipy.optimize" not in sys.modules
from hivemind.averaging.load_balancing import scipy
assert scipy.optimize.linprog and sys.modules["scipy.optimize"] is scipy.optimize
"""
    found = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def _fake_p2pd(monkeypatch: pytest.MonkeyPatch, directory: Path, shell: str) -> None:
    script = directory / "p2pd"
    script.write_text(f"#!/bin/sh\n{shell}\n")
    script.chmod(0o755)
    monkeypatch.setattr(daemon, "cli_path", [str(directory)])
