"""One round as the peers tell of it. The promise of the round protocol is that their states are equal."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass
class SkipView:
    """A round that some peers skipped, the first of them at `t`: the reasons, by peer."""

    t: float
    reasons: dict[Hashable, str] = field(default_factory=dict)


@dataclass
class RoundView:
    """A round that was committed, or taken by one peer alone (`status` "solo"), the first to tell of it at `t`.

    Attributes:
        contributors: ids of those whose outer gradients are in the mean.
        wall_s: how long it took the first to tell.
        states: the hash of its state by peer, of all that landed it.
        late: peers that landed it without having contributed.
    """

    lineage: str
    round: int
    status: str
    t: float
    contributors: tuple[str, ...]
    wall_s: float = 0.0
    states: dict[Hashable, str] = field(default_factory=dict)
    late: set[Hashable] = field(default_factory=set)

    @property
    def agreed(self) -> bool:
        return len(set(self.states.values())) <= 1

    def land(self, peer: Hashable, state_sha256: str, *, late: bool) -> None:
        """Note that a peer stands on it."""
        self.states[peer] = state_sha256
        if late:
            self.late.add(peer)
