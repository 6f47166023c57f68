"""What is text: bytes become text here, and what is not text is described for the user."""

from __future__ import annotations

from collections.abc import Mapping

from p2ptrain.formatting import count

# A zero byte within so many bytes means that a file is not text, as in git.
LOOKED_AT_BYTES = 8192
_REPLACED = "\N{REPLACEMENT CHARACTER}"  # for bytes that are not UTF-8


def decode(content: bytes) -> tuple[str, int]:
    """The text, without a byte order mark, with `\\n` as line ends, and the number of places that are not UTF-8."""
    text = content.decode("utf-8-sig", errors="replace")
    return text.replace("\r\n", "\n"), text.count(_REPLACED) - content.count(_REPLACED.encode())


def is_binary(content: bytes) -> bool:
    """Whether the beginning of a file shows that it is not text in UTF-8."""
    return b"\0" in content[:LOOKED_AT_BYTES]


def not_utf8(places: Mapping[str, int]) -> str:
    """A warning of the places that are not UTF-8, by the names of the files that have some; at least one."""
    where = next(iter(places)) + (f" and {count(len(places) - 1, 'other file')}" if len(places) > 1 else "")
    num_wrong = sum(places.values())
    verb = "is" if num_wrong == 1 else "are"
    found = f"{count(num_wrong, 'place')} in {where} {verb} not UTF-8, and read as {_REPLACED}"
    return f"{found}; convert the text, such as with iconv"
