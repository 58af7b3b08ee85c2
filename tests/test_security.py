"""What may never stand in the code: unrestricted loading, evaluation of text, shells; and what is written with care."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

SOURCES = sorted(
    path
    for folder in ("library", "networks", "tools", "custom_filters", ".")
    for path in (REPOSITORY / folder).glob("*.py")
)
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "pickle.load", "pickle.loads"}
FORBIDDEN_CALLS |= {"marshal.loads", "yaml.load", "joblib.load", "dill.load", "cloudpickle.load", "shelve.open"}
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "pty", "telnetlib"}
# every place that imports by name or starts a program, and why it may
IMPORTS_BY_NAME = {
    "library/user_dataset.py": "--dataset_class",
    "library/grad_filter.py": "numpy and its own parts, a fixed list",
    "library/grad_filter_custom.py": "custom filters: named on the command line, or a file of custom_filters/",
    "library/images.py": "a fixed list of plug-ins",
    "library/old_names.py": "a fixed table",
    "library/optimizers.py": "classes; checked to be an optimizer before they are called, their file is logged",
    "library/schedulers.py": "classes; checked to be a schedule before they are called",
    "library/trainer.py": "network modules, as the option is meant",
}
STARTS_PROGRAMS = {"library/metadata.py": "git, a list of words, the hash of the trainer's own version"}
# the restricted loader of accelerate, for random numbers in another trainer's state
RESTRICTED_LOADERS = {"library/state.py"}


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def calls(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]


def faults(text: str, where: str) -> list[str]:
    """Give every line of a module that breaks a rule."""
    found: list[str] = []
    tree = ast.parse(text)
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        found += [f"{where}:{node.lineno} imports {name}" for name in names if name in FORBIDDEN_IMPORTS]
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        constant = {key: value.value for key, value in given.items() if isinstance(value, ast.Constant)}
        if name in FORBIDDEN_CALLS:
            found.append(f"{where}:{node.lineno} calls {name}")
        if name == "torch.load" and constant.get("weights_only") is not True:
            found.append(f"{where}:{node.lineno} torch.load without weights_only=True")
        if name.endswith("load") and name.startswith(("np.", "numpy.")) and constant.get("allow_pickle") is not False:
            found.append(f"{where}:{node.lineno} {name} without allow_pickle=False")
        if "shell" in given:
            found.append(f"{where}:{node.lineno} hands a line to a shell")
        if name.endswith(("import_module", "spec_from_file_location")) and where not in IMPORTS_BY_NAME:
            found.append(f"{where}:{node.lineno} imports by name")
        if name.startswith("subprocess.") and not where.startswith("tools/") and where not in STARTS_PROGRAMS:
            found.append(f"{where}:{node.lineno} starts a program")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_nothing_runs_what_it_reads(path):
    assert faults(path.read_text(encoding="utf-8"), path.relative_to(REPOSITORY).as_posix()) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "eval(x)",
        "import torch\ntorch.load(p)",
        "torch.load(p, weights_only=False)",
        "torch.load(p, weights_only=w)",
        "np.load(p)",
        "subprocess.run('x', shell=True)",
        "importlib.import_module(name)",
        "os.system(x)",
    ],
)
def test_the_search_finds_what_it_looks_for(text):
    assert faults(text, "library/new.py")


def test_every_exception_is_still_needed():
    for where in IMPORTS_BY_NAME:
        names = {dotted(call.func).rpartition(".")[2] for call in calls(REPOSITORY / where)}
        assert names & {"import_module", "spec_from_file_location"}, where
    assert {
        path.relative_to(REPOSITORY).as_posix()
        for path in SOURCES
        if "from accelerate.utils import load" in path.read_text(encoding="utf-8")
    } == RESTRICTED_LOADERS


WRITES = {"write_text", "write_bytes", "save_file", "savez", "save"}
WRITERS = {
    "library/files.py": "the writer",
    "library/state.py": "into new_folder",
    "library/array_files.py": "through write_file",
    "library/checkpoint.py": "through write_file",
    "library/sampling.py": "through write_file",
    "library/dataset_view.py": "through write_file",
    "networks/lora.py": "through write_file",
    "library/metadata.py": "bytes in memory, for a hash",
    "library/tokenizers.py": "a temporary folder of this process",
    "library/grad_filter.py": "the file stands alone: temporary, then rename, by itself",
    "library/delta.py": "through write_file",
    "library/grad_filter_statistics.py": "the pictures of grad_filter_plots, by its save_all",
    "library/grad_filter_plots.py": "pictures; what is half is drawn anew",
}


def test_files_that_outlive_the_process_go_through_one_module():
    found = set()
    for path in SOURCES:
        where = path.relative_to(REPOSITORY).as_posix()
        if not where.startswith(("library/", "networks/")):
            continue
        for call in calls(path):
            name = dotted(call.func) or (call.func.attr if isinstance(call.func, ast.Attribute) else "")
            imported = name.rpartition(".")[0] == "" and name in ("write_text", "write_bytes")  # of library.files
            last = call.func.attr if isinstance(call.func, ast.Attribute) else name
            if last in WRITES and not imported:
                found.add(where)
            mode = [a.value for a in call.args[:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            if last == "open" and any(m in ("w", "wb", "a", "ab", "x", "xb", "w+", "r+b") for m in mode):
                found.add(where)
    assert found <= set(WRITERS), found - set(WRITERS)
