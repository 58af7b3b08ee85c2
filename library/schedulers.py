"""Learning-rate schedules by name, as one table; the rate is a function of the update number alone."""

from __future__ import annotations

import importlib
import logging
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from library.errors import OptionError, did_you_mean
from library.key_values import parse_key_values
from library.optimizers import is_schedulefree_optimizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScheduleSpec:
    """One schedule.

    Attributes:
        takes: which of warmup, steps, cycles, power, timescale, min_lr_ratio, decay its function is given.
        warmup: False when a warm-up is an error.
    """

    name: str
    takes: tuple[str, ...] = ()
    warmup: bool = True


SCHEDULES = {
    row.name: row
    for row in (
        ScheduleSpec("constant", warmup=False),
        ScheduleSpec("constant_with_warmup", ("warmup",)),
        ScheduleSpec("linear", ("warmup", "steps")),
        ScheduleSpec("cosine", ("warmup", "steps")),
        ScheduleSpec("cosine_with_restarts", ("warmup", "steps", "cycles")),
        ScheduleSpec("polynomial", ("warmup", "steps", "power")),
        ScheduleSpec("inverse_sqrt", ("warmup", "timescale")),
        ScheduleSpec("cosine_with_min_lr", ("warmup", "steps", "half_cycles", "min_lr_ratio")),
        ScheduleSpec("warmup_stable_decay", ("warmup", "stable", "decay", "half_cycles", "min_lr_ratio")),
        ScheduleSpec("piecewise_constant", ()),
    )
}


@dataclass(frozen=True)
class ScheduleOptions:
    """Names and meanings as the options; steps are scheduler steps (optimizer steps times processes)."""

    name: str = "constant"
    total_steps: int = 1
    warmup: int | float = 0
    decay: int | float = 0
    num_cycles: int = 1
    power: float = 1.0
    timescale: int | None = None
    min_lr_ratio: float | None = None
    arguments: Mapping[str, Any] | None = None

    @property
    def warmup_steps(self) -> int:
        return int(self.warmup * self.total_steps) if isinstance(self.warmup, float) else self.warmup

    @property
    def decay_steps(self) -> int:
        return int(self.decay * self.total_steps) if isinstance(self.decay, float) else self.decay


def check_schedule(options: ScheduleOptions, scheduler_type: str = "") -> None:
    """Refuse what the schedule cannot do, before anything is loaded.

    Raises:
        OptionError: unknown name, a warm-up it does not have, or a missing setting.
    """
    if scheduler_type:
        if options.warmup:
            raise OptionError("--lr_scheduler_type has no warm-up of ours. Leave --lr_warmup_steps out")
        _scheduler_class(scheduler_type)
        return
    name = options.name.partition(":")[0]
    if name == "adafactor":
        return
    if name not in SCHEDULES:
        raise OptionError(
            f"--lr_scheduler: no schedule is called {options.name!r}.{did_you_mean(options.name, SCHEDULES)} "
            f"Known: {', '.join(SCHEDULES)}. Example: --lr_scheduler cosine"
        )
    if options.warmup and not SCHEDULES[name].warmup:
        raise OptionError(f"--lr_scheduler {name} has no warm-up. Use constant_with_warmup or --lr_warmup_steps 0")
    if name == "cosine_with_min_lr" and options.min_lr_ratio is None:
        raise OptionError("--lr_scheduler cosine_with_min_lr needs --lr_scheduler_min_lr_ratio. Example: 0.1")
    if name == "piecewise_constant" and "step_rules" not in (options.arguments or {}):
        raise OptionError(
            "--lr_scheduler piecewise_constant needs rules. "
            "Example: --lr_scheduler_args \"step_rules='1:5,0.1:10,0.01'\""
        )
    if options.warmup_steps < 0 or options.warmup_steps > options.total_steps:
        raise OptionError(
            f"--lr_warmup_steps {options.warmup}: {options.warmup_steps} steps of warm-up in a run of "
            f"{options.total_steps}. Use a smaller number, or a share below 1 such as 0.05"
        )


def _scheduler_class(path: str) -> Any:
    module_name, _, class_name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name or "torch.optim.lr_scheduler"), class_name)
    except (ImportError, AttributeError) as error:
        known = vars(torch.optim.lr_scheduler)
        raise OptionError(
            f"--lr_scheduler_type: no class {path!r}.{did_you_mean(class_name, known)} Example: CosineAnnealingLR"
        ) from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.lr_scheduler.LRScheduler)):
        raise OptionError(f"--lr_scheduler_type {path} is no learning-rate scheduler. Example: CosineAnnealingLR")
    return found


def _settings(options: ScheduleOptions) -> dict[str, Any]:
    warmup, decay = options.warmup_steps, options.decay_steps
    values = {
        "warmup": {"num_warmup_steps": warmup},
        "steps": {"num_training_steps": options.total_steps},
        "cycles": {"num_cycles": options.num_cycles},
        "half_cycles": {"num_cycles": options.num_cycles / 2},
        "power": {"power": options.power},
        "timescale": {"timescale": options.timescale or warmup or 10_000},
        "min_lr_ratio": {
            "min_lr_rate" if options.name == "cosine_with_min_lr" else "min_lr_ratio": options.min_lr_ratio or 0.0
        },
        "stable": {"num_stable_steps": options.total_steps - warmup - decay},
        "decay": {"num_decay_steps": decay},
    }
    chosen: dict[str, Any] = {}
    for part in SCHEDULES[options.name].takes:
        chosen |= values[part]
    return chosen | dict(options.arguments or {})


def build_scheduler(optimizer: torch.optim.Optimizer, options: ScheduleOptions, scheduler_type: str = "") -> Any:
    """Build the schedule of an optimizer.

    Args:
        optimizer: the raw one. options: plain values. scheduler_type: a class to use instead of a name.

    Raises:
        OptionError: as :func:`check_schedule`, or arguments that the schedule does not take.
    """
    check_schedule(options, scheduler_type)
    try:
        if scheduler_type:
            return _scheduler_class(scheduler_type)(optimizer, **dict(options.arguments or {}))
        if options.name.startswith("adafactor:"):
            from transformers.optimization import AdafactorSchedule

            return AdafactorSchedule(optimizer, float(options.name.partition(":")[2]))
        return _named_schedule(optimizer, options)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"--lr_scheduler_args: the schedule refuses its arguments ({error}). Check names and values"
        ) from error


def _named_schedule(optimizer: torch.optim.Optimizer, options: ScheduleOptions) -> Any:
    if options.name == "piecewise_constant":
        from diffusers.optimization import get_piecewise_constant_schedule

        return get_piecewise_constant_schedule(optimizer, **dict(options.arguments or {}))
    from transformers import optimization
    from transformers.trainer_utils import SchedulerType

    names = {"warmup_stable_decay": SchedulerType.WARMUP_STABLE_DECAY}
    function = optimization.TYPE_TO_SCHEDULER_FUNCTION[names.get(options.name, SchedulerType(options.name))]
    return function(optimizer, **_settings(options))


class ConstantRates:
    """Stands where a schedule stands for optimizers that need none."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer

    def step(self) -> None:
        """Leave the rates as they are."""

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]


def get_dummy_scheduler(optimizer: torch.optim.Optimizer) -> ConstantRates:
    """Give a schedule that changes nothing."""
    return ConstantRates(optimizer)


def read_schedule(args: Namespace, num_processes: int, max_train_steps: int) -> ScheduleOptions:
    """Read the schedule's options; accelerate advances a schedule ``num_processes`` times per step."""
    return ScheduleOptions(
        name=args.lr_scheduler,
        total_steps=max_train_steps * num_processes,
        warmup=args.lr_warmup_steps or 0,
        decay=args.lr_decay_steps or 0,
        num_cycles=args.lr_scheduler_num_cycles,
        power=args.lr_scheduler_power,
        timescale=args.lr_scheduler_timescale,
        min_lr_ratio=args.lr_scheduler_min_lr_ratio,
        arguments=parse_key_values(args.lr_scheduler_args, "--lr_scheduler_args"),
    )


def get_scheduler_fix(
    args: Namespace, optimizer: torch.optim.Optimizer, num_processes: int, max_train_steps: int | None = None
) -> Any:
    """Build the schedule that the options ask for; schedule-free optimizers get one that changes nothing."""
    if is_schedulefree_optimizer(optimizer, args):
        return get_dummy_scheduler(optimizer)
    options = read_schedule(args, num_processes, max_train_steps or args.max_train_steps)
    return build_scheduler(optimizer, options, args.lr_scheduler_type)
