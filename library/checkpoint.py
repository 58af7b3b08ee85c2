"""Base models: from a Diffusers folder or one file to modules, and back. No network, no code from pickles."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from library import checkpoint_keys as keys
from library.errors import OptionError
from library.files import new_folder, write_file
from library.model_configs import LATENT_SCALES, text_config, unet_config, vae_config
from library.tokenizers import find_tokenizer

log = logging.getLogger(__name__)

HEADER_LIMIT_BYTES = 100_000_000
POINTER_MARK = b"version https://git-lfs"
BASE_MODEL = "--pretrained_model_name_or_path"


@dataclass
class LoadedModel:
    """The parts of a base model, frozen, on the device they were loaded to.

    Attributes:
        text_encoders, tokenizers: one each for SD, two for SDXL. vae, unet: Diffusers modules.
        is_single_file: loaded from one file. source: that file or folder.
        carried: tensors of the file that belong to no part and are written again. counts: epoch and step that a .ckpt
            file says it was trained for.
    """

    text_encoders: list[Any]
    tokenizers: list[Any]
    vae: Any
    unet: Any
    is_single_file: bool
    source: Path
    carried: dict[str, Tensor] = field(default_factory=dict)
    counts: tuple[int, int] = (0, 0)


# ------------------------------------------------------------------------------------------------- looking at files


def _bad_file(path: Path, option: str, reason: str) -> OptionError:
    return OptionError(f"{option} {path}: {reason}")


def safetensors_header(path: Path, option: str) -> dict[str, Any]:
    """Read the header of a safetensors file and check it against the file's size.

    Returns:
        ``{key: {"dtype", "shape", "data_offsets"}}`` without the metadata entry.

    Raises:
        OptionError: not a safetensors file, cut short, or a text pointer that a large-file store left behind.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = stream.read(len(POINTER_MARK))
        if start == POINTER_MARK:
            raise _bad_file(path, option, f"is a pointer of a large-file store ({size} bytes). Fetch the real file")
        if len(start) < 8:
            raise _bad_file(path, option, f"holds {size} bytes, the download is incomplete. Fetch it again")
        length = struct.unpack("<Q", start[:8])[0]
        if length > min(size, HEADER_LIMIT_BYTES):
            reason = f"has no readable header ({size} bytes): incomplete, or not a safetensors file. Fetch it again"
            raise _bad_file(path, option, reason)
        stream.seek(8)
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise _bad_file(path, option, "has a damaged header. Fetch it again") from error
    if 8 + length + end != size:
        reason = (
            f"is {size} bytes where its header promises {8 + length + end}, the download is incomplete. Fetch it again"
        )
        raise _bad_file(path, option, reason)
    return header


def read_tensors(path: Path, option: str, mapped: bool = True) -> dict[str, Tensor]:
    """Read all tensors of a .safetensors, .ckpt, .pt, .pth or .bin file.

    Args:
        mapped: leave a safetensors file on the disk until its tensors are used; False reads it at once.

    Raises:
        OptionError: damaged, or a pickle that needs more than tensors and plain containers.
    """
    if path.suffix == ".safetensors":
        safetensors_header(path, option)
        from safetensors.torch import load, load_file

        return load_file(path) if mapped else load(path.read_bytes())
    content = _unpickled(path, option)
    content = content.get("state_dict", content) if isinstance(content, dict) else {}
    tensors = {key: value for key, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        raise _bad_file(path, option, "holds no tensors. Give a model file")
    return tensors


def _unpickled(path: Path, option: str) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling raises many kinds
        reason = str(error).strip().splitlines()[0][:120]
        raise _bad_file(
            path,
            option,
            f"cannot be read without running code from it, or is damaged ({reason}). Use a .safetensors file",
        ) from error


def kind_of_keys(names: Mapping[str, Any]) -> str:
    """Say what a file holds from its keys: ``sd1``, ``sd2``, ``sdxl``, ``lora`` or ``unknown``."""
    if any(name.startswith("conditioner.embedders.") for name in names):
        return "sdxl"
    if any(name.startswith(keys.TEXT_LAYOUTS["sd2"][0].prefix) for name in names):
        return "sd2"
    if any(name.startswith((keys.UNET_PREFIX, keys.TEXT_LAYOUTS["sd1"][0].prefix)) for name in names):
        return "sd1"
    if any(".lora_down." in name or ".lora_A." in name or name.startswith("lora_") for name in names):
        return "lora"
    return "unknown"


def kind_of_folder(folder: Path) -> str:
    """Say what a Diffusers folder holds: ``sd1``, ``sd2``, ``sdxl`` or ``unknown``."""
    if (folder / "text_encoder_2").is_dir():
        return "sdxl"
    config = folder / "text_encoder" / "config.json"
    if not config.is_file() or not (folder / "unet" / "config.json").is_file():
        return "unknown"
    return "sd2" if json.loads(config.read_text(encoding="utf-8")).get("hidden_act") == "gelu" else "sd1"


def find_model(name: str, option: str = BASE_MODEL) -> Path:
    """Give the file or folder of a base model; a hub id is looked up in the local cache only.

    Raises:
        OptionError: neither a path nor in the cache; ``option`` is named in it, here and below.
    """
    path = Path(name)
    if path.exists():
        return path
    if name.count("/") == 1 and not name.startswith((".", "/")):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            return Path(snapshot_download(name, local_files_only=True))
        except (LocalEntryNotFoundError, ValueError, OSError):
            pass  # said below
    raise OptionError(
        f"{option} {name}: no such file or folder, and no model of that name in the local hub cache. "
        f"Give a .safetensors file or a Diffusers folder; nothing is downloaded during a run"
    )


def kind_of_model(path: Path, option: str = BASE_MODEL) -> str | None:
    """Say what a file or folder holds from names and headers alone; None for a pickle, which has to be read.

    Returns:
        As :func:`kind_of_keys`.

    Raises:
        OptionError: damaged, or no kind of model file at all.
    """
    if path.is_dir():
        found = kind_of_folder(path)
        if found == "unknown":
            raise _bad_file(
                path, option, "is no Diffusers folder (unet/ and text_encoder/ with config.json are missing)"
            )
        return found
    if path.suffix == ".safetensors":
        return kind_of_keys(safetensors_header(path, option))
    with path.open("rb") as stream:
        start = stream.read(2)
    if start not in (b"PK", b"\x80\x02"):
        reason = f"is not a model file (.safetensors or .ckpt), {path.stat().st_size} bytes"
        raise _bad_file(path, option, reason)
    return None


def check_model(path: Path, kind: str, option: str = BASE_MODEL) -> None:
    """Refuse what cannot be a base model of this kind, from names and headers alone.

    Raises:
        OptionError: missing parts, damage, or another kind of model.
    """
    found = kind_of_model(path, option)
    if found is not None:  # what a pickle holds, load_model looks at
        _refuse_other_kinds(path, found, kind, option)


SCRIPTS = {"sdxl": "sdxl_train_network.py or sdxl_train.py", "sd1": "train_network.py", "sd2": "train_network.py --v2"}


def _refuse_other_kinds(path: Path, found: str, wanted: str, option: str) -> None:
    if found == wanted:
        return
    if found == "lora":
        way_out = "Give it with --network_weights" if option == BASE_MODEL else "Give a whole model"
        raise _bad_file(path, option, f"is a LoRA, not a base model. {way_out}")
    if found == "unknown":
        raise _bad_file(path, option, "holds no Stable Diffusion U-Net. Give a whole model")
    if "sdxl" in (found, wanted):
        name = "an SDXL model" if found == "sdxl" else f"a model of Stable Diffusion {found[2]}.x"
        raise _bad_file(path, option, f"is {name}. Use {SCRIPTS[found]}")
    way_out = "Add --v2" if found == "sd2" else "Leave --v2 out"
    raise _bad_file(path, option, f"is a model of Stable Diffusion {found[2]}.x. {way_out}")


# --------------------------------------------------------------------------------------------------------- loading


def load_model(
    path: Path,
    kind: str,
    *,
    dtype: torch.dtype,
    vae_path: Path | None = None,
    tokenizer_cache: Path | None = None,
    mapped: bool = True,
    option: str = BASE_MODEL,
) -> LoadedModel:
    """Load a base model, whole size or tiny, on the CPU.

    Args:
        path: a file or a Diffusers folder. kind: ``sd1``, ``sd2`` or ``sdxl``.
        dtype: of U-Net, text encoders and VAE. vae_path: a VAE to use instead, file or folder.
        tokenizer_cache: ``--tokenizer_cache_dir``. mapped: as in :func:`read_tensors`.
        option: named in messages.

    Raises:
        OptionError: the file cannot be read or is another kind of model.
    """
    check_model(path, kind, option)
    is_folder = path.is_dir()
    model = _load_folder(path, kind, dtype, option) if is_folder else _load_file(path, kind, dtype, mapped, option)
    for layout in keys.TEXT_LAYOUTS[kind]:
        model.tokenizers.append(find_tokenizer(layout.tokenizer, path if is_folder else None, tokenizer_cache))
    if vae_path is not None:
        model.vae = load_vae(vae_path, dtype, kind)
    for module in (model.unet, model.vae, *model.text_encoders):
        module.requires_grad_(False).eval()
    return model


def _quiet_transformers() -> None:
    """Keep bars that front-ends would take for ours, and remarks on parts we do not use, out of a run's output."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def _encoder_class(layout: keys.TextLayout) -> Any:
    from transformers import CLIPTextModel, CLIPTextModelWithProjection

    return CLIPTextModelWithProjection if layout.projection else CLIPTextModel


def _load_folder(folder: Path, kind: str, dtype: torch.dtype, option: str) -> LoadedModel:
    from diffusers import AutoencoderKL, UNet2DConditionModel

    _quiet_transformers()

    def load(cls: Any, part: str) -> Any:
        try:
            return cls.from_pretrained(folder / part, torch_dtype=dtype, local_files_only=True)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            reason = str(error).strip().splitlines()[0][:160]
            raise _bad_file(folder / part, option, f"cannot be loaded ({reason}). Fetch the folder again") from error

    return LoadedModel(
        text_encoders=[load(_encoder_class(layout), layout.folder) for layout in keys.TEXT_LAYOUTS[kind]],
        tokenizers=[],
        vae=load(AutoencoderKL, "vae"),
        unet=load(UNet2DConditionModel, "unet"),
        is_single_file=False,
        source=folder,
    )


def _load_file(path: Path, kind: str, dtype: torch.dtype, mapped: bool, option: str) -> LoadedModel:
    from diffusers import UNet2DConditionModel

    _quiet_transformers()
    tensors = read_tensors(path, option, mapped)
    _refuse_other_kinds(path, kind_of_keys(tensors), kind, option)
    carried = {keys.LOGIT_SCALE: tensors[keys.LOGIT_SCALE]} if keys.LOGIT_SCALE in tensors else {}
    try:
        unet = _taken(tensors, keys.UNET_PREFIX)
        unet = _translated(unet, keys.inverted(keys.unet_table_of_file(unet)))
        # the reference keeps 1x1 convolutions for SD2 files; LoRA files of such models have 4-D weights
        config = unet_config(_shapes(unet), kind, linear_projection=kind == "sdxl")
        unet_module = _assembled(lambda: UNet2DConditionModel(**config), unet, dtype)
        encoders = [_text_encoder_of(tensors, layout, dtype) for layout in keys.TEXT_LAYOUTS[kind]]
        vae_module = _vae_of(_taken(tensors, keys.VAE_PREFIX), dtype, kind)
    except (KeyError, IndexError, StopIteration, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        raise _bad_file(path, option, f"lacks parts of a Stable Diffusion model ({reason}). Fetch it again") from error
    counts = (0, 0) if path.suffix == ".safetensors" else _trained_counts(path, option)
    return LoadedModel(encoders, [], vae_module, unet_module, True, path, carried, counts)


def _trained_counts(path: Path, option: str) -> tuple[int, int]:
    content = _unpickled(path, option)
    return int(content.get("epoch", 0)), int(content.get("global_step", 0))


def _taken(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Take the tensors below ``prefix`` out, their prefix removed."""
    return {key.removeprefix(prefix): tensors.pop(key) for key in _below(tensors, prefix)}


def _below(tensors: Mapping[str, Tensor], prefix: str) -> list[str]:
    return [key for key in tensors if key.startswith(prefix)]


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in tensors.items()}


def _translated(tensors: Mapping[str, Tensor], table: Mapping[str, str]) -> dict[str, Tensor]:
    renamed = ((keys.translate(key, table), tensor) for key, tensor in tensors.items())
    return {key: tensor for key, tensor in renamed if key is not None}


def _text_encoder_of(tensors: dict[str, Tensor], layout: keys.TextLayout, dtype: torch.dtype) -> Any:
    from transformers import CLIPTextConfig

    own = _taken(tensors, layout.prefix)
    if layout.openclip:
        layers = len({key.split(".")[2] for key in own if key.startswith("transformer.resblocks.")})
        own = keys.openclip_to_hf(own, min(layers, layout.layers or layers))
    else:
        own = {keys.canonical_text_key(key): tensor for key, tensor in own.items()}
    config = CLIPTextConfig(**text_config(_shapes(own), openclip=layout.openclip))
    return _assembled(lambda: _encoder_class(layout)(config), own, dtype)


def _assembled(build: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    """Build a module without weights and give it ``tensors``, which take the module's shapes."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        module = build()
    own = module.state_dict()
    ready: dict[str, Tensor] = {}
    for key, expected in own.items():
        source = key if key in tensors else keys.canonical_text_key(key)
        ready[key] = tensors[source].to(dtype).reshape(expected.shape)
    module.load_state_dict(ready, assign=True)
    return module


def _vae_of(file_tensors: Mapping[str, Tensor], dtype: torch.dtype, kind: str) -> Any:
    tensors = _translated(file_tensors, keys.inverted(keys.vae_table_of_file(file_tensors)))
    return _vae_with(tensors, dtype, kind)


def _vae_with(tensors: Mapping[str, Tensor], dtype: torch.dtype, kind: str) -> Any:
    from diffusers import AutoencoderKL

    return _assembled(lambda: AutoencoderKL(**vae_config(_shapes(tensors), LATENT_SCALES[kind])), tensors, dtype)


def load_vae(path: Path, dtype: torch.dtype, kind: str = "sd1") -> Any:
    """Load a VAE from a Diffusers folder, a single-file VAE, or a whole single-file model.

    Args:
        kind: of the model it is for; its scale factor is put into the config when the VAE comes from a file.

    Raises:
        OptionError: nothing there, or not a VAE.
    """
    from diffusers import AutoencoderKL

    if not path.exists():
        raise OptionError(f"--vae {path}: no such file or folder. Give a VAE file or a Diffusers VAE folder")
    if path.is_dir():
        folder = path / "vae" if (path / "vae").is_dir() else path
        try:
            return AutoencoderKL.from_pretrained(folder, torch_dtype=dtype, local_files_only=True)
        except (OSError, ValueError) as error:
            raise _bad_file(path, "--vae", "is no Diffusers VAE folder (config.json is missing)") from error
    tensors = read_tensors(path, "--vae")
    own = {key.removeprefix(keys.VAE_PREFIX): tensors[key] for key in _below(tensors, keys.VAE_PREFIX)} or tensors
    if "encoder.down_blocks.0.resnets.0.conv1.weight" in own:  # a weights file out of a Diffusers folder
        return _vae_with(own, dtype, kind)
    if "encoder.down.0.block.0.conv1.weight" not in own:
        raise _bad_file(path, "--vae", "holds no VAE. Give a VAE file or a Diffusers VAE folder")
    return _vae_of(own, dtype, kind)


# ---------------------------------------------------------------------------------------------------------- saving


def single_file_tensors(
    kind: str, unet: Mapping[str, Tensor], vae: Mapping[str, Tensor], texts: Sequence[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Give the tensors of a single-file checkpoint from the state dicts of the parts, text encoders in order."""
    result = {
        keys.UNET_PREFIX + key: value for key, value in _translated(unet, keys.unet_table_of_diffusers(unet)).items()
    }
    if kind == "sd2":  # files of SD2 hold these as matrices
        for key in [key for key in result if key.endswith((".proj_in.weight", ".proj_out.weight"))]:
            result[key] = result[key].reshape(result[key].shape[:2])
    vae_names = keys.vae_table_of_diffusers(vae)
    for key, value in vae.items():
        matrix = keys.is_vae_attention_matrix(key)
        result[f"{keys.VAE_PREFIX}{keys.translate(key, vae_names)}"] = value[:, :, None, None] if matrix else value
    for layout, own in zip(keys.TEXT_LAYOUTS[kind], texts):
        text = {keys.canonical_text_key(key): value for key, value in own.items()}
        if layout.openclip:
            layers = {key.split(".")[3] for key in text if key.startswith("text_model.encoder.layers.")}
            text = keys.hf_to_openclip(text, len(layers))
        result |= {layout.prefix + key: value for key, value in text.items()}
    return result


def single_file_of(model: LoadedModel, kind: str) -> dict[str, Tensor]:
    """Give the tensors of a model under the keys of a single file, in their dtypes of memory."""
    texts = [encoder.state_dict() for encoder in model.text_encoders]
    return single_file_tensors(kind, model.unet.state_dict(), model.vae.state_dict(), texts) | model.carried


def save_single_file(
    path: Path,
    model: LoadedModel,
    kind: str,
    *,
    dtype: torch.dtype | None = None,
    metadata: dict[str, str] | None = None,
    counts: tuple[int, int] = (0, 0),
) -> None:
    """Write a model as one file: .safetensors with ``metadata``, or .ckpt with the numbers of epochs and steps.

    Args:
        path: target, replaced in one step. kind: ``sd1``, ``sd2`` or ``sdxl``.
        dtype: cast everything to it, None keeps what is in memory. counts: epochs and steps of this training.
    """
    from safetensors.torch import save_file

    tensors = single_file_of(model, kind)
    tensors = {key: value.detach().to("cpu", dtype or value.dtype).contiguous() for key, value in tensors.items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    if path.suffix == ".safetensors":
        write_file(path, lambda temporary: save_file(tensors, temporary, metadata=metadata or None), size)
        return
    epoch, step = (before + now for before, now in zip(model.counts, counts))
    content = {"state_dict": tensors, "epoch": epoch, "global_step": step}
    write_file(path, lambda temporary: torch.save(content, temporary), size)


def save_folder(folder: Path, pipeline: Any, *, dtype: torch.dtype | None = None, safetensors: bool = True) -> None:
    """Write a Diffusers pipeline as a folder, which appears only when it is complete.

    Args:
        folder: target; an older one of this name is replaced. dtype: as in :func:`save_single_file`.
        safetensors: kind of the weight files, else .bin.
    """
    parts = {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}
    copies = {name: _copy_for_writing(part, dtype) for name, part in parts.items()}
    pipeline = type(pipeline)(**{**pipeline.components, **copies}, **_needless_parts(pipeline))
    size = sum(value.nbytes for part in copies.values() for value in part.state_dict().values())
    with new_folder(folder, size) as inside:
        pipeline.save_pretrained(inside, safe_serialization=safetensors)


def _needless_parts(pipeline: Any) -> dict[str, bool]:
    return {"requires_safety_checker": False} if hasattr(pipeline.config, "requires_safety_checker") else {}


def _copy_for_writing(module: Any, dtype: torch.dtype | None) -> Any:
    build = getattr(type(module), "from_config", type(module))
    tensors = {key: value.detach().cpu() for key, value in module.state_dict().items()}
    return _assembled(lambda: build(module.config), tensors, dtype or module.dtype)
