"""The tool that adds filters to a foreign checkout, on stand-ins of our own in several layouts."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

TOOL = REPOSITORY / "tools" / "add_to_sd_scripts.py"

PLAIN = '''"""A stand-in for a trainer's utilities, written for this test."""

import argparse
import os

import torch


def add_optimizer_arguments(parser: argparse.ArgumentParser):
    parser.add_argument("--optimizer_type", type=str, default="")
    parser.add_argument("--optimizer_args", type=str, default=None, nargs="*")
    parser.add_argument("--learning_rate", type=float, default=2e-6)


class Something:
    def get_optimizer(self):
        return None


def get_optimizer(args, trainable_params):
    kind = getattr(torch.optim, args.optimizer_type or "AdamW")
    pairs = dict(item.split("=") for item in args.optimizer_args or [])
    pairs = {key: float(value) for key, value in pairs.items()}
    optimizer = kind(trainable_params, lr=args.learning_rate, **pairs)
    return kind.__module__ + "." + kind.__name__, ",".join(f"{k}={v}" for k, v in pairs.items()), optimizer
'''
DECORATED = PLAIN.replace(
    "def add_optimizer_arguments",
    "def same(function):\n    return function\n\n\n@same\n@same\ndef add_optimizer_arguments",
).replace("\ndef get_optimizer", "\n@same\ndef get_optimizer")
ANNOTATED = PLAIN.replace(
    "def get_optimizer(args, trainable_params):",
    "def get_optimizer(\n    args: argparse.Namespace,\n    trainable_params: list,\n) -> tuple[str, str, object]:",
)
OTHER_ORDER = (
    "\n\n\n".join([PLAIN.split("\n\n\n")[0], PLAIN.split("\n\n\n")[3].rstrip(), *PLAIN.split("\n\n\n")[1:3]]) + "\n"
)
LAYOUTS = {
    "plain": PLAIN,
    "decorated": DECORATED,
    "annotated": ANNOTATED,
    "other order": OTHER_ORDER,
    "crlf": PLAIN.replace("\n", "\r\n"),
    "tabs": PLAIN.replace("    ", "\t"),
    "bom": "\ufeff" + PLAIN,
    "non-ascii": PLAIN.replace("A stand-in", "Ein Stück, 日本語, a stand-in"),
    "no newline at the end": PLAIN.rstrip("\n"),
    "form feed": PLAIN.replace("\n\n\nclass", "\n\x0c\n\nclass"),
    "imports later": PLAIN + "\n\nimport json\n",
    "in a try": PLAIN.replace("import torch\n", "try:\n    import torch\nexcept ImportError:\n    torch = None\n"),
}


def checkout(folder: Path, text: str) -> Path:
    (folder / "library").mkdir(parents=True)
    (folder / "library" / "__init__.py").write_text("")
    (folder / "library" / "train_util.py").write_bytes(text.encode("utf-8"))
    return folder


def tool(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(TOOL), *words], capture_output=True, text=True, encoding="utf-8")


def tree(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_added_checked_added_again_and_undone(name, tmp_path):
    folder = checkout(tmp_path / "sd", LAYOUTS[name])
    before = tree(folder)
    checked = tool(str(folder), "--check")
    assert checked.returncode == 0 and "+@grad_filter.with_grad_filter" in checked.stdout
    assert tree(folder) == before
    added = tool(str(folder))
    assert added.returncode == 0, added.stderr
    after = tree(folder)
    assert after["library/grad_filter.py"] == (REPOSITORY / "library" / "grad_filter.py").read_bytes()
    old, new = before["library/train_util.py"], after["library/train_util.py"]
    lines_added = new.count(b"# gradient filters")
    assert lines_added == 3 and new.count(b"\r\n") == (old.count(b"\r\n") + 3 if b"\r\n" in old else 0)
    again = tool(str(folder))
    assert again.returncode == 0 and "nothing to do" in again.stdout and tree(folder) == after
    undone = tool(str(folder), "--undo")
    assert undone.returncode == 0 and tree(folder) == before
    assert "nothing to do" in tool(str(folder), "--undo").stdout


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "imports later"])
def test_the_patched_trainer_filters(name, tmp_path):
    """In a process that sees nothing of this repository."""
    folder = checkout(tmp_path / "sd", LAYOUTS[name])
    assert tool(str(folder)).returncode == 0
    code = """
import argparse, torch
from library import train_util
parser = argparse.ArgumentParser()
train_util.add_optimizer_arguments(parser)
args = parser.parse_args(["--grad_filter", "topk", "--grad_filter_args", "keep=0.25", "--learning_rate", "1"])
weight = torch.nn.Parameter(torch.zeros(8, 16))
args.optimizer_type = "SGD"
name, text, optimizer = train_util.get_optimizer(args, [weight])
weight.grad = torch.randn(8, 16)
optimizer.step()
assert int((weight != 0).sum()) == 32, int((weight != 0).sum())
assert name.endswith("SGD") and "topk" in text, (name, text)
plain = parser.parse_args([])
assert train_util.get_optimizer(plain, [weight])[1] == ""
assert "grad_filter" not in train_util.get_optimizer(plain, [weight])[2].state_dict()
"""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_older_patch_is_brought_up_to_date(tmp_path):
    folder = checkout(tmp_path / "sd", PLAIN)
    before = tree(folder)
    assert tool(str(folder)).returncode == 0
    path = folder / "library" / "train_util.py"
    newest = path.read_bytes()
    path.write_bytes(newest.replace(b"@grad_filter.with_grad_filter  #", b"@grad_filter.an_older_name  #"))
    (folder / "library" / "grad_filter.py").write_text('"""Gradient filters, an older copy."""\n')
    assert tool(str(folder)).returncode == 0
    assert path.read_bytes() == newest
    assert tool(str(folder), "--undo").returncode == 0 and tree(folder) == before


REFUSALS = {
    "no such function": (
        PLAIN.replace("def get_optimizer(args", "def build_optimizer(args"),
        "does not define get_optimizer",
    ),
    "twice": (PLAIN + "\n\ndef get_optimizer(args):\n    return None\n", "2 times"),
    "does not parse": (PLAIN + "\ndef broken(:\n", "does not parse"),
    "inside a condition": (
        PLAIN.replace(
            "\ndef get_optimizer(args, trainable_params):",
            "\nif True:\n    def get_optimizer(a, b):\n        return\n\n\ndef other(args, trainable_params):",
        ),
        "does not define",
    ),
    "no import": ("def add_optimizer_arguments(p): ...\ndef get_optimizer(a, b): ...\n", "imports nothing"),
    "wrong encoding": (None, "cannot be decoded"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_not_understood_is_refused_and_left_alone(name, tmp_path):
    text, match = REFUSALS[name]
    folder = checkout(tmp_path / "sd", text or "")
    if text is None:
        (folder / "library" / "train_util.py").write_bytes(b"x = '\xff\xfe'\n")
    before = tree(folder)
    done = tool(str(folder))
    assert done.returncode == 2 and tree(folder) == before
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and match in lines[0], done.stderr


def test_a_missing_checkout_is_told(tmp_path):
    done = tool(str(tmp_path))
    assert done.returncode == 2 and "sd-scripts checkout" in done.stderr


def test_a_foreign_file_of_the_same_name_is_kept(tmp_path):
    folder = checkout(tmp_path / "sd", PLAIN)
    (folder / "library" / "grad_filter.py").write_text("print('mine')\n")
    before = tree(folder)
    done = tool(str(folder))
    assert done.returncode == 2 and "another file" in done.stderr and tree(folder) == before


def test_a_read_only_file_is_refused(tmp_path):
    folder = checkout(tmp_path / "sd", PLAIN)
    path = folder / "library" / "train_util.py"
    path.chmod(0o444)
    before = tree(folder)
    done = tool(str(folder))
    assert done.returncode == 2 and "read-only" in done.stderr and tree(folder) == before


def test_the_mode_of_the_file_stays(tmp_path):
    folder = checkout(tmp_path / "sd", PLAIN)
    path = folder / "library" / "train_util.py"
    path.chmod(0o640)
    assert tool(str(folder)).returncode == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("undo", [False, True])
def test_a_failure_in_the_middle_takes_everything_back(undo, tmp_path, monkeypatch):
    sys.path.insert(0, str(REPOSITORY / "tools"))
    try:
        import add_to_sd_scripts as module
    finally:
        sys.path.pop(0)
    folder = checkout(tmp_path / "sd", PLAIN)
    if undo:
        module.run(folder, check=False, undo=False)
    before = tree(folder)
    real = module.replace
    failed = []

    def fail_once(path, content):
        if path.name == "train_util.py" and not failed:
            failed.append(path)
            raise OSError(28, "No space left on device", str(path))
        real(path, content)

    monkeypatch.setattr(module, "replace", fail_once)
    with pytest.raises(OSError, match="No space"):
        module.run(folder, check=False, undo=undo)
    assert failed and tree(folder) == before
