"""Text to train on: tokenizers, token files, a split that is the same everywhere, and each peer's windows.

>>> corpus = load_corpus("stdlib", Characters())
>>> windows = RandomWindows(corpus.training, context=64, batch_size=4, seed=peer.data_seed)
>>> inputs, targets = windows.next_batch()
"""

from p2ptrain.training.data.corpus import Corpus, Tokens
from p2ptrain.training.data.source import load_corpus
from p2ptrain.training.data.tokenizer import Characters, Tokenizer
from p2ptrain.training.data.windows import RandomWindows, fixed_windows

__all__ = ["Characters", "Corpus", "RandomWindows", "Tokenizer", "Tokens", "fixed_windows", "load_corpus"]
