"""Merging, resizing and extracting LoRAs: what comes out acts on a model as what went in."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from library.checkpoint import load_model, save_single_file
from library.errors import OptionError, run_script
from library.metadata import safetensors_hashes
from networks import lora
from networks.lora_tools import LowRank, read_lora
from networks.resize_lora import DYNAMIC, resized
from tests.conftest import REPOSITORY
from tests.training import arguments, first_difference

KINDS = ("sd1", "sd2", "sdxl")
PROGRAMS = ("merge_lora", "sdxl_merge_lora", "svd_merge_lora", "resize_lora", "extract_lora_from_models")


def run(program: str, **options) -> None:
    importlib.import_module(f"networks.{program}").main(arguments(options))


@pytest.fixture(scope="module")
def bases(request, tmp_path_factory):
    """For each kind a small model as a folder and as one file."""
    found = {}
    for kind in KINDS:
        folder = request.getfixturevalue(f"tiny_{kind}_folder")
        file = tmp_path_factory.mktemp(kind) / "base.safetensors"
        save_single_file(file, load_model(folder, kind, dtype=torch.float32), kind)
        found[kind] = {"folder": folder, "file": file}
    return found


def encoders_of(model):
    return model.text_encoders if len(model.text_encoders) > 1 else model.text_encoders[0]


def make_lora(path, base, kind, seed, rank=3, **conv):
    """A LoRA with random values on every layer, saved as a training run saves it."""
    model = load_model(base, kind, dtype=torch.float32)
    network = lora.create_network(1.0, rank, 1.5, None, encoders_of(model), model.unet, **conv)
    network.apply_to(encoders_of(model), model.unet)
    generator = torch.Generator().manual_seed(seed)
    for param in network.parameters():
        param.data = torch.randn(param.shape, generator=generator) / param[0].numel() ** 0.5
    for module in network.loras:  # singular values that differ
        up = module.lora_up.weight.data
        up *= 0.5 * (3.0 ** -torch.arange(module.lora_dim)).reshape(1, -1, *[1] * (up.dim() - 2))
    network.save_weights(
        path, None, {"ss_base_model_version": "sdxl_base_v1-0" if kind == "sdxl" else f"sd_v{kind[2]}"}
    )
    return path


@pytest.fixture(scope="module")
def loras(bases, tmp_path_factory):
    """For each kind two LoRAs of different ranks, the first with convolutions."""
    folder = tmp_path_factory.mktemp("loras")
    return {
        kind: [
            make_lora(folder / f"{kind}_a.safetensors", bases[kind]["file"], kind, 1, conv_dim="2", conv_alpha="3"),
            make_lora(folder / f"{kind}_b.safetensors", bases[kind]["file"], kind, 2, rank=2),
        ]
        for kind in KINDS
    }


def outputs(model) -> list[torch.Tensor]:
    """What every part of a model gives for fixed inputs."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 49000, (2, 77), generator=generator)
    with torch.no_grad():
        texts = [encoder(ids)[0] for encoder in model.text_encoders]
        hidden = torch.randn(2, 77, model.unet.config.cross_attention_dim, generator=generator)
        more = {}
        if len(texts) > 1:
            more = {"text_embeds": torch.randn(2, 64, generator=generator), "time_ids": torch.ones(2, 6)}
        noisy, timesteps = torch.randn(2, 4, 8, 8, generator=generator), torch.tensor([10, 900])
        return [*texts, model.unet(noisy, timesteps, hidden, added_cond_kwargs=more).sample]


def with_loras(base, kind, files_and_strengths) -> list[torch.Tensor]:
    """Outputs of a model with LoRAs attached at run time."""
    model = load_model(base, kind, dtype=torch.float32)
    for file, strength in files_and_strengths:
        network, tensors = lora.create_network_from_weights(strength, file, None, encoders_of(model), model.unet)
        network.apply_to(encoders_of(model), model.unet)
        network.load_tensors(tensors, "")
    return outputs(model)


def assert_near(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=5e-4, rtol=5e-4)


# ------------------------------------------------------------------------------------------------------------ merging


@pytest.mark.parametrize("form", ["file", "folder"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_model_acts_as_the_model_with_its_loras(kind, form, bases, loras, tmp_path):
    base, target = bases[kind][form], tmp_path / ("merged.safetensors" if form == "file" else "merged")
    program = "sdxl_merge_lora" if kind == "sdxl" else "merge_lora"
    run(program, sd_model=base, models=loras[kind], ratios=[0.7, -0.4], save_to=target, v2=kind == "sd2")
    merged = outputs(load_model(target, kind, dtype=torch.float32))
    assert_near(merged, with_loras(base, kind, zip(loras[kind], (0.7, -0.4))))
    plain = outputs(load_model(base, kind, dtype=torch.float32))
    assert not any(torch.allclose(one, other, atol=1e-2) for one, other in zip(merged, plain))
    if form == "file":
        with safe_open(target, "pt") as stream:
            entries = stream.metadata()
        assert entries["modelspec.merged_from"] == f"base, {kind}_a, {kind}_b"
        assert not entries["modelspec.architecture"].endswith("/lora")


def test_only_layers_of_the_lora_change_and_precisions_count(bases, loras, tmp_path):
    base, target = bases["sd1"]["file"], tmp_path / "m.safetensors"
    options = {"sd_model": base, "models": [loras["sd1"][1]], "ratios": [1], "save_to": target}
    run("merge_lora", **options, save_precision="fp16")
    before, after = load_file(base), load_file(target)
    changed = {key for key in before if not torch.equal(before[key].half(), after[key])}
    assert {value.dtype for value in after.values()} == {torch.float16} and 0 < len(changed) < len(before)
    assert all("attn" in key or ".ff." in key or "proj_" in key or ".mlp." in key for key in changed)
    run("merge_lora", **options, precision="bf16")
    assert {value.dtype for value in load_file(target).values()} == {torch.bfloat16}


@pytest.mark.parametrize("kind", KINDS)
def test_merged_loras_act_as_both(kind, bases, loras, tmp_path):
    target, base = tmp_path / "both.safetensors", bases[kind]["file"]
    program = "sdxl_merge_lora" if kind == "sdxl" else "merge_lora"
    run(program, models=loras[kind], ratios=[0.5, -0.8], save_to=target)
    assert_near(with_loras(base, kind, [(target, 1.0)]), with_loras(base, kind, zip(loras[kind], (0.5, -0.8))))
    with safe_open(target, "pt") as stream:
        entries = stream.metadata()
    assert entries["ss_network_module"] == "networks.lora" and entries["modelspec.architecture"].endswith("/lora")
    assert entries["ss_base_model_version"].startswith("sdxl" if kind == "sdxl" else f"sd_v{kind[2]}")
    assert entries["sshs_model_hash"] == safetensors_hashes(target.read_bytes())[0]


def test_a_merge_by_svd_is_exact_when_its_rank_suffices_and_near_when_not(bases, loras, tmp_path):
    exact, small, target = (tmp_path / f"{name}.safetensors" for name in ("exact", "small", "sum"))
    options = {"models": loras["sd1"], "ratios": [1, 1]}
    run("merge_lora", **options, save_to=target)
    run("svd_merge_lora", **options, save_to=exact, new_rank=5)
    run("svd_merge_lora", **options, save_to=small, new_rank=2, new_conv_rank=1)
    summed, ours, fewer = (read_lora(str(path), "").modules for path in (target, exact, small))
    for name, module in summed.items():
        torch.testing.assert_close(ours[name].product(), module.product(), atol=1e-5, rtol=1e-4)
        s = torch.linalg.svdvals(module.product().flatten(1))
        rank = fewer[name].rank
        lost = (fewer[name].product() - module.product()).norm()
        torch.testing.assert_close(lost, s[rank:].norm(), atol=1e-4, rtol=1e-3)  # no matrix of that rank is nearer
        assert rank == (1 if module.is_large_convolution else 2)


# ----------------------------------------------------------------------------------------------------------- resizing


def test_a_resize_keeps_the_product_and_the_scale_when_the_rank_suffices(loras, tmp_path):
    target = tmp_path / "r.safetensors"
    run("resize_lora", model=loras["sdxl"][0], save_to=target, new_rank=3)
    before, after = (read_lora(str(path), "").modules for path in (loras["sdxl"][0], target))
    assert before.keys() == after.keys() and any(module.is_large_convolution for module in after.values())
    for name, module in before.items():
        torch.testing.assert_close(after[name].product(), module.product(), atol=1e-5, rtol=1e-4)
        assert after[name].scale == pytest.approx(module.scale) and after[name].up.dim() == module.up.dim()


def plain_rank(s: list[float], method: str, param: float) -> int:
    """The rules of the dynamic methods, counted one value after the other."""
    if method == "sv_ratio":
        return sum(value > s[0] / param for value in s)
    power = 1 if method == "sv_cumulative" else 2
    total, reached = sum(value**power for value in s), 0.0
    for count, value in enumerate(s, start=1):
        reached += value**power
        if reached / total >= param**power:
            return count
    return len(s)


@pytest.mark.parametrize("method,param", [("sv_ratio", 4), ("sv_cumulative", 0.8), ("sv_fro", 0.95), ("sv_fro", 1)])
def test_a_dynamic_resize_keeps_what_its_rule_says(method, param, loras, tmp_path):
    target = tmp_path / "r.safetensors"
    run("resize_lora", model=loras["sd1"][0], save_to=target, new_rank=99, dynamic_method=method, dynamic_param=param)
    before, after = (read_lora(str(path), "").modules for path in (loras["sd1"][0], target))
    for name, module in before.items():
        s = torch.linalg.svdvals(module.up.flatten(1).double() @ module.down.flatten(1).double())[: module.rank]
        assert abs(after[name].rank - plain_rank(s.tolist(), method, param)) <= (param == 1), name
    with safe_open(target, "pt") as stream:
        entries = stream.metadata()
    assert f"by {method} {param:g}" in entries["ss_training_comment"]
    assert entries["ss_network_dim"] == "Dynamic"
    assert entries["sshs_model_hash"] == safetensors_hashes(target.read_bytes())[0]


@pytest.mark.parametrize("method", DYNAMIC)
def test_new_rank_limits_a_dynamic_resize_and_an_empty_module_stays(method):
    generator = torch.Generator().manual_seed(0)
    module = LowRank(torch.randn(9, 5, generator=generator), torch.randn(5, 7, generator=generator), 5.0)
    small, kept = resized(module, 2, method, 1e9 if method == "sv_ratio" else 1.0)
    assert small.rank == 2 and 0 < kept < 1
    empty, kept = resized(LowRank(torch.zeros(9, 5), module.down, 5.0), 2, method, 2.0)
    assert empty.rank == 1 and kept == 1.0 and not empty.product().any() and empty.scale == 1.0


# --------------------------------------------------------------------------------------------------------- extracting


@pytest.mark.parametrize("kind", KINDS)
def test_an_extracted_lora_recovers_the_tuned_model(kind, bases, loras, tmp_path):
    base, tuned, target = bases[kind]["file"], tmp_path / "tuned.safetensors", tmp_path / "x.safetensors"
    run("merge_lora", sd_model=base, models=[loras[kind][0]], ratios=[1], save_to=tuned)
    options = {"model_org": bases[kind]["folder" if kind == "sd1" else "file"], "model_tuned": tuned, "save_to": target}
    options |= {"sdxl": kind == "sdxl", "v2": kind == "sd2"}
    run("extract_lora_from_models", **options, dim=3, conv_dim=2, clamp_quantile=1)
    assert_near(with_loras(base, kind, [(target, 1.0)]), outputs(load_model(tuned, kind, dtype=torch.float32)))
    assert set(load_file(target)) == set(load_file(loras[kind][0]))
    with safe_open(target, "pt") as stream:
        entries = stream.metadata()
    assert entries["ss_network_dim"] == "3" and json.loads(entries["ss_network_args"])["conv_dim"] == "2"
    assert entries["ss_v2"] == str(kind == "sd2")
    assert entries["sshs_model_hash"] == safetensors_hashes(target.read_bytes())[0]


def test_a_text_encoder_that_hardly_changed_gets_no_lora_and_large_factors_are_cut(bases, loras, tmp_path):
    base, tuned, target = bases["sd1"]["file"], tmp_path / "tuned.safetensors", tmp_path / "x.safetensors"
    only_unet = {k: v for k, v in load_file(loras["sd1"][0]).items() if k.startswith("lora_unet")}
    save_file(only_unet, tmp_path / "unet.safetensors")
    run("merge_lora", sd_model=base, models=[tmp_path / "unet.safetensors"], ratios=[1], save_to=tuned)
    options = {"model_org": base, "model_tuned": tuned, "save_to": target, "dim": 3}
    run("extract_lora_from_models", **options, clamp_quantile=1)
    uncut = load_file(target)
    assert {key.split("_")[1] for key in uncut} == {"unet"} and not any("resnets" in key for key in uncut)
    run("extract_lora_from_models", **options, clamp_quantile=0.9)
    for name, module in read_lora(str(target), "").modules.items():
        whole = torch.cat([uncut[f"{name}.lora_{part}.weight"].flatten() for part in ("up", "down")])
        limit = whole.quantile(0.9)
        largest = max(module.up.abs().max(), module.down.abs().max())
        assert largest <= limit * 1.0001 and largest < whole.abs().max()


# ----------------------------------------------------------------------------------------------------------- mistakes


@pytest.fixture
def wrong(bases, loras, tmp_path):
    """Options of each program that work, for a test to spoil."""
    target = tmp_path / "out.safetensors"
    one = str(loras["sd1"][0])
    base = str(bases["sd1"]["file"])
    return {
        "merge_lora": {"models": [one], "ratios": [1], "save_to": target},
        "sdxl_merge_lora": {"sd_model": base, "models": [one], "ratios": [1], "save_to": target},
        "svd_merge_lora": {"models": [one], "ratios": [1], "save_to": target},
        "resize_lora": {"model": one, "save_to": target},
        "extract_lora_from_models": {"model_org": base, "model_tuned": base, "save_to": target},
    }


@pytest.mark.parametrize(
    "program,spoiled,message",
    [
        ("merge_lora", {"models": None}, "--models is missing"),
        ("merge_lora", {"ratios": [1, 2]}, "--ratios: 2 for 1 --models"),
        ("merge_lora", {"save_to": None}, "--save_to is missing"),
        ("merge_lora", {"models": ["none.safetensors"]}, "--models none.safetensors: there is no such file"),
        ("merge_lora", {"sd_model": "none.safetensors"}, "--sd_model none.safetensors: no such file"),
        ("merge_lora", {"sd_model": "LORA"}, "--sd_model .* is a LoRA, not a base model. Give a whole model"),
        ("merge_lora", {"models": ["BASE"]}, "--models .* is not of networks.lora"),
        ("merge_lora", {"save_to": "LORA"}, "--save_to .* would replace what is read"),
        ("merge_lora", {"models": ["LORA", "SDXL_LORA"], "ratios": [1, 1]}, "one of the LoRAs is for SDXL"),
        ("sdxl_merge_lora", {"models": ["SDXL_LORA"]}, "none of its|is for a layer of shape"),
        ("svd_merge_lora", {"new_rank": 0}, "--new_rank 0: ranks are at least 1"),
        ("resize_lora", {"model": None}, "--model is missing"),
        ("resize_lora", {"new_rank": 0}, "--new_rank 0: ranks are at least 1"),
        ("resize_lora", {"dynamic_method": "sv_fro"}, "--dynamic_method sv_fro needs --dynamic_param"),
        ("resize_lora", {"dynamic_method": "sv_ratio", "dynamic_param": 0.5}, "sv_ratio takes a number above 1"),
        ("resize_lora", {"device": "gpu7"}, "--device gpu7: there is no device"),
        ("extract_lora_from_models", {"model_org": None}, "--model_org is missing"),
        ("extract_lora_from_models", {"dim": 0}, "ranks are at least 1"),
        ("extract_lora_from_models", {"clamp_quantile": 2}, "--clamp_quantile 2.0"),
        ("extract_lora_from_models", {"model_tuned": "SDXL"}, "--model_tuned is a model of kind sdxl"),
        ("extract_lora_from_models", {}, "have the same weights"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(program, spoiled, message, wrong, bases, loras, tmp_path, capsys):
    names = {"LORA": loras["sd1"][0], "SDXL_LORA": loras["sdxl"][1], "BASE": bases["sd1"]["file"]}
    names["SDXL"] = bases["sdxl"]["file"]

    def real(value):
        return [real(item) for item in value] if isinstance(value, list) else names.get(value, value)

    options = {**wrong[program], **{key: real(value) for key, value in spoiled.items()}}
    with pytest.raises(OptionError, match=message) as raised:
        run(program, **options)
    assert len(str(raised.value).splitlines()) == 1 and not list(tmp_path.iterdir())
    with pytest.raises(SystemExit) as stopped:
        run_script(lambda: run(program, **options))
    assert stopped.value.code == 2


@pytest.mark.parametrize("program", [*PROGRAMS, "check_lora_weights"])
def test_programs_run_from_any_folder(program, tmp_path):
    path = REPOSITORY / "networks" / f"{program}.py"
    done = subprocess.run([sys.executable, path, "--help"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "usage:" in done.stdout and not done.stderr


def test_weights_are_told(loras, capsys):
    importlib.import_module("networks.check_lora_weights").main([str(loras["sd1"][1])])
    printed = capsys.readouterr().out
    modules = len(read_lora(str(loras["sd1"][1]), "").modules)
    assert f"number of LoRA modules: {modules}\n" in printed and "NaN or Inf: none" in printed


def test_a_file_of_another_suffix_is_written_and_read(loras, tmp_path):
    run("resize_lora", model=loras["sd1"][1], save_to=tmp_path / "r.pt", new_rank=2, save_precision="bf16")
    run("resize_lora", model=loras["sd1"][1], save_to=tmp_path / "r.safetensors", new_rank=2, save_precision="bf16")
    assert (
        first_difference(lora.read_network_file(tmp_path / "r.pt", ""), load_file(tmp_path / "r.safetensors")) is None
    )
