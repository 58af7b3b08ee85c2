"""Buffers of gradient filters in fewer bytes, or on the CPU, between steps; loaded on demand for ``state_dtype`` and
``state_device``. Only the tensors of the running bucket are unpacked at a time.

``bf16`` rounds to nearest. ``fp8`` (e4m3) and ``int8`` keep one float32 scale for 256 entries, which is their largest
magnitude, as 8-bit optimizers do (arXiv:2110.02861): an entry below about 1/250 (int8) of the largest in its block
becomes zero, fp8 keeps it to 1/16 of its own size down to 1/200000 of the largest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .grad_filter import TILE, Slot

LARGEST = {"fp8": 448.0, "int8": 127.0}  # codes of the largest magnitude in a block
BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0 + 4.0 / TILE, "int8": 1.0 + 4.0 / TILE}


def packs(tensor: Tensor, entries: int) -> bool:
    """Say whether a buffer is packed: those with one or more numbers for each entry of the parameter are."""
    return tensor.is_floating_point() and tensor.numel() > 0 and tensor.numel() % entries == 0


def pack(tensor: Tensor, kind: str) -> dict[str, Any]:
    """Encode a float buffer.

    Args:
        tensor: any shape. kind: a key of ``BYTES``.

    Returns:
        ``shape``; ``values``: float32, bfloat16, or uint8 codes, flat; with codes also ``scales``: float32, one for 256
        entries.
    """
    shape = list(tensor.shape)
    if kind in ("fp32", "bf16"):
        return {"shape": shape, "values": tensor.reshape(-1).to(torch.bfloat16 if kind == "bf16" else tensor.dtype)}
    flat = torch.nn.functional.pad(tensor.reshape(-1).float(), (0, -tensor.numel() % TILE)).view(-1, TILE)
    scales = flat.abs().amax(dim=1)
    codes = flat / scales.clamp(min=1e-38)[:, None] * LARGEST[kind]
    codes = codes.round().to(torch.int8) if kind == "int8" else codes.to(torch.float8_e4m3fn)
    return {"shape": shape, "values": codes.view(torch.uint8).view(-1)[: tensor.numel()].clone(), "scales": scales}


def unpack(packed: Mapping[str, Any], kind: str, like: Tensor) -> Tensor:
    """Decode a buffer on the device of ``like``, in float32 (float64 for float64)."""
    values = packed["values"].to(like.device, non_blocking=True)
    dtype = torch.float64 if like.dtype is torch.float64 else torch.float32
    if "scales" in packed:
        codes = values.view(torch.int8 if kind == "int8" else torch.float8_e4m3fn).to(dtype)
        scales = packed["scales"].to(like.device, dtype, non_blocking=True) / LARGEST[kind]
        values = codes * scales.repeat_interleave(TILE)[: codes.numel()]
    return values.to(dtype, copy=True).view(packed["shape"])


def pack_slot(slot: Slot) -> None:
    """Take the float buffers out of a slot and keep them packed."""
    assert slot.chain is not None
    options = slot.chain.options
    for stage, own in slot.buffers.items():
        for key in [key for key, tensor in own.items() if packs(tensor, slot.param.numel())]:
            packed = pack(own.pop(key), options.state_dtype)
            if options.state_device == "cpu":
                packed |= {name: _in_host_memory(packed[name]) for name in ("values", "scales") if name in packed}
            slot.packed[f"{stage}.{key}"] = packed


def _in_host_memory(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return host.copy_(tensor)  # waits: the memory on the device is used again at once


def unpack_slot(slot: Slot) -> None:
    """Put packed buffers back into a slot."""
    assert slot.chain is not None
    for name, packed in slot.packed.items():
        stage, _, key = name.rpartition(".")
        slot.buffers[stage][key] = unpack(packed, slot.chain.options.state_dtype, slot.param)
    slot.packed.clear()


def loaded(entry: Mapping[str, Any], param: Tensor) -> dict[str, Tensor]:
    """Give the buffers of a saved entry, decoded, by name."""
    found = dict(entry["buffers"])
    for name, packed in entry.get("packed", {}).items():
        found[name] = unpack(packed, entry["state_dtype"], param)
    return found
