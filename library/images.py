"""Pixels: reading images of every kind, resizing, cropping and changing them.

Images are numpy arrays (H, W, C), uint8, RGB or RGBA. Sizes are (width, height).
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import math
import os
import random
import struct
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from library.buckets import Size
from library.config_util import PLUGINS
from library.errors import OptionError

log = logging.getLogger(__name__)

MAX_PIXELS = 1 << 27  # 134 million: above every camera, below what fills a memory
BACKGROUND = (255, 255, 255)  # transparent areas show it, as viewers do, not the colours hidden below
EXIF_ORIENTATION = 0x0112
SIDEWAYS_ORIENTATIONS = range(5, 9)
UPRIGHT = {  # what makes each stored orientation upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
HUE_TURN = 8 / 180
GAMMA_SPREAD = 0.05
COLOR_AUG_RATE = 0.33


@lru_cache(maxsize=1)
def _load_plugins() -> None:
    for module in PLUGINS.values():
        if importlib.util.find_spec(module):
            importlib.import_module(module)


def _open(path: Path) -> Image.Image:
    _load_plugins()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # MAX_PIXELS is checked instead
        image = Image.open(path)
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"{image.width}x{image.height} is more than {MAX_PIXELS // 10**6} million pixels")
    return image


def _reason(error: Exception) -> str:
    if isinstance(error, Image.UnidentifiedImageError):
        return "no image data that can be read"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _readable(path: Path, use: Callable[[Image.Image], Any]) -> Any:
    """Open an image by its content and use it; what decoders raise on broken bytes becomes one line."""
    try:
        with _open(path) as image:
            return use(image)
    except Exception as error:  # decoders raise anything from SyntaxError to struct.error on damaged bytes
        raise OptionError(f"{path}: {_reason(error)}. Replace or remove the file") from error


def _orientation(image: Image.Image) -> int:
    # the method of PNG files would decode all pixels in search of metadata behind them, which viewers ignore
    try:
        return Image.Image.getexif(image).get(EXIF_ORIENTATION, 1)
    except (SyntaxError, ValueError, OSError, struct.error):  # from older Pillow; the pixels may be good all the same
        log.debug("%s: metadata cannot be read, taken as upright", getattr(image, "filename", ""), exc_info=True)
        return 1


def read_size(path: Path) -> Size:
    """Give the size an image has upright, from its header.

    Raises:
        OptionError: no image, or one that is too large.
    """

    def upright(image: Image.Image) -> Size:
        sideways = _orientation(image) in SIDEWAYS_ORIENTATIONS
        return (image.height, image.width) if sideways else (image.width, image.height)

    return _readable(path, upright)


def read_sizes(paths: Sequence[Path]) -> list[Size]:
    """Give the upright size of every image.

    Raises:
        OptionError: one line that names all broken files, those with a good header included.
    """
    try:
        return [read_size(path) for path in paths]
    except OptionError:
        check_images(paths)
        raise


def check_images(paths: Iterable[Path]) -> None:
    """Decode every image once, so that a broken one is found before training.

    Raises:
        OptionError: one line that names all broken files.
    """

    def problem(path: Path) -> str | None:
        def decode(image: Image.Image) -> None:
            image.draft("RGB", (max(1, image.width // 8), max(1, image.height // 8)))  # a JPEG is read, not unpacked
            image.load()

        try:
            _readable(path, decode)
        except OptionError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        problems = [text for text in pool.map(problem, paths) if text]
    if len(problems) == 1:
        raise OptionError(f"broken image: {problems[0]}")
    if problems:
        named = "; ".join(text.removesuffix(". Replace or remove the file") for text in problems)
        raise OptionError(f"{len(problems)} broken images, replace or remove them: {named}")


def load_image(path: Path, alpha: bool = False) -> np.ndarray:
    """Read an image upright; the first frame of an animation.

    Args:
        path: any name, the content decides. alpha: keep transparency as a fourth channel, opaque without one.

    Returns:
        (H, W, 3) RGB, transparent areas over :data:`BACKGROUND`; or (H, W, 4) with the hidden colours as they are.

    Raises:
        OptionError: the image is broken, too large, or of a kind that has no colours (floating point).
    """
    return _readable(path, lambda image: _to_array(image, alpha))


def _to_array(image: Image.Image, alpha: bool) -> np.ndarray:
    orientation = _orientation(image)  # asked before the pixels are read, as for the size
    image.load()
    if orientation in UPRIGHT:
        image = image.transpose(UPRIGHT[orientation])
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image, dtype=np.int64).clip(0, 65535) / 257 + 0.5).astype(np.uint8))
    if image.mode == "F":
        raise ValueError("an image of floating point values")
    if not image.has_transparency_data:
        return np.array(image.convert("RGBA" if alpha else "RGB"))
    image = image.convert("RGBA")
    if not alpha:
        background = Image.new("RGBA", image.size, (*BACKGROUND, 255))
        image = Image.alpha_composite(background, image).convert("RGB")
    return np.array(image)


# ------------------------------------------------------------------------------------------------------ resizing


def resize(image: np.ndarray, size: Size, interpolation: str | None) -> np.ndarray:
    """Resize an image.

    Args:
        image: (H, W, C) uint8. size: (width, height) wanted.
        interpolation: a name of the option; None takes the area average when no side grows, else Lanczos.

    Returns:
        (H, W, C) uint8; the same array when the size is already right.
    """
    height, width = image.shape[:2]
    if (width, height) == size:
        return image
    if interpolation is None:
        interpolation = "area" if size[0] <= width and size[1] <= height else "lanczos"
    return RESIZERS[interpolation](image, size)


def _resize_area(image: np.ndarray, size: Size) -> np.ndarray:
    averaged = _average_rows(_average_rows(image, size[1]).swapaxes(0, 1), size[0]).swapaxes(0, 1)
    return np.rint(averaged).clip(0, 255).astype(np.uint8)


def _average_rows(image: np.ndarray, count: int) -> np.ndarray:
    """Average rows into ``count`` rows, each weighted by the share of it that is covered; float32."""
    flat = np.ascontiguousarray(image).reshape(image.shape[0], -1)
    edges = np.arange(count + 1) * (len(flat) / count)
    averaged = np.empty((count, flat.shape[1]), dtype=np.float32)
    for place, (top, bottom) in enumerate(itertools.pairwise(edges)):
        first, last = int(top), min(math.ceil(bottom), len(flat))
        rows = np.arange(first, last)
        covered = np.minimum(rows + 1, bottom) - np.maximum(rows, top)
        averaged[place] = (covered / covered.sum()).astype(np.float32) @ flat[first:last].astype(np.float32)
    return averaged.reshape(count, *image.shape[1:])


def _resize_nearest(image: np.ndarray, size: Size) -> np.ndarray:
    columns, rows = ((2 * np.arange(new) + 1) * old // (2 * new) for old, new in zip(image.shape[1::-1], size))
    return image[rows[:, None], columns]


def _resize_with_pillow(filter_name: str) -> Callable[[np.ndarray, Size], np.ndarray]:
    def resize_with(image: np.ndarray, size: Size) -> np.ndarray:
        # Pillow weights colours by a fourth channel, which here may be a mask that says nothing about them
        planes = [image[..., :3], image[..., 3]] if image.shape[2] == 4 else [image]
        resized = [Image.fromarray(plane).resize(size, Image.Resampling[filter_name]) for plane in planes]
        return np.dstack([np.asarray(plane) for plane in resized])

    return resize_with


def _resize_with_torch(mode: str) -> Callable[[np.ndarray, Size], np.ndarray]:
    def resize_with(image: np.ndarray, size: Size) -> np.ndarray:
        planes = torch.from_numpy(image).permute(2, 0, 1)[None].float()
        resized = torch.nn.functional.interpolate(planes, (size[1], size[0]), mode=mode, align_corners=False)
        return resized.round().clamp(0, 255).to(torch.uint8)[0].permute(1, 2, 0).contiguous().numpy()

    return resize_with


# Pillow widens its filters when an image shrinks; torch, like OpenCV, which these names come from, does not.
RESIZERS: dict[str, Callable[[np.ndarray, Size], np.ndarray]] = {
    "lanczos": _resize_with_pillow("LANCZOS"),
    "box": _resize_with_pillow("BOX"),
    "nearest": _resize_nearest,
    "bilinear": _resize_with_torch("bilinear"),
    "linear": _resize_with_torch("bilinear"),
    "bicubic": _resize_with_torch("bicubic"),
    "cubic": _resize_with_torch("bicubic"),
    "area": _resize_area,
}


# ------------------------------------------------------------------------------------------- cropping and changing


def crop(image: np.ndarray, size: Size, rng: random.Random | None) -> np.ndarray:
    """Cut ``size`` out of an image that is at least as large: from the middle, or where ``rng`` says."""
    excess = (image.shape[1] - size[0], image.shape[0] - size[1])
    left, top = (rng.randint(0, room) if rng else room // 2 for room in excess)
    return image[top : top + size[1], left : left + size[0]]


def face_of_name(path: Path) -> tuple[int, int, int, int] | None:
    """Give (centre x, centre y, width, height) of the face that a file name ends in (``photo_320_200_90_110``)."""
    numbers = path.stem.split("_")[-4:]
    if len(numbers) < 4 or not all(number.isdecimal() for number in numbers):
        return None
    x, y, width, height = map(int, numbers)
    return (x, y, width, height) if x > 0 and width > 0 and height > 0 else None


def crop_around_face(
    image: np.ndarray,
    face: tuple[int, int, int, int],
    size: Size,
    zoom: tuple[float, float],
    wander: bool,
    interpolation: str | None,
    rng: random.Random,
) -> np.ndarray:
    """Scale an image that covers ``size`` by a random factor, at most 1, and cut ``size`` out around a face.

    Args:
        face: centre and size in pixels of ``image``. zoom: the crop's shorter side in face sizes, from and to.
        wander: the crop may leave the face. interpolation: as in :func:`resize`.
    """
    height, width = image.shape[:2]
    longer_side, shorter_crop = max(face[2:]), min(size)
    low = min(1.0, max(size[0] / width, size[1] / height, shorter_crop / (longer_side * zoom[1])))
    high = min(1.0, max(low, shorter_crop / (longer_side * zoom[0])))
    scale = rng.uniform(low, high)
    scaled = (max(size[0], int(width * scale + 0.5)), max(size[1], int(height * scale + 0.5)))
    image = resize(image, scaled, interpolation)
    face_side = longer_side * scale
    corner = []
    for length, wanted, centre in zip(scaled, size, face):
        centre = int(centre * scale + 0.5)
        if wander:
            reach = max(length - centre, centre)
            centre += rng.randint(0, reach) + rng.randint(0, reach) - reach
        elif zoom[0] != zoom[1] and face_side > shorter_crop / 10 and face_side >= 40:
            centre = int(centre + face_side * rng.uniform(-0.05, 0.05))
        corner.append(max(0, min(centre - wanted // 2, length - wanted)))
    left, top = corner
    return image[top : top + size[1], left : left + size[0]]


def change_colors(image: np.ndarray, rng: random.Random) -> np.ndarray:
    """Turn the hue a little, or bend the brightness a little, in a third of the draws; alpha stays."""
    if rng.random() >= COLOR_AUG_RATE:
        return image
    turn_hue = rng.random() < 0.5
    amount = rng.uniform(-1, 1)
    colors = image[..., :3]
    if turn_hue:
        hsv = np.array(Image.fromarray(colors).convert("HSV"))
        hsv[..., 0] += np.uint8(round(amount * HUE_TURN * 256) % 256)
        changed = np.asarray(Image.fromarray(hsv, "HSV").convert("RGB"))
    else:
        changed = np.clip(np.power(colors.astype(np.float32), 1 + amount * GAMMA_SPREAD), 0, 255).astype(np.uint8)
    return np.concatenate([changed, image[..., 3:]], axis=2)


def to_tensor(image: np.ndarray) -> Tensor:
    """Give (3, H, W) float32 in [-1, 1] of an RGB or RGBA image."""
    return torch.from_numpy(np.ascontiguousarray(image[..., :3])).permute(2, 0, 1).float() / 127.5 - 1.0


def alpha_of(image: np.ndarray) -> Tensor:
    """Give (H, W) float32 in [0, 1], ones for an image without transparency."""
    if image.shape[2] == 3:
        return torch.ones(image.shape[:2])
    return torch.from_numpy(np.ascontiguousarray(image[..., 3])).float() / 255
