"""The loop of a run: batches become gradients, gradients become updates, updates become files."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from library import grad_filter
from library.batch_loss import BatchResult
from library.dataset import BatchKey, TrainingData, batch_loader
from library.errors import RunStopped
from library.fused_steps import FusedSteps
from library.losses import first_non_finite
from library.optimizers import EstimateWatch, MovementWatch, logged_rates, step_size_estimates
from library.output import RunOutput
from library.processes import RankCheck, joined, largest_of_all, shared_random_numbers
from library.progress import LossAverage, Progress
from library.run_plan import RunPlan, Update
from library.signals import StopRequest

log = logging.getLogger(__name__)


@dataclass
class TrainedParts:
    """What an update acts on.

    Attributes:
        network: follows the network module contract. stored: modules whose tensors a state holds, a file each.
        text_encoders, unet: the models it is attached to.
        optimizer, scheduler: prepared by accelerate. raw_optimizer: the object below, which the filter is attached to.
        names: names of the trained tensors, in the optimizer's order. descriptions: one per parameter group.
        fused: steps from inside the backward pass; None where the optimizer steps after it.
    """

    network: Any
    stored: Sequence[torch.nn.Module]
    text_encoders: Sequence[torch.nn.Module]
    unet: torch.nn.Module
    optimizer: Any
    raw_optimizer: torch.optim.Optimizer
    scheduler: Any
    names: list[str]
    descriptions: list[str]
    fused: FusedSteps | None = None


@dataclass(frozen=True)
class LoopSteps:
    """Steps of the loop that the trainer, or who subclasses it, decides.

    Attributes:
        loss_of_batch: forward pass of one batch. reduce_gradients: makes the network's gradients means over processes.
        draw_samples: called with (epoch or None, step) when previews may be due.
        report_step: called with (update, loss of the last batch, mean loss, weight norms, rates used and scalars of
            filters).
        report_epoch: called with (update, mean loss).
        validate: called with (update, whether its epoch ends, mean loss) when a validation may be due.
    """

    loss_of_batch: Callable[[dict[str, Any]], BatchResult]
    reduce_gradients: Callable[[Any], None]
    draw_samples: Callable[[int | None, int], None]
    report_step: Callable[[Update, float, float, dict[str, float], dict[str, float]], None]
    report_epoch: Callable[[Update, float], None]
    validate: Callable[[Update, bool, float], None]


@dataclass(frozen=True)
class LoopSettings:
    """Plain values of the loop; norms are L2, ``scale_weight_norms`` and ``max_grad_norm`` are off at None or 0."""

    workers: int
    persistent_workers: bool
    max_grad_norm: float
    scale_weight_norms: float | None
    check_ranks: bool = False


class TrainingLoop:
    """Runs the updates of a plan that are still to do.

    Args:
        accelerator: devices, precision, trackers.
        plan: how batches, updates and epochs relate.
        data: ready batches.
        parts: what is trained and by what.
        steps: what the trainer decides.
        output: writes models and states when they are due.
        settings: plain values.
        losses: loss of each position in the epoch, from an earlier process.
        stop: tells that the process was asked to end.
    """

    def __init__(
        self,
        accelerator: Any,
        plan: RunPlan,
        data: TrainingData,
        parts: TrainedParts,
        steps: LoopSteps,
        output: RunOutput,
        settings: LoopSettings,
        losses: Sequence[float] = (),
        stop: StopRequest | None = None,
    ):
        self.accelerator = accelerator
        self.plan = plan
        self.data = data
        self.parts = parts
        self.steps = steps
        self.output = output
        self.settings = settings
        self.average = LossAverage(losses)
        self.stop = stop or StopRequest()
        optimizers = getattr(parts.raw_optimizer, "optimizers", [parts.raw_optimizer])
        self.filters = [handle for each in optimizers if (handle := grad_filter.handle_of(each)) is not None]
        self.estimates = EstimateWatch(parts.raw_optimizer)
        self.movement = MovementWatch(param for each in optimizers for g in each.param_groups for param in g["params"])
        self.rates: dict[str, float] = {}
        self.several = plan.processes > 1
        self.step = 0
        self.asked_to_stop, self.most_samples = 0, 0  # as all processes agreed at the last batch
        self.check: RankCheck | None = None
        if self.several and settings.check_ranks:
            params = [param for each in optimizers for group in each.param_groups for param in group["params"]]
            names = {id(param): name for param, name in zip(params, parts.names)}
            self.check = RankCheck(optimizers, names, accelerator.device)

    def run(self, done: int, epoch_end_due: bool) -> Update:
        """Do every update after ``done`` and give the last one.

        Args:
            done: updates already behind.
            epoch_end_due: the previous process stopped after the last update of an epoch, before what ends an epoch.
        """
        self.progress = Progress(self.plan.max_steps, done, self.accelerator.is_main_process)
        if epoch_end_due:
            self._end_epoch(self.plan.update(done))
        # closed however the run ends: loader processes ignore signals, and would be waited for without end
        with contextlib.closing(self._batches(done)) as self.batches:
            for epoch in range(self.plan.epoch_after(done), self.plan.epochs + 1):
                self._one_epoch(epoch, done)
        self.progress.close()
        self.movement.report()
        return self.plan.update(self.plan.max_steps)

    def _one_epoch(self, epoch: int, done: int) -> None:
        self.progress.epoch(epoch, self.plan.epochs)
        self.parts.network.on_epoch_start(self.parts.text_encoders, self.parts.unet)
        for step in self.plan.steps_of_epoch(epoch, after_step=done):
            self._one_update(self.plan.update(step))
            if step < self.plan.max_steps:
                self._stop_if_asked(self.plan.update(step))

    # ------------------------------------------------------------------------------------------------------- data

    def _keys(self, epoch: int, done: int) -> Iterator[BatchKey]:
        rank, processes = self.accelerator.process_index, self.plan.processes
        order = self.data.batch_order(epoch)
        mine = [order[(position * processes + rank) % len(order)] for position in range(self.plan.batches_per_process)]
        for step in self.plan.steps_of_epoch(epoch, after_step=done):
            update = self.plan.update(step)
            for position in range(update.first_batch, update.last_batch):
                yield BatchKey(epoch, step - 1, mine[position])

    def _batches(self, done: int) -> Generator[dict[str, Any], None, None]:
        epochs = range(self.plan.epoch_after(done), self.plan.epochs + 1)
        keys_of_epochs = (self._keys(epoch, done) for epoch in epochs)
        if self.settings.persistent_workers:  # one loader for the whole run keeps its processes
            keys_of_epochs = iter([itertools.chain.from_iterable(keys_of_epochs)])
        for keys in keys_of_epochs:
            yield from batch_loader(self.data, keys, self.settings.workers)

    def _stop_if_asked(self, update: Update) -> None:
        asked = self.asked_to_stop if self.several else self.stop.number  # all of them stop after the same step
        if not asked:
            return
        self.progress.close()
        self.stop.number = asked
        saved = self.output.at_stop(update)
        if self.several:  # a process that ended earlier would make the launcher end the one that writes
            self.accelerator.wait_for_everyone()
        way_on = f"Go on with --resume {saved}" if saved else "No state was asked for: add --save_state to go on later"
        raise RunStopped(
            f"{self.stop.name}: stopped after step {update.step} of {self.plan.max_steps}. {way_on}", self.stop.status
        )

    # ----------------------------------------------------------------------------------------------------- update

    def _one_update(self, update: Update) -> None:
        results: list[BatchResult] = []
        self.step = update.step
        for position in range(update.first_batch, update.last_batch):
            results.append(self._one_batch(update, position, results))
        self._apply_gradients(results)
        if self.check is not None:
            self.check.after_update(update.step)
        norms = self._limit_weight_norms()
        self.progress.step(self.average.mean, norms)
        self._log_update(update, results, norms)
        self.output.after_step(update)
        self.steps.draw_samples(None, update.step)
        self.steps.validate(update, False, self.average.mean)
        if update.ends_epoch or update.step == self.plan.max_steps:
            self._end_epoch(update)

    def _one_batch(self, update: Update, position: int, earlier: Sequence[BatchResult]) -> BatchResult:
        parts = self.parts
        batch = next(self.batches)
        if hasattr(parts.network, "on_step_start"):
            parts.network.on_step_start(parts.text_encoders, parts.unet)
        result = self.steps.loss_of_batch(batch)
        value = float(result.loss.detach())
        self._refuse_non_finite_loss(update, value, [*earlier, result], batch)
        size = update.last_batch - update.first_batch  # the short group at an epoch's end has its own mean
        loss, result = result.loss / size, BatchResult(result.loss.detach(), result.losses, result.timesteps)
        if parts.fused is not None:
            is_last = position == update.last_batch - 1
            parts.fused.begin(is_last)
            if is_last:
                self._tell_filters([*earlier, result])
        with self._alike_in_all_processes(parts.fused is not None):  # steps are made in there
            self.accelerator.backward(loss)
        self.average.add(position, value)
        return result

    def _refuse_non_finite_loss(
        self, update: Update, value: float, results: Sequence[BatchResult], batch: dict[str, Any]
    ) -> None:
        """Stop every process where the loss of one is not finite; they also agree on what else they must agree on."""
        finite, bad_rank = math.isfinite(value), 0
        if self.several:
            samples = max(sum(len(each.losses) for each in results), sum(len(each.timesteps) for each in results))
            bad = 0 if finite else 1 + self.accelerator.process_index
            told = largest_of_all([bad, self.stop.number, samples], self.accelerator.device)
            bad_rank, self.asked_to_stop, self.most_samples = told
        if not finite:
            raise RunStopped(
                f"step {update.step}: the loss is {value} for {', '.join(batch['image_keys'])}. Earlier saves are "
                f"intact. Lower --learning_rate, or use --mixed_precision bf16 or --no_half_vae"
            )
        if bad_rank:
            raise RunStopped(f"step {update.step}: the loss of process {bad_rank - 1} is not finite, see its message")

    def _tell_filters(self, results: Sequence[BatchResult]) -> None:
        if not self.filters:
            return
        timesteps = torch.cat([result.timesteps for result in results])
        losses = torch.cat([result.losses for result in results])
        if self.several:  # every process must choose the same
            device = self.accelerator.device
            timesteps, losses = (joined(each, self.most_samples, device) for each in (timesteps, losses))
        for handle in self.filters:
            handle.set_context(
                total_steps=self.plan.max_steps,
                micro_steps=len(results) * self.plan.processes,
                timesteps=timesteps,
                losses=losses,
            )

    def _apply_gradients(self, results: Sequence[BatchResult]) -> None:
        parts = self.parts
        estimates = step_size_estimates(parts.raw_optimizer)
        if parts.fused is not None:
            with self._alike_in_all_processes():
                parts.fused.finish()
            self._note_rates(estimates)
            parts.scheduler.step()
            return
        trained = list(parts.network.get_trainable_params())
        if self.several:
            self.steps.reduce_gradients(parts.network)
        if self.settings.max_grad_norm:
            self.accelerator.clip_grad_norm_(trained, self.settings.max_grad_norm)
        if not self.filters and self.accelerator.scaler is None:
            self._refuse_non_finite_gradients()
        self._tell_filters(results)
        if self.check is not None:
            self.check.note_gradients()
        with self._alike_in_all_processes():
            parts.optimizer.step()
        self._note_rates(estimates)
        parts.scheduler.step()
        parts.optimizer.zero_grad(set_to_none=True)

    def _alike_in_all_processes(self, needed: bool = True) -> contextlib.AbstractContextManager[None]:
        """Give the block within which a step may draw random numbers."""
        if not (self.several and needed):
            return contextlib.nullcontext()
        return shared_random_numbers(self.data.seed, "step", self.step)

    def _note_rates(self, estimates: Sequence[float | None]) -> None:
        self.rates = logged_rates(self.parts.raw_optimizer, self.parts.descriptions, estimates)
        self.estimates.after_update()
        self.movement.after_update()

    def _refuse_non_finite_gradients(self) -> None:
        params = [param for group in self.parts.raw_optimizer.param_groups for param in group["params"]]
        gradients = ((name, param.grad) for name, param in zip(self.parts.names, params) if param.grad is not None)
        bad = first_non_finite(gradients)
        if bad is not None:
            raise RunStopped(
                f"the gradient of {bad} is not finite. Earlier saves are intact. Lower --learning_rate, or add "
                f"--grad_filter finite to skip such steps"
            )

    def _limit_weight_norms(self) -> dict[str, float]:
        network, limit = self.parts.network, self.settings.scale_weight_norms
        if not limit:
            return {}
        scaled, mean, largest = network.apply_max_norm_regularization(limit, self.accelerator.device)
        return {"Keys Scaled": scaled, "Average key norm": float(mean), "max_key_norm": float(largest)}

    # ---------------------------------------------------------------------------------------------- logs and files

    def _log_update(self, update: Update, results: list[BatchResult], norms: dict[str, float]) -> None:
        scalars = dict(self.rates)
        for number, handle in enumerate(self.filters):
            suffix = f"/optimizer{number}" if len(self.filters) > 1 else ""
            scalars |= {f"{name}{suffix}": value for name, value in handle.scalars().items()}
        self.steps.report_step(update, float(results[-1].loss), self.average.mean, norms, scalars)

    def _end_epoch(self, update: Update) -> None:
        self.steps.report_epoch(update, self.average.mean)
        self.output.after_epoch(update, is_last=update.step == self.plan.max_steps)
        self.steps.draw_samples(update.epoch, update.step)
        self.steps.validate(update, True, self.average.mean)
