"""What a run leaves behind and when: models, states, and which older ones go."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from library.files import remove_folder
from library.naming import OutputNames, epoch_to_remove, step_to_remove
from library.run_plan import Update
from library.settings import SaveSettings

log = logging.getLogger(__name__)


class RunOutput:
    """Writes models and states when they are due; an older one goes only after the newer one is complete.

    Args:
        settings: intervals and keep-last rules.
        names: every path.
        epoch_interval: epochs between saves, None for no epoch saves.
        write_model: called with (path, update, at_epoch_end).
        write_state: called with (folder, update, at_epoch_end).
        saved: called with (path, whether it is a state) after each save.
        removes: whether this process removes what the rules say; only the one that writes may.
    """

    def __init__(
        self,
        settings: SaveSettings,
        names: OutputNames,
        epoch_interval: int | None,
        write_model: Callable[[Path, Update, bool], None],
        write_state: Callable[[Path, Update, bool], None],
        removes: bool = True,
        saved: Callable[[Path, bool], None] = lambda path, is_state: None,
    ):
        self.settings = settings
        self.names = names
        self.epoch_interval = epoch_interval
        self._write_model = write_model
        self._write_state = write_state
        self._removes = removes
        self._saved = saved
        self._last_state: Path | None = None

    def after_step(self, update: Update) -> None:
        """Save what is due after an optimizer step."""
        interval = self.settings.every_n_steps
        if not interval or update.step % interval:
            return
        self._model(self.names.step_model(update.step), update, at_epoch_end=False)
        if self.settings.state:
            self._state(self.names.step_state(update.step), update, at_epoch_end=False)
            keep = self.settings.keep_last_steps_state or self.settings.keep_last_steps
            self._remove(step_to_remove(update.step, interval, keep), self.names.step_state)
        self._remove(step_to_remove(update.step, interval, self.settings.keep_last_steps), self.names.step_model)

    def after_epoch(self, update: Update, is_last: bool) -> None:
        """Save what is due after the last update of an epoch; the last epoch is saved by :meth:`at_end`."""
        interval = self.epoch_interval
        if not interval or update.epoch % interval or is_last:
            return
        self._model(self.names.epoch_model(update.epoch), update, at_epoch_end=True)
        self._remove(epoch_to_remove(update.epoch, interval, self.settings.keep_last_epochs), self.names.epoch_model)
        if self.settings.state:
            self._state(self.names.epoch_state(update.epoch), update, at_epoch_end=True)
            keep = self.settings.keep_last_epochs_state or self.settings.keep_last_epochs
            self._remove(epoch_to_remove(update.epoch, interval, keep), self.names.epoch_state)

    def at_end(self, update: Update) -> None:
        """Save the final state, then the final model."""
        if self.settings.state_at_end:
            self._state(self.names.final_state(), update, at_epoch_end=update.ends_epoch)
        self._model(self.names.final_model(), update, at_epoch_end=True)

    def at_stop(self, update: Update) -> Path | None:
        """Save the state of a run that is asked to end, where states are wanted; give its folder, None without one."""
        if not self.settings.state_at_end:
            return None
        folder = self.names.step_state(update.step)
        if folder != self._last_state:
            self._state(folder, update, at_epoch_end=update.ends_epoch)
        return folder

    def _model(self, path: Path, update: Update, at_epoch_end: bool) -> None:
        self._write_model(path, update, at_epoch_end)
        log.info("model saved: %s", path)
        self._saved(path, False)

    def _state(self, folder: Path, update: Update, at_epoch_end: bool) -> None:
        self._write_state(folder, update, at_epoch_end)
        self._last_state = folder
        log.info("state saved: %s", folder)
        self._saved(folder, True)

    def _remove(self, number: int | None, name: Callable[[int], Path]) -> None:
        if number is None or not self._removes:
            return
        path = name(number)
        if path.is_dir():
            remove_folder(path)
            log.info("removed older state: %s", path)
        elif path.is_file():
            path.unlink()
            log.info("removed older model: %s", path)
