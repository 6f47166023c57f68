"""Preparing token files: what is written, from what, and what happens after an interruption."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tokenizers
import zstandard
from click.testing import CliRunner

from p2ptrain.cli.main import cli
from p2ptrain.errors import ConfigError, TransientError
from p2ptrain.training.data import documents, prepare
from p2ptrain.training.data.corpus import Corpus
from p2ptrain.training.data.documents import find_units, read_documents
from p2ptrain.training.data.meta import read_meta
from p2ptrain.training.data.prepare import Prepared, Progress
from p2ptrain.training.data.token_files import open_tokens
from p2ptrain.training.data.token_info import describe
from p2ptrain.training.data.tokenizer import Bytes

TEXTS = [f"document {number}: " + "words and more " * (number % 7) for number in range(300)]


def _prepare(sources: Sequence[Path | str], out: Path, **given: Any) -> Prepared:
    settings = {
        "tokenizer": "bytes", "field": "text", "split": "train", "held_out": 0.1, "jobs": 1,
        "say": lambda line: None, "on_progress": lambda progress: None, **given,
    }  # fmt: skip
    return prepare.prepare(tuple(map(str, sources)), out, **settings)


def _corpus(out: Path) -> Corpus:
    folder = open_tokens(str(out))
    assert folder is not None
    return folder.corpus(Bytes())


def _texts(tokens: Any) -> list[str]:
    """The documents of a side, of bytes with a separator after each."""
    ids = tokens[np.arange(len(tokens))]
    assert ids[-1] == 256
    return [Bytes().decode(part) for part in np.split(ids, np.flatnonzero(ids == 256) + 1)[:-1]]


def _write_lines(path: Path, texts: Sequence[str] = TEXTS, field: str = "text") -> Path:
    content = "".join(json.dumps({"id": n, field: text}) + "\n" for n, text in enumerate(texts)).encode()
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        half = len(content) // 2  # two frames, as parallel compressors write
        content = b"".join(zstandard.compress(part) for part in (content[:half], content[half:]))
    path.write_bytes(content)
    return path


def test_every_document_is_on_one_side_with_a_separator(tmp_path: Path) -> None:
    prepared = _prepare([_write_lines(tmp_path / "a.jsonl")], tmp_path / "out")
    corpus = _corpus(tmp_path / "out")
    training, held_out = _texts(corpus.training), _texts(corpus.held_out)
    assert sorted(training + held_out) == sorted(TEXTS)
    assert 10 <= len(held_out) <= 60
    assert training == [text for text in TEXTS if text not in held_out]  # in order
    assert [shard.documents for shard in prepared.meta.shards] == [len(training), len(held_out)]
    assert (prepared.meta.tokenizer, prepared.meta.vocab_size, prepared.meta.dtype) == ("bytes", 257, "uint16")


def test_what_is_held_out_depends_on_the_text_alone(tmp_path: Path) -> None:
    _prepare([_write_lines(tmp_path / "a.jsonl")], tmp_path / "one")
    _prepare([_write_lines(tmp_path / "b.jsonl", TEXTS[::-1] + TEXTS[:50])], tmp_path / "two")
    one, two = _corpus(tmp_path / "one"), _corpus(tmp_path / "two")
    assert set(_texts(one.held_out)) == set(_texts(two.held_out))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.ndjson"])
def test_records_may_be_compressed(name: str, tmp_path: Path) -> None:
    _prepare([_write_lines(tmp_path / name)], tmp_path / "out")
    _prepare([_write_lines(tmp_path / "a.jsonl")], tmp_path / "plain")
    assert _texts(_corpus(tmp_path / "out").training) == _texts(_corpus(tmp_path / "plain").training)


@pytest.mark.parametrize(("unit_bytes", "units"), [(1, 5), (documents.UNIT_BYTES, 1)])
def test_parquet_is_read_by_its_row_groups(
    unit_bytes: int, units: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small ones together: each unit becomes one or two files, and all are open in training."""
    monkeypatch.setattr(documents, "UNIT_BYTES", unit_bytes)
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pa.table({"content": TEXTS}), tmp_path / "a.parquet", row_group_size=70)
    _prepare([tmp_path / "a.parquet"], tmp_path / "out", field="content")
    assert len(read_meta(tmp_path / "out").shards) == 2 * units
    monkeypatch.undo()
    _prepare([_write_lines(tmp_path / "a.jsonl")], tmp_path / "plain")
    assert _texts(_corpus(tmp_path / "out").training) == _texts(_corpus(tmp_path / "plain").training)
    with pytest.raises(ConfigError, match=r"a.parquet: has no field 'text'; give --field with one of: content"):
        _prepare([tmp_path / "a.parquet"], tmp_path / "other")
    parquet.ParquetWriter(tmp_path / "empty.parquet", pa.schema({"other": pa.string()})).close()
    with pytest.raises(ConfigError, match="holds no text"):
        find_units((str(tmp_path / "empty.parquet"),), "train", print)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"bad.parquet: is not a .parquet file, or cut off"):
        _prepare([tmp_path / "bad.parquet"], tmp_path / "other")


def test_a_saved_dataset_is_read_by_its_split(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    saved = {"train": datasets.Dataset.from_dict({"text": TEXTS}), "test": datasets.Dataset.from_dict({"text": ["x"]})}
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "data")
    _prepare([tmp_path / "data"], tmp_path / "out")
    assert sorted(_texts(_corpus(tmp_path / "out").training)) == sorted(
        text for text in TEXTS if text not in _texts(_corpus(tmp_path / "out").held_out)
    )
    datasets.DatasetDict(saved).save_to_disk(tmp_path / "both")
    with pytest.raises(ConfigError, match=r"split dev: cannot be loaded \('dev'\); check --split"):
        _prepare([tmp_path / "both"], tmp_path / "other", split="dev")


def test_a_dataset_of_the_hub_is_streamed_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here from a directory, which the library opens as it opens a repository of the hub."""
    datasets = pytest.importorskip("datasets")
    (tmp_path / "name").mkdir()
    for number, part in enumerate((TEXTS[:150], TEXTS[150:])):
        datasets.Dataset.from_dict({"text": part}).to_parquet(
            tmp_path / "name" / f"train-{number:05d}-of-00002.parquet"
        )
    source = f"hub:{tmp_path / 'name'}"
    units = find_units((source,), "train", print)
    assert [(unit.kind, unit.start, unit.end) for unit in units] == [("dataset", 0, 2), ("dataset", 1, 2)]
    assert [d.text for unit in units for d in read_documents(unit, "text", "train")] == TEXTS
    with pytest.raises(ConfigError, match=r"has no field 'body'; give --field with one of: text"):
        _prepare([source], tmp_path / "out", field="body")

    monkeypatch.setattr(documents, "is_hub_there", lambda: False)
    with pytest.raises(
        TransientError,
        match=r"hub:name:part, split train: cannot be loaded \(the hub does not answer\); check the name, --split and "
        r"the connection",
    ):
        _prepare(["hub:name:part"], tmp_path / "other")


def test_plain_text_is_cut_at_line_ends_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "TEXT_BYTES", 200)
    monkeypatch.setattr(documents, "UNIT_BYTES", 1000)
    text = "".join(f"line {number} with some words\n" for number in range(300))
    (tmp_path / "a.txt").write_text(text)
    _prepare([tmp_path / "a.txt"], tmp_path / "out", held_out=0.0)
    shards = [
        np.fromfile(tmp_path / "out" / shard.file, dtype=np.uint16) for shard in read_meta(tmp_path / "out").shards
    ]
    assert len(shards) > 5
    written = np.concatenate(shards)
    assert written[-1] == 256
    assert (written[:-1] < 256).all()  # one document, one separator
    assert Bytes().decode(written[:-1].tolist()) == text


@pytest.mark.parametrize("unit_bytes", [1, 7, 64, 1000])
def test_units_share_the_lines_of_a_file(unit_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "UNIT_BYTES", unit_bytes)
    path = _write_lines(tmp_path / "a.jsonl", TEXTS[:20])
    units = find_units((str(path),), "train", print)
    assert [d.text for unit in units for d in read_documents(unit, "text", "train")] == TEXTS[:20]


def test_a_directory_with_a_part_that_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "open.txt").write_text("text")
    scandir = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    # Simulated, because tests may run as root, who can read everything.
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError):
        find_units((str(tmp_path),), "train", print)


def test_directories_are_walked_and_binary_files_left_out(tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    _write_lines(tmp_path / "in" / "deep" / "b.jsonl", ["b"])
    (tmp_path / "in" / "a.txt").write_text("a\n")
    (tmp_path / "in" / ".hidden.txt").write_text("hidden")
    (tmp_path / "in" / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "in" / "wide.txt").write_text("wide", encoding="utf-16")
    said: list[str] = []
    units = find_units((str(tmp_path / "in"),), "train", said.append)
    assert [d.text for unit in units for d in read_documents(unit, "text", "")] == ["a\n", "b"]
    assert said == [
        f"warning: {tmp_path / 'in'}: left out 2 files (1 .png, 1 .txt): a file that holds zero bytes is not UTF-8 "
        "text; if it is UTF-16, convert it with `iconv -f UTF-16 -t UTF-8`"
    ]
    with pytest.raises(ConfigError, match=r"wide.txt: holds zero bytes, so it is not UTF-8 text; if it is UTF-16, con"):
        find_units((str(tmp_path / "in" / "wide.txt"),), "train", print)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa\n")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "b"}\n')
    found = [d for unit in find_units((str(tmp_path),), "train", print) for d in read_documents(unit, "text", "")]
    assert [(d.text, d.is_whole) for d in found] == [("a\n", True), ("b", True)]


def test_a_file_of_one_long_line_ends_with_a_separator_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "UNIT_BYTES", 1000)
    monkeypatch.setattr(documents, "TEXT_BYTES", 200)
    (tmp_path / "a.txt").write_text("a" * 2500)
    (tmp_path / "b.txt").write_text("b" * 250 + "\n" + "c" * 250 + "\n")
    _prepare([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "out", held_out=0.0)
    meta = read_meta(tmp_path / "out")
    shards = [np.fromfile(tmp_path / "out" / shard.file, dtype=np.uint16) for shard in meta.shards]
    assert [np.flatnonzero(ids == 256).tolist() for ids in shards] == [[2500], [502]]


def test_half_a_character_and_special_tokens_in_a_text_are_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "half \\ud83d of it"}\n{"text": "say <|endoftext|> twice"}\n' * 50)
    prepared = _prepare([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer="train:300", held_out=0.0)
    (shard,) = prepared.meta.shards
    ids = np.fromfile(tmp_path / "out" / shard.file, dtype=np.uint16)
    assert np.count_nonzero(ids == prepared.meta.separator) == 100
    folder = open_tokens(str(tmp_path / "out"))
    assert folder is not None
    tokenizer = folder.tokenizer()
    assert tokenizer is not None
    assert tokenizer.decode(ids.tolist()).startswith("half ? of it<|endoftext|>say <|endoftext|> twice<|endoftext|>")


@pytest.mark.parametrize("tokenizer", ["bytes", "chars"])
def test_text_that_is_not_utf_8_is_reported(tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "UNIT_BYTES", 500)
    said: list[str] = []
    (tmp_path / "a.txt").write_text("caf\N{REPLACEMENT CHARACTER}\n" * 100, encoding="utf-8")
    _prepare([tmp_path / "a.txt"], tmp_path / "good", tokenizer=tokenizer, say=said.append)
    assert said == []
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "b.txt").write_bytes("café crème\n".encode("latin-1") * 100)
    (folder / "c.txt").write_bytes(b"\xe9")
    _prepare([folder], tmp_path / "out", tokenizer=tokenizer, held_out=0.5, say=said.append)
    where = f"{folder / 'b.txt'} and 1 other file"
    assert said == [
        f"warning: 201 places in {where} are not UTF-8, and read as \N{REPLACEMENT CHARACTER}; convert the text, such "
        "as with iconv"
    ]


def test_text_of_an_archive_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(b"name\0\0\0content"))
    with pytest.raises(ConfigError, match=r"a.tar.gz, byte 0: holds a zero byte, so it is not text"):
        _prepare([tmp_path / "a.tar.gz"], tmp_path / "out")


def test_a_directory_without_its_meta_is_not_taken_for_another_kind(tmp_path: Path) -> None:
    _prepare([_write_lines(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer="train:300")
    (tmp_path / "out" / "meta.json").unlink()
    with pytest.raises(ConfigError, match=r"whose meta.json says what its ids are; give the whole directory"):
        open_tokens(str(tmp_path / "out"))


class Stop(Exception):
    """An interruption."""


def test_the_same_command_goes_on_after_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "UNIT_BYTES", 1000)
    path = _write_lines(tmp_path / "a.jsonl")
    whole = _prepare([path], tmp_path / "whole", tokenizer="train:300")
    seen: list[Progress] = []

    def stop(progress: Progress) -> None:
        seen.append(progress)
        if progress.units == 4:
            raise Stop

    with pytest.raises(Stop):
        _prepare([path], tmp_path / "out", tokenizer="train:300", on_progress=stop)
    with pytest.raises(ConfigError, match=r"is not finished; run the same `p2ptrain data prepare` again"):
        open_tokens(str(tmp_path / "out"))
    with pytest.raises(ConfigError, match=r"another preparation was begun there \(tokenizer 'train:300'\)"):
        _prepare([path], tmp_path / "out", tokenizer="bytes")
    said: list[str] = []
    again = _prepare([path], tmp_path / "out", tokenizer="train:300", say=said.append, on_progress=seen.append)
    assert said == [f"continuing: 4 of {seen[0].units_total} parts are done"]
    assert [progress.units for progress in seen] == list(range(1, seen[0].units_total + 1))
    assert again.meta == whole.meta  # hashes included
    with pytest.raises(ConfigError, match=r"holds prepared data already"):
        _prepare([path], tmp_path / "out", tokenizer="train:300")


def test_a_corrected_command_takes_the_directory_of_one_that_failed_at_once(tmp_path: Path) -> None:
    path, empty = _write_lines(tmp_path / "a.jsonl", field="body"), _write_lines(tmp_path / "empty.jsonl", [""])
    tok = tmp_path / "tokenizer.json"
    _prepare([_write_lines(tmp_path / "b.jsonl")], tmp_path / "made", tokenizer="train:300")
    (tmp_path / "made" / "tokenizer.json").rename(tok)
    with pytest.raises(ConfigError, match=r"has no field 'text'; give --field with one of: id, body"):
        _prepare([empty, path], tmp_path / "out", tokenizer=str(tok))
    _prepare([path], tmp_path / "out", field="body")
    assert sorted(found.name for found in (tmp_path / "out").iterdir()) == [
        ".lock", "meta.json", "train-000000.bin", "val-000000.bin"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("texts", "held_out", "error"),
    [
        (["short"], 0.0, "a.jsonl: 6 tokens in the largest file are too few to hold some out; give 20 or more"),
        (["x" * 100], 1.0, "a.jsonl: all documents are held out; give more text, or a smaller --held-out"),
        (["", ""], 0.1, "a.jsonl: no document with text was found to train on"),
    ],
)
def test_a_preparation_of_too_little_leaves_nothing(
    texts: list[str], held_out: float, error: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=error):
        _prepare([_write_lines(tmp_path / "a.jsonl", texts)], tmp_path / "out", held_out=held_out)
    assert [found.name for found in (tmp_path / "out").iterdir()] == [".lock"]
    prepared = _prepare([_write_lines(tmp_path / "b.jsonl", ["x" * 19])], tmp_path / "out", held_out=0.0)
    assert prepared.meta.shards[0].tokens == 20
    assert len(_corpus(tmp_path / "out").held_out) == 1


def test_parts_that_are_done_are_kept_when_a_later_one_fails(tmp_path: Path) -> None:
    good, bad = _write_lines(tmp_path / "a.jsonl"), _write_lines(tmp_path / "b.jsonl", field="body")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"has no field 'text'"):
            _prepare([good, bad], tmp_path / "out")
    _write_lines(bad)  # as long as before
    said: list[str] = []
    _prepare([good, bad], tmp_path / "out", say=said.append)
    assert said == ["continuing: 1 of 2 parts are done"]


def test_without_a_terminal_lines_say_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2ptrain.cli.data.LINE_INTERVAL_S", 0.0)
    paths = [str(_write_lines(tmp_path / f"{number}.jsonl")) for number in range(2)]
    flags = ["--tokenizer", "train:300", "--out", str(tmp_path / "out"), "--jobs", "1"]
    done = CliRunner().invoke(cli, ["data", "prepare", *paths, *flags], catch_exceptions=False)
    lines = re.sub(r"[\d,]+ tokens", "N tokens", re.sub(r"in \d+ s", "in N s", done.output)).splitlines()
    assert lines[:4] == [
        "making a tokenizer of 300 ids; with much text this takes minutes", "made it in N s: 300 ids",
        "1 of 2 parts, N tokens", "2 of 2 parts, N tokens",
    ]  # fmt: skip
    assert lines[-1] == f"train on it with: p2ptrain join --data {tmp_path / 'out'}"


@pytest.mark.parametrize(("share", "few"), [("0.005", True), ("0.5", False)])
def test_few_held_out_tokens_are_warned_of(share: str, few: bool, tmp_path: Path) -> None:
    source = str(_write_lines(tmp_path / "records.jsonl"))
    flags = ["--tokenizer", "bytes", "--out", str(tmp_path / "out"), "--jobs", "1", "--held-out", share]
    done = CliRunner().invoke(cli, ["data", "prepare", source, *flags], catch_exceptions=False)
    assert ("tokens are held out" in done.output) == few
    assert (f"give a larger --held-out than {share} and another --out" in done.output) == few


def test_no_held_out_documents_are_refused(tmp_path: Path) -> None:
    """Every peer evaluates."""
    source, out = str(_write_lines(tmp_path / "a.jsonl")), tmp_path / "out"
    done = CliRunner().invoke(
        cli, ["data", "prepare", source, "--tokenizer", "bytes", "--out", str(out), "--held-out", "0"]
    )
    assert done.exit_code == 2
    assert "Invalid value for '--held-out': 0.0 is not in the range 0<x<=0.5." in done.output
    assert not out.exists()
    assert "0<x<=0.5" in CliRunner().invoke(cli, ["data", "prepare", "--help"]).output


def test_the_command_to_train_is_quoted(tmp_path: Path) -> None:
    source, out = str(_write_lines(tmp_path / "a.jsonl")), tmp_path / "two words"
    flags = ["--tokenizer", "bytes", "--jobs", "1", "--out", str(out)]
    done = CliRunner().invoke(cli, ["data", "prepare", source, *flags], catch_exceptions=False)
    assert done.output.splitlines()[-1] == f"train on it with: p2ptrain join --data '{out}'"


def test_several_processes_write_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        _write_lines(tmp_path / f"{number}.jsonl", TEXTS[100 * number : 100 * number + 100])
    paths = [tmp_path / f"{number}.jsonl" for number in range(3)]
    assert _prepare(paths, tmp_path / "two", jobs=2).meta == _prepare(paths, tmp_path / "one").meta


def test_documents_without_text_are_left_out_and_counted(tmp_path: Path) -> None:
    prepared = _prepare(
        [_write_lines(tmp_path / "a.jsonl", ["one" * 9, "", "two", ""])], tmp_path / "out", held_out=0.0
    )
    assert prepared.empty == 2
    assert prepared.first_empty == f"{tmp_path / 'a.jsonl'}, byte 49"
    assert prepared.meta.shards[0].documents == 2


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"{", r"a.jsonl, byte 27: is not a line of JSON"),
        pytest.param(b"[" * 200_000, r"a.jsonl, byte 27: is not a line of JSON", id="deep"),
        (b"[1]", r"a.jsonl, byte 27: is a list, not a record"),
        (b'{"body": "x", "n": 1}', r"a.jsonl, byte 27: has no field 'text'; give --field with one of: body, n"),
        (b'{"text": 5}', r"a.jsonl, byte 27: field 'text' is a int, not text"),
    ],
)
def test_a_bad_record_is_named_with_its_place(line: bytes, error: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"id": 0, "text": "first"}\n' + line + b"\n")
    with pytest.raises(ConfigError, match=error):
        _prepare([tmp_path / "a.jsonl"], tmp_path / "out")
    assert not (tmp_path / "out" / "meta.json").exists()


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_compressed_file_that_is_cut_off_is_named(name: str, tmp_path: Path) -> None:
    path = _write_lines(tmp_path / name)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=rf"{name}: is cut off"):
        _prepare([path], tmp_path / "out")


def test_a_compressed_file_with_a_wrong_byte_is_named(tmp_path: Path) -> None:
    path = _write_lines(tmp_path / "a.jsonl.gz", [f"text {number}" for number in range(1000)])
    content = bytearray(path.read_bytes())
    content[40] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"a.jsonl.gz: is cut off or not compressed as its name says"):
        _prepare([path], tmp_path / "out")


def test_a_tokenizer_without_an_id_for_every_text_is_named(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"one": 0, "two": 1}, unk_token="[UNK]"))
    words.save(str(tmp_path / "words.json"))
    with pytest.raises(ConfigError, match=r"tokenizer.json: cannot encode a text \(.*UNK.*\); give a tokenizer that"):
        _prepare(
            [_write_lines(tmp_path / "a.jsonl", ["three"])], tmp_path / "out", tokenizer=str(tmp_path / "words.json")
        )


@pytest.mark.long
@pytest.mark.processes
def test_a_worker_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    parent = multiprocessing.get_context("spawn").Process(target=_start_a_worker, args=(begun,))
    parent.start()
    while not begun.exists() or not begun.read_text():
        assert parent.is_alive()
        time.sleep(0.02)
    worker = psutil.Process(int(begun.read_text()))
    parent.kill()
    parent.join()
    psutil.wait_procs([worker], timeout=60)
    assert not worker.is_running()


def _start_a_worker(begun: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, prepare.end_with_parent) as pool:
        pool.submit(_hang, begun).result()


def _hang(begun: Path) -> None:
    begun.write_text(str(os.getpid()))
    threading.Event().wait()


def test_sources_and_directories_that_cannot_be_used_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: no such file or directory"):
        _prepare([tmp_path / "nowhere"], tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty: holds no text"):
        _prepare([tmp_path / "empty"], tmp_path / "out")
    path = _write_lines(tmp_path / "a.jsonl")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"--out .*full: is not empty \(precious.txt\); give a new directory"):
        _prepare([path], tmp_path / "full")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"pipe: neither a file nor a directory; give files"):
        _prepare([tmp_path / "pipe"], tmp_path / "out")
    (tmp_path / "empty" / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(
        ConfigError, match=r"gone.txt: is a link to a missing file \(.*nowhere\); restore it, or remove"
    ):
        _prepare([tmp_path / "empty"], tmp_path / "out")
    name = _write_lines(tmp_path / os.fsdecode(b"caf\xe9.jsonl"))
    with pytest.raises(ConfigError, match=r"caf\\udce9.jsonl: is not UTF-8, as meta.json needs it; give another name"):
        _prepare([name], tmp_path / "out")
    with pytest.raises(ConfigError, match=r"no document with text was found"):
        _prepare([_write_lines(tmp_path / "b.jsonl", ["", ""])], tmp_path / "out2")


def test_a_changed_or_cut_shard_is_found(tmp_path: Path) -> None:
    _prepare([_write_lines(tmp_path / "a.jsonl")], tmp_path / "out")
    assert describe(tmp_path / "out", check=True).documents == 300
    shard = tmp_path / "out" / "train-000000.bin"
    content = bytearray(shard.read_bytes())
    shard.write_bytes(content[:-2])
    with pytest.raises(ConfigError, match=r"train-000000.bin: has [\d,]+ tokens, and meta.json says"):
        open_tokens(str(tmp_path / "out"))
    content[100] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ConfigError, match=r"train-000000.bin: was changed since it was prepared"):
        describe(tmp_path / "out", check=True)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"version": 2}', b"\xff"])
def test_a_meta_that_is_none_is_an_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"meta.json: was not written by p2ptrain data prepare"):
        open_tokens(str(tmp_path))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"separator": 256', '"separator": 257', r"meta.json: separator 257 is none of the 257 ids; it was changed"),
        ('"separator": 256', '"separator": -1', r"meta.json: separator -1 is none of the 257 ids"),
        ('"val-000000.bin"', '"train-000000.bin"', r"meta.json: names train-000000.bin twice; it was changed: copy it"),
        ('"tokens": ', '"tokens": 1', r"000.bin: has [\d,]+ tokens, and meta.json says 1[\d,]+; it was cut off or"),
        ('"documents": ', '"documents": 9999999', r"000.bin has [\d,]+ documents in [\d,]+ tokens; it was changed"),
        ('"vocab_size": 257', '"vocab_size": 300', r"its meta.json says 300 ids, and its tokenizer has 257; copy meta"),
    ],
)
def test_a_meta_that_contradicts_itself_or_its_files_is_named(old: str, new: str, message: str, tmp_path: Path) -> None:
    _prepare([_write_lines(tmp_path / "a.jsonl")], tmp_path / "out")
    path = tmp_path / "out" / "meta.json"
    content = path.read_text()
    assert old in content
    path.write_text(content.replace(old, new))
    with pytest.raises(ConfigError, match=rf"--data {tmp_path}/.*{message}"):
        describe(tmp_path / "out", check=False)


def test_a_meta_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    _prepare([_write_lines(tmp_path / "a.jsonl")], tmp_path / "out")
    path = tmp_path / "out" / "meta.json"
    path.write_text(path.read_text().replace("train-000000.bin", "../../etc/x.bin"))
    with pytest.raises(ConfigError, match=r"was not written by p2ptrain data prepare"):
        open_tokens(str(tmp_path / "out"))


def test_a_directory_is_described(tmp_path: Path) -> None:
    _prepare([_write_lines(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer="train:300")
    info = describe(tmp_path / "out", check=False)
    lines = list(info.lines())
    assert lines[0].endswith("300 ids of 2 bytes")
    assert "tokenizer train:300 (" in lines[0]
    assert "300 documents in all" in lines[3]
    assert info.begins.startswith("document ")
    assert info.held_out_begins.startswith("document ")
    with pytest.raises(ConfigError, match=r"was prepared with tokenizer .*, not bytes"):
        describe(tmp_path / "out", check=False, tokenizer_name="bytes")
    (tmp_path / "text.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"holds no token files"):
        describe(tmp_path / "text.txt", check=False)
