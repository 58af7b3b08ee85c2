"""Tokens and hidden states against a plain second implementation."""

from __future__ import annotations

import pytest
import torch

from library.text_encoding import encode, tokenize
from library.tokenizers import find_tokenizer

LONG = "a photo of a cat, " * 30
CAPTIONS = ["a cat", LONG, "", "one two three " * 26]


@pytest.fixture(scope="module", params=["sd1", "sd2"])
def tokenizer(request):
    return find_tokenizer(request.param)


def plain_windows(tokenizer, caption: str, windows: int) -> list[list[int]]:
    """Cut by hand: begin, 75 ids, end, for each window."""
    bos, eos, pad = 49406, 49407, tokenizer.pad_token_id
    ids = tokenizer(caption, truncation=False).input_ids[1:-1][: 75 * windows]
    whole = [bos, *ids, eos] + [pad] * (75 * windows - len(ids))
    if windows == 1:
        return [whole]
    result = []
    for n in range(windows):
        window = [bos, *whole[1 + 75 * n : 76 + 75 * n], whole[-1]]
        if pad != eos:
            if window[75] not in (eos, pad):
                window[76] = eos
            if window[1] == pad:
                window[1] = eos
        result.append(window)
    return result


@pytest.mark.parametrize("max_length,windows", [(None, 1), (150, 2), (225, 3)])
def test_windows_equal_the_plain_cut(tokenizer, max_length, windows):
    ids = tokenize(tokenizer, CAPTIONS, max_length)
    assert ids.shape == (len(CAPTIONS), windows, 77) and ids.dtype is torch.int64
    for row, caption in zip(ids.tolist(), CAPTIONS):
        assert row == plain_windows(tokenizer, caption, windows)


@pytest.fixture(scope="module")
def encoder(tiny_sd1_folder):
    from transformers import CLIPTextModel

    return CLIPTextModel.from_pretrained(tiny_sd1_folder / "text_encoder").eval()


@pytest.mark.parametrize("windows,length", [(1, 77), (2, 152), (3, 227)])
def test_states_of_windows_are_joined(encoder, windows, length):
    ids = torch.randint(0, 49408, (2, windows, 77))
    joined = encode(encoder, ids)
    assert joined.shape == (2, length, 64)
    each = [encoder(ids[:, n]).last_hidden_state for n in range(windows)]
    if windows == 1:
        expected = each[0]
    else:
        expected = torch.cat([each[0][:, :1], *(part[:, 1:-1] for part in each), each[-1][:, -1:]], dim=1)
    torch.testing.assert_close(joined, expected)


def test_clip_skip_takes_an_earlier_layer_through_the_final_norm(encoder):
    ids = torch.randint(0, 49408, (1, 1, 77))
    torch.testing.assert_close(encode(encoder, ids, clip_skip=1), encode(encoder, ids))
    states = encoder(ids[:, 0], output_hidden_states=True).hidden_states
    norm = next(module for name, module in encoder.named_modules() if name.endswith("final_layer_norm"))
    torch.testing.assert_close(encode(encoder, ids, clip_skip=2), norm(states[-2]))


def test_gradients_reach_a_trained_encoder(encoder):
    encode(encoder, torch.randint(0, 49408, (1, 2, 77)), clip_skip=2).sum().backward()
    assert any(param.grad is not None and param.grad.abs().sum() > 0 for param in encoder.parameters())
