"""A model saved as what changed becomes the full checkpoint again, to the bit; anything else is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from library import delta
from library.checkpoint import load_model, save_single_file
from library.errors import OptionError
from tests.training import first_difference, make_tiles, train
from tools import apply_delta

SCRIPTS = {"sdxl_train": "sdxl", "train_db": "sd1", "fine_tune": "sd1"}
NAME = "t.delta.safetensors"


@pytest.fixture
def run(request, tmp_path):
    """Run a script with a static mask, and with further options; gives its folder of results."""

    def started(script, output, **more):
        base = request.getfixturevalue(f"tiny_{SCRIPTS[script]}_folder")
        data = tmp_path / "data"
        if not data.is_dir():
            make_tiles(data)
        images = {str(path): {"caption": "a cat"} for path in data.rglob("*.png")}
        (tmp_path / "meta.json").write_text(json.dumps(images))
        generator = torch.Generator().manual_seed(0)
        unet = load_model(base, SCRIPTS[script], dtype=torch.float32).unet
        masks = {f"unet.{k}": torch.rand(v.shape, generator=generator) < 0.02 for k, v in unet.named_parameters()}
        save_file(masks, tmp_path / "masks.safetensors")
        options = {
            "pretrained_model_name_or_path": base,
            "train_data_dir": data,
            "output_dir": tmp_path / output,
            "max_train_steps": 2,
            "grad_filter": "mask_file",
            "grad_filter_args": [f"path={tmp_path / 'masks.safetensors'}", "policy=freeze"],
            **({"in_json": tmp_path / "meta.json"} if script == "fine_tune" else {}),
            **({"stop_text_encoder_training": -1} if script == "train_db" else {}),
            **more,
        }
        train(script, **options)
        return tmp_path / output

    return started


def single_file(folder, kind, path, dtype=torch.float32):
    save_single_file(path, load_model(folder, kind, dtype=dtype), kind)
    return path


@pytest.mark.parametrize(
    "script,form,more",
    [
        ("sdxl_train", "file", {"save_precision": "fp16"}),
        ("sdxl_train", "folder", {"full_bf16": True, "mixed_precision": "bf16"}),
        ("train_db", "file", {}),
        ("train_db", "folder", {"save_precision": "bf16", "mixed_precision": "bf16"}),
        ("fine_tune", "file", {"full_bf16": True, "mixed_precision": "bf16", "save_precision": "float"}),
    ],
)
def test_base_and_delta_make_the_full_checkpoint(script, more, form, run, request, tmp_path):
    base = request.getfixturevalue(f"tiny_{SCRIPTS[script]}_folder")
    if form == "file":
        base = single_file(base, SCRIPTS[script], tmp_path / "base.safetensors", torch.float16)
    more = {**more, "pretrained_model_name_or_path": base}
    full = run(script, "full", save_model_as="safetensors", **more) / "t.safetensors"
    part = run(script, "part", save_delta=True, **more) / NAME
    apply_delta.main([str(base), str(part), str(tmp_path / "again.safetensors")])
    assert first_difference(load_file(tmp_path / "again.safetensors"), load_file(full)) is None
    with safe_open(full, "pt") as one, safe_open(tmp_path / "again.safetensors", "pt") as other:
        dates = {"modelspec.date": ""}
        assert {**one.metadata(), **dates} == {**other.metadata(), **dates}
    assert part.stat().st_size < full.stat().st_size / 4


def test_epoch_saves_are_deltas_too_and_their_names_say_so(run):
    folder = run("train_db", "out", save_delta=True, save_every_n_steps=1)
    assert {path.name for path in folder.glob("*.safetensors")} == {
        NAME,
        "t-step00000001.delta.safetensors",
        "t-step00000002.delta.safetensors",
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("changed", [0, 1, 30, 400, 1000])
def test_every_density_and_dtype_comes_back(changed, dtype, tmp_path):
    generator = torch.Generator().manual_seed(changed)
    before = (torch.randn(10, 100, generator=generator) * 100).to(dtype)
    after = before.clone()
    places = torch.randperm(1000, generator=generator)[:changed]
    after.view(-1)[places] = after.view(-1)[places] + 1
    if dtype.is_floating_point and changed:  # other bits, equal values
        before.view(-1)[places[0]], after.view(-1)[places[0]] = 0.0, -0.0
    tensors = {"a": after, "new": torch.arange(3.0), "number": torch.tensor(4.5)}
    save_file({"a": before, "number": torch.tensor(4.5)}, tmp_path / "base.safetensors")
    part, again = tmp_path / f"x{delta.SUFFIX}", tmp_path / "again.safetensors"
    delta.save_delta(part, tensors, delta.Base(tmp_path / "base.safetensors", ""), None, {"k": "v"})
    delta.apply_delta(tmp_path / "base.safetensors", part, again)
    assert first_difference(load_file(again), tensors) is None
    kinds = {key.split("|")[1] for key in load_file(part) if key.startswith("a|")}
    expected = {0: set(), 1: {"indices", "values"}, 30: {"indices", "values"}, 1000: {"whole"}}
    expected |= {400: {"mask", "values"}}
    assert kinds == expected[changed]


@pytest.fixture
def pair(tmp_path):
    """A base model of one tensor and a delta against it."""
    save_file({"a": torch.zeros(1000)}, tmp_path / "base.safetensors")
    changed = torch.zeros(1000)
    changed[:20] = 1
    part = tmp_path / f"x{delta.SUFFIX}"
    delta.save_delta(part, {"a": changed}, delta.Base(tmp_path / "base.safetensors", ""), None, {})
    return tmp_path / "base.safetensors", part


def applied(base, part, output="again.safetensors"):
    apply_delta.main([str(base), str(part), str(base.parent / output)])


def test_another_base_model_is_refused(pair, tmp_path):
    save_file({"a": torch.ones(1000)}, tmp_path / "other.safetensors")
    with pytest.raises(OptionError, match="the delta was made from another model"):
        applied(tmp_path / "other.safetensors", pair[1])
    assert not (tmp_path / "again.safetensors").exists()


@pytest.mark.parametrize("left", [0, 7, 100, -1])
def test_a_truncated_delta_is_refused(left, pair):
    content = pair[1].read_bytes()
    pair[1].write_bytes(content[:left])
    with pytest.raises(OptionError, match=r"DELTA .*(incomplete|damaged)"):
        applied(*pair)
    assert not (pair[0].parent / "again.safetensors").exists()


def rewritten(part, tensors=None, **entries):
    with safe_open(part, "pt") as stream:
        content = {**stream.metadata(), **{key.replace("_", ".", 1): value for key, value in entries.items()}}
    save_file({**load_file(part), **(tensors or {})}, part, content)


def test_what_is_no_delta_of_this_program_is_refused(pair, tmp_path):
    with pytest.raises(OptionError, match="it is not a file of --save_delta"):
        applied(pair[0], pair[0])
    rewritten(pair[1], delta_version="2")
    with pytest.raises(OptionError, match="format version 2, this program reads 1"):
        applied(*pair)
    rewritten(pair[1], {"a|indices": torch.arange(990, 1010, dtype=torch.int32)}, delta_version="1")
    with pytest.raises(OptionError, match="places outside of it"):
        applied(*pair)
    assert not (tmp_path / "again.safetensors").exists()


@pytest.mark.parametrize(
    "output,match", [("again.ckpt", "written as .safetensors"), ("base.safetensors", "would replace what is read")]
)
def test_an_output_that_cannot_be_is_refused(output, match, pair):
    with pytest.raises(OptionError, match=match):
        applied(*pair, output)


def test_a_delta_of_another_format_is_refused_before_the_model_is_loaded(run):
    with pytest.raises(OptionError, match="--save_delta does not go with --save_model_as ckpt"):
        run("train_db", "out", save_delta=True, save_model_as="ckpt")
