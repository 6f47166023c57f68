"""What is in a directory of token files, for `p2ptrain data info`."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2ptrain.errors import ConfigError
from p2ptrain.monitor.formatting import count
from p2ptrain.training.data.meta import META_FILE, read_meta
from p2ptrain.training.data.token_files import TokenFile, open_tokens
from p2ptrain.training.data.tokenizer import IDS

# Ids read at once.
CHECKED_IDS = 2**22
# Tokens of the training text that are shown.
SHOWN_TOKENS = 64


@dataclass(frozen=True)
class TokenInfo:
    """What a directory holds.

    Attributes:
        tokenizer: identity of the tokenizer, or "ids" if it is not known; `name`: what the user called it.
        documents: None if the files do not say it.
        begins: how the training text begins; empty without a tokenizer.
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
    checked: bool

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def lines(self) -> Iterator[str]:
        """For the terminal."""
        known = self.tokenizer if self.tokenizer != IDS else "not known; taken as GPT-2's, or as --tokenizer says"
        named = f"{self.name} ({known[:12]})" if self.name not in ("", known) else known
        yield f"{self.directory}: tokenizer {named}, {self.vocab_size:,} ids of {self.bytes_per_token} bytes"
        documents = "" if self.documents is None else f", {self.documents:,} documents in all"
        train_files, held_out_files = count(self.train_files, "file"), count(self.held_out_files, "file")
        yield f"  train     {self.train_tokens:>15,} tokens in {train_files}"
        yield f"  held out  {self.held_out_tokens:>15,} tokens in {held_out_files}{documents}"
        if self.begins:
            yield f"  begins    {self.begins!r}"
        if self.checked:
            yield "  checked   all files were read, and are as they should be"


def describe(directory: Path, *, check: bool) -> TokenInfo:
    """Look into a directory of token files; with `check`, read all of them. Raises ConfigError if one is bad."""
    folder = open_tokens(str(directory))
    if folder is None:
        raise ConfigError(
            f"{directory}: holds no token files; give a directory of p2ptrain data prepare, or of .bin files"
        )
    path = directory.expanduser()
    meta = read_meta(path) if (path / META_FILE).is_file() else None
    if check:
        for shard in meta.shards if meta is not None else ():
            if _sha256(path / shard.file) != shard.sha256:
                raise ConfigError(f"{path / shard.file}: was changed since it was prepared; copy or prepare it again")
        for file in (*folder.training, *folder.held_out):
            _check_ids(file, folder.vocab_size)
    tokenizer = folder.tokenizer()
    start = folder.training[0].ids[:SHOWN_TOKENS].tolist()
    return TokenInfo(
        directory=str(directory), tokenizer=folder.identity, name="" if meta is None else meta.name,
        vocab_size=folder.vocab_size,
        train_tokens=_tokens(folder.training), train_files=len(folder.training),
        held_out_tokens=_tokens(folder.held_out), held_out_files=len(folder.held_out),
        documents=None if meta is None else sum(shard.documents for shard in meta.shards),
        bytes_per_token=folder.training[0].ids.itemsize,
        begins="" if tokenizer is None else tokenizer.decode(start), checked=check,
    )  # fmt: skip


def _tokens(files: Sequence[TokenFile]) -> int:
    return sum(len(file.ids) for file in files)


def _check_ids(file: TokenFile, vocab_size: int) -> None:
    for first in range(0, len(file.ids), CHECKED_IDS):
        part = file.ids[first : first + CHECKED_IDS]
        worst = int(part.argmax())
        if part[worst] >= vocab_size:
            raise ConfigError(
                f"{file.place(first + worst)}: id {part[worst]} is beyond the vocabulary of {vocab_size:,}"
            )


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
