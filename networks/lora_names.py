"""From a module's path to its LoRA key, block number and role; no torch."""

from __future__ import annotations

import re

from library.checkpoint_keys import Table, canonical_text_key, translate, unet_table

PREFIX_UNET = "lora_unet"
PREFIX_TEXT_ENCODER = "lora_te"
SD_BLOCKS = 25
SDXL_BLOCKS = 23
SDXL_UNET_TABLE: Table = unet_table(levels=3, layers=2, up_levels_with_attention=(0, 1))


def unet_key(path: str, is_sdxl: bool) -> str:
    """Give the key of a U-Net module by its Diffusers path; SDXL keys use the block names of the original."""
    if is_sdxl:
        path = translate(path, SDXL_UNET_TABLE) or path
    return f"{PREFIX_UNET}_{path.replace('.', '_')}"


def text_encoder_prefix(index: int, count: int) -> str:
    """Give the key prefix of text encoder ``index`` of ``count``."""
    return PREFIX_TEXT_ENCODER if count == 1 else f"{PREFIX_TEXT_ENCODER}{index + 1}"


def text_encoder_key(path: str, index: int, count: int) -> str:
    """Give the key of a text encoder module; the ``text_model`` level is always part of it."""
    return f"{text_encoder_prefix(index, count)}_{canonical_text_key(path).replace('.', '_')}"


def diffusers_sdxl_key_to_ldm(key: str) -> str:
    """Rename an SDXL U-Net key that uses Diffusers block names; others come back unchanged."""
    for prefix, replacement in _underscored_sdxl_table():
        if key.startswith(f"{PREFIX_UNET}_{prefix}"):
            return f"{PREFIX_UNET}_{replacement}{key[len(PREFIX_UNET) + 1 + len(prefix) :]}"
    return key


def _underscored_sdxl_table() -> list[tuple[str, str]]:
    table = ((ours.replace(".", "_"), file.replace(".", "_")) for ours, file in SDXL_UNET_TABLE.items())
    return sorted(table, key=lambda pair: -len(pair[0]))


_SD_BLOCK = re.compile(r"lora_unet_(down|up)_blocks_(\d+)_(resnets|attentions|downsamplers|upsamplers)_(\d+)")
_SDXL_BLOCK = re.compile(r"lora_unet_(input_blocks|middle_block|output_blocks)_(\d+)")
_SDXL_FIRST = {"input_blocks": 1, "middle_block": 10, "output_blocks": 13}


def block_number(key: str, is_sdxl: bool) -> int | None:
    """Give the number of the U-Net block a key lies in, None outside of every block.

    SD has numbers 1 to 24 (12 is the middle), SDXL 0 to 22.
    """
    if is_sdxl:
        found = _SDXL_BLOCK.match(key)
        if found:
            return _SDXL_FIRST[found[1]] + int(found[2])
        outside = {"time_embed": 0, "label_emb": 0, "out_": SDXL_BLOCKS - 1}
        return next((number for name, number in outside.items() if key.startswith(f"{PREFIX_UNET}_{name}")), None)
    if key.startswith("lora_unet_mid_block"):
        return 12
    found = _SD_BLOCK.match(key)
    if not found:
        return None
    side, level, kind, index = found[1], int(found[2]), found[3], int(found[4])
    if kind.endswith("samplers"):
        index = 2
    return (1 if side == "down" else 13) + 3 * level + index


def block_label(key: str, is_sdxl: bool) -> str:
    """Give a short name of the block as people write it: IN08, MID, OUT03, TE."""
    if not key.startswith(PREFIX_UNET):
        return key.split("_text_model")[0].removeprefix("lora_").upper()
    number = block_number(key, is_sdxl)
    if number is None:
        return ""
    first_middle, first_out = (10, 13) if is_sdxl else (12, 13)
    if number < first_middle:
        return f"IN{number - 1 if is_sdxl else number:02d}"
    return "MID" if number < first_out else f"OUT{number - first_out:02d}"
