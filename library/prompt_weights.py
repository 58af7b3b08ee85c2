"""Attention weights in a text: ``(more)``, ``(much more:1.3)``, ``[less]``."""

from __future__ import annotations

import re
from typing import NamedTuple

STEP = 1.1  # what one pair of brackets multiplies by, or divides
_PIECES = re.compile(
    r"\\(?P<escaped>[()\[\]\\]?)|(?P<open>[(\[])|:\s*(?P<weight>[+-]?(?:\d+\.?\d*|\.\d+))\s*\)|(?P<close>[)\]])"
    r"|(?P<text>[^\\()\[\]:]+|:)"
)
_OPENED_BY = {")": "(", "]": "["}
_FACTORS = {"(": STEP, "[": 1 / STEP}


class WeightedText(NamedTuple):
    """A piece of a text and the factor on the hidden states of its tokens."""

    text: str
    weight: float


def parse_weights(text: str) -> list[WeightedText]:
    r"""Split a text into pieces of one weight.

    ``(x)`` multiplies by 1.1, ``(x:1.3)`` by 1.3, ``[x]`` divides by 1.1; brackets inside brackets multiply. A bracket
    that is never closed acts to the end, one that was never opened is text. ``\(``, ``\)``, ``\[``, ``\]`` and ``\\``
    stand for the character itself; any other backslash is left out.

    Returns:
        At least one piece; neighbours of equal weight are one.
    """
    found: list[WeightedText] = []
    open_at: dict[str, list[int]] = {"(": [], "[": []}

    def multiply(first: int, factor: float) -> None:
        found[first:] = [WeightedText(piece, weight * factor) for piece, weight in found[first:]]

    for match in _PIECES.finditer(text):
        bracket = match["close"]
        if match["open"]:
            open_at[match["open"]].append(len(found))
        elif match["weight"] and open_at["("]:
            multiply(open_at["("].pop(), float(match["weight"]))
        elif bracket and open_at[_OPENED_BY[bracket]]:
            multiply(open_at[_OPENED_BY[bracket]].pop(), _FACTORS[_OPENED_BY[bracket]])
        else:
            piece = match["escaped"] if match["escaped"] is not None else match[0]
            found.append(WeightedText(piece, 1.0))
    for bracket, places in open_at.items():
        for first in places:
            multiply(first, _FACTORS[bracket])
    return _joined(found)


def _joined(pieces: list[WeightedText]) -> list[WeightedText]:
    joined: list[WeightedText] = []
    for text, weight in pieces:
        if joined and joined[-1].weight == weight:
            joined[-1] = WeightedText(joined[-1].text + text, weight)
        elif text:
            joined.append(WeightedText(text, weight))
    return joined or [WeightedText("", 1.0)]
