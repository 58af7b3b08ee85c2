"""Losses and their weights against the specification's numbers and plain formulas."""

from __future__ import annotations

import math

import pytest
import torch

from library import losses
from library.errors import OptionError
from library.noise import noise_schedule
from tests.conftest import spec_fixture


@pytest.fixture(scope="module")
def numbers():
    return spec_fixture("numerics.json")


@pytest.mark.parametrize("zero_terminal", [False, True])
@pytest.mark.parametrize(
    "key,options,v_prediction",
    [
        ("min_snr_5_eps", {"min_snr_gamma": 5.0}, False),
        ("min_snr_5_v", {"min_snr_gamma": 5.0}, True),
        ("scale_v_pred", {"scale_v_pred_loss_like_noise_pred": True}, True),
        ("v_pred_like_0.1", {"v_pred_like_loss": 0.1}, False),
        ("debiased_eps", {"debiased_estimation_loss": True}, False),
        ("debiased_v", {"debiased_estimation_loss": True}, True),
    ],
)
def test_weights_equal_the_specification(numbers, key, options, v_prediction, zero_terminal):
    timesteps = torch.tensor(numbers["timesteps"])
    snr = noise_schedule(zero_terminal).snr
    weighted = losses.weighted(torch.ones(len(timesteps)), timesteps, snr, losses.LossOptions(**options), v_prediction)
    expected = torch.tensor(numbers["zero_terminal_snr" if zero_terminal else "plain"][key])
    torch.testing.assert_close(weighted, expected, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("schedule", losses.HUBER_SCHEDULES)
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_huber_thresholds_equal_the_specification(numbers, schedule, scale):
    timesteps = torch.tensor(numbers["timesteps"])
    found = losses.huber_threshold(timesteps, noise_schedule().alphas_cumprod, schedule, 0.1, scale)
    expected = torch.tensor(numbers["plain"][f"huber_{schedule}_c0.1_scale{scale}"])
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("loss_type", losses.LOSSES)
def test_element_losses_equal_the_specification(numbers, loss_type):
    table = numbers["loss_elementwise"]
    prediction = torch.tensor(table["pred"]).reshape(1, 1, 1, -1)
    threshold = torch.tensor([0.1]) if losses.LOSSES[loss_type].needs_threshold else None
    found = losses.element_loss(prediction, torch.full_like(prediction, table["target"]), loss_type, threshold)
    key = loss_type if threshold is None else f"{loss_type}_c0.1"
    torch.testing.assert_close(found.flatten(), torch.tensor(table[key]), rtol=1e-5, atol=1e-6)


def test_weights_are_applied_one_after_the_other():
    snr = noise_schedule().snr
    both = losses.LossOptions(min_snr_gamma=5.0, debiased_estimation_loss=True)
    t = torch.tensor([10, 700])
    s = snr[t]
    expected = torch.minimum(s, torch.tensor(5.0)) / s / torch.sqrt(s.clamp(max=1000))
    torch.testing.assert_close(losses.weighted(torch.ones(2), t, snr, both, False), expected)


def test_an_unknown_loss_is_told():
    with pytest.raises(OptionError, match="Did you mean 'huber'"):
        losses.element_loss(torch.zeros(1), torch.zeros(1), "hubr", None)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_first_non_finite_tensor_is_named(bad, dtype):
    tensors = {"a": torch.ones(3, dtype=dtype), "b": torch.ones(2, 2, dtype=dtype), "c": torch.ones(1, dtype=dtype)}
    assert losses.first_non_finite(tensors.items()) is None
    tensors["b"][1, 0] = bad
    tensors["c"][0] = bad
    assert losses.first_non_finite(tensors.items()) == "b"


def test_a_sum_that_overflows_is_not_a_bad_tensor():
    assert losses.first_non_finite([("a", torch.full((4,), 3e38))]) is None
