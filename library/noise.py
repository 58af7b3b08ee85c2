"""Noise and timesteps: how latents are disturbed and what the model is asked to predict.

The order of the draws is a contract: noise, its offset, its pyramid, the timestep, the extra noise of the input. The
timestep comes from the CPU generator, the number of a pyramid level from Python's ``random``.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

TRAIN_STEPS = 1000
BETA_START, BETA_END = 0.00085, 0.012


@dataclass(frozen=True)
class NoiseSchedule:
    """Noise levels of the forward process.

    Attributes:
        betas, alphas_cumprod, snr: (1000,) float32. With zero terminal SNR, ``snr`` stays that of the plain schedule,
        because loss weights are defined on it.
    """

    betas: Tensor
    alphas_cumprod: Tensor
    snr: Tensor

    def to(self, device: torch.device | str) -> NoiseSchedule:
        return NoiseSchedule(self.betas.to(device), self.alphas_cumprod.to(device), self.snr.to(device))


def noise_schedule(zero_terminal_snr: bool = False) -> NoiseSchedule:
    """Build the scaled-linear schedule of Stable Diffusion.

    Args:
        zero_terminal_snr: shift and scale so that the last step is pure noise (Lin et al. 2023, arXiv:2305.08891).
    """
    betas = torch.linspace(BETA_START**0.5, BETA_END**0.5, TRAIN_STEPS, dtype=torch.float32) ** 2
    alphas_cumprod = torch.cumprod(1.0 - betas, dim=0)
    snr = alphas_cumprod / (1.0 - alphas_cumprod)
    if zero_terminal_snr:
        alphas_cumprod = zero_terminal(alphas_cumprod)
        betas = betas_of(alphas_cumprod)
    return NoiseSchedule(betas, alphas_cumprod, snr)


def zero_terminal(alphas_cumprod: Tensor) -> Tensor:
    """Shift and scale levels (T,) so that the first stays and the last is pure noise (arXiv:2305.08891)."""
    root = alphas_cumprod.sqrt()
    root = (root - root[-1]) * root[0] / (root[0] - root[-1])
    return root**2


def betas_of(alphas_cumprod: Tensor) -> Tensor:
    """Give the (T,) betas whose levels these are."""
    return 1.0 - torch.cat([alphas_cumprod[:1], alphas_cumprod[1:] / alphas_cumprod[:-1]])


@dataclass(frozen=True)
class NoiseOptions:
    """Names and meanings as the options; None switches a part off."""

    noise_offset: float | None = None
    noise_offset_random_strength: bool = False
    adaptive_noise_scale: float | None = None
    multires_noise_iterations: int | None = None
    multires_noise_discount: float = 0.3
    ip_noise_gamma: float | None = None
    ip_noise_gamma_random_strength: bool = False
    min_timestep: int = 0
    max_timestep: int = TRAIN_STEPS
    zero_terminal_snr: bool = False
    v_parameterization: bool = False


@dataclass(frozen=True)
class Disturbed:
    """Latents ready for the model.

    Attributes:
        noise, noisy_latents, target: (B, C, h, w). timesteps: (B,) int64. All on the latents' device.
    """

    noise: Tensor
    noisy_latents: Tensor
    target: Tensor
    timesteps: Tensor


def _strength(value: float, random_strength: bool, device: torch.device) -> Tensor | float:
    return torch.rand(1, device=device) * value if random_strength else value


def offset_noise(noise: Tensor, latents: Tensor, offset: Tensor | float, adaptive_scale: float | None) -> Tensor:
    """Add one constant per sample and channel; the adaptive scale adds its share of the latents' absolute mean."""
    if adaptive_scale is not None:
        offset = (offset + adaptive_scale * latents.mean(dim=(2, 3), keepdim=True).abs()).clamp(min=0.0)
    batch, channels = latents.shape[:2]
    return noise + offset * torch.randn((batch, channels, 1, 1), device=latents.device, dtype=latents.dtype)


def pyramid_noise(noise: Tensor, iterations: int, discount: float) -> Tensor:
    """Add upsampled noise of falling resolution and bring the whole back to unit deviation.

    Level i has a random size of about 1 / r^i with r in [2, 4) and the weight ``discount`` ^ i.
    """
    batch, channels, height, width = noise.shape
    for level in range(iterations):
        ratio = (2.0 + 2.0 * random.random()) ** level
        size = max(1, int(height / ratio)), max(1, int(width / ratio))
        coarse = torch.randn((batch, channels, *size), device=noise.device, dtype=noise.dtype)
        upsampled = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bilinear")
        noise = noise + discount**level * upsampled
        if 1 in size:
            break
    return noise / noise.std()


def draw_timesteps(batch: int, low: int, high: int, device: torch.device) -> Tensor:
    """Draw (B,) int64 timesteps uniformly from [low, high); all ``high`` when the range is empty."""
    if low >= high:
        return torch.full((batch,), high, dtype=torch.long, device=device)
    return torch.randint(low, high, (batch,), device="cpu").to(device)


def add_noise(latents: Tensor, noise: Tensor, timesteps: Tensor, alphas_cumprod: Tensor) -> Tensor:
    """Mix latents and noise at each sample's level: sqrt(a) x + sqrt(1 - a) e."""
    level = alphas_cumprod[timesteps].reshape(-1, 1, 1, 1).to(latents.dtype)
    return level.sqrt() * latents + (1.0 - level).sqrt() * noise


def velocity(latents: Tensor, noise: Tensor, timesteps: Tensor, alphas_cumprod: Tensor) -> Tensor:
    """Give the v target: sqrt(a) e - sqrt(1 - a) x."""
    level = alphas_cumprod[timesteps].reshape(-1, 1, 1, 1).to(latents.dtype)
    return level.sqrt() * noise - (1.0 - level).sqrt() * latents


def disturb(latents: Tensor, schedule: NoiseSchedule, options: NoiseOptions) -> Disturbed:
    """Draw noise and timesteps for a batch of scaled latents (B, C, h, w) and give what the model sees."""
    noise = torch.randn_like(latents)
    if options.noise_offset:
        offset = _strength(options.noise_offset, options.noise_offset_random_strength, latents.device)
        noise = offset_noise(noise, latents, offset, options.adaptive_noise_scale)
    if options.multires_noise_iterations:
        noise = pyramid_noise(noise, options.multires_noise_iterations, options.multires_noise_discount)
    timesteps = draw_timesteps(latents.shape[0], options.min_timestep, options.max_timestep, latents.device)
    input_noise = noise
    if options.ip_noise_gamma:
        gamma = _strength(options.ip_noise_gamma, options.ip_noise_gamma_random_strength, latents.device)
        input_noise = noise + gamma * torch.randn_like(latents)
    target = velocity(latents, noise, timesteps, schedule.alphas_cumprod) if options.v_parameterization else noise
    noisy = add_noise(latents, input_noise, timesteps, schedule.alphas_cumprod)
    return Disturbed(noise, noisy, target, timesteps)
