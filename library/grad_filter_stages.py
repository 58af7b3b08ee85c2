"""Stages of gradient filters beyond the core ones, and presets under the names people know; loaded on demand.

Each class says its formula, what it keeps, and where it comes from. ``grad_filter.py`` works without this file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .grad_filter import (
    FILTERS,
    PRESETS,
    GradFilter,
    GradFilterError,
    Preset,
    TopKChange,
    chunks,
    keep_count,
    masked,
    ordered_bits,
    pass_largest,
    random_like,
    register_filter,
    require,
    rms,
    row_shape,
    work_dtype,
)

TRAIN_TIMESTEPS = 1000


def zeros_for(param: Tensor) -> Tensor:
    """Give a buffer of the parameter's shape, contiguous, in the type filters compute in."""
    return torch.zeros(param.shape, dtype=work_dtype(param), device=param.device)


def decay_into(mean: Tensor, value: Tensor, beta: float) -> None:
    """Advance a running mean in place: beta * mean + (1 - beta) * value."""
    mean.lerp_(value, 1.0 - beta)


def pack_bits(mask: Tensor) -> Tensor:
    """Store a mask as one bit for each entry, in uint8; see :func:`unpack_bits`."""
    flat = mask.reshape(-1)
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(-1, 8).to(torch.uint8)
    return (flat << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(dim=1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, like: Tensor) -> Tensor:
    """Give the mask that :func:`pack_bits` stored, in the shape of ``like``."""
    bits = (packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    return bits.view(-1)[: like.numel()].bool().view(like.shape)


def share_mask(scores: Tensor, keep: float) -> Tensor:
    """Give the mask of the share ``keep`` with the largest non-negative scores of one tensor."""
    bits = ordered_bits(scores.contiguous().view(1, -1), nonnegative=True)
    return pass_largest(bits, keep_count(keep, scores.numel())).view(scores.shape)


def check_share(stage: str, keep: float) -> None:
    require(0.0 < keep <= 1.0, stage, "keep", keep, "in (0, 1]", 0.1)


def check_decay(stage: str, key: str, value: float) -> None:
    require(0.0 <= value < 1.0, stage, key, value, "in [0, 1)", 0.9)


def momentum_of(moments: Mapping[str, Any]) -> Tensor | None:
    """Give the first moment among an optimizer's state, None when it keeps none or has not stepped yet."""
    for name in ("exp_avg", "momentum_buffer"):
        if isinstance(moments.get(name), Tensor):
            return moments[name]
    return None


# --------------------------------------------------------------------------------------------------------- scores


@register_filter("stable", summary="pass what changed least since the last gradient, the opposite of topk_change")
class Stable(GradFilter):
    """Pass the smallest relative change |g - P| / (|P| + eps), P the gradient before. At the first step P is 0.

    Args:
        eps: added to |P|, above 0.

    State: ``prev``, float32, shape of the gradient.
    """

    entrywise = True

    def __init__(self, eps: float = 1e-8):
        self.change = TopKChange(eps=eps)

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        return {"prev": zeros_for(param)}

    def score(self, grad: Tensor, state: dict[str, Tensor]) -> Tensor:
        return self.change.score(grad, state, torch.empty_like(grad)).neg_()

    def passed(self, grad: Tensor, state: dict[str, Tensor]) -> None:
        state["prev"].copy_(grad)


class _SignalToNoise(GradFilter):
    """Running a = EMA(g) and c = EMA(g^2), both without bias, and rho = a^2 / (c - a^2)."""

    needs_float_buffers = True

    def __init__(self, beta: float, source: str, per: str, buckets: int, stage: str):
        check_decay(stage, "beta", beta)
        require(buckets >= 1, stage, "buckets", buckets, "at least 1", 4)
        if source == "optimizer" and per == "timestep":
            raise GradFilterError(f"{stage}: source=optimizer has no noise levels. Use source=own with per=timestep")
        self.beta, self.source, self.stage = beta, source, stage
        self.buckets = buckets if per == "timestep" else 1

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        if self.source == "optimizer":
            return {}
        shape = (self.buckets, *param.shape)
        buffer = torch.zeros(shape, dtype=work_dtype(param), device=param.device)
        return {"mean": buffer, "square": buffer.clone(), "seen": torch.zeros(self.buckets, device=param.device)}

    def ratio(self, grad: Tensor, state: dict[str, Tensor], moments: Mapping[str, Any], timesteps: Any) -> Tensor:
        if self.source == "optimizer":
            mean, square = self._borrowed(grad, moments)
        else:
            place = self._bucket(timesteps)
            state["seen"][place] += 1
            decay_into(state["mean"][place], grad, self.beta)
            decay_into(state["square"][place], grad.square(), self.beta)
            unbiased = 1.0 - self.beta ** state["seen"][place]
            mean, square = state["mean"][place] / unbiased, state["square"][place] / unbiased
        signal = mean.square()
        return signal / (square - signal).clamp_(min=1e-30)

    def _bucket(self, timesteps: Tensor | None) -> int:
        if self.buckets == 1:
            return 0
        if timesteps is None:
            raise GradFilterError(f"{self.stage}: this trainer does not say timesteps. Use per=all")
        return min(self.buckets - 1, int(timesteps.float().mean() / TRAIN_TIMESTEPS * self.buckets))

    def _borrowed(self, grad: Tensor, moments: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        if not moments:
            return grad, grad.square()  # nothing is known before the optimizer's first step
        mean, square = moments.get("exp_avg"), moments.get("exp_avg_sq")
        if not isinstance(mean, Tensor) or not isinstance(square, Tensor) or mean.shape != grad.shape:
            raise GradFilterError(f"{self.stage}: this optimizer keeps no exp_avg and exp_avg_sq. Use source=own")
        return mean.to(grad.dtype), square.to(grad.dtype)


@register_filter("snr", summary="pass entries with the best signal-to-noise ratio over the last steps")
class Snr(_SignalToNoise):
    """Pass the largest rho = a^2 / (c - a^2), a = EMA(g), c = EMA(g^2); or all with rho >= threshold.

    Args:
        beta: share of the old means kept each step. threshold: pass by value instead of by share.
        source: ``optimizer`` borrows exp_avg and exp_avg_sq of Adam-like optimizers and costs no memory.
        per: ``timestep`` keeps statistics for each noise level, in ``buckets`` levels (the trainer says timesteps);
            what is informative at one noise level is noise at another.

    State: ``mean`` and ``square``, float32, shape of the gradient for each bucket. Source: GSNR, M-SVAG, VRGD.
    """

    nonnegative = True

    def __init__(
        self,
        beta: float = 0.95,
        threshold: float | None = None,
        source: Literal["own", "optimizer"] = "own",
        per: Literal["all", "timestep"] = "all",
        buckets: int = 4,
    ):
        super().__init__(beta, source, per, buckets, "snr")
        require(threshold is None or threshold >= 0.0, "snr", "threshold", threshold, "at least 0", 1.0)
        self.threshold = threshold

    def score(
        self, grad: Tensor, state: dict[str, Tensor], moments: Mapping[str, Any], timesteps: Tensor | None
    ) -> Tensor:
        ratio = self.ratio(grad, state, moments, timesteps)
        return ratio if self.threshold is None else ratio >= self.threshold


@register_filter("snr_soft", summary="weigh every entry by rho / (1 + rho), rho its signal-to-noise ratio")
class SnrSoft(_SignalToNoise):
    """Give g * rho / (1 + rho), rho as in snr.

    Args:
        beta, source, per, buckets: as in snr.

    State and source: as in snr.
    """

    def __init__(
        self,
        beta: float = 0.95,
        source: Literal["own", "optimizer"] = "own",
        per: Literal["all", "timestep"] = "all",
        buckets: int = 4,
    ):
        super().__init__(beta, source, per, buckets, "snr_soft")

    def transform(
        self, grad: Tensor, state: dict[str, Tensor], moments: Mapping[str, Any], timesteps: Tensor | None
    ) -> Tensor:
        ratio = self.ratio(grad, state, moments, timesteps)
        return grad * (1.0 - 1.0 / (1.0 + ratio))


@register_filter("fisher", summary="collect g^2 for some steps, choose the largest share once, keep that mask")
class Fisher(GradFilter):
    """Pass everything for ``warmup`` steps while summing g^2 (or |g|), then the largest ``keep`` of the sum for ever.

    Args:
        keep: share that passes. warmup: steps to collect, at least 1. of: ``square`` or ``magnitude``.

    State: ``sum``, float32, until the choice; ``mask``, one bit for each entry, after it.
    Source: FISH mask (arXiv:2111.09839), SIFT (arXiv:2312.11875), SPEFT.
    """

    def __init__(self, keep: float = 0.1, warmup: int = 10, of: Literal["square", "magnitude"] = "square"):
        check_share("fisher", keep)
        require(warmup >= 1, "fisher", "warmup", warmup, "at least 1", 10)
        self.keep, self.warmup, self.of = keep, warmup, of

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        return {"sum": zeros_for(param)}

    def mask(self, grad: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
        if step < self.warmup:
            state["sum"].add_(grad.square() if self.of == "square" else grad.abs())
            return torch.ones_like(grad, dtype=torch.bool)
        if "sum" in state:
            state["mask"] = pack_bits(share_mask(state.pop("sum"), self.keep))
        return unpack_bits(state["mask"], grad)


@register_filter(
    "weight", summary="pass a fixed share of entries, those whose weight is smallest (or largest) at start"
)
class Weight(GradFilter):
    """Choose by |w| at the first filtered step, and keep that mask.

    Args:
        keep: share that passes. largest: pass large weights instead of small ones.

    State: ``mask``, one bit for each entry. Source: SaRA (arXiv:2409.06633).
    """

    def __init__(self, keep: float = 0.1, largest: bool = False):
        check_share("weight", keep)
        self.keep, self.largest = keep, largest

    def mask(self, grad: Tensor, state: dict[str, Tensor], param: Tensor) -> Tensor:
        if "mask" not in state:
            size = param.detach().to(grad.dtype).abs()
            share = share_mask(size, self.keep if self.largest else 1.0 - self.keep)
            chosen = share if self.largest else ~share
            if not self.largest:  # the complement of the largest has ties the other way round, so count again
                bits = ordered_bits(size.neg().contiguous().view(1, -1))
                chosen = pass_largest(bits, keep_count(self.keep, size.numel())).view(size.shape)
            state["mask"] = pack_bits(chosen)
        return unpack_bits(state["mask"], grad)


@register_filter("mask_file", summary="pass what masks in safetensors files say")
class MaskFile(GradFilter):
    """Pass where a stored mask is not zero; a tensor without a mask passes whole.

    Args:
        path: safetensors files with one tensor for each parameter name, several with commas.
        join: how several files are combined: ``union`` or ``intersection``. complement: pass the others instead.

    No state: the files are read again. Masks are written by ``FilterHandle.export_masks``.
    """

    def __init__(
        self,
        path: tuple[str, ...],
        join: Literal["union", "intersection"] = "union",
        complement: bool = False,
    ):
        for name in path:
            require(Path(name).is_file(), "mask_file", "path", name, "an existing file", "masks.safetensors")
        self.path, self.join, self.complement = path, join, complement
        self._masks: dict[str, Tensor | None] = {}

    def mask(self, grad: Tensor, name: str, index: int) -> Tensor:
        key = name or f"index{index}"
        if key not in self._masks:
            self._masks[key] = self._read(key, grad)
        stored = self._masks[key]
        return torch.ones_like(grad, dtype=torch.bool) if stored is None else unpack_bits(stored, grad)

    def _read(self, key: str, grad: Tensor) -> Tensor | None:
        from safetensors import safe_open

        found = []
        for name in self.path:
            with safe_open(name, framework="pt") as file:
                if key in file.keys():  # noqa: SIM118  a safetensors file is no mapping
                    found.append(file.get_tensor(key).to(grad.device) != 0)
        if not found:
            return None
        if any(mask.shape != grad.shape for mask in found):
            raise GradFilterError(f"mask_file: the mask of {key} has another shape than the weight. Export it again")
        joined = torch.stack(found)
        both = joined.any(dim=0) if self.join == "union" else joined.all(dim=0)
        return pack_bits(~both if self.complement else both)


# ---------------------------------------------------------------------------------------------------------- masks


@register_filter("agree", summary="pass entries whose sign is that of their running mean (or of the coming update)")
class Agree(GradFilter):
    """Pass where g agrees in sign with EMA(g), the present g not in it; at the first step all pass.

    Args:
        beta: share of the old mean kept each step. of: ``mean``, or ``update``: agree with the first moment the
            optimizer will have after this step (with ``policy=update`` this is a cautious optimizer).

    State: ``mean``, float32, shape of the gradient; none with ``of=update``. Source: C-AdamW (arXiv:2411.16085).
    """

    def __init__(self, beta: float = 0.9, of: Literal["mean", "update"] = "mean"):
        check_decay("agree", "beta", beta)
        self.beta, self.of = beta, of

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        return {"mean": zeros_for(param)} if self.of == "mean" else {}

    def mask(self, grad: Tensor, state: dict[str, Tensor], moments: Mapping[str, Any]) -> Tensor:
        if self.of == "update":
            moment = momentum_of(moments)
            return grad * (grad if moment is None else self.beta * moment + (1.0 - self.beta) * grad) > 0
        agrees = grad * state["mean"] >= 0
        decay_into(state["mean"], grad, self.beta)
        return agrees


@register_filter("nonzero", summary="pass entries whose gradient is not zero")
class NonZero(GradFilter):
    """Pass where g != 0. With ``policy=moments`` this is an Adam that leaves zeros out of its moments. No state."""

    entrywise = True

    def mask(self, grad: Tensor) -> Tensor:
        return grad != 0


@register_filter("band", summary="pass entries whose magnitude lies between two quantiles")
class Band(GradFilter):
    """Pass entries whose |g| is above the share ``lo`` and not above the share ``hi`` of all, counted exactly.

    Args:
        lo, hi: shares, 0 <= lo < hi <= 1; ``lo=0.5 hi=0.99`` leaves out the lower half and the largest 1 %.

    No state.
    """

    def __init__(self, lo: float = 0.5, hi: float = 0.99):
        require(0.0 <= lo < hi <= 1.0, "band", "lo and hi", (lo, hi), "shares with lo below hi", (0.5, 0.99))
        self.lo, self.hi = lo, hi

    def mask(self, grad: Tensor) -> Tensor:
        size = grad.numel()
        bits = ordered_bits(grad.abs().view(1, -1), nonnegative=True)
        above_low = pass_largest(bits, size - math.floor(self.lo * size + 0.5))
        above_high = pass_largest(bits, size - math.floor(self.hi * size + 0.5))
        return (above_low & ~above_high).view(grad.shape)


@register_filter("vargate", summary="hold entries back until their sign is certain, then pass what has gathered")
class VarGate(GradFilter):
    """Gather r = sum g and v = sum g^2; where r^2 > alpha * v pass r and start again, elsewhere hold and decay v.

    Args:
        alpha: how certain, above 0. zeta: decay of v while an entry waits, in (0, 1].

    State: ``sum`` and ``square``, float32, shape of the gradient. With ``policy=update`` the optimizer sees g, not r.
    Source: Tsuzuku et al. 2018 (arXiv:1802.06058).
    """

    entrywise = needs_float_buffers = True

    def __init__(self, alpha: float = 2.0, zeta: float = 0.999):
        require(alpha > 0.0, "vargate", "alpha", alpha, "above 0", 2.0)
        require(0.0 < zeta <= 1.0, "vargate", "zeta", zeta, "in (0, 1]", 0.999)
        self.alpha, self.zeta = alpha, zeta

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        return {"sum": zeros_for(param), "square": zeros_for(param)}

    def mask(self, grad: Tensor, state: dict[str, Tensor]) -> Tensor:
        state["sum"].add_(grad)
        state["square"].add_(grad.square())
        return state["sum"].square() > self.alpha * state["square"]

    def passed(self, grad: Tensor, mask: Tensor, state: dict[str, Tensor]) -> Tensor:
        gathered = masked(state["sum"], mask)
        state["sum"].masked_fill_(mask, 0.0)
        state["square"].masked_fill_(mask, 0.0).mul_(self.zeta)
        return gathered


class MicroSteps:
    """Counts the signs of the batches that are accumulated in one gradient."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin a new gradient."""
        self.count = 0
        self.signs: Tensor | None = None
        self._before: Tensor | None = None
        self._gradient: Tensor | None = None

    @torch.no_grad()
    def watch(self, param: Tensor) -> None:
        """Look at a gradient to which a batch was added."""
        gradient = param.grad
        assert gradient is not None
        if gradient is not self._gradient:
            self.forget()  # a loss scaler left the step out, so nothing said that it ended
        added = gradient if self._before is None else gradient - self._before
        signs = added.sign().to(torch.int16)
        self.signs = signs if self.signs is None else self.signs.add_(signs)
        self._gradient, self._before = gradient, gradient.clone()
        self.count += 1


@register_filter("micro_agree", summary="pass entries whose sign agrees over the batches accumulated in a gradient")
class MicroAgree(GradFilter):
    """Pass where |number of positive minus negative micro-steps| / micro-steps >= tau; a single one passes all.

    Args:
        tau: share of agreement, in [0, 1]; 1 is unanimity.

    Not saved: ``signs``, int16, and a copy of the gradient so far, which last for one optimizer step.
    Source: AND-mask (arXiv:2009.00329).
    """

    watches_micro_steps = True

    def __init__(self, tau: float = 1.0):
        require(0.0 <= tau <= 1.0, "micro_agree", "tau", tau, "in [0, 1]", 1.0)
        self.tau = tau

    def mask(self, grad: Tensor, signs: Tensor | None, micro_steps: int | None) -> Tensor:
        if signs is None or not micro_steps:
            return torch.ones_like(grad, dtype=torch.bool)
        return signs.abs() >= self.tau * micro_steps


@register_filter(
    "magma", summary="pass or hold whole tensors at random; what passes moves less where momentum disagrees"
)
class Magma(GradFilter):
    """Pass a tensor with probability p and scale what passes by s = EMA(sigmoid(cos(m, g) / temperature)).

    m is the optimizer's first moment; cos is 0 before its first step or when it has none. Meant for ``policy=update``,
    where s scales the movement; with ``policy=zero`` it scales the gradient, which Adam-like optimizers hardly notice.

    Args:
        p: probability to pass. temperature: above 0. beta: share of the old s kept each step. seed: any whole number.

    State: ``scale``, one number. Source: arXiv:2602.15322.
    """

    def __init__(self, p: float = 0.5, temperature: float = 2.0, beta: float = 0.9, seed: int = 0):
        require(0.0 < p <= 1.0, "magma", "p", p, "in (0, 1]", 0.5)
        require(temperature > 0.0, "magma", "temperature", temperature, "above 0", 2.0)
        check_decay("magma", "beta", beta)
        self.p, self.temperature, self.beta, self.seed = p, temperature, beta, seed

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        return {"scale": torch.full((), 0.5, device=param.device)}

    def mask(self, grad: Tensor, state: dict[str, Tensor], moments: Mapping[str, Any], step: int, index: int) -> Tensor:
        moment = momentum_of(moments)
        cosine = torch.zeros((), device=grad.device)
        if moment is not None:
            cosine = torch.nn.functional.cosine_similarity(moment.to(grad.dtype).reshape(1, -1), grad.view(1, -1))[0]
        decay_into(state["scale"], torch.sigmoid(cosine / self.temperature).float(), self.beta)
        drawn = random_like(grad.view(-1)[:1], "magma", self.seed, step, index) < self.p
        return drawn.view([1] * grad.dim()).expand(grad.shape)

    def factor(self, state: dict[str, Tensor]) -> Tensor:
        return state["scale"]


# ----------------------------------------------------------------------------------------------------- transforms


@register_filter("sign", summary="replace every entry by its sign")
class Sign(GradFilter):
    """Give -1, 0 or 1. No state. Source: signSGD (arXiv:1802.04434); rai_toolbox's SignedGradientOptim."""

    entrywise = True

    def transform(self, grad: Tensor) -> Tensor:
        return grad.sign()


@register_filter("threshold", summary="pass entries whose magnitude reaches a bound")
class Threshold(GradFilter):
    """Pass |g| >= value, or |g| >= value * RMS(g) when ``relative``. No state.

    Args:
        value: the bound, at least 0. relative: in units of the root mean square of the tensor.
    """

    def __init__(self, value: float = 1.0, relative: bool = True):
        require(value >= 0.0, "threshold", "value", value, "at least 0", 1.0)
        self.value, self.relative = value, relative

    def mask(self, grad: Tensor) -> Tensor:
        return grad.abs() >= (rms(grad) * self.value if self.relative else self.value)


@register_filter("random", summary="pass entries, rows or tensors with a fixed probability")
class Random(GradFilter):
    """Pass at random, drawn from (seed, step, position of the parameter) and never from a global generator.

    Args:
        p: probability to pass, in (0, 1]. seed: any whole number. unit: what is drawn: ``entry``, ``row`` (first
            dimension) or ``tensor``.

    No state. Source: Child-Tuning-F (arXiv:2109.05687); SkipUpdate draws whole tensors.
    """

    def __init__(self, p: float = 0.1, seed: int = 0, unit: Literal["entry", "row", "tensor"] = "entry"):
        require(0.0 < p <= 1.0, "random", "p", p, "in (0, 1]", 0.1)
        self.p, self.seed, self.unit = p, seed, unit

    def mask(self, grad: Tensor, step: int, index: int) -> Tensor:
        drawn = {
            "entry": grad,
            "row": grad.reshape(len(grad) if grad.dim() else 1, -1)[:, :1],
            "tensor": grad.reshape(-1)[:1],
        }
        chosen = random_like(drawn[self.unit], self.seed, step, index) < self.p
        if self.unit == "entry":
            return chosen
        shape = (-1,) + (1,) * (grad.dim() - 1) if self.unit == "row" and grad.dim() else (1,) * grad.dim()
        return chosen.reshape(shape).expand(grad.shape)


@register_filter("soft_threshold", summary="shrink every entry towards zero by a bound")
class SoftThreshold(GradFilter):
    """Give sign(g) * max(|g| - t, 0), t = value or value * RMS(g). No state.

    Args:
        value: at least 0. relative: in units of the root mean square of the tensor.
    """

    def __init__(self, value: float = 1.0, relative: bool = True):
        require(value >= 0.0, "soft_threshold", "value", value, "at least 0", 1.0)
        self.value, self.relative = value, relative

    def transform(self, grad: Tensor) -> Tensor:
        bound = rms(grad) * self.value if self.relative else self.value
        return grad.sign() * (grad.abs() - bound).clamp_(min=0.0)


@register_filter("norm", summary="divide by a norm of the tensor or of its trailing dimensions")
class Norm(GradFilter):
    """Give g / |g|_p; rows of zeros stay. No state.

    Args:
        p: 1, 2 or inf. ndim: trailing dimensions that have a norm together, none for the whole tensor; tensors of one
            dimension have one norm.

    Source: rai_toolbox's L1, L2 and L-inf gradient optimizers.
    """

    def __init__(self, p: Literal["1", "2", "inf"] = "2", ndim: int | None = None):
        self.p, self.ndim = float(p), ndim

    def transform(self, grad: Tensor) -> Tensor:
        rows = grad.view(row_shape(grad.shape, self.ndim if grad.dim() > 1 else None))
        size = torch.linalg.vector_norm(rows, self.p, dim=1, keepdim=True)
        return (rows / torch.where(size > 0, size, torch.ones_like(size))).view(grad.shape)


@register_filter("clamp", summary="limit gradient entries, or weights after the step")
class Clamp(GradFilter):
    """Give min(max(g, lo), hi), and keep weights inside ``weights`` after every step. No state.

    Args:
        lo, hi: bounds of the gradient, none for no bound. weights: two bounds, as ``weights=-1,1``.
    """

    entrywise = True

    def __init__(self, lo: float | None = None, hi: float | None = None, weights: tuple[float, ...] | None = None):
        if lo is None and hi is None and weights is None:
            raise GradFilterError("clamp: nothing to limit. Example: lo=-0.01 hi=0.01, or weights=-1,1")
        require(lo is None or hi is None or lo <= hi, "clamp", "lo", lo, "at most hi", -0.01)
        fits = weights is None or (len(weights) == 2 and weights[0] <= weights[1])
        require(fits, "clamp", "weights", weights, "a lower and an upper bound", (-1.0, 1.0))
        self.lo, self.hi, self.weights = lo, hi, weights

    def transform(self, grad: Tensor) -> Tensor:
        return grad if self.lo is None and self.hi is None else grad.clamp(self.lo, self.hi)

    def weights_after(self, weight: Tensor) -> Tensor:
        return weight if self.weights is None else weight.clamp(*self.weights)


@register_filter("scale", summary="multiply the gradient and add a constant")
class Scale(GradFilter):
    """Give grad_scale * g + grad_bias. No state. Source: rai_toolbox's ``grad_scale`` and ``grad_bias``.

    Args:
        grad_scale, grad_bias: any numbers.
    """

    entrywise = True

    def __init__(self, grad_scale: float = 1.0, grad_bias: float = 0.0):
        self.grad_scale, self.grad_bias = grad_scale, grad_bias

    def transform(self, grad: Tensor) -> Tensor:
        return grad * self.grad_scale + self.grad_bias


@register_filter("centralize", summary="subtract from each output row its mean")
class Centralize(GradFilter):
    """Give g minus its mean over all dimensions but the first; tensors of one dimension pass as they are. No state.

    Source: gradient centralization (arXiv:2004.01461).
    """

    def transform(self, grad: Tensor) -> Tensor:
        return grad - grad.mean(dim=tuple(range(1, grad.dim())), keepdim=True) if grad.dim() > 1 else grad


@register_filter("orthograd", summary="take out of the gradient the part along the weights, keep its norm")
class OrthoGrad(GradFilter):
    """Give h * |g| / |h| with h = g - (w.g / w.w) w. No state. Source: OrthoGrad (arXiv:2501.04697).

    Put it behind no mask: it fills masked entries again.
    """

    fills_masked_entries = True

    def transform(self, grad: Tensor, param: Tensor) -> Tensor:
        weight = param.to(grad.dtype)
        along = (weight * grad).sum() / weight.square().sum().clamp(min=1e-30)
        rest = grad - along * weight
        return rest * (grad.norm() / rest.norm().clamp(min=1e-30))


@register_filter("grokfast", summary="add the slow part of the gradient once more")
class GrokFast(GradFilter):
    """Give g + lamb * mean, mean = alpha * mean + (1 - alpha) * g.

    Args:
        alpha: share of the old mean kept each step. lamb: how much of it is added.

    State: ``mean``, float32, shape of the gradient. Source: Grokfast-EMA (arXiv:2405.20233).
    """

    entrywise = True
    fills_masked_entries = True

    def __init__(self, alpha: float = 0.98, lamb: float = 2.0):
        check_decay("grokfast", "alpha", alpha)
        self.alpha, self.lamb = alpha, lamb

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        return {"mean": zeros_for(param)}

    def transform(self, grad: Tensor, state: dict[str, Tensor]) -> Tensor:
        decay_into(state["mean"], grad, self.alpha)
        return grad + self.lamb * state["mean"]


@register_filter("spike", summary="cut spikes of entries (SPAM), tensors (AdaGC) or whole steps (ZClip)")
class Spike(GradFilter):
    """Cut what is far above its own past.

    ``by=entry``: where g^2 > theta * v, v = EMA(g^2), give sign(g) * sqrt(theta * v); default theta 5000, beta 0.999.
    ``by=tensor``: scale to theta * EMA(norm) when the norm is above it; default theta 1.05, beta 0.98.
    ``by=global``: z = (norm - mean) / deviation of all gradients together; when z > theta scale the norm to
    mean + theta^2 / z * deviation; default theta 2.5, beta 0.97. Running values learn from what was cut.

    Args:
        by: entry, tensor or global. theta, beta: as above when not given. warmup: steps that only learn.

    State: ``square`` of the gradient's shape for entry, otherwise one or two numbers.
    Source: SPAM (arXiv:2501.06842), AdaGC (arXiv:2502.11034), ZClip (arXiv:2504.02507).
    """

    DEFAULTS: ClassVar = {"entry": (5000.0, 0.999), "tensor": (1.05, 0.98), "global": (2.5, 0.97)}

    def __init__(
        self,
        by: Literal["entry", "tensor", "global"] = "entry",
        theta: float | None = None,
        beta: float | None = None,
        warmup: int = 10,
    ):
        self.by = by
        self.theta = self.DEFAULTS[by][0] if theta is None else theta
        self.beta = self.DEFAULTS[by][1] if beta is None else beta
        require(self.theta > 0.0, "spike", "theta", self.theta, "above 0", self.DEFAULTS[by][0])
        check_decay("spike", "beta", self.beta)
        require(warmup >= 1, "spike", "warmup", warmup, "at least 1", 10)
        self.warmup = warmup

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        if self.by == "entry":
            return {"square": zeros_for(param)}
        return {"mean": torch.zeros((), device=param.device), "variance": torch.zeros((), device=param.device)}

    def transform(self, grad: Tensor, state: dict[str, Tensor], step: int, total_norm: Tensor) -> Tensor:
        if self.by == "entry":
            return self._entries(grad, state, step)
        norm = grad.norm().float() if self.by == "tensor" else total_norm
        allowed = norm if step < self.warmup else self._allowed(norm, state)
        beta = min(self.beta, step / (step + 1.0))  # a plain mean until there are enough steps
        decay_into(state["variance"], (allowed - state["mean"]).square() if step else torch.zeros_like(allowed), beta)
        decay_into(state["mean"], allowed, beta)
        return grad * (allowed / norm.clamp(min=1e-30)).to(grad.dtype)

    def _allowed(self, norm: Tensor, state: dict[str, Tensor]) -> Tensor:
        if self.by == "tensor":
            return torch.minimum(norm, self.theta * state["mean"])
        deviation = state["variance"].sqrt().clamp(min=1e-12)
        z = (norm - state["mean"]) / deviation
        return torch.where(z > self.theta, state["mean"] + self.theta**2 / z.clamp(min=1e-12) * deviation, norm)

    def _entries(self, grad: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
        bound = (self.theta * state["square"] / max(1e-30, 1.0 - self.beta**step)).sqrt_()
        cut = grad if step < self.warmup else torch.where(grad.abs() > bound, grad.sign() * bound, grad)
        for square, value in chunks(state["square"], cut.contiguous()):
            decay_into(square, value.square(), self.beta)
        return cut


# -------------------------------------------------------------------------------------------------------- presets

PRESETS.update(
    {
        "gmt": Preset("topk", ("keep=0.2",), "gradient-mask tuning: the largest 20 % of every gradient"),
        "sift": Preset("fisher", ("of=magnitude", "fisher.warmup=1", "keep=0.05", "policy=freeze"), "5 % chosen once"),
        "fish": Preset(
            "fisher", ("of=square", "keep=0.005", "policy=freeze"), "the 0.5 % with most Fisher information"
        ),
        "sara": Preset("weight", ("keep=0.1", "policy=freeze"), "train the 10 % of weights that are smallest"),
        "grokfast": Preset("grokfast", (), "amplify the slow part of gradients"),
        "cautious": Preset(
            "agree", ("of=update", "policy=update", "rescale=cautious"), "move where update and g agree"
        ),
        "magma": Preset("magma", ("policy=update",), "random tensors rest, the others move by agreement"),
        "skipupdate": Preset(
            "random", ("unit=tensor", "p=0.5", "policy=update", "rescale=keep"), "tensors rest at random"
        ),
        "dgc": Preset(
            "topk", ("keep=0.01", "policy=residual", "ramp=100"), "deep gradient compression: what is left waits"
        ),
        "childtuning_f": Preset("random", ("p=0.3", "rescale=keep"), "30 % of entries at random, scaled up"),
        "spam_clip": Preset("spike", ("by=entry",), "cut spiking entries"),
        "zclip": Preset("spike", ("by=global",), "cut spiking steps"),
        "adagc": Preset("spike", ("by=tensor",), "cut spiking tensors"),
        "orthograd": Preset("orthograd", (), "no gradient along the weights"),
        "gc": Preset("centralize", (), "gradient centralization"),
        "lazy_adam": Preset("nonzero", ("policy=freeze",), "entries without a gradient rest, moments and all"),
    }
)
assert all(stage in FILTERS for preset in PRESETS.values() for stage in preset.stages.split(","))
