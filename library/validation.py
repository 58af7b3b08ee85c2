"""The loss on images that are not trained on: the same batches, timesteps and noise each time, beside the training."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch

from library.dataset import BatchKey, TrainingData, batch_loader
from library.run_plan import Update
from library.sampling import undisturbed
from library.settings import ValidationSettings

log = logging.getLogger(__name__)

TIMESTEPS_OF_A_BATCH = 4


def validation_timesteps(low: int, high: int) -> list[int]:
    """Give the timesteps that every batch is looked at: evenly spaced in [low, high], without its ends."""
    if low >= high:
        return [high]
    return [int(step) for step in numpy.linspace(low, high, TIMESTEPS_OF_A_BATCH + 2)[1:-1]]


class Validation:
    """Measures when it is due. Nothing of the training changes by it, and no fault in it ends a run.

    Args:
        data: batches of the images that are held out. settings: when, how much, which seed.
        timesteps: of :func:`validation_timesteps`. modules: put into evaluation mode meanwhile.
        loss_of: called with (batch, timestep), gives the loss. after_batch: called with (batch).
        workers: loader processes. stopping: tells that the run was asked to end.
    """

    def __init__(
        self,
        data: TrainingData,
        settings: ValidationSettings,
        timesteps: Sequence[int],
        modules: Sequence[torch.nn.Module],
        loss_of: Callable[[dict[str, Any], int], float],
        after_batch: Callable[[dict[str, Any]], None],
        *,
        workers: int,
        stopping: Callable[[], bool],
    ):
        self.data = data
        self.settings = settings
        self.timesteps = timesteps
        self.modules = modules
        self.loss_of = loss_of
        self.after_batch = after_batch
        self.workers = workers
        self.stopping = stopping

    def due(self, update: Update, at_epoch_end: bool) -> bool:
        """Say whether to measure after an update, or at the end of its epoch."""
        if at_epoch_end:
            return update.epoch % (self.settings.every_n_epochs or 1) == 0
        return bool(self.settings.every_n_steps) and update.step % (self.settings.every_n_steps or 1) == 0

    def measure(self, accelerator: Any, report: Callable[[int, float], None]) -> float | None:
        """Give the mean loss over batches and timesteps, over all processes; None when it could not be had.

        Args:
            accelerator: which part of the batches is this process's. report: called with (batch number, its loss).
        """
        losses: list[float] = []
        whole = False
        try:
            with undisturbed(self.modules), torch.no_grad():
                for module in self.modules:
                    module.eval()
                random.seed(self.settings.seed)
                torch.manual_seed(self.settings.seed)
                whole = self._all_batches(accelerator, losses, report)
        except Exception as error:  # anything may go wrong in a forward pass; training is what counts
            log.warning("validation is left out this time: %s: %s", type(error).__name__, str(error)[:200])
        sums = torch.tensor([sum(losses), len(losses), not whole], dtype=torch.float64)
        if accelerator.num_processes > 1:
            sums = accelerator.reduce(sums.float().to(accelerator.device), reduction="sum")
        total, count, incomplete = sums.tolist()
        return total / count if count and not incomplete else None

    def _all_batches(self, accelerator: Any, losses: list[float], report: Callable[[int, float], None]) -> bool:
        last = min(len(self.data), self.settings.max_batches or len(self.data))
        mine = range(accelerator.process_index, last, accelerator.num_processes)
        keys = [BatchKey(1, self.data.max_train_steps, index) for index in mine]  # nothing random differs next time
        for batch in itertools.islice(batch_loader(self.data, keys, self.workers), len(keys)):
            if self.stopping():
                log.info("validation is left out: the run was asked to end")
                return False
            of_batch = [self.loss_of(batch, timestep) for timestep in self.timesteps]
            losses += of_batch
            self.after_batch(batch)
            report(len(losses) // len(self.timesteps), sum(of_batch) / len(of_batch))
        return True
