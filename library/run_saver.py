"""What writes the model files and the states of a run, and refuses to write weights that are not finite."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from library import metadata, state
from library.errors import RunStopped
from library.loop import TrainedParts
from library.losses import first_non_finite
from library.optimizers import evaluation_weights
from library.run_plan import RunPlan, Update
from networks import foreign


class RunSaver:
    """Writes the model files and states of a run, on the main process.

    Attributes:
        average: losses of the epoch, kept in the record of a state.
    """

    def __init__(
        self,
        accelerator: Any,
        plan: RunPlan,
        parts: TrainedParts,
        optimizer_name: str,
        seed: int,
        dtype: torch.dtype | None,
        entries: dict[str, str],
        modelspec: dict[str, str],
        minimum: bool,
    ):
        self.accelerator = accelerator
        self.plan = plan
        self.parts = parts
        self.seed = seed
        self.dtype = dtype
        self.optimizer_name = optimizer_name
        self.minimum = minimum
        self.run_metadata = entries
        self.modelspec = modelspec
        self.average: Any = None

    def write_model(self, path: Path, update: Update, at_epoch_end: bool) -> None:
        """Write the network with the weights meant for use."""
        if not self.accelerator.is_main_process:
            return
        with evaluation_weights(self.parts.raw_optimizer):
            self._refuse_non_finite(path, update)
            content = metadata.save_metadata(
                self.run_metadata,
                self.modelspec,
                steps=update.step,
                epoch=update.epoch if at_epoch_end else update.epoch - 1,  # as the reference counts at step saves
                finished_at=time.time(),
                minimum=self.minimum,
            )
            self._guarded(path, lambda: foreign.save_weights(self.parts.network, path, self.dtype, content))

    def write_state(self, folder: Path, update: Update, at_epoch_end: bool) -> None:
        """Write a state folder; every process contributes its random numbers."""
        from accelerate.utils import gather_object

        random_states = gather_object([state.random_states()])
        if not self.accelerator.is_main_process:
            return
        self._refuse_non_finite(folder, update)
        optimizer = self.parts.raw_optimizer
        scheduler = self.parts.scheduler
        record = state.StateRecord(
            current_epoch=update.epoch,
            current_step=update.step,
            seed=self.seed,
            batches=self.plan.batches,
            processes=self.plan.processes,
            accumulation=self.plan.accumulation,
            optimizer=self.optimizer_name,
            parameters=self.parts.names,
            rates=[group.get("initial_lr", group.get("lr")) for group in optimizer.param_groups],
            losses=list(self.average.losses),
            epoch_ended=at_epoch_end,
        )
        self._guarded(
            folder,
            lambda: state.save_state(
                folder,
                weights=[module.state_dict() for module in self.parts.stored],
                optimizer=optimizer,
                scheduler=scheduler if hasattr(scheduler, "state_dict") else None,
                scaler=self.accelerator.scaler,
                random_states_of_ranks=random_states,
                record=record,
            ),
        )

    def _refuse_non_finite(self, target: Path, update: Update) -> None:
        bad = first_non_finite(self.parts.network.named_parameters())
        if bad is not None:
            raise RunStopped(
                f"step {update.step}: the weights of {bad} are not finite, {target} is not written. Earlier saves "
                f"are intact. Lower --learning_rate"
            )

    @staticmethod
    def _guarded(target: Path, write: Any) -> None:
        try:
            write()
        except OSError as error:
            raise RunStopped(
                f"{target} could not be written ({error.strerror or error}). Earlier saves are intact. Free some "
                f"room in the output folder and resume"
            ) from error
