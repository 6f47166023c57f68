"""The views of peers and swarm, made from the peers' metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from p2ptrain.demo.orchestrator import EventReader
from p2ptrain.monitor import swarmview
from p2ptrain.monitor.peerview import PeerState, PeerView
from p2ptrain.monitor.swarmview import SwarmView, Tone
from tests.demo import metrics
from tests.demo.metrics import BEGAN_S, TOTAL_STEPS, small_swarm


def _texts(swarm: SwarmView) -> list[str]:
    return [notice.text for notice in swarm.notices]


def test_events_are_read_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = EventReader(path)
    assert list(reader.new_events()) == []
    lines = [json.dumps(metrics.step(n, float(n))) + "\n" for n in range(3)]
    path.write_text(lines[0] + lines[1][:10], encoding="utf-8")
    assert [event["step"] for event in reader.new_events()] == [0]
    assert list(reader.new_events()) == []
    path.write_text("".join(lines), encoding="utf-8")
    assert [event["step"] for event in reader.new_events()] == [1, 2]


@pytest.mark.parametrize("line", ["null", "5", "[]", '"step"', "{}", '{"event": "st'])
def test_a_line_that_is_not_an_event_is_skipped(line: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    step = json.dumps(metrics.step(1, 1.0))
    path.write_text(f"{line}\n{step}\n", encoding="utf-8")
    assert [event["step"] for event in EventReader(path).new_events()] == [1]


def test_a_peer_goes_from_starting_to_finished() -> None:
    peer = PeerView(2)
    seen = [peer.state]
    for event in (
        metrics.start(2, 1.0), metrics.step(1, 2.0), metrics.step(TOTAL_STEPS, 3.0),
        {"event": "stop", "t": 4.0, "reason": "finished"},
    ):  # fmt: skip
        peer.apply(event)
        seen.append(peer.state)
    assert [state.value for state in seen] == ["starting", "joining", "training", "last round", "finished"]


def test_speed_and_exchange_are_recent() -> None:
    peer = PeerView(1)
    peer.apply(metrics.start(1, 0.0))
    peer.apply(metrics.step(1, 1.0, exchange_s=1.0))
    for n in range(21):
        peer.apply(metrics.step(2 + n, 100 + n / 10, exchange_s=0.002))
    assert peer.tokens_per_s == pytest.approx(2560)
    assert peer.exchange_ms == pytest.approx(2.0)
    assert peer.own_steps == 22


def test_an_evaluation_does_not_change_the_speed() -> None:
    peer = PeerView(1)
    peer.apply(metrics.start(1, 0.0))
    for n in range(8):
        peer.apply(metrics.step(1 + n, 1.0 + n / 10 + (50 if n > 4 else 0)))
        if n == 4:
            peer.apply({"event": "eval", "t": 51.4, "step": 5, "loss": 2.0})
    assert peer.tokens_per_s == pytest.approx(2560)


def test_steps_that_take_longer_than_the_window_have_a_speed() -> None:
    peer = PeerView(1)
    peer.apply(metrics.start(1, 0.0))
    for n in range(4):
        peer.apply(metrics.step(1 + n, 64.0 * n))
    assert peer.tokens_per_s == pytest.approx(4)


def test_the_loss_is_smoothed_and_survives_a_lost_step() -> None:
    peer = PeerView(1)
    peer.apply(metrics.step(1, 0.0, loss=4.0))
    assert peer.loss == 4.0
    peer.apply(metrics.step(2, 0.1, loss=None))
    peer.apply(metrics.step(3, 0.2, loss=3.0))
    assert peer.loss == pytest.approx(0.98 * 4.0 + 0.02 * 3.0)
    assert list(peer.losses) == [(0.0, 4.0), (0.2, 3.0)]


def test_counts_add_up() -> None:
    peer = PeerView(1)
    for _ in range(2):
        peer.apply(metrics.fragments(1.0, sent=5, merged=4, skipped={"epoch": 1}, bytes_sent=100))
    peer.apply(metrics.round_(3, 2.0, by=("Qm1",)))
    assert (peer.sent, peer.merged, peer.skipped) == (10, 8, {"epoch": 2})
    assert (peer.fragment_bytes, peer.round_bytes, peer.bytes_sent) == (200, 500, 700)
    assert peer.round == 4


def test_notices_are_in_order() -> None:
    swarm = small_swarm()
    assert _texts(swarm) == [
        "peer 1 founded the run; the other peers adopt its weights",
        "round 0 committed by 3 peers in 0.4 s · 500 B sent · anchor aaaaaaaa",
        "peer 1 killed (SIGKILL) at step 40",
        "all other peers noticed within 0.40 s; training goes on",
        "peer 4 joined late: adopted the swarm's weights of round 0, step 50",
        "round 1 committed by 3 peers in 0.4 s · 500 B sent · anchor bbbbbbbb",
    ]
    assert [notice.at_s for notice in swarm.notices] == pytest.approx([2, 5, 8, 8.4, 10, 17])
    assert [notice.tone for notice in swarm.notices][2:5] == [Tone.BAD, Tone.PLAIN, Tone.GOOD]
    assert swarm.killed_at == (1, 1008.0)
    assert swarm.joined_at == (4, 1010)
    assert [len(round_.contributors) for round_ in swarm.rounds.applied] == [3, 3]
    assert swarm.step == TOTAL_STEPS


@pytest.mark.parametrize("state", [PeerState.KILLED, PeerState.TOO_LATE])
def test_the_last_events_of_a_killed_peer_do_not_revive_it(state: PeerState) -> None:
    swarm = small_swarm()
    swarm.peers[1].state = state
    swarm.apply(1, metrics.step(41, 1008.0))
    assert swarm.peers[1].state is state
    assert swarm.peers[1].own_steps == 41


def test_a_different_anchor_is_reported_once() -> None:
    swarm = SwarmView(BEGAN_S, TOTAL_STEPS)
    for number, anchor in ((1, "aa"), (2, "bb"), (3, "bb")):
        swarm.started(number)
        swarm.apply(number, metrics.round_(7, 1001, by=("Qm1", "Qm2", "Qm3"), anchor=anchor))
    assert _texts(swarm)[1:] == ["round 7: peer 2 has a different state than other peers"]
    assert swarm.notices[-1].tone is Tone.BAD
    assert not swarm.rounds.by_key["0-x", 7].agreed


def test_the_oldest_rounds_are_forgotten_in_any_order_of_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarmview, "MOST_ROUNDS", 3)
    swarm = SwarmView(BEGAN_S, TOTAL_STEPS)
    for peer, number in ((1, 7), (1, 8), (1, 9), (2, 3), (2, 10)):
        swarm.started(peer)
        swarm.apply(peer, metrics.round_(number, 1000 + number, by=("Qm1", "Qm2")))
    assert [round_ for _, round_ in swarm.rounds.by_key] == [8, 9, 10]


def test_a_round_of_unknown_duration_is_reported_without_it() -> None:
    swarm = SwarmView(BEGAN_S, TOTAL_STEPS)
    swarm.started(1)
    swarm.apply(1, {**metrics.round_(2, 1001, by=("Qm1", "Qm2")), "wall_s": None})
    assert _texts(swarm) == ["round 2 committed by 2 peers · 500 B sent · anchor aaaaaaaa"]


def test_a_skipped_round_is_reported_with_its_reason() -> None:
    swarm = SwarmView(BEGAN_S, TOTAL_STEPS)
    swarm.started(1)
    swarm.apply(1, metrics.round_(2, 1001, by=(), status="skipped"))
    assert _texts(swarm) == ["peer 1 skipped round 2: no quorum"]
    assert not swarm.rounds.applied


def test_correlation_is_of_samples_of_the_same_step() -> None:
    swarm = SwarmView(BEGAN_S, TOTAL_STEPS)
    for number in (1, 2):
        swarm.started(number)
        swarm.apply(number, metrics.sample(0, 1000 + number, [1.0, 2.0, 3.0]))
    swarm.apply(1, metrics.sample(10, 1010, [1.0, 2.0, 3.0]))
    assert [(found.step, found.t) for found in swarm.correlations()] == [(0, 1001.5)]
    # A peer whose step a round has corrected takes its sample a little later.
    swarm.apply(2, metrics.sample(13, 1011, [-1.0, -2.0, -3.0]))
    assert [round(found.value, 6) for found in swarm.correlations()] == [1.0, -1.0]
