"""Gradient filters of one's own: Python files in filter folders, ``file.py:Name`` and ``package.module:Name``.

``grad_filter`` loads it when a name is asked for that it does not know.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import sys
import types
from pathlib import Path

from .grad_filter import FILTERS, GradFilterError, Registered, registered, suggest

log = logging.getLogger(__name__)

PATH_VARIABLE = "GRAD_FILTER_PATH"


def register_all() -> None:
    """Make the filters of all filter folders known by name; a broken file is named in the log and hides no other."""
    for path in _files_of_folders():
        try:
            module = _load_file(path).__name__
            if not any(found.target.__module__ == module for found in FILTERS.values()):
                FILTERS[path.stem] = _from_file(path.stem, path)
        except GradFilterError as error:
            log.warning("%s", error)


def find(name: str, allow_code: bool) -> Registered | None:
    """Find a filter in code that is named, or in a file of that name; None where there is neither.

    Raises:
        GradFilterError: it cannot be run, or is code where ``allow_code`` is False.
    """
    if ":" in name:
        return _from_code(name, allow_code)
    for path in _files_of_folders():
        if path.stem == name:
            return _from_file(name, path)
    return None


def filter_folders() -> list[Path]:
    """Give the folders whose files are filters: custom_filters/ beside the library, and those of GRAD_FILTER_PATH."""
    named = [Path(part) for part in os.environ.get(PATH_VARIABLE, "").split(os.pathsep) if part]
    return [folder for folder in (Path(__file__).resolve().parent.parent / "custom_filters", *named) if folder.is_dir()]


def _files_of_folders() -> list[Path]:
    return [path for folder in filter_folders() for path in sorted(folder.glob("[!_]*.py"))]


def _from_code(name: str, allow_code: bool) -> Registered:
    if not allow_code:
        raise GradFilterError(
            f"--grad_filter {name}: code is named, which a config file may not do. Give it on the command line, or put "
            f"the file into custom_filters/"
        )
    source, _, attribute = name.rpartition(":")
    if source.endswith(".py"):
        module = _load_file(Path(source))
    else:
        try:
            module = importlib.import_module(source)
        except ImportError as error:
            raise GradFilterError(
                f"--grad_filter {name}: cannot import {source} ({error}). Check the name or install it"
            ) from error
    target = getattr(module, attribute, None)
    if target is None:
        known = [key for key, value in vars(module).items() if callable(value)]
        raise GradFilterError(f"--grad_filter {name}: {source} has no {attribute}.{suggest(attribute, known)}")
    log.info("grad_filter: %s is %s of %s", name, attribute, getattr(module, "__file__", source))
    return next((found for found in FILTERS.values() if found.target is target), None) or registered(target, name)


def _from_file(name: str, path: Path) -> Registered:
    module = _load_file(path)
    if name in FILTERS:
        return FILTERS[name]
    own = [v for v in vars(module).values() if getattr(v, "__module__", "") == module.__name__ and callable(v)]
    target = getattr(module, name, own[0] if len(own) == 1 else None)
    if target is None:
        raise GradFilterError(f"--grad_filter {name}: {path} defines no {name}. Name the class or function so")
    return registered(target, name)


@functools.cache
def _load_file(path: Path) -> types.ModuleType:
    if not path.is_file():
        raise GradFilterError(f"--grad_filter: there is no file {path}. Give an existing file.py:Name")
    spec = importlib.util.spec_from_file_location(f"grad_filter_file_{path.stem}", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # type hints of its classes are looked up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a stranger's file raises
        raise GradFilterError(f"--grad_filter: {path} cannot be run: {type(error).__name__}: {error}") from error
    return module
