"""Metadata of saved networks: ss_* keys, modelspec keys, and the hashes that tools look for. All values are text."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import logging
import mimetypes
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

HASH_OFFSET, HASH_LENGTH = 0x100000, 0x10000
MINIMUM_KEYS = (
    "ss_v2",
    "ss_base_model_version",
    "ss_network_module",
    "ss_network_dim",
    "ss_network_alpha",
    "ss_network_args",
)
# key -> option whose value is recorded as text
FROM_OPTIONS = {
    "ss_output_name": "output_name",
    "ss_training_comment": "training_comment",
    "ss_v2": "v2",
    "ss_clip_skip": "clip_skip",
    "ss_max_token_length": "max_token_length",
    "ss_network_module": "network_module",
    "ss_network_dim": "network_dim",
    "ss_network_alpha": "network_alpha",
    "ss_network_dropout": "network_dropout",
    "ss_scale_weight_norms": "scale_weight_norms",
    "ss_learning_rate": "learning_rate",
    "ss_unet_lr": "unet_lr",
    "ss_lr_scheduler": "lr_scheduler",
    "ss_lr_warmup_steps": "lr_warmup_steps",
    "ss_max_grad_norm": "max_grad_norm",
    "ss_gradient_checkpointing": "gradient_checkpointing",
    "ss_gradient_accumulation_steps": "gradient_accumulation_steps",
    "ss_mixed_precision": "mixed_precision",
    "ss_full_fp16": "full_fp16",
    "ss_fp8_base": "fp8_base",
    "ss_fp8_base_unet": "fp8_base_unet",
    "ss_lowram": "lowram",
    "ss_cache_latents": "cache_latents",
    "ss_noise_offset": "noise_offset",
    "ss_noise_offset_random_strength": "noise_offset_random_strength",
    "ss_multires_noise_iterations": "multires_noise_iterations",
    "ss_multires_noise_discount": "multires_noise_discount",
    "ss_adaptive_noise_scale": "adaptive_noise_scale",
    "ss_zero_terminal_snr": "zero_terminal_snr",
    "ss_ip_noise_gamma": "ip_noise_gamma",
    "ss_ip_noise_gamma_random_strength": "ip_noise_gamma_random_strength",
    "ss_min_snr_gamma": "min_snr_gamma",
    "ss_debiased_estimation": "debiased_estimation_loss",
    "ss_loss_type": "loss_type",
    "ss_huber_schedule": "huber_schedule",
    "ss_huber_scale": "huber_scale",
    "ss_huber_c": "huber_c",
    "ss_prior_loss_weight": "prior_loss_weight",
    "ss_caption_dropout_rate": "caption_dropout_rate",
    "ss_caption_dropout_every_n_epochs": "caption_dropout_every_n_epochs",
    "ss_caption_tag_dropout_rate": "caption_tag_dropout_rate",
    "ss_face_crop_aug_range": "face_crop_aug_range",
    "ss_resize_interpolation": "resize_interpolation",
    "ss_validation_seed": "validation_seed",
    "ss_validation_split": "validation_split",
    "ss_max_validation_steps": "max_validation_steps",
    "ss_validate_every_n_epochs": "validate_every_n_epochs",
    "ss_validate_every_n_steps": "validate_every_n_steps",
}
# modelspec key -> option, recorded when it is set
MODELSPEC_FROM_OPTIONS = {
    f"modelspec.{name}": f"metadata_{name}"
    for name in (
        "author",
        "description",
        "license",
        "tags",
        "usage_hint",
        "merged_from",
        "trigger_phrase",
        "preprocessor",
        "is_negative_embedding",
    )
}


@dataclass
class RunFacts:
    """What the metadata says beside the options.

    Attributes:
        session_id, started_at: of this process; Unix time. version, architecture, implementation, resolution: of the
            model family.
        optimizer, optimizer_args: as get_optimizer named them. max_steps, epochs, batches_per_epoch: of the plan.
        seed: in force. text_encoder_lr: the rate of the first encoder. options: option values as they were typed,
            where building the optimizer changed them. dataset, grad_filter: ready ss_ entries.
    """

    session_id: int
    started_at: float
    version: str
    architecture: str
    implementation: str
    resolution: str
    optimizer: str
    optimizer_args: str
    max_steps: int
    epochs: int
    batches_per_epoch: int
    seed: int
    network_args: Mapping[str, Any]
    dataset: Mapping[str, str] = field(default_factory=dict)
    grad_filter: Mapping[str, str] = field(default_factory=dict)


def safetensors_hashes(blob: bytes) -> tuple[str, str]:
    """Give (sshs_model_hash, sshs_legacy_hash) of a safetensors file's bytes with only ss_ metadata in its header.

    The first is the SHA-256 of everything behind the header, the second the first 8 digits of the SHA-256 over 64 KiB
    at offset 1 MiB.
    """
    data_start = 8 + int.from_bytes(blob[:8], "little")
    legacy = hashlib.sha256(blob[HASH_OFFSET : HASH_OFFSET + HASH_LENGTH]).hexdigest()[:8]
    return hashlib.sha256(blob[data_start:]).hexdigest(), legacy


def precalculate_safetensors_hashes(tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> tuple[str, str]:
    """Give the two hashes of tensors not yet written; of the metadata only ss_ keys count."""
    from safetensors.torch import save

    hashed = {key: value for key, value in metadata.items() if key.startswith("ss_")}
    return safetensors_hashes(save(dict(tensors), metadata=hashed or None))


def model_hashes(path: Path) -> tuple[str, str]:
    """Give (old, new) hash of a model file; ``IsADirectory`` or ``NOFILE`` twice where there is no file."""
    if path.is_dir():
        return "IsADirectory", "IsADirectory"
    if not path.is_file():
        return "NOFILE", "NOFILE"
    whole = hashlib.sha256()
    with path.open("rb") as stream:
        stream.seek(HASH_OFFSET)
        old = hashlib.sha256(stream.read(HASH_LENGTH)).hexdigest()[:8]
        stream.seek(0)
        while block := stream.read(1 << 20):
            whole.update(block)
    return old, whole.hexdigest()


def revision() -> str:
    """Give the git commit of this checkout, ``(unknown)`` outside of one."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "(unknown)"
    return found.stdout.strip()


def _model_entries(prefix: str, name: str) -> dict[str, str]:
    path = Path(name)
    entries = {f"ss_{prefix}_name": path.name if path.exists() else name}
    if path.exists():
        old, new = model_hashes(path)
        entries |= {f"ss_{prefix}_hash": old, f"ss_new_{prefix}_hash": new}
    return entries


def run_metadata(args: Any, facts: RunFacts) -> dict[str, str]:
    """Give the entries that stay the same for every file of a run.

    Args:
        args: parsed options; only those of ``FROM_OPTIONS`` are recorded, never a path or a secret.
    """
    entries = {key: str(getattr(args, name, None)) for key, name in FROM_OPTIONS.items()}
    rates = args.text_encoder_lr
    text_encoder_lr = rates[0] if isinstance(rates, (list, tuple)) and rates else rates or None
    arguments = f"({facts.optimizer_args})" if facts.optimizer_args else ""
    entries |= {
        "ss_session_id": str(facts.session_id),
        "ss_training_started_at": str(facts.started_at),
        "ss_sd_scripts_commit_hash": revision(),
        "ss_base_model_version": facts.version,
        "ss_text_encoder_lr": str(text_encoder_lr),
        "ss_optimizer": f"{facts.optimizer}{arguments}",
        "ss_max_train_steps": str(facts.max_steps),
        "ss_num_epochs": str(facts.epochs),
        "ss_num_batches_per_epoch": str(facts.batches_per_epoch),
        "ss_seed": str(facts.seed),
        **_model_entries("sd_model", args.pretrained_model_name_or_path),
        **facts.dataset,
        **facts.grad_filter,
    }
    if args.vae:
        entries |= _model_entries("vae", args.vae)
    if facts.network_args:
        dropout = {} if "dropout" in facts.network_args else {"dropout": args.network_dropout}
        entries["ss_network_args"] = json.dumps({**facts.network_args, **dropout})
    return entries


def file_modelspec(
    architecture: str, implementation: str, resolution: str, title: str, v_parameterization: bool
) -> dict[str, str]:
    """Give the modelspec entries that every file has; ``resolution`` is a text like 512x512."""
    commit = revision()
    return {
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": architecture,
        "modelspec.implementation": implementation,
        "modelspec.implementation_version": f"sd-scripts/{'unknown' if commit == '(unknown)' else commit}",
        "modelspec.title": title,
        "modelspec.date": datetime.datetime.now().replace(microsecond=0).isoformat(),
        "modelspec.resolution": resolution,
        "modelspec.prediction_type": "v" if v_parameterization else "epsilon",
    }


def modelspec(args: Any, facts: RunFacts) -> dict[str, str]:
    """Give the modelspec entries of a LoRA or a model."""
    kind = "LoRA" if facts.architecture.endswith("/lora") else "Checkpoint"
    sizes = [part.strip() for part in str(args.resolution).split(",")] if args.resolution else []
    title = args.metadata_title or args.output_name or f"{kind}@{facts.started_at:.0f}"
    resolution = f"{sizes[0]}x{sizes[-1]}" if sizes else facts.resolution
    entries = file_modelspec(facts.architecture, facts.implementation, resolution, title, args.v_parameterization)
    if args.min_timestep is not None or args.max_timestep is not None:
        low = 0 if args.min_timestep is None else args.min_timestep
        entries["modelspec.timestep_range"] = f"{low},{1000 if args.max_timestep is None else args.max_timestep}"
    if args.clip_skip is not None:
        entries["modelspec.encoder_layer"] = str(args.clip_skip)
    for key, name in MODELSPEC_FROM_OPTIONS.items():
        if getattr(args, name, None):
            entries[key] = str(getattr(args, name))
    if args.metadata_thumbnail:
        entries |= _thumbnail(args.metadata_thumbnail)
    return entries


def _thumbnail(value: str) -> dict[str, str]:
    if value.startswith("data:"):
        return {"modelspec.thumbnail": value}
    path = Path(value)
    if not path.is_file():
        log.warning("--metadata_thumbnail %s: there is no such file, it is left out", value)
        return {}
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    return {"modelspec.thumbnail": f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"}


def save_metadata(
    run: Mapping[str, str], spec: Mapping[str, str], *, steps: int, epoch: int, finished_at: float, minimum: bool
) -> dict[str, str]:
    """Give the metadata of one file.

    Args:
        run: of :func:`run_metadata`. spec: of :func:`modelspec`. steps, epoch: of this save. finished_at: Unix time.
        minimum: record the smallest set of ss_ entries only.
    """
    entries = dict(run)
    entries |= {"ss_steps": str(steps), "ss_epoch": str(epoch), "ss_training_finished_at": str(finished_at)}
    if minimum:
        entries = {key: entries[key] for key in MINIMUM_KEYS if key in entries}
    return {**entries, **spec}
