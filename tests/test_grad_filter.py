"""The gradient filter: what passes, what the optimizer sees, what is saved, and what is refused."""

from __future__ import annotations

import argparse
import copy
import io
import logging
import pickle

import pytest
import torch

from library import grad_filter as gf
from library import grad_filter_tool

SHAPES = [(96, 5), (4, 3, 5, 5), (200,), (8, 8)]


def parameters(shapes=SHAPES, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_gradients(params, step, seed=7):
    generator = torch.Generator().manual_seed(1000 * seed + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def plain_top(scores, count):
    """Slow twin of the selection: sort by score, then by index."""
    flat = scores.reshape(-1).tolist()
    order = sorted(range(len(flat)), key=lambda i: (-flat[i], i))[:count]
    mask = torch.zeros(len(flat), dtype=torch.bool)
    mask[order] = True
    return mask.reshape(scores.shape)


def filtered(spec, gradient, steps=1):
    """The gradient an optimizer sees for a constant stream of gradients, one result a step."""
    param = torch.nn.Parameter(torch.zeros_like(gradient))
    seen = []
    optimizer = torch.optim.SGD([param], lr=0.0)
    gf.attach(optimizer, spec)
    optimizer.register_step_pre_hook(lambda *_: seen.append(param.grad.clone()))
    for _ in range(steps):
        param.grad = gradient.clone()
        optimizer.step()
    return seen


# ------------------------------------------------------------------------------------------------------ selection


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (70,), (9, 11), (3, 4, 5, 2)])
@pytest.mark.parametrize("keep", [0.01, 0.1, 0.5, 0.77, 1.0])
def test_topk_passes_exactly_the_share_and_the_first_of_ties(shape, keep, dtype):
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(3)).mul(2).round().div(2).to(dtype)
    gradient.view(-1)[0] = 2.0
    count = gf.keep_count(keep, gradient.numel())
    mask = plain_top(gradient.float().abs(), count)
    expected = torch.where(mask, gradient, torch.zeros_like(gradient))
    assert torch.equal(filtered(f"topk keep={keep} min_numel=0", gradient)[0], expected)


@pytest.mark.parametrize("threshold_of", [gf.largest_in_rows, gf._threshold_bit_by_bit])
def test_thresholds_equal_those_of_sorting(threshold_of):
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(4, 501, generator=generator)
    scores[1] = scores[1].round()
    scores[2, 5:9] = float("nan")
    scores[3] = -scores[3].abs()
    bits = gf.ordered_bits(scores)
    for count in (1, 2, 250, 500, 501):
        expected = bits.sort(dim=1, descending=True).values[:, count - 1 : count]
        assert torch.equal(threshold_of(bits, count), expected)


def test_ordered_bits_order_like_numbers_with_nan_last():
    scores = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 3.0, -3.0, float("inf"), float("-inf"), float("nan")])
    bits = gf.ordered_bits(scores)
    assert bits[0] == bits[1]
    order = scores[torch.argsort(bits, stable=True)]
    assert torch.isnan(order[0])
    assert torch.equal(order[1:], scores[:-1].sort(stable=True).values)


def test_selection_without_numpy_is_the_same(monkeypatch):
    gradient = torch.randn(50, 40)
    with_numpy = filtered("topk_change topk_ratio=0.7", gradient, 3)
    monkeypatch.setattr(gf, "kernels", lambda *tensors: None)
    assert all(torch.equal(a, b) for a, b in zip(with_numpy, filtered("topk_change topk_ratio=0.7", gradient, 3)))


@pytest.mark.parametrize("ndim,size", [("1", 5), ("2", 20), ("-1", 20), ("0", 1), ("none", 120), ("9", 120)])
def test_ndim_lets_entries_compete_within_trailing_dimensions(ndim, size):
    gradient = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(2))
    rows = gradient.reshape(-1, size)
    mask = torch.stack([plain_top(row.abs(), gf.keep_count(0.3, size)) for row in rows]).reshape(gradient.shape)
    seen = filtered(f"topk keep=0.3 ndim={ndim}", gradient)[0]
    assert torch.equal(seen, torch.where(mask, gradient, 0.0))


def test_many_ties_leave_exactly_the_share():
    gradient = torch.ones(300_000)
    seen = filtered("topk keep=0.5", gradient)[0]
    assert torch.equal(seen.nonzero().view(-1), torch.arange(150_000))


# -------------------------------------------------------------------------------------------------- the request


def request_step(p, g, buf, prev, lr, m, ratio):
    """One step of the optimizer in the feature request, from its formula."""
    buf = m * buf + (1 - m) * g
    change = (buf - prev).abs() / (prev.abs() + 1e-8)
    k = int(buf.numel() * (1 - ratio))
    mask = torch.ones_like(buf)
    if 0 < k < buf.numel():
        mask = plain_top(change, k).to(buf.dtype)
    update = mask * buf
    return p - lr * torch.sign(update), buf, update


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.5, 0.9, 0.999])
def test_ema_and_topk_change_on_signsgd_are_the_requested_optimizer_bit_for_bit(ratio):
    from pytorch_optimizer import SignSGD

    params = parameters([(17, 13), (100,)])
    plain = [(p.detach().clone(), torch.zeros_like(p), torch.zeros_like(p)) for p in params]
    optimizer = SignSGD(params, lr=1e-3, momentum=0.0)
    gf.attach(optimizer, f"ema,topk_change ema.beta=0.9 topk_ratio={ratio}")
    for step in range(200):
        give_gradients(params, step)
        plain = [request_step(p, q.grad, b, v, 1e-3, 0.9, ratio) for (p, b, v), q in zip(plain, params)]
        optimizer.step()
    saved = gf.handle_of(optimizer).export_state()["params"]
    for param, (expected, mean, previous), kept in zip(params, plain, saved):
        assert torch.equal(param, expected)
        assert torch.equal(kept["buffers"]["ema.ema"], mean)
        assert torch.equal(kept["buffers"]["topk_change.prev"], previous)


def test_topk_change_at_half_alternates_between_two_halves():
    gradient = torch.randn(100, generator=torch.Generator().manual_seed(5))
    masks = [seen != 0 for seen in filtered("topk_change topk_ratio=0.5", gradient, 6)]
    assert torch.equal(masks[0], ~masks[1])
    assert torch.equal(masks[0], masks[2]) and torch.equal(masks[1], masks[5])


# -------------------------------------------------------------------------------------------- the other stages


def test_threshold_sign_random_and_ema_follow_their_formulas():
    gradient = torch.randn(30, 40, generator=torch.Generator().manual_seed(4))
    rms = gradient.square().mean().sqrt()
    big = torch.where(gradient.abs() >= 1.5 * rms, gradient, 0.0)
    assert torch.equal(filtered("threshold value=1.5", gradient)[0], big)
    absolute = torch.where(gradient.abs() >= 0.2, gradient, 0.0)
    assert torch.equal(filtered("threshold value=0.2 relative=false", gradient)[0], absolute)
    assert torch.equal(filtered("sign", gradient)[0], gradient.sign())
    means = filtered("ema beta=0.5", gradient, 3)
    torch.testing.assert_close(means[2], gradient * 0.875)
    torch.testing.assert_close(filtered("ema beta=0.5 debias=true", gradient, 3)[2], gradient)


def test_random_masks_depend_on_seed_step_and_position_only():
    gradient = torch.ones(100, 100)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = filtered("random p=0.3", gradient, 2)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert all(torch.equal(a, b) for a, b in zip(first, filtered("random p=0.3", gradient, 2)))
    assert not torch.equal(first[0], first[1])
    assert abs(first[0].mean().item() - 0.3) < 0.02
    assert not torch.equal(first[0], filtered("random p=0.3 seed=1", gradient)[0])
    rows = filtered("random p=0.5 unit=row", gradient)[0]
    assert 20 < rows[:, 0].sum() < 80 and torch.equal(rows, rows[:, :1].expand(100, 100))
    wholes = torch.stack([seen.mean() for seen in filtered("random p=0.5 unit=tensor", gradient, 40)])
    assert set(wholes.tolist()) == {0.0, 1.0}


def test_jitter_varies_the_share_around_what_was_asked():
    gradient = torch.randn(1000)
    shares = [seen.count_nonzero().item() for seen in filtered("topk keep=0.2 jitter=0.5", gradient, 200)]
    assert 100 <= min(shares) < 115 and 285 < max(shares) <= 300 and abs(sum(shares) / 200 - 200) < 15


# ----------------------------------------------------------------------------------- non-finite, zero and absent


def build_adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_step_with_a_non_finite_gradient_changes_nothing(bad, caplog):
    params = parameters()
    optimizer = build_adamw(params)
    gf.attach(optimizer, "ema,topk_change")
    for step in range(2):
        give_gradients(params, step)
        optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]
    give_gradients(params, 2)
    params[1].grad.view(-1)[3] = bad
    gradients = [p.grad for p in params]
    optimizer.step()
    after = optimizer.state_dict()
    assert after["grad_filter"].pop("counters")["skipped_steps"] == 1
    before[0]["grad_filter"].pop("counters")
    assert_same(after, before[0])
    assert_same([p.detach() for p in params], before[1])
    assert all(p.grad is g for p, g in zip(params, gradients))
    assert "group0.index1 is not finite" in caplog.text


def test_nan_zero_lets_the_other_entries_pass():
    gradient = torch.ones(10, 10)
    gradient[0, 0], gradient[1, 1] = float("nan"), float("inf")
    seen = filtered("finite nan=zero", gradient)[0]
    assert torch.isfinite(seen).all() and seen.sum() == 98


def test_tensors_with_zero_or_absent_gradients_keep_their_buffers():
    params = parameters()
    optimizer = build_adamw(params)
    handle = gf.attach(optimizer, "ema,topk")
    give_gradients(params, 0)
    params[0].grad.zero_()
    params[1].grad = None
    optimizer.step()
    saved = handle.export_state()["params"]
    assert [entry["step"] for entry in saved] == [0, 0, 1, 1]
    assert [bool(entry["buffers"]) for entry in saved] == [False, False, True, True]


def test_small_tensors_pass_untouched_and_are_named_in_the_plan():
    params = parameters([(8,), (100,)])
    gf.tag_parameter(params[0], "net.bias")
    optimizer = torch.optim.SGD(params, lr=1.0)
    handle = gf.attach(optimizer, "topk keep=0.1")
    give_gradients(params, 0)
    before = [p.grad.clone() for p in params]
    optimizer.step()
    assert torch.equal(params[0].grad, before[0]) and params[1].grad.count_nonzero() == 10
    assert any("net.bias" in line and "pass untouched" in line for line in handle.plan())


# ------------------------------------------------------------------------------------------------------ policies


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_policy_update_leaves_masked_weights_where_they_are_and_moments_whole(name):
    def build(params):
        options = {"momentum": 0.9} if name == "SGD" else {}
        return getattr(torch.optim, name)(params, lr=1e-2, weight_decay=0.1, **options)

    params, twins = parameters(), parameters()
    optimizer, bare = build(params), build(twins)
    gf.attach(optimizer, "topk keep=0.1 policy=update")
    for step in range(5):
        give_gradients(params, step)
        give_gradients(twins, step)
        for param, twin in zip(params, twins):
            twin.data.copy_(param)
        optimizer.step()
        before = [twin.detach().clone() for twin in twins]
        bare.step()
        for param, twin, old in zip(params, twins, before):
            mask = plain_top(twin.grad.abs(), gf.keep_count(0.1, twin.numel()))
            assert torch.equal(param.detach(), torch.where(mask, twin, old))
            assert_same(optimizer.state[param], bare.state[twin])


def test_policy_zero_gives_the_optimizer_zeros():
    params, twins = parameters(), parameters()
    optimizer, bare = build_adamw(params), build_adamw(twins)
    gf.attach(optimizer, "topk keep=0.1")
    for step in range(5):
        give_gradients(params, step)
        give_gradients(twins, step)
        for twin in twins:
            twin.grad = torch.where(plain_top(twin.grad.abs(), gf.keep_count(0.1, twin.numel())), twin.grad, 0.0)
        optimizer.step()
        bare.step()
    assert_same([p.detach() for p in params], [p.detach() for p in twins])


# ------------------------------------------------------------------------------------------------- schedules, targets


def kept_by_step(spec, steps):
    return [seen.count_nonzero().item() for seen in filtered(spec, torch.randn(100), steps)]


def test_warmup_every_and_until_say_when_the_filter_acts():
    assert kept_by_step("topk keep=0.1 warmup=2", 4) == [100, 100, 10, 10]
    assert kept_by_step("topk keep=0.1 every=2", 4) == [10, 100, 10, 100]
    assert kept_by_step("topk keep=0.1 until=2", 4) == [10, 10, 100, 100]


def test_targets_choose_chains_and_options_by_tag_name_group_and_shape():
    params = parameters([(100,), (100,), (100,), (10, 10), (100,)])
    names = ["lora_unet_down_blocks_0.lora_down.weight", "lora_unet_down_blocks_0.lora_up.weight", "lora_te_x.lora_up"]
    for param, name in zip(params, names):
        gf.tag_parameter(param, name, "up" if "up" in name else "down", "IN01" if "unet" in name else "TE")
    optimizer = torch.optim.SGD([{"params": params[:4]}, {"params": params[4:]}], lr=1.0)
    spec = gf.parse_spec("topk", "keep=0.1", ["te=none", "lora_up:keep=0.5", "10x10=sign", "group1:keep=0.3"])
    handle = gf.attach(optimizer, spec)
    for param in params:
        param.grad = torch.randn(param.shape)
    optimizer.step()
    assert [param.grad.count_nonzero().item() for param in params] == [10, 50, 100, 100, 30]
    assert set(params[3].grad.unique().tolist()) == {-1.0, 1.0}
    assert not any("matches no tensor" in line for line in handle.plan())


@pytest.mark.parametrize(
    "pattern,name,expected",
    [
        ("te", "lora_te_text_model", True),
        ("te", "lora_unet_attentions", False),
        ("down_blocks_0", "lora_unet_down_blocks_0_attn", True),
        ("down_blocks_0", "lora_unet_down_blocks_01_attn", False),
        ("%attn%", "lora_unet_attn_1", True),
        ("lora_*_1", "lora_unet_attn_1", True),
        ("IN08", "x", True),
        ("in0%", "x", True),
        ("up", "x", True),
    ],
)
def test_patterns_mean_whole_pieces_of_names(pattern, name, expected):
    tags = gf.Tags(name, "up" if pattern == "up" else "", "IN08")
    assert gf.matches(pattern, tags, 0, 0, (2, 3)) is expected


# ----------------------------------------------------------------------------------------------------- attachment


def assert_same(one, other, path=""):
    assert type(one) is type(other), path
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other), path
    elif isinstance(one, dict):
        assert list(one) == list(other), path
        for key in one:
            assert_same(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for index, (a, b) in enumerate(zip(one, other)):
            assert_same(a, b, f"{path}/{index}")
    else:
        assert one == other, path


def run(optimizer, params, first, last):
    for step in range(first, last):
        give_gradients(params, step)
        optimizer.step()


def through_file(state):
    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


def test_detach_leaves_the_optimizer_as_it_was():
    params = parameters()
    optimizer = build_adamw(params)
    before = dict(vars(optimizer)), {k: dict(v) for k, v in vars(optimizer).items() if k.endswith("_hooks")}
    handle = gf.attach(optimizer, "topk")
    assert gf.handle_of(optimizer) is handle and type(optimizer) is torch.optim.AdamW
    handle.detach()
    assert (dict(vars(optimizer)), {k: dict(v) for k, v in vars(optimizer).items() if k.endswith("_hooks")}) == before
    assert gf.handle_of(optimizer) is None and "grad_filter" not in optimizer.state_dict()
    gf.attach(optimizer, "topk")


def test_attaching_twice_is_an_error():
    optimizer = build_adamw(parameters())
    gf.attach(optimizer, "topk")
    with pytest.raises(gf.GradFilterError, match="already"):
        gf.attach(optimizer, "topk")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_copies_go_on_with_the_filter(copied):
    params = parameters()
    optimizer = build_adamw(params)
    gf.attach(optimizer, "ema,topk_change policy=update")
    run(optimizer, params, 0, 3)
    clone = copied(optimizer)
    twins = clone.param_groups[0]["params"]
    run(clone, twins, 3, 6)
    run(optimizer, params, 3, 6)
    assert_same([p.detach() for p in twins], [p.detach() for p in params])
    assert_same(clone.state_dict(), optimizer.state_dict())


def test_closures_are_filtered_after_they_ran():
    params, twins = parameters(), parameters()
    optimizer, other = build_adamw(params), build_adamw(twins)
    for one in (optimizer, other):
        gf.attach(one, "ema,topk_change")
    for step in range(3):
        if step == 2:
            optimizer.step(closure=lambda: give_gradients(params, 2) or torch.tensor(5.0))
        else:
            assert optimizer.step(lambda s=step: give_gradients(params, s) or torch.tensor(5.0)) == 5.0
    run(other, twins, 0, 3)
    assert_same([p.detach() for p in params], [p.detach() for p in twins])


def test_every_call_of_a_closure_is_filtered():
    param = torch.nn.Parameter(torch.randn(100))
    target = torch.randn(100)
    optimizer = torch.optim.LBFGS([param], max_iter=4)
    handle = gf.attach(optimizer, "topk keep=0.1")
    kept = []

    def closure():
        optimizer.zero_grad()
        loss = (param - target).square().sum()
        loss.backward()
        return loss

    optimizer.register_step_post_hook(lambda *_: kept.append(param.grad.count_nonzero().item()))
    optimizer.step(closure)
    assert kept == [10] and handle.step > 1


def test_a_step_that_calls_its_parents_step_is_filtered_once():
    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    param = torch.nn.Parameter(torch.zeros(100))
    optimizer = Twice([param], lr=1.0)
    handle = gf.attach(optimizer, "topk_change")
    param.grad = torch.randn(100)
    optimizer.step()
    assert handle.step == 1 and param.count_nonzero() == int(100 * (1 - 0.9))


def test_a_step_that_raised_is_forgotten():
    class Fragile(torch.optim.SGD):
        broken = True

        def step(self, closure=None):
            if self.broken:
                raise RuntimeError("no memory")
            return super().step(closure)

    params = parameters()
    optimizer = Fragile(params, lr=1.0)
    handle = gf.attach(optimizer, "topk keep=0.1 policy=update")
    give_gradients(params, 0)
    with pytest.raises(RuntimeError, match="no memory"):
        optimizer.step()
    optimizer.broken = False
    before = [p.detach().clone() for p in params]
    give_gradients(params, 1)
    optimizer.step()
    assert handle.step == 2
    assert [int((p != b).sum()) for p, b in zip(params, before)] == [gf.keep_count(0.1, p.numel()) for p in params]


def test_a_fused_optimizer_with_a_scaler_sees_filtered_gradients_and_overflow_changes_nothing():
    def build(fused):
        params = parameters([(10, 10)])
        optimizer = torch.optim.AdamW(params, lr=1e-2, fused=fused)
        return (
            params,
            optimizer,
            gf.attach(optimizer, "ema,topk_change"),
            torch.amp.GradScaler("cpu", init_scale=1024.0),
        )

    results = []
    for fused in (True, False):
        params, optimizer, handle, scaler = build(fused)
        for step in range(4):
            give_gradients(params, step)
            params[0].grad.mul_(scaler.get_scale())
            if step == 2:
                params[0].grad[0, 0] = float("inf")
                before = copy.deepcopy(handle.export_state())
            scaler.scale(torch.tensor(1.0))
            scaler.step(optimizer)
            scaler.update()
            if step == 2:
                assert_same(handle.export_state(), before)
        results.append((params[0].detach(), handle.export_state()))
    torch.testing.assert_close(results[0][0], results[1][0])
    torch.testing.assert_close(
        results[0][1]["params"][0]["buffers"]["ema.ema"], results[1][1]["params"][0]["buffers"]["ema.ema"]
    )


def test_learning_rate_schedulers_find_a_bound_step():
    params = parameters()
    optimizer = build_adamw(params)
    handle = gf.attach(optimizer, "topk")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    run(optimizer, params, 0, 2)
    scheduler.step()
    assert handle.step == 2 and optimizer.param_groups[0]["lr"] == 0.005


def test_gradients_are_filtered_inside_the_backward_pass_where_no_step_is_called():
    param, small = torch.nn.Parameter(torch.randn(100)), torch.nn.Parameter(torch.randn(4))
    optimizer = torch.optim.SGD([param, small], lr=1.0)
    gf.attach(optimizer, "ema,topk keep=0.1", in_backward=True)
    seen = []
    param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.count_nonzero().item()))
    ((param * torch.randn(100)).sum() + small.sum()).backward()
    assert seen == [10] and small.grad.count_nonzero() == 4
    with pytest.raises(gf.GradFilterError, match="fused_backward_pass"):
        gf.attach(torch.optim.SGD([param], lr=1.0), "topk policy=update", in_backward=True)


def test_parameter_groups_added_later_are_filtered():
    params = parameters()
    optimizer = build_adamw(params[:1])
    handle = gf.attach(optimizer, "topk keep=0.1")
    run(optimizer, params, 0, 1)
    optimizer.add_param_group({"params": params[1:], "lr": 1.0})
    give_gradients(params, 1)
    optimizer.step()
    assert [p.grad.count_nonzero().item() for p in params] == [gf.keep_count(0.1, p.numel()) for p in params]
    assert len(handle.export_state()["params"]) == len(params)


def test_sparse_gradients_are_refused_by_name():
    table = torch.nn.Embedding(50, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    gf.attach(optimizer, "topk")
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(gf.GradFilterError, match=r"group0\.index0 is sparse"):
        optimizer.step()


# ------------------------------------------------------------------------------------------------------ saved state


@pytest.mark.parametrize("spec", ["topk_change", "ema,topk_change policy=update", "random p=0.5", "topk jitter=0.3"])
def test_a_resumed_run_is_the_run_that_was_never_stopped(spec):
    params = parameters(dtype=torch.bfloat16)
    optimizer = build_adamw(params)
    gf.attach(optimizer, spec)
    run(optimizer, params, 0, 3)
    saved, weights = through_file(optimizer.state_dict()), [p.detach().clone() for p in params]
    run(optimizer, params, 3, 6)

    twins = [torch.nn.Parameter(w) for w in weights]
    resumed = build_adamw(twins)
    gf.attach(resumed, spec)
    resumed.load_state_dict(saved)
    assert_same(resumed.state_dict(), saved)  # also before the first step
    run(resumed, twins, 3, 6)
    assert_same([p.detach() for p in twins], [p.detach() for p in params])
    assert_same(resumed.state_dict(), optimizer.state_dict())


def test_the_state_that_was_loaded_is_not_shared_with_the_file():
    params = parameters()
    optimizer = build_adamw(params)
    gf.attach(optimizer, "ema,topk")
    run(optimizer, params, 0, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    kept = copy.deepcopy(saved["grad_filter"])
    run(optimizer, params, 1, 3)
    assert_same(saved["grad_filter"], kept)


def messages(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "library.grad_filter"]


def test_a_state_that_does_not_fit_says_so_in_one_line_each(caplog):
    params = parameters()
    optimizer = build_adamw(params)
    gf.attach(optimizer, "ema,topk")
    run(optimizer, params, 0, 2)
    with_filter = copy.deepcopy(optimizer.state_dict())

    bare = build_adamw(params)
    bare.load_state_dict(with_filter)
    assert messages(caplog) == []
    gf.report_unused_state(with_filter, bare)
    assert len(messages(caplog)) == 1 and "no filter is on" in caplog.text
    caplog.clear()

    without = {key: value for key, value in with_filter.items() if key != "grad_filter"}
    optimizer.load_state_dict(without)
    assert len(messages(caplog)) == 1 and "without a filter" in caplog.text
    caplog.clear()

    other = build_adamw(params)
    handle = gf.attach(other, "topk_change")
    other.load_state_dict(with_filter)
    assert len(messages(caplog)) == 1 and "ema,topk" in caplog.text and "4 of 4 tensors" in caplog.text
    assert handle.export_state()["params"][0]["buffers"] == {}
    caplog.clear()

    same = build_adamw(params)
    gf.attach(same, "ema,topk keep=0.2")
    same.load_state_dict(with_filter)
    assert len(messages(caplog)) == 1 and "keep=0.2" in caplog.text and "fresh" not in caplog.text
    assert_same(same.state_dict()["grad_filter"]["params"], with_filter["grad_filter"]["params"])
    caplog.clear()

    fresh = build_adamw(params)
    gf.attach(fresh, "ema,topk")
    fresh.load_state_dict(fresh.state_dict())  # what accelerate does while preparing
    assert messages(caplog) == []


# ------------------------------------------------------------------------------------------- options, custom filters


def test_off_words_and_absent_options_are_off():
    for off in ("", "none", "None", "off", None, [], "''"):
        assert gf.parse_spec(off) is None


@pytest.mark.parametrize(
    "stages,args",
    [
        ("ema,topk_change", ["topk_ratio=0.7", "ema.beta=0.8", "policy=update"]),
        ("ema,topk_change", "topk_ratio=0.7 ema.beta=0.8 policy=update"),
        (["ema", "topk_change"], ["'topk_ratio=0.7'", "beta=0.8", "", "policy=update"]),
        ("'ema,topk_change'", ("topk_ratio=70%", "beta=0.1", "beta=0.8", "policy=update")),
        ("ema,topk_change topk_ratio=0.7 beta=0.8 policy=update", None),
    ],
)
def test_options_arrive_in_every_form_a_front_end_sends(stages, args):
    spec = gf.parse_spec(stages, args)
    assert spec.canonical() == "ema,topk_change ema.beta=0.8 topk_change.topk_ratio=0.7 policy=update"
    assert gf.parse_spec(spec.canonical()) == spec


@pytest.mark.parametrize(
    "stages,args,message",
    [
        ("topkk", [], "Did you mean 'topk'"),
        ("topk", ["keeep=0.1"], "Did you mean 'keep'"),
        ("topk", ["keep=0"], r"keep must be in \(0, 1\]"),
        ("topk", ["keep=1.5"], r"keep must be in \(0, 1\]"),
        ("topk", ["keep=nan"], "a number"),
        ("topk", ["keep=undefined"], "a number"),
        ("topk", ["keep="], "not key=value"),
        ("topk", ["keep"], "not key=value"),
        ("topk", ["policy=freez"], "policy must be"),
        ("topk", ["warmup=1.5"], "a whole number"),
        ("topk", ["ema.beta=0.5"], "no option is called 'ema.beta'"),
        ("ema", ["debias=maybe"], "true or false"),
        ("ema", ["beta=1"], r"beta must be in \[0, 1\)"),
        ("topk_change", ["previous=mask"], "masked or raw or ema"),
        ("topk_change", ["keep=0.5", "topk_ratio=0.9"], "do not add up"),
        ("topk,random", ["seed=1"], "topk.seed=1 or random.seed=1"),
        ("topk,topk", [], "named twice"),
        ("topk:keep", [], "cannot import"),
        ("nosuch/file.py:Name", [], "no file"),
        ("", ["keep=0.1"], "no filter is on"),
    ],
)
def test_mistakes_are_one_line_that_says_what_to_type(stages, args, message):
    with pytest.raises(gf.GradFilterError, match=message) as raised:
        gf.parse_spec(stages, args)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("target", ["te", "te:", "=topk", "te:keep", "te=topkk", "te:keep=7", "te:nokey=1"])
def test_wrong_targets_are_refused(target):
    with pytest.raises(gf.GradFilterError):
        gf.parse_spec("topk", [], [target])


def test_keep_and_topk_ratio_may_both_be_given_when_they_agree():
    spec = gf.parse_spec("ema,topk_change", "topk_ratio=0.9 ema.beta=0.9 policy=update warmup=100 keep=0.1")
    assert gf.Chain(spec.chain).stages[1].filter.count(1000) == int(1000 * (1 - 0.9))


CUSTOM = '''
import torch
from library.grad_filter import GradFilter, GradFilterError


class Slowest(GradFilter):
    """Pass entries that changed least."""

    def __init__(self, decay: float = 0.9):
        self.decay = decay

    def init_state(self, param):
        return {"mean": torch.zeros_like(param, dtype=torch.float32)}

    def score(self, grad, state):
        state["mean"].lerp_(grad, 1 - self.decay)
        return -(grad - state["mean"]).abs()


def big(grad, level: float = 1.0):
    return grad.abs() > level


def counted(grad, state, step):
    state.setdefault("seen", torch.zeros(())).add_(1)
    return grad.abs() * (1 + step)


class Forgetful:
    def __init__(self):
        self.calls = 0

    def transform(self, grad):
        self.calls += 1
        return grad * self.calls


class Wrong:
    def mask(self, grad):
        return grad[..., :1] > 0
'''


@pytest.fixture
def custom_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(CUSTOM)
    return path


@pytest.mark.parametrize("name", ["Slowest", "big", "counted"])
def test_custom_filters_pass_the_check_and_resume(name, custom_file):
    assert grad_filter_tool.check(f"{custom_file}:{name}") == []


@pytest.mark.parametrize("name,message", [("Forgetful", "resumed run differs"), ("Wrong", "for a gradient of shape")])
def test_the_check_finds_broken_promises(name, message, custom_file):
    assert any(message in line for line in grad_filter_tool.check(f"{custom_file}:{name}"))


def test_options_of_custom_filters_come_from_their_signature(custom_file):
    gradient = torch.tensor([3.0, 0.5, -2.0, 1.0]).repeat(25)
    seen = filtered(f"{custom_file}:big level=1.5", gradient)[0]
    assert torch.equal(seen, torch.where(gradient.abs() > 1.5, gradient, 0.0))
    with pytest.raises(gf.GradFilterError, match="level"):
        gf.parse_spec(f"{custom_file}:big", ["lvel=1"])


def test_files_in_filter_folders_are_known_by_name(custom_file, monkeypatch):
    custom_file.with_name("calm.py").write_text(
        "from library.grad_filter import register_filter\n\n\n"
        "@register_filter('calm_test', summary='halves')\n"
        "class Calm:\n    def transform(self, grad):\n        return grad / 2\n"
    )
    monkeypatch.setenv("GRAD_FILTER_PATH", str(custom_file.parent))
    try:
        assert torch.equal(filtered("calm_test", torch.ones(80))[0], torch.full((80,), 0.5))
    finally:
        gf.FILTERS.pop("calm_test", None)


def test_code_is_named_on_the_command_line_only(custom_file, monkeypatch):
    name = f"{custom_file}:big"
    with pytest.raises(gf.GradFilterError, match="config file"):
        gf.parse_spec(name, allow_code=False)
    with pytest.raises(gf.GradFilterError, match="config file"):
        gf.parse_spec("topk", [], [f"te={name}"], allow_code=False)
    args = argparse.Namespace(grad_filter=name, optimizer_args=None, config_keys=frozenset({"grad_filter"}))
    with pytest.raises(gf.GradFilterError, match="config file"):
        gf.spec_from_args(args)
    args.config_keys = frozenset()
    assert gf.spec_from_args(args) is not None
    foreign = argparse.Namespace(grad_filter=name, config_file="x.toml")
    with pytest.raises(gf.GradFilterError, match="config file"):
        gf.spec_from_args(foreign)
    monkeypatch.setattr("sys.argv", ["train.py", "--grad_filter", name])
    assert gf.spec_from_args(foreign) is not None


# ------------------------------------------------------------------------------------------------------ decorators


@gf.with_grad_filter
def get_optimizer(args, params):
    args.learning_rate = None
    args.new = 1
    seen.append(args.optimizer_args)
    return "torch.optim.AdamW", "weight_decay=0.1", build_adamw(params)


seen: list = []


@pytest.mark.parametrize(
    "given,rest",
    [
        (None, None),
        (["weight_decay=0.1"], ["weight_decay=0.1"]),
        ("a=1 b=2", "a=1 b=2"),
        (["grad_filter=none", "a=1"], ["a=1"]),
    ],
)
def test_off_changes_nothing(given, rest, caplog):
    caplog.set_level(logging.DEBUG)
    args = argparse.Namespace(optimizer_args=given, learning_rate=1.0)
    name, text, optimizer = get_optimizer(args, parameters())
    assert (name, text, seen[-1], args.learning_rate, args.new) == (
        "torch.optim.AdamW",
        "weight_decay=0.1",
        rest,
        None,
        1,
    )
    assert args.optimizer_args is given
    assert vars(optimizer).keys() == vars(build_adamw(parameters())).keys()
    assert list(optimizer.state_dict()) == ["state", "param_groups"]
    assert messages(caplog) == []


def test_settings_inside_optimizer_args_reach_the_filter_and_not_the_optimizer():
    given = ["weight_decay=0.1", "grad_filter=ema,topk", "grad_filter.keep=0.5", "grad_filter_targets=te=none"]
    args = argparse.Namespace(optimizer_args=given, learning_rate=1.0, grad_filter=None, grad_filter_args=["beta=0.5"])
    _, text, optimizer = get_optimizer(args, parameters())
    assert seen[-1] == ["weight_decay=0.1"] and args.optimizer_args is given and args.new == 1
    assert text.startswith("weight_decay=0.1,grad_filter=ema,topk") and "keep=0.5" in text
    spec = gf.handle_of(optimizer).spec
    assert spec.canonical() == "ema,topk ema.beta=0.5 topk.keep=0.5 @te=none"
    assert spec.metadata() == {
        "ss_grad_filter": "ema,topk",
        "ss_grad_filter_args": "ema.beta=0.5 topk.keep=0.5 @te=none",
    }


def test_metadata_names_files_without_their_folders(custom_file, tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.ones(1)}, tmp_path / "m.safetensors")
    path = f"{tmp_path}/m.safetensors"
    spec = gf.parse_spec(f"mask_file,{custom_file}:big", [f"path={path},{path}", "level=2"], [f"te={custom_file}:big"])
    assert spec.metadata() == {
        "ss_grad_filter": "mask_file,mine.py:big",
        "ss_grad_filter_args": "mask_file.path=m.safetensors,m.safetensors mine.py:big.level=2.0 @te=mine.py:big",
    }


def test_two_different_filters_and_deepspeed_are_refused():
    with pytest.raises(gf.GradFilterError, match="Give it once"):
        gf.spec_from_args(argparse.Namespace(grad_filter="topk", optimizer_args=["grad_filter=sign"]))
    args = argparse.Namespace(grad_filter="topk", optimizer_args=None, deepspeed=True)
    with pytest.raises(gf.GradFilterError, match="DeepSpeed"):
        get_optimizer(args, parameters())


def test_arguments_work_on_an_empty_parser():
    @gf.with_grad_filter_arguments
    def add_optimizer_arguments(parser):
        parser.add_argument("--optimizer_type")

    parser = argparse.ArgumentParser()
    add_optimizer_arguments(parser)
    args = parser.parse_args(["--grad_filter", "topk", "--grad_filter_args", "keep=0.1", "policy=update"])
    assert gf.spec_from_args(args).canonical() == "topk topk.keep=0.1 policy=update"
    assert gf.spec_from_args(parser.parse_args([])) is None


# ---------------------------------------------------------------------------------------------- reports, command line


def test_scalars_tell_the_kept_share_once_for_each_logged_step():
    params = parameters()
    optimizer = build_adamw(params)
    handle = gf.attach(optimizer, "topk keep=0.1 log_every=2")
    run(optimizer, params, 0, 1)
    first = handle.scalars()
    whole = sum(p.numel() for p in params)
    kept = sum(gf.keep_count(0.1, p.numel()) for p in params)
    assert first["grad_filter/kept"] == pytest.approx(kept / whole)
    give_gradients(params, 0)
    energies = [p.grad.square().sum() for p in params]
    tops = [p.grad.abs().view(-1).topk(gf.keep_count(0.1, p.numel())).values.square().sum() for p in params]
    assert first["grad_filter/energy_kept"] == pytest.approx(float(sum(tops) / sum(energies)), rel=1e-5)
    run(optimizer, params, 1, 2)
    assert handle.scalars() == {}
    run(optimizer, params, 2, 3)
    assert "grad_filter/kept" in handle.scalars()


def test_unknown_facts_are_refused():
    handle = gf.attach(build_adamw(parameters()), "topk")
    with pytest.raises(gf.GradFilterError, match="timestep"):
        handle.set_context(timestep=1)


def test_list_describe_and_check_print_answers(capsys, custom_file):
    assert grad_filter_tool.main(["list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in gf.FILTERS)
    for name in [*gf.FILTERS, *gf.PRESETS]:
        assert grad_filter_tool.main(["describe", name]) == 0
        assert name in capsys.readouterr().out
    assert grad_filter_tool.main(["check", f"{custom_file}:Slowest"]) == 0
    assert grad_filter_tool.main(["check", f"{custom_file}:Forgetful"]) == 1
    assert grad_filter_tool.main(["describe", "topkk"]) == 2
    assert "Did you mean 'topk'" in capsys.readouterr().err


@pytest.mark.parametrize("zeros", [0.3, 0.5, 0.95])
@pytest.mark.parametrize("keep", [0.01, 0.05, 0.5, 0.9])
def test_tensors_with_many_zeros_lose_nothing_to_the_short_cut(zeros, keep):
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(3000, generator=generator)
    gradient[torch.rand(3000, generator=generator) < zeros] = 0.0
    mask = plain_top(gradient.abs(), gf.keep_count(keep, 3000))
    assert torch.equal(gf.pass_largest(gf.ordered_bits(gradient.abs().view(1, -1), True), int(mask.sum()))[0], mask)
    signed = gf.ordered_bits(gradient.view(1, -1))
    assert torch.equal(gf.pass_largest(signed, int(mask.sum()))[0], plain_top(gradient, int(mask.sum())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [10, 200_000])
def test_masking_keeps_bits_and_gives_plain_zeros(dtype, size):
    values = torch.randn(size).to(dtype)
    values[:4] = torch.tensor([float("nan"), float("inf"), -0.0, -1.0])
    mask = torch.rand(size) < 0.5
    mask[:4] = torch.tensor([False, True, True, False])
    expected = torch.where(mask, values, torch.zeros((), dtype=dtype))
    for result in (gf.masked(values, mask), gf.masked(values.clone(), mask, out=values)):
        assert torch.equal(result.view(torch.uint8), expected.view(torch.uint8))
