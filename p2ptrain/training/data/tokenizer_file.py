"""Tokenizers with a tokenizer.json, as Hugging Face `tokenizers` writes and reads it; and the choice of a tokenizer.

>>> tokenizer = find_tokenizer("hub:gpt2")
>>> tokenizer.encode(["To be"])
[array([2514,  307], dtype=uint16)]
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from p2ptrain.errors import ConfigError
from p2ptrain.settings.config import MAX_VOCAB_SIZE
from p2ptrain.settings.files import open_file, user_path
from p2ptrain.training.data.tokenizer import (
    BYTES,
    CHARS,
    GPT2_VOCAB_SIZE,
    IDS,
    Bytes,
    Characters,
    Ids,
    Tokenizer,
    token_dtype,
)
from p2ptrain.training.hub import first_line, is_hub_there, library_errors, silence_error

TOKENIZER_FILE = "tokenizer.json"
# Joiners get the file from other peers. Tokenizers of 262,144 ids have files of up to 33 MB, of 50,257 ids 1.4 to 3.6.
MAX_FILE_BYTES = 8 * 2**20
# The usual name of the token between documents.
SEPARATOR = "<|endoftext|>"
_SEPARATORS = (SEPARATOR, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
# One id for each byte, and the separator: a smaller vocabulary cannot hold all text.
LEAST_TRAINED = 257
HUB, TRAIN = "hub:", "train:"
_WITHOUT_FILE: dict[str, type[Characters] | type[Bytes]] = {CHARS: Characters, BYTES: Bytes}


class TokenizerFile:
    """A tokenizer of a tokenizer.json."""

    def __init__(self, file: bytes, origin: str) -> None:
        """`origin` names the file in errors. Raises ConfigError if the file cannot be used."""
        if len(file) > MAX_FILE_BYTES:
            too_many = f"has more than {MAX_FILE_BYTES:,} bytes, too many to send to joiners"
            raise ConfigError(f"{origin}: {too_many}; give a smaller one")
        with library_errors(f"{origin}: is not a tokenizer.json", "give one that Hugging Face's tokenizers wrote"):
            self._tokenizer = tokenizers.Tokenizer.from_buffer(file)
        # A text that mentions a special token does not become one, as in nanoGPT.
        self._tokenizer.encode_special_tokens = True
        # Truncation would cut texts, and padding would lengthen them.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values(), default=-1) + 1
        if not 2 <= self.vocab_size <= MAX_VOCAB_SIZE:
            raise ConfigError(f"{origin}: has {self.vocab_size:,} ids; 2 to {MAX_VOCAB_SIZE:,} can be used")
        self._origin = origin
        self.file = file
        self.identity = hashlib.sha256(file).hexdigest()
        self.separator = next((ids[token] for token in _SEPARATORS if token in ids), None)
        self._dtype = token_dtype(self.vocab_size)

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        with library_errors(f"{self._origin}: cannot encode a text", "give a tokenizer that has an id for every text"):
            encoded = self._tokenizer.encode_batch_fast([_valid(text) for text in texts], add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self._dtype) for encoding in encoded]

    def decode(self, tokens: Iterable[int]) -> str:
        with library_errors(f"{self._origin}: cannot write ids as text", "give another tokenizer"):
            return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


def find_tokenizer(name: str) -> Tokenizer | None:
    """The tokenizer that the user names: chars, bytes, ids:N, FILE.json or hub:NAME; None for train:N.

    Raises ConfigError if there is none of that name, or its file cannot be used. Blocks for a download with hub:NAME,
    unless the file is in Hugging Face's cache.
    """
    if name in _WITHOUT_FILE:
        return _WITHOUT_FILE[name]()
    if name == IDS or name.startswith(IDS + ":"):
        return Ids(_number(name, IDS + ":", 2) if ":" in name else GPT2_VOCAB_SIZE)
    if name.startswith(TRAIN):
        trained_size(name)
        return None
    if name.startswith(HUB):
        return TokenizerFile(_from_hub(name.removeprefix(HUB)), f"--tokenizer {name}")
    path = user_path(name)
    try:
        path = path / TOKENIZER_FILE if path.is_dir() else path
        with open_file(path) as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
        return TokenizerFile(content, f"--tokenizer {name}")
    except OSError as error:
        raise ConfigError(
            f"--tokenizer {name}: cannot be read ({error.strerror}); give chars, bytes, a tokenizer.json, hub:NAME or "
            f"train:N"
        ) from error


def read_tokenizer(folder: Path, identity: str, vocab_size: int) -> Tokenizer | None:
    """The tokenizer with this identity: one that needs no file, or that of the folder's tokenizer.json.

    None if that file is missing, or is another tokenizer. Raises ConfigError if it cannot be used.
    """
    if identity in _WITHOUT_FILE:
        return _WITHOUT_FILE[identity]()
    if identity == IDS:
        return Ids(vocab_size)
    try:
        file = (folder / TOKENIZER_FILE).read_bytes()
    except OSError:
        return None
    if hashlib.sha256(file).hexdigest() != identity:
        return None
    return TokenizerFile(file, str(folder / TOKENIZER_FILE))


def as_file(tokenizer: Tokenizer) -> bytes:
    """The content of a tokenizer.json that works like this tokenizer, also for characters and bytes."""
    if tokenizer.file:
        return tokenizer.file
    if isinstance(tokenizer, Bytes):
        # The library writes the bytes as these characters, in the order of the bytes.
        letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda letter: _BYTE_OF[letter])
        made = tokenizers.Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens([SEPARATOR])
    else:
        texts = [tokenizer.decode([number]) for number in range(tokenizer.vocab_size)]
        vocabulary = {text: number for number, text in enumerate(texts)}
        made = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=texts[-1]))
        made.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        made.decoder = decoders.Fuse()
    return made.to_str().encode()


def _byte_letters() -> dict[str, int]:
    """The byte that each letter of the library's byte-level alphabet stands for, as GPT-2 maps them."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + number): byte for number, byte in enumerate(hidden)}


_BYTE_OF = _byte_letters()


def trained_size(name: str) -> int:
    """The number of ids of "train:N". Raises ConfigError."""
    return _number(name, TRAIN, LEAST_TRAINED)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> TokenizerFile:
    """Make a byte-level BPE of at most `vocab_size` ids: the 256 bytes, a separator, and merges. Blocks for seconds."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(map(_valid, texts), trainer)
    return TokenizerFile(tokenizer.to_str().encode(), "the trained tokenizer")


def _valid(text: str) -> str:
    """The text without halves of surrogate pairs. JSON can hold them, and the library refuses them."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _number(name: str, prefix: str, least: int) -> int:
    digits = name.removeprefix(prefix)
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 9 and least <= int(digits) <= MAX_VOCAB_SIZE):
        raise ConfigError(
            f"--tokenizer {name}: must be {prefix}N with a number of ids from {least} to {MAX_VOCAB_SIZE:,}, such as "
            f"{prefix}8192"
        )
    return int(digits)


def _from_hub(name: str) -> bytes:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        found = huggingface_hub.hf_hub_download(name, TOKENIZER_FILE, local_files_only=not is_hub_there())
        return Path(found).read_bytes()
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        is_offline = isinstance(error, LocalEntryNotFoundError)
        reason = "the hub cannot be reached, and it is not in the cache" if is_offline else first_line(error)
        raise (silence_error() if is_offline else ConfigError)(
            f"--tokenizer {HUB}{name}: no tokenizer.json found ({reason}); check the name and the connection, or give "
            f"the file"
        ) from error
