"""Look at gradient filters: ``python -m library.grad_filter list | describe NAME | check FILE.py:Name``."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from .grad_filter import (
    PRESETS,
    FilterSpec,
    GradFilterError,
    accepted_options,
    as_text,
    attach,
    known_filters,
    parse_spec,
    resolve,
)


def describe(name: str) -> str:
    """Give the documentation and the options of a filter or preset."""
    if name in PRESETS:
        preset = PRESETS[name]
        return f"{name}: {preset.summary}\n\n--grad_filter {preset.stages} --grad_filter_args {' '.join(preset.args)}"
    registered = resolve(name)
    options = [f"  {key}={as_text(item.default)}" for key, item in accepted_options(registered).items()]
    text = inspect.getdoc(registered.target) or ""
    return "\n".join(
        [f"{name} ({registered.kind}): {registered.summary}", "", text, "", "Options:", *(options or ["  none"])]
    )


def check(name: str) -> list[str]:
    """Try a filter on small tensors and give one line for each promise it breaks.

    Raises:
        GradFilterError: the filter cannot be found or built.
    """
    spec = parse_spec(name, ["min_numel=0"])
    assert spec is not None, name
    problems: list[str] = []
    for shape in ((), (1,), (96,), (8, 16), (4, 4, 3, 3)):
        for dtype in (torch.float32, torch.bfloat16):
            label = f"shape {shape}, {str(dtype).removeprefix('torch.')}"
            try:
                problems += [f"{label}: {line}" for line in _broken_promises(spec, shape, dtype)]
            except Exception as error:  # whatever a stranger's filter raises
                problems.append(f"{label}: {type(error).__name__}: {error}")
    return problems


def _broken_promises(spec: FilterSpec, shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
    def start(param: Tensor) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD([param], lr=0.1)
        handle = attach(optimizer, spec)
        handle.set_context(total_steps=6, timesteps=torch.tensor([1, 500]), losses=torch.ones(2))
        return optimizer

    def run(resume_at: int | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        param = torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        optimizer = start(param)
        for step in range(6):
            if step == resume_at:
                saved, optimizer = optimizer.state_dict(), start(param)
                optimizer.load_state_dict(saved)
            param.grad = torch.randn(shape, generator=generator).to(dtype)
            optimizer.step()
        return param.detach()

    whole = run()
    lines = []
    if not torch.isfinite(whole).all():
        lines.append("weights became NaN or Inf")
    if not torch.equal(whole, run()):
        lines.append("two equal runs differ; draw random numbers with random_like(grad, seed, step, index)")
    if not torch.equal(whole, run(3)):
        lines.append("a resumed run differs; keep what must last in state, not on self")
    return lines


def main(words: Sequence[str] | None = None) -> int:
    """Run ``python -m library.grad_filter list | describe NAME | check FILE.py:Name``."""
    parser = argparse.ArgumentParser(prog="python -m library.grad_filter", description="look at gradient filters")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="print every filter and preset")
    for command, text in (("describe", "print what a filter does"), ("check", "try a filter of your own")):
        commands.add_parser(command, help=text).add_argument("name")
    options = parser.parse_args(words)
    try:
        if options.command == "list":
            rows = [f"{name:16} {found.kind:14} {found.summary}" for name, found in sorted(known_filters().items())]
            rows += [f"{name:16} {'preset':14} {preset.summary}" for name, preset in sorted(PRESETS.items())]
            print("\n".join(rows))
        elif options.command == "describe":
            print(describe(options.name))
        else:
            problems = check(options.name)
            print("\n".join(problems) if problems else f"{options.name}: every check passed")
            return 1 if problems else 0
    except GradFilterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
