"""What a peer remembers of its own events, for those who look on; it is asked for like everything else of a peer.

Bounded, however long the peer lives: what is recent is kept as it was; what is older gets coarser the more of it there
is, and still adds up. The events are those of the metrics stream (docs/metrics.md), steps and counts of fragments
folded over a while.
"""

from __future__ import annotations

import json
import math
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import trio

from p2ptrain.protocol.event_log.downsampling import coalesce
from p2ptrain.protocol.event_log.events import KINDS, MAX_PAGE_BYTES, Event

# Fast peers make 200 steps a second, and nobody reads faster than this.
FOLD_S = 2.0
# What all who look on get together, at most: a hundredth of a fast link, and a third of a slow one (guess).
RATE_BYTES_S = 512 * 1024
# Entries kept of each kind of event: a day of steps at two minutes each, correlation at a hundred moments, and
# whatever happens rarely.
MOST = {"step": 1024, "fragments": 1024, "round": 1024, "eval": 512, "sample": 128}
MOST_OF_OTHERS = 256
# The share of them that is the newest, and kept as it was.
FRESH = 0.25
# More samples than that nobody takes: where halving them does not help, they are all of one moment.
MOST_STRIDE = 2**40


@dataclass(frozen=True, slots=True)
class Entry:
    """One event; `number` counts what was ever written here, `weight` how many such it was folded from."""

    number: int
    event: Event
    weight: int = 1


class EventLog:
    """Keeps a peer's events; a sink of them (`monitor.sinks.Sink`). Any thread may call any method.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: dict[str, list[Entry]] = {}
        self._last = 0
        # Steps of late: the first one's time, how many, and what they add up to.
        self._steps: Event | None = None
        self._loss: list[float] = [0.0, 0.0]

    def write(self, event: str, /, **fields: Any) -> None:
        """Take one event. What is no event of the contract, a user's own for one, is not kept."""
        if event not in KINDS or not KINDS[event].required.keys() <= fields.keys():
            return
        now = round(self._clock(), 3)
        with self._lock:
            if event == "step":
                self._take_step(now, fields)
            else:
                self._keep(event, {"event": event, "t": now, **fields})
                # Here, and not with the steps, which training waits for: it takes milliseconds.
                for kind in self._kinds:
                    self._thin(kind, MOST.get(kind, MOST_OF_OTHERS))

    def close(self) -> None:
        """Nothing to do: whoever looks on may still ask."""

    def page(self, after: int) -> bytes:
        """What was written since the entry numbered `after`, oldest first, as far as it fits a page.

        JSON: `{"last": number of the last event of this page, "more": whether there is more, "events": [...]}`.
        """
        with self._lock:
            self._end_fold(self._clock())
            fresh = [entry for kept in self._kinds.values() for entry in kept[bisect_right(kept, after, key=_NUMBER) :]]
        fresh.sort(key=_NUMBER)
        texts: list[str] = []
        size = 0
        for entry in fresh:
            # ASCII, so that characters are bytes; room for what stands around the events.
            text = _encode(entry.event)
            if size + len(text) + 100 > MAX_PAGE_BYTES and texts:
                break
            texts.append(text)
            size += len(text) + 1
            after = entry.number
        more = "true" if len(texts) < len(fresh) else "false"
        return f'{{"last":{after},"more":{more},"events":[{",".join(texts)}]}}'.encode()

    def _take_step(self, now: float, fields: Event) -> None:
        self._end_fold(now)
        if self._steps is None:
            self._steps = {"event": "step", "t": now, "tokens": 0, "exchange_s": 0.0, "steps": 0, "began": now}
            self._loss = [0.0, 0.0]
        fold, loss = self._steps, fields["loss"]
        fold["step"], fold["step_s"] = fields["step"], fields["step_s"]
        fold["tokens"] += fields["tokens"]
        fold["exchange_s"] += fields["exchange_s"]
        fold["steps"] += 1
        fold["t"] = now
        if loss is not None and math.isfinite(loss):
            self._loss[0] += loss
            self._loss[1] += 1

    def _end_fold(self, now: float) -> None:
        fold = self._steps
        if fold is None or now - fold["began"] < FOLD_S:
            return
        total, count = self._loss
        self._steps = None
        del fold["began"]
        fold["loss"] = round(total / count, 5) if count else None
        fold["exchange_s"] = round(fold["exchange_s"] / fold["steps"], 6)
        self._keep("step", fold)

    def _keep(self, kind: str, event: Event) -> None:
        self._last += 1
        kept = self._kinds.setdefault(kind, [])
        kept.append(Entry(self._last, event))
        # Where nothing but steps is ever written.
        self._thin(kind, 2 * MOST.get(kind, MOST_OF_OTHERS))

    def _thin(self, kind: str, most: int) -> None:
        kept = self._kinds[kind]
        if len(kept) > most:
            fresh = int(FRESH * most)
            old, goal = kept[:-fresh], most - 2 * fresh
            kept[:-fresh] = _thin_samples(old, goal) if kind == "sample" else coalesce(old, goal, _WEIGHT, _merge)


_NUMBER: Callable[[Entry], int] = attrgetter("number")
_WEIGHT: Callable[[Entry], int] = attrgetter("weight")


def _merge(older: Entry, newer: Entry) -> Entry:
    """One entry of two: steps and counts add up, of anything else the newer is kept."""
    a, b = older.event, newer.event
    event = dict(b)
    match b["event"]:
        case "step":
            event["steps"] = a["steps"] + b["steps"]
            event["tokens"] = a["tokens"] + b["tokens"]
            event["exchange_s"] = _mean(a["exchange_s"], a["steps"], b["exchange_s"], b["steps"])
            losses = [(e["loss"], e["steps"]) for e in (a, b) if e["loss"] is not None]
            event["loss"] = sum(x * n for x, n in losses) / sum(n for _, n in losses) if losses else None
        case "fragments":
            for name in ("sent", "merged", "bytes_sent", "bytes_received"):
                event[name] = a[name] + b[name]
            for name in ("skipped", "to"):
                event[name] = dict(Counter(a[name]) + Counter(b[name]))
            event["staleness"] = _mean(a["staleness"], a["merged"], b["staleness"], b["merged"])
        case "round":
            # What this peer sent for rounds that are not told of any more.
            event["earlier_bytes_sent"] = (
                a["bytes_sent"] + a.get("earlier_bytes_sent", 0) + b.get("earlier_bytes_sent", 0)
            )
    return Entry(newer.number, event, older.weight + newer.weight)


def _mean(a: float, of_a: int, b: float, of_b: int) -> float:
    return round((a * of_a + b * of_b) / (of_a + of_b), 6) if of_a + of_b else 0.0


def _thin_samples(entries: list[Entry], goal: int) -> list[Entry]:
    """Those at every 2nd, 4th, 8th … of the moments at which samples are taken: the same ones on every peer."""
    stride = 1
    while len(entries) > goal and stride < MOST_STRIDE:
        stride *= 2
        entries = [entry for entry in entries if entry.event["step"] // entry.event["every"] % stride == 0]
    return entries[-goal:]


def _encode(event: Event) -> str:
    """JSON, which has no NaN and no infinity."""
    plain = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in event.items()}
    try:
        return json.dumps(plain, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError):
        # A diverged model's sample, or a value of the user's that is no number and no text.
        return json.dumps({"event": "unreadable", "t": event["t"]})


class RateLimit:
    """Spreads what is sent over time: at most `rate_bytes_s`, whoever asks, and however many they are."""

    def __init__(self, rate_bytes_s: float) -> None:
        self._rate_bytes_s = rate_bytes_s
        self._free_s = 0.0

    async def wait(self, size_bytes: int) -> None:
        """Return when it is this answer's turn."""
        turn_s = max(self._free_s, trio.current_time())
        self._free_s = turn_s + size_bytes / self._rate_bytes_s
        await trio.sleep_until(turn_s)
