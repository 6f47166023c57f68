"""Tokenizers of a tokenizer.json, and how the user names one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from p2ptrain.errors import ConfigError, TransientError
from p2ptrain.training.data import tokenizer_file
from p2ptrain.training.data.tokenizer import Bytes, Characters, Ids, token_dtype
from p2ptrain.training.data.tokenizer_file import (
    SEPARATOR,
    TokenizerFile,
    find_tokenizer,
    read_tokenizer,
    train_tokenizer,
)

TEXT = "To be, or not to be: that is the question. Ünïcödé 𝄞 wörds\n" * 50


@pytest.fixture(scope="module")
def trained() -> TokenizerFile:
    return train_tokenizer([TEXT], 300)


def test_a_trained_tokenizer_writes_any_text_and_reads_it_again(trained: TokenizerFile) -> None:
    assert trained.vocab_size == 300
    (ids,) = trained.encode([TEXT])
    assert ids.dtype == np.uint16
    assert len(ids) < len(TEXT.encode()) / 1.5
    assert trained.decode(ids.tolist()) == TEXT
    assert trained.decode(trained.encode(["漢字 \0 \r\n"])[0].tolist()) == "漢字 \0 \r\n"
    assert trained.decode([trained.separator]) == SEPARATOR


def test_the_same_text_makes_the_same_tokenizer(trained: TokenizerFile) -> None:
    assert train_tokenizer([TEXT], 300).identity == trained.identity
    assert train_tokenizer([TEXT + "more"], 300).identity != trained.identity


def test_bytes_are_those_of_utf_8() -> None:
    (ids,) = Bytes().encode(["aé\0"])
    assert ids.tolist() == [97, 195, 169, 0]
    assert Bytes().decode([97, 195, 169, 256, 0]) == "aé\0"
    assert Bytes().decode([195]) == "\N{REPLACEMENT CHARACTER}"


def test_ids_alone_are_trained_on_but_not_made() -> None:
    with pytest.raises(ConfigError, match=r"--tokenizer ids: makes no tokens of text"):
        Ids(10).encode(["text"])
    assert Ids(10).decode([1, 2]) == " 1 2"


@pytest.mark.parametrize(("vocab_size", "size"), [(256, 1), (257, 2), (65536, 2), (65537, 4)])
def test_ids_take_no_more_bytes_than_they_need(vocab_size: int, size: int) -> None:
    assert np.dtype(token_dtype(vocab_size)).itemsize == size


def test_a_tokenizer_is_found_by_its_name(trained: TokenizerFile, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(trained.file)
    for name in (str(path), str(tmp_path)):
        found = find_tokenizer(name)
        assert found is not None
        assert (found.identity, found.vocab_size, found.file) == (trained.identity, 300, trained.file)
    assert isinstance(find_tokenizer("chars"), Characters)
    assert isinstance(find_tokenizer("bytes"), Bytes)
    assert [find_tokenizer(name).vocab_size for name in ("ids", "ids:500")] == [50257, 500]  # type: ignore[union-attr]
    assert find_tokenizer("train:8192") is None


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("train:256", "--tokenizer train:256: must be train:N with a number of ids from 257 to 1,048,576"),
        ("train:", "--tokenizer train:: must be"),
        ("ids:0", "--tokenizer ids:0: must be ids:N"),
        ("ids:9999999", "--tokenizer ids:9999999: must be ids:N"),
        ("train:８１９２", "must be train:N"),
        ("~nobody-of-this-name/x.json", "--tokenizer ~nobody-of-this-name/x.json: cannot be read"),
        (300 * "x", "--tokenizer x+: cannot be read .File name too long"),
        ("nowhere.json", "--tokenizer nowhere.json: cannot be read.*give chars, bytes, a tokenizer.json, hub:NAME"),
    ],
)
def test_a_name_that_is_none_is_an_error(name: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        find_tokenizer(name)


def test_a_file_of_the_hub_is_found_in_its_cache(
    trained: TokenizerFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    path = tmp_path / "tokenizer.json"
    path.write_bytes(trained.file)
    asked = []

    def download(*names: str, local_files_only: bool) -> str:
        asked.append((*names, local_files_only))
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(tokenizer_file, "is_hub_there", lambda: False)
    found = find_tokenizer("hub:some/model")
    assert found is not None
    assert found.identity == trained.identity
    assert asked == [("some/model", "tokenizer.json", True)]


def test_a_hub_that_does_not_have_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    monkeypatch.setattr(tokenizer_file, "is_hub_there", lambda: True)
    for error, reason, kind in (
        (
            LocalEntryNotFoundError("a long text"),
            "the hub cannot be reached, and it is not in the cache",
            TransientError,
        ),
        (OSError("disk full\nand more"), "disk full", ConfigError),
        (OSError(), "OSError", ConfigError),
    ):

        def fail(*names: str, local_files_only: bool, error: Exception = error) -> str:
            raise error

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
        with pytest.raises(
            ConfigError, match=rf"--tokenizer hub:a/b: no tokenizer.json found \({reason}\); check the"
        ) as raised:
            find_tokenizer("hub:a/b")
        assert raised.type is kind
    monkeypatch.undo()
    monkeypatch.setattr(tokenizer_file, "is_hub_there", lambda: True)
    with pytest.raises(ConfigError, match=r"hub:not a name"):
        find_tokenizer("hub:not a name")


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b"[]", b'{"model": 1}'])
def test_a_file_that_is_no_tokenizer_is_an_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad.json: is not a tokenizer.json \(.*; give one that"):
        find_tokenizer(str(tmp_path / "bad.json"))


@pytest.mark.parametrize(
    ("part", "value", "error"),
    [
        # Exponential: the library stops the search, and panics.
        ("normalizer", {"type": "Replace", "pattern": {"Regex": "(a|aa)+$"}, "content": "b"}, "cannot encode a text"),
        ("normalizer", {"type": "Replace", "pattern": {"String": ""}, "content": "b"}, "cannot encode a text"),
        ("decoder", {"type": "Strip", "content": "a", "start": 9, "stop": 9}, "cannot write ids as text"),
    ],
)
def test_a_file_at_which_the_library_panics_is_an_error(
    trained: TokenizerFile, part: str, value: dict[str, object], error: str
) -> None:
    odd = TokenizerFile(json.dumps(json.loads(trained.file) | {part: value}).encode(), "odd.json")
    with pytest.raises(ConfigError, match=rf"^odd.json: {error} \(.*\); give "):
        odd.decode(odd.encode(["a" * 40 + "!"])[0])


def test_a_file_that_joiners_could_not_get_is_an_error(trained: TokenizerFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_file, "MAX_FILE_BYTES", 1000)
    with pytest.raises(ConfigError, match=r"it: has more than 1,000 bytes, too many to send to joiners"):
        TokenizerFile(trained.file, "it")


def test_a_vocabulary_with_holes_counts_to_its_last_id() -> None:
    made = Tokenizer(models.WordLevel({"a": 0, "b": 70000, "?": 1}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = TokenizerFile(made.to_str().encode(), "it")
    assert tokenizer.vocab_size == 70001
    assert tokenizer.separator is None
    (ids,) = tokenizer.encode(["b a c"])
    assert ids.dtype == np.uint32
    assert ids.tolist() == [70000, 0, 1]
    made = Tokenizer(models.WordLevel({"a": 0, "b": 2**20, "?": 1}, unk_token="?"))
    with pytest.raises(ConfigError, match=r"it: has 1,048,577 ids; 2 to 1,048,576 can be used"):
        TokenizerFile(made.to_str().encode(), "it")


def test_a_file_that_cuts_and_fills_texts_does_neither_here(trained: TokenizerFile) -> None:
    settings = json.loads(trained.file)
    settings["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    settings["padding"] = {
        "strategy": {"Fixed": 5000}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": SEPARATOR,
    }  # fmt: skip
    cutting = TokenizerFile(json.dumps(settings).encode(), "it")
    assert cutting.encode([TEXT])[0].tolist() == trained.encode([TEXT])[0].tolist()


def test_a_directory_has_the_tokenizer_of_its_hash_only(trained: TokenizerFile, tmp_path: Path) -> None:
    assert read_tokenizer(tmp_path, trained.identity, 300) is None
    (tmp_path / "tokenizer.json").write_bytes(trained.file)
    found = read_tokenizer(tmp_path, trained.identity, 300)
    assert found is not None
    assert found.file == trained.file
    assert read_tokenizer(tmp_path, "0" * 64, 300) is None
    assert isinstance(read_tokenizer(tmp_path, "chars", 98), Characters)
    assert read_tokenizer(tmp_path, "ids", 77).vocab_size == 77  # type: ignore[union-attr]
