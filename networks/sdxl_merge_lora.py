"""Merge LoRAs into an SDXL model, or into one LoRA: merge_lora.py under the name that front-ends call for SDXL."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # library and networks lie there, wherever this runs

from library.errors import run_script
from library.log import prepare_output, setup_logging
from networks import merge_lora


def setup_parser() -> argparse.ArgumentParser:
    """Give the parser of every option of this program."""
    return merge_lora.setup_parser(is_sdxl=True)


def main(words: Sequence[str] | None = None) -> None:
    """Run the program with the given words, None for the process's command line."""
    merge_lora.main(words, is_sdxl=True)


if __name__ == "__main__":
    prepare_output()
    setup_logging()
    run_script(main)
