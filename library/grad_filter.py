"""Gradient filters for any optimizer: decide, just before a step, which entries of every gradient pass.

    handle = attach(torch.optim.AdamW(params), "topk keep=0.1 policy=update")

One file that stands alone: standard library and torch (2.4 upwards, Python 3.10 upwards). In a trainer, decorate the
function that adds the optimizer's options and the function that builds it:

    @with_grad_filter_arguments
    def add_optimizer_arguments(parser): ...

    @with_grad_filter
    def get_optimizer(args, params): ...        # -> (name, args text, optimizer)

In this file, in order: the contract of a filter, selection, the core stages, options, finding and building, parsing,
targets, the engine, policies, the attachment to an optimizer, the decorators. Beside it, loaded when they are there and
asked for: grad_filter_stages (more stages), _scopes (contests of tensors and units), _policies (freeze, moments,
residual), _custom (filters of one's own from files), _statistics and _plots (numbers and pictures), _tool (list,
describe, check), _batches and _cpu (speed).
"""

from __future__ import annotations

import argparse
import collections
import copy
import difflib
import fnmatch
import functools
import hashlib
import importlib
import importlib.util
import inspect
import logging
import math
import os
import re
import sys
import threading
import time
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

log = logging.getLogger(__name__)

STATE_KEY = "grad_filter"
STATE_VERSION = 1
OFF_WORDS = ("", "none", "off")
HANDLE_ATTRIBUTE = "grad_filter_handle"


class GradFilterError(ValueError):
    """A wrong filter, option or use; one line that names it and says what to type instead."""


# ---------------------------------------------------------------------------------------------- contract of a filter


@dataclass
class Context:
    """What a filter may ask for by naming it as an argument of its method; all of it is for reading.

    Attributes:
        step: filtered steps of this parameter so far. index: position of the parameter in the optimizer.
        param: the parameter. name, role, block: from :func:`tag_parameter`. group: number of its parameter group.
        lr: learning rate of the group. moments: the optimizer's state of the parameter, empty before its first step.
        optimizer_step: steps of the optimizer so far. total_norm: norm of all gradients together, 0-d.
        total_steps: optimizer steps of the run. micro_steps: batches accumulated in this gradient.
        timesteps, losses: of the samples behind this gradient, (B,). None where the trainer does not say.
        signs: positive minus negative micro-steps by entry, for filters with ``watches_micro_steps``.
    """

    param: Tensor
    index: int = 0
    step: int = 0
    name: str = ""
    role: str = ""
    block: str = ""
    group: int = 0
    lr: float = 0.0
    moments: Mapping[str, Any] = field(default_factory=dict)
    optimizer_step: int = 0
    total_norm: Tensor | None = None
    signs: Tensor | None = None
    total_steps: int | None = None
    micro_steps: int | None = None
    timesteps: Tensor | None = None
    losses: Tensor | None = None


FROM_TRAINER = ("total_steps", "micro_steps", "timesteps", "losses")
CALL_WORDS = ("grad", "state", "mask", "out", "context", *(item.name for item in fields(Context)))
KINDS = ("score", "mask", "transform")


class GradFilter:
    """Base of a filter: it decides, the engine acts. It never touches ``param.grad``, the optimizer or a file.

    A filter offers exactly one of

    * ``score(grad)``: how informative is each entry? Any real numbers, shape of grad. The engine passes the share
      ``keep`` with the largest scores: exactly that many, ties by lowest index, NaN last.
    * ``mask(grad)``: bool, shape of grad, True passes.
    * ``transform(grad)``: a new gradient, shape of grad.

    ``grad`` is finite, contiguous, float32 (float64 for float64 weights), not all zero; it must neither be changed nor
    kept. A method gets more by naming it: ``state`` (what :meth:`init_state` declared, for changing in place; saved and
    restored with the optimizer) and whatever stands in :class:`Context`. After a selection, ``passed(grad, mask,
    state)`` is called when a filter has it; it may give back the masked gradient if it had to compute that.
    Options are the arguments of ``__init__``; wrong ones raise ``GradFilterError``.

    Attributes:
        nonnegative: no score is ever below zero, which saves a pass over it.
        entrywise: what becomes of an entry depends on that entry of gradient and state alone, every tensor in the state
            has the shape of the gradient and is changed in place. Small tensors are then filtered many at a time.
        needs_float_buffers: it cannot work with buffers of 8 bits (``state_dtype``).
    """

    nonnegative = False
    entrywise = False
    needs_float_buffers = False

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        """Give the tensors kept for one parameter."""
        return {}


class _FunctionFilter(GradFilter):
    """A plain function as a filter: the arguments that are no words of :class:`Context` are its options."""

    def __init__(self, function: Callable[..., Tensor], kind: str, options: dict[str, Any]):
        self.kind = kind
        self.method = functools.partial(function, **options)


@dataclass(frozen=True)
class Registered:
    """A filter known by name; ``target`` is its class or function."""

    name: str
    summary: str
    target: Any
    kind: str

    def options(self) -> dict[str, inspect.Parameter]:
        """Give the options it declares, by name."""
        parameters = inspect.signature(self.target).parameters
        called = () if inspect.isclass(self.target) else CALL_WORDS
        return {name: item for name, item in parameters.items() if name not in called}

    def hints(self) -> dict[str, Any]:
        """Give the types of the options; what cannot be read is left out and told by the default."""
        try:
            return typing.get_type_hints(self.target.__init__ if inspect.isclass(self.target) else self.target)
        except (NameError, TypeError):
            return {}

    def build(self, options: dict[str, Any]) -> Any:
        if inspect.isclass(self.target):
            return self.target(**options)
        return _FunctionFilter(self.target, self.kind, options)


FILTERS: dict[str, Registered] = {}


def register_filter(name: str, summary: str = "", kind: str = "") -> Callable[[Any], Any]:
    """Make a class or a function known by ``name``.

    A function ``f(grad, ..., option=...)`` is a filter too: ``kind`` says which, otherwise one that gives bool is a
    mask and any other a score.
    """

    def register(target: Any) -> Any:
        FILTERS[name] = registered(target, name, summary, kind)
        return target

    return register


def registered(target: Any, name: str, summary: str = "", kind: str = "") -> Registered:
    if inspect.isclass(target):
        offered = [word for word in KINDS if callable(getattr(target, word, None))]
        if len(offered) != 1:
            found = " and ".join(offered) or "none"
            raise GradFilterError(f"{name}: a filter class has one of {', '.join(KINDS)}; this one has {found}")
        kind = offered[0]
    elif not callable(target) or "grad" not in inspect.signature(target).parameters:
        raise GradFilterError(f"{name}: {target!r} is neither a filter class nor a function f(grad, ...)")
    first_line = (inspect.getdoc(target) or "").partition("\n")[0]
    return Registered(name, summary or first_line, target, kind or "score or mask")


@dataclass(frozen=True)
class Preset:
    """Stages and options under a name people know; options the user types come after them and win."""

    stages: str
    args: tuple[str, ...] = ()
    summary: str = ""


PRESETS: dict[str, Preset] = {
    "sd2085": Preset(
        "ema,topk_change", ("ema.beta=0.9", "topk_ratio=0.9"), "the request, in front of SignSGD momentum=0"
    ),
}


# ------------------------------------------------------------------------------------------------------- selection

CHUNK = 1 << 16  # entries; a float32 chunk and its neighbours stay in the cache of one core
TILE = 256  # entries that share one scale in 8-bit optimizer states


def keep_count(keep: float, size: int) -> int:
    """Give how many of ``size`` entries the share ``keep`` is: rounded half up, at least one."""
    return min(size, max(1, math.floor(keep * size + 0.5)))


def chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Give contiguous tensors of equal size piece by piece, on the CPU in pieces that fit the cache."""
    flat = [tensor.view(-1) for tensor in tensors]
    if flat[0].numel() <= CHUNK:
        yield tuple(flat)
        return
    step = CHUNK if flat[0].device.type == "cpu" else max(1, flat[0].numel())
    for start in range(0, flat[0].numel(), step):
        yield tuple(tensor[start : start + step] for tensor in flat)


def kernels(*tensors: Tensor) -> Any:
    """Give the module of fast passes for these tensors; None where the plain ones have to do."""
    if not all(tensor.is_cpu and tensor.is_contiguous() for tensor in tensors):
        return None
    return _load_beside("grad_filter_cpu", "numpy")


def ordered_bits(scores: Tensor, nonnegative: bool = False) -> Tensor:
    """Give integers that order like the scores, NaN lowest: the bits of a non-negative float already do."""
    integer = torch.int64 if scores.dtype is torch.float64 else torch.int32
    if nonnegative:
        return scores.view(integer)
    bits = (scores + 0.0).view(integer)  # -0.0 becomes 0.0
    bits = torch.where(bits < 0, bits ^ torch.iinfo(integer).max, bits)
    return bits.masked_fill_(scores.isnan(), torch.iinfo(integer).min)


def largest_in_rows(bits: Tensor, count: int) -> Tensor:
    """Give the ``count``-th largest integer of each row.

    Args:
        bits: (rows, size) int32 or int64, contiguous. count: 1 to size.

    Returns:
        (rows, 1), on the device of ``bits``; nothing waits for the device.
    """
    fast = kernels(bits)
    if fast is not None:
        return fast.largest_in_rows(bits, count)
    if bits.device.type == "cpu" or bits.shape[1] <= 1 << 17:
        return bits.kthvalue(bits.shape[1] - count + 1, dim=1, keepdim=True).values
    return _threshold_bit_by_bit(bits, count)


def _threshold_bit_by_bit(bits: Tensor, count: int) -> Tensor:
    """Build the ``count``-th largest of each row from its highest bit down; only counts are ever stored."""
    highest = torch.iinfo(bits.dtype).bits - 2
    negative = (bits >= 0).sum(dim=1, keepdim=True) < count
    found = torch.where(negative, torch.iinfo(bits.dtype).min, 0).to(bits.dtype)
    for bit in range(highest, -1, -1):
        tried = found + (1 << bit)
        found = torch.where((bits >= tried).sum(dim=1, keepdim=True) >= count, tried, found)
    return found


def pass_largest(bits: Tensor, count: int) -> Tensor:
    """Give the mask of the ``count`` largest integers of each row: exactly that many, ties by lowest index.

    Args:
        bits: (rows, size) from :func:`ordered_bits`. count: at least 0.

    Returns:
        bool, (rows, size).
    """
    if count >= bits.shape[1]:
        return torch.ones_like(bits, dtype=torch.bool)
    if count <= 0:
        return torch.zeros_like(bits, dtype=torch.bool)
    threshold = largest_in_rows(bits, count)
    fast = kernels(bits)
    if fast is not None:
        mask = torch.empty_like(bits, dtype=torch.bool)
        passing = fast.at_least(bits, threshold, mask)
    else:
        mask = bits >= threshold
        passing = int(torch.count_nonzero(mask)) if bits.is_cpu else -1
    if passing == count * len(bits):
        return mask  # no ties at any threshold, which is cheap to see
    if bits.is_cpu:
        surplus = torch.count_nonzero(mask, dim=1) - count
        for row in surplus.nonzero().view(-1).tolist():
            _drop_last_ties(mask[row], bits[row], threshold[row], int(surplus[row]))
        return mask
    above = bits > threshold
    missing = count - above.sum(dim=1, keepdim=True)
    ties = mask & ~above
    return above | (ties & (torch.cumsum(ties, dim=1, dtype=torch.int32) <= missing))


def _drop_last_ties(mask: Tensor, bits: Tensor, threshold: Tensor, surplus: int) -> None:
    """Take ``surplus`` entries equal to ``threshold`` out of a mask, from the end; no index tensor is full size."""
    stop = bits.numel()
    while surplus:
        start = max(0, stop - CHUNK)
        ties = (bits[start:stop] == threshold).nonzero().view(-1)[-surplus:]
        mask[start + ties] = False
        surplus -= ties.numel()
        stop = start


class _Memory(threading.local):
    def __init__(self) -> None:
        self.tensors: dict[tuple[str, torch.dtype], Tensor] = {}


_memory = _Memory()


def scratch(shape: torch.Size, dtype: torch.dtype, purpose: str, device: torch.device | None = None) -> Tensor:
    """Give memory that is used again at the next call for the same purpose, so its content is for the moment only.

    Fresh memory costs more than most passes over it. What is kept is as large as the largest tensor that asked.
    """
    if device is not None and device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)  # its allocator does the same
    size = math.prod(shape)
    kept = _memory.tensors.get((purpose, dtype))
    if kept is None or kept.numel() < size:
        kept = _memory.tensors[purpose, dtype] = torch.empty(size, dtype=dtype)
    return kept[:size].view(shape)


def row_shape(shape: Sequence[int], ndim: int | None) -> tuple[int, int]:
    """Give (rows, size) for the trailing ``ndim`` dimensions of a shape, in the manner of rai_toolbox's param_ndim.

    Args:
        shape: of the tensor. ndim: 0 or more counts trailing dimensions, negative is an offset from the number of
            dimensions, None is the whole tensor; more than there are is the whole tensor.
    """
    if ndim is None:
        return 1, math.prod(shape)
    count = min(len(shape), ndim) if ndim >= 0 else max(0, len(shape) + ndim)
    cut = len(shape) - count
    return math.prod(shape[:cut]), math.prod(shape[cut:])


def seed_of(*parts: Any) -> int:
    """Give a 63-bit seed that depends on all ``parts``, the same on every process and platform."""
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def random_like(grad: Tensor, *parts: Any) -> Tensor:
    """Give uniform numbers in [0, 1), shape of grad, that depend on ``parts`` and the kind of device alone."""
    generator = torch.Generator(device=grad.device).manual_seed(seed_of(*parts))
    return torch.rand(grad.shape, generator=generator, device=grad.device)


# ------------------------------------------------------------------------------------------------------ core stages


def require(condition: bool, stage: str, key: str, value: Any, allowed: str, example: Any) -> None:
    """Raise the one-line error of a wrong option unless ``condition`` holds."""
    if not condition:
        raise GradFilterError(
            f"{stage}: {key} must be {allowed}, got {as_text(value)}. Example: {key}={as_text(example)}"
        )


@register_filter("finite", summary="leave out steps with NaN or Inf (nan=skip), or zero such entries (nan=zero)")
class Finite(GradFilter):
    """Guard against NaN and Inf. Always first, also when it is not named; naming it changes what it does.

    Args:
        nan: ``skip`` leaves the whole step out and changes no buffer; ``zero`` lets the other entries pass.

    No state. The engine looks at every gradient once, also at those that pass untouched.
    """

    def __init__(self, nan: Literal["skip", "zero"] = "skip"):
        self.nan = nan

    def transform(self, grad: Tensor) -> Tensor:
        return grad  # the engine has dealt with it


@register_filter("topk", summary="pass the share keep of entries with the largest magnitude")
class TopK(GradFilter):
    """Pass the largest |g|: exactly ``keep`` of them, ties by lowest index.

    No state. Source: GMT (arXiv:2406.15330), rai_toolbox's TopQGradientOptimizer, DGC (arXiv:1712.01887).
    """

    nonnegative = entrywise = True

    def score(self, grad: Tensor, out: Tensor) -> Tensor:
        return torch.abs(grad, out=out)


@register_filter("topk_change", summary="pass what changed most against the last masked gradient (the request)")
class TopKChange(GradFilter):
    """Pass the largest relative changes r = |u - P| / (|P| + eps); then P becomes the masked u.

    The filter of the feature request, bit for bit; P starts at 0. Because P holds the masked gradient, at ``keep`` up
    to one half consecutive masks never overlap and the change is never used (magnitude with a rest of one step), at
    exactly one half two complementary halves alternate for ever, above it small noisy entries are favoured.

    Args:
        topk_ratio: share that is dropped, in [0, 1], 0.9 when neither share is given; k = int(n * (1 - topk_ratio)) in
            the request's own rounding, and k = 0 passes everything.
        keep: the same as a share that passes, rounded as everywhere else; not together with another topk_ratio.
        eps: added to |P|, above 0.
        previous: what P becomes: ``masked`` (the request), ``raw`` (the whole u) or ``ema`` (0.9 P + 0.1 u).

    State: ``prev``, float32, shape of the gradient (4 bytes for each trained value).
    """

    nonnegative = entrywise = True

    def __init__(
        self,
        topk_ratio: float | None = None,
        keep: float | None = None,
        eps: float = 1e-8,
        previous: Literal["masked", "raw", "ema"] = "masked",
    ):
        require(
            topk_ratio is None or 0.0 <= topk_ratio <= 1.0, "topk_change", "topk_ratio", topk_ratio, "in [0, 1]", 0.9
        )
        require(keep is None or 0.0 < keep <= 1.0, "topk_change", "keep", keep, "in (0, 1]", 0.1)
        require(eps > 0.0, "topk_change", "eps", eps, "above 0", 1e-8)
        if keep is not None and topk_ratio is not None and abs(keep + topk_ratio - 1.0) > 1e-6:
            raise GradFilterError(f"topk_change: keep={keep} and topk_ratio={topk_ratio} do not add up to 1. Give one")
        self.keep = keep if topk_ratio is None else None
        self.topk_ratio = 0.9 if topk_ratio is None else topk_ratio
        self.eps, self.previous = eps, previous

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        return {"prev": torch.zeros(param.shape, dtype=work_dtype(param), device=param.device)}

    def count(self, size: int) -> int:
        """Give how many of ``size`` entries pass."""
        if self.keep is not None:
            return keep_count(self.keep, size)
        return int(size * (1 - self.topk_ratio)) or size

    def score(self, grad: Tensor, state: dict[str, Tensor], out: Tensor) -> Tensor:
        fast = kernels(grad, state["prev"], out)
        if fast is not None:
            fast.relative_change(grad, state["prev"], self.eps, out)
            return out
        return torch.sub(grad, state["prev"], out=out).abs_().div_(state["prev"].abs().add_(self.eps))

    def passed(self, grad: Tensor, mask: Tensor, state: dict[str, Tensor]) -> Tensor | None:
        if self.previous == "masked":
            return masked(grad, mask, out=state["prev"])
        if self.previous == "raw":
            state["prev"].copy_(grad)
        else:
            state["prev"].lerp_(grad, 0.1)
        return None


@register_filter("ema", summary="replace the gradient by its running mean")
class Ema(GradFilter):
    """Smooth: u = beta * u + (1 - beta) * g. Momentum-free SignSGD behind it is SignSGD with momentum.

    Args:
        beta: share of the old mean kept each step, in [0, 1). debias: divide by 1 - beta^t.

    State: ``ema``, float32, shape of the gradient.
    """

    entrywise = True

    def __init__(self, beta: float = 0.9, debias: bool = False):
        require(0.0 <= beta < 1.0, "ema", "beta", beta, "in [0, 1)", 0.9)
        self.beta, self.debias = beta, debias

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        return {"ema": torch.zeros(param.shape, dtype=work_dtype(param), device=param.device)}

    def transform(self, grad: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
        for mean, value in chunks(state["ema"], grad):
            mean.mul_(self.beta).add_(value * (1 - self.beta))  # lerp would round otherwise than the formula
        return state["ema"] / (1 - self.beta ** (step + 1)) if self.debias else state["ema"]


def work_dtype(tensor: Tensor) -> torch.dtype:
    """Give the type filters compute in: float32, and float64 for float64."""
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def rms(grad: Tensor) -> Tensor:
    """Give the root mean square as a 0-d tensor."""
    return grad.square().mean().sqrt()


@functools.cache
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device)


def masked(grad: Tensor, mask: Tensor, out: Tensor | None = None) -> Tensor:
    """Give the gradient with zeros where the mask is False; never a product, which would keep NaN and -0.

    Args:
        grad: any shape and type, ``out`` may be the same tensor. mask: bool, same shape.
    """
    if out is None:
        out = torch.empty_like(grad)
    fast = kernels(grad, mask, out)
    if fast is None:
        return torch.where(mask, grad, _zero(grad.dtype, grad.device), out=out)
    fast.masked(grad, mask, out)
    return out


# --------------------------------------------------------------------------------------------------------- options


@dataclass(frozen=True)
class ChainOptions:
    """Options of the whole chain.

    Attributes:
        policy: what happens at masked entries. ``zero``: the optimizer sees zeros, momentum and weight decay still move
            the weights. ``update``: it sees the whole gradient and the weights are put back after the step.
            ``moments``: it sees zeros and its moments are put back. ``freeze``: weights and moments are put back.
            ``residual``: it sees zeros, what was dropped is added to the next gradient.
        decay: with residual the share of the old rest that is kept, 1 unless given; with freeze ``all`` lets weight
            decay through.
        bias_correction: ``entry`` counts Adam's steps for each entry, with policy=freeze.
        rescale: what passes is multiplied: ``norm`` keeps the norm, ``keep`` divides by the share that passed,
            ``cautious`` by (passed + 1) / all; with policy=update it is the movement that is multiplied.
        scope: who competes: ``row`` (all but the first dimension), ``tensor``, ``group`` of the optimizer, ``global``.
        unit: what passes together: ``entry``, ``row``, LoRA rank ``component`` of down and up together, ``tile`` of 256
            entries, ``tensor``.
        floor, cap: least and largest share of one tensor with scope group or global.
        warmup: optimizer steps before the filter starts. ramp: steps in which the share then falls from all to keep,
            ``ramp_shape`` linear or cubic. every: filter each n-th step only. until: step at which the filter ends, 0
            for never.
        min_numel: smaller tensors pass untouched. log_every: steps between statistics. statistics: ``full`` also
            follows single entries (overlap of masks, entries by age, real movement) for 7 bytes an entry.
        state_dtype: how buffers are kept between steps; fp8 and int8 share a scale for 256 entries. state_device:
            ``cpu`` keeps them in the computer's memory.
    """

    policy: str = "zero"
    decay: str = ""
    bias_correction: Literal["global", "entry"] = "global"
    rescale: Literal["none", "norm", "cautious", "keep"] = "none"
    scope: Literal["row", "tensor", "group", "global"] = "tensor"
    unit: Literal["entry", "row", "component", "tile", "tensor"] = "entry"
    floor: float = 0.0
    cap: float = 1.0
    warmup: int = 0
    ramp: int = 0
    ramp_shape: Literal["linear", "cubic"] = "linear"
    every: int = 1
    until: int = 0
    min_numel: int = 64
    log_every: int = 10
    statistics: Literal["basic", "full"] = "basic"
    state_dtype: Literal["fp32", "bf16", "fp8", "int8"] = "fp32"
    state_device: Literal["same", "cpu"] = "same"

    def __post_init__(self) -> None:
        for key, least in (("warmup", 0), ("ramp", 0), ("every", 1), ("until", 0), ("min_numel", 0), ("log_every", 1)):
            require(getattr(self, key) >= least, "grad_filter", key, getattr(self, key), f"at least {least}", least)
        require(0.0 <= self.floor <= self.cap <= 1.0 and self.cap > 0.0, "grad_filter", "floor and cap",
                (self.floor, self.cap), "shares with floor at most cap", (0.01, 0.5))  # fmt: skip
        wide = self.scope in ("group", "global")
        if self.limits_tensors and not wide:
            raise GradFilterError("grad_filter: floor and cap need scope=group or scope=global. Add scope=global")
        if self.unit == "tensor" and not wide:
            raise GradFilterError("grad_filter: unit=tensor needs tensors that compete. Add scope=global")
        if self.scope == "row" and self.unit != "entry":
            raise GradFilterError(f"grad_filter: unit={self.unit} cannot compete within a row. Use scope=tensor")

    @property
    def packs(self) -> bool:
        return self.state_dtype != "fp32" or self.state_device != "same"

    @property
    def limits_tensors(self) -> bool:
        return self.floor > 0.0 or self.cap < 1.0

    def active(self, step: int) -> bool:
        """Say whether the filter acts at optimizer step ``step``, counted from 0."""
        return step >= self.warmup and (step - self.warmup) % self.every == 0 and (not self.until or step < self.until)

    def progress(self, step: int) -> float:
        """Give how much of what is to be dropped is dropped at optimizer step ``step``, 0 to 1."""
        if step >= self.warmup + self.ramp:
            return 1.0
        left = 1.0 - (step - self.warmup) / self.ramp
        return 1.0 - left ** (3 if self.ramp_shape == "cubic" else 1)


@dataclass(frozen=True)
class Selection:
    """Options that every scoring filter has besides its own.

    Attributes:
        keep: share that passes, in (0, 1]. ndim: entries compete within the trailing dimensions, see
            :func:`row_shape`; tensors of one dimension compete as a whole. jitter: the share varies evenly by this part
            of itself from step to step. seed: of the jitter.
    """

    keep: float = 0.1
    ndim: int | None = None
    jitter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        require(0.0 < self.keep <= 1.0, "grad_filter", "keep", self.keep, "in (0, 1]", 0.1)
        require(0.0 <= self.jitter < 1.0, "grad_filter", "jitter", self.jitter, "in [0, 1)", 0.2)

    def share(self, step: int) -> float:
        if not self.jitter:
            return self.keep
        drawn = seed_of("jitter", self.seed, step) / 2**63
        return min(1.0, self.keep * (1.0 + self.jitter * (2.0 * drawn - 1.0)))


@dataclass(frozen=True)
class StageSpec:
    """One stage: the name typed, and the options typed for it."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class ChainSpec:
    """Stages in order and the chain's options."""

    stages: tuple[StageSpec, ...]
    options: ChainOptions = field(default_factory=ChainOptions)

    def words(self) -> list[str]:
        """Give the options that were typed, each as ``key=value``."""
        typed = [f"{stage.name}.{key}={as_text(value)}" for stage in self.stages for key, value in stage.options]
        default = vars(ChainOptions())
        return typed + [f"{k}={as_text(v)}" for k, v in vars(self.options).items() if v != default[k]]

    def canonical(self) -> str:
        """Give the text that describes the chain completely: same text, same behaviour."""
        return " ".join([",".join(stage.name for stage in self.stages), *self.words()])


@dataclass(frozen=True)
class Target:
    """A rule for some parameters: another chain (None: no filter), or other options of the chain they have."""

    pattern: str
    chain: ChainSpec | None = None
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class FilterSpec:
    """Everything that was asked for.

    Attributes:
        chain: for parameters without a rule. targets: the last rule with a chain decides the chain of what it matches,
            then every rule with options changes them, in order. target_words: the rules as typed.
    """

    chain: ChainSpec
    targets: tuple[Target, ...] = ()
    target_words: tuple[str, ...] = ()

    def canonical(self) -> str:
        return " ".join([self.chain.canonical(), *(f"@{word}" for word in self.target_words)])

    def chain_for(self, means: Callable[[str], bool]) -> ChainSpec | None:
        """Give the chain of a parameter; ``means`` says whether a pattern matches it."""
        matching = [target for target in self.targets if means(target.pattern)]
        chain = ([self.chain] + [target.chain for target in matching if not target.words])[-1]
        for target in matching:
            if chain is not None and target.words:
                chain = _with_words(chain, [word for word in target.words if _accepts(chain, word)])
        return chain

    def metadata(self) -> dict[str, str]:
        """Give the two entries recorded with a trained network; of files only their base names."""
        names = ",".join(os.path.basename(stage.name) for stage in self.chain.stages)
        words = [*self.chain.words(), *(f"@{word}" for word in self.target_words)]
        return {"ss_grad_filter": names, "ss_grad_filter_args": " ".join(map(_without_folders, words))}


def _without_folders(word: str) -> str:
    """Give a ``key=value`` word with the base names of the files in it."""
    key, equals, value = word.partition("=")
    return os.path.basename(key) + equals + ",".join(map(os.path.basename, value.split(",")))


def as_text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return ",".join(map(as_text, value)) if isinstance(value, tuple) else str(value)


def _words(value: Any) -> list[str]:
    """Give the words of a setting that arrives as a list, as one string, or not at all; strips one pair of quotes."""
    items = value.split() if isinstance(value, str) else [] if value is None else list(value)
    words = []
    for item in items:
        word = str(item).strip()
        if len(word) > 1 and word[0] == word[-1] == "'":
            word = word[1:-1].strip()
        words += word.split()
    return words


def suggest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


# ------------------------------------------------------------------------------------------- finding and building


def known_filters() -> dict[str, Registered]:
    """Give every filter known by name: the core ones, those of grad_filter_stages.py, and those of filter folders."""
    _load_beside("grad_filter_stages")
    custom = _load_beside("grad_filter_custom")
    if custom is not None:
        custom.register_all()
    return FILTERS


@functools.cache
def _load_beside(name: str, needs: str = "") -> types.ModuleType | None:
    """Load an optional file that lies beside this one, when the package it ``needs`` is installed.

    Without it there is less to choose from, or the same takes longer.
    """
    installed = not needs or importlib.util.find_spec(needs) is not None
    if installed and __package__ and Path(__file__).with_name(f"{name}.py").is_file():
        return importlib.import_module(f"{__package__}.{name}")
    return None


def needed(name: str, what: str) -> types.ModuleType:
    """Load a file that must lie beside this one for ``what`` was asked."""
    module = _load_beside(name)
    if module is None:
        raise GradFilterError(f"grad_filter: {what} needs {name}.py beside grad_filter.py. Copy it there")
    return module


def resolve(name: str, allow_code: bool = True) -> Registered:
    """Find a filter by name: built in, a file of a filter folder, ``package.module:Name`` or ``file.py:Name``.

    Raises:
        GradFilterError: unknown, not importable, or code where ``allow_code`` is False.
    """
    if name not in FILTERS:
        _load_beside("grad_filter_stages")
    if name in FILTERS:
        return FILTERS[name]
    custom = needed("grad_filter_custom", name) if ":" in name else _load_beside("grad_filter_custom")
    found = custom.find(name, allow_code) if custom is not None else None
    if found is not None:
        return found
    known = sorted({*known_filters(), *PRESETS})
    if name in FILTERS:  # registered by a file of another name
        return FILTERS[name]
    raise GradFilterError(
        f"--grad_filter: no filter is called {name!r}.{suggest(name, known)} There are {len(known)}, among them topk, "
        f"ema, finite; python -m library.grad_filter list prints all"
    )


def accepted_options(registered: Registered) -> dict[str, inspect.Parameter]:
    """Give the options of a stage: its own, and those of :class:`Selection` when it scores."""
    options = registered.options()
    if registered.kind.startswith("score"):
        for item in fields(Selection):
            kind = inspect.Parameter.KEYWORD_ONLY
            options.setdefault(item.name, inspect.Parameter(item.name, kind, default=item.default))
    return options


def _type_of(registered: Registered, key: str) -> Any:
    hints = {**typing.get_type_hints(Selection), **registered.hints()}
    default = accepted_options(registered)[key].default
    return hints.get(key, str if default in (None, inspect.Parameter.empty) else type(default))


def convert(text: str, kind: Any, where: str, example: Any) -> Any:
    """Convert the text of an option to a type: bool, int, float, str, ``Literal``, a tuple of one of them, or None.

    Raises:
        GradFilterError: the text is no such value.
    """
    wrong = GradFilterError(
        f"--grad_filter_args {where}={text}: give {_kind_words(kind)}. Example: {where}={as_text(example)}"
    )
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        if type(None) in typing.get_args(kind) and text.lower() == "none":
            return None
        kind = next(one for one in typing.get_args(kind) if one is not type(None))
    if typing.get_origin(kind) is Literal:
        if text not in typing.get_args(kind):
            raise wrong
        return text
    if typing.get_origin(kind) is tuple:
        return tuple(convert(part, typing.get_args(kind)[0], where, example) for part in text.split(","))
    if kind is bool:
        if text.lower() not in ("true", "1", "yes", "false", "0", "no"):
            raise wrong
        return text.lower() in ("true", "1", "yes")
    if kind not in (int, float):
        return text
    try:
        number = float(text[:-1]) / 100.0 if text.endswith("%") else float(text)
    except ValueError:
        raise wrong from None
    if not math.isfinite(number) or (kind is int and number != int(number)):
        raise wrong
    return kind(number)


def _kind_words(kind: Any) -> str:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(_kind_words(one) for one in typing.get_args(kind))
    if typing.get_origin(kind) is Literal:
        return " or ".join(typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return f"{_kind_words(typing.get_args(kind)[0])}, several with commas"
    names = {bool: "true or false", int: "a whole number", float: "a number", type(None): "none"}
    return names.get(kind, "a word")


# ------------------------------------------------------------------------------------------------------- parsing


def parse_spec(
    grad_filter: Any, grad_filter_args: Any = None, grad_filter_targets: Any = None, *, allow_code: bool = True
) -> FilterSpec | None:
    """Read the three settings, however they arrive, and check every part of them.

    Args:
        grad_filter: stages with commas, or a preset; empty, ``none`` or absent is off. Options may follow in the text.
        grad_filter_args: ``key=value`` words. grad_filter_targets: ``pattern=stages``, ``pattern=none`` or
            ``pattern:key=value`` words. allow_code: whether ``file.py:Name`` may be used.

    Returns:
        The specification, None when the filter is off.

    Raises:
        GradFilterError: an unknown name or a wrong value.
    """
    names, words, target_words = _words(grad_filter), _words(grad_filter_args), _words(grad_filter_targets)
    words = [word for word in names if "=" in word] + words  # "topk keep=0.1" in one text
    stages = [part for word in names if "=" not in word for part in word.split(",") if part]
    if not stages or [part.lower() for part in stages] in ([word] for word in OFF_WORDS):
        if words or target_words:
            raise GradFilterError(
                f"--grad_filter_args {' '.join([*words, *target_words])}: no filter is on. Add --grad_filter"
            )
        return None
    chain = parse_chain(stages, words, allow_code)
    return FilterSpec(
        chain, tuple(_parse_target(word, chain, allow_code) for word in target_words), tuple(target_words)
    )


def parse_chain(
    stages: Sequence[str], words: Sequence[str], allow_code: bool = True, options: ChainOptions | None = None
) -> ChainSpec:
    """Make a chain of stage names (or one preset's name) and ``key=value`` words, and check it by building it."""
    _load_beside("grad_filter_stages")
    if len(stages) == 1 and stages[0] in PRESETS:
        preset = PRESETS[stages[0]]
        stages, words = preset.stages.split(","), [*preset.args, *words]
    if len(set(stages)) != len(stages):
        raise GradFilterError(f"--grad_filter {','.join(stages)}: a stage is named twice. Name each stage once")
    ordered = sorted(stages, key=lambda name: name != "finite")  # it always comes first
    for name in ordered:
        resolve(name, allow_code)
    empty = ChainSpec(tuple(StageSpec(name) for name in ordered), options or ChainOptions())
    return _with_words(empty, words)


def _with_words(chain: ChainSpec, words: Sequence[str]) -> ChainSpec:
    """Change options of a chain; a key given twice in ``words`` is named in the log, the last one wins."""
    found = {stage.name: resolve(stage.name) for stage in chain.stages}
    values = {stage.name: dict(stage.options) for stage in chain.stages}
    chain_values: dict[str, Any] = {}
    seen: dict[tuple[str | None, str], str] = {}
    for word in words:
        stage, key, text = _owner(word, {name: accepted_options(one) for name, one in found.items()})
        if seen.setdefault((stage, key), text) != text:
            log.info("grad_filter: %s is given twice, %s=%s wins", key, key, text)
        if stage is None:
            example = getattr(ChainOptions(), key)
            chain_values[key] = convert(text, typing.get_type_hints(ChainOptions)[key], key, example)
        else:
            default = accepted_options(found[stage])[key].default
            example = 1 if default in (None, inspect.Parameter.empty) else default
            values[stage][key] = convert(text, _type_of(found[stage], key), key, example)
    stages = tuple(StageSpec(name, tuple(sorted(own.items()))) for name, own in values.items())
    changed = ChainSpec(stages, replace(chain.options, **chain_values))
    Chain(changed)  # filters check the ranges of their options when they are built
    return changed


def _owner(word: str, accepted: Mapping[str, Mapping[str, Any]]) -> tuple[str | None, str, str]:
    """Give (stage or None for the chain, key, text) of a ``key=value`` or ``stage.key=value`` word."""
    left, equals, text = word.partition("=")
    if not equals or not left or not text:
        raise GradFilterError(f"--grad_filter_args: {word!r} is not key=value. Example: --grad_filter_args keep=0.1")
    for stage in accepted:  # a stage's own name may hold dots, so compare whole names
        if left.startswith(f"{stage}."):
            key = left[len(stage) + 1 :]
            if key not in accepted[stage]:
                known = ", ".join(accepted[stage]) or "none"
                near = suggest(key, accepted[stage])
                raise GradFilterError(f"--grad_filter_args: {stage} has no option {key!r}.{near} Known: {known}")
            return stage, key, text
    owners = [stage for stage, keys in accepted.items() if left in keys]
    if len(owners) > 1:
        choices = " or ".join(f"{stage}.{left}={text}" for stage in owners)
        raise GradFilterError(f"--grad_filter_args {word}: several stages have {left}. Write {choices}")
    if owners or left in vars(ChainOptions()):
        return (owners[0] if owners else None), left, text
    known_words = sorted({*vars(ChainOptions()), *(key for keys in accepted.values() for key in keys)})
    near = suggest(left, known_words)
    raise GradFilterError(f"--grad_filter_args: no option is called {left!r}.{near} Known: {', '.join(known_words)}")


def _accepts(chain: ChainSpec, word: str) -> bool:
    left = word.partition("=")[0]
    stages = {stage.name: accepted_options(resolve(stage.name)) for stage in chain.stages}
    qualified = {f"{name}.{key}" for name, keys in stages.items() for key in keys}
    return left in qualified or left in vars(ChainOptions()) or any(left in keys for keys in stages.values())


def _parse_target(word: str, chain: ChainSpec, allow_code: bool) -> Target:
    pattern, _, names = word.partition("=")
    if ":" in pattern:  # pattern:key=value,key=value
        pattern, _, settings = word.partition(":")
        words = tuple(settings.split(","))
        if pattern and all(words):
            _with_words(chain, words)
            return Target(pattern, words=words)
    elif pattern and names.lower() in OFF_WORDS[1:]:
        return Target(pattern)
    elif pattern and names:
        return Target(pattern, parse_chain(names.split(","), [], allow_code, chain.options))
    raise GradFilterError(
        f"--grad_filter_targets {word}: neither pattern=stages nor pattern:key=value. Example: te=none up:keep=0.5"
    )


# --------------------------------------------------------------------------------------------------------- targets


@dataclass(frozen=True)
class Tags:
    """What a parameter is called; the trainer says it with :func:`tag_parameter`."""

    name: str = ""
    role: str = ""
    block: str = ""


def tag_parameter(param: Tensor, name: str, role: str = "", block: str = "") -> None:
    """Name a parameter for targets, plans, pictures and saved states.

    Args:
        name: full name. role: ``down`` or ``up`` in a LoRA. block: block of the model, as IN08 or TE.
    """
    param.grad_filter_tags = Tags(name, role, block)  # type: ignore[attr-defined]


def matches(pattern: str, tags: Tags, group: int, index: int, shape: Sequence[int]) -> bool:
    """Say whether a target pattern means this parameter; ``%`` or ``*`` in it stands for anything.

    It is compared with the role (up, lora_up), the block (IN08), the group (group0), the position (index3), the shape
    (16x320), the whole name, and runs of whole pieces of the name, which dots and underscores divide: ``unet``, ``te``
    and ``down_blocks_0`` are pieces of LoRA names.
    """
    wanted = pattern.replace("%", "*").lower()
    size = "x".join(map(str, shape))
    words = [tags.role, f"lora_{tags.role}", tags.block, f"group{group}", f"index{index}", size, tags.name]
    if any(fnmatch.fnmatchcase(word.lower(), wanted) for word in words if word):
        return True
    return re.search(rf"(^|[._]){re.escape(wanted)}($|[._])", tags.name.lower()) is not None


# ---------------------------------------------------------------------------------------------------------- engine


class Stage:
    """A stage ready to run: its filter, which of the three methods that offers, and what its methods ask for."""

    def __init__(self, spec: StageSpec, chain: ChainOptions):
        self.name = spec.name
        self.chain = chain
        registered = resolve(spec.name)
        own, selection = registered.options(), {item.name for item in fields(Selection)}
        options = dict(spec.options)
        missing = [k for k, item in own.items() if item.default is inspect.Parameter.empty and k not in options]
        if missing:
            raise GradFilterError(f"{self.name}: the option {missing[0]} has to be given. Example: {missing[0]}=1")
        self.selection = Selection(**{k: v for k, v in options.items() if k in selection and k not in own})
        try:
            self.filter = registered.build({key: value for key, value in options.items() if key in own})
        except GradFilterError:
            raise
        except (ValueError, TypeError) as error:
            raise GradFilterError(f"{self.name}: {error}") from error
        self.kind = registered.kind
        self._method = getattr(self.filter, "method", None) or getattr(self.filter, self.kind)
        self._passed, self._factor = (getattr(self.filter, name, None) for name in ("passed", "factor"))
        self._asked = {
            method: [word for word in inspect.signature(method).parameters if word in CALL_WORDS]
            for method in (self._method, self._passed, self._factor)
            if method is not None
        }

    @property
    def scores(self) -> bool:
        return self.kind.startswith("score")

    @property
    def words(self) -> set[str]:
        """What its methods ask for."""
        return {word for words in self._asked.values() for word in words}

    def asks_for(self, word: str) -> bool:
        return word in self.words

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        state = self.filter.init_state(param) if hasattr(self.filter, "init_state") else {}
        for key, value in state.items():
            if not isinstance(value, Tensor):
                raise GradFilterError(
                    f"{self.name}: init_state gave {key} of type {type(value).__name__}, not a tensor"
                )
        return state

    def _call(self, method: Callable[..., Any], work: Work, **given: Any) -> Any:
        known = {"grad": work.input_of(self.kind), "state": work.slot.buffers[self.name], "context": work.context}
        known |= given
        asked = self._asked[method]
        return method(**{word: known[word] if word in known else getattr(work.context, word) for word in asked})

    def run(self, works: Sequence[Work]) -> None:
        """Run on tensors that compete with each other: change their values or their masks."""
        results = [self._result(work, alone=len(works) == 1) for work in works]
        if self.kind == "transform":
            for work, result in zip(works, results):
                work.replace(result)
            return
        if results[0].dtype is torch.bool:
            masks = results
        elif self.kind == "mask":
            raise GradFilterError(f"{self.name}: mask() has to give bool, got {results[0].dtype}")
        else:
            masks = self._select(results, works)
        for work, mask in zip(works, masks):
            passed = self._call(self._passed, work, mask=mask) if self._passed else None
            if self._factor is not None:
                work.scale(self._call(self._factor, work, mask=mask))
            work.restrict(mask, passed)

    def _result(self, work: Work, alone: bool) -> Tensor:
        given = {}
        if "out" in self._asked[self._method]:
            whole = work.whole
            given["out"] = (
                scratch(whole.shape, whole.dtype, "score", whole.device) if alone else torch.empty_like(whole)
            )
        result = self._call(self._method, work, **given)
        if not isinstance(result, Tensor) or result.shape != work.whole.shape:
            got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise GradFilterError(f"{self.name}: gave {got} for a gradient of shape {tuple(work.whole.shape)}")
        return result if result.dtype is torch.bool else result.to(work.whole.dtype).contiguous()

    def count(self, size: int, work: Work) -> int:
        """Give how many of ``size`` competitors pass at this step."""
        own = getattr(self.filter, "count", None)
        count = own(size) if own else keep_count(self.selection.share(work.context.step), size)
        return size - math.floor((size - count) * self.chain.progress(work.context.optimizer_step) + 0.5)

    def _select(self, scores: list[Tensor], works: Sequence[Work]) -> list[Tensor]:
        nonnegative = getattr(self.filter, "nonnegative", False)
        if self.chain.unit != "entry" or len(works) > 1 or self.chain.limits_tensors:
            return needed("grad_filter_scopes", "a contest of tensors or units").select(self, scores, works)
        (score,), (work,) = scores, works
        ndim = self.selection.ndim if self.selection.ndim is not None or self.chain.scope != "row" else -1
        rows, size = row_shape(score.shape, ndim if score.dim() > 1 else None)
        if work.rows:
            rows, size = work.rows, score.numel() // work.rows
        count = self.count(size, work)
        work.asked = count * rows
        return [pass_largest(ordered_bits(score.view(rows, size), nonnegative), count).view(score.shape)]


class Chain:
    """A chain ready to run."""

    def __init__(self, spec: ChainSpec):
        self.spec = spec
        self.options = options = spec.options
        self.stages = [Stage(stage, options) for stage in spec.stages]
        guards = [stage.filter for stage in self.stages if isinstance(stage.filter, Finite)]
        self.skips_non_finite = not guards or guards[0].nan == "skip"
        self.stages = [stage for stage in self.stages if not isinstance(stage.filter, Finite)]
        self.policy = make_policy(options)
        if options.packs:
            needed("grad_filter_packing", f"state_dtype={options.state_dtype} state_device={options.state_device}")
        if options.scope in ("group", "global") or options.unit != "entry":
            needed("grad_filter_scopes", f"scope={options.scope} unit={options.unit}")
        self.watches_micro_steps = any(getattr(s.filter, "watches_micro_steps", False) for s in self.stages)
        self.asks_for_norm = any(stage.asks_for("total_norm") for stage in self.stages)
        self.limits_weights = [s.filter.weights_after for s in self.stages if hasattr(s.filter, "weights_after")]
        self._check_order()

    def _check_order(self) -> None:
        """Refuse orders and options that are known to do something else than they say."""
        scoring = [stage for stage in self.stages if stage.scores]
        for key in ("scope", "unit", "floor", "cap", "ramp"):
            if getattr(self.options, key) != getattr(ChainOptions, key) and not scoring:
                names = ",".join(stage.name for stage in self.spec.stages)
                raise GradFilterError(f"grad_filter: {key} needs a stage that scores; {names} has none. Example: topk")
        selects = False
        for stage in self.stages:
            if selects and getattr(stage.filter, "fills_masked_entries", False):
                raise GradFilterError(
                    f"--grad_filter: {stage.name} behind a selection fills masked entries again. Put it in front"
                )
            selects = selects or stage.kind != "transform"
        if self.options.state_dtype in ("fp8", "int8"):
            for stage in self.stages:
                if getattr(stage.filter, "needs_float_buffers", False):
                    raise GradFilterError(
                        f"{stage.name}: state_dtype={self.options.state_dtype} is too coarse: others would pass. "
                        f"Use state_dtype=bf16"
                    )
        if self.options.policy == "residual" and sum(stage.kind != "transform" for stage in self.stages) != 1:
            raise GradFilterError("grad_filter: policy=residual needs exactly one stage that selects. Example: topk")
        if self.options.bias_correction == "entry" and self.options.policy != "freeze":
            raise GradFilterError("grad_filter: bias_correction=entry needs policy=freeze. Add policy=freeze")

    def buckets(self, slots: Sequence[Slot]) -> Iterator[list[Slot]]:
        """Give the tensors that compete with each other, bucket by bucket."""
        scope, paired = self.options.scope, self.options.unit == "component"
        found: dict[Any, list[Slot]] = {}
        for slot in slots:
            alone = slot.component if paired else slot.index
            found.setdefault({"global": 0, "group": slot.context.group}.get(scope, alone), []).append(slot)
        yield from found.values()

    def run(self, works: Sequence[Work]) -> None:
        """Take tensors that compete with each other through the chain."""
        for work in works:
            self.policy.begin(work)
        for stage in self.stages:
            stage.run(works)
        for work in works:
            work.scale_by(self.options.rescale)
            self.policy.end(work)


class Work:
    """One tensor on its way through a chain in one step. Nothing is changed in place: buffers may share the memory.

    Attributes:
        whole: the gradient after every transform. mask: entries that pass so far, None for all.
        factor: number that what passes is multiplied with, None for 1. asked: how many entries were to pass, when a
            share was asked for. start, gradient: what it began with, and where the result goes.
        rows: entries compete within each of so many rows; 0 where the shape and the options decide.
    """

    rows = 0

    def __init__(self, slot: Slot, gradient: Tensor, zeroes: bool):
        self.slot, self.context = slot, slot.context
        self.whole = self.start = gradient.to(work_dtype(gradient)).contiguous()
        self.mask: Tensor | None = None
        self.factor: Tensor | None = None
        self.asked: float | None = None
        self.gradient = gradient
        self._seen: Tensor | None = self.whole
        self._zeroes = zeroes

    @property
    def seen(self) -> Tensor:
        """What passes so far, zero elsewhere."""
        if self._seen is None:
            assert self.mask is not None
            self._seen = masked(self.whole, self.mask)
        return self._seen

    def input_of(self, kind: str) -> Tensor:
        """Give what a stage looks at: where the optimizer sees the whole gradient, transforms work on all of it."""
        return self.whole if kind == "transform" and not self._zeroes else self.seen

    def replace(self, value: Tensor) -> None:
        self.whole = value
        self._seen = value if self.mask is None or self._zeroes else None

    def restrict(self, mask: Tensor, passed: Tensor | None) -> None:
        if self._zeroes and self.mask is not None:
            self.whole = self.seen
        self.mask = mask if self.mask is None else self.mask & mask
        self._seen = passed

    def scale(self, factor: Tensor) -> None:
        self.factor = factor if self.factor is None else self.factor * factor

    def scale_by(self, rescale: str) -> None:
        """Make up for what was dropped; see the option ``rescale``."""
        if self.mask is None or rescale == "none":
            return
        passing = torch.count_nonzero(self.mask).to(self.whole.dtype)
        if rescale == "norm":
            self.scale(self.whole.norm() / self.seen.norm().clamp(min=1e-30))
        else:
            self.scale(self.mask.numel() / (passing + 1.0 if rescale == "cautious" else passing.clamp(min=1.0)))

    def write_back(self) -> None:
        """Put into the parameter's gradient what its optimizer is to see."""
        if not self._zeroes or self.mask is None:
            if self.whole is not self.start:
                self.gradient.copy_(self.whole)
        elif self._seen is None and self.whole is self.start:
            masked(self.gradient, self.mask, out=self.gradient)
        else:
            self.gradient.copy_(self.seen)
        if self.factor is not None and self._zeroes:
            self.gradient.mul_(self.factor)


# -------------------------------------------------------------------------------------------------------- policies


class Policy:
    """What happens at masked entries. ``end`` runs when the mask is known, ``after`` when the optimizer has stepped.

    Attributes:
        ends_steps: it needs the end of a step.
    """

    ends_steps = False

    def __init__(self, options: ChainOptions):
        self.options = options
        if type(self) in (Policy, KeepWeights):
            require(not options.decay, "grad_filter", "decay", options.decay, "left out with this policy", "")

    def zeroes_for(self, slot: Slot, optimizer: torch.optim.Optimizer) -> bool:
        """Say whether the optimizer sees zeros at masked entries of a parameter."""
        return True

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer it cannot work with."""

    def notes(self, slots: Sequence[Slot], optimizer: torch.optim.Optimizer) -> list[str]:
        """Give lines for the start of a run."""
        return []

    def buffers(self, param: Tensor) -> dict[str, Tensor]:
        """Give the tensors it keeps for one parameter."""
        return {}

    def begin(self, work: Work) -> None:
        """Look at a gradient before the first stage."""

    def end(self, work: Work) -> None:
        """Look at the result of the last stage."""

    def before(self, slots: Sequence[Slot], optimizer: torch.optim.Optimizer) -> None:
        """Remember what has to be put back, for slots that have a mask."""

    def after(self, slots: Sequence[Slot], optimizer: torch.optim.Optimizer) -> None:
        """Put it back."""


class KeepWeights(Policy):
    """``update``: the optimizer sees the whole gradient; masked weights are put back after the step."""

    ends_steps = True
    WEIGHT_LIKE = ("z",)  # schedule-free keeps a second copy of the weights there, which must rest with them

    def zeroes_for(self, slot: Slot, optimizer: torch.optim.Optimizer) -> bool:
        return False

    def notes(self, slots: Sequence[Slot], optimizer: torch.optim.Optimizer) -> list[str]:
        if "d" not in optimizer.param_groups[0]:
            return []
        return [
            f"grad_filter: {type(optimizer).__name__} finds its step size from how far weights move, and policy=update "
            f"holds them: the estimate stays far too low. Use policy=freeze with warmup"
        ]

    def before(self, slots: Sequence[Slot], optimizer: torch.optim.Optimizer) -> None:
        for slot in slots:
            slot.before[""] = slot.param.detach()
            state = optimizer.state.get(slot.param, {})
            for name in self.WEIGHT_LIKE:
                if name in state or "weight_sum" in optimizer.param_groups[slot.context.group]:
                    # before the first step there is no copy yet; it will start as the weights
                    slot.before[name] = state.get(name, slot.before[""])
        remember(slots)

    def after(self, slots: Sequence[Slot], optimizer: torch.optim.Optimizer) -> None:
        changes = []
        for slot in slots:
            for name, before in slot.before.items():
                now = optimizer.state[slot.param][name] if name else slot.param.detach()
                if slot.factor is not None:
                    now.copy_(before + (now - before) * slot.factor)
                changes.append((now, slot.mask, before))
        put_back_all(changes)


def remember(slots: Sequence[Slot]) -> None:
    """Copy what the slots' ``before`` names, into memory that is used again at the next step."""
    copies: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for slot in slots:
        for name, value in slot.before.items():
            kept = slot.memory.get(name)
            if kept is None or kept.shape != value.shape or kept.dtype != value.dtype or kept.device != value.device:
                kept = slot.memory[name] = torch.empty_like(value)
            slot.before[name] = kept
            targets, sources = copies.setdefault((value.dtype, value.device), ([], []))
            targets.append(kept)
            sources.append(value)
    for targets, sources in copies.values():
        torch._foreach_copy_(targets, sources)


def put_back_all(changes: Sequence[tuple[Tensor, Tensor | None, Tensor]]) -> None:
    """Do :func:`put_back` for many (now, mask, before)."""
    batches = _load_beside("grad_filter_batches")
    for change in changes if batches is None else batches.put_back_together(changes):
        put_back(*change)


def put_back(now: Tensor, mask: Tensor | None, before: Tensor) -> None:
    """Restore ``before`` where the mask is False, to the bit."""
    assert mask is not None
    mask, before = mask.reshape(now.shape), before.reshape(now.shape)
    fast = kernels(now, mask, before)
    if fast is not None:
        fast.put_back(now, mask, before)
    elif now.is_contiguous() and mask.is_contiguous():
        torch.where(mask, now, before, out=now)
    else:
        now.copy_(torch.where(mask, now, before))


POLICIES: dict[str, type[Policy]] = {"zero": Policy, "update": KeepWeights}


def make_policy(options: ChainOptions) -> Policy:
    """Build a policy; those beyond ``zero`` and ``update`` are in grad_filter_policies.py."""
    _load_beside("grad_filter_policies")
    known = " or ".join(sorted(POLICIES))
    require(options.policy in POLICIES, "grad_filter", "policy", options.policy, known, "update")
    return POLICIES[options.policy](options)


POLICY_BUFFERS = "policy"


@dataclass
class Slot:
    """What is kept for one parameter: names, chain, buffers by stage, and what the running step must put back."""

    param: Tensor
    index: int
    context: Context
    tags: Tags
    chain: Chain | None
    buffers: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    loaded: dict[str, Tensor] = field(default_factory=dict)
    mask: Tensor | None = None
    factor: Tensor | None = None
    before: dict[str, Tensor] = field(default_factory=dict)
    memory: dict[str, Tensor] = field(default_factory=dict)
    micro: Any = None  # counts signs of micro-steps
    followed: Any = None  # what statistics keep
    packed: dict[str, dict[str, Any]] = field(default_factory=dict)
    batch: Any = None  # whose buffers hold those of this slot

    @property
    def name(self) -> str:
        return self.tags.name or f"group{self.context.group}.index{self.index}"

    @property
    def gradient(self) -> Tensor:
        assert self.param.grad is not None, self.name
        return self.param.grad

    @property
    def component(self) -> Any:
        """What the down and up matrix of one LoRA module have in common."""
        base = re.sub(r"lora_(down|up|A|B)\b", "lora", self.tags.name)
        return base if self.tags.role in ("down", "up") else self.index

    def fresh_buffers(self, param: Tensor) -> dict[str, dict[str, Tensor]]:
        """Give the buffers that stages and policy start with."""
        assert self.chain is not None
        found = {stage.name: stage.init_state(param) for stage in self.chain.stages}
        kept = self.chain.policy.buffers(param)
        return {**found, POLICY_BUFFERS: kept} if kept else found

    def prepare(self) -> None:
        """Make the buffers at the first filtered step, when the parameter has its final type and device."""
        if not self.buffers or self.loaded:
            fresh = self.buffers or self.fresh_buffers(self.param)
            for key, saved in self.loaded.items():
                stage, _, name = key.rpartition(".")
                if stage in fresh:
                    like = fresh[stage].get(name, saved)
                    fresh[stage][name] = saved.to(self.param.device, like.dtype, copy=True)
            self.buffers, self.loaded = fresh, {}

    def exported(self) -> dict[str, Tensor]:
        return self.loaded or {f"{stage}.{key}": t for stage, own in self.buffers.items() for key, t in own.items()}


# ------------------------------------------------------------------------------------------------------ attachment


class FilterHandle:
    """A filter attached to an optimizer. Made by :func:`attach`.

    Attributes:
        spec: what was asked for. step: optimizer steps filtered or passed so far; left-out ones are not counted.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, spec: FilterSpec, in_backward: bool):
        self.spec = spec
        self.step = 0
        self.skipped_steps = self.zero_tensors = 0
        reports = _load_beside("grad_filter_statistics")
        self.statistics = reports.Statistics(self) if reports else None
        self.optimizer = optimizer
        self._in_backward = in_backward
        self.chains: dict[ChainSpec, Chain] = {}
        self._slots: dict[int, Slot] = {}  # by id; a slot keeps its parameter alive
        self._facts: dict[str, Any] = {}
        self._frame: types.FrameType | None = None
        self._own: dict[str, Any] = {}
        self._removers: list[Any] = []
        self._measures = False
        self._time, self._last_end = 0.0, time.perf_counter()  # of the filter in this step, and when the last one ended
        self._check_optimizer()
        self._install()

    # ------------------------------------------------------------------------------------------- on and off

    def _check_optimizer(self) -> None:
        for param in (param for group in self.optimizer.param_groups for param in group["params"]):
            if hasattr(param, "device_mesh"):
                raise GradFilterError("grad_filter: FSDP and DTensor parameters are not supported. Train without FSDP")
        specs = [self.spec.chain, *(target.chain for target in self.spec.targets if target.chain)]
        specs += [_with_words(self.spec.chain, target.words) for target in self.spec.targets]
        for chain in map(Chain, specs):
            chain.policy.check(self.optimizer)
            if self._in_backward:
                self._check_backward(chain)
        if self._in_backward:
            return
        if not hasattr(self.optimizer, "register_step_pre_hook"):
            raise GradFilterError(f"grad_filter: {type(self.optimizer).__name__} has no step hooks of torch.optim")

    def _check_backward(self, chain: Chain) -> None:
        options = chain.options
        reasons = {
            f"policy={options.policy}": chain.policy.ends_steps,
            f"scope={options.scope}": options.scope in ("group", "global"),
            "unit=component": options.unit == "component",
            "micro_agree": chain.watches_micro_steps,
            "a norm of all gradients": chain.asks_for_norm,
            "clamp of weights": bool(chain.limits_weights),
            "statistics=full": options.statistics == "full",
        }
        for what in [what for what, applies in reasons.items() if applies]:
            raise GradFilterError(
                f"grad_filter: {what} cannot work with --fused_backward_pass, where no step ends. Use policy=zero and "
                f"scope=tensor, or leave --fused_backward_pass out"
            )

    def _install(self) -> None:
        optimizer = self.optimizer
        if self._in_backward:
            for slot in self.slots():
                hook = functools.partial(self._filter_in_backward, slot)
                self._removers.append(slot.param.register_post_accumulate_grad_hook(hook))
        else:
            self._removers.append(optimizer.register_step_pre_hook(self._before_step))
            self._removers.append(optimizer.register_step_post_hook(self._after_step))
            self.slots()  # filters that watch micro-steps begin to
        self._own = {name: vars(optimizer)[name] for name in _OVERRIDES if name in vars(optimizer)}
        for name, function in _OVERRIDES.items():  # bitsandbytes runs no state hooks, so its methods are overridden
            setattr(optimizer, name, types.MethodType(function, optimizer))
        setattr(optimizer, HANDLE_ATTRIBUTE, self)

    def detach(self) -> None:
        """Leave the optimizer exactly as it was before :func:`attach`."""
        for remover in self._removers:
            remover.remove()
        self._removers = []
        for name in (*_OVERRIDES, HANDLE_ATTRIBUTE):
            vars(self.optimizer).pop(name, None)
        vars(self.optimizer).update(self._own)

    def bare(self, name: str) -> Callable[..., Any]:
        """Give the optimizer's own method of that name, which the filter stands in front of."""
        return self._own.get(name) or types.MethodType(getattr(type(self.optimizer), name), self.optimizer)

    # ----------------------------------------------------------------------------------------------- slots

    def slots(self) -> list[Slot]:
        """Give a slot for every parameter in the optimizer's order; groups may have been added."""
        places = [(n, param) for n, group in enumerate(self.optimizer.param_groups) for param in group["params"]]
        for index, (group, param) in enumerate(places):
            if id(param) not in self._slots:
                self._slots[id(param)] = self._new_slot(param, index, group)
        return [self._slots[id(param)] for _, param in places]

    def _new_slot(self, param: Tensor, index: int, group: int) -> Slot:
        tags: Tags = getattr(param, "grad_filter_tags", Tags())
        spec = self.spec.chain_for(lambda pattern: matches(pattern, tags, group, index, param.shape))
        if spec is not None and param.numel() < spec.options.min_numel:
            spec = None
        if spec is not None and spec not in self.chains:
            self.chains[spec] = Chain(spec)
        context = Context(param.detach(), index, name=tags.name, role=tags.role, block=tags.block, group=group)
        slot = Slot(param, index, context, tags, self.chains[spec] if spec else None)
        if slot.chain is not None and slot.chain.watches_micro_steps:
            slot.micro = needed("grad_filter_stages", "watching micro-steps").MicroSteps()
            self._removers.append(param.register_post_accumulate_grad_hook(slot.micro.watch))
        return slot

    # ------------------------------------------------------------------------------------------------ steps

    def set_context(self, **facts: Any) -> None:
        """Tell filters what the coming step is about: total_steps, micro_steps, timesteps, losses."""
        unknown = [name for name in facts if name not in FROM_TRAINER]
        if unknown:
            raise GradFilterError(f"set_context: {unknown[0]!r} is not known. Known: {', '.join(FROM_TRAINER)}")
        self._facts = facts

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        caller = sys._getframe(1)
        if self._is_running(caller):
            return None  # a subclass calls its parent's step
        self._frame = caller
        for slot in self._slots.values():
            slot.mask = None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is None:
            return None if self._filter_all() else ((stand_in(optimizer), *args[1:]), kwargs)

        def closure_and_filter() -> Any:
            with torch.enable_grad():
                loss = closure()
            if not self._filter_all():  # the step is under way: without gradients the weights rest
                optimizer.zero_grad(set_to_none=True)
            return loss

        if len(args) > 1:
            return (args[0], closure_and_filter, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_and_filter}

    def _is_running(self, frame: types.FrameType | None) -> bool:
        """Say whether the step that began is still on the stack; one that raised is not, and is forgotten."""
        while frame is not None and self._frame is not None:
            if frame is self._frame:
                return True
            frame = frame.f_back
        return False

    @torch.no_grad()
    def _filter_all(self) -> bool:
        """Filter every gradient; give False when the optimizer must not see this step."""
        started = time.perf_counter()
        try:
            return self._filter_gradients()
        finally:
            self._time += time.perf_counter() - started

    def _filter_gradients(self) -> bool:
        slots = [slot for slot in self.slots() if slot.param.grad is not None]
        if not slots or not self._unscale(slots):
            return True
        largest = _largest_entries([slot.gradient for slot in slots])  # the one wait for the device in a step
        bad = [slot for slot, value in zip(slots, largest) if not math.isfinite(value)]
        if bad and any(slot.chain is None or slot.chain.skips_non_finite for slot in bad):
            self._leave_step_out(bad[0])
            return False
        for slot in bad:
            slot.gradient.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        chosen: dict[ChainSpec, list[Slot]] = {}
        for slot, value in zip(slots, largest):
            if value == 0.0:
                self.zero_tensors += 1
            elif slot.chain is not None and slot.chain.options.active(self.step):
                chosen.setdefault(slot.chain.spec, []).append(slot)
        if any(self.chains[spec].asks_for_norm for spec in chosen):
            norm = torch.linalg.vector_norm(torch.stack([slot.gradient.norm().float() for slot in slots]))
            for slot in slots:
                slot.context.total_norm = norm
        self._measures = self.statistics is not None and self.step % self.spec.chain.options.log_every == 0
        for spec, members in chosen.items():
            self._run_all(self.chains[spec], members)
        self.step += 1
        return True

    def _run_all(self, chain: Chain, members: Sequence[Slot]) -> None:
        batches = _load_beside("grad_filter_batches")
        alone = list(members)
        if batches is not None and batches.takes(chain):
            zeroes = {slot.index: chain.policy.zeroes_for(slot, self.optimizer) for slot in members}
            together, alone = batches.divide(chain, members, zeroes)
            for slots, rows in together:
                self._run_batch(chain, batches.Batch.of(slots, rows), zeroes[slots[0].index])
        for bucket in chain.buckets(alone):
            self._run(chain, bucket)

    def _run_batch(self, chain: Chain, batch: Any, zeroes: bool) -> None:
        """Do for many slots at once what :meth:`_run` does for the slots of a bucket."""
        for slot in batch.slots if chain.policy.ends_steps else batch.slots[:1]:
            self._tell(slot)
        work = batch.work(zeroes)
        chain.run([work])
        if self._measures and work.mask is not None:
            for part in batch.each(work):
                self.statistics.add(part)
        batch.hand_back(work)
        for slot in batch.slots:
            slot.context.step += 1
        if work.mask is not None and chain.policy.ends_steps:
            for slot, mask in zip(batch.slots, batch.parts(work.mask)):
                slot.mask, slot.factor = mask, None
            chain.policy.before(batch.slots, self.optimizer)

    def _run(self, chain: Chain, bucket: Sequence[Slot]) -> None:
        works = [self._begin(slot, chain) for slot in bucket]  # one bucket at a time leaves little in memory
        chain.run(works)
        for work in works:
            self._finish(chain, work)

    def _finish(self, chain: Chain, work: Work) -> None:
        slot = work.slot
        if self.statistics is not None and work.mask is not None and chain.options.statistics == "full":
            self.statistics.follow(slot, work.mask)
        if self._measures:
            self.statistics.add(work)
        self._give_back(work)
        work.context.step += 1
        if work.mask is not None and (chain.policy.ends_steps or slot.followed is not None):
            slot.mask, slot.factor = work.mask, work.factor
            chain.policy.before([slot], self.optimizer)

    def _give_back(self, work: Work) -> None:
        work.write_back()
        slot = work.slot
        if slot.chain is not None and slot.chain.options.packs:
            needed("grad_filter_packing", "state_dtype").pack_slot(slot)

    def _unscale(self, slots: Sequence[Slot]) -> bool:
        """Undo what a GradScaler leaves to an optimizer with ``fused=True``; give False at an overflow."""
        found_inf, scale = (getattr(self.optimizer, name, None) for name in ("found_inf", "grad_scale"))
        if found_inf is not None and float(found_inf):
            return False
        if scale is not None:
            inverse = 1.0 / float(scale)
            for slot in slots:
                slot.gradient.mul_(inverse)
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
        return True

    def _begin(self, slot: Slot, chain: Chain) -> Work:
        gradient = slot.gradient
        if gradient.is_sparse:
            raise GradFilterError(
                f"grad_filter: the gradient of {slot.name} is sparse. Leave it out with --grad_filter_targets "
                f"{slot.name}=none"
            )
        slot.prepare()
        if slot.packed:
            needed("grad_filter_packing", "state_dtype").unpack_slot(slot)
        self._tell(slot)
        return Work(slot, gradient, chain.policy.zeroes_for(slot, self.optimizer))

    def _tell(self, slot: Slot) -> None:
        """Bring what filters may ask for up to date."""
        context, group = slot.context, self.optimizer.param_groups[slot.context.group]
        context.lr, context.moments = group.get("lr", 0.0), self.optimizer.state.get(slot.param, {})
        context.optimizer_step = self.step
        for name in FROM_TRAINER:
            setattr(context, name, self._facts.get(name))
        if slot.micro is not None:
            context.signs, context.micro_steps = slot.micro.signs, slot.micro.count

    def _leave_step_out(self, bad: Slot) -> None:
        count = self.skipped_steps = self.skipped_steps + 1
        if count & (count - 1) == 0:  # at 1, 2, 4, 8, ...: every one of them would drown the log
            message = "grad_filter: the gradient of %s is not finite; the step is left out (%d so far)"
            log.warning(message, bad.name, count)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if sys._getframe(1) is not self._frame:
            return
        self._frame = None
        started = time.perf_counter()
        with torch.no_grad():
            self._end_steps()
        ended = time.perf_counter()
        self._time += ended - started
        self._measures = False
        self._close_step(self.step - 1, ended)

    def _end_steps(self) -> None:
        slots = [slot for slot in self._slots.values() if slot.chain is not None]
        for chain in self.chains.values():
            chain.policy.after([s for s in slots if s.chain is chain and s.mask is not None], self.optimizer)
        for slot in slots:
            assert slot.chain is not None
            if self._measures and slot.mask is not None and slot.followed is not None:
                self.statistics.add_movement(slot)
            for limit in slot.chain.limits_weights:
                slot.param.copy_(limit(slot.param.detach()))
            slot.mask, slot.factor, slot.before = None, None, {}
            if slot.micro is not None:
                slot.micro.forget()

    @torch.no_grad()
    def _filter_in_backward(self, slot: Slot, param: Tensor) -> None:
        """Filter one parameter as soon as its gradient is complete; the trainer's own hook comes after this one."""
        gradient, started = param.grad, time.perf_counter()
        if slot.chain is None or gradient is None:
            return
        if slot.context.step > self.step:  # the first gradient of a step ends the step before
            self._close_step(self.step, started)
            self.step = slot.context.step
        largest = _largest_entries([gradient])[0]
        if not math.isfinite(largest):
            if slot.chain.skips_non_finite:
                self._leave_step_out(slot)
                param.grad = None
                return
            gradient.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        if largest and slot.chain.options.active(slot.context.step):
            work = self._begin(slot, slot.chain)
            work.context.optimizer_step = slot.context.step
            slot.chain.run([work])
            if self.statistics and slot.context.step % self.spec.chain.options.log_every == 0:
                self.statistics.add(work)
            self._give_back(work)
        slot.context.step += 1
        self._time += time.perf_counter() - started

    def _close_step(self, step: int, ended: float) -> None:
        """Turn what was measured into the numbers of a step."""
        if self.statistics:
            self.statistics.finish(step, self._time / max(ended - self._last_end, 1e-9))
        self._time, self._last_end = 0.0, ended

    # ------------------------------------------------------------------------------------------ saved state

    def export_state(self) -> dict[str, Any]:
        """Give everything the filter must remember as tensors and plain values."""
        params = [
            {
                "name": slot.tags.name,
                "shape": list(slot.param.shape),
                "step": slot.context.step,
                "buffers": slot.exported(),
                **({"packed": dict(slot.packed), "state_dtype": slot.chain.options.state_dtype} if slot.packed else {}),
            }
            for slot in self.slots()
        ]
        counters = {"skipped_steps": self.skipped_steps, "zero_tensors": self.zero_tensors}
        spec = self.spec.canonical()
        state = {"version": STATE_VERSION, "spec": spec, "step": self.step, "counters": counters, "params": params}
        return {**state, "statistics": self.statistics.export_state()} if self.statistics else state

    def import_state(self, saved: Mapping[str, Any]) -> None:
        """Take over a saved state; what does not fit starts fresh, and one line says so."""
        if saved["version"] > STATE_VERSION:
            raise GradFilterError(
                f"grad_filter: the state has version {saved['version']}, this file reads {STATE_VERSION}"
            )
        self.step = saved["step"]
        self.skipped_steps = saved["counters"]["skipped_steps"]
        self.zero_tensors = saved["counters"]["zero_tensors"]
        slots = self.slots()
        entries = [*saved["params"], *[None] * (len(slots) - len(saved["params"]))]
        fresh = [slot.name for slot, entry in zip(slots, entries) if not self._import_slot(slot, entry)]
        if self.statistics and "statistics" in saved:
            self.statistics.import_state(saved["statistics"])
        notes = []
        if saved["spec"] != self.spec.canonical():
            notes.append(f"it was written with {saved['spec']!r}, {self.spec.canonical()!r} is in force")
        if fresh:
            notes.append(f"{len(fresh)} of {len(slots)} tensors start fresh, the first is {fresh[0]}")
        if notes:
            log.warning("grad_filter: the loaded state differs: %s", "; ".join(notes))

    def _import_slot(self, slot: Slot, entry: Mapping[str, Any] | None) -> bool:
        """Take over one parameter; give False when something that is needed does not fit."""
        slot.buffers, slot.packed, slot.loaded, slot.context.step, slot.batch = {}, {}, {}, 0, None
        if (
            entry is None
            or entry["shape"] != list(slot.param.shape)
            or (slot.tags.name and entry["name"] and slot.tags.name != entry["name"])
        ):
            return False
        slot.context.step = entry["step"]
        if slot.chain is None:
            return True
        owners = [*(stage.name for stage in slot.chain.stages), POLICY_BUFFERS]
        saved = entry["buffers"]
        if "packed" in entry:
            saved = needed("grad_filter_packing", "a state with state_dtype").loaded(entry, slot.param)
        slot.loaded = {k: t for k, t in saved.items() if k.rpartition(".")[0] in owners}
        found = {key.rpartition(".")[0] for key in slot.loaded}
        needs = {owner for owner, kept in slot.fresh_buffers(torch.zeros([1] * slot.param.dim())).items() if kept}
        return entry["step"] == 0 or needs <= found

    # ---------------------------------------------------------------------------------------------- reports

    def plan(self) -> list[str]:
        """Give lines for the start of a run: what is filtered how, what passes untouched, what memory it takes."""
        return self.statistics.plan() if self.statistics else [f"grad_filter: {self.spec.canonical()}"]

    def scalars(self) -> dict[str, float]:
        """Give the numbers of the latest logged step under ``grad_filter/``, empty when none is new."""
        return self.statistics.scalars() if self.statistics else {}

    def save_pictures(self, folder: Path) -> list[Path]:
        """Draw what was let through into a folder; give the PNG files made, none when nothing was measured."""
        return needed("grad_filter_statistics", "drawing").save_pictures(self, Path(folder))

    def export(self, path: Path | str, what: Literal["masks", "ages"] = "masks") -> None:
        """Write the last masks (uint8, as mask_file reads them) or the step each entry last passed (int32, -1 never).

        Raises:
            GradFilterError: nothing was followed; ``statistics=full`` does that.
        """
        needed("grad_filter_statistics", "an export").export(self, Path(path), what)

    def metadata(self) -> dict[str, str]:
        """Give the entries recorded with a trained network."""
        return self.spec.metadata()


def _largest_entries(gradients: Sequence[Tensor]) -> list[float]:
    """Give the largest magnitude in each gradient, NaN or Inf where it holds one, with one wait for each device."""
    by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
    largest = [0.0] * len(gradients)
    for place, gradient in enumerate(gradients):
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        if values.numel():
            by_device.setdefault(values.device, []).append((place, values))
    for members in by_device.values():
        ends = [end.float() for _, values in members for end in torch.aminmax(values)]  # NaN when one entry is
        low, high = torch.stack(ends).view(-1, 2).unbind(1)
        for (place, _), value in zip(members, torch.maximum(-low, high).tolist()):
            largest[place] = value
    return largest


def stand_in(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Give an optimizer whose step can run in place of a step that is left out.

    It is of the same class and settings and has weights of one entry, with gradients of one. Nothing it does reaches
    the real one, while hiding the gradients would let many optimizers advance counters, or divide by zero.
    """
    twin = object.__new__(type(optimizer))
    vars(twin).update({k: copy.copy(v) if isinstance(v, (dict, list)) else v for k, v in vars(optimizer).items()})
    twin.state = collections.defaultdict(dict)
    twin.param_groups = []
    for group in optimizer.param_groups:
        settings = {k: v.clone() if isinstance(v, Tensor) else copy.copy(v) for k, v in group.items() if k != "params"}
        weights = [torch.ones([1] * p.dim(), dtype=p.dtype, device=p.device) for p in group["params"][:1]]
        for weight in weights:
            weight.requires_grad_().grad = torch.ones_like(weight)
            twin.state[weight] = state_at_birth(twin, settings, weight)
        twin.param_groups.append({**settings, "params": weights})
    return twin


def state_at_birth(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], weight: Tensor) -> dict[str, Tensor]:
    """Give what a constructor puts into a weight's state: nothing, but older torch makes the sums of Adagrad there."""
    if not isinstance(optimizer, torch.optim.Adagrad):
        return {}
    return {"step": torch.tensor(0.0), "sum": torch.full_like(weight, group["initial_accumulator_value"])}


def _state_dict(optimizer: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    handle: FilterHandle = getattr(optimizer, HANDLE_ATTRIBUTE)
    return {**handle.bare("state_dict")(*args, **kwargs), STATE_KEY: handle.export_state()}


def _load_state_dict(optimizer: Any, state_dict: Mapping[str, Any]) -> Any:
    handle: FilterHandle = getattr(optimizer, HANDLE_ATTRIBUTE)
    rest = {key: value for key, value in state_dict.items() if key != STATE_KEY}
    result = handle.bare("load_state_dict")(rest)
    if STATE_KEY in state_dict:
        handle.import_state(state_dict[STATE_KEY])
    else:
        log.warning("grad_filter: the loaded state was written without a filter; its buffers start fresh")
    return result


def _reduce(optimizer: Any, protocol: Any) -> Any:
    """Make copies and pickles of an optimizer keep its filter; torch's own forget everything that is attached."""
    handle: FilterHandle = getattr(optimizer, HANDLE_ATTRIBUTE)
    plain = type(optimizer).__reduce_ex__(optimizer, protocol)  # type: ignore[call-arg]
    return _rebuild, (plain[:3], handle.spec, handle._in_backward, handle.export_state())


def _rebuild(plain: tuple[Any, ...], spec: FilterSpec, in_backward: bool, saved: dict[str, Any]) -> Any:
    function, arguments, state = plain
    optimizer = function(*arguments)
    optimizer.__setstate__(state)
    attach(optimizer, spec, in_backward=in_backward).import_state(saved)
    return optimizer


_OVERRIDES: dict[str, Callable[..., Any]] = {
    "state_dict": _state_dict,
    "load_state_dict": _load_state_dict,
    "__reduce_ex__": _reduce,
}


def report_unused_state(state_dict: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Say in one line that a state's filter buffers are not used, because no filter is attached."""
    if STATE_KEY in state_dict and handle_of(optimizer) is None:
        log.warning(
            "grad_filter: the loaded state has buffers of the filter %r; no filter is on, they are not used",
            state_dict[STATE_KEY]["spec"],
        )


def attach(optimizer: torch.optim.Optimizer, spec: FilterSpec | str, *, in_backward: bool = False) -> FilterHandle:
    """Put a filter in front of an optimizer; class, name, groups and signature of the optimizer stay what they are.

    Args:
        optimizer: any torch optimizer. spec: from :func:`parse_spec`, or text such as ``topk keep=0.1``.
        in_backward: the trainer never calls ``step``; filter each gradient as soon as it is complete.

    Raises:
        GradFilterError: a filter is attached already, or ``spec`` is wrong or off, or cannot work here.
    """
    if handle_of(optimizer) is not None:
        raise GradFilterError("grad_filter: this optimizer has a filter already. Call detach() of its handle first")
    parsed = parse_spec(spec) if isinstance(spec, str) else spec
    if parsed is None:
        raise GradFilterError("grad_filter: the filter is off, there is nothing to attach. Example: topk keep=0.1")
    return FilterHandle(optimizer, parsed, in_backward)


def handle_of(optimizer: Any) -> FilterHandle | None:
    """Give the handle of the filter on an optimizer, also through accelerate's wrapper; None without one."""
    return getattr(optimizer, HANDLE_ATTRIBUTE, None) or getattr(
        getattr(optimizer, "optimizer", None), HANDLE_ATTRIBUTE, None
    )


# ------------------------------------------------------------------------------------------------------ decorators

SETTINGS = ("grad_filter", "grad_filter_args", "grad_filter_targets")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the filter's options to a parser."""
    parser.add_argument(
        "--grad_filter", type=str, default=None, help="gradient filter: stages with commas, or a preset; e.g. topk"
    )
    parser.add_argument(
        "--grad_filter_args", type=str, nargs="*", default=None, help="its options, e.g. keep=0.1 policy=update"
    )
    parser.add_argument(
        "--grad_filter_targets", type=str, nargs="*", default=None, help="rules by tensor, e.g. te=none up:keep=0.5"
    )


def with_grad_filter_arguments(add_optimizer_arguments: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that adds optimizer options to a parser: it adds the filter's options too."""

    @functools.wraps(add_optimizer_arguments)
    def wrapper(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        result = add_optimizer_arguments(parser, *args, **kwargs)
        add_arguments(parser)
        return result

    return wrapper


def _split_optimizer_args(optimizer_args: Any) -> tuple[Any, dict[str, list[str]]]:
    """Split ``optimizer_args`` into what is the optimizer's and the filter's settings among them."""
    found: dict[str, list[str]] = {name: [] for name in SETTINGS}
    rest = []
    items = optimizer_args.split() if isinstance(optimizer_args, str) else list(optimizer_args or ())
    for item in items:
        key, _, value = str(item).strip().strip("'").partition("=")
        if key in found:
            found[key].append(value)
        elif key.startswith("grad_filter."):
            found["grad_filter_args"].append(f"{key.partition('.')[2]}={value}")
        else:
            rest.append(item)
    return (rest if any(found.values()) else optimizer_args), found


def spec_from_args(args: Any) -> FilterSpec | None:
    """Read the filter's settings from parsed options, wherever a front-end put them.

    Code is named on the command line only. ``args.config_keys`` names the options whose value comes from a file; where
    a trainer does not say that but has read a file (``args.config_file``), the word must stand in ``sys.argv``.

    Raises:
        GradFilterError: a wrong setting.
    """
    _, items = _split_optimizer_args(getattr(args, "optimizer_args", None))
    direct = {name: getattr(args, name, None) for name in SETTINGS}
    names = [",".join(_words(text)) for text in [direct["grad_filter"], *items["grad_filter"]] if _words(text)]
    if len(set(names)) > 1:
        raise GradFilterError(f"--grad_filter {names[0]}: optimizer_args say grad_filter={names[-1]}. Give it once")
    return parse_spec(
        names[0] if names else None,
        [*_words(direct["grad_filter_args"]), *items["grad_filter_args"]],
        [*_words(direct["grad_filter_targets"]), *items["grad_filter_targets"]],
        allow_code=_typed_by_user(args, "optimizer_args" if items["grad_filter"] else "grad_filter", names),
    )


def _typed_by_user(args: Any, option: str, names: Sequence[str]) -> bool:
    if hasattr(args, "config_keys"):
        return not {option, "grad_filter_targets"} & set(args.config_keys)
    if getattr(args, "config_file", None):
        return any(name in word for name in names for word in sys.argv[1:])
    return True


def with_grad_filter(get_optimizer: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function ``(args, params) -> (name, args text, optimizer)``: it attaches the filter asked for.

    The filter's items are taken out of ``optimizer_args`` before the function sees them. When the filter is off, the
    function runs as if it were not decorated.
    """

    @functools.wraps(get_optimizer)
    def wrapper(args: Any, trainable_params: Any, *more: Any, **kwargs: Any) -> Any:
        spec = spec_from_args(args)
        rest, items = _split_optimizer_args(getattr(args, "optimizer_args", None))
        if spec is None and not any(items.values()):
            return get_optimizer(args, trainable_params, *more, **kwargs)
        if spec is not None and getattr(args, "deepspeed", False):
            raise GradFilterError("--grad_filter: DeepSpeed flattens parameters, a filter cannot follow. Leave one out")
        view = argparse.Namespace(**vars(args))
        if any(items.values()):
            view.optimizer_args = rest
        name, text, optimizer = get_optimizer(view, trainable_params, *more, **kwargs)
        _copy_changes(view, args, rest)
        if spec is None:
            return name, text, optimizer
        handle = attach(optimizer, spec, in_backward=bool(getattr(args, "fused_backward_pass", False)))
        for line in handle.plan():
            log.info(line)
        recorded = ",".join(["grad_filter=" + spec.metadata()["ss_grad_filter"], *_recorded_options(spec)])
        return name, f"{text},{recorded}" if text else recorded, optimizer

    return wrapper


def _copy_changes(view: argparse.Namespace, args: Any, rest: Any) -> None:
    """Hand on what the wrapped function wrote on its options, as trainers do with learning rate and schedule."""
    for key, value in vars(view).items():
        if not (key == "optimizer_args" and value is rest) and vars(args).get(key, view) is not value:
            setattr(args, key, value)


def _recorded_options(spec: FilterSpec) -> list[str]:
    return [f"grad_filter.{word}" for word in spec.metadata()["ss_grad_filter_args"].split()]


if __name__ == "__main__":
    # a filter's own file imports this module by name and must reach this very registry
    sys.modules.setdefault(__spec__.name if __spec__ else Path(__file__).stem, sys.modules[__name__])
    sys.exit(needed("grad_filter_tool", "the command line").main())
