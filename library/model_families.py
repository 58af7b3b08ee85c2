"""What is special about a kind of model, as one value each; the loop does not know which one it runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from library.checkpoint import LoadedModel, check_model, load_model
from library.model_configs import LATENT_SCALES, NOISE_SCHEDULE
from library.text_encoding import encode, encode_penultimate, tokenize, tokenize_with_weights, weighted

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelFamily:
    """One kind of model.

    Attributes:
        name: for messages. bucket_divisor: bucket steps must be a multiple of it. latent_scale: factor on VAE latents.
        cache_suffix: part of the names of latent cache files.
        text_outputs: names of what ``encode_text`` gives, in files of cached outputs.
        layer_of_text: captions are encoded by the layer that ``clip_skip`` names; False for a fixed one.
        lr_blocks: how many blocks ``block_lr`` gives rates for, 0 where there is no such option.
        block_of: called with a U-Net parameter's name in files; its block number.
        idle_parameters: called with the text encoders; those parameters that no prediction depends on.
        resolution: modelspec resolution where none is given.
        implementation: modelspec name of the code that defines the layout of files, for a LoRA and for a model.
        kind: called with (v2); key of the tables of file layouts.
        check: refuses a wrong model file from its header; called with (path, kind).
        load: called with (path, kind, dtype=..., vae_path=..., tokenizer_cache=..., mapped=...).
        tokenize: called with (tokenizers, captions, max_token_length); one (B, n, 77) tensor per encoder.
        tokenize_with_weights: called with the same, reads attention weights; (ids, weights), a list of each.
        encode_text: called with (text_encoders, input_ids_list, clip_skip); list of tensors that ``predict`` takes.
        predict: called with (unet, noisy_latents, timesteps, text_outputs, batch); (B, C, h, w).
        version: called with (v2, v_parameterization); the name in LoRA metadata.
        architecture: called with (v2, v_parameterization); the modelspec name.
        pipeline: called with (model, scheduler); a Diffusers pipeline over the same modules.
        prompt_arguments: called with text outputs of a prompt; what the pipeline is told instead of it.
    """

    name: str
    bucket_divisor: int
    latent_scale: float
    cache_suffix: str
    text_outputs: tuple[str, ...]
    layer_of_text: bool
    lr_blocks: int
    block_of: Callable[[str], int]
    idle_parameters: Callable[[Sequence[Any]], list[torch.nn.Parameter]]
    resolution: Callable[[bool, bool], str]
    implementation: tuple[str, str]
    kind: Callable[[bool], str]
    check: Callable[[Any, str], None]
    load: Callable[..., LoadedModel]
    tokenize: Callable[[Sequence[Any], Sequence[str], int | None], list[Tensor]]
    tokenize_with_weights: Callable[[Sequence[Any], Sequence[str], int | None], tuple[list[Tensor], list[Tensor]]]
    encode_text: Callable[[Sequence[Any], Sequence[Tensor], int | None], list[Tensor]]
    predict: Callable[[Any, Tensor, Tensor, Sequence[Tensor], dict[str, Any]], Tensor]
    version: Callable[[bool, bool], str]
    architecture: Callable[[bool, bool], str]
    pipeline: Callable[[LoadedModel, Any], Any]
    prompt_arguments: Callable[[Sequence[Tensor]], dict[str, Tensor]]

    def encode_weighted(
        self,
        text_encoders: Sequence[Any],
        input_ids: Sequence[Tensor],
        weights: Sequence[Tensor],
        clip_skip: int | None,
    ) -> list[Tensor]:
        """Encode as ``encode_text`` and weight the hidden states of each encoder; a pooled output stays as it is."""
        outputs = self.encode_text(text_encoders, input_ids, clip_skip)
        return [weighted(output, own) for output, own in zip(outputs, weights)] + outputs[len(weights) :]

    def embed(
        self, model: LoadedModel, max_token_length: int | None, clip_skip: int | None, prompt: str, negative_prompt: str
    ) -> dict[str, Tensor]:
        """Encode a prompt as a weighted caption and give the pipeline's arguments for it, on the U-Net's device."""
        arguments: dict[str, Tensor] = {}
        with torch.no_grad():
            for prefix, text in (("", prompt), ("negative_", negative_prompt)):
                ids, weights = self.tokenize_with_weights(model.tokenizers, [text], max_token_length)
                ids = [own.to(encoder.device) for own, encoder in zip(ids, model.text_encoders)]
                outputs = self.encode_weighted(model.text_encoders, ids, weights, clip_skip)
                outputs = [each.to(model.unet.device) for each in outputs]
                arguments |= {prefix + name: value for name, value in self.prompt_arguments(outputs).items()}
        return arguments


GENERATIVE_MODELS = "https://github.com/Stability-AI/generative-models"


def _tokenize(tokenizers: Sequence[Any], captions: Sequence[str], max_token_length: int | None) -> list[Tensor]:
    return [tokenize(tokenizer, captions, max_token_length) for tokenizer in tokenizers]


def _tokenize_with_weights(
    tokenizers: Sequence[Any], captions: Sequence[str], max_token_length: int | None
) -> tuple[list[Tensor], list[Tensor]]:
    ids, weights = zip(*(tokenize_with_weights(tokenizer, captions, max_token_length) for tokenizer in tokenizers))
    return list(ids), list(weights)


# ----------------------------------------------------------------------------------------- Stable Diffusion 1.x, 2.x


def _sd_encode(text_encoders: Sequence[Any], input_ids: Sequence[Tensor], clip_skip: int | None) -> list[Tensor]:
    return [encode(text_encoders[0], input_ids[0], clip_skip)]


def _sd_predict(unet: Any, noisy: Tensor, timesteps: Tensor, text: Sequence[Tensor], batch: dict[str, Any]) -> Tensor:
    return unet(noisy, timesteps, encoder_hidden_states=text[0], return_dict=False)[0]


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
    latent_scale=LATENT_SCALES["sd1"],
    cache_suffix="sd",
    text_outputs=("hidden_state",),
    layer_of_text=True,
    lr_blocks=0,
    block_of=lambda name: 0,
    idle_parameters=lambda text_encoders: [],
    resolution=lambda v2, v_parameterization: "768x768" if v2 and v_parameterization else "512x512",
    implementation=("diffusers", "https://github.com/Stability-AI/stablediffusion"),
    kind=lambda v2: "sd2" if v2 else "sd1",
    check=check_model,
    load=load_model,
    tokenize=_tokenize,
    tokenize_with_weights=_tokenize_with_weights,
    encode_text=_sd_encode,
    predict=_sd_predict,
    version=_sd_version,
    architecture=_sd_architecture,
    pipeline=_sd_pipeline,
    prompt_arguments=lambda text: {"prompt_embeds": text[0]},
)


# --------------------------------------------------------------------------------------------------------------- SDXL


def _sdxl_encode(text_encoders: Sequence[Any], input_ids: Sequence[Tensor], clip_skip: int | None) -> list[Tensor]:
    first, _ = encode_penultimate(text_encoders[0], input_ids[0])
    second, pooled = encode_penultimate(text_encoders[1], input_ids[1])
    assert pooled is not None
    return [first, second, pooled]


def _sdxl_predict(unet: Any, noisy: Tensor, timesteps: Tensor, text: Sequence[Tensor], batch: dict[str, Any]) -> Tensor:
    first, second, pooled = text
    sizes = [batch[name] for name in ("original_sizes_hw", "crop_top_lefts", "target_sizes_hw")]
    conditions = {"text_embeds": pooled, "time_ids": torch.cat(sizes, dim=1).to(noisy.device)}
    hidden = torch.cat([first, second], dim=-1)
    return unet(noisy, timesteps, encoder_hidden_states=hidden, added_cond_kwargs=conditions, return_dict=False)[0]


def _sdxl_pipeline(model: LoadedModel, scheduler: Any) -> Any:
    from diffusers import StableDiffusionXLPipeline

    return StableDiffusionXLPipeline(
        vae=model.vae,
        text_encoder=model.text_encoders[0],
        text_encoder_2=model.text_encoders[1],
        tokenizer=model.tokenizers[0],
        tokenizer_2=model.tokenizers[1],
        unet=model.unet,
        scheduler=scheduler,
        add_watermarker=False,
    )


SDXL_BLOCKS = 23
_FIRST_BLOCK = {"input_blocks": 1, "middle_block": 10, "output_blocks": 13, "out": SDXL_BLOCKS - 1}


def _sdxl_block(name: str) -> int:
    """Give 0 for the embeddings of time and size, then input, middle and output blocks, and the last for ``out``."""
    kind, number = name.split(".")[:2]
    first = _FIRST_BLOCK.get(kind, 0)
    return first + int(number) if kind.endswith(("_blocks", "_block")) else first


def _sdxl_idle_parameters(text_encoders: Sequence[Any]) -> list[torch.nn.Parameter]:
    first = getattr(text_encoders[0], "text_model", text_encoders[0])
    return [*first.encoder.layers[-1].parameters(), *first.final_layer_norm.parameters()]


SDXL = ModelFamily(
    name="SDXL",
    bucket_divisor=32,
    latent_scale=LATENT_SCALES["sdxl"],
    cache_suffix="sdxl",
    text_outputs=("hidden_state1", "hidden_state2", "pool2"),
    layer_of_text=False,
    lr_blocks=SDXL_BLOCKS,
    block_of=_sdxl_block,
    idle_parameters=_sdxl_idle_parameters,
    resolution=lambda v2, v_parameterization: "1024x1024",
    implementation=(GENERATIVE_MODELS, GENERATIVE_MODELS),
    kind=lambda v2: "sdxl",
    check=check_model,
    load=load_model,
    tokenize=_tokenize,
    tokenize_with_weights=_tokenize_with_weights,
    encode_text=_sdxl_encode,
    predict=_sdxl_predict,
    version=lambda v2, v_parameterization: "sdxl_base_v1-0",
    architecture=lambda v2, v_parameterization: "stable-diffusion-xl-v1-base",
    pipeline=_sdxl_pipeline,
    prompt_arguments=lambda text: {"prompt_embeds": torch.cat(list(text[:2]), dim=-1), "pooled_prompt_embeds": text[2]},
)


FAMILIES = {"sd1": SD, "sd2": SD, "sdxl": SDXL}  # by kind of model


def pipeline_for_saving(family: ModelFamily, model: LoadedModel) -> Any:
    """Give a pipeline with the scheduler of the folder the model came from, or that of the original model."""
    import diffusers

    config = model.source / "scheduler" / "scheduler_config.json"
    if config.is_file():
        name = json.loads(config.read_text(encoding="utf-8"))["_class_name"]
        scheduler = getattr(diffusers, name).from_pretrained(config.parent, local_files_only=True)
    else:
        settings_of_original = {"clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1}
        scheduler = diffusers.DDIMScheduler(**NOISE_SCHEDULE, **settings_of_original)
    return family.pipeline(model, scheduler)


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
