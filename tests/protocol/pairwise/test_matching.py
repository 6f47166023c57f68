"""Two peers pair by an offer and its answer, or by crossing offers; nobody has two partners."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from p2ptrain.protocol.pairwise.matching import MOST_RECENT, Matching, on_answer, on_offer, recent_partners
from p2ptrain.protocol.wire.messages import PairAnswer, PairOffer


def test_an_offer_is_accepted_by_a_willing_peer_only() -> None:
    state = Matching(number=4)
    assert on_offer(state, "b", PairOffer("", 7), willing=False) == (state, PairAnswer(7, 0, False))
    paired, reply = on_offer(state, "b", PairOffer("", 7), willing=True)
    assert (paired.partner, paired.partner_number, reply) == ("b", 7, PairAnswer(7, 4, True))
    assert on_offer(paired, "c", PairOffer("", 1), willing=True) == (paired, PairAnswer(1, 0, False))
    assert on_offer(state.offering("c"), "b", PairOffer("", 7), willing=True)[1] == PairAnswer(7, 0, False)


def test_the_last_partners_have_no_part_in_the_next_step_where_there_are_others() -> None:
    before = tuple("abcdefghij")
    assert [recent_partners(before, others) for others in (0, 1, 2)] == [frozenset()] * 3
    assert recent_partners(before, 3) == {"j"}
    assert recent_partners(before, 7) == set("hij")
    assert recent_partners(before, 1000) == set(before[-MOST_RECENT:])
    assert recent_partners((), 1000) == frozenset()


def test_crossing_offers_are_each_others_answers() -> None:
    one, reply = on_offer(Matching(3).offering("b"), "b", PairOffer("", 9), willing=True)
    assert (one.partner, one.partner_number, one.asked, reply) == ("b", 9, "", None)


def test_an_answer_counts_for_the_offer_that_is_open_only() -> None:
    open_ = Matching(3).offering("b")
    assert on_answer(open_, "b", PairAnswer(3, 8, True)) == (Matching(3, "", "b", 8), None)
    assert on_answer(open_, "b", PairAnswer(3, 0, False)) == (Matching(3), None)
    # Of another peer, or of an earlier step.
    assert on_answer(open_, "c", PairAnswer(3, 0, False)) == (open_, None)
    assert on_answer(open_, "b", PairAnswer(2, 0, False)) == (open_, None)
    # What it accepts, we gave up: it learns that.
    assert on_answer(open_, "c", PairAnswer(3, 8, True)) == (open_, PairAnswer(8, 0, False))
    assert on_answer(Matching(4), "b", PairAnswer(3, 8, True)) == (Matching(4), PairAnswer(8, 0, False))


def test_a_partner_can_leave_the_swap() -> None:
    paired = Matching(3, "", "b", 8)
    assert on_answer(paired, "b", PairAnswer(3, 0, False))[0].partner == ""
    assert paired.without("b").partner == ""
    assert paired.without("c") == paired
    assert paired.stepped() == Matching(4)


@pytest.mark.parametrize("seed", range(100))
def test_whatever_the_order_of_messages_partners_agree_in_the_end(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"p{i}" for i in range(5)]
    states = {name: Matching(number=rng.randrange(5)) for name in names}
    # Links deliver in order, each at its own pace.
    wire: dict[tuple[str, str], list[PairOffer | PairAnswer]] = defaultdict(list)
    offers = 0
    while any(wire.values()) or offers < 40:
        if any(wire.values()) and rng.random() < 0.7:
            sender, receiver = rng.choice([ends for ends, messages in wire.items() if messages])
            message = wire[sender, receiver].pop(0)
            handle = on_answer if isinstance(message, PairAnswer) else lambda *event: on_offer(*event, willing=True)
            states[receiver], reply = handle(states[receiver], sender, message)
            if reply is not None:
                wire[receiver, sender].append(reply)
        elif offers < 40:
            offers += 1
            name, other = rng.sample(names, 2)
            if rng.random() < 0.2:
                # It gives up waiting for an answer that is still under way.
                states[name] = states[name].without(states[name].asked)
            elif not states[name].asked and not states[name].partner:
                states[name] = states[name].offering(other)
                wire[name, other].append(PairOffer("", states[name].number))
    for name, state in states.items():
        if state.partner:
            other = states[state.partner]
            assert (other.partner, other.partner_number) == (name, state.number), states
