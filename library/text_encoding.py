"""From captions to the hidden states a U-Net is conditioned on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from library.prompt_weights import parse_weights

WINDOW = 77  # positions of a CLIP text encoder: begin, 75 tokens, end
INNER = WINDOW - 2
END_ID = 49407


def chunk_count(max_token_length: int | None) -> int:
    """Give how many windows a text of ``max_token_length`` tokens takes (None: one)."""
    return 1 if max_token_length is None else max_token_length // INNER


def tokenize(tokenizer: Any, captions: Sequence[str], max_token_length: int | None) -> Tensor:
    """Turn captions into token ids, cut into windows that each begin and end like a text of their own.

    Args:
        tokenizer: CLIP tokenizer with its pad token set. captions: B texts. max_token_length: None, 150 or 225.

    Returns:
        (B, n, 77) int64, n = 1 for None, 2 for 150, 3 for 225.
    """
    windows = chunk_count(max_token_length)
    length = windows * INNER + 2
    encoded = tokenizer(list(captions), padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    return _cut(encoded.input_ids, tokenizer, windows)


def tokenize_with_weights(
    tokenizer: Any, captions: Sequence[str], max_token_length: int | None
) -> tuple[Tensor, Tensor]:
    """Turn captions with attention weights into token ids and the weight of each hidden state.

    Args:
        As for :func:`tokenize`; the syntax is that of :func:`library.prompt_weights.parse_weights`.

    Returns:
        Ids as of :func:`tokenize`, and (B, 75 n + 2) float32, 1.0 for marks and padding.
    """
    windows = chunk_count(max_token_length)
    room = windows * INNER
    ids = torch.full((len(captions), room + 2), tokenizer.pad_token_id)
    weights = torch.ones(len(captions), room + 2)
    for row, caption in enumerate(captions):
        pieces = parse_weights(caption)
        of_pieces = [tokenizer(text, add_special_tokens=False, verbose=False).input_ids for text, _ in pieces]
        inner = [token for piece in of_pieces for token in piece][:room]
        factors = [weight for piece, (_, weight) in zip(of_pieces, pieces) for _ in piece][:room]
        marked = [tokenizer.bos_token_id, *inner, tokenizer.eos_token_id]
        ids[row, : len(marked)] = torch.tensor(marked)
        weights[row, 1 : 1 + len(factors)] = torch.tensor(factors)
    return _cut(ids, tokenizer, windows), weights


def weighted(hidden: Tensor, weights: Tensor) -> Tensor:
    """Multiply hidden states (B, 75 n + 2, width) by the weights (B, 75 n + 2) of their tokens."""
    return hidden * weights.to(hidden).unsqueeze(-1)


def _cut(ids: Tensor, tokenizer: Any, windows: int) -> Tensor:
    """Cut (B, 75 n + 2) token ids into windows (B, n, 77)."""
    if windows == 1:
        return ids.unsqueeze(1)
    begin, end, pad = ids[:, :1], ids[:, -1:], tokenizer.pad_token_id
    chunks = torch.stack(
        [torch.cat([begin, ids[:, 1 + INNER * n : 1 + INNER * (n + 1)], end], dim=1) for n in range(windows)], dim=1
    )
    if pad != tokenizer.eos_token_id:
        eos = tokenizer.eos_token_id
        last_is_text = (chunks[..., -2] != eos) & (chunks[..., -2] != pad)
        chunks[..., -1] = torch.where(last_is_text, eos, chunks[..., -1])
        chunks[..., 1] = torch.where(chunks[..., 1] == pad, eos, chunks[..., 1])
    return chunks


def final_layer_norm(text_encoder: Any) -> torch.nn.Module:
    """Give the norm after the last layer; transformers 5 has one level less than 4."""
    return getattr(text_encoder, "text_model", text_encoder).final_layer_norm


def encode(text_encoder: Any, input_ids: Tensor, clip_skip: int | None = None) -> Tensor:
    """Encode windows of token ids and join them.

    Args:
        text_encoder: CLIPTextModel. input_ids: (B, n, 77) int64 on the encoder's device.
        clip_skip: take the hidden states of the ``clip_skip``-th layer from the end, through the final norm.

    Returns:
        (B, 75 n + 2, width), see :func:`join_windows`.
    """
    flat = input_ids.flatten(0, 1)
    if clip_skip is None:
        hidden = text_encoder(flat).last_hidden_state
    else:
        layers = text_encoder(flat, output_hidden_states=True).hidden_states
        hidden = final_layer_norm(text_encoder)(layers[-clip_skip])
    return join_windows(hidden, len(input_ids))


def encode_penultimate(text_encoder: Any, input_ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """Encode windows of token ids as SDXL does: the layer before the last, without the final norm.

    Args:
        text_encoder: CLIPTextModel, or one with a projection. input_ids: (B, n, 77) int64 on the encoder's device.

    Returns:
        (B, 75 n + 2, width), and the pooled output (B, projection width): the last layer's state at the first end mark
        of the first window, projected. None without a projection.
    """
    output = text_encoder(input_ids.flatten(0, 1), output_hidden_states=True)
    hidden = join_windows(output.hidden_states[-2], len(input_ids))
    if not hasattr(text_encoder, "text_projection"):
        return hidden, None
    first = output.last_hidden_state.unflatten(0, input_ids.shape[:2])[:, 0]
    ends = (input_ids[:, 0] == END_ID).int().argmax(dim=1)
    return hidden, text_encoder.text_projection(first[torch.arange(len(first), device=first.device), ends])


def join_windows(hidden: Tensor, batch: int) -> Tensor:
    """Join the states of ``batch`` texts of n windows each.

    Args:
        hidden: (B n, 77, width).

    Returns:
        (B, 75 n + 2, width): begin state of the first window, inner states of all, end state of the last.
    """
    hidden = hidden.unflatten(0, (batch, -1))
    if hidden.shape[1] == 1:
        return hidden[:, 0]
    return torch.cat([hidden[:, 0, :1], hidden[:, :, 1:-1].flatten(1, 2), hidden[:, -1, -1:]], dim=1)
