"""The data of a run as its options describe it: of data set files and folders, or of a class of the user's own."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from library.config_util import DatasetSpec, load_dataset_specs, parse_resolution
from library.dataset import TrainingData, dataset_metadata
from library.user_dataset import UserData, load_user_dataset

log = logging.getLogger(__name__)


def find_data(args: Namespace, seed: int, bucket_divisor: int) -> tuple[Any, TrainingData | None]:
    """Give what is trained on and what is validated with, None without a part for it.

    Args:
        seed: of every random choice. bucket_divisor: as for :class:`library.dataset.TrainingData`.

    Raises:
        OptionError: a mistake in the options, or images that cannot be read.
    """
    if args.dataset_class:
        resolution = parse_resolution(args.resolution)
        made = load_user_dataset(args.dataset_class, args.max_token_length, resolution, args.debug_dataset)
        return UserData(made, args.dataset_class, seed), None
    specs = load_dataset_specs(args)
    data = TrainingData(specs, seed=seed, bucket_divisor=bucket_divisor)
    return data, _validation_data(args, specs, seed, bucket_divisor)


def described_data(
    args: Namespace, data: Any, validation: TrainingData | None, batches_per_step: int
) -> dict[str, str]:
    """Give the ``ss_`` entries of a LoRA file that describe the data; ``batches_per_step`` over all processes."""
    if isinstance(data, UserData):
        return data.metadata()
    return dataset_metadata(data, validation, bool(args.dataset_config), batches_per_step)


def _validation_data(
    args: Namespace, specs: Sequence[DatasetSpec], seed: int, bucket_divisor: int
) -> TrainingData | None:
    data = None
    if any(spec.validation_split for spec in specs):
        data = TrainingData(specs, seed=seed, bucket_divisor=bucket_divisor, validation=True)
    if data is not None and not len(data):
        log.warning("--validation_split: the part is too small for one image, there is no validation")
        data = None
    if data is None and (args.validate_every_n_steps or args.validate_every_n_epochs):
        log.warning("there are no images to validate with. Example: --validation_split 0.1")
    return data
