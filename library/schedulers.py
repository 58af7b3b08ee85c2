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
from library.optimizers import is_schedulefree_optimizer, step_needs

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScheduleSpec:
    """One schedule.

    Attributes:
        takes: which of warmup, steps, cycles, half_cycles, power, timescale, min_lr_ratio, stable, decay its function
            is given. instead: where a warm-up is an error, what to use for it.
    """

    name: str
    takes: tuple[str, ...] = ()
    instead: str = ""


SCHEDULES = {
    row.name: row
    for row in (
        ScheduleSpec("constant", instead="Use constant_with_warmup, or --lr_warmup_steps 0"),
        ScheduleSpec("constant_with_warmup", ("warmup",)),
        ScheduleSpec("linear", ("warmup", "steps")),
        ScheduleSpec("cosine", ("warmup", "steps")),
        ScheduleSpec("cosine_with_restarts", ("warmup", "steps", "cycles")),
        ScheduleSpec("polynomial", ("warmup", "steps", "power")),
        ScheduleSpec("inverse_sqrt", ("warmup", "timescale")),
        ScheduleSpec("cosine_with_min_lr", ("warmup", "steps", "half_cycles", "min_lr_ratio")),
        ScheduleSpec("warmup_stable_decay", ("warmup", "stable", "decay", "half_cycles", "min_lr_ratio")),
        ScheduleSpec("piecewise_constant"),
        ScheduleSpec("adafactor", instead="Use --lr_warmup_steps 0, or warmup_init=True in --optimizer_args"),
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
    """Refuse what the schedule cannot do, whatever the length of the run.

    Raises:
        OptionError: unknown name, a warm-up it does not have, or a missing setting.
    """
    if scheduler_type:
        if options.warmup:
            raise OptionError("--lr_scheduler_type has no warm-up of ours. Leave --lr_warmup_steps out")
        _scheduler_class(scheduler_type)
        return
    name, _, rate = options.name.partition(":")
    if name not in SCHEDULES:
        raise OptionError(
            f"--lr_scheduler: no schedule is called {options.name!r}.{did_you_mean(options.name, SCHEDULES)} "
            f"Known: {', '.join(SCHEDULES)}. Example: --lr_scheduler cosine"
        )
    if name == "adafactor" and not rate:
        raise OptionError(
            "--lr_scheduler adafactor shows the rates that Adafactor sets itself. Use it with --optimizer_type "
            "Adafactor and relative_step=True, or use --lr_scheduler constant_with_warmup"
        )
    if options.warmup and SCHEDULES[name].instead:
        raise OptionError(f"--lr_scheduler {name} has no warm-up. {SCHEDULES[name].instead}")
    for option, value in (("lr_warmup_steps", options.warmup), ("lr_decay_steps", options.decay)):
        if value < 0 or (isinstance(value, float) and not value <= 1):
            raise OptionError(f"--{option} {value}: it is a number of steps, or a share of the run such as 0.05 or 5%")
    if options.timescale is not None and options.timescale < 1:
        raise OptionError(f"--lr_scheduler_timescale {options.timescale}: at least 1 step is needed. Example: 1000")
    if name == "cosine_with_min_lr" and options.min_lr_ratio is None:
        raise OptionError("--lr_scheduler cosine_with_min_lr needs --lr_scheduler_min_lr_ratio. Example: 0.1")
    if name == "piecewise_constant" and "step_rules" not in (options.arguments or {}):
        raise OptionError(
            "--lr_scheduler piecewise_constant needs rules. "
            "Example: --lr_scheduler_args \"step_rules='1:5,0.1:10,0.01'\""
        )


def check_schedule_fits(options: ScheduleOptions, scheduler_type: str = "") -> None:
    """Look at how the parts of the schedule fit into the run.

    Raises:
        OptionError: warm-up and decay overlap. A warm-up that the run does not live to see the end of is a warning.
    """
    if scheduler_type or "warmup" not in SCHEDULES[options.name.partition(":")[0]].takes:
        return
    warmup, decay, total = options.warmup_steps, options.decay_steps, options.total_steps
    if "decay" in SCHEDULES[options.name].takes and warmup + decay > total:
        raise OptionError(
            f"--lr_warmup_steps and --lr_decay_steps: {warmup} and {decay} steps do not fit into a run of {total}. "
            f"Use smaller numbers, or shares such as 0.1"
        )
    if warmup >= total:
        log.warning(
            "--lr_warmup_steps: the run ends after %d steps, before its warm-up of %d steps is over: the full learning "
            "rate is never reached",
            total,
            warmup,
        )


def _scheduler_class(path: str) -> Any:
    module_name, _, class_name = path.strip().rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name or "torch.optim.lr_scheduler"), class_name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:  # the last two: not a path at all
        known = [key for key, value in vars(torch.optim.lr_scheduler).items() if isinstance(value, type)]
        raise OptionError(
            f"--lr_scheduler_type: no class {path!r}.{did_you_mean(class_name, known)} Example: CosineAnnealingLR"
        ) from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.lr_scheduler.LRScheduler)):
        raise OptionError(f"--lr_scheduler_type {path} is no learning-rate scheduler. Example: CosineAnnealingLR")
    if needed := step_needs(found):
        raise OptionError(
            f"--lr_scheduler_type {path} cannot be stepped without {', '.join(needed)}. Example: CosineAnnealingLR"
        )
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
            return _adafactor_schedule(optimizer, options)
        return _named_schedule(optimizer, options)
    except OptionError:
        raise
    except Exception as error:  # what a foreign constructor raises at a value is not in our hands
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise OptionError(
            f"--lr_scheduler_args: {scheduler_type or options.name} refuses its arguments ({reason[:200]}). "
            f"Check names and values"
        ) from error


def _adafactor_schedule(optimizer: torch.optim.Optimizer, options: ScheduleOptions) -> Any:
    from transformers.optimization import Adafactor, AdafactorSchedule

    if not isinstance(optimizer, Adafactor):
        raise OptionError(f"--lr_scheduler {options.name} works with --optimizer_type Adafactor. Example: cosine")
    if options.arguments:
        log.warning("--lr_scheduler_args have no effect while Adafactor sets its own rates")
    return AdafactorSchedule(optimizer, float(options.name.partition(":")[2]))


def _named_schedule(optimizer: torch.optim.Optimizer, options: ScheduleOptions) -> Any:
    if options.name == "piecewise_constant":
        from diffusers.optimization import get_piecewise_constant_schedule

        if options.warmup:
            log.warning("--lr_scheduler piecewise_constant has no warm-up, --lr_warmup_steps has no effect")
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
        if args.lr_scheduler_type or args.lr_scheduler != "constant" or args.lr_warmup_steps:
            log.warning(
                "%s needs no schedule: --lr_scheduler, --lr_scheduler_type and --lr_warmup_steps have no effect. "
                "A warm-up of its own: --optimizer_args warmup_steps=100",
                args.optimizer_type,
            )
        return get_dummy_scheduler(optimizer)
    options = read_schedule(args, num_processes, max_train_steps or args.max_train_steps)
    scheduler = build_scheduler(optimizer, options, args.lr_scheduler_type)
    check_schedule_fits(options, args.lr_scheduler_type)
    return scheduler


def check_scheduler(args: Namespace, optimizer: torch.optim.Optimizer | None) -> None:
    """Try the schedule's options out, so that what is wrong is known before a model is loaded.

    Args:
        args: parsed options. optimizer: one made for trying out; None where its own options are wrong.

    Raises:
        OptionError: a wrong name, argument or value. How it fits into the run is for :func:`check_schedule_fits`.
    """
    if (args.optimizer_type or "").strip().lower().endswith("schedulefree"):
        return
    options = read_schedule(args, 1, args.max_train_steps)
    if optimizer is None:
        check_schedule(options, args.lr_scheduler_type)
    else:
        build_scheduler(optimizer, options, args.lr_scheduler_type)


# ---------------------------------------------------------------------------------------------------- after a resume


def move_schedule(scheduler: Any, step: int) -> None:
    """Let a schedule that counted with another number of processes go on at another of its steps.

    Args:
        scheduler: the raw schedule, its state loaded. step: scheduler steps done, as this run counts them.
    """
    if type(scheduler) is not torch.optim.lr_scheduler.LambdaLR:
        if hasattr(scheduler, "last_epoch") and scheduler.last_epoch != step:
            log.warning("%s goes on at its step %d, not at %d", type(scheduler).__name__, scheduler.last_epoch, step)
        return
    scheduler.last_epoch, scheduler._step_count = step, step + 1


def put_schedule_in_force(scheduler: Any, updates_left: int) -> None:
    """Let the schedule of the options give the next rate, where a state of another schedule or length was loaded.

    Args:
        scheduler: the raw schedule, its state loaded. updates_left: scheduler steps still to do.
    """
    if type(scheduler) is not torch.optim.lr_scheduler.LambdaLR:
        return  # every other kind keeps its numbers in its state
    step, optimizer = scheduler.last_epoch, scheduler.optimizer
    rates = [base * factor(step) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas)]
    saved = [group["lr"] for group in optimizer.param_groups]
    if rates != saved:
        log.warning(
            "the schedule of the options gives a learning rate of %g at step %d, the state was made with %g: the "
            "options are in force",
            rates[0],
            step,
            saved[0],
        )
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate
    scheduler._last_lr = rates
    ahead = range(step, step + updates_left)
    if not any(base * factor(s) for s in ahead for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas)):
        log.warning("the learning rate is 0 for the %d steps that are left: nothing is learnt", updates_left)
