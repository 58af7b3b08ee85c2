"""Attention weights in texts against a second implementation, in captions, caches and previews."""

from __future__ import annotations

import copy
import itertools
import math
import random

import pytest
import torch
from safetensors.torch import load_file

from library.errors import OptionError
from library.model_families import SD, SDXL
from library.prompt_weights import parse_weights
from library.text_encoding import encode, tokenize, tokenize_with_weights
from library.tokenizers import find_tokenizer
from tests.test_sampling import draw
from tests.training import make_tiles, train

ROUND, SQUARE = 1.1, 1 / 1.1
VECTORS = {
    "a cat": [("a cat", 1.0)],
    "": [("", 1.0)],
    "(x)": [("x", ROUND)],
    "a (b:1.3) c": [("a ", 1.0), ("b", 1.3), (" c", 1.0)],
    "[x]": [("x", SQUARE)],
    "((x))": [("x", ROUND * ROUND)],
    "(a (b:2) c:0.5)": [("a ", 0.5), ("b", 1.0), (" c", 0.5)],
    r"\(x\) \[y\] \\": [(r"(x) [y] " + "\\", 1.0)],
    "a (b": [("a ", 1.0), ("b", ROUND)],
    "a [b": [("a ", 1.0), ("b", SQUARE)],
    "a: b": [("a: b", 1.0)],
    "a) b]": [("a) b]", 1.0)],
    "(x:y)": [("x:y", ROUND)],
    "x:1.3)": [("x:1.3)", 1.0)],
    "(x:-1)": [("x", -1.0)],
    "()": [("", 1.0)],
}


@pytest.mark.parametrize("text", VECTORS)
def test_the_syntax_by_example(text):
    found = parse_weights(text)
    assert [piece for piece, _ in found] == [piece for piece, _ in VECTORS[text]]
    assert [weight for _, weight in found] == pytest.approx([weight for _, weight in VECTORS[text]])


def weight_of_every_character(text: str) -> list[tuple[str, float]]:
    """Read properly nested text by descent: characters with the product of the factors around them."""
    place = 0

    def group(closing: str) -> tuple[list[tuple[str, float]], float]:
        nonlocal place
        inside: list[tuple[str, float]] = []
        while place < len(text):
            char = text[place]
            place += 1
            if char == closing:
                return inside, ROUND if closing == ")" else SQUARE
            if char == "\\":
                inside.append((text[place], 1.0))
                place += 1
            elif char in "([":
                below, factor = group(")" if char == "(" else "]")
                inside += [(c, w * factor) for c, w in below]
            elif char == ":" and closing == ")" and (end := text.find(")", place)) > 0 and is_number(text[place:end]):
                factor, place = float(text[place:end]), end + 1
                return inside, factor
            else:
                inside.append((char, 1.0))
        return inside, ROUND if closing == ")" else SQUARE if closing == "]" else 1.0

    return group("")[0]


def is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def nested_text(rng: random.Random, depth: int = 0) -> str:
    words = ["a cat", "dog, ", ":", " ", r"\(", r"\]", r"\\", "x: y", "1.5"]
    parts = []
    for _ in range(rng.randint(1, 4)):
        kind = rng.random() if depth < 4 else 0.0
        if kind < 0.5:
            parts.append(rng.choice(words))
        elif kind < 0.7:
            parts.append(f"[{nested_text(rng, depth + 1)}]")
        elif kind < 0.85:
            parts.append(f"({nested_text(rng, depth + 1)}w)")
        else:
            parts.append(f"({nested_text(rng, depth + 1)}w:{rng.choice(['1.3', '.5', '2', '-1', ' 0.7'])})")
    return "".join(parts) + (rng.choice(["", "", "(open", "[open"]) if depth == 0 else "")


def test_generated_texts_read_as_the_second_implementation_reads_them():
    rng = random.Random(4)
    for _ in range(2000):
        text = nested_text(rng)
        found = [(char, weight) for piece, weight in parse_weights(text) for char in piece]
        expected = weight_of_every_character(text)
        assert [char for char, _ in found] == [char for char, _ in expected], text
        assert [w for _, w in found] == pytest.approx([w for _, w in expected]), text


def test_any_text_is_read_without_a_fault():
    rng = random.Random(5)
    for _ in range(3000):
        text = "".join(rng.choice("ab()[]:\\ 1.5-") for _ in range(rng.randint(0, 20)))
        pieces = parse_weights(text)
        assert pieces and all(math.isfinite(weight) for _, weight in pieces)
        assert all(one.weight != other.weight for one, other in itertools.pairwise(pieces))


# ---------------------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("kind", ["sd1", "sd2"])
@pytest.mark.parametrize("max_token_length", [None, 150, 225])
def test_text_without_weights_has_the_tokens_of_a_plain_caption(kind, max_token_length):
    tokenizer = find_tokenizer(kind)
    captions = ["a cat", "", "one two three, " * 30, "word " * 74, "word " * 75, "word " * 300]
    ids, weights = tokenize_with_weights(tokenizer, captions, max_token_length)
    assert torch.equal(ids, tokenize(tokenizer, captions, max_token_length))
    assert weights.shape == (len(captions), 75 * ids.shape[1] + 2) and (weights == 1).all()


@pytest.mark.parametrize("kind", ["sd1", "sd2"])
@pytest.mark.parametrize("max_token_length,windows", [(None, 1), (150, 2), (225, 3)])
def test_every_token_carries_the_weight_of_its_piece(kind, max_token_length, windows):
    tokenizer = find_tokenizer(kind)
    words = [f"({word}:{1 + 0.5 * (place % 4)})" for place, word in enumerate(["red", "cat", "sat", "down"] * 60)]
    for count in (3, 74, 75, 76, 149, 151, 240):
        ids, weights = tokenize_with_weights(tokenizer, ["".join(words[:count])], max_token_length)
        kept = min(count, 75 * windows)
        expected = [1.0, *(1 + 0.5 * (place % 4) for place in range(kept))]
        assert weights[0].tolist() == expected + [1.0] * (75 * windows + 2 - len(expected))
        inner = ids[0, :, 1:76].flatten()[:kept].tolist()
        plain = [tokenizer(word).input_ids[1] for word in ["red", "cat", "sat", "down"]]
        assert inner == [plain[place % 4] for place in range(kept)]


# -------------------------------------------------------------------------------------------------- hidden states


@pytest.fixture(scope="module")
def models(tiny_sd1_folder, tiny_sd2_folder, tiny_sdxl_folder):
    from library.checkpoint import load_model

    folders = {"sd1": tiny_sd1_folder, "sd2": tiny_sd2_folder, "sdxl": tiny_sdxl_folder}
    return {kind: load_model(folder, kind, dtype=torch.float32) for kind, folder in folders.items()}


@pytest.mark.parametrize("max_token_length", [None, 150, 225])
@pytest.mark.parametrize("kind", ["sd1", "sd2", "sdxl"])
def test_states_are_those_of_the_text_times_the_weights_and_pooled_states_are_not(kind, max_token_length, models):
    model, family = models[kind], SDXL if kind == "sdxl" else SD
    text, bare = "(red:2) [cat] " + "sat " * 90, ["red", "cat", *["sat"] * 90]
    ids, weights = family.tokenize_with_weights(model.tokenizers, [text], max_token_length)
    with torch.no_grad():
        found = family.encode_weighted(model.text_encoders, ids, weights, None)
        plain = family.encode_text(
            model.text_encoders, family.tokenize(model.tokenizers, [" ".join(bare)], max_token_length), None
        )
    factors = torch.ones(plain[0].shape[1])
    factors[1], factors[2] = 2.0, 1 / 1.1
    for one, other in zip(found[:2], plain[:2]):
        torch.testing.assert_close(one, other * factors[:, None])
    if kind == "sdxl":
        torch.testing.assert_close(found[2], plain[2])


def test_gradients_pass_through_the_weights(models):
    encoders = [copy.deepcopy(encoder).requires_grad_(True) for encoder in models["sd1"].text_encoders]
    ids, weights = SD.tokenize_with_weights(models["sd1"].tokenizers, ["(cat:3)"], None)
    one = SD.encode_weighted(encoders, ids, weights, None)[0][0, 1]
    other = encode(encoders[0], ids[0])[0, 1]
    grads = [torch.autograd.grad(value[0], list(encoders[0].parameters())) for value in (one, other)]
    for weighted, plain in zip(*grads):
        torch.testing.assert_close(weighted, 3 * plain)


def test_weights_in_sample_prompts_count(models, tmp_path):
    from library.sampling import SamplePrompt

    pictures = []
    for name, text in (("plain", "a red cat"), ("weighted", "a (red:1.9) cat"), ("escaped", r"a red cat")):
        prompt = SamplePrompt(text, "(bad:1.0)", width=64, height=64, sample_steps=2, seed=1)
        pictures += draw(models["sd1"], SD, [prompt], tmp_path / name)
    assert pictures[0] != pictures[1] and pictures[0] == pictures[2]


# ------------------------------------------------------------------------------------------------------------ runs


@pytest.fixture
def options(tiny_sd1_folder, tmp_path):
    data = make_tiles(tmp_path / "data", count=2, repeats=1)
    for path in (data / "1_sks cat").glob("*.txt"):
        path.write_text("a (cat:1.5), number [one]", encoding="utf-8")
    return {"pretrained_model_name_or_path": tiny_sd1_folder, "train_data_dir": data, "max_train_steps": 2}


def test_weights_in_captions_count_when_asked_for(options, tmp_path):
    results = []
    for name, more in (("on", {"weighted_captions": True}), ("again", {"weighted_captions": True}), ("off", {})):
        train(**options, **more, max_token_length=150, output_dir=tmp_path / name)
        results.append(load_file(tmp_path / name / "t.safetensors"))
    same = [[torch.equal(results[0][key], other[key]) for key in other] for other in results[1:]]
    assert all(same[0]) and not all(same[1])


def test_cached_text_outputs_are_weighted_and_made_anew_when_that_changes(options, tiny_sdxl_folder, tmp_path):
    import numpy

    options = {**options, "pretrained_model_name_or_path": tiny_sdxl_folder, "network_train_unet_only": True}
    results = {}
    for name, more in (
        ("off", {"cache_text_encoder_outputs_to_disk": True}),
        ("on", {"weighted_captions": True, "cache_text_encoder_outputs_to_disk": True}),
        ("uncached", {"weighted_captions": True}),
    ):
        train("sdxl_train_network", **options, **more, output_dir=tmp_path / name)
        file = next((tmp_path / "data").rglob("*_te_outputs.npz"))
        results[name] = load_file(tmp_path / name / "t.safetensors"), dict(numpy.load(file))
    off, on = results["off"][1], results["on"][1]
    assert not numpy.array_equal(off["hidden_state1"], on["hidden_state1"])
    for key, value in results["on"][0].items():
        torch.testing.assert_close(value, results["uncached"][0][key], atol=1e-5, rtol=1e-3)


def test_sdxl_train_refuses_weights_with_cached_outputs(options, tiny_sdxl_folder, tmp_path):
    options = {**options, "pretrained_model_name_or_path": tiny_sdxl_folder, "output_dir": tmp_path / "out"}
    with pytest.raises(OptionError, match="weighted_captions"):
        train("sdxl_train", **options, weighted_captions=True, cache_text_encoder_outputs=True)
