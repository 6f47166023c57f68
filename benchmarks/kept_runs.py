"""A file of runs that are done, one JSON line each, so that a long list can be stopped and continued; and its page."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def read(path: Path) -> list[Line]:
    """The runs in a file, the oldest first; a line that was cut off when a process was killed is left out."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Append a run, after a newline if the last line was cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        is_cut = file.tell() > 0 and (file.seek(-1, 2), file.read(1))[1] != b"\n"
        file.write(b"\n" * is_cut + json.dumps(line).encode() + b"\n")


def drop(path: Path, is_dropped: Callable[[Line], bool]) -> None:
    """Take runs out of a file, if there is one, so that they are made again."""
    if not path.exists():
        return
    kept = [line for line in read(path) if not is_dropped(line)]
    written = path.with_suffix(".new")
    written.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    written.replace(path)


def write_between(page: Path, begin: str, end: str, parts: Sequence[str]) -> None:
    """Replace what is between two marks of a page. Raises ValueError if it does not have each mark once."""
    before, rest = page.read_text(encoding="utf-8").split(begin)
    after = rest.split(end)[1]
    page.write_text("\n\n".join([before + begin, *parts, end + after]), encoding="utf-8")
