"""The edge: the only place where a run's parsed options are read; behind it, everything takes plain values."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from library.errors import OptionError
from library.losses import LossOptions
from library.noise import NoiseOptions


def _path(value: str | None) -> Path | None:
    return Path(value) if value else None


@dataclass(frozen=True)
class LengthSettings:
    """How long a run lasts: steps are optimizer steps, accumulation counts batches of one step."""

    max_steps: int
    max_epochs: int | None
    accumulation: int
    initial_step: int | None
    initial_epoch: int | None


@dataclass(frozen=True)
class PrecisionSettings:
    """Arithmetic of a run; ``full`` is the dtype name trained weights are kept in, None means float32."""

    mixed: str
    full: str | None
    no_half_vae: bool
    gradient_checkpointing: bool
    attention: str


@dataclass(frozen=True)
class SaveSettings:
    """When models and states are written and which older ones go; counts are in steps or epochs."""

    folder: Path
    name: str | None
    format: str
    precision: str | None
    every_n_steps: int | None
    every_n_epochs: int | None
    epoch_ratio: int | None
    keep_last_steps: int | None
    keep_last_epochs: int | None
    keep_last_steps_state: int | None
    keep_last_epochs_state: int | None
    state: bool
    state_at_end: bool


@dataclass(frozen=True)
class SampleSettings:
    """Preview images: prompts come from ``prompts``; intervals are None when off."""

    prompts: str | None
    sampler: str
    every_n_steps: int | None
    every_n_epochs: int | None
    at_first: bool


@dataclass(frozen=True)
class ValidationSettings:
    """When the loss on held-out images is measured; ``every_n_epochs`` None means every one, steps None means none."""

    every_n_steps: int | None
    every_n_epochs: int | None
    max_batches: int | None
    seed: int


def _positive(value: int | None) -> int | None:
    return value if value and value > 0 else None


def read_length(args: Namespace) -> LengthSettings:
    return LengthSettings(
        args.max_train_steps,
        args.max_train_epochs,
        args.gradient_accumulation_steps,
        args.initial_step,
        args.initial_epoch,
    )


def read_precision(args: Namespace) -> PrecisionSettings:
    chosen = [name for name in ("mem_eff_attn", "xformers", "sdpa") if getattr(args, name)]
    if args.diffusers_xformers:
        chosen.insert(0, "xformers")
    return PrecisionSettings(
        mixed=args.mixed_precision,
        full="fp16" if args.full_fp16 else "bf16" if args.full_bf16 else None,
        no_half_vae=args.no_half_vae,
        gradient_checkpointing=args.gradient_checkpointing,
        attention=chosen[0] if chosen else "plain",
    )


def read_noise(args: Namespace) -> NoiseOptions:
    return NoiseOptions(
        args.noise_offset,
        args.noise_offset_random_strength,
        args.adaptive_noise_scale,
        args.multires_noise_iterations,
        args.multires_noise_discount,
        args.ip_noise_gamma,
        args.ip_noise_gamma_random_strength,
        0 if args.min_timestep is None else args.min_timestep,
        1000 if args.max_timestep is None else args.max_timestep,
        args.zero_terminal_snr,
        args.v_parameterization,
    )


def read_loss(args: Namespace) -> LossOptions:
    return LossOptions(
        args.loss_type,
        args.huber_schedule,
        args.huber_c,
        args.huber_scale,
        args.min_snr_gamma,
        args.scale_v_pred_loss_like_noise_pred,
        args.v_pred_like_loss,
        args.debiased_estimation_loss,
    )


def read_saving(args: Namespace) -> SaveSettings:
    return SaveSettings(
        folder=Path(args.output_dir),
        name=args.output_name,
        format=args.save_model_as,
        precision=args.save_precision,
        every_n_steps=_positive(args.save_every_n_steps),
        every_n_epochs=_positive(args.save_every_n_epochs),
        epoch_ratio=_positive(args.save_n_epoch_ratio),
        keep_last_steps=_positive(args.save_last_n_steps),
        keep_last_epochs=_positive(args.save_last_n_epochs),
        keep_last_steps_state=_positive(args.save_last_n_steps_state),
        keep_last_epochs_state=_positive(args.save_last_n_epochs_state),
        state=args.save_state,
        state_at_end=args.save_state or args.save_state_on_train_end,
    )


def read_samples(args: Namespace) -> SampleSettings:
    every_n_epochs = _positive(args.sample_every_n_epochs)
    return SampleSettings(
        prompts=args.sample_prompts,
        sampler=args.sample_sampler,
        every_n_steps=None if every_n_epochs else _positive(args.sample_every_n_steps),
        every_n_epochs=every_n_epochs,
        at_first=args.sample_at_first,
    )


def read_validation(args: Namespace, seed: int) -> ValidationSettings:
    """Read when to validate; ``seed`` is that of the run."""
    return ValidationSettings(
        every_n_steps=_positive(args.validate_every_n_steps),
        every_n_epochs=_positive(args.validate_every_n_epochs),
        max_batches=_positive(args.max_validation_steps),
        seed=seed if args.validation_seed is None else args.validation_seed,
    )


def read_network_rates(args: Namespace) -> dict[str, Any]:
    """Give the three rates of a LoRA run as the network's group builder takes them."""
    text_encoder = args.text_encoder_lr
    if isinstance(text_encoder, (int, float)):
        text_encoder = [float(text_encoder)]
    return {"text_encoder_lr": text_encoder or None, "unet_lr": args.unet_lr, "default_lr": args.learning_rate}


def read_part_rates(args: Namespace) -> list[float | None]:
    """Give the learning rates of the parts to be trained, as far as the options tell."""
    rates = read_network_rates(args)
    encoders = rates["text_encoder_lr"] or [rates["default_lr"]]
    unet = rates["default_lr"] if rates["unet_lr"] is None else rates["unet_lr"]
    of_encoders = [] if args.network_train_unet_only else list(encoders)
    return of_encoders + ([] if args.network_train_text_encoder_only else [unet])


def read_trained_parts(args: Namespace) -> tuple[bool, bool]:
    """Say whether the text encoder and the U-Net get a network.

    Raises:
        OptionError: both --network_train_..._only switches are on, which leaves nothing to train.
    """
    if args.network_train_unet_only and args.network_train_text_encoder_only:
        raise OptionError(
            "--network_train_unet_only and --network_train_text_encoder_only together leave nothing to train. "
            "Give one of them, or neither to train both parts"
        )
    return not args.network_train_unet_only, not args.network_train_text_encoder_only


def read_resume(args: Namespace) -> Path | None:
    return _path(args.resume)


SECRET_OR_PATH = ["api_key", "token", "_dir", "_path", "pretrained", "vae", "weights", "file", "resume", "prompts"]
SECRET_OR_PATH += ["in_json", "config"]


def logged_options(args: Namespace) -> dict[str, Any] | None:
    """Give the options that may be logged, without secrets and paths; None without ``--log_config``."""
    if not args.log_config:
        return None
    return {name: value for name, value in vars(args).items() if not any(word in name for word in SECRET_OR_PATH)}
