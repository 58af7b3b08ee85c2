"""Draw what every filter that selects lets through on the demo's model: docs/gallery/NAME.png.

python tools/draw_gallery.py [NAME ...]      some minutes for all of them
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from tools.demo import NETWORK, newest, train, write_images  # noqa: E402

TARGET = REPOSITORY / "docs" / "gallery"
WIDTH = 800
LORA = [*NETWORK, "--optimizer_type", "AdamW", "--learning_rate", "1e-3"]
# filter -> its options, where the defaults would show nothing in so few steps, and the trainer's
CHOSEN: dict[str, tuple[list[str], list[str]]] = {
    "agree": ([], []),
    "band": ([], []),
    "fisher": (["fisher.warmup=8"], []),
    "magma": ([], []),
    "micro_agree": ([], ["--gradient_accumulation_steps", "4"]),
    "nonzero": ([], []),
    "random": ([], []),
    "snr": ([], []),
    "stable": ([], []),
    "threshold": ([], []),
    "topk": (["scope=global"], []),
    "topk_change": (["topk_ratio=0.4"], []),
    "vargate": ([], []),
    "weight": ([], []),
}


def draw(name: str, folder: Path, model: Path, images: Path) -> None:
    """Train a LoRA with one filter and keep the picture, reduced to few colours."""
    from PIL import Image

    own, trainer = CHOSEN[name]
    words = ["--grad_filter", name, "--grad_filter_args", *own, "log_every=1"]
    train("train_network.py", name, [*LORA, *words, *trainer], model, images)
    with Image.open(newest(folder / name, "*density*.png")) as picture:
        small = picture.convert("RGB").resize((WIDTH, round(picture.height * WIDTH / picture.width)), Image.LANCZOS)
        small.quantize(96).save(TARGET / f"{name}.png", optimize=True)


def main() -> None:
    from tools.make_tiny_model import make_tiny_model

    TARGET.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model, images = make_tiny_model(folder / "model", "sd1"), folder / "images"
        write_images(images)
        (folder / "prompts.txt").write_text("photo of a cat --w 64 --h 64 --s 1 --d 1\n", encoding="utf-8")
        for name in sys.argv[1:] or CHOSEN:
            draw(name, folder, model, images)


if __name__ == "__main__":
    main()
