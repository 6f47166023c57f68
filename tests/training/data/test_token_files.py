"""Token files of nanoGPT, llm.c and modded-nanogpt, as they are, and of `p2ptrain data prepare`."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from p2ptrain.errors import ConfigError
from p2ptrain.training.data import Characters, RandomWindows, token_files
from p2ptrain.training.data.token_files import TokenFile, TokenFiles, TokenFolder, open_tokens
from p2ptrain.training.data.token_info import describe
from p2ptrain.training.data.tokenizer import Bytes, Ids


def _opened(path: Path) -> TokenFolder:
    found = open_tokens(str(path))
    assert found is not None
    return found


def _plain(path: Path, ids: np.ndarray) -> None:
    """As nanoGPT writes train.bin."""
    ids.astype(np.uint16).tofile(path)


def _with_header(path: Path, ids: np.ndarray, *, magic: int = 20240520, version: int = 1, count: int = -1) -> None:
    """As llm.c and modded-nanogpt write their shards."""
    header = np.zeros(256, dtype=np.int32)
    header[:3] = magic, version, len(ids) if count < 0 else count
    dtype = np.uint16 if magic == 20240520 else np.uint32
    path.write_bytes(header.tobytes() + ids.astype(dtype).tobytes())


def test_nanogpts_folder_is_read_as_it_is(tmp_path: Path) -> None:
    _plain(tmp_path / "train.bin", np.arange(1000) % 50257)
    _plain(tmp_path / "val.bin", np.arange(500, 600))
    (tmp_path / "meta.pkl").write_bytes(b"not read: a pickle can run code")
    folder = _opened(tmp_path)
    assert (folder.identity, folder.vocab_size) == ("ids", 50257)
    corpus = folder.corpus(Ids(50257))
    assert len(corpus.training) == 1000
    assert corpus.held_out[np.array([[0, 99], [1, 2]])].tolist() == [[500, 599], [501, 502]]


def test_a_named_tokenizer_shows_whether_it_made_the_files(tmp_path: Path) -> None:
    _plain(tmp_path / "train.bin", Bytes().encode(["the text to train on"])[0])
    _plain(tmp_path / "val.bin", Bytes().encode(["what is held out"])[0])
    unknown = describe(tmp_path, check=False)
    assert next(unknown.lines()) == (
        f"{tmp_path}: tokenizer not known (GPT-2's? see --tokenizer), 50,257 ids of 2 bytes"
    )
    assert (unknown.begins, unknown.held_out_begins) == ("", "")
    assert list(describe(tmp_path, check=True, tokenizer_name="bytes").lines()) == [
        f"{tmp_path}: tokenizer bytes, 257 ids of 2 bytes",
        "  train                  20 tokens in 1 file",
        "    begins  'the text to train on'",
        "  held out               16 tokens in 1 file",
        "    begins  'what is held out'",
        "  checked   all files were read, and are as they should be",
    ]
    (first, *_) = describe(tmp_path, check=False, tokenizer_name="ids:300").lines()
    assert first == f"{tmp_path}: tokenizer ids:300, 300 ids of 2 bytes"
    for name, fault in (
        ("chars", r"train\.bin, token 6 \(byte 12\): id 120 is beyond the vocabulary of 98; another tokenizer made"),
        ("train:300", "--tokenizer train:300: train:N makes a new one; give the tokenizer that made the tokens"),
    ):
        with pytest.raises(ConfigError, match=fault):
            describe(tmp_path, check=False, tokenizer_name=name)


def test_sharded_files_with_a_header_follow_each_other(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        _with_header(tmp_path / f"fineweb_train_{number:06d}.bin", np.arange(100) + 1000 * number)
    _with_header(tmp_path / "fineweb_val_000000.bin", np.arange(50))
    corpus = _opened(tmp_path).corpus(Ids(50257))
    assert len(corpus.training) == 300
    assert corpus.training[np.array([0, 99, 100, 199, 200, 299])].tolist() == [1000, 1099, 2000, 2099, 3000, 3099]
    # A window may go from one file to the next, as in nanoGPT.
    assert corpus.training[np.arange(98, 102)].tolist() == [1098, 1099, 2000, 2001]
    assert len(corpus.held_out) == 50


def test_llama_3s_files_have_four_bytes_for_an_id(tmp_path: Path) -> None:
    _with_header(tmp_path / "a_train.bin", np.array([128000, 5] * 50), magic=20240801, version=7)
    _with_header(tmp_path / "a_val.bin", np.array([128000]), magic=20240801, version=7)
    assert _opened(tmp_path).vocab_size == 128_256
    assert _opened(tmp_path).corpus(Ids(128256)).training[np.arange(3)].tolist() == [128000, 5, 128000]


def test_one_file_alone_holds_its_end_out(tmp_path: Path) -> None:
    _plain(tmp_path / "mine.bin", np.arange(2000))
    corpus = _opened(tmp_path / "mine.bin").corpus(Ids(50257))
    assert (len(corpus.training), len(corpus.held_out)) == (1900, 100)
    assert corpus.held_out[np.array([0, 99])].tolist() == [1900, 1999]


def test_the_end_of_the_largest_file_is_held_out(tmp_path: Path) -> None:
    for number, count in enumerate((400, 4000, 30)):
        _with_header(tmp_path / f"a_train_{number}.bin", np.arange(count))
    corpus = _opened(tmp_path).corpus(Ids(50257))
    assert (len(corpus.training), len(corpus.held_out)) == (400 + 3800 + 30, 200)
    assert corpus.held_out[np.array([0, 199])].tolist() == [3800, 3999]
    assert corpus.training[np.array([4199, 4200])].tolist() == [3799, 0]


def test_names_say_what_is_held_out_as_whole_words(tmp_path: Path) -> None:
    for name in ("medieval_train", "interval-train-2", "wiki_val", "val"):
        _plain(tmp_path / f"{name}.bin", np.arange(100))
    folder = _opened(tmp_path)
    assert {file.path.stem for file in folder.training} == {"medieval_train", "interval-train-2"}
    assert {file.path.stem for file in folder.held_out} == {"wiki_val", "val"}


def test_a_binary_file_among_texts_makes_no_token_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    _plain(tmp_path / "firmware.bin", np.arange(100))
    assert open_tokens(str(tmp_path)) is None


def test_windows_are_drawn_from_files_as_from_an_array(tmp_path: Path) -> None:
    ids = np.arange(3000) % 251
    _plain(tmp_path / "a_train.bin", ids[:1700])
    _plain(tmp_path / "b_train.bin", ids[1700:])
    _plain(tmp_path / "val.bin", ids[:100])
    files = _opened(tmp_path).corpus(Ids(251)).training
    from_files = RandomWindows(files, context=16, batch_size=8, seed=3)
    from_array = RandomWindows(ids, context=16, batch_size=8, seed=3)
    for _ in range(20):
        for a, b in zip(from_files.next_batch(), from_array.next_batch(), strict=True):
            assert a.tolist() == b.tolist()


def test_files_are_mapped_not_loaded(tmp_path: Path) -> None:
    _plain(tmp_path / "train.bin", np.arange(1000))
    assert isinstance(_opened(tmp_path / "train.bin").training[0].ids, np.memmap)


def test_an_id_beyond_the_vocabulary_is_named_with_its_place(tmp_path: Path) -> None:
    _with_header(tmp_path / "a_train.bin", np.arange(100))
    _with_header(tmp_path / "b_train.bin", np.where(np.arange(100) == 42, 50256, 7))
    _with_header(tmp_path / "val.bin", np.arange(50))
    folder = _opened(tmp_path)
    training = TokenFiles(folder.training, 300)
    training[np.arange(0, 142)]
    with pytest.raises(
        ConfigError, match=r"b_train.bin, token 42 \(byte 1,108\): id 50256 is beyond the vocabulary of 300; give the"
    ):
        training[np.arange(10, 150)]
    with pytest.raises(ConfigError, match=r"b_train.bin, token 42 "):
        folder.corpus(Ids(300))  # before anything is read


def test_the_quick_look_at_large_files_sees_their_ends_and_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_files, "SAMPLE_IDS", 4)
    monkeypatch.setattr(token_files, "SAMPLES", 8)

    def is_seen(place: int, count: int) -> bool:
        _with_header(tmp_path / "train.bin", np.where(np.arange(count) == place, 50256, 7))
        _with_header(tmp_path / "val.bin", np.arange(50))
        try:
            _opened(tmp_path).corpus(Ids(300))
        except ConfigError as error:
            return f"token {place:,} " in str(error)
        return False

    assert all(is_seen(place, 32) for place in range(32))
    assert [place for place in range(33) if not is_seen(place, 33)] == [28]
    assert is_seen(0, 1000)
    assert is_seen(999, 1000)
    assert not is_seen(50, 1000)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"\1\2\3", "3 bytes after byte 0 are no whole number of ids of 2 bytes; it was cut off"),
        (struct.pack("<256i", 20240520, 1, 10, *[0] * 253) + b"\1\0" * 9, "header says 10 tokens, and 9 follow"),
        (struct.pack("<256i", 20240520, 1, 10, *[0] * 253) + b"\1\0" * 11, "header says 10 tokens, and 11 follow"),
        (struct.pack("<256i", 20240520, 2, 10, *[0] * 253) + b"\1\0" * 10, "version 2 of its kind; only version 1"),
        (struct.pack("<3i", 20240520, 1, 10), "0 bytes after byte 1,024 are no whole number"),
        (struct.pack("<256i", 20240801, 7, 1, *[0] * 253) + b"\1\0", "2 bytes after byte 1,024 are no whole number"),
        (b"\x93NUMPY\1\0" + b"\1\0" * 999, r"is a .npy file, .*; write its ids alone with np.load\('train.bin'\)"),
        (np.arange(9999, dtype="<u4").tobytes() + b"\1\0", "its ids seem to have 4 bytes, and those of a .bin file"),
        (np.arange(9999, dtype="<i8").tobytes() + b"\1\0" * 2, "its ids seem to have 8 bytes, and those of a .bin"),
        (np.arange(9999, dtype="<i8").tobytes() + b"\1\0" * 3, "its ids seem to have 8 bytes, and those of a .bin"),
        (b"", "no tokens to train on"),
        (b"\1\0" * 10, "10 tokens in the largest file are too few to hold some out; give 20 or more"),
    ],
)
def test_a_bad_file_is_named(content: bytes, error: str, tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"--data .*: .*{error}"):
        open_tokens(str(tmp_path / "train.bin"))


@pytest.mark.parametrize(("name", "loaded"), [("a.npy", "np.load('a.npy')"), ("a.npz", "np.load('a.npz')['ids']")])
def test_arrays_of_numpy_are_refused_with_the_command_that_writes_them(
    name: str, loaded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.arange(999, dtype=np.int64)
    np.save(tmp_path / "a.npy", ids)
    np.savez(tmp_path / "a.npz", ids=ids)
    with pytest.raises(ConfigError) as caught:
        open_tokens(str(tmp_path / name))
    command = str(caught.value).partition("alone with ")[2].partition(", or as")[0].replace("NAME", "ids")
    assert command == f"{loaded}.astype(np.uint16).tofile('a.bin')"
    monkeypatch.chdir(tmp_path)
    exec(command, {"np": np})
    assert _opened(tmp_path / "a.bin").training[0].ids.tolist() == ids[:950].tolist()


@pytest.mark.parametrize(
    ("dtype", "width", "vocab_size"), [("<u4", 4, 50257), ("<u4", 4, 128_256), ("<u4", 4, 5), ("<i8", 8, 128_256)]
)
def test_wider_ids_without_a_header_are_refused_and_the_docs_mend_them(
    dtype: str, width: int, vocab_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.random.default_rng(0).zipf(1.2, 100_000) % vocab_size
    for name in ("train.bin", "val.bin"):
        ids.astype(dtype).tofile(tmp_path / name)
    with pytest.raises(ConfigError, match=rf"train\.bin: its ids seem to have {width} bytes, and those .* have 2;"):
        open_tokens(str(tmp_path))
    page = (Path(__file__).parents[3] / "docs/use/data.md").read_text(encoding="utf-8")
    program = page.partition("```python\n")[2].partition("```")[0].replace("np.uint32)", f"'{dtype}')", 1)
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    training = _opened(tmp_path).training[0]
    np.testing.assert_array_equal(training.ids, ids)


def test_the_digest_of_a_folder_is_that_of_its_text(tmp_path: Path) -> None:
    def digest(first: int, last: int, name: str = "a_train_1") -> str:
        folder = tmp_path / f"{first}-{last}-{name}"
        folder.mkdir()
        _with_header(folder / f"{name}.bin", np.array([first, *range(100_000), last]) % 50_000)
        _with_header(folder / "a_val_1.bin", np.arange(100))
        return _opened(folder).corpus(Ids(50257)).digest

    assert digest(1, 2) == digest(1, 2, "b_train_7")
    assert len({digest(1, 3), digest(2, 2), digest(1, 2, "c_train")}) == 3


@pytest.mark.parametrize("vocab_size", [2, 5, 17, 65, 50257])
def test_ids_of_two_bytes_are_never_taken_for_wider_ones(vocab_size: int, tmp_path: Path) -> None:
    for seed, count in enumerate([64, 100, 10_000, 100_000]):
        _plain(tmp_path / "train.bin", np.random.default_rng(seed).zipf(1.2, count) % vocab_size)
        assert _opened(tmp_path / "train.bin").training[0].ids.dtype == np.uint16
    _plain(tmp_path / "train.bin", np.zeros(1000))
    _opened(tmp_path / "train.bin")


def test_a_folder_without_files_to_train_on_is_an_error(tmp_path: Path) -> None:
    _plain(tmp_path / "val.bin", np.arange(50))
    with pytest.raises(ConfigError, match=r"no tokens to train on; give a folder with train.bin"):
        open_tokens(str(tmp_path))


@pytest.mark.parametrize("given", [".", "train-000000.bin"])
def test_files_of_data_prepare_are_not_read_without_what_describes_them(given: str, tmp_path: Path) -> None:
    """With `chars`, an id has one byte."""
    for name in ("train", "val"):
        (tmp_path / f"{name}-000000.bin").write_bytes(bytes(100))
    with pytest.raises(ConfigError, match=r"has a name of `p2ptrain data prepare`.*give the whole directory"):
        open_tokens(str(tmp_path / given))


def test_a_folder_of_text_is_none_of_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    assert open_tokens(str(tmp_path)) is None
    assert open_tokens(str(tmp_path / "a.txt")) is None


def test_tokens_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "a.bin", np.arange(10), 0)
    folder = TokenFolder("here", [file], [file], "bytes", 257)
    folder.corpus(Bytes())
    with pytest.raises(ConfigError, match=r"--data here: was prepared with tokenizer bytes, not chars"):
        folder.corpus(Characters())


def test_positions_may_have_any_shape_and_order() -> None:
    files = TokenFiles([TokenFile(Path("a"), np.arange(5), 0), TokenFile(Path("b"), np.arange(5, 12), 0)], 100)
    positions = np.random.default_rng(1).integers(12, size=(7, 3, 2))
    np.testing.assert_array_equal(files[positions], positions)
    assert files[np.empty((0, 4), dtype=np.int64)].shape == (0, 4)


def test_a_file_that_is_cut_off_while_it_is_used_is_named(tmp_path: Path) -> None:
    """Reading beyond its end would kill the process with SIGBUS."""
    _plain(tmp_path / "train.bin", np.arange(100_000) % 1000)
    training = _opened(tmp_path).corpus(Ids(1000)).training
    positions = np.array([5, 50_000])
    assert training[positions].tolist() == [5, 0]
    with open(tmp_path / "train.bin", "r+b") as file:
        file.truncate(1000)
    with pytest.raises(ConfigError, match=r"train.bin: was cut off while it was used, to 1,000 bytes; restore it"):
        training[positions]
    (tmp_path / "train.bin").unlink()


def test_an_empty_file_to_hold_out_is_an_error(tmp_path: Path) -> None:
    _plain(tmp_path / "train.bin", np.arange(1000))
    (tmp_path / "val.bin").touch()
    with pytest.raises(ConfigError, match=r"val.bin: is empty; remove it to hold out the end of the training files"):
        open_tokens(str(tmp_path))
