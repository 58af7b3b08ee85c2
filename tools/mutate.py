"""Put one small fault after another into a module and see whether its tests notice; lists the faults that survive.

python tools/mutate.py library/run_plan.py tests/test_run_plan.py [--limit 100] [--seed 1]

Works on a copy of the repository. Faults: comparison, arithmetic and boolean operators, numbers, constants, returned
values, ``not``, and statements left out. Judging the survivors is left to a person: docs/reliability.md.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


def faults_of(node: ast.AST) -> Iterator[tuple[str, Callable[[ast.AST], None]]]:
    """Give the faults that fit a node, as a name and what changes the node in place."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        swapped = SWAPS[type(node.ops[0])]
        yield swapped.__name__, lambda n: n.ops.__setitem__(0, swapped())  # type: ignore[attr-defined]
    if isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in SWAPS:
        operator = SWAPS[type(node.op)]
        yield operator.__name__, lambda n: setattr(n, "op", operator())
    if isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        other = not node.value if isinstance(node.value, bool) else node.value + 1
        yield f"{node.value} -> {other}", lambda n: setattr(n, "value", other)
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        yield "condition turned round", lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))  # type: ignore
    if isinstance(node, ast.Return) and node.value is not None:
        yield "returns None", lambda n: setattr(n, "value", ast.Constant(None))
    if hasattr(node, "body") and isinstance(node.body, list):
        for index, statement in enumerate(node.body):
            if isinstance(statement, (ast.Expr, ast.Assign, ast.AugAssign, ast.Raise)) and not _is_text(statement):
                yield f"left out: line {statement.lineno}", lambda n, i=index: n.body.__setitem__(i, ast.Pass())  # type: ignore


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def mutants(source: str) -> list[tuple[int, str, str]]:
    """Give (line, what, text) of every faulty variant of a module."""
    tree = ast.parse(source)
    found = []
    for position, node in enumerate(ast.walk(tree)):
        for what, change in faults_of(node):
            faulty = copy.deepcopy(tree)
            change(list(ast.walk(faulty))[position])
            line = getattr(node, "lineno", 0)
            found.append((line, what, ast.unparse(ast.fix_missing_locations(faulty))))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("module")
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--limit", type=int, default=0, help="try this many, drawn by --seed; 0 tries all")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ignored = shutil.ignore_patterns(".git", ".venv", "build", "demo_output", "__pycache__")
        place = Path(shutil.copytree(REPOSITORY, Path(folder) / "copy", ignore=ignored))
        target = place / options.module
        source = target.read_text(encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}

        def passes() -> bool:
            try:
                return not subprocess.run(
                    [*command, *options.tests], cwd=place, env=environment, capture_output=True, timeout=300
                ).returncode
            except subprocess.TimeoutExpired:
                return False

        if not passes():
            sys.exit("the tests fail without any fault")
        chosen = mutants(source)
        if options.limit and options.limit < len(chosen):
            chosen = sorted(random.Random(options.seed).sample(chosen, options.limit))
        survivors = []
        for line, what, text in chosen:
            target.write_text(text, encoding="utf-8")
            if passes():
                survivors.append(f"{options.module}:{line} {what}")
                print(survivors[-1], flush=True)
        print(f"{options.module}: {len(chosen)} faults (seed {options.seed}), {len(survivors)} survived")


if __name__ == "__main__":
    main()
