"""The collectives of torch.distributed that a process group uses. Each has the timeout of the group."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from p2ptrain.errors import ConfigError, PeerLostError

# The group's threads release a tensor within a millisecond, on a busy machine later.
SETTLE_TIMEOUT_S, SETTLE_POLL_S = 5.0, 0.001


class ProcessGroup:
    """Collectives over the ranks of a group: all ranks must call them. They raise PeerLostError if a rank is lost.

    Attributes:
        rank, size: number of this process in the group, and number of processes.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._group = group
        self._device = device
        self._held: list[weakref.ref[torch.Tensor]] = []

    @property
    def members(self) -> list[int]:
        """The ranks of torch.distributed that form the group, in order."""
        return dist.get_process_group_ranks(self._group)

    def agree(self, refused: str, call: str) -> None:
        """Raise ConfigError on all ranks if `refused`, the reason to refuse `call`, is not empty on one of them."""
        if self.total(float(bool(refused)))[0]:
            raise ConfigError(refused or f"another rank of this process group has refused its {call}: see its error")

    def total(self, *numbers: float) -> list[float]:
        """Return the sum of each number over all ranks."""
        summed = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        with self._lost_ranks_told():
            self._group.allreduce([self._carried(summed)]).wait()
            return [float(number) for number in summed.tolist()]

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, which must have one shape and dtype."""
        rows = torch.zeros(self._group.size(), *tensor.shape, dtype=tensor.dtype, device=self._device)
        rows[self._group.rank()] = tensor
        with self._lost_ranks_told():
            self._group.allreduce([self._carried(rows)]).wait()
        # Copies, and no views of one tensor: torch.set_rng_state crashes with those.
        return [row.clone() for row in rows]

    def copy(self, tensor: torch.Tensor) -> None:
        """Set the values of a tensor to those on rank 0."""
        tensor = tensor.detach()
        carried = tensor.to(self._device).contiguous()
        with self._lost_ranks_told():
            self._group.broadcast(self._carried(carried), 0).wait()
            if carried is not tensor:
                tensor.copy_(carried)

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Send the values of a tensor to one rank, which must call `receive`. Not a collective."""
        with self._lost_ranks_told():
            carried = tensor.detach().to(self._device).contiguous()
            self._group.send([self._carried(carried)], rank, 0).wait()

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        """Set the values of a contiguous tensor to those that a rank sends, of the same type and size."""
        with self._lost_ranks_told():
            carried = tensor if tensor.device == self._device else torch.empty_like(tensor, device=self._device)
            self._group.recv([self._carried(carried)], rank, 0).wait()
            if carried is not tensor:
                tensor.copy_(carried)

    def tell(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the message of rank 0 on all ranks. It must consist of JSON values; tuples become lists."""
        told: dict[str, Any] = json.loads(self.tell_bytes(json.dumps(message).encode()))
        return told

    def tell_bytes(self, data: bytes) -> bytes:
        """Return the bytes of rank 0 on all ranks."""
        size = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
        self.copy(size)
        told = torch.zeros(int(size), dtype=torch.uint8, device="cpu")
        if self._group.rank() == 0:
            told.numpy()[:] = np.frombuffer(data, np.uint8)
        if len(told):
            self.copy(told)
        return told.numpy().tobytes()

    def settle(self) -> None:
        """Wait until the group's threads have released every tensor, for up to SETTLE_TIMEOUT_S.

        Gloo's threads release a tensor shortly after its collective has ended. If the interpreter has ended by then,
        the thread aborts the process ("terminate called without an active exception").
        """
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while any(held() is not None for held in self._held) and time.monotonic() < deadline:
            time.sleep(SETTLE_POLL_S)

    def _carried(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note a tensor that a collective is about to transfer. No other reference may outlive the collective."""
        self._held = [held for held in self._held if held() is not None] + [weakref.ref(tensor)]
        return tensor

    @contextmanager
    def _lost_ranks_told(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise PeerLostError(
                f"rank {self._group.rank()} of {self._group.size()} has lost another process of its group, or "
                f"waited longer than the group's timeout for it ({error}); start all of them again, as torchrun "
                f"--max-restarts does"
            ) from error


def device_of(group: dist.ProcessGroup, model: torch.nn.Module) -> torch.device:
    """Device of the tensors that a process group transfers: the CPU if its backend can, else the model's device."""
    if "gloo" in dist.get_backend_config(group):
        return torch.device("cpu")
    return next(model.parameters()).device
