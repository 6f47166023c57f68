"""Decides which peers pair, by offers and answers between peers whose outer step is due. Pure.

Two peers pair when one accepts the other's offer, or when their offers cross. A peer makes one offer at a time, and
accepts none while it waits for the answer, so that it never has two partners.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from p2ptrain.protocol.wire.messages import PairAnswer, PairOffer
from p2ptrain.protocol.wire.transport import PeerId

# A peer does not pair again with this many of its last partners (guess).
MOST_RECENT = 8


def recent_partners(before: Sequence[PeerId], others: int) -> frozenset[PeerId]:
    """The last partners, with which a peer does not pair again: fewer than half of the `others`.

    So in a large swarm, a peer that always sends the first offer to everybody gets every ninth step of each, not all.
    """
    most = min(MOST_RECENT, (others - 1) // 2)
    return frozenset(before[-most:] if most > 0 else ())


@dataclass(frozen=True, slots=True)
class Matching:
    """The state of one peer.

    Attributes:
        number: the number of its next or current step.
        asked: the peer that has its offer; "" for none.
        partner: the partner of this step; "" for none yet.
        partner_number: the number of the partner's step.
    """

    number: int = 0
    asked: PeerId = ""
    partner: PeerId = ""
    partner_number: int = 0

    def offering(self, peer_id: PeerId) -> Matching:
        """After an offer was sent."""
        return dataclasses.replace(self, asked=peer_id)

    def without(self, peer_id: PeerId) -> Matching:
        """After a peer was lost, did not answer in time, or declined."""
        return dataclasses.replace(
            self,
            asked="" if self.asked == peer_id else self.asked,
            partner="" if self.partner == peer_id else self.partner,
        )

    def stepped(self) -> Matching:
        """After the step: the next one has no partner yet."""
        return Matching(self.number + 1)

    def _with(self, partner: PeerId, number: int) -> Matching:
        return Matching(self.number, "", partner, number)


def on_offer(state: Matching, sender: PeerId, offer: PairOffer, *, willing: bool) -> tuple[Matching, PairAnswer | None]:
    """Take an offer; returns the new state and the answer to send.

    Args:
        willing: whether our step is due, or nearly, and we may pair with this peer.
    """
    if sender == state.asked:
        # The offers crossed: each is the answer to the other.
        return state._with(sender, offer.number), None
    if sender == state.partner:
        # It has given up the swap that we agreed on.
        return state.without(sender), PairAnswer(offer.number, 0, False)
    if willing and not state.asked and not state.partner:
        return state._with(sender, offer.number), PairAnswer(offer.number, state.number, True)
    return state, PairAnswer(offer.number, 0, False)


def on_answer(state: Matching, sender: PeerId, answer: PairAnswer) -> tuple[Matching, PairAnswer | None]:
    """Take an answer to our offer, or the end of a swap; returns the new state and the answer to send."""
    ours = answer.offer == state.number
    if not answer.accepted:
        return (state.without(sender) if ours and sender in (state.asked, state.partner) else state), None
    if ours and sender == state.asked:
        return state._with(sender, answer.number), None
    if ours and sender == state.partner:
        return state, None
    # It accepts an offer that we have given up.
    return state, PairAnswer(answer.number, 0, False)
