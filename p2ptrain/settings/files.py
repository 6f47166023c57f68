"""Opens files that users name, except pipes and devices, which could block or never end; writes files atomically."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import IO, NoReturn

# Pipes that a shell opens (`-c <(make-settings)`, `… | p2ptrain -c /dev/stdin`) are allowed: they have a writer.
_OF_SHELL = (Path("/dev/fd"), Path("/proc/self/fd"))
_STDIN = Path("/dev/stdin")
# Larger than any file of settings or addresses (guess).
MAX_TEXT_BYTES = 2**20


def user_path(path: str | Path) -> Path:
    """A path that the user gave, with the home directory for ~. Unchanged if there is no user of that name."""
    return Path(os.path.expanduser(path))


def reason_of(error: OSError | ValueError) -> str:
    """Why a text file cannot be read, for a message. ValueError: it is not UTF-8, or its path has a null character."""
    if isinstance(error, UnicodeDecodeError):
        return "not a text file"
    return getattr(error, "strerror", None) or str(error)


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


def raise_unreadable(error: OSError) -> NoReturn:
    """For `os.walk(onerror=…)`, which leaves out silently what it cannot read."""
    raise error


def try_to_write(directory: Path) -> None:
    """Raise OSError unless files can be written in a directory. It leaves none there.

    As root, `os.access` allows writing to /proc, and to a file system that is mounted read-only.
    """
    with tempfile.TemporaryFile(dir=directory) as file:
        file.write(b"1")  # fails on a full disk, where an empty file can still be made


def write_whole(path: Path, content: bytes) -> None:
    """Write or replace a file, completely or not at all, even if the machine stops meanwhile. Raises OSError."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
