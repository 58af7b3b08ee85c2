"""Optimizer steps from inside the backward pass, so that gradients do not have to be in memory all together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from library.errors import RunStopped
from library.optimizers import load_optimizer_state
from library.processes import MeansInBackward


@dataclass
class Unit:
    """Parameters that are stepped together, as soon as the last of them has its gradient."""

    params: list[Tensor]
    step: Callable[[], Any]
    waiting: int = field(default=0)


class FusedSteps:
    """Steps units of parameters in hooks of the backward pass and drops their gradients at once.

    A gradient is limited by its own norm, since no norm over all of them is ever known.

    Args:
        units: what is stepped together. names: of every parameter, by id, for messages.
        max_grad_norm: L2 limit of each parameter's gradient, 0 for none.
        means: makes the gradients means over several processes; None for one process.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        names: dict[int, str],
        max_grad_norm: float,
        means: MeansInBackward | None = None,
    ):
        self.units = list(units)
        self.names = names
        self.max_grad_norm = max_grad_norm
        self.means = means
        self.is_last = False
        self.finite: dict[int, Tensor] = {}
        for unit in self.units:
            for param in unit.params:
                param.register_post_accumulate_grad_hook(functools.partial(self._arrived, unit))

    def begin(self, is_last: bool) -> None:
        """Get ready for a backward pass; only the last one of an update steps."""
        self.is_last = is_last
        if self.means is not None:
            self.means.is_last = is_last
        for unit in self.units:
            unit.waiting = len(unit.params)

    def _arrived(self, unit: Unit, param: Tensor) -> None:
        if not self.is_last or param.grad is None:
            return
        norm = param.grad.norm()
        self.finite[id(param)] = torch.isfinite(norm)
        if self.max_grad_norm:
            param.grad.mul_((self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        unit.waiting -= 1
        if unit.waiting == 0:
            self._step(unit)

    def _step(self, unit: Unit) -> None:
        unit.step()
        for param in unit.params:
            param.grad = None

    def finish(self) -> None:
        """Step the units of which some parameter got no gradient, and look whether every gradient was finite.

        Raises:
            RunStopped: one was not; weights in memory are spoilt, saved ones are not.
        """
        for unit in self.units:
            if any(param.grad is not None for param in unit.params):
                self._step(unit)
        finite, self.finite = self.finite, {}
        if finite and not bool(torch.stack(list(finite.values())).all()):
            bad = next(self.names[key] for key, flag in finite.items() if not bool(flag))
            raise RunStopped(
                f"the gradient of {bad} is not finite. Earlier saves are intact. Lower --learning_rate, or add "
                f"--grad_filter finite to skip such gradients"
            )


# ------------------------------------------------------------------------------------------------ fused_backward_pass


def units_of_parameters(optimizer: torch.optim.Optimizer) -> list[Unit]:
    """Give a unit for each parameter; the one optimizer steps it alone.

    bfloat16 weights are rounded stochastically, or small updates would be lost: they go up with the probability that
    makes the mean right. Source: Gupta et al. 2015, "Deep Learning with Limited Numerical Precision", section 3.1.
    """
    return [
        Unit([param], functools.partial(_step_alone, optimizer, number, param))
        for number, group in enumerate(optimizer.param_groups)
        for param in group["params"]
    ]


def _step_alone(optimizer: torch.optim.Optimizer, number: int, param: Tensor) -> None:
    groups = optimizer.param_groups  # loading a state replaces them, so the group is looked up at every step
    optimizer.param_groups = [{**groups[number], "params": [param]}]
    low = param.data if param.dtype == torch.bfloat16 else None
    try:
        if low is not None:
            _replace(param, low.float())
        optimizer.step()
    finally:
        optimizer.param_groups = groups
        if low is not None:
            new = param.data
            _replace(param, low)
            param.data.copy_(stochastically_rounded(new))


def _replace(param: Tensor, data: Tensor) -> None:
    gradient, param.grad = param.grad, None
    param.data = data
    param.grad = None if gradient is None else gradient.to(data.dtype)


def stochastically_rounded(tensor: Tensor) -> Tensor:
    """Give a float32 tensor as bfloat16, up or down at random in proportion to the distance.

    Adds a random number to the 16 bits that bfloat16 lacks, then cuts them off. Not finite values stay what they are.
    """
    bits = tensor.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, tensor.shape, dtype=torch.int32, device=tensor.device)
    rounded = bits.add(noise).bitwise_and_(-(1 << 16)).view(torch.float32)
    return torch.where(torch.isfinite(tensor), rounded, tensor).to(torch.bfloat16)


# --------------------------------------------------------------------------------------------- fused_optimizer_groups


def unit_of_optimizer(optimizer: torch.optim.Optimizer) -> Unit:
    """Give the unit of all parameters of an optimizer."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return Unit(params, lambda: optimizer.step())  # a schedule replaces the method later


def split_groups(groups: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Split parameter groups into about ``count`` of equal numbers of parameters, each with one learning rate."""
    size = -(-sum(len(group["params"]) for group in groups) // count)
    split: list[dict[str, Any]] = []
    room = 0
    for group in groups:
        rest = list(group["params"])
        if split and split[-1]["lr"] != group["lr"]:
            room = 0
        while rest:
            if room == 0:
                split.append({**group, "params": []})
                room = size
            taken, rest = rest[:room], rest[room:]
            split[-1]["params"] += taken
            room -= len(taken)
    return split


class OptimizerList:
    """Several optimizers seen as one: what is saved, restored and logged of them."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        self.optimizers = list(optimizers)
        for name in ("train", "eval"):  # only where averaged weights are kept
            functions = [getattr(each, name) for each in optimizers if callable(getattr(each, name, None))]
            if functions:
                setattr(self, name, functools.partial(_call_all, functions))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for each in self.optimizers for group in each.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [each.state_dict() for each in self.optimizers]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore every optimizer.

        Raises:
            ValueError: the state is of another number of optimizers.
        """
        if len(saved.get("optimizers", [])) != len(self.optimizers):
            raise ValueError(f"it holds {len(saved.get('optimizers', [0]))} optimizers, not {len(self.optimizers)}")
        for each, own in zip(self.optimizers, saved["optimizers"]):
            load_optimizer_state(each, own)


class SchedulerList:
    """Schedules of several optimizers, stepped together; ``repeats`` times an update, as accelerate does."""

    def __init__(self, schedulers: Sequence[Any], repeats: int):
        self.schedulers = list(schedulers)
        self.repeats = repeats

    def step(self) -> None:
        for _ in range(self.repeats):
            for each in self.schedulers:
                each.step()

    def state_dict(self) -> dict[str, Any]:
        return {"schedulers": [each.state_dict() for each in self.schedulers]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for each, own in zip(self.schedulers, saved["schedulers"], strict=True):
            each.load_state_dict(own)


def _call_all(functions: Sequence[Callable[[], Any]]) -> None:
    for function in functions:
        function()
