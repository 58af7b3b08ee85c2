"""Policies of gradient filters beyond ``zero`` and ``update``: freeze, moments, residual; loaded on demand.

What an optimizer keeps is measured, not looked up in a list of names: a copy of it takes two steps with a small tensor
whose gradient is partly zero, which shows what belongs to an entry, how it starts and how it decays.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .grad_filter import (
    POLICIES,
    TILE,
    ChainOptions,
    GradFilterError,
    Policy,
    Slot,
    Work,
    masked,
    put_back_all,
    remember,
    require,
    stand_in,
    state_at_birth,
    work_dtype,
)

log = logging.getLogger(__name__)

EIGHT_BIT_SIZE = 4096  # bitsandbytes quantises states of tensors from this size on


@dataclass(frozen=True)
class Kept:
    """One tensor of an optimizer's state that belongs to the entries of a parameter.

    Attributes:
        starts_as_weight: it starts as a copy of the weights; otherwise as zeros.
        decay: what it is multiplied with in a step without gradient (one for each leading slice), None when that is not
            one number. codes: it holds 8-bit codes; scales are in ``absmax`` and values in ``qmap`` of that number.
    """

    starts_as_weight: bool = False
    decay: Tensor | None = None
    codes: str = ""


@dataclass(frozen=True)
class Inventory:
    """What an optimizer keeps for a parameter: ``entries`` by name, and names of states shared by rows or columns."""

    entries: dict[str, Kept] = field(default_factory=dict)
    shared: tuple[str, ...] = ()


def take_inventory(optimizer: torch.optim.Optimizer, group: int, like: Tensor) -> Inventory:
    """Measure what an optimizer keeps for tensors with as many dimensions and in the size class of ``like``."""
    size = 5120 if like.numel() >= EIGHT_BIT_SIZE else 80
    # no dimension of one, where states of rows would look like states of entries
    shape = [*[2] * (like.dim() - 2), 10, size // 10 >> (like.dim() - 2)] if like.dim() > 1 else [size]
    generator = torch.Generator().manual_seed(0)

    # weights may still wait on the CPU for the device that some optimizers need; float32 measures without rounding
    device = torch.device("cuda") if torch.cuda.is_available() else like.device

    def random() -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    weight = random().requires_grad_()
    first = (torch.arange(weight.numel(), device=device) < weight.numel() // 2).view(shape)
    twin = stand_in(optimizer)
    twin.param_groups = [{**twin.param_groups[group], "params": [weight]}]
    twin.state[weight] = state_at_birth(optimizer, optimizer.param_groups[group], weight)
    start = weight.detach().clone()
    weight.grad = random().masked_fill_(first, 0.0)
    twin.step()
    one = {k: v.clone() for k, v in twin.state[weight].items() if isinstance(v, Tensor)}
    weight.grad = random().masked_fill_(~first, 0.0)
    twin.step()
    two = twin.state[weight]

    entries, shared = {}, []
    for name, value in one.items():
        if value.numel() == 1 or name.startswith(("qmap", "absmax")):
            continue
        slices, rest = divmod(value.numel(), weight.numel())
        if rest or not slices:
            shared.append(name)
        elif value.dtype is torch.uint8:
            entries[name] = _kept_codes(name, one, two, slices, twin.param_groups[0].get("betas", ()))
        else:
            entries[name] = _kept_entries(value, two[name], start, first, slices)
    return Inventory(entries, tuple(shared))


def _kept_entries(one: Tensor, two: Tensor, start: Tensor, first: Tensor, slices: int) -> Kept:
    resting = one.reshape(slices, -1)[:, first.reshape(-1)].float()
    weights = start.reshape(-1)[first.reshape(-1)].float().expand_as(resting)
    like_weight = bool((resting - weights).abs().mean() < 0.5 * resting.abs().mean())
    before = one.reshape(slices, -1)[:, ~first.reshape(-1)].float()
    after = two.reshape(slices, -1)[:, ~first.reshape(-1)].float()
    ratio = (after / before).nan_to_num(nan=1.0)
    # a resumed optimizer measures with other counters: the last digits must not depend on them
    decay = (ratio.median(dim=1).values.double() * 1e5).round() / 1e5
    steady = bool(((ratio - decay[:, None]).abs() < 1e-2).all() and (decay > 0.01).all() and (decay <= 1.0).all())
    return Kept(like_weight, decay if steady and not like_weight else None)


def _kept_codes(name: str, one: dict[str, Tensor], two: dict[str, Tensor], slices: int, betas: Sequence[float]) -> Kept:
    number = name.removeprefix("state")
    sizes = []
    for state in (one, two):
        absmax = state[f"absmax{number}"].view(slices, -1, 1)
        values = state[f"qmap{number}"][state[name].view(slices, -1, TILE).long()] * absmax
        resting = values.shape[1] // 2  # the tiles whose second gradient is zero
        sizes.append(values[:, resting:].abs().sum(dim=(1, 2)))
    measured = (sizes[1] / sizes[0]).tolist()  # coding the result shrank it a little; the step itself is exact
    meant = [min(betas, key=lambda beta, value=value: abs(beta - value)) for value in measured if betas]
    return Kept(False, torch.tensor(meant, device=sizes[0].device) if meant else None, number)


# --------------------------------------------------------------------------------------------------- 8-bit states


def nearest_codes(values: Tensor, qmap: Tensor) -> Tensor:
    """Give the index of the nearest value of a rising table."""
    return torch.searchsorted((qmap[1:] + qmap[:-1]) / 2.0, values.contiguous()).to(torch.uint8)


def put_back_codes(
    codes: Tensor, absmax: Tensor, qmap: Tensor, mask: Tensor, before: Tensor, before_absmax: Tensor
) -> None:
    """Restore 8-bit states where the mask is False.

    Tiles of 256 entries that are wholly masked get back codes and scale, to the bit. Tiles that are partly masked are
    decoded, joined and coded anew, which moves their values by at most half a step of the code at the larger scale.

    Args:
        codes: uint8, the state now, of one slice. absmax: (tiles,) its scales. qmap: (256,) values of the codes.
        mask: bool, one for each entry. before, before_absmax: codes and scales to restore.
    """
    now, old = _tiles(codes), _tiles(before)
    passing = _tiles(mask)
    inside = _tiles(torch.ones_like(mask))
    any_passes, all_pass = passing.any(dim=1), (passing | ~inside).all(dim=1)
    mixed = (any_passes & ~all_pass).nonzero().view(-1)
    joined = torch.where(any_passes[:, None], now, old)
    scales = torch.where(any_passes, absmax, before_absmax)
    if mixed.numel():
        values = torch.where(
            passing[mixed],
            qmap[now[mixed].long()] * absmax[mixed, None],
            qmap[old[mixed].long()] * before_absmax[mixed, None],
        )
        values.masked_fill_(~inside[mixed], 0.0)
        scales[mixed] = values.abs().amax(dim=1)
        unit = values / scales[mixed, None].clamp(min=1e-38)
        joined[mixed] = nearest_codes(unit, qmap)
    codes.copy_(joined.view(-1)[: codes.numel()].view(codes.shape))
    absmax.copy_(scales)


def _tiles(entries: Tensor) -> Tensor:
    flat = entries.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % TILE)).view(-1, TILE)


# ------------------------------------------------------------------------------------------------------- policies


class _PutsStatesBack(Policy):
    """Zeroes masked gradients and puts states back; subclasses say which."""

    ends_steps = True
    weights_too = False
    instead = ""  # what is done where states are shared by rows or columns

    def __init__(self, options: ChainOptions):
        super().__init__(options)
        self._inventories: dict[tuple[int, int, bool], Inventory] = {}

    def inventory(self, slot: Slot, optimizer: torch.optim.Optimizer) -> Inventory:
        key = (slot.context.group, slot.param.dim(), slot.param.numel() >= EIGHT_BIT_SIZE)
        if key not in self._inventories:
            with torch.enable_grad():
                self._inventories[key] = take_inventory(optimizer, slot.context.group, slot.param)
        return self._inventories[key]

    def zeroes_for(self, slot: Slot, optimizer: torch.optim.Optimizer) -> bool:
        return not self.weights_too or not self.inventory(slot, optimizer).shared

    def notes(self, slots: Sequence[Slot], optimizer: torch.optim.Optimizer) -> list[str]:
        shared = [slot for slot in slots if self.inventory(slot, optimizer).shared]
        coded = [s for s in slots if any(kept.codes for kept in self.inventory(s, optimizer).entries.values())]
        lines = []
        if shared:
            names = ", ".join(self.inventory(shared[0], optimizer).shared)
            lines.append(
                f"grad_filter: policy={self.options.policy} is policy={self.instead} on {len(shared)} tensors (first "
                f"{shared[0].name}), whose entries share the states {names}"
            )
        if coded and self.options.unit != "tile":
            lines.append(
                f"grad_filter: 8-bit states of {len(coded)} tensors have one scale for 256 entries: mixed tiles "
                f"are restored to within half a code step; unit=tile restores them to the bit"
            )
        return lines

    def before(self, slots: Sequence[Slot], optimizer: torch.optim.Optimizer) -> None:
        for slot in slots:
            inventory, state = self.inventory(slot, optimizer), optimizer.state.get(slot.param, {})
            if self.weights_too:
                slot.before[""] = slot.param.detach()
            for name, kept in inventory.entries.items():
                if inventory.shared or (kept.starts_as_weight and not self.weights_too):
                    continue
                for part in (name, f"absmax{kept.codes}") if kept.codes else (name,):
                    if part in state:
                        slot.before[part] = state[part]
                    elif kept.starts_as_weight:
                        slot.before[part] = slot.param.detach()
        remember(slots)

    def after(self, slots: Sequence[Slot], optimizer: torch.optim.Optimizer) -> None:
        changes = []
        for slot in slots:
            assert slot.mask is not None
            inventory, state = self.inventory(slot, optimizer), optimizer.state[slot.param]
            for name, kept in inventory.entries.items():
                if inventory.shared or name not in state or (kept.starts_as_weight and not self.weights_too):
                    continue
                now, before = state[name], slot.before.get(name)
                before = torch.zeros_like(now) if before is None else before
                if kept.codes:
                    self._codes_back(slot, state, name, kept.codes, before)
                else:
                    changes.append((now, over_slices(slot.mask, now), before))
            if self.weights_too:
                changes.append((slot.param.detach(), slot.mask, self._rested_weights(slot, optimizer)))
        put_back_all(changes)

    def _codes_back(self, slot: Slot, state: dict[str, Tensor], name: str, number: str, before: Tensor) -> None:
        assert slot.mask is not None
        absmax, slices = state[f"absmax{number}"], state[name].numel() // slot.mask.numel()
        old_absmax = slot.before.get(f"absmax{number}", torch.zeros_like(absmax))
        rows = (t.view(slices, -1) for t in (state[name], absmax, before, old_absmax))
        for codes, scale, old, old_scale in zip(*rows):
            put_back_codes(codes, scale, state[f"qmap{number}"], slot.mask.reshape(-1), old, old_scale)

    def _rested_weights(self, slot: Slot, optimizer: torch.optim.Optimizer) -> Tensor:
        """Give the weights that masked entries are to have after the step."""
        return slot.before[""]


def over_slices(mask: Tensor, state: Tensor) -> Tensor:
    """Give the mask for a state that has several values for each entry, one after the other."""
    slices = state.numel() // mask.numel()
    return mask.reshape(-1).expand(slices, -1) if slices > 1 else mask


class Freeze(_PutsStatesBack):
    """``freeze``: weights and moments of masked entries are put back, to the bit."""

    weights_too = True
    instead = "update"

    def __init__(self, options: ChainOptions):
        super().__init__(options)
        require(options.decay in ("", "all"), "grad_filter", "decay", options.decay, "all with policy=freeze", "all")

    def buffers(self, param: Tensor) -> dict[str, Tensor]:
        if self.options.bias_correction == "global":
            return {}
        return {"steps": torch.zeros(param.shape, dtype=torch.int32, device=param.device)}

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        adam = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))
        if self.options.bias_correction == "entry" and not (adam and not optimizer.defaults["amsgrad"]):
            raise GradFilterError(
                f"grad_filter: bias_correction=entry knows torch's Adam and AdamW without amsgrad, not "
                f"{type(optimizer).__name__}. Leave it out"
            )

    def _rested_weights(self, slot: Slot, optimizer: torch.optim.Optimizer) -> Tensor:
        group, before = optimizer.param_groups[slot.context.group], slot.before[""]
        decayed, needed = before, self.options.decay == "all" or self.options.bias_correction == "entry"
        if needed and group.get("weight_decay"):
            decayed = before * (1.0 - float(group["lr"]) * group["weight_decay"])
        if self.options.bias_correction == "entry":
            decoupled = isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay", False)
            self._correct_bias(slot, optimizer, decayed if decoupled else before)
        return decayed if self.options.decay == "all" else before

    def _correct_bias(self, slot: Slot, optimizer: torch.optim.Optimizer, base: Tensor) -> None:
        """Scale every movement as if Adam had counted the steps of its entry alone."""
        assert slot.mask is not None
        own = slot.buffers["policy"]["steps"].add_(slot.mask)
        beta1, beta2 = optimizer.param_groups[slot.context.group]["betas"]
        counted = float(optimizer.state[slot.param]["step"])
        steps = own.clamp(min=1).to(work_dtype(slot.param))
        first = (1.0 - beta1**counted) / (1.0 - beta1**steps)
        second = ((1.0 - beta2**steps) / (1.0 - beta2**counted)).sqrt_()
        weight = slot.param.detach()
        weight.copy_(base + (weight - base) * first * second)


class Moments(_PutsStatesBack):
    """``moments``: moments of masked entries are put back, and the step uses them as they are.

    A moment that the step multiplies with its decay is divided by it before, so that the weights move by the moment
    that was and not by a decayed one.
    """

    instead = "zero"

    def before(self, slots: Sequence[Slot], optimizer: torch.optim.Optimizer) -> None:
        super().before(slots, optimizer)
        changes = []
        for slot in slots:
            assert slot.mask is not None
            state = optimizer.state.get(slot.param, {})
            for name, kept in self.inventory(slot, optimizer).entries.items():
                if name not in slot.before or kept.decay is None:
                    continue
                if kept.codes:
                    scales = state[f"absmax{kept.codes}"].view(kept.decay.numel(), -1)
                    resting = ~_tiles(slot.mask).any(dim=1)
                    scales.copy_(torch.where(resting, scales / kept.decay[:, None], scales))
                else:
                    now = state[name].view(kept.decay.numel(), -1)
                    before_decay = now / kept.decay[:, None].to(now.dtype)
                    changes.append((now, over_slices(slot.mask, now), before_decay))
        put_back_all(changes)


class Residual(Policy):
    """``residual``: what was dropped is kept and added to the next gradient (error feedback).

    State: ``residual``, float32, shape of the gradient. Source: deep gradient compression (arXiv:1712.01887).
    """

    def __init__(self, options: ChainOptions):
        super().__init__(options)
        try:
            self.decay = float(options.decay or 1.0)
        except ValueError:
            self.decay = -1.0
        require(0.0 < self.decay <= 1.0, "grad_filter", "decay", options.decay, "in (0, 1] with policy=residual", 1.0)

    def buffers(self, param: Tensor) -> dict[str, Tensor]:
        return {"residual": torch.zeros(param.shape, dtype=work_dtype(param), device=param.device)}

    def begin(self, work: Work) -> None:
        work.replace(work.whole + self.decay * work.slot.buffers["policy"]["residual"])

    def end(self, work: Work) -> None:
        residual = work.slot.buffers["policy"]["residual"]
        if work.mask is None:
            residual.zero_()
        else:
            masked(work.whole, ~work.mask, out=residual)


POLICIES.update({"freeze": Freeze, "moments": Moments, "residual": Residual})
