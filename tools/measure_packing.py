"""How many entries still pass when a filter's buffers are kept in fewer bytes, and how far what passes is off.

    python tools/measure_packing.py

Every step's gradient is a fixed direction plus noise of four times its size, with the sizes of its entries spread over
three powers of ten, as the gradients of a LoRA are. Runs with fp32 and with packed buffers see the same gradients.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from library import grad_filter

SIZE, STEPS, COUNTED = 1 << 18, 60, 20
CHAINS = ("topk_change", "ema,topk keep=0.1", "snr keep=0.1", "vargate", "topk keep=0.1 policy=residual", "agree")


def results(text: str) -> list[Tensor]:
    """Give the filtered gradients of the last steps."""
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** (3 * torch.rand(SIZE, generator=generator) - 3)
    direction = torch.randn(SIZE, generator=generator)
    param = torch.nn.Parameter(torch.ones(SIZE))
    optimizer = torch.optim.SGD([param], lr=1e-4)
    grad_filter.attach(optimizer, f"{text} log_every=1000")
    found = []
    for step in range(STEPS):
        param.grad = sizes * (direction + 4.0 * torch.randn(SIZE, generator=generator))
        optimizer.step()
        if step >= STEPS - COUNTED:
            found.append(param.grad)
    return found


def main() -> None:
    print("| filter | state_dtype | entries that pass in both / in fp32 | relative error of what passes |")
    print("|---|---|---|---|")
    for chain in CHAINS:
        plain = results(chain)
        for kind in ("bf16",) if chain.startswith(("snr", "vargate")) else ("bf16", "fp8", "int8"):
            packed = results(f"{chain} state_dtype={kind}")
            same = sum(int(((a != 0) & (b != 0)).sum()) for a, b in zip(plain, packed))
            error = sum(float((a - b).norm() / a.norm()) for a, b in zip(plain, packed)) / COUNTED
            print(
                f"| {chain} | {kind} | {same / sum(int((a != 0).sum()) for a in plain):.4f} | {error:.4f} |", flush=True
            )


if __name__ == "__main__":
    main()
