"""Network modules of other packages, such as lycoris.kohya: they find layers and name keys by what the reference's own
models are called, so they are shown ours under those names."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from library.checkpoint_keys import canonical_text_key, translate
from library.errors import OptionError
from library.files import TEMPORARY_MARK, write_file
from networks.lora_names import (
    PREFIX_TEXT_ENCODER,
    PREFIX_UNET,
    SDXL_UNET_TABLE,
    block_label,
    text_encoder_key,
    unet_key,
)

log = logging.getLogger(__name__)

OWN = "networks.lora"
# presets say CrossAttention; lycoris names the layers of SD1's time embedding one by one, the class means other models
CLASS_NAMES = {"Attention": "CrossAttention", "TimestepEmbedding": "TimeEmbedding"}


class Renamed:
    """A model whose modules have other paths; everything else is the model's own.

    Args:
        model: a text encoder or U-Net. path_of: gives the new path for a module's own.
    """

    def __init__(self, model: Any, path_of: Callable[[str], str]):
        self._model, self._path_of = model, path_of

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        for path, module in self._model.named_modules():
            yield self._path_of(path), module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@contextmanager
def shown_to(module: str, text_encoder: Any, unet: Any) -> Iterator[tuple[Any, Any]]:
    """Give text encoder (or list of them) and U-Net as a network module expects them while it builds a network.

    Args:
        module: ``--network_module``; its mistakes inside the block become one line.
    """
    if module == OWN:
        yield text_encoder, unet
        return
    is_sdxl = isinstance(text_encoder, list)
    encoders = [Renamed(each, canonical_text_key) for each in (text_encoder if is_sdxl else [text_encoder])]
    renamed = Renamed(unet, lambda path: translate(path, SDXL_UNET_TABLE) or path) if is_sdxl else unet
    swapped = [(each, type(each)) for each in unet.modules() if type(each).__name__ in CLASS_NAMES]
    try:
        for each, own in swapped:
            each.__class__ = type(CLASS_NAMES[own.__name__], (own,), {})
        yield encoders if is_sdxl else encoders[0], renamed
    except (KeyError, ValueError, TypeError, AssertionError, AttributeError, OSError) as error:
        raise OptionError(
            f"--network_module {module} could not make its network ({type(error).__name__}: {error}). Check "
            f"--network_args, --network_dim and --network_alpha"
        ) from error
    finally:
        for each, own in swapped:
            each.__class__ = own


def use_reference_keys(network: Any, text_encoder: Any, unet: Any) -> None:
    """Name the modules of a network of another package, not yet attached, as files of the reference do."""
    encoders = text_encoder if isinstance(text_encoder, list) else [text_encoder]
    keys = {id(layer): unet_key(path, len(encoders) > 1) for path, layer in unet.named_modules()}
    for index, encoder in enumerate(encoders):
        keys |= {id(layer): text_encoder_key(path, index, len(encoders)) for path, layer in encoder.named_modules()}
    for module in [*getattr(network, "text_encoder_loras", ()), *getattr(network, "unet_loras", ())]:
        for original in list(getattr(module, "org_module", ()))[:1]:
            module.lora_name = keys.get(id(original), module.lora_name)


def parameter_tags(network: Any) -> Iterator[tuple[Any, str, str, str]]:
    """Give (parameter, name, role, block label) as the network says, or from the names of its parameters."""
    if hasattr(network, "parameter_tags"):
        yield from network.parameter_tags()
        return
    named = list(network.named_parameters())
    is_sdxl = any(name.startswith((f"{PREFIX_TEXT_ENCODER}2_", f"{PREFIX_UNET}_input_blocks_")) for name, _ in named)
    for name, param in named:
        yield param, name, "", block_label(name.split(".")[0], is_sdxl) if name.startswith("lora_") else ""


def load_weights(network: Any, file: str) -> None:
    """Load ``--network_weights`` and say what did not fit, where the network tells it."""
    said = network.load_weights(file)
    for what, names in said.items() if isinstance(said, dict) else ():
        log.warning("--network_weights %s: %d %s, the first is %s", file, len(names), what, next(iter(names), "none"))


def save_weights(network: Any, path: Path, dtype: Any, metadata: dict[str, str]) -> None:
    """Let a network write its file, which appears under its name when it is complete."""
    if getattr(network, "writes_whole_files", False):
        network.save_weights(path, dtype, metadata)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}{TEMPORARY_MARK}", dir=path.parent) as folder:
        inside = Path(folder) / path.name
        network.save_weights(str(inside), dtype, metadata)
        write_file(path, lambda temporary: os.replace(inside, temporary), inside.stat().st_size)
