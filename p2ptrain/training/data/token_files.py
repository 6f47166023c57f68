"""Token files: memory-mapped, never loaded whole.

Three kinds are read as they are: folders of `p2ptrain data prepare` (meta.json), nanoGPT's `train.bin` and `val.bin`
(plain uint16), and the `.bin` files of llm.c and modded-nanogpt (256 int32, then uint16 or uint32 ids).
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from p2ptrain.errors import ConfigError
from p2ptrain.settings.config import MAX_VOCAB_SIZE
from p2ptrain.settings.files import open_file, user_path
from p2ptrain.training.data.corpus import HELD_OUT_ONE_IN, Corpus
from p2ptrain.training.data.meta import META_FILE, UNFINISHED, Meta, read_meta
from p2ptrain.training.data.tokenizer import GPT2_VOCAB_SIZE, IDS, Tokenizer
from p2ptrain.training.data.tokenizer_file import TOKENIZER_FILE, read_tokenizer

# The header of llm.c's files: 256 int32, which begin with magic, version and number of tokens.
HEADER_BYTES = 1024
_HEADER = struct.Struct("<3i")
# Version, dtype and number of ids by magic, for GPT-2's and Llama 3's tokenizer (llm.c, dev/data/data_common.py).
HEADERS: dict[int, tuple[int, type[np.unsignedinteger[Any]], int]] = {
    20240520: (1, np.uint16, GPT2_VOCAB_SIZE), 20240801: (7, np.uint32, 128_256),
}  # fmt: skip
# The first bytes of a .npy file, whatever its name.
NUMPY_MAGIC = b"\x93NUMPY"
NUMPY = (".npy", ".npz")
# Usual names of the files to train on and to evaluate on: train.bin, fineweb_val_000000.bin.
_NAMED = re.compile(r"(?:^|[_-])(train|val)(?:[_-]|$)")
# A file of `p2ptrain data prepare`.
_SHARD = re.compile(r"(train|val)-\d{6}\.bin")
# Files may be larger than memory. To guess the width of ids without a header, so many stretches of so many are read.
_STRETCHES, _STRETCH = 16, 1024
# To find ids beyond the vocabulary in larger files, this many stretches of this many ids are read in all, and at least
# the first and last of each file: 8 MiB of ids of two bytes.
SAMPLES, SAMPLE_IDS = 64, 64 * 1024
# In a shorter file every second number may be small by chance.
_FEWEST = 64
# Without a file to hold out, the end of the largest one is held out: a twentieth, and at most as much as an evaluation
# can use.
MOST_HELD_OUT = 2**20


@dataclass(frozen=True)
class TokenFile:
    """A file of token ids, memory-mapped: (tokens,) uint8, uint16 or uint32, from `offset` bytes after its start on.

    `vocab_size` is that of the tokenizer with which files of this kind are made. `sha256` is the hash of the whole file
    in its meta.json; "" without one.
    """

    path: Path
    ids: NDArray[Any]
    offset: int
    vocab_size: int = GPT2_VOCAB_SIZE
    sha256: str = ""

    def check_size(self) -> None:
        """Raise ConfigError if the file was cut off since it was opened: reading beyond its end kills the process."""
        try:
            size = self.path.stat().st_size
        except OSError:  # it was removed: the system keeps it as long as it is mapped
            return
        if size < self.offset + self.ids.nbytes:
            raise ConfigError(
                f"--data: {self.path}: was cut off while it was used, to {size:,} bytes; restore it, and run the same "
                f"command again"
            )

    def fingerprint(self) -> bytes:
        """A hash of its length, its first and last ids, and `sha256`, which are quick to read."""
        digest = hashlib.sha256(f"{len(self.ids)} {self.ids.dtype.str} {self.sha256} ".encode())
        digest.update(self.ids[:_STRETCH].tobytes() + self.ids[-_STRETCH:].tobytes())
        return digest.digest()

    def beyond(self, position: int, vocab_size: int) -> str:
        """Describe an id that is beyond the vocabulary, and its place, for errors."""
        place = f"token {position:,} (byte {self.offset + position * self.ids.itemsize:,})"
        return f"{self.path}, {place}: id {self.ids[position]} is beyond the vocabulary of {vocab_size:,}"


class TokenFiles:
    """The ids of several files, joined."""

    def __init__(self, files: Sequence[TokenFile], vocab_size: int) -> None:
        """Ids must be below `vocab_size`, which is checked as they are read."""
        self._files = list(files)
        self._ends = np.cumsum([len(file.ids) for file in self._files])
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The ids at these positions, int64 in the same shape.

        Raises ConfigError for an id beyond the vocabulary, or a file that was cut off since it was opened.
        """
        numbers = np.searchsorted(self._ends, positions, side="right")
        ids = np.empty(positions.shape, dtype=np.int64)
        for number in np.unique(numbers):
            inside = numbers == number
            file, first = self._files[number], self._ends[number] - len(self._files[number].ids)
            file.check_size()
            ids[inside] = self._checked(file, positions[inside] - first)
        return ids

    def look(self) -> None:
        """Raise ConfigError for an id beyond the vocabulary, in small files and in samples of large ones.

        It reads a few megabytes in all.
        """
        samples = max(2, SAMPLES // len(self._files))
        for file in self._files:
            count = len(file.ids)
            is_large = count > samples * SAMPLE_IDS
            for start in np.linspace(0, count - SAMPLE_IDS, samples, dtype=np.int64) if is_large else [0]:
                self._checked(file, np.arange(start, start + SAMPLE_IDS if is_large else count))

    def _checked(self, file: TokenFile, positions: NDArray[np.int64]) -> NDArray[np.integer[Any]]:
        """The ids at these positions of a file. Raises ConfigError if one is beyond the vocabulary."""
        found = file.ids[positions]
        if found.max() >= self._vocab_size:
            fault = file.beyond(int(positions[np.argmax(found)]), self._vocab_size)
            raise ConfigError(f"--data: {fault}; give the tokenizer that made these files as --tokenizer")
        return found


@dataclass(frozen=True)
class TokenFolder:
    """Files of tokens to train on and to evaluate on.

    Attributes:
        source: the user's value of --data, for errors.
        training, held_out: the files; at least one of each.
        identity, vocab_size: those of the tokenizer that made them; the identity is `IDS` if it is not known.
    """

    source: str
    training: Sequence[TokenFile]
    held_out: Sequence[TokenFile]
    identity: str
    vocab_size: int

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that made them; None if that is not known. Raises ConfigError if its file is missing."""
        if self.identity == IDS:
            return None
        tokenizer = read_tokenizer(Path(self.source), self.identity, self.vocab_size)
        if tokenizer is None:
            raise ConfigError(
                f"--data {self.source}: its {TOKENIZER_FILE} is missing or another one; copy it from where "
                f"the data was prepared"
            )
        self.check_tokenizer(tokenizer)
        return tokenizer

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise ConfigError if another tokenizer made these files, or has another size than they say."""
        if self.identity not in (IDS, tokenizer.identity) and tokenizer.identity != IDS:
            raise ConfigError(
                f"--data {self.source}: was prepared with tokenizer {self.identity[:12]}, not "
                f"{tokenizer.identity[:12]}; prepare it again, or give data of that tokenizer"
            )
        if self.identity == tokenizer.identity != IDS and self.vocab_size != tokenizer.vocab_size:
            raise ConfigError(
                f"--data {self.source}: its {META_FILE} says {self.vocab_size:,} ids, and its tokenizer has "
                f"{tokenizer.vocab_size:,}; copy {META_FILE} again, or prepare the data again"
            )

    def corpus(self, tokenizer: Tokenizer) -> Corpus:
        """The tokens. Raises ConfigError if a quick look at their ids shows that another tokenizer made them."""
        self.check_tokenizer(tokenizer)
        vocab_size = tokenizer.vocab_size
        digest = hashlib.sha256(b"".join(file.fingerprint() for file in (*self.training, *self.held_out))).hexdigest()
        training, held_out = TokenFiles(self.training, vocab_size), TokenFiles(self.held_out, vocab_size)
        training.look()
        held_out.look()
        return Corpus(training, held_out, digest)


def open_tokens(source: str) -> TokenFolder | None:
    """Map a folder of token files, or one .bin file; None if `source` is neither. Raises ConfigError for bad files."""
    path = user_path(source)
    try:
        if (path / META_FILE).is_file():
            return _prepared(path, read_meta(path))
        if path.suffix in (".bin", *NUMPY):
            return _given(source, [path])
        if (path / UNFINISHED).is_dir():
            raise ConfigError(f"--data {source}: is not finished; run the same `p2ptrain data prepare` again")
        bins = [file for file in sorted(path.glob("*.bin")) if _NAMED.search(file.stem)] if path.is_dir() else []
        return _given(source, bins) if bins else None
    except OSError as error:
        raise ConfigError(f"--data {error.filename or source}: cannot be read ({error.strerror}); check it") from error


def _prepared(folder: Path, meta: Meta) -> TokenFolder:
    dtype = np.dtype(meta.dtype).newbyteorder("<")
    files: dict[str, list[TokenFile]] = {"train": [], "val": []}
    for shard in meta.shards:
        file = replace(_mapped(folder / shard.file, dtype, 0), sha256=shard.sha256)
        if len(file.ids) != shard.tokens:
            raise ConfigError(
                f"--data {file.path}: has {len(file.ids):,} tokens, and {META_FILE} says {shard.tokens:,}; it was cut "
                f"off or changed: copy it again, or prepare the data again"
            )
        files[shard.split].append(file)
    return _folder(str(folder), files["train"], files["val"], meta.tokenizer, meta.vocab_size)


def _given(source: str, paths: Iterable[Path]) -> TokenFolder:
    """Open files of nanoGPT, llm.c or modded-nanogpt. Those whose names have the word "val" are held out."""
    training: list[TokenFile] = []
    held_out: list[TokenFile] = []
    for path in paths:
        named = _NAMED.search(path.stem)
        (held_out if named is not None and named[1] == "val" else training).append(_open(path))
    return _folder(source, training, held_out, IDS, max(file.vocab_size for file in (*training, *held_out)))


def _folder(
    source: str, training: Sequence[TokenFile], held_out: Sequence[TokenFile], identity: str, vocab_size: int
) -> TokenFolder:
    if held_out and not any(len(file.ids) for file in held_out):
        raise ConfigError(f"--data {held_out[0].path}: is empty; remove it to hold out the end of the training files")
    training, held_out = ([file for file in files if len(file.ids)] for files in (training, held_out))
    if not training:
        raise ConfigError(f"--data {source}: no tokens to train on; give a folder with train.bin, or *train*.bin")
    if not held_out:
        largest = max(training, key=lambda file: len(file.ids))
        if (fault := too_few(len(largest.ids))) is not None:
            raise ConfigError(f"--data {source}: {fault}")
        count = min(MOST_HELD_OUT, len(largest.ids) // HELD_OUT_ONE_IN)
        cut = len(largest.ids) - count
        training = [replace(file, ids=file.ids[:cut]) if file is largest else file for file in training]
        offset = largest.offset + cut * largest.ids.itemsize
        held_out = [replace(largest, ids=largest.ids[cut:], offset=offset)]
    return TokenFolder(source, training, held_out, identity, vocab_size)


def too_few(tokens: int) -> str | None:
    """Why the end of the largest file, of so many tokens, cannot be held out, in words; None if it can."""
    if tokens >= HELD_OUT_ONE_IN:
        return None
    return f"{tokens} tokens in the largest file are too few to hold some out; give {HELD_OUT_ONE_IN} or more"


def _open(path: Path) -> TokenFile:
    """Map a file of nanoGPT's kind (no header), or of llm.c's."""
    with open_file(path) as stream:
        start = stream.read(_HEADER.size)
    magic, version, count = _HEADER.unpack(start) if len(start) == _HEADER.size else (0, 0, 0)
    if start.startswith(NUMPY_MAGIC) or path.suffix in NUMPY:
        kind, array = (".npz", "['NAME']") if path.suffix == ".npz" else (".npy", "")
        raise ConfigError(
            f"--data {path}: is a {kind} file, which begins with a header; write its ids alone with "
            f"np.load({path.name!r}){array}.astype(np.uint16).tofile({path.with_suffix('.bin').name!r}), or as "
            f"docs/use/data.md says if they are above 65,535"
        )
    if magic not in HEADERS:
        if _SHARD.fullmatch(path.name):
            raise ConfigError(
                f"--data {path}: has a name of `p2ptrain data prepare`, whose {META_FILE} says what its ids are; give "
                f"the whole directory, with that file, or rename this one if it has ids of 2 bytes"
            )
        file = _mapped(path, np.dtype("<u2"), 0)
        if width := _wider_than_two_bytes(file.ids):
            raise ConfigError(
                f"--data {path}: its ids seem to have {width} bytes, and those of a .bin file without a header have 2; "
                f"write it again with a header or with ids of 2 bytes (docs/use/data.md says how), or make it from the "
                f"text with `p2ptrain data prepare`"
            )
        return file
    known, dtype, vocab_size = HEADERS[magic]
    if version != known:
        raise ConfigError(f"--data {path}: has version {version} of its kind; only version {known} can be read")
    file = _mapped(path, np.dtype(dtype).newbyteorder("<"), HEADER_BYTES)
    if len(file.ids) != count:
        raise ConfigError(
            f"--data {path}: its header says {count:,} tokens, and {len(file.ids):,} follow; it was cut off or "
            f"changed: copy or download it again"
        )
    return replace(file, vocab_size=vocab_size)


def _wider_than_two_bytes(ids: NDArray[Any]) -> int | None:
    """4 or 8 if these uint16 look like parts of ids of 4 or 8 bytes; None if they look like ids.

    The upper half of an id of 4 bytes is smaller than most lower halves, and below MAX_VOCAB_SIZE / 2**16. In no text
    is every second id that small.
    """
    whole = ids[: len(ids) // 4 * 4]  # the file may end within an id
    if len(whole) < _FEWEST:
        return None
    starts = np.linspace(0, max(0, len(whole) - _STRETCH), _STRETCHES).astype(np.int64) // 4 * 4
    sample = np.concatenate([whole[start : start + _STRETCH] for start in starts])
    low, high = sample[0::2], sample[1::2]
    if not high[1::2].any() and not low[1::2].any():
        low, high, width = low[0::2], high[0::2], 8
    else:
        width = 4
    is_wide = high.max() < MAX_VOCAB_SIZE >> 16 and np.mean(low > high.max()) > 0.5
    return width if is_wide else None


def _mapped(path: Path, dtype: np.dtype[Any], offset: int) -> TokenFile:
    size = path.stat().st_size - offset
    if size < 0 or size % dtype.itemsize:
        raise ConfigError(
            f"--data {path}: {max(0, size):,} bytes after byte {offset:,} are no whole number of ids of "
            f"{dtype.itemsize} bytes; it was cut off, or is no token file: copy it again"
        )
    # An empty file cannot be mapped.
    ids = np.memmap(path, dtype, mode="r", offset=offset) if size else np.empty(0, dtype)
    return TokenFile(path, ids, offset)
