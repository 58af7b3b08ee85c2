"""Generated and spoilt inputs: whatever comes in, a user gets one line for each mistake and never a traceback.

``FUZZ`` in the environment multiplies the number of cases (``make fuzz``); hypothesis prints the input that failed and
how to replay it, and each one found so far stands in tests/corpus.
"""

from __future__ import annotations

import io
import os
import random
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save

from library import args as options
from library.captions import CaptionText, read_caption
from library.checkpoint import read_tensors, safetensors_header
from library.errors import OptionError
from library.images import load_image, read_size
from library.key_values import parse_key_values
from library.naming import check_output_name
from tests.conftest import REPOSITORY

WRITE = ("output_config", "console_log_file")  # these open the file they name while they are parsed
SCALE = int(os.environ.get("FUZZ", "1"))
CORPUS = REPOSITORY / "tests" / "corpus"
PARSER = options.script_parser("train_network")
NAMES = sorted(action.dest for action in PARSER._actions if action.dest != "help")
NASTY = [
    "",
    " ",
    "0",
    "-1",
    "1e400",
    "nan",
    "inf",
    "1_000",
    "true",
    "None",
    "undefined",
    "ä",
    "\0",
    "a\nb",
    "../..",
    "=",
]
NASTY += ["(1,", "[[[[", "9" * 40, "1;2", "{}", "'x'", "--seed", "%", "C:\\x", "512x512", "1,2,3", "k=v", "a=b=c"]


def quick(examples: int):
    return settings(
        max_examples=examples * SCALE,
        deadline=None,
        print_blob=True,
        derandomize=SCALE == 1,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


def refused_or_fine(action, *args) -> bool:
    """Do it; True when it worked, False when it was refused in lines that say something."""
    try:
        action(*args)
    except OptionError as error:
        lines = str(error).splitlines()
        assert lines and all(line.strip() and len(line) <= 1000 for line in lines), lines
        return False
    except SystemExit as end:
        assert end.code in (0, 2)
        return False
    return True


VALUES = st.one_of(st.sampled_from(NASTY), st.text(max_size=12), st.integers().map(str), st.floats().map(str))


@quick(250)
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.lists(VALUES, max_size=2)), max_size=4))
def test_command_lines(pairs):
    words = [word for name, values in pairs if name not in WRITE for word in (f"--{name}", *values)]

    def look() -> None:
        options.check_options(options.parse(PARSER, words))

    refused_or_fine(look)


TOML = st.recursive(
    st.one_of(
        st.booleans().map(lambda value: str(value).lower()),
        st.integers(-(2**63), 2**63 - 1).map(str),
        st.floats(allow_nan=False, allow_infinity=False).map(repr),
        st.sampled_from(["nan", "inf", '""', "'x y'", '"\\u00e4"', "1979-05-27", "[]", "{}", "C:\\x", "undefined"]),
    ),
    lambda inner: st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
    max_leaves=4,
)


@quick(150)
@given(
    pairs=st.lists(
        st.tuples(st.sampled_from([*sorted({*NAMES} - {*WRITE}), "lerning_rate", "learning-rate", "a.b"]), TOML),
        max_size=4,
    )
)
def test_config_files(pairs, tmp_path_factory):
    path = tmp_path_factory.mktemp("config", numbered=True) / "run.toml"
    path.write_text("\n".join(f"{name} = {value}" for name, value in pairs), encoding="utf-8")
    refused_or_fine(lambda: options.check_options(options.parse(PARSER, ["--config_file", str(path)])))


@quick(60)
@given(content=st.binary(max_size=60))
def test_config_files_of_any_bytes(content, tmp_path_factory):
    path = tmp_path_factory.mktemp("config", numbered=True) / "run.toml"
    path.write_bytes(content)
    refused_or_fine(lambda: options.parse(PARSER, ["--config_file", str(path)]))


@quick(400)
@given(st.lists(st.one_of(VALUES, st.tuples(st.text(max_size=5), VALUES).map("=".join)), max_size=3))
def test_key_value_lists(items):
    refused_or_fine(parse_key_values, items, "--optimizer_args")


@quick(300)
@given(st.one_of(VALUES, st.text(max_size=20)))
def test_output_names_stay_in_the_output_folder(name):
    if refused_or_fine(check_output_name, name):
        target = Path("/out") / f"{name}-state"
        assert target.parent == Path("/out") and ".." not in target.parts and "\0" not in name


@quick(150)
@given(content=st.binary(max_size=80))
def test_captions_of_any_bytes(content, tmp_path_factory):
    path = tmp_path_factory.mktemp("caption", numbered=True) / "a.txt"
    path.write_bytes(content)
    if refused_or_fine(read_caption, path, False):
        assert isinstance(read_caption(path, False), CaptionText)


# ----------------------------------------------------------------------------------------------------- spoilt files


def spoil(content: bytes, chance: random.Random) -> bytes:
    """Change a few bytes, cut, repeat or grow, as damaged disks and hostile hands do."""
    spoilt = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(spoilt)) if spoilt else 0
        kind = chance.choice(["bit", "byte", "cut", "insert", "number", "text"])
        if kind == "bit" and spoilt:
            spoilt[at] ^= 1 << chance.randrange(8)
        elif kind == "byte" and spoilt:
            spoilt[at] = chance.randrange(256)
        elif kind == "cut":
            del spoilt[at:]
        elif kind == "insert":
            spoilt[at:at] = chance.randbytes(chance.randint(1, 9))
        elif kind == "number":
            spoilt[at : at + 8] = struct.pack("<Q", chance.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]))
        else:
            spoilt[at : at + 4] = chance.choice([b"F64\0", b"null", b"-1,0", b"{{{{", b'":":'])
    return bytes(spoilt)


def _lora() -> bytes:
    return save({"lora_unet_x.lora_down.weight": torch.ones(2, 3), "lora_unet_x.alpha": torch.tensor(1.0)}, {"a": "b"})


def _pickled() -> bytes:
    stream = io.BytesIO()
    torch.save({"lora_unet_x.alpha": torch.ones(2)}, stream)
    return stream.getvalue()


def _image(kind: str, mode: str = "RGB") -> bytes:
    stream = io.BytesIO()
    Image.new(mode, (9, 7), 3).save(stream, format=kind)
    return stream.getvalue()


def read_image(path: Path) -> None:
    read_size(path)
    pixels = load_image(path)
    assert pixels.ndim == 3 and pixels.shape[2] == 3


def read_weights(path: Path) -> None:
    if path.suffix == ".safetensors":
        safetensors_header(path, "--network_weights")
    read_tensors(path, "--network_weights")


FILES = {
    "lora.safetensors": (_lora, read_weights),
    "lora.pt": (_pickled, read_weights),
    "picture.png": (lambda: _image("PNG"), read_image),
    "picture.jpg": (lambda: _image("JPEG"), read_image),
    "picture.webp": (lambda: _image("WEBP"), read_image),
    "picture.bmp": (lambda: _image("BMP"), read_image),
    "picture.gif": (lambda: _image("GIF", "P"), read_image),
}


@pytest.mark.parametrize("name", FILES)
def test_spoilt_files(name, tmp_path):
    make, read = FILES[name]
    whole = make()
    path = tmp_path / name
    path.write_bytes(whole)
    read(path)
    seed = 1 if SCALE == 1 else random.SystemRandom().randrange(2**32)
    chance = random.Random(seed)
    for number in range(60 * SCALE):
        content = spoil(whole, chance)
        path.write_bytes(content)
        try:
            refused_or_fine(read, path)
        except Exception as error:
            raise AssertionError(f"seed {seed}, case {number}; keep as tests/corpus/{name}: {content!r}") from error


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.*")), ids=lambda path: path.name)
def test_the_corpus(path, tmp_path):
    """Files named KIND.WHAT.SUFFIX that once made trouble; KIND chooses the reader."""
    kind, suffix = path.name.split(".")[0], path.suffix
    if suffix == ".toml":
        refused_or_fine(lambda: options.check_options(options.parse(PARSER, ["--config_file", str(path)])))
    elif kind == "words":
        words = path.read_text(encoding="utf-8").split("\n")
        refused_or_fine(lambda: options.check_options(options.parse(PARSER, words)))
    else:
        refused_or_fine(FILES[f"{kind}{suffix}"][1], path)
