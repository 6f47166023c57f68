"""The warning that rounds take too much of the interval between them."""

from __future__ import annotations

import logging

import pytest

from p2ptrain.protocol.rounds.deciding.timeouts import AGAIN_AFTER_S, IntervalWatch
from tests.protocol.swarm import RUN, run_virtual, swarm


def told(watch: IntervalWatch, rounds_s: list[float], now: float = 0.0, own: int = 200) -> list[str]:
    return [text for round_s in rounds_s if (text := watch.note(round_s, own, 0.1, now))]


def test_a_round_may_take_a_tenth_of_its_interval() -> None:
    assert told(IntervalWatch(200), [2.0] * 5) == []
    (text,) = told(IntervalWatch(200), [2.5] * 5)
    assert text.startswith("a round takes 2.5 s, 12 % of an interval of 200 steps of 0.1 s")
    assert "keeps its H = 200; give the next one --sync-every 250 or more" in text


def test_one_slow_round_says_nothing() -> None:
    assert told(IntervalWatch(200), [1.0, 30.0, 1.0, 1.0, 30.0, 1.0]) == []
    assert told(IntervalWatch(200), [30.0, 30.0]) == []
    assert len(told(IntervalWatch(200), [1.0, 30.0, 30.0])) == 1


def test_it_is_said_again_after_an_hour() -> None:
    watch = IntervalWatch(200)
    assert len(told(watch, [5.0] * 5, now=7.0)) == 1
    assert told(watch, [5.0] * 5, now=6.0 + AGAIN_AFTER_S) == []
    assert len(told(watch, [5.0] * 5, now=7.0 + AGAIN_AFTER_S)) == 1


def test_the_h_that_would_do_is_the_runs() -> None:
    """A peer that is twice as fast has twice the steps in the same interval."""
    (text,) = told(IntervalWatch(100), [5.0] * 3, own=200)
    assert "25 % of an interval of 200 steps" in text
    assert "keeps its H = 100; give the next one --sync-every 250" in text


def test_before_the_first_step_nothing_is_known() -> None:
    assert not any(IntervalWatch(200).note(5.0, 200, 0.0, 0.0) for _ in range(5))


@pytest.mark.parametrize(("latency_s", "warnings"), [(0.001, 0), (0.1, 2)])
def test_peers_whose_rounds_land_late_say_so_once(
    latency_s: float, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with swarm(RUN, latency_s=latency_s) as s:
            for name in "ab":
                s.start(name)
            await s.until(lambda: all(len(peer.rounds("committed")) >= 6 for peer in s.peers.values()), within_s=120)

    caplog.set_level(logging.WARNING)
    run_virtual(main)
    assert sum("of an interval of 20 steps" in record.getMessage() for record in caplog.records) == warnings
