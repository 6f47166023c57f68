"""Opens files that users name: does not wait, or read for ever, where the name is that of a pipe or a device.

And writes files that are whole or not there."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO

# Pipes that a shell opens: `-c <(make-settings)`, `… | p2ptrain -c /dev/stdin`. Their writers are there.
_OF_SHELL = (Path("/dev/fd"), Path("/proc/self/fd"))
_STDIN = Path("/dev/stdin")
# More than settings and lists of addresses ever have (guess).
MAX_TEXT_BYTES = 2**20


def open_file(path: Path) -> IO[bytes]:
    """Open a file to read. Raises OSError; also for a named pipe and a device, with a reason for messages."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or path.parent in _OF_SHELL or path == _STDIN):
        raise OSError(errno.EINVAL, "a pipe or a device, not a file", str(path))
    return path.open("rb")


def read_text(path: Path) -> str:
    """The text of a file of at most MAX_TEXT_BYTES. Raises OSError as `open_file`, and UnicodeDecodeError."""
    with open_file(path) as file:
        content = file.read(MAX_TEXT_BYTES + 1)
    if len(content) > MAX_TEXT_BYTES:
        raise OSError(errno.EFBIG, f"has more than {MAX_TEXT_BYTES:,} bytes", str(path))
    return content.decode("utf-8")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, or replace it: whole, or not at all, also if the machine stops meanwhile. Raises OSError."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
