"""The Hugging Face hub: whether it answers, and the errors of its libraries.

The libraries try six times before they report that the hub does not answer, which takes up to 36 s.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from p2ptrain.errors import ConfigError, TransientError

HUB_TIMEOUT_S = 10.0


def is_hub_there() -> bool:
    """Whether the hub answers; blocks for up to HUB_TIMEOUT_S, usually for 0.1 s. False in the hub's offline mode."""
    import huggingface_hub

    try:
        # Any answer will do; a proxy of the environment is used.
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
    except Exception:  # of the HTTP library that this version uses
        return False
    return True


def silence_error() -> type[ConfigError]:
    """The error of a hub that does not answer: it may do so later, but not in its offline mode."""
    import huggingface_hub

    return ConfigError if huggingface_hub.constants.HF_HUB_OFFLINE else TransientError


@contextmanager
def library_errors(what: str, fix: str, *, is_hub_silent: bool = False) -> Iterator[None]:
    """Raise ConfigError with the first line of any exception of this block. These libraries raise anything.

    With a silent hub an OSError, such as of a file that is not in the cache, becomes `silence_error()`.

    Tokenizers panic at many kinds of odd files, which another peer may have sent, and at texts that take a regular
    expression too many tries; a panic is no `Exception`.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        kind = silence_error() if is_hub_silent and isinstance(error, OSError) else ConfigError
        raise kind(f"{what} ({first_line(error)}); {fix}") from error


def first_line(error: BaseException) -> str:
    """The first line of an error, which may go on for pages; the name of its type if it has no text."""
    return (str(error).splitlines() or [type(error).__name__])[0]
