"""What is special about a kind of model, as one value each; the loop does not know which one it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from library.checkpoint import LoadedModel, check_model, load_sd_model
from library.text_encoding import encode, tokenize

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelFamily:
    """One kind of model.

    Attributes:
        name: for messages. bucket_divisor: bucket steps must be a multiple of it. latent_scale: factor on VAE latents.
        cache_suffix: part of the names of latent cache files.
        check: refuses a wrong model file from its header; called with (path, v2=...).
        load: called with (path, v2=..., dtype=..., vae_path=..., tokenizer_cache=...).
        tokenize: called with (tokenizers, captions, max_token_length); one (B, n, 77) tensor per encoder.
        encode_text: called with (text_encoders, input_ids_list, clip_skip); gives what ``predict`` takes.
        predict: called with (unet, noisy_latents, timesteps, conditioning, batch); (B, C, h, w).
        version: called with (v2, v_parameterization); the name in LoRA metadata.
        architecture: called with (v2, v_parameterization); the modelspec name.
        pipeline: called with (model, scheduler); a Diffusers pipeline over the same modules.
    """

    name: str
    bucket_divisor: int
    latent_scale: float
    cache_suffix: str
    check: Callable[..., None]
    load: Callable[..., LoadedModel]
    tokenize: Callable[[Sequence[Any], Sequence[str], int | None], list[Tensor]]
    encode_text: Callable[[Sequence[Any], Sequence[Tensor], int | None], Any]
    predict: Callable[[Any, Tensor, Tensor, Any, dict[str, Any]], Tensor]
    version: Callable[[bool, bool], str]
    architecture: Callable[[bool, bool], str]
    pipeline: Callable[[LoadedModel, Any], Any]


def _sd_tokenize(tokenizers: Sequence[Any], captions: Sequence[str], max_token_length: int | None) -> list[Tensor]:
    return [tokenize(tokenizer, captions, max_token_length) for tokenizer in tokenizers]


def _sd_encode(text_encoders: Sequence[Any], input_ids: Sequence[Tensor], clip_skip: int | None) -> Tensor:
    return encode(text_encoders[0], input_ids[0], clip_skip)


def _sd_predict(unet: Any, noisy: Tensor, timesteps: Tensor, hidden: Tensor, batch: dict[str, Any]) -> Tensor:
    return unet(noisy, timesteps, encoder_hidden_states=hidden, return_dict=False)[0]


def _sd_pipeline(model: LoadedModel, scheduler: Any) -> Any:
    from diffusers import StableDiffusionPipeline

    return StableDiffusionPipeline(
        vae=model.vae,
        text_encoder=model.text_encoders[0],
        tokenizer=model.tokenizers[0],
        unet=model.unet,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _sd_version(v2: bool, v_parameterization: bool) -> str:
    return f"sd_{'v2' if v2 else 'v1'}{'_v' if v_parameterization else ''}"


def _sd_architecture(v2: bool, v_parameterization: bool) -> str:
    if not v2:
        return "stable-diffusion-v1"
    return "stable-diffusion-v2-768-v" if v_parameterization else "stable-diffusion-v2-512"


SD = ModelFamily(
    name="Stable Diffusion 1.x/2.x",
    bucket_divisor=64,
    latent_scale=0.18215,
    cache_suffix="sd",
    check=check_model,
    load=load_sd_model,
    tokenize=_sd_tokenize,
    encode_text=_sd_encode,
    predict=_sd_predict,
    version=_sd_version,
    architecture=_sd_architecture,
    pipeline=_sd_pipeline,
)


def set_attention(unet: Any, choice: str) -> None:
    """Choose how a Diffusers U-Net computes attention.

    Args:
        choice: ``mem_eff_attn`` (in slices), ``xformers``, ``sdpa``, or ``plain``. Without the xformers package
            ``xformers`` becomes ``sdpa`` with one warning, since front-ends send it by default.
    """
    from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
    from diffusers.utils import is_xformers_available

    if choice == "mem_eff_attn":
        unet.set_attention_slice("auto")
    elif choice == "xformers" and is_xformers_available() and torch.cuda.is_available():
        unet.enable_xformers_memory_efficient_attention()
    elif choice == "plain":
        unet.set_attn_processor(AttnProcessor())
    else:
        if choice == "xformers":
            log.warning("--xformers: the package cannot be used here, torch's scaled dot product attention is used")
        unet.set_attn_processor(AttnProcessor2_0())
