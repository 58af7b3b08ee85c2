"""Make a LoRA of the difference between a tuned model and the one it was tuned from; see docs/lora_tools.md."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent.parent))  # library and networks lie there, wherever this runs

from library.checkpoint import LoadedModel
from library.errors import OptionError, run_script
from library.log import prepare_output, setup_logging
from networks.lora_names import PREFIX_TEXT_ENCODER
from networks.lora_tools import (
    DTYPES,
    LowRank,
    add_precision,
    check_target,
    describe,
    device_of,
    layers_of,
    load_base,
    write_lora,
)

log = logging.getLogger(__name__)


def setup_parser() -> argparse.ArgumentParser:
    """Give the parser of every option of this program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--v2", action="store_true", help="the models are Stable Diffusion 2.x")
    parser.add_argument("--v_parameterization", action="store_true", help="they predict v; for the metadata")
    parser.add_argument("--sdxl", action="store_true", help="the models are SDXL")
    add_precision(parser, "load_precision", "save_precision")
    parser.add_argument("--model_org", type=str, help="base model")
    parser.add_argument("--model_tuned", type=str, help="tuned model")
    parser.add_argument("--save_to", type=str, help="LoRA file to write")
    parser.add_argument("--dim", type=int, default=4, help="rank")
    parser.add_argument("--conv_dim", type=int, help="rank of convolutions larger than 1x1; without it they get none")
    parser.add_argument("--device", type=str, help="where to compute, for example cuda")
    parser.add_argument("--min_diff", type=float, default=0.01, help="text encoders whose weights differ less get none")
    parser.add_argument("--clamp_quantile", type=float, default=0.99, help="factors are cut there; 1 cuts nothing")
    parser.add_argument("--load_original_model_to", type=str, help="accepted; models are loaded to the CPU")
    parser.add_argument("--load_tuned_model_to", type=str, help="accepted; models are loaded to the CPU")
    parser.add_argument("--no_metadata", action="store_true", help="write no metadata")
    return parser


def differences(base: LoadedModel, tuned: LoadedModel, with_convolutions: bool, min_diff: float) -> dict[str, Tensor]:
    """Give the change of the weight of every layer that gets a LoRA, float32.

    Raises:
        OptionError: the models differ in shape, or in nothing.
    """
    others = dict(layers_of(tuned, with_convolutions))
    found: dict[str, Tensor] = {}
    for name, layer in layers_of(base, with_convolutions):
        weight, other = layer.weight.detach(), others[name].weight.detach() if name in others else None
        if other is None or other.shape != weight.shape:
            raise OptionError(f"--model_tuned: {name} has another shape than in --model_org. Give models of one kind")
        found[name] = other.float() - weight.float()
    texts = [name for name in found if name.startswith(PREFIX_TEXT_ENCODER)]
    if not any(found[name].abs().max() > min_diff for name in texts):
        log.info("no weight of the text encoders changed by more than --min_diff %g, they get no LoRA", min_diff)
        found = {name: change for name, change in found.items() if name not in texts}
    if not any(change.any() for change in found.values()):
        raise OptionError("--model_tuned and --model_org have the same weights. Give the model that was trained")
    return found


def extracted(change: Tensor, rank: int, clamp_quantile: float, device: torch.device | None) -> LowRank:
    """Give the module of at most ``rank`` nearest to ``change``.

    Args:
        change: (out, in) or (out, in, kh, kw), float32. clamp_quantile: both factors are limited to this quantile of
            all their values, which keeps single large values out of the file; 1 limits nothing.
    """
    matrix = change.flatten(1).to(device)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    rank = min(rank, len(s))
    up, down = u[:, :rank] * s[:rank], v[:rank]
    if clamp_quantile < 1:
        values = torch.cat([up.flatten(), down.flatten()]).cpu().numpy()
        limit = float(numpy.quantile(values, clamp_quantile))
        up, down = up.clamp(-limit, limit), down.clamp(-limit, limit)
    window = change.shape[2:]
    return LowRank(up.reshape(*up.shape, *[1] * len(window)).cpu(), down.reshape(rank, -1, *window).cpu(), float(rank))


def main(words: Sequence[str] | None = None) -> None:
    """Run the program with the given words, None for the process's command line."""
    args = setup_parser().parse_args(words)
    for name in ("model_org", "model_tuned"):
        if not getattr(args, name):
            raise OptionError(f"--{name} is missing. Give a model file or a Diffusers folder")
    if args.dim < 1 or (args.conv_dim is not None and args.conv_dim < 1):
        raise OptionError("--dim and --conv_dim: ranks are at least 1. Example: --dim 4")
    if not 0.5 < args.clamp_quantile <= 1:
        raise OptionError(f"--clamp_quantile {args.clamp_quantile}: it must be in (0.5, 1]. Example: 0.99")
    target = check_target(args.save_to, [args.model_org, args.model_tuned])
    dtype, device = DTYPES[args.load_precision or "float"], device_of(args.device)
    asked = "sdxl" if args.sdxl else "sd2" if args.v2 else "sd1"
    base, kind = load_base(args.model_org, "--model_org", asked, dtype)
    tuned, other_kind = load_base(args.model_tuned, "--model_tuned", asked, dtype)
    if kind != other_kind:
        raise OptionError(
            f"--model_tuned is a model of kind {other_kind}, --model_org of {kind}. Give models of one kind"
        )
    modules = {}
    changes = differences(base, tuned, args.conv_dim is not None, args.min_diff)
    for number, (name, change) in enumerate(changes.items(), start=1):
        rank = args.conv_dim if change.dim() == 4 and change[0, 0].numel() > 1 else args.dim
        modules[name] = extracted(change, rank, args.clamp_quantile, device)
        if number % 50 == 0:
            log.info("%d of %d layers", number, len(changes))
    entries = {}
    if not args.no_metadata:
        version = {"ss_base_model_version": "sd_v2_v"} if kind == "sd2" and args.v_parameterization else {}
        entries = describe(kind, modules, target.stem, version)
    write_lora(target, modules, DTYPES[args.save_precision or "float"], entries)


if __name__ == "__main__":
    prepare_output()
    setup_logging()
    run_script(main)
