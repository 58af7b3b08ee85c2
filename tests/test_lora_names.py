"""Names and numbers of U-Net blocks, against the rules of the specification written out."""

from __future__ import annotations

import pytest

from networks import lora_names
from networks.lora_names import block_label, block_number
from tests.conftest import spec_fixture


def plain_number(key: str, is_sdxl: bool) -> int:
    words = key.removeprefix("lora_unet_").split("_")
    if is_sdxl:
        return {"input": 1, "middle": 10, "output": 13}[words[0]] + int(words[2])
    if words[0] == "mid":
        return 12
    level, kind, index = int(words[2]), words[3], int(words[4])
    return (1 if words[0] == "down" else 13) + 3 * level + (2 if "samplers" in kind else index)


@pytest.mark.parametrize("name", ["sd15_conv4", "sd2_diffusers_conv4", "sdxl_conv4"])
def test_every_key_of_the_specification_has_its_block(name):
    is_sdxl = name.startswith("sdxl")
    numbers = set()
    for key in spec_fixture(f"lora_keys_{name}.json"):
        module = key.split(".")[0]
        if module.startswith("lora_unet"):
            assert block_number(module, is_sdxl) == plain_number(module, is_sdxl), module
            numbers.add(block_number(module, is_sdxl))
        else:
            assert block_number(module, is_sdxl) is None
            assert block_label(module, is_sdxl) in {"TE", "TE1", "TE2"}
    assert numbers == set(range(2, 22) if is_sdxl else range(1, 25))  # conv_in is SDXL's 1


@pytest.mark.parametrize(
    "key,is_sdxl,label",
    [
        ("lora_unet_down_blocks_2_attentions_1_proj_in", False, "IN08"),
        ("lora_unet_down_blocks_0_downsamplers_0_conv", False, "IN03"),
        ("lora_unet_mid_block_attentions_0_proj_in", False, "MID"),
        ("lora_unet_up_blocks_1_attentions_0_proj_in", False, "OUT03"),
        ("lora_unet_input_blocks_8_1_proj_in", True, "IN08"),
        ("lora_unet_middle_block_1_proj_in", True, "MID"),
        ("lora_unet_output_blocks_0_1_proj_in", True, "OUT00"),
        ("lora_te2_text_model_encoder_layers_3_mlp_fc1", True, "TE2"),
    ],
)
def test_blocks_are_labelled_as_people_write_them(key, is_sdxl, label):
    assert block_label(key, is_sdxl) == label


@pytest.mark.parametrize(
    "key,number",
    [
        ("lora_unet_time_embed_0", 0),
        ("lora_unet_label_emb_0_0", 0),
        ("lora_unet_out_2", 22),
        ("lora_unet_conv_in", None),
    ],
)
def test_layers_around_the_sdxl_blocks_have_the_ends_of_the_numbers(key, number):
    assert block_number(key, True) == number


@pytest.mark.parametrize(
    "diffusers,original",
    [
        (
            "down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_k",
            "input_blocks_4_1_transformer_blocks_0_attn2_to_k",
        ),
        ("down_blocks_0_downsamplers_0_conv", "input_blocks_3_0_op"),
        ("down_blocks_2_resnets_0_conv_shortcut", "input_blocks_7_0_skip_connection"),
        ("mid_block_resnets_1_time_emb_proj", "middle_block_2_emb_layers_1"),
        ("mid_block_attentions_0_proj_out", "middle_block_1_proj_out"),
        ("up_blocks_1_upsamplers_0_conv", "output_blocks_5_2_conv"),
        ("up_blocks_2_resnets_2_conv2", "output_blocks_8_0_out_layers_3"),
        ("input_blocks_4_1_proj_in", "input_blocks_4_1_proj_in"),
    ],
)
def test_sdxl_keys_are_renamed(diffusers, original):
    assert lora_names.diffusers_sdxl_key_to_ldm(f"lora_unet_{diffusers}") == f"lora_unet_{original}"


@pytest.mark.parametrize("path", ["encoder.layers.0.mlp.fc1", "text_model.encoder.layers.0.mlp.fc1"])
def test_text_encoder_keys_keep_the_level_that_transformers_5_left_out(path):
    assert lora_names.text_encoder_key(path, 0, 1) == "lora_te_text_model_encoder_layers_0_mlp_fc1"
    assert lora_names.text_encoder_key(path, 1, 2) == "lora_te2_text_model_encoder_layers_0_mlp_fc1"
