"""Names of everything a run writes, and which older model or state a keep-last rule lets go."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from pathlib import Path

from library.errors import OptionError

RESERVED = {"con", "prn", "aux", "nul", *(f"com{i}" for i in range(1, 10)), *(f"lpt{i}" for i in range(1, 10))}


def check_output_name(name: str | None) -> None:
    """Refuse an output name that would leave the output folder or that no file system accepts.

    Raises:
        OptionError: with what is wrong about it.
    """
    if name is None:
        return
    wrong = None
    if any(mark in name for mark in ("/", "\\", "\0")) or name in (".", ".."):
        wrong = "it may not contain a folder"
    elif any(ord(character) < 32 for character in name) or name.strip(" .") != name:
        wrong = "it may not begin or end with a blank or a dot or hold control characters"
    elif name.split(".")[0].lower() in RESERVED:
        wrong = "the name is reserved on Windows"
    elif len(name.encode("utf-8")) > 200:
        wrong = "it is longer than 200 bytes"
    if wrong:
        raise OptionError(f"--output_name {name!r}: {wrong}. Use a plain name, for example --output_name lighthouse")


def check_writable(folder: Path, option: str) -> None:
    """Refuse a folder that cannot be made or written to; ``option`` is named in the message.

    Raises:
        OptionError: with the place that is in the way.
    """
    existing = folder.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise OptionError(f"{option} {folder}: {existing} is a file. Give a folder")
    if not os.access(existing, os.W_OK):
        raise OptionError(f"{option} {folder}: {existing} is not writable. Give another folder")


@dataclass(frozen=True)
class OutputNames:
    """Paths of a run's results.

    Args:
        folder: the output folder. name: ``--output_name``, None uses the fall-back words.
        suffix: of models, with its dot; empty for folders.
    """

    folder: Path
    name: str | None
    suffix: str

    def final_model(self) -> Path:
        return self.folder / f"{self.name or 'last'}{self.suffix}"

    def epoch_model(self, epoch: int) -> Path:
        return self.folder / f"{self.name or 'epoch'}-{epoch:06d}{self.suffix}"

    def step_model(self, step: int) -> Path:
        return self.folder / f"{self.name or 'at'}-step{step:08d}{self.suffix}"

    def final_state(self) -> Path:
        return self.folder / f"{self.name or 'last'}-state"

    def epoch_state(self, epoch: int) -> Path:
        return self.folder / f"{self.name or 'epoch'}-{epoch:06d}-state"

    def step_state(self, step: int) -> Path:
        return self.folder / f"{self.name or 'at'}-step{step:08d}-state"

    def pictures(self) -> Path:
        return self.folder / f"{self.name or 'last'}-grad_filter"

    def sample(self, index: int, epoch: int | None, step: int, seed: int | None) -> Path:
        """Give the path of a preview image; the epoch form is used when ``epoch`` is not None."""
        place = f"e{epoch:06d}" if epoch is not None else f"{step:06d}"
        stamp = f"{datetime.datetime.now():%Y%m%d%H%M%S}"
        parts = [self.name, place, f"{index:02d}", stamp, None if seed is None else str(seed)]
        return self.folder / "sample" / ("_".join(part for part in parts if part) + ".png")


def epoch_to_remove(epoch: int, interval: int, keep: int | None) -> int | None:
    """Give the epoch whose files go once those of ``epoch`` are complete, None when nothing goes.

    Args:
        epoch: just saved. interval: epochs between saves. keep: how many to keep, None keeps all.
    """
    if not keep:
        return None
    removed = epoch - interval * keep
    return removed if removed > 0 else None


def step_to_remove(step: int, interval: int, keep_steps: int | None) -> int | None:
    """Give the step whose files go once those of ``step`` are complete, None when nothing goes.

    Args:
        step: just saved. interval: steps between saves. keep_steps: for how many steps back files are kept.
    """
    if not keep_steps:
        return None
    removed = step - keep_steps - 1
    removed -= removed % interval
    return removed if removed > 0 else None
