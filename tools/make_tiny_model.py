"""Build a small Stable Diffusion of the real structure with random weights, as a Diffusers folder.

    python tools/make_tiny_model.py FOLDER --family sd1

Every part is a real one with small widths, so all loading, training and saving code runs on it. Nothing is downloaded:
the tokenizer comes from the vocabulary inside the open_clip_torch package.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

# width and layers of a text encoder by its tokenizer; other programs tell those of SDXL apart by their widths
TEXT_SIZES = {"sd1": (64, 2), "sd2": (64, 3), "sdxl1": (32, 2), "sdxl2": (64, 3)}
PIPELINES = {"sd1": "StableDiffusionPipeline", "sd2": "StableDiffusionPipeline", "sdxl": "StableDiffusionXLPipeline"}


def _text_encoder(layout: Any) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    width, layers = TEXT_SIZES[layout.tokenizer]
    config = CLIPTextConfig(
        vocab_size=49408,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        hidden_act="gelu" if layout.openclip else "quick_gelu",
        projection_dim=width,
        bos_token_id=49406,
        eos_token_id=49407,
        pad_token_id=0 if layout.openclip else 49407,
    )
    return (CLIPTextModelWithProjection if layout.projection else CLIPTextModel)(config)


def _unet(family: str, width: int) -> Any:
    from diffusers import UNet2DConditionModel

    if family == "sdxl":
        widths = [width, 2 * width, 2 * width]
        return UNet2DConditionModel(
            block_out_channels=widths,
            layers_per_block=2,
            down_block_types=["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
            up_block_types=["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
            transformer_layers_per_block=[1, 1, 2],
            cross_attention_dim=TEXT_SIZES["sdxl1"][0] + TEXT_SIZES["sdxl2"][0],
            attention_head_dim=[max(1, each // 64) for each in widths],
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=TEXT_SIZES["sdxl2"][0] + 6 * 256,
            sample_size=8,
        )
    widths = [width, 2 * width, 2 * width, 2 * width]
    return UNet2DConditionModel(
        block_out_channels=widths,
        layers_per_block=2,
        cross_attention_dim=TEXT_SIZES[family][0],
        attention_head_dim=[max(1, each // 64) for each in widths] if family == "sd2" else 8,
        use_linear_projection=family == "sd2",
        sample_size=8,
    )


def _vae(family: str) -> Any:
    from diffusers import AutoencoderKL

    from library.model_configs import LATENT_SCALES

    return AutoencoderKL(
        block_out_channels=[32, 32, 32, 32],
        layers_per_block=2,
        latent_channels=4,
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        sample_size=64,
        scaling_factor=LATENT_SCALES[family],
    )


def make_tiny_model(folder: Path, family: str = "sd1", seed: int = 0, width: int = 32) -> Path:
    """Write a complete small model.

    Args:
        folder: a new folder. family: ``sd1``, ``sd2`` or ``sdxl``. seed: of the weights, which equal
            seeds repeat.
        width: channels of the first U-Net level, a multiple of 32.

    Returns:
        ``folder``, in the layout of diffusers' StableDiffusionPipeline or StableDiffusionXLPipeline.
    """
    import torch
    from diffusers import DDIMScheduler

    from library.checkpoint_keys import TEXT_LAYOUTS
    from library.model_configs import NOISE_SCHEDULE
    from library.tokenizers import KINDS, shipped_vocabulary, write_tokenizer_files

    vocabulary = shipped_vocabulary()
    if vocabulary is None:
        raise SystemExit("the CLIP vocabulary is missing: pip install --no-deps open_clip_torch")
    layouts = TEXT_LAYOUTS[family]
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    unet, vae, text_encoders = _unet(family, width), _vae(family), [_text_encoder(layout) for layout in layouts]
    torch.random.set_rng_state(state)
    unet.save_pretrained(folder / "unet")
    vae.save_pretrained(folder / "vae")
    index: dict[str, Any] = {
        "_class_name": PIPELINES[family],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "scheduler": ["diffusers", "DDIMScheduler"],
        "feature_extractor": [None, None],
    }
    for layout, encoder in zip(layouts, text_encoders):
        tokenizer = layout.folder.replace("text_encoder", "tokenizer")
        encoder.save_pretrained(folder / layout.folder)
        write_tokenizer_files(folder / tokenizer, vocabulary, KINDS[layout.tokenizer].pad_token)
        index |= {layout.folder: ["transformers", type(encoder).__name__], tokenizer: ["transformers", "CLIPTokenizer"]}
    DDIMScheduler(**NOISE_SCHEDULE, clip_sample=False, set_alpha_to_one=False, steps_offset=1).save_pretrained(
        folder / "scheduler"
    )
    index |= {"image_encoder": [None, None]} if family == "sdxl" else {"safety_checker": [None, None]}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", choices=sorted(PIPELINES), default="sd1")
    parser.add_argument("--width", type=int, default=32, help="channels of the first U-Net level, a multiple of 32")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(make_tiny_model(options.folder, options.family, options.seed, options.width))


if __name__ == "__main__":
    main()
