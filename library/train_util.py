"""Where other programs look for things: old name -> the module that has it now. Nothing is defined here."""

from __future__ import annotations

import importlib
from typing import Any

# old name: module, or (module, name there)
NAMES: dict[str, str | tuple[str, str]] = {
    # options
    "add_sd_models_arguments": "library.args",
    "add_training_arguments": "library.args",
    "add_dataset_arguments": "library.args",
    "add_masked_loss_arguments": "library.args",
    "add_sd_saving_arguments": "library.args",
    "add_optimizer_arguments": "library.args",
    "read_config_from_file": "library.config_file",
    "verify_command_line_training_args": "library.args",
    # optimizer and schedule
    "get_optimizer": "library.optimizers",
    "get_optimizer_train_eval_fn": "library.optimizers",
    "is_schedulefree_optimizer": "library.optimizers",
    "get_scheduler_fix": "library.schedulers",
    "get_dummy_scheduler": "library.schedulers",
    # data
    "BucketManager": "library.buckets",
    "load_image": "library.images",
    # files
    "precalculate_safetensors_hashes": "library.metadata",
    "get_git_revision_hash": ("library.metadata", "revision"),
    "SS_METADATA_MINIMUM_KEYS": ("library.metadata", "MINIMUM_KEYS"),
}


def __getattr__(name: str) -> Any:
    try:
        entry = NAMES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    module, real_name = entry if isinstance(entry, tuple) else (entry, name)
    return getattr(importlib.import_module(module), real_name)


def __dir__() -> list[str]:
    return sorted(NAMES)
