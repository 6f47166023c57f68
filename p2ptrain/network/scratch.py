"""The private directory of a running peer: its sockets, and the key of an identity that is kept nowhere.

A process that was killed outright leaves its directory behind. The lock in it, which ends with its holder whatever
happens, tells the next peer on this machine that it may be removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from p2ptrain.errors import ConfigError

# A unix socket's path may have 103 bytes on macOS and 107 on Linux; ours adds at most 39 to its parent directory's.
MAX_PARENT_LENGTH = 64
PREFIX = "p2ptrain-"
LOCK = "lock"


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """A new directory that nobody else can enter, removed at the end. Raises ConfigError."""
    parent = _parent()
    remove_leftovers(parent)
    try:
        path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
    except OSError as error:
        raise ConfigError(f"no directory for sockets can be made ({error}); set TMPDIR to a writable one") from None
    try:
        with (path / f"{LOCK}.new").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Under its own name only once it is held, so that nobody takes us for dead.
            (path / f"{LOCK}.new").rename(path / LOCK)
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def remove_leftovers(parent: Path | None = None) -> None:
    """Remove the directories of peers that were killed outright; in the usual place when `parent` is None."""
    for path in (parent or _parent()).glob(f"{PREFIX}*-*/{LOCK}"):
        with contextlib.suppress(OSError), path.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)


def _parent() -> Path:
    usual = tempfile.gettempdir()
    return Path(usual if len(usual) <= MAX_PARENT_LENGTH else "/tmp")
