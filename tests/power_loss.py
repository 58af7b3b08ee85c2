"""What a disk may hold after the power went: everything that was not flushed may be missing, cut, or there.

A small model of a file system. Flushing a file makes its bytes durable, flushing a folder its list of names. Whatever
is not durable may have reached the disk or not; names of different folders may have reached it in any order.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

WATCHED = ("fsync", "replace", "rename", "unlink", "rmdir", "mkdir")


@dataclass
class Snapshot:
    """The tree at one moment: bytes by number of file, names by number of folder, as written and as flushed."""

    files: dict[int, bytes]
    folders: dict[int, dict[str, int]]
    flushed_files: dict[int, bytes]
    flushed_folders: dict[int, dict[str, int]]


@dataclass
class Recorder:
    """Takes a snapshot before every call that matters, and after the last."""

    root: Path
    snapshots: list[Snapshot] = field(default_factory=list)
    flushed_files: dict[int, bytes] = field(default_factory=dict)
    flushed_folders: dict[int, dict[str, int]] = field(default_factory=dict)

    def take(self) -> None:
        files, folders = {}, {}
        for path in (self.root, *self.root.rglob("*")):
            number = path.stat().st_ino
            if path.is_dir():
                folders[number] = {inner.name: inner.stat().st_ino for inner in path.iterdir()}
            else:
                files[number] = path.read_bytes()
        self.snapshots.append(Snapshot(files, folders, dict(self.flushed_files), dict(self.flushed_folders)))

    def everything_is_flushed(self) -> None:
        self.take()
        now = self.snapshots.pop()
        self.flushed_files, self.flushed_folders = now.files, now.folders

    def flushed(self, handle: int) -> None:
        number = os.fstat(handle).st_ino
        for path in (self.root, *self.root.rglob("*")):
            if path.stat().st_ino == number:
                if path.is_dir():
                    self.flushed_folders[number] = {inner.name: inner.stat().st_ino for inner in path.iterdir()}
                else:
                    self.flushed_files[number] = path.read_bytes()


@contextmanager
def recording(root: Path) -> Iterator[Recorder]:
    """Record what the block does below ``root``, which counts as flushed at its beginning."""
    recorder = Recorder(root)
    recorder.everything_is_flushed()

    def watched(name: str) -> Callable:
        real = getattr(os, name)

        def call(*args, **more):
            recorder.take()
            result = real(*args, **more)
            if name == "fsync":
                recorder.flushed(args[0])
            return result

        return call

    with mock.patch.multiple(os, **{name: watched(name) for name in WATCHED}):
        yield recorder
    recorder.take()


def after_power_loss(snapshot: Snapshot, root_number: int, target: Path, chance: random.Random) -> None:
    """Write one of the trees that the disk may hold to ``target``, an empty folder."""

    def folder(number: int, place: Path) -> None:
        choices = [snapshot.folders.get(number), snapshot.flushed_folders.get(number)]
        names = chance.choice([found for found in choices if found is not None] or [{}])
        for name, inner in names.items():
            if inner in snapshot.folders or inner in snapshot.flushed_folders:
                (place / name).mkdir()
                folder(inner, place / name)
            else:
                (place / name).write_bytes(content(inner))

    def content(number: int) -> bytes:
        flushed, now = snapshot.flushed_files.get(number), snapshot.files.get(number)
        if flushed is not None and (now is None or now == flushed):
            return flushed
        whole = now or b""
        return chance.choice([flushed or b"", whole[: chance.randint(0, len(whole))], whole])

    folder(root_number, target)
