"""Old names around Stable Diffusion checkpoints -> the module that has them now. Nothing is defined here."""

from __future__ import annotations

from library.old_names import lookup

OLD = "library.old_signatures"
NAMES: dict[str, str | tuple[str, str]] = {
    "is_safetensors": OLD,
    "load_models_from_stable_diffusion_checkpoint": OLD,
    "load_vae": OLD,
    "make_bucket_resolutions": OLD,
    "get_model_version_str_for_sd1_sd2": OLD,
}

__getattr__, __dir__ = lookup(__name__, NAMES)
