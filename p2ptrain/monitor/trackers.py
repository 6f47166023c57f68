"""A peer's figures, and those of its swarm, in TensorBoard, Weights & Biases or Trackio: `p2ptrain join --log`."""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from p2ptrain.error_log import ErrorLog
from p2ptrain.errors import ConfigError
from p2ptrain.settings.extras import require_extra

logger = logging.getLogger(__name__)

# Steps are averaged over this time: a fast model takes hundreds a second.
MEAN_S = 2.0
# Most events that wait for a slow tracker; further ones are lost.
MAX_WAITING = 1000
CLOSE_S = 10.0

Values = dict[str, float]


class Backend(Protocol):
    """The library of a tracker."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


def open_tracker(name: str, out: Path, run_id: str) -> Tracker:
    """Open a tracker (`--log`) for the peer with this output directory.

    Raises ConfigError if its package is missing, or it cannot be opened. Blocks while wandb connects.
    """
    require_extra(name, f"--log {name}")
    try:
        backend: Backend = _TensorBoard(out) if name == "tensorboard" else _WandbLike(name, out, run_id)
    except Exception as error:  # the libraries raise anything
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"--log {name}: cannot be opened ({text})") from error
    return Tracker(backend)


class Tracker:
    """A sink that gives numbers to a tracker in a thread of its own. `write` never blocks."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._queue: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue(MAX_WAITING)
        self._errors = ErrorLog(logger)
        self._thread = threading.Thread(target=self._run, name="p2ptrain-tracker", daemon=True)
        self._thread.start()

    def write(self, event: str, /, **fields: Any) -> None:
        try:
            self._queue.put_nowait((event, fields))
        except queue.Full:
            self._errors.note("the tracker does not keep up; figures are lost", queue.Full())

    def close(self) -> None:
        """Log the events that still wait, without waiting for it: a peer that leaves has a checkpoint to write."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait((_END, {}))

    def join(self) -> None:
        """Close, and wait until all is logged. Blocks for up to twice CLOSE_S."""
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._queue.put((_END, {}), timeout=CLOSE_S)
                self._thread.join(CLOSE_S)

    def _run(self) -> None:
        figures = Figures()
        while True:
            event, fields = self._queue.get()
            try:
                for step, values in figures.of(event, fields, time.monotonic()):
                    self._backend.log(step, values)
                if event == _END:
                    self._backend.close()
            except Exception as error:  # a tracker must not end a peer
                self._errors.note("figures for the tracker are lost", error)
            if event == _END:
                return


_END = "end of the events"


class Figures:
    """Turns a peer's events into numbers by step. Pure: the caller gives the time."""

    def __init__(self) -> None:
        self._step = 0
        self._since_s = -math.inf
        self._trained_s = 0.0
        self._losses: list[float] = []
        self._tokens = 0
        self._held_s = 0.0

    def of(self, event: str, fields: Mapping[str, Any], now: float) -> list[tuple[int, Values]]:
        """The numbers to log for an event, with their step; `now` in seconds of any clock."""
        match event:
            case "step":
                return self._of_step(fields, now)
            case "eval":
                # The time since the last step was not training.
                self._since_s += now - self._trained_s
                self._trained_s = now
                if not isinstance(fields.get("loss"), (int, float)):
                    return []
                self._step, loss = max(self._step, int(fields.get("step") or 0)), float(fields["loss"])
                return [(self._step, {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))})]
            case "round" if fields["status"] != "skipped":
                named = {"group_size": "contributors", "wall_s": "seconds", "stall_s": "held_s", "cosine": "cosine"}
                values = {f"round/{name}": float(fields[key]) for key, name in named.items()}
                return [(self._step, {"round/number": float(fields["round"]), **values})]
            case "peers":
                return [(self._step, {"swarm/peers": 1.0 + len(fields["alive"])})]
            case "fragments":
                skipped = sum(fields["skipped"].values())
                values = {"sent": fields["sent"], "merged": fields["merged"], "skipped": skipped}
                return [(self._step, {f"fragments/{name}": float(number) for name, number in values.items()})]
            case "pair" if fields["spread"] is not None:
                return [(self._step, {"swarm/anchor_spread": float(fields["spread"])})]
            case event if event == _END:
                return self._mean(now)
        return []

    def _of_step(self, fields: Mapping[str, Any], now: float) -> list[tuple[int, Values]]:
        if self._since_s == -math.inf:
            self._since_s = now
        self._trained_s = now
        self._step = max(self._step, int(fields["step"]))
        if fields["loss"] is not None:
            self._losses.append(float(fields["loss"]))
        self._tokens += int(fields["tokens"])
        self._held_s += float(fields["exchange_s"])
        return self._mean(now) if now - self._since_s >= MEAN_S else []

    def _mean(self, now: float) -> list[tuple[int, Values]]:
        if not self._losses:
            return []
        seconds = max(now - self._since_s, 1e-9)
        values = {
            "train/loss": sum(self._losses) / len(self._losses),
            "train/tokens_per_s": self._tokens / seconds,
            "train/exchange_share": self._held_s / seconds,
        }
        self._losses, self._tokens, self._held_s, self._since_s = [], 0, 0.0, now
        return [(self._step, values)]


class _TensorBoard:
    def __init__(self, out: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(out / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WandbLike:
    """Weights & Biases, or Trackio, which has the same functions. The peers of a run are one group."""

    def __init__(self, name: str, out: Path, run_id: str) -> None:
        self._library = importlib.import_module(name)
        self._library.init(project="p2ptrain", group=run_id, name=out.resolve().name)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # As a value, because their own step may not go back; a peer's step may, after a round.
        self._library.log({**values, "step": step})

    def close(self) -> None:
        self._library.finish()
