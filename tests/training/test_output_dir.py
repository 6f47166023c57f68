"""The lock: one process per directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2ptrain.errors import ConfigError
from p2ptrain.training.output_dir import check_writable, claim_out, to_continue
from tests.fakes import full_disk


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_directory_is_made_and_kept_for_one() -> None:
    with claim_out("a/b", "run", joins=True) as out:
        assert out == Path("a/b")
        assert out.is_dir()
        with (
            pytest.raises(ConfigError, match="--out a/b: another p2ptrain process"),
            claim_out("a/b", "run", joins=True),
        ):
            pass
    with claim_out("a/b", "run", joins=True):
        pass


def test_the_default_directory_is_named_for_the_run() -> None:
    with claim_out(None, "novels", joins=False) as out:
        assert out == Path("p2ptrain-novels")


def test_a_second_joiner_takes_the_next_directory_but_a_second_founder_does_not() -> None:
    with claim_out(None, "run", joins=False):
        with pytest.raises(ConfigError, match="p2ptrain join --initial-peers"), claim_out(None, "run", joins=False):
            pass
        with claim_out(None, "run", joins=True) as second, claim_out(None, "run", joins=True) as third:
            assert (second, third) == (Path("p2ptrain-run-2"), Path("p2ptrain-run-3"))
        with claim_out(None, "run", joins=True) as again:
            assert again == Path("p2ptrain-run-2")


def test_who_was_given_another_directory_is_told_to_name_it() -> None:
    for given, claimed in ((None, "p2ptrain-run"), ("a", "a"), ("p2ptrain-run-2", "p2ptrain-run-2")):
        assert to_continue(given, Path(claimed), "run") == "run the same command again to continue"
    named = "run it again with --out p2ptrain-run-2 to continue"
    assert to_continue(None, Path("p2ptrain-run-2"), "run") == named


def test_a_place_that_cannot_be_written_is_refused() -> None:
    Path("file").touch()
    with pytest.raises(ConfigError, match="file is a file; give a directory"), claim_out("file", "r", joins=False):
        pass
    with pytest.raises(ConfigError, match="file/in cannot be used"), claim_out("file/in", "run", joins=False):
        pass


def test_a_full_disk_is_noticed_before_the_work() -> None:
    check_writable(Path("out"))
    with full_disk(), pytest.raises(ConfigError, match="directory out cannot be used"):
        check_writable(Path("out"))
