"""Writes the tables of messages in docs/understand/protocol.md, from `messages.py`: `make docs` runs it."""

from __future__ import annotations

import types
import typing
from pathlib import Path

from msgspec import Struct

from p2ptrain.protocol.wire import messages

PAGE = Path(__file__).parent / "understand/protocol.md"
BEGIN, END = "<!-- made by docs/message_tables.py -->\n", "<!-- end of what it makes -->\n"


def wire_type(hint: object) -> str:
    """What msgpack has for a value of this type."""
    if typing.get_origin(hint) is typing.Annotated:
        return wire_type(typing.get_args(hint)[0])
    args = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return " or ".join("nil" if arg is types.NoneType else wire_type(arg) for arg in args)
    if typing.get_origin(hint) is tuple:
        items = ", ".join(wire_type(arg) for arg in args if arg is not Ellipsis)
        return f"list of {items}" if Ellipsis in args else f"[{items}]"
    assert isinstance(hint, type), hint
    return hint.__name__


def structs() -> list[type[Struct]]:
    """The messages by their kinds, then the structs that they contain."""
    found = [value for value in vars(messages).values() if isinstance(value, type) and issubclass(value, Struct)]
    kinds = list(messages.KINDS.values())
    return [*kinds, *(part for part in found if part not in kinds and not part.__name__.startswith("_"))]


def types_of_fields() -> dict[str, list[str]]:
    """Fields by type; a field that has several types is named with its message where it is not the usual one."""
    usual: dict[str, str] = {}
    rows: dict[str, list[str]] = {}
    for struct in structs():
        for field, hint in typing.get_type_hints(struct, include_extras=True).items():
            of = wire_type(hint)
            name = field if usual.setdefault(field, of) == of else f"{struct.__name__}.{field}"
            if name not in rows.setdefault(of, []):
                rows[of].append(name)
    return rows


def tables() -> str:
    """The three tables, as Markdown."""
    kinds = [f"| {k} | {of.__name__} | {', '.join(of.__struct_fields__)} |" for k, of in messages.KINDS.items()]
    others = structs()[len(kinds) :]
    parts = [f"| {part.__name__} | {', '.join(part.__struct_fields__)} |" for part in others]
    typed = [f"| {of} | {', '.join(names)} |" for of, names in types_of_fields().items()]
    blocks = (
        ["| kind | message | fields |", "|---|---|---|", *kinds],
        ["| part of a message | fields |", "|---|---|", *parts],
        ["| type | fields |", "|---|---|", *typed],
    )
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def page() -> str:
    """The page with the tables as they should be."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{tables()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
