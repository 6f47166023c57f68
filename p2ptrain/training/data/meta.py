"""The `meta.json` of a folder of prepared tokens: what made them, and which files hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from p2ptrain.errors import ConfigError
from p2ptrain.settings.config import MAX_VOCAB_SIZE

META_FILE = "meta.json"
# While a directory is prepared, it has this folder instead of META_FILE.
UNFINISHED = ".progress"

Count = Annotated[int, msgspec.Meta(ge=0)]


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of tokens. `sha256` is the hash of the whole file."""

    # A name without a path: the file is beside the meta.json.
    file: Annotated[str, msgspec.Meta(pattern=r"^[\w.-]+\.bin$")]
    split: Literal["train", "val"]
    documents: Count
    tokens: Count
    sha256: str


class Meta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a `meta.json`.

    Attributes:
        tokenizer: identity of the tokenizer, as in `RunConfig.tokenizer`.
        name: the user's name for it.
        separator: the id after each document, or None.
        dtype: type of the ids in all files, little-endian.
    """

    version: Literal[1]
    tokenizer: str
    name: str
    vocab_size: Annotated[int, msgspec.Meta(ge=2, le=MAX_VOCAB_SIZE)]
    separator: int | None
    dtype: Literal["uint8", "uint16", "uint32"]
    sources: list[str]
    shards: list[Shard]


def read_meta(folder: Path) -> Meta:
    """Read and check the `meta.json` of a folder. Raises ConfigError if it is invalid, OSError if it is unreadable."""
    path = folder / META_FILE
    try:
        meta = msgspec.json.decode(path.read_bytes(), type=Meta)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--data {path}: was not written by p2ptrain data prepare ({error})") from error
    if wrong := _contradiction(meta):
        raise ConfigError(f"--data {path}: {wrong}; it was changed: copy it again, or prepare the data again")
    return meta


def _contradiction(meta: Meta) -> str | None:
    """A contradiction in the file, in words; None if there is none."""
    if meta.separator is not None and not 0 <= meta.separator < meta.vocab_size:
        return f"separator {meta.separator} is none of the {meta.vocab_size:,} ids"
    seen: set[str] = set()
    for shard in meta.shards:
        if shard.file in seen:
            return f"names {shard.file} twice"
        if shard.documents > shard.tokens:
            return f"{shard.file} has {shard.documents:,} documents in {shard.tokens:,} tokens"
        seen.add(shard.file)
    return None


def encoded(meta: Meta) -> bytes:
    """The bytes of the meta.json."""
    return msgspec.json.format(msgspec.json.encode(meta), indent=2) + b"\n"
