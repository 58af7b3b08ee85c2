"""Preview images: every sampler draws at any number of steps, and prompts are encoded as captions are."""

from __future__ import annotations

import functools
import logging

import pytest
import torch

from library.checkpoint import load_model
from library.model_families import SD, SDXL
from library.sampling import ALIASES, SAMPLERS, SamplePrompt, generate_samples

FAMILIES = {"sd1": SD, "sdxl": SDXL}


@pytest.fixture(scope="module")
def models(tiny_sd1_folder, tiny_sdxl_folder):
    folders = {"sd1": tiny_sd1_folder, "sdxl": tiny_sdxl_folder}
    return {kind: load_model(folder, kind, dtype=torch.float32) for kind, folder in folders.items()}


def draw(model, family, prompts, folder, sampler="ddim", max_token_length=None, clip_skip=None):
    """The bytes of every image."""
    embed = functools.partial(family.embed, model, max_token_length, clip_skip)
    build = functools.partial(family.pipeline, model)
    cpu = torch.device("cpu")
    generate_samples(
        prompts, build, [model.unet], sampler, False, lambda index, seed: folder / f"{index}.png", cpu, embed
    )
    return [path.read_bytes() for path in sorted(folder.glob("*.png"))]


@pytest.mark.parametrize("sampler", [*SAMPLERS, *ALIASES])
def test_every_sampler_draws_at_any_number_of_steps(sampler, models, tmp_path, caplog):
    prompts = [SamplePrompt("a cat", width=64, height=64, sample_steps=steps, seed=1) for steps in (1, 2, 3, 5)]
    with caplog.at_level(logging.WARNING):
        assert len(draw(models["sd1"], SD, prompts, tmp_path, sampler)) == len(prompts)
    assert not [record for record in caplog.records if "left out" in record.getMessage()]


@pytest.mark.parametrize("kind", FAMILIES)
def test_prompts_are_encoded_as_the_pipeline_of_diffusers_does(kind, models):
    model, family = models[kind], FAMILIES[kind]
    pipeline = family.pipeline(model, None)
    pipeline.register_to_config(force_zeros_for_empty_prompt=False)
    theirs = pipeline.encode_prompt("a cat", negative_prompt="a dog", **({} if kind == "sdxl" else DEFAULTS))
    ours = family.embed(model, None, None, "a cat", "a dog")
    names = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
    assert set(ours) == set(names[: len(theirs)])
    for name, expected in zip(names, theirs):
        torch.testing.assert_close(ours[name], expected)


DEFAULTS = {"device": "cpu", "num_images_per_prompt": 1, "do_classifier_free_guidance": True}


@pytest.mark.parametrize("kind", FAMILIES)
def test_layer_and_length_of_captions_count_for_previews(kind, models, tmp_path):
    long = " ".join(["a cat and a dog"] * 30)
    prompts = [SamplePrompt(long, width=64, height=64, sample_steps=2, seed=1)]
    plain = draw(models[kind], FAMILIES[kind], prompts, tmp_path / "plain")
    skipped = draw(models[kind], FAMILIES[kind], prompts, tmp_path / "skipped", clip_skip=2)
    longer = draw(models[kind], FAMILIES[kind], prompts, tmp_path / "longer", max_token_length=150)
    assert len(plain) == len(skipped) == len(longer) == 1
    assert (plain == skipped) == (kind == "sdxl")  # SDXL has one layer for everything
    assert plain != longer
