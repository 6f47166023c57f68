"""Text from a checkpoint."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import tokenizers
import torch
from torch import nn

from p2ptrain.errors import ConfigError
from p2ptrain.settings.config import RunConfig
from p2ptrain.training import checkpoint
from p2ptrain.training.data import Characters
from p2ptrain.training.data.tokenizer import Bytes
from p2ptrain.training.data.tokenizer_file import TokenizerFile
from p2ptrain.training.generation import generate_text, load_model
from p2ptrain.training.models import GPT, GPTConfig, Llama, LlamaConfig, build
from tests.training.characters import VOCAB_SIZE, encode


class Alphabet(nn.Module):
    """Predicts the next letter of the alphabet from the last character alone (`context` is 1)."""

    context = 1

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        assert tokens.shape[1] <= self.context
        logits = torch.zeros(*tokens.shape, VOCAB_SIZE + 5)
        logits[..., VOCAB_SIZE:] = 99.0  # rows beyond the vocabulary
        return logits.scatter(-1, (tokens + 1)[..., None], 9.0)


def _text(prompt: str, **settings: float) -> str:
    chosen = {"length": 5, "temperature": 0.0, "seed": 0, **settings}
    return "".join(generate_text(Alphabet(), Characters(), prompt, **chosen))


def test_the_likeliest_character_follows() -> None:
    assert _text("xya") == "bcdef"
    assert _text("a" * 1000) == "bcdef"


def test_draws_depend_on_seed_and_temperature() -> None:
    assert _text("a", temperature=3.0, seed=1) == _text("a", temperature=3.0, seed=1)
    assert _text("a", temperature=3.0, seed=1) != _text("a", temperature=3.0, seed=2)
    assert _text("a", temperature=0.1) == "bcdef"


def test_a_tiny_temperature_is_none_and_weights_that_are_nan_are_an_error() -> None:
    assert _text("a", temperature=1e-40) == _text("a")
    broken = build("gpt-demo", vocab_size=VOCAB_SIZE, seed=0)
    with torch.no_grad():
        next(broken.parameters()).fill_(math.nan)
    with pytest.raises(ConfigError, match="predictions are NaN or infinite"):
        list(generate_text(broken, Characters(), "a", length=1, temperature=1.0, seed=0))


def test_an_empty_prompt_begins_a_line() -> None:
    assert _text("", length=1) == "\t"
    assert encode("\n\t").tolist() == [0, 1]


def test_a_model_is_found_in_a_checkpoint_or_in_the_directory_above(tmp_path: Path) -> None:
    model = build("gpt-demo", vocab_size=VOCAB_SIZE, seed=4)
    info = {"run": RunConfig(model="gpt-demo", run_seed=1).to_dict()}
    path = checkpoint.save(tmp_path, checkpoint.Checkpoint(3, info, {"model": model.state_dict(), "peer": {}}))
    for place in (path, tmp_path):
        found, _ = load_model(place)
        assert all(map(torch.equal, found.parameters(), model.parameters()))
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"damaged.*give another checkpoint"):
        load_model(path)


def test_a_model_whose_tokenizer_is_missing_is_found_for_those_that_need_none(tmp_path: Path) -> None:
    model = build("gpt-demo", vocab_size=VOCAB_SIZE, seed=4)
    info = {"run": RunConfig(model="gpt-demo", run_seed=1, tokenizer="f" * 64).to_dict()}
    path = checkpoint.save(tmp_path, checkpoint.Checkpoint(3, info, {"model": model.state_dict(), "peer": {}}))
    found, tokenizer = load_model(path, needs_text=False)
    assert all(map(torch.equal, found.parameters(), model.parameters()))
    assert tokenizer.identity == "ids"
    with pytest.raises(ConfigError, match=r"the run's tokenizer is not there; give it"):
        load_model(path)


def test_a_model_that_has_changed_since_its_checkpoint_is_an_error(tmp_path: Path) -> None:
    model = build("gpt-demo", vocab_size=VOCAB_SIZE + 9, seed=4)
    info = {"run": RunConfig(model="gpt-demo").to_dict()}
    checkpoint.save(tmp_path, checkpoint.Checkpoint(3, info, {"model": model.state_dict(), "peer": {}}))
    with pytest.raises(
        ConfigError, match=r"^the checkpoint does not fit model gpt-demo with .* \(size mis.*: use that version$"
    ):
        load_model(tmp_path)


def test_a_users_model_that_is_not_here_is_named_with_its_checkpoint(tmp_path: Path) -> None:
    info = {"run": RunConfig(model="not_here.models:bigram").to_dict()}
    checkpoint.save(tmp_path, checkpoint.Checkpoint(1, info, {"model": {}}))
    wanted = (
        r"^the checkpoint in .*: --model not_here\.models:bigram: cannot import .*, and run this in the directory that "
        "holds not_here, or add that to PYTHONPATH"
    )
    with pytest.raises(ConfigError, match=wanted):
        load_model(tmp_path)


def test_where_nothing_was_trained_there_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none: no such directory; `p2ptrain join` writes checkpoints"):
        load_model(tmp_path / "none")
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match=r"run: no checkpoint there; `p2ptrain join` writes checkpoints"):
        load_model(tmp_path / "run")


@pytest.mark.parametrize("fault", ["no such directory", "no checkpoint there"])
def test_a_directory_beside_it_that_has_a_checkpoint_is_named(tmp_path: Path, fault: str) -> None:
    for number in (1, 2, 3):
        (tmp_path / f"run-{number}").mkdir()
    (tmp_path / "run-2" / "checkpoint-7").mkdir()
    if fault == "no checkpoint there":
        (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match=f"run: {fault}; {tmp_path / 'run-2'} has a checkpoint"):
        load_model(tmp_path / "run")


def test_where_the_default_directory_is_missing_another_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "p2ptrain-plays" / "checkpoint-7").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"no such directory; .*p2ptrain-plays has a checkpoint"):
        load_model(tmp_path / "p2ptrain-p2ptrain")


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_a_cache_changes_no_text_within_the_context(kind: str) -> None:
    torch.manual_seed(3)
    shape: dict[str, int] = {"vocab_size": VOCAB_SIZE, "layers": 2, "heads": 2, "width": 16, "context": 40}
    model: nn.Module = GPT(GPTConfig(**shape)) if kind == "gpt" else Llama(LlamaConfig(**shape, hidden=24))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0)  # so that what is likeliest depends on what was read

    class Plain(nn.Module):
        """The same without a cache."""

        context = 40

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.model(tokens)  # type: ignore[no-any-return]

    given = {"length": 36, "temperature": 0.0, "seed": 0}
    cached = "".join(generate_text(model, Characters(), "abcd", **given))
    assert cached == "".join(generate_text(Plain(), Characters(), "abcd", **given))
    assert len(set(cached)) > 3
    # Beyond the context it goes on.
    longer = "".join(generate_text(model, Characters(), "abcd", **{**given, "length": 150}))
    assert longer.startswith(cached)
    assert len(longer) == 150


class Dice(nn.Module):
    """Tokens 0 to 3 with probabilities 0.5, 0.3, 0.15 and 0.05, whatever came before."""

    context = 4

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, 0.3, 0.15, 0.05]).log())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = torch.full((*tokens.shape, VOCAB_SIZE), -math.inf)
        logits[..., 40:44] = self.weight
        return logits


@pytest.mark.parametrize(("top_p", "kept"), [(1.0, 4), (0.96, 4), (0.9, 3), (0.8, 2), (0.7, 2), (0.5, 1), (0.1, 1)])
def test_top_p_keeps_the_fewest_tokens_of_that_probability(top_p: float, kept: int) -> None:
    texts = generate_text(Dice(), Characters(), "a", length=400, temperature=1.0, seed=1, top_p=top_p)
    assert len(set("".join(texts))) == kept


def _metaspace() -> TokenizerFile:
    """Words with the space before each in its token, as of SentencePiece."""
    words = {"▁the": 0, "▁cat": 1, "▁sat": 2, "<unk>": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.normalizer = tokenizers.normalizers.Strip()
    made.pre_tokenizer, made.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    return TokenizerFile(made.to_str().encode(), "made")


def test_the_space_between_prompt_and_text_is_kept() -> None:
    class Next(nn.Module):
        context = 4

        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.zeros(1))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return torch.zeros(*tokens.shape, 4).scatter(-1, (tokens + 1)[..., None], 9.0)

    pieces = list(generate_text(Next(), _metaspace(), "the", length=2, temperature=0.0, seed=0))
    assert pieces == [" cat", " sat", ""]


@pytest.mark.parametrize("prompt", ["", "  "])
def test_a_prompt_without_tokens_is_an_error(prompt: str) -> None:
    texts = generate_text(Dice(), _metaspace(), prompt, length=2, temperature=0.0, seed=0)
    with pytest.raises(ConfigError, match=f"--prompt '{prompt}': the model's tokenizer makes no tokens of it"):
        next(texts)


def test_characters_of_several_tokens_come_whole() -> None:
    class Repeat(nn.Module):
        """Writes "é" as bytes, without end."""

        context = 8

        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.zeros(1))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            following = torch.where(tokens == 195, 169, 195)
            return torch.zeros(*tokens.shape, 257).scatter(-1, following[..., None], 9.0)

    pieces = list(generate_text(Repeat(), Bytes(), "a", length=5, temperature=0.0, seed=0))
    assert "".join(pieces) == "éé\N{REPLACEMENT CHARACTER}"
    assert [piece for piece in pieces if piece] == ["é", "é", "\N{REPLACEMENT CHARACTER}"]
