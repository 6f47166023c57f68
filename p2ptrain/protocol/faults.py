"""What a simulation lets go wrong inside a peer, where no network could do it. Real peers have none of it."""

from __future__ import annotations

from typing import Protocol


class Faults(Protocol):
    """Asked by a node; answers may be random."""

    def loses_fragment(self) -> bool:
        """Whether a fragment that arrives is lost."""
        ...

    def loses_gradient(self) -> bool:
        """Whether this peer's outer gradient is lost (DiLoCo, figure 8); asked once an interval."""
        ...


class NoFaults:
    """A real peer's."""

    def loses_fragment(self) -> bool:
        return False

    def loses_gradient(self) -> bool:
        return False
