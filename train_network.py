"""Train a LoRA (or another network module) for Stable Diffusion 1.x or 2.x; see docs/train_network.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))  # library and networks lie beside this file, wherever it runs

from library.args import parse, script_parser
from library.errors import run_script
from library.launch import with_its_processes
from library.log import prepare_output, setup_logging


def setup_parser() -> argparse.ArgumentParser:
    """Give the parser of every option of this script."""
    return script_parser("train_network")


def __getattr__(name: str) -> object:
    """Give NetworkTrainer on demand: importing this module and printing its help stay light."""
    if name == "NetworkTrainer":
        from library.trainer import NetworkTrainer

        return NetworkTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main(words: Sequence[str] | None = None) -> None:
    """Run the script with the given words, None for the process's command line."""
    args = parse(setup_parser(), words)
    from library.trainer import NetworkTrainer

    NetworkTrainer().train(args)


if __name__ == "__main__":
    prepare_output()
    setup_logging()
    run_script(with_its_processes(main))
