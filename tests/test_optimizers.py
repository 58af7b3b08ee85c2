"""Every row of the optimizer table is built and stepped, and every mistake is told in a line."""

from __future__ import annotations

import importlib
from argparse import Namespace

import pytest
import torch

from library import optimizers
from library.errors import OptionError
from library.optimizers import (
    OPTIMIZERS,
    EstimateWatch,
    check_optimizer,
    evaluation_weights,
    get_optimizer,
    logged_rates,
    step_size_estimates,
)


def options(optimizer_type: str, *arguments: str, lr: float = 1e-3, **more) -> Namespace:
    values = {
        "optimizer_type": optimizer_type,
        "optimizer_args": list(arguments),
        "learning_rate": lr,
        "lr_scheduler": "constant",
        "unet_lr": None,
        "text_encoder_lr": None,
    }
    return Namespace(**{**values, **more})


def weights() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((96, 64), (5,))]


def step(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], times: int = 3) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(times):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def skip_without_gpu(spec) -> None:
    if spec.needs_cuda and not torch.cuda.is_available():
        with pytest.raises(OptionError, match="needs a CUDA GPU"):
            get_optimizer(options(spec.name), weights())
        pytest.skip("paged optimizers need a GPU; the refusal was checked")


@pytest.mark.parametrize("spec", OPTIMIZERS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("spelling", [str, str.lower])
def test_every_row_builds_its_class_and_steps(spec, spelling):
    skip_without_gpu(spec)
    params = weights()
    before = [param.detach().clone() for param in params]
    rate = 1.0 if spec.adapts_lr else 1e-3
    extra = ["relative_step=False", "scale_parameter=False"] if spec.name == "Adafactor" else []
    name, text, optimizer = get_optimizer(options(spelling(spec.name), *extra, lr=rate), params)
    module, _, class_name = spec.path.rpartition(".")
    assert type(optimizer) is getattr(importlib.import_module(module), class_name)
    assert name == f"{type(optimizer).__module__}.{class_name}"
    for key, value in {**spec.defaults, **spec.forced}.items():
        assert f"{key}={value}" in text.split(",")
    step(optimizer, params, times=8)
    assert all(torch.isfinite(param).all() for param in params)
    assert any(not torch.equal(param, old) for param, old in zip(params, before))


@pytest.mark.parametrize(
    "name", ["SGD", "RMSprop", "bitsandbytes.optim.AdEMAMix8bit", "pytorch_optimizer.CAME", "torch.optim.NAdam"]
)
def test_other_names_are_found(name):
    params = weights()
    _, _, optimizer = get_optimizer(options(name), params)
    step(optimizer, params)
    assert type(optimizer).__name__ == name.rpartition(".")[2]


@pytest.mark.parametrize(
    "name,arguments,match",
    [
        ("Prodgy", [], "Did you mean 'Prodigy'"),
        ("AdEMAMix8bit", [], "full path"),
        ("os.system", [], "no torch optimizer"),
        ("no_such_package.Thing", [], "pip install no_such_package"),
        ("torch.optim.Adamm", [], "Did you mean"),
        ("Adafactor", ["betas=(0.9,0.99)"], "beta1"),
        ("AdamW", ["weight_decy=0.1"], "Did you mean 'weight_decay'"),
        ("AdamW", ["betas=0.9"], "refuses"),
        ("AdamW", ["betas=(0.9,"], "bracket"),
        ("AdamW", ["weight_decay="], "no value"),
        ("AdamW", ["weight_decay"], "key=value"),
        ("AdamW", ["lr=0.1"], "--learning_rate"),
        ("SignSGD", ["momentm=0.5"], "Did you mean 'momentum'"),
        ("LBFGS", [], "cannot be stepped without closure"),
        ("torch..AdamW", [], "no full path"),
        ("Optimizer", [], "no optimizer is called"),
    ],
)
def test_a_mistake_is_told_in_one_line(name, arguments, match):
    with pytest.raises(OptionError, match=match) as raised:
        get_optimizer(options(name, *arguments), weights())
    assert "\n" not in str(raised.value)


def test_old_switches_name_an_optimizer():
    assert optimizers.chosen_type(Namespace(optimizer_type="", use_8bit_adam=True)) == "AdamW8bit"
    with pytest.raises(OptionError, match="old way"):
        optimizers.chosen_type(Namespace(optimizer_type="Lion", use_lion_optimizer=True))


def test_adafactor_with_its_own_rates_rewrites_the_options():
    args = options("Adafactor", lr=1e-4)
    _, text, optimizer = get_optimizer(args, [{"params": weights(), "lr": 1e-3}])
    assert args.lr_scheduler == "adafactor:0.0001" and args.learning_rate is None
    assert optimizer.param_groups[0]["lr"] is None and "relative_step=True" in text


def test_one_rate_for_optimizers_that_find_their_own():
    one, other = weights()
    with pytest.raises(OptionError, match="one learning rate"):
        get_optimizer(options("Prodigy", lr=1.0), [{"params": [one], "lr": 1.0}, {"params": [other], "lr": 0.5}])


@pytest.mark.parametrize("name", ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree", "AdamW"])
def test_evaluation_weights_come_back_to_the_bit(name):
    params = weights()
    _, _, optimizer = get_optimizer(options(name), params)
    step(optimizer, params, times=8)
    training = [param.detach().clone() for param in params]
    with evaluation_weights(optimizer):
        shown = [param.detach().clone() for param in params]
    assert all(torch.equal(param, value) for param, value in zip(params, training))
    assert any(not torch.equal(a, b) for a, b in zip(shown, training)) == name.endswith("ScheduleFree")
    with pytest.raises(RuntimeError), evaluation_weights(optimizer):
        raise RuntimeError("a save that fails")
    assert all(torch.equal(param, value) for param, value in zip(params, training))
    step(optimizer, params)


def test_rates_are_logged_by_what_the_optimizer_has():
    params = weights()
    _, _, optimizer = get_optimizer(options("Prodigy", lr=1.0), [{"params": params, "lr": 1.0}])
    step(optimizer, params)
    estimates = step_size_estimates(optimizer)
    step(optimizer, params, times=1)
    scalars = logged_rates(optimizer, ["unet"], estimates)
    assert scalars["lr/unet"] == 1.0
    assert scalars["lr/d*lr/unet"] == pytest.approx(estimates[0])


@pytest.mark.parametrize("name", ["AdamW", "SGDScheduleFree", "AdamWScheduleFree", "RAdamScheduleFree"])
def test_a_warmup_of_the_optimizer_itself_is_in_the_logged_rate(name):
    params = weights()
    warmup = ["warmup_steps=10"] if name in ("SGDScheduleFree", "AdamWScheduleFree") else []
    _, _, optimizer = get_optimizer(options(name, *warmup), params)
    step(optimizer, params, times=1)
    rate = logged_rates(optimizer, ["unet"], step_size_estimates(optimizer))["lr/unet"]
    assert rate == pytest.approx(1e-4 if warmup else 0 if name.startswith("R") else 1e-3)


def test_a_step_size_that_never_moves_is_said_once(caplog):
    params = weights()
    _, _, optimizer = get_optimizer(options("Prodigy", lr=1.0), [{"params": params, "lr": 1.0}])
    watch = EstimateWatch(optimizer, patience=4)
    for _ in range(9):
        watch.after_update()
    assert len([r for r in caplog.records if "hardly anything is learnt" in r.getMessage()]) == 1
    caplog.clear()
    watch = EstimateWatch(optimizer, patience=4)
    for _ in range(9):
        step(optimizer, params, times=1)
        watch.after_update()
    assert not [r for r in caplog.records if "hardly anything is learnt" in r.getMessage()]


def test_trying_out_changes_no_option():
    args = options("Adafactor", lr=1e-4)
    optimizer, schedule = check_optimizer(args, [1e-4])
    assert args == options("Adafactor", lr=1e-4) and schedule == "adafactor:0.0001"
    assert type(optimizer).__name__ == "Adafactor"
    with pytest.raises(OptionError, match="one learning rate"):
        check_optimizer(options("Prodigy", lr=1.0), [1.0, 0.5])
    check_optimizer(options("Prodigy", lr=1.0), [1.0, 0])  # a frozen part does not count


@pytest.mark.parametrize("spec", OPTIMIZERS, ids=lambda spec: spec.name)
def test_state_survives_saving_and_goes_on_to_the_bit(spec, tmp_path):
    """live = resumed, and both differ from a cold start."""
    skip_without_gpu(spec)
    extra = ["relative_step=False", "scale_parameter=False"] if spec.name == "Adafactor" else []
    rate = 1.0 if spec.adapts_lr else 1e-3

    def build(values):
        params = [torch.nn.Parameter(value.clone()) for value in values]
        return params, get_optimizer(options(spec.name, *extra, lr=rate), params)[2]

    live, optimizer = build(weights())
    step(optimizer, live, times=4)
    torch.save(optimizer.state_dict(), tmp_path / "o.bin")
    resumed, other = build([param.detach() for param in live])
    other.load_state_dict(torch.load(tmp_path / "o.bin", weights_only=True))
    cold, third = build([param.detach() for param in live])
    for params, each in ((live, optimizer), (resumed, other), (cold, third)):
        step(each, params, times=20)
    assert all(torch.equal(a, b) for a, b in zip(live, resumed))
    if spec.name not in ("SignSGD",):  # without momentum there is nothing to remember
        assert any(not torch.equal(a, b) for a, b in zip(live, cold))
