"""Small real runs for tests: a data set of coloured tiles, the real script in this process, a comparer of states."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image

RUN_OPTIONS: dict[str, Any] = {
    "output_name": "t",
    "resolution": "64",
    "caption_extension": ".txt",
    "network_module": "networks.lora",
    "network_dim": 2,
    "learning_rate": 1e-3,
    "max_train_steps": 6,
    "seed": 1,
    "max_data_loader_n_workers": 0,
    "cache_latents": True,
    "sdpa": True,
}


def make_tiles(folder: Path, count: int = 3, repeats: int = 2, size: tuple[int, int] = (64, 64)) -> Path:
    """Make a data set in the folder convention: ``count`` tiles of different colours with captions."""
    target = folder / f"{repeats}_sks cat"
    target.mkdir(parents=True)
    generator = numpy.random.default_rng(0)
    for index in range(count):
        pixels = generator.integers(0, 256, (size[1], size[0], 3), dtype=numpy.uint8)
        Image.fromarray(pixels).save(target / f"tile{index}.png")
        (target / f"tile{index}.txt").write_text(f"a cat, number {index}, tile", encoding="utf-8")
    return folder


def arguments(options: dict[str, Any]) -> list[str]:
    """Turn options into words of a command line; True is a switch, None and False are left out."""
    words: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        words.append(f"--{name}")
        if isinstance(value, (list, tuple)):
            words += [str(item) for item in value]
        elif value is not True:
            words.append(str(value))
    return words


def forget_accelerate() -> None:
    """One process of accelerate's is one run: make the next run a first one."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for shared in (AcceleratorState, GradientState, PartialState):
        shared._reset_state()


def train(script: str = "train_network", **options: Any) -> None:
    """Run a script's own main in this process."""
    forget_accelerate()
    known = RUN_OPTIONS if script.endswith("network") else {**RUN_OPTIONS, "network_module": None, "network_dim": None}
    importlib.import_module(script).main(arguments({**known, **options}))


# ---------------------------------------------------------------------------------------------------- comparison


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Walk over every leaf of nested dicts, lists and tuples."""
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        yield f"{path}#", len(value)
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}/{index}")
    else:
        yield path, value


def same_bits(one: Any, other: Any) -> bool:
    """Say whether two leaves have the same type and the same bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        flat = one.detach().cpu().contiguous().reshape(-1), other.detach().cpu().contiguous().reshape(-1)
        return torch.equal(flat[0].view(torch.uint8), flat[1].view(torch.uint8))
    if isinstance(one, float):
        return (one == other and math.copysign(1, one) == math.copysign(1, other)) or (one != one and other != other)
    return bool(one == other)


def first_difference(one: Any, other: Any) -> str | None:
    """Give the path of the first leaf that differs, None when everything is the same to the bit."""
    ours, theirs = dict(leaves(one)), dict(leaves(other))
    for path in [*ours, *(path for path in theirs if path not in ours)]:
        if path not in ours or path not in theirs or not same_bits(ours[path], theirs[path]):
            return path
    return None


def read_state(folder: Path) -> dict[str, Any]:
    """Read everything a state folder holds, without the record's own file hashes."""
    from safetensors.torch import load_file

    content: dict[str, Any] = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    for path in folder.glob("*.bin"):
        content[path.name] = torch.load(path, weights_only=True)
    for path in folder.glob("*.json"):
        content[path.name] = json.loads(path.read_text(encoding="utf-8"))
    for of_files in ("files", "sha256"):
        content["train_state.json"].pop(of_files)
    return content
