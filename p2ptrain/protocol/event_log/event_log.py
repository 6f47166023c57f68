"""A peer's log of its own events, which observers request over their links.

It has the events of the metrics stream (docs/use/metrics.md), with steps aggregated over two seconds. The log is
bounded: recent events are kept, and older ones are merged so that their sums stay right.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import trio

from p2ptrain.protocol.event_log.downsampling import coalesce
from p2ptrain.protocol.event_log.events import KINDS, MAX_PAGE_BYTES, PAGE_FRAME_BYTES, Event, encode_event

# Steps within this time become one event. Fast peers make 200 steps per second, more than an observer needs.
FOLD_S = 2.0
# Limit of the answers to all observers together: a hundredth of a fast link, a third of a slow one (guess).
RATE_BYTES_S = 512 * 1024
# Entries kept of each kind of event. 1024 step events cover a day if each covers 84 s.
MOST = {"step": 1024, "fragments": 1024, "round": 1024, "pair": 1024, "eval": 512, "sample": 128}
MOST_OF_OTHERS = 256
# Share of the newest entries, which are not merged.
FRESH = 0.25
# Largest distance between kept samples, in their intervals. If more samples are left, they are all of one step.
MOST_STRIDE = 2**40


@dataclass(frozen=True, slots=True)
class Entry:
    """An event, its serial number, and the number of events that were merged into it."""

    number: int
    event: Event
    weight: int = 1


class EventLog:
    """Keeps a peer's events; implements `peer.sinks.Sink`. Thread-safe.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: dict[str, list[Entry]] = {}
        self._last = 0
        # The current aggregate of steps, and the sum and count of its losses.
        self._steps: Event | None = None
        self._loss: list[float] = [0.0, 0.0]

    def write(self, event: str, /, **fields: Any) -> None:
        """Add an event. Events that are not in docs/use/metrics.md, such as a user's own, are ignored."""
        if event not in KINDS or not KINDS[event].required.keys() <= fields.keys():
            return
        now = round(self._clock(), 3)
        with self._lock:
            if event == "step":
                self._take_step(now, fields)
            else:
                if event == "eval":  # its time is not one of steps, for whoever reads both
                    self._end_fold(math.inf)
                self._keep(event, {"event": event, "t": now, **fields})
                # Not after steps, because it takes milliseconds and the training thread waits for it.
                for kind in self._kinds:
                    self._thin(kind, MOST.get(kind, MOST_OF_OTHERS))

    def close(self) -> None:
        """Nothing to do: observers may still read."""

    def page(self, after: int) -> bytes:
        """The oldest entries after number `after` that fit a page.

        JSON: `{"last": number of the page's last entry, "more": whether there are more, "events": [...]}`.
        """
        with self._lock:
            self._end_fold(self._clock())
            fresh = [entry for kept in self._kinds.values() for entry in kept[bisect_right(kept, after, key=_NUMBER) :]]
        fresh.sort(key=_NUMBER)
        texts: list[str] = []
        size = 0
        for entry in fresh:
            text = encode_event(entry.event)
            if size + len(text) + PAGE_FRAME_BYTES > MAX_PAGE_BYTES:
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
        if fold is None or 0 <= now - fold["began"] < FOLD_S:  # the clock may be set back
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
        # A looser bound, in case only steps are written.
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
    """Merge two entries: their counts add up, and other fields are the newer event's."""
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
        case "pair":
            for name in ("bytes_sent", "bytes_received"):
                event[name] = a[name] + b[name]
        case "round":
            # Bytes that this peer sent for the rounds that were merged into this one.
            event["earlier_bytes_sent"] = (
                a["bytes_sent"] + a.get("earlier_bytes_sent", 0) + b.get("earlier_bytes_sent", 0)
            )
    return Entry(newer.number, event, older.weight + newer.weight)


def _mean(a: float, of_a: int, b: float, of_b: int) -> float:
    return round((a * of_a + b * of_b) / (of_a + of_b), 6) if of_a + of_b else 0.0


def _thin_samples(entries: list[Entry], goal: int) -> list[Entry]:
    """Keep every 2nd, 4th, 8th … sample, at the same steps on every peer."""
    stride = 1
    while len(entries) > goal and stride < MOST_STRIDE:
        stride *= 2
        entries = [entry for entry in entries if entry.event["step"] // entry.event["every"] % stride == 0]
    return entries[-goal:]


class RateLimit:
    """Limits the total rate of answers to `rate_bytes_s`."""

    def __init__(self, rate_bytes_s: float) -> None:
        self._rate_bytes_s = rate_bytes_s
        self._turn = trio.Lock()
        self._free_s = 0.0

    async def make(self, answer_of: Callable[[], Awaitable[bytes]]) -> bytes:
        """Wait until the rate allows another answer, then make it: a waiting caller holds no bytes."""
        async with self._turn:
            await trio.sleep_until(self._free_s)
            answer = await answer_of()
            self._free_s = trio.current_time() + len(answer) / self._rate_bytes_s
            return answer
