"""Bucket lists and assignments: the specification's vectors, and an independent slow twin on random sizes."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest

from library.buckets import (
    BucketManager,
    bucket_sizes,
    check_bucket_limits,
    covering_size,
    crop_conditioning,
    whole_steps,
)
from library.errors import OptionError
from tests.conftest import spec_fixture

RANDOM_IMAGES = 10_000


def manager_of(case):
    manager = BucketManager(case["no_upscale"], tuple(case["resolution"]), case["min"], case["max"], case["steps"])
    if not case["no_upscale"]:
        manager.make_buckets()
    return manager


def test_bucket_lists_equal_the_specification():
    for case in spec_fixture("bucketing.json")["enumerate"]:
        sizes = bucket_sizes(tuple(case["resolution"]), case["min"], case["max"], case["steps"])
        assert [list(size) for size in sizes] == case["buckets"], case


def test_images_are_assigned_as_in_the_specification():
    for case in spec_fixture("bucketing.json")["select"]:
        manager = manager_of(case)
        if 0 in case["bucket"]:
            with pytest.raises(OptionError, match="too narrow"):
                manager.select_bucket(*case["image"])
            continue
        bucket, resized, error = manager.select_bucket(*case["image"])
        assert [list(bucket), list(resized), error] == [case["bucket"], case["resized"], case["ar_error"]], case
        assert list(crop_conditioning(bucket, tuple(case["image"]))) == case["crop_ltrb"], case


def test_without_buckets_an_image_covers_the_resolution():
    for case in spec_fixture("bucketing.json")["bucketing_off"]:
        assert list(covering_size(tuple(case["image"]), tuple(case["resolution"]))) == case["resized"], case


def listed_slowly(resolution, low, high, step):
    """Every size in steps within the bounds that cannot grow in height (or width) without passing the area."""
    area = resolution[0] * resolution[1]
    sides = range(low, high + 1, step)
    tall = [(w, max(h for h in sides if w * h <= area)) for w in sides if w * low <= area]
    side = math.isqrt(area) // step * step
    return sorted({(side, side), *tall, *((h, w) for w, h in tall)})


def assigned_slowly(image, sizes):
    """Nearest ratio by exact fractions, then the scale that leaves nothing of the bucket uncovered."""
    if image in sizes:
        return image, image
    ratio = Fraction(*image)
    best = min(sizes, key=lambda size: (abs(Fraction(*size) - ratio), size))
    scale = max(Fraction(best[0], image[0]), Fraction(best[1], image[1]))
    return best, tuple(math.floor(side * scale + Fraction(1, 2)) for side in image)


@pytest.mark.parametrize(
    ("resolution", "low", "high", "step"),
    [((512, 512), 256, 1024, 64), ((1024, 1024), 512, 2048, 32), ((768, 512), 320, 960, 64), ((64, 64), 64, 128, 64)],
)
def test_random_images_are_assigned_as_by_a_slow_twin(resolution, low, high, step):
    sizes = listed_slowly(resolution, low, high, step)
    assert bucket_sizes(resolution, low, high, step) == sizes
    manager = BucketManager(False, resolution, low, high, step)
    manager.make_buckets()
    chance = random.Random(f"{resolution}{step}")
    for _ in range(RANDOM_IMAGES // 4):
        image = (chance.randint(1, 6000), chance.randint(1, 6000))
        bucket, resized, _ = manager.select_bucket(*image)
        slow_bucket, slow_resized = assigned_slowly(image, sizes)
        assert bucket == slow_bucket, image
        # an exact half may fall either way in floating point
        assert all(abs(side - slow) <= 1 for side, slow in zip(resized, slow_resized)), image
        assert resized[0] >= bucket[0] and resized[1] >= bucket[1], image


@pytest.mark.parametrize("step", [64, 32])
def test_without_upscaling_buckets_fit_the_image_and_the_area(step):
    manager = BucketManager(True, (512, 512), None, None, step)
    chance = random.Random(step)
    for _ in range(2000):
        image = (chance.randint(1, 6000), chance.randint(1, 6000))
        try:
            bucket, resized, _ = manager.select_bucket(*image)
        except OptionError:
            assert min(image) < step or max(image) / min(image) > 512 / step, image
            continue
        assert all(0 < side <= new <= old + step for side, new, old in zip(bucket, resized, image)), image
        assert all(side % step == 0 and new - side < step for side, new in zip(bucket, resized)), image
        if image[0] * image[1] <= 512 * 512:
            assert resized == image
        else:
            # one side is cut to whole steps, so the ratio is kept to a rounding of the other
            assert any(side % step == 0 for side in resized), image
            assert abs(resized[0] - resized[1] * image[0] / image[1]) <= 0.51 * max(1, image[0] / image[1]), image


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (((512, 512), 256, 1024, 1, 64), "multiple of 64, got 1. Example: bucket_reso_steps = 64"),
        (((512, 512), 256, 1024, 48, 64), "multiple of 64, got 48"),
        (((512, 512), 256, 1024, 48, 32), "Example: bucket_reso_steps = 64"),
        (((512, 512), 1024, 256, 64, 64), "min_bucket_reso 1024 is larger"),
        (((128, 512), 256, 1024, 64, 64), "below min_bucket_reso 256"),
        (((512, 2048), 256, 1024, 64, 64), "above max_bucket_reso 1024"),
    ],
)
def test_limits_that_cannot_work_are_refused(limits, message):
    with pytest.raises(OptionError, match=message) as caught:
        check_bucket_limits(*limits, source="data.toml")
    assert str(caught.value).startswith("data.toml: ")


def test_limits_are_widened_to_whole_steps_with_a_warning(caplog):
    assert whole_steps(300, 1000, 64) == (256, 1024)
    assert "using 256 to 1024" in caplog.text


def test_front_ends_can_fill_and_sort_buckets():
    manager = BucketManager(False, (512, 512), 256, 1024, 64)
    manager.set_predefined_resos([(576, 448), (448, 576), (512, 512)])
    for name, size in {"a": (900, 600), "b": (500, 500), "c": (910, 610)}.items():
        manager.add_image(manager.select_bucket(*size)[0], name)
    manager.sort()
    assert manager.resos == [(512, 512), (576, 448)]
    assert manager.buckets == [["b"], ["a", "c"]]


def test_an_image_that_is_a_bucket_goes_there():
    manager = BucketManager(False, (512, 512), 256, 1024, 64)
    manager.set_predefined_resos([(256, 256), (512, 512)])
    assert manager.select_bucket(512, 512)[0] == (512, 512)


def test_a_manager_without_a_list_says_what_to_call():
    with pytest.raises(OptionError, match=r"make_buckets\(\)"):
        BucketManager(False, (512, 512), 256, 1024, 64).select_bucket(10, 10)
