"""What ``--network_args`` say about a LoRA: ranks, alphas and learning-rate factors, per block where asked."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from library.errors import OptionError, did_you_mean
from networks.lora_names import SD_BLOCKS, SDXL_BLOCKS, block_number

log = logging.getLogger(__name__)

DEFAULT_RANK = 4
DEFAULT_ALPHA = 1.0
OFF_VALUES = {"0", "0.0", "false", ""}


@dataclass(frozen=True)
class NetworkArguments:
    """The values of ``--network_args``; None means not given. Names and meanings as the keys."""

    conv_dim: int | None = None
    conv_alpha: float | None = None
    dropout: float | None = None
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


def _rank(text: str) -> int:
    if int(text) < 0:
        raise ValueError("a rank is a whole number, 0 or above")
    return int(text)


def _number(text: str) -> float:
    if not 0.0 <= float(text) < math.inf:
        raise ValueError("a finite number, 0 or above, is needed")
    return float(text)


def _probability(text: str) -> float:
    if not 0.0 <= float(text) < 1.0:
        raise ValueError("a probability in [0, 1) is needed")
    return float(text)


def _list_of(read: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [read(part) for part in text.split(",")]


# key -> (reader, a value to show in messages)
READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "conv_dim": (_rank, "8"),
    "conv_alpha": (_number, "1"),
    "dropout": (_probability, "0.1"),
    "rank_dropout": (_probability, "0.1"),
    "module_dropout": (_probability, "0.1"),
    "block_dims": (_list_of(_rank), "4,4,8,8,... (one for each block)"),
    "block_alphas": (_list_of(_number), "1,1,2,2,... (one for each block)"),
    "conv_block_dims": (_list_of(_rank), "4,4,8,8,... (one for each block)"),
    "conv_block_alphas": (_list_of(_number), "1,1,2,2,... (one for each block)"),
    "down_lr_weight": (str, "cosine"),
    "mid_lr_weight": (str, "1"),
    "up_lr_weight": (str, "sine"),
    "block_lr_zero_threshold": (_number, "0.1"),
    "loraplus_lr_ratio": (_number, "16"),
    "loraplus_unet_lr_ratio": (_number, "16"),
    "loraplus_text_encoder_lr_ratio": (_number, "16"),
}
# keys that a network made from a file takes from the file
RANK_KEYS = ("conv_dim", "conv_alpha", "block_dims", "block_alphas", "conv_block_dims", "conv_block_alphas")


def read_network_arguments(values: Mapping[str, Any]) -> NetworkArguments:
    """Read ``--network_args``.

    Keys of other network modules pass where their value asks for nothing (0, false): front-ends send them all.

    Args:
        values: key -> text (or a value already read); None counts as not given.

    Raises:
        OptionError: an unknown key that asks for something, or a value that is not readable.
    """
    read: dict[str, Any] = {}
    for key, value in values.items():
        text = "" if value is None else str(value).strip("[]() ")
        if key in READERS and value is not None:
            reader, example = READERS[key]
            try:
                read[key] = reader(text)
            except ValueError as error:
                raise OptionError(
                    f"--network_args: {key}={value} is not readable ({error}). Example: {key}={example}"
                ) from error
        elif key not in READERS and text.lower() not in OFF_VALUES:
            raise OptionError(
                f"--network_args: networks.lora has no {key!r}.{did_you_mean(key, READERS)} "
                f"Known: {', '.join(sorted(READERS))}"
            )
        elif key not in READERS:
            log.info("--network_args: networks.lora has no %s; %s=%s asks for nothing", key, key, value)
    if read.get("conv_dim") == 0:
        del read["conv_dim"]  # front-ends send 0 for off
    if read.get("conv_alpha") and "conv_dim" not in read and "conv_block_dims" not in read:
        log.warning("--network_args: conv_alpha has no effect without conv_dim or conv_block_dims")
    return NetworkArguments(**read)


# -------------------------------------------------------------------------------------------- learning-rate factors

PRESETS: dict[str, Callable[[int, int], float]] = {
    "cosine": lambda index, count: math.sin(math.pi / 2 * (count - 1 - index) / (count - 1)),
    "sine": lambda index, count: math.sin(math.pi / 2 * index / (count - 1)),
    "linear": lambda index, count: index / (count - 1),
    "reverse_linear": lambda index, count: (count - 1 - index) / (count - 1),
    "zeros": lambda index, count: 0.0,
}


Factors = str | float | Sequence[float]


def _lr_factors(factors: Factors | None, count: int, key: str, presets: bool = True) -> list[float]:
    """Read the factors of one part of the U-Net.

    Args:
        factors: numbers, or a text of them with commas (empty ones 0), or a preset name with ``+number``.
            Missing ones are 1, too many are cut.
        count: how many the part has.
        presets: whether a name is allowed; then a single number is not.
    """
    if factors is None:
        return [1.0] * count
    allowed = f"{count} numbers with commas" + (f" or one of {', '.join(PRESETS)} (cosine+0.25)" if presets else "")
    try:
        if not isinstance(factors, str):
            read = list(factors) if isinstance(factors, Sequence) else [factors]
        elif presets and "," not in factors:
            name, _, added = factors.partition("+")
            read = [PRESETS[name.strip()](index, count) + float(added or 0.0) for index in range(count)]
        else:
            read = [float(part) if part.strip() else 0.0 for part in factors.split(",")]
    except (KeyError, ValueError) as error:
        near = did_you_mean(str(factors), PRESETS) if presets else ""
        raise OptionError(f"--network_args: {key}={factors} is not readable.{near} Give {allowed}") from error
    if not all(math.isfinite(factor) for factor in read):
        raise OptionError(f"--network_args: {key}={factors} is not finite. Give {allowed}")
    if len(read) != count:
        action = "the rest is cut" if len(read) > count else "missing ones are 1"
        log.warning("--network_args: %s has %d values, this model takes %d; %s", key, len(read), count, action)
    return (read + [1.0] * count)[:count]


def get_block_lr_weight(
    is_sdxl: bool,
    down_lr_weight: Factors | None,
    mid_lr_weight: Factors | None,
    up_lr_weight: Factors | None,
    zero_threshold: float,
) -> list[float] | None:
    """Give the learning-rate factor of every U-Net block, 0 up to the threshold; None when no factor is asked for."""
    if down_lr_weight is None and mid_lr_weight is None and up_lr_weight is None:
        return None
    side, middle = (9, 3) if is_sdxl else (12, 1)
    factors = [
        *_lr_factors(down_lr_weight, side, "down_lr_weight"),
        *_lr_factors(mid_lr_weight, middle, "mid_lr_weight", presets=False),
        *_lr_factors(up_lr_weight, side, "up_lr_weight"),
    ]
    if is_sdxl:
        factors = [1.0, *factors, 1.0]  # the embeddings in front and the output layers behind
    return [0.0 if factor <= zero_threshold else factor for factor in factors]


def parse_block_lr_kwargs(is_sdxl: bool, nw_kwargs: Mapping[str, Any]) -> list[float] | None:
    """Give the learning-rate factors that ``--network_args`` ask for; see :func:`get_block_lr_weight`."""
    return get_block_lr_weight(
        is_sdxl,
        nw_kwargs.get("down_lr_weight"),
        nw_kwargs.get("mid_lr_weight"),
        nw_kwargs.get("up_lr_weight"),
        float(nw_kwargs.get("block_lr_zero_threshold") or 0.0),
    )


def get_block_index(lora_name: str, is_sdxl: bool = False) -> int:
    """Give the number of the U-Net block a key lies in, -1 outside of every block."""
    number = block_number(lora_name, is_sdxl)
    return -1 if number is None else number


# ---------------------------------------------------------------------------------------------- ranks and alphas


def get_block_dims_and_alphas(
    is_sdxl: bool,
    block_dims: str | Sequence[int] | None,
    block_alphas: str | Sequence[float] | None,
    network_dim: int,
    network_alpha: float,
    conv_block_dims: str | Sequence[int] | None,
    conv_block_alphas: str | Sequence[float] | None,
    conv_dim: int | None,
    conv_alpha: float | None,
) -> tuple[list[int], list[float], list[int] | None, list[float] | None]:
    """Give ranks and alphas of every U-Net block: of linear layers, then of larger convolutions (None for none).

    Raises:
        OptionError: a list has the wrong length or an unreadable value.
    """
    given = {
        "block_dims": block_dims,
        "block_alphas": block_alphas,
        "conv_block_dims": conv_block_dims,
        "conv_block_alphas": conv_block_alphas,
    }
    texts = {k: v if isinstance(v, str) else ",".join(map(str, v)) for k, v in given.items() if v is not None}
    lists = dataclasses.asdict(read_network_arguments(texts))
    blocks = SDXL_BLOCKS if is_sdxl else SD_BLOCKS
    for key in texts:
        if len(lists[key]) != blocks:
            raise OptionError(
                f"--network_args: {key} has {len(lists[key])} values, this model has {blocks} blocks. "
                f"Example: {key}={','.join(['4'] * blocks)}"
            )
    ranks = lists["block_dims"] or [network_dim] * blocks
    alphas = lists["block_alphas"] or [float(network_alpha)] * blocks
    conv_ranks = lists["conv_block_dims"] or ([conv_dim] * blocks if conv_dim else None)
    if conv_ranks is None:
        if lists["conv_block_alphas"]:
            raise OptionError(
                "--network_args: conv_block_alphas needs conv_dim or conv_block_dims. Example: conv_dim=4"
            )
        return ranks, alphas, None, None
    default = 1.0 if conv_alpha is None else float(conv_alpha)
    return ranks, alphas, conv_ranks, lists["conv_block_alphas"] or [default] * blocks


@dataclass(frozen=True)
class BlockPlan:
    """Rank, alpha and rate factor of every layer.

    Attributes:
        rank, alpha: of text encoders, and of U-Net layers outside of every block.
        conv_rank, conv_alpha: of larger convolutions outside of every block, None for none.
        block_ranks, block_alphas: per U-Net block, of linear layers and 1x1 convolutions.
        conv_block_ranks, conv_block_alphas: per U-Net block, of larger convolutions, None for none.
        lr_weights: learning-rate factor per U-Net block, None when not asked.
        unet_ratio, text_encoder_ratio: rate of the up matrices over that of the down matrices, None for one rate.
        modules: exact (rank, alpha) by key, for a network made from a file.
    """

    is_sdxl: bool
    rank: int
    alpha: float
    conv_rank: int | None
    conv_alpha: float | None
    block_ranks: list[int]
    block_alphas: list[float]
    conv_block_ranks: list[int] | None
    conv_block_alphas: list[float] | None
    lr_weights: list[float] | None
    unet_ratio: float | None
    text_encoder_ratio: float | None
    modules: Mapping[str, tuple[int, float]] | None = None

    @property
    def with_convolutions(self) -> bool:
        return self.modules is not None or self.conv_block_ranks is not None

    def with_modules(self, modules: Mapping[str, tuple[int, float]]) -> BlockPlan:
        """Give a plan in which only the named modules exist."""
        return replace(self, modules=modules)

    def rank_and_alpha(self, key: str, large_convolution: bool) -> tuple[int, float | None]:
        """Give rank and alpha of a layer; rank 0 means no LoRA there."""
        if self.modules is not None:
            return self.modules.get(key, (0, None))
        block = block_number(key, self.is_sdxl)
        if block is None:
            return (self.conv_rank or 0, self.conv_alpha) if large_convolution else (self.rank, self.alpha)
        if self.lr_weights and self.lr_weights[block] == 0.0:
            return 0, None
        if not large_convolution:
            return self.block_ranks[block], self.block_alphas[block]
        if self.conv_block_ranks is None or self.conv_block_alphas is None:
            return 0, None
        return self.conv_block_ranks[block], self.conv_block_alphas[block]


def block_plan(rank: int | None, alpha: float | None, arguments: NetworkArguments, is_sdxl: bool) -> BlockPlan:
    """Turn options into a plan; needs no model, so a mistake is known before one is loaded.

    Args:
        rank, alpha: ``--network_dim`` and ``--network_alpha``, None for 4 and 1. arguments: ``--network_args``.
        is_sdxl: whether blocks are those of SDXL.

    Raises:
        OptionError: a list has the wrong length, a factor is not readable, or the rank is below 1.
    """
    rank = DEFAULT_RANK if rank is None else int(rank)
    alpha = DEFAULT_ALPHA if alpha is None else float(alpha)
    if rank < 1:
        raise OptionError(f"--network_dim {rank}: a rank is at least 1. Example: --network_dim 16")
    if not 0.0 <= alpha < math.inf:
        raise OptionError(f"--network_alpha {alpha}: 0 (the rank) or more is needed. Example: --network_alpha 8")
    ranks, alphas, conv_ranks, conv_alphas = get_block_dims_and_alphas(
        is_sdxl,
        arguments.block_dims,
        arguments.block_alphas,
        rank,
        alpha,
        arguments.conv_block_dims,
        arguments.conv_block_alphas,
        arguments.conv_dim,
        arguments.conv_alpha,
    )
    return BlockPlan(
        is_sdxl=is_sdxl,
        rank=rank,
        alpha=alpha,
        conv_rank=arguments.conv_dim,
        conv_alpha=1.0 if arguments.conv_alpha is None else arguments.conv_alpha,
        block_ranks=ranks,
        block_alphas=alphas,
        conv_block_ranks=conv_ranks,
        conv_block_alphas=conv_alphas,
        lr_weights=parse_block_lr_kwargs(is_sdxl, dataclasses.asdict(arguments)),
        unet_ratio=_first_given(arguments.loraplus_unet_lr_ratio, arguments.loraplus_lr_ratio),
        text_encoder_ratio=_first_given(arguments.loraplus_text_encoder_lr_ratio, arguments.loraplus_lr_ratio),
    )


def _first_given(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)
