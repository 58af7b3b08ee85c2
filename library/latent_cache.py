"""Latents computed once: in memory, or in a file beside each image that says what it was made from."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from library.array_files import DAMAGE, load_arrays, save_arrays
from library.errors import OptionError
from library.processes import Share

log = logging.getLogger(__name__)

FINGERPRINT_KEY = "made_from"
LOAD_THREADS = 8

Encode = Callable[[Tensor], tuple[Tensor, Tensor]]


class CachedLatents(NamedTuple):
    """Latents of one image, float32 on the CPU, not multiplied by the scale factor of the model.

    Attributes:
        latents: (C, h, w). flipped: the same of the mirrored image, None unless it is mirrored in training.
        mask: (H, W) in [0, 1], None unless it is trained with.
    """

    latents: Tensor
    flipped: Tensor | None
    mask: Tensor | None


class Pixels(NamedTuple):
    """An image at its bucket size: (3, H, W) float32 in [-1, 1], and its mask (H, W) in [0, 1] or None."""

    image: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class CacheRequest:
    """One image to encode and everything its latents depend on, apart from the VAE.

    Attributes:
        name: stands for the image in messages and decides its noise. path: of the image.
        original_size, resized, bucket: (width, height) before resizing, before and after cropping.
        interpolation: name of the resize filter. crop_ltrb: as the SDXL rule gives it.
        flip: the mirrored image is needed too. with_mask: a mask is needed too.
        mask: file the mask comes from, None for the transparency of the image itself.
    """

    name: str
    path: Path
    original_size: tuple[int, int]
    resized: tuple[int, int]
    bucket: tuple[int, int]
    interpolation: str | None
    crop_ltrb: tuple[float, float, float, float]
    flip: bool
    with_mask: bool
    mask: Path | None = None

    def fingerprint(self, vae: str) -> str:
        """Give one line of JSON that changes when the latents or the mask would."""
        made_from = {
            "vae": vae,
            "content": [_content_hash(path) for path in (self.path, self.mask) if path],
            "resized": self.resized,
            "bucket": self.bucket,
            "interpolation": self.interpolation,
            "mask": self.with_mask,  # transparent areas keep their hidden colours then
            "version": 1,
        }
        return json.dumps(made_from, sort_keys=True)


class Cacheable(Protocol):
    """What :func:`cache_latents` needs of a data set."""

    latents: dict[int, CachedLatents | Path]

    def cache_requests(self) -> list[CacheRequest]: ...

    def load_pixels(self, index: int) -> Pixels: ...


def cache_latents(
    data: Cacheable,
    encode: Encode,
    *,
    batch_size: int,
    to_disk: bool = False,
    vae: str = "",
    suffix: str = "_sd.npz",
    trust_files: bool = False,
    shown: bool = True,
    share: Share | None = None,
) -> None:
    """Encode every image of a data set and store the result in ``data.latents``.

    Noise of the posterior sample depends on the image alone, so the same image gives the same latents in every
    process, at every batch size, and when a run is resumed.

    Args:
        data: the images. encode: (B, 3, H, W) float32 in [-1, 1] to mean and standard deviation, each (B, C, h, w).
        batch_size: images per call of ``encode``; all of one size.
        to_disk: keep them in files beside the images, and use those of an earlier run that still fit.
        vae: stands for the weights and precision of the VAE; files made with another one are made anew.
        suffix: ends the file names; differs between kinds of models.
        trust_files: take files of other programs, which do not say what they were made from.
        shown: False hides the progress bar.
        share: of this process, where several write files for each other; without files everyone encodes everything.

    Raises:
        OptionError: an image cannot be read, or its latents are not finite.
    """
    from tqdm import tqdm

    requests = data.cache_requests()

    def encode_and_store(indices: Sequence[int], bar: Any) -> None:
        batches = _batches_of_one_size(requests, indices, batch_size)
        for batch, pixels in _loaded_ahead(batches, data.load_pixels):
            for index, cached in zip(batch, _encode_batch([requests[i] for i in batch], pixels, encode)):
                data.latents[index] = cached
                if to_disk:
                    data.latents[index] = _write(requests[index], cached, vae, suffix)
            bar.update(len(batch))

    with tqdm(total=len(requests), desc="caching latents", disable=not shown) as bar:
        missing = list(range(len(requests)))
        if to_disk:
            missing = _take_from_disk(data, requests, vae, suffix, trust_files)
            bar.update(len(requests) - len(missing))
            if share is not None:
                own = set(share.of(range(len(requests))))  # of all: what is missing changes while others write
                encode_and_store([index for index in missing if index in own], bar)
                share.wait()
                missing = _take_from_disk(data, requests, vae, suffix, trust_files)
        encode_and_store(missing, bar)


def load_cached(cached: CachedLatents | Path, flip: bool, with_mask: bool) -> CachedLatents:
    """Give cached latents, read from their file when they are kept there."""
    return _read(cached, flip, with_mask) if isinstance(cached, Path) else cached


# ------------------------------------------------------------------------------------------------------ encoding


def _batches_of_one_size(requests: Sequence[CacheRequest], indices: Iterable[int], size: int) -> list[list[int]]:
    by_bucket: dict[tuple[int, int], list[int]] = {}
    for index in indices:
        by_bucket.setdefault(requests[index].bucket, []).append(index)
    return [group[start : start + size] for group in by_bucket.values() for start in range(0, len(group), size)]


def _loaded_ahead(
    batches: Sequence[list[int]], load: Callable[[int], Pixels]
) -> Iterator[tuple[list[int], list[Pixels]]]:
    """Read images in threads while earlier ones are encoded, a bounded number at a time."""
    with ThreadPoolExecutor(min(LOAD_THREADS, os.cpu_count() or 1)) as pool:
        waiting: list[tuple[list[int], list[Future[Pixels]]]] = []
        try:
            for batch in batches:
                waiting.append((batch, [pool.submit(load, index) for index in batch]))
                if sum(len(futures) for _, futures in waiting) > LOAD_THREADS and len(waiting) > 1:
                    done, futures = waiting.pop(0)
                    yield done, [future.result() for future in futures]
            while waiting:
                done, futures = waiting.pop(0)
                yield done, [future.result() for future in futures]
        finally:
            for _, futures in waiting:
                for future in futures:
                    future.cancel()


def _encode_batch(requests: list[CacheRequest], pixels: list[Pixels], encode: Encode) -> list[CachedLatents]:
    images = torch.stack([pixel.image for pixel in pixels])
    latents = _sample(requests, images, encode, flipped=False)
    mirrored: list[Tensor | None] = [None] * len(requests)
    if any(request.flip for request in requests):
        mirrored = list(_sample(requests, images.flip(-1), encode, flipped=True))
    return [
        CachedLatents(plain, flipped if request.flip else None, pixel.mask)
        for request, plain, flipped, pixel in zip(requests, latents, mirrored, pixels)
    ]


def _sample(requests: list[CacheRequest], images: Tensor, encode: Encode, flipped: bool) -> Tensor:
    with torch.no_grad():
        mean, deviation = (part.float().cpu() for part in encode(images))
    noise = torch.stack([posterior_noise(request.name, flipped, mean.shape[1:]) for request in requests])
    latents = mean + deviation * noise
    for request, one in zip(requests, latents):
        if not torch.isfinite(one).all():
            raise OptionError(
                f"{request.path}: the VAE gave values that are not finite, most likely because it ran in half "
                f"precision; the image is not to blame. Add --no_half_vae"
            )
    return latents


def posterior_noise(name: str, flipped: bool, shape: Sequence[int]) -> Tensor:
    """Give the standard normal noise of an image's posterior sample, float32; a function of its name alone."""
    digest = hashlib.sha256(f"{name}|{'flipped' if flipped else 'plain'}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.randn(tuple(shape), generator=generator)


# ---------------------------------------------------------------------------------------------------------- files


def cache_path(image: Path, original_size: tuple[int, int], suffix: str) -> Path:
    """Give the file that holds an image's latents; an existing file of the plain name is used before all others."""
    plain = image.with_suffix(".npz")
    width, height = original_size
    return plain if plain.is_file() else image.with_name(f"{image.stem}_{width:04d}x{height:04d}{suffix}")


def _content_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _take_from_disk(
    data: Cacheable, requests: Sequence[CacheRequest], vae: str, suffix: str, trust_files: bool
) -> list[int]:
    """Take over the files that fit; give the indices of the images that must be encoded."""
    missing, stale = [], 0
    for index, request in enumerate(requests):
        path = cache_path(request.path, request.original_size, suffix)
        problem = _problem(path, request, vae, trust_files) if path.is_file() else ""
        if problem is None:
            data.latents[index] = path
            continue
        missing.append(index)
        if problem:
            stale += 1
            log.debug("%s is made anew: %s", path, problem)
    if stale:
        log.info("%d of %d latent files do not fit this run and are made anew", stale, len(requests))
    return missing


def _problem(path: Path, request: CacheRequest, vae: str, trust_files: bool) -> str | None:
    """Say why a file cannot be used, None when it can."""
    try:
        content = load_arrays(path)
    except DAMAGE as error:
        return f"damaged ({error})"
    needed = ["latents", *["latents_flipped"] * request.flip, *["alpha_mask"] * request.with_mask]
    lacking = [key for key in needed if key not in content]
    if lacking:
        return f"without {', '.join(lacking)}"
    shape = (request.bucket[1] // 8, request.bucket[0] // 8)
    if any(content[key].shape[-2:] != shape for key in needed[: 1 + request.flip]):
        return "of another size"
    if trust_files:
        return None
    if str(content.get(FINGERPRINT_KEY, "")) != request.fingerprint(vae):
        return "made from another image, VAE or option"
    return None


def _read(path: Path, flip: bool, with_mask: bool) -> CachedLatents:
    content = load_arrays(path)

    def tensor(key: str, wanted: bool) -> Tensor | None:
        return torch.from_numpy(content[key].astype(np.float32)) if wanted else None

    return CachedLatents(
        torch.from_numpy(content["latents"].astype(np.float32)),
        tensor("latents_flipped", flip),
        tensor("alpha_mask", with_mask),
    )


def _write(request: CacheRequest, cached: CachedLatents, vae: str, suffix: str) -> Path:
    path = cache_path(request.path, request.original_size, suffix)
    arrays = {
        "latents": cached.latents.numpy(),
        "original_size": np.array(request.original_size, dtype=np.int64),
        "crop_ltrb": np.array(request.crop_ltrb, dtype=np.float64),
        FINGERPRINT_KEY: np.array(request.fingerprint(vae)),
    }
    for key, tensor in (("latents_flipped", cached.flipped), ("alpha_mask", cached.mask)):
        if tensor is not None:
            arrays[key] = tensor.numpy()
    save_arrays(path, arrays, replaced=("latents_flipped", "alpha_mask"))
    return path
