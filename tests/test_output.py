"""When models and states are written, and that an older one goes only after the newer one is complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from library.naming import OutputNames
from library.output import RunOutput
from library.run_plan import RunPlan
from library.settings import SaveSettings

PLAN = RunPlan(batches=3, processes=1, accumulation=1, max_steps=12)
NOTHING = {
    "every_n_steps": None,
    "every_n_epochs": None,
    "epoch_ratio": None,
    "keep_last_steps": None,
    "keep_last_epochs": None,
    "keep_last_steps_state": None,
    "keep_last_epochs_state": None,
    "state": False,
    "state_at_end": False,
}


class Disk:
    """Writes empty files in the place of models and states and notes the order of what happens."""

    def __init__(self, folder: Path, fails_at: str = "", **rules):
        settings = SaveSettings(folder, "t", "safetensors", None, **{**NOTHING, **rules})
        names = OutputNames(folder, "t", ".safetensors")
        self.folder, self.fails_at = folder, fails_at
        self.output = RunOutput(settings, names, settings.every_n_epochs, self.model, self.state)

    def model(self, path: Path, update, at_epoch_end: bool) -> None:
        self._fail(path)
        path.write_bytes(b"")

    def state(self, folder: Path, update, at_epoch_end: bool) -> None:
        self._fail(folder)
        folder.mkdir()

    def _fail(self, path: Path) -> None:
        if path.name == self.fails_at:
            raise OSError(28, "No space left on device")

    def run(self, last: int = 12) -> set[str]:
        for step in range(1, last + 1):
            update = PLAN.update(step)
            self.output.after_step(update)
            if update.ends_epoch:
                self.output.after_epoch(update, is_last=step == PLAN.max_steps)
        return {path.name for path in self.folder.iterdir()}


@pytest.mark.parametrize(
    "rules,left",
    [
        ({"every_n_steps": 5}, {"t-step00000005.safetensors", "t-step00000010.safetensors"}),
        ({"every_n_steps": 5, "keep_last_steps": 1}, {"t-step00000010.safetensors"}),
        ({"every_n_epochs": 1, "keep_last_epochs": 2}, {"t-000002.safetensors", "t-000003.safetensors"}),
        (
            {"every_n_steps": 6, "state": True, "keep_last_steps_state": 1},
            {"t-step00000006.safetensors", "t-step00000012.safetensors", "t-step00000012-state"},
        ),
        (
            {"every_n_epochs": 1, "state": True, "keep_last_epochs": 1},
            {"t-000003.safetensors", "t-000003-state"},
        ),
    ],
)
def test_what_is_left_at_the_end(rules, left, tmp_path):
    assert Disk(tmp_path, **rules).run() == left


@pytest.mark.parametrize(
    "fails_at,left",
    [
        ("t-step00000008.safetensors", {"t-step00000004.safetensors", "t-step00000004-state"}),
        ("t-step00000008-state", {"t-step00000004.safetensors", "t-step00000004-state", "t-step00000008.safetensors"}),
    ],
)
def test_nothing_older_goes_while_the_newer_one_cannot_be_written(fails_at, left, tmp_path):
    disk = Disk(tmp_path, fails_at, every_n_steps=4, state=True, state_at_end=True, keep_last_steps=1)
    with pytest.raises(OSError):
        disk.run()
    assert {path.name for path in tmp_path.iterdir()} == left


def test_a_stop_saves_a_state_once_and_only_where_states_are_wanted(tmp_path):
    disk = Disk(tmp_path, every_n_steps=4, state=True, state_at_end=True)
    disk.run(last=4)
    assert disk.output.at_stop(PLAN.update(4)) == tmp_path / "t-step00000004-state"  # written by the step already
    disk.run(last=0)
    assert disk.output.at_stop(PLAN.update(5)) == tmp_path / "t-step00000005-state"
    assert (tmp_path / "t-step00000005-state").is_dir()
    assert Disk(tmp_path / "other").output.at_stop(PLAN.update(5)) is None


def test_only_the_process_that_writes_removes(tmp_path):
    disk = Disk(tmp_path, every_n_steps=2, keep_last_steps=2)
    disk.output._removes = False
    assert len(disk.run()) == 6
