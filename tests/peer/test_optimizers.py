"""Two peers with optimizers and tools that keep copies or a memory of the weights: what exchanges do to these.

The table "What you train with" of docs/use/api.md says it; each row is tested here or in `test_programs.py`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable

import pytest
import schedulefree
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.peer.pair import WITH_END, Pair, are_equal

WITHOUT_GOSSIP = dataclasses.replace(WITH_END, fragment_fraction=0.0)


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(9, 40), nn.Tanh(), nn.Linear(40, 1))


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    """The loss of a peer on its own data."""
    inputs = torch.randn(64, 9, generator=torch.Generator().manual_seed(number))
    outputs = model(inputs.to(next(model.parameters()).dtype)).float()
    return (outputs - inputs.sum(1, keepdim=True)).square().mean()


def descend(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model, number).backward()
    optimizer.step()


def values_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


class ScheduleFree:
    """A peer's side of a run with a schedule-free optimizer. `exchanges`: "y", which it trains, or "x", its average."""

    def __init__(self, model: nn.Module, number: int, exchanges: str) -> None:
        self.model, self.number, self.exchanges = model, number, exchanges
        self.optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01)
        self.z: list[torch.Tensor] = []

    def step(self) -> None:
        assert all(map(torch.equal, self.z, self.zs()))  # peer.step() has left it alone
        self.optimizer.train()
        descend(self.model, self.optimizer, self.number)
        if self.exchanges == "x":
            self.optimizer.eval()
        self.z = values_of(self.zs())

    def zs(self) -> list[torch.Tensor]:
        return [self.optimizer.state[parameter]["z"] for parameter in self.model.parameters() if self.optimizer.state]


@pytest.mark.parametrize("exchanges", ["y", "x"])
def test_a_schedule_free_optimizer_keeps_its_z_and_eval_after_the_last_round_uses_it(exchanges: str) -> None:
    models = [network(seed) for seed in range(2)]
    with Pair(models[0], run=WITH_END) as pair:
        pair.join(models[1])
        sides = [ScheduleFree(model, number, exchanges) for number, model in enumerate(models)]
        pair.finish(sides[0].step, sides[1].step)
    assert are_equal(*models)
    assert not all(map(torch.equal, sides[0].z, sides[1].z))
    for side in sides:
        side.optimizer.eval()
    assert are_equal(*models) == (exchanges == "x")


def test_an_average_of_weights_that_is_updated_after_the_step_has_the_rounds_in_it() -> None:
    models = [network(seed) for seed in range(2)]
    with Pair(models[0], run=WITH_END) as pair:
        pair.join(models[1])
        early, last, slow = (
            [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay)) for model in models]
            for decay in (0.0, 0.0, 0.9)
        )
        optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]

        def after_step(number: int) -> None:
            last[number].update_parameters(models[number])
            slow[number].update_parameters(models[number])

        def step(number: int) -> Callable[[], None]:
            def run() -> None:
                after_step(number)  # of the step before
                descend(models[number], optimizers[number], number)
                early[number].update_parameters(models[number])

            return run

        pair.finish(step(0), step(1))
        for number in range(2):
            after_step(number)
    assert are_equal(*last)
    assert are_equal(last[0], models[0])
    assert not are_equal(*early)  # without the last round
    assert not are_equal(*slow)  # each peer's own


class Masters:
    """A peer's side of a run with a bf16 model and fp32 masters, as mixed-precision optimizers keep them."""

    def __init__(self, model: nn.Module, number: int) -> None:
        self.masters, self.model, self.number = model, copy.deepcopy(model).bfloat16(), number

    def set_out(self) -> None:
        """After joining, as the joined module has the run's weights only then."""
        self.optimizer = torch.optim.Adam(self.masters.parameters(), lr=0.01)

    def step(self) -> None:
        self.copy(self.masters, self.model)
        self.model.zero_grad()
        loss_of(self.model, self.number).backward()
        for master, parameter in zip(self.masters.parameters(), self.model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        self.optimizer.step()
        self.copy(self.masters, self.model)

    @staticmethod
    @torch.no_grad()
    def copy(source: nn.Module, target: nn.Module) -> None:
        torch._foreach_copy_(list(target.parameters()), list(source.parameters()))


@pytest.mark.parametrize("joined", ["masters", "model"])
def test_rounds_reach_fp32_masters_only_if_these_are_what_joined(joined: str) -> None:
    sides = [Masters(network(number), number) for number in range(2)]
    with Pair(getattr(sides[0], joined), run=WITH_END) as pair:
        pair.join(getattr(sides[1], joined))
        for side in sides:
            side.set_out()
        pair.finish(sides[0].step, sides[1].step)
    assert are_equal(getattr(sides[0], joined), getattr(sides[1], joined))
    for side in sides:
        side.copy(side.masters, side.model)  # as at the next step
    assert are_equal(sides[0].model, sides[1].model) == (joined == "masters")


def test_steps_that_a_gradient_scaler_skips_are_steps_of_the_run_and_its_scale_is_its_own() -> None:
    models, skipped = [network(seed) for seed in range(2)], [0, 0]
    with Pair(models[0], run=WITH_END) as pair:
        pair.join(models[1])
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
        scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in models]
        scales = [scaler.get_scale() for scaler in scalers]

        def step(number: int) -> Callable[[], None]:
            model, optimizer, scaler = models[number], optimizers[number], scalers[number]

            def run() -> None:
                assert scaler.get_scale() == scales[number]  # peer.step() has left it alone
                optimizer.zero_grad()
                overflows = pair.peers[number].run_step % 5 == number
                scaler.scale(loss_of(model, number) * (float("inf") if overflows else 1)).backward()
                before = values_of(model.parameters())
                scaler.step(optimizer)
                scaler.update()
                assert all(map(torch.equal, before, model.parameters())) == overflows
                skipped[number] += overflows
                scales[number] = scaler.get_scale()

            return run

        pair.finish(step(0), step(1))
        assert min(skipped) >= 2
        assert [peer.run_step for peer in pair.peers] == [WITH_END.total_steps] * 2
    assert are_equal(*models)
    assert all(value.isfinite().all() for value in models[0].parameters())


def test_gradients_that_are_being_accumulated_are_left_alone() -> None:
    models = [network(seed) for seed in range(2)]
    with Pair(models[0], run=WITH_END) as pair:
        pair.join(models[1])
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
        steps, kept = [0, 0], [list[torch.Tensor](), list[torch.Tensor]()]

        def gradients(model: nn.Module) -> list[torch.Tensor]:
            return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

        def step(number: int) -> Callable[[], None]:
            def run() -> None:
                model, optimizer = models[number], optimizers[number]
                assert all(map(torch.equal, kept[number], gradients(model)))
                optimizer.zero_grad()
                for _ in range(4):
                    (loss_of(model, number) / 4).backward()
                optimizer.step()
                steps[number] += 1
                kept[number] = values_of(gradients(model))

            return run

        pair.finish(step(0), step(1))
        assert min(steps) >= WITH_END.total_steps - 1  # the run counts optimizer steps, not batches
    assert all(len(each) == 4 for each in kept)
    assert are_equal(*models)


def test_lbfgs_that_forgets_its_past_when_a_round_lands_learns() -> None:
    models, rounds = [network(seed) for seed in range(2)], [0, 0]
    with Pair(models[0], run=dataclasses.replace(WITHOUT_GOSSIP, total_steps=60, sync_every=15)) as pair:
        pair.join(models[1])
        optimizers = [torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4) for model in models]
        losses: list[list[float]] = [[], []]

        def step(number: int) -> Callable[[], None]:
            model, optimizer = models[number], optimizers[number]

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, number)
                loss.backward()
                return loss

            def run() -> None:
                if rounds[number] != pair.peers[number].round:  # as where `report.round` is not None
                    optimizer.state.clear()
                    rounds[number] = pair.peers[number].round
                losses[number].append(optimizer.step(closure).item())

            return run

        pair.finish(step(0), step(1))
        assert min(rounds) >= 2
    assert are_equal(*models)
    for each in losses:
        assert max(each) < 1.5 * each[0]
        assert each[-1] < each[0] / 4
