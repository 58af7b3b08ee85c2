"""The writer: a stop or a full disk at any file call leaves the old file, or the new one, and never a half."""

from __future__ import annotations

import os
import shutil
import subprocess
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


@pytest.mark.parametrize("held", [0, 1, 6, 7])
def test_a_rename_on_windows_waits_for_a_scanner_to_let_go(held, tmp_path, monkeypatch):
    real, calls, waited = os.replace, [], []

    def busy(source, target):
        calls.append(source)
        if len(calls) <= held:
            raise PermissionError(13, "The process cannot access the file because it is being used by another process")
        real(source, target)

    monkeypatch.setattr(files.os, "replace", busy)
    monkeypatch.setattr(files.os, "name", "nt")
    source, target = str(tmp_path / "new"), str(tmp_path / "old")
    for path, text in ((source, "new"), (target, "old")):
        with open(path, "w") as stream:
            stream.write(text)
    if held == 7:
        with pytest.raises(PermissionError):
            files.rename(source, target, waited.append)
    else:
        files.rename(source, target, waited.append)
    assert waited == list(files.RENAME_WAITS_S[:held])
    with open(target) as stream:
        assert stream.read() == ("old" if held == 7 else "new")


def test_a_rename_elsewhere_fails_at_once(tmp_path, monkeypatch):
    def refuse(source, target):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files.os, "replace", refuse)
    with pytest.raises(PermissionError):
        files.rename(tmp_path / "a", tmp_path / "b", lambda seconds: pytest.fail("it waited"))


def test_two_processes_may_recover_one_folder(tmp_path, monkeypatch):
    older = tmp_path / f".t-state{files.OLDER_MARK}1a"
    older.mkdir()
    real = files.os.replace

    def faster(source, target):
        real(source, target)
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(files.os, "replace", faster)
    files.recover_folder(tmp_path / "t-state")
    assert (tmp_path / "t-state").is_dir() and not older.exists()


@pytest.fixture
def small_disk(tmp_path):
    """A folder with room for 256 KiB, its own file system."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this machine does not let the tests mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("known", [True, False], ids=["size known", "size not known"])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_B19_a_disk_that_is_really_full_keeps_what_it_has(kind, known, small_disk):
    small, large = b"a" * 1000, b"b" * 300_000

    def save(content: bytes) -> None:
        size = len(content) if known else 0
        if kind == "file":
            files.write_file(small_disk / "t.bin", lambda path: path.write_bytes(content), size)
            return
        with files.new_folder(small_disk / "t-state", size) as inside:
            (inside / "one").write_bytes(content)

    save(small)
    with pytest.raises(OSError) as raised:
        save(large)
    assert raised.value.errno == 28
    assert [path.read_bytes() for path in small_disk.rglob("*") if path.is_file()] == [small]
    save(small)


def test_room_for_a_whole_folder_is_looked_for_before_it_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**21, 2**20, 2**20))
    with (
        pytest.raises(OSError, match=r"3\.0 MiB are needed, 1\.0 MiB are free"),
        files.new_folder(tmp_path / "a" / "t-state", 3 * 2**20),
    ):
        pytest.fail("the block was run")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_put_in_place_leaves_the_older_one_and_says_so(tmp_path, monkeypatch):
    with files.new_folder(tmp_path / "t-state") as inside:
        (inside / "a").write_text("old")
    real, calls = files.rename, []

    def second_fails(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise PermissionError(13, "held by another program")
        real(source, target)

    monkeypatch.setattr(files, "rename", second_fails)
    with pytest.raises(PermissionError), files.new_folder(tmp_path / "t-state") as inside:
        (inside / "a").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["t-state"]
    assert (tmp_path / "t-state" / "a").read_text() == "old"


def test_remove_folder_leaves_nothing(tmp_path):
    (tmp_path / "t-state").mkdir()
    (tmp_path / "t-state" / "a").write_text("x")
    files.remove_folder(tmp_path / "t-state")
    assert not list(tmp_path.iterdir())
