"""The linked peers of our lineage, and where in the run they are."""

from __future__ import annotations

from collections.abc import Sequence

from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.rounds.context import RoundContext


def linked_others(context: RoundContext) -> list[Link]:
    """The links to the live peers of our lineage that hold its state."""
    links = (context.links.get(peer_id) for peer_id in context.host.trainers())
    return [link for link in links if link is not None]


def others_step(others: Sequence[Link]) -> int:
    """The step that more than a third of these peers have reached; 0 without any. So a third of liars cannot raise it.

    Steps are claims. New members, which are at 0, lower it only if they are two thirds.
    """
    steps = sorted(link.beat.step for link in others if link.beat is not None)
    return steps[(2 * len(steps) - 1) // 3] if steps else 0
