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

TEXT_WIDTHS = {"sd1": 64, "sd2": 64}
TEXT_LAYERS = {"sd1": 2, "sd2": 3}


def _text_encoder(family: str) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    width = TEXT_WIDTHS[family]
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=49408,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=TEXT_LAYERS[family],
            num_attention_heads=max(1, width // 64),
            hidden_act="gelu" if family == "sd2" else "quick_gelu",
            projection_dim=width,
            bos_token_id=49406,
            eos_token_id=49407,
            pad_token_id=0 if family == "sd2" else 49407,
        )
    )


def _unet(family: str, width: int) -> Any:
    from diffusers import UNet2DConditionModel

    widths = [width, 2 * width, 2 * width, 2 * width]
    return UNet2DConditionModel(
        block_out_channels=widths,
        layers_per_block=2,
        cross_attention_dim=TEXT_WIDTHS[family],
        attention_head_dim=[max(1, each // 64) for each in widths] if family == "sd2" else 8,
        use_linear_projection=family == "sd2",
        sample_size=8,
    )


def _vae() -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=[32, 32, 32, 32],
        layers_per_block=2,
        latent_channels=4,
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        sample_size=64,
    )


def make_tiny_model(folder: Path, family: str = "sd1", seed: int = 0, width: int = 32) -> Path:
    """Write a complete small model.

    Args:
        folder: a new folder. family: ``sd1`` or ``sd2``. seed: of the random weights, which equal seeds repeat.
        width: channels of the first U-Net level, a multiple of 32.

    Returns:
        ``folder``, in the layout of diffusers' StableDiffusionPipeline.
    """
    import torch
    from diffusers import DDIMScheduler

    from library.model_configs import NOISE_SCHEDULE
    from library.tokenizers import KINDS, shipped_vocabulary, write_tokenizer_files

    vocabulary = shipped_vocabulary()
    if vocabulary is None:
        raise SystemExit("the CLIP vocabulary is missing: pip install --no-deps open_clip_torch")
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    unet, vae, text_encoder = _unet(family, width), _vae(), _text_encoder(family)
    torch.random.set_rng_state(state)
    unet.save_pretrained(folder / "unet")
    vae.save_pretrained(folder / "vae")
    text_encoder.save_pretrained(folder / "text_encoder")
    write_tokenizer_files(folder / "tokenizer", vocabulary, KINDS[family].pad_token)
    DDIMScheduler(**NOISE_SCHEDULE, clip_sample=False, set_alpha_to_one=False, steps_offset=1).save_pretrained(
        folder / "scheduler"
    )
    index = {
        "_class_name": "StableDiffusionPipeline",
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "scheduler": ["diffusers", "DDIMScheduler"],
        "safety_checker": [None, None],
        "feature_extractor": [None, None],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", choices=sorted(TEXT_WIDTHS), default="sd1")
    parser.add_argument("--width", type=int, default=32, help="channels of the first U-Net level, a multiple of 32")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(make_tiny_model(options.folder, options.family, options.seed, options.width))


if __name__ == "__main__":
    main()
