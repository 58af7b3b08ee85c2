"""Captions: the specification's cases, and what files from users' disks hold."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from library.captions import CaptionOptions, find_caption_file, process_caption, read_caption
from library.errors import OptionError
from tests.conftest import spec_fixture


def results(caption, draws=80, epoch=1, step=0, **options):
    return {
        process_caption(
            caption, CaptionOptions(**options), random.Random(draw), epoch=epoch, step=step, max_train_steps=100
        )
        for draw in range(draws)
    }


def test_results_are_those_of_the_specification():
    for case in spec_fixture("captions.json"):
        possible = results(case["caption"], epoch=case["epoch"], step=case["step"], **case["options"])
        assert possible == set(case["possible_results"]), case


def test_a_caption_is_a_function_of_the_generator():
    options = {"shuffle_caption": True, "caption_tag_dropout_rate": 0.3, "enable_wildcard": True}
    caption = "{a|b|c}, d, e, f, g\nh, {i|j}"
    assert len(results(caption, draws=200, **options)) > 50
    first, second = (
        process_caption(caption, CaptionOptions(**options), random.Random(5), epoch=1, step=0, max_train_steps=9)
        for _ in range(2)
    )
    assert first == second


@pytest.mark.parametrize("name", ["caption_dropout_rate", "caption_tag_dropout_rate"])
def test_dropout_happens_as_often_as_asked(name):
    dropped = sum(
        process_caption("word", CaptionOptions(**{name: 0.3}), random.Random(draw), epoch=1, step=0, max_train_steps=1)
        == ""
        for draw in range(4000)
    )
    assert abs(dropped / 4000 - 0.3) < 0.03


def test_no_number_is_drawn_at_rate_zero():
    chance = random.Random(1)
    before = chance.getstate()
    process_caption("a, b", CaptionOptions(), chance, epoch=1, step=0, max_train_steps=1)
    assert chance.getstate() == before


@pytest.mark.parametrize(
    ("content", "first_line", "every_line"),
    [
        (b"a cat", "a cat", "a cat"),
        (b"\xef\xbb\xbfa cat\r\nsecond\r\n", "a cat", "a cat\nsecond"),
        (b"\n\n  a cat  \n\nb", "a cat", "a cat\nb"),
        ("\u200ba\u200b cat\ufeff".encode(), "a cat", "a cat"),
        ("猫、犬".encode(), "猫、犬", "猫、犬"),
        (b"", "", ""),
        (b"\n", "", ""),
        (b"   ", "", ""),
        (b"word " * 5000, ("word " * 5000).strip(), ("word " * 5000).strip()),
    ],
)
def test_a_file_gives_its_visible_text(tmp_path, content, first_line, every_line):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    assert read_caption(path, all_lines=False).text == first_line
    assert read_caption(path, all_lines=True).text == every_line


def test_odd_characters_are_counted(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a\u200b cat\uff0c b, c", encoding="utf-8")
    assert read_caption(path, all_lines=False) == ("a cat\uff0c b, c", 2)


@pytest.mark.parametrize(
    ("text", "encoding", "guess"),
    [("猫の写真", "cp932", "cp932"), ("a cat", "utf-16", "UTF-16"), ("été", "latin-1", "cp|gbk")],
)
def test_another_encoding_is_one_line_with_file_and_guess(tmp_path, text, encoding, guess):
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode(encoding))
    with pytest.raises(OptionError, match=f"a.txt: not UTF-8 text, perhaps ({guess})") as caught:
        read_caption(path, all_lines=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("caption", ["{", "}", "{{", "}}", "{a", "a}", "{|}", "{{{a|b}}}", "{}{}", "", "\n", "{a|b"])
def test_unbalanced_braces_never_fail(caption):
    assert all("\ue000" not in result for result in results(caption, enable_wildcard=True))


def test_face_data_names_share_a_caption_file(tmp_path: Path):
    image = tmp_path / "img_100_120_50_60.png"
    shared, own = tmp_path / "img.txt", tmp_path / "img_100_120_50_60.txt"
    assert find_caption_file(image, ".txt") is None
    shared.touch()
    assert find_caption_file(image, ".txt") == shared
    own.touch()
    assert find_caption_file(image, ".txt") == own
