"""The tokenizer of a run, in the peer's directory."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from p2ptrain.errors import ConfigError
from p2ptrain.settings.config import RunConfig
from p2ptrain.training.data.corpus import TextFiles
from p2ptrain.training.data.tokenizer_file import TOKENIZER_FILE, train_tokenizer
from p2ptrain.training.run_tokenizer import first_tokenizer, tokenizer_of

TEXT = "to be or not to be\n" * 9


def test_a_pretrained_model_has_its_own_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, model = TextFiles("t", [("t", TEXT)]), f"hf:{tmp_path}:pretrained"
    with pytest.raises(ConfigError, match=rf"--tokenizer {tmp_path}: cannot be read.*or give token files"):
        first_tokenizer(None, model, source, print)
    own = train_tokenizer([TEXT], 300)
    (tmp_path / TOKENIZER_FILE).write_bytes(own.file)
    assert first_tokenizer(None, model, source, print).identity == own.identity
    monkeypatch.chdir(tmp_path.parent)
    (tmp_path.parent / "chars").symlink_to(tmp_path)
    assert first_tokenizer(None, "hf:chars:pretrained", source, print).identity == own.identity
    for model in ("gpt-demo", "hf:a/b", "my.module:pretrained"):
        assert first_tokenizer(None, model, source, print).identity == "chars"


def test_a_full_disk_leaves_no_half_of_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = train_tokenizer([TEXT], 300)
    run = RunConfig(run_id="r", tokenizer=made.identity, vocab_size=made.vocab_size)
    source = TextFiles("t", [("t", TEXT)])

    def fill_up(descriptor: int) -> None:
        os.ftruncate(descriptor, 100)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fill_up)
    with pytest.raises(ConfigError, match=rf"{TOKENIZER_FILE} cannot be written: No space left on device; free space"):
        tokenizer_of(run, made, source, tmp_path, lambda: None)
    assert not (tmp_path / TOKENIZER_FILE).exists()
    monkeypatch.undo()
    tokenizer_of(run, made, source, tmp_path, lambda: None)
    assert (tmp_path / TOKENIZER_FILE).read_bytes() == made.file
