"""Write the generated documents: docs/arguments.md from the table of options."""

from __future__ import annotations

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

INTRODUCTION = """# Every argument of train_network.py

Made by `python tools/write_docs.py` from `library/args_table.py`. An option that is refused stops the run in one line,
before anything is loaded, when it asks for something. `*` takes several words.

"""


def main() -> None:
    from library.args import arguments_table
    from library.files import write_text
    from library.optimizers import OPTIMIZERS

    names = ", ".join(f"`{spec.name}`" for spec in OPTIMIZERS)
    optimizers = (
        f"\n## Optimizers\n\n{names}; any class of `torch.optim` by its name; any other class by its full path, such "
        f"as `bitsandbytes.optim.AdEMAMix8bit` or `pytorch_optimizer.CAME`.\n"
    )
    write_text(REPOSITORY / "docs" / "arguments.md", INTRODUCTION + arguments_table() + optimizers)


if __name__ == "__main__":
    main()
