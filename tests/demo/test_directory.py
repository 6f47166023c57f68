"""A demo replaces the directory of an earlier demo, and no other directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2ptrain.demo.demo import claim_demo_directory, peer_directory
from p2ptrain.errors import ConfigError


def test_an_earlier_demo_is_replaced_and_other_files_stay(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    with claim_demo_directory(out):
        peer_directory(out, 1).mkdir()
        (peer_directory(out, 1) / "metrics.jsonl").write_text("old", encoding="utf-8")
        (out / "curves.png").write_bytes(b"old")
        (out / "notes.md").write_text("mine", encoding="utf-8")
    with claim_demo_directory(out):
        assert not peer_directory(out, 1).exists()
        assert not (out / "curves.png").exists()
        assert (out / "notes.md").read_text(encoding="utf-8") == "mine"


def test_a_directory_of_something_else_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "peer-1").mkdir()
    with pytest.raises(ConfigError, match="no earlier demo wrote it; give another directory"):
        claim_demo_directory(tmp_path).__enter__()
    assert [path.name for path in tmp_path.iterdir()] == ["peer-1"]


def test_an_empty_directory_will_do(tmp_path: Path) -> None:
    with claim_demo_directory(tmp_path):
        pass


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    with claim_demo_directory(tmp_path), pytest.raises(ConfigError, match="another p2ptrain process uses"):
        claim_demo_directory(tmp_path).__enter__()


def test_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match="is a file"):
        claim_demo_directory(path).__enter__()
