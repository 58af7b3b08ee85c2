"""Images as they come from users' disks, and resizing beside OpenCV."""

from __future__ import annotations

import io
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from library import images
from library.errors import OptionError

SIZE = (24, 16)


@pytest.fixture(scope="module")
def tile() -> Image.Image:
    """A picture without any symmetry, smooth enough for lossy formats."""
    x, y = np.meshgrid(np.linspace(0, 1, SIZE[0]), np.linspace(0, 1, SIZE[1]))
    return Image.fromarray((np.stack([x, y, x * y], axis=2) * 255).astype(np.uint8))


def saved(path: Path, image: Image.Image, **options) -> Path:
    image.save(path, **options)
    return path


def close(array, reference, bound=2) -> bool:
    return np.abs(array.astype(int) - np.asarray(reference, dtype=int)).max() <= bound


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_gives_the_same_upright_picture(tmp_path, tile, orientation):
    undo = {1: None, 2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}[orientation]  # transposition that stores it so
    stored = tile if undo is None else tile.transpose(Image.Transpose(undo))
    exif = Image.Exif()
    exif[images.EXIF_ORIENTATION] = orientation
    path = saved(tmp_path / "a.png", stored, exif=exif)
    assert images.read_size(path) == SIZE
    assert close(images.load_image(path), tile, 0)


TO_MODE = {
    "L": lambda image: image.convert("L"),
    "1": lambda image: image.convert("1"),
    "LA": lambda image: image.convert("LA"),
    "P": lambda image: image.convert("RGB").quantize(32),
    "RGB": lambda image: image,
    "RGBA": lambda image: image.convert("RGBA"),
    "CMYK": lambda image: image.convert("CMYK"),
    "I;16": lambda image: Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257),
}


@pytest.mark.parametrize("mode", TO_MODE)
@pytest.mark.parametrize("alpha", [False, True])
def test_every_mode_becomes_rgb(tmp_path, tile, mode, alpha):
    image = TO_MODE[mode](tile)
    path = saved(tmp_path / "a.png", image, **({"format": "TIFF"} if mode == "CMYK" else {}))
    reference = (TO_MODE["L"](tile) if mode == "I;16" else image).convert("RGB")
    array = images.load_image(path, alpha)
    assert array.dtype == np.uint8 and array.shape == (SIZE[1], SIZE[0], 4 if alpha else 3)
    assert close(array[..., :3], reference)
    if alpha:
        assert (array[..., 3] == 255).all()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_areas_show_the_background_and_keep_their_mask(tmp_path, mode):
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    image.paste((200, 200, 200, 255), (0, 0, 4, 8))
    options = {}
    if mode == "P":
        image = Image.fromarray(np.repeat([[1] * 4 + [0] * 4], 8, axis=0).astype(np.uint8), "P")
        image.putpalette([0, 0, 0, 200, 200, 200])
        options = {"transparency": 0}
    path = saved(tmp_path / "a.png", image.convert(mode) if mode != "P" else image, **options)
    array = images.load_image(path)
    assert (array[:, :4] == 200).all() and (array[:, 4:] == images.BACKGROUND).all()
    mask = images.alpha_of(images.load_image(path, alpha=True))
    assert (mask[:, :4] == 1).all() and (mask[:, 4:] == 0).all()


@pytest.mark.parametrize("format_name", ["PNG", "JPEG", "WEBP", "BMP", "GIF"])
@pytest.mark.parametrize("suffix", [".png", ".jpg"])
def test_the_content_decides_not_the_name(tmp_path, tile, format_name, suffix):
    path = saved(
        tmp_path / f"a{suffix}", tile, format=format_name, **({"quality": 95} if format_name == "JPEG" else {})
    )
    assert images.read_size(path) == SIZE
    images.check_images([path])
    assert images.load_image(path).shape == (*SIZE[::-1], 3)


def test_an_animation_gives_its_first_frame(tmp_path, tile):
    path = saved(tmp_path / "a.webp", tile, save_all=True, append_images=[ImageOps.invert(tile)], lossless=True)
    assert close(images.load_image(path), tile)


def broken_files(folder: Path, tile: Image.Image) -> list[Path]:
    large = tile.resize((200, 200))
    jpeg, png = io.BytesIO(), io.BytesIO()
    large.save(jpeg, "JPEG")
    large.save(png, "PNG")
    contents = {
        "half.jpg": jpeg.getvalue()[: len(jpeg.getvalue()) // 2],
        "half.png": png.getvalue()[: len(png.getvalue()) // 2],
        "empty.png": b"",
        "page.png": b"<html><body>not found</body></html>",
        "pointer.png": b"version https://example.invalid/spec/v1\noid sha256:0\nsize 1\n",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in contents]


def test_all_broken_files_are_named_in_one_line(tmp_path, tile):
    good = [saved(tmp_path / f"{number}.png", tile) for number in range(5)]
    broken = broken_files(tmp_path, tile)
    images.check_images(good)
    for check in (images.check_images, images.read_sizes):
        with pytest.raises(OptionError, match=r"^5 broken images, replace or remove them") as caught:
            check([*good, *broken])
        assert all(path.name in str(caught.value) for path in broken)
        assert "\n" not in str(caught.value)
        assert not any(path.name in str(caught.value) for path in good)


def test_a_single_broken_file_is_named(tmp_path, tile):
    path = broken_files(tmp_path, tile)[0]
    with pytest.raises(OptionError, match=r"broken image: .*half.jpg: .*truncated.*Replace or remove"):
        images.check_images([path])
    with pytest.raises(OptionError, match=r"half\.jpg"):
        images.load_image(path)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's remarks about damaged metadata
def test_mutated_files_are_read_or_refused_never_worse(tmp_path, tile):
    chance = random.Random(4)
    originals = []
    for format_name in ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"):
        content = io.BytesIO()
        tile.save(content, format_name)
        originals.append(content.getvalue())
    path = tmp_path / "a.png"
    for _ in range(600):
        content = bytearray(chance.choice(originals))
        for _ in range(chance.randint(1, 6)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        path.write_bytes(content[: chance.randint(1, len(content))] if chance.random() < 0.3 else content)
        try:
            assert images.load_image(path).shape[2] == 3
        except OptionError as error:
            assert "\n" not in str(error) and "a.png" in str(error)


def test_a_picture_of_too_many_pixels_is_refused_by_its_header(tmp_path, tile, monkeypatch):
    path = saved(tmp_path / "a.png", tile)
    monkeypatch.setattr(images, "MAX_PIXELS", SIZE[0] * SIZE[1] - 1)
    with pytest.raises(OptionError, match=r"24x16 is more than"):
        images.read_size(path)


# ------------------------------------------------------------------------------------------------------ resizing

OPENCV = {"bilinear": "INTER_LINEAR", "linear": "INTER_LINEAR", "bicubic": "INTER_CUBIC", "cubic": "INTER_CUBIC",
          "area": "INTER_AREA"}  # fmt: skip


@pytest.mark.parametrize("name", OPENCV)
@pytest.mark.parametrize(
    ("old", "new"), [((90, 61), (40, 33)), ((40, 30), (64, 50)), ((30, 30), (30, 17)), ((9, 90), (20, 20))]
)
def test_resizing_equals_opencv(name, old, new):
    cv2 = pytest.importorskip("cv2")
    image = np.random.default_rng(1).integers(0, 256, (old[1], old[0], 4), dtype=np.uint8)
    if name == "area" and (new[0] > old[0]) != (new[1] > old[1]):
        pytest.skip("OpenCV has no area average when one side grows and the other shrinks")
    assert close(images.resize(image, new, name), cv2.resize(image, new, interpolation=getattr(cv2, OPENCV[name])), 1)


@pytest.mark.parametrize("name", images.RESIZERS)
def test_every_filter_gives_the_size_asked_and_keeps_a_plain_colour(name):
    image = np.full((30, 50, 3), (10, 100, 250), dtype=np.uint8)
    for size in ((20, 12), (77, 64), (50, 31)):
        resized = images.resize(image, size, name)
        assert resized.shape == (size[1], size[0], 3) and resized.dtype == np.uint8
        assert (resized == image[0, 0]).all()


@pytest.mark.parametrize(
    ("size", "chosen"), [((20, 20), "area"), ((40, 20), "area"), ((41, 20), "lanczos"), ((80, 80), "lanczos")]
)
def test_the_filter_without_a_name_depends_on_growth(size, chosen):
    image = np.random.default_rng(2).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    assert (images.resize(image, size, None) == images.resize(image, size, chosen)).all()


@pytest.mark.parametrize("name", images.RESIZERS)
@pytest.mark.parametrize("size", [(20, 12), (77, 64)])
def test_a_fourth_channel_does_not_touch_the_colours(name, size):
    image = np.random.default_rng(3).integers(0, 256, (30, 50, 4), dtype=np.uint8)
    assert (images.resize(image, size, name)[..., :3] == images.resize(image[..., :3].copy(), size, name)).all()


def test_nearest_takes_pixels_as_they_are():
    image = np.arange(12, dtype=np.uint8).reshape(3, 4, 1)
    assert images.resize(image, (2, 3), "nearest")[:, :, 0].tolist() == [[1, 3], [5, 7], [9, 11]]
    assert images.resize(image, (8, 3), "nearest")[0, :, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_crops_are_centred_or_drawn():
    image = np.arange(100, dtype=np.uint8).reshape(10, 10, 1)
    assert images.crop(image, (4, 5), None)[0, 0, 0] == 23
    corners = {int(images.crop(image, (9, 9), random.Random(draw))[0, 0, 0]) for draw in range(60)}
    assert corners == {0, 1, 10, 11}


def test_colours_change_in_a_third_of_the_draws_and_a_little(tile):
    array = np.dstack([np.asarray(tile), np.full(SIZE[::-1], 77, dtype=np.uint8)])
    changed = [images.change_colors(array, random.Random(draw)) for draw in range(300)]
    share = sum((result != array).any() for result in changed) / len(changed)
    assert 0.25 < share < 0.42
    assert all((result[..., 3] == 77).all() for result in changed)
    assert max(np.abs(result.astype(int) - array).max() for result in changed) < 120
    assert (images.change_colors(array, random.Random(3)) == changed[3]).all()


def test_tensors_lie_between_minus_one_and_one():
    tensor = images.to_tensor(np.array([[[0, 255, 127, 9]]], dtype=np.uint8))
    torch.testing.assert_close(tensor[:, 0, 0], torch.tensor([-1.0, 1.0, 127 / 127.5 - 1]))


def test_a_face_is_read_from_the_end_of_a_name():
    assert images.face_of_name(Path("a_b_10_20_30_40.png")) == (10, 20, 30, 40)
    assert images.face_of_name(Path("a_b_10_20_30.png")) is None


@pytest.mark.parametrize("wander", [False, True])
def test_a_face_crop_has_its_size_and_stays_near_the_face(wander):
    image = np.zeros((300, 400, 3), dtype=np.uint8)
    image[140:160, 290:310] = 255  # the face's centre
    for draw in range(30):
        cut = images.crop_around_face(
            image, (300, 150, 80, 80), (64, 64), (1.0, 2.0), wander, None, random.Random(draw)
        )
        assert cut.shape == (64, 64, 3)
        if not wander:
            assert cut[24:40, 24:40].mean() > 40


@pytest.mark.parametrize("format_name", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_size_from_the_header_is_that_of_the_pixels(tmp_path, tile, format_name, orientation):
    exif = Image.Exif()
    exif[images.EXIF_ORIENTATION] = orientation
    path = saved(tmp_path / "a.jpg", tile, format=format_name, exif=exif)
    assert images.load_image(path).shape[1::-1] == images.read_size(path)


def test_reading_a_size_decodes_no_pixels(tmp_path, tile):
    path = saved(tmp_path / "a.png", tile.resize((600, 600)))
    path.write_bytes(path.read_bytes()[:2000])
    assert images.read_size(path) == (600, 600)


def test_metadata_that_cannot_be_read_leaves_the_picture_good(tmp_path, tile):
    path = saved(tmp_path / "a.jpg", tile, exif=b"Exif\0\0garbage that is no list of tags")
    assert images.read_size(path) == SIZE
    images.check_images([path])
    assert images.load_image(path).shape == (*SIZE[::-1], 3)
