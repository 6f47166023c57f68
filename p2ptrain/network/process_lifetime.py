"""Keeps a process from leaving something behind: its directory, the processes that it has started, and its sockets.

On Linux, the kernel kills a peer's child processes when the peer is killed. The lock file in the directory is
released, so the next peer on this machine knows that it may remove the directory. This imports nothing large: the
demo uses it when it starts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from p2ptrain.errors import ConfigError

# A unix socket's path may have 103 bytes on macOS and 107 on Linux; ours adds at most 39 to its parent directory's.
MAX_PARENT_LENGTH = 64
PREFIX = "p2ptrain-"
LOCK = "lock"
# Run by a bare interpreter, because Python code between fork and exec can hang in a process with many threads.
# Arguments: its parent's pid, and a command.
_KILLED_WITH_PARENT = """
import ctypes, os, sys
PR_SET_PDEATHSIG, SIGKILL = 1, 9
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
if os.getppid() == int(sys.argv[1]):  # else the parent died before prctl
    os.execv(sys.argv[2], sys.argv[2:])
"""


def killed_with_us(command: Sequence[str]) -> list[str]:
    """A command whose process Linux kills when the thread that started it ends, for whatever reason."""
    if sys.platform != "linux" or not sys.executable:
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _KILLED_WITH_PARENT, str(os.getpid()), *command]


def close_everywhere(ended: socket.socket) -> None:
    """End a connection, or stop listening, in all copies of the socket, and close this one.

    Workers of a `DataLoader` are forked and inherit all sockets. The system keeps a connection, or a port, until the
    last copy is closed. So after `close` alone a port would stay taken, and the other end of a connection would hear
    nothing, for as long as workers live; those with `persistent_workers=True` live on after the peer has left.
    """
    with contextlib.suppress(OSError):  # it is closed already, or the system cannot shut down such a socket
        ended.shutdown(socket.SHUT_RDWR)
    ended.close()


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """A new directory that only this user can read, removed at the end. Raises ConfigError."""
    parent = _parent()
    remove_leftovers(parent)
    try:
        path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
    except OSError as error:
        raise ConfigError(f"cannot create a directory for sockets ({error}); set TMPDIR to a writable one") from None
    try:
        with _kept(path), (path / f"{LOCK}.new").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Renamed only once it is locked, so that another peer does not remove it.
            (path / f"{LOCK}.new").rename(path / LOCK)
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _kept(path: Path) -> Iterator[None]:
    """Keep a directory from systemd, which removes what is ten days old from /tmp, but not where there is a lock."""
    directory = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_SH)
        yield
    finally:
        os.close(directory)


def remove_leftovers(parent: Path | None = None) -> None:
    """Remove the directories of killed peers below `parent` (None: the usual place)."""
    for path in (parent or _parent()).glob(f"{PREFIX}*-*/{LOCK}"):
        with contextlib.suppress(OSError), path.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)


def _parent() -> Path:
    usual = tempfile.gettempdir()
    return Path(usual if len(usual) <= MAX_PARENT_LENGTH else "/tmp")
