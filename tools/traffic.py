"""Bytes that each process sends in a step, by what is trained, how many processes there are, and what a filter selects.

On paper, not measured: gradients travel round a ring, small messages too. Prints the tables of docs/distributed.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

RANKS = (8, 64, 512)
LINK_BYTES_S = 50e9  # 400 Gbit/s for each process
LATENCY_S = 20e-6  # of one collective call, times log2 of the processes
STEP_S = 0.5  # computing time of a step that shares are taken of
COUNTERS = 4 * 256 * 8  # an exact threshold of float32: four rounds of 256 counters of 8 bytes, summed over processes
ROUNDS = 4


@dataclass(frozen=True)
class Model:
    """What is trained: entries and tensors, bytes of a gradient entry, blocks that selections may be made in."""

    name: str
    entries: int
    tensors: int
    entry_bytes: int
    blocks: int


MODELS = (
    Model("LoRA rank 32 of SDXL", 114_016_256, 1972, 4, 22),
    Model("SDXL U-Net", 2_567_463_684, 1680, 4, 22),
    Model("12 B model", 12_000_000_000, 800, 2, 57),
)
# scope of a selection -> how many thresholds are sought in a step, where shards are rows of tensors
SCOPES = {
    "entry, row": lambda model: 0,
    "tensor": lambda model: model.tensors,
    "block": lambda model: model.blocks,
    "global": lambda model: 1,
}


def ring(size: float, ranks: int) -> float:
    """Give the bytes that each process sends to sum ``size`` bytes over all and give everyone the result."""
    return 2 * (ranks - 1) / ranks * size


def gradient_bytes(model: Model, ranks: int, sharded: bool) -> float:
    """Give the bytes sent for weights and gradients; shards gather weights for both passes, then scatter gradients."""
    size = model.entries * model.entry_bytes
    return 3 * (ranks - 1) / ranks * size if sharded else ring(size, ranks)


def agreement_bytes(model: Model, ranks: int) -> float:
    """Give the bytes of what our loop agrees on in a step: who has which gradient, losses, whether to stop."""
    return ring(4 * model.tensors + 3 * 8, ranks) + (ranks - 1) * 2 * 16


def selection_bytes(model: Model, ranks: int, scope: str, sharded: bool) -> float:
    """Give the bytes a filter's selections add; whole gradients lie in every process where nothing is sharded."""
    return ring(SCOPES[scope](model) * COUNTERS, ranks) if sharded else 0.0


def seconds(sent: float, calls: int, ranks: int) -> float:
    return sent / LINK_BYTES_S + calls * LATENCY_S * math.log2(ranks)


def _size(value: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.0f}"


def whole_table() -> str:
    """Give the table for weights that lie whole in every process, which is what this trainer does."""
    lines = ["| trained | processes | gradients | agreements | filter, any scope | time | of a step |"]
    lines.append("|---|---|---|---|---|---|---|")
    for model in MODELS:
        for ranks in RANKS:
            gradients, agreed = gradient_bytes(model, ranks, False), agreement_bytes(model, ranks)
            calls = math.ceil(model.entries / (1 << 22)) + 4
            time = seconds(gradients + agreed, calls, ranks)
            share = time / (time + STEP_S)
            lines.append(
                f"| {model.name} | {ranks} | {_size(gradients)} | {_size(agreed)} | 0 | {time * 1e3:.3g} ms "
                f"| {share:.1%} |"
            )
    return "\n".join(lines) + "\n"


def sharded_table() -> str:
    """Give the table for weights in shards: what each scope adds to the traffic that sharding has anyway."""
    lines = ["| trained | processes | weights and gradients | " + " | ".join(SCOPES) + " | slowest of them |"]
    lines.append("|---" * (4 + len(SCOPES)) + "|")
    for model in MODELS[1:]:
        for ranks in RANKS:
            added = [selection_bytes(model, ranks, scope, True) for scope in SCOPES]
            slowest = seconds(max(added), ROUNDS, ranks)
            cells = " | ".join(_size(value) for value in added)
            total = _size(gradient_bytes(model, ranks, True))
            lines.append(f"| {model.name} | {ranks} | {total} | {cells} | {slowest * 1e3:.2g} ms |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(whole_table())
    print(sharded_table())
