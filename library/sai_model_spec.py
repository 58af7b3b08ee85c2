"""Old name of the function that adds model metadata options -> the module that has it now. Nothing is defined here."""

from __future__ import annotations

from library.old_names import lookup

NAMES: dict[str, str | tuple[str, str]] = {"add_model_spec_arguments": "library.args"}

__getattr__, __dir__ = lookup(__name__, NAMES)
