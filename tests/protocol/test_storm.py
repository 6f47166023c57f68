"""Storms: under random faults no two peers commit different states, and afterwards all have the same state.

`STORMS=500` in the environment (or `make storms SEEDS=500`) runs this many seeds instead of a few.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from tests.protocol import storm as storm_module
from tests.protocol.storm import Storm, Trouble, play, shortest, weather

SEEDS = range(int(os.environ.get("STORMS", "3")))


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Free a storm's peers, which refer to each other: they are few objects with much memory, so 500 storms took 60 GB
    before Python's collector saw a reason to look at all of them."""
    yield
    gc.collect()


@pytest.mark.timeout(1200)  # finding the shortest storm plays it some thirty times
@pytest.mark.parametrize("seed", SEEDS)
def test_storm(seed: int) -> None:
    weather(Storm.of(seed))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", SEEDS[::4])
def test_storm_of_a_run_that_gathers(seed: int) -> None:
    weather(Storm.of(seed, "gather"))


def test_who_missed_the_last_rounds_gives_in_to_a_record_that_others_accepted() -> None:
    """Of three voters b is frozen, and misses rounds of a and c. c leaves as a is READY with the next one.

    a can take part in no other record, and b, which a quorum needs, is not in that one: no round for ever.
    """
    troubles = (
        Trouble(10.6, "freeze", "b", 6.89), Trouble(14.65, "freeze", "b", 14.72), Trouble(25.78, "leave", "c", 7.32),
    )  # fmt: skip
    play(Storm(457, 3, 0.03, False, troubles, interval_s=0.2))


@pytest.mark.long
def test_a_storm_is_the_same_every_time() -> None:
    storm = Storm.of(3)
    first, second = (weather(storm) for _ in range(2))
    assert [p.events for p in first.peers.values()] == [p.events for p in second.peers.values()]
    assert first.run_audit.committed


def test_a_failure_is_told_with_its_seed_and_the_least_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    guilty = [Trouble(3.0, "kill", "a", 1.0), Trouble(9.0, "split", "ab", 5.0)]
    innocent = [Trouble(float(i), "stop", "b", 1.0) for i in range(9)]
    storm = Storm(7, 3, 0.001, False, tuple(sorted([*guilty, *innocent], key=lambda t: t.at_s)))

    def play(storm: Storm) -> None:
        assert not set(guilty) <= set(storm.troubles), "no peace"

    monkeypatch.setattr(storm_module, "play", play)
    assert shortest(storm, storm_module._fails).troubles == tuple(guilty)
    with pytest.raises(pytest.fail.Exception) as caught:
        weather(storm)
    told = str(caught.value)
    assert told.startswith("seed 7: no peace")
    assert "troubles=(Trouble(at_s=3.0, action='kill', victims='a', lasts_s=1.0, amount=0.0), Trouble(at_s=9.0" in told
