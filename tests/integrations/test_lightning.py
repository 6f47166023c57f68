"""A real Trainer with a tiny module and a fake peer that records calls. Lightning takes seconds to import."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from p2ptrain.errors import ConfigError
from tests.integrations.peer import Peer

LENGTH = 8
PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def module(package: str = PACKAGES[0], *, fails_at: int = -1) -> Any:
    """A linear model whose learning rate decays to zero, and which notes its losses and learning rates."""

    class Module(importlib.import_module(package).LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(4, 1)
            self.told: list[float] = []
            self.rates: list[float] = []

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            if batch_idx == fails_at:
                raise LookupError("of the user's own")
            loss: torch.Tensor = self.layer(batch[0]).square().mean()
            self.told.append(loss.item())
            self.rates.append(self.optimizers().param_groups[0]["lr"])
            return loss

        def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
            self.log("val_loss", self.layer(batch[0]).square().mean())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / LENGTH)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Module()


def batches(number: int) -> Any:
    data = torch.utils.data.TensorDataset(torch.randn(2 * number, 4, generator=torch.Generator().manual_seed(1)))
    return torch.utils.data.DataLoader(data, batch_size=2)


class Join:
    """In the place of `p2ptrain.join`: gives a peer, and keeps what it was asked."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.asked: list[dict[str, Any]] = []

    def __call__(self, model: torch.nn.Module, **given: Any) -> Peer:
        assert isinstance(model, torch.nn.Module)
        self.asked.append(given)
        return self.peer


def trainer(join: Join, out: Path, package: str = PACKAGES[0], **given: Any) -> Any:
    from p2ptrain.integrations.lightning import P2PCallback

    callback: Any = P2PCallback(join)  # type: ignore[arg-type]
    settings = {
        "max_steps": LENGTH, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": out, "log_every_n_steps": 2,
        "limit_val_batches": 1,
    }  # fmt: skip
    given["callbacks"] = [callback, *given.get("callbacks", [])]
    return importlib.import_module(package).Trainer(**settings | given)


@pytest.mark.parametrize("package", PACKAGES)
def test_one_exchange_a_step_of_the_optimizer_with_the_mean_loss_of_its_batches(package: str, tmp_path: Path) -> None:
    join, model = Join(peer := Peer()), module(package)
    run = trainer(join, tmp_path, package, accumulate_grad_batches=3)
    run.fit(model, batches(3 * LENGTH), batches(1))
    assert join.asked == [{"resume": None, "process_group": None}]
    assert peer.samples == [6] * LENGTH
    assert peer.losses[0::2] == [None] * (LENGTH // 2)
    means = torch.tensor(model.told).view(-1, 6).mean(1).tolist()
    assert peer.losses[1::2] == pytest.approx(means)
    ((event, fields),) = peer.events  # not of the sanity check
    assert (event, fields["step"]) == ("eval", LENGTH)
    assert LENGTH in peer.settled_at
    assert (run.callback_metrics["peers"], run.callback_metrics["round"]) == (2, 0)
    assert (peer.left, peer.waited) == ("closed", False)  # a run without end


@pytest.mark.parametrize("tells", [True, False])
def test_losses_of_manual_optimization_are_not_added_up(tells: bool, tmp_path: Path) -> None:
    """Its optimizer steps every second batch; the loss is known only if `training_step` returns it."""

    class Manual(type(module(PACKAGES[0]))):  # type: ignore[misc]
        automatic_optimization = False

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor | None:
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            if batch_idx % 2:
                self.optimizers().step()
                self.optimizers().zero_grad()
            return loss if tells else None

    join, model = Join(peer := Peer()), Manual()
    trainer(join, tmp_path).fit(model, batches(2 * LENGTH), batches(1))
    means = torch.tensor(model.told).view(-1, 4).mean(1).tolist()
    assert len(peer.losses) == LENGTH
    assert peer.losses[1::2] == (pytest.approx(means) if tells else [None] * (LENGTH // 2))


@pytest.mark.parametrize(("at", "pace", "steps"), [(0, 1.0, 8), (5, 1.0, 3), (0, 2.0, 4), (0, 0.5, 16), (8, 1.0, 0)])
def test_the_trainer_ends_with_the_run_and_learns_by_its_position(
    tmp_path: Path, at: int, pace: float, steps: int
) -> None:
    join, model = Join(peer := Peer(LENGTH, at=at, pace=pace)), module()
    trainer(join, tmp_path).fit(model, batches(20))
    assert model.rates == pytest.approx([0.1 * (1 - int(at + step * pace) / LENGTH) for step in range(steps)])
    assert peer.left == "closed"
    assert peer.waited == (steps > 0)


def test_a_schedule_that_cannot_follow_the_run_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def one_cycle() -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=LENGTH + 2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    model = module()
    model.configure_optimizers = one_cycle
    trainer(Join(Peer()), tmp_path).fit(model, batches(LENGTH))
    assert "does not follow" not in caplog.text
    trainer(Join(Peer(LENGTH)), tmp_path).fit(model, batches(LENGTH))
    assert caplog.text.count("OneCycleLR does not follow the run, only LambdaLR does") == 1


def test_another_length_than_the_runs_is_refused(tmp_path: Path) -> None:
    peer = Peer(9)
    with pytest.raises(ConfigError, match=r"give Trainer\(max_steps=9\)"):
        trainer(Join(peer), tmp_path).fit(module(), batches(9))
    assert peer.left == "ConfigError"


def test_an_exception_leaves_the_run_and_comes_out_unchanged(tmp_path: Path) -> None:
    peer = Peer()
    with pytest.raises(LookupError, match="of the user's own"):
        trainer(Join(peer), tmp_path).fit(module(fails_at=3), batches(9))
    assert len(peer.losses) == 3
    assert peer.left == "LookupError"


def test_a_checkpoint_holds_the_peers_part_with_which_the_next_fit_joins(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    saving = ModelCheckpoint(tmp_path, filename="at-{step}", every_n_train_steps=3, save_top_k=-1)
    first = trainer(Join(Peer(LENGTH)), tmp_path, enable_checkpointing=True, callbacks=[saving])
    first.fit(module(), batches(20))

    # The run is at 4 after a restart, the Trainer at 3.
    again, model = Join(Peer(LENGTH, at=4)), module()
    resumed = trainer(again, tmp_path)
    resumed.fit(model, batches(20), ckpt_path=tmp_path / "at-step=3.ckpt")
    (asked,) = again.asked
    assert (asked["resume"]["head"], asked["resume"]["run_step"]) == ("ab12", 3)
    assert [float(t[0, 0]) for t in (asked["resume"]["anchor"], *asked["resume"]["moments"])] == [1.0, 2.0, 3.0]
    assert model.rates == pytest.approx([0.1 * (1 - step / LENGTH) for step in range(4, LENGTH)])
    assert resumed.global_step == 7


def test_examples_are_counted_in_batches_of_any_form() -> None:
    from p2ptrain.integrations.lightning import count_examples

    tokens = torch.zeros(5, 3)
    for batch in (tokens, [tokens, 1], {"name": "x", "ids": tokens}, [{"ids": tokens}, torch.zeros(2)]):
        assert count_examples(batch) == 5
    assert count_examples(["text"]) == count_examples(torch.tensor(1.0)) == 1
