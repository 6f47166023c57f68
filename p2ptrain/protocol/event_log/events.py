"""The events of the metrics stream (docs/metrics.md) as peers tell them to each other: strictly checked.

A page of them is JSON from another machine: its size, every kind, field, type and length is checked, numbers are
finite, and what is not known here, because a newer version writes it, is left out.
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
# Far beyond every count and measure of a run; sums of many of them are finite still.
LARGEST = 1e18
# A loss is a few nats; beyond this a model has diverged, and it would only press the other curves flat.
LARGEST_LOSS = 1e6
# Peers whose clocks are more than seconds apart do not meet (the DHT refuses them).
AHEAD_S = 120.0
# Nobody has trained for longer.
BEHIND_S = 366 * 24 * 3600.0


def _text(value: Any) -> bool:
    return type(value) is str and len(value) <= MAX_TEXT


def _name(value: Any) -> bool:
    return type(value) is str and len(value) <= MAX_NAME


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


def _texts(value: Any) -> bool:
    return type(value) is list and len(value) <= MAX_NAMES and all(map(_text, value))


def _names(value: Any) -> bool:
    return type(value) is list and len(value) <= MAX_NAMES and all(map(_name, value))


def _counts(value: Any) -> bool:
    return type(value) is dict and len(value) <= MAX_NAMES and all(_name(k) and _count(v) for k, v in value.items())


def _numbers(value: Any) -> bool:
    return type(value) is list and len(value) <= MAX_VALUES and all(map(_number, value))


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
    """Some of a peer's events, oldest first: up to the one numbered `last`; `more` are there."""

    last: int
    more: bool
    events: list[Event]


def parse_page(payload: bytes, *, now_s: float) -> Page:
    """Check what another peer says that its event log holds.

    Args:
        payload: what it answered.
        now_s: seconds since the epoch, as `t` of events is.

    Raises:
        WireError: it says what no honest peer does.
    """
    if len(payload) > MAX_PAGE_BYTES:
        raise WireError(f"{len(payload)} bytes of events")
    try:
        page = json.loads(payload, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise WireError(f"events are no JSON: {error}") from None
    if type(page) is not dict or not _count(page.get("last")) or not _flag(page.get("more")):
        raise WireError("events are no page")
    if type(events := page.get("events")) is not list:
        raise WireError("a page without events")
    checked = [_check(event, now_s) for event in events]
    if page["more"] and not events:
        raise WireError("an empty page, and more of them")
    return Page(page["last"], page["more"], [event for event in checked if event is not None])


def _check(event: Any, now_s: float) -> Event | None:
    """The known fields of an event; None for one of a kind that is not known here."""
    if type(event) is not dict or type(name := event.get("event")) is not str:
        raise WireError("an event without a name")
    t = event.get("t")
    if t is None or not _number(t) or not now_s - BEHIND_S < t < now_s + AHEAD_S:
        raise WireError("an event of an impossible time")
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
        raise WireError("samples of no distance")
    return known


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")
