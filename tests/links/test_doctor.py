"""Whether others can dial this machine is tried for real: for one on the internet, and one behind a router."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.namespaces import Machine, Wires
from tests.swarm.processes import Swarm


def _line(check: str, machine: Machine, addresses: Path, directory: Path, listening: str) -> str:
    """The doctor's line about one check, as a person there reads it."""
    command = [sys.executable, "-m", "p2ptrain", "doctor", "--device", "cpu", "--threads", "1"]
    flags = ["--initial-peers", str(addresses), "--host-maddrs", listening]
    done = subprocess.run(
        [*machine.enter, *command, *flags], cwd=directory,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (line for line in done.stdout.splitlines() if re.match(f". {check}", line))
    return line


@pytest.mark.long  # half a minute, and root
def test_each_interface_is_measured_and_the_one_that_is_used_is_named(net: Wires, swarm: Swarm, tmp_path: Path) -> None:
    bootstrap_machine, machine = net.machine(), net.machine(mbit=2.5)
    second, silent = net.add_interface(machine, "eth1", mbit=100), net.add_interface(machine, "eth2", "apart")
    bootstrap = swarm.start(
        "p2ptrain bootstrap", enter=bootstrap_machine.enter,
        settings={"host_maddrs": f"/ip4/{bootstrap_machine.address}/tcp/4001"},
    )  # fmt: skip
    swarm.until(lambda: bootstrap.addresses.exists())
    line = _line("interfaces", machine, bootstrap.addresses, tmp_path, "/ip4/0.0.0.0/tcp/0")
    slow = re.search(rf"eth0 \({machine.address}.*?\) [\d.]+ ms and ([\d.]+) Mbit/s \(used\)", line)
    fast = re.search(rf"eth1 \({second}.*?\) [\d.]+ ms and ([\d.]+) Mbit/s(,|;)", line)
    assert slow, line
    assert fast, line
    # A busy machine measures less, and no machine more than the link carries.
    assert float(slow[1]) <= 5
    assert float(fast[1]) <= 110
    assert line.startswith("!") == (float(fast[1]) >= 2 * float(slow[1]))
    # Packets go through the interface that is asked about, and not where the routes lead.
    assert re.search(rf"; no answer through eth2 \({silent}.*?\)$", line), line


@pytest.mark.long  # an answer that dialling back failed comes after 15 s
def test_a_peer_is_asked_to_dial_back(net: Wires, swarm: Swarm, tmp_path: Path) -> None:
    bootstrap_machine, open_machine, private_machine = net.machine(), net.machine(), net.behind_nat()
    bootstrap = swarm.start(
        "p2ptrain bootstrap", enter=bootstrap_machine.enter,
        settings={"host_maddrs": f"/ip4/{bootstrap_machine.address}/tcp/4001"},
    )  # fmt: skip
    swarm.until(lambda: bootstrap.addresses.exists())
    line = _line("reachable", open_machine, bootstrap.addresses, tmp_path, f"/ip4/{open_machine.address}/tcp/4001")
    assert line.startswith("✓ reachable")
    assert line.endswith(f" dialled back to /ip4/{open_machine.address}/tcp/4001")
    line = _line("reachable", private_machine, bootstrap.addresses, tmp_path, "/ip4/0.0.0.0/tcp/4001")
    assert line.startswith("! reachable")
    assert "could not dial back" in line
