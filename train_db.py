"""Train Stable Diffusion 1.x or 2.x itself on folders of images; see docs/sdxl_train.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))  # library and networks lie beside this file, wherever it runs

from library.args import parse, script_parser
from library.errors import run_script
from library.launch import with_its_processes
from library.log import setup_logging


def setup_parser() -> argparse.ArgumentParser:
    """Give the parser of every option of this script."""
    return script_parser("train_db")


def train(args: argparse.Namespace) -> None:
    """Run everything that parsed options ask for."""
    from library.model_trainer import SdModelTrainer

    SdModelTrainer().train(args)


def main(words: Sequence[str] | None = None) -> None:
    """Run the script with the given words, None for the process's command line."""
    train(parse(setup_parser(), words))


if __name__ == "__main__":
    setup_logging()
    run_script(with_its_processes(main))
