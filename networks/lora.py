"""LoRA for Stable Diffusion: a low-rank update beside every linear layer of attention blocks, and on request beside
convolutions, with the file format of sd-scripts.

A module adds up(down(x)) * multiplier * alpha / rank to the output of the layer it is attached to. Source: Hu et al.
2021 (arXiv:2106.09685); LoRA+ rates: Hayou et al. 2024 (arXiv:2402.12354).
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from library.errors import OptionError
from library.files import write_file
from networks import lora_names
from networks.lora_blocks import (
    DEFAULT_ALPHA,
    DEFAULT_RANK,
    RANK_KEYS,
    BlockPlan,
    NetworkArguments,
    block_plan,
    get_block_dims_and_alphas,
    get_block_index,
    get_block_lr_weight,
    parse_block_lr_kwargs,
    read_network_arguments,
)

__all__ = [
    "LoRAInfModule",
    "LoRAModule",
    "LoRANetwork",
    "convert_diffusers_to_sai_if_needed",
    "create_network",
    "create_network_from_weights",
    "get_block_dims_and_alphas",
    "get_block_index",
    "get_block_lr_weight",
    "parse_block_lr_kwargs",
]

log = logging.getLogger(__name__)

HALF_ROUNDING = 2.0**-8  # largest relative error of a number kept in bfloat16


class LoRAModule(nn.Module):
    """The low-rank update of one layer.

    Args:
        lora_name: key of the module. org_module: the Linear or Conv2d it stands beside. multiplier: of its output.
        lora_dim: rank. alpha: numerator of the scale; 0 or None means the rank.
        dropout, rank_dropout, module_dropout: probabilities, only in train mode; None switches one off.
    """

    alpha: Tensor

    def __init__(
        self,
        lora_name: str,
        org_module: Any,
        multiplier: float = 1.0,
        lora_dim: int = DEFAULT_RANK,
        alpha: float | Tensor | None = DEFAULT_ALPHA,
        dropout: float | None = None,
        rank_dropout: float | None = None,
        module_dropout: float | None = None,
    ):
        super().__init__()
        self.lora_name = lora_name
        self.lora_dim = lora_dim
        self.multiplier = multiplier
        self.dropout, self.rank_dropout, self.module_dropout = dropout, rank_dropout, module_dropout
        if isinstance(org_module, nn.Conv2d):
            window: dict[str, Any] = {name: getattr(org_module, name) for name in ("kernel_size", "stride", "padding")}
            self.lora_down: nn.Conv2d | nn.Linear = nn.Conv2d(org_module.in_channels, lora_dim, bias=False, **window)
            self.lora_up: nn.Conv2d | nn.Linear = nn.Conv2d(lora_dim, org_module.out_channels, 1, bias=False)
        else:
            self.lora_down = nn.Linear(org_module.in_features, lora_dim, bias=False)
            self.lora_up = nn.Linear(lora_dim, org_module.out_features, bias=False)
        nn.init.kaiming_uniform_(self.lora_down.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_up.weight)
        alpha = float(alpha) if alpha else float(lora_dim)
        self.register_buffer("alpha", torch.tensor(alpha))
        self.scale = alpha / lora_dim
        self._original: list[Any] = [org_module]  # in a list, so that it is no sub-module and never saved

    def apply_to(self) -> None:
        """Put this module in front of the layer it stands beside."""
        original = self._original[0]
        self._original_forward: Callable[..., Tensor] = original.forward
        original.forward = self.forward  # type: ignore[method-assign]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output = self._original_forward(x, *args, **kwargs)
        if self.training and self.module_dropout and torch.rand(1).item() < self.module_dropout:
            return output
        return output + self._update(x)

    def _update(self, x: Tensor) -> Tensor:
        hidden, scale = self.lora_down(x), self.scale * self.multiplier
        if self.training and self.dropout:
            hidden = nn.functional.dropout(hidden, self.dropout)
        if self.training and self.rank_dropout:
            kept = torch.rand((hidden.shape[0], self.lora_dim), device=hidden.device) > self.rank_dropout
            channels_first = isinstance(self.lora_down, nn.Conv2d)
            shape = (-1, self.lora_dim, 1, 1) if channels_first else (-1, *[1] * (hidden.dim() - 2), self.lora_dim)
            hidden = hidden * kept.reshape(shape).to(hidden.dtype)
            scale = scale / (1.0 - self.rank_dropout)
        return self.lora_up(hidden * scale)  # scaled where it is small: rank values a position, not the layer's width

    def product(self) -> Tensor:
        """Give scale * up * down as a weight of the layer's own shape."""
        return low_rank_product(self.lora_up.weight, self.lora_down.weight) * self.scale

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        loaded = float(self.alpha) / self.lora_dim
        if not math.isclose(loaded, self.scale, rel_tol=HALF_ROUNDING):  # an alpha only rounded is no other alpha
            self.scale = loaded


class LoRAInfModule(LoRAModule):
    """A module that can also be merged into its layer."""

    def merge_to(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> None:
        """Add the update to the layer's weight, computed in float32 and rounded once."""
        weight = self._original[0].weight
        merged = weight.detach().float() + self.multiplier * self.product().float().to(weight.device)
        weight.data = merged.to(device or weight.device, dtype or weight.dtype)


def low_rank_product(up: Tensor, down: Tensor) -> Tensor:
    """Give the weight that equals applying ``down``, then ``up``; 2-D for linear layers, 4-D for convolutions."""
    product = up.flatten(1).float() @ down.flatten(1).float()
    return product.reshape(up.shape[0], *down.shape[1:])


class LoRANetwork(nn.Module):
    """All LoRA modules of a model.

    Args:
        text_encoder: one text encoder, or a list of them. unet: a Diffusers U-Net. plan: rank and alpha of every layer.
        multiplier: of every module's output. dropouts: dropout, rank_dropout and module_dropout of LoRAModule.
        module_class: LoRAModule, or LoRAInfModule for merging. source: option and file, for messages of a merge.
    """

    UNET_TARGET_REPLACE_MODULE = ("Transformer2DModel",)
    UNET_TARGET_REPLACE_MODULE_CONV2D_3X3 = ("ResnetBlock2D", "Downsample2D", "Upsample2D")
    TEXT_ENCODER_TARGET_REPLACE_MODULE = ("CLIPAttention", "CLIPSdpaAttention", "CLIPMLP")
    LORA_PREFIX_UNET = lora_names.PREFIX_UNET
    LORA_PREFIX_TEXT_ENCODER = lora_names.PREFIX_TEXT_ENCODER
    LORA_PREFIX_TEXT_ENCODER1 = f"{lora_names.PREFIX_TEXT_ENCODER}1"
    LORA_PREFIX_TEXT_ENCODER2 = f"{lora_names.PREFIX_TEXT_ENCODER}2"
    writes_whole_files = True

    def __init__(
        self,
        text_encoder: Any,
        unet: nn.Module,
        plan: BlockPlan,
        multiplier: float = 1.0,
        dropouts: Mapping[str, float | None] | None = None,
        module_class: type[LoRAModule] = LoRAModule,
        source: str = "--base_weights",
    ):
        super().__init__()
        text_encoders = list(text_encoder) if isinstance(text_encoder, (list, tuple)) else [text_encoder]
        self.plan = plan
        self.multiplier = multiplier
        self.source = source
        self.lora_dim, self.alpha = plan.rank, plan.alpha
        dropouts = dropouts or {}

        def build(layers: Iterator[tuple[str, nn.Module]]) -> list[LoRAModule]:
            built = []
            for name, layer in layers:
                rank, alpha = plan.rank_and_alpha(name, _is_large_convolution(layer))
                if rank:
                    built.append(module_class(name, layer, multiplier, rank, alpha, **dropouts))
            return built

        self.text_encoder_loras = [
            module
            for index, encoder in enumerate(text_encoders)
            for module in build(text_encoder_layers(encoder, index, len(text_encoders)))
        ]
        self.unet_loras = build(unet_layers(unet, plan.with_convolutions, plan.is_sdxl))

    @property
    def loras(self) -> list[LoRAModule]:
        return [*self.text_encoder_loras, *self.unet_loras]

    def set_multiplier(self, multiplier: float) -> None:
        """Set the strength of every module's output."""
        self.multiplier = multiplier
        for module in self.loras:
            module.multiplier = multiplier

    def apply_to(
        self, text_encoder: Any, unet: nn.Module, apply_text_encoder: bool = True, apply_unet: bool = True
    ) -> None:
        """Attach the modules of the parts that are trained; the others are dropped, neither saved nor trained."""
        if not apply_text_encoder:
            self.text_encoder_loras = []
        if not apply_unet:
            self.unet_loras = []
        for module in self.loras:
            module.apply_to()
            self.add_module(module.lora_name, module)
        log.info(
            "LoRA: %d modules in text encoders, %d in the U-Net", len(self.text_encoder_loras), len(self.unet_loras)
        )
        if not self.loras:
            raise OptionError(
                "--network_module networks.lora: no layer gets a LoRA. Check --network_train_unet_only, "
                "--network_train_text_encoder_only and block_dims in --network_args"
            )

    # --------------------------------------------------------------------------------------------------- training

    def parameter_tags(self) -> Iterator[tuple[Tensor, str, str, str]]:
        """Give (parameter, name, role ``down`` or ``up``, block label) of everything that is trained."""
        for module in self.loras:
            block = lora_names.block_label(module.lora_name, self.plan.is_sdxl)
            yield module.lora_down.weight, f"{module.lora_name}.lora_down.weight", "down", block
            yield module.lora_up.weight, f"{module.lora_name}.lora_up.weight", "up", block

    def prepare_optimizer_params(
        self,
        text_encoder_lr: Sequence[float] | float | None,
        unet_lr: float | None,
        default_lr: float | None,
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """As :meth:`prepare_optimizer_params_with_multiple_te_lrs` with one rate; of a list the first counts."""
        rates = list(text_encoder_lr or ()) if isinstance(text_encoder_lr, Sequence) else [text_encoder_lr]
        return self.prepare_optimizer_params_with_multiple_te_lrs(rates[:1], unet_lr, default_lr)

    def prepare_optimizer_params_with_multiple_te_lrs(
        self,
        text_encoder_lr: Sequence[float | None] | float | None,
        unet_lr: float | None,
        default_lr: float | None,
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Give the optimizer's groups and a description of each; a part whose rate is 0 is left out.

        Args:
            text_encoder_lr: one rate, or one for each text encoder. unet_lr: of the U-Net.
            default_lr: for parts whose rate is None.
        """
        groups: list[dict[str, Any]] = []
        descriptions: list[str] = []

        def add(modules: Sequence[LoRAModule], rate: float | None, ratio: float | None, description: str) -> None:
            if not rate or not modules:
                return
            down = {f"{m.lora_name}.lora_down.weight": m.lora_down.weight for m in modules}
            up = {f"{m.lora_name}.lora_up.weight": m.lora_up.weight for m in modules}
            parts = [(down | up, rate, "")] if not ratio else [(down, rate, ""), (up, rate * ratio, " plus")]
            for params, its_rate, suffix in parts:
                groups.append({"params": params.values(), "lr": its_rate})
                descriptions.append(description + suffix)

        for modules, rate, description in self._text_encoder_parts(text_encoder_lr):
            add(modules, default_lr if rate is None else rate, self.plan.text_encoder_ratio, description)
        unet_rate = default_lr if unet_lr is None else unet_lr
        if self.plan.lr_weights is None:
            add(self.unet_loras, unet_rate, self.plan.unet_ratio, "unet")
        else:
            by_block: dict[int, list[LoRAModule]] = {}
            for module in self.unet_loras:
                by_block.setdefault(get_block_index(module.lora_name, self.plan.is_sdxl), []).append(module)
            for block, modules in by_block.items():
                factor = 1.0 if block < 0 else self.plan.lr_weights[block]
                add(modules, (unet_rate or 0.0) * factor, self.plan.unet_ratio, f"unet_block{block}")
        return groups, descriptions

    def _text_encoder_parts(
        self, rates: Sequence[float | None] | float | None
    ) -> list[tuple[list[LoRAModule], float | None, str]]:
        """Give (modules, rate, description): all text encoders together, or each alone where their rates differ."""
        listed = list(rates) if isinstance(rates, Sequence) else [rates]
        listed = listed or [None]
        if len(set(listed)) == 1:
            return [(self.text_encoder_loras, listed[0], "textencoder")]
        by_prefix: dict[str, list[LoRAModule]] = {}
        for module in self.text_encoder_loras:
            by_prefix.setdefault(module.lora_name.partition("_text_model")[0], []).append(module)
        if len(by_prefix) <= 1:
            log.warning("--text_encoder_lr has %d rates for one text encoder, %s is used", len(listed), listed[0])
            return [(self.text_encoder_loras, listed[0], "textencoder")]
        prefixes = (self.LORA_PREFIX_TEXT_ENCODER1, self.LORA_PREFIX_TEXT_ENCODER2)
        return [
            (by_prefix.get(prefix, []), rate, f"textencoder{number}")
            for number, (prefix, rate) in enumerate(zip(prefixes, listed), start=1)
        ]

    def enable_gradient_checkpointing(self) -> None:
        """Nothing to do: the base model recomputes, the modules inside it follow."""

    def prepare_grad_etc(self, text_encoder: Any, unet: nn.Module) -> None:
        self.requires_grad_(True)

    def on_epoch_start(self, text_encoder: Any, unet: nn.Module) -> None:
        self.train()

    def get_trainable_params(self) -> Iterator[nn.Parameter]:
        return self.parameters()

    def apply_max_norm_regularization(self, limit: float, device: torch.device) -> tuple[int, float, float]:
        """Scale both factors of every module whose product has a norm above ``limit``.

        Returns:
            Number of modules scaled, mean and largest norm after scaling.
        """
        with torch.no_grad():
            norms = torch.stack([module.product().norm() for module in self.loras]).clamp(min=limit / 2)
            ratios = norms.clamp(max=limit) / norms
            too_large = [(m, ratio) for m, ratio in zip(self.loras, ratios.tolist()) if ratio != 1.0]
            for module, ratio in too_large:
                module.lora_up.weight.mul_(ratio**0.5)
                module.lora_down.weight.mul_(ratio**0.5)
            limited = norms * ratios
        return len(too_large), limited.mean().item(), limited.max().item()

    # ------------------------------------------------------------------------------------------------------ files

    def load_weights(self, file: str | Path) -> str:
        """Load a LoRA file into the attached modules.

        Returns:
            One line that says what was loaded.

        Raises:
            OptionError: nothing fits, or a tensor has another rank.
        """
        return self.load_tensors(read_network_file(file, "--network_weights"), f"--network_weights {file}")

    def load_tensors(self, tensors: Mapping[str, Tensor], source: str) -> str:
        """Load tensors by key; ``source`` names their option and file in messages. See :meth:`load_weights`."""
        if self.plan.is_sdxl:
            tensors = convert_diffusers_to_sai_if_needed(tensors)
        own = self.state_dict()
        matching = {key: value for key, value in tensors.items() if key in own}
        if not matching:
            raise OptionError(
                f"{source}: none of its {len(tensors)} tensors belongs to this network (the file has "
                f"{next(iter(tensors), 'nothing')}, this network {next(iter(own))}). Give a LoRA of this kind of model"
            )
        for key, value in matching.items():
            if _trimmed_shape(value) != _trimmed_shape(own[key]):
                raise OptionError(
                    f"{source}: {key} has shape {list(value.shape)}, this network's is {list(own[key].shape)}. "
                    f"Give the --network_dim and conv_dim of the file, or add --dim_from_weights"
                )
            own[key] = value.reshape(own[key].shape).to(own[key].dtype)
        scales = [module.scale for module in self.loras]
        self.load_state_dict(own)
        notes = {
            f"{len(own) - len(matching)} of this network are not in it": len(own) - len(matching),
            f"{len(tensors) - len(matching)} of it are not used": len(tensors) - len(matching),
            "its alpha replaces --network_alpha": scales != [module.scale for module in self.loras],
        }
        said = [note for note, true in notes.items() if true]
        line = ", ".join([f"{source}: {len(matching)} tensors loaded", *said])
        log.log(logging.WARNING if said else logging.INFO, line)
        return line

    def save_weights(self, file: str | Path, dtype: torch.dtype | None, metadata: dict[str, str] | None) -> None:
        """Write the network; ``.safetensors`` with metadata and its hashes, other suffixes by torch.save without."""
        write_network_file(Path(file), self.state_dict(), dtype, metadata)

    def merge_to(
        self, text_encoder: Any, unet: nn.Module, weights_sd: Mapping[str, Tensor], dtype: torch.dtype, device: Any
    ) -> None:
        """Merge ``weights_sd`` into the base model; the network must be made with ``for_inference``."""
        for module in self.loras:
            self.add_module(module.lora_name, module)
        self.load_tensors(weights_sd, self.source)
        for module in self.loras:
            if isinstance(module, LoRAInfModule):
                module.merge_to(dtype, device)


# ------------------------------------------------------------------------------------------------------- the search


def _is_large_convolution(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Conv2d) and layer.kernel_size != (1, 1)


def _layers_below(root: nn.Module, targets: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    for path, module in root.named_modules():
        if type(module).__name__ in targets:
            for inner, layer in module.named_modules():
                if isinstance(layer, (nn.Linear, nn.Conv2d)):
                    yield (f"{path}.{inner}" if inner else path), layer


def unet_layers(unet: nn.Module, with_convolutions: bool, is_sdxl: bool) -> Iterator[tuple[str, nn.Module]]:
    """Give (key, layer) of every U-Net layer that can get a LoRA."""
    targets = LoRANetwork.UNET_TARGET_REPLACE_MODULE
    if with_convolutions:
        targets += LoRANetwork.UNET_TARGET_REPLACE_MODULE_CONV2D_3X3
    for path, layer in _layers_below(unet, targets):
        yield lora_names.unet_key(path, is_sdxl), layer


def text_encoder_layers(encoder: nn.Module, index: int, count: int) -> Iterator[tuple[str, nn.Module]]:
    """Give (key, layer) of every layer of a text encoder that can get a LoRA."""
    for path, layer in _layers_below(encoder, LoRANetwork.TEXT_ENCODER_TARGET_REPLACE_MODULE):
        yield lora_names.text_encoder_key(path, index, count), layer


# ------------------------------------------------------------------------------------------------ module contract


def read_network_file(file: str | Path, option: str) -> dict[str, Tensor]:
    """Read the tensors of a LoRA file; ``option`` names it in messages.

    Raises:
        OptionError: missing, damaged, or a pickle that needs code.
    """
    from library.checkpoint import read_tensors

    path = Path(file)
    if not path.is_file():
        raise OptionError(f"{option} {file}: there is no such file. Give a .safetensors, .ckpt or .pt LoRA")
    return read_tensors(path, option)


def write_network_file(
    path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype | None, metadata: Mapping[str, str] | None
) -> None:
    """Write tensors as a LoRA file, cast to ``dtype``; kinds of file as :meth:`LoRANetwork.save_weights` says."""
    from safetensors.torch import save_file

    from library.metadata import precalculate_safetensors_hashes

    tensors = {key: value.detach().to("cpu", dtype or value.dtype).contiguous() for key, value in tensors.items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    if path.suffix != ".safetensors":
        write_file(path, lambda temporary: torch.save(tensors, temporary), size)
        return
    model_hash, legacy_hash = precalculate_safetensors_hashes(tensors, metadata or {})
    content = {**(metadata or {}), "sshs_model_hash": model_hash, "sshs_legacy_hash": legacy_hash}
    write_file(path, lambda temporary: save_file(tensors, temporary, metadata=content), size)


def _trimmed_shape(tensor: Tensor) -> tuple[int, ...]:
    """Give the shape of a factor without the trailing ones by which a 1x1 convolution differs from a linear layer."""
    shape = tuple(tensor.shape)
    return shape[:2] if shape[2:] == (1, 1) else shape


def _is_sdxl(text_encoder: Any) -> bool:
    return isinstance(text_encoder, (list, tuple)) and len(text_encoder) == 2


def create_network(
    multiplier: float,
    network_dim: int | None,
    network_alpha: float | None,
    vae: Any,
    text_encoder: Any,
    unet: nn.Module,
    neuron_dropout: float | None = None,
    **kwargs: Any,
) -> LoRANetwork:
    """Build the network that the options describe, not yet attached.

    Args:
        multiplier: of every module's output. network_dim, network_alpha: rank and alpha, None for 4 and 1.
        text_encoder: one, or a list; two make it SDXL. neuron_dropout: element dropout. kwargs: ``--network_args``;
            their ``dropout`` wins over ``neuron_dropout``.

    Raises:
        OptionError: an unknown key or a bad value in ``kwargs``.
    """
    arguments = read_network_arguments(kwargs)
    plan = block_plan(network_dim, network_alpha, arguments, _is_sdxl(text_encoder))
    dropouts = _dropouts(arguments, neuron_dropout)
    given = {key: value for key, value in dataclasses.asdict(arguments).items() if value and key not in dropouts}
    said = {"rank": plan.rank, "alpha": plan.alpha, **given, **{key: value for key, value in dropouts.items() if value}}
    log.info("LoRA: %s", ", ".join(f"{key} {value}" for key, value in said.items()))
    return LoRANetwork(text_encoder, unet, plan, multiplier, dropouts)


def _dropouts(arguments: NetworkArguments, neuron_dropout: float | None) -> dict[str, float | None]:
    return {
        "dropout": neuron_dropout if arguments.dropout is None else arguments.dropout,
        "rank_dropout": arguments.rank_dropout,
        "module_dropout": arguments.module_dropout,
    }


def create_network_from_weights(
    multiplier: float,
    file: str | Path | None,
    vae: Any,
    text_encoder: Any,
    unet: nn.Module,
    weights_sd: Mapping[str, Tensor] | None = None,
    for_inference: bool = False,
    **kwargs: Any,
) -> tuple[LoRANetwork, dict[str, Tensor]]:
    """Build a network with the modules, ranks and alphas of a file; SDXL files in Diffusers naming are renamed.

    Args:
        multiplier: of every module's output. file: a LoRA; weights_sd: its tensors, where they are read already.
        for_inference: build modules that can be merged. kwargs: ``--network_args``; ranks and alphas among them are
            those of the file instead.

    Returns:
        The network, not yet attached or loaded, and the tensors.

    Raises:
        OptionError: the file is no LoRA, or not one of this kind of model.
    """
    option = "--base_weights" if for_inference else "--network_weights"
    tensors = dict(read_network_file(str(file), option) if weights_sd is None else weights_sd)
    is_sdxl = _is_sdxl(text_encoder)
    if is_sdxl:
        tensors = convert_diffusers_to_sai_if_needed(tensors)
    ranks = {key.split(".")[0]: value.shape[0] for key, value in tensors.items() if key.endswith("lora_down.weight")}
    alphas = {key.split(".")[0]: float(value) for key, value in tensors.items() if key.endswith(".alpha")}
    if not ranks:
        raise OptionError(f"{option} {file}: it holds no LoRA (no key ends with lora_down.weight). Give a LoRA file")
    arguments = read_network_arguments(kwargs)
    replaced = [key for key in RANK_KEYS if getattr(arguments, key) is not None]
    if replaced:
        log.warning("--network_args: %s come from %s instead (--dim_from_weights)", ", ".join(replaced), file)
    plan = block_plan(None, None, arguments, is_sdxl)
    plan = plan.with_modules({name: (rank, alphas.get(name, float(rank))) for name, rank in ranks.items()})
    network = LoRANetwork(
        text_encoder,
        unet,
        plan,
        multiplier,
        _dropouts(arguments, None),
        module_class=LoRAInfModule if for_inference else LoRAModule,
        source=f"{option} {file}",
    )
    if not network.loras:
        raise OptionError(
            f"{option} {file}: none of its {len(ranks)} modules is in this model (the first is {next(iter(ranks))}). "
            f"Give a LoRA of this kind of model"
        )
    return network, tensors


def convert_diffusers_to_sai_if_needed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give SDXL tensors with the block names of the original model."""
    if not any(key.startswith(("lora_unet_down_blocks", "lora_unet_up_blocks")) for key in weights):
        return dict(weights)
    renamed = {}
    for key, value in weights.items():
        name, dot, rest = key.partition(".")
        renamed[f"{lora_names.diffusers_sdxl_key_to_ldm(name)}{dot}{rest}"] = value
    return renamed
