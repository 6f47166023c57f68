"""Texts of other peers never reach a person with control characters, which could forge lines or colours."""

from __future__ import annotations

import io
import json
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from p2ptrain.errors import ConfigError, WireError
from p2ptrain.protocol.event_log import events
from p2ptrain.protocol.event_log.events import encode_event, parse_page
from p2ptrain.protocol.membership.directory import decode_record
from p2ptrain.protocol.wire.messages import KINDS, MAX_REASON, Message, Withdraw, pack, unpack
from p2ptrain.protocol.wire.text import escaped, for_terminal
from p2ptrain.settings.config import RunConfig
from tests.protocol.wire.test_messages import example_of

EXAMPLES = {kind: example_of(kind) for kind in KINDS.values()}
FORGED = "\x1b[31m\nFORGED"
# Also what no terminal obeys alone: C1 controls, line separators, and what turns the direction around.
UNSAFE = [FORGED, "\r", "\x07", "\x7f", "\x9b31m", "\u2028", "\u202e", "\u200b", "\ufeff", "\U000e0041"]
FREE = {("Beat", "status"), ("Leave", "reason"), ("Abort", "reason"), ("Withdraw", "reason"), ("Answer", "note")}


def forgeries(value: Any, text: str) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Copies of a message's list of fields, each with another of its texts replaced, and where."""
    if isinstance(value, str):
        yield (), text
    if isinstance(value, list):
        for i, item in enumerate(value):
            for at, forged in forgeries(item, text):
                yield (i, *at), [*value[:i], forged, *value[i + 1 :]]


def texts_of(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for pair in value.items() for item in pair for text in texts_of(item))
    elif isinstance(value, (list, tuple)):
        yield from (text for item in value for text in texts_of(item))


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("text", UNSAFE, ids=ascii)
def test_every_text_of_every_message_is_refused_or_escaped(kind: type[Message], text: str) -> None:
    example = EXAMPLES[kind]
    fields = msgspec.msgpack.decode(pack(example))
    for at, forged in forgeries(fields, text):
        name = kind.__struct_fields__[at[0]]
        data = msgspec.msgpack.encode(forged)
        if (kind.__name__, name) in FREE:
            assert getattr(unpack(kind, data), name) == escaped(text)
            assert escaped(text).isprintable()
            continue
        with pytest.raises(WireError) as caught:
            unpack(kind, data)
        assert str(caught.value).isprintable()


def test_the_examples_have_every_text() -> None:
    """Else the test above would not see a field whose list is empty in its example."""
    for kind, example in EXAMPLES.items():
        fields = msgspec.msgpack.decode(pack(example))
        paths = {at[0] for at, _ in forgeries(fields, FORGED)}
        expected = {i for i, name in enumerate(kind.__struct_fields__) if has_text(typing.get_type_hints(kind)[name])}
        assert paths == expected, kind.__name__


def has_text(hint: Any) -> bool:
    """Whether a type of a field holds a text somewhere."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return any(map(has_text, typing.get_type_hints(hint).values()))
    return hint is str or any(map(has_text, typing.get_args(hint)))


def test_what_we_send_ourselves_is_escaped_so_that_others_take_it() -> None:
    """A reason is often the text of an exception, which may have lines."""
    for kind, name in FREE:
        (cls,) = (cls for cls in KINDS.values() if cls.__name__ == kind)
        ours = msgspec.structs.replace(EXAMPLES[cls], **{name: FORGED})
        assert getattr(ours, name) == r"\x1b[31m\nFORGED"
        assert unpack(cls, pack(ours)) == ours


def test_what_we_send_ourselves_is_cut_so_that_others_take_it() -> None:
    for text in ("a", "\n", "学"):
        for kind, name in FREE:
            (cls,) = (cls for cls in KINDS.values() if cls.__name__ == kind)
            ours = msgspec.structs.replace(EXAMPLES[cls], **{name: text * 5000})
            assert unpack(cls, pack(ours)) == ours
    assert Withdraw("0-l", 3, EXAMPLES[Withdraw].attempt, 600 * "x").reason == MAX_REASON * "x"  # type: ignore[attr-defined]


def value_of(hint: Any) -> Any:
    """A value of the type of an event's field, with forged texts where it has any."""
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    arguments = typing.get_args(hint)
    if hint is str:
        return FORGED
    if typing.get_origin(hint) is list:
        return [value_of(arguments[0])]
    if typing.get_origin(hint) is dict:
        return {value_of(arguments[0]): value_of(arguments[1])}
    if arguments:  # a union: the text, or the first
        return FORGED if any(map(has_text, arguments)) else value_of(arguments[0])
    return {bool: False, int: 1, float: 1.0}[hint]


@pytest.mark.parametrize("name", events.KINDS)
def test_every_text_of_every_event_is_escaped(name: str) -> None:
    kind = events.KINDS[name]
    event = {key: value_of(hint) for key, hint in (kind.required | kind.optional).items()}
    event |= {"event": name, "t": 1e9}
    if name == "start":
        event["run"]["total_steps"] = 1
    payload = json.dumps({"last": 1, "more": False, "events": [event]}).encode()
    (parsed,) = parse_page(payload, now_s=1e9).events
    found = list(texts_of(parsed))
    assert all(map(str.isprintable, found)), found
    if any(map(has_text, (kind.required | kind.optional).values())):
        assert any("FORGED" in text for text in found)
    assert encode_event({**parsed, "t": 1e9})


def test_records_and_settings_of_others_have_no_control_characters() -> None:
    assert decode_record(msgspec.msgpack.encode(((FORGED,), "trainer"))) is None
    assert decode_record(msgspec.msgpack.encode((("/ip4/1.2.3.4",), FORGED))) is None
    for name in (name for name, value in RunConfig().to_dict().items() if isinstance(value, str)):
        with pytest.raises(ConfigError) as caught:
            RunConfig.from_dict({name: FORGED})
        assert str(caught.value).isprintable()
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict({FORGED: 1})
    assert str(caught.value).isprintable()


def test_printable_text_of_any_language_is_left_alone() -> None:
    for text in ("", "lost its link", "Größe ≤ 3 µs", "学習", "🙂", "עברית"):
        assert escaped(text) == text
        assert unpack(KINDS[4], pack(KINDS[4](text))) == KINDS[4](text)  # type: ignore[call-arg]


def test_what_is_printed_has_no_raw_escape() -> None:
    out = io.StringIO()
    print(unpack(KINDS[4], msgspec.msgpack.encode([FORGED])), file=out)
    assert "\x1b" not in out.getvalue()
    assert out.getvalue().count("\n") == 1


def test_a_generated_text_keeps_its_lines_and_loses_its_commands() -> None:
    assert for_terminal("a\tb\r\nc\u200dd\u202e é") == "a\tb\r\nc\u200dd\u202e é"
    assert for_terminal("\x1b[2J\x07\x9b31m\x7f\x00") == r"\x1b[2J\x07\x9b31m\x7f\x00"
