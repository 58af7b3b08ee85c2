"""Merge LoRAs into a base model, or into one LoRA; see docs/lora_tools.md."""

from __future__ import annotations

import argparse
import functools
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))  # library and networks lie there, wherever this runs

from library.checkpoint import save_folder, save_single_file
from library.errors import OptionError, run_script
from library.log import prepare_output, setup_logging
from library.metadata import file_modelspec
from library.model_families import FAMILIES, pipeline_for_saving
from networks.lora_tools import (
    DTYPES,
    LoraFile,
    LowRank,
    add_precision,
    check_target,
    concatenated,
    describe,
    layers_of,
    load_base,
    merge_into,
    read_lora,
    write_lora,
    written,
)

log = logging.getLogger(__name__)

Strengths = Sequence[tuple[LoraFile, float]]


def setup_parser(is_sdxl: bool = False) -> argparse.ArgumentParser:
    """Give the parser; ``is_sdxl`` is that of sdxl_merge_lora.py."""
    parser = argparse.ArgumentParser(description=__doc__)
    if not is_sdxl:
        parser.add_argument("--v2", action="store_true", help="the base model is Stable Diffusion 2.x")
    parser.add_argument("--sd_model", type=str, help="base model to merge into; without it the LoRAs become one LoRA")
    parser.add_argument("--models", type=str, nargs="*", help="LoRA files")
    parser.add_argument("--ratios", type=float, nargs="*", help="strength of each LoRA")
    parser.add_argument("--save_to", type=str, help="file to write; a base model without a suffix is a folder")
    add_precision(parser, "precision", "save_precision")
    parser.add_argument("--no_metadata", action="store_true", help="write no metadata")
    parser.add_argument("--concat", action="store_true", help="what a merge into one LoRA does in any case")
    parser.add_argument("--shuffle", action="store_true", help="accepted; the order of ranks changes nothing")
    return parser


def read_models(models: Sequence[str] | None, ratios: Sequence[float] | None) -> Strengths:
    """Give LoRAs and their strengths from ``--models`` and ``--ratios``.

    Raises:
        OptionError: none, another number of strengths, or a file that is no LoRA.
    """
    if not models:
        raise OptionError("--models is missing. Give at least one LoRA file")
    ratios = ratios or []
    if len(ratios) != len(models):
        raise OptionError(f"--ratios: {len(ratios)} for {len(models)} --models. Give one number for each LoRA")
    return [(read_lora(name, "--models"), ratio) for name, ratio in zip(models, ratios)]


def merge_into_model(
    name: str, kind_asked: str, loras: Strengths, target: Path, precision: torch.dtype, save_dtype: torch.dtype
) -> None:
    """Write the base model ``name`` with LoRAs merged into it; ``target`` without suffix is a folder.

    Args:
        precision: dtype of the model while merging; sums are made in float32 and rounded to it once for each LoRA.
    """
    model, kind = load_base(name, "--sd_model", kind_asked, precision)
    layers = dict(layers_of(model))
    for lora, strength in loras:
        known = [key for key in lora.modules if key in layers]
        if not known:
            raise OptionError(
                f"--models {lora.path}: none of its {len(lora.modules)} modules is in {name} (the first is "
                f"{next(iter(lora.modules))}). Give a LoRA of this kind of model"
            )
        if len(known) < len(lora.modules):
            log.warning("%s: %d modules are not in the model", lora.path, len(lora.modules) - len(known))
        for key in known:
            merge_into(layers[key], lora.modules[key], strength, f"--models {lora.path}: {key}")
        log.info("merged %d modules of %s with strength %g", len(known), lora.path, strength)
    family, v2 = FAMILIES[kind], kind == "sd2"
    if not target.suffix:
        written(target, functools.partial(save_folder, target, pipeline_for_saving(family, model), dtype=save_dtype))
        return
    v_prediction = any(lora.metadata.get("ss_base_model_version", "").endswith("_v") for lora, _ in loras)
    entries = file_modelspec(
        family.architecture(v2, v_prediction),
        family.implementation[1],
        family.resolution(v2, v_prediction),
        target.stem,
        v_prediction,
    )
    entries["modelspec.merged_from"] = _names([Path(name), *(lora.path for lora, _ in loras)])
    written(target, functools.partial(save_single_file, target, model, kind, dtype=save_dtype, metadata=entries))


def merged_modules(loras: Strengths) -> dict[str, LowRank]:
    """Give the modules whose products are the sums of those of ``loras`` times their strengths.

    Raises:
        OptionError: they are for different kinds of models.
    """
    parts: dict[str, list[tuple[LowRank, float]]] = {}
    for lora, strength in loras:
        if (lora.kind == "sdxl") != (loras[0][0].kind == "sdxl"):
            raise OptionError(f"--models {lora.path}: one of the LoRAs is for SDXL, one is not. Give LoRAs of one kind")
        for name, module in lora.modules.items():
            others = parts.setdefault(name, [])
            if others and others[0][0].shape != module.shape:
                raise OptionError(
                    f"--models {lora.path}: {name} is for a layer of shape {module.shape}, in another file of "
                    f"{others[0][0].shape}. Give LoRAs of one kind"
                )
            others.append((module, strength))
    return {name: concatenated(own) for name, own in parts.items()}


def merged_metadata(loras: Strengths, modules: dict[str, LowRank], target: Path) -> dict[str, str]:
    """Give the metadata of a LoRA merged from others; what they know of their base model comes from the first."""
    known = next((lora.metadata for lora, _ in loras if "ss_base_model_version" in lora.metadata), {})
    entries = describe(loras[0][0].kind, modules, target.stem, known)
    return entries | {"modelspec.merged_from": _names([lora.path for lora, _ in loras])}


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(path.stem for path in paths)


def main(words: Sequence[str] | None = None, is_sdxl: bool = False) -> None:
    """Run the program with the given words, None for the process's command line."""
    args = setup_parser(is_sdxl).parse_args(words)
    target = check_target(args.save_to, [args.sd_model, *(args.models or ())])
    loras = read_models(args.models, args.ratios)
    precision = DTYPES[args.precision or "float"]
    save_dtype = DTYPES[args.save_precision] if args.save_precision else precision
    if args.sd_model:
        asked = "sdxl" if is_sdxl else "sd2" if args.v2 else "sd1"
        merge_into_model(args.sd_model, asked, loras, target, precision, save_dtype)
        return
    modules = merged_modules(loras)
    ranks = sorted({module.rank for module in modules.values()})
    log.info("ranks are added up, to at most %d; svd_merge_lora.py makes a smaller file", ranks[-1])
    entries = {} if args.no_metadata else merged_metadata(loras, modules, target)
    write_lora(target, modules, save_dtype, entries)


if __name__ == "__main__":
    prepare_output()
    setup_logging()
    run_script(main)
