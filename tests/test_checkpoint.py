"""Base models: read as diffusers reads them, written so that it reads ours, and every broken file told in a line."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from library import checkpoint_keys as keys
from library.checkpoint import (
    check_model,
    find_model,
    load_model,
    load_vae,
    read_tensors,
    save_folder,
    save_single_file,
)
from library.errors import OptionError
from library.model_families import SD, SDXL
from tests.training import first_difference


@pytest.fixture(scope="session")
def models(tiny_sd1_folder, tiny_sd2_folder, tiny_sdxl_folder, tmp_path_factory):
    """(folder, single file) by kind."""
    target = tmp_path_factory.mktemp("files")
    paths = {}
    for kind, folder in (("sd1", tiny_sd1_folder), ("sd2", tiny_sd2_folder), ("sdxl", tiny_sdxl_folder)):
        file = target / f"{kind}.safetensors"
        save_single_file(file, load_model(folder, kind, dtype=torch.float32), kind)
        paths[kind] = (folder, file)
    return paths


KINDS = ("sd1", "sd2", "sdxl")
FAMILIES = {"sd1": SD, "sd2": SD, "sdxl": SDXL}


def prediction(model, kind):
    """What a model predicts for a fixed input and caption, in float64."""
    # float64: a normalisation over two numbers, as the tiny model has them, turns float32 rounding into 1e-4
    family, generator = FAMILIES[kind], torch.Generator().manual_seed(0)
    noisy = torch.randn(1, 4, 8, 8, generator=generator, dtype=torch.float64)
    sizes = {name: torch.tensor([[64, 48]]) for name in ("original_sizes_hw", "crop_top_lefts", "target_sizes_hw")}
    with torch.no_grad():
        text = family.encode_text(model.text_encoders, family.tokenize(model.tokenizers, ["a cat"], None), None)
        return family.predict(model.unet, noisy, torch.tensor([7]), text, sizes)


@pytest.mark.parametrize("kind", KINDS)
def test_file_and_folder_give_the_same_model(models, kind):
    folder, file = (load_model(path, kind, dtype=torch.float64) for path in models[kind])
    assert (folder.is_single_file, file.is_single_file) == (False, True)
    for ours, theirs in ((folder.vae, file.vae), *zip(folder.text_encoders, file.text_encoders)):
        assert first_difference(dict(ours.state_dict()), dict(theirs.state_dict())) is None
    torch.testing.assert_close(prediction(folder, kind), prediction(file, kind), atol=1e-5, rtol=1e-5)
    linear = torch.nn.Linear
    attention = [each.unet.mid_block.attentions[0].proj_in for each in (folder, file)]
    assert [isinstance(each, linear) for each in attention] == [kind != "sd1", kind == "sdxl"]


@pytest.mark.parametrize("suffix", [".safetensors", ".ckpt"])
@pytest.mark.parametrize("kind", KINDS)
def test_read_write_read_is_bit_identical(models, kind, suffix, tmp_path):
    _, file = models[kind]
    again = tmp_path / f"again{suffix}"
    save_single_file(again, load_model(file, kind, dtype=torch.float32), kind, counts=(2, 30))
    assert first_difference(load_file(file), read_tensors(again, "")) is None
    if suffix == ".ckpt":  # numbers of epochs and steps add up from training to training
        save_single_file(again, load_model(again, kind, dtype=torch.float32), kind, counts=(1, 5))
        content = torch.load(again, weights_only=True)
        assert (content["epoch"], content["global_step"]) == (3, 35)


def test_a_tensor_that_belongs_to_no_part_is_written_again(models, tmp_path):
    tensors = {**load_file(models["sdxl"][1]), keys.LOGIT_SCALE: torch.tensor(4.6)}
    save_file(tensors, tmp_path / "m.safetensors")
    save_single_file(
        tmp_path / "again.safetensors", load_model(tmp_path / "m.safetensors", "sdxl", dtype=torch.float32), "sdxl"
    )
    assert first_difference(tensors, load_file(tmp_path / "again.safetensors")) is None


def test_sdxl_projection_is_stored_the_other_way_round(models):
    folder, file = models["sdxl"]
    own = load_model(folder, "sdxl", dtype=torch.float32).text_encoders[1].text_projection.weight
    assert torch.equal(load_file(file)["conditioner.embedders.1.model.text_projection"], own.T)


@pytest.mark.parametrize("dtype", [None, torch.float16])
@pytest.mark.parametrize("safetensors", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_we_write_is_a_pipeline_of_diffusers(models, kind, safetensors, dtype, tmp_path):
    from diffusers import DDIMScheduler, DiffusionPipeline

    model = load_model(models[kind][1], kind, dtype=torch.float32)
    pipeline = FAMILIES[kind].pipeline(model, DDIMScheduler())
    save_folder(tmp_path / "out", pipeline, dtype=dtype, safetensors=safetensors)
    loaded = DiffusionPipeline.from_pretrained(tmp_path / "out", local_files_only=True, torch_dtype=dtype)
    expected = {"unet": model.unet, "vae": model.vae, "text_encoder": model.text_encoders[0]}
    for name, ours in expected.items():
        theirs = getattr(loaded, name).state_dict()
        wanted = {key: value.to(dtype or value.dtype) for key, value in ours.state_dict().items()}
        assert first_difference(dict(theirs), wanted) is None, name
    kinds = {path.suffix for path in (tmp_path / "out" / "unet").iterdir()}
    assert (".safetensors" in kinds) is safetensors
    assert not any(part.is_meta for part in ours.parameters()) and ours.dtype == torch.float32


def test_sdxl_text_outputs_equal_those_of_the_pipeline(models):
    model = load_model(models["sdxl"][0], "sdxl", dtype=torch.float32)
    pipeline = SDXL.pipeline(model, None)
    expected, _, pooled, _ = pipeline.encode_prompt("a cat, red")
    ids = SDXL.tokenize(model.tokenizers, ["a cat, red"], None)
    first, second, ours = SDXL.encode_text(model.text_encoders, ids, None)
    torch.testing.assert_close(torch.cat([first, second], dim=-1), expected)
    torch.testing.assert_close(ours, pooled)


@pytest.mark.parametrize("kind", KINDS)
def test_diffusers_converts_our_file_to_the_folder(models, kind):
    """The library's own converters are the other program that reads our files."""
    from diffusers.loaders import single_file_utils as theirs

    folder, file = models[kind]
    model = load_model(folder, kind, dtype=torch.float32)
    checkpoint = load_file(file)
    unet_config = dict(model.unet.config)
    converted = theirs.convert_ldm_unet_checkpoint(dict(checkpoint), unet_config)
    own = model.unet.state_dict()
    assert set(converted) == set(own)
    for key, value in converted.items():
        assert torch.equal(value.reshape(own[key].shape), own[key]), key
    converted = theirs.convert_ldm_vae_checkpoint(dict(checkpoint), dict(model.vae.config))
    own = model.vae.state_dict()
    assert set(converted) == set(own)
    for key, value in converted.items():
        assert torch.equal(value.reshape(own[key].shape), own[key]), key


@pytest.mark.parametrize("kind", ["sd2", "sdxl"])
def test_diffusers_converts_our_open_clip_encoder(models, kind):
    """Fused projections are the part of the map that a wrong order of query, key and value would hide in."""
    from diffusers.loaders import single_file_utils as theirs

    folder, file = models[kind]
    own = load_model(folder, kind, dtype=torch.float32).text_encoders[-1]
    converted = theirs.convert_open_clip_checkpoint(own, load_file(file), prefix=keys.TEXT_LAYOUTS[kind][-1].prefix)
    state = {keys.canonical_text_key(key): value for key, value in own.state_dict().items()}
    compared = 0
    for key, value in converted.items():
        if keys.canonical_text_key(key) in state:
            assert torch.equal(value, state[keys.canonical_text_key(key)]), key
            compared += 1
    assert compared == len(state)


@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
def test_diffusers_loads_our_file_with_a_local_config(models, kind):
    from diffusers import AutoencoderKL, UNet2DConditionModel

    folder, file = models[kind]
    for cls, part in ((UNet2DConditionModel, "unet"), (AutoencoderKL, "vae")):
        loaded = cls.from_single_file(str(file), config=str(folder), subfolder=part, local_files_only=True)
        assert (
            first_difference(dict(loaded.state_dict()), dict(cls.from_pretrained(folder / part).state_dict())) is None
        )


def test_a_ckpt_file_is_read_like_a_safetensors_file(models, tmp_path):
    _, file = models["sd1"]
    tensors = load_file(file)
    tensors["cond_stage_model.transformer.text_model.embeddings.position_ids"] = torch.arange(77)[None]
    torch.save({"state_dict": tensors, "global_step": 3}, tmp_path / "m.ckpt")
    ours = load_model(tmp_path / "m.ckpt", "sd1", dtype=torch.float32)
    theirs = load_model(file, "sd1", dtype=torch.float32)
    assert first_difference(dict(ours.unet.state_dict()), dict(theirs.unet.state_dict())) is None


def test_half_precision_files_and_dtypes(models, tmp_path):
    _, file = models["sd1"]
    save_file({key: value.half() for key, value in load_file(file).items()}, tmp_path / "h.safetensors")
    model = load_model(tmp_path / "h.safetensors", "sd1", dtype=torch.bfloat16)
    for module in (model.unet, model.vae, model.text_encoders[0]):
        assert {param.dtype for param in module.parameters()} == {torch.bfloat16}
        assert not any(param.is_meta for param in [*module.parameters(), *module.buffers()])
        assert not any(param.requires_grad for param in module.parameters())


def test_a_vae_from_folder_file_and_whole_model(models, tmp_path):
    folder, file = models["sd1"]
    expected = dict(load_model(folder, "sd1", dtype=torch.float32).vae.state_dict())
    bare = {k.removeprefix("first_stage_model."): v for k, v in load_file(file).items() if k.startswith("first_stage")}
    save_file(bare, tmp_path / "vae.safetensors")
    torch.save(expected, tmp_path / "vae.bin")
    for path in (folder, folder / "vae", file, tmp_path / "vae.safetensors", tmp_path / "vae.bin"):
        assert first_difference(dict(load_vae(path, torch.float32).state_dict()), expected) is None


# ------------------------------------------------------------------------------------------------------ broken files


def cut(share: float):
    return lambda source, target: target.write_bytes(source.read_bytes()[: int(source.stat().st_size * share)])


def zero_tail(source: Path, target: Path) -> None:
    content = source.read_bytes()
    target.write_bytes(content[:-100])


def lora(source: Path, target: Path) -> None:
    save_file({"lora_unet_x.lora_down.weight": torch.zeros(2, 2)}, target)


def sdxl(source: Path, target: Path) -> None:
    save_file({"conditioner.embedders.0.x": torch.zeros(1), "model.diffusion_model.y": torch.zeros(1)}, target)


def header_bomb(source: Path, target: Path) -> None:
    target.write_bytes(struct.pack("<Q", 2**40) + b"{}")


def bad_header(source: Path, target: Path) -> None:
    target.write_bytes(struct.pack("<Q", 4) + b"[1, " + b"0" * 10)


BROKEN = {
    "cut to 1 KiB": (cut(0.001), "incomplete|header"),
    "cut at 99 %": (cut(0.99), "incomplete"),
    "shorter tail": (zero_tail, "incomplete"),
    "empty": (lambda source, target: target.write_bytes(b""), "0 bytes"),
    "pointer": (
        lambda s, t: t.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        "pointer",
    ),
    "text": (lambda source, target: target.write_text("<html>not found</html>" * 20), "header"),
    "lora": (lora, "network_weights"),
    "sdxl": (sdxl, "sdxl_train_network"),
    "other": (lambda source, target: save_file({"a": torch.zeros(1)}, target), "no Stable Diffusion"),
    "header bomb": (header_bomb, "header"),
    "bad header": (bad_header, "header"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_told_before_anything_is_loaded(models, name, tmp_path):
    damage, match = BROKEN[name]
    target = tmp_path / "model.safetensors"
    damage(models["sd1"][1], target)
    with pytest.raises(OptionError, match=match) as raised:
        check_model(target, "sd1")
    assert str(target) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "kind,wanted,match",
    [
        ("sd1", "sd2", "--v2"),
        ("sd2", "sd1", "--v2"),
        ("sdxl", "sd1", "sdxl_train_network"),
        ("sd1", "sdxl", r"1\.x\. Use train_network"),
        ("sd2", "sdxl", r"2\.x\. Use train_network"),
    ],
)
def test_another_kind_of_model_is_told(models, kind, wanted, match):
    for path in models[kind]:
        with pytest.raises(OptionError, match=match):
            check_model(path, wanted)


def test_missing_paths_and_folders_are_told(tmp_path):
    with pytest.raises(OptionError, match="no such file"):
        find_model(str(tmp_path / "none.safetensors"))
    with pytest.raises(OptionError, match="local hub cache"):
        find_model("someone/some-model")
    with pytest.raises(OptionError, match="no Diffusers folder"):
        check_model(tmp_path, "sd1")
    (tmp_path / "x.ckpt").write_text("text")
    with pytest.raises(OptionError, match="not a model file"):
        check_model(tmp_path / "x.ckpt", "sd1")


def test_parts_that_are_missing_are_told(models, tmp_path):
    tensors = load_file(models["sd1"][1])
    for prefix in ("first_stage_model.", "cond_stage_model.", "model.diffusion_model.out."):
        save_file({k: v for k, v in tensors.items() if not k.startswith(prefix)}, tmp_path / "m.safetensors")
        with pytest.raises(OptionError, match=r"lacks parts"):
            load_model(tmp_path / "m.safetensors", "sd1", dtype=torch.float32)


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("suffix", [".ckpt", ".pt"])
def test_a_pickle_that_runs_code_is_refused(tmp_path, suffix):
    canary, file = tmp_path / "canary", tmp_path / f"m{suffix}"
    torch.save({"state_dict": {"model.diffusion_model.x": torch.zeros(1)}, "hook": Canary(canary)}, file)
    with pytest.raises(OptionError, match="without running code"):
        load_model(file, "sd1", dtype=torch.float32)
    with pytest.raises(OptionError, match="without running code"):
        load_vae(file, torch.float32)
    assert not canary.exists()


def test_a_header_that_lists_nothing_is_no_model(tmp_path):
    header = json.dumps({"__metadata__": {"a": "b"}}).encode()
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(OptionError, match="no Stable Diffusion"):
        check_model(tmp_path / "m.safetensors", "sd1")
