"""What the programs for LoRA files share: reading, low-rank arithmetic, the layers of a base model, writing."""

from __future__ import annotations

import json
import logging
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from library import metadata
from library.checkpoint import LoadedModel, find_model, kind_of_model, load_model
from library.errors import OptionError, RunStopped
from library.model_families import FAMILIES
from library.naming import check_writable
from networks.lora import (
    convert_diffusers_to_sai_if_needed,
    low_rank_product,
    read_network_file,
    text_encoder_layers,
    unet_layers,
    write_network_file,
)

log = logging.getLogger(__name__)

DTYPES = {"float": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PARTS = (".lora_up.weight", ".lora_down.weight", ".alpha")


@dataclass(frozen=True)
class LowRank:
    """The update of one layer: ``up`` (out, r) or (out, r, 1, 1), ``down`` (r, in) or (r, in, kh, kw)."""

    up: Tensor
    down: Tensor
    alpha: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the layer's weight as a matrix: outputs, and inputs of the whole window."""
        return self.up.shape[0], self.down[0].numel()

    @property
    def is_large_convolution(self) -> bool:
        return self.down[0, 0].numel() > 1

    def product(self) -> Tensor:
        """Give scale * up * down, float32, in the shape of ``down`` with the outputs in front."""
        return low_rank_product(self.up, self.down) * self.scale


@dataclass
class LoraFile:
    """A LoRA file: its modules by key, and its metadata."""

    path: Path
    modules: dict[str, LowRank]
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Kind of the base model it is for: ``sd1``, ``sd2`` or ``sdxl``."""
        if any(name.startswith(("lora_te1_", "lora_te2_", "lora_unet_input_blocks")) for name in self.modules):
            return "sdxl"
        known = self.metadata.get("ss_base_model_version", "")
        if known.startswith("sdxl"):
            return "sdxl"
        return "sd2" if self.metadata.get("ss_v2") == "True" or known.startswith("sd_v2") else "sd1"


# ------------------------------------------------------------------------------------------------------------ options


def add_precision(parser: ArgumentParser, *names: str) -> None:
    """Add options that name a dtype."""
    for name in names:
        parser.add_argument(f"--{name}", choices=sorted(DTYPES), help="float, fp16 or bf16")


def device_of(name: str | None) -> torch.device:
    """Give the device that ``--device`` names; the CPU without it, and with a warning where there is no such device.

    Raises:
        OptionError: no name of a device.
    """
    try:
        device = torch.device(name or "cpu")
    except RuntimeError as error:
        raise OptionError(f"--device {name}: there is no device of this name. Example: --device cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        log.warning("--device %s: there is none here, the CPU computes", name)
        return torch.device("cpu")
    return device


def check_target(target: str | None, sources: Sequence[str | None]) -> Path:
    """Give the path of ``--save_to``, looked at before any work is done.

    Raises:
        OptionError: missing, not writable, or the name of something that is read.
    """
    if not target:
        raise OptionError("--save_to is missing. Give the file to write, for example --save_to result.safetensors")
    path = Path(target)
    for source in sources:
        if source and path.resolve() == Path(source).resolve():
            raise OptionError(f"--save_to {target}: it would replace what is read. Use another name")
    check_writable(path.parent, "--save_to")
    return path


def written(target: Path, write: Callable[[], None]) -> None:
    """Let ``write`` write ``target``; say in one line when that fails, and when it is done.

    Raises:
        RunStopped: no room, no rights.
    """
    try:
        write()
    except OSError as error:
        raise RunStopped(f"{target} could not be written ({error.strerror or error})") from error
    log.info("saved: %s", target)


# -------------------------------------------------------------------------------------------------------- LoRA files


def read_lora(name: str, option: str) -> LoraFile:
    """Read a LoRA; SDXL block names in Diffusers naming are renamed.

    Raises:
        OptionError: no such file, damaged, or a network of another type.
    """
    tensors = read_network_file(name, option)
    if any(key.startswith(("lora_te1_", "lora_te2_")) for key in tensors) or "sdxl" in str(_read_metadata(name)):
        tensors = convert_diffusers_to_sai_if_needed(tensors)
    foreign = next((key for key in tensors if not key.endswith(PARTS)), None)
    if foreign is not None:
        raise OptionError(f"{option} {name}: {foreign} is not of networks.lora. Give a LoRA with lora_up and lora_down")
    modules = {}
    for key in (key for key in tensors if key.endswith(PARTS[1])):
        module = key.removesuffix(PARTS[1])
        up = tensors.get(module + PARTS[0])
        if up is None or up.shape[1] != tensors[key].shape[0]:
            raise OptionError(f"{option} {name}: {module} lacks a fitting lora_up.weight. Fetch the file again")
        alpha = tensors.get(module + PARTS[2])
        rank = tensors[key].shape[0]
        modules[module] = LowRank(up, tensors[key], float(rank if alpha is None else alpha))
    if not modules:
        raise OptionError(f"{option} {name}: it holds no LoRA (no key ends with lora_down.weight). Give a LoRA file")
    return LoraFile(Path(name), modules, _read_metadata(name))


def _read_metadata(name: str) -> dict[str, str]:
    from safetensors import safe_open

    if not name.endswith(".safetensors"):
        return {}
    with safe_open(name, framework="pt") as stream:
        return stream.metadata() or {}


def write_lora(
    path: Path, modules: Mapping[str, LowRank], dtype: torch.dtype, entries: Mapping[str, str] | None
) -> None:
    """Write modules as a LoRA file.

    Args:
        dtype: of every tensor. entries: metadata; None writes only the hashes.
    """
    tensors: dict[str, Tensor] = {}
    for name, module in modules.items():
        values = (module.up, module.down, torch.tensor(module.alpha))
        tensors |= {name + part: value for part, value in zip(PARTS, values)}
    written(path, lambda: write_network_file(path, tensors, dtype, entries))


def describe(kind: str, modules: Mapping[str, LowRank], title: str, known: Mapping[str, str]) -> dict[str, str]:
    """Give the metadata of a LoRA that was computed.

    Args:
        kind: of the base model. known: entries of the files it was made from, which win over what the kind says.
    """
    family, v2 = FAMILIES[kind], kind == "sd2"
    version = known.get("ss_base_model_version", family.version(v2, False))
    v_prediction = version.endswith("_v")
    linear = [module for module in modules.values() if not module.is_large_convolution]
    large = [module for module in modules.values() if module.is_large_convolution]
    entries = {
        "ss_v2": str(v2),
        "ss_base_model_version": version,
        "ss_network_module": "networks.lora",
        "ss_network_dim": _one_or_dynamic([module.rank for module in linear or large]),
        "ss_network_alpha": _one_or_dynamic([module.alpha for module in linear or large]),
    }
    if large:
        dim, alpha = (_one_or_dynamic([getattr(module, name) for module in large]) for name in ("rank", "alpha"))
        entries["ss_network_args"] = json.dumps({"conv_dim": dim, "conv_alpha": alpha})
    return entries | metadata.file_modelspec(
        family.architecture(v2, v_prediction) + "/lora",
        family.implementation[0],
        family.resolution(v2, v_prediction),
        title,
        v_prediction,
    )


def _one_or_dynamic(values: Sequence[float]) -> str:
    return str(values[0]) if len(set(values)) == 1 else "Dynamic"


# -------------------------------------------------------------------------------------------------------- arithmetic


def concatenated(parts: Sequence[tuple[LowRank, float]]) -> LowRank:
    """Give the module whose product is the sum of the products of ``parts`` times their strengths; ranks add up."""
    ups, downs = [], []
    for module, strength in parts:
        factor = strength * module.scale
        ups.append(module.up.float() * (abs(factor) ** 0.5 * (-1.0 if factor < 0 else 1.0)))
        downs.append(module.down.float() * abs(factor) ** 0.5)
    down = torch.cat(downs, dim=0)
    return LowRank(torch.cat(ups, dim=1), down, float(down.shape[0]))


def singular_factors(module: LowRank, device: torch.device | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Give U (out, k), S (k,), V (k, in * kh * kw) of up * down, float32, without building that product.

    The two factors are orthogonalised first, so the decomposition is one of a rank x rank matrix.
    """
    up, down = (part.flatten(1).to(device, torch.float32) for part in (module.up, module.down))
    left, of_up = torch.linalg.qr(up)
    right, of_down = torch.linalg.qr(down.T)
    u, s, v = torch.linalg.svd(of_up @ of_down.T)
    kept = min(u.shape[1], v.shape[0])
    return left @ u[:, :kept], s, v[:kept] @ right.T


def low_rank_of(u: Tensor, s: Tensor, v: Tensor, rank: int, like: LowRank, scale: float) -> LowRank:
    """Give a module of the first ``rank`` singular values, with the layer of ``like`` and the given scale."""
    up = (u[:, :rank] * s[:rank]).cpu()
    down = v[:rank].reshape(rank, *like.down.shape[1:]).cpu()
    return LowRank(up.reshape(*up.shape, *[1] * (down.dim() - 2)), down, scale * rank)


# -------------------------------------------------------------------------------------------------------- base models


def load_base(name: str, option: str, kind_asked: str, dtype: torch.dtype) -> tuple[LoadedModel, str]:
    """Load a base model of whatever kind it is.

    Args:
        kind_asked: what the options say; it counts for pickles, other files tell it themselves.

    Returns:
        The model on the CPU, and its kind.

    Raises:
        OptionError: no base model.
    """
    path = find_model(name, option)
    kind = kind_of_model(path, option) or kind_asked
    if kind in FAMILIES and kind != kind_asked:
        log.warning("%s %s: it is a model of kind %s, not %s as the options say", option, name, kind, kind_asked)
    return load_model(path, kind if kind in FAMILIES else kind_asked, dtype=dtype, option=option), kind


def layers_of(model: LoadedModel, with_convolutions: bool = True) -> Iterator[tuple[str, Any]]:
    """Give (key, layer) of everything that can have a LoRA; with its convolutions a residual block gets some too."""
    for index, encoder in enumerate(model.text_encoders):
        yield from text_encoder_layers(encoder, index, len(model.text_encoders))
    yield from unet_layers(model.unet, with_convolutions, len(model.text_encoders) > 1)


def merge_into(layer: Any, module: LowRank, strength: float, source: str) -> None:
    """Add a module to a layer's weight, computed in float32 and rounded once; ``source`` names it in messages.

    Raises:
        OptionError: it is for a layer of another size.
    """
    weight = layer.weight
    shape = tuple(weight.flatten(1).shape)
    if module.shape != shape:
        raise OptionError(
            f"{source} is for a layer of shape {module.shape}, the model's has {shape}. Give another LoRA"
        )
    update = module.product().reshape(weight.shape) * strength
    weight.data = (weight.detach().float() + update).to(weight.dtype)
