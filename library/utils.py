"""Old names of logging functions -> the module that has them now. Nothing is defined here."""

from __future__ import annotations

from library.old_names import lookup

NAMES: dict[str, str | tuple[str, str]] = {
    "setup_logging": ("library.log", "setup_logging_once"),
    "add_logging_arguments": "library.args",
}

__getattr__, __dir__ = lookup(__name__, NAMES)
