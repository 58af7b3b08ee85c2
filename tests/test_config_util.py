"""Data set options: where a value is found, what is refused, and how a missing folder is told."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest
from PIL import Image

from library.config_util import (
    DatasetSpec,
    Kind,
    SubsetSpec,
    add_config_arguments,
    list_images,
    load_dataset_specs,
    load_user_config,
    subsets_of_folders,
)
from library.errors import OptionError

GIVEN = {  # a value of each kind of option that differs from its default, as a file writes it
    "class_tokens": "cat",
    "caption_extension": ".txt",
    "num_repeats": 3,
    "shuffle_caption": True,
    "caption_separator": ";",
    "keep_tokens": 2,
    "keep_tokens_separator": "|||",
    "secondary_separator": ";;;",
    "enable_wildcard": True,
    "caption_prefix": "p",
    "caption_suffix": "s",
    "caption_dropout_rate": 0.5,
    "caption_dropout_every_n_epochs": 2,
    "caption_tag_dropout_rate": 0.25,
    "token_warmup_min": 2,
    "token_warmup_step": 0.5,
    "color_aug": True,
    "flip_aug": True,
    "random_crop": True,
    "face_crop_aug_range": [1.0, 2.0],
    "resize_interpolation": "area",
    "custom_attributes": {"a": 1},
    "is_reg": True,
    "alpha_mask": True,
    "cache_info": True,
    "resolution": [128, 64],
    "batch_size": 4,
    "enable_bucket": True,
    "min_bucket_reso": 64,
    "max_bucket_reso": 512,
    "bucket_reso_steps": 32,
    "bucket_no_upscale": True,
    "validation_split": 0.5,
    "validation_seed": 3,
    "network_multiplier": 0.5,
}
NOT_FOR_FOLDERS = {"metadata_file", "conditioning_data_dir"}
HANDLED_APART = {"image_dir", "prior_loss_weight"}


@pytest.fixture
def folder(tmp_path) -> Path:
    path = tmp_path / "2_sks cat"
    path.mkdir()
    Image.new("RGB", (8, 8)).save(path / "a.png")
    return path


def specs_of(tmp_path, config, **args):
    """Load a data set file with that content."""
    file = tmp_path / "data.json"
    file.write_text(json.dumps(config))
    return load_dataset_specs(Namespace(**{"dataset_config": file, "resolution": "64", **args}))


def config_with(folder, general=None, dataset=None, subset=None):
    return {
        "general": general or {},
        "datasets": [{**(dataset or {}), "subsets": [{"image_dir": str(folder), **(subset or {})}]}],
    }


LEVEL_ARGUMENTS = {"G": "general", "D": "dataset", "S": "subset"}
PLACES = [
    pytest.param(spec, name, level, id=f"{spec.__name__}-{name}-{level}")
    for spec in (SubsetSpec, DatasetSpec)
    for name, declared in spec.declared().items()
    for level in declared.levels
    if name not in NOT_FOR_FOLDERS | HANDLED_APART
]


def test_every_option_is_tried():
    declared = {*SubsetSpec.declared(), *DatasetSpec.declared()}
    assert declared - NOT_FOR_FOLDERS - HANDLED_APART == set(GIVEN)


@pytest.mark.parametrize(("spec", "name", "level"), PLACES)
def test_every_option_works_at_every_level_it_is_declared_for(folder, tmp_path, spec, name, level):
    config = config_with(folder, **{LEVEL_ARGUMENTS[level]: {name: GIVEN[name]}})
    if name == "is_reg":  # needs something else to train on
        make_images(tmp_path / "other")
        config["datasets"][0]["subsets"].append({"image_dir": str(tmp_path / "other")})
    dataset = specs_of(tmp_path, config)[0]
    found = getattr(dataset if spec is DatasetSpec else dataset.subsets[0], name)
    assert (list(found) if isinstance(found, tuple) else found) == GIVEN[name]


@pytest.mark.parametrize(
    ("levels", "winner"),
    [(["args"], 1), (["args", "general"], 2), (["args", "general", "dataset"], 3), (["args", "dataset", "subset"], 4)],
)
def test_the_nearest_level_wins(folder, tmp_path, levels, winner):
    values = {"args": 1, "general": 2, "dataset": 3, "subset": 4}
    given = {level: {"keep_tokens": values[level]} for level in levels if level != "args"}
    dataset = specs_of(tmp_path, config_with(folder, **given), keep_tokens=1)[0]
    assert dataset.subsets[0].keep_tokens == winner


@pytest.mark.parametrize(("name", "off"), [("flip_aug", False), ("keep_tokens", 0), ("caption_prefix", "")])
def test_a_value_of_nothing_stops_the_search(folder, tmp_path, name, off):
    dataset = specs_of(tmp_path, config_with(folder, subset={name: off}), **{name: GIVEN[name]})[0]
    assert getattr(dataset.subsets[0], name) == off


def test_command_line_names_that_differ(folder, tmp_path):
    dataset = specs_of(tmp_path, config_with(folder), train_batch_size=5, dataset_repeats=6, prior_loss_weight=0.5)[0]
    assert (dataset.batch_size, dataset.subsets[0].num_repeats, dataset.prior_loss_weight) == (5, 6, 0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"subset": {"keep_token": 1}}, r"datasets\[1\], subsets\[1\]: unknown key .keep_token.. Did you mean .keep_t"),
        ({"dataset": {"batchsize": 1}}, r"data.json, datasets\[1\]: unknown key 'batchsize'. Did you mean 'batch_s"),
        ({"general": {"sufle_caption": True}}, r"\[general\]: unknown key 'sufle_caption'. Did you mean 'shuffle"),
        ({"subset": {"batch_size": 2}}, r"batch_size does not belong here, put it into \[general\] or \[\[dat"),
        ({"subset": {"metadata_file": "x", "is_reg": True}}, "is_reg does not belong here, a fine-tuning data set"),
        ({"subset": {"conditioning_data_dir": "x"}}, "a DreamBooth data set does not use it"),
        ({"subset": {"keep_tokens": "1"}}, "keep_tokens = '1': text where a number"),
        ({"subset": {"num_repeats": 1.5}}, "num_repeats = 1.5: .*Example: num_repeats = 10"),
        ({"subset": {"caption_dropout_rate": 2}}, "caption_dropout_rate = 2: .*less than or equal to 1"),
        ({"subset": {"face_crop_aug_range": [2, 1]}}, "the smaller one first"),
        ({"subset": {"resize_interpolation": "linaer"}}, "Did you mean 'linear'"),
        ({"dataset": {"resolution": "512x512"}}, "resolution = '512x512': a resolution is one or two whole numbers"),
        ({"dataset": {"resolution": "512,"}}, "a resolution is one or two whole numbers"),
        ({"dataset": {"resolution": 0}}, "resolution = 0: .*greater than 0"),
        ({"dataset": {"resolution": [1, 2, 3]}}, "resolution = "),
        ({"dataset": {"batch_size": 0}}, "batch_size = 0: .*greater than or equal to 1"),
    ],
)  # fmt: skip
def test_a_mistake_names_file_section_and_key(folder, tmp_path, change, message):
    with pytest.raises(OptionError, match=message) as caught:
        specs_of(tmp_path, config_with(folder, **change))
    assert "\n" not in str(caught.value)


def test_all_mistakes_are_told_together(folder, tmp_path):
    config = config_with(folder, general={"x": 1}, dataset={"y": 2, "batch_size": "2"}, subset={"z": 3})
    with pytest.raises(OptionError) as caught:
        specs_of(tmp_path, config)
    assert [key in str(caught.value) for key in ("'x'", "'y'", "'z'", "batch_size = '2'")] == [True] * 4


@pytest.mark.parametrize("name", ["keep_tokens", "caption_dropout_rate", "resolution", "train_batch_size"])
def test_a_mistake_on_the_command_line_names_the_argument(folder, name):
    args = {"train_data_dir": str(folder.parent), "resolution": "64", name: "wrong"}
    with pytest.raises(OptionError, match=f"^--{name} wrong: "):
        load_dataset_specs(Namespace(**args))


@pytest.mark.parametrize(
    ("value", "expected"),
    [(64, (64, 64)), ([64, 32], (64, 32)), ("64,32", (64, 32)), ("64", (64, 64)), (64.0, (64,) * 2)],
)
def test_ways_to_write_a_resolution(folder, tmp_path, value, expected):
    assert specs_of(tmp_path, config_with(folder, dataset={"resolution": value}))[0].resolution == expected


def test_numbers_may_be_written_as_the_other_kind(folder, tmp_path):
    dataset = specs_of(tmp_path, config_with(folder, dataset={"bucket_reso_steps": 64.0, "validation_split": 1}))[0]
    assert (dataset.bucket_reso_steps, dataset.validation_split) == (64, 1.0)


def test_a_missing_resolution_is_told(folder):
    with pytest.raises(OptionError, match=r"no resolution given\. Example: resolution = 512, or --resolution 512"):
        load_dataset_specs(Namespace(train_data_dir=str(folder.parent)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.toml", 'a = "C:\\data\\new"', r"d.toml.*no valid TOML.*single quotes"),
        ("d.toml", "[general\n", "no valid TOML"),
        ("d.toml", "a = ", "no valid TOML"),
        ("d.json", "{", "no valid JSON"),
        ("d.json", "[]", "must hold one object"),
        ("d.yaml", "", r"must end in .toml or .json"),
        ("d.toml", "é".encode("cp1252"), "not UTF-8 text"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, name, content, message):
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(OptionError, match=message) as caught:
        load_user_config(file)
    assert "\n" not in str(caught.value)


def test_toml_with_mark_and_carriage_returns_is_read(tmp_path):
    file = tmp_path / "d.TOML"
    file.write_bytes(b"\xef\xbb\xbf[[datasets]]\r\nresolution = 64\r\n[[datasets.subsets]]\r\nimage_dir = 'a\\b'\r\n")
    assert load_user_config(file) == {"datasets": [{"resolution": 64, "subsets": [{"image_dir": "a\\b"}]}]}


@pytest.mark.parametrize("name", ["10_cat", '10_ann o\'neil "x" person', "10", "10_", "10_a_b"])
def test_folder_names_give_repeats_and_class_tokens(tmp_path, name):
    (tmp_path / name).mkdir()
    subset = subsets_of_folders(str(tmp_path), None)[0]
    assert (subset["num_repeats"], subset["class_tokens"]) == (10, name[3:])


@pytest.mark.parametrize("name", ["10cat", "_cat", "0_cat", "-1_cat", "cat"])
def test_folder_names_without_a_count_are_told(tmp_path, name, caplog):
    (tmp_path / name).mkdir()
    with pytest.raises(OptionError, match=r"looked for folders named like 10_cat.*Rename"):
        subsets_of_folders(str(tmp_path), None)
    assert name in caplog.text


def make_images(folder, count=1):
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        Image.new("RGB", (8, 8)).save(folder / f"{number}.png")


@pytest.mark.parametrize(
    ("layout", "given", "message"),
    [
        ({}, "data", "no such folder"),
        ({"data": 0}, "data", "found nothing. Put images into .*10_name"),
        ({"data": 3}, "data", "found 3 images. Move them one level down"),
        ({"data/10_cat": 3}, "data/10_cat", "found 3 images. Give the folder above instead"),
        ({"data/10_cat": 0}, "data", "no images .*png.* in .*10_cat"),
        ({"data/10_cat/more": 2}, "data", "Images lie one level deeper, in .*more"),
    ],
)
def test_a_wrong_layout_says_what_was_found(tmp_path, layout, given, message):
    for folder, count in layout.items():
        make_images(tmp_path / folder, count)
    with pytest.raises(OptionError, match=message) as caught:
        load_dataset_specs(Namespace(train_data_dir=str(tmp_path / given), resolution="64"))
    assert "\n" not in str(caught.value)


def test_only_regularization_images_are_refused(folder, tmp_path):
    with pytest.raises(OptionError, match="only regularization images"):
        specs_of(tmp_path, config_with(folder, subset={"is_reg": True}))


def test_regularization_folders_are_read_like_the_others(tmp_path):
    make_images(tmp_path / "train" / "2_sks cat")
    make_images(tmp_path / "reg" / "1_cat")
    args = Namespace(train_data_dir=str(tmp_path / "train"), reg_data_dir=str(tmp_path / "reg"), resolution="64")
    train, reg = load_dataset_specs(args)[0].subsets
    assert (train.is_reg, reg.is_reg, reg.num_repeats, reg.class_tokens) == (False, True, 1, "cat")


def test_kinds_of_data_sets(folder, tmp_path):
    metadata = tmp_path / "meta.json"
    metadata.write_text("{}")
    fine_tuning = {"subsets": [{"metadata_file": str(metadata)}]}
    folders = {"subsets": [{"image_dir": str(folder)}]}
    both = {"general": {"resolution": 64, "class_tokens": "x"}, "datasets": [fine_tuning, folders]}
    assert [spec.kind for spec in specs_of(tmp_path, both)] == [Kind.FINE_TUNING, Kind.DREAMBOOTH]
    mixed = {"datasets": [{"resolution": 64, "subsets": [*fine_tuning["subsets"], *folders["subsets"]]}]}
    with pytest.raises(OptionError, match="1 of 2 subsets have a metadata_file"):
        specs_of(tmp_path, mixed)


def test_in_json_and_folder_make_one_fine_tuning_set(folder, tmp_path):
    metadata = tmp_path / "meta.json"
    metadata.write_text("{}")
    spec = load_dataset_specs(Namespace(in_json=str(metadata), train_data_dir=str(folder), resolution="64"))[0]
    assert (spec.kind, spec.subsets[0].image_dir) == (Kind.FINE_TUNING, str(folder))


def test_a_folder_listed_twice_counts_once(folder, tmp_path, caplog):
    config = config_with(folder)
    config["datasets"][0]["subsets"] *= 2
    assert len(specs_of(tmp_path, config)[0].subsets) == 1
    assert "listed twice" in caplog.text


def test_data_set_files_are_used_before_folders(folder, tmp_path, caplog):
    specs_of(tmp_path, config_with(folder), train_data_dir="elsewhere")
    assert "--train_data_dir not used" in caplog.text.replace(":", "")


def test_a_caption_extension_without_dot_is_repaired_aloud(folder, tmp_path, caplog):
    spec = specs_of(tmp_path, config_with(folder, subset={"caption_extension": "txt"}))[0]
    assert spec.subsets[0].caption_extension == ".txt"
    assert "has no dot" in caplog.text


def test_leftovers_of_archives_are_no_images(tmp_path):
    make_images(tmp_path, 1)
    for name in ("._0.png", ".hidden.png", "Thumbs.db", "desktop.ini", "a.txt", "A.PNG", "b.Png"):
        (tmp_path / name).touch()
    (tmp_path / "folder.png").mkdir()
    assert [path.name for path in list_images(tmp_path)] == ["0.png", "A.PNG"]


def test_the_file_option_is_added_to_an_empty_parser():
    parser = ArgumentParser()
    add_config_arguments(parser)
    assert parser.parse_args(["--dataset_config", "a.toml"]).dataset_config == Path("a.toml")
