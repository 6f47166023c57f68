"""A real Trainer with a tiny model and a fake peer that records calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from p2ptrain.errors import ConfigError
from p2ptrain.integrations.transformers import STATE_FILE, P2PCallback, _read
from tests.integrations.peer import Peer
from tests.peer.pair import Pair

CONFIG = GPT2Config(n_embd=8, n_layer=1, n_head=1, n_positions=8, vocab_size=16, bos_token_id=0, eos_token_id=0)
LENGTH = 8


class Windows(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield {"input_ids": (ids := torch.arange(8)), "labels": ids}


def trainer(peer: Peer, out: Path, **arguments: Any) -> Trainer:
    torch.manual_seed(0)
    settings = {
        "max_steps": LENGTH, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "learning_rate": 0.1,
        "lr_scheduler_type": "linear", "logging_steps": 2, "save_steps": 4, "use_cpu": True, "disable_tqdm": True,
        "report_to": [],
    }  # fmt: skip
    callback: Any = P2PCallback(peer)  # type: ignore[arg-type]
    return Trainer(
        GPT2LMHeadModel(CONFIG), TrainingArguments(str(out), **settings | arguments), train_dataset=Windows(),
        eval_dataset=[next(iter(Windows()))], callbacks=[callback],
    )  # fmt: skip


def test_one_exchange_a_step_of_the_optimizer_and_the_means_that_the_trainer_logs(tmp_path: Path) -> None:
    peer = Peer()
    run = trainer(peer, tmp_path, eval_strategy="steps", eval_steps=8)
    run.train()
    assert peer.samples == [6] * LENGTH
    logs = [log for log in run.state.log_history if "loss" in log]
    assert peer.losses == [None, None, logs[0]["loss"], None, logs[1]["loss"], None, logs[2]["loss"], None]
    (event,) = peer.events
    assert (event[0], event[1]["step"]) == ("eval", LENGTH)
    assert not peer.waited  # a run without end


def test_an_evaluation_does_not_lose_the_loss(tmp_path: Path) -> None:
    peer = Peer()
    trainer(peer, tmp_path, eval_strategy="steps", eval_steps=2).train()
    assert [loss is not None for loss in peer.losses] == [False, False, True, False, True, False, True, False]


def test_a_fast_peer_says_that_a_dataset_with_an_end_ended_it_early(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    peer = Peer(LENGTH, pace=0.5)
    run = trainer(peer, tmp_path, save_strategy="no")
    run.train_dataset = [next(iter(Windows()))] * (4 * 6)
    run.train()
    assert peer.run_step < LENGTH
    assert "has ended at step 4 of 8 of the run" in caplog.text


def test_a_trainer_that_somebody_stopped_early_is_not_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
            control.should_training_stop |= state.global_step == 2

    peer = Peer(LENGTH)
    run = trainer(peer, tmp_path, save_strategy="no")
    run.add_callback(Stop())
    run.train()
    assert peer.run_step == 2
    assert "has ended at step" not in caplog.text


def test_a_round_has_landed_whole_in_weights_that_the_trainer_saves_or_evaluates(tmp_path: Path) -> None:
    peer = Peer()
    trainer(peer, tmp_path, save_steps=4, eval_strategy="steps", eval_steps=3).train()
    assert peer.settled_at == [3, 4, 6, 8]


def test_a_round_that_cannot_be_landed_costs_a_checkpoint_its_state_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise TimeoutError("out of memory")

    peer = Peer()
    monkeypatch.setattr(peer, "state_dict", fail)
    trainer(peer, tmp_path, save_steps=LENGTH).train()
    assert (tmp_path / f"checkpoint-{LENGTH}" / "model.safetensors").exists()
    assert not (tmp_path / f"checkpoint-{LENGTH}" / STATE_FILE).exists()
    assert "this checkpoint is without the peer's part: out of memory" in caplog.text


def test_tokens_are_counted_where_the_trainer_counts_them(tmp_path: Path) -> None:
    peer = Peer()
    trainer(peer, tmp_path, include_num_input_tokens_seen="all").train()
    assert peer.samples == [2 * 3 * 8] * LENGTH


@pytest.mark.parametrize(("at", "pace", "steps"), [(0, 1.0, 8), (5, 1.0, 3), (0, 2.0, 4), (0, 0.5, 16)])
def test_the_trainer_ends_with_the_run_and_learns_by_its_position(
    tmp_path: Path, at: int, pace: float, steps: int
) -> None:
    peer = Peer(LENGTH, at=at, pace=pace)
    run = trainer(peer, tmp_path, logging_steps=1, save_strategy="no")
    run.train()
    assert len(peer.losses) == steps
    assert peer.waited
    rates = [log["learning_rate"] for log in run.state.log_history if "loss" in log]
    assert rates == pytest.approx([0.1 * (1 - int(at + step * pace) / LENGTH) for step in range(steps)])


def test_another_length_than_the_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"give TrainingArguments\(max_steps=9\)"):
        trainer(Peer(9), tmp_path).train()


def test_another_model_than_the_peers_is_refused(tmp_path: Path) -> None:
    with Pair(model := GPT2LMHeadModel(CONFIG)) as pair:
        run = trainer(pair.peers[0], tmp_path)  # with a model of its own
        with pytest.raises(ConfigError, match=r"trains another model .* as with Trainer\(model_init=…\)"):
            run.train()
        state, wrapped = TrainerState(max_steps=pair.peers[0].run.total_steps), torch.nn.DataParallel(model)
        P2PCallback(pair.peers[0]).on_train_begin(run.args, state, TrainerControl(), model=wrapped, lr_scheduler=None)


@pytest.mark.parametrize(
    ("length", "scheduler", "warned"),
    [(8, "reduce_lr_on_plateau", True), (0, "reduce_lr_on_plateau", False), (8, "linear", False)],
)
def test_a_schedule_that_cannot_follow_the_run_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, length: int, scheduler: str, warned: bool
) -> None:
    trainer(Peer(length), tmp_path, lr_scheduler_type=scheduler, eval_strategy="epoch", save_strategy="no").train()
    assert ("ReduceLROnPlateau does not follow the run, only LambdaLR does" in caplog.text) == warned


@pytest.mark.parametrize("length", [0, LENGTH])
def test_a_best_model_that_the_last_round_replaces_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, length: int
) -> None:
    trainer(Peer(length), tmp_path, load_best_model_at_end=True, eval_strategy="steps", eval_steps=4).train()
    assert ("the run's last round replaces the best model" in caplog.text) == (length > 0)


@pytest.mark.parametrize("run_is_at", [0, 7])
def test_a_checkpoint_holds_the_peers_part_and_the_further_one_counts(tmp_path: Path, run_is_at: int) -> None:
    before = Peer(LENGTH)
    trainer(before, tmp_path, save_steps=3).train()
    assert (tmp_path / "checkpoint-6" / STATE_FILE).exists()

    for late in tmp_path.glob("checkpoint-[78]*"):
        (late / "trainer_state.json").unlink()
        late.rename(tmp_path / "gone")
    peer = Peer(LENGTH, at=run_is_at)
    again = trainer(peer, tmp_path, save_strategy="no")
    again.train(resume_from_checkpoint=True)
    assert peer.restored is not None
    assert peer.restored.keys() == before.state_dict().keys()
    assert (peer.restored["head"], peer.restored["history"], peer.restored["run_step"]) == ("ab12", "cd34", 6)
    assert [float(tensor[0, 0]) for tensor in (peer.restored["anchor"], *peer.restored["moments"])] == [1.0, 2.0, 3.0]
    assert len(peer.losses) == (2 if run_is_at == 0 else 1)
    embedding = again.model.transformer.wte.weight
    assert (embedding.mean() > 0.25) == (run_is_at == 7)  # that of the run, or that of the checkpoint


@pytest.mark.parametrize(("founded", "is_same"), [(True, False), (True, True), (False, False)])
def test_weights_of_a_checkpoint_are_not_overwritten_by_those_that_a_founder_began_with(
    tmp_path: Path, founded: bool, is_same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(Peer(LENGTH), tmp_path, save_steps=3).train()
    for directory in tmp_path.glob("checkpoint-*"):
        (directory / STATE_FILE).unlink()
    peer = Peer(LENGTH, at=1)
    peer.founded = founded
    again = trainer(peer, tmp_path, save_strategy="no")
    if founded and is_same:
        saved = load_file(tmp_path / "checkpoint-6" / "model.safetensors")
        monkeypatch.setattr(peer, "anchor_state_dict", lambda: saved)
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
        assert peer.losses
    elif founded:
        with pytest.raises(ConfigError, match=r"has no p2ptrain\.safetensors, and this peer has founded run"):
            again.train(resume_from_checkpoint=True)
    else:
        again.train(resume_from_checkpoint=True)
        assert again.model.transformer.wte.weight.mean() > 0.25  # that of the run


def test_a_real_peer_reads_its_part_of_a_checkpoint(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    directory = tmp_path / "checkpoint-0"
    directory.mkdir()
    with Pair(torch.nn.Linear(2, 2)) as pair:
        (peer,) = pair.peers
        P2PCallback(peer).on_save(arguments, TrainerState(), TrainerControl())
        # ConfigError if something is missing. It is not ahead of the run.
        assert not peer.load_state_dict(_read(directory / STATE_FILE))
