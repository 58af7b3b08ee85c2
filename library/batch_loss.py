"""From a prediction to the loss of each sample, and what a forward pass gives."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from library.losses import LOSSES, LossOptions, element_loss, huber_threshold
from library.noise import NoiseSchedule

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


def schedule_of(scheduler: Any) -> NoiseSchedule:
    """Give the levels of a Diffusers scheduler; ``all_snr`` on it is the ratio that loss weights are defined on."""
    alphas = scheduler.alphas_cumprod
    snr = getattr(scheduler, "all_snr", None)
    return NoiseSchedule(scheduler.betas, alphas, alphas / (1.0 - alphas) if snr is None else snr)


def finite_latents(latents: Tensor, image_keys: Sequence[str]) -> Tensor:
    """Give the latents with zeros for what is not finite, with a line that names the images."""
    if torch.isfinite(latents).all():
        return latents
    log.warning("latents of %s are not finite, zeros are used. Try --no_half_vae", ", ".join(image_keys))
    return torch.nan_to_num(latents, nan=0.0, posinf=0.0, neginf=0.0)


def sample_losses(
    prediction: Tensor,
    target: Tensor,
    timesteps: Tensor,
    batch: dict[str, Any],
    options: LossOptions,
    alphas_cumprod: Tensor,
    weighting: Tensor | None = None,
) -> Tensor:
    """Give the loss of each sample under the batch's mask, before loss weights.

    Args:
        prediction, target: (B, C, h, w). timesteps: (B,) int64. batch: as the data set makes it.
        options: loss and Huber schedule. alphas_cumprod: (T,). weighting: factor that goes with (B, C, h, w).

    Returns:
        (B,) float32.
    """
    threshold = None
    if LOSSES[options.loss_type].needs_threshold:
        threshold = huber_threshold(
            timesteps, alphas_cumprod, options.huber_schedule, options.huber_c, options.huber_scale
        )
    loss = element_loss(prediction, target, options.loss_type, threshold)
    if weighting is not None:
        loss = loss * weighting
    mask = loss_mask(batch)
    if mask is not None:
        loss = loss * torch.nn.functional.interpolate(mask.to(loss.device), size=loss.shape[2:], mode="area")
    return loss.mean(dim=(1, 2, 3))


def loss_mask(batch: dict[str, Any]) -> Tensor | None:
    """Give the mask of a batch, (B, 1, H, W) in [0, 1]: the red channel of mask images, else alpha, else None."""
    if batch["conditioning_images"] is not None:
        return (batch["conditioning_images"][:, :1].float() + 1.0) / 2.0
    if batch["alpha_masks"] is not None:
        return batch["alpha_masks"].unsqueeze(1).float()
    return None
