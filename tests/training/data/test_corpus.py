"""Corpora: the split is the same everywhere, and unusable text is refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from p2ptrain.errors import ConfigError
from p2ptrain.training.data import Characters, load_corpus
from p2ptrain.training.data.corpus import BLOCK_TOKENS, STDLIB_BYTES
from tests.training.characters import decode, encode


def _numbered_files(root: Path, numbers: range) -> None:
    for number in numbers:
        path = root / f"part{number % 3}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"<{number}>" * 10, encoding="utf-8")


def _numbers(tokens: np.ndarray) -> set[int]:
    return {int(text) for text in decode(tokens.tolist()).replace("<", "").split(">") if text}


def test_the_standard_library_is_a_few_megabytes_of_ascii() -> None:
    corpus = load_corpus("stdlib", Characters())
    size = len(corpus.training) + len(corpus.held_out)
    assert STDLIB_BYTES / 2 < size <= STDLIB_BYTES
    assert len(corpus.held_out) > 20_000
    assert np.mean(corpus.training == encode("é")[0]) < 1e-3
    assert not corpus.training.flags.writeable


def test_loading_twice_gives_the_same() -> None:
    first, second = load_corpus("stdlib", Characters()), load_corpus("stdlib", Characters())
    np.testing.assert_array_equal(first.training, second.training)
    np.testing.assert_array_equal(first.held_out, second.held_out)
    assert first.digest == second.digest


def test_another_text_has_another_digest(tmp_path: Path) -> None:
    path, digests = tmp_path / "text", set[str]()
    for text in ("a" * 20_000, "a" * 19_999 + "b", "a" * 20_001):
        path.write_text(text)
        digests.add(load_corpus(str(path), Characters()).digest)
    assert len(digests) == 3


def test_a_directory_is_split_by_file(tmp_path: Path) -> None:
    _numbered_files(tmp_path, range(400))
    corpus = load_corpus(str(tmp_path), Characters())
    training, held_out = _numbers(corpus.training), _numbers(corpus.held_out)
    assert training | held_out == set(range(400))
    assert not training & held_out
    assert 400 / 40 < len(held_out) < 400 / 10
    # Golden: the hash of the path decides, on every machine.
    assert {39, 67, 70} <= held_out


@pytest.mark.parametrize("large", ["text.txt", "input.txt"])
def test_a_directory_with_one_large_file_is_split_by_block(large: str, tmp_path: Path) -> None:
    """By their names the first would be held out and the small file trained on, and the second the other way round."""
    small = {"text.txt": "README.md", "input.txt": "clean.md"}[large]
    (tmp_path / large).write_text("a" * 100 * BLOCK_TOKENS)
    (tmp_path / small).write_text("b" * 400)
    corpus = load_corpus(str(tmp_path), Characters())
    assert 0.01 < len(corpus.held_out) / (100 * BLOCK_TOKENS) < 0.1
    assert len(corpus.training) > 90 * BLOCK_TOKENS


def test_a_file_is_held_out_whatever_else_there_is(tmp_path: Path) -> None:
    _numbered_files(tmp_path / "some", range(200))
    _numbered_files(tmp_path / "more", range(400))
    some, more = load_corpus(str(tmp_path / "some"), Characters()), load_corpus(str(tmp_path / "more"), Characters())
    assert _numbers(some.held_out) == {number for number in _numbers(more.held_out) if number < 200}


def test_a_file_is_split_by_block(tmp_path: Path) -> None:
    letters = [chr(33 + number % 90) for number in range(200)]
    path = tmp_path / "text"
    path.write_text("".join(letter * BLOCK_TOKENS for letter in letters), encoding="utf-8")
    corpus = load_corpus(str(path), Characters())
    assert len(corpus.training) + len(corpus.held_out) == 200 * BLOCK_TOKENS
    assert 200 / 40 < len(corpus.held_out) / BLOCK_TOKENS < 200 / 10
    assert len(corpus.held_out) % BLOCK_TOKENS == 0


@pytest.mark.parametrize("blocks", [2, 3, 10])
def test_a_small_text_still_has_both_sides(blocks: int, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("ab" * (BLOCK_TOKENS // 2) * blocks, encoding="utf-8")
    for source in (tmp_path, tmp_path / "one.txt"):
        corpus = load_corpus(str(source), Characters())
        assert len(corpus.training) >= BLOCK_TOKENS
        assert len(corpus.held_out) >= BLOCK_TOKENS


def test_line_ends_of_other_systems_are_ours(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"ab\r\n" * 3000)
    corpus = load_corpus(str(path), Characters())
    assert set(decode(corpus.training.tolist())) == {"a", "b", "\n"}


def test_a_byte_order_mark_is_not_trained_on(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbf" + b"ab\n" * 3000)
    for source in (tmp_path / "text", tmp_path):
        corpus = load_corpus(str(source), Characters())
        assert set(decode([*corpus.training.tolist(), *corpus.held_out.tolist()])) == {"a", "b", "\n"}


def test_text_that_is_not_utf_8_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_bytes("caf\N{REPLACEMENT CHARACTER}\n".encode() * BLOCK_TOKENS)
    (tmp_path / "b.txt").write_bytes("café crème\n".encode("latin-1") * BLOCK_TOKENS)
    load_corpus(str(tmp_path / "a.txt"), Characters())
    assert caplog.messages == []
    load_corpus(str(tmp_path / "b.txt"), Characters())
    load_corpus(str(tmp_path), Characters())
    one, folder = caplog.messages
    assert f"b.txt: {2 * BLOCK_TOKENS:,} places in b.txt are not UTF-8, and read as \N{REPLACEMENT CHARACTER};" in one
    assert f"{tmp_path}: {2 * BLOCK_TOKENS:,} places in b.txt are not" in folder
    (tmp_path / "c.txt").write_bytes(b"\xe9")
    load_corpus(str(tmp_path), Characters())
    assert f"{2 * BLOCK_TOKENS + 1:,} places in b.txt and 1 other file are not" in caplog.messages[-1]


def test_binary_and_hidden_files_of_a_directory_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("a" * 3 * BLOCK_TOKENS, encoding="utf-8")
    (tmp_path / "picture.png").write_bytes(b"\0" * 9999)
    (tmp_path / ".hidden").write_text("b" * 9999, encoding="utf-8")
    corpus = load_corpus(str(tmp_path), Characters())
    assert set(decode(corpus.training.tolist())) == {"a"}
    for kind in "bcdef":
        (tmp_path / f"wide.{kind}").write_text("wide", encoding="utf-16")
    (tmp_path / "more.b").write_bytes(b"\0")
    load_corpus(str(tmp_path), Characters())
    first, second = caplog.messages
    assert f"--data {tmp_path}: left out 1 file (1 .png): a file that holds zero bytes is not UTF-8 text;" in first
    assert "left out 7 files (2 .b, 1 " in second
    assert second.count(" 1 .") == 4
    assert ", …): a file that holds zero bytes" in second


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz", "a.txt.zst"])
def test_what_has_to_be_prepared_is_refused_with_the_command(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"\1" * 9999)
    command = f"p2ptrain data prepare {path} --tokenizer NAME --out NEW"
    with pytest.raises(
        ConfigError, match=rf"{path}: {path.suffix} is neither text nor .*; prepare it first: {command}"
    ):
        load_corpus(str(path), Characters())


def test_records_in_the_place_of_text_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "two words"
    folder.mkdir()
    for name in ("a.jsonl", "b.ndjson", "package.json"):
        (folder / name).write_text('{"text": "abc"}\n' * BLOCK_TOKENS)
    (folder / "c.parquet").write_bytes(b"PAR1\0")
    load_corpus(str(folder / "package.json"), Characters())
    assert caplog.messages == []
    load_corpus(str(folder / "a.jsonl"), Characters())
    load_corpus(str(folder), Characters())
    one, records, packed = caplog.messages
    assert "/a.jsonl: trains on the raw lines of JSON in 1 file; to train on the text of one field, prepare" in one
    command = f"prepare it first: p2ptrain data prepare '{folder}' --tokenizer NAME --out NEW"
    assert f"in 2 files; to train on the text of one field, {command}" in records
    assert packed.endswith(f"; for .gz, .zst, .parquet files, {command}")


def test_what_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("", encoding="utf-8")
    (tmp_path / "small").write_text("a" * BLOCK_TOKENS, encoding="utf-8")
    (tmp_path / "binary").write_bytes(b"\0\1" * 9999)
    (tmp_path / "cyrillic").write_text("привет " * 9999, encoding="utf-8")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / "pipe")
    for name, message in {
        "none": "no such file or directory",
        "empty": "0 characters are too few",
        "small": "4096 characters are too few; give more than 4096",
        "binary": "not UTF-8 text; if it is UTF-16, convert it with `iconv -f UTF-16 -t UTF-8`; else give text",
        "cyrillic": "86 % of the characters are outside the vocabulary",
        "folder": "no text in this directory",
    }.items():
        with pytest.raises(ConfigError, match=message) as caught:
            load_corpus(str(tmp_path / name), Characters())
        assert f"--data {tmp_path / name}" in str(caught.value)


def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, mode: str = "r") -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    # Simulated, because tests may run as root, who can read everything.
    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr("p2ptrain.training.data.corpus.free_memory_bytes", lambda: None)
    (tmp_path / "text").touch()
    for source in (tmp_path, tmp_path / "text"):
        with pytest.raises(ConfigError, match=r"text: cannot be read \(Permission denied\)"):
            load_corpus(str(source), Characters())


def test_a_python_without_its_source_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(ConfigError, match=r"--data stdlib: .* give text with --data FILE"):
        load_corpus("stdlib", Characters())
