"""Write the generated documents: arguments from the table of options, the gallery of filters from their own words."""

from __future__ import annotations

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

INTRODUCTION = """# Every argument of the five scripts

Made by `python tools/write_docs.py` from `library/args_table.py`. An option that is refused stops the run in one line,
before anything is loaded, when it asks for something. `*` takes several words. The scripts: `train_network`,
`sdxl_train_network`, `sdxl_train`, `train_db`, `fine_tune`.

"""


GALLERY_INTRODUCTION = """# Every gradient filter

Made by `python tools/write_docs.py` from the filters' own words; read [grad_filters.md](grad_filters.md) first. Every
filter that scores also has the options `keep=0.1`, `ndim`, `jitter=0.0` and `seed=0`. Pictures show the share of every
layer that passed in 60 steps of the demo's LoRA (`python tools/draw_gallery.py`), with options where it says so on top.

"""


def filter_gallery() -> str:
    """Give a section for each filter that comes with the trainer, and a table of the presets."""
    import inspect

    from library import grad_filter

    sections = []
    for name, found in sorted(grad_filter.known_filters().items()):
        if not found.target.__module__.startswith("library."):
            continue  # what a user dropped into custom_filters is theirs to describe
        options = ", ".join(f"`{key}={item.default}`" for key, item in found.options().items()) or "none"
        text = (inspect.getdoc(found.target) or "").replace("``", "`")
        section = f"## {name}\n\n*{found.kind}*: {found.summary}\n\n{text}\n\nDefaults: {options}\n"
        drawn = (REPOSITORY / "docs" / "gallery" / f"{name}.png").is_file()
        sections.append(section + (f"\n![share that passes, by layer and step](gallery/{name}.png)\n" if drawn else ""))
    rows = [
        f"| `{name}` | `{preset.stages}` | {' '.join(f'`{word}`' for word in preset.args)} | {preset.summary} |"
        for name, preset in sorted(grad_filter.PRESETS.items())
    ]
    presets = "## Presets\n\n| name | stages | options | |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
    return GALLERY_INTRODUCTION + "\n".join(sections) + "\n" + presets


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
    write_text(REPOSITORY / "docs" / "grad_filter_gallery.md", filter_gallery())


if __name__ == "__main__":
    main()
