"""Small tensors filtered many at a time: the same bits, masks, states and numbers as one by one."""

from __future__ import annotations

import copy

import pytest
import torch

from library import grad_filter, grad_filter_batches
from library.grad_filter import FILTERS, attach, known_filters

SHAPES = [(8, 40), (40, 8), (320,), (8, 40), (4, 8, 3, 3), (20, 16), (8, 40), (2, 2), (64, 1100), (70,)]
CHAINS = [
    "topk keep=0.1",
    "topk keep=0.1 jitter=0.5",
    "topk keep=0.1 warmup=2 ramp=4 every=2",
    "topk keep=0.1 scope=row",
    "topk_change scope=row policy=update",
    "topk keep=0.1 scope=global",
    "topk keep=0.1 scope=group",
    "topk_change",
    "topk_change keep=0.6 previous=ema",
    "topk_change scope=global previous=raw",
    "ema,topk_change ema.debias=true",
    "ema,topk,sign policy=update",
    "ema,topk,sign",
    "topk keep=0.3 policy=freeze",
    "topk keep=0.3 policy=freeze bias_correction=entry scope=global",
    "topk keep=0.3 policy=moments",
    "topk_change policy=residual",
    "sign",
]
ENTRYWISE = sorted(name for name, found in known_filters().items() if getattr(found.target, "entrywise", False))


def gradients(step: int, dtype: torch.dtype, kind: str) -> list[torch.Tensor | None]:
    """Random gradients, with ties, tensors of zeros, and parameters that have none now and then."""
    generator = torch.Generator().manual_seed(step)
    drawn: list[torch.Tensor | None] = [torch.randn(shape, generator=generator) for shape in SHAPES]
    if kind == "ties":
        drawn = [(4 * one).round() / 4 for one in drawn if one is not None]
    if kind == "holes":
        drawn[step % len(SHAPES)] = None
        drawn[(step + 3) % len(SHAPES)] = torch.zeros(SHAPES[(step + 3) % len(SHAPES)])
    if kind == "strided":
        drawn = [one.mT.contiguous().mT if one is not None and one.dim() > 1 else one for one in drawn]
    return [None if one is None else one.to(dtype) for one in drawn]


class Run:
    """An optimizer with a filter over tensors of a few sizes in two groups."""

    def __init__(self, text: str, dtype: torch.dtype):
        self.params = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in SHAPES]
        groups = [{"params": self.params[:4]}, {"params": self.params[4:], "lr": 0.003}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01)
        self.handle = attach(self.optimizer, f"{text} log_every=1")
        self.seen: list[torch.Tensor] = []
        self.scalars: list[dict[str, float]] = []

    def step(self, given: list[torch.Tensor | None]) -> None:
        for param, gradient in zip(self.params, given):
            param.grad = gradient if gradient is None else gradient.clone()
        self.optimizer.step()
        self.seen = [param.grad for param in self.params if param.grad is not None]
        self.scalars.append({k: v for k, v in self.handle.scalars().items() if not k.endswith("time_share")})

    def everything(self) -> list[torch.Tensor]:
        saved = self.optimizer.state_dict()
        states = [value for state in saved["state"].values() for value in state.values()]
        kept = [value for entry in saved["grad_filter"]["params"] for value in entry["buffers"].values()]
        return [*self.params, *self.seen, *states, *kept]


@pytest.fixture
def batches_made(monkeypatch):
    """The number of slots in every batch that was filtered."""
    made: list[int] = []
    work = grad_filter_batches.Batch.work
    monkeypatch.setattr(
        grad_filter_batches.Batch, "work", lambda batch, zeroes: made.append(len(batch.slots)) or work(batch, zeroes)
    )
    return made


def assert_same(one: Run, other: Run) -> None:
    here, there = one.everything(), other.everything()
    assert len(here) == len(there)
    for a, b in zip(here, there):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def without_batches(monkeypatch) -> None:
    monkeypatch.setattr(grad_filter_batches, "takes", lambda chain: False)


CASES = [
    *((text, "holes", torch.float32) for text in CHAINS),
    *((text, "plain", torch.bfloat16) for text in CHAINS if "policy" not in text or "freeze" in text),
    *(
        (text, kind, torch.float32)
        for text in ("topk_change", "topk keep=0.1 scope=global")
        for kind in ("ties", "strided")
    ),
]


@pytest.mark.parametrize("text, kind, dtype", CASES)
def test_batches_give_the_bits_of_single_tensors(text, kind, dtype, batches_made, monkeypatch):
    together = Run(text, dtype)
    for step in range(5):
        together.step(gradients(step, dtype, kind))
    assert batches_made and max(batches_made) > 2
    batches_made.clear()
    without_batches(monkeypatch)
    alone = Run(text, dtype)
    for step in range(5):
        alone.step(gradients(step, dtype, kind))
    assert not batches_made
    assert_same(together, alone)
    for one, other in zip(together.scalars, alone.scalars):
        assert one == pytest.approx(other, rel=1e-6, nan_ok=True)


def test_tensors_that_missed_a_step_are_still_taken_together(batches_made):
    """The down matrices of a LoRA have no gradient at its first step."""
    for text, expected in (("topk_change", 1), ("topk keep=0.1 scope=global", len(SHAPES) - 1)):
        run = Run(text, torch.float32)
        for step in range(3):
            given = gradients(step, torch.float32, "plain")
            for one in given[::2] if step == 0 else ():
                one.zero_()
            batches_made.clear()
            run.step(given)
        assert max(batches_made) >= expected and sum(batches_made) >= 6


@pytest.mark.parametrize("name", ENTRYWISE)
def test_filters_that_call_themselves_entrywise_are(name, batches_made, monkeypatch):
    needs = {"clamp": "clamp lo=-0.01 hi=0.01"}
    together = Run(needs.get(name, name), torch.float32)
    for step in range(5):
        together.step(gradients(step, torch.float32, "plain"))
    assert batches_made, f"{name} is never batched"
    without_batches(monkeypatch)
    alone = Run(needs.get(name, name), torch.float32)
    for step in range(5):
        alone.step(gradients(step, torch.float32, "plain"))
    assert_same(together, alone)


@pytest.mark.parametrize("text", ["ema,topk_change", "topk_change scope=global", "topk_change policy=residual"])
def test_states_pass_between_batches_and_single_tensors(text, batches_made, monkeypatch, tmp_path):
    whole = Run(text, torch.float32)
    for step in range(6):
        whole.step(gradients(step, torch.float32, "plain"))
        if step == 2:
            torch.save(whole.optimizer.state_dict(), tmp_path / "state.pt")
    middle = replay(text, 3)
    for batched in (True, False):
        with monkeypatch.context() as patch:
            if not batched:
                without_batches(patch)
            rest = Run(text, torch.float32)
            rest.step(gradients(9, torch.float32, "plain"))  # it has batches of its own before it loads
            rest.optimizer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
            half = torch.load(tmp_path / "state.pt", weights_only=True)["grad_filter"]["params"]
            assert all(t.shape == torch.Size(e["shape"]) for e in half for t in e["buffers"].values())
            for param, like in zip(rest.params, middle):
                param.data.copy_(like)
            for step in range(3, 6):
                rest.step(gradients(step, torch.float32, "plain"))
        assert_same(whole, rest)


def replay(text: str, steps: int) -> list[torch.Tensor]:
    run = Run(text, torch.float32)
    for step in range(steps):
        run.step(gradients(step, torch.float32, "plain"))
    return [param.detach() for param in run.params]


def test_a_copied_optimizer_shares_no_buffer(batches_made):
    run = Run("topk_change", torch.float32)
    run.step(gradients(0, torch.float32, "plain"))
    twin = copy.deepcopy(run.optimizer)
    before = [t.clone() for e in twin.state_dict()["grad_filter"]["params"] for t in e["buffers"].values()]
    run.step(gradients(1, torch.float32, "plain"))
    after = [t for e in twin.state_dict()["grad_filter"]["params"] for t in e["buffers"].values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after))


def test_large_tensors_and_other_chains_stay_alone(batches_made):
    big = [torch.nn.Parameter(torch.zeros(grad_filter_batches.SMALL + 1)) for _ in range(3)]
    optimizer = torch.optim.SGD(big, lr=0.1)
    attach(optimizer, "topk")
    for param in big:
        param.grad = torch.ones_like(param)
    optimizer.step()
    for text in ("topk unit=row", "topk ndim=1", "topk state_dtype=bf16", "topk rescale=norm", "topk statistics=full",
                 "topk scope=global cap=0.5", "random", "norm", "norm,topk"):  # fmt: skip
        run = Run(text, torch.float32)
        run.step(gradients(0, torch.float32, "plain"))
    assert not batches_made


def test_a_batch_of_rows_is_bounded(batches_made, monkeypatch):
    monkeypatch.setattr(grad_filter_batches, "ROWS_TOGETHER", 700)
    run = Run("topk", torch.float32)
    run.step(gradients(0, torch.float32, "plain"))
    assert batches_made and max(batches_made) == 2  # 700 entries are two tensors of 320


def test_without_the_file_beside_it_the_result_is_the_same(monkeypatch):
    real = grad_filter._load_beside
    together = Run("ema,topk_change", torch.float32)
    monkeypatch.setattr(
        grad_filter, "_load_beside", lambda name, *needs: None if "batches" in name else real(name, *needs)
    )
    alone = Run("ema,topk_change", torch.float32)
    given = gradients(0, torch.float32, "plain")
    alone.step(given)
    monkeypatch.undo()
    together.step(given)
    assert_same(together, alone)


def test_only_known_filters_are_entrywise():
    assert {"topk", "topk_change", "ema", "sign", "stable"} <= set(ENTRYWISE) and "random" not in ENTRYWISE
    assert set(ENTRYWISE) <= set(FILTERS)
