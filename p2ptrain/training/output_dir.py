"""The directory of one peer, with its identity, metrics and checkpoints, and the lock that keeps a second process out.

Two processes that write one directory would mix their checkpoints. The lock is the operating system's, so a crash
leaves none behind. (The identity has a lock of its own, in `network/`, as it may be kept elsewhere.)
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from p2ptrain.errors import ConfigError

# A guess: nobody runs more peers in one directory without giving them names.
MAX_NUMBERED = 100


@contextmanager
def claim_out(out: str | None, run_id: str, *, joins: bool) -> Iterator[Path]:
    """Make and lock the directory of this peer.

    Args:
        out: the directory that the user gave; None for `p2ptrain-<run id>` below the current one.
        run_id: name of the run.
        joins: whether this peer joins others. If so, and `p2ptrain-<run id>` is in use, the next free one of
            `p2ptrain-<run id>-2`, `-3` … is taken: the line that a peer prints works in a second terminal too.

    Raises:
        ConfigError: the directory is in use, or cannot be written.
    """
    first = Path(out or f"p2ptrain-{run_id}")
    candidates = [first]
    if out is None and joins:
        candidates += [Path(f"{first}-{number}") for number in range(2, MAX_NUMBERED)]
    for candidate in candidates:
        lock = _lock(candidate)
        if lock is not None:
            with lock:
                yield candidate
            return
    raise ConfigError(
        f"--out {first}: another p2ptrain process uses this directory; stop it, give another --out, "
        f"or join it by the line that it printed (p2ptrain join --initial-peers …)"
    )


def make_directory(directory: Path) -> None:
    """Make a directory where it is missing. Raises ConfigError when that cannot be done."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(directory, error) from error


def check_writable(directory: Path) -> None:
    """Make a directory where it is missing, and see that files can be written there. Raises ConfigError."""
    make_directory(directory)
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise _unusable(directory, error) from error


def _lock(directory: Path) -> FileLock | None:
    """An acquired lock, which the caller releases; None when another process holds it."""
    make_directory(directory)
    lock = FileLock(directory / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        return None
    except OSError as error:
        raise _unusable(directory, error) from error
    return lock


def _unusable(directory: Path, error: OSError) -> ConfigError:
    return ConfigError(f"directory {directory} cannot be used ({error.strerror}); give one that can be written")
