"""One grammar for key=value lists, for every way a front-end hands them over."""

from __future__ import annotations

import math

import pytest

from library.errors import OptionError
from library.key_values import parse_key_values, parse_strings


@pytest.mark.parametrize(
    "text,value",
    [
        ("0.1", 0.1),
        ("1e-4", 1e-4),
        ("1E-4", 1e-4),
        (".5", 0.5),
        ("+1", 1),
        ("1_000", 1000),
        ("True", True),
        ("true", True),
        ("FALSE", False),
        ("none", None),
        ("null", None),
        ("inf", math.inf),
        ('"abc"', "abc"),
        ("abc", "abc"),
        ("0.9,0.99", (0.9, 0.99)),
        ("(0.9, 0.99)", (0.9, 0.99)),
        ("[1,2]", [1, 2]),
        ("0.5,", 0.5),
    ],
)
def test_values(text, value):
    assert parse_key_values([f"k={text}"], "--optimizer_args") == {"k": value}


@pytest.mark.parametrize("items", [None, [], ""])
def test_nothing_is_nothing(items):
    assert parse_key_values(items, "--x") == {}


def test_one_string_is_words_and_the_last_repeat_wins(caplog):
    caplog.set_level("INFO")
    assert parse_key_values("a=1 b=2 a=3", "--x") == {"a": 3, "b": 2}
    assert [record.getMessage() for record in caplog.records] == ["--x: a is given twice, a=3 wins"]


def test_only_the_first_equals_sign_splits():
    assert parse_strings(["path=a=b"], "--x") == {"path": "a=b"}


def test_quotes_of_a_front_end_are_taken_off():
    assert parse_key_values(["'betas=(0.9,0.99)'"], "--x") == {"betas": (0.9, 0.99)}


@pytest.mark.parametrize(
    "item,match",
    [
        ("T_max", "key=value"),
        ("weight_decay=", "no value"),
        ("conv_dim=undefined", "no value"),
        ("betas=(0.9,", "bracket"),
        ("0.99)", "quotes"),
        ("k=1;2", "not understood"),
        ("k=a b", "not understood"),
        ("=3", "key=value"),
    ],
)
def test_a_bad_item_is_told_in_one_line(item, match):
    with pytest.raises(OptionError, match=match) as raised:
        parse_key_values([item], "--optimizer_args")
    assert "\n" not in str(raised.value) and "--optimizer_args" in str(raised.value)
