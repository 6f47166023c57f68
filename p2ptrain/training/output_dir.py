"""The output directory of one peer (identity, metrics, checkpoints) and the lock that keeps a second process out.

Two processes that write to one directory would mix their checkpoints. The operating system holds the lock, so it ends
with the process, also after a crash. The identity has its own lock, in `network/`, as it may be kept elsewhere.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from p2ptrain.errors import ConfigError
from p2ptrain.settings.files import try_to_write
from p2ptrain.settings.peer_config import default_dir

# Guess: nobody starts more peers than this in one directory without --out.
MAX_NUMBERED = 100
KNOWN_PEERS_FILE = "peers.txt"


@contextmanager
def claim_out(out: str | None, run_id: str, *, joins: bool) -> Iterator[Path]:
    """Create and lock the output directory of this peer until the block ends.

    Raises ConfigError if it is in use, or cannot be written.

    Args:
        out: the directory that the user gave; None for `p2ptrain-<run id>` in the current one.
        joins: whether this peer has initial peers. If so, and `p2ptrain-<run id>` is in use, the next free one of
            `p2ptrain-<run id>-2`, `-3` … is used, so that the printed command also works in a second terminal.
    """
    first = Path(out or default_dir(run_id))
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
        f"or join it with the command that it printed (p2ptrain join --initial-peers …)"
    )


def is_numbered(out: str | None, claimed: Path, run_id: str) -> bool:
    """Whether `claim_out` gave another directory for `out`, as the usual one was in use."""
    return out is None and claimed != default_dir(run_id)


def to_continue(out: str | None, claimed: Path, run_id: str) -> str:
    """What a user is told to do to continue in the directory that `claim_out` gave for `out`."""
    if not is_numbered(out, claimed, run_id):
        return "run the same command again to continue"
    return f"run it again with --out {shlex.quote(str(claimed))} to continue"


def has_run(out: str | None, run_id: str) -> bool:
    """Whether the directory that `claim_out` would give a first peer holds a run that it can continue.

    Such a directory has a checkpoint, or the addresses of other peers. Raises ConfigError if it cannot be used.
    """
    directory = Path(out or default_dir(run_id))
    try:
        if not any(directory.glob("checkpoint-*")) and not (directory / KNOWN_PEERS_FILE).exists():
            return False
    except OSError:
        return False  # the name is too long: making the directory reports it
    lock = _lock(directory)
    if lock is None:
        return False  # another peer is running there
    lock.release()
    return True


def make_directory(directory: Path) -> None:
    """Create a directory if it is missing. Raises ConfigError if that fails."""
    with writing_to(directory):
        directory.mkdir(parents=True, exist_ok=True)


def check_writable(directory: Path) -> None:
    """Create a directory if it is missing, and check that files can be written there. Raises ConfigError if not."""
    make_directory(directory)
    with writing_to(directory):
        try_to_write(directory)


@contextmanager
def writing_to(directory: Path) -> Iterator[None]:
    """Raise ConfigError if this block, which writes files to `directory`, raises OSError."""
    try:
        yield
    except OSError as error:
        if directory.is_file():
            raise ConfigError(f"{directory} is a file; give a directory, or a name for a new one") from error
        raise ConfigError(
            f"directory {directory} cannot be used ({error.strerror or error}); give one that is writable"
        ) from error


def _lock(directory: Path) -> FileLock | None:
    """Acquire the directory's lock, which the caller releases. Returns None if another process holds it."""
    make_directory(directory)
    lock = FileLock(directory / ".lock", timeout=0)
    with writing_to(directory):
        try:
            lock.acquire()
        except Timeout:
            return None
    return lock
