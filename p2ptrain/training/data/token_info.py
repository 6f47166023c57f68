"""Describes a directory of token files, for `p2ptrain data info`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from p2ptrain.errors import ConfigError
from p2ptrain.formatting import count
from p2ptrain.settings.files import user_path
from p2ptrain.training.checkpoint import file_sha256
from p2ptrain.training.data.meta import META_FILE, read_meta
from p2ptrain.training.data.token_files import TokenFile, open_tokens
from p2ptrain.training.data.tokenizer import IDS, Tokenizer
from p2ptrain.training.data.tokenizer_file import TRAIN, find_tokenizer

# Ids read at once.
CHECKED_IDS = 2**22
# Tokens of the training text that are shown.
SHOWN_TOKENS = 64


@dataclass(frozen=True)
class TokenInfo:
    """A summary of a directory of token files.

    Attributes:
        tokenizer: identity of the tokenizer, or "ids" if it is not known; `name`: the user's name for it.
        documents: None if the files do not say it.
        begins, held_out_begins: how the texts begin; empty without a tokenizer.
        checked: whether everything was read.
    """

    directory: str
    tokenizer: str
    name: str
    vocab_size: int
    train_tokens: int
    train_files: int
    held_out_tokens: int
    held_out_files: int
    documents: int | None
    bytes_per_token: int
    begins: str
    held_out_begins: str
    checked: bool

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def lines(self) -> Iterator[str]:
        """For the terminal."""
        known = self.tokenizer if self.tokenizer != IDS else self.name or "not known (GPT-2's? see --tokenizer)"
        named = known if self.name in ("", known) or self.tokenizer == IDS else f"{self.name} ({known[:12]})"
        yield f"{self.directory}: tokenizer {named}, {self.vocab_size:,} ids of {self.bytes_per_token} bytes"
        documents = "" if self.documents is None else f", {self.documents:,} documents in all"
        train_files, held_out_files = count(self.train_files, "file"), count(self.held_out_files, "file")
        yield f"  train     {self.train_tokens:>15,} tokens in {train_files}"
        if self.begins:
            yield f"    begins  {self.begins!r}"
        yield f"  held out  {self.held_out_tokens:>15,} tokens in {held_out_files}{documents}"
        if self.held_out_begins:
            yield f"    begins  {self.held_out_begins!r}"
        if self.checked:
            yield "  checked   all files were read, and are as they should be"


def describe(directory: Path, *, check: bool, tokenizer_name: str | None = None) -> TokenInfo:
    """Look into a directory of token files; with `check`, read all of them.

    `tokenizer_name`: the tokenizer that made them, according to the user. Raises ConfigError if a file is bad, or
    another tokenizer made them.
    """
    folder = open_tokens(str(directory))
    if folder is None:
        raise ConfigError(f"{directory}: holds no token files; give a directory of data prepare, or of .bin files")
    tokenizer = folder.tokenizer() if tokenizer_name is None else _named(tokenizer_name)
    vocab_size = folder.vocab_size if tokenizer is None else tokenizer.vocab_size
    if tokenizer is not None:
        folder.check_tokenizer(tokenizer)
    path = user_path(directory)
    meta = read_meta(path) if (path / META_FILE).is_file() else None
    if check:
        for shard in meta.shards if meta is not None else ():
            if file_sha256(path / shard.file) != shard.sha256:
                raise ConfigError(f"{path / shard.file}: was changed since it was prepared; copy or prepare it again")
        for file in (*folder.training, *folder.held_out):
            _check_ids(file, vocab_size)

    def begin(file: TokenFile) -> str:
        shown = replace(file, ids=file.ids[:SHOWN_TOKENS])
        _check_ids(shown, vocab_size)
        is_text = tokenizer is not None and tokenizer.identity != IDS
        return tokenizer.decode(shown.ids.tolist()) if tokenizer is not None and is_text else ""

    return TokenInfo(
        directory=str(directory),
        tokenizer=folder.identity if tokenizer is None else tokenizer.identity,
        name=tokenizer_name or ("" if meta is None else meta.name),
        vocab_size=vocab_size,
        train_tokens=_tokens(folder.training),
        train_files=len(folder.training),
        held_out_tokens=_tokens(folder.held_out),
        held_out_files=len(folder.held_out),
        documents=None if meta is None else sum(shard.documents for shard in meta.shards),
        bytes_per_token=folder.training[0].ids.itemsize,
        begins=begin(folder.training[0]),
        held_out_begins=begin(folder.held_out[0]),
        checked=check,
    )


def _named(name: str) -> Tokenizer:
    tokenizer = find_tokenizer(name)
    if tokenizer is None:
        raise ConfigError(f"--tokenizer {name}: {TRAIN}N makes a new one; give the tokenizer that made the tokens")
    return tokenizer


def _tokens(files: Sequence[TokenFile]) -> int:
    return sum(len(file.ids) for file in files)


def _check_ids(file: TokenFile, vocab_size: int) -> None:
    for first in range(0, len(file.ids), CHECKED_IDS):
        part = file.ids[first : first + CHECKED_IDS]
        worst = int(part.argmax())
        if part[worst] >= vocab_size:
            raise ConfigError(f"{file.beyond(first + worst, vocab_size)}; another tokenizer made these files")
