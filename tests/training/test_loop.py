"""The training loop: what it records, when it stops, and the checkpoints that it writes."""

from __future__ import annotations

import errno
import itertools
import logging
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from p2ptrain.errors import ConfigError, TransientError
from p2ptrain.settings.config import RunConfig
from p2ptrain.settings.peer_config import PeerConfig
from p2ptrain.training import checkpoint, loop
from p2ptrain.training.data import Corpus
from p2ptrain.training.data.token_files import TokenFile, TokenFiles
from p2ptrain.training.loop import run_training, training_steps
from p2ptrain.training.models import GPT, GPTConfig
from p2ptrain.training.progress import TrainingProgress
from p2ptrain.training.trainer import SAMPLED_WEIGHTS, Execution, Trainer, TrainingData
from tests.fakes import FakePeer
from tests.training.characters import encode

CORPUS = Corpus(training=encode("abc def ghi. " * 100), held_out=encode("abc def. " * 10))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def _pair(
    total_steps: int = 12, *, corpus: Corpus = CORPUS, read_ahead: bool = False, **run_settings: int
) -> tuple[FakePeer, Trainer]:
    run = RunConfig(total_steps=total_steps, sync_every=run_settings.pop("sync_every", 5), warmup_steps=2)
    model = GPT(GPTConfig(vocab_size=98, layers=1, heads=1, width=8, context=8))
    return FakePeer(run), Trainer(
        model, TrainingData(corpus), run, batch_size=1, seed=0, execution=Execution(read_ahead=read_ahead)
    )


def _clock(step_s: float = 1.0) -> Callable[[], float]:
    """A clock that advances by `step_s` each time it is read."""
    ticks = itertools.count()
    return lambda: next(ticks) * step_s


def _run(
    peer: FakePeer,
    trainer: Trainer,
    out: Path,
    *,
    stop: Callable[[], bool] = lambda: False,
    config: PeerConfig = PeerConfig(eval_every=4),  # noqa: B008 (frozen)
    step_s: float = 1.0,
) -> tuple[str, list[TrainingProgress]]:
    lines: list[TrainingProgress] = []
    end = run_training(peer, trainer, config, out=out, stop=stop, on_progress=lines.append, now=_clock(step_s))
    return end.reason, lines


def test_it_trains_until_the_run_ends_and_leaves_a_checkpoint(tmp_path: Path) -> None:
    peer, trainer = _pair()
    reason, _ = _run(peer, trainer, tmp_path)
    assert (reason, peer.left, peer.run_step) == ("finished", "finished", 12)
    saved = checkpoint.load_newest(tmp_path)
    assert saved is not None
    assert saved.step == 12
    assert RunConfig.from_dict(saved.info["run"]) == peer.run
    assert saved.info["peer_id"] == "QmFake"
    assert saved.info["round"] == 2
    assert saved.state["peer"]["step"] == 12
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(saved.state["model"][name], tensor)


def test_the_peer_is_told_loss_and_tokens_of_every_step(tmp_path: Path) -> None:
    peer, trainer = _pair()
    steps = list(training_steps(peer, trainer, eval_every=100))
    assert peer.losses == [done.loss for done in steps]
    assert [done.run_step for done in steps] == list(range(1, 13))
    assert {done.tokens for done in steps} == {8}


def test_evaluations_and_weights_are_recorded_together_at_the_runs_steps(tmp_path: Path) -> None:
    peer, trainer = _pair()
    peer.run_step = 2  # a joiner
    _run(peer, trainer, tmp_path)
    assert [(event, fields["step"]) for event, fields in peer.events] == [
        (event, step) for step in (2, 4, 8, 12, 12) for event in ("eval", "sample")
    ]
    for event, fields in peer.events:
        assert len(fields["values"]) == SAMPLED_WEIGHTS if event == "sample" else fields["loss"] > 0


def test_progress_sums_up_what_happened_since_the_last_line(tmp_path: Path) -> None:
    peer, trainer = _pair(total_steps=40)
    reason, lines = _run(peer, trainer, tmp_path)
    assert reason == "finished"
    assert len(lines) > 2
    assert lines[-1].run_step == 40
    assert sum(line.sent for line in lines) == 80
    assert sum(line.merged for line in lines) == 40
    assert sum(line.skipped["stale"] for line in lines) == 40
    first = lines[0]
    assert (first.total_steps, first.peers) == (40, 2)
    assert first.loss == pytest.approx(sum(peer.losses[: first.run_step]) / first.run_step)
    assert first.tokens_per_s > 0
    assert math.isfinite(first.eval_loss)
    assert first.mfu is None


def test_evaluations_are_in_the_time_left_and_not_in_the_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer, trainer = _pair(total_steps=40)
    now_s = 0.0

    def taking(seconds: float, action: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: object) -> Any:
            nonlocal now_s
            now_s += seconds
            return action(*arguments)

        return timed

    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now_s))
    monkeypatch.setattr(trainer, "step", taking(0.5, trainer.step))
    monkeypatch.setattr(trainer, "evaluate", taking(30.0, trainer.evaluate))
    _, lines = _run(peer, trainer, tmp_path)
    assert {line.tokens_per_s for line in lines} == {8 / 0.5}
    left = [0.5 * (40 - line.run_step) + 30 * (11 - line.run_step // 4) for line in lines]
    assert [line.left_s for line in lines] == pytest.approx(left)


def test_progress_has_the_share_of_a_known_gpus_peak(tmp_path: Path) -> None:
    peer, trainer = _pair()
    trainer.utilisation = 1e-6
    _, lines = _run(peer, trainer, tmp_path)
    assert [line.mfu for line in lines] == [pytest.approx(1e-6 * line.tokens_per_s) for line in lines]


def test_a_signal_stops_it_after_the_step(tmp_path: Path) -> None:
    peer, trainer = _pair(total_steps=0)
    reason, _ = _run(peer, trainer, tmp_path, stop=lambda: peer.run_step >= 7)
    assert (reason, peer.left, peer.run_step) == ("interrupted", "interrupted", 7)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["checkpoint-7"]


def test_a_signal_after_the_last_step_changes_nothing(tmp_path: Path) -> None:
    peer, trainer = _pair()
    reason, _ = _run(peer, trainer, tmp_path, stop=lambda: peer.run_step >= 12)
    assert reason == "finished"


@pytest.mark.parametrize(("stops_at", "left"), [(100, None), (7, "interrupted")])
def test_it_leaves_before_it_writes_unless_the_run_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops_at: int, left: str | None
) -> None:
    """At the end of the run, leaving may take ten seconds, in which a signal may come."""
    peer, trainer = _pair()
    left_at_save: list[str | None] = []
    monkeypatch.setattr(checkpoint, "save", lambda out, saved: left_at_save.append(peer.left))
    _run(peer, trainer, tmp_path, stop=lambda: peer.run_step >= stops_at)
    assert left_at_save == [left]


def test_a_last_round_that_lands_while_the_peer_leaves_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, trainer = _pair()
    monkeypatch.setattr(FakePeer, "round", property(lambda peer: 0 if peer.left is None else 1))
    rounds: list[int] = []
    monkeypatch.setattr(checkpoint, "save", lambda out, saved: rounds.append(saved.info["round"]))
    _run(peer, trainer, tmp_path, stop=lambda: False)
    assert rounds == [0, 1]


def test_a_checkpoint_is_not_written_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal while one is written ends training right after it."""
    peer, trainer = _pair()
    written: list[int] = []
    monkeypatch.setattr(checkpoint, "save", lambda out, saved: written.append(saved.step) or out)
    reason, _ = _run(peer, trainer, tmp_path, config=PeerConfig(checkpoint_minutes=0.01), stop=lambda: bool(written))
    assert (reason, written) == ("interrupted", [1])


class Signal:
    """A signal that arrives at the `at`-th of some calls."""

    def __init__(self, at: int) -> None:
        self.calls, self.at = 0, at

    def call(self, *arguments: object) -> None:
        self.calls += 1

    def __call__(self) -> bool:
        return self.calls >= self.at


@pytest.mark.parametrize("at", [1, 3, 6, 10])
def test_a_signal_in_an_evaluation_ends_it(tmp_path: Path, at: int) -> None:
    """In the first one, in one on the way, and in the last one."""
    peer, trainer = _pair()
    trainer._eval_batch = 4  # 12 windows of 8: three batches, at steps 0, 4, 8, 12 and 12
    signal = Signal(at)
    trainer.model.register_forward_pre_hook(lambda model, _: None if model.training else signal.call())
    reason, _ = _run(peer, trainer, tmp_path, stop=signal)
    assert signal.calls == at
    assert (reason, peer.run_step) == ("interrupted", 4 * ((at - 1) // 3)) if at < 10 else ("finished", 12)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == [f"checkpoint-{peer.run_step}"]
    assert len([event for event, _ in peer.events if event == "eval"]) == at // 3


def test_bad_data_is_an_error_after_the_checkpoint_and_its_batch_is_the_next_one(tmp_path: Path) -> None:
    good = CORPUS.training
    path = tmp_path / "train.bin"
    bad = np.array(good, dtype="<u2")
    bad[::7] = 98
    ids = np.concatenate([good, bad]).astype("<u2")
    ids.tofile(path)
    tokens = TokenFiles([TokenFile(path, ids, 0)], 98)
    for read_ahead in (False, True):
        peer, trainer = _pair(corpus=Corpus(tokens, CORPUS.held_out), read_ahead=read_ahead)
        with pytest.raises(
            ConfigError, match=r"train\.bin, token [\d,]+ \(byte [\d,]+\): id 98 is beyond the vocabulary of 98"
        ):
            _run(peer, trainer, tmp_path / "out")
        assert peer.left == "failed"
        saved = checkpoint.load_newest(tmp_path / "out")
        assert saved is not None
        assert saved.step == peer.run_step == saved.state["trainer"]["windows"]["position"] == len(peer.losses)


def test_an_error_that_spoils_the_checkpoint_too_is_the_one_that_is_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    peer, trainer = _pair()

    def lost(*arguments: object) -> None:
        if peer.run_step == 3:
            raise RuntimeError("CUDA error: device lost")

    trainer.model.register_forward_pre_hook(lost)
    trainer.state_dict = lambda: lost() or {}  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="device lost"):
        _run(peer, trainer, tmp_path)
    assert peer.left == "failed"
    assert "no checkpoint could be made: CUDA error: device lost" in caplog.messages


def test_checkpoints_are_written_on_the_way(tmp_path: Path) -> None:
    peer, trainer = _pair(total_steps=20)
    _run(peer, trainer, tmp_path, config=PeerConfig(checkpoint_minutes=0.25))
    found = checkpoint.checkpoints(tmp_path)
    assert found[0].name == "checkpoint-20"
    assert len(found) == 3


def test_a_full_disk_does_not_stop_training_but_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    peer, trainer = _pair(total_steps=20)
    with caplog.at_level(logging.WARNING):
        with pytest.raises(
            TransientError, match=r"finished at step 20, but no checkpoint could be .* to continue from step 0, or"
        ):
            _run(peer, trainer, tmp_path, config=PeerConfig(checkpoint_minutes=0.25))
    assert (peer.left, peer.run_step) == ("finished", 20)
    assert len(caplog.messages) > 1
    *during, last = caplog.messages
    assert during.count("training goes on without this checkpoint") == len(during) / 2
    assert all("No space left on device" in message for message in [*during[::2], last])
    (tmp_path / "checkpoint-4").mkdir()
    with pytest.raises(TransientError, match="to continue from the checkpoint before, or with the swarm's state"):
        _run(*_pair(), tmp_path)


def test_the_last_round_is_waited_for_but_not_for_ever(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Waiting(FakePeer):
        waits = 0
        finished = False

        def wait_finished(self, timeout_s: float) -> bool:
            assert timeout_s <= 1
            self.waits += 1
            self.finished = self.waits == self.ends_after
            return self.finished

    for ends_after, warnings in ((3, 0), (10**9, 1)):
        _, trainer = _pair()
        peer = Waiting(trainer.run)
        peer.ends_after = ends_after
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert _run(peer, trainer, tmp_path)[0] == "finished"
        assert peer.run_step == 12
        # As long as an attempt at a round may take, by a clock of a second for each look.
        assert peer.waits == 3 or peer.run.round_timeout_s - 2 <= peer.waits <= peer.run.round_timeout_s
        assert len(caplog.messages) == warnings


def test_who_waits_long_for_the_last_round_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Waiting(FakePeer):
        waits = 0
        finished = False

        def wait_finished(self, timeout_s: float) -> bool:
            self.waits += 1
            self.finished = self.waits == 70
            return self.finished

    _, trainer = _pair()
    with caplog.at_level(logging.INFO, loop.__name__):
        assert _run(Waiting(trainer.run), trainer, tmp_path)[0] == "finished"
    told = [line for line in caplog.messages if "last round" in line]
    assert len(told) == 2
    assert "30 s so far, at most 1800 s" in told[0]


def test_a_checkpoint_whose_state_lands_a_round_counts_as_written(tmp_path: Path) -> None:
    """As `Peer.state_dict` may do."""

    class Landing(FakePeer):
        rounds = 0

        @property
        def round(self) -> int:
            return self.rounds

        def state_dict(self) -> dict[str, Any]:
            self.rounds = 1
            return super().state_dict()

    _, trainer = _pair()
    peer = Landing(trainer.run)
    assert _run(peer, trainer, tmp_path, stop=lambda: peer.run_step == 3)[0] == "interrupted"
    saved = checkpoint.load_newest(tmp_path)
    assert saved is not None
    assert (saved.step, saved.info["round"], saved.info["finished"]) == (3, 1, False)


def test_a_signal_ends_the_wait_for_the_last_round(tmp_path: Path) -> None:
    class Waiting(FakePeer):
        waits = 0
        finished = False

        def wait_finished(self, timeout_s: float) -> bool:
            self.waits += 1
            return False

    _, trainer = _pair()
    peer = Waiting(trainer.run)
    assert _run(peer, trainer, tmp_path, stop=lambda: peer.waits == 2)[0] == "interrupted"
    assert (peer.waits, peer.left) == (2, "interrupted")
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["checkpoint-12"]


def test_a_fast_peer_that_a_round_puts_back_trains_on(tmp_path: Path) -> None:
    class Fast(FakePeer):
        puts_back = 1

        @property
        def finished(self) -> bool:
            return self.puts_back == 0 and super().finished

        def wait_finished(self, timeout_s: float) -> bool:
            self.puts_back, self.run_step = 0, 9
            return False

    _, trainer = _pair()
    peer = Fast(trainer.run)
    assert _run(peer, trainer, tmp_path)[0] == "finished"
    assert (peer.run_step, len(peer.losses)) == (12, 12 + 3)


def test_a_peer_that_is_cut_off_saves_and_says_so(tmp_path: Path) -> None:
    peer, trainer = _pair(total_steps=0)

    class CutOff(FakePeer):
        @property
        def failure(self) -> Exception | None:
            return OSError("the daemon has died") if self.run_step >= 5 else None

    peer = CutOff(trainer.run)
    with pytest.raises(TransientError, match=f"the daemon has died; run it again with --out {tmp_path} to continue"):
        _run(peer, trainer, tmp_path)
    assert peer.left == "failed"
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["checkpoint-5"]
    # No failure after Ctrl-C, which a terminal sends to the daemon too.
    assert _run(CutOff(trainer.run), trainer, tmp_path, stop=lambda: True)[0] == "interrupted"


def test_a_checkpoint_goes_on_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    peer, trainer = _pair(total_steps=20)
    start = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    _run(peer, trainer, tmp_path / "straight")

    first, trainer = _pair(total_steps=20)
    trainer.model.load_state_dict(start)
    _run(first, trainer, tmp_path / "halves", stop=lambda: first.run_step >= 10)
    saved = checkpoint.load_newest(tmp_path / "halves")
    assert saved is not None
    _, trainer = _pair(total_steps=20)
    trainer.model.load_state_dict(saved.state["model"])
    trainer.load_state_dict(saved.state["trainer"])
    second = FakePeer(trainer.run, saved.state["peer"])
    _run(second, trainer, tmp_path / "halves")

    assert first.losses + second.losses == peer.losses
