"""Data of the user's own class, a look at the data, what is remembered of a folder, preserved outputs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

import train_network
from library.args import parse, script_parser
from library.config_util import build_specs
from library.dataset import INFO_FILE, TrainingData
from library.errors import OptionError
from tests.test_train_network import metadata_of
from tests.training import RUN_OPTIONS, arguments, first_difference, forget_accelerate, make_tiles, read_state, train


@pytest.fixture
def data(tmp_path) -> Path:
    return make_tiles(tmp_path / "data", count=3, repeats=1)


@pytest.fixture
def options(tiny_sd1_folder, data, tmp_path):
    return {
        "pretrained_model_name_or_path": tiny_sd1_folder,
        "train_data_dir": data,
        "output_dir": tmp_path / "out",
        "max_train_steps": 3,
        "cache_latents": False,
    }


# ------------------------------------------------------------------------------------------------- dataset_class

CLASSES = '''
import torch
from library.train_util import MinimalDataset

made = []

class Plain:
    """The least that works."""
    def __init__(self, tokenizer, max_token_length, resolution, debug_dataset):
        made.append((tokenizer, max_token_length, resolution, debug_dataset))
    def __len__(self):
        return 3
    def __getitem__(self, index):
        pixels = torch.full((2, 3, 64, 64), index / 3)
        return {"captions": ["a cat", f"number {index}"], "images": pixels}

class Latents(MinimalDataset):
    def __init__(self, *args):
        super().__init__(*args)
        self.num_train_images = 7
        self.epoch = 0
    def set_current_epoch(self, epoch):
        self.epoch = epoch
    def __len__(self):
        return 2
    def __getitem__(self, index):
        latents = torch.full((1, 4, 8, 8), float(self.epoch))
        return {"captions": ["x"], "latents": latents, "loss_weights": torch.tensor([0.5])}

class NoCaptions(Plain):
    def __getitem__(self, index):
        return {"images": torch.zeros(1, 3, 64, 64)}

class Empty(Plain):
    def __len__(self):
        return 0

class Broken(Plain):
    def __init__(self):
        pass
'''


@pytest.fixture
def classes(tmp_path, monkeypatch):
    (tmp_path / "own_data_sets.py").write_text(CLASSES, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("own_data_sets", None)
    import own_data_sets

    return own_data_sets


@pytest.mark.parametrize("workers", [0, 2])
def test_a_class_of_the_users_own_is_trained_on(workers, classes, options, tmp_path):
    more = {"dataset_class": "own_data_sets.Plain", "train_data_dir": None, "max_token_length": 150}
    train(**{**options, **more}, max_data_loader_n_workers=workers, min_snr_gamma=5)
    assert classes.made == [(None, 150, (64, 64), False)]
    assert metadata_of(tmp_path / "out" / "t.safetensors")["ss_num_batches_per_epoch"] == "3"


def test_its_batches_are_what_the_model_sees(classes, options, tmp_path):
    seen = []

    class Watching(train_network.NetworkTrainer):
        def process_batch(self, batch, *rest, **more):
            seen.append(batch)
            return super().process_batch(batch, *rest, **more)

    forget_accelerate()
    more = {"dataset_class": "own_data_sets.Latents", "max_train_steps": 4}
    Watching().train(parse(script_parser("train_network"), arguments({**RUN_OPTIONS, **options, **more})))
    assert [float(batch["latents"].mean()) for batch in seen] == [1, 1, 2, 2]
    assert all(batch["images"] is None and batch["loss_weights"].tolist() == [0.5] for batch in seen)
    assert seen[0]["original_sizes_hw"].tolist() == [[64, 64]] and seen[0]["custom_attributes"] == [{}]
    assert metadata_of(tmp_path / "out" / "t.safetensors")["ss_num_train_images"] == "7"


def test_sdxl_trains_on_it(classes, options, tiny_sdxl_folder, tmp_path):
    more = {"pretrained_model_name_or_path": tiny_sdxl_folder, "dataset_class": "own_data_sets.Plain"}
    train("sdxl_train_network", **{**options, **more})
    assert (tmp_path / "out" / "t.safetensors").is_file()


def test_a_resumed_run_on_it_ends_with_the_same_bits(classes, options, tmp_path):
    options = {**options, "dataset_class": "own_data_sets.Latents", "save_state": True, "save_every_n_steps": 1}
    train(**options)
    train(**{**options, "output_dir": tmp_path / "b"}, resume=tmp_path / "out" / "t-step00000001-state")
    states = [read_state(tmp_path / folder / "t-state") for folder in ("out", "b")]
    assert first_difference(*states) is None


@pytest.mark.parametrize(
    "name,more,match",
    [
        ("own_data_sets.Nothing", {}, "Nothing"),
        ("no_such_module.Class", {}, "no_such_module"),
        ("NoModule", {}, "Give package.module.Class"),
        ("own_data_sets.Empty", {}, "no batches"),
        ("own_data_sets.Broken", {}, "TypeError"),
        ("own_data_sets.NoCaptions", {}, "has no captions"),
        ("own_data_sets.Plain", {"cache_latents": True}, "cannot be used with --dataset_class"),
    ],
)
def test_a_class_that_cannot_be_used_is_one_line(name, more, match, classes, options):
    with pytest.raises(OptionError, match=match) as error:
        train(**{**options, **more}, dataset_class=name)
    assert "--dataset_class" in str(error.value) and "\n" not in str(error.value)


# ------------------------------------------------------------------------------------------------- debug_dataset


def test_a_look_at_the_data_shows_every_batch_and_trains_nothing(options, data, tmp_path, capsys):
    train(**options, debug_dataset=True, flip_aug=True, train_batch_size=2)
    said = capsys.readouterr().out
    assert re.findall(r"batch (\d) of 2: (\d) images of 64x64", said) in (
        [("1", "1"), ("2", "2")],
        [("1", "2"), ("2", "1")],
    )
    for name in ("tile0", "tile1", "tile2"):
        assert f"1_sks cat/{name}.png, 64x64, crop" in said and f"'a cat, number {name[-1]}, tile'" in said
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["t-debug_dataset"]
    pictures = sorted((tmp_path / "out" / "t-debug_dataset").iterdir())
    shown = {numpy.asarray(Image.open(path)).tobytes() for path in pictures}
    expected = [numpy.asarray(Image.open(path)) for path in data.rglob("*.png")]
    assert len(pictures) == 3
    assert all(each.tobytes() in shown or each[:, ::-1].tobytes() in shown for each in expected)


def test_a_look_shows_masks_beside_their_images(options, data, tmp_path, capsys):
    for path in data.rglob("*.png"):
        Image.open(path).convert("RGBA").save(path)
    train(**options, debug_dataset=True, alpha_mask=True)
    assert "with alpha_masks" in capsys.readouterr().out
    picture = Image.open(next((tmp_path / "out" / "t-debug_dataset").iterdir()))
    assert picture.size == (128, 64) and numpy.asarray(picture)[:, 64:].min() == 255


def test_a_look_at_the_data_leaves_with_status_0(options, capsys):
    from tests.test_train_network import run_program

    done = run_program(arguments({**RUN_OPTIONS, **options, "debug_dataset": True}))
    assert done.returncode == 0 and "3 batches in an epoch" in done.stdout


# ---------------------------------------------------------------------------------------------------- cache_info


def info_data(folder: Path, **more) -> TrainingData:
    config = {"datasets": [{"resolution": 64, "subsets": [{"image_dir": str(folder), "cache_info": True}], **more}]}
    return TrainingData(
        build_specs(config, "test", parse(script_parser("train_network"), ["--caption_extension", ".txt"])), seed=1
    )


def seen(data: TrainingData) -> list[tuple]:
    return sorted((p.item.path.name, p.item.size, p.item.caption) for p in data.placed)


def test_a_folder_is_remembered_and_not_looked_through_again(data):
    folder = data / "1_sks cat"
    first = seen(info_data(folder))
    content = json.loads((folder / INFO_FILE).read_text(encoding="utf-8"))
    key = str(folder / "tile1.png")
    assert content[key] == {"caption": "a cat, number 1, tile", "resolution": [64, 64]}
    assert seen(info_data(folder)) == first
    (folder / "tile0.txt").write_text("changed", encoding="utf-8")
    Image.new("RGB", (64, 64)).save(folder / "new.png")
    assert seen(info_data(folder)) == first  # what is remembered counts


def test_captions_stay_with_their_images_when_some_are_held_out(data):
    folder = data / "1_sks cat"
    for _ in range(2):
        items = info_data(folder, validation_split=0.34, validation_seed=2).placed
        assert len(items) == 2
        assert all(f"number {placed.item.path.stem[-1]}" in placed.item.caption for placed in items)


@pytest.mark.parametrize(
    "content,match",
    [("[]", "cannot read"), ("{", "cannot read"), ('{"x.png": {}}', "cannot read"), (None, "not there any more")],
)
def test_a_record_that_does_not_fit_is_one_line(content, match, data):
    folder = data / "1_sks cat"
    info_data(folder)
    if content is None:
        (folder / "tile1.png").unlink()
    else:
        (folder / INFO_FILE).write_text(content, encoding="utf-8")
    with pytest.raises(OptionError, match=match):
        info_data(folder)


def test_a_folder_moved_with_its_record_is_found(data, tmp_path):
    info_data(data / "1_sks cat")
    moved = data.rename(tmp_path / "elsewhere")
    assert len(info_data(moved / "1_sks cat").placed) == 3


# ------------------------------------------------------------------------------------------ diff_output_preservation


def preserving(data: Path, tmp_path: Path, which: list[str]) -> Path:
    """A data set of one batch of three images from three folders, of which those named keep their output."""
    text = "[[datasets]]\nresolution = 64\nbatch_size = 3\n"
    for number in range(3):
        folder = tmp_path / f"part{number}"
        folder.mkdir()
        (data / "1_sks cat" / f"tile{number}.png").rename(folder / f"tile{number}.png")
        text += f"[[datasets.subsets]]\nimage_dir = '{folder}'\n"
        if str(number) in which:
            text += "custom_attributes = { diff_output_preservation = true }\n"
    file = tmp_path / "d.toml"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize("which", [["1"], ["0", "2"], ["0", "1", "2"]], ids="".join)
@pytest.mark.parametrize("family", ["sd1", "sdxl"])
def test_the_target_of_marked_images_is_what_the_model_does_without_the_network(
    which, family, request, options, data, tmp_path
):
    import sdxl_train_network

    base = train_network.NetworkTrainer if family == "sd1" else sdxl_train_network.SdxlNetworkTrainer
    seen = []

    class Watching(base):
        def get_noise_pred_and_target(self, args, accelerator, scheduler, latents, batch, text, unet, network, *rest):
            noisy: list = []
            ask = self.call_unet

            def call_unet(args, accelerator, unet, noisy_latents, timesteps, *others, **more):
                noisy.append((noisy_latents, timesteps))
                return ask(args, accelerator, unet, noisy_latents, timesteps, *others, **more)

            self.call_unet = call_unet
            result = super().get_noise_pred_and_target(
                args, accelerator, scheduler, latents, batch, text, unet, network, *rest
            )
            del self.call_unet
            assert all(lora.multiplier == 1.0 for lora in network.unet_loras)
            network.set_multiplier(0.0)
            with torch.no_grad():
                plain = self.call_unet(args, accelerator, unet, *noisy[0], text, batch, torch.float32)
            network.set_multiplier(1.0)
            seen.append((batch["image_keys"], result[0].detach(), result[1], plain))
            return result

    folder = request.getfixturevalue(f"tiny_{family}_folder")
    script = "train_network" if family == "sd1" else "sdxl_train_network"
    more = {"pretrained_model_name_or_path": folder, "dataset_config": preserving(data, tmp_path, which)}
    more |= {"train_data_dir": None, "learning_rate": 1e-2, "max_train_steps": 3}
    forget_accelerate()
    Watching().train(parse(script_parser(script), arguments({**RUN_OPTIONS, **options, **more})))
    for keys, prediction, target, plain in seen[1:]:  # at first the network does nothing
        for place, key in enumerate(keys):
            kept = key[len("part")] in which
            assert torch.allclose(target[place], plain[place], atol=1e-5) == kept
            learnt = not torch.allclose(prediction[place], plain[place], atol=1e-5)
            assert learnt or len(which) == 3  # nothing is learnt from targets that are all one's own


def test_whole_models_refuse_it(options, tiny_sd1_folder, data, tmp_path):
    with pytest.raises(OptionError, match="diff_output_preservation"):
        train("train_db", **{**options, "train_data_dir": None}, dataset_config=preserving(data, tmp_path, ["1"]))
