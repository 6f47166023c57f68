"""Parses pages of events (docs/metrics.md) from other peers, with strict checks.

A page is untrusted JSON. Sizes, kinds, fields, types and lengths are checked, and numbers must be finite. Unknown
events and fields, as from a newer version, are dropped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from p2ptrain.errors import WireError

Event = dict[str, Any]
Check = Callable[[Any], bool]

MAX_PAGE_BYTES = 256 * 1024
MAX_TEXT = 2048
# Peer ids and reasons; a round has at most 64 contributors, a peer at most 128 links.
MAX_NAME = 128
MAX_NAMES = 128
MAX_VALUES = 1024
# Larger than any count or measure of a run; sums of many such numbers are finite.
LARGEST = 1e18
# A loss is a few nats; with a larger one a model has diverged, and would spoil the scale of plots.
LARGEST_LOSS = 1e6
# The DHT refuses peers whose clocks differ by more than seconds.
AHEAD_S = 120.0
# Longer than any run.
BEHIND_S = 366 * 24 * 3600.0


def _text(value: Any, most: int = MAX_TEXT) -> bool:
    return type(value) is str and len(value) <= most


def _name(value: Any) -> bool:
    return _text(value, MAX_NAME)


def _flag(value: Any) -> bool:
    return type(value) is bool


def _number(value: Any) -> bool:
    return type(value) in (int, float) and -LARGEST < value < LARGEST


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST


def _index(value: Any) -> bool:
    return type(value) is int and -1 <= value < LARGEST


def _loss(value: Any) -> bool:
    return value is None or (_number(value) and abs(value) <= LARGEST_LOSS)


def _maybe(value: Any) -> bool:
    return value is None or _number(value)


def _list_of(check: Check, most: int) -> Check:
    return lambda value: type(value) is list and len(value) <= most and all(map(check, value))


_texts, _names, _numbers = _list_of(_text, MAX_NAMES), _list_of(_name, MAX_NAMES), _list_of(_number, MAX_VALUES)


def _counts(value: Any) -> bool:
    return type(value) is dict and len(value) <= MAX_NAMES and all(_name(k) and _count(v) for k, v in value.items())


def _settings(value: Any) -> bool:
    return (
        type(value) is dict
        and len(value) <= MAX_NAMES
        and _count(value.get("total_steps"))
        and all(_text(name) and (_text(v) or _flag(v) or _number(v)) for name, v in value.items())
    )


@dataclass(frozen=True)
class Kind:
    """The fields of one kind of event, by name."""

    required: Mapping[str, Check]
    optional: Mapping[str, Check] = field(default_factory=dict)


KINDS: dict[str, Kind] = {
    "start": Kind(
        {"peer_id": _name, "run_id": _text, "maddrs": _texts, "run": _settings},
        {"run_digest": _text, "incarnation": _text, "parameters": _count},
    ),
    "adopt": Kind(
        {
            "reason": _text, "lineage": _name, "round": _index, "run_step": _count, "anchor_sha256": _text,
            "state_sha256": _text,
        }
    ),
    "shard": Kind({"sharding": _text, "shard": _count, "sizes": _numbers, "partition_sha256": _text}),
    "step": Kind(
        {"step": _count, "loss": _loss, "tokens": _count, "step_s": _maybe, "exchange_s": _number}, {"steps": _count}
    ),
    "fragments": Kind(
        {
            "step": _count, "sent": _count, "merged": _count, "skipped": _counts, "bytes_sent": _count,
            "bytes_received": _count, "staleness": _number,
        },
        {"to": _counts},
    ),
    "round": Kind(
        {
            "lineage": _name, "round": _index, "status": _text, "late": _flag, "group_size": _count,
            "contributors": _names, "parent_sha256": _text, "anchor_sha256": _text, "state_sha256": _text,
            "bytes_sent": _count, "bytes_received": _count, "wall_s": _maybe, "stall_s": _maybe,
            "tokens_discarded": _count, "reason": _text,
        },
        {"cosine": _maybe, "mean_norm": _maybe, "earlier_bytes_sent": _count},
    ),
    "eval": Kind({"step": _count, "loss": _loss}),
    "sample": Kind({"step": _count, "every": _count, "values": _numbers}),
    "peers": Kind({"alive": _names}),
    "daemon": Kind({"status": _text, "reason": _text}),
    "stop": Kind({"reason": _text}),
}  # fmt: skip


@dataclass(frozen=True)
class Page:
    """Some of a peer's events, oldest first, up to number `last`. `more`: whether there are more."""

    last: int
    more: bool
    events: list[Event]


def parse_page(payload: bytes, *, now_s: float) -> Page:
    """Parse another peer's page of events. `now_s` is in seconds since the epoch. Raises WireError if malformed."""
    if len(payload) > MAX_PAGE_BYTES:
        raise WireError(f"{len(payload)} bytes of events")
    try:
        page = json.loads(payload, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise WireError(f"events are not JSON: {error}") from None
    if type(page) is not dict or not _count(page.get("last")) or not _flag(page.get("more")):
        raise WireError("malformed page of events")
    if type(events := page.get("events")) is not list:
        raise WireError("a page without events")
    checked = [_check(event, now_s) for event in events]
    if page["more"] and not events:
        raise WireError("an empty page that announces more")
    return Page(page["last"], page["more"], [event for event in checked if event is not None])


def _check(event: Any, now_s: float) -> Event | None:
    """The known fields of an event; None for an unknown kind."""
    if type(event) is not dict or type(name := event.get("event")) is not str:
        raise WireError("an event without a name")
    t = event.get("t")
    if t is None or not _number(t) or not now_s - BEHIND_S < t < now_s + AHEAD_S:
        raise WireError("an event with an impossible time")
    if (kind := KINDS.get(name)) is None:
        return None
    known: Event = {"event": name, "t": t}
    for fields in (kind.required, kind.optional):
        for key, check in fields.items():
            if key not in event and fields is kind.optional:
                continue
            if key not in event or not check(event[key]):
                raise WireError(f"{name} with a bad {key}")
            known[key] = event[key]
    if name == "sample" and known["every"] < 1:
        raise WireError("samples with a distance below 1")
    return known


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")
