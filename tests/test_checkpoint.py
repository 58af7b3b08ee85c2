"""Base models: read as diffusers reads them, written so that it reads ours, and every broken file told in a line."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from library import checkpoint_keys as keys
from library.checkpoint import check_model, find_model, load_sd_model, load_vae, save_single_file
from library.errors import OptionError
from tests.training import first_difference


@pytest.fixture(scope="session")
def models(tiny_sd1_folder, tiny_sd2_folder, tmp_path_factory):
    """(folder, single file) by v2."""
    target = tmp_path_factory.mktemp("files")
    paths = {}
    for v2, folder in ((False, tiny_sd1_folder), (True, tiny_sd2_folder)):
        file = target / f"sd{1 + v2}.safetensors"
        save_single_file(file, load_sd_model(folder, v2=v2, dtype=torch.float32), v2=v2)
        paths[v2] = (folder, file)
    return paths


@pytest.mark.parametrize("v2", [False, True])
def test_file_and_folder_give_the_same_model(models, v2):
    folder, file = (load_sd_model(path, v2=v2, dtype=torch.float64) for path in models[v2])
    assert (folder.is_single_file, file.is_single_file) == (False, True)
    for ours, theirs in ((folder.vae, file.vae), (folder.text_encoders[0], file.text_encoders[0])):
        assert first_difference(dict(ours.state_dict()), dict(theirs.state_dict())) is None
    # float64: a normalisation over two numbers, as the tiny model has them, turns float32 rounding into 1e-4
    x, hidden = torch.randn(1, 4, 8, 8, dtype=torch.float64), torch.randn(1, 77, 64, dtype=torch.float64)
    t = torch.tensor([7])
    with torch.no_grad():
        torch.testing.assert_close(
            folder.unet(x, t, hidden).sample, file.unet(x, t, hidden).sample, atol=1e-5, rtol=1e-5
        )
    assert isinstance(file.unet.down_blocks[0].attentions[0].proj_in, torch.nn.Conv2d)
    assert isinstance(folder.unet.down_blocks[0].attentions[0].proj_in, torch.nn.Linear if v2 else torch.nn.Conv2d)


@pytest.mark.parametrize("v2", [False, True])
def test_read_write_read_is_bit_identical(models, v2, tmp_path):
    _, file = models[v2]
    save_single_file(tmp_path / "again.safetensors", load_sd_model(file, v2=v2, dtype=torch.float32), v2=v2)
    assert first_difference(load_file(file), load_file(tmp_path / "again.safetensors")) is None


@pytest.mark.parametrize("v2", [False, True])
def test_diffusers_converts_our_file_to_the_folder(models, v2):
    """The library's own converters are the other program that reads our files."""
    from diffusers.loaders import single_file_utils as theirs

    folder, file = models[v2]
    model = load_sd_model(folder, v2=v2, dtype=torch.float32)
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


def test_diffusers_converts_our_text_encoder_of_sd2(models):
    """Fused projections are the part of the map that a wrong order of query, key and value would hide in."""
    from diffusers.loaders import single_file_utils as theirs

    folder, file = models[True]
    own = load_sd_model(folder, v2=True, dtype=torch.float32).text_encoders[0]
    converted = theirs.convert_open_clip_checkpoint(own, load_file(file), prefix="cond_stage_model.model.")
    state = {keys.canonical_text_key(key): value for key, value in own.state_dict().items()}
    compared = 0
    for key, value in converted.items():
        if keys.canonical_text_key(key) in state:
            assert torch.equal(value, state[keys.canonical_text_key(key)]), key
            compared += 1
    assert compared == len(state)


def test_diffusers_loads_our_file_with_a_local_config(models):
    from diffusers import AutoencoderKL, UNet2DConditionModel

    folder, file = models[False]
    for cls, part in ((UNet2DConditionModel, "unet"), (AutoencoderKL, "vae")):
        loaded = cls.from_single_file(str(file), config=str(folder), subfolder=part, local_files_only=True)
        assert (
            first_difference(dict(loaded.state_dict()), dict(cls.from_pretrained(folder / part).state_dict())) is None
        )


def test_a_ckpt_file_is_read_like_a_safetensors_file(models, tmp_path):
    _, file = models[False]
    tensors = load_file(file)
    tensors["cond_stage_model.transformer.text_model.embeddings.position_ids"] = torch.arange(77)[None]
    torch.save({"state_dict": tensors, "global_step": 3}, tmp_path / "m.ckpt")
    ours = load_sd_model(tmp_path / "m.ckpt", v2=False, dtype=torch.float32)
    theirs = load_sd_model(file, v2=False, dtype=torch.float32)
    assert first_difference(dict(ours.unet.state_dict()), dict(theirs.unet.state_dict())) is None


def test_half_precision_files_and_dtypes(models, tmp_path):
    _, file = models[False]
    save_file({key: value.half() for key, value in load_file(file).items()}, tmp_path / "h.safetensors")
    model = load_sd_model(tmp_path / "h.safetensors", v2=False, dtype=torch.bfloat16)
    for module in (model.unet, model.vae, model.text_encoders[0]):
        assert {param.dtype for param in module.parameters()} == {torch.bfloat16}
        assert not any(param.is_meta for param in [*module.parameters(), *module.buffers()])
        assert not any(param.requires_grad for param in module.parameters())


def test_a_vae_from_folder_file_and_whole_model(models, tmp_path):
    folder, file = models[False]
    expected = dict(load_sd_model(folder, v2=False, dtype=torch.float32).vae.state_dict())
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
    damage(models[False][1], target)
    with pytest.raises(OptionError, match=match) as raised:
        check_model(target, v2=False)
    assert str(target) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("v2", [False, True])
def test_the_other_generation_is_told(models, v2):
    for path in models[v2]:
        with pytest.raises(OptionError, match="--v2"):
            check_model(path, v2=not v2)


def test_missing_paths_and_folders_are_told(tmp_path):
    with pytest.raises(OptionError, match="no such file"):
        find_model(str(tmp_path / "none.safetensors"))
    with pytest.raises(OptionError, match="local hub cache"):
        find_model("someone/some-model")
    with pytest.raises(OptionError, match="no Diffusers folder"):
        check_model(tmp_path, v2=False)
    (tmp_path / "x.ckpt").write_text("text")
    with pytest.raises(OptionError, match="not a model file"):
        check_model(tmp_path / "x.ckpt", v2=False)


def test_parts_that_are_missing_are_told(models, tmp_path):
    tensors = load_file(models[False][1])
    for prefix in ("first_stage_model.", "cond_stage_model.", "model.diffusion_model.out."):
        save_file({k: v for k, v in tensors.items() if not k.startswith(prefix)}, tmp_path / "m.safetensors")
        with pytest.raises(OptionError, match=r"lacks parts"):
            load_sd_model(tmp_path / "m.safetensors", v2=False, dtype=torch.float32)


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
        load_sd_model(file, v2=False, dtype=torch.float32)
    with pytest.raises(OptionError, match="without running code"):
        load_vae(file, torch.float32)
    assert not canary.exists()


def test_a_header_that_lists_nothing_is_no_model(tmp_path):
    header = json.dumps({"__metadata__": {"a": "b"}}).encode()
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(OptionError, match="no Stable Diffusion"):
        check_model(tmp_path / "m.safetensors", v2=False)
