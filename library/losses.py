"""Element losses, Huber thresholds and loss weights, each a row of a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from library.errors import OptionError, did_you_mean

SNR_CAP = 1000.0


def l2(difference: Tensor, threshold: Tensor | None) -> Tensor:
    """Squared difference."""
    return difference**2


def l1(difference: Tensor, threshold: Tensor | None) -> Tensor:
    """Absolute difference."""
    return difference.abs()


def huber(difference: Tensor, threshold: Tensor | None) -> Tensor:
    """Pseudo-Huber 2c(sqrt(d^2 + c^2) - c): about d^2 below the threshold c, about 2c|d| above."""
    return 2 * threshold * (torch.sqrt(difference**2 + threshold**2) - threshold)


def smooth_l1(difference: Tensor, threshold: Tensor | None) -> Tensor:
    """Pseudo-Huber divided by its threshold: about |d| far from zero, up to a factor of two."""
    return 2 * (torch.sqrt(difference**2 + threshold**2) - threshold)


@dataclass(frozen=True)
class ElementLoss:
    """A loss per element; ``needs_threshold`` says that it takes c per sample."""

    function: Callable[[Tensor, Tensor | None], Tensor]
    needs_threshold: bool


LOSSES = {
    "l2": ElementLoss(l2, False),
    "l1": ElementLoss(l1, False),
    "huber": ElementLoss(huber, True),
    "smooth_l1": ElementLoss(smooth_l1, True),
}


def _constant(timesteps: Tensor, snr: Tensor, c: float, scale: float) -> Tensor:
    return torch.full_like(snr[timesteps], c * scale)


def _exponential(timesteps: Tensor, snr: Tensor, c: float, scale: float) -> Tensor:
    return torch.exp(timesteps.float() * math.log(c) / len(snr)) * scale


def _by_snr(timesteps: Tensor, snr: Tensor, c: float, scale: float) -> Tensor:
    sigma = snr[timesteps].rsqrt()
    return (1.0 - c) / (1.0 + sigma) ** 2 + c


HUBER_SCHEDULES = {"constant": _constant, "exponential": _exponential, "snr": _by_snr}


def huber_threshold(timesteps: Tensor, alphas_cumprod: Tensor, schedule: str, c: float, scale: float) -> Tensor:
    """Give the Huber threshold of each sample.

    Args:
        timesteps: (B,) int64. alphas_cumprod: (T,) float32. schedule: a key of ``HUBER_SCHEDULES``.
        c, scale: as the options; ``snr`` ignores ``scale``.

    Returns:
        (B,) float32.
    """
    snr = alphas_cumprod / (1.0 - alphas_cumprod)
    return HUBER_SCHEDULES[schedule](timesteps, snr, c, scale)


def element_loss(prediction: Tensor, target: Tensor, loss_type: str, threshold: Tensor | None) -> Tensor:
    """Give the loss of every element, in float32.

    Args:
        prediction, target: (B, C, h, w). loss_type: a key of ``LOSSES``. threshold: (B,) where the loss needs it.

    Raises:
        OptionError: unknown ``loss_type``.
    """
    if loss_type not in LOSSES:
        raise OptionError(
            f"--loss_type: no loss is called {loss_type!r}.{did_you_mean(loss_type, LOSSES)} "
            f"Known: {', '.join(sorted(LOSSES))}. Example: --loss_type huber"
        )
    row = LOSSES[loss_type]
    shaped = threshold.reshape(-1, 1, 1, 1) if row.needs_threshold and threshold is not None else None
    return row.function(prediction.float() - target.float(), shaped)


# --------------------------------------------------------------------------------------------------------- weights


def min_snr(loss: Tensor, snr: Tensor, gamma: float, v_prediction: bool) -> Tensor:
    """Cap the signal-to-noise ratio at ``gamma`` (Hang et al. 2023, arXiv:2303.09556)."""
    return loss * snr.clamp(max=gamma) / (snr + 1.0 if v_prediction else snr)


def v_pred_like_noise_pred(loss: Tensor, snr: Tensor, on: bool, v_prediction: bool) -> Tensor:
    """Bring a velocity loss to the scale of a noise loss: S' / (S' + 1)."""
    capped = snr.clamp(max=SNR_CAP)
    return loss * capped / (capped + 1.0)


def noise_pred_plus_v_like(loss: Tensor, snr: Tensor, share: float, v_prediction: bool) -> Tensor:
    """Add a share of the loss on the velocity scale: (S' + 1) / S'."""
    capped = snr.clamp(max=SNR_CAP)
    return loss + loss * share * (capped + 1.0) / capped


def debiased(loss: Tensor, snr: Tensor, on: bool, v_prediction: bool) -> Tensor:
    """Weight by 1 / sqrt(S'), for velocity by 1 / (S' + 1) (Yu et al. 2023, arXiv:2310.08442)."""
    capped = snr.clamp(max=SNR_CAP)
    return loss / (capped + 1.0) if v_prediction else loss * capped.rsqrt()


# option -> weight, applied in this order when the option is set
LOSS_WEIGHTS: dict[str, Callable[..., Tensor]] = {
    "min_snr_gamma": min_snr,
    "scale_v_pred_loss_like_noise_pred": v_pred_like_noise_pred,
    "v_pred_like_loss": noise_pred_plus_v_like,
    "debiased_estimation_loss": debiased,
}


@dataclass(frozen=True)
class LossOptions:
    """Names and meanings as the options; None, 0 or False switches a weight off."""

    loss_type: str = "l2"
    huber_schedule: str = "snr"
    huber_c: float = 0.1
    huber_scale: float = 1.0
    min_snr_gamma: float | None = None
    scale_v_pred_loss_like_noise_pred: bool = False
    v_pred_like_loss: float | None = None
    debiased_estimation_loss: bool = False


def weighted(loss: Tensor, timesteps: Tensor, snr: Tensor, options: LossOptions, v_prediction: bool) -> Tensor:
    """Apply every loss weight that is switched on, in the order of ``LOSS_WEIGHTS``.

    Args:
        loss: (B,) float32. timesteps: (B,) int64. snr: (T,) float32 of the plain schedule.
    """
    snr_of_samples = snr[timesteps]
    for name, weight in LOSS_WEIGHTS.items():
        value = getattr(options, name)
        if value:
            loss = weight(loss, snr_of_samples, value, v_prediction)
    return loss


def first_non_finite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Give the name of the first tensor that holds a NaN or an infinity, None when all are finite."""
    named = list(named)
    if not named:
        return None
    # one number for all: the sum of sums is finite only when every entry is (or a sum overflowed, looked at below)
    total = torch.stack([tensor.detach().float().sum() for _, tensor in named]).sum()
    if torch.isfinite(total):
        return None
    return next((name for name, tensor in named if not torch.isfinite(tensor).all()), None)
