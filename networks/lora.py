"""LoRA for Stable Diffusion: a low-rank update beside every linear layer of attention blocks, and on request beside
convolutions, with the file format of sd-scripts.

A module adds up(down(x)) * multiplier * alpha / rank to the output of the layer it is attached to. Source: Hu et al.
2021 (arXiv:2106.09685); LoRA+ rates: Hayou et al. 2024 (arXiv:2402.12354).
"""

from __future__ import annotations

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
from networks.lora_blocks import BlockPlan, block_plan, read_network_arguments

log = logging.getLogger(__name__)

DEFAULT_RANK = 4
DEFAULT_ALPHA = 1.0


class LoRAModule(nn.Module):
    """The low-rank update of one layer.

    Args:
        lora_name: key of the module. org_module: the Linear or Conv2d it stands beside. multiplier: of its output.
        lora_dim: rank. alpha: numerator of the scale; 0 or None means the rank.
        dropout, rank_dropout, module_dropout: probabilities, only in train mode; None switches one off.
    """

    def __init__(
        self,
        lora_name: str,
        org_module: nn.Module,
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
            self.lora_down: nn.Module = nn.Conv2d(
                org_module.in_channels,
                lora_dim,
                org_module.kernel_size,
                org_module.stride,
                org_module.padding,
                bias=False,
            )
            self.lora_up: nn.Module = nn.Conv2d(lora_dim, org_module.out_channels, 1, bias=False)
        else:
            self.lora_down = nn.Linear(org_module.in_features, lora_dim, bias=False)
            self.lora_up = nn.Linear(lora_dim, org_module.out_features, bias=False)
        nn.init.kaiming_uniform_(self.lora_down.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_up.weight)
        self.register_buffer("alpha", torch.tensor(float(alpha) if alpha else float(lora_dim)))
        self.scale = float(self.alpha) / lora_dim
        self._original = [org_module]  # in a list, so that it is no sub-module and never saved

    def apply_to(self) -> None:
        """Put this module in front of the layer it stands beside."""
        original = self._original[0]
        self._original_forward: Callable[..., Tensor] = original.forward
        original.forward = self.forward  # type: ignore[method-assign]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output = self._original_forward(x, *args, **kwargs)
        if self.training and self.module_dropout and torch.rand(1).item() < self.module_dropout:
            return output
        return output + self._update(x) * self.multiplier

    def _update(self, x: Tensor) -> Tensor:
        hidden, scale = self.lora_down(x), self.scale
        if self.training and self.dropout:
            hidden = nn.functional.dropout(hidden, self.dropout)
        if self.training and self.rank_dropout:
            kept = torch.rand((hidden.shape[0], self.lora_dim), device=hidden.device) > self.rank_dropout
            channels_first = isinstance(self.lora_down, nn.Conv2d)
            shape = (-1, self.lora_dim, 1, 1) if channels_first else (-1, *[1] * (hidden.dim() - 2), self.lora_dim)
            hidden = hidden * kept.reshape(shape).to(hidden.dtype)
            scale = scale / (1.0 - self.rank_dropout)
        return self.lora_up(hidden) * scale

    def product(self) -> Tensor:
        """Give scale * up * down as a weight of the layer's own shape."""
        return low_rank_product(self.lora_up.weight, self.lora_down.weight) * self.scale


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
        multiplier: of every module's output. dropout, rank_dropout, module_dropout: as in LoRAModule.
        module_class: LoRAModule, or LoRAInfModule for merging.
    """

    UNET_TARGET_REPLACE_MODULE = ("Transformer2DModel",)
    UNET_TARGET_REPLACE_MODULE_CONV2D_3X3 = ("ResnetBlock2D", "Downsample2D", "Upsample2D")
    TEXT_ENCODER_TARGET_REPLACE_MODULE = ("CLIPAttention", "CLIPSdpaAttention", "CLIPMLP")
    LORA_PREFIX_UNET = lora_names.PREFIX_UNET
    LORA_PREFIX_TEXT_ENCODER = lora_names.PREFIX_TEXT_ENCODER
    LORA_PREFIX_TEXT_ENCODER1 = f"{lora_names.PREFIX_TEXT_ENCODER}1"
    LORA_PREFIX_TEXT_ENCODER2 = f"{lora_names.PREFIX_TEXT_ENCODER}2"

    def __init__(
        self,
        text_encoder: Any,
        unet: nn.Module,
        plan: BlockPlan,
        multiplier: float = 1.0,
        dropout: float | None = None,
        rank_dropout: float | None = None,
        module_dropout: float | None = None,
        module_class: type[LoRAModule] = LoRAModule,
    ):
        super().__init__()
        text_encoders = list(text_encoder) if isinstance(text_encoder, (list, tuple)) else [text_encoder]
        self.plan = plan
        self.multiplier = multiplier
        self.lora_dim, self.alpha = plan.rank, plan.alpha
        dropouts = {"dropout": dropout, "rank_dropout": rank_dropout, "module_dropout": module_dropout}

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

    def parameter_tags(self) -> Iterator[tuple[nn.Parameter, str, str, str]]:
        """Give (parameter, name, role ``down`` or ``up``, block label) of everything that is trained."""
        for module in self.loras:
            block = lora_names.block_label(module.lora_name, self.plan.is_sdxl)
            yield module.lora_down.weight, f"{module.lora_name}.lora_down.weight", "down", block
            yield module.lora_up.weight, f"{module.lora_name}.lora_up.weight", "up", block

    def prepare_optimizer_params_with_multiple_te_lrs(
        self, text_encoder_lr: Sequence[float] | float | None, unet_lr: float | None, default_lr: float | None
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """As :meth:`prepare_optimizer_params`; only the first text encoder rate counts."""
        return self.prepare_optimizer_params(text_encoder_lr, unet_lr, default_lr)

    def prepare_optimizer_params(
        self,
        text_encoder_lr: Sequence[float] | float | None,
        unet_lr: float | None,
        default_lr: float | None,
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Give the optimizer's groups and a description of each; a part whose rate is 0 is left out."""
        if isinstance(text_encoder_lr, (list, tuple)):
            text_encoder_lr = text_encoder_lr[0] if text_encoder_lr else None
        groups: list[dict[str, Any]] = []
        descriptions: list[str] = []

        def add(modules: list[LoRAModule], rate: float | None, ratio: float | None, description: str) -> None:
            if not rate or not modules:
                return
            down = {f"{m.lora_name}.lora_down.weight": m.lora_down.weight for m in modules}
            up = {f"{m.lora_name}.lora_up.weight": m.lora_up.weight for m in modules}
            parts = [(down | up, rate, "")] if not ratio else [(down, rate, ""), (up, rate * ratio, " plus")]
            for params, its_rate, suffix in parts:
                groups.append({"params": params.values(), "lr": its_rate})
                descriptions.append(description + suffix)

        text_rate = default_lr if text_encoder_lr is None else text_encoder_lr
        add(self.text_encoder_loras, text_rate, self.plan.text_encoder_ratio, "textencoder")
        unet_rate = default_lr if unet_lr is None else unet_lr
        if not self.plan.lr_weights:
            add(self.unet_loras, unet_rate, self.plan.unet_ratio, "unet")
        else:
            by_block: dict[int | None, list[LoRAModule]] = {}
            for module in self.unet_loras:
                by_block.setdefault(lora_names.block_number(module.lora_name, self.plan.is_sdxl), []).append(module)
            for block, modules in by_block.items():
                rate = (unet_rate or 0.0) * self.plan.lr_weight(block)
                add(modules, rate, self.plan.unet_ratio, f"unet_block{block}")
        return groups, descriptions

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
        norms, scaled = [], 0
        with torch.no_grad():
            for module in self.loras:
                norm = module.product().norm().clamp(min=limit / 2)
                ratio = norm.clamp(max=limit) / norm
                if ratio.item() != 1.0:
                    scaled += 1
                    module.lora_up.weight.mul_(ratio.sqrt())
                    module.lora_down.weight.mul_(ratio.sqrt())
                norms.append((norm * ratio).item())
        return scaled, sum(norms) / len(norms), max(norms)

    # ------------------------------------------------------------------------------------------------------ files

    def load_weights(self, file: str | Path) -> str:
        """Load a LoRA file into the attached modules.

        Returns:
            One line that says what was loaded.

        Raises:
            OptionError: nothing fits, or a tensor has another rank.
        """
        return self.load_tensors(read_network_file(file), str(file))

    def load_tensors(self, tensors: Mapping[str, Tensor], source: str) -> str:
        """Load tensors by key; see :meth:`load_weights`."""
        own = self.state_dict()
        matching = {key: value for key, value in tensors.items() if key in own}
        if not matching:
            raise OptionError(
                f"--network_weights {source}: none of its {len(tensors)} tensors belongs to this network "
                f"(first key {next(iter(tensors), 'none')}). Give a LoRA of this kind of model"
            )
        for key, value in matching.items():
            if value.numel() != own[key].numel():
                raise OptionError(
                    f"--network_weights {source}: {key} has shape {list(value.shape)}, this network's is "
                    f"{list(own[key].shape)}. Give the file's --network_dim and conv_dim, or add --dim_from_weights"
                )
            own[key] = value.reshape(own[key].shape).to(own[key].dtype)  # SD2 files differ in 1x1 convolutions
        self.load_state_dict(own)
        for module in self.loras:
            module.scale = float(module.alpha) / module.lora_dim
        missing, extra = len(own) - len(matching), len(tensors) - len(matching)
        line = f"network weights: {len(matching)} tensors loaded from {source}"
        if missing or extra:
            line += f", {missing} of this network are not in it, {extra} of it are not used"
            log.warning(line)
        else:
            log.info(line)
        return line

    def save_weights(self, file: str | Path, dtype: torch.dtype | None, metadata: dict[str, str] | None) -> None:
        """Write the network; ``.safetensors`` with metadata and its hashes, other suffixes by torch.save without."""
        from safetensors.torch import save_file

        from library.metadata import precalculate_safetensors_hashes

        path = Path(file)
        tensors = {k: v.detach().to("cpu", dtype or v.dtype).contiguous() for k, v in self.state_dict().items()}
        if path.suffix != ".safetensors":
            write_file(path, lambda temporary: torch.save(tensors, temporary))
            return
        metadata = dict(metadata or {})
        if metadata:
            model_hash, legacy_hash = precalculate_safetensors_hashes(tensors, metadata)
            metadata |= {"sshs_model_hash": model_hash, "sshs_legacy_hash": legacy_hash}
        write_file(path, lambda temporary: save_file(tensors, temporary, metadata=metadata or None))

    def merge_to(
        self, text_encoder: Any, unet: nn.Module, weights_sd: Mapping[str, Tensor], dtype: torch.dtype, device: Any
    ) -> None:
        """Merge ``weights_sd`` into the base model; the network must be made of LoRAInfModule."""
        for module in self.loras:
            self.add_module(module.lora_name, module)
        self.load_tensors(weights_sd, "--base_weights")
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


def read_network_file(file: str | Path) -> dict[str, Tensor]:
    """Read the tensors of a LoRA file.

    Raises:
        OptionError: missing, damaged, or a pickle that needs code.
    """
    from library.checkpoint import read_tensors

    path = Path(file)
    if not path.is_file():
        raise OptionError(f"--network_weights {file}: there is no such file. Give a .safetensors, .ckpt or .pt LoRA")
    return read_tensors(path, "--network_weights")


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
    """Build the network that the options describe; see the module contract in docs/architecture.md.

    Args:
        multiplier: of every module's output. network_dim, network_alpha: rank and alpha, None for 4 and 1.
        text_encoder: one, or a list; two make it SDXL. neuron_dropout: element dropout. kwargs: ``--network_args``.

    Raises:
        OptionError: an unknown key or a bad value in ``kwargs``.
    """
    arguments = read_network_arguments(kwargs)
    rank = DEFAULT_RANK if network_dim is None else network_dim
    alpha = DEFAULT_ALPHA if network_alpha is None else network_alpha
    plan = block_plan(rank, alpha, arguments, _is_sdxl(text_encoder))
    return LoRANetwork(
        text_encoder,
        unet,
        plan,
        multiplier,
        dropout=neuron_dropout,
        rank_dropout=arguments.rank_dropout,
        module_dropout=arguments.module_dropout,
    )


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

    Returns:
        The network, not yet attached or loaded, and the tensors.
    """
    tensors = dict(weights_sd) if weights_sd is not None else read_network_file(str(file))
    is_sdxl = _is_sdxl(text_encoder)
    if is_sdxl:
        tensors = convert_diffusers_to_sai_if_needed(tensors)
    ranks = {key.split(".")[0]: value.shape[0] for key, value in tensors.items() if key.endswith("lora_down.weight")}
    alphas = {key.split(".")[0]: float(value) for key, value in tensors.items() if key.endswith(".alpha")}
    if not ranks:
        raise OptionError(f"--network_weights {file}: it holds no LoRA (no lora_down.weight). Give a LoRA file")
    arguments = read_network_arguments(kwargs)
    plan = block_plan(DEFAULT_RANK, DEFAULT_ALPHA, arguments, is_sdxl)
    plan = plan.with_modules({name: (rank, alphas.get(name, float(rank))) for name, rank in ranks.items()})
    module_class = LoRAInfModule if for_inference else LoRAModule
    return LoRANetwork(text_encoder, unet, plan, multiplier, module_class=module_class), tensors


def convert_diffusers_to_sai_if_needed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give SDXL tensors with the block names of the original model."""
    if not any(key.startswith(("lora_unet_down_blocks", "lora_unet_up_blocks")) for key in weights):
        return weights
    renamed = {}
    for key, value in weights.items():
        name, dot, rest = key.partition(".")
        renamed[f"{lora_names.diffusers_sdxl_key_to_ldm(name)}{dot}{rest}"] = value
    return renamed
