"""The arithmetic of a run: how batches become updates, updates become epochs, and where a resumed run stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from library.errors import OptionError


def ceil_div(numerator: int, denominator: int) -> int:
    """Give the quotient of two positive integers, rounded up."""
    return -(-numerator // denominator)


class Update(NamedTuple):
    """One optimizer step: the batches whose gradients it uses.

    Attributes:
        step: number of this update in the run, from 1.
        epoch: epoch it belongs to, from 1.
        first_batch, last_batch: half-open range of the epoch's batch positions on this process.
        ends_epoch: True for the last update of its epoch.
    """

    step: int
    epoch: int
    first_batch: int
    last_batch: int
    ends_epoch: bool


@dataclass(frozen=True)
class RunPlan:
    """Updates and epochs of a run, from sizes alone.

    Args:
        batches: batches of one epoch, over all processes.
        processes: processes that share them.
        accumulation: batches whose gradients one update averages; the last update of an epoch takes what is left.
        max_steps: updates of the whole run.
    """

    batches: int
    processes: int
    accumulation: int
    max_steps: int

    @classmethod
    def from_limits(
        cls, batches: int, processes: int, accumulation: int, max_steps: int, max_epochs: int | None
    ) -> RunPlan:
        """Build the plan; an epoch limit replaces the step limit."""
        if max_epochs is not None:
            max_steps = max_epochs * ceil_div(ceil_div(batches, processes), accumulation)
        return cls(batches, processes, accumulation, max_steps)

    @property
    def batches_per_process(self) -> int:
        return ceil_div(self.batches, self.processes)

    @property
    def updates_per_epoch(self) -> int:
        return ceil_div(self.batches_per_process, self.accumulation)

    @property
    def epochs(self) -> int:
        return ceil_div(self.max_steps, self.updates_per_epoch)

    def update(self, step: int) -> Update:
        """Give the update with number ``step``, from 1 to ``max_steps``."""
        epoch_index, in_epoch = divmod(step - 1, self.updates_per_epoch)
        first = in_epoch * self.accumulation
        last = min(first + self.accumulation, self.batches_per_process)
        return Update(step, epoch_index + 1, first, last, ends_epoch=last == self.batches_per_process)

    def steps_of_epoch(self, epoch: int, after_step: int = 0) -> range:
        """Give the step numbers of an epoch that come after ``after_step``; the last epoch may be cut."""
        first = (epoch - 1) * self.updates_per_epoch + 1
        last = min(epoch * self.updates_per_epoch, self.max_steps)
        return range(max(first, after_step + 1), last + 1)

    def epoch_after(self, step: int) -> int:
        """Give the epoch in which the update after ``step`` falls, from 1."""
        return step // self.updates_per_epoch + 1

    def save_interval_for_ratio(self, ratio: int) -> int:
        """Give the epoch interval at which at least ``ratio`` models are saved over the run."""
        return max(1, self.epochs // ratio)


def initial_step(
    plan: RunPlan, resumed_step: int | None, step_option: int | None, epoch_option: int | None
) -> tuple[int, str]:
    """Say how many updates count as done, and why.

    Args:
        plan: the run to continue.
        resumed_step: updates recorded in the resumed state, None without one.
        step_option, epoch_option: ``--initial_step`` and ``--initial_epoch`` (from 1), None when not given.

    Returns:
        The number of updates done and the words that say where it came from.

    Raises:
        OptionError: nothing is left to do, or an option is out of range.
    """
    if step_option is not None:
        done, source = step_option, f"--initial_step {step_option}"
    elif epoch_option is not None:
        done, source = (epoch_option - 1) * plan.updates_per_epoch, f"--initial_epoch {epoch_option}"
    elif resumed_step is not None:
        done, source = resumed_step, "the resumed state"
    else:
        return 0, "the beginning"
    if done < 0:
        raise OptionError(
            f"{source}: a run cannot start before its beginning. Use a value of at least 0 steps, 1 epoch"
        )
    if done >= plan.max_steps:
        raise OptionError(
            f"nothing left to train: {source} stands at step {done} of {plan.max_steps}. "
            f"Raise --max_train_steps (or --max_train_epochs) above it to go on"
        )
    return done, source
