"""What filters cost beside an optimizer's step: medians and ratios, candidates alternating in one process.

    make bench-filters              a small size, about two minutes
    make bench-filters FULL=1       the sizes of SD1.5 and SDXL LoRAs, a part of a U-Net, single tensors

Printed for every workload: the milliseconds of a bare torch AdamW step (default and fused), of the request's own code
(per tensor: difference, division, torch.topk, index fill), of a copy of the gradients, and of every filter, before and
after the step, each also as a multiple of the bare step. The step behind the filter is not in its number: torch takes
square roots of zeros at half speed, so AdamW (not fused) is slower on gradients with zeros, whoever made them.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from library import grad_filter

Shapes = list[tuple[int, ...]]


def lora(modules: dict[tuple[int, int], int], rank: int) -> Shapes:
    """Give the shapes of a LoRA: for each (in, out) of a module as many pairs of down and up."""
    return [
        shape for (width, out), times in modules.items() for _ in range(times) for shape in ((rank, width), (out, rank))
    ]


SMALL = {(64, 64): 120, (128, 128): 120, (128, 512): 40, (256, 256): 34, (256, 1024): 10}
SD15 = {(320, 320): 48, (640, 640): 48, (1280, 1280): 60, (768, 1280): 12, (768, 768): 72, (1280, 10240): 6,
        (5120, 1280): 6, (320, 2560): 6, (1280, 320): 6}  # fmt: skip
SDXL = {(640, 640): 110, (1280, 1280): 512, (2048, 1280): 60, (1280, 10240): 20, (5120, 1280): 20}
UNET: Shapes = [(1280, 1280)] * 40 + [(10240, 1280)] * 4 + [(640, 640, 3, 3)] * 6

WORKLOADS: dict[str, Shapes] = {
    "LoRA rank 4 of a small model, 648 tensors": lora(SMALL, 4),
    "LoRA rank 32, 128 tensors of 1280": lora({(1280, 1280): 64}, 32),
    "one tensor of 4 M": [(4_000_000,)],
}
FULL: dict[str, Shapes] = {
    "SD1.5 LoRA rank 32, 528 tensors": lora(SD15, 32),
    "SDXL LoRA rank 32, 1444 tensors": lora(SDXL, 32),
    "part of a U-Net, 141 M": UNET,
    "one tensor of 10 M": [(10_000_000,)],
    "one tensor of 100 M": [(100_000_000,)],
}
SHARES = (0.5, 0.1, 0.01)
FILTERS = (
    *(f"topk keep={keep}" for keep in SHARES),
    *(f"topk_change keep={keep}" for keep in SHARES),
    "topk keep=0.1 scope=global",
    "topk_change keep=0.1 scope=global",
    "topk keep=0.1 scope=row",
    "topk keep=0.1 policy=update",
    "topk keep=0.1 policy=moments",
    "topk keep=0.1 policy=freeze",
    "topk keep=0.1 policy=residual",
    "ema,topk_change keep=0.1",
    "agree",
    "sign",
    "threshold",
    "random",
)


def request(gradients: list[Tensor], previous: list[Tensor], keep: float) -> None:
    """Do what the request's code does to each gradient; ``previous`` becomes the masked gradient."""
    for gradient, before in zip(gradients, previous):
        change = (gradient - before).abs() / (before.abs() + 1e-8)
        flat = change.view(-1)
        _, chosen = torch.topk(flat, max(1, int(flat.numel() * keep)))
        mask = torch.zeros_like(flat)
        mask[chosen] = 1.0
        gradient.mul_(mask.view_as(gradient))
        before.copy_(gradient)


class Candidate:
    """An optimizer's step over a workload, with whatever stands in front of it."""

    def __init__(self, shapes: Shapes, device: str, fused: bool | None = None):
        generator = torch.Generator().manual_seed(0)
        self.source = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
        self.params = [torch.nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes]
        self.optimizer = torch.optim.AdamW(self.params, lr=1e-4, fused=fused)
        self.seconds: list[float] = []
        for param in self.params:
            param.grad = torch.empty_like(param)

    def new_gradients(self) -> list[Tensor]:
        """Give the gradients of a step: the source, moved on, so that no step's are those of the step before."""
        for param, gradient in zip(self.params, self.source):
            flat, target = gradient.view(-1), param.grad.view(-1)  # type: ignore[union-attr]
            cut = 7919 * len(self.seconds) % flat.numel()
            target[: flat.numel() - cut].copy_(flat[cut:])
            target[flat.numel() - cut :].copy_(flat[:cut])
        return [param.grad for param in self.params]  # type: ignore[misc]

    def measure(self) -> None:
        self.new_gradients()
        self.seconds.append(timed(self.optimizer.step, self.params[0].device))


class Filtered(Candidate):
    """What a filter does before and after a step, between hooks of ours."""

    def __init__(self, shapes: Shapes, device: str, filter_text: str):
        super().__init__(shapes, device)
        self._marks: list[float] = []
        self.optimizer.register_step_pre_hook(self._mark)
        self.optimizer.register_step_post_hook(self._mark)
        grad_filter.attach(self.optimizer, f"{filter_text} log_every=1000000")
        self.optimizer.register_step_pre_hook(self._mark)
        self.optimizer.register_step_post_hook(self._mark)

    def _mark(self, optimizer: object, *_: object) -> None:
        if optimizer is self.optimizer:  # a copy of it may be tried out
            self._marks.append(now(self.params[0].device))

    def measure(self) -> None:
        self._marks.clear()
        super().measure()
        started, filtered, stepped, ended = self._marks
        self.seconds[-1] = (filtered - started) + (ended - stepped)


class Plain(Candidate):
    """Work on the gradients alone."""

    def __init__(self, shapes: Shapes, device: str, work: Callable[[list[Tensor], list[Tensor]], None]):
        super().__init__(shapes, device)
        self.work, self.previous = work, [torch.zeros_like(param) for param in self.params]

    def measure(self) -> None:
        gradients = self.new_gradients()
        with torch.no_grad():
            self.seconds.append(timed(lambda: self.work(gradients, self.previous), self.params[0].device))


def now(device: torch.device) -> float:
    """Give CPU seconds, which other programs disturb least; on a GPU, seconds when all work so far has ended."""
    if device.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Give the seconds of one call."""
    start = now(device)
    work()
    return now(device) - start


def alternate(candidates: list[Candidate], steps: int) -> list[float]:
    """Give the median seconds of each; the first two rounds build states and are left out."""
    for number in range(steps + 2):
        for candidate in candidates if number % 2 else reversed(candidates):
            candidate.measure()
    return [statistics.median(candidate.seconds[2:]) for candidate in candidates]


def table(name: str, shapes: Shapes, steps: int, device: str, filters: tuple[str, ...]) -> None:
    """Measure a workload, one filter at a time beside the bare step, and print its rows."""
    entries = sum(torch.Size(shape).numel() for shape in shapes)
    print(f"\n### {name}: {len(shapes)} tensors, {entries / 1e6:.1f} M entries\n")
    print("| what | ms | x AdamW step |\n|---|---|---|")
    bare, fused = alternate([Candidate(shapes, device), Candidate(shapes, device, fused=True)], steps)
    copied = Plain(shapes, device, lambda gradients, previous: torch._foreach_copy_(previous, gradients))
    (copy,) = alternate([copied], steps)
    print(f"| AdamW step | {bare * 1e3:.1f} | 1.00 |")
    print(f"| AdamW step, fused | {fused * 1e3:.1f} | {fused / bare:.2f} |")
    print(f"| copy of the gradients | {copy * 1e3:.2f} | {copy / bare:.3f} |")
    for keep in SHARES:
        asked = Plain(shapes, device, lambda gradients, previous, keep=keep: request(gradients, previous, keep))
        one, beside = alternate([Candidate(shapes, device), asked], steps)
        print(f"| the request's code, keep={keep} | {beside * 1e3:.1f} | {beside / one:.2f} |", flush=True)
    for text in filters:
        one, own = alternate([Candidate(shapes, device), Filtered(shapes, device, text)], steps)
        print(f"| {text} | {own * 1e3:.1f} | {own / one:.2f} |", flush=True)


def processor() -> str:
    """Give the model of the processor in the system's words."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return found[0] if found else platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description="what gradient filters add to an AdamW step, as ratios")
    parser.add_argument("--full", action="store_true", help="full sizes: several GB of memory and many minutes")
    parser.add_argument("--steps", type=int, default=7, help="measured steps of each candidate")
    parser.add_argument("--threads", type=int, default=1, help="of torch; more make CPU time larger where they wait")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--only", nargs="*", default=None, metavar="TEXT", help="filters to measure, all when left out")
    parser.add_argument("--workload", default="", help="measure workloads whose name has this in it")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    where = torch.cuda.get_device_name() if options.device == "cuda" else processor()
    print(f"{where}, torch {torch.__version__}, {options.threads} threads, {options.steps} steps of each, medians")
    for name, shapes in {**WORKLOADS, **(FULL if options.full else {})}.items():
        if options.workload in name:
            table(name, shapes, options.steps, options.device, tuple(options.only or FILTERS))


if __name__ == "__main__":
    main()
