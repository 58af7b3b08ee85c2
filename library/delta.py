"""A trained model kept as what changed: which values of the base model have other bits, and what they are now.

A delta is a safetensors file. Its metadata holds the format, the hash of the base model and a table of all tensors of
the full checkpoint; its tensors are ``KEY|values`` with ``KEY|indices`` (flat, int32 or int64) or ``KEY|mask`` (bits,
lowest first), whichever is smaller, or ``KEY|whole``.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from library.checkpoint import kind_of_model, load_model, safetensors_header, single_file_of
from library.errors import OptionError
from library.files import write_file
from library.metadata import model_hashes

log = logging.getLogger(__name__)

SUFFIX = ".delta.safetensors"
FORMAT, VERSION = "weights that changed", "1"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Base:
    """The tensors of a base model under the keys of a single file, read when they are asked for.

    Args:
        path: a .safetensors file, which stays on the disk; or a .ckpt file or Diffusers folder, which is read at once.
        option: named in messages. kind: of the model, needed for a .ckpt file.

    Attributes:
        hash: SHA-256 of the file, or of the hashes of a folder's weight files.
    """

    def __init__(self, path: Path, option: str, kind: str | None = None):
        self.hash = _hash_of(path)
        self._file: Any = None
        self._tensors: Mapping[str, Tensor] = {}
        if path.suffix == ".safetensors":
            from safetensors import safe_open

            safetensors_header(path, option)
            self._file = safe_open(path, framework="pt")
            self._keys = set(self._file.keys())
            return
        kind = kind_of_model(path, option) or kind
        if kind not in ("sd1", "sd2", "sdxl"):
            raise OptionError(f"{option} {path}: say what kind of model it is. Example: --kind sd1")
        self._tensors = single_file_of(load_model(path, kind, dtype=torch.float32, option=option), kind)
        self._keys = set(self._tensors)

    def get(self, key: str, count: int) -> Tensor | None:
        """Give the tensor of a key as it is stored, None where there is none with ``count`` values."""
        if key not in self._keys:
            return None
        tensor = self._file.get_tensor(key) if self._file else self._tensors[key]
        return tensor if tensor.numel() == count else None


def _hash_of(path: Path) -> str:
    if path.is_file():
        return model_hashes(path)[1]
    files = sorted(file for file in path.glob("*/*") if file.suffix in (".safetensors", ".bin"))
    text = "".join(f"{file.relative_to(path).as_posix()} {model_hashes(file)[1]}\n" for file in files)
    return hashlib.sha256(text.encode()).hexdigest()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(BITS[tensor.element_size()])


def save_delta(
    path: Path, tensors: Mapping[str, Tensor], base: Base, dtype: torch.dtype | None, metadata: Mapping[str, str]
) -> None:
    """Write what makes ``base`` the checkpoint of ``tensors``.

    Args:
        path: target, replaced in one step. tensors: of the full checkpoint by its keys, in the dtypes of memory.
        dtype: of the full checkpoint, None keeps those of memory. metadata: of the full checkpoint.
    """
    from safetensors.torch import save_file

    table: dict[str, dict[str, Any]] = {}
    parts: dict[str, Tensor] = {}
    changed = total = size = 0
    for key, tensor in tensors.items():
        now = tensor.detach().to("cpu", dtype or tensor.dtype).contiguous()
        table[key] = {"dtype": NAMES[now.dtype], "shape": list(now.shape), "memory": NAMES[tensor.dtype]}
        before = base.get(key, now.numel())
        own = _changes(now, None if before is None else _as_saved(before, tensor.dtype, now.dtype))
        parts |= {f"{key}|{name}": value for name, value in own.items()}
        changed += next((value.numel() for name, value in own.items() if name in ("values", "whole")), 0)
        total, size = total + now.numel(), size + now.nbytes
    content = {
        **metadata,
        "delta.format": FORMAT,
        "delta.version": VERSION,
        "delta.base_hash": base.hash,
        "delta.tensors": json.dumps(table, separators=(",", ":")),
    }
    of_delta = sum(part.nbytes for part in parts.values())
    write_file(path, lambda temporary: save_file(parts, temporary, metadata=content), of_delta)
    log.info(
        "%d of %d values changed, %.1f MiB; the full model has %.1f MiB", changed, total, of_delta / 2**20, size / 2**20
    )


def _as_saved(before: Tensor, memory: torch.dtype, saved: torch.dtype) -> Tensor:
    """Give a base tensor as a run that changes nothing would save it."""
    return before.to(memory).to(saved).contiguous()


def _changes(now: Tensor, before: Tensor | None) -> dict[str, Tensor]:
    if before is None:
        return {"whole": now}
    differs = _bits(now) != _bits(before)
    indices = differs.nonzero().reshape(-1)
    if not len(indices):
        return {}
    if now.numel() <= torch.iinfo(torch.int32).max:
        indices = indices.to(torch.int32)
    mask_bytes = -(-now.numel() // 8)
    values = now.reshape(-1)[differs]
    if min(indices.nbytes, mask_bytes) + values.nbytes >= now.nbytes:
        return {"whole": now}
    if indices.nbytes <= mask_bytes:
        return {"indices": indices, "values": values}
    return {"mask": torch.from_numpy(numpy.packbits(differs.numpy(), bitorder="little")), "values": values}


# ------------------------------------------------------------------------------------------------------------ applying


def apply_delta(base_path: Path, delta_path: Path, output: Path, kind: str | None = None) -> None:
    """Write the full checkpoint that a delta stands for, one tensor after the other.

    Args:
        output: a .safetensors file, replaced in one step. kind: of the base model, needed for a .ckpt file.

    Raises:
        OptionError: a damaged delta, one of another format, or a base model that it was not made from.
    """
    from safetensors import safe_open

    header = safetensors_header(delta_path, "DELTA")
    with safe_open(delta_path, framework="pt") as stream:
        content = dict(stream.metadata() or {})
        if content.pop("delta.format", None) != FORMAT:
            raise OptionError(f"DELTA {delta_path}: it is not a file of --save_delta. Give one")
        version = content.pop("delta.version")
        if version != VERSION:
            raise OptionError(f"DELTA {delta_path}: it has format version {version}, this program reads {VERSION}")
        base = Base(base_path, "BASE", kind)
        made_from = content.pop("delta.base_hash")
        if base.hash != made_from:
            raise OptionError(
                f"BASE {base_path}: the delta was made from another model (SHA-256 {made_from[:12]}..., this one "
                f"{base.hash[:12]}...). Give the base model of the run"
            )
        table = json.loads(content.pop("delta.tensors"))

        def tensors() -> Iterator[Tensor]:
            for key, entry in table.items():
                own = {name: stream.get_tensor(f"{key}|{name}") for name in _PARTS if f"{key}|{name}" in header}
                yield _restored(base, key, entry, own, delta_path)

        _write_streamed(output, table, content, tensors())


_PARTS = ("whole", "indices", "mask", "values")


def _restored(base: Base, key: str, entry: dict[str, Any], own: dict[str, Tensor], delta_path: Path) -> Tensor:
    if "whole" in own:
        return own["whole"]
    saved = DTYPES[entry["dtype"]]
    count = int(numpy.prod(entry["shape"], dtype=numpy.int64))
    before = base.get(key, count)
    if before is None:
        raise OptionError(f"DELTA {delta_path}: {key} is in neither file. Save the delta again")
    result = _as_saved(before, DTYPES[entry["memory"]], saved).reshape(entry["shape"])
    if "values" not in own:
        return result
    result = result.clone()
    if "mask" in own:
        bits = numpy.unpackbits(own["mask"].numpy(), bitorder="little", count=count)
        places: Tensor = torch.from_numpy(bits).bool()
    else:
        places = own["indices"].long()
        if int(places.min()) < 0 or int(places.max()) >= count:
            raise OptionError(f"DELTA {delta_path}: {key} has places outside of it, the file is damaged")
    result.view(-1)[places] = own["values"]
    return result


def _write_streamed(
    output: Path, table: Mapping[str, Any], metadata: dict[str, str], tensors: Iterator[Tensor]
) -> None:
    """Write a safetensors file whose tensors exist one at a time; ``tensors`` come in the order of ``table``."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for key, entry in table.items():
        count = int(numpy.prod(entry["shape"], dtype=numpy.int64))
        start, end = end, end + count * DTYPES[entry["dtype"]].itemsize
        header[key] = {"dtype": entry["dtype"], "shape": entry["shape"], "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def write(temporary: Path) -> None:
        with temporary.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors:
                stream.write(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))

    write_file(output, write, 8 + len(text) + end)
