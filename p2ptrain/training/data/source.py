"""`--data`: text, or token files."""

from __future__ import annotations

from p2ptrain.settings.table import BUILTIN_DATA
from p2ptrain.training.data.corpus import Corpus, TextFiles, read_texts
from p2ptrain.training.data.token_files import TokenFolder, open_tokens
from p2ptrain.training.data.tokenizer import Tokenizer

Source = TextFiles | TokenFolder


def open_source(source: str) -> Source:
    """Open "stdlib", a text file, a directory of text, a .bin file or a directory of them.

    Texts are read; token files are only mapped. Raises ConfigError if there is nothing to train on, or a file is bad.
    """
    tokens = None if source == BUILTIN_DATA else open_tokens(source)
    return read_texts(source) if tokens is None else tokens


def load_corpus(source: str, tokenizer: Tokenizer) -> Corpus:
    """The tokens of a source. Raises ConfigError as `open_source` and its `corpus` do."""
    return open_source(source).corpus(tokenizer)
