"""Parses pages of events (docs/use/metrics.md) from other peers with strict checks, and encodes our own for them.

A page is untrusted JSON. Sizes, kinds, fields, types and lengths are checked, numbers must be finite, and control
characters in texts are escaped. Unknown events and fields, which a newer version may send, are dropped.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from p2ptrain.errors import WireError
from p2ptrain.protocol.links.limits import MAX_LINKS
from p2ptrain.protocol.wire.text import escaped_all

Event = dict[str, Any]

MAX_PAGE_BYTES = 256 * 1024
# Bytes of a page around its events.
PAGE_FRAME_BYTES = 100
MAX_TEXT = 2048
# Length of a peer id or a reason, and entries of a list; a round has at most 64 contributors.
MAX_NAME = 128
MAX_NAMES = MAX_LINKS
MAX_VALUES = 1024
# Larger than any count or measure of a run. Sums of many such numbers are finite.
LARGEST = 10**18
# A loss is a few nats. A model with a larger loss has diverged, and would spoil the scale of plots.
LARGEST_LOSS = 1e6
# An event may be this much in the future: the DHT refuses peers whose clocks differ by more than seconds.
AHEAD_S = 120.0
# An event may be this old: longer than any run.
BEHIND_S = 366 * 24 * 3600.0

Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Number = Annotated[float, Meta(gt=-LARGEST, lt=LARGEST)]
Whole = Annotated[int, Meta(gt=-LARGEST, lt=LARGEST)]
Count = Annotated[int, Meta(ge=0, lt=LARGEST)]
Index = Annotated[int, Meta(ge=-1, lt=LARGEST)]
Loss = Annotated[float, Meta(ge=-LARGEST_LOSS, le=LARGEST_LOSS)] | None
Texts = Annotated[list[Text], Meta(max_length=MAX_NAMES)]
Names = Annotated[list[Name], Meta(max_length=MAX_NAMES)]
Numbers = Annotated[list[Number], Meta(min_length=1, max_length=MAX_VALUES)]
Counts = Annotated[dict[Name, Count], Meta(max_length=MAX_NAMES)]
Settings = Annotated[dict[Text, Text | bool | Whole | Number], Meta(max_length=MAX_NAMES)]


@dataclass(frozen=True)
class Kind:
    """The types of the fields of one kind of event, by name."""

    required: dict[str, Any]
    optional: dict[str, Any] = field(default_factory=dict)


KINDS: dict[str, Kind] = {
    "start": Kind(
        {"peer_id": Name, "run_id": Text, "maddrs": Texts, "run": Settings},
        {"run_digest": Text, "incarnation": Text, "parameters": Count},
    ),
    "adopt": Kind(
        {
            "reason": Text, "lineage": Name, "round": Index, "run_step": Count, "anchor_hash": Text,
            "state_hash": Text,
        },
        {"founded": bool, "founder": Text},
    ),
    "shard": Kind({"sharding": Text, "shard": Count, "sizes": Numbers, "partition_sha256": Text}),
    "step": Kind(
        {"step": Count, "loss": Loss, "tokens": Count, "step_s": Number | None, "exchange_s": Number}, {"steps": Count}
    ),
    "fragments": Kind(
        {
            "step": Count, "sent": Count, "merged": Count, "skipped": Counts, "bytes_sent": Count,
            "bytes_received": Count, "staleness": Number,
        },
        {"to": Counts, "push_every_s": Number},
    ),
    "round": Kind(
        {
            "lineage": Name, "round": Index, "status": Text, "late": bool, "group_size": Count,
            "contributors": Names, "parent_hash": Text, "anchor_hash": Text, "state_hash": Text,
            "bytes_sent": Count, "bytes_received": Count, "wall_s": Number | None, "stall_s": Number | None,
            "tokens_discarded": Count, "reason": Text,
        },
        {"record_sha256": Text, "cosine": Number | None, "mean_norm": Number | None, "earlier_bytes_sent": Count},
    ),
    "pair": Kind({
        "step": Count, "status": Text, "partner": Name, "reason": Text, "bytes_sent": Count, "bytes_received": Count,
        "wall_s": Number | None, "distance": Number | None, "spread": Number | None,
    }),
    "eval": Kind({"step": Count, "loss": Loss}),
    "sample": Kind({"step": Count, "every": Annotated[int, Meta(ge=1, lt=LARGEST)], "values": Numbers}),
    "peers": Kind({"alive": Names}),
    "daemon": Kind({"status": Text, "reason": Text}),
    "stop": Kind({"reason": Text}),
}  # fmt: skip


def encode_event(event: Event) -> str:
    """An event of our own as JSON that passes `parse_page`: texts and lists are cut to its limits, larger numbers null.

    An event that does not pass even so, as with a user's value of another type, becomes one of an unknown kind.
    """
    kind = KINDS[event["event"]]
    types = kind.required | kind.optional
    cut = {key: _cut(value, types[key]) if key in types else value for key, value in event.items()}
    try:
        # ASCII, so characters are bytes.
        text = json.dumps(cut, separators=(",", ":"), allow_nan=False)
        _check(msgspec.json.decode(text), event["t"])
    except (TypeError, ValueError, RecursionError, WireError):
        text = ""
    if not 0 < len(text) <= MAX_PAGE_BYTES - PAGE_FRAME_BYTES:
        return json.dumps({"event": "unreadable", "t": event["t"]})
    return text


def _cut(value: Any, expected: Any) -> Any:
    match value:
        case str():
            return value[: MAX_NAME if expected is Name else MAX_TEXT]
        case list() | tuple():
            return value[: MAX_VALUES if expected is Numbers else MAX_NAMES]
        case dict():
            return dict(list(value.items())[:MAX_NAMES])
        case float() | int() if not abs(value) < (LARGEST_LOSS if expected is Loss else LARGEST):
            return None
    return value


class Page(msgspec.Struct):
    """Some of a peer's events, oldest first, up to number `last`. `more`: whether there are more."""

    last: Count
    more: bool
    events: list[Event]


def parse_page(payload: bytes, *, now_s: float) -> Page:
    """Parse another peer's page of events. `now_s` is in seconds since the epoch. Raises WireError if malformed."""
    if len(payload) > MAX_PAGE_BYTES:
        raise WireError(f"{len(payload)} bytes of events")
    try:
        page = msgspec.json.decode(payload, type=Page)
    except (ValueError, RecursionError) as error:
        raise WireError(f"malformed page of events: {error}") from None
    if page.more and not page.events:
        raise WireError("an empty page that announces more")
    page.events = [known for event in page.events if (known := _check(event, now_s)) is not None]
    return page


def _check(event: Event, now_s: float) -> Event | None:
    """The known fields of an event; None for an unknown kind, and for one that was noted while its clock was wrong."""
    name = _convert(event, "event", str, "an event")
    t = _convert(event, "t", Number, "an event")
    if (kind := KINDS.get(name)) is None or not now_s - BEHIND_S < t < now_s + AHEAD_S:
        return None
    known: Event = {"event": name, "t": t}
    for key, expected in (kind.required | kind.optional).items():
        if key in event or key in kind.required:
            known[key] = escaped_all(_convert(event, key, expected, name))
    if name == "start":
        _convert(known["run"], "total_steps", Count, "settings")
    return known


def _convert(fields: Event, key: str, expected: Any, name: str) -> Any:
    if key not in fields:
        raise WireError(f"{name} without {key}")
    try:
        return msgspec.convert(fields[key], expected)
    except msgspec.ValidationError as error:
        raise WireError(f"{name} with a bad {key}: {error}") from None
