"""Tokenizers turn text into token ids, and back. Here are those that need no file; `tokenizer_file` has the others.

All peers of a run share one tokenizer: its identity and its number of ids are settings of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from p2ptrain.errors import ConfigError

CHARS, BYTES, IDS = "chars", "bytes", "ids"
# nanoGPT's and llm.c's files do not name their tokenizer; both projects use GPT-2's.
GPT2_VOCAB_SIZE = 50257

_CHARACTERS = "\n\t" + "".join(map(chr, range(32, 127)))
UNKNOWN = len(_CHARACTERS)
_UNKNOWN_SHOWN = "\N{REPLACEMENT CHARACTER}"

_TOKEN_OF_ASCII = np.full(128, UNKNOWN, dtype=np.uint8)
_TOKEN_OF_ASCII[[ord(character) for character in _CHARACTERS]] = np.arange(UNKNOWN, dtype=np.uint8)


class Tokenizer(Protocol):
    """Turns text into token ids, and ids into text.

    Attributes:
        identity: the same on all peers of a run (`RunConfig.tokenizer`): "chars", "bytes", "ids", or the hex SHA-256 of
            `file`.
        vocab_size: all ids are below it.
        separator: the id between two documents; None if there is none.
        file: the content of its tokenizer.json, which joiners may ask for; empty for those that need no file.
    """

    @property
    def identity(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def separator(self) -> int | None: ...
    @property
    def file(self) -> bytes: ...

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """The ids of each text, (tokens,) of dtype `token_dtype(vocab_size)`, without separators."""

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of some ids. Ids that are no text, such as half of a character, become U+FFFD."""


class Characters:
    """Printable ASCII, newline and tab; one more id for everything else."""

    identity = CHARS
    vocab_size = len(_CHARACTERS) + 1
    separator = None
    file = b""

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        return [_characters(text) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        return "".join(_CHARACTERS[token] if token < UNKNOWN else _UNKNOWN_SHOWN for token in tokens)


def _characters(text: str) -> NDArray[np.uint8]:
    if text.isascii():  # eight times as fast, and true of most files
        return _TOKEN_OF_ASCII[np.frombuffer(text.encode(), dtype=np.uint8)]
    codes = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")
    return _TOKEN_OF_ASCII[np.where(codes < 128, codes, 0)]  # code 0 is not in the vocabulary


class Bytes:
    """The bytes of UTF-8, and one more id between documents."""

    identity = BYTES
    vocab_size = 257
    separator = 256
    file = b""

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        dtype = token_dtype(self.vocab_size)
        return [np.frombuffer(text.encode(errors="replace"), dtype=np.uint8).astype(dtype) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


class Ids:
    """A placeholder for an unknown tokenizer: its ids can be trained on, but not made from text or shown as text."""

    identity = IDS
    separator = None
    file = b""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        raise ConfigError("--tokenizer ids: makes no tokens of text; give token files as --data, or another tokenizer")

    def decode(self, tokens: Iterable[int]) -> str:
        return "".join(f" {token}" for token in tokens)


def token_dtype(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    """The smallest type that holds all ids below `vocab_size`: uint8, uint16 or uint32."""
    return np.uint8 if vocab_size <= 2**8 else np.uint16 if vocab_size <= 2**16 else np.uint32
