"""Buffers in fewer bytes: how exact they are, that they resume to the same bits, and that other options still work."""

from __future__ import annotations

import io

import pytest
import torch

from library import grad_filter as gf
from library import grad_filter_packing as packing

KINDS = ["fp32", "bf16", "fp8", "int8"]
CHAINS = [
    "ema,topk keep=0.2",
    "topk_change",
    "snr keep=0.3",
    "topk keep=0.2 policy=residual",
    "topk_change scope=global",
]
SHAPES = [(40, 33), (700,), (8, 4, 3, 3)]


class Run:
    def __init__(self, text: str, in_backward: bool = False):
        self.params = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
        self.optimizer = torch.optim.AdamW(self.params, lr=0.01)
        self.handle = gf.attach(self.optimizer, text, in_backward=in_backward)

    def steps(self, numbers: range) -> Run:
        for number in numbers:
            generator = torch.Generator().manual_seed(number)
            for param in self.params:
                param.grad = torch.randn(param.shape, generator=generator)
            self.optimizer.step()
        return self

    def saved(self) -> dict:
        file = io.BytesIO()
        torch.save(self.optimizer.state_dict(), file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def load(self, saved: dict, other: Run) -> Run:
        self.optimizer.load_state_dict(saved)
        for own, theirs in zip(self.params, other.params):
            own.data.copy_(theirs.data)
        return self


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 255, 256, 1000])
def test_values_come_back_as_exact_as_stated(kind, size):
    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    back = packing.unpack(packing.pack(values, kind), kind, values)
    largest = torch.nn.functional.pad(values.abs(), (0, -size % 256)).view(-1, 256).amax(dim=1)
    bound = {
        "fp32": torch.zeros(size),
        "bf16": values.abs() / 256,
        "fp8": (values.abs() / 16).maximum(largest.repeat_interleave(256)[:size] / 200_000),
        "int8": largest.repeat_interleave(256)[:size] / 254,
    }[kind]
    assert ((back - values).abs() <= bound * 1.001).all()
    assert torch.equal(packing.unpack(packing.pack(torch.zeros(size), kind), kind, values), torch.zeros(size))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chain", [chain for chain in CHAINS if "snr" not in chain] + ["agree"])
def test_a_resumed_run_has_the_bits_of_the_unbroken_one(chain, kind):
    text = f"{chain} state_dtype={kind} state_device=cpu"
    unbroken, first = Run(text).steps(range(6)), Run(text).steps(range(3))
    resumed = Run(text).load(first.saved(), first).steps(range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(resumed.params, unbroken.params))
    for one, other in zip(resumed.saved()["grad_filter"]["params"], unbroken.saved()["grad_filter"]["params"]):
        assert one["step"] == other["step"] == 6 and one["packed"]
        assert not any(packing.packs(buffer, 2) for buffer in one["buffers"].values())
        torch.testing.assert_close(one["packed"], other["packed"], rtol=0, atol=0)


@pytest.mark.parametrize("chain", CHAINS)
def test_memory_alone_on_the_cpu_changes_no_bit(chain):
    plain, moved = Run(chain).steps(range(4)), Run(f"{chain} state_device=cpu").steps(range(4))
    assert all(torch.equal(a, b) for a, b in zip(plain.params, moved.params))


def test_a_filter_that_needs_exact_buffers_refuses_coarse_ones():
    with pytest.raises(gf.GradFilterError, match=r"snr: state_dtype=int8 is too coarse.*bf16"):
        Run("snr state_dtype=int8")
    text = "snr keep=0.3 state_dtype=bf16"
    first = Run(text).steps(range(3))
    resumed = Run(text).load(first.saved(), first).steps(range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(resumed.params, Run(text).steps(range(6)).params))


def test_a_state_of_another_kind_is_taken_over():
    first = Run("ema,topk keep=0.2 state_dtype=int8").steps(range(3))
    for other in ("fp32", "bf16"):
        second = Run(f"ema,topk keep=0.2 state_dtype={other}").load(first.saved(), first).steps(range(3, 5))
        assert all(torch.isfinite(param).all() for param in second.params)
        assert second.saved()["grad_filter"]["params"][0]["step"] == 5


@pytest.mark.parametrize("kind,share", [("bf16", 2.0), ("fp8", 1.016), ("int8", 1.016)])
def test_the_state_and_the_plan_are_smaller(kind, share):
    run = Run(f"topk_change state_dtype={kind}").steps(range(2))
    entries = sum(param.numel() for param in run.params)
    parts = [
        part
        for one in run.saved()["grad_filter"]["params"]
        for packed in one["packed"].values()
        for part in (packed["values"], packed.get("scales", torch.empty(0)))
    ]
    assert sum(part.numel() * part.element_size() for part in parts) <= share * entries + 4 * len(SHAPES)
    wide = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1000, 1000))])
    assert f"buffers {share:.1f} MB" in gf.attach(wide, f"topk_change state_dtype={kind}").plan()[0]
