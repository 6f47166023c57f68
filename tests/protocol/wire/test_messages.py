"""Messages: every type round-trips, and headers with any wrong field are refused."""

from __future__ import annotations

import contextlib
import json
import math
import tracemalloc
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.errors import WireError
from p2ptrain.protocol.wire.frames import MAX_HEADER_BYTES
from p2ptrain.protocol.wire.messages import (
    KINDS,
    MAX_BEAT_MEMBERS,
    MAX_LIST,
    MAX_MADDRS,
    MAX_OFFER_BYTES,
    MAX_STRING,
    VOTER_HASH_BYTES,
    Attempt,
    Beat,
    Contributor,
    Fragment,
    Head,
    Hello,
    Join,
    Leave,
    Message,
    Part,
    Proposal,
    Propose,
    Record,
    Roster,
    RosterPart,
    View,
    pack,
    unpack,
)

every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.__name__)


def values_of(expected: Any) -> st.SearchStrategy[Any]:
    """All values of a message field's type, within its bounds."""
    if typing.get_origin(expected) is typing.Annotated:
        (base, meta), *_ = ((expected.__origin__, meta) for meta in expected.__metadata__)
        if meta.pattern is not None:
            return st.from_regex(meta.pattern)
        if base in (int, float):
            return (st.integers if base is int else st.floats)(meta.ge, meta.le)
        return values_of(base)
    if expected is int:
        return st.integers(-(2**63), 2**63 - 1)
    if expected is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if expected is bool:
        return st.booleans()
    if expected is str:
        return st.text(st.characters(exclude_categories=["Cc", "Cf", "Cs", "Zl", "Zp"]), max_size=20)
    if expected is bytes:
        return st.binary(max_size=20)
    options = typing.get_args(expected)
    if typing.get_origin(expected) is tuple:
        if options[1:] == (Ellipsis,):
            return st.lists(values_of(options[0]), max_size=4).map(tuple)
        return st.tuples(*map(values_of, options))
    if isinstance(expected, types.UnionType):
        return st.none() | values_of(options[0])
    return st.builds(
        expected,
        **{name: values_of(hint) for name, hint in typing.get_type_hints(expected, include_extras=True).items()},
    )


def plain(value: Any) -> Any:
    """A message as the lists that its bytes hold."""
    if isinstance(value, msgspec.Struct):
        return [plain(getattr(value, name)) for name in value.__struct_fields__]
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def example_of(expected: Any) -> Any:
    """One value of a field's type with no empty list and nothing optional left out."""
    if typing.get_origin(expected) is typing.Annotated:
        is_lineage = any(meta.pattern is not None for meta in expected.__metadata__)
        return "0-text" if is_lineage else example_of(expected.__origin__)
    simple: dict[Any, Any] = {int: 7, float: 0.5, bool: True, str: "text", bytes: b"bytes"}
    if expected in simple:
        return simple[expected]
    options = typing.get_args(expected)
    if typing.get_origin(expected) is tuple:
        if options[1:] == (Ellipsis,):
            return (example_of(options[0]),) * 2
        return tuple(map(example_of, options))
    if isinstance(expected, types.UnionType):
        return example_of(options[0])
    return expected(*map(example_of, typing.get_type_hints(expected, include_extras=True).values()))


@every_kind
def test_every_message_survives_the_wire(kind: type[Message]) -> None:
    @settings(max_examples=25, derandomize=True)
    @given(message=values_of(kind))
    def round_trip(message: Message) -> None:
        assert unpack(kind, pack(message)) == message
        assert pack(message) == msgpack.packb(plain(message))

    round_trip()


def test_the_bytes_of_every_message_stay_what_they_are() -> None:
    written = json.loads(Path(__file__).with_name("message_bytes.json").read_text(encoding="utf-8"))
    assert {kind.__name__: pack(example_of(kind)).hex() for kind in KINDS.values()} == written
    # They are MessagePack, and not one library's.
    assert {name: msgpack.unpackb(bytes.fromhex(data)) for name, data in written.items()} == {
        kind.__name__: plain(example_of(kind)) for kind in KINDS.values()
    }


def test_a_hello_has_a_bounded_number_of_addresses() -> None:
    fields = ["run", "0" * 64, "i", "trainer", ["x"] * MAX_MADDRS, b""]
    assert len(unpack(Hello, msgpack.packb(fields)).maddrs) == MAX_MADDRS
    fields[4] = ["x"] * (MAX_MADDRS + 1)
    with pytest.raises(WireError, match=r"array. of length <= 16"):
        unpack(Hello, msgpack.packb(fields))


@every_kind
def test_an_error_names_the_message_and_the_rule(kind: type[Message]) -> None:
    with pytest.raises(WireError, match=f"bad {kind.__name__}: Expected `array`, got `int`"):
        unpack(kind, msgpack.packb(7))


@pytest.mark.parametrize(
    ("came", "shown"),
    [
        ([7, "bye"], "[7, 'bye']"),
        ({"reason": "\x1b[2J"}, r"{'reason': '\x1b[2J'}"),
        ([b"x" * 100], "[b'" + 77 * "x"),
        (b"x" * 5000, "5003 bytes"),
    ],
)
def test_an_error_shows_the_beginning_of_what_came(came: object, shown: str) -> None:
    """Another version may have other fields: without what came, nobody can tell."""
    with pytest.raises(WireError) as caught:
        unpack(Leave, msgpack.packb(came))
    assert str(caught.value).rpartition("; it came as ")[2] == shown


@given(data=st.binary(max_size=200))
def test_whatever_comes_is_a_message_or_an_error_of_its_sender(data: bytes) -> None:
    for header in (data, b"\x91" * 2000 + data, b"\x81" + data, b"\x82\x91" + data):
        with contextlib.suppress(WireError):
            unpack(Leave, header)


def test_an_error_names_the_field_and_its_value() -> None:
    with pytest.raises(WireError, match=r"bad Leave: Expected `str`, got `int` - at `\$\[0\]`"):
        unpack(Leave, msgpack.packb([7]))


def test_a_whole_number_becomes_a_float_where_the_field_is_one() -> None:
    (age,) = plain(unpack(Fragment, msgpack.packb(["l", 1, "s", 1, 1, 1, 1, 2**60])))[-1:]
    assert (type(age), age) == (float, 2.0**60)


@settings(max_examples=50, derandomize=True)
@given(head=values_of(Head), record=values_of(Record))
def test_heads_and_records_have_canonical_bytes(head: Head, record: Record) -> None:
    assert unpack(Head, pack(head)) == head
    assert unpack(Record, pack(record)) == record
    assert pack(unpack(Record, pack(record))) == pack(record)


def test_the_numbers_on_the_wire_stay_what_they_are() -> None:
    names = [kind.__name__ for kind in KINDS.values()]
    assert names == [
        "Hello", "Beat", "Ack", "Leave", "Fragment", "Due", "Call", "Join", "Refuse", "Roster", "Contribution",
        "Arrived", "Reduce", "Reduced", "Propose", "Ready", "Commit", "Abort", "Withdraw", "Request", "Answer",
        "Landed", "Accuse", "Challenge", "Proof", "Mean", "PairOffer", "PairAnswer",
        "PairWeights",
    ]  # fmt: skip
    assert list(KINDS) == list(range(1, 30))


def test_attempts_are_ordered_by_counter_then_leader_then_incarnation() -> None:
    assert Attempt(1, "z", "2") < Attempt(2, "a", "9") < Attempt(2, "b", "1") < Attempt(2, "b", "2")


# --- hostile headers ---------------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
WRONG: dict[Any, list[Any]] = {
    int: ["7", 7.0, True, None, b"7", [7], {}, 2**63, 2**64 - 1],
    float: ["0.5", True, None, b"", [0.5], NAN, INF, -INF],
    bool: [1, 0, "true", None, []],
    str: [b"text", 7, None, ["text"], {}, "x" * (MAX_STRING + 1)],
    bytes: (None, 7, "text", True, []),
}


def corruptions(expected: Any, packed: Any) -> Iterator[Any]:
    """The packed value with each of its parts, in turn, replaced by something of another kind."""
    if expected in WRONG:
        yield from WRONG[expected]
        return
    options = typing.get_args(expected)
    if isinstance(expected, types.UnionType):
        yield from (bad for bad in corruptions(options[0], packed) if bad is not None)
        return
    yield from (None, 7, "text", b"", {}, {1: 2}, [*packed, None])
    if typing.get_origin(expected) is tuple:
        hints = [options[0]] * len(packed) if options[1:] == (Ellipsis,) else list(options)
        if options[1:] != (Ellipsis,):
            yield packed[:-1]
    else:
        hints = list(typing.get_type_hints(expected).values())
        if hints:
            yield packed[:-1]
    for i, hint in enumerate(hints):
        for bad in corruptions(hint, packed[i]):
            yield [*packed[:i], bad, *packed[i + 1 :]]


@every_kind
def test_a_field_of_the_wrong_kind_is_refused(kind: type[Message]) -> None:
    good = msgpack.unpackb(pack(example_of(kind)))
    assert unpack(kind, msgpack.packb(good)) == example_of(kind)
    count = 0
    for bad in corruptions(kind, good):
        with pytest.raises(WireError):
            unpack(kind, msgpack.packb(bad))
        count += 1
    assert count >= 7


@every_kind
def test_random_and_damaged_headers_are_refused_or_well_formed(kind: type[Message]) -> None:
    good = pack(example_of(kind))

    @settings(max_examples=60, derandomize=True)
    @given(
        noise=st.binary(max_size=60),
        cut=st.integers(0, len(good)),
        flip=st.integers(0, 8 * len(good) - 1),
    )
    def hostile(noise: bytes, cut: int, flip: int) -> None:
        flipped = bytearray(good)
        flipped[flip // 8] ^= 1 << flip % 8
        for header in (noise, good[:cut] + noise, bytes(flipped)):
            try:
                message = unpack(kind, header)
            except WireError:
                continue
            assert type(message) is kind
            assert unpack(kind, pack(message)) == message

    hostile()


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(b"\x91" * 200_000, id="200,000 lists in one another"),
        pytest.param(b"\x81\x01" * 100_000, id="maps in one another"),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="a list of 4 billion"),
        pytest.param(b"\x91\xdd\x00\x10\x00\x00" + b"\xc0" * 1000, id="a list of a million, cut short"),
        pytest.param(b"\x91\xdb\xff\xff\xff\xff", id="a string of 4 GB"),
        pytest.param(b"\x91\xc6\xff\xff\xff\xff", id="bytes of 4 GB"),
        pytest.param(b"\xdf\xff\xff\xff\xff", id="a map of 4 billion"),
        pytest.param(b"\x91\xc9\xff\xff\xff\xff\x05", id="an extension of 4 GB"),
        pytest.param(b"\x91\xd6\xff\x00\x00\x00\x00", id="a timestamp"),
        pytest.param(b"\x91\xa2\xc3\x28", id="a string that is no UTF-8"),
        pytest.param(b"\x91\xa3\xed\xa0\x80", id="a string with half a surrogate pair"),
        pytest.param(b"\x91\xc1", id="a byte that msgpack never uses"),
        pytest.param(b"\x91\xa1x\x00", id="something after the end"),
        pytest.param(b"", id="nothing"),
        pytest.param(msgpack.packb(["x"] * (MAX_LIST + 1)), id="a list that is too long"),
        pytest.param(msgpack.packb(["x" * (MAX_STRING + 1)]), id="a string that is too long"),
    ],
)
def test_a_hostile_header_costs_nothing(header: bytes) -> None:
    for kind in KINDS.values():
        tracemalloc.start()
        try:
            with pytest.raises(WireError):
                unpack(kind, header)
            assert tracemalloc.get_traced_memory()[1] < 1_000_000
        finally:
            tracemalloc.stop()


def test_the_longest_honest_messages_fit() -> None:
    """A round of 64 contributors and parts, at libp2p's 52 characters an id; a beat with two well-known members."""
    ids = [f"{i:052d}" for i in range(128)]
    record = Record(
        "g" * 20, "l" * 20, 2**40, "0" * 64,
        tuple(Contributor(peer, "i" * 16, 1 / 3, bytes(32)) for peer in ids[:64]),
        tuple(Part(1024 * i, 1024 * i + 1024, "0" * 64, ids[i % 64]) for i in range(64)),
        "nesterov", 0.7, 0.9, 2**40, 2**50, tuple((peer, 500) for peer in ids[:64]), 0.5, 1.5,
        tuple((peer, "i" * 16) for peer in ids[:31]),
    )  # fmt: skip
    views = tuple(View(peer, "i" * 16, bytes(VOTER_HASH_BYTES * 95), bytes(560)) for peer in ids[:31])
    proposal = Proposal(record, views)
    attempt = Attempt(3, ids[0], "a" * 16)
    expected = tuple(Contributor(peer, "i" * 16, 1 / 3, b"") for peer in ids[:64])
    parts = tuple(RosterPart(1024 * i, 1024 * i + 1024, ids[i % 64], ()) for i in range(512))
    maddrs = tuple("/ip4/1.2.3.4/tcp/4001/p2p/".ljust(512, "x") for _ in range(16))
    longest = [
        Propose(attempt, proposal),
        Join("l", 1, attempt, "i", "0" * 64, True, 1, 1, 1, 1.0, 1.0, tuple(ids), False, views[0], attempt, proposal),
        Roster("l", 1, attempt, tuple(ids[:64]), parts, expected),
        Beat(1.0, 1.0, 1.0, "0-g", "0-l", 1, 1, 1, "x" * 60, 1.0, ((ids[0], maddrs), (ids[1], maddrs)), 1),
        Hello("r" * 128, "0" * 64, "i" * 16, "trainer", maddrs, bytes(MAX_OFFER_BYTES)),
    ]
    for message in longest:
        header = pack(message)
        assert len(header) <= MAX_HEADER_BYTES / 2
        assert unpack(type(message), header) == message
    senders = tuple(ids[:64])
    dense = Roster("l", 1, attempt, senders, tuple(RosterPart(0, 2**40, peer, senders) for peer in senders), ())
    assert len(pack(dense)) <= MAX_HEADER_BYTES


# --- what a heartbeat may claim ---------------------------------------------------------------------------------

BEAT = Beat(1.0, 0.0, 0.0, "0-g", "0-l", 3, 70, 7, "training", 2.0, (), 1)


IMPOSSIBLE: list[dict[str, Any]] = [
    {"sent_s": -1.0}, {"sent_s": 1e13}, {"echo_s": -1.0}, {"held_s": -0.1}, {"held_s": 1e300},
    {"genesis": "x-y"}, {"genesis": "g"}, {"lineage": "x-y"}, {"lineage": "1-"}, {"lineage": "1-a\n"},
    {"lineage": "1-" + 65 * "a"}, {"lineage": "1234567890-a"}, {"lineage": "1-é"}, {"lineage": "1-\x1b"},
    {"round": -2}, {"round": 2**62 + 1}, {"round": 2**63 - 1}, {"tokens_total": -1}, {"tokens_total": 2**62 + 1},
    {"step": -1}, {"step": 2**63 - 1}, {"status": 257 * "x"}, {"speed": -1.0}, {"speed": 1.1e6}, {"speed": 1e308},
    {"reach": -1}, {"reach": 106}, {"members": (("x", ()),) * (MAX_BEAT_MEMBERS + 1)}, {"members": ((129 * "x", ()),)},
    {"members": (("x", ("a",) * 17),)}, {"members": (("x", (513 * "a",)),)},
]  # fmt: skip


@pytest.mark.parametrize("lie", IMPOSSIBLE, ids=lambda lie: f"{next(iter(lie))} {str(next(iter(lie.values())))[:12]!r}")
def test_an_impossible_heartbeat_is_refused(lie: dict[str, Any]) -> None:
    fields = [lie.get(name, getattr(BEAT, name)) for name in Beat.__struct_fields__]
    with pytest.raises(WireError):
        unpack(Beat, msgspec.msgpack.encode(fields))


@pytest.mark.parametrize("field", ["sent_s", "echo_s", "held_s", "speed"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_heartbeat_with_a_number_that_is_not_finite_is_refused(field: str, value: float) -> None:
    packed = msgpack.packb([*msgspec.structs.astuple(msgspec.structs.replace(BEAT, **{field: value}))])
    with pytest.raises(WireError):
        unpack(Beat, packed)


def test_a_heartbeat_at_its_limits_is_taken() -> None:
    most = Beat(
        1e12, 1e12, 1e12, "999999999-" + 64 * "z", "0-a", 2**62, 2**62, 2**62, 256 * "x", 1e6,
        ((128 * "x", (512 * "a",) * 16),) * MAX_BEAT_MEMBERS, 64,
    )  # fmt: skip
    assert unpack(Beat, pack(most)) == most
    assert unpack(Beat, pack(least := Beat(0.0, 0.0, 0.0, "", "", -1, 0, 0, "", 0.0, (), 0))) == least
