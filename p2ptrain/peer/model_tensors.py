"""The tensors of a user's model by the names that peers agree on, and what they must be to be trained in a run."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import safetensors.torch
import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from p2ptrain.errors import ConfigError
from p2ptrain.peer.process_group import ProcessGroup
from p2ptrain.peer.sharding import check_sharding, is_sharded, local_of

T = TypeVar("T")

# Limit of the buffers that a joiner downloads (guess).
MAX_BUFFERS_BYTES = 1024 * 1024 * 1024
# At most so many bytes describe a tensor in a file of safetensors, besides its name (guess).
MOST_DESCRIBED_BYTES = 256

# Where `torch.compile` and `checkpoint_wrapper` keep the module that they wrap.
WRAPPED = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def plain_names(model: torch.nn.Module, tensors: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """Yield tensors of a model by the names that they have without the wrappers of torch around its modules."""
    for name, tensor in tensors:
        module, parts = model, []
        for part in name.split("."):
            parallel = isinstance(module, DataParallel | DistributedDataParallel) and part == "module"
            if not parallel and part not in WRAPPED:
                parts.append(part)
            module = getattr(module, part, module)
        yield ".".join(parts), tensor


def check_has_values(model: torch.nn.Module) -> None:
    """Raises ConfigError if a parameter or buffer has no values yet."""
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in _named(model, tensors).items():
            if torch.nn.parameter.is_lazy(tensor):
                raise ConfigError(f"{kind} {name} has no shape yet: run the model once before joining")
            if tensor.is_meta:
                raise ConfigError(f"{kind} {name} is on the meta device: materialise the model before joining")


def trainable_parameters(model: torch.nn.Module, ranks: ProcessGroup | None) -> dict[str, torch.nn.Parameter]:
    """Return the trainable parameters by name, tied ones once.

    Raises ConfigError as `check_has_values`, if there are none, if one cannot be written in place or is not of a
    floating-point type, if a frozen one cannot be compared, or if the sharding is not supported.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model = {type(model).__name__}: must be a torch.nn.Module")
    check_has_values(model)
    parameters = _named(model, model.named_parameters())
    for name, parameter in parameters.items():
        _check_dense("parameter", name, parameter)
    trainable = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    if not trainable:
        raise ConfigError("the model has no parameter with requires_grad=True: there is nothing to train")
    for name, parameter in trainable.items():
        if not parameter.is_floating_point():
            raise ConfigError(
                f"parameter {name} is of type {parameter.dtype}: only floating-point types can be averaged"
            )
        if parameter.itemsize < 2:
            raise ConfigError(
                f"parameter {name} is of type {parameter.dtype}, to which torch cannot add: keep what is trained in "
                "bfloat16 or wider, and convert it in the forward pass, or freeze it"
            )
        if parameter.is_inference():
            raise ConfigError(
                f"parameter {name} was made in torch.inference_mode(), so it cannot be trained: build the model outside"
            )
        _check_written("parameter", name, parameter)
    check_sharding(model, ranks)
    return trainable


def persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that a joiner downloads, by name. Raises ConfigError if one cannot be sent or written."""
    buffers = _named(model, model.named_buffers())
    saved = dict(plain_names(model, model.state_dict().items()))
    persistent = {name: buffer for name, buffer in buffers.items() if name in saved}
    for name, buffer in persistent.items():
        _check_dense("buffer", name, buffer)
        if not _is_sent(buffer.dtype):
            raise ConfigError(
                f"buffer {name} is of type {buffer.dtype}, which safetensors does not send to joining peers: convert "
                "it, or register it with persistent=False"
            )
        _check_written("buffer", name, buffer)
    if (size_bytes := most_bytes_of(persistent)) > MAX_BUFFERS_BYTES:
        raise ConfigError(
            f"the model's buffers take {size_bytes / 2**20:,.0f} MiB, and joining peers take at most "
            f"{MAX_BUFFERS_BYTES // 2**20:,}: register those that each peer has already with persistent=False"
        )
    return persistent


def most_bytes_of(buffers: Mapping[str, torch.Tensor]) -> int:
    """The most bytes that safetensors makes of these buffers; 0 of none."""
    described = sum(len(name) + MOST_DESCRIBED_BYTES for name in buffers)
    return described + sum(buffer.numel() * buffer.element_size() for buffer in buffers.values())


def _named(model: torch.nn.Module, tensors: Iterable[tuple[str, T]]) -> dict[str, T]:
    named: dict[str, T] = {}
    for name, tensor in plain_names(model, tensors):
        if name in named:
            raise ConfigError(f"the model has two tensors named {name}, one of them in a wrapper of torch: rename one")
        named[name] = tensor
    return named


def _check_dense(kind: str, name: str, tensor: torch.Tensor) -> None:
    if is_traceable_wrapper_subclass(tensor) and not is_sharded(tensor):
        raise ConfigError(
            f"{kind} {name} is a {type(tensor).__name__}, whose values are in other tensors: convert it to a plain "
            "tensor, or make it a buffer with persistent=False, which stays local"
        )
    if tensor.is_nested or tensor.layout is not torch.strided:
        what = "nested" if tensor.is_nested else f"of layout {tensor.layout}"
        raise ConfigError(
            f"{kind} {name} is {what}: must be dense (torch.strided); convert it with to_dense(), or make it a buffer "
            "with persistent=False, which stays local"
        )


def _check_written(kind: str, name: str, tensor: torch.Tensor) -> None:
    if _overlaps(tensor):
        raise ConfigError(
            f"{kind} {name} has several elements in one place of memory, as after expand(), so it cannot be written: "
            "make it a clone()"
        )
    if tensor.is_neg() or tensor.is_conj():
        raise ConfigError(f"{kind} {name} is a lazily negated or conjugated view: make it a clone()")


def check_apart(trainable: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
    """Raise ConfigError if a trainable parameter lies in the memory of another one or of a persistent buffer.

    Of tensors with gaps, such as columns of a matrix, only the beginnings are compared.
    """
    spans = []
    for name, tensor in {**trainable, **buffers}.items():
        local = local_of(tensor)
        if local.numel():
            size = local.nbytes if local.is_contiguous() else 1
            spans.append((str(local.device), local.data_ptr(), local.data_ptr() + size, name))
    spans.sort()
    for (device, _, stop, first), (other_device, start, _, second) in itertools.pairwise(spans):
        if device == other_device and start < stop and not {first, second}.isdisjoint(trainable):
            raise ConfigError(
                f"{first} and {second} are two tensors in one memory, in which each change would land twice: assign "
                "the first one to the second name, which ties them, or make the second one a clone()"
            )


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor may share memory."""
    last = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= last:
            return tensor.numel() > 0
        last += stride * (size - 1)
    return False


def _is_sent(dtype: torch.dtype) -> bool:
    """Whether safetensors writes and reads a type."""
    try:
        safetensors.torch.load(safetensors.torch.save({"": torch.empty(0, dtype=dtype, device="cpu")}))
    except (KeyError, RuntimeError):  # its own, and torch's of quantized types
        return False
    return True
