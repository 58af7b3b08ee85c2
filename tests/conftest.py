"""What every test file may use: the specification's fixtures and small models built once per session."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs the network is a fault, not a slow test

REPOSITORY = Path(__file__).resolve().parent.parent
SPECIFICATION_FIXTURES = REPOSITORY.parent / "shared" / "interface" / "fixtures"


def spec_fixture(name: str) -> Any:
    """Content of a JSON fixture of the interface specification, which lies beside the checkout."""
    path = SPECIFICATION_FIXTURES / name
    if not path.is_file():
        pytest.skip(f"the specification's fixture {name} is not beside this checkout")
    return json.loads(path.read_text(encoding="utf-8"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many cases of each kind the tests of a long set went through."""
    reports = [report for group in ("passed", "failed") for report in terminalreporter.stats.get(group, [])]
    kinds = Counter(v for r in reports for k, v in getattr(r, "user_properties", ()) if k == "counted")
    for kind, number in sorted(kinds.items()):
        terminalreporter.write_line(f"{number:6d}  {kind}")


@pytest.fixture(scope="session")
def tiny_sd1_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small SD1 model as a Diffusers folder."""
    from tools.make_tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "sd1", "sd1")


@pytest.fixture(scope="session")
def tiny_sd2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small SD2 model as a Diffusers folder."""
    from tools.make_tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "sd2", "sd2")


@pytest.fixture(scope="session")
def tiny_sdxl_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small SDXL model as a Diffusers folder."""
    from tools.make_tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "sdxl", "sdxl")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    """Leave out steps where bitsandbytes makes them on a GPU only (before 0.46)."""
    try:
        return (yield)
    except NameError as error:
        if not str(error.name).startswith("str2optimizer"):
            raise
        pytest.skip("this bitsandbytes makes no step without a GPU")
