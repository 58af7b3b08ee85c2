"""The real script on small models: what it writes, prints and logs, and what it says about mistakes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from library.errors import OptionError, RunStopped
from tests.conftest import REPOSITORY, spec_fixture
from tests.training import RUN_OPTIONS, arguments, first_difference, make_tiles, read_state, train


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return make_tiles(tmp_path_factory.mktemp("data"))


@pytest.fixture
def options(tiny_sd1_folder, data, tmp_path):
    return {
        "pretrained_model_name_or_path": tiny_sd1_folder,
        "train_data_dir": data,
        "output_dir": tmp_path / "out",
        "max_train_steps": 2,
    }


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


def scalars_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, list[tuple[int, float]]] = {}
    for file in folder.rglob("events.out.*"):
        events = EventAccumulator(str(file.parent))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            found[tag] = [(event.step, event.value) for event in events.Scalars(tag)]
    return found


def run_program(words: list[str], *, launch: bool = False, cwd: Path = REPOSITORY) -> subprocess.CompletedProcess:
    command = [sys.executable]
    if launch:
        command += ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--mixed_precision", "no"]
        command += ["--num_machines", "1", "--dynamo_backend", "no"]
    return subprocess.run(
        [*command, str(REPOSITORY / "train_network.py"), *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


# ------------------------------------------------------------------------------------------------------- real runs


def test_metadata_has_the_keys_of_the_reference(options, tmp_path):
    train(
        **{**options, "cache_latents": False},
        enable_bucket=True,
        min_bucket_reso=64,
        max_bucket_reso=128,
        network_args=["conv_dim=4"],
        min_snr_gamma=5,
        min_timestep=10,
        clip_skip=2,
        metadata_author="someone",
        metadata_usage_hint="hint",
        grad_filter="topk",
        grad_filter_args=["keep=0.2", "policy=update"],
    )
    found = metadata_of(tmp_path / "out" / "t.safetensors")
    expected = spec_fixture("lora_metadata_example_folders.json")
    ours = {"ss_grad_filter", "ss_grad_filter_args", "ss_sd_model_hash", "ss_new_sd_model_hash"}
    assert set(found) - ours == set(expected) - ours
    for key in ("ss_bucket_info", "ss_tag_frequency", "ss_dataset_dirs", "ss_reg_dataset_dirs", "ss_network_args"):
        assert type(json.loads(found[key])) is type(json.loads(expected[key]))
    same = [
        key for key in expected if key.startswith("ss_") and not re.search("hash|time|_at|name|dim|alpha|seed|id", key)
    ]
    different = {key: (found[key], expected[key]) for key in same if found[key] != expected[key]}
    allowed = {"ss_tag_frequency", "ss_dataset_dirs", "ss_optimizer"}  # other captions and folder; the filter is named
    assert set(different) <= allowed, different
    assert found["ss_grad_filter"] == "topk" and "keep=0.2" in found["ss_grad_filter_args"]
    assert found["ss_optimizer"].startswith("torch.optim.adamw.AdamW")
    assert str(tmp_path) not in json.dumps(found)


def test_no_metadata_writes_the_smallest_set(options, tmp_path):
    train(**options, no_metadata=True, network_args=["conv_dim=2"])
    keys = {key for key in metadata_of(tmp_path / "out" / "t.safetensors") if key.startswith("ss_")}
    minimum = {"v2", "base_model_version", "network_module", "network_dim", "network_alpha", "network_args"}
    assert keys == {f"ss_{name}" for name in minimum}


def test_scalars_have_the_names_front_ends_read(options, tmp_path):
    train(
        **options,
        logging_dir=tmp_path / "logs",
        log_prefix="p_",
        grad_filter="topk",
        optimizer_type="Prodigy",
        learning_rate=1,
    )
    assert re.fullmatch(r"p_\d{14}", next((tmp_path / "logs").iterdir()).name)
    found = scalars_of(tmp_path / "logs")
    expected = {"loss/current", "loss/average", "loss/epoch_average", "lr/unet", "lr/textencoder", "lr/d*lr/unet"}
    assert expected <= set(found)
    assert [step for step, _ in found["loss/current"]] == [1, 2]
    assert any(name.startswith("grad_filter/") for name in found)


def test_names_of_everything_that_is_saved(options, tmp_path):
    train(
        **{**options, "max_train_steps": None},
        max_train_epochs=3,
        save_every_n_epochs=1,
        save_every_n_steps=4,
        save_state=True,
        save_last_n_steps=8,
        save_last_n_epochs=1,
    )
    names = {path.name for path in (tmp_path / "out").iterdir()}
    # 18 steps; saved at 4, 8, 12, 16 and epochs 1, 2; kept are the last 8 steps and the last epoch
    steps = {f"t-step{step:08d}{suffix}" for step in (8, 12, 16) for suffix in (".safetensors", "-state")}
    assert names == {"t.safetensors", "t-state", "t-000002.safetensors", "t-000002-state", *steps}


@pytest.mark.parametrize(
    "extra", [{"mixed_precision": "bf16"}, {"mixed_precision": "bf16", "full_bf16": True}], ids=["amp", "full"]
)
def test_half_precision_runs_and_saves(extra, options, tmp_path):
    train(**options, **extra, gradient_checkpointing=True, save_precision="fp16")
    tensors = load_file(tmp_path / "out" / "t.safetensors")
    assert {value.dtype for value in tensors.values()} == {torch.float16}
    assert all(torch.isfinite(value).all() for value in tensors.values())


def test_gradient_checkpointing_changes_nothing(options, tmp_path):
    results = []
    for name, extra in (("a", {}), ("b", {"gradient_checkpointing": True})):
        train(**{**options, "output_dir": tmp_path / name}, **extra)
        results.append(load_file(tmp_path / name / "t.safetensors"))
    for key, value in results[0].items():
        torch.testing.assert_close(value, results[1][key], atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("source", ["folder", "file", "ckpt"])
def test_sd2_trains_from_every_source(source, tiny_sd2_folder, data, tmp_path):
    from library.checkpoint import load_model, save_single_file

    path = tiny_sd2_folder
    if source != "folder":
        path = tmp_path / "m.safetensors"
        save_single_file(path, load_model(tiny_sd2_folder, "sd2", dtype=torch.float32), "sd2")
    if source == "ckpt":
        torch.save({"state_dict": load_file(path)}, tmp_path / "m.ckpt")
        path = tmp_path / "m.ckpt"
    train(
        pretrained_model_name_or_path=path,
        v2=True,
        v_parameterization=True,
        train_data_dir=data,
        output_dir=tmp_path / "out",
        max_train_steps=1,
        max_token_length=150,
    )
    found = metadata_of(tmp_path / "out" / "t.safetensors")
    assert found["ss_base_model_version"] == "sd_v2_v" and found["modelspec.prediction_type"] == "v"
    key = "lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight"
    assert load_file(tmp_path / "out" / "t.safetensors")[key].dim() == (2 if source == "folder" else 4)


def test_a_data_set_file_buckets_and_uncached_images(options, tmp_path):
    folder = make_tiles(tmp_path / "wide", size=(128, 64)) / "2_sks cat"
    config = tmp_path / "data.toml"
    config.write_text(
        f"[general]\ncaption_extension = '.txt'\nenable_bucket = true\nmin_bucket_reso = 64\n"
        f"[[datasets]]\nresolution = 64\nbatch_size = 2\n"
        f"[[datasets.subsets]]\nimage_dir = '{folder}'\nflip_aug = true\n",
        encoding="utf-8",
    )
    train(
        **{**options, "train_data_dir": None, "cache_latents": False},
        dataset_config=config,
        max_data_loader_n_workers=2,
    )
    assert "ss_datasets" in metadata_of(tmp_path / "out" / "t.safetensors")


def test_masked_loss_masks(options, tmp_path):
    for image in (options["train_data_dir"] / "2_sks cat").glob("*.png"):
        target = tmp_path / "d" / "1_x"
        target.mkdir(parents=True, exist_ok=True)
        picture = Image.open(image).convert("RGBA")
        picture.putalpha(0)
        picture.save(target / image.name)
    train(**{**options, "train_data_dir": tmp_path / "d"}, alpha_mask=True, save_state=True)
    losses = json.loads((tmp_path / "out" / "t-state" / "train_state.json").read_text())["losses"]
    assert set(losses) == {0.0}


def test_network_weights_are_the_start(options, tmp_path):
    train(**options, learning_rate=1e-2)
    first = tmp_path / "out" / "t.safetensors"
    again = {**options, "output_dir": tmp_path / "b", "max_train_steps": 1, "learning_rate": 1e-9}
    train(**again, network_weights=first)
    for key, value in load_file(tmp_path / "b" / "t.safetensors").items():
        torch.testing.assert_close(value, load_file(first)[key], atol=1e-6, rtol=0)
    train(**{**again, "network_dim": None, "output_dir": tmp_path / "c"}, network_weights=first, dim_from_weights=True)
    assert set(load_file(tmp_path / "c" / "t.safetensors")) == set(load_file(first))


def test_base_weights_are_merged(options, tmp_path):
    train(**options, learning_rate=1e-2)
    first = tmp_path / "out" / "t.safetensors"
    train(**{**options, "output_dir": tmp_path / "b"}, base_weights=[first], base_weights_multiplier=[0.5])
    assert set(load_file(tmp_path / "b" / "t.safetensors")) == set(load_file(first))  # nothing leaked into the targets


def test_saving_only_the_unet(options, tmp_path):
    train(**options, network_train_unet_only=True)
    assert all(key.startswith("lora_unet") for key in load_file(tmp_path / "out" / "t.safetensors"))


def test_previews_never_change_the_result(options, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(
        "# comment\na cat --w 64 --h 64 --s 2 --d 1\nn a dog --w 64 --h 64 --s 1 --x 3 --d 2\n", encoding="utf-8"
    )
    train(**options, save_state=True)
    with_previews = {**options, "output_dir": tmp_path / "b"}
    train(**with_previews, save_state=True, sample_prompts=prompts, sample_every_n_steps=1, sample_at_first=True)
    assert first_difference(read_state(tmp_path / "out" / "t-state"), read_state(tmp_path / "b" / "t-state")) is None
    images = sorted((tmp_path / "b" / "sample").iterdir())
    assert len(images) == 6
    assert re.fullmatch(r"t_000001_00_\d{14}_1\.png", images[0].name), images
    assert Image.open(images[0]).size == (64, 64)


def test_a_failing_preview_ends_nothing(options, tmp_path, monkeypatch, caplog):
    from library import sampling

    def fail(*args, **kwargs):
        raise MemoryError("no room")

    monkeypatch.setattr(sampling, "_draw", fail)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\n", encoding="utf-8")
    train(**options, sample_prompts=prompts, sample_every_n_steps=1)
    assert (tmp_path / "out" / "t.safetensors").is_file()
    assert sum("left out" in record.getMessage() for record in caplog.records) == 2


def test_a_failing_tracker_ends_nothing(options, tmp_path, monkeypatch):
    from accelerate import Accelerator

    def fail(*args, **kwargs):
        raise OSError("tracker is gone")

    monkeypatch.setattr(Accelerator, "log", fail)
    train(**options, logging_dir=tmp_path / "logs")
    assert (tmp_path / "out" / "t.safetensors").is_file()


@pytest.mark.parametrize("grad_filter", [None, "topk"])
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_what_was_saved(grad_filter, options, tmp_path, monkeypatch):
    from library import batch_loss

    real, calls = batch_loss.element_loss, []

    def poisoned(*args):
        calls.append(1)
        return real(*args) * (float("nan") if len(calls) == 3 else 1.0)

    monkeypatch.setattr(batch_loss, "element_loss", poisoned)
    with pytest.raises(RunStopped, match=r"step 3: the loss is nan for .*tile"):
        train(**{**options, "max_train_steps": 6}, save_every_n_steps=1, grad_filter=grad_filter)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["t-step00000001.safetensors", "t-step00000002.safetensors"]
    for name in names:
        assert all(torch.isfinite(value).all() for value in load_file(tmp_path / "out" / name).values())


@pytest.mark.parametrize("grad_filter", [None, "topk"])
def test_a_bad_gradient_stops_a_bare_run_and_is_left_out_by_a_filter(
    grad_filter, options, tmp_path, monkeypatch, caplog
):
    from accelerate import Accelerator

    from library.trainer import NetworkTrainer

    networks, backward, create = [], Accelerator.backward, NetworkTrainer.create_network

    def remember(self, *args):
        result = create(self, *args)
        networks.append(result[0])
        return result

    def poison(self, loss, **kwargs):
        backward(self, loss, **kwargs)
        networks[-1].unet_loras[0].lora_up.weight.grad.view(-1)[0] = float("inf")

    monkeypatch.setattr(NetworkTrainer, "create_network", remember)
    monkeypatch.setattr(Accelerator, "backward", poison)
    run = {
        **options,
        "network_train_unet_only": True,
        "max_grad_norm": 0,
        "grad_filter": grad_filter,
        "learning_rate": 1,
    }
    if grad_filter is None:
        with pytest.raises(RunStopped, match="gradient of lora_unet"):
            train(**run)
        return
    train(**run)
    assert all((v == 0).all() for k, v in load_file(tmp_path / "out" / "t.safetensors").items() if "lora_up" in k)
    assert sum("not finite" in record.getMessage() for record in caplog.records) == 2


# --------------------------------------------------------------------------------------------------- as a program


@pytest.mark.parametrize("launch", [False, True], ids=["python", "accelerate"])
def test_the_program_from_another_folder(launch, options, tmp_path):
    config = tmp_path / "lauf ü.toml"
    shape = {**RUN_OPTIONS, **options, "output_name": "größe ü"}
    values = {key: value if isinstance(value, (bool, int, float)) else str(value) for key, value in shape.items()}
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    config.write_text("\n".join([*lines, "epoch = 6", 'noise_offset_type = "Original"']), encoding="utf-8")
    done = run_program(["--config_file", str(config), "--grad_filter", "topk"], launch=launch, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "out" / "größe ü.safetensors").is_file()
    assert re.search(r"^epoch 1/1$", done.stdout, re.MULTILINE)
    assert re.search(r"steps: +100%\|.*\| 2/2 \[.*avr_loss=\d", done.stderr)
    assert re.search(r"model saved: .*größe ü\.safetensors", done.stderr)
    assert "prepare optimizer" in done.stderr and "caching latents" in done.stderr


BAD = {
    "no model": ({"pretrained_model_name_or_path": "/nowhere.safetensors"}, "pretrained_model_name_or_path"),
    "no data": ({"train_data_dir": "/nowhere"}, "train_data_dir"),
    "filter name": ({"grad_filter": "topq"}, "Did you mean 'topk'"),
    "filter key": ({"grad_filter": "topk", "grad_filter_args": ["keepp=0.1"]}, "Did you mean 'keep'"),
    "filter value": ({"grad_filter": "topk", "grad_filter_args": ["keep=2"]}, "keep"),
    "filter off": ({"grad_filter_args": ["keep=0.2"]}, "no filter is on"),
    "optimizer": ({"optimizer_type": "Prodgy"}, "Prodigy"),
    "optimizer argument": ({"optimizer_args": ["betas=(0.9,"]}, "optimizer_args"),
    "swallowed argument": ({"optimizer_type": "SignSGD", "optimizer_args": ["momentm=0.9"]}, "Did you mean 'momentum'"),
    "rates": ({"optimizer_type": "Prodigy", "unet_lr": 1, "text_encoder_lr": 0.5}, "one learning rate"),
    "step needs": ({"optimizer_type": "LBFGS"}, "closure"),
    "schedule": ({"lr_scheduler": "cosinus"}, "cosine"),
    "schedule value": ({"lr_scheduler": "polynomial", "lr_scheduler_args": ["lr_end=2"]}, "lr_scheduler_args"),
    "network": ({"network_module": "networks.lara"}, "network_module"),
    "network argument": ({"network_args": ["conv_dims=4"]}, "conv_dim"),
    "both only": ({"network_train_unet_only": True, "network_train_text_encoder_only": True}, "nothing to train"),
    "resume": ({"resume": "/nowhere-state"}, "resume"),
    "fp16": ({"mixed_precision": "fp16"}, "GPU"),
    "full": ({"full_bf16": True}, "mixed_precision bf16"),
    "prompts": ({"sample_prompts": "/nowhere.txt"}, "sample_prompts"),
    "resolution": ({"resolution": "512x512"}, "resolution"),
    "steps": ({"max_train_steps": 0}, "max_train_steps"),
    "v2": ({"v2": True}, "--v2"),
    "output": ({"output_dir": "/etc/hostname/x"}, "output_dir"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_told_in_a_line_before_a_model_is_loaded(name, options, tmp_path, monkeypatch):
    from library.trainer import NetworkTrainer

    monkeypatch.setattr(NetworkTrainer, "_load_model", lambda *a: pytest.fail("a model was loaded"))
    changed, match = BAD[name]
    with pytest.raises(OptionError, match=match) as raised:
        train(**{**options, **changed})
    lines = str(raised.value).splitlines()
    assert len(lines) == 1 and len(lines[0]) <= 400, lines
    assert not (tmp_path / "out").exists()


def test_frozen_everything_is_told(options):
    with pytest.raises(OptionError, match="nothing is trained"):
        train(**options, learning_rate=0)


def test_all_broken_images_are_told_at_once(options, tmp_path):
    folder = make_tiles(tmp_path / "bad") / "2_sks cat"
    (folder / "empty.png").write_bytes(b"")
    (folder / "page.png").write_text("<html>")
    (folder / "cut.png").write_bytes((folder / "tile0.png").read_bytes()[:2000])
    with pytest.raises(OptionError) as raised:
        train(**{**options, "train_data_dir": folder.parent})
    assert all(name in str(raised.value) for name in ("empty.png", "page.png", "cut.png"))


def test_the_program_ends_with_status_2_and_one_line(options, tmp_path):
    done = run_program(arguments({**RUN_OPTIONS, **options, "grad_filter": "topq"}), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("error: --grad_filter")
    assert "Traceback" not in done.stderr


def test_a_full_disk_keeps_earlier_saves(options, tmp_path, monkeypatch):
    from library import state

    real, calls = state.save_state, []

    def full(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        real(*args, **kwargs)

    monkeypatch.setattr(state, "save_state", full)
    with pytest.raises(RunStopped, match="No space left"):
        train(**{**options, "max_train_steps": 3}, save_every_n_steps=1, save_state=True)
    assert (tmp_path / "out" / "t-step00000001-state" / "train_state.json").is_file()


@pytest.mark.parametrize("workers", [0, 2])
def test_worker_count_changes_nothing(workers, options, tmp_path):
    extra = {"shuffle_caption": True, "flip_aug": True, "max_data_loader_n_workers": workers, "save_state": True}
    train(
        **{**options, "output_dir": tmp_path / "base", "max_train_steps": 8},
        **{**extra, "max_data_loader_n_workers": 1},
    )
    train(**{**options, "max_train_steps": 8}, **extra, persistent_data_loader_workers=workers > 0)
    assert first_difference(read_state(tmp_path / "base" / "t-state"), read_state(tmp_path / "out" / "t-state")) is None


def test_a_canary_in_network_weights_is_not_run(options, tmp_path):
    class Canary:
        def __reduce__(self):
            return open, (str(tmp_path / "canary"), "w")

    torch.save({"x.lora_down.weight": torch.zeros(1), "y": Canary()}, tmp_path / "n.ckpt")
    with pytest.raises(OptionError, match="without running code"):
        train(**options, network_weights=tmp_path / "n.ckpt")
    assert not (tmp_path / "canary").exists()


def test_the_input_is_never_the_output(options, tmp_path):
    (tmp_path / "out").mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "out" / "t.safetensors")
    before = (tmp_path / "out" / "t.safetensors").read_bytes()
    with pytest.raises(OptionError, match="would replace --network_weights"):
        train(**options, network_weights=tmp_path / "out" / "t.safetensors")
    assert (tmp_path / "out" / "t.safetensors").read_bytes() == before
    shutil.rmtree(tmp_path / "out")
