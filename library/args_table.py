"""Every option, declared once: name, type, group, meaning, default; and which ones are refused here, and why."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any


def int_or_share(text: str) -> int | float:
    """Read a count of steps, or a share of all steps written below 1 or with a percent sign.

    Raises:
        ValueError: neither.
    """
    if text.endswith("%"):
        return float(text[:-1]) / 100.0
    number = float(text)
    return number if number < 1 else int(text)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


DYNAMO_BACKENDS = _names(
    "eager aot_eager inductor aot_ts_nvfuser nvprims_nvfuser cudagraphs ofi fx2trt onnxrt tensort ipex tvm"
)
SAMPLERS = _names(
    "ddim pndm lms euler euler_a heun dpm_2 dpm_2_a dpmsolver dpmsolver++ dpmsingle k_lms k_euler "
    "k_euler_a k_dpm_2 k_dpm_2_a"
)


@dataclass(frozen=True)
class Row:
    """One option. ``kind`` is bool for a switch; ``group`` names the function that adds it to a parser."""

    name: str
    kind: Any
    group: str
    help: str
    default: Any = None
    choices: tuple[Any, ...] | None = None
    nargs: str | None = None


NOT_YET = "it is not supported yet"
# option -> why it is refused when it asks for something; an option that is not here works
REFUSED: dict[str, str] = {
    "deepspeed": "DeepSpeed flattens parameters, which filters cannot follow (docs/distributed.md). Leave it out",
    "torch_compile": f"{NOT_YET}. Leave it out",
    "fp8_base": f"{NOT_YET}. Use --mixed_precision bf16",
    "fp8_base_unet": f"{NOT_YET}. Use --mixed_precision bf16",
    "cpu_offload_checkpointing": "the U-Net of Stable Diffusion cannot do it. Use --gradient_checkpointing alone",
    "conditioning_data_dir": "mask folders are given per subset. Write conditioning_data_dir into --dataset_config",
    "offload_optimizer_device": "it belongs to --deepspeed, which is refused. Leave it out",
    "offload_optimizer_nvme_path": "it belongs to --deepspeed, which is refused. Leave it out",
    "offload_param_device": "it belongs to --deepspeed, which is refused. Leave it out",
    "offload_param_nvme_path": "it belongs to --deepspeed, which is refused. Leave it out",
    "zero3_init_flag": "it belongs to --deepspeed, which is refused. Leave it out",
    "zero3_save_16bit_model": "it belongs to --deepspeed, which is refused. Leave it out",
    "fp16_master_weights_and_gradients": "it belongs to --deepspeed, which is refused. Leave it out",
}
# switches whose wish is met without them
ALWAYS: dict[str, str] = {
    "lowram": "weights are mapped from a .safetensors file and moved to the device part by part, with or without it",
    "highvram": "the device's cache is never emptied between batches, with or without it",
    "skip_until_initial_step": "batches already used are left out, with or without it",
    "console_log_simple": "log lines are plain, with or without it",
}
# options that mean something only beside another one; on their own they ask for nothing
DEPENDENT: dict[str, str] = {
    "dynamo_backend": "torch_compile",
    "zero_stage": "deepspeed",
    "wandb_run_name": "log_with wandb",
}

ROWS: tuple[Row, ...] = (
    # Model loading
    Row(
        "pretrained_model_name_or_path",
        str,
        "models",
        "Base model: a single checkpoint file, a Diffusers directory, or a hub id in the local cache.",
    ),
    Row("v2", bool, "models", "Base is SD 2.x (other text encoder and tokenizer; with SDXL scripts it aborts)."),
    Row(
        "v_parameterization",
        bool,
        "models",
        "The model predicts velocity; changes the target, the SNR weights and the sampler used for previews.",
    ),
    Row(
        "vae",
        str,
        "training",
        "Replacement VAE (checkpoint file, .bin, Diffusers directory or hub id), loaded in the mixed-precision dtype.",
    ),
    Row(
        "tokenizer_cache_dir",
        str,
        "models",
        "Folder where tokenizers are looked up; sub-folder = hub id with every slash turned into an underscore.",
    ),
    Row("lowram", bool, "training", "Load the weights straight onto the accelerator instead of main memory."),
    Row(
        "disable_mmap_load_safetensors",
        bool,
        "sdxl",
        "Read the whole safetensors file into memory rather than mapping it (SDXL scripts only).",
    ),
    Row("no_half_vae", bool, "training", "Keep the VAE in fp32 even under fp16/bf16 mixed precision."),
    Row(
        "clip_skip",
        int,
        "training",
        "Take the Nth text-encoder hidden layer counted from the end (SD1/2 only; ignored with a warning by SDXL).",
    ),
    Row(
        "max_token_length",
        int,
        "training",
        "Text length in tokens without start/end markers: unset (=75), 150 or 225.",
        choices=(None, 150, 225),
    ),
    # Dataset: where the data is
    Row(
        "train_data_dir",
        str,
        "dataset",
        "Parent of the N_name concept folders, or the image folder of --in_json. Ignored with --dataset_config.",
    ),
    Row("reg_data_dir", str, "dataset", "Parent folder of N_name folders holding regularization (class) images."),
    Row("dataset_config", Path, "config", "TOML or JSON dataset description; chosen by file suffix."),
    Row(
        "in_json",
        str,
        "dataset",
        "Metadata JSON/JSONL: selects the fine-tuning (caption metadata) way of building the dataset.",
    ),
    Row("dataset_class", str, "dataset", "package.module.Class of a user-written dataset replacing the built-in ones."),
    Row(
        "dataset_repeats",
        int,
        "dataset",
        "Default for num_repeats wherever no subset/dataset/general value is set; in practice for the --in_json way.",
        default=1,
    ),
    Row("conditioning_data_dir", str, "masked_loss", "Folder of mask images; give it in the dataset config."),
    Row(
        "debug_dataset",
        bool,
        "dataset",
        "Walk over the dataset printing what each batch holds, then leave without training.",
    ),
    Row(
        "cache_info",
        bool,
        "dataset",
        "Remember captions and sizes of a DreamBooth folder in metadata_cache.json inside it.",
    ),
    # Dataset: captions
    Row(
        "caption_extension",
        str,
        "dataset",
        "Suffix of caption files; default .caption (most users pass .txt); a missing leading dot is added.",
        default=".caption",
    ),
    Row("caption_extention", str, "dataset", "Old misspelling; when set it replaces caption_extension."),
    Row("caption_separator", str, "dataset", "Tag separator, default comma.", default=","),
    Row("caption_prefix", str, "dataset", "Text put before every caption with one space between."),
    Row("caption_suffix", str, "dataset", "Text put after every caption with one space between."),
    Row(
        "caption_dropout_rate",
        float,
        "dataset",
        "Probability that a caption is replaced by the empty string.",
        default=0.0,
    ),
    Row("caption_dropout_every_n_epochs", int, "dataset", "Empty all captions in every Nth epoch.", default=0),
    Row("caption_tag_dropout_rate", float, "dataset", "Probability of leaving out each non-fixed tag.", default=0.0),
    Row("shuffle_caption", bool, "dataset", "Random order of the non-fixed tags."),
    Row("keep_tokens", int, "dataset", "Number of leading tags that stay in place and are never dropped.", default=0),
    Row(
        "keep_tokens_separator",
        str,
        "dataset",
        "Marker dividing fixed head / flexible middle / fixed tail; overrides keep_tokens where it occurs.",
        default="",
    ),
    Row(
        "secondary_separator",
        str,
        "dataset",
        "Separator inside a compound tag, turned into caption_separator after shuffling and dropping.",
    ),
    Row("enable_wildcard", bool, "dataset", "{a|b} random choice and random line of multi-line captions."),
    Row("token_warmup_min", int, "dataset", "Number of flexible tags shown at step 0 of the tag warm-up.", default=1),
    Row(
        "token_warmup_step",
        float,
        "dataset",
        "Step (or, below 1, fraction of all steps) at which all tags are shown.",
        default=0,
    ),
    Row("weighted_captions", bool, "custom_train", "Interpret (tag:1.2) / [tag] weights in captions."),
    # Dataset: images, buckets, augmentation, batches
    Row(
        "resolution",
        str,
        "dataset",
        "Training size, one number or width,height (string). Required unless each dataset in the config sets it.",
    ),
    Row("train_batch_size", int, "dataset", "Images per batch and device.", default=1),
    Row("enable_bucket", bool, "dataset", "Aspect-ratio bucketing."),
    Row("min_bucket_reso", int, "dataset", "Shortest bucket side.", default=256),
    Row("max_bucket_reso", int, "dataset", "Longest bucket side.", default=1024),
    Row(
        "bucket_reso_steps",
        int,
        "dataset",
        "Bucket side granularity; must be a multiple of 64 (SD1/2) or 32 (SDXL).",
        default=64,
    ),
    Row("bucket_no_upscale", bool, "dataset", "Never enlarge images: bucket derived from each image's own size."),
    Row(
        "resize_interpolation",
        str,
        "dataset",
        "Resampling filter; unset = area when shrinking, Lanczos when enlarging.",
        choices=("lanczos", "nearest", "bilinear", "linear", "bicubic", "cubic", "area"),
    ),
    Row("random_crop", bool, "dataset", "Random instead of centred crop."),
    Row(
        "face_crop_aug_range",
        str,
        "dataset",
        "min,max factor for face-centred cropping (needs face data in the file name, no bucketing).",
    ),
    Row("color_aug", bool, "dataset", "Slight random hue or gamma change."),
    Row("flip_aug", bool, "dataset", "Random horizontal mirroring with probability one half."),
    Row("alpha_mask", bool, "dataset", "Use the image's alpha channel as loss mask."),
    Row(
        "masked_loss",
        bool,
        "masked_loss",
        "Weight the loss with mask images given by conditioning_data_dir in the dataset config.",
    ),
    Row("prior_loss_weight", float, "regularisation", "Loss factor of regularization images.", default=1.0),
    Row(
        "max_data_loader_n_workers",
        int,
        "training",
        "DataLoader processes, capped by the CPU count; default 8.",
        default=8,
    ),
    Row("persistent_data_loader_workers", bool, "training", "Keep the DataLoader processes between epochs."),
    Row("validation_split", float, "network", "Share of the images held out for validation (0 to 1).", default=0.0),
    Row("validation_seed", int, "network", "Seed of the hold-out shuffle and of validation noise."),
    # Latent and text-encoder caches
    Row(
        "cache_latents",
        bool,
        "dataset",
        "Encode all images once before training and drop the VAE from the accelerator.",
    ),
    Row("cache_latents_to_disk", bool, "dataset", "Same, stored as .npz beside the images; switches cache_latents on."),
    Row(
        "vae_batch_size",
        int,
        "dataset",
        "Images per VAE call while caching (and in process_batch when not caching).",
        default=1,
    ),
    Row("skip_cache_check", bool, "dataset", "Trust existing cache files without opening them."),
    Row(
        "cache_text_encoder_outputs",
        bool,
        "sdxl",
        "Encode all captions once (SDXL); needs frozen text encoders and no caption randomness.",
    ),
    Row(
        "cache_text_encoder_outputs_to_disk",
        bool,
        "sdxl",
        "Same, stored beside the images; switches the previous one on.",
    ),
    # Training length
    Row("max_train_steps", int, "training", "Number of optimizer steps (1600 if nothing is given).", default=1600),
    Row("max_train_epochs", int, "training", "Number of epochs; overrides max_train_steps."),
    Row("gradient_accumulation_steps", int, "training", "Micro-batches per optimizer step.", default=1),
    Row("seed", int, "training", "Random seed; one is drawn when absent."),
    Row("initial_epoch", int, "network", "First epoch number when continuing without state (1 = from the start)."),
    Row("initial_step", int, "network", "Number of optimizer steps considered done; wins over initial_epoch."),
    Row(
        "skip_until_initial_step",
        bool,
        "network",
        "Actually iterate past the already used batches instead of only renumbering epochs.",
    ),
    # Optimizer
    Row(
        "optimizer_type",
        str,
        "optimizer",
        "Optimizer: a name of docs/arguments.md in any case, a torch.optim class, or a full import path.",
        default="",
    ),
    Row("optimizer_args", str, "optimizer", "List of key=value, the value a Python literal.", nargs="*"),
    Row(
        "learning_rate",
        float,
        "optimizer",
        "Base learning rate, default 2e-6. 0 in sdxl_train freezes the U-Net.",
        default=2e-06,
    ),
    Row("unet_lr", float, "network", "Rate for the U-Net part of the network."),
    Row(
        "text_encoder_lr",
        float,
        "network",
        "Rate(s) for the text-encoder part; several values allowed, networks.lora uses the first one only.",
        nargs="*",
    ),
    Row("learning_rate_te1", float, "sdxl_full", "Rate of SDXL text encoder 1 (sdxl_train)."),
    Row("learning_rate_te2", float, "sdxl_full", "Rate of SDXL text encoder 2 (sdxl_train)."),
    Row("train_text_encoder", bool, "full", "Also train the text encoders (sdxl_train, fine_tune)."),
    Row("learning_rate_te", float, "sd_full", "Rate of the text encoder (train_db, fine_tune)."),
    Row(
        "stop_text_encoder_training",
        int,
        "dreambooth",
        "Step after which the text encoder stays as it is; -1 never trains it (train_db).",
    ),
    Row("no_token_padding", bool, "dreambooth", "Captions are not padded to the full token length (train_db)."),
    Row("block_lr", str, "sdxl_full", "23 comma-separated rates, one per SDXL U-Net block; 0 freezes a block."),
    Row("max_grad_norm", float, "optimizer", "Gradient-norm limit, 0 = off.", default=1.0),
    Row("use_8bit_adam", bool, "optimizer", "Old switch for AdamW8bit."),
    Row("use_lion_optimizer", bool, "optimizer", "Old switch for Lion."),
    Row(
        "fused_backward_pass",
        bool,
        "optimizer",
        "Step every parameter inside the backward pass (Adafactor, sdxl_train only).",
    ),
    Row(
        "fused_optimizer_groups",
        int,
        "sdxl_full",
        "Split the parameters over this many optimizers, each stepping inside the backward pass (sdxl_train).",
    ),
    # Learning-rate schedule
    Row("lr_scheduler", str, "optimizer", "Schedule name.", default="constant"),
    Row("lr_scheduler_args", str, "optimizer", "List of key=value passed to the schedule.", nargs="*"),
    Row(
        "lr_scheduler_type",
        str,
        "optimizer",
        "Torch scheduler class name or import path; takes precedence over lr_scheduler.",
        default="",
    ),
    Row(
        "lr_warmup_steps",
        int_or_share,
        "optimizer",
        "Warm-up length: integer steps, fraction below 1, or N%.",
        default=0,
    ),
    Row(
        "lr_decay_steps",
        int_or_share,
        "optimizer",
        "Decay length for the warmup-stable-decay kind; same notation.",
        default=0,
    ),
    Row(
        "lr_scheduler_num_cycles",
        int,
        "optimizer",
        "Cycles of cosine with restarts (halved for two other kinds).",
        default=1,
    ),
    Row("lr_scheduler_power", float, "optimizer", "Exponent of the polynomial schedule.", default=1),
    Row("lr_scheduler_timescale", int, "optimizer", "Time scale of inverse square root."),
    Row("lr_scheduler_min_lr_ratio", float, "optimizer", "Floor as a share of the base rate for two schedules."),
    # Network (LoRA)
    Row("network_module", str, "network", "Import path of the network module, e.g. networks.lora."),
    Row("network_dim", int, "network", "Rank; unset = the module's own default (4 in networks.lora)."),
    Row("network_alpha", float, "network", "Numerator of the LoRA scale (default 1).", default=1),
    Row("network_args", str, "network", "List of key=value strings handed to the module.", nargs="*"),
    Row("network_dropout", float, "network", "Dropout between the two LoRA matrices."),
    Row("network_weights", str, "network", "Network file to start from."),
    Row("dim_from_weights", bool, "network", "Take ranks and alphas from network_weights."),
    Row("network_train_unet_only", bool, "network", "No text-encoder part."),
    Row("network_train_text_encoder_only", bool, "network", "No U-Net part."),
    Row("base_weights", str, "network", "Network files merged into the base model before training.", nargs="*"),
    Row("base_weights_multiplier", float, "network", "Their strengths, in the same order (missing = 1).", nargs="*"),
    Row("scale_weight_norms", float, "network", "Cap on the norm of each up*down product, applied after every step."),
    # Noise and loss
    Row(
        "loss_type",
        str,
        "training",
        "l2, l1, huber or smooth_l1.",
        default="l2",
        choices=("l1", "l2", "huber", "smooth_l1"),
    ),
    Row(
        "huber_schedule",
        str,
        "training",
        "How the Huber threshold follows the timestep: constant, exponential, snr.",
        default="snr",
        choices=("constant", "exponential", "snr"),
    ),
    Row("huber_c", float, "training", "Huber threshold parameter.", default=0.1),
    Row("huber_scale", float, "training", "Huber threshold factor (no effect with the snr schedule).", default=1.0),
    Row("noise_offset", float, "training", "Strength of per-channel constant noise."),
    Row("noise_offset_random_strength", bool, "training", "Draw that strength uniformly between 0 and the value."),
    Row(
        "adaptive_noise_scale",
        float,
        "training",
        "Adds this times the absolute channel mean of the latents to noise_offset.",
    ),
    Row("multires_noise_iterations", int, "training", "Number of pyramid noise levels."),
    Row("multires_noise_discount", float, "training", "Factor per level.", default=0.3),
    Row("ip_noise_gamma", float, "training", "Extra noise on the model input only."),
    Row("ip_noise_gamma_random_strength", bool, "training", "Draw that strength uniformly."),
    Row("min_snr_gamma", float, "custom_train", "Min-SNR loss weighting."),
    Row("debiased_estimation_loss", bool, "custom_train", "Inverse-square-root SNR weighting."),
    Row(
        "scale_v_pred_loss_like_noise_pred",
        bool,
        "custom_train",
        "Rescale velocity loss to the noise-prediction scale.",
    ),
    Row("v_pred_like_loss", float, "custom_train", "Adds this share of a velocity-like loss to noise prediction."),
    Row("zero_terminal_snr", bool, "training", "Rescale the betas to zero terminal SNR."),
    Row("min_timestep", int, "training", "Lowest timestep drawn."),
    Row("max_timestep", int, "training", "Upper end (exclusive) of the timesteps drawn."),
    # Precision, memory, speed
    Row("mixed_precision", str, "training", "no, fp16 or bf16.", default="no", choices=("no", "fp16", "bf16")),
    Row("full_fp16", bool, "training", "Trainable weights and gradients in fp16."),
    Row("full_bf16", bool, "training", "Trainable weights and gradients in bf16."),
    Row("fp8_base", bool, "training", "Frozen base weights in float8_e4m3fn (U-Net and text encoder)."),
    Row("fp8_base_unet", bool, "network", "Same for the U-Net only."),
    Row("gradient_checkpointing", bool, "training", "Recompute activations in the backward pass."),
    Row("cpu_offload_checkpointing", bool, "network", "Keep checkpointed activations in main memory."),
    Row("xformers", bool, "training", "xformers attention."),
    Row("sdpa", bool, "training", "Torch scaled-dot-product attention."),
    Row("mem_eff_attn", bool, "training", "Built-in chunked attention; wins over xformers, which wins over sdpa."),
    Row(
        "diffusers_xformers",
        bool,
        "full",
        "Old Diffusers xformers switch (VAE only in effect; disables the three above).",
    ),
    Row("torch_compile", bool, "training", "Compile through accelerate."),
    Row(
        "dynamo_backend",
        str,
        "training",
        "Backend used when torch_compile is on.",
        default="inductor",
        choices=DYNAMO_BACKENDS,
    ),
    Row("highvram", bool, "training", "Do not empty the device cache after each caching batch."),
    Row("ddp_timeout", int, "training", "Process-group time-out in minutes."),
    Row("ddp_gradient_as_bucket_view", bool, "training", "DDP flag."),
    Row("ddp_static_graph", bool, "training", "DDP flag."),
    Row("check_ranks", bool, "training", "Compare every update between processes, for finding faults."),
    # Saving, state, resume
    Row("output_dir", str, "training", "Output folder."),
    Row("output_name", str, "training", "Base name of every output."),
    Row(
        "save_model_as",
        str,
        "file_format",
        "File format; a LoRA as safetensors, a full model as the one it was loaded from.",
    ),
    Row(
        "save_precision",
        str,
        "training",
        "float, fp16 or bf16; unset = as held in memory.",
        choices=(None, "float", "fp16", "bf16"),
    ),
    Row("use_safetensors", bool, "old_format", "Old switch: .safetensors instead of .ckpt (sdxl_train)."),
    Row("save_delta", bool, "delta", "Save models as what changed against the base model (docs/sdxl_train.md)."),
    Row("save_every_n_epochs", int, "training", "Epoch interval of intermediate models."),
    Row("save_every_n_steps", int, "training", "Step interval of intermediate models."),
    Row("save_n_epoch_ratio", int, "training", "At least this many intermediate models; computes save_every_n_epochs."),
    Row("save_last_n_epochs", int, "training", "How many epoch models to keep."),
    Row("save_last_n_epochs_state", int, "training", "Same for states."),
    Row("save_last_n_steps", int, "training", "For how many steps to keep step models."),
    Row("save_last_n_steps_state", int, "training", "Same for states."),
    Row("save_state", bool, "training", "Also write the training state with every intermediate model and at the end."),
    Row("save_state_on_train_end", bool, "training", "Write the state at the end only."),
    Row(
        "resume",
        str,
        "training",
        "State folder to continue from; auto: the newest complete one of this output name.",
    ),
    Row("resume_from_huggingface", bool, "training", "Read --resume as a hub address."),
    Row("no_metadata", bool, "network", "Write only the six minimum ss_ keys (plus modelspec and hashes)."),
    Row("training_comment", str, "network", "Free text stored in the metadata."),
    Row("config_file", str, "training", "TOML with argument values."),
    Row("output_config", bool, "training", "Write the non-default arguments to config_file and exit."),
    # Preview images
    Row("sample_prompts", str, "training", "Prompt file (.txt, .toml, .json)."),
    Row(
        "sample_sampler",
        str,
        "training",
        "Default sampler.",
        default="ddim",
        choices=SAMPLERS,
    ),
    Row("sample_every_n_epochs", int, "training", "Epoch interval; wins over steps."),
    Row("sample_every_n_steps", int, "training", "Step interval."),
    Row("sample_at_first", bool, "training", "Also before the first step."),
    # Validation
    Row("validate_every_n_steps", int, "network", "Step interval of validation runs."),
    Row("validate_every_n_epochs", int, "network", "Epoch interval (every epoch when unset)."),
    Row("max_validation_steps", int, "network", "Limit on validation batches."),
    # Logging
    Row("logging_dir", str, "training", "Turns logging on; a time-stamped folder is made in it."),
    Row(
        "log_with",
        str,
        "training",
        "tensorboard, wandb or all; tensorboard when only logging_dir is given.",
        choices=("tensorboard", "wandb", "all"),
    ),
    Row("log_prefix", str, "training", "Put before the time stamp."),
    Row("log_tracker_name", str, "training", "Tracker name; default depends on the script."),
    Row("log_tracker_config", str, "training", "TOML with tracker init arguments."),
    Row("log_config", bool, "training", "Also log the arguments (secrets and paths left out)."),
    Row("wandb_run_name", str, "training", "Run name."),
    Row("wandb_api_key", str, "training", "Key for wandb login."),
    Row(
        "console_log_level",
        str,
        "logging",
        "Console log level.",
        choices=("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"),
    ),
    Row("console_log_file", str, "logging", "Console log goes to this file."),
    Row("console_log_simple", bool, "logging", "Plain console log lines."),
    # Hub upload
    Row("huggingface_repo_id", str, "training", "Upload target; enables uploading."),
    Row("huggingface_repo_type", str, "training", "model, dataset, space."),
    Row("huggingface_path_in_repo", str, "training", "Folder in the repository."),
    Row("huggingface_token", str, "training", "Access token."),
    Row("huggingface_repo_visibility", str, "training", "public, anything else = private."),
    Row("save_state_to_huggingface", bool, "training", "Upload states too."),
    Row("async_upload", bool, "training", "Upload in a background thread (final files always synchronously)."),
    # Model metadata (modelspec)
    Row("metadata_title", str, "model_spec", "Title; default output_name."),
    Row("metadata_author", str, "model_spec", "Author."),
    Row("metadata_description", str, "model_spec", "Description."),
    Row("metadata_license", str, "model_spec", "License."),
    Row("metadata_tags", str, "model_spec", "Comma-separated tags."),
    Row("metadata_usage_hint", str, "model_spec", "Usage hint."),
    Row("metadata_thumbnail", str, "model_spec", "Data URL, or image file converted to one."),
    Row("metadata_merged_from", str, "model_spec", "Source models."),
    Row("metadata_trigger_phrase", str, "model_spec", "Trigger phrase."),
    Row("metadata_preprocessor", str, "model_spec", "Preprocessor."),
    Row("metadata_is_negative_embedding", str, "model_spec", "Negative-embedding mark."),
    # DeepSpeed
    Row("deepspeed", bool, "deepspeed", "Use DeepSpeed through accelerate."),
    Row("zero_stage", int, "deepspeed", "ZeRO stage.", default=2, choices=(0, 1, 2, 3)),
    Row("offload_optimizer_device", str, "deepspeed", "cpu or nvme.", choices=(None, "cpu", "nvme")),
    Row("offload_optimizer_nvme_path", str, "deepspeed", "NVMe path."),
    Row("offload_param_device", str, "deepspeed", "cpu or nvme.", choices=(None, "cpu", "nvme")),
    Row("offload_param_nvme_path", str, "deepspeed", "NVMe path."),
    Row("zero3_init_flag", bool, "deepspeed", "ZeRO-3 init."),
    Row("zero3_save_16bit_model", bool, "deepspeed", "ZeRO-3 16-bit save."),
    Row("fp16_master_weights_and_gradients", bool, "deepspeed", "fp16 master weights (ZeRO-2 with CPU offload)."),
)

BY_NAME = {row.name: row for row in ROWS}
# sent by front-ends, meaningless here; named once in the log
OBSOLETE = frozenset(
    _names(
        "epoch noise_offset_type no_token_padding learning_rate_te stop_text_encoder_training train_inpainting "
        "easy_name save_toml save_toml_location tag_occurrence tag_file_location lr_warmup_ratio lr_restart_cycles "
        "keep_only_last_n_epochs conv_dim conv_alpha betas weight_decay model_type flow_model "
        "contrastive_flow_matching sdxl"
    )
)

# ---------------------------------------------------------------------------------------------------------- scripts

EVERYWHERE = _names("logging models deepspeed dataset training masked_loss optimizer config custom_train model_spec")
FILE_FORMATS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "network": ("safetensors", ("ckpt", "pt", "safetensors")),
    "checkpoint": (None, ("ckpt", "safetensors", "diffusers", "diffusers_safetensors")),
}
NO_FUSED_STEP = {"fused_backward_pass": "a LoRA step is made after the whole backward pass. Leave it out"}


@dataclass(frozen=True)
class Script:
    """One script's command line: EVERYWHERE and ``groups`` without ``left_out``; ``refused`` is refused here only."""

    name: str
    summary: str
    groups: tuple[str, ...]
    writes: str
    left_out: tuple[str, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)

    def rows(self) -> list[Row]:
        """Give the options of this script, in the order of the table."""
        groups = {*EVERYWHERE, *self.groups, "file_format"}
        return [self._own(row) for row in ROWS if row.group in groups and row.name not in self.left_out]

    def _own(self, row: Row) -> Row:
        if row.name != "save_model_as":
            return row
        default, choices = FILE_FORMATS[self.writes]
        return replace(row, default=default, choices=(None, *choices))


SCRIPTS: dict[str, Script] = {
    script.name: script
    for script in (
        Script(
            "train_network",
            "Train a LoRA for Stable Diffusion 1.x or 2.x.",
            ("network", "regularisation"),
            "network",
            refused=NO_FUSED_STEP,
        ),
        Script(
            "sdxl_train_network",
            "Train a LoRA for SDXL.",
            ("network", "regularisation", "sdxl"),
            "network",
            refused=NO_FUSED_STEP,
        ),
        Script(
            "sdxl_train",
            "Train all weights of SDXL.",
            ("sdxl", "sdxl_full", "full", "old_format", "delta"),
            "checkpoint",
        ),
        Script(
            "train_db",
            "Train all weights of Stable Diffusion 1.x or 2.x on folders named N_name.",
            ("regularisation", "dreambooth", "sd_full", "old_format", "delta"),
            "checkpoint",
            left_out=("in_json", "dataset_repeats"),
            refused={
                "no_token_padding": f"{NOT_YET}. Leave it out",
            },
        ),
        Script(
            "fine_tune",
            "Train all weights of Stable Diffusion 1.x or 2.x on images listed in a metadata file.",
            ("full", "sd_full", "old_format", "delta"),
            "checkpoint",
            left_out=("reg_data_dir",),
        ),
    )
}
