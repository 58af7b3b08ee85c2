"""Where other programs look for things: old name -> the module that has it now. Nothing is defined here."""

from __future__ import annotations

from library.old_names import lookup

OLD = "library.old_signatures"
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
    "verify_training_args": ("library.args", "check_combinations"),
    "prepare_dataset_args": OLD,
    "get_sanitized_config_or_none": ("library.settings", "logged_options"),
    # optimizer and schedule
    "get_optimizer": "library.optimizers",
    "get_optimizer_train_eval_fn": "library.optimizers",
    "is_schedulefree_optimizer": "library.optimizers",
    "get_scheduler_fix": "library.schedulers",
    "get_dummy_scheduler": "library.schedulers",
    "append_lr_to_logs": OLD,
    "append_lr_to_logs_with_names": OLD,
    # set-up
    "prepare_accelerator": OLD,
    "prepare_dtype": OLD,
    "init_trackers": OLD,
    "patch_accelerator_for_fp16_training": ("library.accelerator", "allow_half_gradients"),
    "load_target_model": OLD,
    "replace_unet_modules": OLD,
    "enable_high_vram": OLD,
    "HIGH_VRAM": OLD,
    # data
    "BucketManager": "library.buckets",
    "load_image": "library.images",
    "glob_images": OLD,
    "MinimalDataset": "library.user_dataset",
    "load_arbitrary_dataset": "library.user_dataset",
    "IMAGE_EXTENSIONS": OLD,
    # noise and loss
    "get_noise_noisy_latents_and_timesteps": OLD,
    "get_timesteps": OLD,
    "get_huber_threshold_if_needed": OLD,
    "conditional_loss": OLD,
    "LossRecorder": OLD,
    # names of files
    "get_epoch_ckpt_name": OLD,
    "get_step_ckpt_name": OLD,
    "get_last_ckpt_name": OLD,
    "get_remove_epoch_no": OLD,
    "get_remove_step_no": OLD,
    # metadata
    "precalculate_safetensors_hashes": "library.metadata",
    "model_hash": OLD,
    "calculate_sha256": OLD,
    "load_metadata_from_safetensors": OLD,
    "build_minimum_network_metadata": OLD,
    "get_sai_model_spec": OLD,
    "get_git_revision_hash": ("library.metadata", "revision"),
    "SS_METADATA_MINIMUM_KEYS": ("library.metadata", "MINIMUM_KEYS"),
    "SS_METADATA_KEY_V2": OLD,
    "SS_METADATA_KEY_BASE_MODEL_VERSION": OLD,
    "SS_METADATA_KEY_NETWORK_MODULE": OLD,
    "SS_METADATA_KEY_NETWORK_DIM": OLD,
    "SS_METADATA_KEY_NETWORK_ALPHA": OLD,
    "SS_METADATA_KEY_NETWORK_ARGS": OLD,
    # previews
    "load_prompts": OLD,
    "line_to_prompt_dict": OLD,
}
DATA = "library.config_util reads data set files, library.dataset.TrainingData makes the batches"
STATE = "library.output and library.state write and read states"
GONE = {
    **dict.fromkeys(
        (
            *("DatasetGroup", "DreamBoothDataset", "FineTuningDataset", "ControlNetDataset"),
            *("DreamBoothSubset", "FineTuningSubset", "ControlNetSubset", "ImageInfo", "collator_class"),
            *("debug_dataset", "split_train_val", "trim_and_resize_if_required"),
        ),
        DATA,
    ),
    **dict.fromkeys(
        (
            *("save_and_remove_state_on_epoch_end", "save_and_remove_state_stepwise", "save_state_on_train_end"),
            "resume_from_local_or_hf_if_specified",
        ),
        STATE,
    ),
    **dict.fromkeys(
        ("save_sd_model_on_epoch_end_or_stepwise_common", "save_sd_model_on_train_end_common"),
        "library.checkpoint.save_single_file writes a whole model",
    ),
    "sample_images": "library.sampling.generate_samples draws previews",
    "sample_images_common": "library.sampling.generate_samples draws previews",
}

__getattr__, __dir__ = lookup(__name__, NAMES, GONE)
