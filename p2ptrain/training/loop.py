"""The training loop behind `p2ptrain join`: local steps, one `peer.step()` after each.

`training_steps` is a generator that yields after each step, so a thread or a simulation in virtual time can drive it.
`run_training` drives it on the calling thread and adds progress lines, checkpoints and an orderly shutdown.
`take_part` adds signals and sample texts, and is the same on all ranks of a peer.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import platform
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from p2ptrain.errors import CheckpointError, TransientError
from p2ptrain.formatting import count
from p2ptrain.protocol.exchange.types import StepReport
from p2ptrain.settings.model_defaults import model_defaults
from p2ptrain.settings.peer_config import PeerConfig
from p2ptrain.signals import TOGETHER_S, stop_on_signals
from p2ptrain.training import checkpoint
from p2ptrain.training.data.tokenizer import IDS
from p2ptrain.training.generation import generate_text
from p2ptrain.training.output_dir import to_continue
from p2ptrain.training.parallel import whole
from p2ptrain.training.progress import Evaluation, ProgressMeter, StepDone, TrainingProgress
from p2ptrain.training.ranks import Ranks
from p2ptrain.training.trainer import Stopped, Trainer, never

if TYPE_CHECKING:
    from p2ptrain.peer.group_peer import GroupPeer
    from p2ptrain.peer.peer import Peer
    from p2ptrain.training.job import Job

# Guesses: seconds between progress lines, and between those while the run's last round is awaited.
PROGRESS_INTERVAL_S = 5.0
WAITING_INTERVAL_S = 30.0
# Ctrl-C is noticed within this time during that wait.
POLL_S = 0.5
SAMPLE_TOKENS = 100

logger = logging.getLogger(__name__)


class SteppingPeer(Protocol):
    """The part of a `Peer` that `training_steps` uses; a simulated peer has it too."""

    @property
    def run_step(self) -> int: ...
    @property
    def finished(self) -> bool: ...
    def step(self, loss: float | None = None, samples: int = 0) -> StepReport: ...
    def finish_landing(self) -> bool: ...
    def record(self, event: str, /, **fields: Any) -> None: ...


def training_steps(
    peer: SteppingPeer, trainer: Trainer, *, eval_every: int, stop: Callable[[], bool] = never
) -> Generator[StepDone, None, None]:
    """Train until the run's length is reached or `stop()`, yielding after each step. Never waits for the network.

    A step in micro-batches, or an evaluation, that has begun when `stop()` becomes true is abandoned.
    """
    total_steps = trainer.run.total_steps
    while not stop() and not peer.finished and (total_steps == 0 or peer.run_step < total_steps):
        before, began_s = peer.run_step, time.perf_counter()
        try:
            loss, tokens = trainer.step(before, stop)
        except Stopped:
            return
        trained_s = time.perf_counter()
        report = peer.step(loss=loss if math.isfinite(loss) else None, samples=tokens)
        ended_s = time.perf_counter()
        # At multiples of the run's steps, not this peer's, so that the curves of all peers share their x values.
        is_due = before // eval_every != peer.run_step // eval_every
        evaluation = record_evaluation(peer, trainer, eval_every, stop) if is_due else None
        yield StepDone(peer.run_step, loss, tokens, report, ended_s - began_s, ended_s - trained_s, evaluation)


def record_evaluation(
    peer: SteppingPeer, trainer: Trainer, every: int, stop: Callable[[], bool] = never
) -> Evaluation | None:
    """Measure the loss on held-out text, record it with a sample of the weights, and return it.

    Returns None, and records nothing, if `stop()` became true meanwhile. `every`: steps between two measurements;
    observers use it to group the samples of different peers.
    """
    began_s = time.perf_counter()
    peer.finish_landing()
    try:
        loss = trainer.evaluate(stop)
    except Stopped:
        return None
    seconds = time.perf_counter() - began_s
    peer.record("eval", step=peer.run_step, loss=loss if math.isfinite(loss) else None)
    peer.record("sample", step=peer.run_step, every=every, values=trainer.sample_weights())
    return Evaluation(loss, seconds)


@dataclass(frozen=True)
class TrainingEnd:
    """Why training ended, and the held-out loss after the run's last round, in nats.

    `eval_loss` is None if the last round did not land, or the evaluation was interrupted.
    """

    reason: Literal["finished", "interrupted"]
    eval_loss: float | None = None


def run_training(
    peer: Peer | GroupPeer,
    trainer: Trainer,
    config: PeerConfig,
    *,
    out: Path,
    stop: Callable[[], bool],
    on_progress: Callable[[TrainingProgress], None],
    on_sample_due: Callable[[], None] = lambda: None,
    now: Callable[[], float] = time.monotonic,
) -> TrainingEnd:
    """Train until the run ends or `stop()` is true; then leave the run and write a checkpoint. Blocks until then.

    After an error, such as bad data, it also leaves, writes the checkpoint if there is one rank, and raises the error.

    Args:
        peer: has joined the run with the model of `trainer`.
        out: directory for checkpoints. If one cannot be written, an error is logged and training goes on.
        stop: true after a signal. Asked in and after every step and evaluation, and while the last round is awaited.
            All ranks get the same answers, and the same times from `now` (`Ranks.agreed`).
        on_progress: called every few seconds.
        on_sample_due: called every `config.sample_every` steps of the run.
        now: monotonic clock, in seconds.

    Raises:
        TransientError: the network side has ended, or the last checkpoint cannot be written.
    """
    saved_at: tuple[int, int] | None = None

    def save() -> bool:
        """Write a checkpoint, unless the newest one is of this step and round. Returns whether it is now."""
        nonlocal saved_at
        is_new = (peer.run_step, peer.round) != saved_at
        if is_new and save_checkpoint(peer, trainer, out, is_closed=config.network.key is not None):
            saved_at = peer.run_step, peer.round  # of the checkpoint, which may have landed a round first
        return saved_at == (peer.run_step, peer.round)

    try:
        eval_loss = _train(
            peer, trainer, config, save=save, stop=stop, on_progress=on_progress, on_sample_due=on_sample_due, now=now
        )
    except Exception:
        peer.leave("failed")
        try:
            if trainer.ranks.size == 1:  # other ranks may not be there to add their part
                save()
        except Exception as second:  # what broke training, such as a lost GPU, may break this too
            logger.error("no checkpoint could be made: %s", second)
        raise
    interrupted = stop() and not peer.finished
    error = _leave(peer, save, out, to_continue(config.out, out, peer.run.run_id), interrupted=interrupted)
    if error:
        raise trainer.ranks.once(TransientError(error))
    return TrainingEnd("interrupted" if interrupted else "finished", eval_loss)


def _train(
    peer: Peer | GroupPeer,
    trainer: Trainer,
    config: PeerConfig,
    *,
    save: Callable[[], bool],
    stop: Callable[[], bool],
    on_progress: Callable[[TrainingProgress], None],
    on_sample_due: Callable[[], None],
    now: Callable[[], float],
) -> float | None:
    """Train until the run ends, `stop()` is true or the network side fails. Returns `TrainingEnd.eval_loss`.

    `save` is called every `config.checkpoint_minutes`.
    """
    eval_every = config.eval_every or model_defaults(trainer.run.model).eval_every
    meter = ProgressMeter(peer, trainer, eval_every)
    meter.add_evaluation(record_evaluation(peer, trainer, eval_every, stop))
    line_s = saved_s = now()
    sampled = peer.run_step
    for done in _steps_to_the_end(peer, trainer, eval_every, stop, now):
        meter.add(done)
        if stop() or peer.failure:
            break
        if config.sample_every and done.run_step // config.sample_every != sampled // config.sample_every:
            on_sample_due()
            sampled = done.run_step
        if now() - line_s >= PROGRESS_INTERVAL_S:
            on_progress(meter.summary())
            line_s = now()
        if now() - saved_s >= 60 * config.checkpoint_minutes:
            if not save() and trainer.ranks.is_first:
                logger.warning("training goes on without this checkpoint")
            saved_s = now()
    is_merged, last = peer.finished, None
    if not stop() and not peer.failure:
        last = record_evaluation(peer, trainer, eval_every, stop)
        meter.add_evaluation(last)
    if meter.has_news:
        on_progress(meter.summary())
    return last.loss if last and is_merged else None


def _leave(peer: Peer | GroupPeer, save: Callable[[], bool], out: Path, hint: str, *, interrupted: bool) -> str | None:
    """Leave the run, and write a checkpoint. Returns what went wrong, with the `hint`; None if nothing did."""
    if interrupted:
        logger.info(
            "stopping at step %d: writing a checkpoint; another signal after %g s ends at once, without it",
            peer.run_step,
            TOGETHER_S,
        )
    # Ctrl-C also ends the libp2p daemon, which is no failure then.
    failure = None if interrupted else peer.failure
    is_saved, tried_at = False, None
    if not interrupted and not failure:
        # Save before leaving, which may take ten seconds, in which a signal may come. Other peers are served meanwhile.
        # In the other cases they should not wait for this disk.
        is_saved = save()
        tried_at = peer.run_step, peer.round
    why = "failed" if failure else "interrupted" if interrupted else "finished"
    peer.leave(why, landing=True)
    if tried_at != (peer.run_step, peer.round):  # the last round has landed meanwhile
        is_saved = save()
    if not is_saved:
        start = "from the checkpoint before" if checkpoint.checkpoints(out) else "from step 0"
        return (
            f"{why} at step {peer.run_step}, but no checkpoint could be written to {out}, for the reason above; mend "
            f"it, and {hint} {start}, or with the swarm's state if other peers train"
        )
    return f"cut off from the run: {failure}; {hint}" if failure else None


def _steps_to_the_end(
    peer: Peer | GroupPeer, trainer: Trainer, eval_every: int, stop: Callable[[], bool], now: Callable[[], float]
) -> Generator[StepDone, None, None]:
    """Train, yielding after each step, until the run's last round is resolved.

    Waits for that round as long as an attempt at one may take: it averages the whole model over links of any speed.
    """
    while True:
        yield from training_steps(peer, trainer, eval_every=eval_every, stop=stop)
        began_s, told_s, most_s = now(), 0.0, peer.run.round_timeout_s
        while True:
            if peer.finished or peer.failure or stop():
                return
            if peer.run_step < peer.run.total_steps:  # a round has set this peer back, so it trains on
                break
            waited_s = now() - began_s
            if waited_s >= most_s:
                logger.warning("the run's last round did not end within %.0f s; leaving without it", most_s)
                return
            if waited_s - told_s >= WAITING_INTERVAL_S:
                told_s = waited_s
                logger.info(
                    "waiting for the run's last round: %.0f s so far, at most %.0f s; Ctrl-C leaves without it",
                    waited_s,
                    most_s,
                )
            peer.wait_finished(POLL_S)


def save_checkpoint(peer: Peer | GroupPeer, trainer: Trainer, out: Path, *, is_closed: bool) -> bool:
    """All ranks: write a checkpoint of model, trainer and peer, on rank 0.

    `is_closed`: whether the run has a key, without which it must not be continued. Returns False (logged) if it cannot
    be written.
    """
    try:
        own = peer.state_dict()  # first, as it may land a round: the weights, the round and the anchor belong together
    except TimeoutError as error:
        logger.warning("no checkpoint was written now: %s", error)
        return False
    info = {
        "run": peer.run.to_dict(),
        "is_closed": is_closed,
        "peer_id": peer.peer_id,
        "round": peer.round,
        "anchor_hash": peer.anchor_hash,
        "genesis": own.get("genesis", ""),  # rank 0 has the peer's part
        "finished": peer.finished,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    model = whole(trainer.model.state_dict(), trainer.ranks)
    state = {"model": model, "trainer": trainer.state_dict(), "peer": own}
    is_written = False
    if trainer.ranks.is_first:
        try:
            path = checkpoint.save(out, checkpoint.Checkpoint(step=peer.run_step, info=info, state=state))
            logger.info("wrote checkpoint %s", path)
            is_written = True
        except CheckpointError as error:
            logger.error("%s", error)
    return trainer.ranks.any(is_written)


def take_part(
    job: Job,
    trainer: Trainer,
    ranks: Ranks,
    member: Peer | GroupPeer,
    *,
    say: Callable[[str], None],
    on_progress: Callable[[TrainingProgress], None],
) -> TrainingEnd:
    """All ranks: train until the run ends or the user stops it. Returns how it ended, and raises, as `run_training`.

    Args:
        member: has joined the run with the model of `trainer`.
        say: prints one line; called on rank 0.
        on_progress: called every few seconds on rank 0.
    """
    with stop_on_signals() as received, ranks.lost_ranks_reported():
        stop, now = ranks.agreed(received)
        config, tokenizer = job.config, job.tokenizer

        def sample() -> None:
            if not ranks.is_first:
                return
            try:
                written = generate_text(trainer.model, tokenizer, "\n", length=SAMPLE_TOKENS, temperature=0.8, seed=0)
                text = "".join(takewhile(lambda _: not received(), written))
            except Exception as error:  # a text is not worth a run
                logger.warning("no sample at step %d: %s", member.run_step, error)
            else:
                say(f"sample at step {member.run_step}: {text!r}")

        missing = ""
        if tokenizer.identity == IDS:
            missing = "the tokenizer of these ids is not known; name it with --tokenizer"
        elif config.fsdp == "on":
            missing = "the model is sharded (--fsdp)"
        if config.sample_every and missing:
            say(f"--sample-every: not used, because {missing}")
            config = dataclasses.replace(config, sample_every=0)
        say(_size_line(trainer))
        return run_training(
            member, trainer, config, out=job.out, stop=stop, now=now, on_progress=on_progress, on_sample_due=sample
        )


def _size_line(trainer: Trainer) -> str:
    """The model's size and a step's. With a large model, minutes pass before the next line."""
    number = sum(parameter.numel() for parameter in trainer.model.parameters())
    size = f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.1f}M" if number >= 1e6 else f"{number:,}"
    windows = count(trainer.step_windows, "window")
    at_once = trainer.micro_batch * trainer.ranks.size
    parts = f", {at_once:,} at once" if at_once < trainer.step_windows else ""
    return (
        f"{size} parameters; a step is {windows} of {trainer.context:,} tokens{parts}; evaluating on "
        f"{trainer.eval_windows * trainer.context:,} held-out tokens first"
    )
