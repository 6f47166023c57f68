"""The GPT and its presets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from p2ptrain.training.models import GPT, PRESETS, GPTConfig, build

TINY = GPTConfig(vocab_size=11, layers=2, heads=2, width=8, context=6)


@pytest.mark.parametrize(
    ("name", "count"), [("gpt-demo", 110_464), ("gpt-small", 10_783_488), ("gpt2-124m", 124_439_808)]
)
def test_presets_have_their_size(name: str, count: int) -> None:
    # 124,439,808 is the published size of GPT-2 small: 12 layers, 12 heads, width 768.
    with torch.device("meta"):
        model = build(name, vocab_size=PRESETS[name].vocab_size or 98, seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert model.context == PRESETS[name].context


@pytest.mark.parametrize(
    ("name", "layers", "width", "heads", "head_size"),
    [("diloco-60m", 3, 896, 16, 64), ("diloco-150m", 12, 896, 16, 64), ("diloco-400m", 12, 1536, 12, 128)],
)
def test_dilocos_models_have_the_size_counted_by_hand(
    name: str, layers: int, width: int, heads: int, head_size: int
) -> None:
    with torch.device("meta"):
        model = build(name, vocab_size=32_000, seed=0)
    inner = heads * head_size
    attention = (width * 3 * inner + 3 * inner) + (inner * width + width)
    mlp = (width * 4 * width + 4 * width) + (4 * width * width + width)
    norms = 2 * 2 * width
    embeddings = 32_000 * width + 1024 * width
    expected = embeddings + layers * (attention + mlp + norms) + 2 * width
    assert sum(parameter.numel() for parameter in model.parameters()) == expected
    # The millions in the name, to within 3 %.
    assert expected == pytest.approx(1e6 * int(name.removeprefix("diloco-").removesuffix("m")), rel=0.03)


def test_dilocos_smallest_model_learns_a_batch() -> None:
    model = build("diloco-60m", vocab_size=98, seed=0)
    tokens = torch.arange(1, 17)[None]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = functional.cross_entropy(model(tokens)[0, :-1], tokens[0, 1:])
        losses.append(loss.item())
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] == pytest.approx(torch.tensor(98.0).log().item(), abs=0.5)
    assert losses[1] < losses[0]


def test_heads_may_be_wider_than_their_share() -> None:
    """A wide head whose extra columns are zero computes what the narrow head does, except for the scale."""
    torch.manual_seed(0)
    narrow = GPT(TINY).blocks[0].attention
    wide = GPT(replace(TINY, head_size=16)).blocks[0].attention
    assert wide.query_key_value.weight.shape == (3 * 2 * 16, 8)
    assert wide.project.weight.shape == (8, 2 * 16)
    with torch.no_grad():
        for parameter in wide.parameters():
            parameter.zero_()
        for parameter in narrow.parameters():
            parameter.normal_()
        # (query key value, head, head size, ...): scale the query, as attention divides by sqrt(head size).
        scale = torch.tensor([2.0, 1.0, 1.0])[:, None, None]
        rows = narrow.query_key_value.weight.view(3, 2, 4, 8)
        wide.query_key_value.weight.view(3, 2, 16, 8)[:, :, :4] = rows * scale[..., None]
        wide.query_key_value.bias.view(3, 2, 16)[:, :, :4] = narrow.query_key_value.bias.view(3, 2, 4) * scale
        wide.project.weight.view(8, 2, 16)[:, :, :4] = narrow.project.weight.view(8, 2, 4)
        wide.project.bias.copy_(narrow.project.bias)
    x = torch.randn(3, 5, 8)
    torch.testing.assert_close(wide(x), narrow(x))


def test_the_head_is_the_embedding() -> None:
    model = GPT(TINY)
    assert not any(parameter.shape == (11, 8) for name, parameter in model.named_parameters() if "token" not in name)
    tokens = torch.tensor([[1, 2, 3]])
    before = model(tokens)
    with torch.no_grad():
        model.token_embedding.weight[7] *= 2  # a token that is not in the input
    torch.testing.assert_close(model(tokens)[..., 7], 2 * before[..., 7])
    assert torch.equal(model(tokens)[..., :7], before[..., :7])


def test_no_position_sees_what_comes_after_it() -> None:
    model = GPT(TINY)
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    changed = torch.tensor([[1, 2, 3, 9, 9]])
    torch.testing.assert_close(model(tokens)[:, :3], model(changed)[:, :3])
    assert not torch.allclose(model(tokens)[:, 3:], model(changed)[:, 3:])


def test_against_torchs_own_encoder_layer() -> None:
    torch.manual_seed(0)
    model = GPT(TINY)
    ours = model.blocks[0]
    theirs = nn.TransformerEncoderLayer(
        8, 2, 32, dropout=0.0, activation=nn.GELU(approximate="tanh"), batch_first=True, norm_first=True
    )
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_()
        for target, source in (
            (theirs.self_attn.in_proj_weight, ours.attention.query_key_value.weight),
            (theirs.self_attn.in_proj_bias, ours.attention.query_key_value.bias),
        ):
            target.copy_(source)
    theirs.self_attn.out_proj.load_state_dict(ours.attention.project.state_dict())
    theirs.linear1.load_state_dict(ours.mlp.expand.state_dict())
    theirs.linear2.load_state_dict(ours.mlp.project.state_dict())
    theirs.norm1.load_state_dict(ours.attention_norm.state_dict())
    theirs.norm2.load_state_dict(ours.mlp_norm.state_dict())
    x = torch.randn(3, 5, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    torch.testing.assert_close(ours(x), theirs(x, src_mask=mask, is_causal=True), rtol=1e-4, atol=1e-4)


def test_an_untrained_model_guesses() -> None:
    model = build("gpt-demo", vocab_size=98, seed=0)
    tokens = torch.arange(98)[None, :64]
    loss = functional.cross_entropy(model(tokens)[0], tokens[0].roll(-1))
    assert abs(loss.item() - torch.tensor(98.0).log().item()) < 0.1
