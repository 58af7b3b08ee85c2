"""Optimizers that transform gradients or weights around the step of another optimizer, for use from Python.

The interface follows MIT's rai_toolbox, so code written for it runs here; the transforms are the stages of
``grad_filter``. One difference by design: with a negative ``param_ndim`` a tensor of one dimension is taken as a whole.
rai_toolbox takes its entries one by one there, so that a top-q filter zeroes every bias and an L2 norm turns biases
into +-1; ``whole_biases=False`` brings that back.

    optim = L2NormedGradientOptim(model.parameters(), InnerOpt=torch.optim.AdamW, lr=1e-3, param_ndim=None)
    adam = MaskedAdam(model.parameters(), lr=1e-3)          # moments skip zero gradients
"""

from __future__ import annotations

import collections
import functools
import inspect
import logging
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from library import grad_filter
from library.grad_filter import keep_count, ordered_bits, pass_largest
from library.grad_filter_stages import Clamp, Norm, Scale, Sign

log = logging.getLogger(__name__)

BASE_KNOBS: dict[str, Any] = {"param_ndim": -1, "grad_scale": 1.0, "grad_bias": 0.0, "whole_biases": True}
TRANSFORM_KEY = "param_transform"


# ---------------------------------------------------------------------------------------------------------- checks


def _number(name: str, value: Any, low: float = -math.inf, high: float = math.inf, *, open_low: bool = False) -> None:
    """Refuse what is no number (TypeError) or lies outside of its range (ValueError), naming the argument."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not (low <= value <= high) or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise ValueError(f"{name} must be in {bracket}{low}, {high}], got {value}")


def check_param_ndim(value: Any) -> None:
    """Refuse a ``param_ndim`` that is neither a whole number nor None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise TypeError(f"param_ndim must be a whole number or None, got {value!r}")


def transform_shape(shape: Sequence[int], param_ndim: int | None, whole_biases: bool = True) -> tuple[int, ...]:
    """Give (N, d1..dm), the shape a transform sees.

    Args:
        shape: of the parameter. param_ndim: k >= 0 keeps the trailing k dimensions; negative is an offset from the
            number of dimensions; None keeps all. whole_biases: with a negative value, one dimension is kept whole.

    Raises:
        ValueError: k is larger than the number of dimensions.
    """
    ndim = len(shape)
    if param_ndim is None or (param_ndim < 0 and ndim == 1 and whole_biases):
        kept = ndim
    elif param_ndim >= 0:
        kept = param_ndim
        if kept > ndim:
            raise ValueError(f"param_ndim must be at most {ndim} for a parameter of shape {tuple(shape)}, got {kept}")
    else:
        kept = max(0, ndim + param_ndim)
    return (math.prod(shape[: ndim - kept]), *shape[ndim - kept :])


def run_closure(closure: Callable[[], Any] | None) -> Any:
    """Call a closure with gradients enabled and give its loss; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


# ------------------------------------------------------------------------------------------------------------ base


class _State(MutableMapping):
    """The inner optimizer's state; what a subclass keeps for a reshaped parameter lies apart, under the real one.

    Optimizers test whether a parameter's state is empty to know their first step, so nothing may be added there.
    """

    def __init__(self, inner: Mapping[Any, Any], real_of_view: Mapping[Tensor, Tensor]):
        self._inner = inner
        self._real_of_view = real_of_view
        self.own: dict[Tensor, dict[str, Any]] = {}

    def __getitem__(self, key: Any) -> Any:
        real = self._real_of_view.get(key)
        return self._inner[key] if real is None else self.own.setdefault(real, {})

    def __setitem__(self, key: Any, value: Any) -> None:
        real = self._real_of_view.get(key)
        if real is None:
            self._inner[key] = value  # type: ignore[index]
        else:
            self.own[real] = value

    def __delitem__(self, key: Any) -> None:
        real = self._real_of_view.get(key)
        if real is None:
            del self._inner[key]  # type: ignore[attr-defined]
        else:
            del self.own[real]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._inner)

    def __len__(self) -> int:
        return len(self._inner)


class ParamTransformingOptimizer(Optimizer):
    """Transforms each parameter's gradient before, and its value after, the step of an inner optimizer.

    Subclasses override :meth:`_pre_step_transform_` and :meth:`_post_step_transform_`; both get the parameter reshaped
    to (N, d1..dm) and change ``param.grad`` or ``param`` in place. After the first one the gradient is multiplied by
    ``grad_scale``, then ``grad_bias`` is added; both are visible in ``p.grad`` after the step.

    Args:
        params: parameters or group dicts; None when ``InnerOpt`` is an instance. Every knob may differ per group.
        InnerOpt: optimizer class, functools.partial of one, or an instance.
        param_ndim, grad_scale, grad_bias: see :func:`transform_shape` and above.
        whole_biases: see the module's text. defaults: further per-group knobs of a subclass, with their values.
        inner_opt_kwargs: arguments of the inner optimizer.

    Raises:
        TypeError, ValueError: an argument of the wrong kind or out of range, named in the message.
    """

    def __init__(
        self,
        params: Iterable[Any] | None = None,
        InnerOpt: Any = SGD,
        *,
        param_ndim: int | None = -1,
        grad_scale: float = 1.0,
        grad_bias: float = 0.0,
        whole_biases: bool = True,
        defaults: dict[str, Any] | None = None,
        **inner_opt_kwargs: Any,
    ):
        knobs = {
            "param_ndim": param_ndim,
            "grad_scale": grad_scale,
            "grad_bias": grad_bias,
            "whole_biases": whole_biases,
        }
        self._knobs = {**knobs, **(defaults or {})}
        self.inner_opt = _build_inner(params, InnerOpt, inner_opt_kwargs)
        self._views: dict[Tensor, Tensor] = {}
        self._real_of_view: dict[Tensor, Tensor] = {}
        self._mirror = _State(self.inner_opt.state, self._real_of_view)
        self._hooks_like_an_optimizer()
        for group in self.param_groups:
            self._complete_group(group)

    def _hooks_like_an_optimizer(self) -> None:
        """Give this object what Optimizer.__init__ would, without groups and state of its own."""
        self._optimizer_step_pre_hooks = collections.OrderedDict()
        self._optimizer_step_post_hooks = collections.OrderedDict()
        self._optimizer_state_dict_pre_hooks = collections.OrderedDict()
        self._optimizer_state_dict_post_hooks = collections.OrderedDict()
        self._optimizer_load_state_dict_pre_hooks = collections.OrderedDict()
        self._optimizer_load_state_dict_post_hooks = collections.OrderedDict()
        self._patch_step_function()

    def _complete_group(self, group: dict[str, Any]) -> None:
        for key, value in self._knobs.items():
            group.setdefault(key, value)
        check_param_ndim(group["param_ndim"])
        _number("grad_scale", group["grad_scale"])
        _number("grad_bias", group["grad_bias"])
        self._check_group(group)
        for param in group["params"]:
            transform_shape(param.shape, group["param_ndim"], group["whole_biases"])

    def _check_group(self, group: dict[str, Any]) -> None:
        """Check a subclass's own knobs of a group."""

    # ---------------------------------------------------------------------------------------- what is mirrored

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner_opt.param_groups

    @property
    def state(self) -> MutableMapping[Any, Any]:  # type: ignore[override]
        return self._mirror

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return {**self.inner_opt.defaults, **self._knobs}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer; knobs that are not given take the values of construction."""
        self.inner_opt.add_param_group(param_group)
        self._complete_group(self.param_groups[-1])

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner_opt.zero_grad(set_to_none=set_to_none)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner_opt!r})"

    # ------------------------------------------------------------------------------------------------- steps

    def _pre_step_transform_(self, param: Tensor, optim_group: dict[str, Any]) -> None:
        """Change ``param.grad`` in place; ``param`` and its gradient have shape (N, d1..dm)."""

    def _post_step_transform_(self, param: Tensor, optim_group: dict[str, Any]) -> None:
        """Change ``param`` in place; it has shape (N, d1..dm)."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Transform gradients, step, transform weights; a closure runs first, with gradients enabled."""
        loss = run_closure(closure)
        for group in self.param_groups:
            scale = Scale(group["grad_scale"], group["grad_bias"])
            for param in group["params"]:
                if param.grad is None:
                    continue
                self._on_view(param, group, self._pre_step_transform_, with_grad=True)
                if group["grad_scale"] != 1.0 or group["grad_bias"] != 0.0:
                    param.grad.copy_(scale.transform(param.grad))
        self.inner_opt.step()
        self.project()
        return loss

    @torch.no_grad()
    def project(self) -> None:
        """Apply the post-step transform to every parameter."""
        if type(self)._post_step_transform_ is ParamTransformingOptimizer._post_step_transform_:
            return
        for group in self.param_groups:
            for param in group["params"]:
                self._on_view(param, group, self._post_step_transform_, with_grad=False)

    def _on_view(self, param: Tensor, group: dict[str, Any], transform: Callable[..., None], with_grad: bool) -> None:
        shape = transform_shape(param.shape, group["param_ndim"], group["whole_biases"])
        view = self._view_of(param, shape)
        gradient = param.grad.reshape(shape) if with_grad and param.grad is not None else None
        view.grad = gradient
        transform(view, group)
        if gradient is not None and view.grad is not None and view.grad.data_ptr() != param.grad.data_ptr():
            param.grad.copy_(view.grad.reshape(param.shape))  # a memory layout that has no view of this shape
        if view.data_ptr() != param.data_ptr():
            param.copy_(view.reshape(param.shape))
        view.grad = None

    def _view_of(self, param: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Give the same object for a parameter at every step, so that a subclass can keep state under it."""
        current = param.detach().reshape(shape)
        view = self._views.get(param)
        if view is None:
            view = self._views[param] = current.requires_grad_(False)
            self._real_of_view[view] = param
        else:
            view.data = current
        return view

    # --------------------------------------------------------------------------------------------- saved state

    def _transform_state(self) -> dict[str, Any]:
        """Give what a subclass must remember beside per-parameter state; plain values and tensors."""
        return {}

    def _load_transform_state(self, saved: Mapping[str, Any]) -> None:
        """Take over what :meth:`_transform_state` gave."""

    def _all_params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Give the inner optimizer's state dict and, under one key, that of the transforms."""
        content = self.inner_opt.state_dict()
        own = [self._mirror.own.get(param) for param in self._all_params()]
        content[TRANSFORM_KEY] = {"per_param": own, "more": self._transform_state()}
        return content

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load a state; the knobs of this object stay in force, with a line for each that the state has otherwise."""
        asked = [{key: group[key] for key in self._knobs} for group in self.param_groups]
        rest = {key: value for key, value in state_dict.items() if key != TRANSFORM_KEY}
        self.inner_opt.load_state_dict(rest)
        self._mirror._inner = self.inner_opt.state
        for number, (group, knobs) in enumerate(zip(self.param_groups, asked)):
            for key, value in knobs.items():
                if group.get(key, value) != value:
                    log.warning("group %d: %s=%r stays in force, the state has %r", number, key, value, group[key])
                group[key] = value
        saved = state_dict.get(TRANSFORM_KEY)
        if saved is None:
            log.warning("the state was written without %s, its transforms start fresh", type(self).__name__)
            return
        for param, own in zip(self._all_params(), saved["per_param"]):
            if own is not None:
                self._mirror.own[param] = {key: _to_device(value, param.device) for key, value in own.items()}
        self._load_transform_state(saved["more"])


def _to_device(value: Any, device: torch.device) -> Any:
    return value.to(device, copy=True) if isinstance(value, Tensor) else value


def _build_inner(params: Iterable[Any] | None, inner: Any, arguments: dict[str, Any]) -> Optimizer:
    if isinstance(inner, Optimizer):
        if params is not None or arguments:
            raise TypeError("params and further arguments must be left out when InnerOpt is an instance")
        return inner
    cls = inner.func if isinstance(inner, functools.partial) else inner
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        raise TypeError(f"InnerOpt must be an optimizer class, a partial of one or an instance, got {inner!r}")
    if params is None:
        raise TypeError("params must be given when InnerOpt is not an instance")
    return inner(params, **arguments)


# ------------------------------------------------------------------------------------------------ gradient transforms


class SignedGradientOptim(ParamTransformingOptimizer):
    """Steps with the sign of every gradient entry."""

    def _pre_step_transform_(self, param: Tensor, optim_group: dict[str, Any]) -> None:
        assert param.grad is not None
        param.grad.copy_(Sign().transform(param.grad))


class _NormedGradientOptim(ParamTransformingOptimizer):
    """Divides each row's gradient by its norm; rows of zeros stay zero, in every precision."""

    p: float = 2.0

    def _pre_step_transform_(self, param: Tensor, optim_group: dict[str, Any]) -> None:
        assert param.grad is not None
        normalize_rows_(param.grad, self.p)


def normalize_rows_(gradient: Tensor, p: float) -> None:
    """Divide (N, d1..dm) by the p-norm of each row, in place; computed in float32."""
    rows = gradient.reshape(gradient.shape[0], -1)
    normed = Norm(p=p, ndim=1).transform(rows.float())
    gradient.copy_(normed.reshape(gradient.shape))


class L1NormedGradientOptim(_NormedGradientOptim):
    """Steps with each row's gradient divided by its L1 norm."""

    p = 1.0


class L2NormedGradientOptim(_NormedGradientOptim):
    """Steps with each row's gradient divided by its L2 norm."""

    p = 2.0


class LinfNormedGradientOptim(_NormedGradientOptim):
    """Steps with each row's gradient divided by its largest magnitude."""

    p = math.inf


def top_rows(gradient: Tensor, keep: float) -> Tensor:
    """Give the mask of the share ``keep`` of each row's largest magnitudes: exactly that many, at least one."""
    rows = gradient.float().abs().reshape(gradient.shape[0], -1).contiguous()
    mask = pass_largest(ordered_bits(rows, nonnegative=True), keep_count(keep, rows.shape[1]))
    return mask.reshape(gradient.shape)


class TopQGradientOptimizer(ParamTransformingOptimizer):
    """Zeroes all but the largest gradient entries of each row.

    Args:
        q: quantile of the magnitudes; entries above it stay, so q=0.9 keeps a tenth. In [0, 1].
        dq: at each step and parameter q is drawn uniformly from [q - dq, q + dq], kept within [0, 1].
        generator: for these draws; its state is saved and restored. A new one is seeded with 0.
    """

    def __init__(
        self,
        params: Iterable[Any] | None = None,
        InnerOpt: Any = SGD,
        *,
        q: float,
        dq: float = 0.0,
        generator: torch.Generator | None = None,
        defaults: dict[str, Any] | None = None,
        **arguments: Any,
    ):
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator or None, got {generator!r}")
        self.generator = generator if generator is not None else torch.Generator().manual_seed(0)
        super().__init__(params, InnerOpt, defaults={"q": q, "dq": dq, **(defaults or {})}, **arguments)

    def _check_group(self, group: dict[str, Any]) -> None:
        _number("q", group["q"], 0.0, 1.0)
        _number("dq", group["dq"], 0.0, 1.0)

    def _drawn_keep(self, group: dict[str, Any]) -> float:
        q = group["q"]
        if group["dq"]:
            low, high = max(0.0, q - group["dq"]), min(1.0, q + group["dq"])
            q = low + (high - low) * torch.rand((), generator=self.generator, device=self.generator.device).item()
        return 1.0 - q

    def _pre_step_transform_(self, param: Tensor, optim_group: dict[str, Any]) -> None:
        assert param.grad is not None
        mask = top_rows(param.grad, self._drawn_keep(optim_group))
        param.grad.masked_fill_(~mask, 0.0)

    def _transform_state(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def _load_transform_state(self, saved: Mapping[str, Any]) -> None:
        self.generator.set_state(saved["generator"].cpu())


class L1qNormedGradientOptim(TopQGradientOptimizer):
    """Steps with the signs of each row's largest gradient entries, divided by their number: an L1 norm of 1."""

    def _pre_step_transform_(self, param: Tensor, optim_group: dict[str, Any]) -> None:
        super()._pre_step_transform_(param, optim_group)
        assert param.grad is not None
        param.grad.copy_(Sign().transform(param.grad))
        normalize_rows_(param.grad, 1.0)


class _Clamping(ParamTransformingOptimizer):
    """Has two bounds, at least one of which is a number.

    Args:
        clamp_min, clamp_max: bounds, None for no bound.
    """

    def __init__(
        self,
        params: Iterable[Any] | None = None,
        InnerOpt: Any = SGD,
        *,
        clamp_min: float | None = None,
        clamp_max: float | None = None,
        defaults: dict[str, Any] | None = None,
        **arguments: Any,
    ):
        own = {"clamp_min": clamp_min, "clamp_max": clamp_max, **(defaults or {})}
        super().__init__(params, InnerOpt, defaults=own, **arguments)

    def _check_group(self, group: dict[str, Any]) -> None:
        low, high = group["clamp_min"], group["clamp_max"]
        if low is None and high is None:
            raise TypeError("clamp_min or clamp_max must be given")
        for name in ("clamp_min", "clamp_max"):
            if group[name] is not None:
                _number(name, group[name])
        if low is not None and high is not None and low > high:
            raise ValueError(f"clamp_min must be at most clamp_max, got {low} and {high}")


class ClampedGradientOptimizer(_Clamping):
    """Limits every gradient entry before the step."""

    def _pre_step_transform_(self, param: Tensor, optim_group: dict[str, Any]) -> None:
        assert param.grad is not None
        param.grad.copy_(Clamp(optim_group["clamp_min"], optim_group["clamp_max"]).transform(param.grad))


class ClampedParameterOptimizer(_Clamping):
    """Limits every weight after the step."""

    def _post_step_transform_(self, param: Tensor, optim_group: dict[str, Any]) -> None:
        param.copy_(Clamp(optim_group["clamp_min"], optim_group["clamp_max"]).transform(param))


class _Projecting(ParamTransformingOptimizer):
    """Has a radius.

    Args:
        epsilon: radius of the ball, at least 0.
    """

    def __init__(
        self,
        params: Iterable[Any] | None = None,
        InnerOpt: Any = SGD,
        *,
        epsilon: float,
        defaults: dict[str, Any] | None = None,
        **arguments: Any,
    ):
        super().__init__(params, InnerOpt, defaults={"epsilon": epsilon, **(defaults or {})}, **arguments)

    def _check_group(self, group: dict[str, Any]) -> None:
        _number("epsilon", group["epsilon"], 0.0)


class L2ProjectedOptim(_Projecting):
    """Steps with L2-normed gradients and puts every row of the weights back into the ball of radius ``epsilon``."""

    def _pre_step_transform_(self, param: Tensor, optim_group: dict[str, Any]) -> None:
        assert param.grad is not None
        normalize_rows_(param.grad, 2.0)

    def _post_step_transform_(self, param: Tensor, optim_group: dict[str, Any]) -> None:
        rows = param.reshape(param.shape[0], -1)
        size = torch.linalg.vector_norm(rows.float(), dim=1, keepdim=True)
        factor = torch.where(size > optim_group["epsilon"], optim_group["epsilon"] / size, torch.ones_like(size))
        param.copy_((rows.float() * factor).reshape(param.shape))


class LinfProjectedOptim(_Projecting):
    """Steps with signed gradients and puts every weight back into [-epsilon, epsilon]."""

    def _pre_step_transform_(self, param: Tensor, optim_group: dict[str, Any]) -> None:
        assert param.grad is not None
        param.grad.copy_(Sign().transform(param.grad))

    def _post_step_transform_(self, param: Tensor, optim_group: dict[str, Any]) -> None:
        param.clamp_(-optim_group["epsilon"], optim_group["epsilon"])


class ChainedParamTransformingOptimizer(ParamTransformingOptimizer):
    """Applies several transforming optimizers' transforms one after the other around one inner step.

    Args:
        transforms: classes or partials of ParamTransformingOptimizer, in order. params, InnerOpt: as there.
    """

    def __init__(
        self, *transforms: Any, params: Iterable[Any] | None = None, InnerOpt: Any = SGD, **inner_opt_kwargs: Any
    ):
        for transform in transforms:
            cls = transform.func if isinstance(transform, functools.partial) else transform
            if not (isinstance(cls, type) and issubclass(cls, ParamTransformingOptimizer)):
                raise TypeError(f"transforms must be ParamTransformingOptimizer classes or partials, got {transform!r}")
        super().__init__(params, InnerOpt, **inner_opt_kwargs)
        groups = [{"params": list(group["params"])} for group in self.param_groups]
        self._links = [
            transform([dict(group) for group in groups], InnerOpt=functools.partial(SGD, lr=0.0))
            for transform in transforms
        ]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = run_closure(closure)
        for link in self._links:
            for group in link.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        link._on_view(param, group, link._pre_step_transform_, with_grad=True)
                        param.grad.mul_(group["grad_scale"]).add_(group["grad_bias"])
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(group["grad_scale"]).add_(group["grad_bias"])
        self.inner_opt.step()
        self.project()
        return loss

    def project(self) -> None:
        """Apply every post-step transform in order."""
        for link in self._links:
            link.project()

    def _transform_state(self) -> dict[str, Any]:
        return {str(number): link.state_dict()[TRANSFORM_KEY] for number, link in enumerate(self._links)}

    def _load_transform_state(self, saved: Mapping[str, Any]) -> None:
        for number, link in enumerate(self._links):
            link.load_state_dict({**link.inner_opt.state_dict(), TRANSFORM_KEY: saved[str(number)]})


# ----------------------------------------------------------------------------------------------------- Frank-Wolfe


class FrankWolfe(Optimizer):
    """Moves towards the negative gradient as a point of the feasible set: p <- p + rate * (-grad - p).

    Useful inside a transforming optimizer that turns the gradient into a vertex of the set. Source: Frank and Wolfe
    1956; Jaggi 2013 for the step rule 2 / (t + 2).

    Args:
        params: parameters or groups. lr: the rate when ``use_default_lr_schedule`` is False, in (0, 1].
        use_default_lr_schedule: rate = 2 / (t + 2), t counted from 0.
    """

    def __init__(self, params: Iterable[Any], *, lr: float = 1.0, use_default_lr_schedule: bool = True):
        _number("lr", lr, 0.0, 1.0, open_low=True)
        super().__init__(params, {"lr": lr, "use_default_lr_schedule": use_default_lr_schedule})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Make one step; a closure runs first, with gradients enabled."""
        loss = run_closure(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                done = state.setdefault("step", 0)
                rate = 2.0 / (done + 2.0) if group["use_default_lr_schedule"] else group["lr"]
                param.add_(-param.grad - param, alpha=rate)
                state["step"] = done + 1
        return loss


class _NormFrankWolfe(_Projecting):
    """Frank-Wolfe over a norm ball of radius ``epsilon``; the gradient becomes the ball's vertex against it.

    Args:
        epsilon: radius. lr, use_default_lr_schedule: as :class:`FrankWolfe`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        epsilon: float,
        lr: float = 1.0,
        use_default_lr_schedule: bool = True,
        **arguments: Any,
    ):
        inner = functools.partial(FrankWolfe, lr=lr, use_default_lr_schedule=use_default_lr_schedule)
        super().__init__(params, inner, epsilon=epsilon, **arguments)

    def _vertex_(self, gradient: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def _pre_step_transform_(self, param: Tensor, optim_group: dict[str, Any]) -> None:
        assert param.grad is not None
        self._vertex_(param.grad, optim_group)
        param.grad.mul_(optim_group["epsilon"])


class L1FrankWolfe(_NormFrankWolfe):
    """Frank-Wolfe over the L1 ball: the vertex is the sign of each row's largest entry."""

    def _vertex_(self, gradient: Tensor, group: dict[str, Any]) -> None:
        gradient.masked_fill_(~top_rows(gradient, 0.0), 0.0)
        gradient.copy_(Sign().transform(gradient))


class L2FrankWolfe(_NormFrankWolfe):
    """Frank-Wolfe over the L2 ball: the vertex is each row's direction."""

    def _vertex_(self, gradient: Tensor, group: dict[str, Any]) -> None:
        normalize_rows_(gradient, 2.0)


class LinfFrankWolfe(_NormFrankWolfe):
    """Frank-Wolfe over the box: the vertex is the sign of every entry."""

    def _vertex_(self, gradient: Tensor, group: dict[str, Any]) -> None:
        gradient.copy_(Sign().transform(gradient))


class L1qFrankWolfe(L1qNormedGradientOptim):
    """Frank-Wolfe whose vertices are signs of each row's largest entries with an L1 norm of ``epsilon``.

    Args:
        q, dq, generator: as :class:`TopQGradientOptimizer`. epsilon, lr, use_default_lr_schedule: as above.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        q: float,
        epsilon: float,
        dq: float = 0.0,
        lr: float = 1.0,
        use_default_lr_schedule: bool = True,
        generator: torch.Generator | None = None,
        **arguments: Any,
    ):
        inner = functools.partial(FrankWolfe, lr=lr, use_default_lr_schedule=use_default_lr_schedule)
        super().__init__(params, inner, q=q, dq=dq, generator=generator, defaults={"epsilon": epsilon}, **arguments)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        _number("epsilon", group["epsilon"], 0.0)

    def _pre_step_transform_(self, param: Tensor, optim_group: dict[str, Any]) -> None:
        super()._pre_step_transform_(param, optim_group)
        assert param.grad is not None
        param.grad.mul_(optim_group["epsilon"])


# -------------------------------------------------------------------------------------------------------- filtered


def filtered(optimizer_class: type[Optimizer], filter_stages: str, **options: Any) -> type[Optimizer]:
    """Give a subclass of an optimizer whose instances have a gradient filter attached from the start.

    Args:
        optimizer_class: any torch optimizer class. filter_stages: as ``--grad_filter``. options: its arguments.

    Returns:
        A class, usable wherever an optimizer class or a partial of one is.

    Raises:
        GradFilterError: a wrong filter or option, at once.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(f"optimizer_class must be an optimizer class, got {optimizer_class!r}")
    words = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in options.items()]
    spec = grad_filter.parse_spec(filter_stages, words)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        optimizer_class.__init__(self, *args, **kwargs)
        if spec is not None:
            grad_filter.attach(self, spec)

    __init__.__signature__ = inspect.signature(optimizer_class.__init__)  # type: ignore[attr-defined]
    name = f"Filtered{optimizer_class.__name__}"
    doc = f"{optimizer_class.__name__} with the gradient filter {filter_stages!r}."
    return type(name, (optimizer_class,), {"__init__": __init__, "__doc__": doc, "__module__": __name__})


MaskedAdam = filtered(torch.optim.Adam, "nonzero", policy="moments", min_numel=0)
