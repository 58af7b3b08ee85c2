"""Arrays in .npz files beside the images: read without pickles, written in one step, other programs' keys kept."""

from __future__ import annotations

import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from library.files import write_file

# what reading a damaged file can raise
DAMAGE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, NotImplementedError)


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read every array of a file.

    Raises:
        One of ``DAMAGE``: it is damaged, or needs unpickling.
    """
    with np.load(path, allow_pickle=False) as archive:
        return {key: archive[key] for key in archive.files}


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray], replaced: Collection[str] = ()) -> None:
    """Write arrays; what else a readable file of that name holds is kept.

    Args:
        replaced: keys that are not kept although ``arrays`` lacks them.
    """
    try:
        kept = {key: array for key, array in load_arrays(path).items() if key not in replaced}
    except DAMAGE:
        kept = {}

    content = {**kept, **arrays}

    def save(temporary: Path) -> None:
        with temporary.open("wb") as file:  # np.savez adds .npz to a name, not to an open file
            np.savez(file, **content)

    write_file(path, save, sum(array.nbytes for array in content.values()))
