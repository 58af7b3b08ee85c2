"""Runs that train a base model itself, U-Net and text encoders: the one trainer, told that the model is the network."""

from __future__ import annotations

import functools
import logging
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from library import delta, grad_filter, settings
from library.accelerator import DTYPES
from library.args import with_defaults
from library.checkpoint import BASE_MODEL, LoadedModel
from library.errors import ErrorCollector, OptionError
from library.full_model import FullModel
from library.fused_steps import (
    FusedSteps,
    OptimizerList,
    SchedulerList,
    split_groups,
    unit_of_optimizer,
    units_of_parameters,
)
from library.loop import TrainedParts
from library.model_families import SD, SDXL, pipeline_for_saving
from library.optimizers import find_optimizer, get_optimizer
from library.processes import MeansInBackward
from library.run_plan import RunPlan
from library.schedulers import get_scheduler_fix
from library.trainer import NetworkTrainer, OptimizerParts
from library.trainer_hooks import LossScalars

log = logging.getLogger(__name__)

FORMATS = {"diffusers": "", "diffusers_safetensors": "", "ckpt": ".ckpt", "safetensors": ".safetensors"}


class ModelTrainer(NetworkTrainer):
    """Trains SDXL itself."""

    family = SDXL
    script = "sdxl_train"
    architecture_suffix = ""
    tracker_name = "finetuning"
    loss_scalars = LossScalars(None, "loss", "loss/epoch")

    # ------------------------------------------------------------------------------------------- before loading

    def text_encoder_rates(self, args: Namespace) -> list[float]:
        """Give the learning rate of each text encoder, 0 where it is not trained."""
        own = (args.learning_rate_te1, args.learning_rate_te2)
        return [args.learning_rate if rate is None else rate for rate in own] if args.train_text_encoder else [0.0, 0.0]

    def complete(self, args: Namespace) -> Namespace:
        """Say with the options of a network what is trained."""
        full = with_defaults(args)
        full.text_encoder_lr = self.text_encoder_rates(full)
        full.unet_lr = full.learning_rate
        full.network_train_unet_only = not any(full.text_encoder_lr)
        full.network_train_text_encoder_only = not full.learning_rate and not full.block_lr
        return full

    def check_filter(self, args: Namespace) -> None:
        super().check_filter(args)
        spec = grad_filter.spec_from_args(args)
        if spec is None or not args.fused_backward_pass:
            return
        try:
            grad_filter.attach(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0), spec, in_backward=True)
        except grad_filter.GradFilterError as error:
            raise OptionError(str(error)) from error
        log.info("--fused_backward_pass: the gradient filter makes no statistics and no pictures, as no step ends")

    def check_network(self, args: Namespace) -> None:
        errors = ErrorCollector()
        if args.network_train_unet_only and args.network_train_text_encoder_only:
            errors.messages.append("--learning_rate 0 and no trained text encoder leave nothing to train")
        for check in (self._check_block_rates, _check_fused, _check_text_cache, _check_delta, self._check_target):
            with errors.check():
                check(args)
        errors.raise_if_any()

    def assert_extra_args(self, args: Namespace, train_dataset_group: Any, val_dataset_group: Any) -> None:
        for subset in (subset for spec in train_dataset_group.specs for subset in spec.subsets):
            if subset.custom_attributes.get("diff_output_preservation"):
                raise OptionError(
                    f"{subset.name}: diff_output_preservation keeps what a model does without its LoRA, and there is "
                    f"none here. Leave it out of custom_attributes"
                )

    def _check_block_rates(self, args: Namespace) -> None:
        self._block_rates(args)

    def _block_rates(self, args: Namespace) -> list[float] | None:
        if not args.block_lr:
            return None
        wanted = self.family.lr_blocks
        try:
            rates = [float(item) for item in str(args.block_lr).split(",")]
        except ValueError as error:
            raise OptionError(f"--block_lr: {error}. Give {wanted} rates joined by commas") from error
        if len(rates) != wanted or any(not rate >= 0 for rate in rates):
            raise OptionError(f"--block_lr: {wanted} rates of at least 0 are needed, got {len(rates)}")
        return rates

    def _check_target(self, args: Namespace) -> None:
        source = Path(args.pretrained_model_name_or_path or "")
        target = Path(args.output_dir or "") / f"{args.output_name or 'last'}{self.model_suffix(args)}"
        if source.exists() and target.resolve() == source.resolve():
            raise OptionError(f"--output_name: the result would replace the base model {source}. Use another name")

    def model_suffix(self, args: Namespace) -> str:
        """Give the suffix of the format asked for, or of what was loaded."""
        if args.save_delta:
            return delta.SUFFIX
        if args.save_model_as:
            return FORMATS[args.save_model_as]
        source = Path(args.pretrained_model_name_or_path or "")
        if not source.is_file():
            return ""
        return ".safetensors" if args.use_safetensors or source.suffix == ".safetensors" else ".ckpt"

    # ------------------------------------------------------------------------------------------------- the parts

    def base_dtype(self, precision: settings.PrecisionSettings) -> torch.dtype:
        return DTYPES[precision.full] if precision.full else torch.float32

    def create_network(
        self, args: Namespace, model: LoadedModel, precision: settings.PrecisionSettings, accelerator: Any
    ) -> tuple[FullModel, dict[str, str]]:
        network = FullModel(
            model,
            self.family.kind(args.v2),
            dtype=self.base_dtype(precision),
            frozen_dtype=DTYPES[precision.mixed],
            trains_unet=not args.network_train_text_encoder_only,
            trained_encoders=[bool(rate) for rate in args.text_encoder_lr],
            idle=self.family.idle_parameters(model.text_encoders),
            block_rates=self._block_rates(args),
            block_of=self.family.block_of,
            pipeline=functools.partial(pipeline_for_saving, self.family, model),
            safetensors=args.save_model_as != "diffusers",
            base=delta.Base(model.source, BASE_MODEL, self.family.kind(args.v2)) if args.save_delta else None,
        )
        return network, {}

    def create_optimizer(
        self, args: Namespace, groups: Sequence[dict[str, Any]], names: Sequence[str], accelerator: Any, plan: RunPlan
    ) -> OptimizerParts:
        if not (args.fused_backward_pass or args.fused_optimizer_groups):
            return super().create_optimizer(args, groups, names, accelerator, plan)
        by_id = {id(p): name for name, p in zip(names, (p for group in groups for p in group["params"]))}
        means = MeansInBackward([p for group in groups for p in group["params"]]) if plan.processes > 1 else None
        if args.fused_optimizer_groups:
            built = [get_optimizer(args, [group]) for group in split_groups(groups, args.fused_optimizer_groups)]
            optimizers = [optimizer for _, _, optimizer in built]
            units = [unit_of_optimizer(each) for each in optimizers]
            raw: Any = OptimizerList(optimizers)
        else:
            built = [get_optimizer(args, groups)]
            optimizers = [built[0][2]]
            units = units_of_parameters(optimizers[0])
            raw = optimizers[0]
        schedulers = [
            get_scheduler_fix(args, optimizer, accelerator.num_processes, plan.max_steps) for optimizer in optimizers
        ]
        fused = FusedSteps(units, by_id, args.max_grad_norm, means)
        scheduler = SchedulerList(schedulers, accelerator.num_processes)
        return OptimizerParts(built[0][0], built[0][1], raw, raw, scheduler, fused)


def _check_fused(args: Namespace) -> None:
    switches = {"fused_backward_pass": args.fused_backward_pass, "fused_optimizer_groups": args.fused_optimizer_groups}
    given = [f"--{name}" for name, value in switches.items() if value]
    if not given:
        return
    if len(given) == 2:
        raise OptionError("--fused_backward_pass and --fused_optimizer_groups together: give one of them")
    if args.mixed_precision == "fp16":
        raise OptionError(f"{given[0]} does not go with --mixed_precision fp16, whose steps may be left out. Use bf16")
    if args.fused_backward_pass:
        if find_optimizer(args.optimizer_type).name != "Adafactor":
            raise OptionError(
                "--fused_backward_pass works with --optimizer_type Adafactor only. Use it, or leave it out"
            )
        if args.gradient_accumulation_steps > 1:
            raise OptionError("--fused_backward_pass keeps no gradients. Use --gradient_accumulation_steps 1")
    elif args.fused_optimizer_groups < 1:
        raise OptionError("--fused_optimizer_groups: at least 1 group is needed. Example: --fused_optimizer_groups 10")


def _check_text_cache(args: Namespace) -> None:
    cached = args.cache_text_encoder_outputs or args.cache_text_encoder_outputs_to_disk
    if cached and any(args.text_encoder_lr):
        raise OptionError("--cache_text_encoder_outputs does not go with --train_text_encoder. Leave one of them out")
    if cached and args.weighted_captions:
        raise OptionError("--cache_text_encoder_outputs does not go with --weighted_captions. Leave one of them out")


def _check_delta(args: Namespace) -> None:
    if args.save_delta and args.save_model_as not in (None, "safetensors"):
        raise OptionError(
            f"--save_delta does not go with --save_model_as {args.save_model_as}: what changed is a .safetensors file. "
            f"Leave one of them out"
        )


class SdModelTrainer(ModelTrainer):
    """Trains Stable Diffusion 1.x or 2.x itself; DreamBooth folders train the text encoder too unless told not to."""

    family = SD
    script = "train_db"

    def text_encoder_rates(self, args: Namespace) -> list[float]:
        wanted = args.train_text_encoder or self.script == "train_db"
        if args.stop_text_encoder_training is not None and args.stop_text_encoder_training <= 0:
            wanted = False
        rate = args.learning_rate if args.learning_rate_te is None else args.learning_rate_te
        return [rate if wanted else 0.0]

    def after_update(self, args: Namespace, parts: TrainedParts, step: int) -> None:
        """Leave the text encoder as it is after step --stop_text_encoder_training, also after a resume behind it."""
        last = args.stop_text_encoder_training or 0
        if last <= 0 or step < last or not any(args.text_encoder_lr):
            return
        for encoder in parts.text_encoders:
            if any(param.requires_grad for param in encoder.parameters()):
                log.info("the text encoder is not trained any more, after step %d", step)
            encoder.requires_grad_(False)  # without gradients an optimizer leaves values and moments alone


class FineTuningTrainer(SdModelTrainer):
    """Trains Stable Diffusion 1.x or 2.x itself on images with a metadata file."""

    script = "fine_tune"
