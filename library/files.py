"""The one place that writes files which outlive the process: complete under their name, or not there at all."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TEMPORARY_MARK = ".incomplete-"
OLDER_MARK = ".older-"
RENAME_WAITS_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)  # between the tries of a rename that is not permitted
UMASK = os.umask(0)  # it can only be read by setting it
os.umask(UMASK)


def _hidden_beside(target: Path, mark: str) -> Path:
    return target.with_name(f".{target.name}{mark}{uuid.uuid4().hex[:8]}")


def flush_to_disk(path: Path) -> None:
    """Wait until a file's bytes, or a folder's list of names, are on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open a folder for flushing; its rename is journalled
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rename(source: Path, target: Path, wait: Callable[[float], None] = time.sleep) -> None:
    """Rename a file or folder; on Windows a few times, as a scanner or indexer may hold it open for a moment.

    Args:
        source, target: in one folder; an older file under ``target`` is replaced. wait: called with seconds.

    Raises:
        OSError: it cannot be done; both stay as they are.
    """
    for seconds in RENAME_WAITS_S if os.name == "nt" else ():
        try:
            os.replace(source, target)
            return
        except PermissionError:
            wait(seconds)
    os.replace(source, target)


def check_room(target: Path, size: int) -> None:
    """Find out before writing whether a file or folder of about ``size`` bytes fits beside what is there.

    Raises:
        OSError: too little room is left, with both numbers.
    """
    folder = next(path for path in (target, *target.parents) if path.is_dir())
    free = shutil.disk_usage(folder).free
    if size > free:
        raise OSError(errno.ENOSPC, f"{size / 2**20:.1f} MiB are needed, {free / 2**20:.1f} MiB are free", str(target))


def open_as_usual(path: Path) -> None:
    """Give a file the rights the user's umask says; safetensors writes files that nobody else may read."""
    os.chmod(path, 0o666 & ~UMASK)


def write_file(target: Path, write: Callable[[Path], object], size: int = 0) -> None:
    """Let ``write`` fill a temporary file beside ``target``, flush it, and rename it into place.

    Args:
        target: the final path; its folder is made when missing; an older file is replaced in one step.
        write: called with the temporary path, which it must create.
        size: bytes it will have, as far as known; looked for before anything is written.

    Raises:
        OSError: the disk is full, read-only, ...; the temporary file is gone then and an older target untouched.
    """
    check_room(target, size)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _hidden_beside(target, TEMPORARY_MARK)
    try:
        write(temporary)
        open_as_usual(temporary)
        flush_to_disk(temporary)
        rename(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    flush_to_disk(target.parent)


def write_bytes(target: Path, content: bytes) -> None:
    """Write bytes through :func:`write_file`."""
    write_file(target, lambda path: path.write_bytes(content), len(content))


def write_text(target: Path, content: str) -> None:
    """Write text as UTF-8 with plain line ends through :func:`write_file`."""
    write_bytes(target, content.encode("utf-8"))


def write_json(target: Path, content: Any) -> None:
    """Write a value as indented JSON through :func:`write_file`."""
    write_text(target, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def new_folder(target: Path, size: int = 0) -> Iterator[Path]:
    """Fill a temporary folder; when the block ends well it becomes ``target``, replacing an older one.

    Everything inside is flushed before the rename, so a folder under its final name is complete. An older folder is
    moved aside first and removed only after the new one stands in its place; :func:`recover_folder` undoes a kill
    between the two.

    Args:
        target: the final path of the folder. size: bytes it will have, as far as known.

    Raises:
        OSError: as the writes inside; the temporary folder is removed and an older target stays.
    """
    check_room(target, size)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _hidden_beside(target, TEMPORARY_MARK)
    temporary.mkdir()
    try:
        yield temporary
        for path in sorted(temporary.rglob("*")):
            if path.is_file():
                open_as_usual(path)
            flush_to_disk(path)
        flush_to_disk(temporary)
        _put_in_place(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    flush_to_disk(target.parent)


def _put_in_place(temporary: Path, target: Path) -> None:
    if not target.exists():
        rename(temporary, target)
        return
    older = _hidden_beside(target, OLDER_MARK)
    rename(target, older)
    try:
        rename(temporary, target)
    except OSError:
        rename(older, target)
        raise
    flush_to_disk(target.parent)  # or a loss of power could leave the older folder's name with nothing in it
    shutil.rmtree(older, ignore_errors=True)


def recover_folder(target: Path) -> None:
    """Put an older folder back that a kill between the two renames of :func:`new_folder` left beside its name."""
    if target.exists() or not target.parent.is_dir():
        return
    for older in target.parent.glob(f".{glob.escape(target.name)}{OLDER_MARK}*"):
        with contextlib.suppress(FileNotFoundError):  # another process of this run was faster
            rename(older, target)
        return


def remove_folder(target: Path) -> None:
    """Remove a folder so that a kill in between never leaves half of it under its name."""
    doomed = _hidden_beside(target, TEMPORARY_MARK)
    rename(target, doomed)
    flush_to_disk(target.parent)
    shutil.rmtree(doomed, ignore_errors=True)
