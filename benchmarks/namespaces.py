"""Simulated machines for tests and benchmarks: network namespaces, each connected to a switch by its own veth link.

A namespace exists as long as the process that holds it, and that process ends with this one, however it ends. No
namespace has a name, so nothing is left behind. Needs root and Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import masquerade

# A home router buffers this long before it drops packets (bufferbloat: tenths of a second are usual).
BUFFER_S = 0.3
# A bucket must hold one tick of the kernel's clock at the link's rate, and one packet.
BURST_S, MIN_BURST_BYTES = 0.004, 16 * 1024
# Addresses that libp2p considers routable: it ignores those reserved for documentation and benchmarks.
SUBNET = "5.188.7"
CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Machine:
    """One namespace with one interface.

    Attributes:
        enter: prefix of a command to run it there.
        address: its IPv4 address.
        port: name of the other end of its link, at the switch; "inside" behind a router.
        pid: process that holds the namespace.
    """

    enter: tuple[str, ...]
    address: str
    port: str
    pid: int

    def received_bytes(self) -> int:
        """Bytes that its interface has received so far."""
        return self._count("rx_bytes")

    def sent_bytes(self) -> int:
        return self._count("tx_bytes")

    def _count(self, what: str) -> int:
        for line in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines():
            name, _, counts = line.partition(":")
            if name.strip() == "eth0":
                return int(counts.split()[0 if what == "rx_bytes" else 8])
        raise OSError("the machine has no interface")


class Wires:
    """The switch and all machines. Created by `wires`."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._numbers = itertools.count(1)
        self._switch = self._namespace()
        for bridge in ("whole", "apart"):
            self._run(self._switch, "ip", "link", "add", bridge, "type", "bridge")
            self._run(self._switch, "ip", "link", "set", bridge, "up")

    def machine(self, *, mbit: float | None = None, subnet: str = SUBNET, closed: bool = False) -> Machine:
        """Add a machine to the switch; `mbit` limits its link in each direction, in Mbit/s.

        `closed`: behind a firewall that lets in only answers.
        """
        number = next(self._numbers)
        address = f"{subnet}.{number}"
        machine = Machine(self._enter(pid := self._namespace()), address, f"port{number}", pid)
        self._join(machine, self._switch, f"{address}/24", mbit)
        self._run(self._switch, "ip", "link", "set", machine.port, "master", "whole")
        # Dialling an address that does not exist takes time, as on the internet.
        self._run(pid, "ip", "route", "add", "default", "dev", "eth0")
        if closed:
            self._run(pid, sys.executable, "-S", masquerade.__file__, "eth0", "closed")
        return machine

    def add_interface(self, machine: Machine, name: str, bridge: str = "whole", mbit: float | None = None) -> str:
        """Connect a machine once more, by an interface that its routes do not use. Returns the address.

        `bridge`: "apart" for an interface that leads to no other machine. `mbit`: as for `machine`.
        """
        number = next(self._numbers)
        address, port = f"{SUBNET}.{number}", f"port{number}"
        self._run(
            machine.pid, "ip", "link", "add", name, "type", "veth", "peer", "name", port, "netns", str(self._switch)
        )
        # Each interface answers for its own address only, so that packets come back the way they went.
        self._run(machine.pid, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/conf/all/arp_ignore")
        self._run(machine.pid, "ip", "address", "add", f"{address}/24", "dev", name, "noprefixroute")
        self._run(machine.pid, "ip", "link", "set", name, "up")
        self._run(machine.pid, "ip", "route", "add", f"{SUBNET}.0/24", "dev", name, "metric", str(100 + number))
        self._run(self._switch, "ip", "link", "set", port, "up")
        self._run(self._switch, "ip", "link", "set", port, "master", bridge)
        self._limit(machine.pid, name, mbit)
        self._limit(self._switch, port, mbit)
        return address

    def behind_nat(self, *how: str, mbit: float | None = None) -> Machine:
        """Add a machine behind its own router, which has an address on the switch and does source NAT.

        `how`: words that `masquerade.py` explains.
        """
        router = self.machine(mbit=mbit)
        inside = f"192.168.{next(self._numbers)}"
        machine = Machine(self._enter(pid := self._namespace()), f"{inside}.2", "inside", pid)
        self._join(machine, router.pid, f"{inside}.2/24", None)
        self._run(router.pid, "ip", "address", "add", f"{inside}.1/24", "dev", "inside")
        self._run(pid, "ip", "route", "add", "default", "via", f"{inside}.1")
        self._run(router.pid, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        self._run(router.pid, sys.executable, "-S", masquerade.__file__, "eth0", *how)
        return machine

    def cut(self, *machines: Machine) -> None:
        """Disconnect these machines from all others without notice; they still reach each other."""
        self._plug(machines, "apart")

    def heal(self, *machines: Machine) -> None:
        self._plug(machines, "whole")

    def _plug(self, machines: tuple[Machine, ...], bridge: str) -> None:
        for machine in machines:
            self._run(self._switch, "ip", "link", "set", machine.port, "master", bridge)

    def _join(self, machine: Machine, other: int, address: str, mbit: float | None) -> None:
        """Connect a machine to another namespace."""
        self._run(
            machine.pid, "ip", "link", "add", "eth0", "type", "veth",
            "peer", "name", machine.port, "netns", str(other),
        )  # fmt: skip
        self._run(machine.pid, "ip", "address", "add", address, "dev", "eth0")
        for pid, interface in ((machine.pid, "eth0"), (other, machine.port)):
            self._run(pid, "ip", "link", "set", interface, "up")
            self._limit(pid, interface, mbit)

    def _limit(self, pid: int, interface: str, mbit: float | None) -> None:
        """Limit what leaves through an interface."""
        if mbit is not None:
            burst = max(MIN_BURST_BYTES, int(mbit * 1e6 / 8 * BURST_S))
            self._run(
                pid, "tc", "qdisc", "add", "dev", interface, "root", "tbf",
                "rate", f"{mbit}mbit", "burst", str(burst), "latency", f"{BUFFER_S * 1000:.0f}ms",
            )  # fmt: skip

    def _namespace(self) -> int:
        """Create a namespace. Returns the pid of the process that holds it until its input is closed."""
        holder = subprocess.Popen(
            ["unshare", "--net", sys.executable, "-S", "-c", "print(flush=True); input()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._stack.callback(_end, holder)
        assert holder.stdout is not None
        if not holder.stdout.readline():
            assert holder.stderr is not None
            raise OSError(holder.stderr.read().decode().strip())
        self._run(holder.pid, "ip", "link", "set", "lo", "up")
        return holder.pid

    @staticmethod
    def _enter(pid: int) -> tuple[str, ...]:
        return ("nsenter", "--target", str(pid), "--net", "--")

    def _run(self, pid: int, *command: str) -> None:
        done = subprocess.run([*self._enter(pid), *command], capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


@contextlib.contextmanager
def wires() -> Iterator[Wires]:
    """Create a switch without machines; remove all at the end. Raises OSError if namespaces are not permitted."""
    with contextlib.ExitStack() as stack:
        yield Wires(stack)


def why_not() -> str:
    """Why namespaces with shaped links and NAT do not work on this machine; empty if they do."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with wires() as trial:
            trial.machine(mbit=10)
            trial.behind_nat()
    except OSError as error:
        return f"no network namespaces here: {error}"
    return ""


def _end(holder: subprocess.Popen[bytes]) -> None:
    holder.communicate()


def enter(pid: int) -> None:
    """Move this thread, and all that it starts from now on, into a process's network namespace. Raises OSError."""
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(namespace)
