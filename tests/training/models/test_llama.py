"""The Llama: equal to that of transformers, trained by every part of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from p2ptrain.training.models import Llama, LlamaConfig, build, count_parameters

TINY = LlamaConfig(vocab_size=50, layers=2, heads=2, width=16, hidden=24, context=12)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_the_number_of_parameters_is_computed_without_building_it(tied: bool, qk_norm: bool) -> None:
    config = replace(TINY, tied=tied, qk_norm=qk_norm)
    assert config.num_parameters == sum(parameter.numel() for parameter in Llama(config).parameters())


def test_it_does_not_see_the_future_and_knows_positions() -> None:
    torch.manual_seed(0)
    model = Llama(TINY).eval()
    tokens = torch.randint(50, (2, 12))
    logits = model(tokens)
    assert logits.shape == (2, 12, 50)
    torch.testing.assert_close(model(tokens[:, :7]), logits[:, :7])
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 50
    assert torch.equal(model(changed)[:, :5], logits[:, :5])
    swapped = tokens.clone()
    swapped[:, [0, 1]] = tokens[:, [1, 0]]
    assert not torch.allclose(model(swapped)[:, 11], logits[:, 11], atol=1e-5)


def test_presets_are_of_their_size() -> None:
    for name, millions in (("llama-15m", 15.2), ("llama-60m", 58.1), ("llama-160m", 162), ("llama-400m", 393)):
        assert count_parameters(name, vocab_size=32_000) / 1e6 == pytest.approx(millions, rel=0.003)


def test_the_same_seed_gives_the_same_weights() -> None:
    first, second = (build("llama-15m", vocab_size=98, seed=3).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert "model.cos" not in first  # rotary angles are computed, not saved or sent


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_computes_the_same_logits_from_the_same_weights(tied: bool, qk_norm: bool) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = replace(TINY, tied=tied, qk_norm=qk_norm)
    model = Llama(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    shape = {
        "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 12,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": tied, "attention_bias": False,
    }  # fmt: skip
    theirs = (
        transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape))
        if qk_norm
        else transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    ).eval()
    missing, unexpected = theirs.load_state_dict(model.state_dict(), strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if tied else [])
    theirs.tie_weights()
    tokens = torch.randint(50, (3, 12))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=1e-5, atol=1e-5)
