"""Two peers train one model together: the kinds of models and settings of torch that users come with."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from p2ptrain.errors import ConfigError
from p2ptrain.peer.network_side import NetworkSide
from tests.peer.pair import RUN, Pair


@pytest.fixture
def defaults() -> Iterator[None]:
    """What tests set for all of torch does not outlive them."""
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
    torch.set_default_device(None)


def linear(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(9, 40), nn.ReLU(), nn.Linear(40, 3))


def normed(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(9, 3), nn.BatchNorm1d(3))


def convolution(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Unflatten(1, (1, 3, 3)), nn.Conv2d(1, 5, 2), nn.Conv2d(5, 3, 2), nn.Flatten())


def train(*models: nn.Module) -> None:
    """One step of SGD of each, towards outputs of 1."""
    for model in models:
        own = next(model.parameters())
        model.zero_grad()
        loss = (model(torch.ones(4, 9, dtype=own.dtype, device=own.device)) - 1).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad


def rounded(model: nn.Module) -> list[torch.Tensor]:
    """Its weights as peers exchange them."""
    return [parameter.detach().float() for parameter in model.parameters()]


@pytest.mark.usefixtures("defaults")
@pytest.mark.parametrize(
    ("default", "of_weights"),
    [
        (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.float64, torch.float64),
        (torch.bfloat16, torch.float32), (torch.float64, torch.float32),
        (torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.float32, torch.float64),
    ],
)  # fmt: skip
def test_rounds_are_the_same_under_every_default_dtype(default: torch.dtype, of_weights: torch.dtype) -> None:
    torch.set_default_dtype(default)
    models = [linear(seed).to(of_weights) for seed in range(2)]
    with Pair(models[0]) as pair:
        pair.join(models[1])
        assert all(map(torch.equal, rounded(models[0]), rounded(models[1])))
        hashes = pair.train(lambda: train(*models))
        assert all(ours == theirs for ours, theirs in hashes)
        assert {values.dtype for values in pair.peers[0].anchor_state_dict().values()} == {torch.float32}


@pytest.mark.usefixtures("defaults")
def test_nothing_of_ours_is_made_on_the_default_device() -> None:
    models = [linear(seed) for seed in range(2)]
    torch.set_default_device("meta")
    with Pair(models[0]) as pair:
        pair.join(models[1])
        hashes = pair.train(lambda: train(*models))
        assert all(ours == theirs for ours, theirs in hashes)
        assert all(values.device.type == "cpu" for values in pair.peers[0].anchor_state_dict().values())


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def compiled_in_part(model: nn.Module) -> nn.Module:
    model[0] = compiled(model[0])  # type: ignore[operator]
    return model


def parallel_in_part(model: nn.Module) -> nn.Module:
    model[1] = nn.DataParallel(model[1])  # type: ignore[operator, index]
    return model


def checkpointed_in_part(model: nn.Module) -> nn.Module:
    model[1] = checkpoint_wrapper(model[1])  # type: ignore[operator, index]
    return model


def scripted(model: nn.Module) -> nn.Module:
    return torch.jit.script(model)  # type: ignore[no-untyped-call, no-any-return]


@pytest.mark.filterwarnings("ignore:torch.utils.checkpoint", "ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(
    "wrap",
    [
        compiled, compiled_in_part, nn.DataParallel, parallel_in_part, checkpointed_in_part, checkpoint_wrapper,
        scripted,
    ],
)  # fmt: skip
@pytest.mark.parametrize("of_founder", [True, False])
def test_a_wrapped_model_and_a_plain_one_train_together(wrap, of_founder: bool) -> None:
    models = [normed(seed) for seed in range(2)]
    models[0][1].running_mean += 7
    wrapped = [wrap(models[0]), models[1]] if of_founder else [models[0], wrap(models[1])]
    with Pair(wrapped[0]) as pair:
        pair.join(wrapped[1])
        assert [b.tolist() for b in models[1].buffers()] == [b.tolist() for b in models[0].buffers()]
        hashes = pair.train(lambda: train(*wrapped))
        assert all(ours == theirs for ours, theirs in hashes)
        for peer in pair.peers:
            anchor = peer.anchor_state_dict()
            assert anchor.keys() == dict(normed(0).named_parameters()).keys()
            assert normed(0).load_state_dict(anchor, strict=False).unexpected_keys == []


def in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.arange(3.0)


@pytest.mark.parametrize(
    "make", [in_inference_mode, lambda: torch.arange(6.0).reshape(2, 3).t(), lambda: torch.tensor([1 + 2j, 3j])]
)
def test_a_joiner_gets_every_kind_of_buffer_that_the_founder_was_let_in_with(make) -> None:
    models = [linear(seed) for seed in range(2)]
    models[0].register_buffer("given", make())
    models[1].register_buffer("given", torch.zeros_like(make()))
    with Pair(models[0]) as pair:
        pair.join(models[1])
        assert torch.equal(models[1].given, make())


def test_frozen_parameters_may_be_expanded_or_made_in_inference_mode() -> None:
    models = [linear(seed) for seed in range(2)]
    for model in models:
        model.expanded = nn.Parameter(torch.ones(1).expand(5), requires_grad=False)
        model.inferred = nn.Parameter(in_inference_mode(), requires_grad=False)
    with Pair(models[0]) as pair:
        pair.join(models[1])


def with_one_of(model: nn.Module) -> nn.Module:
    other = linear(1)
    other[2].weight = model[2].weight  # type: ignore[index]
    return other


def with_the_memory_of_one_of(model: nn.Module) -> nn.Module:
    other = linear(1)
    other[2].weight.data = model[2].weight.data  # type: ignore[index, union-attr]
    return other


@pytest.mark.parametrize(
    ("second", "complaint"),
    [
        (lambda model: model, r"4 parameters of the model, such as 0\.weight, belong to another peer"),
        (compiled, r"4 parameters of the model, such as 0\.weight, belong to another peer"),
        (with_one_of, r"1 parameters of the model, such as 2\.weight, belong to another peer"),
        (with_the_memory_of_one_of, r"1 parameters of the model, such as 2\.weight, belong to another peer"),
    ],
)
def test_two_peers_of_a_process_cannot_have_the_same_parameters_at_a_time(second, complaint: str) -> None:
    model = linear(0)
    model.nothing = nn.Parameter(torch.zeros(0))
    with Pair(model) as pair:
        with pytest.raises(ConfigError, match=complaint):
            pair.join(second(model))
        with pytest.raises(ConfigError, match=complaint), Pair(second(model)):
            pass  # another run
        with pytest.raises(ConfigError, match="belong to another peer"):
            pair.join(second(model))  # a refusal has released nothing
        pair.join(copy.deepcopy(model))
        pair.peers[0].leave()
        pair.peers[1].leave()
        with Pair(second(model)) as again:
            assert again.peers[0].founded


def test_a_peer_that_could_not_join_gives_the_parameters_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(network_side: NetworkSide, note_status: object) -> None:
        raise OSError("no network")

    model = linear(0)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no network"):
        patch.setattr(NetworkSide, "await_ready", broken)
        Pair(model)
    with Pair(model) as pair:
        assert pair.peers[0].founded


@pytest.mark.usefixtures("defaults")
def test_weights_under_a_float64_default_are_bit_equal_after_the_last_round() -> None:
    torch.set_default_dtype(torch.float64)
    models = [linear(seed) for seed in range(2)]
    with Pair(models[0], run=dataclasses.replace(RUN, total_steps=60)) as pair:
        pair.join(models[1])
        pair.finish(lambda: train(models[0]), lambda: train(models[1]))
        assert {parameter.dtype for parameter in models[0].parameters()} == {torch.float64}
        assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


@pytest.mark.parametrize("both", [True, False])
def test_a_convolution_may_have_its_channels_last(both: bool) -> None:
    """At one peer or both: the order in memory is no part of the layout."""
    models = [convolution(seed) for seed in range(2)]
    for model in models if both else models[:1]:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        assert not model[2].weight.is_contiguous()  # type: ignore[index, union-attr]
    with Pair(models[0]) as pair:
        pair.join(models[1])
        assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
        hashes = pair.train(lambda: train(*models))
        assert all(ours == theirs for ours, theirs in hashes)
        assert not models[0][2].weight.is_contiguous()  # type: ignore[index, union-attr]
