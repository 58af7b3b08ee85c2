"""What steps inside the backward pass save: peak memory of whole sdxl_train.py runs, each in a process of its own.

    make bench-memory

Builds an SDXL of the real structure, wide enough that gradients outweigh the rest, and prints the largest resident size
of each process beside the size of the trained weights. POSIX only.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

FILTER = ("--grad_filter", "topk", "--grad_filter_args", "keep=0.1")
WAYS: dict[str, tuple[str, ...]] = {
    "after the backward pass": (),
    "--fused_backward_pass": ("--fused_backward_pass",),
    "--fused_optimizer_groups 20": ("--fused_optimizer_groups", "20"),
    "after the backward pass, topk": FILTER,
    "--fused_backward_pass, topk": ("--fused_backward_pass", *FILTER),
}


def peak_of_run(words: list[str]) -> int:
    """Run sdxl_train.py and give its largest resident size in bytes."""
    command = [sys.executable, str(REPOSITORY / "sdxl_train.py"), *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    output = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(output.decode("utf-8", "replace")[-2000:])
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=128, help="channels of the first U-Net level, a multiple of 32")
    width = parser.parse_args().width
    from tests.training import make_tiles
    from tools.make_tiny_model import make_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model", "sdxl", width=width)
        weights = sum(path.stat().st_size for path in (model / "unet").glob("*.safetensors"))
        data = make_tiles(Path(folder) / "data")
        common = [
            *("--pretrained_model_name_or_path", str(model), "--train_data_dir", str(data), "--resolution", "64"),
            *("--output_dir", f"{folder}/out", "--output_name", "t", "--caption_extension", ".txt", "--seed", "1"),
            *("--max_train_steps", "2", "--max_data_loader_n_workers", "0", "--sdpa", "--cache_latents"),
            *("--optimizer_type", "Adafactor", "--optimizer_args", "relative_step=False", "scale_parameter=False"),
            *("--learning_rate", "1e-5", "--save_model_as", "safetensors"),
        ]
        print(f"{platform.machine()}, U-Net of width {width}: {weights / 2**20:.0f} MiB of trained weights in float32")
        print("| steps | peak resident MiB | less than after the pass, in sizes of the weights |")
        print("|---|---|---|")
        first = None
        for name, words in WAYS.items():
            peak = peak_of_run([*common, *words])
            first = first or peak
            print(f"| {name} | {peak / 2**20:.0f} | {(first - peak) / weights:.2f} |", flush=True)


if __name__ == "__main__":
    main()
