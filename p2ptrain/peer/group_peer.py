"""One peer that consists of several processes: a process group, such as the GPUs of one machine.

Only rank 0 is on the network; it holds the `Peer`. The run sees one peer, with the samples of all ranks.

If each rank has the whole model, DistributedDataParallel or a similar wrapper keeps the weights of all ranks equal
between exchanges. After each exchange rank 0 sends the other ranks what has changed: the blocks of merged fragments,
O(pN), or all weights after a round. If FSDP2 has sharded the model, the other ranks read and write their row shards for
rank 0 during the exchange (`sharded_view.py`).

Every method documented with "all ranks" is collective: all ranks must call it, and it waits for the other ranks, at
most as long as the timeout of the process group.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from p2ptrain import errors
from p2ptrain.algorithms.blocks import BLOCK
from p2ptrain.errors import ConfigError, PeerLostError
from p2ptrain.peer.model_layout import ModelParts
from p2ptrain.peer.peer import Peer
from p2ptrain.peer.process_group import ProcessGroup
from p2ptrain.peer.sharded_view import ShardedView
from p2ptrain.peer.step_values import plain_loss, plain_samples
from p2ptrain.protocol.exchange.types import Changes, RoundReport, StepReport
from p2ptrain.settings.config import RunConfig

T = TypeVar("T")

# While rank 0 waits for a round, it tells the other ranks so at this interval: well below any group's timeout.
TELL_EVERY_S = 1.0
# Attributes of rank 0's peer that all ranks have.
_POSITION = ("alive", "round", "run_step", "finished", "anchor_hash")
# Errors of rank 0 that the other ranks raise with the same class, so that a program can catch them on all ranks.
_SHARED_ERRORS: dict[str, type[Exception]] = {
    name: kind
    for name, kind in {**vars(errors), "TimeoutError": TimeoutError}.items()
    if isinstance(kind, type) and issubclass(kind, ConfigError | TimeoutError)
}


class GroupPeer:
    """The peer of a process group; each rank has this object. Created by `p2ptrain.join(…, process_group=…)`.

    A context manager that leaves the run at the end of its block. If the block ends without an exception, all ranks
    must reach its end.

    Attributes:
        peer: the `Peer` on rank 0; None on the other ranks.
        rank, size: number of this process in the group, and number of processes.
        data_seed: a seed for this process's share of the data; differs between ranks.
        run, peer_id, maddrs, founded: as those of a `Peer`.
        alive, round, run_step, finished, anchor_hash, failure: likewise, as of the last collective call.
    """

    alive: list[str]
    round: int
    run_step: int
    finished: bool
    anchor_hash: str
    failure: Exception | None

    def __init__(
        self,
        model: torch.nn.Module,
        group: dist.ProcessGroup,
        enter: Callable[[ModelParts], Peer] | None,
        *,
        device: torch.device,
    ) -> None:
        """All ranks: join the run, and download its weights and buffers. Blocks as long as `enter` on rank 0.

        Args:
            model: the same on each rank, or sharded over the ranks by `fully_shard`.
            group: its rank 0 is on the network.
            enter: joins the run with the parts of `model`; called on rank 0, and may be None on the others.
            device: device of the tensors that the group's backend transfers.

        Raises:
            ConfigError: on all ranks, if the model of one of them cannot be trained or is not that of rank 0.
            PeerLostError: as `step`.
            Exception: on all ranks, if `enter` raises on rank 0; of which class, says `load_state_dict`.
        """
        self.rank, self.size = group.rank(), group.size()
        self.peer: Peer | None = None
        self._ranks = ProcessGroup(group, device)
        try:
            self._parts = ModelParts(model, self._ranks)
            view = self._parts.view
            self._sharded = view if isinstance(view, ShardedView) else None
            settled = self._told("join", self._on_rank_0("join", lambda: self._enter(enter), {}))
            self.run = RunConfig.from_dict(settled["run"])
            self.peer_id: str = settled["peer_id"]
            self.maddrs: list[str] = settled["maddrs"]
            self.founded = bool(settled["founded"])
            self.data_seed = self.run.data_seed(f"{self.peer_id}/{self.rank}" if self.rank else self.peer_id)
            self._parts.load_buffers(self._ranks.tell_bytes(self._parts.buffers()), of_own_rank=True)
            self._follow("join", changes=Changes(everything=True))
        except BaseException as error:
            self.leave(type(error).__name__)
            self._ranks.close()
            raise

    def __enter__(self) -> GroupPeer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None:
            self.leave(kind.__name__)
            self._ranks.close()  # the others notice at once
            return
        self.leave(landing=True)
        self._ranks.settle()
        self._ranks.close()

    def step(self, loss: float | None = None, samples: int = 0) -> StepReport:
        """All ranks: exchange with the other peers; call it once after every optimizer step.

        Args:
            loss: this rank's training loss; the mean over the ranks is recorded.
            samples: how much this rank trained on; the sum over all ranks is the weight of this peer in rounds.

        Returns:
            The report of rank 0. `exchange_s` includes the wait for the other ranks.

        Raises:
            PeerLostError: a rank has ended, or did not make this call within the timeout of the process group. The
                peer leaves the run at the end of the `with` block.
            ConfigError: on all ranks, if on one of them `loss` or `samples` is not a valid number, or the model's
                trainable parameters are no longer those that it joined with; or if the samples of all ranks are
                more than 2**32.
        """
        start = time.monotonic()
        number, own_loss, refused = 0, None, ""
        try:
            number, own_loss = plain_samples(samples), plain_loss(loss)
            self._parts.check_in_place()
        except ConfigError as error:
            refused = str(error)
        # A rank that raised before this would let the others wait for it. They wait once, for the report.
        totals = self._ranks.total_on_0(
            own_loss or 0.0, float(own_loss is not None), float(number), float(bool(refused))
        )

        def exchange() -> StepReport:
            total_loss, losses, total, refusals = totals
            if refusals:
                raise ConfigError("another rank of this process group has refused its step(): see its error")
            mean_loss = total_loss / losses if losses else None
            return self._peer.step_checked(mean_loss, plain_samples(int(total)), start)

        try:
            report = self._follow("step", self._on_rank_0("step", exchange, StepReport()))
        except ConfigError:
            if not refused:
                raise
            raise ConfigError(refused) from None
        return dataclasses.replace(report, exchange_s=time.monotonic() - start)

    def wait_finished(self, timeout_s: float | None = None) -> bool:
        """All ranks: as `Peer.wait_finished`, with the `timeout_s` of rank 0."""
        deadline = time.monotonic() + (self.run.round_timeout_s if timeout_s is None else timeout_s)

        def wait() -> bool:
            left_s = deadline - time.monotonic()
            finished = self._peer.wait_finished(min(left_s, TELL_EVERY_S))
            return not finished and left_s > TELL_EVERY_S and self._peer.failure is None

        waiting = True
        while waiting:
            waits = self._on_rank_0("wait_finished", wait, True)
            self._follow("wait_finished")
            waiting = bool(self._ranks.tell({"waiting": waits})["waiting"])
        return self.finished

    def finish_landing(self) -> bool:
        """As `Peer.finish_landing`. Nothing is left to land here: in a process group, a round lands in one step."""
        return True

    def record(self, event: str, /, **fields: Any) -> None:
        """Append an event to the metrics stream of rank 0; does nothing on the other ranks."""
        if self.peer is not None:
            self.peer.record(event, **fields)

    def state_dict(self) -> dict[str, Any]:
        """All ranks: this peer's part of a checkpoint, as `Peer.state_dict`, on rank 0; empty on the other ranks.

        Raises as `load_state_dict`, with the errors of `Peer.state_dict`. After the `with` block, ranks call it alone.
        """
        if self._ranks.closed:
            return {} if self.peer is None else self.peer.state_dict()
        state: dict[str, Any] = self._on_rank_0("state_dict", lambda: self._peer.state_dict(), {})
        self._follow("state_dict")
        return state

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """All ranks: `Peer.load_state_dict` with the state given on rank 0. Waits until it is in force.

        Raises its error on all ranks: on the others with the same class and text if it is a ConfigError or
        TimeoutError, and as a PeerLostError otherwise.
        """
        taken = self._on_rank_0("load_state_dict", lambda: self._peer.load_state_dict(state), False)
        taken = bool(self._told("load_state_dict", {"taken": taken})["taken"])
        self._follow("load_state_dict")
        return taken

    def shares_weights_with(self, model: torch.nn.Module) -> bool:
        """As `Peer.shares_weights_with`, for the model of this rank."""
        return self._parts.shares_weights_with(model)

    def anchor_state_dict(self) -> dict[str, torch.Tensor]:
        """All ranks: the weights of the last round by parameter name, as float32 CPU tensors.

        Of a sharded model, rank 0 returns the whole parameters, and the other ranks an empty dictionary.
        """
        none: dict[str, torch.Tensor] = {}
        anchor = self._on_rank_0("anchor_state_dict", lambda: self._peer.anchor_state_dict(), none)
        self._follow("anchor_state_dict")  # `anchor_hash` is of this anchor now
        if self._sharded is not None:
            return anchor
        flat = torch.zeros(self._parts.space.num_blocks, BLOCK, dtype=torch.float32, device="cpu")
        if self.peer is not None:
            for name, values in self._parts.unflatten(flat).items():
                values.copy_(anchor[name])
        self._ranks.copy(flat)
        return self._parts.unflatten(flat)

    def leave(self, reason: str = "done", *, landing: bool = False) -> None:
        """On rank 0, tell the other peers and end the network side; does nothing on the other ranks.

        Args:
            reason: for the records of all peers.
            landing: let a round that is being committed change the weights of all ranks, as the end of the `with` block
                does. Then all ranks must call this. Without it, such a round does not change a sharded model.
        """
        if landing:
            self._on_rank_0("leave", lambda: self._peer.leave(reason), None)
            self._follow("leave")
        elif self.peer is not None:
            self.peer.leave(reason, landing=self._sharded is None)

    @property
    def _peer(self) -> Peer:
        assert self.peer is not None, "on rank 0 only"
        return self.peer

    def _on_rank_0(self, name: str, call: Callable[[], T], otherwise: T) -> T:
        """All ranks: make the user's call on rank 0, which may change the weights. The others return `otherwise`.

        The other ranks of a sharded model do their share meanwhile. All ranks must call `_told` next, in which the
        other ranks raise the error that the call has raised on rank 0.
        """
        self._parts.reshard()
        if self.rank:
            if self._sharded is not None:
                self._sharded.serve()
            return otherwise
        try:
            result = call()
        except Exception as error:
            with suppress(PeerLostError):  # then the others notice by themselves
                self._end_share()
                self._ranks.tell({"call": name, **_message_of(error)})
            raise
        self._end_share()
        return result

    def _end_share(self) -> None:
        if self._sharded is not None:
            self._sharded.end()

    def _told(self, call: str, message: dict[str, Any]) -> dict[str, Any]:
        """All ranks, after `_on_rank_0`: return the message of rank 0, or raise the error of that call.

        Raises ConfigError if rank 0 has made another call before; where ranks wait for each other first, they notice
        nothing until the group's timeout.
        """
        told = self._ranks.tell({"call": call, **message})
        if told["call"] != call:
            raise ConfigError(
                f"rank 0 has called {told['call']}(), and this rank {call}(): all ranks must make the same calls"
            )
        if "raised" in told:
            raise _SHARED_ERRORS.get(told["raised"], PeerLostError)(told["text"])
        return told

    def _enter(self, enter: Callable[[ModelParts], Peer] | None) -> dict[str, Any]:
        assert enter is not None, "on rank 0"
        self.peer = peer = enter(self._parts)
        return {
            "run": peer.run.to_dict(), "peer_id": peer.peer_id, "maddrs": peer.maddrs, "founded": peer.founded,
        }  # fmt: skip

    def _follow(self, call: str, report: StepReport | None = None, *, changes: Changes | None = None) -> StepReport:
        """Give all ranks the report and the status of rank 0, and the weights that have changed there.

        The ranks of a sharded model have changed their weights themselves.

        Args:
            call: the user's.
            report: the report of rank 0, None if nothing was exchanged; ignored on the other ranks.
            changes: changes in the weights of rank 0; None for those since the last call.
        """
        message: dict[str, Any] = {}
        blocks = torch.empty(0, dtype=torch.int64, device="cpu")
        if self.peer is not None:
            changes = changes or self.peer.take_changes()
            blocks = torch.from_numpy(changes.blocks)
            message = {
                "position": {name: getattr(self.peer, name) for name in _POSITION},
                "failure": None if self.peer.failure is None else str(self.peer.failure),
                "report": dataclasses.asdict(report or StepReport()),
                "everything": changes.everything,
                "blocks": len(blocks),
            }
        message = self._told(call, message)
        for name in _POSITION:
            setattr(self, name, message["position"][name])
        self.failure = None if message["failure"] is None else PeerLostError(message["failure"])
        if self._sharded is None and message["everything"]:
            self._ranks.copy_together(self._parts.tensors)
        elif self._sharded is None and message["blocks"]:
            self._copy_blocks(blocks if self.peer is not None else blocks.new_empty(message["blocks"]))
        landed = message["report"].pop("round")
        if landed is not None:
            landed = RoundReport(**landed | {"contributors": tuple(landed["contributors"])})
        return StepReport(**message["report"], round=landed)

    def _copy_blocks(self, blocks: torch.Tensor) -> None:
        """Copy blocks of weights from rank 0. `blocks`: (n,) int64 block numbers; rank 0's are used."""
        if self.peer is None:
            values = torch.empty(len(blocks), BLOCK, dtype=torch.float32, device="cpu")
        else:
            values = self._parts.view.gather(self._parts.space.plan(blocks.numpy()))
        self._ranks.copy_together([blocks, values])
        if self.peer is None:
            self._parts.view.scatter(self._parts.space.plan(blocks.numpy()), values)


def _message_of(error: Exception) -> dict[str, Any]:
    """The message for the other ranks about an error of rank 0: the nearest shared class, and the text."""
    for kind in type(error).__mro__:
        if kind.__name__ in _SHARED_ERRORS:
            return {"raised": kind.__name__, "text": str(error)}
    return {"raised": "", "text": f"rank 0 of this process group has raised {type(error).__name__}: {error}"}
