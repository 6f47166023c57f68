"""The event log of a peer: bounded, with exact sums, verified by its readers."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from p2ptrain.errors import WireError
from p2ptrain.monitor.peerview import PeerState, PeerView
from p2ptrain.protocol.event_log.downsampling import coalesce
from p2ptrain.protocol.event_log.event_log import MOST, EventLog, RateLimit
from p2ptrain.protocol.event_log.events import KINDS, MAX_PAGE_BYTES, Event, parse_page
from p2ptrain.protocol.links.limits import MAX_LINKS
from tests.protocol.swarm import run_virtual

DAY_S = 24 * 3600
NESTED: list[Any] = []
for _ in range(100_000):
    NESTED = [NESTED]


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Book:
    """An event log, its clock, and shorthands for writing into it."""

    clock: Clock = field(default_factory=Clock)
    event_log: EventLog = field(init=False)

    def __post_init__(self) -> None:
        self.event_log = EventLog(self.clock)

    def step(self, step: int, loss: float | None = 2.0) -> None:
        self.event_log.write("step", step=step, loss=loss, tokens=256, step_s=0.01, exchange_s=0.001)

    def fragments(self, step: int, **to: int) -> None:
        self.event_log.write(
            "fragments", step=step, sent=sum(to.values()), to=to, merged=3, skipped={"epoch": 1}, bytes_sent=100,
            bytes_received=90, staleness=0.1,
        )  # fmt: skip

    def round(self, number: int) -> None:
        self.event_log.write(
            "round", lineage="L", round=number, status="committed", late=False, group_size=2, contributors=["a", "b"],
            parent_hash="p", anchor_hash="x", state_hash="y", bytes_sent=1000, bytes_received=900, wall_s=1.0,
            stall_s=0.0, tokens_discarded=0, cosine=0.1, mean_norm=2.0, reason="",
        )  # fmt: skip

    def sample(self, step: int, every: int = 10) -> None:
        self.event_log.write("sample", step=step, every=every, values=[0.25, -1.5])

    def read(self, after: int = 0) -> list[Event]:
        """All pages."""
        found: list[Event] = []
        while True:
            payload = self.event_log.page(after)
            assert len(payload) <= MAX_PAGE_BYTES
            page = parse_page(payload, now_s=self.clock.now)
            found += page.events
            after = page.last
            if not page.more:
                return found


def test_steps_are_folded_and_add_up() -> None:
    book = Book()
    for n in range(1, 101):
        book.step(n, loss=float(n))
        book.clock.now += 0.1
    first, *rest = [event for event in book.read() if event["event"] == "step"]
    assert first == {
        "event": "step", "t": 1001.9, "step": 20, "loss": 10.5, "tokens": 20 * 256, "step_s": 0.01,
        "exchange_s": 0.001, "steps": 20,
    }  # fmt: skip
    assert [event["step"] for event in rest] == [40, 60, 80, 100]


def test_a_fold_of_steps_ends_at_an_evaluation() -> None:
    """Who computes a speed leaves out the time of evaluations."""
    book, peer = Book(), PeerView(1)
    peer.state = PeerState.TRAINING
    for n in range(1, 101):
        book.step(n)
        if n % 7 == 0:
            book.clock.now += 5.0
            book.event_log.write("eval", step=n, loss=2.0)
        book.clock.now += 0.1
    for event in book.read():
        peer.apply(event)
    assert peer.tokens_per_s == pytest.approx(2560, rel=0.2)


def test_steps_are_told_also_after_the_clock_was_set_back() -> None:
    book = Book()
    book.step(1)
    book.clock.now -= 60.0
    for n in range(2, 101):
        book.step(n)
        book.clock.now += 0.1
    assert sum(event["steps"] for event in book.read() if event["event"] == "step") > 50


def test_a_reader_gets_everything_once() -> None:
    book = Book()
    book.round(0)
    book.fragments(5, b=2)
    page = parse_page(book.event_log.page(0), now_s=book.clock.now)
    assert [event["event"] for event in page.events] == ["round", "fragments"]
    assert book.read(page.last) == []
    book.clock.now += 1
    book.round(1)
    assert [event["round"] for event in book.read(page.last)] == [1]


def test_a_day_fits_and_its_sums_are_exact() -> None:
    """Everything of a day, in an afternoon's memory; curves span all of it, and what is recent is fine."""
    book = Book()
    steps = DAY_S // 4
    for n in range(steps):
        book.step(n + 1, loss=10.0 - 8 * n / steps)
        book.fragments(n, b=1, c=n % 3)
        if n % 15 == 0:
            book.round(n // 15)
        if n % 5 == 0:
            book.sample(n + 1, every=5)
        book.clock.now += 4
    events = book.read()
    of = {kind: [event for event in events if event["event"] == kind] for kind in ("step", "fragments", "round")}
    assert all(MOST[kind] // 2 <= len(found) <= MOST[kind] for kind, found in of.items())
    assert sum(event["steps"] for event in of["step"]) == steps
    assert sum(event["tokens"] for event in of["step"]) == 256 * steps
    assert sum(event["to"].get("c", 0) for event in of["fragments"]) == sum(n % 3 for n in range(steps))
    assert sum(event["skipped"]["epoch"] for event in of["fragments"]) == steps
    assert sum(e["bytes_sent"] + e.get("earlier_bytes_sent", 0) for e in of["round"]) == 1000 * len(range(0, steps, 15))
    times = [event["t"] for event in of["step"]]
    assert times == sorted(times)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert max(gaps) < DAY_S / 100
    assert gaps[-200:] == pytest.approx([4] * 200)
    assert of["step"][0]["loss"] > 9.9
    assert len(json.dumps(events)) < 2_000_000


def test_samples_of_two_peers_stay_at_the_same_steps() -> None:
    old, young = Book(), Book()
    for n in range(1000):
        for book in (old, young):
            book.clock.now += 10
        old.sample(10 * n + 3)
        if n > 300:
            young.sample(10 * n)
    kept = [{event["step"] // 10 for event in book.read()} for book in (old, young)]
    assert len(kept[0] & kept[1]) > 0.5 * min(map(len, kept))
    assert all(len(steps) <= MOST["sample"] for steps in kept)


def test_samples_that_cannot_be_told_apart_are_bounded_too() -> None:
    book = Book()
    for _ in range(1000):
        book.sample(0)
    assert len(book.read()) <= MOST["sample"]


def test_an_event_of_the_users_own_is_not_told() -> None:
    book = Book()
    book.event_log.write("lunch", dish="soup")
    book.event_log.write("step", mine=True)
    book.event_log.write("eval", step=3, loss=object())
    book.event_log.write("eval", step=4, loss=float("nan"))
    assert [(event["event"], event["loss"]) for event in book.read()] == [("eval", None)]


def test_what_is_asked_for_is_made_when_it_may_be_sent_and_no_sooner() -> None:
    async def main() -> None:
        pace, made_s = RateLimit(1000), []

        async def make() -> bytes:
            made_s.append(trio.current_time())
            return bytes(500)

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(pace.make, make)
        assert made_s == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0])

    run_virtual(main)


IDS = [f"Qm{number:0126}" for number in range(300)]
EXTREMES: dict[str, dict[str, Any]] = {
    "start": {
        "peer_id": IDS[0], "run_id": "r" * 128, "maddrs": ["m" * 512] * 16,
        "run": {"total_steps": 0, "model": "\u2028" * 128}, "run_digest": "d" * 64, "incarnation": "i" * 100,
        "parameters": 10**15,
    },
    "adopt": {
        "reason": "\u2028" * 9000, "lineage": "L" * 128, "round": -1, "run_step": 2**53, "anchor_hash": "a" * 64,
        "state_hash": "s" * 64, "founded": False,
    },
    "shard": {"sharding": "s" * 128, "shard": 2**53, "sizes": [2.0**53] * 5000, "partition_sha256": "p" * 64},
    "step": {"step": 2**53, "loss": 1e300, "tokens": 2**53, "step_s": math.inf, "exchange_s": 1e9},
    "fragments": {
        "step": 2**53, "sent": 10**9, "merged": 10**9, "skipped": {"epoch": 10**9}, "bytes_sent": 10**15,
        "bytes_received": 10**15, "staleness": 1e9, "to": dict.fromkeys(IDS, 10**9),
    },
    "round": {
        "lineage": "L" * 128, "round": 2**53, "status": "committed", "late": True, "group_size": 64,
        "contributors": tuple(IDS[:64]), "parent_hash": "p" * 64, "anchor_hash": "a" * 64, "state_hash": "s" * 64,
        "bytes_sent": 10**15, "bytes_received": 10**15, "wall_s": math.nan, "stall_s": 1e300, "tokens_discarded": 2**53,
        "reason": "x" * 5000, "cosine": -math.inf, "mean_norm": 1e300,
    },
    "pair": {
        "step": 2**53, "status": "paired", "partner": IDS[0], "reason": "x" * 5000, "bytes_sent": 10**15,
        "bytes_received": 10**15, "wall_s": math.inf, "distance": math.nan, "spread": 1e300,
    },
    "eval": {"step": 2**53, "loss": -(10**7)},
    "sample": {"step": 2**53, "every": 2**53, "values": [np.float64(1e17)] * 5000},
    "peers": {"alive": IDS},
    "daemon": {"status": "failed", "reason": "x" * 5000},
    "stop": {"reason": "x" * 5000},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_peer_writes_its_readers_read(kind: str) -> None:
    book = Book()
    book.event_log.write(kind, **EXTREMES[kind])
    book.clock.now += 10
    (event,) = book.read()
    assert event["event"] == kind
    assert event.keys() >= EXTREMES[kind].keys()
    assert event.get("loss") is None
    if kind == "peers":
        assert event["alive"] == IDS[:MAX_LINKS]


def test_a_loss_as_large_as_a_sum_of_squares_is_told() -> None:
    book = Book()
    book.event_log.write("eval", step=1, loss=-999_999.5)
    assert book.read()[0]["loss"] == -999_999.5


@pytest.mark.parametrize("values", [NESTED, [math.nan], object(), ["x"], None])
def test_an_event_that_cannot_be_told_costs_itself_alone(values: Any) -> None:
    book = Book()
    book.event_log.write("sample", step=1, every=1, values=values)
    book.event_log.write("eval", step=1, loss=1.0, mine=values)
    book.event_log.write("stop", reason="done")
    assert [event["event"] for event in book.read()][-1] == "stop"


def test_thinning_keeps_the_order_and_the_weight() -> None:
    kept = coalesce([(n, 1) for n in range(100)], 10, lambda item: item[1], lambda a, b: (a[0], a[1] + b[1]))
    assert len(kept) <= 10
    assert sum(weight for _, weight in kept) == 100
    assert [first for first, _ in kept] == sorted(first for first, _ in kept)


# --- bytes from others ---------------------------------------------------------------------------------------------

STOP: dict[str, Any] = {"event": "stop", "t": 1000.0, "reason": "done"}


def page_of(*events: Any, **changes: Any) -> bytes:
    return json.dumps({"last": 7, "more": False, "events": list(events), **changes}).encode()


def test_what_a_newer_version_adds_is_left_out() -> None:
    page = parse_page(
        page_of({**STOP, "mood": "fine"}, {"event": "party", "t": 1000.0, "observers": []}, hint=1), now_s=1000
    )
    assert page.events == [STOP]


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"null", b"[]", b"{", b"[" * 100_000, b"\xff", b'{"last":NaN,"more":false,"events":[]}',
        b" " * (MAX_PAGE_BYTES + 1),
        page_of(last=-1), page_of(last=True), page_of(last=1.5), page_of(more=0), page_of(events={}),
        page_of(more=True), page_of(1), page_of({}), page_of({"event": 3}),
        page_of({"event": "stop", "reason": "no time"}),
        page_of({**STOP, "t": "1"}),
        page_of({**STOP, "reason": 5}), page_of({**STOP, "reason": "x" * 5000}), page_of({"event": "stop", "t": 1000}),
        page_of({"event": "peers", "t": 1000, "alive": ["x"] * 10_000}),
        page_of({"event": "peers", "t": 1000, "alive": [["x"]]}),
        page_of({"event": "eval", "t": 1000, "step": 1, "loss": 1e300}),
        page_of({"event": "eval", "t": 1000, "step": -1, "loss": 1.0}),
        page_of({"event": "eval", "t": 1000, "step": True, "loss": 1.0}),
        b'{"last":1,"more":false,"events":[{"event":"eval","t":1000,"step":1,"loss":1e999}]}',
        b'{"last":' + b"9" * 5000 + b',"more":false,"events":[]}',
        page_of({"event": "sample", "t": 1000, "step": 1, "every": 0, "values": [1.0]}),
        page_of({"event": "sample", "t": 1000, "step": 1, "every": 1, "values": [1.0] * 5000}),
        page_of({"event": "sample", "t": 1000, "step": 1, "every": 1, "values": []}),
    ],
)  # fmt: skip
def test_nonsense_is_refused(payload: bytes) -> None:
    with pytest.raises(WireError):
        parse_page(payload, now_s=1000)


@pytest.mark.parametrize(
    ("event", "says"),
    [
        ({**STOP, "reason": 5}, "stop with a bad reason: Expected `str`, got `int`"),
        ({"event": "stop", "t": 1000}, "stop without reason"),
        ({"event": "eval", "t": 1000, "step": -1, "loss": 1.0}, "eval with a bad step: Expected `int` >= 0"),
        (
            {"event": "start", "t": 1000, "peer_id": "x", "run_id": "r", "maddrs": [], "run": {"a": 1}},
            "settings without total_steps",
        ),
    ],
)
def test_an_error_names_the_field_and_the_rule(event: Event, says: str) -> None:
    with pytest.raises(WireError, match=says):
        parse_page(page_of(event), now_s=1000)


@pytest.mark.parametrize("t", [1e9, -1e9])
def test_an_event_from_when_a_clock_was_wrong_is_left_out(t: float) -> None:
    assert parse_page(page_of({**STOP, "t": t}, STOP), now_s=1000).events == [STOP]


def test_every_kind_is_in_the_documentation() -> None:
    text = (Path(__file__).parents[3] / "docs/use/metrics.md").read_text(encoding="utf-8")
    for name, kind in KINDS.items():
        assert f"| `{name}` |" in text, name
        for key in (*kind.required, *kind.optional):
            assert f"`{key}`" in text, f"{name}: {key}"
