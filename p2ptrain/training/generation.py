"""Text from a trained model, one token at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from p2ptrain.errors import ConfigError
from p2ptrain.settings.config import RunConfig
from p2ptrain.training import checkpoint
from p2ptrain.training.data.tokenizer import CHARS, GPT2_VOCAB_SIZE, IDS, Ids, Tokenizer
from p2ptrain.training.data.tokenizer_file import TOKENIZER_FILE, find_tokenizer, read_tokenizer
from p2ptrain.training.models import GPT, Llama, build, build_of, context_length
from p2ptrain.training.models.cache import KeyValueCache
from p2ptrain.training.models.hf import CausalLM
from p2ptrain.training.pretrained import load_saved

# Logits divided by less than this may overflow; the likeliest token then has all of the probability anyway.
GREEDY_BELOW = 1e-4


def load_model(path: Path, tokenizer: str | None = None, *, needs_text: bool = True) -> tuple[nn.Module, Tokenizer]:
    """Load the model of a checkpoint, which is found as by `checkpoint.load_given`, and its tokenizer.

    Raises ConfigError if one of them cannot be loaded, or they do not belong together.

    Args:
        tokenizer: name of the tokenizer, as for `--tokenizer`, if the directory has none.
        needs_text: whether an unknown tokenizer is an error.
    """
    if os.path.isfile(path / "config.json"):  # unlike `is_file`, False where it may not be looked for
        return _exported(path, tokenizer, needs_text=needs_text)
    saved = checkpoint.load_given(path, parts=["model"])
    run = RunConfig.from_stated(saved.info["run"])
    try:
        model = build_of(run)
    except ConfigError as error:
        raise ConfigError(f"the checkpoint in {path}: {error}") from error
    load_saved(model, saved.state["model"], run, "use that version")
    if tokenizer is not None:
        found = find_tokenizer(tokenizer)
    else:
        folders = (path, path.resolve().parent)
        tried = (read_tokenizer(folder, run.tokenizer, run.vocab_size) for folder in folders)
        found = next(filter(None, tried), None)
    if found is None and not needs_text:
        return model, Ids(run.vocab_size)
    if found is None or (found.identity == IDS and needs_text):
        raise ConfigError(f"{path}: the run's tokenizer is not there; give it with --tokenizer FILE.json or hub:NAME")
    if run.tokenizer not in (IDS, found.identity) or found.vocab_size > run.vocab_size:
        raise ConfigError(f"--tokenizer {tokenizer}: is not that of the run; give the one that it was started with")
    return model, found


def _exported(path: Path, name: str | None, *, needs_text: bool) -> tuple[nn.Module, Tokenizer]:
    """Load the model and the tokenizer of a directory that `p2ptrain export` or transformers wrote."""
    model = build(f"hf:{path}:pretrained", vocab_size=2, seed=0)
    file = path / TOKENIZER_FILE
    found = find_tokenizer(name or str(file)) if name or file.is_file() else None
    if found is None and needs_text:
        raise ConfigError(f"{path}: has no {TOKENIZER_FILE}; give it with --tokenizer FILE.json or hub:NAME")
    assert isinstance(model, CausalLM)
    table = model.num_ids
    if found is not None and found.vocab_size > table:
        raise ConfigError(
            f"{path}: its tokenizer has {found.vocab_size:,} ids, and its model {table:,}; give the model's own with "
            f"--tokenizer FILE.json"
        )
    return model, found or Ids(GPT2_VOCAB_SIZE)


@torch.no_grad()
def generate_text(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    length: int,
    temperature: float,
    seed: int,
    top_p: float = 1.0,
) -> Iterator[str]:
    """Yield text of `length` tokens that continues `prompt`, in pieces of whole characters.

    Args:
        model: maps int64 tokens (1, T) to logits (1, T, V).
        prompt: may be empty, which begins a line; if longer than the model's context, only its end is used.
        temperature: 1 samples from the model's distribution; below GREEDY_BELOW, the likeliest token is taken.
        seed: seeds the sampling.
        top_p: sample only from the likeliest tokens that together have this probability.

    Raises ConfigError if the prompt has no tokens, or the predictions are not finite.
    """
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    reader = _reader(model)
    (ids,) = tokenizer.encode([prompt or "\n"])
    if not len(ids):
        raise ConfigError(f"--prompt {prompt!r}: the model's tokenizer makes no tokens of it; give another text")
    ids = ids[-context_length(model) :]
    tokens = torch.from_numpy(ids.astype("int64"))[None].to(device)  # (1, T)
    # With the prompt, as the text of the first token may begin with a space only after another one.
    written: list[int] = ids.tolist()
    shown = tokenizer.decode(written)
    for _ in range(length):
        logits = reader(tokens)[: tokenizer.vocab_size].float().cpu()
        if not torch.isfinite(logits.max()):
            raise ConfigError("the model's predictions are NaN or infinite: its weights cannot be used")
        if temperature < GREEDY_BELOW:
            chosen = logits.argmax(keepdim=True)
        else:
            chances = _likeliest((logits / temperature).softmax(0), top_p)
            chosen = torch.multinomial(chances, 1, generator=generator)
        tokens = torch.cat([tokens, chosen[None].to(device)], dim=1)
        written += chosen.tolist()
        # Decode everything again: a token's text may depend on earlier tokens, and a token may end within a character.
        text = tokenizer.decode(written)
        if tokenizer.identity == CHARS or not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(written)[len(shown) :]


def _reader(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function from all tokens so far, (1, T), to the next logits, (V,). Our models read each token once."""
    context = context_length(model)
    if not isinstance(model, (GPT, Llama)):
        return lambda tokens: model(tokens[:, -context:])[0, -1]
    cache = KeyValueCache()

    def read(tokens: torch.Tensor) -> torch.Tensor:
        nonlocal cache
        if 0 < cache.length < context:
            return model(tokens[:, -1:], cache)[0, -1]  # type: ignore[no-any-return]
        # The cache is new, or full. It cannot slide, as positions count from the beginning: read half of the context
        # again, which leaves room for the other half.
        kept = tokens[:, -(context if cache.length == 0 else max(1, context // 2)) :]
        cache = KeyValueCache()
        return model(kept, cache)[0, -1]  # type: ignore[no-any-return]

    return read


def _likeliest(chances: torch.Tensor, top_p: float) -> torch.Tensor:
    """Set the probabilities (V,) of unlikely tokens to 0: the fewest are kept that together have `top_p`."""
    if top_p >= 1.0:
        return chances
    ordered, order = chances.sort(descending=True)
    is_left_out = ordered.cumsum(0) - ordered >= top_p
    return chances.index_fill(0, order[is_left_out], 0.0)
