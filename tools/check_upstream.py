"""Try the upstream change in an old environment: this interpreter, its torch, and nothing else installed.

    python tools/check_upstream.py

Adds the filter to a stand-in checkout, trains a few weights with every stage and several optimizers of torch, saves and
resumes, and compares a switched-off filter with no filter. `make test-upstream` runs it in environments of its own.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

TOOL = Path(__file__).resolve().parent / "add_to_sd_scripts.py"

STAND_IN = """import argparse

import torch


def add_optimizer_arguments(parser):
    parser.add_argument("--optimizer_type", type=str, default="AdamW")
    parser.add_argument("--optimizer_args", type=str, nargs="*", default=None)
    parser.add_argument("--learning_rate", type=float, default=1e-3)


def get_optimizer(args, trainable_params):
    kind = getattr(torch.optim, args.optimizer_type)
    return "torch.optim." + args.optimizer_type, "", kind(trainable_params, lr=args.learning_rate)
"""

TRIAL = """
import argparse, sys, tempfile
import torch
from library import grad_filter, train_util

parser = argparse.ArgumentParser()
train_util.add_optimizer_arguments(parser)

def run(words, steps, saved=None, weights=None):
    generator = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in ((40, 32), (8, 4, 3, 3), (5,))]
    if weights:
        for param, value in zip(params, weights):
            param.data = value.clone()
    _, _, optimizer = train_util.get_optimizer(parser.parse_args(words), params)
    if saved:
        optimizer.load_state_dict(torch.load(saved, weights_only=True))
    for step in steps:
        noise = torch.Generator().manual_seed(step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=noise)
        optimizer.step()
    return params, optimizer

def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other))

checked, refused = 0, set()
for optimizer in ("AdamW", "Adam", "SGD", "RMSprop", "Adagrad", "NAdam"):
    for name in sorted(grad_filter.known_filters() if hasattr(grad_filter, "known_filters") else grad_filter.FILTERS):
        words = ["--optimizer_type", optimizer, "--grad_filter", name]
        words += ["--grad_filter_args", "lo=-0.01", "hi=0.01"] if name == "clamp" else []
        try:
            whole, _ = run(words, range(8))
        except grad_filter.GradFilterError as refusal:  # needs a file, or a state this optimizer has not
            refused.add(f"{name}: {refusal}")
            continue
        half, live = run(words, range(4))
        with tempfile.NamedTemporaryFile(suffix=".bin") as file:
            torch.save(live.state_dict(), file.name)
            resumed, _ = run(words, range(4, 8), file.name, [p.detach() for p in half])
        assert same(whole, resumed), (optimizer, name)
        assert all(torch.isfinite(p).all() for p in whole), (optimizer, name)
        checked += 1
    bare, plain = run(["--optimizer_type", optimizer], range(8))
    off, switched = run(["--optimizer_type", optimizer, "--grad_filter", "none"], range(8))
    assert same(bare, off) and "grad_filter" not in switched.state_dict()
print(f"python {sys.version.split()[0]}, torch {torch.__version__}: {checked} combinations resume to the bit")
print(*sorted(refused), sep="\\n")
"""


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        library = Path(name) / "library"
        library.mkdir()
        (library / "__init__.py").write_text("")
        (library / "train_util.py").write_text(STAND_IN)
        subprocess.run([sys.executable, str(TOOL), name], check=True, stdout=subprocess.DEVNULL)
        return subprocess.run([sys.executable, "-c", TRIAL], cwd=name).returncode


if __name__ == "__main__":
    sys.exit(main())
