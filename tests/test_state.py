"""State folders: what is written comes back bit for bit, what is damaged is refused by name."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from pathlib import Path

import numpy
import pytest
import torch

from library.errors import OptionError
from library.state import (
    RECORD_NAME,
    StateRecord,
    check_optimizer_matches,
    check_state_can_be_read_back,
    load_state,
    random_states,
    read_record,
    restore_random_states,
    save_state,
)
from tests.training import forget_accelerate


class Run:
    """Two weights, AdamW, a schedule, and noise from every generator."""

    def __init__(self) -> None:
        self.layer = torch.nn.Linear(4, 3)
        self.optimizer = torch.optim.AdamW(self.layer.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def step(self) -> None:
        noise = torch.randn(2, 4) + random.random() + float(numpy.random.rand())
        self.layer(noise).square().sum().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        save_state(
            folder,
            weights=[self.layer.state_dict()],
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=None,
            random_states_of_ranks=[random_states()],
            record=StateRecord(2, 5, optimizer="AdamW", parameters=["weight", "bias"], losses=[0.5, 1.5]),
        )

    def load(self, folder: Path) -> None:
        load_state(
            folder,
            load_weights=lambda weights: self.layer.load_state_dict(weights[0]),
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=None,
            rank=0,
        )


@pytest.fixture
def saved(tmp_path) -> Path:
    run = Run()
    run.step()
    run.save(tmp_path / "t-state")
    return tmp_path / "t-state"


def test_a_loaded_run_goes_on_bit_for_bit(tmp_path):
    unbroken = Run()
    unbroken.step()
    unbroken.save(tmp_path / "t-state")
    unbroken.step()
    resumed = Run()
    resumed.load(tmp_path / "t-state")
    resumed.step()
    for now, then in zip(resumed.layer.parameters(), unbroken.layer.parameters()):
        assert torch.equal(now, then)
    assert resumed.scheduler.get_last_lr() == unbroken.scheduler.get_last_lr()


def test_the_record_comes_back(saved):
    record = read_record(saved)
    assert (record.current_epoch, record.current_step, record.losses) == (2, 5, [0.5, 1.5])
    assert set(record.files) == {path.name for path in saved.iterdir()} - {RECORD_NAME}


def test_every_generator_is_restored():
    states = json.loads(json.dumps(random_states()))
    drawn = (random.random(), numpy.random.rand(), torch.rand(3).tolist(), random.gauss(0, 1))
    restore_random_states(states)
    assert drawn == (random.random(), numpy.random.rand(), torch.rand(3).tolist(), random.gauss(0, 1))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.json"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "bit", "swapped"])
def test_a_damaged_file_is_named(saved, name, damage):
    path = saved / name
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "bit":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    else:
        other = Run()
        other.step()
        other.save(saved.parent / "other-state")
        shutil.copy(saved.parent / "other-state" / name, path)
        if path.read_bytes() == bytes(content):
            pytest.skip("both runs have this file in common")
    with pytest.raises(OptionError, match=name):
        read_record(saved)


@pytest.mark.parametrize(
    "make,match",
    [
        (lambda p: p / "none", "there is no folder"),
        (lambda p: (p / "empty", (p / "empty").mkdir())[0], "not a complete state"),
        (lambda p: (p / "l.safetensors", (p / "l.safetensors").write_bytes(b"x"))[0], "network_weights"),
        (lambda p: p, "t-state"),
    ],
    ids=["missing", "empty", "file", "parent"],
)
def test_a_wrong_folder_is_told_in_one_line(saved, make, match):
    with pytest.raises(OptionError, match=match) as raised:
        read_record(make(saved.parent))
    assert "\n" not in str(raised.value)


def test_a_newer_format_is_refused(saved):
    record = dataclasses.asdict(read_record(saved))
    (saved / RECORD_NAME).write_text(json.dumps({**record, "version": 99}))
    with pytest.raises(OptionError, match="newer version"):
        read_record(saved)


def test_a_broken_record_is_refused(saved):
    (saved / RECORD_NAME).write_text("{")
    with pytest.raises(OptionError, match=RECORD_NAME):
        read_record(saved)


def test_another_optimizer_is_refused(saved):
    with pytest.raises(OptionError, match="SGD"):
        check_optimizer_matches(read_record(saved), "SGD", ["weight", "bias"])


@pytest.mark.parametrize(
    "names,match", [(["weight"], "bias"), (["bias", "weight"], "order"), (["weight", "bias", "c"], "c")]
)
def test_other_trained_tensors_are_refused(saved, names, match):
    with pytest.raises(OptionError, match=match):
        check_optimizer_matches(read_record(saved), "AdamW", names)


def test_a_state_that_another_trainer_wrote_is_read(saved):
    """accelerate's layout: pickled generator states, a record with two numbers."""
    run = Run()
    (saved / RECORD_NAME).write_text('{"current_epoch": 3, "current_step": 7}')
    random_file = saved / "random_states_0.json"
    random_file.unlink()
    torch.save(
        {
            "step": 7,
            "random_state": random.getstate(),
            "numpy_random_seed": numpy.random.get_state(),
            "torch_manual_seed": torch.get_rng_state(),
        },
        saved / "random_states_0.pkl",
    )
    drawn = (random.random(), numpy.random.rand(), torch.rand(2).tolist())
    record = read_record(saved)
    assert (record.version, record.current_step) == (0, 7)
    run.load(saved)
    assert drawn == (random.random(), numpy.random.rand(), torch.rand(2).tolist())


@pytest.mark.parametrize("layout", ["safetensors", "pickled", "two modules", "no step among random numbers"])
def test_R23_a_state_that_accelerate_itself_wrote_goes_on_to_the_bit(layout, tmp_path):
    from accelerate import Accelerator

    forget_accelerate()
    accelerator, run = Accelerator(cpu=True), Run()
    modules = [run.layer] + [torch.nn.Linear(2, 2)] * (layout == "two modules")
    parts = accelerator.prepare(*modules, run.optimizer, run.scheduler)
    run.step()
    accelerator.save_state(tmp_path / "s", safe_serialization=layout != "pickled")
    (tmp_path / "s" / RECORD_NAME).write_text('{"current_epoch": 1, "current_step": 1}')
    numbers = tmp_path / "s" / "random_states_0.pkl"
    if layout == "no step among random numbers":
        drawn = torch.load(numbers, weights_only=False)
        drawn.pop("step")
        torch.save(drawn, numbers)
    names = {path.name for path in (tmp_path / "s").iterdir()}
    assert ("pytorch_model.bin" in names) == (layout == "pickled")
    assert ("model_1.safetensors" in names) == (layout == "two modules")
    run.step()
    resumed = Run()
    assert read_record(tmp_path / "s").processes == 1 and parts
    resumed.load(tmp_path / "s")
    resumed.step()
    for now, then in zip(resumed.layer.parameters(), run.layer.parameters()):
        assert torch.equal(now, then)
    assert resumed.scheduler.get_last_lr() == run.scheduler.get_last_lr()


def test_R23_a_state_without_weights_is_told_in_one_line(saved):
    (saved / RECORD_NAME).write_text('{"current_epoch": 1, "current_step": 1}')
    (saved / "model.safetensors").unlink()
    with pytest.raises(OptionError, match=r"neither model\.safetensors nor"):
        Run().load(saved)


def test_R18_a_process_without_random_numbers_in_the_state_is_refused(saved):
    run = Run()
    with pytest.raises(OptionError, match="random_states_1"):
        load_state(saved, load_weights=lambda _: None, optimizer=run.optimizer, scheduler=None, scaler=None, rank=1)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_R18_processes_of_a_foreign_state_are_counted(processes, saved):
    (saved / RECORD_NAME).write_text('{"current_epoch": 1, "current_step": 1}')
    (saved / "random_states_0.json").unlink()
    for rank in range(processes):
        (saved / f"random_states_{rank}.pkl").write_bytes(b"x")
    assert read_record(saved).processes == processes


class Canary:
    """Unpickling it without restriction would make a file."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("name", ["optimizer.bin", "scheduler.bin", "random_states_0.pkl"])
def test_nothing_in_a_state_runs_code(saved, name, tmp_path):
    canary = tmp_path / "canary"
    (saved / RECORD_NAME).write_text('{"current_epoch": 3, "current_step": 7}')
    (saved / "random_states_0.json").unlink()
    torch.save({"random_state": Canary(str(canary))}, saved / name)
    with pytest.raises(Exception, match=r"."):
        Run().load(saved)
    assert not canary.exists()


def test_a_state_that_cannot_be_saved_is_found_before_the_first_step():
    run = Run()
    run.optimizer.param_groups[0]["hook"] = Canary("never")
    with pytest.raises(OptionError, match="AdamW"):
        check_state_can_be_read_back(run.optimizer)
