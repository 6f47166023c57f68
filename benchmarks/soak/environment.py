"""Where the processes of a soak run: each on its own simulated machine, which can be cut off, or all on loopback."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.namespaces import Machine, Wires, wires
from p2ptrain.demo.orchestrator import LOOPBACK


@dataclass(frozen=True)
class Place:
    """Where one process runs: the prefix of its command, and the address that it listens on."""

    enter: tuple[str, ...] = ()
    host_maddrs: str = LOOPBACK


class Environment:
    """Places for the peers and for their bootstrap node, which is never cut off. Made by `prepare_environment`."""

    def __init__(self, peers: int, net: Wires | None) -> None:
        self._net = net
        self._machines = [net.machine() for _ in range(peers)] if net else []
        self.peers = [_on(machine) for machine in self._machines] or [Place()] * peers
        self.bootstrap = _on(net.machine()) if net else Place()

    def cut(self, peers: Iterable[int]) -> None:
        """Disconnect these peers from all others without notice. Peers that are cut off reach each other."""
        assert self._net is not None, "on loopback no peer can be cut off"
        self._net.cut(*(self._machines[peer] for peer in peers))

    def heal(self, peers: Iterable[int]) -> None:
        assert self._net is not None, "on loopback no peer can be cut off"
        self._net.heal(*(self._machines[peer] for peer in peers))


@contextmanager
def prepare_environment(peers: int, *, machines: bool) -> Iterator[Environment]:
    """Create places for the duration of the block, on simulated machines or not. Raises OSError if they fail."""
    if machines:
        with wires() as net:
            yield Environment(peers, net)
    else:
        yield Environment(peers, None)


def _on(machine: Machine) -> Place:
    return Place(machine.enter, f"/ip4/{machine.address}/tcp/0")
