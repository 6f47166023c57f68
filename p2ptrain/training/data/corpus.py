"""Text files, and their split into text to train on and held-out text that no peer ever trains on.

A file is held out if the hash of its relative path is a multiple of 20, so machines with the same file agree on it,
whatever their version of Python. If the held-out files are less than 1 % or more than 20 % of the tokens, as with few
files, blocks of 4096 tokens are split by their numbers instead; then only machines with the same text agree.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from p2ptrain.errors import ConfigError
from p2ptrain.formatting import count
from p2ptrain.settings.files import open_file, raise_unreadable, user_path
from p2ptrain.settings.machine import free_memory_bytes
from p2ptrain.settings.table import BUILTIN_DATA
from p2ptrain.training.data.text import (
    HOLDS_ZEROS,
    LOOKED_AT_BYTES,
    PACKED,
    RECORDS,
    decode,
    is_binary,
    left_out_warning,
    not_utf8_warning,
    prepare_first,
)
from p2ptrain.training.data.tokenizer import CHARS, UNKNOWN, Tokenizer
from p2ptrain.training.memory import check_text

logger = logging.getLogger(__name__)

# 5 % is a common share; nothing here depends on it being large.
HELD_OUT_ONE_IN = 20
# Around that, so that neither part is too small (guess).
HELD_OUT_SHARE = 0.01, 0.2
BLOCK_TOKENS = 4096
# A default run (2000 steps of 256 characters) sees an eighth of it; more would only take longer to load.
STDLIB_BYTES = 4 * 2**20
# Tests, tables, installed packages, and modules that only some installations have.
_STDLIB_SKIPPED = frozenset({
    "__phello__", "__pycache__", "dist-packages", "distutils", "encodings", "ensurepip", "idle_test",
    "idlelib", "lib-dynload", "lib2to3", "pydoc_data", "site-packages", "test", "tests", "tkinter", "turtledemo",
})  # fmt: skip


class Tokens(Protocol):
    """Token ids that are read by their positions: a numpy array, or files (`token_files.TokenFiles`)."""

    def __len__(self) -> int: ...

    def __getitem__(self, positions: NDArray[np.int64]) -> NDArray[Any]:
        """The ids at these positions, in the same shape."""


@dataclass(frozen=True)
class Corpus:
    """Tokenised text.

    Attributes:
        training: the text that peers train on.
        held_out: the text that they are evaluated on.
        digest: hex SHA-256 that changes with the text, to notice a change between two starts; "" if it is not known.
            Of `.bin` files without a meta.json it covers only the length, and the first and last 1,024 ids.
    """

    training: Tokens
    held_out: Tokens
    digest: str = ""


@dataclass(frozen=True)
class TextFiles:
    """Texts by their names, before they are tokenised.

    Attributes:
        source: the user's value of --data, for errors.
        texts: relative path and text of each file, in order.
    """

    source: str
    texts: Sequence[tuple[str, str]]

    def corpus(self, tokenizer: Tokenizer) -> Corpus:
        """Tokenise and split. Raises ConfigError if the text is too small, or of no use with this tokenizer."""
        files = list(zip([name for name, _ in self.texts], self._encoded(tokenizer), strict=True))
        held_out = [tokens for name, tokens in files if _is_held_out(name)]
        training = [tokens for name, tokens in files if not _is_held_out(name)]
        least, most = HELD_OUT_SHARE
        if not least <= sum(map(len, held_out)) / max(1, sum(len(tokens) for _, tokens in files)) <= most:
            training, held_out = self._blocks(np.concatenate([tokens for _, tokens in files]), tokenizer)
        return _checked(np.concatenate(training), np.concatenate(held_out), tokenizer, self.source)

    def _encoded(self, tokenizer: Tokenizer) -> list[NDArray[Any]]:
        encoded = tokenizer.encode([text for _, text in self.texts])
        if tokenizer.separator is None or len(encoded) == 1:
            return encoded
        return [np.append(tokens, tokens.dtype.type(tokenizer.separator)) for tokens in encoded]

    def _blocks(self, tokens: NDArray[Any], tokenizer: Tokenizer) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
        """The blocks of a text to train on, and those that are held out: at least one."""
        blocks = [tokens[start : start + BLOCK_TOKENS] for start in range(0, len(tokens), BLOCK_TOKENS)]
        if len(blocks) < 2:
            raise ConfigError(
                f"--data {self.source}: {len(tokens)} {unit(tokenizer)} are too few; give more than {BLOCK_TOKENS}, "
                f"so that a part can be held out for evaluation"
            )
        held_out = {number for number in range(len(blocks)) if _is_held_out(str(number))}
        held_out = held_out or {min(range(len(blocks)), key=lambda number: _hash(str(number)))}
        training = [block for number, block in enumerate(blocks) if number not in held_out]
        return training, [blocks[number] for number in sorted(held_out)]


def unit(tokenizer: Tokenizer) -> str:
    """The user's word for this tokenizer's tokens."""
    return "characters" if tokenizer.identity == CHARS else "tokens"


def read_texts(source: str) -> TextFiles:
    """Read "stdlib" (the source of Python's own library), a text file, or all text files below a directory.

    Raises ConfigError if the text is missing, empty, unreadable or binary.
    """
    if source == BUILTIN_DATA:
        return TextFiles(source, _decoded(source, _stdlib_files()))
    path = user_path(source)
    try:
        if path.is_dir():
            binary: list[Path] = []
            files = _decoded(source, _text_files(path, binary))
            if binary:
                is_packed = any(file.suffix in PACKED for file in binary)
                hint = f"; for {', '.join(PACKED)} files, {prepare_first(source)}" if is_packed else ""
                logger.warning("warning: --data %s: %s%s", source, left_out_warning(binary), hint)
            if not files:
                raise ConfigError(f"--data {source}: no text in this directory; give one with text files, or a file")
            return TextFiles(source, files)
        size_bytes = path.stat().st_size
        if path.suffix in PACKED:
            raise ConfigError(
                f"--data {source}: {path.suffix} is neither text nor token files; {prepare_first(source)}"
            )
        check_text(source, size_bytes, free_memory_bytes())
        with open_file(path) as file:
            content = file.read()
    except FileNotFoundError as error:
        raise ConfigError(f"--data {source}: no such file or directory; give text, or leave it out") from error
    except OSError as error:
        raise ConfigError(f"--data {error.filename or source}: cannot be read ({error.strerror}); check it") from error
    if is_binary(content):
        raise ConfigError(f"--data {source}: {HOLDS_ZEROS}; else give text, or token files (.bin)")
    return TextFiles(source, _decoded(source, [(path.name, content)]))


def _checked(training: NDArray[Any], held_out: NDArray[Any], tokenizer: Tokenizer, source: str) -> Corpus:
    unknown = float(np.mean(training == UNKNOWN)) if tokenizer.identity == CHARS else 0.0
    if unknown > 0.5:
        raise ConfigError(
            f"--data {source}: {100 * unknown:.0f} % of the characters are outside the vocabulary of printable ASCII, "
            f"which leaves nothing to learn; give text that is mostly ASCII, or start a run with --tokenizer bytes"
        )
    training.flags.writeable = held_out.flags.writeable = False
    digest = hashlib.sha256(f"{len(training)} ".encode())
    for tokens in (training, held_out):
        digest.update(tokens.data)
    return Corpus(training, held_out, digest.hexdigest())


def _stdlib_files() -> Iterator[tuple[str, bytes]]:
    """Modules of Python's standard library in the order of their paths; up to STDLIB_BYTES, by the hash of the path."""
    root = Path(sysconfig.get_path("stdlib"))
    # The two names that are left out are written for each installation.
    found = [
        (name, path)
        for name, path in _walk(root, skipped=_STDLIB_SKIPPED)
        if name.endswith(".py") and not name.startswith(("_sysconfigdata", "config-"))
    ]
    chosen, size_bytes = [], 0
    for name, path in sorted(found, key=lambda item: _hash("order:" + item[0])):
        size_bytes += path.stat().st_size
        if size_bytes > STDLIB_BYTES:
            break
        chosen.append((name, path))
    if size_bytes < STDLIB_BYTES // 4:
        too_few = f"{root} holds only {size_bytes} bytes of Python's own source"
        raise ConfigError(f"--data stdlib: {too_few}; give text with --data FILE")
    for name, path in sorted(chosen):
        yield name, path.read_bytes()


def _text_files(root: Path, binary: list[Path]) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the text files below `root`. Others that are not empty are appended to `binary`."""
    size_bytes, free_bytes = 0, free_memory_bytes()
    for name, path in sorted(_walk(root)):
        with path.open("rb") as file:
            start = file.read(LOOKED_AT_BYTES)
            if is_binary(start):
                binary.append(path)
                continue
            if not start:
                continue
            size_bytes += path.stat().st_size
            check_text(str(root), size_bytes, free_bytes)
            content = start + file.read()
        yield name, content


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> Iterator[tuple[str, Path]]:
    """All regular, visible files below `root` with their relative paths in POSIX notation."""

    for folder, folders, names in os.walk(root, onerror=raise_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path.relative_to(root).as_posix(), path


def _decoded(source: str, files: Iterable[tuple[str, bytes]]) -> list[tuple[str, str]]:
    """Decode files. Logs a warning if some of them are not UTF-8, or lines of JSON."""
    texts, places = [], dict[str, int]()
    for name, content in files:
        text, num_wrong = decode(content)
        if num_wrong:
            places[name] = num_wrong
        texts.append((name, text))
    if places:
        logger.warning("warning: --data %s: %s", source, not_utf8_warning(places))
    if records := sum(name.endswith(RECORDS) for name, _ in texts):
        logger.warning(
            "warning: --data %s: trains on the raw lines of JSON in %s; to train on the text of one field, %s",
            source,
            count(records, "file"),
            prepare_first(source),
        )
    return texts


def _is_held_out(name: str) -> bool:
    return _hash(name) % HELD_OUT_ONE_IN == 0


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:8])
