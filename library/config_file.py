"""``--config_file``: TOML as front-ends write it, turned into what the command line would have given."""

from __future__ import annotations

import argparse
import logging
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from library.args_table import BY_NAME, OBSOLETE, int_or_share
from library.errors import ErrorCollector, OptionError, did_you_mean
from library.files import write_text

log = logging.getLogger(__name__)

# values outside the choices by which front-ends mean the default
MEANS_DEFAULT = {"max_token_length": ("75", "255"), "dynamo_backend": ("no",)}
NOT_SAVED = ("config_file", "output_config", "config_keys", "wandb_api_key", "huggingface_token")
UNSET = object()

Actions = Mapping[str, argparse.Action]


def read_config_from_file(args: Namespace, parser: ArgumentParser) -> Namespace:
    """Read ``--config_file`` beneath the command line: command line over file over default.

    Tables are flattened by one level. Values are converted to the type of their option where that loses nothing.

    Returns:
        A new namespace; ``config_keys`` on it names the options whose value comes from the file.

    Raises:
        OptionError: the file is missing or no TOML, or a value cannot be used; all of them in one error.
        SystemExit: status 0 after ``--output_config`` wrote the file.
    """
    if not args.config_file:
        if args.output_config:
            raise OptionError("--output_config needs --config_file, the file to write. Example: --config_file run.toml")
        return args
    path = Path(args.config_file)
    if path.suffix.lower() != ".toml":
        path = path.with_name(path.name + ".toml")
    if args.output_config:
        _write_config(path, args, parser)
        raise SystemExit(0)
    actions = {action.dest: action for action in parser._actions if action.dest != "help"}
    values = _usable(_flattened(_read_toml(path), path, actions), path, actions)
    merged = parser.parse_args(namespace=Namespace(**values))
    merged.config_file = str(path)
    typed = _typed_names(parser)
    merged.config_keys = frozenset(name for name in values if name not in typed)
    return merged


def _typed_names(parser: ArgumentParser) -> set[str]:
    """Give the options that stand on the command line, by parsing it over marks instead of defaults."""
    mark = object()
    marked = Namespace(**{action.dest: mark for action in parser._actions if action.dest != "help"})
    return {name for name, value in vars(parser.parse_args(namespace=marked)).items() if value is not mark}


# ------------------------------------------------------------------------------------------------- reading the file


def _read_toml(path: Path) -> dict[str, Any]:
    import toml

    if not path.is_file():
        raise OptionError(f"--config_file {path}: there is no such file. Give the path of a TOML file")
    try:
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise OptionError(f"--config_file {path}: it is not UTF-8 (byte {error.start}). Save it as UTF-8") from error
    try:
        return toml.loads(text)
    except (toml.TomlDecodeError, IndexError, ValueError, TypeError) as error:
        content = _second_opinion(text)
        if content is not None:
            return content
        line = getattr(error, "lineno", None)
        place = f" line {line}" if line else ""
        backslash = "\\" in (text.splitlines()[line - 1] if line and line <= len(text.splitlines()) else text)
        hint = "Write paths in single quotes or with /" if backslash else "Check quotes and brackets there"
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise OptionError(f"--config_file {path}:{place} {reason}. {hint}") from error


def _second_opinion(text: str) -> dict[str, Any] | None:
    """Read lists of whole numbers and fractions, which the toml package refuses, where Python has a reader (3.11)."""
    try:
        import tomllib
    except ImportError:
        return None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None


def _flattened(content: Mapping[str, Any], path: Path, actions: Actions) -> dict[str, Any]:
    """Dissolve tables by one level; their names mean nothing, and a later key replaces an earlier one."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if not isinstance(value, dict):
            flat[key] = value
            continue
        strangers = [name for name in value if name not in actions and name not in OBSOLETE]
        if key in actions and strangers:
            text = (
                f"config file {path}: {key} is given as a table, so {strangers[0]} is read as an option of its own. "
                f"{_flat_example(key, strangers[0], value[strangers[0]])}"
            )
            if key.startswith("grad_filter"):
                raise OptionError(text)
            log.warning(text)
        flat.update(value)
    return flat


def _flat_example(option: str, key: str, value: Any) -> str:
    option = "grad_filter_args" if option == "grad_filter" else option
    return f'Example: {option} = ["{key}={value}"]'


def _usable(values: Mapping[str, Any], path: Path, actions: Actions) -> dict[str, Any]:
    """Convert what is known, name what is not used, and refuse what cannot be converted or looks like a filter."""
    errors, usable = ErrorCollector(), {}
    unused, unknown = [], []
    for key, value in values.items():
        if key in actions:
            with errors.check():
                converted = convert(actions[key], value, f"--config_file {path}: {key}")
                if converted is not UNSET:
                    usable[key] = converted
        elif key in OBSOLETE or key in BY_NAME:
            unused.append(key)
        elif ("grad" in key and "filter" in key) or did_you_mean(key, ("grad_filter", "grad_filter_args")):
            near = did_you_mean(key, [name for name in actions if name.startswith("grad_filter")])
            errors.messages.append(f"--config_file {path}: no option is called {key!r}.{near}")
        else:
            near = did_you_mean(key, actions).strip()
            unknown.append(f"{key} ({near[0].lower()}{near[1:]})" if near else key)
    errors.raise_if_any()
    if unused:
        log.info("config file: keys without a meaning for this script: %s", ", ".join(unused))
    if unknown:
        log.warning("config file: unknown keys are not used: %s", ", ".join(unknown))
    return usable


# ------------------------------------------------------------------------------------------------ converting values


def convert(action: argparse.Action, value: Any, where: str) -> Any:
    """Convert a value of a config file to what the command line would have given.

    Returns:
        The value, or ``UNSET`` when it means that the option is not given.

    Raises:
        OptionError: it cannot be converted without loss.
    """
    if isinstance(value, dict):
        raise OptionError(f"{where} is a table, an option takes a value. {_flat_example(action.dest, 'key', 'value')}")
    if isinstance(action, argparse._StoreTrueAction):
        return _switch(value, where)
    if action.nargs == "*":
        return [_converted(action, item, where) for item in _items(action, value, where)] or UNSET
    if isinstance(value, list):
        value = ",".join(str(item) for item in value)
    if value is False or value == "" or str(value) in MEANS_DEFAULT.get(action.dest, ()):
        return UNSET
    return _converted(action, value, where)


def _switch(value: Any, where: str) -> Any:
    if value in ("", []):
        return UNSET
    if str(value).strip().lower() not in ("true", "1", "false", "0", "1.0", "0.0"):
        raise OptionError(f"{where}={value!r} must be true or false")
    return str(value).strip().lower() in ("true", "1", "1.0")


def _items(action: argparse.Action, value: Any, where: str) -> Iterator[Any]:
    """Give the words of an option that takes several, from a list, one value, or one text that holds all of them."""
    if isinstance(value, str) and not os.path.exists(value):  # a file's name may hold blanks
        value = (value if action.type in (None, str) else value.replace(",", " ")).split()
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, (list, dict)):
            raise OptionError(f"{where} holds a list or a table inside its list. Write every item as one text")
        if item != "" and item is not False:
            yield item


def _converted(action: argparse.Action, value: Any, where: str) -> Any:
    kind = action.type or str
    name = {int: "a whole number", float: "a number", int_or_share: "a number of steps or a share"}.get(kind, "a text")
    try:
        if kind is not str and isinstance(value, bool):
            raise ValueError
        if kind is int:
            result: Any = _whole(value)
        elif kind is int_or_share:
            result = int_or_share(value) if isinstance(value, str) else value if value < 1 else _whole(value)
        else:
            result = kind(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise OptionError(f"{where}={value!r} must be {name}") from error
    if action.choices is not None and result not in action.choices:
        known = ", ".join(str(choice) for choice in action.choices if choice is not None)
        raise OptionError(f"{where}={value!r} is none of {known}.{did_you_mean(str(value), map(str, action.choices))}")
    return result


def _whole(value: Any) -> int:
    """Read 16, 16.0, "16" and "16.0" as 16.

    Raises:
        ValueError: there is something behind the point, or it is no number.
    """
    if isinstance(value, int):
        return value
    number = float(value)
    if number != int(number):
        raise ValueError
    return int(number)


# ------------------------------------------------------------------------------------------------- writing the file


def _write_config(path: Path, args: Namespace, parser: ArgumentParser) -> None:
    import toml

    if path.exists():
        raise OptionError(f"--output_config: {path} exists already. Give another --config_file")
    given = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(args).items()
        if name not in NOT_SAVED and value is not None and value != parser.get_default(name)
    }
    write_text(path, toml.dumps(given))
    log.info("config saved: %s", path)
