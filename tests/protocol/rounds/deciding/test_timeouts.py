"""How long each step of a round may take, who is avoided for a while, and the warning that H is too short."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest

from p2ptrain.protocol.rounds.deciding.timeouts import (
    AGAIN_AFTER_S,
    MARGIN,
    MIN_ATTEMPT_S,
    STALL_S,
    IntervalWatch,
    PeerBackoff,
    Timeouts,
)
from p2ptrain.settings.config import RunConfig
from tests.protocol.swarm import RUN, run_virtual, swarm


def run(sync_every: int = 200, sections: int = 1, codec: str = "int8") -> RunConfig:
    return RunConfig(sync_every=sync_every, round_sections=sections, round_codec=codec)


def told(watch: IntervalWatch, rounds_s: list[float], now: float = 0.0, interval_s: float = 20.0) -> list[str]:
    return [text for round_s in rounds_s if (text := watch.note(round_s, interval_s, now))]


def test_a_round_of_the_whole_after_rounds_of_sections_may_take_as_many_times_longer() -> None:
    timeouts = Timeouts(peer_timeout_s=30.0, round_timeout_s=1800.0)
    for share, took_s in ((0.25, 50.0), (0.15, 30.0)):
        timeouts.expect(share)
        timeouts.note_round(took_s)
        assert timeouts.attempt_s() == pytest.approx(MARGIN * took_s)
    timeouts.expect(0.001)
    # Most of it are round trips and the joining window.
    timeouts.note_round(1.0)
    assert timeouts.attempt_s() == MIN_ATTEMPT_S
    timeouts.expect(1.0)
    assert timeouts.attempt_s() == pytest.approx(MARGIN * 200.0)


def test_a_round_that_takes_more_than_a_fifth_of_its_interval_is_warned_of() -> None:
    assert told(IntervalWatch(run()), [4.0] * 5) == []
    (text,) = told(IntervalWatch(run()), [5.0] * 5)
    assert text == (
        "a round takes 5.0 s, 25 % of its interval of 20 s, and its result lands late, which costs loss. This run "
        "keeps its H = 200; give the next one --round-codec int4, or more --round-sections, or --sync-every 500 or more"
    )
    (text,) = told(IntervalWatch(run(500)), [120.0] * 5, interval_s=500.0)
    assert text.startswith("a round takes 2 min, 24 % of its interval of 8 min, ")


def test_the_h_that_would_do_is_the_runs() -> None:
    (text,) = told(IntervalWatch(run(100)), [5.0] * 5)
    assert "keeps its H = 100; " in text
    assert text.endswith("--sync-every 250 or more")


@pytest.mark.parametrize("codec", ["int4", "int2", "topk"])
def test_no_codec_is_named_where_a_smaller_one_costs_loss(codec: str) -> None:
    (text,) = told(IntervalWatch(run(codec=codec)), [5.0] * 5)
    assert text.endswith("give the next one more --round-sections, or --sync-every 500 or more")


@pytest.mark.parametrize(
    ("settings", "remedies"),
    [
        ({"inner_moments": "averaged", "round_codec": "none", "round_mean": "weighted"}, ""),
        ({"outer_optimizer": "adam"}, "--round-codec int4, or "),
        ({"prune_fraction": 0.5}, "more --round-sections, or "),
        ({"averaging": "pairwise", "outer_optimizer": "sgdm"}, ""),
    ],
)
def test_only_settings_that_the_run_allows_are_named(settings: dict[str, Any], remedies: str) -> None:
    (text,) = told(IntervalWatch(dataclasses.replace(run(), **settings)), [5.0] * 5)
    assert text.endswith(f"give the next one {remedies}--sync-every 500 or more")


def test_with_sections_an_interval_of_each_counts() -> None:
    """Five sections of 40 steps: each is averaged every 200 steps."""
    assert told(IntervalWatch(run(40, sections=5)), [2.0] * 5, interval_s=4.0) == []
    (text,) = told(IntervalWatch(run(40, sections=5)), [2.5] * 5, interval_s=4.0)
    assert text.endswith("--sync-every 50 or more")
    # A round must fit into its interval, however many sections there are.
    (text,) = told(IntervalWatch(run(40, sections=20)), [2.5] * 5, interval_s=4.0)
    assert text.endswith("--sync-every 50 or more")


def test_two_slow_rounds_of_five_say_nothing() -> None:
    assert told(IntervalWatch(run()), [30.0, 30.0, 1.0, 1.0, 1.0, 30.0]) == []
    assert told(IntervalWatch(run()), [30.0] * 4) == []
    assert len(told(IntervalWatch(run()), [30.0, 30.0, 1.0, 1.0, 30.0])) == 1


def test_two_short_intervals_of_five_say_nothing() -> None:
    """While others join, a peer's own H may be shorter for a while."""
    watch = IntervalWatch(run())
    assert not any(watch.note(1.0, interval_s, 0.0) for interval_s in (20.0, 3.0, 20.0, 20.0, 3.0))


def test_the_warning_is_repeated_after_an_hour() -> None:
    watch = IntervalWatch(run())
    assert len(told(watch, [5.0] * 5, now=7.0)) == 1
    assert told(watch, [5.0] * 5, now=6.0 + AGAIN_AFTER_S) == []
    assert len(told(watch, [5.0] * 5, now=7.0 + AGAIN_AFTER_S)) == 1


def test_before_the_first_step_nothing_is_known() -> None:
    assert not told(IntervalWatch(run()), [5.0] * 5, interval_s=0.0)


@pytest.mark.parametrize(("latency_s", "warnings"), [(0.001, 0), (0.1, 2)])
def test_peers_whose_rounds_land_late_say_so_once(
    latency_s: float, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with swarm(RUN, latency_s=latency_s) as s:
            for name in "ab":
                s.start(name)
            await s.until(lambda: all(len(peer.rounds("committed")) >= 8 for peer in s.peers.values()), within_s=120)

    caplog.set_level(logging.WARNING)
    run_virtual(main)
    assert sum("of its interval of 2.0 s" in record.getMessage() for record in caplog.records) == warnings


def test_only_peers_that_failed_lately_are_remembered() -> None:
    backoff = PeerBackoff(60.0)
    for second in range(10_000):
        backoff.note(f"peer-{second}", float(second), 2.0)
    assert len(backoff._until) <= 63
    assert set(backoff.backed_off(9_999.0)) == {"peer-9998", "peer-9999"}
    assert [backoff.is_backed_off(f"peer-{n}", 9_999.0) for n in (0, 9_997, 9_999)] == [False, False, True]


def timeouts(peer_timeout_s: float = 30.0, round_timeout_s: float = 1800.0) -> Timeouts:
    return Timeouts(peer_timeout_s=peer_timeout_s, round_timeout_s=round_timeout_s)


def test_a_sender_gets_several_times_what_its_chunks_took() -> None:
    measured = timeouts()
    assert measured.stall_s("a", 0.0, 0.5) == STALL_S
    assert measured.stall_s("a", 1.5, 0.5) == 6.0  # four round trips
    assert measured.stall_s("a", 0.0, 4.0) == 8.0  # twice a chunk on the slowest line
    measured.note_wait("a", 3.0)
    measured.note_wait("a", 1.0)
    assert measured.stall_s("a", 0.0, 0.5) == 3.0 * MARGIN
    assert measured.stall_s("b", 0.0, 0.5) == STALL_S
    measured.note_wait("a", 100.0)
    assert measured.stall_s("a", 0.0, 0.5) == 30.0
    measured.note_round(20.0)
    measured.note_wait("a", 100.0)
    for took_s in range(20, 40):
        measured.note_timed_out(took_s)
    assert measured.stall_s("a", 0.0, 0.5) == 30.0
    for _ in range(20):
        measured.note_round(1.0)
    assert measured.stall_s("a", 0.0, 0.5) == STALL_S


def test_an_attempt_gets_several_times_what_rounds_took_up_to_the_users_bound() -> None:
    measured = timeouts(round_timeout_s=600.0)
    assert measured.attempt_s() == 600.0
    measured.note_timed_out(5.0)  # nothing was measured: it says nothing
    assert measured.attempt_s() == 600.0
    measured.note_round(2.0)
    assert measured.attempt_s() == MIN_ATTEMPT_S
    measured.note_round(40.0)
    assert measured.attempt_s() == 40.0 * MARGIN
    measured.note_timed_out(20.0)
    assert measured.attempt_s() == 40.0 * MARGIN
    measured.note_unsent(40.0)
    assert measured.attempt_s() == 80.0 * MARGIN
    measured.note_timed_out(40.0 * MARGIN)
    assert measured.attempt_s() == 40.0 * MARGIN**2
    measured.note_timed_out(measured.attempt_s())
    assert measured.attempt_s() == 600.0
    assert timeouts(round_timeout_s=20.0).attempt_s() == 20.0
