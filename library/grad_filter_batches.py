"""Gradient filters on many small tensors at once; ``grad_filter`` loads it on demand, without it the bits are the same.

A LoRA has hundreds of small tensors in a few sizes, and every one of them costs the same fixed time. Tensors of one
size whose chain looks at each entry by itself are laid end to end and become the rows of one tensor; tensors that
compete with each other become one row. A buffer kept for a parameter is then a view into the buffer of the batch, and
is saved and loaded as if it were alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .grad_filter import Chain, Slot, Work, put_back, row_shape, scratch

SMALL = 1 << 14  # entries of a tensor; larger ones fill the cache alone
ROWS_TOGETHER = 1 << 18  # entries of a batch of rows, which bounds the memory a batch takes
ONE_ROW = 1 << 28  # entries of tensors that compete with each other; more are taken one by one
Change = tuple[Tensor, Tensor, Tensor]  # now, mask, before
ENTRYWISE_WORDS = {"grad", "state", "mask", "out", "step"}


def takes(chain: Chain) -> bool:
    """Say whether a chain gives the same bits when its tensors are laid end to end."""
    options = chain.options
    return (
        options.unit == "entry"
        and options.rescale == "none"
        and options.statistics == "basic"
        and not options.packs
        and not options.limits_tensors
        and not chain.watches_micro_steps
        and all(
            getattr(stage.filter, "entrywise", False)
            and stage.words <= ENTRYWISE_WORDS
            and stage.selection.ndim is None
            for stage in chain.stages
        )
        and (options.scope in ("row", "tensor") or sum(stage.kind != "transform" for stage in chain.stages) == 1)
    )


def divide(
    chain: Chain, members: Sequence[Slot], zeroes: Mapping[int, bool]
) -> tuple[list[tuple[list[Slot], int]], list[Slot]]:
    """Give the slots to filter together, with the number of rows they make, and those to take one by one.

    Args:
        members: slots of a chain that :func:`takes` accepted. zeroes: by index of a slot, whether its optimizer sees
            zeros at masked entries.
    """
    together: list[tuple[list[Slot], int]] = []
    alone: list[Slot] = []
    counts = _counts_steps(chain)
    if chain.options.scope in ("row", "tensor"):
        alike: dict[Any, list[Slot]] = {}
        for slot in members:
            rows = row_shape(slot.param.shape, -1)[0] if chain.options.scope == "row" and slot.param.dim() > 1 else 1
            alike.setdefault((slot.param.numel(), rows, *_kind(slot, counts, zeroes)), []).append(slot)
        for (size, rows, *_), slots in alike.items():
            if size > SMALL or len(slots) == 1 or slots[0].gradient.is_sparse:
                alone += slots
                continue
            step = max(1, ROWS_TOGETHER // size)
            for start in range(0, len(slots), step):
                taken = slots[start : start + step]
                together.append((taken, rows * len(taken)))
        return together, alone
    for bucket in chain.buckets(members):
        fits = len(bucket) > 1 and sum(slot.param.numel() for slot in bucket) <= ONE_ROW
        if fits and len({_kind(slot, counts, zeroes) for slot in bucket}) == 1 and not bucket[0].gradient.is_sparse:
            together.append((bucket, 1))
        else:
            alone += bucket
    return together, alone


def _counts_steps(chain: Chain) -> bool:
    """Say whether slots that have made different numbers of steps are treated differently."""
    jitters = chain.options.scope in ("row", "tensor") and any(stage.selection.jitter for stage in chain.stages)
    return jitters or any(stage.asks_for("step") for stage in chain.stages)


def _kind(slot: Slot, counts: bool, zeroes: Mapping[int, bool]) -> tuple[Any, ...]:
    """Give what slots that are filtered together have in common."""
    gradient, step = slot.gradient, slot.context.step if counts else 0
    return gradient.dtype, gradient.device, gradient.layout, slot.param.dtype, step, zeroes[slot.index]


def put_back_together(changes: Sequence[Change]) -> list[Change]:
    """Do ``grad_filter.put_back`` for small tensors, laid end to end; give the changes that are left."""
    alone, alike = [], {}
    for change in changes:
        now, mask, _ = change
        small = now.numel() <= SMALL and mask.numel() == now.numel() and now.is_contiguous()
        (alike.setdefault((now.dtype, now.device), []) if small else alone).append(change)
    for members in alike.values():
        while members:
            taken = _up_to(ROWS_TOGETHER, members)
            now, mask, before = ([one.reshape(-1) for one in column] for column in zip(*members[:taken]))
            joined = torch.cat(now)
            put_back(joined, torch.cat(mask), torch.cat(before))
            torch._foreach_copy_(now, list(joined.split([one.numel() for one in now])))
            del members[:taken]
    return alone


def _up_to(entries: int, changes: Sequence[Change]) -> int:
    """Give how many of the first tensors have so many entries together, at least one."""
    total = 0
    for count, (now, *_) in enumerate(changes):
        total += now.numel()
        if count and total > entries:
            return count
    return len(changes)


class Batch:
    """Slots whose buffers lie end to end. It stands in for a slot in the engine: it has ``buffers`` and ``context``."""

    def __init__(self, slots: Sequence[Slot], rows: int):
        self.slots = list(slots)
        self.rows = rows
        self.sizes = [slot.param.numel() for slot in slots]
        self.context = slots[0].context
        self.buffers: dict[str, dict[str, Tensor]] = {}
        for slot in slots:
            slot.prepare()
        for stage, own in slots[0].buffers.items():
            self.buffers[stage] = {}
            for key in own:
                self.buffers[stage][key] = self._joined([slot.buffers[stage] for slot in slots], key)
        for slot in slots:
            slot.batch = self

    def _joined(self, owners: Sequence[dict[str, Tensor]], key: str) -> Tensor:
        """Lay a buffer of all slots end to end and leave views of it with the slots."""
        flat = torch.cat([own[key].reshape(-1) for own in owners])
        for slot, own, part in zip(self.slots, owners, flat.split(self.sizes)):
            own[key] = part.view(slot.param.shape)
        return flat.view(self.rows, -1)

    @classmethod
    def of(cls, slots: Sequence[Slot], rows: int) -> Batch:
        """Give the batch these slots make up already, or make it."""
        found = slots[0].batch
        alike = isinstance(found, Batch) and len(found.slots) == len(slots) and found.rows == rows
        if alike and all(a is b and b.batch is found for a, b in zip(found.slots, slots)):
            return found
        return cls(slots, rows)

    def work(self, zeroes: bool) -> Work:
        """Give the gradients of all slots as one; scratch memory, good until the next batch."""
        flats = [slot.gradient.reshape(-1) for slot in self.slots]
        joined = scratch(torch.Size([sum(self.sizes)]), flats[0].dtype, "batch", flats[0].device)
        work = Work(self, torch.cat(flats, out=joined).view(self.rows, -1), zeroes)  # type: ignore[arg-type]
        work.rows = self.rows
        return work

    def parts(self, values: Tensor) -> list[Tensor]:
        """Give what belongs to each slot, in the shape of its parameter."""
        split = values.reshape(-1).split(self.sizes)
        return [part.view(slot.param.shape) for part, slot in zip(split, self.slots)]

    def hand_back(self, work: Work) -> None:
        """Put into the gradients what the optimizer is to see."""
        if work.mask is None and work.whole is work.start:
            return
        work.write_back()
        torch._foreach_copy_([slot.gradient for slot in self.slots], self.parts(work.gradient))

    def each(self, work: Work) -> Iterator[Part]:
        """Give what happened to each slot, for measuring."""
        assert work.mask is not None
        entries = sum(self.sizes)
        whole = zip(self.slots, self.parts(work.whole), self.parts(work.mask), self.parts(work.seen))
        for slot, gradient, mask, seen in whole:
            asked = None if work.asked is None else work.asked / entries * mask.numel()
            yield Part(slot, gradient, mask, seen, asked)


@dataclass
class Part:
    """What :class:`Work` tells about one slot of a batch."""

    slot: Slot
    whole: Tensor
    mask: Tensor
    seen: Tensor
    asked: float | None
