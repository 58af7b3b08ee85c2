"""Contests of gradient filters beyond one tensor's entries: tensors that compete with each other, rows, LoRA rank
components, 256-entry tiles or whole tensors that pass together, floors and caps. ``grad_filter`` loads it on demand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .grad_filter import TILE, Stage, Work, keep_count, ordered_bits, pass_largest


def select(stage: Stage, scores: Sequence[Tensor], works: Sequence[Work]) -> list[Tensor]:
    """Give the masks of tensors that compete with each other: exactly the asked number of units passes.

    Args:
        stage: whose filter gave the scores. scores: in the shapes of the gradients. works: the tensors, in that order.
    """
    options, nonnegative = stage.chain, getattr(stage.filter, "nonnegative", False)
    units = Units(options.unit, works)
    bits = [ordered_bits(one.view(1, -1), nonnegative) for one in units.scores(scores)]
    devices = [one.device for one in bits]
    if options.limits_tensors:
        bits = [within_limits(one, options.floor, options.cap) for one in bits]
    sizes = [one.shape[1] for one in bits]
    joined = torch.cat([one.to(devices[0]) for one in bits], dim=1)
    count = min(stage.count(sum(sizes), works[0]), sum(keep_count(options.cap, size) for size in sizes))
    for work in works:
        work.asked = count / sum(sizes) * work.whole.numel()
    chosen = pass_largest(joined, count).view(-1).split(sizes)
    return units.masks([mask.to(device) for mask, device in zip(chosen, devices)])


def within_limits(bits: Tensor, floor: float, cap: float) -> Tensor:
    """Lift the best share ``floor`` of a tensor above all others and put what is beyond ``cap`` below them."""
    size = bits.shape[1]
    limits = torch.iinfo(bits.dtype)
    limited = bits.masked_fill(~pass_largest(bits, keep_count(cap, size)), limits.min)
    if floor:
        limited.masked_fill_(pass_largest(bits, keep_count(floor, size)), limits.max)
    return limited


class Units:
    """What passes or rests together: rows, LoRA rank components, tiles or whole tensors instead of single entries.

    A unit's score is the mean of its entries' scores. The same rank component of ``down`` and ``up`` is one unit.
    """

    def __init__(self, unit: str, works: Sequence[Work]):
        self.unit = unit
        self.works = works
        self.keys = [work.slot.component if unit == "component" else index for index, work in enumerate(works)]

    def scores(self, scores: Sequence[Tensor]) -> list[Tensor]:
        """Give the units' scores, one vector for each tensor or pair of tensors."""
        vectors = [self._reduce(one, work) for one, work in zip(scores, self.works)]
        joined: dict[Any, Tensor] = {}
        for key, vector in zip(self.keys, vectors):
            joined[key] = joined[key] + vector if key in joined else vector
        return list(joined.values())

    def masks(self, chosen: Sequence[Tensor]) -> list[Tensor]:
        """Give the mask of every tensor from those of the units."""
        by_key = dict(zip(dict.fromkeys(self.keys), chosen))
        return [self._spread(by_key[key], work) for key, work in zip(self.keys, self.works)]

    def _reduce(self, scores: Tensor, work: Work) -> Tensor:
        if self.unit == "entry":
            return scores.view(-1)
        if self.unit == "tensor":
            return scores.mean().view(1)
        if self.unit == "tile":
            padding = -scores.numel() % TILE
            tiles = torch.nn.functional.pad(scores.view(-1), (0, padding)).view(-1, TILE)
            sizes = torch.full((len(tiles),), float(TILE), device=scores.device)
            sizes[-1] -= padding
            return tiles.sum(dim=1) / sizes
        if self.unit == "component" and work.context.role == "up":
            scores = scores.transpose(0, 1)
        return scores.reshape(len(scores) if scores.dim() else 1, -1).mean(dim=1)

    def _spread(self, chosen: Tensor, work: Work) -> Tensor:
        like = work.whole
        if self.unit == "entry":
            return chosen.view(like.shape)
        if self.unit == "tile":
            return chosen.repeat_interleave(TILE)[: like.numel()].view(like.shape)
        shape = [1] * like.dim()
        if self.unit != "tensor" and like.dim():
            shape[1 if self.unit == "component" and work.context.role == "up" else 0] = -1
        return chosen.view(shape).expand(like.shape)
