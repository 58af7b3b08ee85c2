"""The writer: a stop or a full disk at any file call leaves the old file, or the new one, and never a half."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from library import files


class Stop(BaseException):
    """Stands for a kill: passes through every ``except Exception``."""


CALLS = ("rename", "replace", "fsync", "rmdir", "unlink")


def run_with_fault_at(call_number: int, fault: BaseException, action: Callable[[], None], monkeypatch) -> bool:
    """Run ``action`` and raise ``fault`` instead of its n-th file call; False when it makes fewer calls."""
    count = 0
    originals = {name: getattr(os, name) for name in CALLS}

    def faulty(name: str) -> Callable:
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == call_number or (count > call_number and isinstance(fault, Stop)):
                raise fault  # after a kill nothing more happens to the disk
            return originals[name](*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, faulty(name))
        try:
            action()
        except type(fault):
            pass
    return count >= call_number


@pytest.mark.parametrize("fault", [Stop(), OSError(28, "No space left on device")], ids=["kill", "full"])
@pytest.mark.parametrize("replaces", [False, True], ids=["first", "replace"])
def test_a_file_is_old_or_new_after_a_fault_at_any_call(fault, replaces, tmp_path, monkeypatch):
    call_number = 0
    while True:
        call_number += 1
        target = tmp_path / f"{call_number}" / "model.bin"
        target.parent.mkdir()
        if replaces:
            target.write_bytes(b"old")
        happened = run_with_fault_at(call_number, fault, lambda: files.write_bytes(target, b"new"), monkeypatch)  # noqa: B023
        content = target.read_bytes() if target.exists() else None
        assert content in ({b"old", b"new"} if replaces else {None, b"new"})
        if not happened:
            assert content == b"new"
            assert [path.name for path in target.parent.iterdir()] == ["model.bin"]
            break
    assert call_number > 3


@pytest.mark.parametrize("fault", [Stop(), OSError(28, "No space left on device")], ids=["kill", "full"])
@pytest.mark.parametrize("replaces", [False, True], ids=["first", "replace"])
def test_a_folder_is_complete_after_a_fault_at_any_call(fault, replaces, tmp_path, monkeypatch):
    def write(target: Path, content: str) -> None:
        with files.new_folder(target) as inside:
            (inside / "a").write_text(content)
            (inside / "b").write_text(content)

    call_number = 0
    while True:
        call_number += 1
        target = tmp_path / f"{call_number}" / "state"
        target.parent.mkdir()
        if replaces:
            write(target, "old")
        happened = run_with_fault_at(call_number, fault, lambda: write(target, "new"), monkeypatch)  # noqa: B023
        files.recover_folder(target)
        assert target.exists() or not replaces
        if target.exists():
            contents = {(target / name).read_text() for name in ("a", "b")}
            assert contents in ({"old"}, {"new"})
        if not happened:
            assert contents == {"new"}
            assert [path.name for path in target.parent.iterdir()] == ["state"]
            break
    assert call_number > 5


def test_a_failing_writer_leaves_no_temporary_file(tmp_path):
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    (tmp_path / "lora.safetensors").write_bytes(b"old")
    with pytest.raises(OSError):
        files.write_file(tmp_path / "lora.safetensors", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["lora.safetensors"]
    assert (tmp_path / "lora.safetensors").read_bytes() == b"old"


def test_remove_folder_hides_the_folder_before_it_empties_it(tmp_path, monkeypatch):
    folder = tmp_path / "old-state"
    folder.mkdir()
    (folder / "train_state.json").write_text("{}")
    monkeypatch.setattr(shutil, "rmtree", lambda *a, **k: None)  # killed right after the rename
    files.remove_folder(folder)
    assert not folder.exists()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such rights")
def test_results_can_be_read_by_whom_the_umask_lets(tmp_path):
    from safetensors.torch import save_file

    def save(path):
        save_file({"a": torch.zeros(1)}, path)

    (tmp_path / "plain").write_text("x")
    files.write_file(tmp_path / "file", save)
    with files.new_folder(tmp_path / "folder") as inside:
        save(inside / "file")
    modes = {path.stat().st_mode for path in (tmp_path / "plain", tmp_path / "file", tmp_path / "folder" / "file")}
    assert len(modes) == 1
