"""Text to train on: characters as tokens, a split that is the same everywhere, shards, and each peer's windows.

>>> corpus = load_corpus("stdlib")
>>> windows = RandomWindows(corpus.training, context=64, batch_size=4, seed=peer.data_seed)
>>> inputs, targets = windows.next_batch()
"""

from p2ptrain.training.data.corpus import Corpus, load_corpus
from p2ptrain.training.data.shards import Shards
from p2ptrain.training.data.tokenizer import VOCAB_SIZE, decode, encode
from p2ptrain.training.data.windows import RandomWindows, fixed_windows

__all__ = ["VOCAB_SIZE", "Corpus", "RandomWindows", "Shards", "decode", "encode", "fixed_windows", "load_corpus"]
