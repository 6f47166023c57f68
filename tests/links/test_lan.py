"""Machines on one network find each other by real multicast."""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.namespaces import Machine, Wires, enter
from p2ptrain.network.lan import MAX_RECORDS, SERVICE, Announcement, look, record_of, runs_of
from p2ptrain.settings.ticket import parse_ticket
from tests.network.test_lan import A
from tests.swarm.processes import Swarm, assert_anchors_agree

T = TypeVar("T")
SUBNET = "192.168.77"
# The tests themselves may run in a container.
SETTINGS = {"host_maddrs": "/ip4/0.0.0.0/tcp/0", "lan": "on", "steps": 0, "sync_every": 50, "fragment_fraction": 0.02}


def _at(machine: Machine, function: Callable[[], T]) -> T:
    """Call a function in a thread on a machine."""

    def call() -> T:
        enter(machine.pid)
        return function()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


def _found(machine: Machine, directory: Path) -> list[dict[str, Any]]:
    """What `p2ptrain find --json` prints there."""
    done = subprocess.run(
        [*machine.enter, sys.executable, "-m", "p2ptrain", "find", "--json"], cwd=directory,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    runs: list[dict[str, Any]] = json.loads(done.stdout)
    assert done.returncode == (0 if runs else 1), done.stderr
    return runs


def test_a_person_types_join_twice_says_yes_once_and_both_train(net: Wires, swarm: Swarm, tmp_path: Path) -> None:
    one, other = net.machine(subnet=SUBNET), net.machine(subnet=SUBNET)
    first = swarm.start("p2ptrain join", terminal=True, enter=one.enter, settings=SETTINGS)
    swarm.until_ready(first)
    assert "no run found there; starting one" in first.output
    (run,) = swarm.until(lambda: _found(other, tmp_path))
    assert (run["run_id"], run["founder"], run["peers"]) == ("p2ptrain", first.peer_id, 1)
    (address,) = parse_ticket(run["ticket"]).addresses
    assert address.startswith(f"/ip4/{one.address}/tcp/")

    second = swarm.start("p2ptrain join", terminal=True, enter=other.enter, settings=SETTINGS)
    swarm.until(lambda: "Join it? [Y/n]: " in second.output)
    line = rf"run 'p2ptrain': model gpt-demo, 110,464 parameters, 1 peer, step [\d,]+, at {one.address}\n"
    assert re.search(line, second.output)
    second.press(b"y\n")
    swarm.until(lambda: first.rounds(by=2) and second.rounds(by=2))
    assert_anchors_agree(first, second)
    assert f"pinned by the ticket to the run that {first.peer_id} founded" in second.output

    # A peer that leaves says goodbye; the other goes on to announce the run.
    first.press(b"\x03")
    assert first.wait() == 0
    (run,) = _found(one, tmp_path)
    assert (run["founder"], run["addresses"][0].rpartition("/")[2]) == (first.peer_id, second.peer_id)


def test_little_is_kept_of_a_flood_of_announcements(net: Wires) -> None:
    liar, machine = net.machine(subnet=SUBNET), net.machine(subnet=SUBNET)
    sent, done = itertools.count(), threading.Event()
    with ThreadPoolExecutor(1) as thread:
        flood = thread.submit(_at, liar, lambda: _flood(liar.address, sent, done))
        try:
            found = _at(machine, lambda: look([machine.address]))
            while next(sent) < 10_000:
                found = _at(machine, lambda: look([machine.address]))
        finally:
            done.set()
        flood.result()
    assert 0 < len(found) <= MAX_RECORDS
    assert all(run.run_id.startswith("flood ") for run in runs_of(found))


def _flood(address: str, numbers: itertools.count[int], done: threading.Event) -> None:
    """Announce another run with each packet."""
    from zeroconf import DNSOutgoing, DNSPointer, DNSText, const  # which starts a program

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        out.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(address))
        out.bind((address, 5353))
        while not done.is_set():
            number = next(numbers)
            record = record_of(Announcement(
                run_id=f"flood {number}", founder=A, peer_id=A, addresses=(f"/ip4/{address}/tcp/1/p2p/{A}",),
            ))  # fmt: skip
            assert record is not None
            name = f"{number}.{SERVICE}"
            texts = [f"{key}={text}".encode() for key, text in record.items()]
            packet = DNSOutgoing(const._FLAGS_QR_RESPONSE | const._FLAGS_AA)
            packet.add_answer_at_time(DNSPointer(SERVICE, const._TYPE_PTR, const._CLASS_IN, 4500, name), 0)
            packet.add_answer_at_time(
                DNSText(name, const._TYPE_TXT, const._CLASS_IN, 4500, b"".join(bytes([len(t)]) + t for t in texts)), 0
            )
            out.sendto(packet.packets()[0], ("224.0.0.251", 5353))
