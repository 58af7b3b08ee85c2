"""SDXL: LoRA runs, cached text outputs, and full training of SDXL and SD in every way of stepping and saving."""

from __future__ import annotations

import json
import math

import numpy
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from library import checkpoint_keys as keys
from library.checkpoint import load_model, read_tensors
from library.errors import OptionError
from library.fused_steps import split_groups, stochastically_rounded
from library.model_families import SDXL
from tests.conftest import spec_fixture
from tests.training import first_difference, make_tiles, read_state, train

LORA = "sdxl_train_network"
FULL = {"script": "sdxl_train", "learning_rate": 1e-3, "save_precision": "float", "save_model_as": "safetensors"}


@pytest.fixture
def options(tiny_sdxl_folder, tmp_path):
    return {
        "pretrained_model_name_or_path": tiny_sdxl_folder,
        "train_data_dir": make_tiles(tmp_path / "data"),
        "output_dir": tmp_path / "out",
        "max_train_steps": 3,
    }


def trained(options, name="t.safetensors"):
    return load_file(options["output_dir"] / name)


def changed_keys(before, after):
    return {key for key in before if not torch.equal(before[key], after[key].to(before[key].dtype))}


# --------------------------------------------------------------------------------------------------------------- LoRA


def test_size_embedding_equals_the_specification(tiny_sdxl_folder):
    fixture = spec_fixture("numerics.json")["sdxl_size_embedding"]
    unet = load_model(tiny_sdxl_folder, "sdxl", dtype=torch.float32).unet
    seen = {}
    unet.add_embedding.register_forward_pre_hook(lambda module, inputs: seen.update(vector=inputs[0]))
    sizes = {"original_sizes_hw": "original_hw", "crop_top_lefts": "crop_top_left", "target_sizes_hw": "target_hw"}
    batch = {name: torch.tensor([fixture[key]]) for name, key in sizes.items()}
    text = [torch.zeros(1, 77, 32), torch.zeros(1, 77, 64), torch.full((1, 64), 9.0)]
    SDXL.predict(unet, torch.zeros(1, 4, 8, 8), torch.tensor([1]), text, batch)
    pooled, embedded = seen["vector"][0].split([64, 1536])
    assert torch.equal(pooled, text[2][0])
    for index, value in fixture["index_value"].items():
        assert math.isclose(embedded[int(index)], value, abs_tol=2e-4), index


def test_a_lora_of_both_encoders_trains_and_loads_into_a_pipeline_of_diffusers(options, tiny_sdxl_folder):
    from diffusers import StableDiffusionXLPipeline

    train(LORA, **options, text_encoder_lr=["1e-3", "5e-4"], network_args=["loraplus_lr_ratio=4"])
    tensors = trained(options)
    for prefix in ("lora_te1_", "lora_te2_", "lora_unet_input_blocks_", "lora_unet_output_blocks_"):
        ups = {k: v for k, v in tensors.items() if k.startswith(prefix) and "lora_up" in k}
        assert ups and any(value.any() for value in ups.values()), prefix
    last = [v for k, v in tensors.items() if k.startswith("lora_te1_text_model_encoder_layers_1") and "lora_up" in k]
    assert last and not any(value.any() for value in last)  # the last layer of the first encoder has no gradient
    pipeline = StableDiffusionXLPipeline.from_pretrained(tiny_sdxl_folder, local_files_only=True)
    pipeline.load_lora_weights(str(options["output_dir"] / "t.safetensors"))
    assert len(pipeline.get_active_adapters()) == 1
    with safe_open(options["output_dir"] / "t.safetensors", "pt") as file:
        written = file.metadata()
    assert written["ss_base_model_version"] == "sdxl_base_v1-0"
    assert written["modelspec.architecture"] == "stable-diffusion-xl-v1-base/lora"
    assert written["modelspec.implementation"] == "https://github.com/Stability-AI/generative-models"


def test_a_resumed_lora_run_ends_where_the_unbroken_run_ends(options, tmp_path):
    asked = {**options, "save_state": True, "save_every_n_steps": 1, "grad_filter": "topk_change"}
    train(LORA, **asked)
    train(LORA, **{**asked, "output_dir": tmp_path / "b"}, resume=options["output_dir"] / "t-step00000002-state")
    ours, theirs = read_state(tmp_path / "b" / "t-state"), read_state(options["output_dir"] / "t-state")
    assert first_difference(ours, theirs) is None


def test_cached_text_outputs_train_the_same_weights_to_the_bit(options, tmp_path):
    asked = {**options, "network_train_unet_only": True}
    train(LORA, **asked, output_name="plain")
    for name, switch in (("memory", "cache_text_encoder_outputs"), ("disk", "cache_text_encoder_outputs_to_disk")):
        train(LORA, **asked, output_name=name, **{switch: True})
        assert first_difference(trained(options, "plain.safetensors"), trained(options, f"{name}.safetensors")) is None
    files = sorted(options["train_data_dir"].rglob("*_te_outputs.npz"))
    assert len(files) == 3
    content = numpy.load(files[0], allow_pickle=False)
    shapes = {key: content[key].shape for key in ("hidden_state1", "hidden_state2", "pool2")}
    assert shapes == {"hidden_state1": (77, 32), "hidden_state2": (77, 64), "pool2": (64,)}


@pytest.mark.parametrize("damage", ["caption", "cut", "empty", "length", "foreign"])
def test_cached_text_outputs_that_do_not_fit_are_made_anew(damage, options):
    asked = {**options, "network_train_unet_only": True, "cache_text_encoder_outputs_to_disk": True}
    train(LORA, **asked, output_name="a")
    file = next(options["train_data_dir"].rglob("tile0_te_outputs.npz"))
    if damage == "caption":
        file.with_name("tile0.txt").write_text("another caption")
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:1000])
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "length":
        asked["max_token_length"] = 150
    else:  # what another program wrote says nothing about its caption
        content = dict(numpy.load(file, allow_pickle=False))
        numpy.savez(file, **{key: value for key, value in content.items() if key != "text_made_from"})
    before = file.read_bytes()
    train(LORA, **asked, output_name="b")
    assert file.read_bytes() != before
    train(LORA, **{**asked, "cache_text_encoder_outputs_to_disk": None}, output_name="c")
    assert first_difference(trained(options, "b.safetensors"), trained(options, "c.safetensors")) is None


@pytest.mark.parametrize(
    "changed,match",
    [
        ({"cache_text_encoder_outputs": True}, "network_train_unet_only"),
        (
            {"cache_text_encoder_outputs": True, "network_train_unet_only": True, "shuffle_caption": True},
            "shuffle_caption",
        ),
        ({"v2": True}, "--v2"),
        ({"network_args": ["block_dims=1,2"]}, "23"),
    ],
)
def test_what_cannot_work_is_told_before_the_model_is_loaded(changed, match, options, monkeypatch):
    monkeypatch.setattr("library.checkpoint._load_folder", lambda *args: pytest.fail("the model was loaded"))
    with pytest.raises(OptionError, match=match):
        train(LORA, **options, **changed)


# ------------------------------------------------------------------------------------------------------ full training

WAYS = {
    "plain": {"optimizer_type": "AdamW", "train_text_encoder": True},
    "accumulated": {"optimizer_type": "AdamW8bit", "gradient_accumulation_steps": 2},
    "backward": {
        "optimizer_type": "Adafactor",
        "optimizer_args": ["relative_step=False", "scale_parameter=False"],
        "fused_backward_pass": True,
        "train_text_encoder": True,
    },
    "groups": {"optimizer_type": "AdamW", "fused_optimizer_groups": 5, "train_text_encoder": True},
    "bf16": {
        "optimizer_type": "Adafactor",
        "optimizer_args": ["relative_step=False", "scale_parameter=False"],
        "fused_backward_pass": True,
        "mixed_precision": "bf16",
        "full_bf16": True,
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_full_run_ends_where_the_unbroken_run_ends(way, options, tmp_path):
    asked = {**options, **FULL, **WAYS[way], "save_state": True, "save_every_n_steps": 2, "grad_filter": "topk_change"}
    asked |= {"lr_scheduler": "cosine"}
    train(**asked)
    train(**{**asked, "output_dir": tmp_path / "b"}, resume=options["output_dir"] / "t-step00000002-state")
    ours, theirs = read_state(tmp_path / "b" / "t-state"), read_state(options["output_dir"] / "t-state")
    assert first_difference(ours, theirs) is None
    first = read_state(options["output_dir"] / "t-step00000002-state")
    assert first_difference(first["model.safetensors"], theirs["model.safetensors"]) is not None


@pytest.mark.parametrize("way", ["backward", "groups"])
def test_steps_inside_the_backward_pass_equal_steps_after_it(way, options):
    """Without a norm limit the order of steps cannot matter, so every bit is the same."""
    asked = {**options, **FULL, **WAYS[way], "max_grad_norm": 0, "grad_filter": "topk"}
    train(**asked, output_name="inside")
    fused = ("fused_backward_pass", "fused_optimizer_groups")
    train(**{key: value for key, value in asked.items() if key not in fused}, output_name="after")
    inside, after = trained(options, "inside.safetensors"), trained(options, "after.safetensors")
    assert first_difference(inside, after) is None


def test_a_gradient_is_limited_by_its_own_norm_inside_the_backward_pass(options, tiny_sdxl_folder):
    before = load_file(tiny_sdxl_folder / "unet" / "diffusion_pytorch_model.safetensors")
    asked = {**options, **FULL, "optimizer_type": "SGD", "fused_optimizer_groups": 3, "max_train_steps": 1}
    train(**{**asked, "learning_rate": 1.0}, max_grad_norm=1e-3)
    table = keys.unet_table_of_diffusers(before)
    after = trained(options)
    norms = [
        (after[keys.UNET_PREFIX + keys.translate(key, table)].reshape(value.shape) - value).norm()
        for key, value in before.items()
    ]
    assert 0.5e-3 < max(norms) < 1.1e-3


def test_only_what_has_a_rate_is_trained(options, tiny_sdxl_folder):
    train(**options, **FULL, output_name="frozen", learning_rate_te1=0, train_text_encoder=True)
    base = load_model(tiny_sdxl_folder, "sdxl", dtype=torch.float32)
    after = load_model(options["output_dir"] / "frozen.safetensors", "sdxl", dtype=torch.float32)
    parts = [(base.text_encoders[0], after.text_encoders[0]), (base.text_encoders[1], after.text_encoders[1])]
    parts += [(base.unet, after.unet), (base.vae, after.vae)]
    changed = [bool(changed_keys(one.state_dict(), other.state_dict())) for one, other in parts]
    assert changed == [False, True, True, False]


def test_the_last_layer_of_the_first_encoder_stays(options, tiny_sdxl_folder):
    train(**options, **FULL, train_text_encoder=True)
    base = load_model(tiny_sdxl_folder, "sdxl", dtype=torch.float32).text_encoders[0].state_dict()
    after = load_model(options["output_dir"] / "t.safetensors", "sdxl", dtype=torch.float32)
    changed = changed_keys(base, after.text_encoders[0].state_dict())
    assert any("layers.0." in key for key in changed)
    assert not any("layers.1." in key or "final_layer_norm" in key for key in changed)


def test_block_rates_name_the_blocks_that_are_trained(options, tiny_sdxl_folder):
    rates = ["0"] * 23
    rates[0] = rates[5] = rates[22] = "1e-3"
    train(**options, **FULL, block_lr=",".join(rates), save_state=True)
    base = load_model(tiny_sdxl_folder, "sdxl", dtype=torch.float32)
    from library.checkpoint import single_file_tensors

    texts = [encoder.state_dict() for encoder in base.text_encoders]
    before = single_file_tensors("sdxl", base.unet.state_dict(), base.vae.state_dict(), texts)
    changed = {key.removeprefix(keys.UNET_PREFIX) for key in changed_keys(before, trained(options))}
    starts = ("time_embed.", "label_emb.", "input_blocks.4.", "out.")
    assert {start for start in starts if any(key.startswith(start) for key in changed)} == set(starts)
    assert all(key.startswith(starts) for key in changed)
    record = json.loads((options["output_dir"] / "t-state" / "train_state.json").read_text())
    assert record["rates"] == [1e-3] * 3


@pytest.mark.parametrize(
    "source,asked,written",
    [
        ("folder", None, "t/"),
        ("file", None, "t.safetensors"),
        ("folder", "ckpt", "t.ckpt"),
        ("file", "diffusers", "t/"),
        ("file", "diffusers_safetensors", "t/"),
    ],
)
def test_formats_of_a_full_model(source, asked, written, options, tiny_sdxl_folder, tmp_path):
    from library.checkpoint import save_single_file

    if source == "file":
        model = load_model(tiny_sdxl_folder, "sdxl", dtype=torch.float32)
        save_single_file(tmp_path / "base.safetensors", model, "sdxl")
        options["pretrained_model_name_or_path"] = tmp_path / "base.safetensors"
    train(**{**options, **FULL, "save_model_as": asked}, max_train_epochs=2, save_every_n_epochs=1)
    path = options["output_dir"] / written.rstrip("/")
    assert path.is_dir() == written.endswith("/")
    middle = options["output_dir"] / path.name.replace("t", "t-000001", 1)
    assert middle.exists()
    load_model(path, "sdxl", dtype=torch.float32)
    if path.suffix == ".ckpt":
        content = torch.load(path, weights_only=True)
        assert (content["epoch"], content["global_step"]) == (2, 12)
        assert set(content["state_dict"]) == set(read_tensors(path, ""))
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            written_keys = file.metadata()
        assert written_keys["modelspec.architecture"] == "stable-diffusion-xl-v1-base"
        assert not any(key.startswith("ss_") for key in written_keys)


@pytest.mark.parametrize(
    "changed,match",
    [
        ({"fused_backward_pass": True, "optimizer_type": "AdamW"}, "Adafactor"),
        (
            {"fused_backward_pass": True, "optimizer_type": "Adafactor", "gradient_accumulation_steps": 2},
            "accumulation",
        ),
        ({"fused_backward_pass": True, "optimizer_type": "Adafactor", "fused_optimizer_groups": 2}, "together"),
        (
            {
                "fused_backward_pass": True,
                "optimizer_type": "Adafactor",
                "grad_filter": "topk",
                "grad_filter_args": "policy=freeze",
            },
            "policy=freeze",
        ),
        ({"block_lr": "1,2"}, "23"),
        ({"block_lr": "a," * 22 + "b"}, "23"),
        ({"cache_text_encoder_outputs": True, "train_text_encoder": True}, "train_text_encoder"),
        ({"learning_rate": 0}, "nothing to train"),
        ({"fused_optimizer_groups": -1}, "at least 1"),
    ],
)
def test_full_training_that_cannot_work_is_told_before_the_model_is_loaded(changed, match, options, monkeypatch):
    monkeypatch.setattr("library.checkpoint._load_folder", lambda *args: pytest.fail("the model was loaded"))
    with pytest.raises(OptionError, match=match) as raised:
        train(**{**options, **FULL, **changed})
    assert "\n" not in str(raised.value)


def test_a_result_does_not_replace_the_base_model(options, tmp_path):
    with pytest.raises(OptionError, match="replace the base model"):
        base = options["pretrained_model_name_or_path"]
        folder = {"output_dir": base.parent, "output_name": base.name, "save_model_as": None}
        train(**{**options, **FULL, **folder})


@pytest.mark.parametrize("script", [LORA, "sdxl_train"])
def test_what_is_trained_is_put_on_the_device_before_an_optimizer_sees_it(script, options, monkeypatch):
    from accelerate import Accelerator

    from library.trainer import NetworkTrainer

    prepared, prepare, create = [], Accelerator.prepare_model, NetworkTrainer.create_optimizer

    def remember(self, model, *words, **settings):
        prepared.append(model)
        return prepare(self, model, *words, **settings)

    def check(self, args, groups, *rest):
        inside = {id(param) for module in prepared for param in module.parameters()}
        assert groups and all(id(param) in inside for group in groups for param in group["params"])
        return create(self, args, groups, *rest)

    monkeypatch.setattr(Accelerator, "prepare_model", remember)
    monkeypatch.setattr(NetworkTrainer, "create_optimizer", check)
    asked = {**options, **FULL} if script == "sdxl_train" else options
    train(**{**asked, "script": script, "max_train_steps": 1})


@pytest.mark.parametrize("script", ["train_db", "fine_tune"])
@pytest.mark.parametrize("text_encoder", [True, False])
def test_full_training_of_sd(script, text_encoder, tiny_sd1_folder, tmp_path):
    options = {"pretrained_model_name_or_path": tiny_sd1_folder, "output_dir": tmp_path / "out", "max_train_steps": 2}
    data = make_tiles(tmp_path / "data")
    if script == "fine_tune":
        images = {str(path): {"caption": "a cat"} for path in data.rglob("*.png")}
        (tmp_path / "meta.json").write_text(json.dumps(images))
        options |= {"in_json": tmp_path / "meta.json", "train_text_encoder": text_encoder}
    else:
        options |= {"stop_text_encoder_training": None if text_encoder else -1}
    train(
        script, **options, train_data_dir=data, grad_filter="topk", save_model_as="safetensors", optimizer_type="Lion"
    )
    base = load_model(tiny_sd1_folder, "sd1", dtype=torch.float32)
    after = load_model(tmp_path / "out" / "t.safetensors", "sd1", dtype=torch.float32)
    assert changed_keys(base.unet.state_dict(), after.unet.state_dict())
    changed = changed_keys(base.text_encoders[0].state_dict(), after.text_encoders[0].state_dict())
    assert bool(changed) is text_encoder


# ---------------------------------------------------------------------------------------------------------- the parts


def test_stochastic_rounding_is_right_on_average_and_exact_where_it_can_be():
    torch.manual_seed(0)
    exact = torch.tensor([1.0, -2.5, 0.0, float("inf"), float("-inf")])
    assert torch.equal(stochastically_rounded(exact), exact.to(torch.bfloat16))
    assert stochastically_rounded(torch.tensor([float("nan")])).isnan().all()
    value = 1.0 + 2**-7 * 0.25  # a quarter of the way to the next number
    rounded = stochastically_rounded(torch.full((100_000,), value)).float()
    assert set(rounded.tolist()) == {1.0, 1.0 + 2**-7}
    assert abs(rounded.mean().item() - value) < 2**-7 * 0.01
    negative = stochastically_rounded(torch.full((100_000,), -value)).float()
    assert abs(negative.mean().item() + value) < 2**-7 * 0.01


@pytest.mark.parametrize("count", [1, 2, 3, 7, 50])
def test_groups_are_split_in_order_and_never_mix_rates(count):
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(17)]
    groups = [{"params": params[:10], "lr": 1.0}, {"params": params[10:], "lr": 2.0}]
    split = split_groups(groups, count)
    assert [id(p) for group in split for p in group["params"]] == [id(p) for p in params]
    assert max(len(group["params"]) for group in split) == max(-(-17 // count), 1) or count == 1
    assert [group["lr"] for group in split] == sorted(group["lr"] for group in split)
    for group in split:
        assert len({1.0 if any(p is q for q in params[:10]) else 2.0 for p in group["params"]}) == 1
