"""How the modules of old names find what they name: nothing is imported before it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

# old name: the module that has it now, or (module, name there)
Names = Mapping[str, "str | tuple[str, str]"]


def lookup(module: str, names: Names, gone: Mapping[str, str] | None = None) -> tuple[Callable, Callable]:
    """Give the ``__getattr__`` and ``__dir__`` of a module of old names.

    Args:
        module: its own name. names: where each old name is now. gone: what to use instead of a name that is no more.
    """

    def find(name: str) -> Any:
        if name not in names:
            hint = f". {gone[name]}" if gone and name in gone else ""
            raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}")
        entry = names[name]
        place, real_name = entry if isinstance(entry, tuple) else (entry, name)
        return getattr(importlib.import_module(place), real_name)

    return find, lambda: sorted(names)
