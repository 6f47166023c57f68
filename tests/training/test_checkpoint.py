"""Checkpoints: state survives a round trip, a crash or a full disk damages nothing, and damage is detected."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from p2ptrain.errors import CheckpointError, ConfigError
from p2ptrain.training import checkpoint
from p2ptrain.training.checkpoint import Checkpoint


def _checkpoint(step: int, **parts: Any) -> Checkpoint:
    return Checkpoint(step=step, info={"run": {"lr": 0.1}}, state=parts or {"model": {"w": torch.full((3,), step)}})


def _names(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir())


def test_nested_state_survives_a_round_trip(tmp_path: Path) -> None:
    state = {
        "plain": None,
        "numbers": [1, 2.5, True, 2**60, float("inf")],
        "text": "é\n",
        "pair": (1, (2, "x")),
        "bytes": b"\0\xff",
        "by_number": {0: {"moment": torch.arange(4.0)}, 1: "x"},
        "dollar": {"$tensor": "not one"},
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "array": np.arange(6, dtype=np.float32).reshape(2, 3),
        "transposed": torch.arange(6).reshape(2, 3).T,
    }
    path = checkpoint.save(tmp_path, _checkpoint(5, part=state))
    loaded = checkpoint.load(path)
    assert (loaded.step, loaded.info) == (5, {"run": {"lr": 0.1}})
    found = loaded.state["part"]
    assert list(found) == list(state)
    for key in ("plain", "numbers", "text", "pair", "bytes", "dollar"):
        assert found[key] == state[key]
        assert type(found[key]) is type(state[key])
    for key in ("half", "scalar", "empty", "transposed"):
        assert torch.equal(found[key], state[key])
        assert found[key].dtype == state[key].dtype
    np.testing.assert_array_equal(found["array"], state["array"])
    assert torch.equal(found["by_number"][0]["moment"], torch.arange(4.0))


def test_tied_and_overlapping_tensors_are_kept(tmp_path: Path) -> None:
    base = torch.arange(8.0)
    square = torch.arange(4.0).view(2, 2)
    state = {
        "weight": base, "head": base, "first": base[:4], "last": base[4:], "square": square,
        "again": square.view(1, 2, 2), "and again": square.view(4),
    }  # fmt: skip
    path = checkpoint.save(tmp_path, _checkpoint(1, model=state))
    loaded = checkpoint.load(path).state["model"]
    for name, tensor in state.items():
        assert torch.equal(loaded[name], tensor)
    assert loaded["weight"] is loaded["head"]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({1}, r"model\.x: a checkpoint cannot hold a set"),
        ({(0, 1): 2}, r"model\.x: a checkpoint cannot hold a dict with such keys"),
        (torch.ones(2, dtype=torch.complex128), "complex128"),
        (np.arange(4)[::-1], "negative"),
    ],
)
def test_a_value_that_cannot_be_kept_costs_the_checkpoint_and_says_why(value: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"{why}.*; keep only real tensors"):
        checkpoint.save(tmp_path, _checkpoint(1, model={"x": value}))
    assert not list(tmp_path.iterdir())


def test_one_part_can_be_read_alone(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, _checkpoint(1, model={"w": torch.ones(1)}, peer={"a": torch.ones(1)}))
    (path / "peer.safetensors").unlink()
    assert list(checkpoint.load(path, parts=["model"]).state) == ["model"]


def test_the_last_three_are_kept(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-of-mine").mkdir()
    for step in (8, 9, 10, 11, 100):
        checkpoint.save(tmp_path, _checkpoint(step))
    assert _names(tmp_path) == ["checkpoint-10", "checkpoint-100", "checkpoint-11", "checkpoint-of-mine"]
    newest = checkpoint.load_newest(tmp_path)
    assert newest is not None
    assert newest.step == 100


def test_the_newest_is_the_one_that_was_saved_last(tmp_path: Path) -> None:
    """A round may set a fast peer back, whose next checkpoint then has a lower step."""
    for step in (185, 188, 190, 184):
        checkpoint.save(tmp_path, _checkpoint(step))
    assert _names(tmp_path) == ["checkpoint-184", "checkpoint-188", "checkpoint-190"]
    newest = checkpoint.load_newest(tmp_path)
    assert newest is not None
    assert newest.step == 184


def test_checkpoints_of_before_they_were_numbered_go_by_their_steps(tmp_path: Path) -> None:
    for step in (10, 9):
        manifest = checkpoint.save(tmp_path, _checkpoint(step)) / "manifest.json"
        content = json.loads(manifest.read_text())["content"]
        del content["serial"]
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        manifest.write_text(json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "content": content}))
    newest = checkpoint.load_newest(tmp_path)
    assert newest is not None
    assert newest.step == 10
    checkpoint.save(tmp_path, _checkpoint(5))
    newest = checkpoint.load_newest(tmp_path)
    assert newest is not None
    assert newest.step == 5


@pytest.mark.parametrize(
    "damaged", ["{", '{"sha256": "", "content": {"serial": Infinity}}', "[" * 100_000], ids=["cut", "infinite", "deep"]
)
def test_a_checkpoint_with_a_damaged_manifest_is_reported_and_deleted_first(
    damaged: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        path = checkpoint.save(tmp_path, _checkpoint(step))
    (path / "manifest.json").write_text(damaged)
    newest = checkpoint.load_newest(tmp_path)
    assert newest is not None
    assert newest.step == 2
    assert f"checkpoint {path} is damaged" in caplog.text
    checkpoint.save(tmp_path, _checkpoint(4))
    assert _names(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-4"]


def test_one_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, _checkpoint(5, model={"w": torch.zeros(1)}))
    path = checkpoint.save(tmp_path, _checkpoint(5, model={"w": torch.ones(1)}))
    assert checkpoint.load(path).state["model"]["w"] == 1
    assert _names(tmp_path) == ["checkpoint-5"]


def test_a_process_that_is_killed_while_it_replaces_one_has_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*arguments: object, **options: object) -> None:
        raise SystemExit

    checkpoint.save(tmp_path, _checkpoint(5, model={"w": torch.zeros(1)}))
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(shutil, "rmtree", kill)
        checkpoint.save(tmp_path, _checkpoint(5, model={"w": torch.ones(1)}))
    newest = checkpoint.load_newest(tmp_path)
    assert newest is not None
    assert newest.state["model"]["w"] == 1
    checkpoint.save(tmp_path, _checkpoint(6))
    assert _names(tmp_path) == ["checkpoint-5", "checkpoint-6"]


@pytest.mark.parametrize("then", ["loads", "saves"])
def test_a_process_that_is_killed_between_the_two_names_has_the_old_one(
    then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def kill(path: Path, target: Path) -> Path:
        if target.name == "checkpoint-5":
            raise SystemExit
        return rename(path, target)

    checkpoint.save(tmp_path, _checkpoint(5, model={"w": torch.zeros(1)}))
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Path, "rename", kill)
        checkpoint.save(tmp_path, _checkpoint(5, model={"w": torch.ones(1)}))
    if then == "saves":
        checkpoint.save(tmp_path, _checkpoint(6))
        assert _names(tmp_path) == ["checkpoint-5", "checkpoint-6"]
    else:
        newest = checkpoint.load_newest(tmp_path)
        assert newest is not None
        assert newest.state["model"]["w"] == 0


def test_nothing_saved_is_nothing_found(tmp_path: Path) -> None:
    assert checkpoint.load_newest(tmp_path) is None
    assert checkpoint.load_newest(tmp_path / "none") is None


@pytest.mark.parametrize("fails_at", ["save_file", "rename"])
@pytest.mark.parametrize("before", [[], [4], [4, 5]])
def test_a_full_disk_harms_nothing(
    fails_at: str, before: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in before:
        checkpoint.save(tmp_path, _checkpoint(step))

    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if fails_at == "save_file":
            patch.setattr(checkpoint, "save_file", fail)
        else:
            patch.setattr(Path, "rename", fail)
        with pytest.raises(CheckpointError, match=r"checkpoint-6: No space left on device; free space"):
            checkpoint.save(tmp_path, _checkpoint(6))
    assert _names(tmp_path) == [f"checkpoint-{step}" for step in before]
    checkpoint.save(tmp_path, _checkpoint(6))


def test_a_crash_while_writing_leaves_nothing_that_is_read(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, _checkpoint(4))
    shutil.copytree(path, tmp_path / ".checkpoint-9.tmp")
    (tmp_path / ".checkpoint-9.tmp" / "manifest.json").unlink()
    newest = checkpoint.load_newest(tmp_path)
    assert newest is not None
    assert newest.step == 4
    checkpoint.save(tmp_path, _checkpoint(5))
    assert _names(tmp_path) == ["checkpoint-4", "checkpoint-5"]


def _flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


def _change_info(path: Path) -> None:
    manifest = json.loads(path.read_text(encoding="utf-8"))
    manifest["content"]["info"]["run"]["lr"] = 0.2
    path.write_text(json.dumps(manifest), encoding="utf-8")


DAMAGE = {
    "tensor changed": lambda path: _flip_byte(path / "model.safetensors"),
    "tensors cut short": lambda path: (path / "model.safetensors").write_bytes(b""),
    "tensors gone": lambda path: (path / "model.safetensors").unlink(),
    "manifest gone": lambda path: (path / "manifest.json").unlink(),
    "manifest cut short": lambda path: (path / "manifest.json").write_text('{"sha256"', encoding="utf-8"),
    "manifest of something else": lambda path: (path / "manifest.json").write_text("[]", encoding="utf-8"),
    "manifest changed": lambda path: _change_info(path / "manifest.json"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_one_is_reported_and_the_one_before_used(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint.save(tmp_path, _checkpoint(4))
    DAMAGE[damage](checkpoint.save(tmp_path, _checkpoint(5)))
    with caplog.at_level(logging.WARNING):
        newest = checkpoint.load_newest(tmp_path)
    assert newest is not None
    assert newest.step == 4
    damaged, used = caplog.messages
    assert f"checkpoint {tmp_path / 'checkpoint-5'} is damaged" in damaged
    assert used == f"using {tmp_path / 'checkpoint-4'} instead"

    DAMAGE[damage](tmp_path / "checkpoint-4")
    with pytest.raises(CheckpointError, match="all of its checkpoints are damaged"):
        checkpoint.load_newest(tmp_path)
    with pytest.raises(ConfigError, match=f"^{tmp_path}: all of its checkpoints are damaged; give another checkpoint$"):
        checkpoint.load_given(tmp_path)


def test_another_format_is_not_guessed_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT", 99)
        path = checkpoint.save(tmp_path, _checkpoint(1))
    with pytest.raises(CheckpointError, match="has format 99, this version reads 4"):
        checkpoint.load(path)


def test_checkpoints_of_another_start_of_the_run_are_neither_replaced_nor_removed(tmp_path: Path) -> None:
    """Someone joins a friend's run of the same name in the directory of his own."""

    def of(start: str, step: int) -> Checkpoint:
        return Checkpoint(step=step, info={"genesis": start}, state={"model": {"w": torch.full((3,), step)}})

    checkpoint.save(tmp_path, of("0-ours", 7))
    checkpoint.save(tmp_path, of("0-ours", 9))
    for step in (7, 8, 9, 10):
        checkpoint.save(tmp_path, of("0-theirs", step))
    kept = ["other-start-0ours-checkpoint-7", "other-start-0ours-checkpoint-9"]
    assert _names(tmp_path) == ["checkpoint-10", "checkpoint-8", "checkpoint-9", *kept]
    assert checkpoint.load(tmp_path / kept[1]).info == {"genesis": "0-ours"}
    newest = checkpoint.load_newest(tmp_path)
    assert newest is not None
    assert (newest.step, newest.info) == (10, {"genesis": "0-theirs"})
    for start in ("0-ours", "0-theirs"):  # and back again
        checkpoint.save(tmp_path, of(start, 7))
    assert kept[0] in _names(tmp_path)
