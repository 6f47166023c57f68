"""The data of the page: its content, and its size after a day."""

from __future__ import annotations

import json
import math
import time

import pytest

from p2ptrain.formatting import short_id
from p2ptrain.monitor.dashboard import snapshot
from p2ptrain.monitor.dashboard.snapshot import POINTS, RANGES, curves
from p2ptrain.monitor.peerview import MOST_POINTS, MOST_RECENT, Curve, PeerView
from p2ptrain.monitor.swarmview import MOST_PEERS, SwarmView
from p2ptrain.protocol.event_log.observer import Batch, Sighting, View
from tests.monitor.dashboard.madeup import DAY_S, MadeUpSwarm, ids, of_a_day

START_S = 1_700_000_000.0


def watched(count: int, seconds: int, **options: int) -> tuple[MadeUpSwarm, SwarmView]:
    swarm, live = MadeUpSwarm(), SwarmView()
    swarm.start(*ids(count), at_s=START_S)
    swarm.live(seconds, **options)
    live.observe(swarm.take(), swarm.now_s)
    return swarm, live


def test_a_peer_that_dies_and_one_that_comes_late() -> None:
    swarm, live = watched(3, 100)
    dead, late = ids(4)[1], ids(4)[3]
    swarm.kill(dead)
    swarm.start(late, at_s=swarm.now_s)
    swarm.live(60)
    live.observe(swarm.take(), swarm.now_s)
    kinds = {peer["id"]: peer["kind"] for peer in snapshot.overview(live, swarm.now_s)["peers"]}
    assert (kinds[dead], kinds[late]) == ("gone", "training")
    texts = [notice["text"] for notice in snapshot.notices(live)]
    assert "peer 2 is gone at step 100: connection lost" in texts
    assert any("peer 4 joined late: adopted the swarm's weights" in text for text in texts)
    swarm.peers[dead].linked = True
    live.observe(swarm.take(), swarm.now_s)
    assert snapshot.notices(live)[0]["text"] == "peer 2 is back"
    swarm.peers[dead].linked, swarm.peers[dead].left = False, True
    live.observe(swarm.take(), swarm.now_s)
    assert snapshot.notices(live)[0]["text"] == "peer 2 left the run at step 100"


def test_pairs_without_a_direct_connection_are_told_by_number() -> None:
    live = SwarmView()

    def sighting(peer_id: str, **relayed: str) -> Sighting:
        return Sighting(peer_id, peer_id != "gone", "training", relayed=relayed)

    told = (sighting("a", b="QmRelayOfTwo", gone=""), sighting("b", a="QmRelayOfTwo", c=""), sighting("c", stranger=""))
    live.observe(View((*told, sighting("gone", a="")), ()), START_S)
    assert snapshot.overview(live, START_S)["relayed"] == [
        {"pair": (1, 2), "relay": short_id("QmRelayOfTwo")}, {"pair": (2, 3), "relay": ""},
    ]  # fmt: skip


def test_rounds_say_who_took_part_in_which_way() -> None:
    _, live = watched(4, 1200)
    rounds = snapshot.rounds(live)
    assert [round_["round"] for round_ in rounds] == list(range(40))
    for round_ in rounds:
        ways = [*round_["by"], *round_["late"], *round_["absent"], *map(int, round_["skipped"])]
        assert sorted(ways) == [1, 2, 3, 4]
    assert any(round_["late"] for round_ in rounds)
    assert any(round_["skipped"] for round_ in rounds)
    assert all(round_["agreed"] for round_ in rounds)


@pytest.mark.long
@pytest.mark.slow
def test_the_data_of_thirty_peers_is_small() -> None:
    """Observed from the first minute on, by a page that stays open."""
    swarm, live = MadeUpSwarm(), SwarmView()
    swarm.start(*ids(30), at_s=START_S)
    for _ in range(14):
        swarm.live(150, sync_every=10)
        live.observe(swarm.take(), swarm.now_s)
    peer = live.peers[1]
    assert len(peer.losses) <= MOST_POINTS
    assert_small(live, swarm.now_s)


@pytest.mark.long
@pytest.mark.slow
def test_a_day_of_thirty_peers_is_small_and_whole() -> None:
    """Observed by a page that is opened after a day: from the peers' event logs."""
    swarm, live = of_a_day(30, START_S), SwarmView()
    view = swarm.take()
    assert all(len(json.dumps(batch.events, separators=(",", ":"))) < 3_000_000 for batch in view.batches)
    live.observe(view, swarm.now_s)
    overview = snapshot.overview(live, swarm.now_s)
    assert (overview["up"], overview["rounds"]) == (30, DAY_S // 60)
    made = sum(peer.step for peer in swarm.peers.values())
    assert overview["bytes"]["steps"] == pytest.approx(made, rel=0.001)  # except steps that are still being merged
    shown = curves(live, 0, swarm.now_s)
    assert shown["t"][-1] - shown["t"][0] == pytest.approx(DAY_S, rel=0.01)
    assert all(value is not None for values in shown["loss"].values() for value in values[1:-1])
    # All peers keep the samples of the same hundred steps.
    assert all(value is not None for value in shown["correlation"][POINTS // 10 : -2])
    assert_small(live, swarm.now_s)


def assert_small(live: SwarmView, now_s: float) -> None:
    for part in (snapshot.overview(live, now_s), snapshot.rounds(live), snapshot.notices(live)):
        assert len(json.dumps(part)) < 40_000
    for range_s in RANGES:
        assert len(json.dumps(curves(live, range_s, now_s))) < 200_000


def test_curves_keep_gaps_while_a_peer_was_away() -> None:
    swarm, live = watched(2, 300)
    away = ids(2)[1]
    swarm.kill(away)
    swarm.live(300)
    swarm.peers[away].linked = True
    swarm.live(300)
    live.observe(swarm.take(), swarm.now_s)
    shown = curves(live, 0, swarm.now_s)
    assert len(shown["t"]) <= POINTS + 2
    known = [value is not None for value in shown["loss"][2]]
    third = len(known) // 3
    assert all(known[2 : third - 2])
    assert not any(known[third + 2 : 2 * third - 2])
    assert all(known[2 * third + 4 : -2])
    assert all(value is not None for value in shown["loss"][1][2:-2])
    assert len(curves(live, 600, swarm.now_s)["t"]) == pytest.approx(600 / 2.5, abs=2)


def test_a_curve_of_a_day_keeps_its_beginning_its_end_and_its_mean() -> None:
    curve = Curve()
    for n in range(50_000):
        curve.add(float(n), float(n))
    points = list(curve)
    assert len(points) <= MOST_POINTS
    assert points[0][0] < 500
    assert points[-100:] == [(float(n), float(n)) for n in range(49_900, 50_000)]
    assert [t for t, _ in points] == sorted(t for t, _ in points)


def test_a_crowd_that_comes_and_goes_is_forgotten() -> None:
    live = SwarmView()
    sample = {"event": "sample", "t": START_S, "step": 10**15, "every": 1, "values": [1.0]}
    skipped = {
        "event": "round", "t": START_S, "round": 10**15, "lineage": "0-l", "status": "skipped", "reason": "x",
        "bytes_sent": 0, "bytes_received": 0, "late": False, "contributors": [], "group_size": 0, "wall_s": 0.0,
        "tokens_discarded": 0, "stall_s": 0.0,
    }  # fmt: skip
    for n in range(3 * MOST_PEERS):
        batch = Batch(f"p{n}", f"p{n}.1", (sample, skipped))
        live.observe(View((Sighting(f"p{n}", True, "training"),), (batch,)), time.time())
    assert len(live.peers) == MOST_PEERS
    assert len(live.sightings) <= MOST_PEERS
    assert len(live._samples[10**15]) <= MOST_PEERS
    assert len(live.rounds.by_key["0-l", 10**15].reasons) <= MOST_PEERS


def test_many_that_come_at_once_do_not_push_out_each_other() -> None:
    """Peers that are new have told nothing yet; all that were seen before have."""
    live = SwarmView()
    stop = {"event": "stop", "t": START_S, "reason": "done"}
    for n in range(MOST_PEERS):
        live.observe(View((Sighting(f"p{n}", True, "training"),), (Batch(f"p{n}", "a", [stop]),)), START_S)
    crowd = tuple(Sighting(f"q{n}", True, "training") for n in range(129))
    live.observe(View(crowd, ()), START_S)
    assert {sighting.peer_id for sighting in crowd} <= live.numbers.keys()
    live.observe(View((), ()), START_S)
    assert len(live.peers) == MOST_PEERS


def test_a_peer_whose_clock_stands_still_takes_no_more_memory() -> None:
    peer = SwarmView().peers.setdefault(1, PeerView(1))
    for n in range(2 * MOST_RECENT):
        peer.apply(
            {"event": "step", "t": START_S, "step": n, "loss": 1.0, "tokens": 1, "step_s": 1.0, "exchange_s": 0.0}
        )
    assert len(peer._recent) == MOST_RECENT


def test_curves_of_a_peer_whose_clock_is_ahead() -> None:
    _, live = watched(1, 10)
    shown = curves(live, 0, START_S - 60)
    assert len(shown["t"]) == 1
    assert shown["loss"] == {1: [None]}


def test_a_loss_that_has_diverged_breaks_nothing() -> None:
    """JSON has no NaN and no infinity: a page that cannot be written would stand still."""
    swarm, live = watched(2, 10)
    peer = swarm.peers[ids(2)[0]]
    for loss in (math.nan, math.inf, -math.inf, 1e308):
        # From its event log, and as a peer's own view takes it.
        for _ in range(2):
            peer.event_log.write("step", step=20, loss=loss, tokens=1, step_s=0.1, exchange_s=0.0)
        swarm.now_s += 3.0
        live.observe(swarm.take(), swarm.now_s)
        if loss != 1e308:
            event = {"step": 20, "loss": loss, "tokens": 1, "step_s": 0.1, "exchange_s": 0.0}
            live.apply(1, {"event": "step", "t": swarm.now_s, **event})
        page = snapshot.overview(live, swarm.now_s)
        json.dumps([page, curves(live, RANGES[0], swarm.now_s)], allow_nan=False)
        assert math.isfinite(page["loss"])
