"""Rounds that average the inner Adam's moments besides the parameters (DiLoCo, appendix, "Inner Optimizer States").

The paper saw no significant gain for three times the bytes, so moments stay local there, and here by default.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from p2ptrain.algorithms.indexspace import IndexSpace, ParameterView, WeightChange
from p2ptrain.errors import ConfigError


class MomentView:
    """All parameters, first moments, second moments and the step count as one flat space, in this order.

    The parameters have the same blocks as in their own space. Moments are looked up at each use, so an optimizer may
    load a checkpoint in between; before its first step they are created as zeros. Call it only from the training
    thread.
    """

    def __init__(
        self, space: IndexSpace, parameters: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer | None
    ) -> None:
        """
        Args:
            space: flat layout of the parameters.
            parameters: the trainable parameters, in the order of `space`.
            optimizer: a torch Adam or AdamW over them.

        Raises:
            ConfigError: the optimizer is missing, of another kind, uses amsgrad, or does not train all parameters.
        """
        self._own = space
        self._parameters = list(parameters)
        self._optimizer = _checked(optimizer, self._parameters, space.names)
        shapes = [(name, tuple(p.shape)) for name, p in zip(space.names, self._parameters, strict=True)]
        kinds = ("", "exp_avg of ", "exp_avg_sq of ")
        self.space = IndexSpace([*((kind + name, shape) for kind in kinds for name, shape in shapes), ("step", ())])

    def read(self, out: torch.Tensor) -> None:
        """Copy everything into `out`, (num_blocks, 64) float32 CPU; its padding becomes zero."""
        ParameterView(self.space, self._tensors()).read(out)

    def changes(self, flat: torch.Tensor, *, adds: bool) -> Sequence[WeightChange]:
        """Those of `ParameterView.changes`, and a last one that sets the moments and the step to those of `flat`."""
        parameters = ParameterView(self._own, [parameter.data for parameter in self._parameters])
        return [*parameters.changes(flat[: self._own.num_blocks], adds=adds), lambda: self._set_moments(flat)]

    @torch.no_grad()
    def _set_moments(self, flat: torch.Tensor) -> None:
        tensors, own = self._tensors(), len(self._parameters)
        step = tensors[-1]
        for tensor, values, _ in list(ParameterView(self.space, tensors).places(flat))[own:]:
            tensor.copy_(values)
        for square in tensors[2 * own : -1]:
            square.clamp_(min=0.0)  # rounding can make it negative
        for parameter in self._parameters:
            self._optimizer.state[parameter]["step"].fill_(step.round().item())

    def _tensors(self) -> list[torch.Tensor]:
        states = [self._state(parameter) for parameter in self._parameters]
        moments = [state[name] for name in ("exp_avg", "exp_avg_sq") for state in states]
        step = torch.tensor(max(float(state["step"]) for state in states), dtype=torch.float32, device="cpu")
        return [*(parameter.data for parameter in self._parameters), *moments, step]

    def _state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Adam's state of one parameter, created as Adam's first step would do."""
        state: dict[str, torch.Tensor] = self._optimizer.state[parameter]
        if not state:
            (group,) = (g for g in self._optimizer.param_groups if any(parameter is p for p in g["params"]))
            on_device = group["capturable"] or group["fused"]
            step = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
            moments = [torch.zeros_like(parameter, memory_format=torch.preserve_format) for _ in range(2)]
            # All or nothing: memory may be short.
            state.update(step=step, exp_avg=moments[0], exp_avg_sq=moments[1])
        return state


def _checked(
    optimizer: torch.optim.Optimizer | None, parameters: Sequence[torch.nn.Parameter], names: Sequence[str]
) -> torch.optim.Optimizer:
    rule = "inner_moments = 'averaged': "
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        kind = "no optimizer" if optimizer is None else type(optimizer).__name__
        raise ConfigError(f"{rule}needs torch's Adam or AdamW, given is {kind}; pass join(…, optimizer=…)")
    if any(group["amsgrad"] for group in optimizer.param_groups):
        raise ConfigError(f"{rule}an Adam with amsgrad=True has a third moment, which is not averaged; leave it out")
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in zip(names, parameters, strict=True):
        if id(parameter) not in trained:
            raise ConfigError(f"{rule}the optimizer does not train parameter {name}; give it all that are trainable")
    return optimizer
