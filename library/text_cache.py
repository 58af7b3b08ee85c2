"""Outputs of frozen text encoders computed once: in memory, or in a file beside each image that says what it is of."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from library.array_files import DAMAGE, load_arrays, save_arrays
from library.processes import Share

log = logging.getLogger(__name__)

FINGERPRINT_KEY = "text_made_from"
SUFFIX = "_te_outputs.npz"

TextOutputs = Sequence[Tensor]


@dataclass(frozen=True)
class TextRequest:
    """The text of one image. ``image``: file that the cache file lies beside. ``caption``: as it is encoded."""

    image: Path
    caption: str

    @property
    def path(self) -> Path:
        return self.image.with_name(f"{self.image.stem}{SUFFIX}")

    def fingerprint(self, encoders: str) -> str:
        """Give one line of JSON that changes when the outputs would."""
        return json.dumps({"caption": self.caption, "encoders": encoders, "version": 1}, sort_keys=True)


class TextCacheable(Protocol):
    """What :func:`cache_text_outputs` needs of a data set."""

    text_outputs: dict[int, TextOutputs | Path]

    def text_requests(self) -> list[TextRequest]: ...


def cache_text_outputs(
    data: TextCacheable,
    encode: Callable[[list[str]], list[Tensor]],
    names: Sequence[str],
    *,
    batch_size: int,
    to_disk: bool = False,
    encoders: str = "",
    trust_files: bool = False,
    shown: bool = True,
    share: Share | None = None,
) -> None:
    """Encode every caption of a data set and store the result in ``data.text_outputs``; equal captions share one.

    Args:
        data: the captions. encode: B captions to the outputs that the U-Net takes, each (B, ...).
        names: keys of the outputs in files. batch_size: captions per call of ``encode``.
        to_disk: keep them in files beside the images, and use those of an earlier run that still fit.
        encoders: stands for weights, precision and text length; files made with another one are made anew.
        trust_files: take files of other programs, which do not say what they were made from.
        shown: False hides the progress bar.
        share: of this process, where several write files for each other; without files everyone encodes everything.
    """
    from tqdm import tqdm

    requests = data.text_requests()

    def wanted() -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            if to_disk and _fits(request, names, encoders, trust_files):
                data.text_outputs[index] = request.path
            else:
                found.setdefault(request.caption, []).append(index)
        return found

    def encode_and_store(groups: Sequence[tuple[str, list[int]]], bar: Any) -> None:
        for start in range(0, len(groups), batch_size):
            some = groups[start : start + batch_size]
            outputs = [_storable(output) for output in encode([caption for caption, _ in some])]
            for place, (_, indices) in enumerate(some):
                one = [output[place] for output in outputs]
                for index in indices:
                    data.text_outputs[index] = _write(requests[index], one, names, encoders) if to_disk else one
                bar.update(len(indices))

    missing = list(wanted().items())
    found = len(requests) - sum(len(indices) for _, indices in missing)
    with tqdm(total=len(requests), initial=found, desc="caching text outputs", disable=not shown) as bar:
        if to_disk and share is not None:
            own = set(share.of(sorted({request.caption for request in requests})))
            encode_and_store([(caption, indices) for caption, indices in missing if caption in own], bar)
            share.wait()
            missing = list(wanted().items())
        encode_and_store(missing, bar)


def load_text_outputs(cached: TextOutputs | Path, names: Sequence[str]) -> TextOutputs:
    """Give cached outputs, read from their file when they are kept there."""
    if not isinstance(cached, Path):
        return cached
    content = load_arrays(cached)
    return [torch.from_numpy(content[name]) for name in names]


def _storable(output: Tensor) -> Tensor:
    output = output.detach().cpu()
    return output.float() if output.dtype == torch.bfloat16 else output  # NumPy has no bfloat16


def _fits(request: TextRequest, names: Sequence[str], encoders: str, trust_files: bool) -> bool:
    if not request.path.is_file():
        return False
    try:
        content = load_arrays(request.path)
    except DAMAGE as error:
        log.debug("%s is made anew: damaged (%s)", request.path, error)
        return False
    if any(name not in content for name in names):
        return False
    return trust_files or str(content.get(FINGERPRINT_KEY, "")) == request.fingerprint(encoders)


def _write(request: TextRequest, outputs: TextOutputs, names: Sequence[str], encoders: str) -> Path:
    arrays = {name: output.numpy() for name, output in zip(names, outputs)}
    save_arrays(request.path, {**arrays, FINGERPRINT_KEY: np.array(request.fingerprint(encoders))})
    return request.path
