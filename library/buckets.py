"""Which size an image is trained at: lists of bucket sizes, and the rule that assigns an image to one of them.

Every size is (width, height) in pixels, every ratio is width over height.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from library.errors import OptionError

log = logging.getLogger(__name__)

Size = tuple[int, int]


class Placement(NamedTuple):
    """Where an image goes.

    Attributes:
        bucket: the size it is trained at. resized: its size before it is cropped to the bucket, never smaller.
        ratio_error: ratio of the bucket minus ratio of the image.
    """

    bucket: Size
    resized: Size
    ratio_error: float


def bucket_sizes(resolution: Size, min_side: int, max_side: int, step: int) -> list[Size]:
    """List the bucket sizes whose area does not exceed that of ``resolution``, ascending.

    Args:
        resolution: its area is the bound. min_side, max_side: bounds of a side. step: sides are multiples of it.
    """
    area = resolution[0] * resolution[1]
    square = int(math.sqrt(area)) // step * step
    sizes = {(square, square)}
    for width in range(min_side, max_side + 1, step):
        height = min(max_side, area // width // step * step)
        if height >= min_side:
            sizes |= {(width, height), (height, width)}
    return sorted(sizes)


def place_in_bucket(image: Size, sizes: list[Size]) -> Placement:
    """Assign an image to the bucket of the nearest ratio; the first in ascending order wins a tie."""
    ratio = image[0] / image[1]
    bucket = image if image in sizes else min(sizes, key=lambda size: abs(size[0] / size[1] - ratio))
    return Placement(bucket, covering_size(image, bucket), bucket[0] / bucket[1] - ratio)


def place_without_upscaling(image: Size, resolution: Size, step: int) -> Placement:
    """Assign an image to a bucket made for it: shrunk to the area of ``resolution`` when larger, then cut to steps.

    Raises:
        OptionError: a side of the bucket would be 0, because the image is smaller than ``step`` there.
    """
    ratio = image[0] / image[1]
    resized = image
    if image[0] * image[1] > resolution[0] * resolution[1]:
        resized = _shrunk_size(ratio, resolution[0] * resolution[1], step)
    bucket = (resized[0] // step * step, resized[1] // step * step)
    if 0 in bucket:
        raise OptionError(
            f"an image of {image[0]}x{image[1]} pixels is too narrow for buckets in steps of {step} without "
            f"upscaling: crop or remove it, lower bucket_reso_steps, or set bucket_no_upscale to false"
        )
    return Placement(bucket, resized, bucket[0] / bucket[1] - ratio)


def _shrunk_size(ratio: float, area: int, step: int) -> Size:
    def rounded_down(length: float) -> int:
        return int(length + 0.5) // step * step

    exact_width = math.sqrt(area * ratio)
    width = rounded_down(exact_width)
    height = rounded_down(area / exact_width)
    height_of_width = rounded_down(width / ratio)
    width_of_height = rounded_down(height * ratio)
    # a side of 0 has no ratio: infinitely far, so that the other candidate is taken while it has one
    error_by_width = abs(width / height_of_width - ratio) if height_of_width else math.inf
    error_by_height = abs(width_of_height / height - ratio) if height else math.inf
    if error_by_width < error_by_height:
        return width, int(width / ratio + 0.5)
    return int(height * ratio + 0.5), height


def covering_size(image: Size, target: Size) -> Size:
    """Give the size of an image scaled, its ratio kept, so that it just covers ``target``."""
    by_height = image[0] / image[1] > target[0] / target[1]
    scale = target[1] / image[1] if by_height else target[0] / image[0]
    return int(image[0] * scale + 0.5), int(image[1] * scale + 0.5)


def crop_conditioning(bucket: Size, image: Size) -> tuple[float, float, float, float]:
    """Give (left, top, right, bottom) as SDXL is told where an image was cropped.

    It is the place of the whole image, fitted inside the bucket; not the true offset of the crop.
    """
    ratio = image[0] / image[1]
    if bucket[0] / bucket[1] > ratio:
        width, height = bucket[1] * ratio, float(bucket[1])
    else:
        width, height = float(bucket[0]), bucket[0] / ratio
    left, top = (bucket[0] - width) // 2, (bucket[1] - height) // 2
    return left, top, left + width, top + height


def whole_steps(min_side: int, max_side: int, step: int) -> tuple[int, int]:
    """Lower the smaller and raise the larger bound to multiples of ``step``, with a warning when that changes one."""
    lowered, raised = min_side // step * step, -(-max_side // step) * step
    if (lowered, raised) != (min_side, max_side):
        log.warning(
            "bucket sides from %d to %d are no multiples of bucket_reso_steps %d: using %d to %d",
            min_side,
            max_side,
            step,
            lowered,
            raised,
        )
    return lowered, raised


def check_bucket_limits(resolution: Size, min_side: int, max_side: int, step: int, divisor: int, source: str) -> None:
    """Refuse bucket settings that cannot work.

    Args:
        resolution, min_side, max_side, step: as the options. divisor: ``step`` must be a multiple of it.
        source: where the settings come from, for the message.

    Raises:
        OptionError: the step is no positive multiple of ``divisor``, or the resolution lies outside the bounds.
    """
    if step < 1 or step % divisor:
        nearest = max(divisor, round(step / divisor) * divisor)
        raise OptionError(
            f"{source}: bucket_reso_steps must be a multiple of {divisor}, got {step}. "
            f"Example: bucket_reso_steps = {nearest}"
        )
    if min_side > max_side:
        raise OptionError(
            f"{source}: min_bucket_reso {min_side} is larger than max_bucket_reso {max_side}. "
            f"Example: min_bucket_reso = 256, max_bucket_reso = 1024"
        )
    width, height = resolution
    if min(width, height) < min_side // step * step:
        raise OptionError(
            f"{source}: resolution {width}x{height} has a side below min_bucket_reso {min_side}. "
            f"Use min_bucket_reso = {min(width, height)} or a larger resolution"
        )
    if max(width, height) > -(-max_side // step) * step:
        raise OptionError(
            f"{source}: resolution {width}x{height} has a side above max_bucket_reso {max_side}. "
            f"Use max_bucket_reso = {max(width, height)} or a smaller resolution"
        )


class BucketManager:
    """Buckets and the images in them; front-ends compute step counts with it.

    Args:
        no_upscale: buckets are made for the images instead of taken from a list.
        max_reso: (width, height) whose area bounds the buckets.
        min_size, max_size: bounds of a side, not used with ``no_upscale``. reso_steps: sides are multiples of it.
    """

    def __init__(self, no_upscale: bool, max_reso: Size, min_size: int | None, max_size: int | None, reso_steps: int):
        self.no_upscale = no_upscale
        self.max_reso = (int(max_reso[0]), int(max_reso[1]))
        self.min_size = min_size
        self.max_size = max_size
        self.reso_steps = reso_steps
        self.predefined_resos: list[Size] = []
        self.resos: list[Size] = []
        self.buckets: list[list[Any]] = []

    def make_buckets(self) -> None:
        """Compute the list that images are assigned from."""
        if self.min_size is None or self.max_size is None:
            raise OptionError("a bucket list needs min_bucket_reso and max_bucket_reso. Example: 256 and 1024")
        self.set_predefined_resos(bucket_sizes(self.max_reso, self.min_size, self.max_size, self.reso_steps))

    def set_predefined_resos(self, resos: Iterable[Size]) -> None:
        """Take a ready list of sizes to assign images from."""
        self.predefined_resos = sorted((int(width), int(height)) for width, height in resos)

    def select_bucket(self, image_width: int, image_height: int) -> Placement:
        """Give (bucket size, size to resize to, ratio error) of an image.

        Raises:
            OptionError: the image is too narrow, or there is no list to choose from.
        """
        image = (image_width, image_height)
        if self.no_upscale:
            placement = place_without_upscaling(image, self.max_reso, self.reso_steps)
        elif self.predefined_resos:
            placement = place_in_bucket(image, self.predefined_resos)
        else:
            raise OptionError("no buckets to select from: call make_buckets() or set_predefined_resos() first")
        return placement

    def add_image(self, reso: Size, image: Any) -> None:
        """Put an image (any value that stands for it) into the bucket of that size, which is made when missing."""
        if reso not in self.resos:
            self.resos.append(reso)
            self.buckets.append([])
        self.buckets[self.resos.index(reso)].append(image)

    def sort(self) -> None:
        """Order the buckets by size."""
        order = sorted(range(len(self.resos)), key=self.resos.__getitem__)
        self.resos = [self.resos[place] for place in order]
        self.buckets = [self.buckets[place] for place in order]
