"""The layout of a user's model: trainable parameters in one index space, buffers, and the hash that peers compare."""

from __future__ import annotations

import hashlib

import safetensors.torch
import torch

from p2ptrain.algorithms.indexspace import IndexSpace, ParameterView
from p2ptrain.algorithms.moments import MomentView
from p2ptrain.errors import ConfigError, WireError
from p2ptrain.settings.config import RunConfig


class ModelParts:
    """The tensors of a model, by their role in a run.

    Trainable floating-point parameters are exchanged and averaged (tied ones once). Frozen parameters do not change and
    must be equal on all peers: their values are part of the layout hash. Persistent buffers (such as running means)
    stay local; a joiner downloads them from a member. The storage of tensors is never replaced.

    Raises ConfigError if there is nothing to train, if a trainable parameter is not of a floating-point type, or if a
    tensor has no values yet.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"model = {type(model).__name__}: must be a torch.nn.Module")
        for name, parameter in model.named_parameters():
            _check_has_values("parameter", name, parameter)
        for name, buffer in model.named_buffers():
            _check_has_values("buffer", name, buffer)
        trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if not trainable:
            raise ConfigError("the model has no parameter with requires_grad=True: there is nothing to train")
        for name, parameter in trainable.items():
            if not parameter.is_floating_point():
                raise ConfigError(
                    f"parameter {name} is of type {parameter.dtype}: only floating-point types can be averaged"
                )
        self._model = model
        self.parameters = list(trainable.values())
        self.tensors = [parameter.data for parameter in self.parameters]
        self.space = IndexSpace([(name, tuple(p.shape)) for name, p in trainable.items()])
        self.layout_sha256 = _layout_sha256(model)
        persistent = model.state_dict().keys()
        self._buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}

    def check_in_place(self) -> None:
        """Raise ConfigError if the parameters have moved since, as the exchange would no longer change the model."""
        try:
            now = self._model.get_parameter(self.space.names[0]).data_ptr()
        except AttributeError:
            now = -1
        if now != self.tensors[0].data_ptr():
            raise ConfigError(
                "the model was moved after it had joined the run (to another device, or into a wrapper that copies its "
                "parameters); move it first, then join"
            )

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
            {name: buffer.detach().to("cpu", copy=True).contiguous() for name, buffer in self._buffers.items()}
        )

    def load_buffers(self, data: bytes) -> None:
        """Load another peer's buffers. Raises WireError, with nothing changed, if they do not fit this model."""
        if not self._buffers and not data:
            return
        try:
            received = safetensors.torch.load(data)
        except Exception as error:  # safetensors raises several types on bad input
            raise WireError(f"bad buffers: {error}") from None
        for name, buffer in self._buffers.items():
            if name not in received or received[name].shape != buffer.shape or received[name].dtype != buffer.dtype:
                raise WireError(f"buffer {name} is missing or differs in shape or type")
        with torch.no_grad():
            for name, buffer in self._buffers.items():
                buffer.copy_(received[name])

    def unflatten(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return views of a (num_blocks, 64) float32 vector by parameter name, in the shapes of the parameters."""
        sections = ParameterView(self.space, self.tensors).sections(flat)
        return {name: values for name, (_, values, _) in zip(self.space.names, sections, strict=True)}


def _check_has_values(kind: str, name: str, tensor: torch.Tensor) -> None:
    if torch.nn.parameter.is_lazy(tensor):
        raise ConfigError(f"{kind} {name} has no shape yet: run the model once before joining")
    if tensor.is_meta:
        raise ConfigError(f"{kind} {name} is on the meta device: materialise the model before joining")


def _layout_sha256(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}\n".encode())
        if not parameter.requires_grad:
            raw = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(raw.numpy().tobytes())
    return digest.hexdigest()
