"""Local training: a model, its inner optimizer and its text. It does not use the network."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from p2ptrain.algorithms.metrics import sample_indices
from p2ptrain.errors import ConfigError
from p2ptrain.peer.sharding import fsdp_modules
from p2ptrain.settings.config import RunConfig
from p2ptrain.training.data import Corpus, RandomWindows, fixed_windows
from p2ptrain.training.data.tokenizer import IDS, Tokenizer
from p2ptrain.training.data.windows import ReadAhead
from p2ptrain.training.inner_optimizer import InnerOptimizer, lr_share
from p2ptrain.training.mfu import utilisation_of
from p2ptrain.training.models import context_length
from p2ptrain.training.parallel import average_gradients, own_values, whole, without_averaging, wrap
from p2ptrain.training.ranks import Ranks

# For the demo model and simulations: as much as 16 steps of 256 characters, which cost about six steps to evaluate.
EVAL_TOKENS = 4096
# Windows evaluated at once, or fewer where memory does not suffice.
EVAL_BATCH = 16
# Enough coordinates for a correlation to within a percent or two; 5 kB per line of the metrics file.
SAMPLED_WEIGHTS = 512
# Several ranks may halve the micro-batch only in their first steps. Memory that suffices for the second one, when the
# optimizer has its state, suffices for all.
PROBED_STEPS = 2
# Guess: after so many steps in a row without a finite gradient, training does not recover.
MAX_LOST_STEPS = 50

logger = logging.getLogger(__name__)


class Stopped(Exception):
    """A step or an evaluation was abandoned because `stop()` was true. The trainer is as it was before."""


def never() -> bool:
    return False


@dataclass(frozen=True)
class TrainingData:
    """The text that a trainer trains and evaluates on.

    Attributes:
        corpus: the text.
        spans: int64 (spans, 2), ranges of the training text to draw windows from (`Partition.spans`); None for all.
        tokenizer: tokenizer of the text, to count the bytes of the evaluated text.
        eval_tokens: tokens to evaluate on, rounded to windows; all held-out text if that is less.
    """

    corpus: Corpus
    spans: NDArray[np.int64] | None = None
    tokenizer: Tokenizer | None = None
    eval_tokens: int = EVAL_TOKENS


@dataclass(frozen=True)
class Execution:
    """Settings of this machine for computing steps.

    Attributes:
        micro_batch: windows per forward and backward pass; gradients of a step are accumulated. None: all of a step at
            once, and half as many after each time that memory does not suffice.
        most_at_once: windows with which `micro_batch` None and an evaluation begin, at most; None: as many as there
            are. The same on all ranks.
        precision: dtype of autocast; None for none.
        compiled: whether to train with torch.compile.
        read_ahead: whether to read the next batch in a thread.
    """

    micro_batch: int | None = None
    most_at_once: int | None = None
    precision: torch.dtype | None = None
    compiled: bool = False
    read_ahead: bool = False


class Trainer:
    """Trains a model on windows of text. It owns the optimizer; the caller owns the model.

    Attributes:
        context: tokens of a window.
        step_windows: windows of a step, over all ranks; eval_windows: windows of an evaluation.
        micro_batch: windows that this rank computes at once.
        bytes_per_token: bytes of UTF-8 per token of the evaluated text; None if that is not known.
        utilisation: share of the GPU's peak that one token a second takes (`mfu`); None if that is not known.
    """

    def __init__(
        self,
        model: nn.Module,
        data: TrainingData,
        run: RunConfig,
        *,
        batch_size: int,
        seed: int,
        execution: Execution | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """
        Args:
            model: maps int64 tokens (B, T) to logits (B, T, V); already on its device.
            run: gives the inner optimizer, its rates and schedule, and the gradient's limit.
            batch_size: windows of text per step, of this rank.
            seed: seeds this peer's windows and torch's global generator (dropout).
            ranks: train the model together, each on its own windows; all call every method. None: there is one.

        Raises:
            ConfigError: the text, or every span of it, is shorter than one window; or the held-out text is bad.
        """
        execution, corpus = execution or Execution(), data.corpus
        self.model = model
        self.run = run
        self.ranks = ranks or Ranks()
        self._seed = seed
        self._device = next(model.parameters()).device
        self.context = context = context_length(model)
        self.step_windows = batch_size * self.ranks.size
        windows = RandomWindows(corpus.training, context=context, batch_size=batch_size, seed=seed, spans=data.spans)
        self._data_digest = corpus.digest
        self._windows = ReadAhead(windows, pin=self._device.type == "cuda") if execution.read_ahead else windows
        self._parallel = wrap(model, self.ranks)
        self._is_sharded = bool(fsdp_modules(model))
        self._forward = cast(nn.Module, torch.compile(self._parallel)) if execution.compiled else self._parallel
        self._precision = execution.precision
        self._halves = execution.micro_batch is None
        self.micro_batch = min(batch_size, execution.micro_batch or execution.most_at_once or batch_size)
        self._probes_left = PROBED_STEPS if self._halves and self.ranks.size > 1 and not self._is_sharded else 0
        eval_count = max(1, round(data.eval_tokens / context))
        self._eval_windows = fixed_windows(corpus.held_out, context=context, count=eval_count)
        self.eval_windows = len(self._eval_windows[0])
        # Sharded ranks cannot halve it, so it is at most the micro-batch that the user chose.
        self._eval_batch = min(EVAL_BATCH, execution.most_at_once or EVAL_BATCH)
        if self._is_sharded:
            self._eval_batch = min(self._eval_batch, self.micro_batch)
        self.bytes_per_token = _bytes_per_token(data.tokenizer, self._eval_windows[1])
        self.utilisation = utilisation_of(model, self._device)
        self.optimizer = InnerOptimizer(model, run)
        self._lost_steps = 0
        torch.manual_seed(seed)

    def step(self, run_step: int, stop: Callable[[], bool] = never) -> tuple[float, int]:
        """Take one optimizer step at the given step of the run. Returns the loss in nats and the number of tokens.

        If the gradient is not finite, the weights stay as they are.

        Args:
            run_step: chooses the learning rate.
            stop: asked after each micro-batch except the last one.

        Raises:
            ConfigError: the gradient was not finite MAX_LOST_STEPS times in a row, the data is bad, or memory does not
                suffice.
            Stopped: `stop()` was true. The next step takes the same batch.
        """
        self.model.train()
        position, random_state = self._windows.state_dict(), self._random_state()
        inputs, targets = self._windows.next_batch()
        try:
            loss = self._accumulate(inputs, targets, stop)
        except Stopped:
            self.optimizer.zero_grad()
            self._windows.load_state_dict(position)
            self._load_random_state(random_state)
            raise
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.run.grad_clip or math.inf)
        if torch.isfinite(norm):
            with within_memory("the optimizer", self._device):
                self.optimizer.step(lr_share(self.run, run_step))
            self._lost_steps = 0
        else:
            self._count_lost_step(run_step)
        self.optimizer.zero_grad()
        return loss, inputs.numel()

    @torch.no_grad()
    def evaluate(self, stop: Callable[[], bool] = never) -> float:
        """Return the mean loss in nats on the fixed windows of held-out text.

        It does not use the compiled model, which torch.compile would compile once more. Raises Stopped if `stop()`,
        asked before each batch, is true, and ConfigError if memory does not suffice for one window.
        """
        self.model.eval()
        rank, size, count = self.ranks.rank, self.ranks.size, len(self._eval_windows[0])
        own = [part[rank::size] for part in self._eval_windows]
        done, total = 0, 0.0
        while done < math.ceil(count / size):  # as many batches on each rank
            if stop():
                raise Stopped
            inputs, targets = (part[done : done + self._eval_batch] for part in own)
            loss, fits = 0.0, True
            try:
                if len(inputs):
                    loss = self._loss(self.model, inputs, targets).item() * len(inputs)
                elif self._is_sharded:  # the other ranks need this one's part of the weights
                    self._loss(self.model, *(part[:1] for part in self._eval_windows))
            except RuntimeError as error:
                if not _is_out_of_memory(error):
                    raise
                if self._eval_batch == 1 or self._is_sharded:
                    fix = "train a smaller model" if self._eval_batch == 1 else "give a smaller --micro-batch"
                    raise ConfigError(f"evaluation: {self._device} is out of memory; {fix}") from error
                fits = False
            if self.ranks.any(not fits):
                self._eval_batch = self._halved(self._eval_batch, "to evaluate")
            else:
                total, done = total + loss, done + self._eval_batch
        return self.ranks.total(total)[0] / count

    @torch.no_grad()
    def sample_weights(self) -> list[float]:
        """SAMPLED_WEIGHTS weights, to six digits, at the same coordinates on every peer (for the live correlation)."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        starts = np.cumsum([0, *(parameter.numel() for parameter in parameters)])
        chosen = sample_indices(self.run.run_seed, int(starts[-1]), SAMPLED_WEIGHTS)
        values: list[float] = []
        for parameter, start in zip(parameters, starts[:-1], strict=True):
            inside = chosen[(chosen >= start) & (chosen < start + parameter.numel())] - start
            if self._is_sharded:
                values += own_values(parameter, inside, self.ranks)
            else:
                values += parameter.reshape(-1)[torch.from_numpy(inside).to(self._device)].tolist()
        values = self.ranks.total(*values) if self._is_sharded else values
        return [float(f"{value:.6g}") for value in values]

    def state_dict(self) -> dict[str, Any]:
        """All state that the next step of each rank depends on except the weights."""
        random_state = self._random_state()
        gathered = {name: self.ranks.gather(state) for name, state in random_state.items()}
        others = [{name: states[rank] for name, states in gathered.items()} for rank in range(1, self.ranks.size)]
        return {
            **whole(self.optimizer.state_dict(), self.ranks),
            "windows": self._windows.state_dict(),
            **random_state,
            "micro_batch": self.micro_batch,
            "other_ranks": others,
            "data": self._data_digest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of rank 0, with this trainer's seed: that of a copied state is another peer's.

        If the text has changed, a warning is logged and the new text is used: only the random windows depend on it.
        """
        self.optimizer.load_state_dict(state)
        rank, windows = self.ranks.rank, state["windows"]
        self._windows.load_state_dict({**windows, "seed": self._seed})
        if rank == 0 and self._data_digest and state.get("data") not in (None, "", self._data_digest):
            logger.warning(
                "--data: is another text than that of the checkpoint; batch %d and all later ones come from the new "
                "text. If it should be the same, end this peer with Ctrl-C, restore the data, and run the same command "
                "again",
                windows["position"],
            )
        ranks = [state, *state.get("other_ranks", ())]
        if rank < len(ranks):
            self._load_random_state(ranks[rank])
        if self._halves:  # this many windows fit, and another number would sum in another order
            self.micro_batch = min(self.micro_batch, state.get("micro_batch", self.micro_batch))

    def _random_state(self) -> dict[str, torch.Tensor]:
        """The random states that dropout uses. Batches depend only on the stream's seed and position."""
        state = {"torch_rng": torch.get_rng_state()}
        if self._device.type == "cuda":
            state["cuda_rng"] = torch.cuda.get_rng_state(self._device)
        elif self._device.type == "mps":
            state["mps_rng"] = torch.mps.get_rng_state()
        return state

    def _load_random_state(self, state: Mapping[str, Any]) -> None:
        torch.set_rng_state(state["torch_rng"])
        if self._device.type == "cuda" and "cuda_rng" in state:
            torch.cuda.set_rng_state(state["cuda_rng"], self._device)
        elif self._device.type == "mps" and "mps_rng" in state:
            torch.mps.set_rng_state(state["mps_rng"])

    def _accumulate(self, inputs: torch.Tensor, targets: torch.Tensor, stop: Callable[[], bool]) -> float:
        """Add up the gradients of a step's micro-batches, average them over the ranks. Returns this rank's mean loss.

        If memory does not suffice, it tries again with half as many windows at once. Several ranks do so together, and
        only in the first steps: in later ones they average while they compute, and none can try again alone. Raises
        Stopped, and ConfigError if one window is too many, or if their number is fixed.
        """
        probing = self._probes_left > 0
        loss: float | None = None
        while loss is None:
            try:
                # All ranks must make the same collective calls, whichever of them run out of memory.
                loss = self._backward(inputs, targets, never if probing else stop)
            except RuntimeError as error:
                if not _is_out_of_memory(error):
                    raise
                if fix := self._memory_fix(probing):
                    fault = f"--micro-batch {self.micro_batch}: {self._device} is out of memory"
                    raise ConfigError(f"{fault}; {fix}") from error
            if probing and self.ranks.any(loss is None):
                loss = None
            if loss is None:
                self.optimizer.zero_grad()
                self.micro_batch = self._halved(self.micro_batch, "(--micro-batch)")
        if probing:
            average_gradients(self.model.parameters(), self._parallel)
            self._probes_left -= 1
        return loss

    def _memory_fix(self, probing: bool) -> str:
        """What the user can do when memory does not suffice for a step; empty if the micro-batch can be halved."""
        if self.micro_batch == 1:
            return "train a smaller model"
        if self._is_sharded:
            return "give a smaller --micro-batch; auto cannot halve it with --fsdp"
        if not self._halves:
            return "give --micro-batch auto, or fewer"
        if self.ranks.size > 1 and not probing:
            return "give a smaller --micro-batch; auto cannot halve it after the first steps of several processes"
        return ""

    def _halved(self, windows: int, purpose: str) -> int:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        logger.warning("out of memory: %d windows at once from now on %s", windows // 2, purpose)
        return windows // 2

    def _loss(self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats of int64 (B, T) inputs and targets."""
        inputs = inputs.to(self._device, non_blocking=True)
        targets = targets.to(self._device, non_blocking=True)
        with self._autocast():
            logits = model(inputs)
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def _backward(self, inputs: torch.Tensor, targets: torch.Tensor, stop: Callable[[], bool]) -> float:
        """Run all micro-batches once. A method of its own, so that an error frees its variables, and so the graph."""
        total = torch.zeros((), device=self._device)
        parts = list(zip(*(torch.split(part, self.micro_batch) for part in (inputs, targets)), strict=True))
        for number, (some_inputs, some_targets) in enumerate(parts, 1):
            if number > 1 and stop():
                raise Stopped
            # The ranks average once, while the last backward pass computes.
            averages = number == len(parts) and not self._probes_left
            with nullcontext() if averages else without_averaging(self._parallel):
                loss = self._loss(self._forward, some_inputs, some_targets) * (len(some_inputs) / len(inputs))
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total.item()

    def _autocast(self) -> AbstractContextManager[object]:
        if self._precision is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._precision)

    def _count_lost_step(self, run_step: int) -> None:
        self._lost_steps += 1
        logger.warning("step %d: the gradient is not finite; update skipped", run_step)
        if self._lost_steps == MAX_LOST_STEPS:
            error = ConfigError(
                f"lr = {self.run.lr}: the gradient was not finite for {MAX_LOST_STEPS} steps in a row; "
                f"start a run with a lower --lr"
            )
            raise self.ranks.once(error)


def _bytes_per_token(tokenizer: Tokenizer | None, windows: torch.Tensor) -> float | None:
    if tokenizer is None or tokenizer.identity == IDS:
        return None
    texts = (tokenizer.decode(token for token in window if token != tokenizer.separator) for window in windows.tolist())
    return sum(len(text.encode()) for text in texts) / windows.numel()


@contextmanager
def within_memory(what: str, device: torch.device) -> Iterator[None]:
    """Raise ConfigError if the device has no memory for something whose size does not depend on the batch."""
    try:
        yield
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        fix = "train a smaller model, or end what else uses its memory"
        raise ConfigError(f"{what}: {device} is out of memory; {fix}") from error


def _is_out_of_memory(error: RuntimeError) -> bool:
    # Only CUDA has a class of its own; for the CPU and Apple's GPU torch raises plain RuntimeError.
    texts = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(text in str(error) for text in texts)
