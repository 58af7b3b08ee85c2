"""A shim over every file call of this process: counts them, stops at the n-th, or says that the disk is full there."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

OS_CALLS = ("open", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir")


class Stop(BaseException):
    """Stands for a kill: passes through every ``except Exception``, and no file call works after it."""


class Faults:
    """Counts file calls and raises at one of them.

    Args:
        at: number of the call that fails, from 1; 0 never. kill: everything after it fails too, as in a dead process.
    """

    def __init__(self, at: int = 0, kill: bool = False):
        self.at, self.kill, self.count = at, kill, 0
        self.dead = False

    def call(self, name: str) -> None:
        """Stand before a file call."""
        self.count += 1
        if self.dead or (self.count == self.at and self.kill):
            self.dead = True
            raise Stop(name)
        if self.count == self.at:
            raise OSError(errno.ENOSPC, "No space left on device", name)

    @property
    def reached(self) -> bool:
        return bool(self.at) and self.count >= self.at


class _Watched(io.BufferedIOBase):
    """A file opened for writing: a failing write leaves half of its bytes behind."""

    def __init__(self, raw: Any, faults: Faults):
        self.raw_file, self.faults = raw, faults

    def write(self, data: Any) -> int:
        try:
            self.faults.call("write")
        except BaseException:
            self.raw_file.write(bytes(data)[: len(bytes(data)) // 2])
            raise
        return self.raw_file.write(data)

    def flush(self) -> None:
        if not self.raw_file.closed:
            self.raw_file.flush()

    def close(self) -> None:
        self.raw_file.close()
        super().close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw_file, name)

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seek(self, *args: Any) -> int:
        return self.raw_file.seek(*args)

    def tell(self) -> int:
        return self.raw_file.tell()


@contextmanager
def watching(faults: Faults) -> Iterator[Faults]:
    """Send every file call inside the block through ``faults``; torch's and safetensors' writers in two halves."""
    import safetensors.torch
    import torch

    real_open = io.open

    def watched_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not any(mark in mode for mark in "wax+") or isinstance(file, int):
            return real_open(file, mode, *args, **kwargs)
        faults.call("open")
        opened = real_open(file, mode, *args, **kwargs)
        return _Watched(opened, faults) if "b" in mode else opened

    def in_halves(write: Callable[..., Any]) -> Callable[..., Any]:
        def call(content: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(target, (str, os.PathLike)):
                return write(content, target, *args, **kwargs)
            faults.call("open")
            write(content, target, *args, **kwargs)
            try:
                faults.call("write")
            except BaseException:
                os.truncate(target, Path(target).stat().st_size // 2)
                raise
            return None

        return call

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            faults.call(name)
            return real(*args, **kwargs)

        return call

    with (
        mock.patch.object(io, "open", watched_open),
        mock.patch.object(builtins, "open", watched_open),
        mock.patch.object(torch, "save", in_halves(torch.save)),
        mock.patch.object(safetensors.torch, "save_file", in_halves(safetensors.torch.save_file)),
        mock.patch.multiple(os, **{name: counted(name) for name in OS_CALLS}),
    ):
        yield faults
