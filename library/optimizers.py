"""Every optimizer by name, as one table; what is special about one is a field of its row."""

from __future__ import annotations

import importlib
import inspect
import logging
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
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
        schedule_free: keeps averaged weights; no schedule, and train() / eval() switch between the two.
        needs_cuda: cannot run on a CPU.
    """

    name: str
    path: str
    pip: str | None = None
    forced: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    adapts_lr: bool = False
    schedule_free: bool = False
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
    OptimizerSpec("Adafactor", "transformers.optimization.Adafactor", "transformers"),
    OptimizerSpec("AdamWScheduleFree", "schedulefree.AdamWScheduleFree", "schedulefree", schedule_free=True),
    OptimizerSpec("RAdamScheduleFree", "schedulefree.RAdamScheduleFree", "schedulefree", schedule_free=True),
    OptimizerSpec("SGDScheduleFree", "schedulefree.SGDScheduleFree", "schedulefree", schedule_free=True),
)
BY_NAME = {spec.name.lower(): spec for spec in OPTIMIZERS}
OWN_SETTINGS = ("params", "lr")


def find_optimizer(optimizer_type: str) -> OptimizerSpec:
    """Give the row of a name; torch.optim classes and dotted paths get a row of their own.

    Raises:
        OptionError: unknown name.
    """
    name = optimizer_type or "AdamW"
    if name.lower() in BY_NAME:
        return BY_NAME[name.lower()]
    if "." in name:
        return OptimizerSpec(name, name, name.split(".")[0], schedule_free=name.lower().endswith("schedulefree"))
    if isinstance(getattr(torch.optim, name, None), type) and issubclass(
        getattr(torch.optim, name), torch.optim.Optimizer
    ):
        return OptimizerSpec(name, f"torch.optim.{name}")
    known = [*(spec.name for spec in OPTIMIZERS), *(k for k, v in vars(torch.optim).items() if isinstance(v, type))]
    raise OptionError(
        f"--optimizer_type: no optimizer is called {name!r}.{did_you_mean(name, known)} "
        f"Use a name of docs/arguments.md, a torch.optim class, or a full path such as bitsandbytes.optim.AdEMAMix8bit"
    )


def load_class(spec: OptimizerSpec) -> type[torch.optim.Optimizer]:
    """Import the class of a row.

    Raises:
        OptionError: its package is missing, it needs a GPU, or it is no optimizer.
    """
    if spec.needs_cuda and not torch.cuda.is_available():
        raise OptionError(f"--optimizer_type {spec.name} needs a CUDA GPU. Use AdamW8bit, Lion8bit or AdamW here")
    module_name, _, class_name = spec.path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except ImportError as error:
        way_out = f"pip install {spec.pip}" if spec.pip else "Update torch"
        raise OptionError(f"--optimizer_type {spec.name}: cannot import {module_name} ({error}). {way_out}") from error
    except AttributeError as error:
        known = vars(importlib.import_module(module_name))
        raise OptionError(
            f"--optimizer_type {spec.name}: {module_name} has no {class_name}.{did_you_mean(class_name, known)}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise OptionError(f"--optimizer_type {spec.name}: {spec.path} is no torch optimizer. Name an optimizer class")
    return found


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
    cls = load_class(spec)
    given = {**spec.defaults, **arguments, **spec.forced}
    accepted = inspect.signature(cls.__init__).parameters
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values()):
        for key in given:
            if key not in accepted:
                known = [name for name in accepted if name not in ("self", *OWN_SETTINGS)]
                raise OptionError(
                    f"--optimizer_args: {spec.name} takes no {key!r}.{did_you_mean(key, known)} "
                    f"It takes: {', '.join(known)}"
                )
    try:
        return cls(params, lr=learning_rate, **given), given
    except (ValueError, TypeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise OptionError(
            f"--optimizer_args: {spec.name} refuses its arguments ({reason}). Check the values"
        ) from error


def _adafactor_settings(arguments: Mapping[str, Any], learning_rate: float) -> tuple[dict[str, Any], bool]:
    """Complete Adafactor's arguments; say whether it sets its own rates."""
    settings = {"relative_step": True, **arguments}
    if settings.get("warmup_init") and not settings["relative_step"]:
        log.info("Adafactor: warmup_init=True needs relative_step=True, which is set")
        settings["relative_step"] = True
    return settings, bool(settings["relative_step"])


def check_rates(spec: OptimizerSpec, rates: Sequence[float | None]) -> None:
    """Warn of, or refuse, rates that an optimizer with its own step size cannot use.

    Raises:
        OptionError: groups differ; the library refuses that in the middle of its first step.
    """
    if not spec.adapts_lr:
        return
    given = {rate for rate in rates if rate is not None}
    if len(given) > 1:
        values = ", ".join(f"{rate:g}" for rate in sorted(given))
        raise OptionError(
            f"--optimizer_type {spec.name} needs one learning rate for everything, got {values}. "
            f"Use equal --learning_rate, --unet_lr and --text_encoder_lr, and no loraplus ratios"
        )
    if given and min(given) <= 0.1:
        log.warning("%s finds its own step size; a learning rate of about 1.0 is meant, got %g", spec.name, min(given))


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
    spec = find_optimizer(chosen_type(args))
    arguments = parse_key_values(args.optimizer_args, "--optimizer_args")
    groups = [{**g, "params": list(g["params"])} if isinstance(g, dict) else g for g in trainable_params]
    rate = args.learning_rate
    if spec.name == "Adafactor":
        arguments, sets_own_rates = _adafactor_settings(arguments, rate)
        if sets_own_rates:
            groups = [{k: v for k, v in g.items() if k != "lr"} if isinstance(g, dict) else g for g in groups]
            args.lr_scheduler = f"adafactor:{rate}"
            args.learning_rate = args.unet_lr = args.text_encoder_lr = rate = None
            log.info("Adafactor sets its own rates; --lr_scheduler becomes %s", args.lr_scheduler)
    check_rates(spec, [g.get("lr", rate) for g in groups if isinstance(g, dict)] or [rate])
    optimizer, given = build_optimizer(spec, groups, rate, arguments)
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    name = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
    return name, ",".join(f"{key}={value}" for key, value in given.items()), optimizer


# ----------------------------------------------------------------------------------------- schedule-free, logged rates


def is_schedulefree_optimizer(optimizer: torch.optim.Optimizer, args: Namespace) -> bool:
    """Say whether the optimizer keeps averaged weights, by its name."""
    return bool(args.optimizer_type) and args.optimizer_type.lower().endswith("schedulefree")


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


def logged_rates(optimizer: torch.optim.Optimizer, descriptions: Sequence[str]) -> dict[str, float]:
    """Give the learning rate of every group, and d * lr where the optimizer finds d, by scalar name."""
    scalars: dict[str, float] = {}
    for description, group in zip(descriptions, optimizer.param_groups):
        rate = group.get("scheduled_lr", group.get("lr"))
        if rate is None:
            continue  # Adafactor with its own steps before its first one
        scalars[f"lr/{description}"] = float(rate)
        if "d" in group:
            scalars[f"lr/d*lr/{description}"] = float(group["d"]) * float(group["lr"])
    return scalars
