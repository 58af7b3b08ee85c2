"""Old names of SDXL training functions -> the module that has them now. Nothing is defined here."""

from __future__ import annotations

from library.old_names import lookup

OLD = "library.old_signatures"
NAMES: dict[str, str | tuple[str, str]] = {
    "add_sdxl_training_arguments": "library.args",
    "verify_sdxl_training_args": OLD,
    "load_target_model": (OLD, "load_sdxl_target_model"),
    "get_size_embeddings": OLD,
    "get_timestep_embedding": OLD,
}
SAVING = "library.checkpoint.save_single_file and save_folder write whole models"
GONE = {
    "save_sd_model_on_epoch_end_or_stepwise": SAVING,
    "save_sd_model_on_train_end": SAVING,
    "sample_images": "library.sampling.generate_samples draws previews",
}

__getattr__, __dir__ = lookup(__name__, NAMES, GONE)
