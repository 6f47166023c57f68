"""One round as its peers report it. The round protocol guarantees that their states are equal."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass
class SkipView:
    """A round that some peers skipped: the first report at `t`, and the reasons by peer."""

    t: float
    reasons: dict[Hashable, str] = field(default_factory=dict)


@dataclass
class RoundView:
    """A round that was committed, or made by one peer alone (`status` "solo"); first reported at `t`.

    Attributes:
        contributors: ids of the peers whose outer gradients are in the mean.
        wall_s: duration at the peer that reported first.
        states: hash of the state by peer, for all peers that applied it.
        late: peers that applied it without contributing.
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
        """Note that a peer has applied this round."""
        self.states[peer] = state_sha256
        if late:
            self.late.add(peer)
