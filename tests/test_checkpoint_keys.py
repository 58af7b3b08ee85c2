"""Key maps against the key lists of full-size checkpoints, on models without weights."""

from __future__ import annotations

import pytest
import torch

from library import checkpoint_keys as keys
from tests.conftest import spec_fixture


def meta_models(v2: bool):
    """Full-size SD1.5 or SD2 parts on the meta device."""
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    with torch.device("meta"):
        unet = UNet2DConditionModel(
            cross_attention_dim=1024 if v2 else 768,
            attention_head_dim=[5, 10, 20, 20] if v2 else 8,
            use_linear_projection=v2,
            block_out_channels=(320, 640, 1280, 1280),
        )
        vae = AutoencoderKL(
            block_out_channels=[128, 256, 512, 512],
            layers_per_block=2,
            latent_channels=4,
            down_block_types=["DownEncoderBlock2D"] * 4,
            up_block_types=["UpDecoderBlock2D"] * 4,
        )
        width, layers, mlp, heads = (1024, 23, 4096, 16) if v2 else (768, 12, 3072, 12)
        text = CLIPTextModel(
            CLIPTextConfig(
                hidden_size=width, num_hidden_layers=layers, intermediate_size=mlp, num_attention_heads=heads
            )
        )
    return unet, vae, text


@pytest.mark.parametrize("v2,fixture", [(False, "checkpoint_keys_sd15.json"), (True, "checkpoint_keys_sd2.json")])
def test_written_keys_and_shapes_equal_the_checkpoint(v2, fixture):
    from library.checkpoint import single_file_tensors

    unet, vae, text = meta_models(v2)
    written = single_file_tensors("sd2" if v2 else "sd1", unet.state_dict(), vae.state_dict(), [text.state_dict()])
    expected = spec_fixture(fixture)
    expected = expected.get("keys", expected)
    assert {key: list(value.shape) for key, value in written.items()} == {k: list(v) for k, v in expected.items()}


@pytest.mark.parametrize("v2", [False, True])
def test_every_table_is_undone_by_its_inverse(v2):
    unet, vae, _ = meta_models(v2)
    for ours, of_diffusers, of_file in (
        (list(unet.state_dict()), keys.unet_table_of_diffusers, keys.unet_table_of_file),
        (list(vae.state_dict()), keys.vae_table_of_diffusers, keys.vae_table_of_file),
    ):
        file = [keys.translate(key, of_diffusers(ours)) for key in ours]
        assert None not in file and len(set(file)) == len(ours)
        assert [keys.translate(key, keys.inverted(of_file(file))) for key in file] == ours


def test_sdxl_unet_keys_are_a_table_away():
    expected = spec_fixture("checkpoint_keys_sdxl.json")
    expected = expected.get("keys", expected)
    file = [key.removeprefix(keys.UNET_PREFIX) for key in expected if key.startswith(keys.UNET_PREFIX)]
    back = [keys.translate(key, keys.inverted(keys.unet_table_of_file(file))) for key in file]
    assert None not in back and len(set(back)) == len(file)
    assert "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k.weight" in back
    assert "up_blocks.1.upsamplers.0.conv.weight" in back
