"""Functions of sd-scripts whose arguments differ from ours: each hands its values on in a line or two.

Other programs reach them through the modules of old names (train_util, custom_train_functions, model_util, ...);
nothing of ours calls them. ``args`` is a namespace of parsed options, a scheduler anything with ``alphas_cumprod``.
"""

from __future__ import annotations

import json
import math
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from library import buckets, checkpoint, checkpoint_keys, losses, metadata, noise, settings
from library.accelerator import DTYPES, LogSettings, build_accelerator
from library.batch_loss import loss_mask
from library.config_util import build_specs, readable_suffixes, subsets_of_folders
from library.errors import OptionError
from library.model_families import SD, SDXL, set_attention
from library.naming import OutputNames, epoch_to_remove, step_to_remove
from library.progress import LossAverage
from library.sampling import SamplePrompt, line_to_prompt
from library.sampling import load_prompts as read_prompts

HIGH_VRAM = False
VAE_SCALE_FACTOR = SDXL.latent_scale
MODEL_VERSION_SDXL_BASE_V1_0 = "sdxl_base_v1-0"
IMAGE_EXTENSIONS = sorted(readable_suffixes())
# SS_METADATA_KEY_V2 and the like
globals().update({f"SS_METADATA_KEY_{key.removeprefix('ss_').upper()}": key for key in metadata.MINIMUM_KEYS})

# ---------------------------------------------------------------------------------------------------------- set-up


def prepare_dataset_args(args: Namespace, support_metadata: bool) -> None:
    """Turn ``args.resolution`` into (width, height) and ``args.face_crop_aug_range`` into two floats, in place."""
    if isinstance(args.resolution, str):
        sides = [int(side) for side in args.resolution.split(",")]
        args.resolution = (sides[0], sides[-1])
    if isinstance(args.face_crop_aug_range, str):
        low, high = args.face_crop_aug_range.split(",")
        args.face_crop_aug_range = (float(low), float(high))


def prepare_accelerator(args: Namespace) -> Any:
    folder = Path(args.logging_dir) if args.logging_dir else None
    return build_accelerator(
        args.mixed_precision,
        LogSettings(folder, args.log_prefix or ""),
        ddp_timeout_min=args.ddp_timeout,
        ddp_gradient_as_bucket_view=args.ddp_gradient_as_bucket_view,
        ddp_static_graph=args.ddp_static_graph,
    )


def prepare_dtype(args: Namespace) -> tuple[torch.dtype, torch.dtype | None]:
    """Give (dtype of frozen weights, dtype of saved weights; None keeps what is in memory)."""
    saved = {"float": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    return DTYPES[args.mixed_precision], saved.get(args.save_precision)


def init_trackers(accelerator: Any, args: Namespace, default_tracker_name: str) -> None:
    if accelerator.is_main_process:
        accelerator.init_trackers(args.log_tracker_name or default_tracker_name, config=settings.logged_options(args))


def enable_high_vram(args: Namespace) -> None:
    """Do nothing: the device's cache is never emptied between batches."""


def load_target_model(
    args: Namespace, weight_dtype: torch.dtype, accelerator: Any, unet_use_linear_projection_in_v2: bool = False
) -> tuple[Any, Any, Any, bool]:
    """Give (text encoder, VAE, U-Net, whether the model is a single file) on the accelerator's device."""
    path = checkpoint.find_model(args.pretrained_model_name_or_path)
    model = SD.load(
        path,
        SD.kind(args.v2),
        dtype=weight_dtype,
        vae_path=Path(args.vae) if args.vae else None,
        tokenizer_cache=Path(args.tokenizer_cache_dir) if args.tokenizer_cache_dir else None,
    )
    parts = [part.to(accelerator.device) for part in (model.text_encoders[0], model.vae, model.unet)]
    return parts[0], parts[1], parts[2], path.is_file()


def replace_unet_modules(unet: Any, mem_eff_attn: bool, xformers: bool, sdpa: bool) -> None:
    chosen = {"mem_eff_attn": mem_eff_attn, "xformers": xformers, "sdpa": sdpa}
    set_attention(unet, next((name for name, on in chosen.items() if on), "plain"))


def append_lr_to_logs(
    logs: dict[str, Any], lr_scheduler: Any, optimizer_type: str, including_unet: bool = True
) -> None:
    names = ["unet"] if including_unet else []
    append_lr_to_logs_with_names(logs, lr_scheduler, optimizer_type, [*names, "text_encoder1", "text_encoder2"])


def append_lr_to_logs_with_names(
    logs: dict[str, Any], lr_scheduler: Any, optimizer_type: str, names: Sequence[str]
) -> None:
    """Write ``lr/<name>`` of every group, and ``lr/d*lr/<name>`` where the optimizer adapts its rate."""
    for index, (name, rate) in enumerate(zip(names, lr_scheduler.get_last_lr())):
        logs[f"lr/{name}"] = float(rate)
        if optimizer_type.lower().startswith(("dadapt", "prodigy")):
            group = lr_scheduler.optimizers[-1].param_groups[index]
            logs[f"lr/d*lr/{name}"] = group["d"] * group["lr"]


# ------------------------------------------------------------------------------------------------------------ data


def glob_images(directory: str, base: str = "*") -> list[str]:
    """Give the sorted paths of the images in a folder whose stem matches ``base``."""
    found = (path for path in Path(directory).glob(f"{base}.*") if path.suffix in readable_suffixes())
    return sorted(str(path) for path in found)


def make_bucket_resolutions(
    max_reso: tuple[int, int], min_size: int = 256, max_size: int = 1024, divisible: int = 64
) -> list[tuple[int, int]]:
    return buckets.bucket_sizes(max_reso, min_size, max_size, divisible)


# -------------------------------------------------------------------------------------------------- noise and loss


def _snr(scheduler: Any, timesteps: Tensor) -> Tensor:
    alphas = scheduler.alphas_cumprod.to(timesteps.device)
    snr = getattr(scheduler, "all_snr", alphas / (1.0 - alphas)).to(timesteps.device)
    return snr[timesteps]


def prepare_scheduler_for_custom_training(noise_scheduler: Any, device: Any) -> None:
    """Keep the signal-to-noise ratio of every step on the scheduler, as ``all_snr``."""
    if not hasattr(noise_scheduler, "all_snr"):
        alphas = noise_scheduler.alphas_cumprod
        noise_scheduler.all_snr = (alphas / (1.0 - alphas)).to(device)


def fix_noise_scheduler_betas_for_zero_terminal_snr(noise_scheduler: Any) -> None:
    """Change a scheduler's levels so that its last step is pure noise."""
    levels = noise.zero_terminal(noise_scheduler.alphas_cumprod)
    noise_scheduler.betas = noise.betas_of(levels)
    noise_scheduler.alphas, noise_scheduler.alphas_cumprod = 1.0 - noise_scheduler.betas, levels


def apply_snr_weight(
    loss: Tensor, timesteps: Tensor, noise_scheduler: Any, gamma: float, v_prediction: bool = False
) -> Tensor:
    return losses.min_snr(loss, _snr(noise_scheduler, timesteps), gamma, v_prediction)


def scale_v_prediction_loss_like_noise_prediction(loss: Tensor, timesteps: Tensor, noise_scheduler: Any) -> Tensor:
    return losses.v_pred_like_noise_pred(loss, _snr(noise_scheduler, timesteps), True, True)


def add_v_prediction_like_loss(
    loss: Tensor, timesteps: Tensor, noise_scheduler: Any, v_pred_like_loss: float
) -> Tensor:
    return losses.noise_pred_plus_v_like(loss, _snr(noise_scheduler, timesteps), v_pred_like_loss, False)


def apply_debiased_estimation(
    loss: Tensor, timesteps: Tensor, noise_scheduler: Any, v_prediction: bool = False
) -> Tensor:
    return losses.debiased(loss, _snr(noise_scheduler, timesteps), True, v_prediction)


def apply_masked_loss(loss: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Multiply the loss of every element by the batch's mask; without one nothing changes."""
    mask = loss_mask({"conditioning_images": None, "alpha_masks": None, **batch})
    if mask is None:
        return loss
    mask = torch.nn.functional.interpolate(mask.to(loss.device, loss.dtype), size=loss.shape[2:], mode="area")
    return loss * mask


def apply_noise_offset(
    latents: Tensor, noise_: Tensor, noise_offset: float | None, adaptive_noise_scale: float | None
) -> Tensor:
    return noise_ if noise_offset is None else noise.offset_noise(noise_, latents, noise_offset, adaptive_noise_scale)


def pyramid_noise_like(noise_: Tensor, device: Any, iterations: int = 6, discount: float = 0.4) -> Tensor:
    return noise.pyramid_noise(noise_.to(device), iterations, discount)


def get_timesteps(min_timestep: int, max_timestep: int, b_size: int, device: torch.device) -> Tensor:
    return noise.draw_timesteps(b_size, min_timestep, max_timestep, device)


def get_noise_noisy_latents_and_timesteps(
    args: Namespace, noise_scheduler: Any, latents: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Give (noise, noisy latents, timesteps), drawn in the order that ``library.noise`` promises."""
    alphas = noise_scheduler.alphas_cumprod.to(latents.device)
    schedule = noise.NoiseSchedule(noise_scheduler.betas.to(latents.device), alphas, alphas / (1.0 - alphas))
    disturbed = noise.disturb(latents, schedule, settings.read_noise(args))
    return disturbed.noise, disturbed.noisy_latents, disturbed.timesteps


def get_huber_threshold_if_needed(args: Namespace, timesteps: Tensor, noise_scheduler: Any) -> Tensor | None:
    if not losses.LOSSES[args.loss_type].needs_threshold:
        return None
    alphas = noise_scheduler.alphas_cumprod.to(timesteps.device)
    return losses.huber_threshold(timesteps, alphas, args.huber_schedule, args.huber_c, args.huber_scale)


def conditional_loss(
    model_pred: Tensor, target: Tensor, loss_type: str, reduction: str, huber_c: Tensor | None = None
) -> Tensor:
    """Give the element losses, or their ``mean`` or ``sum``."""
    loss = losses.element_loss(model_pred, target, loss_type, huber_c)
    return loss if reduction == "none" else getattr(loss, reduction)()


class LossRecorder(LossAverage):
    """Mean of the last loss of every position in the epoch."""

    def add(self, *, epoch: int, step: int, loss: float) -> None:
        super().add(step, loss)

    @property
    def moving_average(self) -> float:
        return self.mean


# --------------------------------------------------------------------------------------------- names and metadata


def _names(args: Namespace, extension: str) -> OutputNames:
    return OutputNames(Path(), args.output_name, f".{extension.lstrip('.')}")


def get_epoch_ckpt_name(args: Namespace, ext: str, epoch_no: int) -> str:
    return _names(args, ext).epoch_model(epoch_no).name


def get_step_ckpt_name(args: Namespace, ext: str, step_no: int) -> str:
    return _names(args, ext).step_model(step_no).name


def get_last_ckpt_name(args: Namespace, ext: str) -> str:
    return _names(args, ext).final_model().name


def get_remove_epoch_no(args: Namespace, epoch_no: int) -> int | None:
    return epoch_to_remove(epoch_no, args.save_every_n_epochs, args.save_last_n_epochs)


def get_remove_step_no(args: Namespace, step_no: int) -> int | None:
    return step_to_remove(step_no, args.save_every_n_steps, args.save_last_n_steps)


def model_hash(filename: str) -> str:
    return metadata.model_hashes(Path(filename))[0]


def calculate_sha256(filename: str) -> str:
    return metadata.model_hashes(Path(filename))[1]


def load_metadata_from_safetensors(file: str) -> dict[str, str]:
    """Give the metadata of a safetensors file, nothing for any other file."""
    if not is_safetensors(file):
        return {}
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return dict(opened.metadata() or {})


def build_minimum_network_metadata(
    v2: Any,
    base_model: str | None,
    network_module: str,
    network_dim: str,
    network_alpha: str,
    network_args: Mapping[str, Any] | None,
) -> dict[str, str]:
    entries = {
        "ss_network_module": network_module,
        "ss_network_dim": network_dim,
        "ss_network_alpha": network_alpha,
    }
    if v2 is not None:
        entries["ss_v2"] = str(v2)
    if base_model is not None:
        entries["ss_base_model_version"] = base_model
    if network_args is not None:
        entries["ss_network_args"] = json.dumps(network_args)
    return entries


def get_sai_model_spec(
    state_dict: Mapping[str, Any] | None,
    args: Namespace,
    sdxl: bool,
    lora: bool,
    textual_inversion: bool,
    is_stable_diffusion_ckpt: bool | None = None,
    **others: Any,
) -> dict[str, str]:
    """Give the modelspec entries of a file of this run's options."""
    family, suffix = (SDXL if sdxl else SD), "/lora" if lora else "/textual-inversion" if textual_inversion else ""
    architecture = family.architecture(args.v2, args.v_parameterization) + suffix
    facts = metadata.RunFacts(
        session_id=0,
        started_at=time.time(),
        version=family.version(args.v2, args.v_parameterization),
        architecture=architecture,
        implementation=family.implementation[bool(is_stable_diffusion_ckpt)],
        resolution=family.resolution(args.v2, args.v_parameterization),
        optimizer="",
        optimizer_args="",
        max_steps=0,
        epochs=0,
        batches_per_epoch=0,
        seed=0,
        network_args={},
    )
    return metadata.modelspec(args, facts)


# --------------------------------------------------------------------------------------------------------- models


def is_safetensors(path: str) -> bool:
    return Path(path).suffix.lower() == ".safetensors"


def load_models_from_stable_diffusion_checkpoint(
    v2: bool,
    ckpt_path: str,
    device: Any = "cpu",
    dtype: torch.dtype | None = None,
    unet_use_linear_projection_in_v2: bool = True,
) -> tuple[Any, Any, Any]:
    """Give (text encoder, VAE, U-Net) of a checkpoint file."""
    model = checkpoint.load_model(Path(ckpt_path), SD.kind(v2), dtype=dtype or torch.float32)
    return model.text_encoders[0].to(device), model.vae.to(device), model.unet.to(device)


def load_vae(vae_id: str, dtype: torch.dtype) -> Any:
    return checkpoint.load_vae(Path(vae_id), dtype)


def get_model_version_str_for_sd1_sd2(v2: bool, v_parameterization: bool) -> str:
    return SD.version(v2, v_parameterization)


# -------------------------------------------------------------------------------------------------------- previews


def _prompt_entry(prompt: SamplePrompt) -> dict[str, Any]:
    return {key: value for key, value in asdict(prompt).items() if value is not None}


def load_prompts(prompt_file: str) -> list[dict[str, Any]]:
    """Give the prompts of a file as dicts, numbered from 0 under ``enum``."""
    return [{**_prompt_entry(prompt), "enum": number} for number, prompt in enumerate(read_prompts(prompt_file))]


def line_to_prompt_dict(line: str) -> dict[str, Any]:
    return _prompt_entry(line_to_prompt(line))


# ------------------------------------------------------------------------------------------------ data set configs


class ConfigSanitizer:
    """What a script supports in a data set file; ours decides by the file itself."""

    def __init__(
        self, support_dreambooth: bool, support_finetuning: bool, support_controlnet: bool, support_dropout: bool
    ):
        self.support_controlnet = support_controlnet


@dataclass
class Blueprint:
    """A checked data set description: specs for :func:`generate_dataset_group_by_blueprint`."""

    dataset_group: list[Any]


class BlueprintGenerator:
    """Checks the tables of a data set file against a namespace of options."""

    def __init__(self, sanitizer: ConfigSanitizer):
        self.sanitizer = sanitizer

    def generate(
        self, user_config: Mapping[str, Any], argparse_namespace: Namespace, **runtime_params: Any
    ) -> Blueprint:
        return Blueprint(build_specs(user_config, "data set config", argparse_namespace))


def generate_dataset_group_by_blueprint(dataset_group: Sequence[Any], seed: int = 0) -> tuple[Any, Any]:
    """Give (training data, validation data or None); ``len`` counts batches."""
    from library.dataset import TrainingData

    return TrainingData(dataset_group, seed=seed, bucket_divisor=1), None


def generate_dreambooth_subsets_config_by_subdirs(
    train_data_dir: str | None = None, reg_data_dir: str | None = None
) -> list[dict[str, Any]]:
    """Describe the ``N_name`` folders below two parents as subsets of a data set file."""
    return subsets_of_folders(train_data_dir, reg_data_dir) if train_data_dir else []


# ------------------------------------------------------------------------------------------------------------ SDXL


def verify_sdxl_training_args(args: Namespace, support_text_encoder_caching: bool = True) -> None:
    """Refuse and change, in place, what SDXL training needs otherwise.

    Raises:
        OptionError: ``--v2``.
    """
    if args.v2:
        raise OptionError("--v2 is for Stable Diffusion 2.x, not for SDXL. Leave it out")
    if support_text_encoder_caching and args.cache_text_encoder_outputs_to_disk:
        args.cache_text_encoder_outputs = True


def load_sdxl_target_model(
    args: Namespace, accelerator: Any, model_version: str, weight_dtype: torch.dtype
) -> tuple[bool, Any, Any, Any, Any, Tensor | None, None]:
    """Give (whether it is a single file, encoder 1, encoder 2, VAE, U-Net, logit scale, None)."""
    path = checkpoint.find_model(args.pretrained_model_name_or_path)
    parts = load_models_from_sdxl_checkpoint(model_version, str(path), accelerator.device, weight_dtype)
    vae = checkpoint.load_vae(Path(args.vae), weight_dtype, "sdxl").to(accelerator.device) if args.vae else parts[2]
    return path.is_file(), parts[0], parts[1], vae, parts[3], parts[4], None


def load_models_from_sdxl_checkpoint(
    model_version: str,
    ckpt_path: str,
    map_location: Any,
    dtype: torch.dtype | None = None,
    disable_mmap: bool = False,
) -> tuple[Any, Any, Any, Any, Tensor | None, None]:
    """Give (encoder 1, encoder 2, VAE, U-Net, logit scale, None)."""
    model = checkpoint.load_model(Path(ckpt_path), "sdxl", dtype=dtype or torch.float32, mapped=not disable_mmap)
    first, second = (encoder.to(map_location) for encoder in model.text_encoders)
    scale = model.carried.get(checkpoint_keys.LOGIT_SCALE)
    return first, second, model.vae.to(map_location), model.unet.to(map_location), scale, None


def get_timestep_embedding(x: Tensor, outdim: int) -> Tensor:
    """Give cosines and sines of each number, (B, n) -> (B, n * outdim)."""
    half = outdim // 2
    rates = torch.exp(torch.arange(half, dtype=torch.float32, device=x.device) * (-math.log(10000.0) / half))
    angles = x.float().reshape(-1, 1) * rates
    return torch.cat([angles.cos(), angles.sin()], dim=1).reshape(len(x), -1)


def get_size_embeddings(orig_size: Tensor, crop_size: Tensor, target_size: Tensor, device: Any) -> Tensor:
    """Give what SDXL's U-Net is told of sizes, three times (B, 2) -> (B, 1536)."""
    return torch.cat([get_timestep_embedding(each, 256) for each in (orig_size, crop_size, target_size)], dim=1).to(
        device
    )


def make_unet_conversion_map() -> dict[str, str]:
    """Give {prefix in files: Diffusers prefix} of SDXL's U-Net."""
    return checkpoint_keys.inverted(checkpoint_keys.unet_table(3, 2, {0, 1}))


def _renamed(tensors: Mapping[str, Any], table: Mapping[str, str]) -> dict[str, Any]:
    return {checkpoint_keys.translate(key, table) or key: value for key, value in tensors.items()}


def convert_diffusers_unet_state_dict_to_sdxl(du_sd: Mapping[str, Any]) -> dict[str, Any]:
    return _renamed(du_sd, checkpoint_keys.unet_table_of_diffusers(du_sd))


def convert_sdxl_unet_state_dict_to_diffusers(sd: Mapping[str, Any]) -> dict[str, Any]:
    return _renamed(sd, checkpoint_keys.inverted(checkpoint_keys.unet_table_of_file(sd)))
