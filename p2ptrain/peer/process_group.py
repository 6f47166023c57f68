"""The collectives that a process group uses. Each has the timeout of the group.

Weights go through torch.distributed; numbers, messages and small tensors over sockets where all ranks are on one
machine (`rank_sockets.py` says why).
"""

from __future__ import annotations

import datetime
import json
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from p2ptrain.errors import ConfigError, PeerLostError
from p2ptrain.peer.rank_sockets import MOST_BYTES, RankSockets, open_sockets

# The group's threads release a tensor within a millisecond, on a busy machine later.
SETTLE_TIMEOUT_S, SETTLE_POLL_S = 5.0, 0.001
# Tensors up to this size go over the sockets, from rank 0 to one rank after the other. Guess.
SOCKET_BYTES = 1 << 16
# The first byte of a message over the sockets: its bytes follow there, or they come through the group.
HERE, IN_GROUP = b"h", b"g"
# Small tensors are copied together up to this size, which bounds the additional memory.
TOGETHER_BYTES = 1 << 22


class ProcessGroup:
    """Collectives over the ranks of a group: all ranks must call them. They raise PeerLostError if a rank is lost.

    Attributes:
        rank, size: number of this process in the group, and number of processes.
        closed: whether `close` was called.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """All ranks: connect them by sockets, where they are on one machine."""
        self.rank, self.size = group.rank(), group.size()
        self._group = group
        self._device = device
        self._held: list[weakref.ref[torch.Tensor]] = []
        self.closed = False
        self._sockets: RankSockets | None = None
        if self.size > 1:
            self._sockets = open_sockets(
                self.rank,
                self.size,
                _timeout_s(group, device),
                self.tell_bytes,
                lambda flag: self.total(float(not flag)) == [0.0],
            )

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
        if self._sockets is None:
            return self._reduced(numbers)
        summed = np.array(self.total_on_0(*numbers), np.float64)
        return [float(number) for number in np.frombuffer(self.tell_bytes(summed.tobytes()), np.float64)]

    def total_on_0(self, *numbers: float) -> list[float]:
        """Return the sum of each number over all ranks on rank 0. The others get an empty list."""
        if self._sockets is None:
            summed = self._reduced(numbers)
            return [] if self.rank else summed
        own = np.array(numbers, np.float64).tobytes()
        with self._lost_ranks_told():
            if self.rank:
                self._sockets.send(own)
                return []
            rows = np.array([np.frombuffer(row, np.float64) for row in self._sockets.collect(own)])
        return [float(number) for number in rows.sum(axis=0)]

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, which must have one shape and dtype."""
        rows = torch.zeros(self.size, *tensor.shape, dtype=tensor.dtype, device=self._device)
        rows[self.rank] = tensor
        with self._lost_ranks_told():
            self._group.allreduce([self._carried(rows)]).wait()
        # Copies, and no views of one tensor: torch.set_rng_state crashes with those.
        return [row.clone() for row in rows]

    def copy(self, tensor: torch.Tensor) -> None:
        """Set the values of a tensor to those on rank 0."""
        tensor = tensor.detach()
        if self._sockets is not None and tensor.device.type == "cpu" and tensor.nbytes <= SOCKET_BYTES:
            told = self.tell_bytes(_bytes_of(tensor).numpy().tobytes() if self.rank == 0 else b"")
            if self.rank and told:
                _set(tensor, torch.frombuffer(bytearray(told), dtype=torch.uint8))
            return
        self._broadcast(tensor)

    def _broadcast(self, tensor: torch.Tensor) -> None:
        carried = tensor.to(self._device).contiguous()
        with self._lost_ranks_told():
            self._group.broadcast(self._carried(carried), 0).wait()
            if carried is not tensor:
                tensor.copy_(carried)

    def copy_together(self, tensors: Sequence[torch.Tensor]) -> None:
        """As `copy` of each tensor, in fewer transfers: small ones that follow each other share one."""
        for batch in _batches(tensors):
            if len(batch) == 1:
                self.copy(batch[0])
                continue
            together = torch.cat([_bytes_of(tensor.detach().to(self._device)) for tensor in batch])
            self.copy(together)
            if self.rank:
                parts = torch.split(together, [tensor.nbytes for tensor in batch])
                for tensor, part in zip(batch, parts, strict=True):
                    _set(tensor.detach(), part)

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
        if self._sockets is not None:
            with self._lost_ranks_told():
                if self.rank == 0:
                    fits = len(HERE) + len(data) <= MOST_BYTES
                    self._sockets.send(HERE + data if fits else IN_GROUP)
                else:
                    data = self._sockets.receive()
                    fits, data = data[: len(HERE)] == HERE, data[len(HERE) :]
            if fits:
                return data
        return self._tell_in_group(data)

    def _tell_in_group(self, data: bytes) -> bytes:
        size = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
        self._broadcast(size)
        told = torch.zeros(int(size), dtype=torch.uint8, device="cpu")
        if self.rank == 0:
            told.numpy()[:] = np.frombuffer(data, np.uint8)
        if len(told):
            self._broadcast(told)
        return told.numpy().tobytes()

    def settle(self) -> None:
        """Wait until the group's threads have released every tensor, for up to SETTLE_TIMEOUT_S.

        Gloo's threads release a tensor shortly after its collective has ended. If the interpreter has ended by then,
        the thread aborts the process ("terminate called without an active exception").
        """
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while any(held() is not None for held in self._held) and time.monotonic() < deadline:
            time.sleep(SETTLE_POLL_S)

    def close(self) -> None:
        """Let the other ranks notice that this one takes part no more. Nothing else may be called afterwards."""
        self.closed = True
        if self._sockets is not None:
            self._sockets.close()

    def _reduced(self, numbers: Sequence[float]) -> list[float]:
        summed = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        with self._lost_ranks_told():
            self._group.allreduce([self._carried(summed)]).wait()
            return [float(number) for number in summed.tolist()]

    def _carried(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note a tensor that a collective is about to transfer. No other reference may outlive the collective."""
        self._held = [held for held in self._held if held() is not None] + [weakref.ref(tensor)]
        return tensor

    @contextmanager
    def _lost_ranks_told(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError, EOFError) as error:
            reason = "Timed out" if isinstance(error, BlockingIOError) else str(error) or type(error).__name__
            raise PeerLostError(
                f"rank {self.rank} of {self.size} has lost another process of its group, or "
                f"waited longer than the group's timeout for it ({reason}); start all of them again, as torchrun "
                f"--max-restarts does"
            ) from error


def _batches(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Cut a sequence into runs of up to TOGETHER_BYTES; a larger tensor is alone. Leaves out tensors without values."""
    batch: list[torch.Tensor] = []
    batch_bytes = 0
    for tensor in tensors:
        if batch and batch_bytes + tensor.nbytes > TOGETHER_BYTES:
            yield batch
            batch, batch_bytes = [], 0
        if tensor.numel():
            batch.append(tensor)
            batch_bytes += tensor.nbytes
    if batch:
        yield batch


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor, flat, as uint8."""
    return tensor.reshape(-1).view(torch.uint8)


def _set(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Set a tensor to the `_bytes_of` another one of its type and shape."""
    tensor.copy_(values.clone().view(tensor.dtype).view(tensor.shape))


def _timeout_s(group: dist.ProcessGroup, device: torch.device) -> float:
    """The timeout of a group, of torch.distributed or of a backend alone."""
    held: Any = group
    backend = held._get_backend(device) if hasattr(held, "_get_backend") else held
    timeout: datetime.timedelta = backend.options._timeout
    return timeout.total_seconds()


def device_of(group: dist.ProcessGroup, model: torch.nn.Module) -> torch.device:
    """Device of the tensors that a process group transfers: the CPU if its backend can, else the model's device."""
    if "gloo" in dist.get_backend_config(group):
        return torch.device("cpu")
    return next(model.parameters()).device
