"""Old names around SDXL checkpoints -> the module that has them now. Nothing is defined here."""

from __future__ import annotations

from library.old_names import lookup

OLD = "library.old_signatures"
NAMES: dict[str, str | tuple[str, str]] = {
    "VAE_SCALE_FACTOR": OLD,
    "MODEL_VERSION_SDXL_BASE_V1_0": OLD,
    "load_models_from_sdxl_checkpoint": OLD,
    "make_unet_conversion_map": OLD,
    "convert_diffusers_unet_state_dict_to_sdxl": OLD,
    "convert_sdxl_unet_state_dict_to_diffusers": OLD,
}
SAVING = "library.checkpoint.save_single_file and save_folder write whole models"
GONE = {"save_stable_diffusion_checkpoint": SAVING, "save_diffusers_checkpoint": SAVING}

__getattr__, __dir__ = lookup(__name__, NAMES, GONE)
