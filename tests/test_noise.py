"""The noise schedule against the specification's numbers, and what is drawn against plain formulas."""

from __future__ import annotations

import random

import pytest
import torch

from library import noise
from tests.conftest import spec_fixture


@pytest.mark.parametrize("zero_terminal", [False, True])
def test_schedule_equals_the_specification(zero_terminal):
    numbers = spec_fixture("numerics.json")
    timesteps = torch.tensor(numbers["timesteps"])
    table = numbers["zero_terminal_snr" if zero_terminal else "plain"]
    schedule = noise.noise_schedule(zero_terminal)
    for key, values in (
        ("betas", schedule.betas),
        ("alphas_cumprod", schedule.alphas_cumprod),
        ("all_snr", schedule.snr),
    ):
        torch.testing.assert_close(
            values[timesteps], torch.tensor(table[key]), rtol=3e-4 if zero_terminal else 2e-5, atol=1e-7
        )


@pytest.fixture
def latents():
    return torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(3))


def drawn(latents, **options):
    torch.manual_seed(1)
    random.seed(1)
    return noise.disturb(latents, noise.noise_schedule(), noise.NoiseOptions(**options))


def test_plain_draw_is_noise_then_timestep(latents):
    result = drawn(latents)
    torch.manual_seed(1)
    expected, steps = torch.randn_like(latents), torch.randint(0, 1000, (2,))
    assert torch.equal(result.noise, expected) and torch.equal(result.timesteps, steps)
    a = noise.noise_schedule().alphas_cumprod[steps].reshape(-1, 1, 1, 1)
    assert torch.equal(result.noisy_latents, a.sqrt() * latents + (1 - a).sqrt() * expected)
    assert torch.equal(result.target, expected)


def test_velocity_target(latents):
    result = drawn(latents, v_parameterization=True)
    a = noise.noise_schedule().alphas_cumprod[result.timesteps].reshape(-1, 1, 1, 1)
    torch.testing.assert_close(result.target, a.sqrt() * result.noise - (1 - a).sqrt() * latents)


def test_offset_is_one_constant_per_channel(latents):
    plain, result = drawn(latents), drawn(latents, noise_offset=0.5)
    torch.manual_seed(1)
    torch.randn_like(latents)
    torch.testing.assert_close(result.noise - plain.noise, (0.5 * torch.randn(2, 4, 1, 1)).expand_as(latents))


def test_adaptive_scale_follows_the_mean(latents):
    plain, result = drawn(latents), drawn(latents, noise_offset=0.1, adaptive_noise_scale=2.0)
    torch.manual_seed(1)
    torch.randn_like(latents)
    strength = (0.1 + 2.0 * latents.mean(dim=(2, 3), keepdim=True).abs()).clamp(min=0)
    torch.testing.assert_close(result.noise - plain.noise, (strength * torch.randn(2, 4, 1, 1)).expand_as(latents))


def test_pyramid_noise_equals_the_plain_loop(latents):
    result = drawn(latents, multires_noise_iterations=4, multires_noise_discount=0.5)
    torch.manual_seed(1)
    random.seed(1)
    e = torch.randn_like(latents)
    for i in range(4):
        r = random.random() * 2 + 2
        h, w = max(1, int(6 / r**i)), max(1, int(8 / r**i))
        e = e + 0.5**i * torch.nn.functional.interpolate(torch.randn(2, 4, h, w), size=(6, 8), mode="bilinear")
        if h == 1 or w == 1:
            break
    torch.testing.assert_close(result.noise, e / e.std())


def test_a_random_strength_is_one_number_per_batch(latents):
    plain, result = drawn(latents), drawn(latents, noise_offset=0.5, noise_offset_random_strength=True)
    torch.manual_seed(1)
    torch.randn_like(latents)
    strength = 0.5 * torch.rand(1)
    torch.testing.assert_close(result.noise - plain.noise, (strength * torch.randn(2, 4, 1, 1)).expand_as(latents))


@pytest.mark.parametrize("random_strength", [False, True])
def test_input_noise_is_gamma_times_fresh_noise(latents, random_strength):
    options = {"ip_noise_gamma": 0.3, "ip_noise_gamma_random_strength": random_strength}
    result = drawn(latents, **options)
    torch.manual_seed(1)
    plain = torch.randn_like(latents)
    timesteps = torch.randint(0, 1000, (2,))
    gamma = 0.3 * torch.rand(1) if random_strength else 0.3
    level = noise.noise_schedule().alphas_cumprod[timesteps].reshape(-1, 1, 1, 1)
    expected = level.sqrt() * latents + (1 - level).sqrt() * (plain + gamma * torch.randn_like(latents))
    torch.testing.assert_close(result.noisy_latents, expected)


def test_input_noise_leaves_the_target_alone(latents):
    plain, result = drawn(latents), drawn(latents, ip_noise_gamma=0.3)
    assert torch.equal(plain.target, result.target)
    assert not torch.equal(plain.noisy_latents, result.noisy_latents)


@pytest.mark.parametrize("low,high,expected", [(100, 101, {100}), (500, 400, {400}), (0, 3, {0, 1, 2})])
def test_timesteps_stay_in_their_range(low, high, expected):
    assert set(noise.draw_timesteps(200, low, high, torch.device("cpu")).tolist()) == expected
