"""Print what a LoRA file holds: its modules, and the mean size of the values of each tensor."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # library and networks lie there, wherever this runs

from library.errors import run_script
from library.log import prepare_output, setup_logging
from networks.lora import read_network_file


def setup_parser() -> argparse.ArgumentParser:
    """Give the parser of every option of this program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=str, help="LoRA file")
    parser.add_argument("-s", "--show_all_keys", action="store_true", help="list every tensor, not only the factors")
    return parser


def main(words: Sequence[str] | None = None) -> None:
    """Run the program with the given words, None for the process's command line."""
    args = setup_parser().parse_args(words)
    tensors = read_network_file(args.file, "file")
    factors = [key for key in tensors if "lora_up" in key or "lora_down" in key]
    print(f"number of LoRA modules: {sum('lora_down' in key for key in factors)}")
    for key in sorted(tensors) if args.show_all_keys else factors:
        value = tensors[key].float()
        print(f"{key}: shape {list(value.shape)}, mean size {value.abs().mean():.6g}, largest {value.abs().max():.6g}")
    bad = [key for key, value in tensors.items() if not value.float().isfinite().all()]
    print(f"tensors with NaN or Inf: {', '.join(bad) or 'none'}")


if __name__ == "__main__":
    prepare_output()
    setup_logging()
    run_script(main)
