"""A base model that is trained itself, told to the trainer as a network: what is trained, at which rates, how saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from library import checkpoint_keys as keys
from library.checkpoint import LoadedModel, save_folder, save_single_file, single_file_of
from library.delta import Base, save_delta


class FullModel(nn.Module):
    """The trained parts of a base model, with the methods of a network module.

    Args:
        model: base model; its trained parts are put into ``dtype``, the others into ``frozen_dtype``.
        kind: layout of its files. trains_unet: whether the U-Net is trained. trained_encoders: the same for each text
            encoder. idle: parameters that no prediction depends on; they are neither trained nor given to an optimizer.
        block_rates: learning rate of each U-Net block, None for one rate.
        block_of: block number of a U-Net parameter by its name in files.
        pipeline: called with nothing, gives a Diffusers pipeline over the same modules, for saving as a folder.
        safetensors: kind of weight files in such a folder.
        base: the base model's tensors, where saves are what changed against them.
    """

    writes_whole_files = True

    def __init__(
        self,
        model: LoadedModel,
        kind: str,
        *,
        dtype: torch.dtype,
        frozen_dtype: torch.dtype,
        trains_unet: bool,
        trained_encoders: Sequence[bool],
        idle: Sequence[nn.Parameter] = (),
        block_rates: Sequence[float] | None = None,
        block_of: Callable[[str], int] | None = None,
        pipeline: Callable[[], Any] | None = None,
        safetensors: bool = True,
        base: Base | None = None,
    ):
        super().__init__()
        self.kind = kind
        self.block_rates, self.block_of = block_rates, block_of
        self._base = base
        self._model, self._pipeline, self._safetensors = [model], pipeline, safetensors  # a list hides the base model
        self._idle = {id(param) for param in idle}
        several = len(model.text_encoders) > 1
        names = [f"text_encoder{index + 1 if several else ''}" for index in range(len(model.text_encoders))]
        every = {"unet": model.unet, **dict(zip(names, model.text_encoders))}
        self.trained = [name for name, wanted in zip(every, (trains_unet, *trained_encoders)) if wanted]
        for name, module in every.items():
            nn.Module.to(module, dtype if name in self.trained else frozen_dtype)  # Diffusers' own comments on it
            if name in self.trained:
                self.add_module(name, module)

    @property
    def stored_modules(self) -> list[nn.Module]:
        """The trained modules, in the order of a state's model files."""
        return [self.get_submodule(name) for name in self.trained]

    # --------------------------------------------------------------------------------------------------- training

    def apply_to(self, text_encoder: Any, unet: nn.Module, apply_text_encoder: bool, apply_unet: bool) -> None:
        """Nothing to attach: the modules are the model's own."""

    def prepare_grad_etc(self, text_encoder: Any, unet: nn.Module) -> None:
        for param in self.parameters():
            param.requires_grad_(id(param) not in self._idle)

    def enable_gradient_checkpointing(self) -> None:
        """Nothing to do: the base model recomputes."""

    def on_epoch_start(self, text_encoder: Any, unet: nn.Module) -> None:
        self.train()

    def get_trainable_params(self) -> Iterator[nn.Parameter]:
        return (param for param in self.parameters() if param.requires_grad)

    def parameter_tags(self) -> Iterator[tuple[Tensor, str, str, str]]:
        """Give (parameter, name, role ``weight`` or ``bias``, block label) of everything that is trained."""
        for name, param in self.named_parameters():
            part = name.split(".")[0]
            block = "" if part == "unet" else part.upper().replace("TEXT_ENCODER", "TE")
            yield param, name, name.rsplit(".", 1)[-1], block

    def prepare_optimizer_params_with_multiple_te_lrs(
        self, text_encoder_lr: Sequence[float | None], unet_lr: float | None, default_lr: float | None
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Give the optimizer's groups and a description of each: the U-Net or its blocks, then the text encoders.

        Args:
            text_encoder_lr: one rate for each text encoder of the model. unet_lr: of the U-Net.
        """
        rates = {"unet": unet_lr}
        for index, rate in enumerate(text_encoder_lr):
            rates["text_encoder" if len(text_encoder_lr) == 1 else f"text_encoder{index + 1}"] = rate
        groups: list[dict[str, Any]] = []
        descriptions = []
        for name in self.trained:
            params = [param for param in self.get_submodule(name).parameters() if param.requires_grad]
            parts = [(name, params, rates[name])]
            if name == "unet" and self.block_rates is not None:
                parts = self._block_parts()
            for description, own, rate in parts:
                groups.append({"params": own, "lr": rate})
                descriptions.append(description)
        return groups, descriptions

    def _block_parts(self) -> list[tuple[str, list[nn.Parameter], float]]:
        assert self.block_rates is not None and self.block_of is not None
        unet = self.get_submodule("unet")
        names = keys.unet_table_of_diffusers(dict(unet.named_parameters()))
        by_block: list[list[nn.Parameter]] = [[] for _ in self.block_rates]
        for name, param in unet.named_parameters():
            by_block[self.block_of(keys.translate(name, names) or name)].append(param)
        for rate, params in zip(self.block_rates, by_block):
            for param in params:
                param.requires_grad_(rate != 0)
        blocks = enumerate(zip(self.block_rates, by_block))
        return [(f"block{number}", params, rate) for number, (rate, params) in blocks if rate and params]

    # ------------------------------------------------------------------------------------------------------ files

    def save_weights(self, file: str | Path, dtype: torch.dtype | None, metadata: dict[str, str] | None) -> None:
        """Write the whole model: one file by its suffix, or a Diffusers folder without one."""
        path, content, model = Path(file), metadata or {}, self._model[0]
        if not path.suffix and self._pipeline is not None:
            save_folder(path, self._pipeline(), dtype=dtype, safetensors=self._safetensors)
            return
        spec = {key: value for key, value in content.items() if key.startswith("modelspec.")}
        if self._base is not None:
            save_delta(path, single_file_of(model, self.kind), self._base, dtype, spec)
            return
        counts = int(content.get("ss_epoch", 0)), int(content.get("ss_steps", 0))
        save_single_file(path, model, self.kind, dtype=dtype, metadata=spec, counts=counts)
