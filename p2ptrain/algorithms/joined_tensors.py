"""Tensors anywhere in the memory of a GPU as the rows of one tensor, so that one call reads blocks of all of them.

A call for each tensor, 148 for GPT-2, held the training thread for 4 ms a step on an H200.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from p2ptrain.algorithms.blocks import BLOCK

# Kinds of devices on which a call costs more than what it copies. In host memory most tensors do not lie whole rows
# apart; there only tests use this.
JOINED_ON = frozenset({"cuda"})


@dataclass(frozen=True)
class JoinedTensors:
    """Tensors of one device and dtype.

    Attributes:
        rows: (r, 64), all memory from the first of the tensors to the end of the last one. Between them lies memory of
            other tensors, or unallocated memory: only full blocks of the joined tensors may be read or written.
        first_rows: the row at which each of them begins, by its number.
        held: the tensors, which keeps their memory allocated.
    """

    rows: torch.Tensor
    first_rows: dict[int, int]
    held: list[torch.Tensor]

    @classmethod
    def of(cls, device: torch.device, tensors: Sequence[torch.Tensor]) -> JoinedTensors:
        """Join those on the device that have the dtype of the largest, and lie a whole number of rows from it."""
        fitting = {
            number: tensor.detach()
            for number, tensor in enumerate(tensors if device.type in JOINED_ON else ())
            if tensor.device == device and tensor.numel() >= BLOCK and tensor.is_contiguous() and not tensor.is_neg()
        }
        if not fitting:
            return cls(torch.empty(0, BLOCK, dtype=torch.float32, device="cpu"), {}, [])
        like = max(fitting.values(), key=torch.Tensor.numel)
        row_bytes = BLOCK * like.element_size()
        joined = {
            number: tensor
            for number, tensor in fitting.items()
            if tensor.dtype == like.dtype and (tensor.data_ptr() - like.data_ptr()) % row_bytes == 0
        }
        begin = min(tensor.data_ptr() for tensor in joined.values())
        end = max(tensor.data_ptr() + tensor.numel() // BLOCK * row_bytes for tensor in joined.values())
        first_rows = {number: (tensor.data_ptr() - begin) // row_bytes for number, tensor in joined.items()}
        return cls(_memory(begin, end - begin, like).view(-1, BLOCK), first_rows, list(joined.values()))


@dataclass(frozen=True)
class _Memory:
    """Memory of a CUDA device, for torch to use as a tensor."""

    __cuda_array_interface__: dict[str, object]


def _memory(address: int, size_bytes: int, like: torch.Tensor) -> torch.Tensor:
    """Memory as a flat tensor of the dtype and on the device of another. Nothing is allocated or copied."""
    if like.device.type == "cpu":
        return torch.frombuffer((ctypes.c_ubyte * size_bytes).from_address(address), dtype=like.dtype)
    interface = {"shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "version": 2}
    return torch.as_tensor(_Memory(interface), dtype=torch.uint8, device=like.device).view(like.dtype)
