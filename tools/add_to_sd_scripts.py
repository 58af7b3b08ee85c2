"""Put gradient filters into a checkout of sd-scripts: one file copied, one import and two decorators added.

    python tools/add_to_sd_scripts.py PATH            add (again: bring up to date)
    python tools/add_to_sd_scripts.py PATH --check    show what would change, change nothing
    python tools/add_to_sd_scripts.py PATH --undo     take it out again, to the byte

The functions are found by parsing PATH/library/train_util.py, so it does not matter where they stand, how they are
annotated, or who else decorated them. Needs nothing but Python; the checkout needs nothing of ours afterwards.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import io
import os
import shutil
import stat
import sys
import tempfile
import tokenize
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "library"
PARTS = ("batches", "cpu", "custom", "packing", "policies", "scopes", "stages", "statistics", "tool")
COPIED = ("grad_filter.py", *(f"grad_filter_{part}.py" for part in PARTS))
MARK = "  # gradient filters"
IMPORT = "from library import grad_filter"
DECORATORS = {
    "add_optimizer_arguments": "@grad_filter.with_grad_filter_arguments",
    "get_optimizer": "@grad_filter.with_grad_filter",
}
OURS = "gradient filter"  # stands in the first line of every file that is copied, in any case


class Refused(Exception):
    """Something the tool does not understand or may not change; one line with the way out."""


@dataclass
class Script:
    """A source file as it lies on the disk: its lines with their ends, and how they are encoded."""

    path: Path
    lines: list[str]
    encoding: str
    bom: bool

    @classmethod
    def read(cls, path: Path) -> Script:
        if not path.is_file():
            raise Refused(f"{path} is not there. Give the folder of an sd-scripts checkout")
        content = path.read_bytes()
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
            bom = content.startswith(b"\xef\xbb\xbf")
            text = content.decode("utf-8-sig" if bom else encoding)
        except (SyntaxError, UnicodeDecodeError) as error:
            raise Refused(f"{path} cannot be decoded ({error}). Repair it first") from error
        return cls(path, text.splitlines(keepends=True) if "\f" not in text else _lines(text), encoding, bom)

    def content(self, lines: list[str]) -> bytes:
        text = "".join(lines)
        return text.encode("utf-8-sig") if self.bom else text.encode(self.encoding)


def _lines(text: str) -> list[str]:
    """Split at line ends only; str.splitlines also splits at form feeds."""
    return io.StringIO(text, newline="").readlines()


def _newline(line: str) -> str:
    return "\r\n" if line.endswith("\r\n") else "\n"


def without_marks(lines: list[str]) -> list[str]:
    """Give the lines without those this tool (in any version) added."""
    return [line for line in lines if not line.rstrip("\r\n").endswith(MARK)]


def with_marks(script: Script, lines: list[str]) -> list[str]:
    """Add the import and the decorators to lines that have none of them.

    Raises:
        Refused: the file does not parse, or a function is missing, doubled, or not at the top level.
    """
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError as error:
        raise Refused(f"{script.path} does not parse (line {error.lineno}). Repair it first") from error
    additions: list[tuple[int, str]] = []
    for name, decorator in DECORATORS.items():
        found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
        if len(found) != 1:
            where = "at the top level" if not found else f"{len(found)} times"
            verb = "does not define" if not found else "defines"
            raise Refused(
                f"{script.path} {verb} {name} {where}. Only sd-scripts checkouts with one such function are known"
            )
        node = found[0]
        additions.append((min([node.lineno, *(each.lineno for each in node.decorator_list)]), decorator))
    first = min(line for line, _ in additions)
    ends = [node.end_lineno or 0 for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    before = [end for end in ends if end < first]
    if not before:
        raise Refused(f"{script.path} imports nothing before its functions. This layout is not known")
    additions.append((max(before) + 1, IMPORT))
    result = list(lines)
    for line, text in sorted(additions, reverse=True):  # from below, so that numbers stay right
        result.insert(line - 1, f"{text}{MARK}{_newline(lines[line - 1])}")
    return result


def check_result(script: Script, lines: list[str]) -> None:
    """Make sure that the new text means what it should."""
    tree = ast.parse("".join(lines))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in DECORATORS:
            assert ast.unparse(node.decorator_list[0]) == DECORATORS[node.name][1:], node.name


def is_ours(path: Path) -> bool:
    """Say whether a file is a copy this tool made."""
    with path.open(encoding="utf-8", errors="replace") as stream:
        first = stream.readline()
    return OURS in first.lower()


def may_write(path: Path) -> None:
    """Refuse a file whose owner made it read-only; being root does not change what was meant."""
    if path.exists() and not path.stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
        raise Refused(f"{path} is read-only. Make it writable first")
    if not os.access(path.parent, os.W_OK):
        raise Refused(f"{path.parent} is not writable. Change its permissions first")


def replace(path: Path, content: bytes) -> None:
    """Write beside the target and rename; the mode of an older file stays."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        if path.exists():
            shutil.copymode(path, name)
        else:
            os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def plan(checkout: Path, undo: bool) -> dict[Path, bytes | None]:
    """Give the new content of every file that changes, None for one that goes.

    Raises:
        Refused: something is not as expected; nothing is changed then.
    """
    folder = checkout / "library"
    script = Script.read(folder / "train_util.py")
    bare = without_marks(script.lines)
    lines = bare if undo else with_marks(script, bare)
    if not undo:
        check_result(script, lines)
    wanted: dict[Path, bytes | None] = {}
    for name in COPIED:
        target, source = folder / name, SOURCE / name
        if target.exists() and not is_ours(target):
            raise Refused(f"{target} is another file of that name. Move it away first")
        if undo:
            wanted[target] = None
        elif source.is_file():
            wanted[target] = source.read_bytes()
    wanted[script.path] = script.content(lines)
    return {path: content for path, content in wanted.items() if _now(path) != content}


def _now(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def show(changes: dict[Path, bytes | None], checkout: Path) -> None:
    """Print the difference of train_util.py and a line for every other file."""
    for path, content in changes.items():
        name = path.relative_to(checkout).as_posix()
        if path.name in COPIED:
            verb = "removed" if content is None else "replaced" if path.exists() else "added"
            print(f"{verb}: {name}")
            continue
        old, new = (_lines(data.decode("utf-8", errors="replace")) for data in (path.read_bytes(), content or b""))
        for line in difflib.unified_diff(old, new, f"a/{name}", f"b/{name}"):
            print(line.rstrip("\r\n"))


def apply(changes: dict[Path, bytes | None]) -> None:
    """Make the changes; when one fails, those made before it are taken back."""
    before = {path: _now(path) for path in changes}
    done: list[Path] = []
    try:
        for path, content in changes.items():
            done.append(path)
            if content is None:
                path.unlink()
            else:
                replace(path, content)
    except BaseException:
        for path in done:
            old = before[path]
            if old is None:
                path.unlink(missing_ok=True)
            elif _now(path) != old:
                replace(path, old)
        raise


def run(checkout: Path, *, check: bool, undo: bool) -> None:
    """Do what the command line asks for; see the module's text."""
    changes = plan(checkout, undo)
    if not changes:
        print(f"nothing to do: gradient filters are {'not in' if undo else 'in'} {checkout}")
        return
    show(changes, checkout)
    if check:
        print("nothing was changed (--check)")
        return
    for path in changes:
        may_write(path)
    apply(changes)
    print(f"gradient filters are {'out of' if undo else 'in'} {checkout}")


def main() -> int:
    parser = argparse.ArgumentParser(description="put gradient filters into a checkout of sd-scripts, or take them out")
    parser.add_argument("path", type=Path, help="the checkout, the folder that holds library/train_util.py")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="show what would change and change nothing")
    mode.add_argument("--undo", action="store_true", help="take it out again")
    options = parser.parse_args()
    try:
        run(options.path.resolve(), check=options.check, undo=options.undo)
    except Refused as refused:
        print(f"error: {refused}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or options.path}: {error.strerror}. Nothing was changed", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
