"""What others override when they subclass a trainer: each step of a run as a method with sd-scripts' arguments.

Each method does what the trainer does, through our own functions; the trainer calls nothing else, so an override counts
wherever the step is made. ``args`` are the parsed options, ``accelerator`` is accelerate's, ``batch`` is one of
``library.dataset``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from library import metadata, settings
from library.batch_loss import BatchResult, finite_latents, sample_losses, schedule_of
from library.checkpoint import LoadedModel, find_model
from library.errors import OptionError
from library.losses import weighted
from library.model_families import SD, ModelFamily, set_attention
from library.noise import disturb, noise_schedule
from library.optimizers import logged_rates, step_size_estimates
from library.processes import mean_gradients
from library.run_plan import Update
from library.trackers import ScalarLog
from library.validation import Validation

log = logging.getLogger(__name__)


class TokenizeStrategy:
    """Turns texts into token ids as a model family does; travels to worker processes.

    Args:
        family: decides how. tokenizers: one for each text encoder. max_token_length: None, 150 or 225.
    """

    def __init__(self, family: ModelFamily, tokenizers: Sequence[Any], max_token_length: int | None):
        self.tokenizers = list(tokenizers)
        length = {"max_token_length": max_token_length}
        self.tokenize = functools.partial(family.tokenize, self.tokenizers, **length)
        self.tokenize_with_weights = functools.partial(family.tokenize_with_weights, self.tokenizers, **length)


class TextEncodingStrategy:
    """Turns token ids into what the U-Net is conditioned on, a list of tensors."""

    def __init__(self, family: ModelFamily, clip_skip: int | None):
        self._family = family
        self._clip_skip = clip_skip

    def encode_tokens(self, tokenize_strategy: Any, models: Sequence[Any], tokens: Sequence[Tensor]) -> list[Tensor]:
        return self._family.encode_text(models, tokens, self._clip_skip)

    def encode_tokens_with_weights(
        self, tokenize_strategy: Any, models: Sequence[Any], tokens: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> list[Tensor]:
        return self._family.encode_weighted(models, tokens, weights, self._clip_skip)


@dataclass(frozen=True)
class LossScalars:
    """Names that losses are logged under: of the last batch (None leaves it out), their mean, and that of an epoch."""

    batch: str | None
    mean: str
    epoch: str


class TrainerHooks:
    """The steps of a run that a subclass may replace.

    Attributes:
        loss_scalars: names that the losses are logged under.
        vae_scale_factor: latents are multiplied by it. is_sdxl: the model has two text encoders and is told sizes.
    """

    family: ModelFamily = SD
    loss_scalars = LossScalars("loss/current", "loss/average", "loss/epoch_average")

    def __init__(self) -> None:
        self.vae_scale_factor = self.family.latent_scale
        self.is_sdxl = self.family.kind(False) == "sdxl"
        self._loaded: LoadedModel | None = None
        self._version = ""
        self._details: BatchResult | None = None
        self._facts: metadata.RunFacts | None = None
        self._scalars: ScalarLog | None = None
        self._draw: Callable[[int | None, int], None] | None = None

    # ---------------------------------------------------------------------------------------------------- checks

    def assert_extra_args(self, args: Namespace, train_dataset_group: Any, val_dataset_group: Any) -> None:
        """Refuse what this kind of training cannot do; may change ``args``. Called before a model is loaded."""

    # --------------------------------------------------------------------------------------------------- loading

    def load_target_model(
        self, args: Namespace, weight_dtype: torch.dtype, accelerator: Any
    ) -> tuple[str, Any, Any, Any]:
        """Give (version name, text encoder or list of them, VAE, U-Net), attention chosen."""
        self._loaded = model = self.family.load(
            find_model(args.pretrained_model_name_or_path),
            self.family.kind(args.v2),
            dtype=weight_dtype,
            vae_path=Path(args.vae) if args.vae else None,
            tokenizer_cache=Path(args.tokenizer_cache_dir) if args.tokenizer_cache_dir else None,
            mapped=not args.disable_mmap_load_safetensors,
        )
        set_attention(model.unet, settings.read_precision(args).attention)
        encoders = model.text_encoders[0] if len(model.text_encoders) == 1 else model.text_encoders
        return self.family.version(args.v2, args.v_parameterization), encoders, model.vae, model.unet

    def load_unet_lazily(
        self, args: Namespace, weight_dtype: torch.dtype, accelerator: Any, text_encoders: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]]:
        """Give (U-Net, text encoders) where :meth:`load_target_model` gave None as the U-Net."""
        raise NotImplementedError("load_target_model gave no U-Net, and load_unet_lazily is not overridden")

    def cast_text_encoder(self, args: Namespace) -> bool:
        """Say whether text encoders are brought to the dtype of frozen weights."""
        return True

    def cast_vae(self, args: Namespace) -> bool:
        """Say whether the VAE is brought to the dtype of frozen weights."""
        return True

    def cast_unet(self, args: Namespace) -> bool:
        """Say whether the U-Net is brought to the dtype of frozen weights."""
        return True

    def prepare_unet_with_accelerator(self, args: Namespace, accelerator: Any, unet: Any) -> Any:
        """Give the U-Net ready to be called; it lies on the device, and frozen weights need nothing else."""
        return unet

    def prepare_text_encoder_grad_ckpt_workaround(self, index: int, text_encoder: Any) -> None:
        """Called for each text encoder under gradient checkpointing, which needs nothing here."""

    def prepare_text_encoder_fp8(
        self, index: int, text_encoder: Any, te_weight_dtype: torch.dtype, weight_dtype: torch.dtype
    ) -> None:
        """Never called, because ``--fp8_base`` is refused."""

    def post_process_network(
        self, args: Namespace, accelerator: Any, network: Any, text_encoders: Any, unet: Any
    ) -> None:
        """Called between the network's creation and its ``apply_to``."""

    # ------------------------------------------------------------------------------------------------------ text

    def get_tokenize_strategy(self, args: Namespace) -> Any:
        """Give what has ``tokenize(texts)``: one (B, n, 77) tensor of ids for each text encoder.

        For ``--weighted_captions`` also ``tokenize_with_weights(texts)``: (ids, weights (B, 75 n + 2)), a list of each.
        """
        tokenizers = self._loaded.tokenizers if self._loaded else []
        return TokenizeStrategy(self.family, tokenizers, args.max_token_length)

    def get_tokenizers(self, tokenize_strategy: Any) -> list[Any]:
        return list(tokenize_strategy.tokenizers)

    def get_text_encoding_strategy(self, args: Namespace) -> Any:
        """Give what has ``encode_tokens(tokenize_strategy, models, ids)``: the list of tensors given to call_unet."""
        return TextEncodingStrategy(self.family, args.clip_skip)

    def get_latents_caching_strategy(self, args: Namespace) -> Any:
        """Give None: ``library.latent_cache`` writes and reads the files, another strategy is refused."""

    def get_text_encoder_outputs_caching_strategy(self, args: Namespace) -> Any:
        """Give None: ``library.text_cache`` writes and reads the files, another strategy is refused."""

    def cache_text_encoder_outputs_if_needed(
        self,
        args: Namespace,
        accelerator: Any,
        unet: Any,
        vae: Any,
        text_encoders: Sequence[Any],
        dataset: Any,
        weight_dtype: torch.dtype,
    ) -> None:
        """Encode every caption once when the options ask for it."""
        if args.cache_text_encoder_outputs or args.cache_text_encoder_outputs_to_disk:
            self._refuse_strategy(self.get_text_encoder_outputs_caching_strategy(args), "text encoder outputs")
            self._cache_text_outputs(args, dataset, self._loaded, accelerator)

    def _refuse_strategy(self, strategy: Any, what: str) -> None:
        if strategy is not None:
            raise OptionError(
                f"{type(self).__name__} has a strategy of its own for caching {what}, which is not used here. "
                f"Leave the cache out"
            )

    def _cache_text_outputs(self, args: Namespace, data: Any, model: Any, accelerator: Any) -> None:
        raise NotImplementedError

    def get_models_for_text_encoding(
        self, args: Namespace, accelerator: Any, text_encoders: Sequence[Any]
    ) -> Sequence[Any]:
        """Give the models that ``encode_tokens`` is called with."""
        return text_encoders

    def is_train_text_encoder(self, args: Namespace) -> bool:
        """Say whether gradients flow through the text encoders."""
        return settings.read_trained_parts(args)[0]

    def get_text_encoders_train_flags(self, args: Namespace, text_encoders: Sequence[Any]) -> list[bool]:
        return [self.is_train_text_encoder(args)] * len(text_encoders)

    def is_text_encoder_not_needed_for_training(self, args: Namespace) -> bool:
        """Say whether the text encoders can leave the device during training."""
        return False

    # ----------------------------------------------------------------------------------------------------- batch

    def get_noise_scheduler(self, args: Namespace, device: Any) -> Any:
        """Give the Diffusers scheduler whose levels are trained on, ``all_snr`` (of the plain schedule) on it."""
        from diffusers import DDPMScheduler

        from library.noise import BETA_END, BETA_START, TRAIN_STEPS

        levels = noise_schedule(args.zero_terminal_snr).to(device)
        scheduler = DDPMScheduler(TRAIN_STEPS, BETA_START, BETA_END, "scaled_linear", clip_sample=False)
        scheduler.betas, scheduler.alphas = levels.betas, 1.0 - levels.betas
        scheduler.alphas_cumprod, scheduler.all_snr = levels.alphas_cumprod, levels.snr
        return scheduler

    def encode_images_to_latents(self, args: Namespace, vae: Any, images: Tensor) -> Tensor:
        """Give a sample of each image's posterior, not yet scaled."""
        return vae.encode(images).latent_dist.sample()

    def shift_scale_latents(self, args: Namespace, latents: Tensor) -> Tensor:
        return latents * self.vae_scale_factor

    def call_unet(
        self,
        args: Namespace,
        accelerator: Any,
        unet: Any,
        noisy_latents: Tensor,
        timesteps: Tensor,
        text_conds: Sequence[Tensor],
        batch: dict[str, Any],
        weight_dtype: torch.dtype,
        **kwargs: Any,
    ) -> Tensor:
        """Give the U-Net's prediction, (B, C, h, w); with ``indices`` that of those samples of the batch only."""
        indices = kwargs.get("indices")
        if indices is not None and len(indices):
            size = len(noisy_latents)
            noisy_latents, timesteps = noisy_latents[indices], timesteps[indices]
            text_conds = [each[indices] for each in text_conds]
            batch = {
                name: value[indices] if isinstance(value, Tensor) and len(value) == size else value
                for name, value in batch.items()
            }
        return self.family.predict(unet, noisy_latents, timesteps, text_conds, batch)

    def get_noise_pred_and_target(
        self,
        args: Namespace,
        accelerator: Any,
        noise_scheduler: Any,
        latents: Tensor,
        batch: dict[str, Any],
        text_encoder_conds: Sequence[Tensor],
        unet: Any,
        network: Any,
        weight_dtype: torch.dtype,
        train_unet: bool,
        is_train: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Give (prediction, target, timesteps, weight of each sample or None)."""
        disturbed = disturb(latents, schedule_of(noise_scheduler), settings.read_noise(args))
        noisy = disturbed.noisy_latents.to(weight_dtype)
        with torch.set_grad_enabled(is_train and torch.is_grad_enabled()), accelerator.autocast():
            prediction = self.call_unet(
                args, accelerator, unet, noisy, disturbed.timesteps, text_encoder_conds, batch, weight_dtype
            )
        target = disturbed.target
        preserved = [
            place for place, has in enumerate(batch["custom_attributes"]) if has.get("diff_output_preservation")
        ]
        if preserved:
            target = target.clone()
            network.set_multiplier(0.0)
            try:
                with torch.no_grad(), accelerator.autocast():
                    own = self.call_unet(
                        *(args, accelerator, unet, noisy, disturbed.timesteps, text_encoder_conds, batch, weight_dtype),
                        indices=preserved,
                    )
            finally:
                network.set_multiplier(1.0)
            target[preserved] = own.to(target.dtype)
        return prediction, target, disturbed.timesteps, None

    def post_process_loss(self, loss: Tensor, args: Namespace, timesteps: Tensor, noise_scheduler: Any) -> Tensor:
        """Weight the loss of each sample, (B,)."""
        snr = schedule_of(noise_scheduler).snr
        return weighted(loss, timesteps, snr, settings.read_loss(args), args.v_parameterization)

    def process_batch(
        self,
        batch: dict[str, Any],
        text_encoders: Sequence[Any],
        unet: Any,
        network: Any,
        vae: Any,
        noise_scheduler: Any,
        vae_dtype: torch.dtype,
        weight_dtype: torch.dtype,
        accelerator: Any,
        args: Namespace,
        text_encoding_strategy: Any,
        tokenize_strategy: Any,
        is_train: bool = True,
        train_text_encoder: bool = True,
        train_unet: bool = True,
    ) -> Tensor:
        """Give the loss of a batch, a scalar with gradient history."""
        latents = batch["latents"]
        if latents is None:
            with torch.no_grad():
                images = batch["images"].to(accelerator.device, vae_dtype)
                latents = finite_latents(self.encode_images_to_latents(args, vae, images).float(), batch["image_keys"])
        latents = self.shift_scale_latents(args, latents.to(accelerator.device))
        conditions = batch["text_encoder_outputs_list"]
        if conditions is not None:
            conditions = [each.to(accelerator.device) for each in conditions]
        else:
            ids, weights = batch["input_ids_list"], None
            if args.weighted_captions:
                ids, weights = tokenize_strategy.tokenize_with_weights(batch["captions"])
            ids = [each.to(accelerator.device) for each in ids]
            models = self.get_models_for_text_encoding(args, accelerator, text_encoders)
            gradients = contextlib.nullcontext() if is_train and train_text_encoder else torch.no_grad()
            with gradients, accelerator.autocast():
                if weights is None:
                    conditions = text_encoding_strategy.encode_tokens(tokenize_strategy, models, ids)
                else:
                    encode = text_encoding_strategy.encode_tokens_with_weights
                    conditions = encode(tokenize_strategy, models, ids, weights)
        prediction, target, timesteps, weighting = self.get_noise_pred_and_target(
            args,
            accelerator,
            noise_scheduler,
            latents,
            batch,
            conditions,
            unet,
            network,
            weight_dtype,
            train_unet,
            is_train,
        )
        levels = schedule_of(noise_scheduler).alphas_cumprod
        losses = sample_losses(prediction, target, timesteps, batch, settings.read_loss(args), levels, weighting)
        losses = self.post_process_loss(
            losses * batch["loss_weights"].to(losses.device), args, timesteps, noise_scheduler
        )
        loss = losses.mean()
        self._details = BatchResult(loss, losses.detach(), timesteps)
        return loss

    # ---------------------------------------------------------------------------------------------------- update

    def on_step_start(
        self,
        args: Namespace,
        accelerator: Any,
        network: Any,
        text_encoders: Sequence[Any],
        unet: Any,
        batch: dict[str, Any],
        weight_dtype: torch.dtype,
        is_train: bool = True,
    ) -> None:
        """Called before each batch."""

    def on_validation_step_end(
        self,
        args: Namespace,
        accelerator: Any,
        network: Any,
        text_encoders: Sequence[Any],
        unet: Any,
        batch: dict[str, Any],
        weight_dtype: torch.dtype,
    ) -> None:
        """Called after each validation batch."""

    def all_reduce_network(self, accelerator: Any, network: Any) -> None:
        """Replace every gradient by its mean over the processes."""
        mean_gradients(list(network.get_trainable_params()), accelerator.device)

    def sample_images(
        self,
        accelerator: Any,
        args: Namespace,
        epoch: int | None,
        global_step: int,
        device: Any,
        vae: Any,
        tokenizers: Sequence[Any],
        text_encoder: Any,
        unet: Any,
    ) -> None:
        """Draw the previews that are due; called at every step with epoch None, and at every epoch's end."""
        if self._draw is not None:
            self._draw(epoch, global_step)

    # ------------------------------------------------------------------------------------------ metadata and logs

    def get_sai_model_spec(self, args: Namespace) -> dict[str, str]:
        """Give the modelspec entries of the files."""
        if self._facts is None:
            raise AssertionError("modelspec entries are known once the model is loaded")
        return metadata.modelspec(args, self._facts)

    def update_metadata(self, metadata: dict[str, str], args: Namespace) -> None:
        """Add entries to the metadata of every file, in place."""

    def generate_step_logs(
        self,
        args: Namespace,
        current_loss: float,
        avr_loss: float,
        lr_scheduler: Any,
        lr_descriptions: Sequence[str],
        optimizer: Any = None,
        keys_scaled: int | None = None,
        mean_norm: float | None = None,
        maximum_norm: float | None = None,
        mean_grad_norm: float | None = None,
        mean_combined_norm: float | None = None,
    ) -> dict[str, float]:
        """Give the scalars of a step, by the names they are logged under."""
        names = self.loss_scalars
        logs = {names.batch: current_loss} if names.batch else {}
        logs[names.mean] = avr_loss
        norms = {
            "max_norm/keys_scaled": keys_scaled,
            "norm/avg_key_norm": mean_norm,
            "max_norm/max_key_norm": maximum_norm,
            "norm/avg_grad_norm": mean_grad_norm,
            "norm/avg_combined_norm": mean_combined_norm,
        }
        logs |= {name: value for name, value in norms.items() if value is not None}
        if optimizer is not None:
            logs |= logged_rates(optimizer, lr_descriptions, step_size_estimates(optimizer))
        return logs

    def step_logging(self, accelerator: Any, logs: dict[str, float], global_step: int, epoch: int) -> None:
        self.accelerator_logging(accelerator, logs, global_step, global_step, epoch)

    def epoch_logging(self, accelerator: Any, logs: dict[str, float], global_step: int, epoch: int) -> None:
        self.accelerator_logging(accelerator, logs, epoch, global_step, epoch)

    def val_logging(
        self, accelerator: Any, logs: dict[str, float], global_step: int, epoch: int, val_step: int
    ) -> None:
        self.accelerator_logging(accelerator, logs, global_step + val_step, global_step, epoch, val_step)

    def _log_validation(
        self, accelerator: Any, validation: Validation, update: Update, at_epoch_end: bool, training_loss: float
    ) -> None:
        """Measure the loss on held-out images and log it, with its distance from the training's mean loss."""
        name = f"loss/validation/{'epoch' if at_epoch_end else 'step'}"
        mean = validation.measure(
            accelerator,
            lambda number, loss: self.val_logging(
                accelerator, {f"{name}_current": loss}, update.step, update.epoch, number
            ),
        )
        if mean is None:
            return
        log.info("validation loss after step %d: %.4g (training: %.4g)", update.step, mean, training_loss)
        logs = {f"{name}_average": mean, f"{name}_divergence": mean - training_loss}
        write = self.epoch_logging if at_epoch_end else self.step_logging
        write(accelerator, logs, update.step, update.epoch)

    def accelerator_logging(
        self,
        accelerator: Any,
        logs: dict[str, float],
        step_value: int,
        global_step: int,
        epoch: int,
        val_step: int | None = None,
    ) -> None:
        """Write scalars at ``step_value`` of their x-axis."""
        if self._scalars is not None:
            row = {"global_step": global_step, "epoch": epoch, **({} if val_step is None else {"val_step": val_step})}
            self._scalars.write(logs, step_value, row)
