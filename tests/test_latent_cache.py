"""Latents made once: the same at every batch size, in memory and on disk, and never from something else."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from library import latent_cache
from library.config_util import load_dataset_specs
from library.dataset import TrainingData
from library.errors import OptionError
from library.latent_cache import cache_latents, posterior_noise

OPTIONS = {
    "resolution": "64",
    "enable_bucket": True,
    "min_bucket_reso": 64,
    "max_bucket_reso": 128,
    "caption_extension": ".txt",
    "train_batch_size": 2,
}


class Encoder:
    """A small real convolution in place of a VAE, which counts the images it was given."""

    def __init__(self, seed: int = 0):
        torch.manual_seed(seed)
        self.layer = torch.nn.Conv2d(3, 8, 8, stride=8)
        self.images = 0

    def __call__(self, images):
        self.images += len(images)
        mean, deviation = self.layer(images).chunk(2, dim=1)
        return mean, deviation.abs()


@pytest.fixture
def folder(tmp_path) -> Path:
    path = tmp_path / "data" / "2_sks cat"
    path.mkdir(parents=True)
    chance = np.random.default_rng(0)
    for number, size in enumerate([(64, 64), (64, 64), (130, 65), (80, 60), (64, 128)]):
        pixels = chance.integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
        Image.fromarray(pixels).save(path / f"{number}.png")
    return path


def data_of(folder, **options) -> TrainingData:
    return TrainingData(load_dataset_specs(Namespace(train_data_dir=str(folder.parent), **OPTIONS | options)), seed=1)


def cached(folder, encoder=None, *, batch_size=2, options=None, **how):
    data = data_of(folder, **(options or {}))
    cache_latents(data, encoder or Encoder(), batch_size=batch_size, shown=False, **how)
    return data


def latents_of(data: TrainingData) -> list[latent_cache.CachedLatents]:
    subset = data.placed[0].item.subset
    return [
        latent_cache.load_cached(data.latents[index], subset.flip_aug, subset.alpha_mask)
        for index in range(len(data.placed))
    ]


def assert_equal(ones, others, **tolerance):
    for one, other in zip(ones, others):
        for tensor, twin in zip(one, other):
            assert (tensor is None) == (twin is None)
            if tensor is not None:
                torch.testing.assert_close(tensor, twin, **tolerance)


@pytest.mark.parametrize("flip", [False, True])
def test_latents_equal_those_of_a_plain_loop(folder, flip):
    data = cached(folder, batch_size=3, options={"flip_aug": flip})
    encoder = Encoder()
    for index, placed in enumerate(data.placed):
        image = data.load_pixels(index).image[None]
        for tensor, pixels, flipped in zip(data.latents[index], (image, image.flip(-1)), (False, True)):
            if flipped and not flip:
                assert tensor is None
                continue
            mean, deviation = encoder(pixels)
            noise = posterior_noise(placed.item.key, flipped, mean.shape[1:])
            torch.testing.assert_close(tensor, (mean + deviation * noise)[0].detach())


def test_noise_differs_between_images_and_mirror_images():
    draws = [posterior_noise(name, flipped, (4, 8, 8)) for name in "ab" for flipped in (False, True)]
    assert all((one != other).any() for place, one in enumerate(draws) for other in draws[:place])
    assert abs(torch.stack(draws).std().item() - 1) < 0.1


@pytest.mark.parametrize("to_disk", [False, True])
def test_batch_size_does_not_matter(folder, to_disk):
    one = latents_of(cached(folder, batch_size=1, to_disk=to_disk))
    shutil.copytree(folder, folder.parent.parent / "copy" / folder.name, ignore=shutil.ignore_patterns("*.npz"))
    other = latents_of(cached(folder.parent.parent / "copy" / folder.name, batch_size=4, to_disk=to_disk))
    assert_equal(one, other)


def test_torch_s_own_stream_is_left_alone(folder):
    data, encoder = data_of(folder), Encoder()
    before = torch.get_rng_state()
    cache_latents(data, encoder, batch_size=2, shown=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_files_are_as_specified(folder):
    cached(folder, to_disk=True, options={"flip_aug": True, "alpha_mask": True})
    assert sorted(path.name for path in folder.glob("*.npz"))[2] == "2_0130x0065_sd.npz"
    with np.load(folder / "2_0130x0065_sd.npz") as file:
        assert file["latents"].dtype == np.float32 and file["latents"].shape == (4, 8, 8)
        assert file["latents_flipped"].shape == (4, 8, 8)
        assert file["alpha_mask"].dtype == np.float32 and file["alpha_mask"].shape == (64, 64)
        assert file["original_size"].dtype == np.int64 and file["original_size"].tolist() == [130, 65]
        assert file["crop_ltrb"].dtype == np.float64 and file["crop_ltrb"].tolist() == [0, 16, 64, 48]


def test_memory_and_files_give_the_same(folder):
    options = {"flip_aug": True, "alpha_mask": True}
    in_memory = latents_of(cached(folder, options=options))
    assert_equal(latents_of(cached(folder, options=options, to_disk=True)), in_memory)
    reader = Encoder()
    assert_equal(latents_of(cached(folder, reader, options=options, to_disk=True)), in_memory)
    assert reader.images == 0


CHANGES = {
    "nothing": ({}, {}, 0),
    "batch size": ({}, {"batch_size": 5}, 0),
    "another VAE": ({}, {"vae": "other"}, 5),
    "flip": ({"flip_aug": True}, {}, 5),
    "alpha mask": ({"alpha_mask": True}, {}, 5),
    "resolution": ({"resolution": "128"}, {}, 5),
    "filter": ({"resize_interpolation": "bilinear"}, {}, 5),
    "another program trusted": ({}, {"trust_files": True, "vae": "other"}, 0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_files_are_used_only_for_what_they_were_made_from(folder, change):
    options, how, remade = CHANGES[change]
    cached(folder, to_disk=True, vae="one")
    encoder, twin = Encoder(1), Encoder(1)
    data = cached(folder, encoder, options=options, **{"to_disk": True, "vae": "one", **how})
    assert encoder.images == remade * (2 if "flip_aug" in options else 1)
    if remade:
        assert_equal(latents_of(data), latents_of(cached(folder, twin, options=options)))


def test_an_image_that_changed_is_encoded_anew(folder):
    cached(folder, to_disk=True)
    Image.new("RGB", (64, 64), (1, 2, 3)).save(folder / "1.png")
    encoder = Encoder()
    cached(folder, encoder, to_disk=True)
    assert encoder.images == 1


def test_an_alpha_mask_in_a_file_is_not_used_when_switched_off(folder):
    cached(folder, to_disk=True, options={"alpha_mask": True})
    encoder = Encoder()
    data = cached(folder, encoder, to_disk=True)
    assert encoder.images == 5  # with a mask the hidden colours were encoded, without one the background is
    assert_equal(latents_of(data), latents_of(cached(folder)))


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "one byte": flip_a_byte,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-40]),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_bytes(b"hello"),
    "of another program": lambda path: np.savez(path, latents=np.zeros((4, 8, 8), dtype=np.float32)),
    "objects": lambda path: np.savez(path, latents=np.array([{"a": 1}], dtype=object)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_anew(folder, damage):
    good = latents_of(cached(folder, to_disk=True))
    DAMAGES[damage](folder / "0_0064x0064_sd.npz")
    encoder = Encoder()
    assert_equal(latents_of(cached(folder, encoder, to_disk=True)), good)
    assert encoder.images == 1
    assert not list(folder.glob(".*"))


def test_an_existing_file_of_the_plain_name_is_used_and_its_other_content_kept(folder):
    plain = folder / "0.npz"
    np.savez(plain, note=np.array("kept"))
    cached(folder, to_disk=True)
    assert not (folder / "0_0064x0064_sd.npz").exists()
    with np.load(plain) as file:
        assert str(file["note"]) == "kept" and file["latents"].shape == (4, 8, 8)


def test_what_was_encoded_before_an_interruption_is_kept(folder):
    class Interrupted(Encoder):
        def __call__(self, images):
            if self.images >= 2:
                raise KeyboardInterrupt
            return super().__call__(images)

    with pytest.raises(KeyboardInterrupt):
        cached(folder, Interrupted(), batch_size=1, to_disk=True)
    encoder = Encoder()
    cached(folder, encoder, batch_size=1, to_disk=True)
    assert encoder.images == 3


@pytest.mark.parametrize("to_disk", [False, True])
def test_values_that_are_not_finite_never_become_latents(folder, to_disk):
    def broken(images):
        mean, deviation = Encoder()(images)
        return mean * float("inf"), deviation

    with pytest.raises(OptionError, match=r"\.png: the VAE gave .*--no_half_vae"):
        cached(folder, broken, to_disk=to_disk)
    assert not list(folder.glob("*.npz"))


@pytest.mark.parametrize("name", ["color_aug", "random_crop"])
def test_options_that_change_pixels_at_every_draw_are_refused(folder, name):
    with pytest.raises(OptionError, match=f"--cache_latents cannot be used with {name}"):
        cached(folder, options={name: True})


def test_the_bar_is_named_as_front_ends_expect(folder, capsys):
    cache_latents(data_of(folder), Encoder(), batch_size=2)
    assert "caching latents: 100%" in capsys.readouterr().err


def test_the_fingerprint_is_readable(folder):
    cached(folder, to_disk=True, vae="abc fp32")
    with np.load(folder / "0_0064x0064_sd.npz") as file:
        assert json.loads(str(file[latent_cache.FINGERPRINT_KEY]))["vae"] == "abc fp32"


def test_a_process_encodes_its_share_of_all_images_whatever_others_have_written(monkeypatch):
    """The other process is faster: between the two looks at the disk it has written everything that is its own."""
    from library import latent_cache

    class Other(latent_cache.Share):
        def wait(self):
            looks.append("waited")

    looks, encoded = [], []
    answers = iter([[1, 2, 3, 5], []])  # 0 and 4 are the other's, and there already
    monkeypatch.setattr(latent_cache, "_take_from_disk", lambda *words: next(answers))
    monkeypatch.setattr(latent_cache, "_batches_of_one_size", lambda requests, indices, size: encoded.append(indices))
    monkeypatch.setattr(latent_cache, "_loaded_ahead", lambda batches, load: iter(()))

    class Data:
        load_pixels = None

        def cache_requests(self):
            return [None] * 6

    latent_cache.cache_latents(Data(), None, batch_size=1, to_disk=True, shown=False, share=Other(1, 2))
    assert encoded == [[1, 3, 5], []] and looks == ["waited"]
