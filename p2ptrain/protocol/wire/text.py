"""Makes other peers' texts safe to print: escapes characters that could forge or reverse a line in a log or a page.

Identifiers and addresses never have such characters, so a message with one there is refused. Reasons and other free
texts may contain the text of any exception, so they are escaped when they are made, and again when they arrive.
"""

from __future__ import annotations

import re
from typing import Any

# C0 and C1 controls, DEL, line separators, characters that are invisible or change the direction of writing, and
# surrogates, which JSON may contain and which cannot be printed.
UNSAFE = r"\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff\U000e0000-\U000e007f"
# For msgspec's checks of strings.
SAFE_PATTERN = rf"\A[^{UNSAFE}]*\Z"

_UNSAFE = re.compile(f"[{UNSAFE}]")
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def escaped(text: str) -> str:
    r"""The text with every unsafe character as Python writes it in a literal, such as \n or \x1b."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def shown(text: str, most: int = 60) -> str:
    """The text escaped, and cut to `most` characters."""
    return escaped(text[:most])[:most]


def for_terminal(text: str) -> str:
    """Escape only the characters that could command a terminal: line breaks and tabs stay."""
    return _CONTROLS.sub(lambda match: escaped(match[0]), text)


def escaped_all(value: Any) -> Any:
    """A JSON value with all its texts escaped."""
    match value:
        case str():
            return escaped(value)
        case list():
            return [escaped_all(item) for item in value]
        case dict():
            return {escaped_all(key): escaped_all(item) for key, item in value.items()}
    return value
