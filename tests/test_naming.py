"""Names of results, which older ones go, and names that would leave the output folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from library.errors import OptionError
from library.naming import OutputNames, check_output_name, check_writable, epoch_to_remove, step_to_remove
from library.output import RunOutput
from library.run_plan import RunPlan
from library.settings import SaveSettings


@pytest.mark.parametrize("name,words", [("n", ("n", "n", "n")), (None, ("last", "epoch", "at"))])
def test_names(name, words):
    names = OutputNames(Path("d"), name, ".safetensors")
    final, epoch, step = words
    assert names.final_model() == Path(f"d/{final}.safetensors")
    assert names.epoch_model(3) == Path(f"d/{epoch}-000003.safetensors")
    assert names.step_model(400) == Path(f"d/{step}-step00000400.safetensors")
    assert names.final_state() == Path(f"d/{final}-state")
    assert names.epoch_state(3) == Path(f"d/{epoch}-000003-state")
    assert names.step_state(400) == Path(f"d/{step}-step00000400-state")


def test_the_example_of_the_specification():
    assert step_to_remove(50, 10, 30) == 10
    assert epoch_to_remove(6, 2, 2) == 2
    assert step_to_remove(10, 10, 30) is None and step_to_remove(50, 10, None) is None


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "a\\b", "..", "con", "LPT1.x", "a\0", "x.", " x", "x" * 201, "a\nb", "com9", "lpt9.x"]
)
def test_hostile_names_are_refused(name):
    with pytest.raises(OptionError, match="output_name"):
        check_output_name(name)


@pytest.mark.parametrize("name", ["a b", "größe", "日本語", "v1.5-lora", "ann o'neil", "x" * 200, "com10", "lpt10"])
def test_usual_names_are_kept(name):
    check_output_name(name)


def test_a_folder_that_can_be_made_is_accepted_and_not_made(tmp_path):
    check_writable(tmp_path, "--output_dir")
    check_writable(tmp_path / "a" / "b", "--output_dir")
    assert not (tmp_path / "a").exists()


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "a" / "b"):
        with pytest.raises(OptionError, match=r"--output_dir .*file is a file"):
            check_writable(folder, "--output_dir")


def test_a_folder_without_the_right_to_write_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("library.naming.os.access", lambda path, mode: (path, mode) != (tmp_path, os.W_OK))
    with pytest.raises(OptionError, match="is not writable"):
        check_writable(tmp_path / "a", "--output_dir")


def settings(**changed) -> SaveSettings:
    values = dict.fromkeys(SaveSettings.__dataclass_fields__)
    return SaveSettings(
        **{**values, "folder": Path("."), "name": "t", "format": "bin", "state": True, "state_at_end": True, **changed}
    )


@pytest.mark.parametrize("keep_steps,keep_epochs", [(None, None), (4, 1), (1, 2), (3, 1)])
def test_what_is_left_after_a_run_with_keep_rules(keep_steps, keep_epochs, tmp_path):
    plan = RunPlan(batches=5, processes=1, accumulation=1, max_steps=20)
    events: list[str] = []

    def write(path, update, at_epoch_end):
        path.mkdir() if path.name.endswith("-state") else path.write_text("x")
        events.append(path.name)

    saving = settings(every_n_steps=2, every_n_epochs=1, keep_last_steps=keep_steps, keep_last_epochs=keep_epochs)
    output = RunOutput(saving, OutputNames(tmp_path, "t", ".bin"), 1, write, write)
    for step in range(1, 21):
        update = plan.update(step)
        output.after_step(update)
        if update.ends_epoch:
            output.after_epoch(update, is_last=step == 20)
    output.at_end(plan.update(20))
    names = {path.name for path in tmp_path.iterdir()}
    assert {"t.bin", "t-state", "t-step00000020.bin", "t-step00000020-state"} <= names
    steps = sorted(int(name[6:14]) for name in names if name.startswith("t-step") and name.endswith(".bin"))
    oldest = 2 if keep_steps is None else 20 - keep_steps
    assert steps == [step for step in range(2, 21, 2) if step >= oldest]
    assert events[-2:] == ["t-state", "t.bin"]
