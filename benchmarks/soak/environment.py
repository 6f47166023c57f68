"""Where the processes of a soak run: each on a machine of its own, which can be cut off, or all on loopback."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.namespaces import Machine, Wires, wires
from p2ptrain.demo.orchestrator import LOOPBACK


@dataclass(frozen=True)
class Place:
    """Where one process runs: what is put before its command, and the address that it listens on."""

    enter: tuple[str, ...] = ()
    host_maddrs: str = LOOPBACK


class Ground:
    """Places for the peers, and one for their bootstrap node, which is never cut off. Made by `prepare_ground`."""

    def __init__(self, peers: int, net: Wires | None) -> None:
        self._net = net
        self._machines = [net.machine() for _ in range(peers)] if net else []
        self.peers = [_on(machine) for machine in self._machines] or [Place()] * peers
        self.bootstrap = _on(net.machine()) if net else Place()

    def cut(self, peers: Iterable[int]) -> None:
        """Part these from all others, without a word to anybody. They still reach each other, and whom else is cut."""
        assert self._net is not None, "on loopback nobody can be cut off"
        self._net.cut(*(self._machines[peer] for peer in peers))

    def heal(self, peers: Iterable[int]) -> None:
        assert self._net is not None, "on loopback nobody can be cut off"
        self._net.heal(*(self._machines[peer] for peer in peers))


@contextmanager
def prepare_ground(peers: int, *, machines: bool) -> Iterator[Ground]:
    """Places that last as long as the context, on machines of their own or not. Raises OSError where there are none."""
    if machines:
        with wires() as net:
            yield Ground(peers, net)
    else:
        yield Ground(peers, None)


def _on(machine: Machine) -> Place:
    return Place(machine.enter, f"/ip4/{machine.address}/tcp/0")
