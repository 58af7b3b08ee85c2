"""Sizes of the parts of a model: what the shapes of a checkpoint tell, and what only the kind of model tells.

Shapes are ``{Diffusers or HF key: shape}``. What shapes cannot tell is a rule: the U-Net of SD1 has 8 heads, those of
SD2 and SDXL and every CLIP text encoder have heads 64 wide; norms have 32 groups. The rules also hold for tiny models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

Shapes = Mapping[str, Sequence[int]]
HEAD_WIDTH = 64
SD1_HEADS = 8
SAMPLE_SIZES = {"sd1": 64, "sd2": 96, "sdxl": 128}
SIZE_EMBEDDING_WIDTH = 256  # of each of the six numbers SDXL is told about an image's size
LATENT_SCALES = {"sd1": 0.18215, "sd2": 0.18215, "sdxl": 0.13025}
NOISE_SCHEDULE = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
}


def _count(shapes: Shapes, pattern: str) -> int:
    """Count the different numbers that the group of ``pattern`` takes."""
    matcher = re.compile(pattern)
    return len({match.group(1) for key in shapes if (match := matcher.match(key))})


def unet_config(shapes: Shapes, kind: str, *, linear_projection: bool) -> dict[str, Any]:
    """Give the config of a UNet2DConditionModel.

    Args:
        shapes: of the U-Net, Diffusers keys. kind: ``sd1``, ``sd2`` or ``sdxl``.
        linear_projection: proj_in and proj_out are linear layers, as in SDXL and a Diffusers folder of SD2.
    """
    levels = _count(shapes, r"down_blocks\.(\d+)\.")
    widths = [shapes[f"down_blocks.{level}.resnets.0.conv1.weight"][0] for level in range(levels)]
    with_attention = [f"down_blocks.{level}.attentions.0.proj_in.weight" in shapes for level in range(levels)]
    cross = next(shape[1] for key, shape in shapes.items() if key.endswith("attn2.to_k.weight"))
    config = {
        "in_channels": shapes["conv_in.weight"][1],
        "out_channels": shapes["conv_out.weight"][0],
        "block_out_channels": widths,
        "layers_per_block": _count(shapes, r"down_blocks\.0\.resnets\.(\d+)\."),
        "down_block_types": ["CrossAttnDownBlock2D" if has else "DownBlock2D" for has in with_attention],
        "up_block_types": ["CrossAttnUpBlock2D" if has else "UpBlock2D" for has in reversed(with_attention)],
        "cross_attention_dim": cross,
        # Diffusers calls the number of heads attention_head_dim
        "attention_head_dim": SD1_HEADS if kind == "sd1" else [max(1, width // HEAD_WIDTH) for width in widths],
        "use_linear_projection": linear_projection,
        "norm_num_groups": 32,
        "sample_size": SAMPLE_SIZES[kind],
    }
    if kind == "sdxl":
        depths = [
            _count(shapes, rf"down_blocks\.{level}\.attentions\.0\.transformer_blocks\.(\d+)\.") or 1
            for level in range(levels)
        ]
        config |= {
            "transformer_layers_per_block": depths,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": SIZE_EMBEDDING_WIDTH,
            "projection_class_embeddings_input_dim": shapes["add_embedding.linear_1.weight"][1],
        }
    return config


def vae_config(shapes: Shapes, scaling_factor: float) -> dict[str, Any]:
    """Give the config of an AutoencoderKL."""
    levels = _count(shapes, r"encoder\.down_blocks\.(\d+)\.")
    return {
        "in_channels": shapes["encoder.conv_in.weight"][1],
        "out_channels": shapes["decoder.conv_out.weight"][0],
        "latent_channels": shapes["post_quant_conv.weight"][0],
        "block_out_channels": [
            shapes[f"encoder.down_blocks.{level}.resnets.0.conv1.weight"][0] for level in range(levels)
        ],
        "layers_per_block": _count(shapes, r"encoder\.down_blocks\.0\.resnets\.(\d+)\."),
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
        "norm_num_groups": 32,
        "sample_size": 512,
        "scaling_factor": scaling_factor,
    }


def text_config(shapes: Shapes, *, openclip: bool) -> dict[str, Any]:
    """Give the config of a CLIPTextModel; OpenCLIP's use exact GELU and pad with id 0."""
    prefix = "text_model.encoder.layers"
    width = shapes["text_model.embeddings.token_embedding.weight"][1]
    return {
        "vocab_size": shapes["text_model.embeddings.token_embedding.weight"][0],
        "hidden_size": width,
        "intermediate_size": shapes[f"{prefix}.0.mlp.fc1.weight"][0],
        "num_hidden_layers": _count(shapes, rf"{re.escape(prefix)}\.(\d+)\."),
        "num_attention_heads": max(1, width // HEAD_WIDTH),
        "max_position_embeddings": shapes["text_model.embeddings.position_embedding.weight"][0],
        "hidden_act": "gelu" if openclip else "quick_gelu",
        "projection_dim": shapes.get("text_projection.weight", (width,))[0],
        "bos_token_id": 49406,
        "eos_token_id": 49407,
        "pad_token_id": 0 if openclip else 49407,
    }
