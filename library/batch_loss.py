"""One forward pass: a batch becomes latents, noise, a prediction and a loss."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from library.checkpoint import LoadedModel
from library.losses import LOSSES, LossOptions, element_loss, huber_threshold, weighted
from library.model_families import ModelFamily
from library.noise import NoiseOptions, NoiseSchedule, disturb

log = logging.getLogger(__name__)


@dataclass
class BatchResult:
    """What one forward pass gives.

    Attributes:
        loss: scalar with gradient history, the mean over the batch. losses: (B,) detached, weighted as in ``loss``.
        timesteps: (B,) int64.
    """

    loss: Tensor
    losses: Tensor
    timesteps: Tensor


@dataclass(frozen=True)
class TextSettings:
    """How captions are encoded; names as the options."""

    clip_skip: int | None
    max_token_length: int | None
    trains_text_encoder: bool


class BatchLoss:
    """Forward pass of a model family under given noise and loss options.

    Args:
        family: how this kind of model encodes text and predicts noise. model: its parts, on the device.
        schedule: noise schedule, on the device. noise_options, loss_options, text: plain values.
        accelerator: gives autocast and the device. dtype: of the frozen weights.
    """

    def __init__(
        self,
        family: ModelFamily,
        model: LoadedModel,
        schedule: NoiseSchedule,
        noise_options: NoiseOptions,
        loss_options: LossOptions,
        text: TextSettings,
        accelerator: Any,
        dtype: torch.dtype,
    ):
        self.family = family
        self.model = model
        self.schedule = schedule
        self.noise_options = noise_options
        self.loss_options = loss_options
        self.text = text
        self.accelerator = accelerator
        self.dtype = dtype

    def __call__(self, batch: dict[str, Any]) -> BatchResult:
        """Give the loss of a ready batch, keys as the data set makes them."""
        latents = self._latents(batch) * self.family.latent_scale
        text = self._text_outputs(batch)
        disturbed = disturb(latents, self.schedule, self.noise_options)
        with self.accelerator.autocast():
            prediction = self.family.predict(
                self.model.unet, disturbed.noisy_latents.to(self.dtype), disturbed.timesteps, text, batch
            )
        losses = self._losses(prediction, disturbed.target, disturbed.timesteps, batch)
        losses = losses * batch["loss_weights"].to(losses.device)
        v_prediction = self.noise_options.v_parameterization
        losses = weighted(losses, disturbed.timesteps, self.schedule.snr, self.loss_options, v_prediction)
        return BatchResult(losses.mean(), losses.detach(), disturbed.timesteps)

    def _latents(self, batch: dict[str, Any]) -> Tensor:
        device = self.accelerator.device
        if batch["latents"] is not None:
            return batch["latents"].to(device)
        vae = self.model.vae
        with torch.no_grad():
            latents = vae.encode(batch["images"].to(device, vae.dtype)).latent_dist.sample().float()
        if torch.isfinite(latents).all():
            return latents
        log.warning("latents of %s are not finite, zeros are used. Try --no_half_vae", ", ".join(batch["image_keys"]))
        return torch.nan_to_num(latents, nan=0.0, posinf=0.0, neginf=0.0)

    def _text_outputs(self, batch: dict[str, Any]) -> list[Tensor]:
        device = self.accelerator.device
        if batch["text_encoder_outputs_list"] is not None:
            return [each.to(device) for each in batch["text_encoder_outputs_list"]]
        ids = [each.to(device) for each in batch["input_ids_list"]]
        gradients = contextlib.nullcontext() if self.text.trains_text_encoder else torch.no_grad()
        with gradients, self.accelerator.autocast():
            return self.family.encode_text(self.model.text_encoders, ids, self.text.clip_skip)

    def _losses(self, prediction: Tensor, target: Tensor, timesteps: Tensor, batch: dict[str, Any]) -> Tensor:
        options = self.loss_options
        threshold = None
        if LOSSES[options.loss_type].needs_threshold:
            threshold = huber_threshold(
                timesteps, self.schedule.alphas_cumprod, options.huber_schedule, options.huber_c, options.huber_scale
            )
        loss = element_loss(prediction, target, options.loss_type, threshold)
        mask = loss_mask(batch)
        if mask is not None:
            mask = torch.nn.functional.interpolate(mask.to(loss.device), size=loss.shape[2:], mode="area")
            loss = loss * mask
        return loss.mean(dim=(1, 2, 3))


def loss_mask(batch: dict[str, Any]) -> Tensor | None:
    """Give the mask of a batch, (B, 1, H, W) in [0, 1]: the red channel of mask images, else alpha, else None."""
    if batch["conditioning_images"] is not None:
        return (batch["conditioning_images"][:, :1].float() + 1.0) / 2.0
    if batch["alpha_masks"] is not None:
        return batch["alpha_masks"].unsqueeze(1).float()
    return None
