"""What ``--network_args`` say about a LoRA: ranks, alphas and learning-rate factors, per block where asked."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from library.errors import OptionError, did_you_mean
from networks.lora_names import SD_BLOCKS, SDXL_BLOCKS, block_number

log = logging.getLogger(__name__)

OFF_VALUES = {"0", "0.0", "false", ""}


@dataclass(frozen=True)
class NetworkArguments:
    """The values of ``--network_args``; None means not given. Names and meanings as the keys."""

    conv_dim: int | None = None
    conv_alpha: float | None = None
    rank_dropout: float | None = None
    module_dropout: float | None = None
    block_dims: list[int] | None = None
    block_alphas: list[float] | None = None
    conv_block_dims: list[int] | None = None
    conv_block_alphas: list[float] | None = None
    down_lr_weight: str | None = None
    mid_lr_weight: str | None = None
    up_lr_weight: str | None = None
    block_lr_zero_threshold: float = 0.0
    loraplus_lr_ratio: float | None = None
    loraplus_unet_lr_ratio: float | None = None
    loraplus_text_encoder_lr_ratio: float | None = None


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _floats(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


READERS: dict[str, Callable[[str], Any]] = {
    "conv_dim": int,
    "block_dims": _ints,
    "block_alphas": _floats,
    "conv_block_dims": _ints,
    "conv_block_alphas": _floats,
    "down_lr_weight": str,
    "mid_lr_weight": str,
    "up_lr_weight": str,
}


def read_network_arguments(values: Mapping[str, Any]) -> NetworkArguments:
    """Read ``--network_args``; every key that is not listed reads as a float.

    Args:
        values: key -> text (or a value already read).

    Raises:
        OptionError: an unknown key that asks for something, or a value that is not readable.
    """
    known = NetworkArguments.__dataclass_fields__
    read: dict[str, Any] = {}
    for key, value in values.items():
        if key == "dropout" or value is None:
            continue  # the trainer passes dropout on its own
        if key not in known:
            if str(value).lower() in OFF_VALUES:
                log.info("--network_args: networks.lora has no %s; %s=%s asks for nothing", key, key, value)
                continue
            raise OptionError(
                f"--network_args: networks.lora has no {key!r}.{did_you_mean(key, known)} "
                f"Known: {', '.join(sorted(known))}"
            )
        try:
            read[key] = READERS.get(key, float)(value if isinstance(value, str) else str(value).strip("[]()"))
        except ValueError as error:
            raise OptionError(f"--network_args: {key}={value} is not readable ({error}). Example: {key}=4") from error
    for name in ("rank_dropout", "module_dropout"):
        if read.get(name) is not None and not 0.0 <= read[name] < 1.0:
            raise OptionError(f"--network_args: {name}={read[name]} must be in [0, 1). Example: {name}=0.1")
    if read.get("conv_dim") is not None and read["conv_dim"] < 1:
        del read["conv_dim"]  # front-ends send 0 for off
    return NetworkArguments(**read)


# -------------------------------------------------------------------------------------------- learning-rate factors

PRESETS: dict[str, Callable[[int, int], float]] = {
    "cosine": lambda index, count: math.sin(math.pi / 2 * (count - 1 - index) / (count - 1)),
    "sine": lambda index, count: math.sin(math.pi / 2 * index / (count - 1)),
    "linear": lambda index, count: index / (count - 1),
    "reverse_linear": lambda index, count: (count - 1 - index) / (count - 1),
    "zeros": lambda index, count: 0.0,
}


def lr_factors(text: str | None, count: int, key: str, presets: bool = True) -> list[float]:
    """Read the factors of one part of the U-Net.

    Args:
        text: numbers with commas (missing ones 1, empty ones 0, too many cut), or a preset name with ``+number``.
        count: how many the part has.
    """
    if text is None:
        return [1.0] * count
    name, _, added = text.partition("+")
    if presets and "," not in text:
        if name not in PRESETS:
            raise OptionError(
                f"--network_args: {key}={text}: give {count} numbers with commas or one of {', '.join(PRESETS)}"
            )
        return [PRESETS[name](index, count) + float(added or 0.0) for index in range(count)]
    factors = [float(part) if part.strip() else 0.0 for part in text.split(",")]
    if len(factors) > count:
        log.warning("--network_args: %s has %d values, the first %d are used", key, len(factors), count)
    return (factors + [1.0] * count)[:count]


@dataclass(frozen=True)
class BlockPlan:
    """Rank, alpha and rate factor of every layer.

    Attributes:
        rank, alpha: of linear layers and 1x1 convolutions. conv_rank, conv_alpha: of larger ones, None for none.
        block_ranks, block_alphas, conv_block_ranks, conv_block_alphas: per U-Net block, empty when not asked.
        lr_weights: learning-rate factor per U-Net block, empty when not asked.
        modules: exact (rank, alpha) by key, for a network made from a file.
    """

    is_sdxl: bool
    rank: int
    alpha: float
    conv_rank: int | None = None
    conv_alpha: float | None = None
    block_ranks: list[int] = field(default_factory=list)
    block_alphas: list[float] = field(default_factory=list)
    conv_block_ranks: list[int] = field(default_factory=list)
    conv_block_alphas: list[float] = field(default_factory=list)
    lr_weights: list[float] = field(default_factory=list)
    unet_ratio: float | None = None
    text_encoder_ratio: float | None = None
    modules: Mapping[str, tuple[int, float]] | None = None

    @property
    def with_convolutions(self) -> bool:
        return self.modules is not None or self.conv_rank is not None or bool(self.conv_block_ranks)

    def with_modules(self, modules: Mapping[str, tuple[int, float]]) -> BlockPlan:
        """Give a plan in which only the named modules exist."""
        return replace(self, modules=modules)

    def lr_weight(self, block: int | None) -> float:
        return self.lr_weights[block] if self.lr_weights and block is not None else 1.0

    def rank_and_alpha(self, key: str, large_convolution: bool) -> tuple[int, float | None]:
        """Give rank and alpha of a layer; rank 0 means no LoRA there."""
        if self.modules is not None:
            return self.modules.get(key, (0, None))
        block = block_number(key, self.is_sdxl) if key.startswith("lora_unet") else None
        if block is not None and self.lr_weights and self.lr_weights[block] == 0.0:
            return 0, None
        if large_convolution:
            if self.conv_block_ranks and block is not None:
                return self.conv_block_ranks[block], self.conv_block_alphas[block]
            return self.conv_rank or 0, self.conv_alpha
        if self.block_ranks and block is not None:
            return self.block_ranks[block], self.block_alphas[block]
        return self.rank, self.alpha


def block_plan(rank: int, alpha: float, arguments: NetworkArguments, is_sdxl: bool) -> BlockPlan:
    """Turn options into a plan.

    Raises:
        OptionError: a list has the wrong length, or a rank is below 1.
    """
    if rank < 1:
        raise OptionError(f"--network_dim {rank}: a rank is at least 1. Example: --network_dim 16")
    blocks = SDXL_BLOCKS if is_sdxl else SD_BLOCKS
    for key in ("block_dims", "block_alphas", "conv_block_dims", "conv_block_alphas"):
        values = getattr(arguments, key)
        if values is not None and len(values) != blocks:
            raise OptionError(f"--network_args: {key} has {len(values)} values, this model has {blocks} blocks")
    conv_alpha = arguments.conv_alpha if arguments.conv_alpha is not None else 1.0
    conv_ranks = arguments.conv_block_dims or []
    return BlockPlan(
        is_sdxl=is_sdxl,
        rank=rank,
        alpha=alpha,
        conv_rank=arguments.conv_dim,
        conv_alpha=conv_alpha if arguments.conv_dim is not None else None,
        block_ranks=arguments.block_dims or [],
        block_alphas=arguments.block_alphas or [alpha] * blocks,
        conv_block_ranks=conv_ranks,
        conv_block_alphas=arguments.conv_block_alphas or [conv_alpha] * blocks,
        lr_weights=_lr_weights(arguments, is_sdxl),
        unet_ratio=arguments.loraplus_unet_lr_ratio or arguments.loraplus_lr_ratio,
        text_encoder_ratio=arguments.loraplus_text_encoder_lr_ratio or arguments.loraplus_lr_ratio,
    )


def _lr_weights(arguments: NetworkArguments, is_sdxl: bool) -> list[float]:
    parts = (arguments.down_lr_weight, arguments.mid_lr_weight, arguments.up_lr_weight)
    if all(part is None for part in parts):
        return []
    side, middle = (9, 3) if is_sdxl else (12, 1)
    factors = [
        *lr_factors(parts[0], side, "down_lr_weight"),
        *lr_factors(parts[1], middle, "mid_lr_weight", presets=False),
        *lr_factors(parts[2], side, "up_lr_weight"),
    ]
    if is_sdxl:
        factors = [1.0, *factors, 1.0]
    return [0.0 if factor <= arguments.block_lr_zero_threshold else factor for factor in factors]
