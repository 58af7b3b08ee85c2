"""A run that was stopped and resumed is the run that was never stopped, to the bit."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from library.errors import OptionError
from tests.training import first_difference, make_tiles, read_state, train

# 3 tiles, 2 repeats, batch 1: 6 batches an epoch; with accumulation 3 an epoch has 2 updates, with 4 a short one
OPTIMIZERS = {
    "AdamW": ["topk_change"],
    "AdamW8bit": ["topk"],
    "Prodigy": ["ema,topk"],
    "Lion": ["random"],
    "SignSGD": ["ema,topk_change"],
    "AdamWScheduleFree": ["topk_change"],
    "Adafactor": ["topk"],
}
OPTIMIZER_OPTIONS = {
    "Prodigy": {"learning_rate": 1.0},
    "Adafactor": {"optimizer_args": ["relative_step=False", "scale_parameter=False"]},
}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resumed_run_ends_where_the_unbroken_run_ends(optimizer, accumulation, tiny_sd1_folder, tmp_path):
    options = {
        "pretrained_model_name_or_path": tiny_sd1_folder,
        "train_data_dir": make_tiles(tmp_path / "data"),
        "optimizer_type": optimizer,
        "grad_filter": OPTIMIZERS[optimizer][0],
        "gradient_accumulation_steps": accumulation,
        "lr_scheduler": None if optimizer.endswith("ScheduleFree") else "cosine",
        "network_dropout": 0.1,
        "max_train_steps": 5 if accumulation > 1 else 8,
        "save_state": True,
        "save_every_n_steps": 1,
        "save_every_n_epochs": 1,
        **OPTIMIZER_OPTIONS.get(optimizer, {}),
    }
    straight = tmp_path / "straight"
    train(**options, output_dir=straight)
    middle = "t-step00000003-state"
    for name in ("t-000001-state", middle):
        resumed = tmp_path / f"after-{name}"
        train(**options, output_dir=resumed, resume=straight / name)
        assert first_difference(read_state(resumed / "t-state"), read_state(straight / "t-state")) is None
        weights = load_file(resumed / "t.safetensors"), load_file(straight / "t.safetensors")
        assert first_difference(*weights) is None
    again = sorted(path.name for path in (tmp_path / f"after-{middle}").iterdir() if path.name != "t-grad_filter")
    later = [path.name for path in straight.iterdir() if not path.name.startswith(("t-step00000001", "t-step00000002"))]
    earlier = {"t-step00000003.safetensors", middle, "t-grad_filter"}
    if accumulation == 3:  # an epoch has two updates, so the first epoch's saves lie before the resumed state
        earlier |= {"t-000001.safetensors", "t-000001-state"}
    assert again == sorted(set(later) - earlier)


@pytest.mark.parametrize(
    "optimizer,grad_filter", [("AdamW", "ema,topk_change"), ("Adafactor", None), ("AdamW8bit", None)]
)
def test_a_text_encoder_stops_after_its_step_and_a_resume_on_either_side_changes_nothing(
    optimizer, grad_filter, tiny_sd1_folder, tmp_path
):
    options = {
        "script": "train_db",
        "pretrained_model_name_or_path": tiny_sd1_folder,
        "train_data_dir": make_tiles(tmp_path / "data"),
        "optimizer_type": optimizer,
        "grad_filter": grad_filter,
        "stop_text_encoder_training": 2,
        "save_model_as": "safetensors",
        "max_train_steps": 4,
        "save_state": True,
        "save_every_n_steps": 1,
        **OPTIMIZER_OPTIONS.get(optimizer, {}),
    }
    straight = tmp_path / "straight"
    train(**options, output_dir=straight)
    texts = []
    for name in ("t-step00000001", "t-step00000002", "t-step00000003", "t"):
        tensors = load_file(straight / f"{name}.safetensors")
        texts.append({key: value for key, value in tensors.items() if key.startswith("cond_stage_model.")})
    assert first_difference(texts[0], texts[1]) and first_difference(texts[1], texts[3]) is None
    assert first_difference(texts[1], texts[2]) is None
    for step in (1, 2, 3):
        resumed = tmp_path / f"after-{step}"
        train(**options, output_dir=resumed, resume=straight / f"t-step{step:08d}-state")
        assert first_difference(read_state(resumed / "t-state"), read_state(straight / "t-state")) is None
        weights = [load_file(folder / "t.safetensors") for folder in (resumed, straight)]
        assert first_difference(*weights) is None


def test_the_comparer_notices_one_bit_in_every_kind_of_leaf(tmp_path):
    state = {"t": torch.arange(4.0), "n": {"i": 1, "f": 0.5, "s": "a", "l": [1, [2.0]], "b": True, "none": None}}
    changes = [
        lambda s: s["t"].view(torch.int32).__setitem__(2, s["t"].view(torch.int32)[2] ^ 1),
        lambda s: s["n"].update(i=2),
        lambda s: s["n"].update(f=0.5000000000000001),
        lambda s: s["n"].update(s="b"),
        lambda s: s["n"]["l"][1].__setitem__(0, 2),
        lambda s: s["n"]["l"].append(3),
        lambda s: s["n"].update(b=1),
        lambda s: s["n"].pop("none"),
        lambda s: s.update(t=s["t"].double()),
    ]
    assert first_difference(state, copy.deepcopy(state)) is None
    for change in changes:
        other = copy.deepcopy(state)
        change(other)
        assert first_difference(state, other) is not None


@pytest.fixture(scope="module")
def short_run(tiny_sd1_folder, tmp_path_factory):
    """Options of a filtered run of 4 steps and the folder that holds its results."""
    folder = tmp_path_factory.mktemp("short")
    options = {
        "pretrained_model_name_or_path": tiny_sd1_folder,
        "train_data_dir": make_tiles(folder / "data"),
        "optimizer_type": "AdamW",
        "save_state": True,
        "save_every_n_steps": 2,
        "max_train_steps": 4,
    }
    train(**options, grad_filter="topk_change", output_dir=folder / "filtered")
    train(**options, output_dir=folder / "bare")
    return options, folder


@pytest.mark.parametrize("first,then,line", [("bare", "topk", "filter"), ("filtered", None, "filter")])
def test_a_state_loads_with_and_without_a_filter_and_says_so_once(first, then, line, short_run, tmp_path, caplog):
    options, folder = short_run
    train(**options, grad_filter=then, resume=folder / first / "t-step00000002-state", output_dir=tmp_path)
    said = [r.getMessage() for r in caplog.records if "grad_filter" in r.name and line in r.getMessage()]
    said = [text for text in said if "state" in text]
    assert len(said) == 1, said
    assert (tmp_path / "t-step00000004.safetensors").is_file()


def test_a_finished_run_says_that_nothing_is_left(short_run, tmp_path):
    options, folder = short_run
    with pytest.raises(OptionError, match="step 4 of 4"):
        train(**options, resume=folder / "bare" / "t-state", output_dir=tmp_path)


@pytest.mark.parametrize(
    "changed,match",
    [
        ({"optimizer_type": "Lion"}, "AdamW"),
        ({"network_dim": 4}, "does not fit|rank|shape"),
        ({"network_train_unet_only": True}, "state trains 408 tensors"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(changed, match, short_run, tmp_path):
    options, folder = short_run
    with pytest.raises(OptionError, match=match) as raised:
        train(**{**options, **changed}, resume=folder / "bare" / "t-step00000002-state", output_dir=tmp_path)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_new_learning_rate_is_in_force_and_said(short_run, tmp_path, caplog):
    options, folder = short_run
    train(**options, learning_rate=5e-4, resume=folder / "bare" / "t-step00000002-state", output_dir=tmp_path)
    assert any("0.001" in r.getMessage() and "0.0005" in r.getMessage() for r in caplog.records)
    record = json.loads((tmp_path / "t-state" / "train_state.json").read_text())
    assert set(record["rates"]) == {5e-4}


def test_resuming_twice_keeps_counting(short_run, tmp_path):
    options, folder = short_run
    longer = {**options, "max_train_steps": 8}
    train(**longer, output_dir=tmp_path / "straight")
    train(**{**options, "max_train_steps": 6}, resume=folder / "bare" / "t-state", output_dir=tmp_path / "a")
    train(**longer, resume=tmp_path / "a" / "t-step00000006-state", output_dir=tmp_path / "b")
    assert (
        first_difference(read_state(tmp_path / "b" / "t-state"), read_state(tmp_path / "straight" / "t-state")) is None
    )


def test_R18_a_foreign_state_of_two_processes_is_not_taken_for_one_of_one(short_run, tmp_path, caplog):
    options, folder = short_run
    shutil.copytree(folder / "bare" / "t-step00000002-state", tmp_path / "s")
    (tmp_path / "s" / "train_state.json").write_text('{"current_epoch": 1, "current_step": 2}')
    shutil.copy(tmp_path / "s" / "random_states_0.json", tmp_path / "s" / "random_states_1.json")
    train(**options, resume=tmp_path / "s", output_dir=tmp_path / "o")
    assert "random numbers start anew in every process, as the state is of 2" in caplog.text


def test_a_damaged_state_is_refused_before_the_model_is_loaded(short_run, tmp_path):
    options, folder = short_run
    shutil.copytree(folder / "bare" / "t-step00000002-state", tmp_path / "t-state")
    (tmp_path / "t-state" / "optimizer.bin").write_bytes(b"")
    with pytest.raises(OptionError, match=r"optimizer\.bin"):
        train(
            **{**options, "pretrained_model_name_or_path": tmp_path},
            resume=tmp_path / "t-state",
            output_dir=tmp_path / "o",
        )
