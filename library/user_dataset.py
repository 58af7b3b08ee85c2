"""``--dataset_class``: ready batches of a class of the user's own, in place of our data sets."""

from __future__ import annotations

import importlib
import inspect
import logging
import random
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from library.dataset import BatchKey
from library.errors import OptionError

log = logging.getLogger(__name__)

REQUIRED = ("captions",)


class MinimalDataset(Dataset):
    """What a class for ``--dataset_class`` may build on: ``len`` batches an epoch, ``[index]`` gives one.

    A batch is a dict with ``captions``, a list of B texts, and ``images`` (B, 3, H, W) in [-1, 1] or ``latents``
    (B, C, h, w) as the VAE gives them, not scaled. ``loss_weights`` (B,), ``alpha_masks`` (B, H, W) in [0, 1],
    ``conditioning_images`` (B, 3, H, W), ``original_sizes_hw``, ``crop_top_lefts``, ``target_sizes_hw`` (B, 2) int64,
    ``flippeds``, ``network_multipliers`` (B,), ``custom_attributes``, ``input_ids_list`` and ``image_keys`` may be
    there and are made up otherwise. ``set_current_epoch`` (from 1) and ``set_current_step`` are called before a batch
    is taken, where the class has them; a batch that is a function of them and of its index makes a run repeatable.

    Args:
        tokenizer: None. max_token_length: None, 150 or 225. resolution: (width, height) or None.
        debug_dataset: whether the run only shows the data.
    """

    def __init__(self, tokenizer: Any, max_token_length: int | None, resolution: Any, debug_dataset: bool = False):
        self.tokenizer, self.max_token_length = tokenizer, max_token_length
        self.resolution, self.debug_dataset = resolution, debug_dataset
        self.num_train_images = 0
        self.num_reg_images = 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError


def load_user_dataset(name: str, max_token_length: int | None, resolution: Any, debug: bool) -> Any:
    """Build the object that ``--dataset_class`` names.

    Args:
        name: ``package.module.Class``. resolution: (width, height), None without one.

    Raises:
        OptionError: it cannot be imported or built, or gives no batches.
    """
    module_name, _, class_name = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
        log.info("--dataset_class %s of %s", name, inspect.getsourcefile(found))
        made = found(None, max_token_length, resolution, debug)
        batches = len(made)
    except (ImportError, AttributeError, TypeError, ValueError, NotImplementedError, OSError) as error:
        raise OptionError(
            f"--dataset_class {name}: {type(error).__name__}: {str(error)[:150]}. Give package.module.Class of a class "
            f"with len() and [index], as library.user_dataset.MinimalDataset describes it"
        ) from error
    if not batches:
        raise OptionError(f"--dataset_class {name}: it has no batches. Its len() must be at least 1")
    return made


class UserData(Dataset):
    """The batches of a user's object, with what :class:`library.dataset.TrainingData` has for the trainer.

    Args:
        made: of :func:`load_user_dataset`. name: for messages. seed: of the order.
    """

    validation = False
    latents: dict[int, Any] = {}  # noqa: RUF012  # nothing is cached
    text_outputs: dict[int, Any] = {}  # noqa: RUF012
    parts: tuple[()] = ()
    specs: tuple[()] = ()

    def __init__(self, made: Any, name: str, seed: int):
        self.made, self.name, self.seed = made, name, seed
        self.tokenize: Callable[[list[str]], list[Tensor]] | None = None
        self.max_train_steps = 0

    def __len__(self) -> int:
        return len(self.made)

    def batch_order(self, epoch: int) -> list[int]:
        """Give the batch indices of an epoch in the order of use."""
        order = list(range(len(self)))
        random.Random(f"{self.seed}|{epoch}|batches").shuffle(order)
        return order

    def __getitem__(self, key: BatchKey) -> dict[str, Any]:
        for name, value in (("set_current_epoch", key.epoch), ("set_current_step", key.step)):
            if hasattr(self.made, name):
                getattr(self.made, name)(value)
        batch = dict(self.made[key.index])
        lacking = [name for name in REQUIRED if batch.get(name) is None]
        if lacking or (batch.get("images") is None and batch.get("latents") is None):
            raise OptionError(
                f"--dataset_class {self.name}: batch {key.index} has no {' and no '.join(lacking or ['images'])}. "
                f"A batch needs captions, and images or latents"
            )
        return self._complete(batch, key.index)

    def _complete(self, batch: dict[str, Any], index: int) -> dict[str, Any]:
        count = len(batch["captions"])
        pixels = batch.get("images")
        height, width = pixels.shape[-2:] if pixels is not None else (8 * side for side in batch["latents"].shape[-2:])
        sizes = torch.tensor([[height, width]] * count)
        made_up = {
            "images": None,
            "latents": None,
            "text_encoder_outputs_list": None,
            "input_ids_list": self.tokenize(batch["captions"]) if self.tokenize else None,
            "loss_weights": torch.ones(count),
            "alpha_masks": None,
            "conditioning_images": None,
            "original_sizes_hw": sizes,
            "crop_top_lefts": torch.zeros_like(sizes),
            "target_sizes_hw": sizes,
            "flippeds": [False] * count,
            "network_multipliers": torch.ones(count),
            "custom_attributes": [{} for _ in range(count)],
            "image_keys": [f"batch {index}, image {position}" for position in range(count)],
        }
        return {**made_up, **{name: value for name, value in batch.items() if value is not None}}

    def metadata(self) -> dict[str, str]:
        """Give the ``ss_`` entries of a LoRA file that describe the data."""
        counts = {name: str(getattr(self.made, name, 0)) for name in ("num_train_images", "num_reg_images")}
        described = {"num_validation_images": "0", "tag_frequency": "{}", "dataset_dirs": "{}", "datasets": "[]"}
        return {f"ss_{name}": value for name, value in {**counts, **described}.items()}

    def files(self) -> list[Path]:
        """Give no files: what the user's class reads is its own affair."""
        return []

    def check_cacheable(self) -> None:
        raise OptionError("--cache_latents cannot be used with --dataset_class. Leave it out, or give latents in it")

    def check_text_cacheable(self) -> None:
        raise OptionError("--cache_text_encoder_outputs cannot be used with --dataset_class. Leave it out")


def load_arbitrary_dataset(args: Namespace, tokenizer: Any = None) -> Any:
    """Build what ``--dataset_class`` names, as sd-scripts calls it; ``tokenizer`` is ignored."""
    return load_user_dataset(args.dataset_class, args.max_token_length, args.resolution, args.debug_dataset)
