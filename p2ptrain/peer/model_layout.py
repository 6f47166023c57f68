"""The layout of a user's model: trainable parameters in one index space, buffers, and the layout that peers compare."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
import threading
import weakref
from collections.abc import Callable
from itertools import chain
from operator import attrgetter, is_

import safetensors.torch
import torch

from p2ptrain.algorithms.blocks import BLOCK
from p2ptrain.algorithms.indexspace import IndexSpace, ParameterView
from p2ptrain.algorithms.moments import MomentView
from p2ptrain.algorithms.transfers import Transfers, at_once, in_pieces
from p2ptrain.errors import ConfigError, RunMismatchError, WireError
from p2ptrain.formatting import count
from p2ptrain.peer.device_transfers import device_transfers
from p2ptrain.peer.model_tensors import (
    check_apart,
    most_bytes_of,
    persistent_buffers,
    plain_names,
    trainable_parameters,
)
from p2ptrain.peer.process_group import ProcessGroup
from p2ptrain.peer.sharded_view import ShardedView
from p2ptrain.peer.sharding import frozen_values, fsdp_modules, is_sharded, local_of
from p2ptrain.peer.side_stream import CudaSideStream
from p2ptrain.settings.config import RunConfig

# Devices and addresses of the parameters that peers of this process write to. It is global, because these peers need
# not know of each other, and a mark on a user's tensor would be pickled with it.
_written = set[tuple[torch.device, int]]()
_claiming = threading.Lock()


class ModelParts:
    """The tensors of a model, by their role in a run.

    Trainable floating-point parameters are exchanged and averaged (tied ones once). Frozen parameters do not change and
    must be equal on all peers: their values are part of the layout hash. Persistent buffers (such as running means)
    stay local; a joiner downloads them from a member. The storage of tensors is never replaced. Names are those of the
    model without torch's wrappers, so that peers which compile it, or checkpoint its activations, and peers which do
    not train in one run.

    Parameters that FSDP2 has sharded are supported in a process group. The layout is that of the whole parameters, so
    that peers which shard and peers which do not train in one run.

    Attributes:
        parameters: the trainable parameters.
        tensors: their values, or the part of them that this rank holds.
        space: index space of the whole parameters.
        view: reads and writes them.
        layout: how many parameters are trained, and the hash of names, shapes, types and frozen values.
    """

    def __init__(self, model: torch.nn.Module, ranks: ProcessGroup | None = None) -> None:
        """All ranks, if `ranks` are given: the processes of this peer, which have the same model.

        Raises ConfigError if `trainable_parameters`, `persistent_buffers` or `check_apart` do: on all ranks, if one of
        them refuses.
        """
        self._fsdp_modules = fsdp_modules(model) if isinstance(model, torch.nn.Module) else []
        self.reshard()
        refused = ""
        try:
            trainable = trainable_parameters(model, ranks)
            self._buffers = persistent_buffers(model)
            check_apart(trainable, self._buffers)
        except ConfigError as error:
            if ranks is None:
                raise
            refused = str(error)
        if ranks is not None:
            ranks.agree(refused, "join()")
            _check_same(_shapes_sha256(model), ranks)
        self._is_alone = ranks is None
        self._release: Callable[[], object] = lambda: None
        self.parameters = list(trainable.values())
        self.tensors = [local_of(parameter) for parameter in self.parameters]
        self.space = IndexSpace([(name, tuple(p.shape)) for name, p in trainable.items()])
        self.is_sharded = is_sharded(self.parameters[0])
        # Addresses of the values when the model joined; of sharded parameters, only the first one's.
        self._addresses = [tensor.data_ptr() for tensor in self.tensors[: 1 if self.is_sharded else None]]
        self._model = model
        self._note_modules()
        self.view: ParameterView | ShardedView
        if self.is_sharded:
            assert ranks is not None
            self.view = ShardedView(self.space, [len(p) for p in self.parameters], self.tensors, ranks)
        else:
            self.view = ParameterView(self.space, self.tensors)
        sha256 = _layout_sha256(model, ranks)
        if ranks is not None and self.is_sharded:
            sha256 = ranks.tell({"sha256": sha256})["sha256"]
        elif ranks is not None:
            _check_same(sha256, ranks)
        trained = count(self.space.numel, "trained parameter")
        self.layout = f"{trained} in {count(len(self.parameters), 'tensor')}, hash {sha256}"

    def with_layout(self, run: RunConfig) -> RunConfig:
        """The settings of a run, with the layout of this model. Raises RunMismatchError if they have another one."""
        theirs = run.model_layout
        if theirs and theirs != self.layout:
            raise RunMismatchError(
                f"model: yours has {_short(self.layout)}, that of run {run.run_id!r} {_short(theirs)}; build the same "
                "(names, shapes, dtypes, which are trained, frozen values), or choose another run_id"
            )
        return dataclasses.replace(run, model_layout=self.layout)

    def claim(self) -> None:
        """Take the parameters for one peer, until `release`.

        Raises ConfigError if another peer of this process has one of them: both would write to it.
        """
        named = zip(self.space.names, self.tensors, strict=True)
        places = {name: (tensor.device, tensor.data_ptr()) for name, tensor in named if tensor.numel()}
        claimed = set(places.values())
        with _claiming:
            taken = [name for name, place in places.items() if place in _written]
            if not taken:
                _written.update(claimed)
                # Released with this object at the latest, as another model may get the memory then.
                self._release = weakref.finalize(self, _written.difference_update, claimed)
        if taken:
            raise ConfigError(
                f"{len(taken)} parameters of the model, such as {taken[0]}, belong to another peer in this process, "
                "which would write to them, too: leave() that one first, or join with a copy.deepcopy() of the model"
            )

    def release(self) -> None:
        """Let other peers have the parameters. May be called twice, and without `claim`."""
        self._release()

    def reshard(self) -> None:
        """Drop the whole parameters that FSDP2 keeps after a forward pass without a backward pass.

        The next forward pass would use them, although the shards have changed.
        """
        for module in self._fsdp_modules:
            module.reshard()

    def check_in_place(self) -> None:
        """Raise ConfigError if a parameter was moved since the model joined, or if one has become trainable.

        The exchange would write into the old memory of the first, and would leave out the second. Of sharded
        parameters, only the first one's memory is checked.
        """
        self.reshard()
        parameters = map(local_of, self.parameters[:1]) if self.is_sharded else self.parameters
        # Also the tensors that the exchange uses: memory that one has freed may hold the other.
        in_place = all(
            list(map(torch.Tensor.data_ptr, tensors)) == self._addresses
            for tensors in (parameters, self.tensors[: len(self._addresses)])
        )
        same = all(map(is_, chain.from_iterable(self._held), self._seen))
        if in_place and same and not any(map(attrgetter("requires_grad"), self._frozen)):
            return
        now = dict(plain_names(self._model, self._model.named_parameters()))
        held, ours = set(map(id, now.values())), set(map(id, self.parameters))
        moved = [
            name
            for name, p in zip(self.space.names, self.parameters, strict=True)
            if id(p) not in held or now.get(name, p) is not p  # also if two have changed places
        ]
        if not in_place:
            places = zip(self.space.names, self.parameters, self.tensors, self._addresses, strict=False)
            moved += [
                name
                for name, p, tensor, was in places
                if id(p) in held and {local_of(p).data_ptr(), tensor.data_ptr()} != {was}
            ]
        if moved:
            raise ConfigError(
                f"{len(moved)} parameters of the model, such as {moved[0]}, were moved, replaced or removed after it "
                "had joined the run (to another device, into shared memory, or into a wrapper that copies its "
                "parameters); move it first, then join"
            )
        new = [name for name, parameter in now.items() if parameter.requires_grad and id(parameter) not in ours]
        if new:
            raise ConfigError(
                f"{len(new)} parameters of the model, such as {new[0]}, became trainable after it had joined the run "
                "(in a new layer or adapter, or by unfreezing), and are not exchanged; change it first, then join"
            )
        self._note_modules()  # something that is not trained was changed

    def _note_modules(self) -> None:
        """Note what the modules of the model hold, for `check_in_place`."""
        modules = list(self._model.modules())
        # These follow the modules. The last one makes sequences of different lengths differ.
        held = [held for module in modules for held in (module._parameters.values(), module._modules.values())]
        self._held = [*held, (object(),)]
        self._seen = list(chain.from_iterable(self._held))
        self._frozen = [parameter for parameter in self._model.parameters() if not parameter.requires_grad]

    def shares_weights_with(self, model: torch.nn.Module) -> bool:
        """Whether `model` has one of our parameters, or one in the same memory.

        Also True if it has parameters that cannot be compared, such as those of sharding wrappers.
        """
        ours = {*map(id, self.parameters), *(tensor.data_ptr() for tensor in self.tensors)}
        return any(
            type(p) is not torch.nn.Parameter or not p.numel() or not ours.isdisjoint((id(p), p.data_ptr()))
            for p in model.parameters()
        )

    def transfers(self) -> Transfers:
        """How an exchange moves the weights to and from host memory.

        On a CUDA or ROCm GPU: beside training. On a CPU: in slices, over several steps; at once in a process group, as
        all weights would have to be copied to the other ranks after each slice of a landing. At once also on other
        devices, and if the weights are sharded or on several devices.
        """
        devices = {tensor.device for tensor in self.tensors}
        if isinstance(self.view, ShardedView) or len(devices) > 1:
            return at_once(self.view)
        device = self.tensors[0].device
        if device.type == "cuda":
            return device_transfers(self.view, CudaSideStream(device))
        return in_pieces(self.view) if device.type == "cpu" and self._is_alone else at_once(self.view)

    def averaged(self, run: RunConfig, optimizer: torch.optim.Optimizer | None) -> MomentView | None:
        """Return the view of parameters and moments that rounds average; None if they average only parameters.

        Raises ConfigError if the optimizer's moments cannot be averaged.
        """
        return MomentView(self.space, self.parameters, optimizer) if run.inner_moments == "averaged" else None

    def buffers(self) -> bytes:
        """Serialize all persistent buffers in the safetensors format; empty if there are none."""
        if not self._buffers:
            return b""
        return safetensors.torch.save(
            {name: buffer.detach().to("cpu", copy=True).contiguous() for name, buffer in self._live_buffers.items()}
        )

    def most_buffer_bytes(self) -> int:
        """The most bytes that another peer's `buffers()` may have; 0 if this model has none."""
        return most_bytes_of(self._live_buffers)

    @property
    def _live_buffers(self) -> dict[str, torch.Tensor]:
        """The persistent buffers as they are now: a model may have put another tensor in the place of one."""
        now = dict(plain_names(self._model, self._model.named_buffers()))
        return {name: now.get(name, buffer) for name, buffer in self._buffers.items()}

    def load_buffers(self, data: bytes, *, of_own_rank: bool = False) -> None:
        """Load another peer's buffers, or those of another rank of this peer.

        Raises WireError, with nothing changed, if they do not fit this model, or if another peer's are not finite where
        ours are.
        """
        if not self._buffers and not data:
            return
        try:
            received = safetensors.torch.load(data)
        except Exception as error:  # safetensors raises several types on bad input
            raise WireError(f"bad buffers: {error}") from None
        buffers = self._live_buffers
        for name, buffer in buffers.items():
            if name not in received or received[name].shape != buffer.shape or received[name].dtype != buffer.dtype:
                raise WireError(f"buffer {name} is missing or differs in shape or type")
            if not of_own_rank and (_is_finite(buffer) & ~_is_finite(received[name])).any():  # masks have infinities
                raise WireError(f"buffer {name} is not finite where ours is")
        with torch.inference_mode():  # for buffers that were made in it
            for name, buffer in buffers.items():
                buffer.copy_(received[name])

    def unflatten(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return views of a (num_blocks, 64) float32 vector by parameter name, in the shapes of the parameters."""
        line, starts = flat.view(-1), (self.space.tensor_starts * BLOCK).tolist()
        return {
            name: line[start : start + parameter.numel()].view(parameter.shape)
            for name, parameter, start in zip(self.space.names, self.parameters, starts, strict=False)
        }

    def distance_to(self, flat: torch.Tensor) -> float:
        """Distance of the weights from those in `flat`, relative to their norm; 0.0 if unknown."""
        if self.is_sharded:
            return 0.0
        there = self.unflatten(flat).values()
        apart = [a - b.detach().to("cpu", torch.float32) for a, b in zip(there, self.parameters, strict=True)]
        norm, distance = (math.sqrt(sum(float(t.square().sum()) for t in of)) for of in (there, apart))
        return distance / norm if norm else 0.0


def _is_finite(values: torch.Tensor) -> torch.Tensor:
    """Which of these values are finite, on the CPU."""
    here = values.detach().to("cpu")
    if here.is_complex():
        return here.isfinite()
    # torch cannot tell for each type of 8 bits.
    return here.double().isfinite() if here.is_floating_point() else torch.ones_like(here, dtype=torch.bool)


def _short(layout: str) -> str:
    """A layout with 12 digits of its hash. Other peers may send any text."""
    known = re.fullmatch(r"([\d,]+ trained parameters? in [\d,]+ tensors?, hash [0-9a-f]{12})[0-9a-f]{52}", layout)
    return known[1] if known else "a layout that this version does not know"


def _check_same(sha256: str, ranks: ProcessGroup) -> None:
    """All ranks: raise ConfigError on all of them unless they have the same hash."""
    same = ranks.tell({"sha256": sha256})["sha256"] == sha256
    refused = f"the model of rank {ranks.rank} is not that of rank 0: build the same on all ranks"
    ranks.agree("" if same else refused, "join()")


def _shapes_sha256(model: torch.nn.Module) -> str:
    lines = [f"{_header(name, p)}{is_sharded(p)}" for name, p in plain_names(model, model.named_parameters())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _layout_sha256(model: torch.nn.Module, ranks: ProcessGroup | None) -> str:
    """All ranks, if parameters are sharded: then only that of rank 0 is right, which gets all frozen values."""
    digest = hashlib.sha256()
    for name, parameter in plain_names(model, model.named_parameters()):
        digest.update(_header(name, parameter).encode())
        if not parameter.requires_grad:
            for part in frozen_values(parameter, ranks):
                digest.update(part.numpy().tobytes())
    return digest.hexdigest()


def _header(name: str, parameter: torch.nn.Parameter) -> str:
    return f"{name} {tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}\n"
