"""What ``--debug_dataset`` shows: every batch of an epoch in words, and the pictures as they would be trained on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from library.dataset import BatchKey
from library.files import write_file

log = logging.getLogger(__name__)

PICTURES = 100


def show_dataset(data: Any, folder: Path) -> None:
    """Print what the first epoch's batches hold, in the order of use, and write their first pictures.

    Args:
        data: batches, as :class:`library.dataset.TrainingData` makes them. folder: for the pictures; made when missing.
    """
    written = 0
    for number, index in enumerate(data.batch_order(1), start=1):
        batch = data[BatchKey(1, number - 1, index)]
        print(f"batch {number} of {len(data)}: {_in_words(batch)}")
        for position in range(len(batch["image_keys"])):
            print("  " + _sample_in_words(batch, position))
            if batch["images"] is not None and written < PICTURES:
                path = folder / f"batch{number:04d}_{position}.png"
                picture = _picture(batch, position)
                write_file(path, lambda temporary, picture=picture: picture.save(temporary, format="PNG"))
                written += 1
    print(f"{len(data)} batches in an epoch. {written} pictures as they are trained on: {folder}")


def _in_words(batch: dict[str, Any]) -> str:
    kind = "images" if batch["latents"] is None else "latents"
    masks = [name for name in ("alpha_masks", "conditioning_images") if batch[name] is not None]
    size = "x".join(str(side) for side in reversed(batch[kind].shape[-2:]))
    return f"{len(batch['image_keys'])} {kind} of {size}{', with ' if masks else ''}{', '.join(masks)}"


def _sample_in_words(batch: dict[str, Any], position: int) -> str:
    original, crop = (batch[name][position].tolist() for name in ("original_sizes_hw", "crop_top_lefts"))
    words = [
        batch["image_keys"][position],
        f"{original[1]}x{original[0]}",
        f"crop {crop[1]},{crop[0]}",
        *["mirrored"] * bool(batch["flippeds"][position]),
        f"weight {batch['loss_weights'][position]:g}",
        *[str(batch["custom_attributes"][position])] * bool(batch["custom_attributes"][position]),
        repr(batch["captions"][position]),
    ]
    return ", ".join(words)


def _picture(batch: dict[str, Any], position: int) -> Image.Image:
    """Give an image of a batch, its mask beside it where there is one."""
    parts = [_pixels(batch["images"][position] / 2 + 0.5)]
    if batch["conditioning_images"] is not None:
        parts.append(_pixels(batch["conditioning_images"][position] / 2 + 0.5))
    elif batch["alpha_masks"] is not None:
        parts.append(_pixels(batch["alpha_masks"][position].expand(3, -1, -1)))
    return Image.fromarray(np.concatenate(parts, axis=1))


def _pixels(image: Tensor) -> np.ndarray:
    return (image.float().clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
