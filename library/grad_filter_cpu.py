"""Passes of gradient filters with NumPy, on the CPU: the bits of the plain ones, several times faster.

NumPy selects, compares and counts with vector instructions where torch does one entry at a time. ``grad_filter`` loads
this file on demand; without it, or without NumPy, nothing but the time changes. Tensors are contiguous and on the CPU;
large ones are taken in pieces that fit the cache of a core, so that no pass needs memory of their size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .grad_filter import CHUNK, scratch

INTEGERS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


def _bits(tensor: Tensor) -> Any:
    """Give the entries as a flat array of integers that shares the memory."""
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return tensor.detach().numpy().reshape(-1).view(INTEGERS[tensor.itemsize])


def _pieces(*arrays: Any) -> Iterator[tuple[Any, ...]]:
    if len(arrays[0]) <= CHUNK:
        yield arrays
        return
    for start in range(0, len(arrays[0]), CHUNK):
        yield tuple(array[start : start + CHUNK] for array in arrays)


def _room(like: Any, purpose: str) -> Any:
    """Give memory for a piece, used again at the next call."""
    dtype = torch.from_numpy(like[:0]).dtype
    return scratch(torch.Size([min(len(like), CHUNK)]), dtype, purpose).numpy()


def masked(grad: Tensor, mask: Tensor, out: Tensor) -> None:
    """Do :func:`grad_filter.masked`; bits times one or zero, so NaN and -0 end as plain zeros."""
    for values, passing, result in _pieces(_bits(grad), _bits(mask), _bits(out)):
        np.multiply(values, passing, out=result)


def put_back(now: Tensor, mask: Tensor, before: Tensor) -> None:
    """Do :func:`grad_filter.put_back`: of the bits that differ, those stay changed where the mask is True."""
    bits = _bits(now)
    room = _room(bits, "put_back")
    for new, passing, old in _pieces(bits, _bits(mask), _bits(before)):
        changed = room[: len(new)]
        np.bitwise_xor(new, old, out=changed)
        np.multiply(changed, passing, out=changed)
        np.bitwise_xor(changed, old, out=new)


def largest_in_rows(bits: Tensor, count: int) -> Tensor:
    """Do :func:`grad_filter.largest_in_rows` by partition."""
    place = bits.shape[1] - count
    few = _entries_that_differ(bits) if len(bits) == 1 else None
    if few is not None:
        bits, place = few, few.shape[1] - count
        if place < 0:
            return bits.new_zeros(1, 1)
    work = scratch(bits.shape, bits.dtype, "partition").numpy()
    np.copyto(work, bits.numpy())
    work.partition(place, axis=1)
    return torch.from_numpy(work[:, place : place + 1].copy())


def _entries_that_differ(bits: Tensor) -> Tensor | None:
    """Give the entries above zero of a row that is zero in many places, None for other rows.

    A partition slows down to a fraction of its speed when a value is repeated over much of an array.
    """
    values = bits[0].numpy()
    sample = values[:: max(1, len(values) // 256)]
    if 4 * np.count_nonzero(sample) > 3 * len(sample) or values.min() < 0:
        return None
    return torch.from_numpy(values[values > 0]).view(1, -1)


def at_least(bits: Tensor, thresholds: Tensor, mask: Tensor) -> int:
    """Write ``bits >= thresholds`` into a mask and give how many entries pass.

    Args:
        bits: (rows, size) integers. thresholds: (rows, 1). mask: bool, (rows, size).
    """
    values, limits, result = bits.numpy(), thresholds.numpy(), mask.numpy()
    rows, size = values.shape
    passing, step = 0, max(1, CHUNK // size)
    for row in range(0, rows, step):
        for start in range(0, size, CHUNK):
            piece = (slice(row, row + step), slice(start, start + CHUNK))
            np.greater_equal(values[piece], limits[row : row + step], out=result[piece])
            passing += np.count_nonzero(result[piece])
    return passing


def relative_change(grad: Tensor, prev: Tensor, eps: float, out: Tensor) -> None:
    """Write ``|grad - prev| / (|prev| + eps)`` of float32 or float64 tensors."""
    values = grad.numpy().reshape(-1)
    room, eps = _room(values, "relative"), values.dtype.type(eps)
    for value, old, change in _pieces(values, prev.numpy().reshape(-1), out.numpy().reshape(-1)):
        size = room[: len(value)]
        np.subtract(value, old, out=change)
        np.abs(change, out=change)
        np.abs(old, out=size)
        np.add(size, eps, out=size)
        np.divide(change, size, out=change)
