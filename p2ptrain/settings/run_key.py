"""The key of a closed run: 32 secret bytes in a file that every member has.

As text it is `p2pk1` and the base32 form of the secret and a checksum, so that a key that was mistyped or cut is
noticed. The object hides the secret in its `repr`: it must not get into logs, metrics or messages.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from p2ptrain.errors import ConfigError
from p2ptrain.settings.files import open_file, reason_of

logger = logging.getLogger(__name__)

PREFIX = "p2pk1"
SECRET_BYTES = 32
CHECKSUM_BYTES = 4
# A file with a key and some comments.
MAX_FILE_BYTES = 4096
MAKE_ONE = "ask the run's owner for it; for a new run make one with: p2ptrain key FILE"
# Keys and tickets; what follows the prefix is secret.
_SECRET = re.compile(r"\b(p2p[kt]1)\w+", re.IGNORECASE)


@dataclass(frozen=True)
class RunKey:
    """A run's secret."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        assert len(self.secret) == SECRET_BYTES


def key_text(key: RunKey) -> str:
    """The key as one word."""
    return PREFIX + base32(key.secret + checksum(PREFIX, key.secret))


def parse_key(word: str) -> RunKey:
    """Read `key_text`. Raises ConfigError, which never shows the word."""
    word = word.strip().lower()
    if not word.startswith(PREFIX):
        raise ConfigError(f"it holds no word that begins with {PREFIX}")
    data = from_base32(word.removeprefix(PREFIX))
    if data is None or len(data) != SECRET_BYTES + CHECKSUM_BYTES:
        length = len(PREFIX) + len(base32(bytes(SECRET_BYTES + CHECKSUM_BYTES)))
        raise ConfigError(f"its key has {len(word)} characters of {length}, or others than a-z and 2-7")
    secret = data[:SECRET_BYTES]
    if data[SECRET_BYTES:] != checksum(PREFIX, secret):
        raise ConfigError("its key is mistyped: the checksum does not fit")
    return RunKey(secret)


def without_secrets(text: str) -> str:
    """The text with keys and tickets cut to their prefixes, for messages."""
    return _SECRET.sub(r"\1…", text)


def looks_like_key(word: str) -> bool:
    """Whether a word is meant as a key, whole or not, and not as an address or a file."""
    return word.lower().startswith(PREFIX) and not set(word) & set("/.\\")


def check_key_file(name: str) -> None:
    """Raises ConfigError if a key or a ticket was given in place of a file. The message does not show it."""
    found = _SECRET.match(name)
    if found is not None and not set(name) & set("/.\\"):
        if found[1].lower() == PREFIX:
            raise ConfigError(f"--run-key {PREFIX}…: this is a run key itself; write it to a file, and give the file")
        raise ConfigError(f"--run-key {found[1]}…: this is a ticket: give it without --run-key")


def read_key(path: Path) -> RunKey:
    """Read a key file; # starts a comment. Raises ConfigError, which never shows what the file holds."""
    check_key_file(str(path))
    origin = f"--run-key {path}"
    try:
        text = _start_of(path).decode("utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(f"{origin}: no such file; {MAKE_ONE}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{origin}: {reason_of(error)}; give the file of the run's key: {MAKE_ONE}") from error
    words = [word for line in text.splitlines() for word in line.partition("#")[0].split()]
    if any(word.lower().startswith("p2pt1") for word in words):
        raise ConfigError(f"{origin}: this file holds a ticket: give it without --run-key")
    if len(words) != 1:
        raise ConfigError(f"{origin}: holds {len(words)} words, not one key; copy the whole file, or {MAKE_ONE}")
    try:
        return parse_key(words[0])
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}; copy the whole file again, or {MAKE_ONE}") from None


def warn_if_shared(path: Path) -> None:
    """Log a warning if other users of this machine can read a file that holds a key or a ticket."""
    with contextlib.suppress(OSError, ValueError):
        if path.is_file() and path.stat().st_mode & 0o077 and _SECRET.search(_start_of(path).decode(errors="replace")):
            logger.warning(
                "warning: %s holds a run key, and other users of this machine can read it: chmod 600 %s", path, path
            )


def _start_of(path: Path) -> bytes:
    with open_file(path) as file:
        return file.read(MAX_FILE_BYTES)


def make_key_file(path: Path, secret: bytes) -> None:
    """Write a new key file that only its owner can read. Raises ConfigError, also if the file exists."""
    text = f"# The key of a closed p2ptrain run. Whoever has it can join the run.\n{key_text(RunKey(secret))}\n"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError:
            path.unlink()  # a part of a key would refuse the next attempt
            raise
    except FileExistsError as error:
        raise ConfigError(f"{path} exists and is not changed; choose another file for the new key") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; choose a file that can be written") from error


def checksum(prefix: str, data: bytes) -> bytes:
    """Detects typing errors; the prefix keeps texts of different kinds apart."""
    return hashlib.sha256(prefix.encode() + data).digest()[:CHECKSUM_BYTES]


def base32(data: bytes) -> str:
    """Lower-case base32 (RFC 4648) without padding: no character that shells or messengers change."""
    return base64.b32encode(data).decode().rstrip("=").lower()


def from_base32(text: str) -> bytes | None:
    """The bytes of `base32`; None if the text is not the form of any."""
    if not text.isascii():
        return None
    try:
        data = base64.b32decode(text.upper() + "=" * (-len(text) % 8))
    except ValueError:
        return None
    return data if base32(data) == text.lower() else None
