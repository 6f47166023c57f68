"""Faults that a simulation injects inside a peer."""

from __future__ import annotations

from typing import Protocol


class Faults(Protocol):
    """Queried by a node; answers may be random."""

    def loses_fragment(self) -> bool:
        """Whether a received fragment is dropped."""
        ...

    def loses_gradient(self) -> bool:
        """Whether this peer's outer gradient is dropped (DiLoCo, figure 8); queried once per interval."""
        ...


class NoFaults:
    """Injects nothing."""

    def loses_fragment(self) -> bool:
        return False

    def loses_gradient(self) -> bool:
        return False
