"""One peer that consists of several processes: a process group, such as the GPUs of one machine.

Only rank 0 is on the network; it holds the `Peer`. DistributedDataParallel or a similar wrapper keeps the weights of
all ranks equal between exchanges. After each exchange rank 0 sends the other ranks what has changed: the blocks of
merged fragments, O(pN), or all weights after a round. The run sees one peer, with the samples of all ranks.

Every method documented with "all ranks" is collective: all ranks must call it, and it waits for the other ranks, at
most as long as the timeout of the process group.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from p2ptrain.algorithms.blocks import BLOCK
from p2ptrain.algorithms.indexspace import ParameterView
from p2ptrain.errors import ConfigError, PeerLostError, RunMismatchError
from p2ptrain.peer.model_layout import ModelParts
from p2ptrain.peer.peer import Peer
from p2ptrain.peer.process_group import ProcessGroup
from p2ptrain.peer.step_values import plain_loss, plain_samples
from p2ptrain.protocol.exchange.types import Changes, RoundReport, StepReport
from p2ptrain.settings.config import RunConfig

# While rank 0 waits for a round, it tells the other ranks so at this interval: well below any group's timeout.
TELL_EVERY_S = 1.0
# Attributes of rank 0's peer that all ranks have.
_POSITION = ("alive", "round", "run_step", "finished", "anchor_hash")


class GroupPeer:
    """The peer of a process group; each rank has this object. Created by `p2ptrain.join(…, process_group=…)`.

    A context manager that leaves the run at the end of its block. If the block ends without an exception, all ranks
    must reach its end.

    Attributes:
        peer: the `Peer` on rank 0; None on the other ranks.
        rank, size: number of this process in the group, and number of processes.
        data_seed: a seed for this process's share of the data; differs between ranks.
        run, peer_id, maddrs: as those of a `Peer`.
        alive, round, run_step, finished, anchor_hash, failure: likewise, as of the last collective call.
    """

    alive: list[str]
    round: int
    run_step: int
    finished: bool
    anchor_hash: str
    failure: Exception | None

    def __init__(
        self, model: torch.nn.Module, group: dist.ProcessGroup, enter: Callable[[], Peer], *, device: torch.device
    ) -> None:
        """All ranks: join the run, and download its weights and buffers. Blocks as long as `enter` on rank 0.

        Args:
            model: the same on each rank.
            group: its rank 0 is on the network.
            enter: joins the run with `model`; called on rank 0.
            device: device of the tensors that the group's backend transfers.

        Raises:
            ConfigError: `enter` raised it on rank 0 (then all ranks raise it), or this rank's model differs.
            PeerLostError: as `step`.
        """
        self.rank, self.size = group.rank(), group.size()
        self.peer: Peer | None = None
        self._ranks = ProcessGroup(group, device)
        self._parts = ModelParts(model)
        self._view = ParameterView(self._parts.space, self._parts.tensors)
        try:
            settled = self._ranks.tell(self._enter(enter) if self.rank == 0 else {})
            if "refused" in settled:
                raise (RunMismatchError if settled["mismatch"] else ConfigError)(settled["refused"])
            self.run = RunConfig.from_dict(settled["run"])
            self.peer_id: str = settled["peer_id"]
            self.maddrs: list[str] = settled["maddrs"]
            self.data_seed = self.run.data_seed(f"{self.peer_id}/{self.rank}" if self.rank else self.peer_id)
            if self.run.model_layout != self._parts.layout_sha256:
                raise ConfigError(f"the model of rank {self.rank} is not that of rank 0: build the same on all ranks")
            self._parts.load_buffers(self._ranks.tell_bytes(self._parts.buffers()))
            self._follow(StepReport(), Changes(everything=True))
        except BaseException as error:
            self.leave(type(error).__name__)
            raise

    def __enter__(self) -> GroupPeer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.leave("done" if kind is None else kind.__name__)
        if kind is None:
            self._follow(StepReport())
            self._ranks.settle()

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
                parameters have moved since it joined; or if the samples of all ranks are more than 2**32.
        """
        start = time.monotonic()
        number, own_loss, refused = 0, None, ""
        try:
            number, own_loss = plain_samples(samples), plain_loss(loss)
            self._parts.check_in_place()
        except ConfigError as error:
            refused = str(error)
        # A rank that raised before this would let the others wait for it.
        total_loss, losses, total, refusals = self._ranks.total(
            own_loss or 0.0, float(own_loss is not None), float(number), float(bool(refused))
        )
        if refusals:
            raise ConfigError(refused or "another rank of this process group has refused its step(): see its error")
        number = plain_samples(int(total))
        report = StepReport()
        if self.peer is not None:
            report = self.peer.step(total_loss / losses if losses else None, number)
        report = self._follow(report)
        return dataclasses.replace(report, exchange_s=time.monotonic() - start)

    def wait_finished(self, timeout_s: float) -> bool:
        """All ranks: after the last step, wait for the run's last round. Returns False if it has not landed in time."""
        deadline = time.monotonic() + timeout_s
        waiting = True
        while waiting:
            if self.peer is not None:
                left_s = deadline - time.monotonic()
                finished = self.peer.wait_finished(min(left_s, TELL_EVERY_S))
                waiting = not finished and left_s > TELL_EVERY_S and self.peer.failure is None
            self._follow(StepReport())
            waiting = bool(self._ranks.tell({"waiting": waiting})["waiting"])
        return self.finished

    def record(self, event: str, /, **fields: Any) -> None:
        """Append an event to the metrics stream of rank 0; does nothing on the other ranks."""
        if self.peer is not None:
            self.peer.record(event, **fields)

    def state_dict(self) -> dict[str, Any]:
        """This peer's part of a checkpoint, as `Peer.state_dict`, on rank 0; empty on the other ranks."""
        return {} if self.peer is None else self.peer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """All ranks: `Peer.load_state_dict` with the state given on rank 0. Waits until it is in force."""
        taken = self._ranks.tell({"taken": self.peer is not None and self.peer.load_state_dict(state)})["taken"]
        self._follow(StepReport())
        return bool(taken)

    def anchor_state_dict(self) -> dict[str, torch.Tensor]:
        """All ranks: the weights of the last round by parameter name, as float32 CPU tensors."""
        flat = torch.zeros(self._parts.space.num_blocks, BLOCK)
        if self.peer is not None:
            anchor = self.peer.anchor_state_dict()
            for name, values in self._parts.unflatten(flat).items():
                values.copy_(anchor[name])
        self._ranks.copy(flat)
        return self._parts.unflatten(flat)

    def leave(self, reason: str = "done") -> None:
        """On rank 0, tell the other peers and end the network side; does nothing on the other ranks."""
        if self.peer is not None:
            self.peer.leave(reason)

    def _enter(self, enter: Callable[[], Peer]) -> dict[str, Any]:
        try:
            self.peer = peer = enter()
        except ConfigError as error:
            return {"refused": str(error), "mismatch": isinstance(error, RunMismatchError)}
        return {"run": peer.run.to_dict(), "peer_id": peer.peer_id, "maddrs": peer.maddrs}

    def _follow(self, report: StepReport, changes: Changes | None = None) -> StepReport:
        """Give all ranks the report and the status of rank 0, and copy the weights that have changed there.

        Args:
            report: the report of rank 0; ignored on the other ranks.
            changes: changes in the weights of rank 0; None for those since the last call.
        """
        message: dict[str, Any] = {}
        blocks = torch.empty(0, dtype=torch.int64)
        if self.peer is not None:
            changes = changes or self.peer.take_changes()
            blocks = torch.from_numpy(changes.blocks)
            message = {
                "position": {name: getattr(self.peer, name) for name in _POSITION},
                "failure": None if self.peer.failure is None else str(self.peer.failure),
                "report": dataclasses.asdict(report), "everything": changes.everything, "blocks": len(blocks),
            }  # fmt: skip
        message = self._ranks.tell(message)
        for name in _POSITION:
            setattr(self, name, message["position"][name])
        self.failure = None if message["failure"] is None else PeerLostError(message["failure"])
        if message["everything"]:
            for tensor in self._parts.tensors:
                self._ranks.copy(tensor)
        elif message["blocks"]:
            self._copy_blocks(blocks if self.peer is not None else blocks.new_empty(message["blocks"]))
        landed = message["report"].pop("round")
        if landed is not None:
            landed = RoundReport(**landed | {"contributors": tuple(landed["contributors"])})
        return StepReport(**message["report"], round=landed)

    def _copy_blocks(self, blocks: torch.Tensor) -> None:
        """Copy blocks of weights from rank 0. `blocks`: (n,) int64 block numbers; rank 0's are used."""
        self._ranks.copy(blocks)
        plan = self._parts.space.plan(blocks.numpy())
        values = self._view.gather(plan)
        self._ranks.copy(values)
        if self.peer is None:
            self._view.scatter(plan, values)
