"""Text from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from p2ptrain.errors import ConfigError
from p2ptrain.settings.config import RunConfig
from p2ptrain.training import checkpoint
from p2ptrain.training.data import VOCAB_SIZE, encode
from p2ptrain.training.generation import generate_text, load_model
from p2ptrain.training.models import build


class Alphabet(nn.Module):
    """Predicts the next letter of the alphabet from the last character alone (`context` is 1)."""

    context = 1

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        assert tokens.shape[1] <= self.context
        logits = torch.zeros(*tokens.shape, VOCAB_SIZE + 5)
        logits[..., VOCAB_SIZE:] = 99.0  # rows beyond the vocabulary
        return logits.scatter(-1, (tokens + 1)[..., None], 9.0)


def _text(prompt: str, **settings: float) -> str:
    chosen = {"length": 5, "temperature": 0.0, "seed": 0, **settings}
    return "".join(generate_text(Alphabet(), prompt, **chosen))


def test_the_likeliest_character_follows() -> None:
    assert _text("xya") == "bcdef"
    assert _text("a" * 1000) == "bcdef"


def test_draws_depend_on_seed_and_temperature() -> None:
    assert _text("a", temperature=3.0, seed=1) == _text("a", temperature=3.0, seed=1)
    assert _text("a", temperature=3.0, seed=1) != _text("a", temperature=3.0, seed=2)
    assert _text("a", temperature=0.1) == "bcdef"


def test_an_empty_prompt_begins_a_line() -> None:
    assert _text("", length=1) == "\t"
    assert encode("\n\t").tolist() == [0, 1]


def test_a_model_is_found_in_a_checkpoint_or_in_the_directory_above(tmp_path: Path) -> None:
    model = build("gpt-demo", vocab_size=VOCAB_SIZE, seed=4)
    info = {"run": RunConfig(model="gpt-demo", run_seed=1).to_dict()}
    path = checkpoint.save(tmp_path, checkpoint.Checkpoint(3, info, {"model": model.state_dict(), "peer": {}}))
    for place in (path, tmp_path):
        found = load_model(place)
        assert all(map(torch.equal, found.parameters(), model.parameters()))
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"damaged.*give another checkpoint"):
        load_model(path)


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
