"""Images per second of latent caching beside a plain loop over the images, side by side in one process.

    make bench-caching

Makes photographs of 1536x1024 as JPEG files and brings them to 512-area buckets. Averages over 8x8 pixels stand for the
latents, as if the VAE took no time: what is measured is reading, resizing and writing. The ways take turns; medians.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))


def make_photographs(folder: Path, count: int) -> None:
    """Write ``count`` smooth pictures with some grain, which decode like photographs."""
    import numpy
    from PIL import Image

    folder.mkdir(parents=True)
    generator = numpy.random.default_rng(0)
    for index in range(count):
        coarse = Image.fromarray(generator.integers(0, 256, (24, 36, 3), dtype=numpy.uint8))
        pixels = numpy.asarray(coarse.resize((1536, 1024), Image.Resampling.BICUBIC)).astype(numpy.int16)
        pixels = pixels + generator.integers(-8, 9, pixels.shape, dtype=numpy.int16)
        Image.fromarray(pixels.clip(0, 255).astype(numpy.uint8)).save(folder / f"{index:04d}.jpg", quality=92)


def remove_caches(folder: Path) -> None:
    for path in folder.glob("*.npz"):
        path.unlink()


def ways(data: Any, encode: Callable, folder: Path) -> dict[str, Callable[[], None]]:
    """Give every way of encoding all images of ``data`` once."""
    import numpy

    from library.latent_cache import cache_latents

    def plain(to_disk: bool) -> None:
        for index, request in enumerate(data.cache_requests()):
            mean, _ = encode(data.load_pixels(index).image[None])
            if to_disk:
                numpy.savez(folder / f"{request.path.stem}.plain.npz", latents=mean[0].numpy())

    def ours(batch_size: int, to_disk: bool) -> None:
        data.latents.clear()
        cache_latents(data, encode, batch_size=batch_size, to_disk=to_disk, vae="bench", shown=False)

    return {
        "plain loop": lambda: plain(False),
        "plain loop to files": lambda: plain(True),
        "--cache_latents": lambda: ours(1, False),
        "--cache_latents --vae_batch_size 4": lambda: ours(4, False),
        "--cache_latents_to_disk": lambda: ours(1, True),
        "--cache_latents_to_disk --vae_batch_size 4": lambda: ours(4, True),
    }


def main() -> None:
    import torch

    from library.config_util import DatasetSpec, Kind, SubsetSpec
    from library.dataset import TrainingData

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "images"
        make_photographs(folder, args.images)
        subsets = (SubsetSpec(image_dir=str(folder)),)
        spec = DatasetSpec(source="bench", kind=Kind.DREAMBOOTH, subsets=subsets, resolution=512, enable_bucket=True)
        data = TrainingData([spec], seed=1)

        def encode(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            mean = torch.nn.functional.avg_pool2d(images, 8)
            return mean, torch.zeros_like(mean)

        seconds: dict[str, list[float]] = {}
        every = ways(data, encode, folder)
        for _ in range(args.rounds):
            for way, run in every.items():
                remove_caches(folder)
                start = time.perf_counter()
                run()
                seconds.setdefault(way, []).append(time.perf_counter() - start)
            start = time.perf_counter()  # the files of the last way are there
            data.latents.clear()
            every["--cache_latents_to_disk"]()
            seconds.setdefault("the same again, all files fit", []).append(time.perf_counter() - start)
    print(f"{args.images} images, {args.rounds} rounds; {platform.machine()}, {os.cpu_count()} cores\n")
    print("| way | images per second | x plain loop |\n|---|---|---|")
    for way, times in seconds.items():
        ratio = statistics.median(one / other for one, other in zip(seconds["plain loop"], times))
        print(f"| {way} | {args.images / statistics.median(times):.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
