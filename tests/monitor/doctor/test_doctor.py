"""`p2ptrain doctor` with real daemons, and with a wrong clock."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.network import dht
from p2ptrain.network.probe import probe
from p2ptrain.network.thread import NetworkThread
from p2ptrain.peer.session import NetworkSession
from p2ptrain.settings.peer_config import NetworkConfig

STRANGER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
LOOPBACK = NetworkConfig(host_maddrs=("/ip4/127.0.0.1/tcp/0",))


def _doctor(*arguments: str, directory: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "p2ptrain", "doctor", "--threads", "1", "--device", "cpu", *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_a_machine_that_would_work(tmp_path: Path) -> None:
    with NetworkSession(LOOPBACK) as other:
        status, text = _doctor(
            "--initial-peers", other.network.maddrs[0], "--host-maddrs", "/ip4/127.0.0.1/tcp/0", directory=tmp_path
        )
    assert status == 0
    lines = text.splitlines()
    assert any(line.startswith("✓ initial peer") and f"…{other.network.peer_id[-6:]}" in line for line in lines)
    assert any(line.startswith("✓ clock") and "within 0." in line and " of 1 peer" in line for line in lines)
    assert any(line.startswith("! run") and "join would start it" in line for line in lines)
    assert lines[-1].startswith("a peer works here: ")
    assert list(tmp_path.iterdir()) == []


def test_a_machine_that_would_not(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, text = _doctor(
            "--initial-peers", f"/ip4/127.0.0.1/tcp/9/p2p/{STRANGER}", "--host-maddrs", f"/ip4/127.0.0.1/tcp/{port}",
            "--json", directory=tmp_path,
        )  # fmt: skip
    report: dict[str, Any] = json.loads(text)
    assert (status, report["works"]) == (1, False)
    failed = {check["check"]: check for check in report["checks"] if check["result"] == "failed"}
    assert set(failed) == {"port", "initial peer"}
    assert "another program uses that port" in failed["port"]["remedy"]
    assert "nothing listens on that port" in failed["initial peer"]["found"]


def test_a_clock_that_is_off_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with NetworkSession(LOOPBACK) as other:
        network = NetworkConfig(host_maddrs=LOOPBACK.host_maddrs, initial_peers=tuple(other.network.maddrs))
        real = dht.hivemind.get_dht_time
        monkeypatch.setattr(dht.hivemind, "get_dht_time", lambda: real() + 40.0)
        thread = NetworkThread()
        found = thread.run(lambda: probe(network, mapping_s=0.0), timeout_s=60)
        assert thread.stop(10)
    (peer,) = found.peers
    assert peer.clock_ahead_s == pytest.approx(40, abs=5)
    assert peer.answered_s is not None
    assert all("/127.0.0.1/" in maddr for maddr in found.maddrs)
