"""Old names of loss weights and noise functions -> the module that has them now. Nothing is defined here."""

from __future__ import annotations

from library.old_names import lookup

OLD = "library.old_signatures"
NAMES: dict[str, str | tuple[str, str]] = {
    "add_custom_train_arguments": "library.args",
    "prepare_scheduler_for_custom_training": OLD,
    "fix_noise_scheduler_betas_for_zero_terminal_snr": OLD,
    "apply_snr_weight": OLD,
    "scale_v_prediction_loss_like_noise_prediction": OLD,
    "add_v_prediction_like_loss": OLD,
    "apply_debiased_estimation": OLD,
    "apply_masked_loss": OLD,
    "apply_noise_offset": OLD,
    "pyramid_noise_like": OLD,
}

__getattr__, __dir__ = lookup(__name__, NAMES)
