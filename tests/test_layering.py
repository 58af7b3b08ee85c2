"""Who may import whom: imports point down, heavy packages wait until they are needed."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

# ground 0 is free of torch; a module imports from lower levels, or from its own level where LEVEL_INSIDE says in order
LEVELS = [
    {"errors", "files", "signals", "old_names"},
    {"log", "launch"},
    {"naming", "buckets", "captions", "config_util", "model_configs", "key_values", "run_plan", "progress"},
    {"metadata", "args_table", "checkpoint_keys", "prompt_weights"},
    {"lora_names", "config_file"},
    {"lora_blocks", "foreign"},
    # from here on torch is at hand
    {"processes"},
    {"losses", "noise", "images", "tokenizers", "array_files"},
    {"latent_cache", "text_cache"},
    {"args", "settings", "optimizers"},
    {"state", "trackers", "hub"},
    {"schedulers", "text_encoding", "dataset", "checkpoint", "accelerator"},
    {"delta"},
    {"lora", "output", "model_families", "fused_steps", "full_model"},
    {"sampling", "batch_loss", "dataset_view", "user_dataset"},
    {"loop", "validation", "run_data"},
    {"trainer_hooks", "run_saver"},
    {"trainer", "old_signatures"},
    {"model_trainer", "lora_tools", "check_lora_weights"},
    {"merge_lora", "resize_lora", "extract_lora_from_models"},
    {"sdxl_merge_lora", "svd_merge_lora"},
]
TABLES = {"train_util", "utils", "custom_train_functions", "model_util", "deepspeed_utils", "sai_model_spec"}
TABLES |= {"sdxl_train_util", "sdxl_model_util"}
FREE_OF_TORCH = LEVELS[0] | LEVELS[1] | LEVELS[2] | LEVELS[3] | LEVELS[4] | LEVELS[5]
APART = {
    "grad_filter",
    "grad_filter_batches",
    "grad_filter_cpu",
    "grad_filter_custom",
    "grad_filter_packing",
    "grad_filter_scopes",
    "grad_filter_statistics",
    "grad_filter_tool",
    "grad_filter_policies",
    "grad_filter_stages",
    "grad_filter_plots",
    "transforming_optimizers",
}
HEAVY = {"diffusers", "transformers", "accelerate", "bitsandbytes", "matplotlib", "cv2", "tensorboard", "peft", "tqdm"}
LEVEL_OF = {name: number for number, names in enumerate(LEVELS) for name in names}
MODULES = sorted(
    p for folder in ("library", "networks") for p in (REPOSITORY / folder).glob("*.py") if p.stem != "__init__"
)


def imports(path: Path, top_only: bool) -> set[str]:
    """Give the dotted names a file imports, at its top level or anywhere."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = tree.body if top_only else list(ast.walk(tree))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            if node.module in ("library", "networks"):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own(names: set[str]) -> set[str]:
    return {name.split(".")[1] for name in names if name.startswith(("library.", "networks."))}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_imports_point_down(path):
    if path.stem in APART or path.stem in TABLES:
        return
    assert path.stem in LEVEL_OF, f"{path.name} has no level: put it into LEVELS and docs/architecture.md"
    for name in own(imports(path, top_only=False)) - APART:
        assert LEVEL_OF[name] < LEVEL_OF[path.stem], f"{path.stem} imports {name}, which is not below it"


@pytest.mark.parametrize("name", sorted(TABLES))
def test_a_module_of_old_names_is_a_table(name):
    """A docstring, the import of the look-up, constants, and the line that makes the look-up the module's own."""
    tree = ast.parse((REPOSITORY / "library" / f"{name}.py").read_text(encoding="utf-8"))
    kinds = {type(node).__name__ for node in tree.body}
    assert kinds <= {"Expr", "ImportFrom", "Assign", "AnnAssign"}
    assert own(imports(REPOSITORY / "library" / f"{name}.py", top_only=False)) == {"old_names"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_heavy_packages_are_imported_where_they_are_used(path):
    top = {name.split(".")[0] for name in imports(path, top_only=True)}
    assert not top & HEAVY
    if path.stem in FREE_OF_TORCH:
        assert "torch" not in top


@pytest.mark.parametrize("name", sorted(APART - {"grad_filter_cpu", "grad_filter_plots", "transforming_optimizers"}))
def test_the_filter_stands_alone(name):
    """Standard library and torch; what is optional is imported where it is used."""
    path = REPOSITORY / "library" / f"{name}.py"
    siblings = {"library", *APART, *(f"library.{module}" for module in APART)}
    for module in imports(path, top_only=True):
        assert module.split(".")[0] in {*sys.stdlib_module_names, "torch"} or module in siblings, module
    for module in imports(path, top_only=False):
        optional = {"numpy", "safetensors", "torch"}
        assert module.split(".")[0] in {*sys.stdlib_module_names, *optional} or module in siblings, module


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_nothing_is_written_around_the_one_writer(path):
    """open(..., "w"), write_text and the like stand in files.py, or inside a function given to write_file."""
    if path.stem in ("files", "log", "tokenizers"):  # tokenizers fills a temporary folder of its own
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            modes = [arg.value for arg in node.args[1:] if isinstance(arg, ast.Constant)]
            assert not any("w" in str(mode) or "a" in str(mode) for mode in modes), f"{path.name}:{node.lineno}"


@pytest.mark.parametrize(
    "path", [*MODULES, *REPOSITORY.glob("*.py"), *(REPOSITORY / "tools").glob("*.py")], ids=lambda p: p.stem
)
def test_no_unrestricted_unpickling_eval_or_shell(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        assert name not in ("eval", "exec", "os.system", "pickle.load", "pickle.loads"), f"{path.name}:{node.lineno}"
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        if name == "torch.load":
            restricted = keywords.get("weights_only")
            assert isinstance(restricted, ast.Constant) and restricted.value is True, f"{path.name}:{node.lineno}"
        assert "shell" not in keywords, f"{path.name}:{node.lineno}"


@pytest.mark.parametrize("path", sorted(REPOSITORY.glob("[!.]*/*.py")) + sorted(REPOSITORY.glob("*.py")), ids=str)
def test_every_file_is_python_3_10(path):
    """The oldest Python that front-ends bring; 3.10 has no except*, no type statement and other names in modules."""
    ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))
    later = {"tomllib", "datetime.UTC", "typing.Self", "enum.StrEnum", "typing.override", "itertools.batched"}
    found = imports(path, top_only=True) | {
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert not found & later


def test_architecture_names_every_module():
    text = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    missing = [path.stem for path in MODULES if path.stem not in text]
    assert not missing
