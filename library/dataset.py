"""Ready batches: which images, which captions, which crops, as a function of seed, epoch and place alone."""

from __future__ import annotations

import json
import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from library import buckets, images
from library.buckets import BucketManager, Placement, Size
from library.captions import CaptionOptions, decode_utf8, find_caption_file, process_caption, read_caption
from library.config_util import DatasetSpec, Kind, SubsetSpec, list_images
from library.errors import ErrorCollector, OptionError
from library.files import write_text
from library.latent_cache import CachedLatents, CacheRequest, Pixels, load_cached
from library.signals import leave_signals_to_the_run
from library.text_cache import TextOutputs, TextRequest, load_text_outputs

log = logging.getLogger(__name__)

SINGLE_DATASET_OPTIONS = ("color_aug", "flip_aug", "random_crop", "shuffle_caption", "keep_tokens")
SUBSET_METADATA = (
    "num_repeats",
    *SINGLE_DATASET_OPTIONS,
    "keep_tokens_separator",
    "secondary_separator",
    "enable_wildcard",
    "caption_prefix",
    "caption_suffix",
    "resize_interpolation",
)
MASK_RATIO_TOLERANCE = 0.02  # a mask drawn on a smaller copy may be a pixel off
# options that make a caption another one at every draw
RANDOM_CAPTIONS = (
    "caption_dropout_rate",
    "caption_dropout_every_n_epochs",
    "caption_tag_dropout_rate",
    "shuffle_caption",
    "token_warmup_step",
    "enable_wildcard",
)
COMMON_CAPTION_EXTENSIONS = (".txt", ".caption", ".cap", ".tags")


class BatchKey(NamedTuple):
    """Address of a batch.

    Attributes:
        epoch: from 1. step: optimizer steps done when it is used. index: which batch of the epoch, from 0.
    """

    epoch: int
    step: int
    index: int  # type: ignore[assignment]  # a place in the epoch, in tuple a method nobody needs here


@dataclass(frozen=True)
class ImageItem:
    """One image of a subset.

    Attributes:
        path: of the file. key: folder name and file name. size: upright (width, height).
        caption: raw text; several lines when one is chosen at each draw. subset: its options.
        mask: image whose red channel says how much each place counts, None without one.
    """

    path: Path
    key: str
    size: Size
    caption: str
    subset: SubsetSpec
    mask: Path | None = None


@dataclass(frozen=True)
class PlacedImage:
    """An image that is trained on: where it goes and how often."""

    item: ImageItem
    repeats: int
    placement: Placement


# ------------------------------------------------------------------------------------------------- finding images


def _read_dreambooth(subset: SubsetSpec) -> list[ImageItem]:
    folder = Path(subset.image_dir or "")
    known = _read_info(folder) if subset.cache_info else None
    if known is None:
        paths = list_images(folder)
        known = list(zip(paths, images.read_sizes(paths), _read_captions(subset, folder, paths)))
        if subset.cache_info:
            _write_info(folder, known)
    return [ImageItem(path, f"{folder.name}/{path.name}", size, caption, subset) for path, size, caption in known]


FolderInfo = list[tuple[Path, Size, str]]  # path, upright size and raw caption of every image
INFO_FILE = "metadata_cache.json"


def _read_info(folder: Path) -> FolderInfo | None:
    """Read what ``cache_info`` remembers of a folder, None when there is nothing yet."""
    file = folder / INFO_FILE
    if not file.is_file():
        return None
    try:
        content = json.loads(decode_utf8(file.read_bytes(), str(file)))
        known = [
            (folder / Path(name).name, (int(of["resolution"][0]), int(of["resolution"][1])), str(of["caption"]))
            for name, of in content.items()
        ]
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"{file}: cache_info cannot read it ({error}). Remove the file, it is made anew") from None
    gone = [path.name for path, _, _ in known if not path.is_file()]
    if gone:
        raise OptionError(
            f"{file}: {len(gone)} images in it are not there any more, as {gone[0]}. Remove the file, it is made anew"
        )
    log.info("%s: %d images as %s says; the folder was not looked through", folder, len(known), INFO_FILE)
    return sorted(known)


def _write_info(folder: Path, known: FolderInfo) -> None:
    content = {str(path): {"caption": caption, "resolution": list(size)} for path, size, caption in known}
    try:
        write_text(folder / INFO_FILE, json.dumps(content, ensure_ascii=False, indent=2))
    except OSError as error:
        log.warning("%s: cache_info cannot be written (%s)", folder, error.strerror or error)


def _read_with_masks(subset: SubsetSpec) -> list[ImageItem]:
    items = _read_dreambooth(subset)
    folder = Path(subset.conditioning_data_dir or "")
    masks = {path.stem: path for path in list_images(folder)}
    missing = [item.path.name for item in items if item.path.stem not in masks]
    surplus = [path.name for stem, path in masks.items() if stem not in {item.path.stem for item in items}]
    for names, problem in ((missing, "images without a mask of the same name"), (surplus, "masks without an image")):
        if names:
            raise OptionError(
                f"conditioning_data_dir {folder}: {len(names)} {problem}: {', '.join(names[:5])}. "
                f"Give every image in {subset.image_dir} exactly one mask"
            )
    paired = [replace(item, mask=masks[item.path.stem]) for item in items]
    for item, mask_size in zip(paired, images.read_sizes([item.mask for item in paired if item.mask])):
        _check_mask_size(item, mask_size)
    return paired


def _check_mask_size(item: ImageItem, mask_size: Size) -> None:
    ratio, mask_ratio = item.size[0] / item.size[1], mask_size[0] / mask_size[1]
    if abs(mask_ratio / ratio - 1) > MASK_RATIO_TOLERANCE:
        raise OptionError(
            f"{item.mask}: a mask of {mask_size[0]}x{mask_size[1]} does not fit the image of "
            f"{item.size[0]}x{item.size[1]}. Save it in the size of the image"
        )


def _read_captions(subset: SubsetSpec, folder: Path, paths: Sequence[Path]) -> list[str]:
    captions, without, empty, odd = [], [], 0, 0
    for path in paths:
        file = find_caption_file(path, subset.caption_extension)
        if file is None:
            without.append(path)
            captions.append(subset.class_tokens or "")
            continue
        text, odd_characters = read_caption(file, all_lines=subset.enable_wildcard)
        captions.append(text)
        empty += not text
        odd += odd_characters
    if without:
        _warn_without_captions(subset, folder, without)
    if empty:
        log.warning("%s: %d of %d captions are empty", folder, empty, len(paths))
    if odd:
        log.warning("%s: %d invisible characters or foreign commas in the captions", folder, odd)
    return captions


def _warn_without_captions(subset: SubsetSpec, folder: Path, without: Sequence[Path]) -> None:
    instead = f"{subset.class_tokens!r}" if subset.class_tokens else "an empty caption"
    names = ", ".join(path.name for path in without[:5]) + (", ..." if len(without) > 5 else "")
    log.warning(
        "%s: %d images have no %s file and get %s: %s", folder, len(without), subset.caption_extension, instead, names
    )
    for extension in COMMON_CAPTION_EXTENSIONS:
        covered = sum(find_caption_file(path, extension) is not None for path in without)
        if covered and extension != subset.caption_extension:
            log.warning(
                "%s: %d of them have a %s file. Use --caption_extension %s", folder, covered, extension, extension
            )


def _read_metadata(subset: SubsetSpec) -> list[ImageItem]:
    path = Path(subset.metadata_file or "")
    entries = _metadata_entries(path)
    paths = [_image_of_entry(path, key, subset.image_dir) for key, _ in entries]
    captions = [
        _joined_caption(str(entry.get("caption") or ""), str(entry.get("tags") or ""), subset) for _, entry in entries
    ]
    return [
        ImageItem(image, f"{path.stem}/{image.name}", size, caption, subset)
        for image, size, caption in zip(paths, images.read_sizes(paths), captions)
    ]


def _image_of_entry(metadata: Path, key: str, image_dir: str | None) -> Path:
    image = Path(key)
    if not image.is_absolute():
        if not image_dir:
            raise OptionError(f"{metadata}: {key!r} is a relative path. Add image_dir (--train_data_dir) to the subset")
        image = Path(image_dir) / key
    if not image.is_file():
        raise OptionError(f"{metadata}: image {image} does not exist. Remove the entry or correct image_dir")
    return image


def _metadata_entries(path: Path) -> list[tuple[str, dict[str, Any]]]:
    text = decode_utf8(path.read_bytes(), str(path))
    try:
        if path.name.endswith(".jsonl"):
            entries = [json.loads(line) for line in text.splitlines() if line.strip()]
            return [(entry["image_path"], dict(entry)) for entry in entries]
        return [(key, dict(entry)) for key, entry in json.loads(text).items()]
    except (KeyError, AttributeError, TypeError, ValueError, RecursionError) as error:
        raise OptionError(
            f"{path}: no metadata as expected ({error}). "
            f'Example: {{"picture.png": {{"caption": "a cat", "tags": "cat, indoors"}}}}'
        ) from None


def _joined_caption(caption: str, tags: str, subset: SubsetSpec) -> str:
    separator = subset.caption_separator
    if not subset.enable_wildcard:
        return caption + (separator if caption and tags else "") + tags
    tags = tags.replace("\n", separator)
    lines = [line.strip() for line in caption.split("\n") if line.strip()]
    return "\n".join(line + separator + tags for line in lines) if lines and tags else "\n".join(lines) or tags


READERS: dict[Kind, Callable[[SubsetSpec], list[ImageItem]]] = {
    Kind.DREAMBOOTH: _read_dreambooth,
    Kind.FINE_TUNING: _read_metadata,
    Kind.MASK: _read_with_masks,
}


def split_items(items: Sequence[Any], is_training: bool, share: float, seed: Any) -> list[Any]:
    """Give the training or the validation part of a list, shuffled by ``seed``; ``share`` is what validation gets."""
    shuffled = list(items)
    random.Random(seed).shuffle(shuffled)
    first_of_validation = len(shuffled) - round(len(shuffled) * share)
    return shuffled[:first_of_validation] if is_training else shuffled[first_of_validation:]


def _repeats_of(items: Sequence[ImageItem]) -> list[int]:
    """Say how often each image is used; regularization images fill up to the number of training images."""
    repeats = [0 if item.subset.is_reg else item.subset.num_repeats for item in items]
    wanted = sum(repeats)
    registered = 0
    reg = [place for place, item in enumerate(items) if item.subset.is_reg]
    first_pass = True
    while reg and registered < wanted:
        for place in reg:
            added = items[place].subset.num_repeats if first_pass else 1
            repeats[place] += added
            registered += added
            if registered >= wanted:
                break
        first_pass = False
    unused = sum(repeats[place] == 0 for place in reg)
    if unused:
        log.warning("%d of %d regularization images are not used: there are not enough others", unused, len(reg))
    return repeats


# ---------------------------------------------------------------------------------------------------- one data set


class _Part:
    """The images of one data set in their buckets, cut into batches."""

    def __init__(self, spec: DatasetSpec, divisor: int, validation: bool, split_seed: int):
        self.spec = spec
        self.is_validation = validation
        self.items_by_subset = self._find(validation, split_seed)
        items = [item for found in self.items_by_subset for item in found]
        repeats = [1] * len(items) if validation else _repeats_of(items)
        place = self._placer(divisor)
        errors = ErrorCollector()
        self.placed: list[PlacedImage] = []
        for item, count in zip(items, repeats):
            if count:
                with errors.check():
                    self.placed.append(PlacedImage(item, count, place(item)))
        errors.raise_if_any()
        by_size: dict[Size, list[int]] = {}
        for index, placed in enumerate(self.placed):
            by_size.setdefault(placed.placement.bucket, []).extend([index] * placed.repeats)
        self.buckets = sorted(by_size.items())
        size = spec.batch_size
        self.batches = [
            (bucket, start)
            for bucket, (_, content) in enumerate(self.buckets)
            for start in range(0, len(content), size)
        ]

    def subsets(self) -> list[tuple[SubsetSpec, list[ImageItem]]]:
        """Give the subsets that have images, with them."""
        return [(subset, items) for subset, items in zip(self.spec.subsets, self.items_by_subset) if items]

    def _find(self, validation: bool, split_seed: int) -> list[list[ImageItem]]:
        spec = self.spec
        share = spec.validation_split
        if not 0 <= share <= 1:
            log.warning("%s: validation_split %s is outside 0 to 1: no validation set", spec.source, share)
            share = 0.0
        seed = split_seed if spec.validation_seed is None else spec.validation_seed
        found = []
        for subset in spec.subsets:
            items: list[ImageItem] = []
            if subset.num_repeats >= 1 and not (validation and (subset.is_reg or share == 0)):
                items = READERS[spec.kind](subset)
                if not items:
                    log.warning("%s: no images in %s", spec.source, subset.metadata_file or subset.image_dir)
                if spec.kind is Kind.DREAMBOOTH and share > 0 and not subset.is_reg:
                    part = {item.path for item in split_items(items, not validation, share, seed)}
                    items = [item for item in items if item.path in part]  # as if the others were not in the folder
            found.append(items)
        return found

    def _placer(self, divisor: int) -> Callable[[ImageItem], Placement]:
        spec = self.spec
        if not spec.enable_bucket:
            _check_plain_resolution(spec)
            return lambda item: Placement(spec.resolution, _plain_size(item, spec.resolution), 0.0)
        limits = (spec.min_bucket_reso, spec.max_bucket_reso)
        buckets.check_bucket_limits(spec.resolution, *limits, spec.bucket_reso_steps, divisor, spec.source)
        limits = buckets.whole_steps(*limits, spec.bucket_reso_steps)
        manager = BucketManager(spec.bucket_no_upscale, spec.resolution, *limits, spec.bucket_reso_steps)
        if not spec.bucket_no_upscale:
            manager.make_buckets()

        def place(item: ImageItem) -> Placement:
            try:
                placement = manager.select_bucket(*item.size)
            except OptionError as error:
                raise OptionError(f"{item.path}: {error}") from None
            _check_resized(item, placement)
            return placement

        return place


def _check_plain_resolution(spec: DatasetSpec) -> None:
    if any(side % 8 for side in spec.resolution):
        width, height = (max(8, round(side / 8) * 8) for side in spec.resolution)
        raise OptionError(
            f"{spec.source}: resolution {spec.resolution[0]}x{spec.resolution[1]} is no multiple of 8. "
            f"Example: --resolution {width},{height}, or turn on --enable_bucket"
        )


def _plain_size(item: ImageItem, resolution: Size) -> Size:
    """Give the size to resize to without buckets: a random crop is taken from an image as it is, when large enough."""
    if item.subset.random_crop and item.size[0] >= resolution[0] and item.size[1] >= resolution[1]:
        return item.size
    return buckets.covering_size(item.size, resolution)


def _check_resized(item: ImageItem, placement: Placement) -> None:
    if placement.resized[0] * placement.resized[1] > images.MAX_PIXELS:
        raise OptionError(
            f"{item.path}: {item.size[0]}x{item.size[1]} is too narrow: it would be enlarged to "
            f"{placement.resized[0]}x{placement.resized[1]}. Crop or remove it"
        )


# -------------------------------------------------------------------------------------------------------- batches


def _chance(*what: Any) -> random.Random:
    """Give a generator that depends on ``what`` alone, the same in every process and Python version."""
    return random.Random("|".join(map(str, what)))


class TrainingData(Dataset):
    """Batches of one or more data sets.

    Nothing that a batch contains depends on which worker makes it, on what was made before, or on how a run was
    interrupted. After construction set ``max_train_steps``, which token warm-up given as a share refers to.

    Args:
        specs: what to train on. seed: of every random choice.
        bucket_divisor: bucket_reso_steps must be a multiple of it (64, for SDXL 32).
        validation: give the validation images instead of the training images.
        tokenize: turns the captions of a batch into one tensor (B, n, 77) per text encoder; None leaves them as text.

    Raises:
        OptionError: options that contradict each other, or images that cannot be read.
    """

    def __init__(
        self,
        specs: Sequence[DatasetSpec],
        *,
        seed: int,
        bucket_divisor: int = 64,
        validation: bool = False,
        tokenize: Callable[[list[str]], list[Tensor]] | None = None,
    ):
        self.specs = list(specs)
        self.seed = seed
        self.validation = validation
        self.tokenize = tokenize
        self.max_train_steps = 0
        self.latents: dict[int, CachedLatents | Path] = {}
        self.text_outputs: dict[int, TextOutputs | Path] = {}
        self.text_names: Sequence[str] = ()
        errors = ErrorCollector()
        self.parts: list[_Part] = []
        for spec in specs:
            with errors.check():
                self.parts.append(_Part(spec, bucket_divisor, validation, seed))
        errors.raise_if_any()
        self._index_images()
        self._order_of_bucket: dict[tuple[int, int], tuple[int, list[int]]] = {}
        self._log_summary()
        if not len(self) and not validation:
            raise OptionError(f"{self.specs[0].source}: no training images found. Add images to the folders it names")

    def _log_summary(self) -> None:
        for part in self.parts:
            used = sum(placed.repeats for placed in part.placed)
            short = sum(len(content) % part.spec.batch_size > 0 for _, content in part.buckets)
            log.info(
                "%s: %d %s images, %d with repeats, %d buckets, %d batches of %d, of which %d are smaller",
                part.spec.source,
                len(part.placed),
                "validation" if self.validation else "training",
                used,
                len(part.buckets),
                len(part.batches),
                part.spec.batch_size,
                short,
            )

    def _index_images(self) -> None:
        self.placed = [placed for part in self.parts for placed in part.placed]
        sizes = [len(part.placed) for part in self.parts]
        self._first_image = [sum(sizes[:place]) for place in range(len(sizes))]
        self._batches = [
            (number, bucket, start) for number, part in enumerate(self.parts) for bucket, start in part.batches
        ]

    # -- order

    def __len__(self) -> int:
        """Give the number of batches in an epoch, over all processes."""
        return len(self._batches)

    def batch_order(self, epoch: int) -> list[int]:
        """Give the batch indices of an epoch in the order of use."""
        order = list(range(len(self)))
        _chance(self.seed, epoch, "batches").shuffle(order)
        return order

    def _images_of_batch(self, epoch: int, index: int) -> tuple[_Part, list[int]]:
        number, bucket, start = self._batches[index]
        part = self.parts[number]
        known_epoch, order = self._order_of_bucket.get((number, bucket), (0, []))
        if known_epoch != epoch:
            order = list(part.buckets[bucket][1])  # workers keep no epoch but the one they are at
            _chance(self.seed, epoch, "bucket", number, bucket).shuffle(order)
            self._order_of_bucket[number, bucket] = (epoch, order)
        first = self._first_image[number]
        return part, [first + place for place in order[start : start + part.spec.batch_size]]

    # -- content

    def __getitem__(self, key: BatchKey) -> dict[str, Any]:
        """Make the batch at ``key``; see section 16 of the data interface for its content.

        ``images`` is None when latents are cached, ``input_ids_list`` without ``tokenize``; ``image_keys`` names the
        images.
        """
        part, chosen = self._images_of_batch(key.epoch, key.index)
        drawn = [self._draw(key, position, image) for position, image in enumerate(chosen)]
        captions = [sample["caption"] for sample in drawn]
        masks = _stacked_masks([sample["mask"] for sample in drawn])
        by_image = part.spec.kind is Kind.MASK
        return {
            "images": _stacked([sample["image"] for sample in drawn]),
            "latents": _stacked([sample["latents"] for sample in drawn]),
            "captions": captions,
            "input_ids_list": self.tokenize(captions) if self.tokenize and not self.text_outputs else None,
            "text_encoder_outputs_list": self._text_outputs(chosen),
            "loss_weights": torch.tensor([sample["loss_weight"] for sample in drawn], dtype=torch.float32),
            "alpha_masks": None if by_image else masks,
            "conditioning_images": _as_image(masks) if by_image and masks is not None else None,
            "original_sizes_hw": torch.tensor([sample["original_size"] for sample in drawn]),
            "crop_top_lefts": torch.tensor([sample["crop_top_left"] for sample in drawn]),
            "target_sizes_hw": torch.tensor([sample["target_size"] for sample in drawn]),
            "flippeds": [sample["flipped"] for sample in drawn],
            "network_multipliers": torch.full((len(drawn),), part.spec.network_multiplier),
            "custom_attributes": [self.placed[image].item.subset.custom_attributes for image in chosen],
            "image_keys": [self.placed[image].item.key for image in chosen],
        }

    def _draw(self, key: BatchKey, position: int, image: int) -> dict[str, Any]:
        placed = self.placed[image]
        item, subset, bucket = placed.item, placed.item.subset, placed.placement.bucket
        text_chance = _chance(self.seed, key.epoch, key.index, position, "caption")
        picture_chance = _chance(self.seed, key.epoch, key.index, position, "picture")
        flipped = subset.flip_aug and picture_chance.random() < 0.5
        left, top, right, _ = buckets.crop_conditioning(bucket, item.size)
        return {
            **self._picture(image, flipped, picture_chance),
            "caption": _caption(item, text_chance, key, self.max_train_steps),
            "flipped": flipped,
            "loss_weight": self._spec_of(image).prior_loss_weight if subset.is_reg else 1.0,
            "original_size": (item.size[1], item.size[0]),
            "crop_top_left": (int(top), int(bucket[0] - right if flipped else left)),
            "target_size": (bucket[1], bucket[0]),
        }

    def _text_outputs(self, chosen: Sequence[int]) -> list[Tensor] | None:
        if not self.text_outputs:
            return None
        cached = [load_text_outputs(self.text_outputs[image], self.text_names) for image in chosen]
        return [torch.stack(list(same)) for same in zip(*cached)]

    def _spec_of(self, image: int) -> DatasetSpec:
        number = max(place for place, first in enumerate(self._first_image) if first <= image)
        return self.parts[number].spec

    def _picture(self, image: int, flipped: bool, chance: random.Random) -> dict[str, Tensor | None]:
        subset = self.placed[image].item.subset
        if image in self.latents:
            cached = load_cached(self.latents[image], subset.flip_aug, _has_mask(self.placed[image].item))
            latents = cached.flipped if flipped else cached.latents
            return {"image": None, "latents": latents, "mask": _mirrored(cached.mask, flipped)}
        pixels = self._pixels(image, chance)
        return {
            "image": _mirrored(pixels.image, flipped),
            "latents": None,
            "mask": _mirrored(pixels.mask, flipped),
        }

    def _pixels(self, image: int, chance: random.Random | None) -> Pixels:
        """Read an image and bring it to its bucket size; without ``chance`` nothing about it is random."""
        placed = self.placed[image]
        subset = placed.item.subset
        array = images.load_image(placed.item.path, alpha=subset.alpha_mask and not placed.item.mask)
        if array.shape[1::-1] != placed.item.size:
            raise OptionError(
                f"{placed.item.path}: its header says {placed.item.size}, its pixels are {array.shape[1::-1]}. "
                f"The file is damaged or changed: replace it, or remove {INFO_FILE} beside it"
            )
        if placed.item.mask:
            mask = images.resize(images.load_image(placed.item.mask), placed.item.size, subset.resize_interpolation)
            array = np.dstack([array, mask[..., 0]])  # it goes through every step with the image, as alpha does
        array = _framed(array, placed, self._spec_of(image), chance)
        if subset.color_aug and chance is not None:
            array = images.change_colors(array, chance)
        return Pixels(images.to_tensor(array), images.alpha_of(array) if _has_mask(placed.item) else None)

    # -- checks and caching

    def files(self) -> list[Path]:
        """Give every image and mask that is used."""
        return [file for placed in self.placed for file in (placed.item.path, placed.item.mask) if file]

    def check_cacheable(self) -> None:
        """Refuse options that change pixels at every draw, which latents made once cannot follow."""
        for name in ("color_aug", "random_crop", "face_crop_aug_range"):
            for placed in self.placed:
                if getattr(placed.item.subset, name):
                    raise OptionError(
                        f"--cache_latents cannot be used with {name} (set for {placed.item.subset.name}): "
                        f"turn off one of the two"
                    )

    def check_text_cacheable(self) -> None:
        """Refuse options that change captions at every draw, which outputs made once cannot follow."""
        for placed in self.placed:
            subset = placed.item.subset
            for name in RANDOM_CAPTIONS:
                if getattr(subset, name):
                    raise OptionError(
                        f"--cache_text_encoder_outputs cannot be used with {name} (set for {subset.name}): "
                        f"turn off one of the two"
                    )

    def text_requests(self) -> list[TextRequest]:
        """Describe every caption to :func:`library.text_cache.cache_text_outputs`, in the order of ``text_outputs``."""
        self.check_text_cacheable()
        return [
            TextRequest(placed.item.path, _caption(placed.item, random.Random(0), BatchKey(1, 0, 0), 0))
            for placed in self.placed
        ]

    def cache_requests(self) -> list[CacheRequest]:
        """Describe every image to :func:`library.latent_cache.cache_latents`, in the order of ``latents``."""
        self.check_cacheable()
        return [
            CacheRequest(
                name=placed.item.key,
                path=placed.item.path,
                original_size=placed.item.size,
                resized=placed.placement.resized,
                bucket=placed.placement.bucket,
                interpolation=placed.item.subset.resize_interpolation,
                crop_ltrb=buckets.crop_conditioning(placed.placement.bucket, placed.item.size),
                flip=placed.item.subset.flip_aug,
                mask=placed.item.mask,
                with_mask=_has_mask(placed.item),
            )
            for placed in self.placed
        ]

    def load_pixels(self, index: int) -> Pixels:
        """Read one image at its bucket size, with nothing random done to it."""
        return self._pixels(index, None)


def _framed(array: np.ndarray, placed: PlacedImage, spec: DatasetSpec, chance: random.Random | None) -> np.ndarray:
    """Bring an image to the size of its bucket."""
    subset, size = placed.item.subset, placed.placement.bucket
    face = images.face_of_name(placed.item.path) if subset.face_crop_aug_range and not spec.enable_bucket else None
    covers = placed.item.size[0] >= size[0] and placed.item.size[1] >= size[1]
    if face and covers and chance and subset.face_crop_aug_range:
        zoom, wander = subset.face_crop_aug_range, subset.random_crop
        return images.crop_around_face(array, face, size, zoom, wander, subset.resize_interpolation, chance)
    array = images.resize(array, placed.placement.resized, subset.resize_interpolation)
    return images.crop(array, size, chance if subset.random_crop else None)


def _has_mask(item: ImageItem) -> bool:
    return item.mask is not None or item.subset.alpha_mask


def _as_image(masks: Tensor) -> Tensor:
    """Give masks (B, H, W) in [0, 1] as grey images (B, 3, H, W) in [-1, 1]."""
    return (masks * 2 - 1)[:, None].expand(-1, 3, -1, -1)


def _caption_options(subset: SubsetSpec) -> CaptionOptions:
    return CaptionOptions(**{field.name: getattr(subset, field.name) for field in fields(CaptionOptions)})


def _caption(item: ImageItem, chance: random.Random, key: BatchKey, max_train_steps: int) -> str:
    options = _caption_options(item.subset)
    return process_caption(
        item.caption, options, chance, epoch=key.epoch, step=key.step, max_train_steps=max_train_steps
    )


def _mirrored(tensor: Tensor | None, flipped: bool) -> Tensor | None:
    return tensor.flip(-1) if flipped and tensor is not None else tensor


def _stacked(tensors: list[Tensor | None]) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    if present and len(present) != len(tensors):
        raise AssertionError(f"{len(present)} of {len(tensors)} images of a batch have latents")
    return torch.stack(present) if present else None


def _stacked_masks(masks: list[Tensor | None]) -> Tensor | None:
    present = [mask for mask in masks if mask is not None]
    if not present:
        return None
    return torch.stack([torch.ones_like(present[0]) if mask is None else mask for mask in masks])


def check_images(data: Iterable[TrainingData]) -> None:
    """Decode every image once.

    Raises:
        OptionError: one line that names all files that cannot be decoded.
    """
    images.check_images(dict.fromkeys(file for each in data for file in each.files()))


# --------------------------------------------------------------------------------------------------------- loader


def _as_it_is(batch: dict[str, Any]) -> dict[str, Any]:
    return batch


def batch_loader(data: TrainingData, keys: Iterable[BatchKey], workers: int) -> Iterator[dict[str, Any]]:
    """Make the batches at ``keys``, in that order.

    Args:
        data: where they come from. keys: their addresses.
        workers: processes that make them ahead; 0 makes each one when it is asked for. At most one per CPU core.
    """
    loader = DataLoader(
        data,
        batch_size=None,
        sampler=list(keys),  # type: ignore[arg-type]
        num_workers=min(workers, os.cpu_count() or 1),
        collate_fn=_as_it_is,  # type: ignore[arg-type]  # it gets one ready batch, as batch_size is None
        worker_init_fn=leave_signals_to_the_run,
        generator=torch.Generator(),  # the loader draws a number for its workers; not from the stream training uses
    )
    return iter(loader)


# ------------------------------------------------------------------------------------------------------- metadata


def tag_frequency(items: Iterable[ImageItem]) -> dict[str, int]:
    """Count the comma-separated tags of raw captions, in lower case."""
    tags = (tag.strip().lower() for item in items for tag in item.caption.split(","))
    return dict(Counter(tag for tag in tags if tag))


def dataset_metadata(
    data: TrainingData, validation: TrainingData | None, from_file: bool, batches_per_step: int
) -> dict[str, str]:
    """Give the ``ss_`` entries of a LoRA file that describe the data.

    Args:
        data, validation: what is trained on and validated with. from_file: the data sets come from a file.
        batches_per_step: batches of one optimizer step, over all processes.
    """
    counts = [_image_counts(part) for part in data.parts]
    entries = {
        "ss_num_train_images": sum(count[0] for count in counts),
        "ss_num_reg_images": sum(count[1] for count in counts),
        "ss_num_validation_images": sum(_image_counts(part)[0] for part in validation.parts) if validation else 0,
        "ss_tag_frequency": json.dumps(_first_of_each_folder(data.parts)),
    }
    if from_file:
        entries["ss_datasets"] = json.dumps([_described_dataset(part) for part in data.parts])
        entries["ss_dataset_dirs"] = json.dumps(_described_folders(data.parts, is_reg=False))
    else:
        entries |= _single_dataset_entries(data.parts[0], batches_per_step)
    return {key: str(value) for key, value in entries.items()}


def _image_counts(part: _Part) -> tuple[int, int]:
    """Count training and regularization images, repeats included."""
    counts = [0, 0]
    for subset, items in part.subsets():
        counts[subset.is_reg] += len(items) * (1 if part.is_validation else subset.num_repeats)
    return counts[0], counts[1]


def _tags_of_part(part: _Part) -> dict[str, dict[str, int]]:
    tags: dict[str, Counter[str]] = {}
    for subset, items in part.subsets():
        tags.setdefault(subset.name, Counter()).update(tag_frequency(items))
    return {name: dict(count) for name, count in tags.items()}


def _first_of_each_folder(parts: Sequence[_Part]) -> dict[str, dict[str, int]]:
    merged: dict[str, dict[str, int]] = {}
    for part in parts:
        for name, tags in _tags_of_part(part).items():
            merged.setdefault(name, tags)
    return merged


def _described_folders(parts: Sequence[_Part], is_reg: bool) -> dict[str, dict[str, int]]:
    described: dict[str, dict[str, int]] = {}
    for part in parts:
        for subset, items in part.subsets():
            if subset.is_reg is is_reg:
                described[_unused_name(subset.name, described)] = {
                    "n_repeats": subset.num_repeats,
                    "img_count": len(items),
                }
    return described


def _unused_name(name: str, used: Iterable[str]) -> str:
    used = set(used)
    numbered = (f"{name} ({number})" for number in range(2, len(used) + 3))
    return name if name not in used else next(candidate for candidate in numbered if candidate not in used)


def _bucket_info(part: _Part) -> dict[str, Any] | None:
    if not part.spec.enable_bucket:
        return None
    errors = [abs(placed.placement.ratio_error) for placed in part.placed]
    return {
        "buckets": {
            str(number): {"resolution": list(size), "count": len(content)}
            for number, (size, content) in enumerate(part.buckets)
        },
        "mean_img_ar_error": sum(errors) / len(errors) if errors else 0.0,
    }


def _single_dataset_entries(part: _Part, batches_per_step: int) -> dict[str, Any]:
    spec, subset = part.spec, part.spec.subsets[0]
    return {
        "ss_batch_size_per_device": spec.batch_size,
        "ss_total_batch_size": spec.batch_size * batches_per_step,
        "ss_resolution": spec.resolution,
        "ss_enable_bucket": spec.enable_bucket,
        "ss_bucket_no_upscale": spec.bucket_no_upscale,
        "ss_min_bucket_reso": spec.min_bucket_reso,
        "ss_max_bucket_reso": spec.max_bucket_reso,
        "ss_bucket_info": json.dumps(_bucket_info(part)),
        "ss_dataset_dirs": json.dumps(_described_folders([part], is_reg=False)),
        "ss_reg_dataset_dirs": json.dumps(_described_folders([part], is_reg=True)),
        **{f"ss_{name}": getattr(subset, name) for name in SINGLE_DATASET_OPTIONS},
    }


def _described_dataset(part: _Part) -> dict[str, Any]:
    spec, (train, reg) = part.spec, _image_counts(part)
    return {
        "is_dreambooth": spec.kind is Kind.DREAMBOOTH,
        "batch_size_per_device": spec.batch_size,
        "num_train_images": train,
        "num_reg_images": reg,
        "resolution": list(spec.resolution),
        "enable_bucket": spec.enable_bucket,
        "min_bucket_reso": spec.min_bucket_reso if spec.enable_bucket else None,
        "max_bucket_reso": spec.max_bucket_reso if spec.enable_bucket else None,
        "tag_frequency": _tags_of_part(part),
        "bucket_info": _bucket_info(part),
        "resize_interpolation": spec.resize_interpolation,
        "subsets": [_described_subset(part, subset, len(items)) for subset, items in part.subsets()],
    }


def _described_subset(part: _Part, subset: SubsetSpec, images_found: int) -> dict[str, Any]:
    described = {"img_count": images_found, **{name: getattr(subset, name) for name in SUBSET_METADATA}}
    described["image_dir"] = Path(subset.image_dir).name if subset.image_dir else None
    if part.spec.kind is Kind.FINE_TUNING:
        return {**described, "metadata_file": subset.name}
    return {**described, "class_tokens": subset.class_tokens, "is_reg": subset.is_reg}
