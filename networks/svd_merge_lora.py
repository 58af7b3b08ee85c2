"""Merge LoRAs into one LoRA of a given rank, as near to their sum as that rank allows; see docs/lora_tools.md."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # library and networks lie there, wherever this runs

from library.errors import OptionError, run_script
from library.log import prepare_output, setup_logging
from networks.lora_tools import DTYPES, LoraFile, add_precision, check_target, device_of, write_lora
from networks.merge_lora import merged_metadata, merged_modules, read_models
from networks.resize_lora import resized_modules

log = logging.getLogger(__name__)


def setup_parser() -> argparse.ArgumentParser:
    """Give the parser of every option of this program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=str, nargs="*", help="LoRA files")
    parser.add_argument("--ratios", type=float, nargs="*", help="strength of each LoRA")
    parser.add_argument("--save_to", type=str, help="file to write")
    add_precision(parser, "precision", "save_precision")
    parser.add_argument("--new_rank", type=int, default=4, help="rank of the result")
    parser.add_argument("--new_conv_rank", type=int, help="the same for convolutions larger than 1x1; default new_rank")
    parser.add_argument("--device", type=str, help="where to compute, for example cuda")
    parser.add_argument("--no_metadata", action="store_true", help="write no metadata")
    return parser


def main(words: Sequence[str] | None = None) -> None:
    """Run the program with the given words, None for the process's command line."""
    args = setup_parser().parse_args(words)
    conv_rank = args.new_rank if args.new_conv_rank is None else args.new_conv_rank
    if min(args.new_rank, conv_rank) < 1:
        raise OptionError(f"--new_rank {args.new_rank}: ranks are at least 1. Example: --new_rank 4")
    target = check_target(args.save_to, args.models or [])
    loras = read_models(args.models, args.ratios)
    summed = LoraFile(target, merged_modules(loras))
    modules = resized_modules(
        summed, args.new_rank, conv_rank, None, None, device_of(device_of(args.device)), verbose=False
    )
    entries = {} if args.no_metadata else merged_metadata(loras, modules, target)
    write_lora(target, modules, DTYPES[args.save_precision or args.precision or "float"], entries)


if __name__ == "__main__":
    prepare_output()
    setup_logging()
    run_script(main)
