"""The NumPy passes against the plain ones they stand in for: the same bits."""

from __future__ import annotations

import pytest
import torch

from library import grad_filter as gf

SIZES = [1, 2, 255, gf.CHUNK, gf.CHUNK + 1, 2 * gf.CHUNK + 77]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def values(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers with what is special among floats."""
    drawn = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    special = torch.tensor([0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1e-40]).to(dtype)
    drawn[: min(size, 6)] = special[: min(size, 6)]
    return drawn


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gf, "kernels", lambda *tensors: None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_masking_and_putting_back_give_the_plain_bits(size, dtype, monkeypatch):
    now, before, mask = values(size, dtype), values(size, dtype).flip(0), torch.arange(size) % 3 != 0
    fast = now.clone(), now.clone()
    assert gf.kernels(now, mask, before) is not None
    in_place = gf.masked(fast[0], mask, out=fast[0])
    gf.put_back(fast[1], mask, before)
    plain(monkeypatch)
    slow = now.clone()
    gf.put_back(slow, mask, before)
    assert torch.equal(bits(in_place), bits(gf.masked(now, mask)))
    assert torch.equal(bits(fast[1]), bits(slow))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("rows,size", [(1, 1), (3, 500), (1, 2 * gf.CHUNK + 77), (7, 64)])
@pytest.mark.parametrize("kind", ["plain", "ties", "zeros", "signed"])
def test_selection_passes_the_same_entries(rows, size, kind, dtype, monkeypatch):
    scores = torch.randn(rows, size, generator=torch.Generator().manual_seed(size)).to(dtype)
    scores = {"plain": scores.abs(), "ties": scores.abs().round(), "signed": scores}.get(kind, scores.abs())
    if kind == "zeros":
        scores[torch.rand(rows, size) < 0.9] = 0.0
    contest = gf.ordered_bits(scores, nonnegative=kind != "signed")
    counts = sorted({1, max(1, size // 10), max(1, size // 2), size})
    fast = [gf.pass_largest(contest, count) for count in counts]
    plain(monkeypatch)
    for count, mask in zip(counts, fast):
        assert torch.equal(mask, gf.pass_largest(contest, count))
        assert mask.sum(dim=1).tolist() == [count] * rows


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_relative_change_gives_the_plain_bits(size, dtype, monkeypatch):
    stage = gf.FILTERS["topk_change"].target()
    grad, prev = torch.randn(size).to(dtype), torch.randn(size).to(dtype)
    fast = stage.score(grad, {"prev": prev}, torch.empty_like(grad))
    plain(monkeypatch)
    slow = stage.score(grad, {"prev": prev}, torch.empty_like(grad))
    assert torch.equal(fast, slow) and torch.equal(slow, (grad - prev).abs() / (prev.abs() + 1e-8))


def test_other_devices_and_strided_tensors_take_the_plain_passes():
    assert gf.kernels(torch.zeros(4, 4).t()) is None and gf.kernels(torch.zeros(4, device="meta")) is None
