"""The grammar of ``key=value`` lists, shared by optimizer, schedule and network arguments.

A list may arrive as words, as one string, or empty. Each item is split at its first ``=``. A value is a Python literal
(``0.1``, ``True``, ``"text"``, ``(0.9, 0.99)``, ``[1, 2]``), a list without brackets (``0.9,0.99``), one of true, false
and none in any case, or a plain word. A key given twice: the last one wins.
"""

from __future__ import annotations

import ast
import logging
import math
import re
from collections.abc import Sequence
from typing import Any

from library.errors import OptionError

log = logging.getLogger(__name__)

WORDS = {"true": True, "false": False, "none": None, "null": None, "inf": math.inf, "nan": math.nan}
PLACEHOLDERS = ("undefined",)
PLAIN_WORD = re.compile(r"[A-Za-z_][\w./:@+-]*\Z")


def as_items(items: Sequence[str] | str | None) -> list[str]:
    """Give the items of a list that may be words, one string, or absent."""
    if not items:
        return []
    if isinstance(items, str):
        return items.split()
    return [str(item) for item in items]


def split_item(item: str, option: str) -> tuple[str, str]:
    """Split one item into key and value text.

    Raises:
        OptionError: no ``=``, no key, no value, or a placeholder that a front-end left in.
    """
    text = item.strip()
    if len(text) > 1 and text[0] == text[-1] == "'":
        text = text[1:-1].strip()
    key, equals, value = text.partition("=")
    key, value = key.strip(), value.strip().rstrip(",").strip()
    if not equals or not key:
        hint = "Put quotes around a value with blanks" if text.endswith((")", "]")) else "Write key=value"
        raise OptionError(f'{option}: {item!r} is not key=value. {hint}, for example {option} "betas=(0.9, 0.99)"')
    if not value or value.lower() in PLACEHOLDERS:
        raise OptionError(f"{option}: {item!r} has no value. Give one, for example {option} {key}=0.1, or leave it out")
    if value.count("(") != value.count(")") or value.count("[") != value.count("]"):
        raise OptionError(
            f"{option}: {item!r} ends inside a bracket, it was split at a blank. "
            f"Write {option} {key}=0.9,0.99 or put quotes around it"
        )
    return key, value


def parse_value(text: str, option: str, key: str) -> Any:
    """Read one value.

    Raises:
        OptionError: it is none of the forms of the grammar.
    """
    lowered = text.lower()
    if lowered in WORDS:
        return WORDS[lowered]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        pass
    if PLAIN_WORD.match(text):
        return text
    raise OptionError(
        f"{option}: the value of {key}={text} is not understood. Write a number, true, false, none, a word, "
        f"or numbers with commas, for example {key}=0.9,0.99"
    )


def parse_strings(items: Sequence[str] | str | None, option: str) -> dict[str, str]:
    """Give the items as key -> value text."""
    values: dict[str, str] = {}
    for item in as_items(items):
        key, value = split_item(item, option)
        if key in values:
            log.info("%s: %s is given twice, %s=%s wins", option, key, key, value)
        values[key] = value
    return values


def parse_key_values(items: Sequence[str] | str | None, option: str) -> dict[str, Any]:
    """Give the items as key -> value, read by the grammar above.

    Args:
        items: as the command line or a config file hands them over.
        option: name for messages, with its dashes.
    """
    return {key: parse_value(text, option, key) for key, text in parse_strings(items, option).items()}
