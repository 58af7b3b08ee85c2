"""Pictures of what a gradient filter let through; loaded by grad_filter on demand, needs matplotlib."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from library.files import write_file

MOST_ROWS = 60


def _grouped(rows: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Average tensors into one row per layer, block by block when there are still too many for a picture."""
    for depth in (None, 6, 5, 4, 3):
        groups: dict[str, list[Sequence[float]]] = {}
        for name, values in rows.items():
            layer = re.sub(r"\.(lora_down|lora_up)\.weight$|\.weight$", "", name)
            words = layer.removeprefix("lora_").split("_")
            groups.setdefault("_".join(words[:depth]), []).append(values)
        if len(groups) <= MOST_ROWS:
            break
    averaged = {}
    for name, members in groups.items():
        columns = zip(*members)
        averaged[name] = [_mean([value for value in column if value == value]) for column in columns]
    return averaged


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def density_map(target: Path, steps: Sequence[int], rows: Mapping[str, Sequence[float]], title: str) -> Path:
    """Draw the kept share of every layer over the steps.

    Args:
        target: PNG file. steps: x axis. rows: tensor name -> kept share in [0, 1] at each step, NaN where not measured.
        title: what the filter is.

    Returns:
        ``target``.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layers = _grouped(rows)
    figure = Figure(figsize=(10, max(3.0, 0.16 * len(layers) + 2.2)), layout="constrained")
    FigureCanvasAgg(figure)
    top, axes = figure.subplots(2, 1, height_ratios=[1, max(2.0, 0.08 * len(layers))], sharex=True)
    extent = (steps[0] - 0.5, steps[-1] + 0.5, len(layers) - 0.5, -0.5)
    overall = [_mean([value for value in column if value == value]) for column in zip(*rows.values())]
    top.plot(steps, overall, color="tab:blue", linewidth=1.2)
    top.set_ylabel("kept share,\nmean of tensors")
    top.set_title(title, fontsize=9)
    top.set_ylim(bottom=0)
    top.grid(alpha=0.3)
    image = axes.imshow(
        list(layers.values()), aspect="auto", interpolation="nearest", extent=extent, cmap="viridis", vmin=0
    )
    axes.set_yticks(range(len(layers)), list(layers), fontsize=6)
    axes.set_xlabel("optimizer step")
    figure.colorbar(image, ax=axes, label="kept share", shrink=0.8)
    write_file(target, lambda temporary: figure.savefig(temporary, format="png", dpi=110))
    return target
