"""Key maps between single-file checkpoints and the names Diffusers and transformers use, as prefix tables.

A table holds {our prefix: file prefix} for one model's structure. A key is translated by its longest prefix in the
table; below a residual block the inner names are translated too. Tables are built from a few numbers read off the
keys, so the same code serves full-size and tiny models. Nothing here needs torch: values are only reshaped or joined.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

UNET_PREFIX = "model.diffusion_model."
VAE_PREFIX = "first_stage_model."


@dataclass(frozen=True)
class TextLayout:
    """Where a text encoder of a model lies.

    Attributes:
        prefix: of its keys in a single file. folder: its name in a Diffusers folder. tokenizer: name of its tokenizer.
        openclip: the file uses OpenCLIP's names and the encoder exact GELU and pad id 0.
        layers: how many are taken of a file that has more, None takes all. projection: it ends in a projection.
    """

    prefix: str
    folder: str
    tokenizer: str
    openclip: bool = False
    layers: int | None = None
    projection: bool = False


TEXT_LAYOUTS: dict[str, tuple[TextLayout, ...]] = {
    "sd1": (TextLayout("cond_stage_model.transformer.", "text_encoder", "sd1"),),
    # files of the original hold 24 layers; the last one is never used
    "sd2": (TextLayout("cond_stage_model.model.", "text_encoder", "sd2", openclip=True, layers=23),),
    "sdxl": (
        TextLayout("conditioner.embedders.0.transformer.", "text_encoder", "sdxl1"),
        TextLayout("conditioner.embedders.1.model.", "text_encoder_2", "sdxl2", openclip=True, projection=True),
    ),
}
LOGIT_SCALE = "conditioner.embedders.1.model.logit_scale"  # no part of the encoder, carried from file to file
PROJECTION = "text_projection"

UNET_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
VAE_RESNET = {"conv_shortcut": "nin_shortcut"}
VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
OPENCLIP_LAYER = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}
OPENCLIP_EMBEDDINGS = {
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "text_model.embeddings.token_embedding": "token_embedding",
    "text_model.final_layer_norm": "ln_final",
}

Table = dict[str, str]


def translate(key: str, table: Mapping[str, str]) -> str | None:
    """Give ``key`` with its longest prefix in ``table`` replaced, None when no prefix is in it."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        replacement = table.get(".".join(parts[:length]))
        if replacement is not None:
            return ".".join([replacement, *parts[length:]])
    return None


def inverted(table: Mapping[str, str]) -> Table:
    """Give the table of the other direction."""
    return {file: ours for ours, file in table.items()}


# ---------------------------------------------------------------------------------------------------------- U-Net


def unet_table(levels: int, layers: int, up_levels_with_attention: Collection[int]) -> Table:
    """Build {Diffusers prefix: file prefix} of a U-Net.

    Args:
        levels: resolution levels. layers: residual blocks of a level on the way down.
        up_levels_with_attention: numbers of the up blocks that have attentions.
    """
    table = {
        "conv_in": "input_blocks.0.0",
        "conv_norm_out": "out.0",
        "conv_out": "out.2",
        "time_embedding.linear_1": "time_embed.0",
        "time_embedding.linear_2": "time_embed.2",
        "add_embedding.linear_1": "label_emb.0.0",
        "add_embedding.linear_2": "label_emb.0.2",
        "mid_block.attentions.0": "middle_block.1",
    }
    resnets = {f"mid_block.resnets.{index}": f"middle_block.{2 * index}" for index in range(2)}
    each = layers + 1
    for level in range(levels):
        for index in range(layers):
            resnets[f"down_blocks.{level}.resnets.{index}"] = f"input_blocks.{each * level + index + 1}.0"
            table[f"down_blocks.{level}.attentions.{index}"] = f"input_blocks.{each * level + index + 1}.1"
        table[f"down_blocks.{level}.downsamplers.0.conv"] = f"input_blocks.{each * (level + 1)}.0.op"
        for index in range(each):
            resnets[f"up_blocks.{level}.resnets.{index}"] = f"output_blocks.{each * level + index}.0"
            table[f"up_blocks.{level}.attentions.{index}"] = f"output_blocks.{each * level + index}.1"
        place = 2 if level in up_levels_with_attention else 1
        table[f"up_blocks.{level}.upsamplers.0.conv"] = f"output_blocks.{each * level + layers}.{place}.conv"
    return table | _with_inner_names(resnets, UNET_RESNET)


def _with_inner_names(blocks: Table, inner: Table) -> Table:
    named = {f"{ours}.{name}": f"{file}.{other}" for ours, file in blocks.items() for name, other in inner.items()}
    return blocks | named


def unet_table_of_diffusers(keys: Collection[str]) -> Table:
    """Build the table for a U-Net given by its Diffusers keys."""
    names = set(keys)
    levels = _numbers(names, "down_blocks.{}.resnets.0.conv1.weight")
    layers = _numbers(names, "down_blocks.0.resnets.{}.conv1.weight")
    attention = {level for level in range(levels) if f"up_blocks.{level}.attentions.0.proj_in.weight" in names}
    return unet_table(levels, layers, attention)


def unet_table_of_file(keys: Collection[str]) -> Table:
    """Build the table for a U-Net given by its file keys, their prefix removed."""
    names = set(keys)
    downsamplers = sorted(int(key.split(".")[1]) for key in names if key.endswith(".0.op.weight"))
    levels, layers = len(downsamplers) + 1, downsamplers[0] - 1
    attention = {level for level in range(levels) if f"output_blocks.{(layers + 1) * level}.1.proj_in.weight" in names}
    return unet_table(levels, layers, attention)


def _numbers(names: Collection[str], pattern: str) -> int:
    count = 0
    while pattern.format(count) in names:
        count += 1
    return count


# ------------------------------------------------------------------------------------------------------------ VAE


def vae_table(levels: int, layers: int) -> Table:
    """Build {Diffusers prefix: file prefix} of an AutoencoderKL with ``layers`` blocks a level in its encoder."""
    table: Table = {"quant_conv": "quant_conv", "post_quant_conv": "post_quant_conv"}
    resnets: Table = {}
    attentions: Table = {}
    for side in ("encoder", "decoder"):
        table |= {f"{side}.{name}": f"{side}.{name}" for name in ("conv_in", "conv_out")}
        table[f"{side}.conv_norm_out"] = f"{side}.norm_out"
        attentions[f"{side}.mid_block.attentions.0"] = f"{side}.mid.attn_1"
        for index in range(2):
            resnets[f"{side}.mid_block.resnets.{index}"] = f"{side}.mid.block_{index + 1}"
    for level in range(levels):
        table[f"encoder.down_blocks.{level}.downsamplers.0"] = f"encoder.down.{level}.downsample"
        table[f"decoder.up_blocks.{level}.upsamplers.0"] = f"decoder.up.{levels - 1 - level}.upsample"
        for index in range(layers):
            resnets[f"encoder.down_blocks.{level}.resnets.{index}"] = f"encoder.down.{level}.block.{index}"
        for index in range(layers + 1):
            resnets[f"decoder.up_blocks.{level}.resnets.{index}"] = f"decoder.up.{levels - 1 - level}.block.{index}"
    return table | _with_inner_names(resnets, VAE_RESNET) | _with_inner_names(attentions, VAE_ATTENTION)


def vae_table_of_diffusers(keys: Collection[str]) -> Table:
    """Build the table for a VAE given by its Diffusers keys."""
    names = set(keys)
    return vae_table(
        _numbers(names, "encoder.down_blocks.{}.resnets.0.conv1.weight"),
        _numbers(names, "encoder.down_blocks.0.resnets.{}.conv1.weight"),
    )


def vae_table_of_file(keys: Collection[str]) -> Table:
    """Build the table for a VAE given by its file keys, their prefix removed."""
    names = set(keys)
    return vae_table(
        _numbers(names, "encoder.down.{}.block.0.conv1.weight"), _numbers(names, "encoder.down.0.block.{}.conv1.weight")
    )


def is_vae_attention_matrix(key: str) -> bool:
    """Say whether a Diffusers VAE key names a matrix that files hold as a 1x1 convolution."""
    return ".attentions.0.to_" in key and key.endswith(".weight")


# ------------------------------------------------------------------------------------------------- text encoders


def canonical_text_key(key: str) -> str:
    """Give a text encoder key with its ``text_model.`` level, which transformers 5 and some SD1 files leave out."""
    top = key.split(".", 1)[0]
    return f"text_model.{key}" if top in ("embeddings", "encoder", "final_layer_norm") else key


def openclip_table(layers: int) -> Table:
    """Build {HF prefix: OpenCLIP prefix}; the fused query, key and value matrices are handled apart."""
    blocks = {f"text_model.encoder.layers.{index}": f"transformer.resblocks.{index}" for index in range(layers)}
    return OPENCLIP_EMBEDDINGS | _with_inner_names(blocks, OPENCLIP_LAYER)


def openclip_to_hf(tensors: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Translate OpenCLIP tensors, their prefix removed, and split the fused projections.

    Args:
        tensors: file key -> tensor. layers: how many layers to take; SD2 leaves its last one out.
    """
    table = inverted(openclip_table(layers))
    result: dict[str, Any] = {}
    for key, value in tensors.items():
        if key.split(".")[0] == PROJECTION:  # files multiply from the right, a linear layer from the left
            result[f"{PROJECTION}.weight"] = value.T
            continue
        ours = translate(key, table)
        if ours is None:
            continue
        if ".attn.in_proj_" in key:
            block, kind = ours.split(".attn.in_proj_")
            for name, part in zip("qkv", value.chunk(3, dim=0)):
                result[f"{block}.self_attn.{name}_proj.{kind}"] = part
        else:
            result[ours] = value
    return result


def hf_to_openclip(tensors: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Translate HF tensors with canonical keys to OpenCLIP's and join query, key and value."""
    import torch

    table = openclip_table(layers)
    result: dict[str, Any] = {}
    for key, value in tensors.items():
        if key == f"{PROJECTION}.weight":
            result[PROJECTION] = value.T
        elif ".self_attn.q_proj." in key:
            joined = [tensors[key.replace(".q_proj.", f".{name}_proj.")] for name in "qkv"]
            block, kind = key.split(".self_attn.q_proj.")
            result[f"{table[block]}.attn.in_proj_{kind}"] = torch.cat(joined, dim=0)
        elif ".self_attn.k_proj." not in key and ".self_attn.v_proj." not in key:
            translated = translate(key, table)
            if translated is not None:
                result[translated] = value
    return result
