"""Stops and full disks at every file call of a save, damage to every part of a state: nothing is lost, nothing passes.

The writers are those of a run; the sample that every test run does takes each third call, ``make torture`` all of them.
"""

from __future__ import annotations

import functools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from library import files, state
from library.errors import OptionError
from tests.file_faults import Faults, Stop, watching
from tests.power_loss import after_power_loss, recording
from tests.training import first_difference, read_state


@pytest.fixture
def count(record_property) -> Callable[[str], None]:
    """Count a case of a kind; tests/conftest.py adds the counts of all tests up and prints them at the end."""
    return lambda kind: record_property("counted", kind)


def _tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"a.weight": torch.randn(6, 4, generator=generator), "b.weight": torch.randn(5, generator=generator)}


def write_state(target: Path, seed: int) -> None:
    weights = {name: torch.nn.Parameter(value) for name, value in _tensors(seed).items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=0.1)
    for weight in weights.values():
        weight.grad = torch.ones_like(weight) * (seed + 1)
    optimizer.step()
    state.save_state(
        target,
        weights=[weights],
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        scaler=None,
        random_states_of_ranks=[state.random_states()],
        record=state.StateRecord(1, seed, optimizer="AdamW", parameters=list(weights)),
    )


def write_lora(target: Path, seed: int) -> None:
    from safetensors.torch import save_file

    files.write_file(target, lambda path: save_file(_tensors(seed), path), 200)


def write_pickled_lora(target: Path, seed: int) -> None:
    files.write_file(target, lambda path: torch.save(_tensors(seed), path), 200)


def write_cache(target: Path, seed: int) -> None:
    def save(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.savez(file, latents=_tensors(seed)["a.weight"].numpy())

    files.write_file(target, save)


def write_json(target: Path, seed: int) -> None:
    files.write_json(target, {"seed": seed})


WRITERS: dict[str, tuple[str, Callable[[Path, int], None]]] = {
    "state": ("t-state", write_state),
    "lora": ("t.safetensors", write_lora),
    "pickled lora": ("t.pt", write_pickled_lora),
    "latent cache": ("t_sd.npz", write_cache),
    "json": ("t.json", write_json),
}


def content(target: Path) -> object:
    """Give everything under a name; a state is read the way a resume reads it, so a damaged one raises."""
    if target.is_dir():
        state.read_record(target)
        return read_state(target)
    return target.read_bytes() if target.exists() else None


def every_call(write: Callable[[], None]) -> int:
    with watching(Faults()) as faults:
        write()
    return faults.count


def walk(kind: str, replaces: bool, kill: bool, calls: slice, folder: Path, count: Callable[[str], None]) -> None:
    name, write = WRITERS[kind]
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    for seed in (1, 2):
        write(folder / "good" / str(seed) / name, seed)
    old, new = (content(folder / "good" / str(seed) / name) for seed in (1, 2))
    assert first_difference(old, new) is not None
    scratch = folder / "scratch" / name
    scratch.parent.mkdir()
    if replaces:
        write(scratch, 1)
    total = every_call(lambda: write(scratch, 2))
    assert total >= 5
    for at in range(1, total + 1)[calls]:
        target = folder / f"call{at}" / name
        target.parent.mkdir()
        if replaces:
            shutil.copytree(folder / "good" / "1", target.parent, dirs_exist_ok=True)
        with watching(Faults(at, kill)) as faults:
            try:
                write(target, 2)
            except Stop:
                assert kill
            except OSError:
                assert not kill
        assert faults.reached, at
        files.recover_folder(target)
        now = content(target)
        allowed = [new, old if replaces else None]
        assert any(first_difference(now, value) is None for value in allowed), f"call {at} of {total}"
        if not kill:
            left = [path.name for path in target.parent.iterdir() if path.name != name]
            assert all(files.OLDER_MARK in hidden for hidden in left) or not left, f"call {at}: {left}"
        count(f"{'stop' if kill else 'no space'} at a file call, {kind}, {'replace' if replaces else 'first'}")


KILL = pytest.mark.parametrize("kill", [True, False], ids=["stop", "no space"])
REPLACES = pytest.mark.parametrize("replaces", [False, True], ids=["first", "replace"])


@KILL
@REPLACES
@pytest.mark.parametrize("kind", WRITERS)
def test_a_sample_of_the_file_calls(kind, replaces, kill, tmp_path, count):
    walk(kind, replaces, kill, slice(None, None, 3), tmp_path, count)


@pytest.mark.slow
@pytest.mark.torture
@KILL
@REPLACES
@pytest.mark.parametrize("kind", WRITERS)
def test_every_file_call(kind, replaces, kill, tmp_path, count):
    walk(kind, replaces, kill, slice(None), tmp_path, count)


# ----------------------------------------------------------------------------------------------------------- damage


def damages(size: int, chance: random.Random, cuts: int, bits: int) -> list[tuple[str, Callable[[bytearray], None]]]:
    """Give what can happen to a file of ``size`` bytes."""

    def cut(content: bytearray, at: int) -> None:
        del content[at:]

    def flip(content: bytearray, at: int) -> None:
        content[at // 8] ^= 1 << at % 8

    def grow(content: bytearray) -> None:
        content += b"\0"

    found = [(f"cut at {at}", functools.partial(cut, at=at)) for at in (0, *chance.sample(range(1, size), cuts))]
    found += [(f"bit {at}", functools.partial(flip, at=at)) for at in chance.sample(range(size * 8), bits)]
    return [*found, ("one byte more", grow)]


def damage_everything(folder: Path, cuts: int, bits: int, seed: int, count: Callable[[str], None]) -> None:
    write_state(folder / "t-state", 5)
    before = read_state(folder / "t-state")
    names = sorted(path.name for path in (folder / "t-state").iterdir())
    for name in names:
        path = folder / "t-state" / name
        whole = path.read_bytes()
        for what, change in damages(len(whole), random.Random(seed), cuts, bits):
            spoilt = bytearray(whole)
            change(spoilt)
            path.write_bytes(spoilt)
            count(f"damage, {name}")
            try:
                record = state.read_record(folder / "t-state")
            except OptionError as error:
                assert "\n" not in str(error) and "t-state" in str(error)
                continue
            same = first_difference(read_state(folder / "t-state"), before) is None
            assert same, f"seed {seed}: {name}, {what} was loaded: {record}"
        path.unlink()
        count(f"damage, {name}")
        with pytest.raises(OptionError, match=name):
            state.read_record(folder / "t-state")
        path.write_bytes(whole)
    state.read_record(folder / "t-state")


def test_damage_is_never_loaded(tmp_path, count):
    damage_everything(tmp_path, cuts=2, bits=6, seed=1, count=count)


@pytest.mark.slow
@pytest.mark.torture
@pytest.mark.parametrize("seed", range(4))
def test_damage_is_never_loaded_at_many_places(seed, tmp_path, count):
    damage_everything(tmp_path, cuts=10, bits=50, seed=seed, count=count)


# ------------------------------------------------------------------------------------------------------ resume auto


def test_auto_takes_the_newest_complete_state_of_this_name(tmp_path, caplog):
    caplog.set_level("INFO")
    for name, step in {"t-step00000002-state": 2, "t-000001-state": 3, "t-step00000004-state": 4, "u-state": 9}.items():
        write_state(tmp_path / name, step)
    write_state(tmp_path / "t-step-old-state", 8)  # another output name that begins alike
    found, record = state.find_state("auto", tmp_path, "t")
    assert (found, record.current_step) == (tmp_path / "t-step00000004-state", 4)
    (tmp_path / "t-step00000004-state" / "optimizer.bin").write_bytes(b"half")
    (tmp_path / "t-state").mkdir()
    found, record = state.find_state("auto", tmp_path, "t")
    assert (found, record.current_step) == (tmp_path / "t-000001-state", 3)
    said = "\n".join(entry.getMessage() for entry in caplog.records)
    assert "passes over t-step00000004-state" in said and "optimizer.bin" in said and "step 3" in said
    assert state.find_state("auto", tmp_path, "nobody") == (None, None)
    assert state.find_state("auto", tmp_path / "missing", "t") == (None, None)


def test_auto_refuses_to_begin_anew_beside_damaged_states(tmp_path):
    write_state(tmp_path / "t-state", 4)
    (tmp_path / "t-state" / "model.safetensors").unlink()
    with pytest.raises(OptionError, match=r"no state in .* is complete") as raised:
        state.find_state("auto", tmp_path, "t")
    assert "\n" not in str(raised.value)
    assert (tmp_path / "t-state").is_dir()


def test_auto_finds_what_a_kill_between_two_renames_left(tmp_path):
    write_state(tmp_path / "t-state", 4)
    (tmp_path / "t-state").rename(tmp_path / f".t-state{files.OLDER_MARK}1a2b")
    assert state.find_state("auto", tmp_path, "t")[0] == tmp_path / "t-state"


# ------------------------------------------------------------------------------------------------------------- room


@pytest.mark.parametrize("kind", WRITERS)
def test_too_little_room_is_told_before_anything_is_written(kind, tmp_path, monkeypatch):
    name, write = WRITERS[kind]
    if kind == "latent cache":
        pytest.skip("its size is known to library/latent_cache.py, not to the writer here")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))
    with pytest.raises(OSError, match=r"needed.*free") as raised:
        write(tmp_path / name, 1)
    assert raised.value.errno == 28
    assert not list(tmp_path.iterdir())


def test_the_room_a_state_needs_is_what_it_takes(tmp_path):
    write_state(tmp_path / "t-state", 1)
    record = json.loads((tmp_path / "t-state" / state.RECORD_NAME).read_text())
    weights = _tensors(1)
    assert state._bytes_in({"w": weights, "more": [weights["a.weight"], 1, "x"]}) == (24 + 5 + 24) * 4
    assert record["files"]["model.safetensors"]["bytes"] > (24 + 5) * 4


# ------------------------------------------------------------------------------------------------------- power loss


def lose_power(kind: str, replaces: bool, times: int, seed: int, folder: Path, count: Callable[[str], None]) -> None:
    name, write = WRITERS[kind]
    root = folder / "disk"
    root.mkdir()
    if replaces:
        write(root / name, 1)
    old = content(root / name)
    with recording(root) as recorder:
        write(root / name, 2)
    new, number = content(root / name), root.stat().st_ino
    chance = random.Random(seed)
    for at, snapshot in enumerate(recorder.snapshots):
        for again in range(times):
            disk = folder / f"{at}-{again}"
            disk.mkdir()
            after_power_loss(snapshot, number, disk, chance)
            files.recover_folder(disk / name)
            now = content(disk / name)
            allowed = [new] if at == len(recorder.snapshots) - 1 else [new, old]
            assert any(first_difference(now, value) is None for value in allowed), f"seed {seed}: call {at}"
            shutil.rmtree(disk)
            count(f"power loss, {kind}, {'replace' if replaces else 'first'}")


@REPLACES
@pytest.mark.parametrize("kind", WRITERS)
def test_a_loss_of_power_leaves_the_old_or_the_new(kind, replaces, tmp_path, count):
    lose_power(kind, replaces, times=3, seed=1, folder=tmp_path, count=count)


@pytest.mark.slow
@pytest.mark.torture
@REPLACES
@pytest.mark.parametrize("kind", WRITERS)
def test_a_loss_of_power_at_many_places(kind, replaces, tmp_path, count):
    lose_power(kind, replaces, times=20, seed=2, folder=tmp_path, count=count)
