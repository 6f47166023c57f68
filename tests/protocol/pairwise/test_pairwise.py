"""Outer steps between random pairs, in whole swarms: no quorum, no barrier, and one exact round at the end."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import trio

from p2ptrain.algorithms.codec import codec
from p2ptrain.algorithms.pairwise import sample_blocks
from p2ptrain.errors import ConfigError, WireError
from p2ptrain.memory_network import PacketFault
from p2ptrain.monitor.estimate import PAIR_ROUND_TRIPS
from p2ptrain.protocol.exchange.types import Snapshot
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.links.outbox import Traffic
from p2ptrain.protocol.pairwise.joining import CHUNK_TIMEOUT_S, MEET_S
from p2ptrain.protocol.pairwise.matching import Matching
from p2ptrain.protocol.pairwise.pairwise import PAUSE_ROUND_TRIPS, Pairwise
from p2ptrain.protocol.pairwise.swap import PartnerWeights
from p2ptrain.protocol.rounds.deciding.grid import Grid
from p2ptrain.protocol.state_sync.checkpoint import Restored
from p2ptrain.protocol.wire.messages import KIND_OF, KINDS, Answer, Attempt, Call, PairOffer, PairWeights, Request
from p2ptrain.settings.config import RunConfig
from tests.protocol.swarm import Swarm, TestPeer, run_virtual, swarm

RUN = RunConfig(
    run_id="test", averaging="pairwise", sync_every=20, fragment_fraction=0.0, total_steps=0, outer_optimizer="sgdm",
    outer_lr=0.7, outer_momentum=0.5,
)  # fmt: skip
INT8 = codec("int8")
BLOCKS = 2100


def pairs(peer: TestPeer, *statuses: str) -> list[dict[str, Any]]:
    return [e for e in peer.events if e["event"] == "pair" and (not statuses or e["status"] in statuses)]


def pairwise_of(peer: TestPeer) -> Pairwise:
    assert peer.current.pairwise is not None
    return peer.current.pairwise


def grow(members: Swarm, count: int) -> list[TestPeer]:
    return [members.start(f"p{i}", founder=i == 0) for i in range(count)]


def weights(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((BLOCKS, 64)).astype(np.float32)


def messages_of(values: np.ndarray) -> list[tuple[PairWeights, bytes]]:
    chunks = [
        (PairWeights(0, start), INT8.encode(values[start:stop])) for start, stop in Grid(0, BLOCKS).bounds(0, BLOCKS)
    ]
    return [*chunks, (PairWeights(0, BLOCKS), INT8.encode(values[sample_blocks(BLOCKS)]))]


def test_a_partners_weights_are_taken_in_order_and_checked() -> None:
    theirs, good = PartnerWeights(("b", 0), INT8, BLOCKS, 0.0), messages_of(weights(1))
    for bad in (
        good[1],
        (good[0][0], good[0][1][:-1]),
        (good[0][0], b"\xff" * len(good[0][1])),
        (good[0][0], b""),
    ):
        with pytest.raises(WireError):
            theirs.add(*bad, 1.0)
    for message, payload in good:
        assert not theirs.complete.is_set()
        theirs.add(message, payload, 2.0)
    assert (theirs.complete.is_set(), theirs.heard_s) == (True, 2.0)
    with pytest.raises(WireError, match="beyond the last chunk"):
        theirs.add(*good[0], 1.0)
    assert theirs.distance(weights(1)) < 0.01 * np.linalg.norm(weights(1))
    huge = PartnerWeights(("b", 0), INT8, BLOCKS, 0.0)
    for message, payload in [*good[:-1], (good[-1][0], INT8.encode(1e20 * weights(1)[: len(sample_blocks(BLOCKS))]))]:
        huge.add(message, payload, 1.0)
    with pytest.raises(WireError, match="beyond 2e"):
        huge.anchor_sample()
    assert theirs.distance(weights(2)) == pytest.approx(np.linalg.norm(weights(1) - weights(2)), rel=0.01)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("outer_optimizer", "nesterov"), ("round_codec", "int4"), ("round_codec", "int2"), ("round_codec", "topk"),
        ("prune_fraction", 0.5), ("sync_schedule", "grow"), ("outer_lr_schedule", "cosine"), ("round_mean", "trimmed"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_with_pairs_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name} = .*averaging = 'pairwise'"):
        dataclasses.replace(RUN, **{name: value})


@pytest.mark.parametrize("is_new_lineage", [True, False])
def test_a_step_that_waits_for_a_snapshot_goes_on_under_a_new_head(is_new_lineage: bool) -> None:
    async def main() -> None:
        async with swarm(RUN) as members:
            (peer,) = grow(members, 1)
            await members.until(lambda: len(pairs(peer, "alone")) >= 2)
            await members.until(lambda: peer.exchange.of_interval > 0.9)
            while not pairwise_of(peer)._stepping:
                await trio.sleep(0.01)
            peer.paused = True
            driver, before = peer.current.driver, len(pairs(peer))
            if is_new_lineage:
                driver.found_lineage(driver.head, driver.history, "a test")
            else:
                driver._set_head(msgspec.structs.replace(driver.head, round=driver.head.round + 1))
            await trio.sleep(1.0)
            assert not pairwise_of(peer)._stepping
            peer.paused = False
            await members.until(lambda: len(pairs(peer, "alone")) > before, within_s=60)

    run_virtual(main)


def test_peers_pair_and_stay_close_without_a_round() -> None:
    async def main() -> None:
        async with swarm(RUN) as members:
            peers = grow(members, 5)
            await members.until(lambda: all(len(pairs(peer, "paired")) >= 6 for peer in peers))
            assert not any(peer.rounds() for peer in peers)
            partners = {event["partner"] for event in pairs(peers[0], "paired")}
            assert len(partners) > 1
            # The anchors differ, by less than those of peers that walk alone.
            anchors = [pairwise_of(peer).anchor for peer in peers]
            start = peers[0].node.state.anchor
            apart = np.linalg.norm(anchors[0] - anchors[1]) / np.linalg.norm(anchors[0] - start)
            assert 0 < apart < 1, apart
            for event in pairs(peers[1], "paired"):
                assert 0 < event["spread"] < 1.5
                assert event["bytes_sent"] > INT8.size_bytes(2140)

    run_virtual(main)


def test_a_step_with_a_partner_is_that_of_the_algorithm() -> None:
    async def main() -> None:
        async with swarm(dataclasses.replace(RUN, round_codec="none")) as members:
            peers = grow(members, 2)
            await members.until(lambda: all(peer.node.ready.is_set() for peer in peers))
            start = [pairwise_of(peer).anchor.copy() for peer in peers]
            assert start[0].tobytes() == start[1].tobytes()
            await members.until(lambda: all(pairs(peer, "paired") for peer in peers))
            after = [pairwise_of(peer) for peer in peers]
            # From equal anchors and no momentum, two peers make the same step.
            np.testing.assert_allclose(after[0].anchor, after[1].anchor, atol=1e-6)
            np.testing.assert_allclose(after[0].anchor, start[0] + after[0].moment, atol=1e-6)
            assert np.abs(after[0].moment).max() > 0.001

    run_virtual(main)


def test_passes_over_the_whole_model_run_in_worker_threads() -> None:
    async def main() -> None:
        async with swarm(RUN) as members:
            peers = grow(members, 2)
            context, works = peers[0].node.driver.context, set[str]()
            honest = context.compute

            async def compute(work: Callable[..., Any], *args: Any) -> Any:
                works.add(getattr(work, "func", work).__name__)
                return await honest(work, *args)

            context.compute = compute
            await members.until(lambda: bool(pairs(peers[0], "paired")))
            assert works >= {"copyto", "fill", "is_within", "squared_distance", "distance", "step"}

    run_virtual(main)


def test_a_pairwise_step_takes_two_round_trips_from_its_offer() -> None:
    """Offer, answer; weights, and the last chunk. A random pause comes before."""
    round_trip_s, step_s = 0.4, 0.05

    async def main() -> None:
        async with swarm(dataclasses.replace(RUN, sync_every=200)) as members:
            members.network.latency = lambda a, b: round_trip_s / 2  # type: ignore[method-assign]
            offered_s: list[float] = []

            def watch(source: str, target: str, packet: bytes) -> PacketFault:
                if KINDS[packet[1]] is PairOffer:
                    offered_s.append(trio.current_time())
                return PacketFault.NONE

            members.network.fault = watch
            peers = [members.start(name, founder=name == "a", step_s=step_s) for name in "ab"]
            await members.until(lambda: all(len(pairs(peer, "paired")) >= 9 for peer in peers), within_s=300)
            took_s: list[float] = []
            for step in range(1, 9):
                ends = [pairs(peer, "paired")[step] for peer in peers]
                offer_s = max(s for s in offered_s if s < ends[0]["t"])
                assert offer_s - max(end["t"] - end["wall_s"] for end in ends) <= PAUSE_ROUND_TRIPS * round_trip_s
                took_s.append(max(end["t"] for end in ends) - offer_s)
            # The pause is random, so half of the longest on average.
            usual_s = (PAIR_ROUND_TRIPS - PAUSE_ROUND_TRIPS / 2) * round_trip_s
            assert round_trip_s < min(took_s)
            # A snapshot and a landing each wait for the end of a step.
            assert statistics.fmean(took_s) <= usual_s + 2 * step_s + 0.01
            assert max(took_s) <= usual_s + round_trip_s

    run_virtual(main)


def test_a_peer_alone_takes_its_steps_alone() -> None:
    async def main() -> None:
        async with swarm(RUN) as members:
            (peer,) = grow(members, 1)
            await members.until(lambda: len(pairs(peer)) >= 3)
            assert {event["status"] for event in pairs(peer)} == {"alone"}
            assert np.abs(pairwise_of(peer).anchor - peer.node.state.anchor).max() > 0

    run_virtual(main)


def test_a_partner_that_vanishes_costs_that_step_only() -> None:
    async def main() -> None:
        async with swarm(RUN, latency_s=0.02, bandwidth_bytes_s=200_000.0) as members:
            peers = grow(members, 2)
            await members.until(lambda: peers[0].node.links.counters.received[Traffic.ROUND] > 0)
            members.kill("p1")
            seen = len(pairs(peers[0]))
            await members.until(lambda: len(pairs(peers[0])) >= seen + 2)
            lost, after = pairs(peers[0])[seen : seen + 2]
            assert (lost["status"], lost["partner"]) == ("alone", "p1")
            assert lost["reason"]
            assert (after["status"], after["partner"]) == ("alone", "")

    run_virtual(main)


def test_weights_far_from_ours_move_us_by_a_few_times_our_own_way_at_most() -> None:
    async def main() -> None:
        async with swarm(RUN) as members:
            peers = grow(members, 2)
            await members.until(lambda: all(pairs(peer, "paired") for peer in peers))
            size = np.linalg.norm(peers[0].flat())
            for tensor in peers[1].tensors:
                tensor.mul_(1e6)
            seen = len(pairs(peers[0], "paired"))
            await members.until(lambda: len(pairs(peers[0], "paired")) > seen)
            event = pairs(peers[0], "paired")[-1]
            assert "too far away" in event["reason"]
            assert event["distance"] > 1000
            assert np.linalg.norm(peers[0].flat()) < 10 * size
            assert not peers[0].node.links.strikes

    run_virtual(main)


def test_a_partner_that_breaks_a_rule_gets_a_strike_and_the_step_is_taken_alone() -> None:
    async def main() -> None:
        async with swarm(RUN) as members:
            peers = grow(members, 2)
            await members.until(lambda: all(pairs(peer, "paired") for peer in peers))
            liar = pairwise_of(peers[1])

            async def send(link: Link, number: int, snapshot: Snapshot, _: object) -> None:
                first = (PairWeights(number, 1024), INT8.encode(snapshot.weights.numpy()[1024:2048]))
                await link.send_bulk(*first, Traffic.ROUND)

            liar._swaps._send = send  # type: ignore[method-assign]
            seen = len(pairs(peers[0]))
            await members.until(lambda: len(pairs(peers[0])) > seen)
            assert pairs(peers[0])[-1]["status"] == "alone"
            assert peers[0].node.links.strikes == {"p1": 1}

    run_virtual(main)


def offer_first(liar: TestPeer, victims: list[TestPeer]) -> None:
    """The liar offers to every victim all the time, and takes part in no swap of its own."""
    pairwise = pairwise_of(liar)

    async def run_forever() -> None:
        while True:
            for victim in victims:
                link = liar.node.links.get(victim.peer_id)
                if link is not None:
                    link.send(PairOffer(liar.node.driver.head.lineage, 0))
            await trio.sleep(0.1)

    pairwise.run_forever = run_forever  # type: ignore[method-assign]
    pairwise.deliver = lambda *message: None  # type: ignore[method-assign]


def test_a_peer_that_offers_first_and_sends_nothing_takes_a_minority_of_the_steps() -> None:
    async def main() -> None:
        async with swarm(RUN) as members:
            peers = [members.start(f"p{i}", founder=i == 0) for i in range(6)]
            offer_first(peers[5], peers[:5])
            await members.until(lambda: len(pairs(peers[0])) >= 12, within_s=600)
            for peer in peers[:5]:
                with_liar = [event["partner"] == "p5" for event in pairs(peer)]
                assert any(with_liar)
                assert not any(one and next_ for one, next_ in itertools.pairwise(with_liar))
                assert len(pairs(peer, "paired")) >= len(pairs(peer)) / 4

    run_virtual(main)


def test_a_partner_that_sends_one_chunk_now_and_then_is_left_after_peer_timeout_or_an_interval() -> None:
    async def main() -> None:
        async with swarm(RUN) as members:
            peers = grow(members, 2)
            await members.until(lambda: all(pairs(peer, "paired") for peer in peers))
            slow = pairwise_of(peers[1])

            async def send(link: Link, number: int, snapshot: Snapshot, _: object) -> None:
                for message, payload in messages_of(snapshot.weights.numpy()):
                    numbered = msgspec.structs.replace(message, number=number)
                    await link.send_bulk(numbered, payload, Traffic.ROUND)
                    await trio.sleep(25)

            slow._swaps._send = send  # type: ignore[method-assign]
            seen = len(pairs(peers[0]))
            await members.until(lambda: len(pairs(peers[0])) > seen)
            event = pairs(peers[0])[-1]
            assert (event["status"], event["partner"]) == ("alone", "p1")
            assert "took too long" in event["reason"]
            # Its chunks come more often than that; an interval is shorter here.
            longest_s = peers[0].node.links.peer_timeout_s
            assert RUN.sync_every * peers[0].step_s < longest_s <= event["wall_s"] < longest_s + 3

    run_virtual(main)


def test_no_link_ends_in_the_middle_of_a_swap_or_an_answer() -> None:
    async def main() -> None:
        async with swarm(RUN) as members:
            a, *_ = grow(members, 2)
            await members.until(lambda: len(pairs(a, "paired")) >= 1)
            unused: list[int] = []

            def watch(source: str, target: str, packet: bytes) -> PacketFault:
                link = members.peers[source].current.links.get(target)
                if packet[1] in (KIND_OF[PairWeights], KIND_OF[Answer]) and not (link and link.is_in_use):
                    unused.append(packet[1])
                return PacketFault.NONE

            members.network.fault = watch
            await members.until(lambda: len(pairs(a, "paired")) >= 3)
            members.start("late")
            await members.until(lambda: members.peers["late"].current.ready.is_set())
            assert not unused

    run_virtual(main)


def test_replayed_and_foreign_weights_change_nothing() -> None:
    async def main() -> None:
        async with swarm(RUN) as members:
            peers = grow(members, 3)
            await members.until(lambda: all(pairs(peer, "paired") for peer in peers))
            pairwise = pairwise_of(peers[0])
            link = peers[0].node.links.get("p2")
            assert link is not None
            pairwise._matching = Matching(7, "", "p1", 9)
            pairwise._incoming = None
            for number in (8, 9, 10):
                pairwise.deliver(link, PairWeights(number, 0), messages_of(weights(1))[0][1])
            assert pairwise._incoming is None
            partner = peers[0].node.links.get("p1")
            assert partner is not None
            size = peers[0].node.state.num_blocks
            first = INT8.encode(weights(1)[:1024])
            assert size > 1024
            pairwise.deliver(partner, PairWeights(8, 0), first)
            assert pairwise._incoming is None
            pairwise.deliver(partner, PairWeights(9, 0), first)
            with pytest.raises(WireError, match="from block 0, not 1024"):
                pairwise.deliver(partner, PairWeights(9, 0), first)

    run_virtual(main)


def test_a_call_far_from_the_end_holds_up_no_pairs() -> None:
    async def main() -> None:
        async with swarm(dataclasses.replace(RUN, total_steps=10_000)) as members:
            peers = grow(members, 3)
            await members.until(lambda: all(pairs(peer, "paired") for peer in peers))
            head = peers[1].node.driver.head
            for counter in range(1, 20):
                for victim in ("p0", "p2"):
                    link = peers[1].node.links.get(victim)
                    assert link is not None
                    attempt = Attempt(counter, "p1", peers[1].node.incarnation)
                    link.send(Call(head.lineage, head.round + 1, attempt, 1.0))
                await trio.sleep(0.5)
                assert all(peer.node.driver.round_state.member is None for peer in peers)

    run_virtual(main)


def test_a_majority_of_liars_leads_a_peer_on_by_a_few_intervals_a_step_at_most() -> None:
    async def main() -> None:
        async with swarm(RUN) as members:
            peers = grow(members, 3)
            await members.until(lambda: all(pairs(peer, "paired") for peer in peers))
            for peer in peers[1:]:
                beat = peer.node.make_beat
                peer.node.make_beat = lambda *times, beat=beat: msgspec.structs.replace(beat(*times), step=2**61)  # type: ignore[method-assign]
            steps = len(pairs(peers[0]))
            await members.until(lambda: len(pairs(peers[0])) >= steps + 3)
            assert peers[0].exchange.run_step <= (len(pairs(peers[0])) + 1) * 18 * RUN.sync_every

    run_virtual(main)


def test_weights_that_are_not_finite_are_neither_sent_nor_stepped() -> None:
    async def main() -> None:
        async with swarm(RUN) as members:
            peers = grow(members, 2)
            await members.until(lambda: all(pairs(peer, "paired") for peer in peers))
            peers[1].tensors[0][0, 0] = torch.nan
            seen = len(pairs(peers[1]))
            await members.until(lambda: len(pairs(peers[1])) > seen)
            assert pairs(peers[1])[-1]["status"] == "skipped"
            assert "not finite" in pairs(peers[1])[-1]["reason"]
            assert np.isfinite(pairwise_of(peers[1]).anchor).all()
            await members.until(lambda: pairs(peers[0])[-1]["status"] == "alone")
            assert torch.isfinite(peers[0].flat()).all()

    run_virtual(main)


def test_a_joiner_gets_the_anchor_and_the_position_of_a_peer() -> None:
    async def main() -> None:
        async with swarm(RUN) as members:
            peers = grow(members, 3)
            await members.until(lambda: peers[0].exchange.run_step > 100)
            joiner = members.start("p9")
            await members.until(joiner.node.ready.is_set)
            (joined,) = pairs(joiner)
            assert joined["status"] == "joined"
            assert joiner.exchange.run_step >= 80
            donor = pairwise_of(members.peers[joined["partner"]])
            near = np.linalg.norm(joiner.flat().numpy() - donor.anchor)
            assert near < np.linalg.norm(joiner.node.state.anchor - donor.anchor) / 2
            await members.until(lambda: bool(pairs(joiner, "paired")))

    run_virtual(main)


def lie_about_anchors(liar: TestPeer, factor: float) -> None:
    """The liar serves its anchor times `factor`."""
    pairwise = pairwise_of(liar)
    honest = pairwise.serve

    async def serve(link: Link, request: Request) -> None:
        true = pairwise.anchor
        pairwise.anchor = true * np.float32(factor)
        try:
            await honest(link, request)
        finally:
            pairwise.anchor = true

    pairwise.serve = serve  # type: ignore[method-assign]


@pytest.mark.parametrize("factor", [0.0, -1.0, 1e6, np.nan])
def test_a_joiner_takes_no_anchor_that_is_unlike_those_of_most(factor: float) -> None:
    async def main() -> None:
        async with swarm(RUN) as members:
            peers = grow(members, 4)
            await members.until(lambda: peers[0].exchange.run_step > 100)
            lie_about_anchors(peers[1], factor)
            # Its initial peer is asked first.
            joiner = members.start("p9", chosen=["p1"])
            await members.until(joiner.node.ready.is_set, within_s=600)
            (joined,) = pairs(joiner)
            assert joined["partner"] in ("p0", "p2", "p3")
            assert torch.isfinite(joiner.flat()).all()

    run_virtual(main)


def test_members_that_give_no_chunks_do_not_hold_a_joiner_up() -> None:
    async def main() -> None:
        async with swarm(RUN) as members:
            peers = grow(members, 5)
            await members.until(lambda: peers[0].exchange.run_step > 100)
            served_s: list[float] = []

            async def hang(link: Link, request: Request) -> None:
                served_s.append(trio.current_time())
                await trio.sleep_forever()

            for peer in peers[1:]:
                pairwise_of(peer).serve = hang  # type: ignore[method-assign]
            joiner = members.start("p9", chosen=["p0"])
            await members.until(joiner.node.ready.is_set)
            assert trio.current_time() - served_s[0] < 1.1 * CHUNK_TIMEOUT_S
            assert max(served_s) - served_s[0] < 1
            assert pairs(joiner)[0]["partner"] == "p0"

    run_virtual(main)


def test_a_joiner_of_a_small_swarm_waits_for_no_more_members() -> None:
    async def main() -> None:
        async with swarm(RUN) as members:
            peers = grow(members, 3)
            await members.until(lambda: peers[0].exchange.run_step > 100)
            joiner = members.start("p9")
            began_s: list[float] = []
            pairwise = pairwise_of(joiner)
            honest = pairwise.begin

            async def begin() -> None:
                began_s.append(trio.current_time())
                await honest()

            pairwise.begin = begin  # type: ignore[method-assign]
            await members.until(joiner.node.ready.is_set)
            assert pairs(joiner)[0]["status"] == "joined"
            assert pairs(joiner)[0]["t"] - began_s[0] < MEET_S - 1

    run_virtual(main)


def test_an_anchor_is_taken_anew_if_a_round_came_first() -> None:
    async def main() -> None:
        async with swarm(RUN) as members:
            (peer,) = grow(members, 1)
            await members.until(lambda: len(pairs(peer)) >= 2)
            pairwise = pairwise_of(peer)
            honest, asked = pairwise._snapshot, []

            async def snapshot() -> Snapshot | None:
                asked.append(pairwise._state)
                return None if len(asked) == 1 else await honest()

            pairwise._snapshot = snapshot  # type: ignore[method-assign]
            pairwise._state = "of before a round"
            pairwise.moment[:] = 1e6
            seen = len(pairs(peer))
            await members.until(lambda: len(pairs(peer)) > seen)
            assert asked[:2] == ["of before a round"] * 2
            assert np.abs(pairwise.moment).max() < 1000

    run_virtual(main)


def test_a_step_that_raises_an_unexpected_error_is_left_out() -> None:
    async def main() -> None:
        async with swarm(RUN) as members:
            (peer,) = grow(members, 1)
            await members.until(lambda: bool(pairs(peer)))
            tried: list[int] = []

            async def snapshot() -> None:
                tried.append(peer.exchange.steps)
                raise RuntimeError("planted")

            pairwise_of(peer)._snapshot = snapshot  # type: ignore[method-assign]
            await members.until(lambda: len(tried) >= 4)
            assert all(after - before >= RUN.sync_every for before, after in itertools.pairwise(tried))

    run_virtual(main)


def test_a_peer_without_an_anchor_serves_none() -> None:
    async def main() -> None:
        async with swarm(RUN) as members:
            peers = grow(members, 2)
            await members.until(lambda: all(peer.node.ready.is_set() for peer in peers))
            link = peers[1].node.links.get("p0")
            assert link is not None
            answer, payload = await peers[1].node.links.request(link, "anchor", timeout_s=5)
            assert (answer.found, len(payload)) == (True, 256 * 1024)
            pairwise_of(peers[0])._state = ""
            answer, payload = await peers[1].node.links.request(link, "anchor", timeout_s=5)
            assert (answer.found, payload) == (False, b"")

    run_virtual(main)


def test_a_restarted_peer_goes_on_from_its_checkpoint_or_from_those_ahead() -> None:
    async def main() -> None:
        async with swarm(RUN) as members:
            peers = grow(members, 3)
            await members.until(lambda: len(pairs(peers[2], "paired")) >= 2)
            node = peers[2].node
            saved = Restored(node.state, node.driver.head, peers[2].exchange.run_step, node.driver.history)
            members.kill("p2")
            again = members.start("p2", restored=saved)
            await members.until(lambda: bool(pairs(again, "paired")))
            assert not pairs(again, "joined")
            assert again.exchange.run_step >= saved.run_step
            members.kill("p2")
            await members.until(lambda: peers[0].exchange.run_step > saved.run_step + 60)
            late = members.start("p2", restored=saved)
            await members.until(late.node.ready.is_set)
            assert pairs(late, "joined")
            assert late.exchange.run_step > saved.run_step + 20

    run_virtual(main)


def test_the_schedule_of_a_slow_peer_follows_the_others_but_not_one_liar() -> None:
    async def main() -> None:
        async with swarm(dataclasses.replace(RUN, total_steps=100_000)) as members:
            peers = [members.start(f"p{i}", founder=i == 0, step_s=0.3 if i == 4 else 0.1) for i in range(5)]
            await members.until(lambda: all(pairs(peer, "paired") for peer in peers))
            liar, beat = peers[1].node, peers[1].node.make_beat
            liar.make_beat = lambda *times: msgspec.structs.replace(beat(*times), step=90_000)  # type: ignore[method-assign]
            await members.until(lambda: peers[4].exchange.steps > 100)
            assert peers[4].exchange.run_step > 2 * peers[4].exchange.steps
            assert max(peer.exchange.run_step for peer in peers) < 1000

    run_virtual(main)


def test_the_run_ends_in_one_exact_round() -> None:
    async def main() -> None:
        async with swarm(dataclasses.replace(RUN, total_steps=100)) as members:
            peers = grow(members, 4)
            await members.until(lambda: all(peer.exchange.finished for peer in peers))
            for peer in peers:
                assert pairs(peer, "paired")
                (last,) = peer.rounds()
                assert (last["round"], last["group_size"]) == (0, 4)
                np.testing.assert_array_equal(peer.flat(), peer.node.state.anchor)

    run_virtual(main)


def test_the_last_round_does_without_the_founder() -> None:
    async def main() -> None:
        async with swarm(dataclasses.replace(RUN, total_steps=100)) as members:
            peers = grow(members, 3)
            await members.until(lambda: bool(pairs(peers[0], "paired")))
            members.kill("p0")
            await members.until(lambda: all(peer.exchange.finished for peer in peers[1:]), within_s=600)
            ends = [peer.rounds()[-1] for peer in peers[1:]]
            assert {(end["group_size"], end["state_hash"]) for end in ends} == {(2, ends[0]["state_hash"])}

    run_virtual(main)


def test_pairs_go_on_while_half_of_the_swarm_is_cut_off() -> None:
    async def main() -> None:
        async with swarm(RUN) as members:
            peers = grow(members, 4)
            await members.until(lambda: all(pairs(peer, "paired") for peer in peers))
            members.network.partition(["p0", "p1"], ["p2", "p3"])
            seen = [len(pairs(peer, "paired")) for peer in peers]
            await trio.sleep(60)
            assert all(len(pairs(peer, "paired")) > before + 5 for peer, before in zip(peers, seen, strict=True))

    run_virtual(main)
