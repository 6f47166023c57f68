"""The tokenizer of a run: the peer that starts the run chooses it, and a joiner without it asks the other peers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from p2ptrain.errors import ConfigError
from p2ptrain.settings.config import RunConfig
from p2ptrain.settings.files import write_whole
from p2ptrain.training.data.corpus import TextFiles
from p2ptrain.training.data.source import Source
from p2ptrain.training.data.token_files import TokenFolder
from p2ptrain.training.data.tokenizer import Characters, Ids, Tokenizer
from p2ptrain.training.data.tokenizer_file import (
    HUB,
    TOKENIZER_FILE,
    TRAIN,
    TokenizerFile,
    find_tokenizer,
    read_tokenizer,
    train_tokenizer,
    trained_size,
)
from p2ptrain.training.models.hf import pretrained_place

logger = logging.getLogger(__name__)


def given_tokenizer(name: str | None, source: Source) -> Tokenizer | None:
    """The tokenizer that the user named, or that made the user's tokens.

    None if the user leaves it to the run, or wants a new one (train:N). Raises ConfigError if it cannot be used, or if
    another one made the tokens.
    """
    if isinstance(source, TextFiles):
        return None if name is None else find_tokenizer(name)
    if name is None:
        return source.tokenizer()
    if name.startswith(TRAIN):
        raise ConfigError(f"--tokenizer {name}: is made from text, and --data {source.source} holds tokens")
    tokenizer = find_tokenizer(name)
    assert tokenizer is not None
    source.check_tokenizer(tokenizer)
    return tokenizer


def first_tokenizer(name: str | None, model: str, source: Source, say: Callable[[str], None]) -> Tokenizer:
    """The tokenizer for a run of this model that starts here without a given one. Blocks while it is made.

    A pretrained model has its own, unless another one is named. Raises ConfigError if it cannot be had.
    """
    if isinstance(source, TokenFolder):
        return Ids(source.vocab_size)  # a placeholder: it is not known
    if name is None and (own := pretrained_place(model)) is not None:
        own = str(Path(own).absolute()) if Path(own).is_dir() else HUB + own
        say(f"using the model's own tokenizer: --tokenizer {own}")
        try:
            found = find_tokenizer(own)
        except ConfigError as error:
            fix = "or give token files of its ids as --data, or --tokenizer chars to train it on characters anyway"
            raise type(error)(f"{error}; {fix}") from error
        assert found is not None
        return found
    if name is None:
        return Characters()
    say(f"making a tokenizer of {trained_size(name):,} ids from {source.source}")
    made = train_tokenizer([text for _, text in source.texts], trained_size(name))
    if made.vocab_size < trained_size(name):
        say(f"--tokenizer {name}: the text has pairs for {made.vocab_size:,} ids only")
    return made


def tokenizer_of(
    run: RunConfig, given: Tokenizer | None, source: Source, out: Path, ask: Callable[[], bytes | None]
) -> Tokenizer:
    """The run's tokenizer, saved in `out` if it has a file.

    Args:
        given: what the user named, or the run was started with.
        source: the user's data; token files can be trained on without a tokenizer.
        ask: gets the file from other peers; may block.

    Raises ConfigError if it cannot be had.
    """
    is_saved = False
    if given is not None and given.identity == run.tokenizer:
        tokenizer = given
    elif (saved := read_tokenizer(out, run.tokenizer, run.vocab_size)) is not None:
        tokenizer, is_saved = saved, True
    elif (file := ask()) is not None:
        tokenizer = TokenizerFile(file, f"the tokenizer of run {run.run_id!r}")
    elif isinstance(source, TokenFolder):
        logger.warning("no peer has the tokenizer of run %r; text cannot be written without it", run.run_id)
        return Ids(run.vocab_size)
    else:
        raise ConfigError(
            f"run {run.run_id!r}: no peer that answers has its tokenizer, {run.tokenizer[:12]}…; give the file with "
            f"--tokenizer FILE.json, or token files as --data"
        )
    if tokenizer.vocab_size != run.vocab_size:
        sizes = f"run {run.run_id!r} says {run.vocab_size:,} ids, and its tokenizer has {tokenizer.vocab_size:,}"
        raise ConfigError(f"{sizes}: another version of p2ptrain started it; start it again")
    if tokenizer.file and not is_saved:  # a run that only this peer trains cannot be continued without it
        path, fix = out / TOKENIZER_FILE, "free space there, or give another --out"
        try:
            write_whole(path, tokenizer.file)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}; {fix}") from error
    return tokenizer
