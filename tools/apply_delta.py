"""Make a full checkpoint of a base model and what --save_delta wrote.

python tools/apply_delta.py BASE DELTA OUTPUT
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))


def main(words: Sequence[str] | None = None) -> None:
    """Run the program with the given words, None for the process's command line."""
    from library.delta import SUFFIX, apply_delta
    from library.errors import OptionError
    from library.naming import check_writable

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", type=Path, help="base model of the run: a file or a Diffusers folder")
    parser.add_argument("delta", type=Path, help=f"file of the run, with the ending {SUFFIX}")
    parser.add_argument("output", type=Path, help="full checkpoint to write, .safetensors")
    parser.add_argument("--kind", choices=("sd1", "sd2", "sdxl"), help="kind of a base model in .ckpt form")
    args = parser.parse_args(words)
    for name in ("base", "delta"):
        if not getattr(args, name).exists():
            raise OptionError(f"{name.upper()} {getattr(args, name)}: there is no such file or folder. Check the path")
    if args.output.suffix != ".safetensors":
        raise OptionError(f"OUTPUT {args.output}: a full checkpoint is written as .safetensors. Use that ending")
    if args.output.resolve() in (args.base.resolve(), args.delta.resolve()):
        raise OptionError(f"OUTPUT {args.output}: it would replace what is read. Use another name")
    check_writable(args.output.parent, "OUTPUT")
    apply_delta(args.base, args.delta, args.output, args.kind)
    print(args.output)


if __name__ == "__main__":
    from library.errors import run_script
    from library.log import prepare_output, setup_logging

    prepare_output()
    setup_logging()
    run_script(main)
