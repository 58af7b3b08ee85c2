"""Give a LoRA another rank, the same for all layers or as many singular values as a rule keeps; docs/lora_tools.md."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent.parent))  # library and networks lie there, wherever this runs

from library.errors import OptionError, run_script
from library.log import prepare_output, setup_logging
from networks.lora_tools import (
    DTYPES,
    LoraFile,
    LowRank,
    add_precision,
    check_target,
    describe,
    device_of,
    low_rank_of,
    read_lora,
    singular_factors,
    write_lora,
)

log = logging.getLogger(__name__)


def _first_reaching(shares: Tensor, wanted: float) -> int:
    return int(torch.searchsorted(shares, torch.tensor(wanted))) + 1


# called with singular values, (k,) float32 in falling order, and --dynamic_param: how many are kept
DYNAMIC: dict[str, Callable[[Tensor, float], int]] = {
    "sv_ratio": lambda s, ratio: int((s > s[0] / ratio).sum()),
    "sv_cumulative": lambda s, share: _first_reaching(s.cumsum(0) / s.sum(), share),
    "sv_fro": lambda s, share: _first_reaching(s.square().cumsum(0) / s.square().sum(), share**2),
}


def setup_parser() -> argparse.ArgumentParser:
    """Give the parser of every option of this program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=str, help="LoRA file to resize")
    parser.add_argument("--save_to", type=str, help="file to write")
    add_precision(parser, "save_precision")
    parser.add_argument("--new_rank", type=int, default=4, help="rank, the largest one with --dynamic_method")
    parser.add_argument("--new_conv_rank", type=int, help="the same for convolutions larger than 1x1; default new_rank")
    parser.add_argument("--dynamic_method", choices=sorted(DYNAMIC), help="rule for the rank of each layer")
    parser.add_argument("--dynamic_param", type=float, help="its number: a ratio above 1 or a share in (0, 1]")
    parser.add_argument("--device", type=str, help="where to compute, for example cuda")
    parser.add_argument("--verbose", action="store_true", help="say for each layer what is kept")
    parser.add_argument("--no_metadata", action="store_true", help="write no metadata")
    return parser


def check_rule(method: str | None, param: float | None) -> None:
    """Refuse a rule without its number, or with one it cannot use.

    Raises:
        OptionError: with a number that works.
    """
    if method is None:
        return
    if param is None:
        raise OptionError(
            f"--dynamic_method {method} needs --dynamic_param. Example: --dynamic_param {EXAMPLES[method]}"
        )
    if not (param > 1 if method == "sv_ratio" else 0 < param <= 1):
        wanted = "above 1" if method == "sv_ratio" else "in (0, 1]"
        raise OptionError(f"--dynamic_param {param}: {method} takes a number {wanted}. Example: {EXAMPLES[method]}")


EXAMPLES = {"sv_ratio": 10, "sv_cumulative": 0.9, "sv_fro": 0.9}


def resized(
    module: LowRank,
    limit: int,
    method: str | None = None,
    param: float | None = None,
    device: torch.device | None = None,
) -> tuple[LowRank, float]:
    """Give a module with a rank of at most ``limit`` whose scale is the old one.

    Returns:
        The module, and the share of the product's Frobenius norm that it keeps.
    """
    u, s, v = singular_factors(module, device)
    rank = min(limit, len(s))
    total = float(s.square().sum().sqrt())
    if method is not None:
        rank = max(1, min(rank, DYNAMIC[method](s, param or 1.0))) if total else 1
    kept = float(s[:rank].square().sum().sqrt()) / total if total else 1.0
    return low_rank_of(u, s, v, rank, module, module.scale), kept


def resized_modules(
    lora: LoraFile,
    rank: int,
    conv_rank: int,
    method: str | None,
    param: float | None,
    device: torch.device | None,
    verbose: bool,
) -> dict[str, LowRank]:
    """Give all modules of a file resized, with a line of what is kept."""
    modules, shares = {}, []
    for name, module in lora.modules.items():
        limit = conv_rank if module.is_large_convolution else rank
        modules[name], share = resized(module, limit, method, param, device)
        shares.append(share)
        if verbose:
            log.info("%s: rank %d, %.2f %% of the norm kept", name, modules[name].rank, 100 * share)
    mean = sum(shares) / len(shares)
    least = 100 * min(shares)
    log.info("%d modules, %.2f %% of the norm kept on average, %.2f %% at least", len(shares), 100 * mean, least)
    return modules


def main(words: Sequence[str] | None = None) -> None:
    """Run the program with the given words, None for the process's command line."""
    args = setup_parser().parse_args(words)
    if not args.model:
        raise OptionError("--model is missing. Give the LoRA file to resize")
    conv_rank = args.new_rank if args.new_conv_rank is None else args.new_conv_rank
    if min(args.new_rank, conv_rank) < 1:
        raise OptionError(f"--new_rank {args.new_rank}: ranks are at least 1. Example: --new_rank 4")
    check_rule(args.dynamic_method, args.dynamic_param)
    target = check_target(args.save_to, [args.model])
    lora = read_lora(args.model, "--model")
    modules = resized_modules(
        lora,
        args.new_rank,
        conv_rank,
        args.dynamic_method,
        args.dynamic_param,
        device_of(device_of(args.device)),
        args.verbose,
    )
    entries = {}
    if not args.no_metadata:
        rule = f"{args.dynamic_method} {args.dynamic_param:g}" if args.dynamic_method else f"rank {args.new_rank}"
        before = lora.metadata.get("ss_network_dim", "unknown")
        comment = f"resized from rank {before} by {rule}; {lora.metadata.get('ss_training_comment', '')}"
        described = describe(lora.kind, modules, target.stem, lora.metadata)
        entries = {**described, **lora.metadata}
        entries |= {key: described[key] for key in described if key.startswith("ss_network_")}
        entries["ss_training_comment"] = comment
        if args.dynamic_method:
            entries |= {"ss_network_dim": "Dynamic", "ss_network_alpha": "Dynamic"}
    write_lora(target, modules, DTYPES[args.save_precision or "float"], entries)


if __name__ == "__main__":
    prepare_output()
    setup_logging()
    run_script(main)
