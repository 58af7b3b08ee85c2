"""What a gradient filter let through: numbers, the plan at the start of a run, pictures and exports.

``grad_filter`` loads it when it lies beside it; filtering is the same without.
"""

from __future__ import annotations

import collections
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .grad_filter import FilterHandle, GradFilterError, Slot, Work, matches, needed

KINDS = ("kept", "overlap_1", "overlap_2")  # of shares that are remembered


class Followed:
    """What ``statistics=full`` keeps for one parameter: its last masks, when each entry last passed, its old weights.

    Attributes:
        masks: of the last three filtered steps, newest last. age: (shape of the parameter) int32, step at which an
            entry last passed, -1 for never. weight: before the running step, when that step is measured.
    """

    def __init__(self, param: Tensor):
        self.masks: collections.deque[Tensor] = collections.deque(maxlen=3)
        self.age = torch.full(param.shape, -1, dtype=torch.int32, device=param.device)
        self.weight: Tensor | None = None

    def see(self, mask: Tensor, step: int) -> None:
        self.masks.append(mask.clone())  # a mask may share the memory of its row
        self.age.masked_fill_(mask, step)

    def export_state(self) -> dict[str, Any]:
        """Give what a state keeps; masks as uint8, newest last."""
        return {"age": self.age, "masks": [mask.byte() for mask in self.masks]}

    @classmethod
    def restored(cls, param: Tensor, saved: Mapping[str, Any]) -> Followed:
        """Make it anew from what a state kept."""
        followed = cls(param)
        followed.age.copy_(saved["age"])
        followed.masks.extend(mask.to(param.device).bool() for mask in saved["masks"])
        return followed

    def overlap(self, steps_ago: int) -> Tensor | None:
        """Give the share of what passes now that also passed then, as a 0-d tensor."""
        if len(self.masks) <= steps_ago:
            return None
        now = self.masks[-1]
        both = torch.count_nonzero(now & self.masks[-1 - steps_ago])
        return both / torch.count_nonzero(now).clamp(min=1)


class Statistics:
    """What the filter let through, gathered on the device and read only when asked.

    Shares of every tensor are remembered for pictures, thinned out so that memory stays bounded.
    """

    COLUMNS = 512

    def __init__(self, handle: FilterHandle):
        self._handle = handle
        self.columns: list[tuple[int, dict[str, dict[int, Tensor]]]] = []
        self._stride = 1
        self._recorded = 0
        self._sums: collections.defaultdict[str, Any] = collections.defaultdict(float)
        self._column: dict[str, dict[int, Tensor]] = {}
        self._latest: dict[str, Any] = {}

    def add(self, work: Work) -> None:
        """Measure one tensor, before its result is written back."""
        if work.mask is None:
            return
        sums, kept, size = self._sums, torch.count_nonzero(work.mask), work.mask.numel()
        sums["entries"] += size
        sums["passing"] += kept.double()
        sums["before"] += work.whole.square().sum().double()
        sums["after"] += work.seen.square().sum().double()
        smallest = torch.where(work.mask, work.whole.abs(), torch.inf).min().double()
        sums["smallest"] = torch.minimum(sums["smallest"], smallest) if "smallest" in sums else smallest
        self._put("kept", work.slot.index, kept / size)
        if work.asked is not None:
            sums["asked"] += work.asked
        followed = work.slot.followed
        if followed is not None:
            followed.weight = work.slot.param.detach().clone()
            sums["never"] += torch.count_nonzero(followed.age < 0).double()
            for steps_ago in (1, 2):
                overlap = followed.overlap(steps_ago)
                if overlap is not None:
                    sums[f"overlap_{steps_ago}"] += overlap.double() * kept
                    sums[f"overlap_{steps_ago}_of"] += kept.double()
                    self._put(f"overlap_{steps_ago}", work.slot.index, overlap)

    def _put(self, kind: str, index: int, share: Tensor) -> None:
        self._column.setdefault(kind, {})[index] = share

    def follow(self, slot: Slot, mask: Tensor) -> None:
        """Remember a mask, for ``statistics=full``."""
        slot.followed = slot.followed or Followed(slot.param)
        slot.followed.see(mask, self._handle.step)

    def add_movement(self, slot: Slot) -> None:
        """Measure how far a parameter that is followed really went in a step."""
        assert slot.mask is not None
        before, mask = slot.followed.weight, slot.mask
        moved = (slot.param.detach() - before).abs()
        slot.followed.weight = None
        self._sums["moved"] += torch.count_nonzero(moved).double()
        self._sums["distance"] += moved.sum().double()
        self._sums["distance_masked"] += moved.masked_fill(mask, 0.0).sum().double()

    def finish(self, step: int, time_share: float) -> None:
        """Turn what was added into the numbers of one step."""
        sums, self._sums = self._sums, collections.defaultdict(float)
        column, self._column = self._column, {}
        if not sums:
            return
        size = sums["entries"]
        self._latest = {
            "kept": sums["passing"] / size,
            "energy_kept": sums["after"] / sums["before"],
            "norm_before": sums["before"].sqrt(),
            "norm_after": sums["after"].sqrt(),
            "threshold": sums["smallest"],
            "time_share": time_share,
            "skipped_steps": self._handle.skipped_steps,
            "zero_tensors": self._handle.zero_tensors,
        }
        if "asked" in sums:
            self._latest["asked"] = sums["asked"] / size
        if "distance" in sums:
            self._latest["moved"] = sums["moved"] / size
            self._latest["moved_at_masked"] = sums["distance_masked"] / sums["distance"].clamp(min=1e-30)
        if "never" in sums:
            self._latest["never_passed"] = sums["never"] / size
        for key in [f"overlap_{steps_ago}" for steps_ago in (1, 2) if f"overlap_{steps_ago}" in sums]:
            self._latest[key] = sums[key] / sums[f"{key}_of"].clamp(min=1.0)
        if self._recorded % self._stride == 0:
            self.columns.append((step, column))
        self._recorded += 1
        if len(self.columns) > self.COLUMNS:
            self.columns, self._stride = self.columns[::2], self._stride * 2

    def scalars(self) -> dict[str, float]:
        """Give what was measured since the last call, under ``grad_filter/``; this waits for the device."""
        latest, self._latest = self._latest, {}
        return {f"grad_filter/{key}": float(value) for key, value in latest.items()}

    def table(self, kind: str) -> tuple[list[int], dict[int, list[float]]]:
        """Give the remembered steps, and by position of the parameter the share at each of them (NaN where absent).

        Args:
            kind: ``kept``, ``overlap_1`` or ``overlap_2``.
        """
        columns = [(step, column[kind]) for step, column in self.columns if kind in column]
        positions = sorted({index for _, column in columns for index in column})
        rows = {i: [float(column.get(i, math.nan)) for _, column in columns] for i in positions}
        return [step for step, _ in columns], rows

    def export_state(self) -> dict[str, Any]:
        """Give what pictures of a resumed run need: shares float32 (steps, tensors), NaN where nothing was measured."""
        kinds = {}
        for kind in KINDS:
            steps, rows = self.table(kind)
            if steps:
                shares = torch.tensor(list(rows.values()), dtype=torch.float32).T.contiguous()
                kinds[kind] = {"steps": steps, "positions": list(rows), "shares": shares}
        followed = {slot.index: slot.followed.export_state() for slot in self._handle.slots() if slot.followed}
        return {"stride": self._stride, "recorded": self._recorded, "kinds": kinds, "followed": followed}

    def import_state(self, saved: Mapping[str, Any]) -> None:
        """Go on from a saved state; tensors that are not followed any more, or have other shapes, are left out."""
        self._stride, self._recorded = saved["stride"], saved["recorded"]
        columns: dict[int, dict[str, dict[int, Tensor]]] = {}
        for kind, table in saved["kinds"].items():
            for step, row in zip(table["steps"], table["shares"]):
                shares = {i: share for i, share in zip(table["positions"], row) if not torch.isnan(share)}
                columns.setdefault(step, {})[kind] = shares
        self.columns = sorted(columns.items())
        for slot in self._handle.slots():
            kept = saved["followed"].get(slot.index)
            fits = kept is not None and kept["age"].shape == slot.param.shape
            wanted = slot.chain is not None and slot.chain.options.statistics == "full"
            slot.followed = Followed.restored(slot.param, kept) if fits and wanted else None

    def plan(self) -> list[str]:
        """Give lines for the start of a run: what is filtered how, what passes untouched, what memory it takes."""
        slots = self._handle.slots()
        by_chain: dict[str, list[Slot]] = {}
        for slot in slots:
            by_chain.setdefault(slot.chain.spec.canonical() if slot.chain else "", []).append(slot)
        policies = {chain.spec.canonical(): chain.policy for chain in self._handle.chains.values()}
        lines = []
        for text, members in sorted(by_chain.items(), reverse=True):
            entries = sum(slot.param.numel() for slot in members)
            what = f"{len(members)} tensors, {entries} entries"
            if text:
                lines.append(f"grad_filter: {text} on {what}; buffers {_megabytes(members)}")
                lines += policies[text].notes(members, self._handle.optimizer)
            else:
                names = ", ".join(slot.name for slot in members[:3]) + (", ..." if len(members) > 3 else "")
                lines.append(f"grad_filter: {what} pass untouched: {names}")
        for target in self._handle.spec.targets:
            if not any(self._means(target.pattern, slot) for slot in slots):
                lines.append(f"grad_filter: the target {target.pattern} matches no tensor")
        return lines

    def _means(self, pattern: str, slot: Slot) -> bool:
        return matches(pattern, slot.tags, slot.context.group, slot.index, slot.param.shape)


def save_pictures(handle: FilterHandle, folder: Path) -> list[Path]:
    """Draw what was let through; needs matplotlib, and grad_filter_plots.py beside this file.

    Returns:
        The PNG files made, none when nothing was measured.
    """
    if not handle.statistics.columns:
        return []
    plots = needed("grad_filter_plots", "drawing")
    names = {slot.index: slot.name for slot in handle.slots()}
    tables = {}
    for kind in KINDS:
        steps, rows = handle.statistics.table(kind)
        tables[kind] = steps, {names[index]: row for index, row in rows.items()}
    ages = [slot.followed.age for slot in handle.slots() if slot.followed is not None]
    return plots.save_all(Path(folder), tables, ages, handle.step, handle.spec.canonical())


def export(handle: FilterHandle, path: Path, what: str) -> None:
    """Write the last masks (uint8, as mask_file reads them) or the step each entry last passed (int32, -1 never).

    Raises:
        GradFilterError: nothing was followed; ``statistics=full`` does that.
    """
    from safetensors.torch import save_file

    followed = [(slot, slot.followed) for slot in handle.slots() if slot.followed is not None]
    if not followed:
        raise GradFilterError("grad_filter: no masks were kept. Add statistics=full to --grad_filter_args")
    tensors = {
        slot.tags.name or f"index{slot.index}": kept.age.cpu() if what == "ages" else kept.masks[-1].byte().cpu()
        for slot, kept in followed
    }
    temporary = Path(f"{path}.tmp")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
    os.replace(temporary, path)


def _bytes(buffer: Tensor, slot: Slot) -> float:
    """Give how many bytes an entry of a buffer takes between steps."""
    assert slot.chain is not None
    kind = slot.chain.options.state_dtype
    if kind == "fp32":
        return buffer.element_size()
    packing = needed("grad_filter_packing", f"state_dtype={kind}")
    return packing.BYTES[kind] if packing.packs(buffer, slot.param.numel()) else buffer.element_size()


def _megabytes(slots: Sequence[Slot]) -> str:
    total = 0
    for slot in slots:
        meta = torch.empty(slot.param.shape, dtype=slot.param.dtype, device="meta")
        try:
            kept = [t for own in slot.fresh_buffers(meta).values() for t in own.values()]
        except (RuntimeError, NotImplementedError):  # a filter of one's own may look at the values
            return "of unknown size"
        total += sum(t.numel() * _bytes(t, slot) for t in kept)
    return f"{total / 1e6:.1f} MB"
