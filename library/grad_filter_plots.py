"""Pictures of what a gradient filter let through; loaded by grad_filter on demand, needs matplotlib."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MOST_ROWS = 60

Table = tuple[Sequence[int], Mapping[str, Sequence[float]]]


MOST_NAMES = 120


def save_all(folder: Path, tables: Mapping[str, Table], ages: Sequence[Tensor], step: int, title: str) -> list[Path]:
    """Draw everything that was measured.

    Args:
        folder: made when absent. tables: ``kept``, ``overlap_1`` and ``overlap_2``, each steps and rows by tensor name.
        ages: int32, step at which an entry last passed, -1 for never. step: steps so far. title: what the filter is.

    Returns:
        The PNG files written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures = [density_map(folder / "density.png", *tables["kept"], title)]
    overlaps = {kind: table for kind, table in tables.items() if kind != "kept" and table[0]}
    if overlaps:
        pictures.append(overlap_lines(folder / "overlap.png", overlaps, title))
    if ages:
        pictures.append(age_bars(folder / "ages.png", ages, step, title))
    return pictures


def density_map(target: Path, steps: Sequence[int], rows: Mapping[str, Sequence[float]], title: str) -> Path:
    """Draw the kept share of every layer over the steps.

    Args:
        target: PNG file. steps: x axis. rows: tensor name -> kept share in [0, 1] at each step, NaN where not measured.
        title: what the filter is.
    """
    layers = _grouped(rows)
    named_every = -(-len(layers) // MOST_NAMES)  # a whole model has more layers than a picture has room for names
    lines = -(-len(layers) // named_every)
    figure = _figure(10, max(3.0, 0.16 * lines + 2.2))
    top, axes = figure.subplots(2, 1, height_ratios=[1, max(2.0, 0.08 * lines)], sharex=True)
    top.plot(steps, _mean_row(rows), color="tab:blue", linewidth=1.2)
    top.set_ylabel("kept share,\nmean of tensors")
    top.set_title(title, fontsize=9)
    top.set_ylim(bottom=0)
    top.grid(alpha=0.3)
    extent = (steps[0] - 0.5, steps[-1] + 0.5, len(layers) - 0.5, -0.5)
    image = axes.imshow(
        list(layers.values()), aspect="auto", interpolation="nearest", extent=extent, cmap="viridis", vmin=0
    )
    axes.set_yticks(range(0, len(layers), named_every), list(layers)[::named_every], fontsize=6)
    axes.set_xlabel("optimizer step")
    figure.colorbar(image, ax=axes, label="kept share", shrink=0.8)
    return _save(figure, target)


def overlap_lines(target: Path, tables: Mapping[str, Table], title: str) -> Path:
    """Draw how much of each mask also passed one and two steps before; two halves that alternate show as 0 and 1."""
    figure = _figure(8, 3.5)
    axes = figure.subplots()
    for kind, (steps, rows) in tables.items():
        ago = kind.rpartition("_")[2]
        label = f"passed also {ago} step{'' if ago == '1' else 's'} ago"
        axes.plot(steps, _mean_row(rows), label=label, linewidth=1.2, marker="." if len(steps) < 60 else "")
    axes.set_ylim(-0.05, 1.05)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("share of what passes")
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend()
    return _save(figure, target)


def age_bars(target: Path, ages: Sequence[Tensor], step: int, title: str) -> Path:
    """Draw how many entries passed last in the newest step, up to 3, 10, 30, ... steps ago, or never."""
    marks = [mark * 10**power for power in range(9) for mark in (1, 3)]
    bounds = [mark for mark in marks if mark < step] + [next(mark for mark in marks if mark >= step)]
    counts, labels, low = [], [], 0
    total = sum(age.numel() for age in ages)
    for bound in bounds:
        inside = sum(int(((age >= 0) & (step - age > low) & (step - age <= bound)).sum()) for age in ages)
        counts.append(inside / total)
        labels.append("last step" if bound == 1 else f"{low + 1}-{bound}")
        low = bound
    counts.append(sum(int((age < 0).sum()) for age in ages) / total)
    figure = _figure(7, 3.5)
    axes = figure.subplots()
    bars = axes.bar([*labels, "never"], counts, color=["tab:blue"] * len(labels) + ["tab:gray"])
    axes.bar_label(bars, [f"{count:.1%}" for count in counts], fontsize=8)
    axes.set_xlabel("steps since an entry last passed")
    axes.set_ylabel("share of entries")
    axes.set_title(title, fontsize=9)
    return _save(figure, target)


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # no window, and pyplot's global state stays untouched
    return figure


def _save(figure: Any, target: Path) -> Path:
    temporary = target.with_name(f".{target.name}.tmp")
    figure.savefig(temporary, format="png", dpi=110)
    os.replace(temporary, target)
    return target


def _grouped(rows: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Average tensors into one row per layer, block by block when there are still too many for a picture."""
    for depth in (None, 6, 5, 4, 3):
        groups: dict[str, dict[str, Sequence[float]]] = {}
        for name, values in rows.items():
            layer = re.sub(r"(\.lora_(down|up))?\.weight$", "", name)
            words = layer.removeprefix("lora_").split("_")
            groups.setdefault("_".join(words[:depth]), {})[name] = values
        if len(groups) <= MOST_ROWS:
            break
    return {name: _mean_row(members) for name, members in groups.items()}


def _mean_row(rows: Mapping[str, Sequence[float]]) -> list[float]:
    table = torch.tensor([list(row) for row in rows.values()], dtype=torch.float64)
    return torch.nanmean(table, dim=0).tolist()
