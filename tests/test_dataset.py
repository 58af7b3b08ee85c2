"""Ready batches: content, order and chance as functions of seed, epoch and place alone."""

from __future__ import annotations

import json
import pickle
import random
from argparse import Namespace
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from library.config_util import load_dataset_specs
from library.dataset import BatchKey, TrainingData, batch_loader, check_images, dataset_metadata, split_items
from library.errors import OptionError
from library.latent_cache import CachedLatents, cache_latents
from tests.conftest import spec_fixture

SIZES = [(64, 64), (64, 64), (130, 65), (80, 60), (64, 128), (200, 80), (64, 64)]
BUCKETS = {"enable_bucket": True, "min_bucket_reso": 64, "max_bucket_reso": 256, "bucket_reso_steps": 64}
EVERYTHING_RANDOM = {
    "shuffle_caption": True,
    "caption_dropout_rate": 0.2,
    "caption_tag_dropout_rate": 0.2,
    "flip_aug": True,
    "color_aug": True,
    "random_crop": True,
}


def fill(folder: Path, sizes=SIZES, caption="a cat, number {}, tag b") -> Path:
    folder.mkdir(parents=True)
    chance = np.random.default_rng(0)
    for number, size in enumerate(sizes):
        pixels = chance.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        if caption is not None:
            (folder / f"{number}.txt").write_text(caption.format(number))
    return folder


@pytest.fixture
def root(tmp_path) -> Path:
    fill(tmp_path / "data" / "2_sks cat")
    return tmp_path / "data"


def specs_of(root, **options):
    given = {"train_data_dir": str(root), "resolution": "128", "caption_extension": ".txt", "train_batch_size": 2}
    return load_dataset_specs(Namespace(**{**given, **BUCKETS, **options}))


def data_of(root, seed=1, validation=False, **options) -> TrainingData:
    return TrainingData(specs_of(root, **options), seed=seed, validation=validation)


def keys_of(data, epochs=2):
    return [BatchKey(epoch, 0, index) for epoch in range(1, epochs + 1) for index in data.batch_order(epoch)]


def prints_of(batches):
    """Everything in a batch that may differ, in a form that compares."""
    return [
        (
            batch["image_keys"],
            batch["captions"],
            batch["flippeds"],
            batch["crop_top_lefts"].tolist(),
            None if batch["images"] is None else batch["images"].numpy().tobytes(),
        )
        for batch in batches
    ]


# --------------------------------------------------------------------------------------------------------- order


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4])
def test_an_epoch_uses_every_image_as_often_as_its_repeats(root, batch_size):
    data = data_of(root, train_batch_size=batch_size)
    counts = Counter(key for batch in map(data.__getitem__, keys_of(data, 1)) for key in batch["image_keys"])
    assert counts == {f"2_sks cat/{number}.png": 2 for number in range(len(SIZES))}
    by_bucket = Counter(placed.placement.bucket for placed in data.placed)
    assert len(data) == sum(-(-count * 2 // batch_size) for count in by_bucket.values())


def test_a_batch_has_one_size(root):
    data = data_of(root, train_batch_size=3)
    for key in keys_of(data, 1):
        batch = data[key]
        assert batch["images"].shape[2:] == tuple(batch["target_sizes_hw"][0].tolist())
        assert (batch["target_sizes_hw"] == batch["target_sizes_hw"][0]).all()
        assert batch["images"].dtype == torch.float32 and batch["images"].abs().max() <= 1


def test_order_and_content_change_with_epoch_and_seed(root):
    data = data_of(root)
    assert data.batch_order(1) != data.batch_order(2)
    assert sorted(data.batch_order(1)) == list(range(len(data)))
    first, second = ([data[key]["image_keys"] for key in keys_of(data, 2) if key.epoch == epoch] for epoch in (1, 2))
    assert sorted(map(tuple, first)) != sorted(map(tuple, second))
    assert data_of(root, seed=2).batch_order(1) != data.batch_order(1)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_number_of_workers_does_not_matter(root, workers, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    data = data_of(root, **EVERYTHING_RANDOM)
    assert prints_of(batch_loader(data, keys_of(data), workers)) == prints_of(batch_loader(data, keys_of(data), 0))


@pytest.mark.parametrize("stop", [1, 4, 10])
def test_a_resumed_run_sees_what_the_unbroken_run_sees(root, stop):
    unbroken = data_of(root, **EVERYTHING_RANDOM)
    keys = keys_of(unbroken)
    resumed = data_of(root, **EVERYTHING_RANDOM)
    assert prints_of(batch_loader(resumed, keys[stop:], 0)) == prints_of(map(unbroken.__getitem__, keys))[stop:]


def test_global_streams_are_neither_used_nor_changed(root):
    data = data_of(root, **EVERYTHING_RANDOM)
    expected = prints_of(map(data.__getitem__, keys_of(data)))
    for seed in (1, 2):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        before = random.getstate(), torch.get_rng_state()
        assert prints_of(batch_loader(data, keys_of(data), seed - 1)) == expected
        assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


def test_data_can_be_sent_to_a_spawned_worker(root):
    data = data_of(root, **EVERYTHING_RANDOM)
    copy = pickle.loads(pickle.dumps(data))
    assert prints_of(map(copy.__getitem__, keys_of(data))) == prints_of(map(data.__getitem__, keys_of(data)))
    assert isinstance(iter(DataLoader(data, batch_size=None, sampler=keys_of(data))), object)


# ------------------------------------------------------------------------------------------------------- content


def test_draws_vary_between_uses_of_the_same_image(root):
    data = data_of(root, flip_aug=True, shuffle_caption=True)
    drawn = {(caption, flip) for key in keys_of(data, 60) for caption, flip in _of_image(data[key], "2_sks cat/0.png")}
    assert len(drawn) == 6 * 2  # orders of three tags, mirrored or not


def _of_image(batch, key):
    return [
        (caption, flipped)
        for name, caption, flipped in zip(batch["image_keys"], batch["captions"], batch["flippeds"])
        if name == key
    ]


def test_mirrored_images_are_mirrored(root):
    plain, flipping = data_of(root), data_of(root, flip_aug=True)
    for key in keys_of(plain):
        batch, mirrored = plain[key], flipping[key]
        for place, flipped in enumerate(mirrored["flippeds"]):
            expected = batch["images"][place].flip(-1) if flipped else batch["images"][place]
            assert torch.equal(mirrored["images"][place], expected)
    assert any(flag for key in keys_of(plain) for flag in flipping[key]["flippeds"])


def test_captions_drop_out_in_the_epochs_asked_for(root):
    data = data_of(root, caption_dropout_every_n_epochs=3)
    for epoch in range(1, 7):
        captions = [
            caption for index in data.batch_order(epoch) for caption in data[BatchKey(epoch, 0, index)]["captions"]
        ]
        assert all((caption == "") == (epoch % 3 == 0) for caption in captions)


def test_tag_warm_up_follows_the_step_of_the_address(root):
    data = data_of(root, token_warmup_step=0.5)
    data.max_train_steps = 20
    lengths = [len(data[BatchKey(1, step, 0)]["captions"][0].split(",")) for step in (0, 5, 9, 10)]
    assert lengths == [1, 2, 2, 3]


def test_sizes_and_crops_of_a_batch(root):
    data = data_of(root)
    batch = next(data[key] for key in keys_of(data) if data[key]["image_keys"][0].endswith("3.png"))
    assert batch["original_sizes_hw"].dtype == torch.int64
    assert batch["original_sizes_hw"][0].tolist() == [60, 80]
    assert batch["target_sizes_hw"][0].tolist() == [128, 128]
    assert batch["crop_top_lefts"][0].tolist() == [16, 0]
    assert batch["loss_weights"].tolist() == [1.0] * len(batch["captions"])


def test_the_crop_told_of_a_mirrored_image_is_mirrored(tmp_path):
    fill(tmp_path / "data" / "1_cat", [(53, 70)])
    data = data_of(tmp_path / "data", enable_bucket=False, flip_aug=True)
    told = {
        (batch["flippeds"][0], *batch["crop_top_lefts"][0].tolist())
        for batch in map(data.__getitem__, keys_of(data, 9))
    }
    assert told == {(False, 0, 15), (True, 0, 16)}  # 31.1 pixels are left over: 15 on the left, 16.1 on the right


def test_chance_differs_between_the_places_of_an_epoch(root):
    data = data_of(root, flip_aug=True, train_batch_size=4)
    flags = [data[BatchKey(1, 0, index)]["flippeds"] for index in range(len(data))]
    assert len({tuple(batch) for batch in flags}) > 1 and any(len(set(batch)) == 2 for batch in flags)


def test_an_image_replaced_during_a_run_is_refused(root):
    data = data_of(root)
    Image.new("RGB", (32, 32)).save(root / "2_sks cat" / "0.png")
    with pytest.raises(OptionError, match=r"0\.png: its header says"):
        for key in keys_of(data, 1):
            data[key]


@pytest.mark.parametrize("missing", ["latents", "images"])
def test_a_batch_holds_images_or_latents(root, missing):
    data = data_of(root, flip_aug=True)
    if missing == "images":
        for index in range(len(data.placed)):
            height, width = (side // 8 for side in reversed(data.placed[index].placement.bucket))
            data.latents[index] = CachedLatents(
                torch.full((4, height, width), index), torch.full((4, height, width), -index), None
            )
    batch = data[keys_of(data)[0]]
    assert batch[missing] is None
    assert batch["latents" if missing == "images" else "images"].shape[0] == 2
    if missing == "images":
        for flipped, latents in zip(batch["flippeds"], batch["latents"]):
            assert (latents <= 0).all() if flipped else (latents >= 0).all()


def test_captions_are_tokenized_where_a_tokenizer_is_given(root):
    data = TrainingData(specs_of(root), seed=1, tokenize=lambda captions: [torch.tensor([[len(c)] for c in captions])])
    batch = data[keys_of(data)[0]]
    assert batch["input_ids_list"][0].tolist() == [[len(caption)] for caption in batch["captions"]]


def test_without_buckets_every_image_gets_the_resolution(root):
    data = data_of(root, enable_bucket=False)
    assert {tuple(data[key]["images"].shape[2:]) for key in keys_of(data, 1)} == {(128, 128)}
    data = data_of(root, enable_bucket=False, random_crop=True, resolution="64")
    batch = next(data[key] for key in keys_of(data) if "2_sks cat/5.png" in data[key]["image_keys"])
    place = batch["image_keys"].index("2_sks cat/5.png")
    pixels = np.asarray(Image.open(root / "2_sks cat" / "5.png"))
    cut = np.rint((batch["images"][place].permute(1, 2, 0).numpy() + 1) * 127.5).astype(np.uint8)
    assert any(
        (pixels[top : top + 64, left : left + 64] == cut).all() for top in range(17) for left in range(200 - 64 + 1)
    )


def test_alpha_masks_are_given_when_asked_for(root):
    assert data_of(root)[BatchKey(1, 0, 0)]["alpha_masks"] is None
    batch = data_of(root, alpha_mask=True)[BatchKey(1, 0, 0)]
    assert batch["alpha_masks"].shape == (len(batch["captions"]), *batch["images"].shape[2:])
    assert (batch["alpha_masks"] == 1).all()


# ------------------------------------------------------------------------------------------------ kinds of subsets


@pytest.fixture
def masked(root) -> Path:
    """A mask for every image: the image's own red channel, so that the two can be compared."""
    folder = root.parent / "masks"
    folder.mkdir()
    for path in (root / "2_sks cat").glob("*.png"):
        Image.open(path).getchannel("R").save(folder / path.name)
    return folder


def masked_data(root, masked, args=None, **subset):
    file = root.parent / "data.json"
    subset = {"image_dir": str(root / "2_sks cat"), "conditioning_data_dir": str(masked), **subset}
    common = {"resolution": 128, "batch_size": 2, **BUCKETS, "subsets": [subset]}
    file.write_text(json.dumps({"datasets": [common]}))
    return TrainingData(load_dataset_specs(Namespace(dataset_config=file, masked_loss=True, **args or {})), seed=1)


def test_masks_follow_their_images_through_crops_and_mirrors(root, masked):
    data = masked_data(root, masked, flip_aug=True, random_crop=True)
    for key in keys_of(data):
        batch = data[key]
        assert batch["alpha_masks"] is None
        assert batch["conditioning_images"].shape == batch["images"].shape
        torch.testing.assert_close(batch["conditioning_images"][:, 0], batch["images"][:, 0], atol=0.02, rtol=0)


def test_cached_latents_keep_their_masks(root, masked):
    plain, cached = masked_data(root, masked, flip_aug=True), masked_data(root, masked, flip_aug=True)
    cache_latents(cached, lambda x: (x[:, :, ::8, ::8],) * 2, batch_size=2, shown=False)
    for key in keys_of(plain):
        assert torch.equal(cached[key]["conditioning_images"], plain[key]["conditioning_images"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "3.png").unlink(), "1 images without a mask of the same name: 3.png"),
        (lambda folder: Image.new("L", (9, 9)).save(folder / "more.png"), "1 masks without an image: more.png"),
        (
            lambda folder: Image.new("L", (64, 9)).save(folder / "3.png"),
            "a mask of 64x9 does not fit the image of 80x60",
        ),
        (lambda folder: (folder / "3.png").write_bytes(b"x"), "broken image: .*3.png"),
    ],
)
def test_masks_that_do_not_fit_are_told(root, masked, change, message):
    change(masked)
    with pytest.raises(OptionError, match=message):
        masked_data(root, masked)


@pytest.mark.parametrize(
    ("train", "reg", "expected"),
    [(6, {"1_cat": 2}, [3, 3]), (6, {"2_cat": 2}, [3, 3]), (6, {"1_cat": 9}, [1] * 6), (6, {"4_cat": 2}, [4, 4])],
)
def test_regularization_images_fill_up_to_the_others(tmp_path, train, reg, expected):
    fill(tmp_path / "train" / "1_sks cat", [(64, 64)] * train)
    for name, count in reg.items():
        fill(tmp_path / "reg" / name, [(64, 64)] * count)
    data = data_of(tmp_path / "train", reg_data_dir=str(tmp_path / "reg"), prior_loss_weight=0.25)
    assert [placed.repeats for placed in data.placed if placed.item.subset.is_reg] == expected
    weights = {
        key: weight
        for batch in map(data.__getitem__, keys_of(data))
        for key, weight in zip(batch["image_keys"], batch["loss_weights"].tolist())
    }
    assert all(weight == (0.25 if key.startswith(tuple(reg)) else 1.0) for key, weight in weights.items())


def test_the_validation_split_is_the_reference_s():
    paths = [f"path{number}" for number in range(1, 8)]
    assert split_items(paths, True, 0.2, 1234) == ["path2", "path3", "path6", "path5", "path1", "path4"]
    assert split_items(paths, False, 0.2, 1234) == ["path7"]


@pytest.mark.parametrize("share", [0.1, 0.4, 0.5, 1.0])
@pytest.mark.parametrize("count", range(1, 12))
def test_the_two_parts_share_nothing_and_lose_nothing(count, share):
    parts = [split_items(range(count), is_training, share, 3) for is_training in (True, False)]
    assert sorted(parts[0] + parts[1]) == list(range(count))
    assert len(parts[1]) == round(count * share)


@pytest.mark.parametrize("validation_seed", [None, 5])
def test_validation_images_are_not_trained_on(root, validation_seed):
    options = {"validation_split": 0.3, "validation_seed": validation_seed}
    train, validation = (
        {placed.item.key: placed.repeats for placed in data_of(root, validation=part, **options).placed}
        for part in (False, True)
    )
    assert not set(train) & set(validation)
    assert list(train) == sorted(train) and list(validation) == sorted(validation)  # as if the rest were not
    assert len(train) + len(validation) == len(SIZES)
    assert set(train.values()) == {2} and set(validation.values()) == {1}


@pytest.mark.parametrize("share", [0.0, 1.5, -1.0])
def test_no_share_means_no_validation_and_all_images_in_training(root, share):
    assert len(data_of(root, validation=True, validation_split=share)) == 0
    assert len(data_of(root, validation_split=share).placed) == len(SIZES)


def test_metadata_files_name_images_and_captions(tmp_path):
    folder = fill(tmp_path / "images", [(64, 64)] * 3, caption=None)
    entries = {
        "0.png": {"caption": "a cat", "tags": "x, y"},
        str(folder / "1.png"): {"tags": "x"},
        "2.png": {"caption": "b", "image_size": [1, 1]},
    }
    (tmp_path / "meta.json").write_text(json.dumps(entries), encoding="utf-8-sig")
    lines = [json.dumps({"image_path": key, **entry}) for key, entry in entries.items()]
    (tmp_path / "meta.jsonl").write_text("\n".join(lines))
    for name in ("meta.json", "meta.jsonl"):
        data = data_of(folder, in_json=str(tmp_path / name))
        assert [placed.item.caption for placed in data.placed] == ["a cat,x, y", "x", "b"]


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "no metadata as expected"), ("[1]", "no metadata as expected"), ('{"a": 1}', "no metadata as expected"),
     ('{"no.png": {}}', "no.png does not exist")],
)  # fmt: skip
def test_a_metadata_file_that_cannot_be_used_is_one_line(tmp_path, content, message):
    folder = fill(tmp_path / "images", [(64, 64)])
    (tmp_path / "meta.json").write_text(content)
    with pytest.raises(OptionError, match=message) as caught:
        data_of(folder, in_json=str(tmp_path / "meta.json"))
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------------- mistakes


def test_captions_with_another_extension_are_told_once(root, caplog):
    data_of(root, caption_extension=".caption")
    assert "7 images have no .caption file and get 'sks cat'" in caplog.text
    assert caplog.text.count("Use --caption_extension .txt") == 1
    assert "7 of them have a .txt file" in caplog.text


def test_empty_captions_are_counted(root, caplog):
    (root / "2_sks cat" / "0.txt").write_text("\n")
    data_of(root)
    assert "1 of 7 captions are empty" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket_reso_steps": 32}, "bucket_reso_steps must be a multiple of 64, got 32"),
        ({"min_bucket_reso": 256, "max_bucket_reso": 128}, "min_bucket_reso 256 is larger"),
        ({"enable_bucket": False, "resolution": "100"}, "100x100 is no multiple of 8. Example: --resolution"),
        ({"bucket_no_upscale": True}, r"3.png: an image of 80x60 pixels is too narrow"),
    ],
)
def test_settings_that_cannot_work_are_refused(root, options, message):
    with pytest.raises(OptionError, match=message):
        data_of(root, **options)


def test_broken_images_are_all_named(root):
    for name in ("0.png", "1.png"):
        (root / "2_sks cat" / name).write_bytes(b"no image")
    with pytest.raises(OptionError, match=r"2 broken images.*0\.png.*1\.png"):
        data_of(root)


def test_cut_images_are_found_by_the_check(root):
    path = root / "2_sks cat" / "5.png"
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(OptionError, match=r"broken image: .*5\.png"):
        check_images([data_of(root)])


# ------------------------------------------------------------------------------------------------------- metadata


def test_metadata_of_folders_equals_the_specification_s_example(tmp_path):
    example = spec_fixture("lora_metadata_example_folders.json")
    fill(tmp_path / "train" / "2_cat", [(64, 64)] * 3, caption="A cat, number {}, tag b")
    options = {"resolution": "64", "max_bucket_reso": 128, "train_batch_size": 1}
    metadata = dataset_metadata(data_of(tmp_path / "train", **options), None, False, 1)
    assert metadata == {key: example[key] for key in metadata}
    assert "ss_datasets" not in metadata


def test_metadata_of_a_file_equals_the_specification_s_example(tmp_path):
    example = spec_fixture("lora_metadata_example_dataset_config.json")
    train = fill(tmp_path / "2_cat", [(64, 64)] * 3)
    reg = fill(tmp_path / "reg", [(64, 64)])
    common = {"enable_bucket": True, "min_bucket_reso": 64, "max_bucket_reso": 128}
    first = {"batch_size": 2, "resolution": 64, **common, "subsets": [
        {"image_dir": str(train), "num_repeats": 2, "class_tokens": "cat"},
        {"image_dir": str(reg), "is_reg": True},
    ]}  # fmt: skip
    second = {"resolution": [64, 128], **common, "subsets": [{"image_dir": str(train), "random_crop": True}]}
    general = {"caption_extension": ".txt", "shuffle_caption": True, "keep_tokens": 1}
    file = tmp_path / "data.json"
    file.write_text(json.dumps({"general": general, "datasets": [first, second]}))
    data = TrainingData(load_dataset_specs(Namespace(dataset_config=file)), seed=7)
    metadata = dataset_metadata(data, None, True, 1)
    for key, value in metadata.items():
        assert (json.loads(value) if value[0] in "[{" else value) == (
            json.loads(example[key]) if value[0] in "[{" else example[key]
        ), key
    assert len(data) == int(example["ss_num_batches_per_epoch"])
    assert "ss_resolution" not in metadata
