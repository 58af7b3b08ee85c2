"""Every optimizer by name, as one table; what is special about one is a field of its row."""

from __future__ import annotations

import dis
import importlib
import importlib.util
import inspect
import logging
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from library import grad_filter
from library.errors import OptionError, did_you_mean
from library.key_values import parse_key_values

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OptimizerSpec:
    """One optimizer.

    Attributes:
        name: as typed, in any case. path: where its class is. pip: package that has it, None for torch.
        forced: arguments it always gets. defaults: arguments it gets unless given.
        adapts_lr: finds its own step size; rates near 1 are meant and all groups need the same one.
        relative_step: sets its own rates unless told otherwise. needs_cuda: cannot run on a CPU.
    """

    name: str
    path: str
    pip: str | None = None
    forced: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    adapts_lr: bool = False
    relative_step: bool = False
    needs_cuda: bool = False


_BNB, _DADAPT = "bitsandbytes", "dadaptation"
_MOMENTUM = {"momentum": 0.9}

OPTIMIZERS: tuple[OptimizerSpec, ...] = (
    OptimizerSpec("AdamW", "torch.optim.AdamW"),
    OptimizerSpec("AdamW8bit", "bitsandbytes.optim.AdamW8bit", _BNB),
    OptimizerSpec("PagedAdamW", "bitsandbytes.optim.PagedAdamW", _BNB, needs_cuda=True),
    OptimizerSpec("PagedAdamW8bit", "bitsandbytes.optim.PagedAdamW8bit", _BNB, needs_cuda=True),
    OptimizerSpec("PagedAdamW32bit", "bitsandbytes.optim.PagedAdamW32bit", _BNB, needs_cuda=True),
    OptimizerSpec("Lion8bit", "bitsandbytes.optim.Lion8bit", _BNB),
    OptimizerSpec("PagedLion8bit", "bitsandbytes.optim.PagedLion8bit", _BNB, needs_cuda=True),
    OptimizerSpec("Lion", "lion_pytorch.Lion", "lion-pytorch"),
    OptimizerSpec("SGDNesterov", "torch.optim.SGD", forced={"nesterov": True}, defaults=_MOMENTUM),
    OptimizerSpec("SGDNesterov8bit", "bitsandbytes.optim.SGD8bit", _BNB, forced={"nesterov": True}, defaults=_MOMENTUM),
    OptimizerSpec("SignSGD", "pytorch_optimizer.SignSGD", "pytorch_optimizer"),
    OptimizerSpec("DAdaptation", "dadaptation.experimental.DAdaptAdamPreprint", _DADAPT, adapts_lr=True),
    OptimizerSpec("DAdaptAdamPreprint", "dadaptation.experimental.DAdaptAdamPreprint", _DADAPT, adapts_lr=True),
    OptimizerSpec("DAdaptAdaGrad", "dadaptation.DAdaptAdaGrad", _DADAPT, adapts_lr=True),
    OptimizerSpec("DAdaptAdam", "dadaptation.DAdaptAdam", _DADAPT, adapts_lr=True),
    OptimizerSpec("DAdaptAdan", "dadaptation.DAdaptAdan", _DADAPT, adapts_lr=True),
    OptimizerSpec("DAdaptAdanIP", "dadaptation.experimental.DAdaptAdanIP", _DADAPT, adapts_lr=True),
    OptimizerSpec("DAdaptLion", "dadaptation.DAdaptLion", _DADAPT, adapts_lr=True),
    OptimizerSpec("DAdaptSGD", "dadaptation.DAdaptSGD", _DADAPT, adapts_lr=True),
    OptimizerSpec("Prodigy", "prodigyopt.Prodigy", "prodigyopt", adapts_lr=True),
    OptimizerSpec("Adafactor", "transformers.optimization.Adafactor", "transformers", relative_step=True),
    OptimizerSpec("AdamWScheduleFree", "schedulefree.AdamWScheduleFree", "schedulefree"),
    OptimizerSpec("RAdamScheduleFree", "schedulefree.RAdamScheduleFree", "schedulefree"),
    OptimizerSpec("SGDScheduleFree", "schedulefree.SGDScheduleFree", "schedulefree"),
)
BY_NAME = {spec.name.lower(): spec for spec in OPTIMIZERS}
OWN_OPTIONS = {"lr": "--learning_rate", "params": "the network"}
# where a short name is looked for when a full path is needed, if the package is there
PLACES = ("bitsandbytes.optim", "pytorch_optimizer", "schedulefree", "dadaptation", "prodigyopt")


def find_optimizer(optimizer_type: str | None) -> OptimizerSpec:
    """Give the row of a name; torch.optim classes and dotted paths get a row of their own.

    Raises:
        OptionError: unknown name.
    """
    name = (optimizer_type or "AdamW").strip()
    if name.lower() in BY_NAME:
        return BY_NAME[name.lower()]
    if "." in name:
        return OptimizerSpec(name, name, name.split(".")[0])
    if _is_optimizer(getattr(torch.optim, name, None)):
        return OptimizerSpec(name, f"torch.optim.{name}")
    known = [*(spec.name for spec in OPTIMIZERS), *(k for k, v in vars(torch.optim).items() if _is_optimizer(v))]
    example = _full_path(name)
    near = f" Did you mean {example}?" if example else did_you_mean(name, known)
    raise OptionError(
        f"--optimizer_type: no optimizer is called {name!r}.{near} Use a name of docs/arguments.md, a torch.optim "
        f"class, or a full path such as {example or 'bitsandbytes.optim.AdEMAMix8bit'}"
    )


def _is_optimizer(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer


def _full_path(name: str) -> str | None:
    """Give where an installed package has a class of this name."""
    for place in PLACES:
        if importlib.util.find_spec(place.split(".")[0]) is None:
            continue
        for key, value in vars(importlib.import_module(place)).items():
            if key.lower() == name.lower() and _is_optimizer(value):
                return f"{place}.{key}"
    return None


def load_class(spec: OptimizerSpec) -> type[torch.optim.Optimizer]:
    """Import the class of a row.

    Raises:
        OptionError: its package is missing, it needs a GPU, or it is no optimizer that a training loop can step.
    """
    if spec.needs_cuda and not torch.cuda.is_available():
        raise OptionError(f"--optimizer_type {spec.name} needs a CUDA GPU. Use AdamW8bit, Lion8bit or AdamW here")
    module_name, _, class_name = spec.path.rpartition(".")
    if not all(spec.path.split(".")):
        raise OptionError(f"--optimizer_type {spec.name!r} is no full path. Example: bitsandbytes.optim.AdEMAMix8bit")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        way_out = f"pip install {spec.pip}" if spec.pip else "Update torch"
        raise OptionError(f"--optimizer_type {spec.name}: cannot import {module_name} ({error}). {way_out}") from error
    found = getattr(module, class_name, None)
    if found is None:
        near = did_you_mean(class_name, [key for key, value in vars(module).items() if _is_optimizer(value)])
        raise OptionError(f"--optimizer_type {spec.name}: {module_name} has no {class_name}.{near} Check its spelling")
    if not _is_optimizer(found):
        raise OptionError(f"--optimizer_type {spec.name}: {spec.path} is no torch optimizer. Name an optimizer class")
    if needed := step_needs(found):
        raise OptionError(
            f"--optimizer_type {spec.name} cannot be stepped without {', '.join(needed)}. Use another one, e.g. AdamW"
        )
    return found


def step_needs(cls: Any) -> list[str]:
    """Give the arguments that the ``step`` of an optimizer or schedule class cannot do without."""
    parameters = list(inspect.signature(cls.step).parameters.values())[1:]
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _check_arguments(spec: OptimizerSpec, cls: type[torch.optim.Optimizer], given: Mapping[str, Any]) -> None:
    accepted = inspect.signature(cls.__init__).parameters
    rest = [name for name, parameter in accepted.items() if parameter.kind is parameter.VAR_KEYWORD]
    known = [name for name in accepted if name not in ("self", *OWN_OPTIONS, *rest)]
    takes_more = bool(rest) and _uses(cls.__init__, rest[0])
    for key in given:
        if key in OWN_OPTIONS:
            raise OptionError(f"--optimizer_args: {key} is set by {OWN_OPTIONS[key]}. Leave it out here")
        if key not in known and not takes_more:
            raise OptionError(
                f"--optimizer_args: {spec.name} takes no {key!r}.{did_you_mean(key, known)} "
                f"It takes: {', '.join(known)}"
            )


def _uses(function: Any, variable: str) -> bool:
    """Say whether a function ever reads one of its arguments; some take ``**kwargs`` only to drop them."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return True
    reads = (step.argval for step in dis.get_instructions(code) if step.opname.startswith("LOAD"))
    return any(variable == read or (isinstance(read, tuple) and variable in read) for read in reads)


def build_optimizer(
    spec: OptimizerSpec, params: Sequence[Any], learning_rate: float | None, arguments: Mapping[str, Any]
) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    """Build an optimizer.

    Args:
        spec: its row. params: parameters or group dicts. learning_rate: of groups without their own, None for
            optimizers that set it themselves. arguments: ``--optimizer_args``.

    Returns:
        The optimizer and the arguments it was given, forced ones included.

    Raises:
        OptionError: an argument that the class does not take, or a value it refuses.
    """
    cls: Any = load_class(spec)
    given = {**spec.defaults, **arguments, **spec.forced}
    _check_arguments(spec, cls, given)
    try:
        return cls(params, lr=learning_rate, **given), given
    except Exception as error:  # what a foreign constructor raises at a value is not in our hands
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise OptionError(
            f"--optimizer_args: {spec.name} refuses its arguments ({reason[:200]}). Check the values"
        ) from error


def check_rates(spec: OptimizerSpec, rates: Sequence[float | None]) -> None:
    """Refuse rates that an optimizer with its own step size cannot use; parts with a rate of 0 do not count.

    Raises:
        OptionError: groups differ; the library refuses that in the middle of its first step.
    """
    given = {rate for rate in rates if rate}
    if spec.adapts_lr and len(given) > 1:
        values = ", ".join(f"{rate:g}" for rate in sorted(given))
        raise OptionError(
            f"--optimizer_type {spec.name} needs one learning rate for everything, got {values}. Use equal "
            f"--learning_rate, --unet_lr and --text_encoder_lr, no loraplus ratios and no lr weights of blocks"
        )


def chosen_type(args: Namespace) -> str:
    """Give the optimizer's name from ``--optimizer_type`` and the two old switches.

    Raises:
        OptionError: more than one of them is given.
    """
    switches = {"use_8bit_adam": "AdamW8bit", "use_lion_optimizer": "Lion"}
    given = [name for name in switches if getattr(args, name, False)]
    if len(given) + bool(args.optimizer_type) > 1:
        raise OptionError(f"--{given[0]} is an old way to give an optimizer. Give --optimizer_type alone")
    return switches[given[0]] if given else args.optimizer_type


@dataclass(frozen=True)
class OptimizerRequest:
    """What the options ask for.

    Attributes:
        spec: the row. arguments: ``--optimizer_args``. learning_rate: as the option.
        sets_own_rates: the optimizer is given no rates at all.
    """

    spec: OptimizerSpec
    arguments: dict[str, Any]
    learning_rate: float | None
    sets_own_rates: bool

    @property
    def own_schedule(self) -> str:
        """Name of the schedule that only shows the optimizer's own rates."""
        return f"adafactor:{self.learning_rate}"


def read_optimizer(args: Namespace) -> OptimizerRequest:
    """Read the optimizer's options.

    Raises:
        OptionError: unknown name, unreadable arguments.
    """
    spec = find_optimizer(chosen_type(args))
    arguments = parse_key_values(args.optimizer_args, "--optimizer_args")
    if spec.relative_step:
        arguments = {"relative_step": True, **arguments}
        if arguments.get("warmup_init") and not arguments["relative_step"]:
            log.info("%s: warmup_init=True needs relative_step=True, which is set", spec.name)
            arguments["relative_step"] = True
    return OptimizerRequest(
        spec, arguments, args.learning_rate, bool(spec.relative_step and arguments["relative_step"])
    )


def check_optimizer(args: Namespace, rates: Sequence[float | None]) -> tuple[torch.optim.Optimizer, str]:
    """Try the options out on a parameter of four by four, so that what is wrong is known before a model is loaded.

    Args:
        args: parsed options without those of the gradient filter. rates: learning rates of the parts to be trained.

    Returns:
        The optimizer that was tried, and the schedule that will be in force.

    Raises:
        OptionError: a wrong name, argument, value or rate.
    """
    request = read_optimizer(args)
    check_rates(request.spec, rates)
    rate = None if request.sets_own_rates else request.learning_rate
    optimizer, _ = build_optimizer(request.spec, [torch.nn.Parameter(torch.zeros(4, 4))], rate, request.arguments)
    return optimizer, request.own_schedule if request.sets_own_rates else args.lr_scheduler


@grad_filter.with_grad_filter
def get_optimizer(args: Namespace, trainable_params: Sequence[Any]) -> tuple[str, str, torch.optim.Optimizer]:
    """Build the optimizer that the options ask for, with the gradient filter they ask for.

    Args:
        args: parsed options. With Adafactor's relative step, ``learning_rate``, ``unet_lr``, ``text_encoder_lr``
            become None and ``lr_scheduler`` becomes ``adafactor:<rate>``, as other code expects.
        trainable_params: parameters, or group dicts whose ``params`` may be any iterable.

    Returns:
        Full class path, ``k=v`` arguments joined by commas, the optimizer in train mode.
    """
    request = read_optimizer(args)
    groups = [{**g, "params": list(g["params"])} if isinstance(g, dict) else g for g in trainable_params]
    rate = request.learning_rate
    if request.sets_own_rates:
        groups = [{k: v for k, v in g.items() if k != "lr"} if isinstance(g, dict) else g for g in groups]
        args.lr_scheduler = request.own_schedule
        args.learning_rate = args.unet_lr = args.text_encoder_lr = rate = None
        log.info("%s sets its own rates; --lr_scheduler becomes %s", request.spec.name, args.lr_scheduler)
    rates = [g.get("lr", rate) for g in groups if isinstance(g, dict)] or [rate]
    check_rates(request.spec, rates)
    if request.spec.adapts_lr and (first := next((r for r in rates if r), 0.0)) <= 0.1:
        log.warning("%s finds its own step size; a learning rate of about 1 is meant, got %g", request.spec.name, first)
    optimizer, given = build_optimizer(request.spec, groups, rate, request.arguments)
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()  # type: ignore[attr-defined]
    cls = type(optimizer)
    name, text = f"{cls.__module__}.{cls.__name__}", ",".join(f"{key}={value}" for key, value in given.items())
    code = getattr(sys.modules.get(cls.__module__), "__file__", "built in")
    log.info("optimizer: %s(%s)%s", name, text, f" of {code}" if "." in request.spec.name else "")
    return name, text, optimizer


# ----------------------------------------------------------------------------------------- schedule-free, logged rates


def is_schedulefree_optimizer(optimizer: torch.optim.Optimizer, args: Namespace) -> bool:
    """Say whether the optimizer keeps averaged weights and wants no schedule, by its name."""
    return (args.optimizer_type or "").strip().lower().endswith("schedulefree")


def get_optimizer_train_eval_fn(
    optimizer: torch.optim.Optimizer, args: Namespace
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Give the optimizer's train and eval, or two functions that do nothing."""
    if is_schedulefree_optimizer(optimizer, args):
        return optimizer.train, optimizer.eval  # type: ignore[attr-defined]
    return (lambda: None), (lambda: None)


@contextmanager
def evaluation_weights(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside the block the parameters hold the weights to save or show; afterwards they are what they were, to the bit.

    Only schedule-free optimizers differ; switching back by their own arithmetic would round every weight.
    """
    if not (callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None))):
        yield
        return
    params: list[Tensor] = [param for group in optimizer.param_groups for param in group["params"]]
    training = [param.detach().clone() for param in params]
    optimizer.eval()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        optimizer.train()  # type: ignore[attr-defined]
        with torch.no_grad():
            for param, value in zip(params, training):
                param.copy_(value)


def step_size_estimates(optimizer: torch.optim.Optimizer) -> list[float | None]:
    """Give d of every group: the step size that D-Adaptation and Prodigy find, None for other optimizers."""
    return [float(group["d"]) if "d" in group else None for group in optimizer.param_groups]


def logged_rates(
    optimizer: torch.optim.Optimizer, descriptions: Sequence[str], estimates: Sequence[float | None]
) -> dict[str, float]:
    """Give the rate that the update just made used in every group, and d times it where there is a d, by scalar name.

    Call it between the optimizer's step and the schedule's.

    Args:
        optimizer: the raw one. descriptions: one per group. estimates: ``step_size_estimates`` from before the update.
    """
    scalars: dict[str, float] = {}
    for description, group, estimate in zip(descriptions, optimizer.param_groups, estimates):
        rate = _rate_of(optimizer, group)
        if rate is None:
            continue
        scalars[f"lr/{description}"] = rate
        if estimate is not None:
            scalars[f"lr/d*lr/{description}"] = estimate * rate
    return scalars


def _rate_of(optimizer: Any, group: dict[str, Any]) -> float | None:
    if group.get("relative_step") and hasattr(optimizer, "_get_lr"):  # a rate per tensor, the first one's is shown
        states = (optimizer.state[param] for param in group["params"] if optimizer.state.get(param))
        return next((float(optimizer._get_lr(group, state)) for state in states), None)
    # libraries with a warm-up of their own write the rate they used beside the one they were given
    rate = group.get("effective_lr", group.get("scheduled_lr", group.get("lr")))
    return None if rate is None else float(rate)


class EstimateWatch:
    """Notices that an optimizer which finds its own step size has not found one.

    Args:
        optimizer: any; without an estimate d nothing is watched. patience: updates without movement.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, patience: int = 50):
        self.optimizer = optimizer
        self.patience = patience
        self.updates = 0
        self.first = step_size_estimates(optimizer)

    def after_update(self) -> None:
        """Look once, after ``patience`` updates, and say so when d still is what it was."""
        if self.updates >= self.patience or None in self.first:
            return
        self.updates += 1
        if self.updates == self.patience and step_size_estimates(self.optimizer) == self.first:
            log.warning(
                "the step size d of %s still is %g after %d updates, so hardly anything is learnt. Let a gradient "
                "filter keep more, or raise d0 or d_coef in --optimizer_args",
                type(self.optimizer).__name__,
                self.first[0],
                self.patience,
            )


class MovementWatch:
    """Says how many weights of 16 bits have changed at all: updates below their spacing are rounded away.

    Weights that are zero do not count, as any update moves them.

    Args:
        params: trained weights; those of 32 bits are not looked at. updates: after which it looks, once.
        sample: entries looked at in each tensor, evenly spaced.
    """

    WARN_BELOW = 0.05

    def __init__(self, params: Iterable[Tensor], updates: int = 100, sample: int = 256):
        self.left = updates
        self.updates = updates
        self._sample = sample
        self._before = [
            (param, self._look(param)) for param in params if param.dtype in (torch.bfloat16, torch.float16)
        ]

    def _look(self, param: Tensor) -> Tensor:
        flat = param.detach().reshape(-1)
        return flat[:: max(1, flat.numel() // self._sample)].clone()

    def after_update(self) -> None:
        """Count one update, and look when it is time."""
        self.left -= 1
        if self.left == 0:
            self.report()

    def report(self) -> None:
        """Look now; nothing is said twice, nor of weights of 32 bits."""
        before, self._before = self._before, []
        if not before:
            return
        changed = sum(int(((self._look(param) != old) & (old != 0)).sum()) for param, old in before)
        share = changed / max(1, sum(int(torch.count_nonzero(old)) for _, old in before))
        said = log.warning if share < self.WARN_BELOW else log.info
        said(
            "%.1f %% of the entries of 16 bit weights have changed in %d updates%s",
            100 * share,
            self.updates - max(self.left, 0),
            ": smaller updates are rounded away. Raise --learning_rate, let a gradient filter keep more, leave "
            "--full_bf16 out, or use --fused_backward_pass, which rounds at random"
            if share < self.WARN_BELOW
            else "",
        )


# --------------------------------------------------------------------------------------------------------- saved state


def load_optimizer_state(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Load a state dict without rounding: torch casts what belongs to a parameter to the parameter's dtype.

    A float32 moment of a bfloat16 weight would lose 16 bits at every resume.
    """
    optimizer.load_state_dict(saved)  # type: ignore[arg-type]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for number, param in zip(numbers, params):
        loaded = optimizer.state.get(param, {})
        for key, value in saved["state"].get(number, {}).items():
            now = loaded.get(key)
            if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                loaded[key] = value.to(now.device, copy=True)
