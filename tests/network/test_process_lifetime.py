"""Running peers have private directories; the next peer removes those of killed peers."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from p2ptrain.errors import ConfigError
from p2ptrain.network.process_lifetime import LOCK, remove_leftovers, scratch_directory


@pytest.fixture
def usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The parent of all scratch directories in this test: a short path, as sockets need."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("p2ptrain.network.process_lifetime.MAX_PARENT_LENGTH", 4096)
    return tmp_path


def test_it_is_there_for_its_owner_alone_and_then_gone(usual: Path) -> None:
    with scratch_directory() as path:
        assert path.parent == usual
        assert path.stat().st_mode & 0o777 == 0o700
        (path / "p2pd.sock").touch()
        held = os.open(path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):  # systemd then leaves alone what is in it
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(held)
    assert list(usual.iterdir()) == []


def test_only_leftovers_that_no_process_holds_are_swept(usual: Path) -> None:
    dead, young, other = (usual / name for name in ("p2ptrain-17-dead", "p2ptrain-18-young", "somebody-elses"))
    for directory in (dead, young, other):
        directory.mkdir()
    (dead / LOCK).touch()
    (other / LOCK).touch()
    with scratch_directory() as alive:
        assert {path.name for path in usual.iterdir()} == {alive.name, young.name, other.name}
        remove_leftovers(usual)
        with scratch_directory() as second:
            assert {path.name for path in usual.iterdir()} == {alive.name, second.name, young.name, other.name}


def test_where_nothing_can_be_made_it_says_what_to_do(usual: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(usual / "missing"))
    with pytest.raises(ConfigError, match="set TMPDIR to a writable one"), scratch_directory():
        pass
