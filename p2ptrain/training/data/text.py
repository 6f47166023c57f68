"""Decode text, recognise what is not text, and word the warnings about it."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from p2ptrain.formatting import count

# Lines of JSON, which `--data` reads as plain text. A .json file may be text, as in a directory of source code.
RECORDS = (".jsonl", ".ndjson")
# Only `p2ptrain data prepare` reads these.
COMPRESSED = (".gz", ".zst")
PACKED = (*COMPRESSED, ".parquet")
# A zero byte among the first so many means that a file is not text, as in git.
LOOKED_AT_BYTES = 8192
_UTF_16 = "if it is UTF-16, convert it with `iconv -f UTF-16 -t UTF-8`"
HOLDS_ZEROS = f"holds zero bytes, so it is not UTF-8 text; {_UTF_16}"
# A warning names at most so many kinds of files.
_NAMED_KINDS = 5
_REPLACED = "\N{REPLACEMENT CHARACTER}"  # for bytes that are not UTF-8


def decode(content: bytes) -> tuple[str, int]:
    """The text, without a byte order mark, with `\\n` as line ends, and the number of places that are not UTF-8."""
    text = content.decode("utf-8-sig", errors="replace")
    return text.replace("\r\n", "\n"), text.count(_REPLACED) - content.count(_REPLACED.encode())


def is_binary(content: bytes) -> bool:
    """Whether the beginning of a file shows that it is not text in UTF-8."""
    return b"\0" in content[:LOOKED_AT_BYTES]


def not_utf8_warning(places: Mapping[str, int]) -> str:
    """A warning of the places that are not UTF-8, by the names of the files that have some; at least one."""
    where = next(iter(places)) + (f" and {count(len(places) - 1, 'other file')}" if len(places) > 1 else "")
    num_wrong = sum(places.values())
    verb = "is" if num_wrong == 1 else "are"
    found = f"{count(num_wrong, 'place')} in {where} {verb} not UTF-8, and read as {_REPLACED}"
    return f"{found}; convert the text, such as with iconv"


def left_out_warning(files: Sequence[Path]) -> str:
    """A warning of binary files in a directory: how many of which kinds, and why; at least one."""
    kinds = Counter(file.suffix or file.name for file in files).most_common()
    named = [f"{number:,} {kind}" for kind, number in kinds[:_NAMED_KINDS]]
    shown = ", ".join(named if len(kinds) <= _NAMED_KINDS else [*named, "…"])
    number = count(len(files), "file")
    return f"left out {number} ({shown}): a file that holds zero bytes is not UTF-8 text; {_UTF_16}"


def prepare_first(source: str) -> str:
    """The command that makes token files of a source."""
    words = ["p2ptrain", "data", "prepare", source, "--tokenizer", "NAME", "--out", "NEW"]
    return f"prepare it first: {shlex.join(words)}"
