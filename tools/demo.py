"""Two small runs with gradient filters, from nothing to pictures, without any network access.

``make demo`` and ``make demo-sdxl`` run this. It builds a small model of the real structure, cuts training images out
of the photographs that scikit-image ships, and starts the real scripts: two LoRAs of Stable Diffusion, or a LoRA of
SDXL and SDXL itself. Everything lands in demo_output/ or demo_output_sdxl/.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
RESOLUTION = 128
STEPS = 60

# file inside skimage.data, caption; the aspect ratios differ so that several buckets are in use
PHOTOGRAPHS = {
    "astronaut.png": "photo of an astronaut, orange suit, flag",
    "chelsea.png": "photo of a cat, close up, whiskers",
    "coffee.png": "photo of a cup of coffee, wooden table, spoon",
    "rocket.jpg": "photo of a rocket, launch pad, clouds",
    "motorcycle_left.png": "photo of a motorcycle, garage, tools",
    "page.png": "scan of a printed page, text",
}

NETWORK = ("--network_module", "networks.lora", "--network_dim", "8", "--network_alpha", "4")
# family -> name -> script and options
RUNS: dict[str, dict[str, tuple[str, list[str]]]] = {
    "sd1": {
        "signsgd_topk_change": (
            "train_network.py",
            [
                *NETWORK,
                *("--optimizer_type", "SignSGD", "--optimizer_args", "momentum=0.0", "--learning_rate", "2e-4"),
                *("--grad_filter", "topk_change"),
                *("--grad_filter_args", "topk_ratio=0.5", "log_every=1", "statistics=full"),
            ],
        ),
        "adamw8bit_topk": (
            "train_network.py",
            [
                *NETWORK,
                *("--optimizer_type", "AdamW8bit", "--learning_rate", "1e-3", "--grad_filter", "topk"),
                *("--grad_filter_args", "keep=0.1", "policy=update", "scope=global", "log_every=2"),
            ],
        ),
    },
    "sdxl": {
        "lora_topk": (
            "sdxl_train_network.py",
            [
                *(*NETWORK, "--network_train_unet_only", "--cache_text_encoder_outputs"),
                *("--optimizer_type", "AdamW", "--learning_rate", "1e-3"),
                *("--grad_filter", "topk", "--grad_filter_args", "keep=0.1", "policy=freeze", "log_every=2"),
            ],
        ),
        "full_topk": (
            "sdxl_train.py",
            [
                *("--optimizer_type", "AdamW8bit", "--learning_rate", "1e-4", "--save_model_as", "safetensors"),
                *(
                    "--grad_filter",
                    "topk",
                    "--grad_filter_args",
                    "keep=0.1",
                    "policy=freeze",
                    "scope=global",
                    "log_every=2",
                ),
            ],
        ),
    },
}


def write_images(folder: Path) -> None:
    """Write each photograph, reduced, beside its caption, into ``folder``/10_photos."""
    import skimage
    from PIL import Image

    source = Path(skimage.__file__).parent / "data"
    target = folder / "10_photos"
    target.mkdir(parents=True)
    for name, caption in PHOTOGRAPHS.items():
        if not (source / name).is_file():
            continue
        image = Image.open(source / name).convert("RGB")
        image.thumbnail((2 * RESOLUTION, 2 * RESOLUTION))
        image.save(target / f"{Path(name).stem}.png")
        (target / f"{Path(name).stem}.txt").write_text(caption, encoding="utf-8")


def train(script: str, name: str, options: list[str], model: Path, images: Path) -> None:
    """Run a script once; its own output shows the progress."""
    output = model.parent
    command = [
        *(sys.executable, str(REPOSITORY / script)),
        *("--pretrained_model_name_or_path", str(model), "--train_data_dir", str(images)),
        *("--output_dir", str(output / name), "--output_name", name, "--logging_dir", str(output / "logs")),
        *("--log_prefix", f"{name}_", "--resolution", str(RESOLUTION), "--enable_bucket", "--min_bucket_reso", "64"),
        *("--max_bucket_reso", "256", "--caption_extension", ".txt", "--cache_latents", "--train_batch_size", "2"),
        *("--max_train_steps", str(STEPS), "--max_data_loader_n_workers", "0", "--sdpa", "--seed", "1"),
        *("--sample_prompts", str(output / "prompts.txt"), "--sample_every_n_steps", str(STEPS)),
        *options,
    ]
    print("\n$ " + " ".join(command[1:]), flush=True)
    subprocess.run(command, check=True)


def newest(folder: Path, pattern: str) -> Path:
    """Give the newest file of a pattern, or fail with the name of what is missing."""
    found = sorted(folder.rglob(pattern), key=lambda path: path.stat().st_mtime)
    if not found:
        sys.exit(f"the demo run left no {pattern} in {folder}")
    return found[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=sorted(RUNS), default="sd1")
    family = parser.parse_args().family
    sys.path.insert(0, str(REPOSITORY))
    from tools.make_tiny_model import make_tiny_model

    output = REPOSITORY / ("demo_output" if family == "sd1" else f"demo_output_{family}")
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    model = make_tiny_model(output / "model", family)
    images = output / "images"
    write_images(images)
    (output / "prompts.txt").write_text(
        "photo of a cat, close up --w 128 --h 128 --s 12 --d 1 --l 5\n", encoding="utf-8"
    )
    for name, (script, options) in RUNS[family].items():
        train(script, name, options, model, images)

    print("\nWhat the demo made:")
    for name, (script, _) in RUNS[family].items():
        folder = output / name
        print(f"  {name}")
        print(f"    {'LoRA ' if 'network' in script else 'model'}         {newest(folder, f'{name}.safetensors')}")
        print(f"    kept share    {newest(folder, '*density*.png')}")
        print(f"    sample image  {newest(folder / 'sample', '*.png')}")
    print(f"  TensorBoard     {output / 'logs'}    (tensorboard --logdir {output / 'logs'})")


if __name__ == "__main__":
    main()
