"""Base models: from a Diffusers folder or one file to modules, and back. No network, no code from pickles."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from library import checkpoint_keys as keys
from library.errors import OptionError
from library.files import write_file
from library.model_configs import text_config, unet_config, vae_config
from library.tokenizers import find_tokenizer

log = logging.getLogger(__name__)

HEADER_LIMIT_BYTES = 100_000_000
POINTER_MARK = b"version https://git-lfs"
BASE_MODEL = "--pretrained_model_name_or_path"


@dataclass
class LoadedModel:
    """The parts of a base model, frozen, on the device they were loaded to.

    Attributes:
        text_encoders, tokenizers: one each for SD. vae, unet: Diffusers modules.
        is_single_file: loaded from one file. source: that file or folder.
    """

    text_encoders: list[Any]
    tokenizers: list[Any]
    vae: Any
    unet: Any
    is_single_file: bool
    source: Path


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


def read_tensors(path: Path, option: str) -> dict[str, Tensor]:
    """Read all tensors of a .safetensors, .ckpt, .pt, .pth or .bin file.

    Raises:
        OptionError: damaged, or a pickle that needs more than tensors and plain containers.
    """
    if path.suffix == ".safetensors":
        safetensors_header(path, option)
        from safetensors.torch import load_file

        return load_file(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling raises many kinds
        reason = str(error).strip().splitlines()[0][:120]
        raise _bad_file(
            path,
            option,
            f"cannot be read without running code from it, or is damaged ({reason}). Use a .safetensors file",
        ) from error
    content = content.get("state_dict", content) if isinstance(content, dict) else {}
    tensors = {key: value for key, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        raise _bad_file(path, option, "holds no tensors. Give a model file")
    return tensors


def kind_of_keys(names: Mapping[str, Any]) -> str:
    """Say what a file holds from its keys: ``sd1``, ``sd2``, ``sdxl``, ``lora`` or ``unknown``."""
    if any(name.startswith("conditioner.embedders.") for name in names):
        return "sdxl"
    if any(name.startswith(keys.SD2_TEXT_PREFIX) for name in names):
        return "sd2"
    if any(name.startswith((keys.UNET_PREFIX, keys.SD1_TEXT_PREFIX)) for name in names):
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


def find_model(name: str) -> Path:
    """Give the file or folder of a base model; a hub id is looked up in the local cache only.

    Raises:
        OptionError: neither a path nor in the cache.
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
        f"{BASE_MODEL} {name}: no such file or folder, and no model of that name in the local hub cache. "
        f"Give a .safetensors file or a Diffusers folder; nothing is downloaded during a run"
    )


def check_model(path: Path, *, v2: bool) -> None:
    """Refuse what cannot be an SD1 or SD2 base model, from names and headers alone.

    Raises:
        OptionError: missing parts, damage, another kind of model, or ``--v2`` not matching it.
    """
    if path.is_dir():
        kind = kind_of_folder(path)
        if kind == "unknown":
            raise _bad_file(
                path, BASE_MODEL, "is no Diffusers folder (unet/ and text_encoder/ with config.json are missing)"
            )
    elif path.suffix == ".safetensors":
        kind = kind_of_keys(safetensors_header(path, BASE_MODEL))
    else:
        with path.open("rb") as stream:
            start = stream.read(2)
        if start not in (b"PK", b"\x80\x02"):
            raise _bad_file(
                path, BASE_MODEL, f"is not a model file (.safetensors or .ckpt), {path.stat().st_size} bytes"
            )
        return  # what a pickle holds is known only after reading it; load_sd_model checks again
    _refuse_other_kinds(path, kind, v2)


def _refuse_other_kinds(path: Path, kind: str, v2: bool) -> None:
    if kind == "lora":
        raise _bad_file(path, BASE_MODEL, "is a LoRA, not a base model. Give it with --network_weights")
    if kind == "sdxl":
        raise _bad_file(path, BASE_MODEL, "is an SDXL model. Use sdxl_train_network.py")
    if kind == "unknown":
        raise _bad_file(path, BASE_MODEL, "holds no Stable Diffusion U-Net. Give a whole SD 1.x or 2.x model")
    if (kind == "sd2") != v2:
        way_out = "Add --v2" if kind == "sd2" else "Leave --v2 out"
        raise _bad_file(path, BASE_MODEL, f"is a model of Stable Diffusion {kind[2]}.x. {way_out}")


# --------------------------------------------------------------------------------------------------------- loading


def load_sd_model(
    path: Path,
    *,
    v2: bool,
    dtype: torch.dtype,
    vae_path: Path | None = None,
    tokenizer_cache: Path | None = None,
) -> LoadedModel:
    """Load SD1 or SD2, whole size or tiny, on the CPU.

    Args:
        path: a file or a Diffusers folder. v2: the model is SD 2.x. dtype: of U-Net, text encoder and VAE.
        vae_path: a VAE to use instead, file or folder. tokenizer_cache: ``--tokenizer_cache_dir``.

    Raises:
        OptionError: the file cannot be read or is another kind of model.
    """
    check_model(path, v2=v2)
    kind = "sd2" if v2 else "sd1"
    model = _load_folder(path, dtype) if path.is_dir() else _load_file(path, v2, dtype)
    model.tokenizers = [find_tokenizer(kind, path if path.is_dir() else None, tokenizer_cache)]
    if vae_path is not None:
        model.vae = load_vae(vae_path, dtype)
    for module in (model.unet, model.vae, *model.text_encoders):
        module.requires_grad_(False).eval()
    return model


def _quiet_transformers() -> None:
    """Keep bars that front-ends would take for ours, and remarks on parts we do not use, out of a run's output."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def _load_folder(folder: Path, dtype: torch.dtype) -> LoadedModel:
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextModel

    _quiet_transformers()

    def load(cls: Any, part: str) -> Any:
        try:
            return cls.from_pretrained(folder / part, torch_dtype=dtype, local_files_only=True)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            reason = str(error).strip().splitlines()[0][:160]
            raise _bad_file(
                folder / part, BASE_MODEL, f"cannot be loaded ({reason}). Fetch the folder again"
            ) from error

    return LoadedModel(
        text_encoders=[load(CLIPTextModel, "text_encoder")],
        tokenizers=[],
        vae=load(AutoencoderKL, "vae"),
        unet=load(UNet2DConditionModel, "unet"),
        is_single_file=False,
        source=folder,
    )


def _load_file(path: Path, v2: bool, dtype: torch.dtype) -> LoadedModel:
    from diffusers import UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    _quiet_transformers()
    tensors = read_tensors(path, BASE_MODEL)
    _refuse_other_kinds(path, kind_of_keys(tensors), v2)
    try:
        unet = {key.removeprefix(keys.UNET_PREFIX): tensors.pop(key) for key in _below(tensors, keys.UNET_PREFIX)}
        unet = _translated(unet, keys.inverted(keys.unet_table_of_file(unet)))
        text = _text_tensors(tensors, v2)
        vae = {key.removeprefix(keys.VAE_PREFIX): tensors.pop(key) for key in _below(tensors, keys.VAE_PREFIX)}
        # the reference keeps 1x1 convolutions for SD2 files; LoRA files of such models have 4-D weights
        unet_module = _assembled(
            lambda: UNet2DConditionModel(**unet_config(_shapes(unet), v2=v2, linear_projection=False)), unet, dtype
        )
        text_module = _assembled(
            lambda: CLIPTextModel(CLIPTextConfig(**text_config(_shapes(text), v2=v2))), text, dtype
        )
        vae_module = _vae_of(vae, dtype)
    except (KeyError, IndexError, StopIteration, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        raise _bad_file(
            path, BASE_MODEL, f"lacks parts of a Stable Diffusion model ({reason}). Fetch it again"
        ) from error
    return LoadedModel([text_module], [], vae_module, unet_module, is_single_file=True, source=path)


def _below(tensors: Mapping[str, Tensor], prefix: str) -> list[str]:
    return [key for key in tensors if key.startswith(prefix)]


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in tensors.items()}


def _translated(tensors: Mapping[str, Tensor], table: Mapping[str, str]) -> dict[str, Tensor]:
    renamed = ((keys.translate(key, table), tensor) for key, tensor in tensors.items())
    return {key: tensor for key, tensor in renamed if key is not None}


def _text_tensors(tensors: dict[str, Tensor], v2: bool) -> dict[str, Tensor]:
    prefix = keys.SD2_TEXT_PREFIX if v2 else keys.SD1_TEXT_PREFIX
    own = {key.removeprefix(prefix): tensors.pop(key) for key in _below(tensors, prefix)}
    if v2:
        layers = {int(key.split(".")[2]) for key in own if key.startswith("transformer.resblocks.")}
        # files of the original hold 24 layers; the last one is never used
        return keys.openclip_to_hf(own, min(len(layers), 23))
    own = {keys.canonical_text_key(key): tensor for key, tensor in own.items()}
    return {key: tensor for key, tensor in own.items() if not key.endswith("position_ids")}


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


def _vae_of(file_tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    from diffusers import AutoencoderKL

    tensors = _translated(file_tensors, keys.inverted(keys.vae_table_of_file(file_tensors)))
    return _assembled(lambda: AutoencoderKL(**vae_config(_shapes(tensors))), tensors, dtype)


def load_vae(path: Path, dtype: torch.dtype) -> Any:
    """Load a VAE from a Diffusers folder, a single-file VAE, or a whole single-file model.

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
        return _assembled(lambda: AutoencoderKL(**vae_config(_shapes(own))), own, dtype)
    if "encoder.down.0.block.0.conv1.weight" not in own:
        raise _bad_file(path, "--vae", "holds no VAE. Give a VAE file or a Diffusers VAE folder")
    return _vae_of(own, dtype)


# ---------------------------------------------------------------------------------------------------------- saving


def single_file_tensors(
    unet: Mapping[str, Tensor], vae: Mapping[str, Tensor], text: Mapping[str, Tensor], *, v2: bool
) -> dict[str, Tensor]:
    """Give the tensors of a single-file checkpoint from the state dicts of the three parts."""
    result = {
        keys.UNET_PREFIX + key: value for key, value in _translated(unet, keys.unet_table_of_diffusers(unet)).items()
    }
    if v2:  # files of SD2 hold these as matrices
        for key in [key for key in result if key.endswith((".proj_in.weight", ".proj_out.weight"))]:
            result[key] = result[key].reshape(result[key].shape[:2])
    vae_names = keys.vae_table_of_diffusers(vae)
    for key, value in vae.items():
        matrix = keys.is_vae_attention_matrix(key)
        result[f"{keys.VAE_PREFIX}{keys.translate(key, vae_names)}"] = value[:, :, None, None] if matrix else value
    text = {keys.canonical_text_key(key): value for key, value in text.items()}
    if v2:
        layers = {key.split(".")[3] for key in text if key.startswith("text_model.encoder.layers.")}
        converted = keys.hf_to_openclip(text, len(layers))
        return result | {keys.SD2_TEXT_PREFIX + key: value for key, value in converted.items()}
    return result | {keys.SD1_TEXT_PREFIX + key: value for key, value in text.items()}


def save_single_file(
    path: Path,
    model: LoadedModel,
    *,
    v2: bool,
    dtype: torch.dtype | None = None,
    metadata: dict[str, str] | None = None,
) -> None:
    """Write an SD1 or SD2 model as one safetensors file.

    Args:
        path: target, replaced in one step. dtype: cast everything to it, None keeps what is in memory.
    """
    from safetensors.torch import save_file

    states = (model.unet.state_dict(), model.vae.state_dict(), model.text_encoders[0].state_dict())
    tensors = single_file_tensors(*states, v2=v2)
    tensors = {key: value.detach().to("cpu", dtype or value.dtype).contiguous() for key, value in tensors.items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    write_file(path, lambda temporary: save_file(tensors, temporary, metadata=metadata or None), size)
