"""Validation: which images, when, at which timesteps; and that the training does not notice it."""

from __future__ import annotations

import math
import random
import shutil
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file

import train_network
from library.args import parse, script_parser
from library.run_plan import RunPlan
from library.settings import ValidationSettings
from library.validation import Validation, validation_timesteps
from tests.test_train_network import metadata_of, scalars_of
from tests.training import RUN_OPTIONS, arguments, first_difference, forget_accelerate, make_tiles, read_state, train

STEP, EPOCH = "loss/validation/step", "loss/validation/epoch"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return make_tiles(tmp_path_factory.mktemp("data"), count=5, repeats=1)


@pytest.fixture
def options(tiny_sd1_folder, data, tmp_path):
    return {
        "pretrained_model_name_or_path": tiny_sd1_folder,
        "train_data_dir": data,
        "output_dir": tmp_path / "out",
        "max_train_steps": 6,  # three images are left: two epochs
        "validation_split": 0.4,
        "validation_seed": 3,
    }


def run(trainer, options) -> None:
    forget_accelerate()
    trainer.train(parse(script_parser("train_network"), arguments({**RUN_OPTIONS, **options})))


# ------------------------------------------------------------------------------------------------------------ when


@pytest.mark.parametrize(
    "low,high,expected", [(0, 1000, [200, 400, 600, 800]), (100, 200, [120, 140, 160, 180]), (7, 7, [7]), (9, 4, [4])]
)
def test_timesteps_lie_evenly_between_the_limits(low, high, expected):
    assert validation_timesteps(low, high) == expected


@pytest.mark.parametrize("every_steps,every_epochs", [(None, None), (2, None), (3, 2), (None, 2)])
def test_it_is_due_at_every_nth_step_and_at_the_end_of_every_nth_epoch(every_steps, every_epochs):
    settings = ValidationSettings(every_steps, every_epochs, None, 0)
    validation = Validation(None, settings, [], [], None, None, workers=0, stopping=None)
    plan = RunPlan(batches=3, processes=1, accumulation=1, max_steps=12)
    updates = [plan.update(step) for step in range(1, 13)]
    at_steps = [update.step for update in updates if validation.due(update, False)]
    at_epochs = [update.epoch for update in updates if update.ends_epoch and validation.due(update, True)]
    assert at_steps == [step for step in range(1, 13) if every_steps and step % every_steps == 0]
    assert at_epochs == [epoch for epoch in range(1, 5) if epoch % (every_epochs or 1) == 0]


def test_it_is_logged_at_the_steps_and_epochs_it_is_due(options, tmp_path):
    train(**options, validate_every_n_steps=2, validate_every_n_epochs=2, logging_dir=tmp_path / "logs")
    found = scalars_of(tmp_path / "logs")
    for kind in ("average", "divergence"):
        assert [step for step, _ in found[f"{STEP}_{kind}"]] == [2, 4, 6]
        assert [step for step, _ in found[f"{EPOCH}_{kind}"]] == [2]
    training = dict(found["loss/average"])
    for (step, mean), (_, divergence) in zip(found[f"{STEP}_average"], found[f"{STEP}_divergence"]):
        assert divergence == pytest.approx(mean - training[step], abs=1e-5)
    assert len(found[f"{STEP}_current"]) == 6  # two images, three times
    metadata = metadata_of(tmp_path / "out" / "t.safetensors")
    assert (metadata["ss_num_train_images"], metadata["ss_num_validation_images"]) == ("3", "2")
    assert metadata["ss_validate_every_n_steps"] == "2"


# ------------------------------------------------------------------------------------------------------ which loss


class Watched(train_network.NetworkTrainer):
    """Notes every forward pass of the validation and what the model was asked."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.ended = 0

    def process_batch(self, batch, text_encoders, unet, network, vae, *rest, is_train=True, **more):
        loss = super().process_batch(batch, text_encoders, unet, network, vae, *rest, is_train=is_train, **more)
        if not is_train:
            assert not loss.requires_grad and not torch.is_grad_enabled()
            assert not any(part.training for module in (network, unet) for part in module.modules())
            timestep = int(self._details.timesteps[0])
            self.seen.append((batch["image_keys"], batch["captions"], timestep, float(loss)))
        return loss

    def on_validation_step_end(self, *rest):
        self.ended += 1


def test_every_validation_sees_the_same_batches_captions_timesteps_and_noise(options):
    trainer = Watched()
    more = {"shuffle_caption": True, "flip_aug": True, "learning_rate": 0.0, "network_dropout": 0.5, "seed": 8}
    run(trainer, {**options, **more, "unet_lr": 1e-12, "validate_every_n_steps": 2, "validate_every_n_epochs": 100})
    assert len(trainer.seen) == 3 * 2 * 4 and trainer.ended == 3 * 2
    first, second, third = (trainer.seen[8 * n : 8 * n + 8] for n in range(3))
    for one, other in zip(first, second):
        assert one[:3] == other[:3] and one[3] == pytest.approx(other[3], rel=1e-5)
    assert [each[:3] for each in first] == [each[:3] for each in third]
    assert [each[2] for each in first] == [200, 400, 600, 800] * 2


@pytest.mark.parametrize("limit,batches", [(1, 1), (2, 2), (50, 2)])
def test_the_number_of_batches_is_limited(limit, batches, options):
    trainer = Watched()
    run(trainer, {**options, "max_validation_steps": limit, "max_train_steps": 3})
    assert len(trainer.seen) == 4 * batches


def test_the_seed_of_the_validation_decides_its_noise(options, data, tmp_path):
    file = tmp_path / "d.toml"  # the split has a seed of its own there
    text = f"[[datasets]]\nvalidation_seed = 3\n[[datasets.subsets]]\nimage_dir = '{data / '1_sks cat'}'\n"
    file.write_text(text, encoding="utf-8")
    seen = []
    for seed in (3, 3, 4):
        trainer = Watched()
        more = {"dataset_config": file, "max_train_steps": 3, "learning_rate": 1e-12}
        run(trainer, {**options, **more, "validation_seed": seed})
        seen.append(trainer.seen)
    assert seen[0] == seen[1]
    assert [each[:3] for each in seen[0]] == [each[:3] for each in seen[2]]
    assert all(one[3] != other[3] for one, other in zip(seen[0], seen[2]))


# ------------------------------------------------------------------------------------------------- never disturbs


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "uncached"])
def test_a_run_with_validation_trains_to_the_bits_of_a_run_on_the_same_images_without(cached, options, data, tmp_path):
    more = {"cache_latents": cached, "multires_noise_iterations": 2, "network_dropout": 0.2, "shuffle_caption": True}
    more |= {"save_state": True, "grad_filter": "topk_change"}
    train(**{**options, **more}, validate_every_n_steps=1)
    held_out = Watched()
    run(held_out, {**options, "output_dir": tmp_path / "look", "max_train_steps": 3})
    folder = tmp_path / "rest" / "1_sks cat"
    folder.mkdir(parents=True)
    names = {key[0].split("/")[1][:-4] for key, *_ in held_out.seen}
    for path in (data / "1_sks cat").iterdir():
        if path.stem not in names:
            shutil.copy(path, folder)
    without = {**options, "validation_split": None, "validation_seed": None, "train_data_dir": tmp_path / "rest"}
    train(**{**without, **more, "output_dir": tmp_path / "plain"})
    states = [read_state(folder / "t-state") for folder in (tmp_path / "out", tmp_path / "plain")]
    assert first_difference(*states) is None


def test_resume_goes_on_to_the_same_bits_and_the_same_validations(options, tmp_path):
    more = {"validate_every_n_steps": 2, "save_state": True, "save_every_n_steps": 1, "seed": 5}
    train(**{**options, **more}, logging_dir=tmp_path / "straight")
    again = tmp_path / "again"
    resume = tmp_path / "out" / "t-step00000003-state"  # the last step of the first epoch: what ends it is still due
    train(**{**options, **more, "output_dir": again}, logging_dir=tmp_path / "resumed", resume=resume)
    assert first_difference(read_state(again / "t-state"), read_state(tmp_path / "out" / "t-state")) is None
    straight, resumed = scalars_of(tmp_path / "straight"), scalars_of(tmp_path / "resumed")
    assert resumed[f"{EPOCH}_average"] == straight[f"{EPOCH}_average"]
    assert resumed[f"{STEP}_average"] == [pair for pair in straight[f"{STEP}_average"] if pair[0] > 3]


class Failing(train_network.NetworkTrainer):
    """A validation that uses random numbers up, then fails."""

    def on_step_start(self, *rest):
        if not rest[-1]:
            random.random(), numpy.random.random(), torch.rand(3)
            raise RuntimeError("out of memory, say")


def test_a_validation_that_fails_is_one_line_and_the_run_goes_on(options, tmp_path, caplog):
    more = {"save_state": True, "save_every_n_steps": 1, "logging_dir": tmp_path / "logs"}
    run(Failing(), {**options, **more, "validate_every_n_steps": 1})
    run(train_network.NetworkTrainer(), {**options, **more, "output_dir": tmp_path / "b"})
    for name in ("t-state", "t-step00000001-state"):
        states = [read_state(folder / name) for folder in (tmp_path / "out", tmp_path / "b")]
        assert first_difference(*states) is None
    lines = [r.getMessage() for r in caplog.records if "validation is left out" in r.getMessage()]
    assert len(lines) == 6 + 2 and "out of memory" in lines[0]
    assert f"{STEP}_average" not in scalars_of(tmp_path / "logs")


def test_a_schedule_free_optimizer_is_validated_with_the_weights_that_are_saved(options, tmp_path):
    class Weights(Watched):
        def process_batch(self, batch, text_encoders, unet, network, *rest, is_train=True, **more):
            if not is_train:
                self.validated = {key: value.clone() for key, value in network.state_dict().items()}
            return super().process_batch(batch, text_encoders, unet, network, *rest, is_train=is_train, **more)

    trainer = Weights()
    run(trainer, {**options, "optimizer_type": "AdamWScheduleFree", "learning_rate": 1e-2})
    saved = load_file(tmp_path / "out" / "t.safetensors")
    assert all(torch.equal(trainer.validated[key], value) for key, value in saved.items())


# ----------------------------------------------------------------------------------------------------- other ways


@pytest.mark.parametrize("kind", ["dataset", "general"])
def test_the_split_can_stand_in_a_data_set_file(kind, options, data, tmp_path):
    line = "validation_split = 0.4\n"
    text = f"[general]\n{line if kind == 'general' else ''}[[datasets]]\n{line if kind == 'dataset' else ''}"
    file = tmp_path / "d.toml"
    file.write_text(f"{text}[[datasets.subsets]]\nimage_dir = '{data / '1_sks cat'}'\n", encoding="utf-8")
    more = {"validation_split": None, "train_data_dir": None, "dataset_config": file, "logging_dir": tmp_path / "logs"}
    train(**{**options, **more})
    assert math.isfinite(scalars_of(tmp_path / "logs")[f"{EPOCH}_average"][0][1])


def test_a_metadata_file_is_validated_on_all_its_images(options, data, tmp_path):
    file = tmp_path / "m.json"
    file.write_text('{"tile0.png": {"caption": "a"}, "tile1.png": {"caption": "b"}}', encoding="utf-8")
    trainer = Watched()
    more = {"in_json": file, "train_data_dir": data / "1_sks cat", "max_train_steps": 1}
    run(trainer, {**options, **more})
    assert {key[0] for key, *_ in trainer.seen} == {"m/tile0.png", "m/tile1.png"}


def test_sdxl_validates_with_cached_text_outputs(tiny_sdxl_folder, options, tmp_path):
    more = {"pretrained_model_name_or_path": tiny_sdxl_folder, "cache_text_encoder_outputs": True}
    more |= {"network_train_unet_only": True, "logging_dir": tmp_path / "logs", "max_train_steps": 3}
    train("sdxl_train_network", **{**options, **more})
    assert len(scalars_of(tmp_path / "logs")[f"{EPOCH}_average"]) == 1


@pytest.mark.parametrize(
    "changed,line",
    [
        ({"validation_split": 0.05}, "too small for one image"),
        ({"validation_split": 1.5}, "outside 0 to 1"),
        ({"validation_split": None, "validate_every_n_steps": 1}, "no images to validate with"),
    ],
)
def test_no_validation_set_is_one_line(changed, line, options, caplog):
    trainer = Watched()
    run(trainer, {**options, **changed, "max_train_steps": 1})
    assert not trainer.seen
    assert any(line in record.getMessage() for record in caplog.records)
