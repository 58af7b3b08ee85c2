"""Transforming optimizers against plain formulas, and the promises of their interface."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import SGD, Adam, AdamW

from library import transforming_optimizers as to
from tests.training import first_difference

settings.register_profile("short", max_examples=40, deadline=None)
settings.load_profile("short")

SHAPES = st.lists(st.integers(1, 4), min_size=0, max_size=4).map(tuple)


def param_of(values) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.as_tensor(values, dtype=torch.float32).clone())


def noise(shape, seed=0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def after_one_step(cls, gradient, *, weight=None, inner=SGD, lr=1.0, **arguments):
    param = param_of(torch.zeros(gradient.shape) if weight is None else weight)
    param.grad = gradient.clone()
    cls([param], inner, lr=lr, **arguments).step()
    return param


def test_the_example_of_the_specification():
    x = param_of([-1.5, 1.5])
    optimizer = to.SignedGradientOptim([x], InnerOpt=SGD, lr=1.0)
    (torch.tensor([-2.0, 20.0]) * x).sum().backward()
    optimizer.step()
    assert x.grad.tolist() == [-1.0, 1.0] and x.tolist() == [-0.5, 0.5]


# ----------------------------------------------------------------------------------------------------- shape algebra


@given(SHAPES, st.one_of(st.none(), st.integers(-5, 4)))
def test_shapes_keep_the_trailing_dimensions(shape, param_ndim):
    if param_ndim is not None and param_ndim > len(shape):
        with pytest.raises(ValueError, match="param_ndim"):
            to.transform_shape(shape, param_ndim)
        return
    found = to.transform_shape(shape, param_ndim)
    assert math.prod(found) == math.prod(shape)
    if param_ndim is None:
        kept = len(shape)
    elif param_ndim >= 0:
        kept = param_ndim
    else:
        kept = 1 if len(shape) == 1 else max(0, len(shape) + param_ndim)
    assert found[1:] == tuple(shape[len(shape) - kept :])


def test_biases_are_whole_unless_asked_otherwise():
    bias = noise((7,))
    torch.testing.assert_close(after_one_step(to.L2NormedGradientOptim, bias).grad.norm(), torch.tensor(1.0))
    like_rai = after_one_step(to.L2NormedGradientOptim, bias, whole_biases=False).grad
    assert torch.equal(like_rai.abs(), torch.ones(7))


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "channels_last"])
def test_memory_layouts_give_the_same(layout):
    plain = noise((4, 3, 2, 5))
    weight = plain.clone()
    if layout == "transposed":
        weight = plain.transpose(0, 3).contiguous().transpose(0, 3)
    elif layout == "channels_last":
        weight = plain.contiguous(memory_format=torch.channels_last)
    results = []
    for start in (plain, weight):
        param = torch.nn.Parameter(start.clone(memory_format=torch.preserve_format))
        param.grad = torch.empty_like(param).copy_(noise((4, 3, 2, 5), 1))
        to.L2ProjectedOptim([param], epsilon=0.5, param_ndim=2, lr=0.1).step()
        results.append(param.detach())
    torch.testing.assert_close(results[0], results[1], atol=1e-7, rtol=1e-6)


# -------------------------------------------------------------------------------------------------------- transforms


@given(SHAPES.filter(lambda s: len(s) > 0), st.sampled_from([1.0, 2.0, math.inf]), st.integers(0, 99))
def test_every_row_has_norm_one(shape, p, seed):
    cls = {1.0: to.L1NormedGradientOptim, 2.0: to.L2NormedGradientOptim, math.inf: to.LinfNormedGradientOptim}[p]
    gradient = noise(shape, seed)
    found = after_one_step(cls, gradient, param_ndim=1).grad.reshape(-1, shape[-1])
    torch.testing.assert_close(torch.linalg.vector_norm(found, p, dim=1), torch.ones(len(found)), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.sign(found).reshape(shape), torch.sign(gradient))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cls", [to.L1NormedGradientOptim, to.L2NormedGradientOptim, to.LinfNormedGradientOptim])
def test_zero_gradients_stay_finite(cls, dtype):
    param = torch.nn.Parameter(torch.ones(3, 4, dtype=dtype))
    param.grad = torch.zeros_like(param)
    cls([param], lr=1.0).step()
    assert torch.equal(param, torch.ones_like(param)) and torch.equal(param.grad, torch.zeros_like(param))


@given(st.integers(1, 6), st.integers(1, 30), st.floats(0, 1), st.integers(0, 99))
def test_top_q_keeps_the_largest_of_each_row(rows, size, q, seed):
    gradient = noise((rows, size), seed)
    found = after_one_step(to.TopQGradientOptimizer, gradient, q=q, param_ndim=1).grad
    keep = min(size, max(1, math.floor((1 - q) * size + 0.5)))
    for row, plain in zip(found, gradient):
        expected = torch.zeros(size)
        chosen = plain.abs().argsort(descending=True, stable=True)[:keep]
        expected[chosen] = plain[chosen]
        assert torch.equal(row, expected)


def test_top_q_with_jitter_repeats_and_resumes():
    def run(steps, saved=None, start=None):
        param = param_of(noise((4, 50)) if start is None else start)
        optimizer = to.TopQGradientOptimizer([param], q=0.6, dq=0.3, lr=0.1, generator=torch.Generator().manual_seed(5))
        if saved:
            optimizer.load_state_dict(saved)
        counts = []
        for step in steps:
            param.grad = noise((4, 50), step)
            optimizer.step()
            counts.append(int((param.grad != 0).sum()))
        return param.detach(), optimizer.state_dict(), counts

    whole, _, counts = run(range(8))
    assert len(set(counts)) > 3
    half, state, _ = run(range(4))
    assert torch.equal(run(range(4, 8), state, half)[0], whole)


def test_l1q_has_signs_of_equal_size():
    found = after_one_step(to.L1qNormedGradientOptim, noise((3, 10)), q=0.7, param_ndim=1).grad
    assert torch.equal((found != 0).sum(dim=1), torch.tensor([3, 3, 3]))
    torch.testing.assert_close(found.abs().sum(dim=1), torch.ones(3))


def test_clamps():
    gradient, weight = noise((5, 5)) * 3, noise((5, 5), 1) * 3
    assert torch.equal(
        after_one_step(to.ClampedGradientOptimizer, gradient, clamp_min=-1, clamp_max=0.5).grad, gradient.clamp(-1, 0.5)
    )
    found = after_one_step(to.ClampedParameterOptimizer, gradient, weight=weight, lr=0.1, clamp_max=0.2)
    torch.testing.assert_close(found.detach(), (weight - 0.1 * gradient).clamp(max=0.2))


@given(st.floats(0, 3), st.integers(0, 99))
def test_projections_land_in_the_ball_and_stay(epsilon, seed):
    weight = noise((4, 6), seed)
    for cls, norm in ((to.L2ProjectedOptim, 2.0), (to.LinfProjectedOptim, math.inf)):
        param = param_of(weight)
        optimizer = cls([param], epsilon=epsilon, param_ndim=1, lr=0.1)
        optimizer.project()
        assert (torch.linalg.vector_norm(param, norm, dim=1) <= epsilon * (1 + 1e-5) + 1e-7).all()
        once = param.detach().clone()
        optimizer.project()
        torch.testing.assert_close(param, once, atol=1e-6, rtol=1e-5)
    inside = torch.linalg.vector_norm(weight, 2.0, dim=1) <= epsilon
    param = param_of(weight)
    to.L2ProjectedOptim([param], epsilon=epsilon, param_ndim=1).project()
    assert torch.equal(param[inside], weight[inside])


def test_scale_then_bias_show_in_the_gradient():
    gradient = noise((3, 4))
    found = after_one_step(to.SignedGradientOptim, gradient, grad_scale=2.0, grad_bias=0.5)
    assert torch.equal(found.grad, torch.sign(gradient) * 2.0 + 0.5) and torch.equal(found, -found.grad)


def test_chains_apply_in_order():
    gradient = noise((4, 8)) * 4
    chain = functools.partial(
        to.ChainedParamTransformingOptimizer,
        functools.partial(to.ClampedGradientOptimizer, clamp_min=-1, clamp_max=1),
        functools.partial(to.L2NormedGradientOptim, param_ndim=None),
        functools.partial(to.ClampedParameterOptimizer, clamp_min=-0.1, clamp_max=0.1),
    )
    param = param_of(torch.zeros(4, 8))
    param.grad = gradient.clone()
    chain(params=[param], InnerOpt=SGD, lr=1.0, grad_scale=2.0).step()
    expected = gradient.clamp(-1, 1)
    expected = expected / expected.norm() * 2.0
    torch.testing.assert_close(param.grad, expected)
    torch.testing.assert_close(param.detach(), (-expected).clamp(-0.1, 0.1))


# -------------------------------------------------------------------------------------------------------- Frank-Wolfe


@pytest.mark.parametrize("cls", [to.L1FrankWolfe, to.L2FrankWolfe, to.LinfFrankWolfe, to.L1qFrankWolfe])
def test_frank_wolfe_follows_its_step_rule(cls):
    extra = {"q": 0.8} if cls is to.L1qFrankWolfe else {}
    param, plain = param_of(noise((3, 10))), noise((3, 10))
    optimizer = cls([param], epsilon=2.0, param_ndim=1, **extra)
    for t in range(6):
        gradient = noise((3, 10), 10 + t)
        param.grad = gradient.clone()
        optimizer.step()
        if cls is to.L2FrankWolfe:
            vertex = gradient / gradient.norm(dim=1, keepdim=True)
        elif cls is to.LinfFrankWolfe:
            vertex = gradient.sign()
        else:
            count = 1 if cls is to.L1FrankWolfe else 2
            vertex = torch.zeros(3, 10)
            chosen = gradient.abs().topk(count, dim=1).indices
            vertex.scatter_(1, chosen, gradient.sign().gather(1, chosen) / count)
        rate = 2.0 / (t + 2.0)
        plain = plain + rate * (-2.0 * vertex - plain)
        torch.testing.assert_close(param.detach(), plain, atol=1e-5, rtol=1e-5)


def test_frank_wolfe_with_a_rate_stays_in_its_ball():
    param = param_of(torch.zeros(2, 5))
    optimizer = to.L2FrankWolfe([param], epsilon=1.5, lr=0.3, use_default_lr_schedule=False, param_ndim=1)
    for t in range(30):
        param.grad = noise((2, 5), t)
        optimizer.step()
        assert (param.norm(dim=1) <= 1.5 + 1e-5).all()


# ---------------------------------------------------------------------------------------------------------- interface


def test_groups_state_and_defaults_are_those_of_the_inner_optimizer():
    one, other = param_of(noise((3, 4))), param_of(noise((4,)))
    optimizer = to.L2NormedGradientOptim(
        [{"params": [one], "param_ndim": None}, {"params": [other], "lr": 0.5}], AdamW, lr=0.1
    )
    assert optimizer.param_groups is optimizer.inner_opt.param_groups
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    assert [group["param_ndim"] for group in optimizer.param_groups] == [None, -1]
    assert optimizer.defaults["weight_decay"] == 0.01 and optimizer.defaults["param_ndim"] == -1
    one.grad, other.grad = noise((3, 4)), noise((4,))
    optimizer.step()
    assert set(optimizer.state[one]) == {"step", "exp_avg", "exp_avg_sq"} and len(optimizer.state) == 2
    torch.testing.assert_close(one.grad.norm(), torch.tensor(1.0))


def test_an_instance_or_a_partial_is_an_inner_optimizer():
    param = param_of(noise((3,)))
    inner = Adam([param], lr=0.1)
    assert to.SignedGradientOptim(InnerOpt=inner).inner_opt is inner
    assert to.SignedGradientOptim([param], functools.partial(Adam, lr=0.3)).param_groups[0]["lr"] == 0.3


def test_schedulers_and_closures_work():
    param = param_of(noise((3, 3)))
    optimizer = to.SignedGradientOptim([param], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def closure():
        optimizer.zero_grad()
        loss = (param * 3).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad
    scheduler.step()
    assert torch.equal(param.grad, torch.ones(3, 3)) and optimizer.param_groups[0]["lr"] == 0.5


class Momentum(to.ParamTransformingOptimizer):
    """A subclass that keeps state for every parameter it is handed."""

    def _pre_step_transform_(self, param, optim_group):
        kept = self.state[param]
        kept["mean"] = 0.5 * kept.get("mean", 0.0) + param.grad
        param.grad.copy_(kept["mean"])


def test_state_of_a_subclass_works_and_does_not_grow():
    def run(steps, saved=None, start=None):
        params = [
            param_of(noise((3, 4)) if start is None else start[0]),
            param_of(noise((5,)) if start is None else start[1]),
        ]
        optimizer = Momentum(params, Adam, lr=0.1)
        if saved:
            optimizer.load_state_dict(saved)
        for step in steps:
            for param in params:
                param.grad = noise(param.shape, step)
            optimizer.step()
        return [param.detach() for param in params], optimizer

    whole, optimizer = run(range(10))
    assert len(optimizer.state) == 2 and len(optimizer._mirror.own) == 2 and len(optimizer._views) == 2
    half, live = run(range(5))
    resumed, _ = run(range(5, 10), live.state_dict(), half)
    assert first_difference(whole, resumed) is None


def test_loading_says_what_stays_in_force(caplog):
    param = param_of(noise((3, 4)))
    saved = to.TopQGradientOptimizer([param], q=0.9, lr=0.1).state_dict()
    optimizer = to.TopQGradientOptimizer([param], q=0.5, lr=0.1)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["q"] == 0.5
    assert [record for record in caplog.records if "q=0.5 stays in force" in record.getMessage()]
    caplog.clear()
    optimizer.load_state_dict(optimizer.state_dict())
    assert not caplog.records


def test_a_state_is_plain_enough_for_restricted_loading(tmp_path):
    param = param_of(noise((3, 4)))
    optimizer = to.TopQGradientOptimizer([param], Adam, q=0.5, dq=0.1, lr=0.1)
    param.grad = noise((3, 4))
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "o.bin")
    optimizer.load_state_dict(torch.load(tmp_path / "o.bin", weights_only=True))


@pytest.mark.parametrize(
    "build,error,match",
    [
        (lambda p: to.SignedGradientOptim(p, "SGD"), TypeError, "InnerOpt"),
        (lambda p: to.SignedGradientOptim(None, SGD), TypeError, "params"),
        (lambda p: to.SignedGradientOptim(p, SGD(p, lr=1)), TypeError, "InnerOpt"),
        (lambda p: to.SignedGradientOptim(p, lr=1, param_ndim=1.5), TypeError, "param_ndim"),
        (lambda p: to.SignedGradientOptim(p, lr=1, param_ndim=3), ValueError, "param_ndim"),
        (lambda p: to.SignedGradientOptim(p, lr=1, grad_scale="2"), TypeError, "grad_scale"),
        (lambda p: to.TopQGradientOptimizer(p, lr=1, q=1.5), ValueError, "q must"),
        (lambda p: to.TopQGradientOptimizer(p, lr=1, q=0.5, dq=-1), ValueError, "dq must"),
        (lambda p: to.TopQGradientOptimizer(p, lr=1, q=0.5, generator=3), TypeError, "generator"),
        (lambda p: to.ClampedGradientOptimizer(p, lr=1), TypeError, "clamp_min"),
        (lambda p: to.ClampedGradientOptimizer(p, lr=1, clamp_min=2, clamp_max=1), ValueError, "clamp_min"),
        (lambda p: to.L2ProjectedOptim(p, lr=1, epsilon=-1), ValueError, "epsilon"),
        (lambda p: to.FrankWolfe(p, lr=0), ValueError, "lr"),
        (lambda p: to.ChainedParamTransformingOptimizer(SGD, params=p, lr=1), TypeError, "transforms"),
        (lambda p: to.filtered(3, "topk"), TypeError, "optimizer_class"),
        (lambda p: to.filtered(SGD, "topq"), ValueError, "topk"),
    ],
)
def test_errors_name_the_argument(build, error, match):
    with pytest.raises(error, match=match):
        build([param_of(noise((3, 4)))])


# ----------------------------------------------------------------------------------------------------------- filtered


def test_filtered_is_a_class_of_its_own():
    cls = to.filtered(AdamW, "topk", keep=0.5, policy="update", min_numel=0)
    assert issubclass(cls, AdamW)
    param = param_of(noise((4, 4)))
    before = param.detach().clone()
    optimizer = functools.partial(cls, lr=0.1)([param])
    param.grad = noise((4, 4), 1)
    optimizer.step()
    assert int((param != before).sum()) == 8


def test_masked_adam_leaves_zeros_out_of_its_moments():
    param, plain = param_of(noise((6, 7))), noise((6, 7))
    optimizer = to.MaskedAdam([param], lr=1e-2)
    m, v = torch.zeros(6, 7), torch.zeros(6, 7)
    for t in range(1, 201):
        gradient = noise((6, 7), t) * (noise((6, 7), 1000 + t) > 0)
        param.grad = gradient.clone()
        optimizer.step()
        seen = gradient != 0
        m = torch.where(seen, 0.9 * m + 0.1 * gradient, m)
        v = torch.where(seen, 0.999 * v + 0.001 * gradient**2, v)
        plain = plain - 1e-2 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    torch.testing.assert_close(param.detach(), plain, atol=2e-6, rtol=1e-5)


def test_they_are_named_on_the_command_line():
    from argparse import Namespace

    from library.optimizers import get_optimizer

    for name in ("SignedGradientOptim", "MaskedAdam"):
        args = Namespace(
            optimizer_type=f"library.transforming_optimizers.{name}",
            optimizer_args=[],
            learning_rate=0.1,
            lr_scheduler="",
        )
        param = param_of(noise((8, 8)))
        _, _, optimizer = get_optimizer(args, [param])
        param.grad = noise((8, 8), 1)
        optimizer.step()
        assert torch.isfinite(param).all()
