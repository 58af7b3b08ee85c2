"""Every stage and preset against a plain twin written from its formula; scopes, units, ramps; what is measured."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from library import grad_filter as gf
from library import grad_filter_stages as stages
from library import grad_filter_statistics, grad_filter_tool

ALL = sorted(gf.known_filters())
SHAPES = [(), (1,), (70,), (9, 11), (4, 5, 6), (3, 4, 3, 3)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NEEDED = {"clamp": "lo=-0.5 hi=0.5", "mask_file": None}


def gradients(shape, steps, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(steps)]


def run(spec, stream, optimizer_class=torch.optim.SGD, param=None, lr=0.0, **options):
    """What the optimizer sees at each step of a stream of gradients."""
    param = torch.nn.Parameter(torch.ones_like(stream[0]) if param is None else param)
    optimizer = optimizer_class([param], lr=lr, **options)
    handle = gf.attach(optimizer, f"{spec} min_numel=0")
    handle.set_context(timesteps=torch.tensor([100, 200]))
    seen = []
    for grad in stream:
        param.grad = grad.clone()
        optimizer.step()
        seen.append(param.grad.clone())
    return seen


def top(scores, count):
    """Slow twin of the selection."""
    order = sorted(range(scores.numel()), key=lambda i: (-float(scores.reshape(-1)[i]), i))[:count]
    mask = torch.zeros(scores.numel(), dtype=torch.bool)
    mask[order] = True
    return mask.view(scores.shape)


def spec_of(name, tmp_path=None):
    extra = NEEDED.get(name, "")
    return f"{name} {extra}" if extra is not None else None


# ------------------------------------------------------------------------------------------- every stage, any tensor


@pytest.mark.parametrize("name", [name for name in ALL if name != "mask_file"])
def test_every_filter_takes_every_shape_and_type(name):
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        seen = run(spec_of(name), gradients(shape, 4, dtype))
        fine = [torch.isfinite(s).all() and s.dtype is dtype and s.shape == torch.Size(shape) for s in seen]
        assert all(fine), (shape, dtype)


@pytest.mark.parametrize("name", [name for name in ALL if name != "mask_file"])
def test_every_filter_gives_the_same_for_gradients_in_another_memory_order(name):
    stream = gradients((4, 3, 5, 5), 3)
    other = [g.to(memory_format=torch.channels_last) for g in stream]
    start = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(3))
    for one, two in zip(
        run(spec_of(name), stream, param=start.clone()), run(spec_of(name), other, param=start.clone())
    ):
        assert torch.equal(one, two)


@pytest.mark.parametrize("name", [name for name in ALL if name != "mask_file"])
def test_every_filter_resumes_and_repeats(name):
    assert grad_filter_tool.check(spec_of(name)) == []


@pytest.mark.parametrize("name", [name for name in ALL if name not in ("mask_file", "finite")])
def test_every_filter_leaves_a_step_of_zeros_and_a_step_with_nan_alone(name):
    param = torch.nn.Parameter(torch.ones(10, 10))
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9)
    handle = gf.attach(optimizer, spec_of(name))
    for grad in gradients((10, 10), 2):
        param.grad = grad
        optimizer.step()
    before = {k: v.clone() for k, v in handle.export_state()["params"][0]["buffers"].items()}
    param.grad = torch.zeros(10, 10)
    optimizer.step()
    param.grad = torch.full((10, 10), float("nan"))
    optimizer.step()
    after = handle.export_state()["params"][0]["buffers"]
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
    assert torch.isfinite(param).all()


def test_every_filter_has_documentation_with_its_options_and_state():
    for name, found in gf.known_filters().items():
        text = found.target.__doc__
        assert found.summary and text, name
        for option in found.options():
            assert option in text, (name, option)
        if hasattr(found.target, "init_state") and found.target.init_state is not gf.GradFilter.init_state:
            assert "State" in text, name


# --------------------------------------------------------------------------------------------------- plain twins


def test_stable_passes_the_smallest_relative_change():
    stream, prev = gradients((20, 10), 4), torch.zeros(20, 10)
    for seen, grad in zip(run("stable keep=0.2", stream), stream):
        change = (grad - prev).abs() / (prev.abs() + 1e-8)
        assert torch.equal(seen, torch.where(top(-change, 40), grad, 0.0))
        prev = grad


def test_previous_raw_and_ema_change_what_is_compared_with():
    stream = gradients((20, 10), 4)
    for previous in ("raw", "ema"):
        prev = torch.zeros(20, 10)
        for seen, grad in zip(run(f"topk_change keep=0.2 previous={previous}", stream), stream):
            change = (grad - prev).abs() / (prev.abs() + 1e-8)
            assert torch.equal(seen, torch.where(top(change, 40), grad, 0.0))
            prev = grad if previous == "raw" else torch.lerp(prev, grad, 0.1)


def noise_ratio(stream, beta):
    a, c, result = torch.zeros_like(stream[0]), torch.zeros_like(stream[0]), []
    for t, grad in enumerate(stream, 1):
        a, c = beta * a + (1 - beta) * grad, beta * c + (1 - beta) * grad**2
        mean, square = a / (1 - beta**t), c / (1 - beta**t)
        result.append(mean**2 / (square - mean**2).clamp(min=1e-30))
    return result


def test_snr_passes_by_share_or_by_threshold_and_snr_soft_weighs():
    stream = [g + 0.5 for g in gradients((20, 10), 6)]
    ratios = noise_ratio(stream, 0.95)
    by_share, by_value = run("snr keep=0.1", stream), run("snr threshold=0.5", stream)
    for t in range(2, 6):
        mask = by_share[t] != 0
        assert mask.sum() == 20 and ratios[t][mask].min() >= ratios[t][~mask].max() * (1 - 1e-3)
        expected = torch.where(ratios[t] >= 0.5, stream[t], 0.0)
        assert (by_value[t] != expected).sum() <= 1  # at the very edge the order of rounding decides
        weighed = stream[t] * ratios[t] / (1 + ratios[t])
        torch.testing.assert_close(run("snr_soft", stream)[t], weighed, rtol=1e-3, atol=1e-5)


def test_snr_borrows_the_moments_of_the_optimizer():
    stream = gradients((20, 10), 4)
    param = torch.nn.Parameter(torch.ones(20, 10))
    optimizer = torch.optim.AdamW([param], lr=1e-3)
    handle = gf.attach(optimizer, "snr source=optimizer keep=0.1 policy=update")
    for grad in stream:
        moments = {k: v.clone() for k, v in optimizer.state.get(param, {}).items()}
        before = param.detach().clone()
        param.grad = grad
        optimizer.step()
    ratio = moments["exp_avg"] ** 2 / (moments["exp_avg_sq"] - moments["exp_avg"] ** 2).clamp(min=1e-30)
    assert torch.equal(param != before, top(ratio, 20))
    assert handle.export_state()["params"][0]["buffers"] == {}
    with pytest.raises(gf.GradFilterError, match="source=own"):
        run("snr source=optimizer", stream, momentum=0.9)


def test_snr_keeps_statistics_for_each_noise_level():
    stream = gradients((20, 10), 8)
    levels = [100, 900, 100, 900, 100, 900, 100, 900]
    param = torch.nn.Parameter(torch.ones(20, 10))
    optimizer = torch.optim.SGD([param], lr=0.0)
    handle = gf.attach(optimizer, "snr per=timestep buckets=2 keep=0.1")
    seen = []
    for grad, level in zip(stream, levels):
        handle.set_context(timesteps=torch.tensor([level]))
        param.grad = grad.clone()
        optimizer.step()
        seen.append(param.grad.clone())
    apart = [run("snr keep=0.1", stream[0::2]), run("snr keep=0.1", stream[1::2])]
    for t in range(8):
        assert torch.equal(seen[t], apart[t % 2][t // 2])
    with pytest.raises(gf.GradFilterError, match="per=all"):
        handle.set_context()
        param.grad = stream[0]
        optimizer.step()


@pytest.mark.parametrize("of", ["square", "magnitude"])
def test_fisher_chooses_once_and_keeps_one_bit_an_entry(of):
    stream = gradients((20, 11), 6)
    total = sum(g**2 if of == "square" else g.abs() for g in stream[:3])
    seen = run(f"fisher warmup=3 keep=0.1 of={of}", stream)
    assert all(torch.equal(s, g) for s, g in zip(seen[:3], stream))
    for s, g in zip(seen[3:], stream[3:]):
        assert torch.equal(s, torch.where(top(total, 22), g, 0.0))
    mask = torch.rand(13, 7) < 0.5
    packed = stages.pack_bits(mask)
    assert packed.numel() == math.ceil(91 / 8) and torch.equal(stages.unpack_bits(packed, mask), mask)


@pytest.mark.parametrize("largest", [True, False])
def test_weight_chooses_by_the_weights_at_the_start(largest):
    weight = torch.randn(20, 10, generator=torch.Generator().manual_seed(8))
    mask = top(weight.abs() if largest else -weight.abs(), 20)
    stream = gradients((20, 10), 3)
    for seen, grad in zip(run(f"weight keep=0.1 largest={largest}", stream, param=weight.clone(), lr=1.0), stream):
        assert torch.equal(seen, torch.where(mask, grad, 0.0))


def test_mask_files_are_joined_and_turned_round(tmp_path):
    from safetensors.torch import save_file

    one, two = torch.rand(10, 10) < 0.5, torch.rand(10, 10) < 0.5
    for name, mask in (("a", one), ("b", two)):
        save_file({"index0": mask.to(torch.uint8)}, tmp_path / f"{name}.safetensors")
    both = f"{tmp_path}/a.safetensors,{tmp_path}/b.safetensors"
    grad = gradients((10, 10), 1)
    for extra, mask in (("", one | two), (" join=intersection", one & two), (" complement=true", ~(one | two))):
        assert torch.equal(run(f"mask_file path={both}{extra}", grad)[0], torch.where(mask, grad[0], 0.0))
    assert torch.equal(run(f"mask_file path={tmp_path}/a.safetensors", gradients((10, 9), 1) and grad)[0] != 0, one)
    with pytest.raises(gf.GradFilterError, match="another shape"):
        run(f"mask_file path={tmp_path}/a.safetensors", gradients((10, 9), 1))
    with pytest.raises(gf.GradFilterError, match="existing file"):
        gf.parse_spec("mask_file path=none.safetensors")
    with pytest.raises(gf.GradFilterError, match="path has to be given"):
        gf.parse_spec("mask_file")


def test_agree_compares_signs_with_the_mean_before():
    stream, mean = gradients((20, 10), 5), torch.zeros(20, 10)
    for seen, grad in zip(run("agree beta=0.8", stream), stream):
        assert torch.equal(seen, torch.where(grad * mean >= 0, grad, 0.0))
        mean = torch.lerp(mean, grad, 1 - 0.8)


def test_cautious_moves_only_where_the_update_agrees_with_the_gradient():
    stream = gradients((20, 10), 5)
    param = torch.nn.Parameter(torch.ones(20, 10))
    twin = torch.nn.Parameter(torch.ones(20, 10))
    optimizer, bare = (torch.optim.AdamW([p], lr=1e-2, weight_decay=0.0) for p in (param, twin))
    gf.attach(optimizer, "cautious")
    for grad in stream:
        twin.data.copy_(param)
        before = param.detach().clone()
        param.grad, twin.grad = grad.clone(), grad.clone()
        optimizer.step()
        bare.step()
        agrees = bare.state[twin]["exp_avg"] * grad > 0
        scale = agrees.numel() / (agrees.sum() + 1)
        expected = torch.where(agrees, before + (twin.detach() - before) * scale, before)
        torch.testing.assert_close(param.detach(), expected, rtol=1e-5, atol=1e-6)


def test_band_passes_what_lies_between_two_quantiles():
    grad = gradients((20, 10), 1)
    rank = grad[0].abs().view(-1).argsort().argsort().view(20, 10)
    seen = run("band lo=0.25 hi=0.9", grad)[0]
    assert torch.equal(seen, torch.where((rank >= 50) & (rank < 180), grad[0], 0.0))


def test_vargate_waits_until_the_sign_is_certain():
    stream = [g * 0.5 + 0.3 for g in gradients((20, 10), 12)]
    r, v = torch.zeros(20, 10), torch.zeros(20, 10)
    passed = 0
    for seen, grad in zip(run("vargate alpha=2 zeta=0.9", stream), stream):
        r, v = r + grad, v + grad**2
        mask = r**2 > 2 * v
        torch.testing.assert_close(seen, torch.where(mask, r, 0.0))
        r, v = torch.where(mask, 0.0, r), torch.where(mask, 0.0, v) * 0.9
        passed += int(mask.sum())
    assert passed


@pytest.mark.parametrize("tau", [0.5, 1.0])
def test_micro_agree_counts_signs_of_accumulated_batches(tau):
    batches = gradients((20, 10), 4)
    param = torch.nn.Parameter(torch.ones(20, 10))
    optimizer = torch.optim.SGD([param], lr=0.0)
    gf.attach(optimizer, f"micro_agree tau={tau}")
    for _ in range(2):
        for batch in batches:
            (param * batch).sum().backward()
        optimizer.step()
        whole = sum(batches)
        agree = sum(b.sign() for b in batches).abs() >= tau * 4
        torch.testing.assert_close(param.grad, torch.where(agree, whole, 0.0))
        optimizer.zero_grad()


def test_micro_agree_forgets_a_step_that_a_loss_scaler_left_out():
    param = torch.nn.Parameter(torch.ones(20, 10))
    optimizer = torch.optim.SGD([param], lr=0.0)
    gf.attach(optimizer, "micro_agree tau=1")
    for batch in gradients((20, 10), 3):
        (param * batch).sum().backward()
    optimizer.zero_grad()  # the optimizer's step is never called
    one, two = gradients((20, 10), 2, seed=5)
    for batch in (one, two):
        (param * batch).sum().backward()
    optimizer.step()
    torch.testing.assert_close(param.grad, torch.where(one.sign() == two.sign(), one + two, 0.0))


def test_magma_rests_whole_tensors_and_scales_movement_by_agreement():
    stream = gradients((20, 10), 30)
    param, twin = torch.nn.Parameter(torch.ones(20, 10)), torch.nn.Parameter(torch.ones(20, 10))
    optimizer, bare = (torch.optim.AdamW([p], lr=1e-2, weight_decay=0.0) for p in (param, twin))
    gf.attach(optimizer, "magma")
    scale, rested = 0.5, 0
    for grad in stream:
        moment = optimizer.state[param]["exp_avg"].clone() if param in optimizer.state else torch.zeros(20, 10)
        cosine = float((moment * grad).sum() / (moment.norm() * grad.norm()).clamp(min=1e-30))
        scale = 0.9 * scale + 0.1 / (1 + math.exp(-cosine / 2))
        twin.data.copy_(param)
        before = param.detach().clone()
        param.grad, twin.grad = grad.clone(), grad.clone()
        optimizer.step()
        bare.step()
        if torch.equal(param, before):
            rested += 1
        else:
            expected = before + (twin.detach() - before) * scale
            torch.testing.assert_close(param.detach(), expected, rtol=1e-5, atol=1e-6)
    assert 5 < rested < 25


@pytest.mark.parametrize(
    "spec,formula",
    [
        ("soft_threshold value=0.3 relative=false", lambda g: g.sign() * (g.abs() - 0.3).clamp(min=0)),
        ("soft_threshold value=0.5", lambda g: g.sign() * (g.abs() - 0.5 * g.square().mean().sqrt()).clamp(min=0)),
        ("norm", lambda g: g / g.norm()),
        ("norm p=1", lambda g: g / g.abs().sum()),
        ("norm p=inf ndim=1", lambda g: g / g.abs().amax(-1, keepdim=True)),
        ("norm p=2 ndim=-1", lambda g: g / g.norm(dim=(1, 2), keepdim=True)),
        ("clamp lo=-0.2 hi=0.4", lambda g: g.clamp(-0.2, 0.4)),
        ("clamp hi=0.4", lambda g: g.clamp(max=0.4)),
        ("scale grad_scale=3 grad_bias=0.5", lambda g: g * 3 + 0.5),
        ("gc", lambda g: g - g.mean((1, 2), keepdim=True)),
        ("nonzero", lambda g: g),
    ],
)
def test_transforms_without_state_follow_their_formulas(spec, formula):
    grad = gradients((4, 5, 6), 1)
    torch.testing.assert_close(run(spec, grad)[0], formula(grad[0]))


def test_norm_of_a_vector_is_one_norm_and_rows_of_zeros_stay():
    grad = torch.randn(50)
    torch.testing.assert_close(run("norm ndim=-1", [grad])[0], grad / grad.norm())
    grad = torch.randn(5, 10)
    grad[2] = 0
    assert torch.equal(run("norm ndim=1", [grad])[0][2], torch.zeros(10))


def test_clamp_keeps_weights_inside_after_the_step():
    param = torch.nn.Parameter(torch.zeros(10, 10))
    optimizer = torch.optim.SGD([param], lr=1.0)
    gf.attach(optimizer, "clamp weights=-0.5,0.25")
    (grad,) = gradients((10, 10), 1)
    param.grad = grad.clone()
    optimizer.step()
    torch.testing.assert_close(param.detach(), (-grad).clamp(-0.5, 0.25))


def test_orthograd_is_orthogonal_to_the_weights_and_keeps_the_norm():
    weight, (grad,) = torch.randn(20, 10), gradients((20, 10), 1)
    (seen,) = run("orthograd", [grad], param=weight.clone())
    assert abs(float((seen * weight).sum())) < 1e-3
    torch.testing.assert_close(seen.norm(), grad.norm())
    along = (weight * grad).sum() / (weight * weight).sum()
    torch.testing.assert_close(seen / seen.norm(), (grad - along * weight) / (grad - along * weight).norm())


def test_grokfast_adds_the_slow_part():
    stream, mean = gradients((20, 10), 4), torch.zeros(20, 10)
    for seen, grad in zip(run("grokfast alpha=0.9 lamb=3", stream), stream):
        mean = 0.9 * mean + 0.1 * grad
        torch.testing.assert_close(seen, grad + 3 * mean)


def test_spikes_of_entries_are_cut_to_what_is_usual():
    stream = gradients((20, 10), 30)
    stream[25][3, 4] = 1000.0
    seen = run("spike theta=25 beta=0.9 warmup=10", stream)
    square = torch.zeros(20, 10)
    for t, (grad, got) in enumerate(zip(stream, seen)):
        bound = (25 * square / max(1e-30, 1 - 0.9**t)).sqrt()
        cut = grad if t < 10 else torch.where(grad.abs() > bound, grad.sign() * bound, grad)
        torch.testing.assert_close(got, cut)
        square = 0.9 * square + 0.1 * cut**2
    assert seen[25][3, 4] < 30 and torch.equal(seen[25] == stream[25], torch.arange(200).view(20, 10) != 34)


@pytest.mark.parametrize("by,theta", [("tensor", 1.2), ("global", 2.5)])
def test_spikes_of_norms_are_cut(by, theta):
    stream = gradients((20, 10), 30)
    stream[25] *= 50
    seen = run(f"spike by={by} theta={theta} beta=0.9 warmup=10", stream)
    mean = variance = 0.0
    for t, (grad, got) in enumerate(zip(stream, seen)):
        norm, allowed = float(grad.norm()), float(grad.norm())
        if t >= 10 and by == "tensor":
            allowed = min(norm, theta * mean)
        elif t >= 10:
            z = (norm - mean) / max(math.sqrt(variance), 1e-12)
            allowed = mean + theta**2 / z * math.sqrt(variance) if z > theta else norm
        torch.testing.assert_close(got, grad * allowed / norm, rtol=1e-4, atol=1e-6)
        beta = min(0.9, t / (t + 1))
        variance = beta * variance + (1 - beta) * ((allowed - mean) ** 2 if t else 0.0)
        mean = beta * mean + (1 - beta) * allowed
    assert seen[25].norm() < 25


# --------------------------------------------------------------------------------------------------------- presets


@pytest.mark.parametrize("name", sorted(gf.PRESETS))
def test_every_preset_is_its_stages_and_options(name):
    preset = gf.PRESETS[name]
    assert gf.parse_spec(name) == gf.parse_spec(f"{preset.stages} {' '.join(preset.args)}")
    assert preset.summary or name
    params = [torch.nn.Parameter(torch.randn(30, 20)), torch.nn.Parameter(torch.randn(100))]
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    gf.attach(optimizer, name)
    for step in range(3):
        for param, shape in zip(params, [(30, 20), (100,)]):
            param.grad = gradients(shape, 1, seed=step)[0]
        optimizer.step()
    assert all(torch.isfinite(p).all() for p in params)


def test_options_typed_after_a_preset_win():
    assert "keep=0.5" in gf.parse_spec("gmt", "keep=0.5").canonical()


def test_skipupdate_and_childtuning_scale_what_passes():
    grad = [torch.ones(100, 100)]
    seen = run("childtuning_f", grad)[0]
    share = float((seen != 0).float().mean())
    assert 0.27 < share < 0.33 and seen.max() == pytest.approx(1 / share, rel=1e-5)


def test_dgc_drops_ever_more_during_its_ramp():
    stream = gradients((50, 40), 120)
    kept = [int((s != 0).sum()) for s in run("dgc", stream)]
    assert kept[0] == 2000 and kept[50] == 2000 - math.floor(1980 * 0.5 + 0.5) and kept[100] == kept[119] == 20


def test_lazy_adam_rests_where_there_is_no_gradient():
    param = torch.nn.Parameter(torch.ones(30, 10))
    optimizer = torch.optim.Adam([param], lr=1e-2)
    gf.attach(optimizer, "lazy_adam")
    for step in range(4):
        param.grad = gradients((30, 10), 1, seed=step)[0]
        param.grad[step::2] = 0
        before = param.detach().clone()
        optimizer.step()
        assert torch.equal(param == before, param.grad == 0)


# --------------------------------------------------------------------------------------------------- scopes and units


def many(spec, shapes, step=0, tags=(), groups=None, scale=None):
    generator = torch.Generator().manual_seed(step)
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    for param, tag in zip(params, tags):
        gf.tag_parameter(param, *tag)
    grouped = [{"params": params}] if groups is None else [{"params": [params[i] for i in group]} for group in groups]
    optimizer = torch.optim.SGD(grouped, lr=0.0)
    gf.attach(optimizer, spec)
    for index, param in enumerate(params):
        param.grad = torch.randn(param.shape, generator=generator) * (scale[index] if scale else 1.0)
    before = [param.grad.clone() for param in params]
    optimizer.step()
    return before, [param.grad for param in params]


def test_global_scope_passes_the_largest_of_all_tensors():
    before, after = many("topk keep=0.1 scope=global", [(20, 10), (300,), (5, 4, 10)], scale=[1, 3, 0.1])
    mask = top(torch.cat([g.abs().view(-1) for g in before]), 70)
    assert torch.equal(torch.cat([g.view(-1) for g in after]) != 0, mask)


def test_group_scope_passes_the_largest_of_each_group():
    before, after = many("topk keep=0.1 scope=group", [(200,), (300,), (100,)], groups=[[0, 1], [2]], scale=[1, 3, 1])
    mask = torch.cat([top(torch.cat([before[0], before[1]]).abs(), 50), top(before[2].abs(), 10)])
    assert torch.equal(torch.cat(after) != 0, mask)


def test_ties_across_tensors_go_to_the_first():
    params = [torch.nn.Parameter(torch.zeros(100)) for _ in range(3)]
    optimizer = torch.optim.SGD(params, lr=1.0)
    gf.attach(optimizer, "topk keep=0.5 scope=global")
    for param in params:
        param.grad = torch.ones(100)
    optimizer.step()
    assert [int((p != 0).sum()) for p in params] == [100, 50, 0]


def test_floor_and_cap_bound_the_share_of_each_tensor():
    _, after = many("topk keep=0.2 scope=global floor=0.05 cap=0.4", [(200,), (200,), (200,)], scale=[100, 1, 0.001])
    kept = [int((g != 0).sum()) for g in after]
    assert sum(kept) == 120 and kept[0] == 80 and kept[2] == 10
    _, after = many("topk keep=0.9 scope=global cap=0.4", [(200,), (200,)])
    assert [int((g != 0).sum()) for g in after] == [80, 80]


def test_row_scope_passes_the_share_of_every_row():
    before, after = many("topk keep=0.1 scope=row", [(7, 4, 5), (100,)])
    mask = torch.stack([top(row.abs(), 2) for row in before[0].view(7, 20)]).view(7, 4, 5)
    assert torch.equal(after[0] != 0, mask)
    assert torch.equal(after[1] != 0, top(before[1].abs(), 10))


@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_rows_pass_as_a_whole(scope):
    before, after = many(f"topk keep=0.25 unit=row scope={scope}", [(8, 20), (12, 5, 4)])
    scores = [g.abs().view(len(g), -1).mean(1) for g in before]
    if scope == "tensor":
        masks = [top(scores[0], 2), top(scores[1], 3)]
    else:
        masks = top(torch.cat(scores), 5).split([8, 12])
    for grad, seen, mask in zip(before, after, masks):
        assert torch.equal(seen, torch.where(mask.view(-1, *[1] * (grad.dim() - 1)), grad, 0.0))


def test_tiles_pass_as_a_whole_also_the_last_short_one():
    before, after = many("topk keep=0.5 unit=tile", [(40, 30)])
    flat = before[0].abs().view(-1)
    scores = torch.stack([tile.mean() for tile in flat.split(256)])
    mask = top(scores, 3).repeat_interleave(256)[:1200]
    assert torch.equal(after[0].view(-1) != 0, mask)


def test_whole_tensors_pass_in_global_scope():
    _, after = many("topk keep=0.5 unit=tensor scope=global", [(100,)] * 4, scale=[1, 5, 0.1, 3])
    assert [bool((g != 0).any()) for g in after] == [False, True, False, True]


def lora_tags(modules):
    for module in range(modules):
        yield f"lora_unet_m{module}.lora_down.weight", "down"
        yield f"lora_unet_m{module}.lora_up.weight", "up"


@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_rank_components_of_down_and_up_pass_together(scope):
    shapes = [(8, 30), (20, 8), (8, 9, 3, 3), (20, 8, 1, 1)]
    spec = f"topk keep=0.25 unit=component scope={scope}"
    before, after = many(spec, shapes, tags=lora_tags(2))
    scores = []
    for down, up in ((0, 1), (2, 3)):
        up_rows = before[up].abs().transpose(0, 1).reshape(8, -1)
        scores.append(before[down].abs().reshape(8, -1).mean(1) + up_rows.mean(1))
    masks = [top(s, 2) for s in scores] if scope == "tensor" else top(torch.cat(scores), 4).split([8, 8])
    for module, mask in enumerate(masks):
        down, up = after[2 * module], after[2 * module + 1]
        assert torch.equal(down.reshape(8, -1).any(1), mask)
        assert torch.equal(up.transpose(0, 1).reshape(8, -1).any(1), mask)
        assert torch.equal((up != 0).transpose(0, 1).reshape(8, -1).all(1), mask)


def test_topk_change_keeps_its_own_rounding_in_every_scope():
    _, after = many("topk_change topk_ratio=0.7 scope=global", [(111,), (222,)])
    assert sum(int((g != 0).sum()) for g in after) == int(333 * (1 - 0.7))


@pytest.mark.parametrize(
    "spec,message",
    [
        ("sign scope=global", "scope needs a stage that scores"),
        ("random unit=row scope=global", "needs a stage that scores"),
        ("topk unit=tensor", "scope=global"),
        ("topk floor=0.1", "scope=global"),
        ("topk scope=row unit=tile", "within a row"),
        ("topk floor=0.5 cap=0.1 scope=global", "floor"),
        ("topk,orthograd", "fills masked entries"),
        ("topk,grokfast", "fills masked entries"),
        ("sign ramp=10", "ramp needs"),
    ],
)
def test_combinations_that_mean_nothing_are_refused(spec, message):
    with pytest.raises(gf.GradFilterError, match=message):
        gf.parse_spec(spec)


# --------------------------------------------------------------------------------------------------------- schedules


@pytest.mark.parametrize("shape,power", [("linear", 1), ("cubic", 3)])
def test_ramps_fall_from_all_to_keep(shape, power):
    kept = [
        int((s != 0).sum()) for s in run(f"topk keep=0.1 warmup=2 ramp=10 ramp_shape={shape}", gradients((1000,), 16))
    ]
    assert kept[:3] == [1000, 1000, 1000]
    for step in range(2, 12):
        assert kept[step] == 1000 - math.floor(900 * (1 - (1 - (step - 2) / 10) ** power) + 0.5)
    assert kept[12:] == [100] * 4


# ---------------------------------------------------------------------------------------------------- what is measured


def followed(spec, steps, shape=(20, 10), optimizer_class=torch.optim.AdamW):
    param = torch.nn.Parameter(torch.ones(shape))
    gf.tag_parameter(param, "lora_unet_block.lora_up.weight", "up")
    optimizer = optimizer_class([param], lr=1e-2)
    handle = gf.attach(optimizer, f"{spec} statistics=full log_every=1")
    grad = gradients(shape, 1)[0]
    for _ in range(steps):
        param.grad = grad.clone()
        before = param.detach().clone()
        optimizer.step()
    return handle, param, before


def test_the_two_cycle_of_the_request_at_half_is_plain_to_see():
    handle, _, _ = followed("topk_change topk_ratio=0.5", 6)
    measured = handle.scalars()
    assert measured["grad_filter/kept"] == measured["grad_filter/asked"] == 0.5
    assert (measured["grad_filter/overlap_1"], measured["grad_filter/overlap_2"]) == (0.0, 1.0)
    assert measured["grad_filter/never_passed"] == 0.0
    steps, rows = handle.statistics.table("overlap_2")
    assert steps == [2, 3, 4, 5] and rows[0] == [1.0] * 4


def test_movement_at_masked_entries_is_told():
    handle, param, before = followed("topk keep=0.1", 5)
    measured = handle.scalars()
    moved = (param.detach() - before).abs()
    masked = param.grad == 0
    assert measured["grad_filter/moved"] == pytest.approx(float((moved > 0).float().mean()))
    assert measured["grad_filter/moved_at_masked"] == pytest.approx(float(moved[masked].sum() / moved.sum()), rel=1e-4)
    assert measured["grad_filter/never_passed"] == pytest.approx(0.9)
    handle, _, _ = followed("topk keep=0.1 policy=update", 5)
    measured = handle.scalars()
    assert measured["grad_filter/moved"] == pytest.approx(0.1)
    assert measured["grad_filter/moved_at_masked"] == 0.0


def test_threshold_and_norms_are_those_of_the_gradient():
    handle, _, _ = followed("topk keep=0.1", 1)
    measured, grad = handle.scalars(), gradients((20, 10), 1)[0]
    passing = grad.abs().view(-1).topk(20).values
    assert measured["grad_filter/threshold"] == pytest.approx(float(passing.min()))
    assert measured["grad_filter/norm_before"] == pytest.approx(float(grad.norm()), rel=1e-5)
    assert measured["grad_filter/norm_after"] == pytest.approx(float(passing.norm()), rel=1e-5)
    assert 0.0 < measured["grad_filter/time_share"] <= 1.0
    assert measured["grad_filter/skipped_steps"] == measured["grad_filter/zero_tensors"] == 0.0


def test_exported_masks_are_read_by_mask_file_and_ages_are_steps(tmp_path):
    from safetensors.torch import load_file

    handle, param, _ = followed("random p=0.3", 4)
    handle.export(tmp_path / "masks.safetensors")
    handle.export(tmp_path / "ages.safetensors", "ages")
    passed = param.grad != 0
    other = torch.nn.Parameter(torch.ones(20, 10))
    gf.tag_parameter(other, "lora_unet_block.lora_up.weight")
    optimizer = torch.optim.SGD([other], lr=1.0)
    gf.attach(optimizer, f"mask_file path={tmp_path}/masks.safetensors")
    other.grad = torch.ones(20, 10)
    optimizer.step()
    assert torch.equal(other.grad != 0, passed)
    (ages,) = load_file(tmp_path / "ages.safetensors").values()
    assert torch.equal(ages == 3, passed) and ages.min() == -1 and ages.dtype is torch.int32
    with pytest.raises(gf.GradFilterError, match="statistics=full"):
        gf.attach(torch.optim.SGD([torch.nn.Parameter(torch.ones(100))]), "topk").export(tmp_path / "x")


def test_pictures_of_density_overlap_and_age_are_drawn(tmp_path):
    from PIL import Image

    handle, _, _ = followed("topk_change topk_ratio=0.5", 6)
    written = handle.save_pictures(tmp_path / "pictures")
    assert [path.name for path in written] == ["density.png", "overlap.png", "ages.png"]
    for path in written:
        with Image.open(path) as picture:
            assert picture.size[0] > 500 and len(picture.convert("L").getcolors(1 << 16)) > 10
    assert not list(tmp_path.glob("**/*.tmp"))
    handle, _, _ = followed("sign", 2)
    assert handle.save_pictures(tmp_path / "none") == []


def test_memory_for_pictures_stays_bounded(monkeypatch):
    monkeypatch.setattr(grad_filter_statistics.Statistics, "COLUMNS", 16)
    handle, _, _ = followed("random p=0.5", 50)
    steps, rows = handle.statistics.table("kept")
    assert steps == list(range(0, 49, 4)) and len(rows[0]) == len(steps)


def test_the_gallery_says_what_the_filters_say():
    from tools.write_docs import REPOSITORY, filter_gallery

    written = (REPOSITORY / "docs" / "grad_filter_gallery.md").read_text(encoding="utf-8")
    assert written == filter_gallery(), "run python tools/write_docs.py"


def run_of(spec: str, steps: range, saved: dict | None = None) -> torch.optim.Optimizer:
    """Steps with a gradient of their own each, from a saved state when there is one."""
    param = torch.nn.Parameter(torch.ones(20, 10))
    optimizer = torch.optim.AdamW([param], lr=1e-2)
    gf.attach(optimizer, f"{spec} log_every=1")
    if saved is not None:
        optimizer.load_state_dict(saved)
    for step in steps:
        param.grad = torch.randn(20, 10, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("spec", ["topk keep=0.2", "topk_change topk_ratio=0.5 statistics=full"])
def test_pictures_and_ages_of_a_resumed_run_are_those_of_the_unbroken_one(spec, tmp_path):
    unbroken = run_of(spec, range(8)).state_dict()["grad_filter"]["statistics"]
    torch.save(run_of(spec, range(5)).state_dict(), tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed = run_of(spec, range(5, 8), saved).state_dict()["grad_filter"]["statistics"]
    assert unbroken["kinds"]["kept"]["steps"] == list(range(8))
    torch.testing.assert_close(resumed, unbroken, rtol=0, atol=0)
    assert bool(unbroken["followed"]) == ("full" in spec)


def test_what_passes_inside_the_backward_pass_is_measured_too():
    params = [torch.nn.Parameter(torch.ones(20, 10)), torch.nn.Parameter(torch.ones(100))]
    optimizer = torch.optim.SGD(params, lr=1.0)
    handle = gf.attach(optimizer, "topk keep=0.1 log_every=2", in_backward=True)
    for step in range(5):
        sum((param * torch.randn_like(param)).sum() for param in params).backward()
        if step == 3:
            assert handle.scalars()["grad_filter/kept"] == pytest.approx(0.1)
    steps, rows = handle.statistics.table("kept")
    assert steps == [0, 2] and all(share == [pytest.approx(0.1)] * 2 for share in rows.values())
    with pytest.raises(gf.GradFilterError, match="statistics=full cannot work with --fused_backward_pass"):
        gf.attach(torch.optim.SGD(params), "topk statistics=full", in_backward=True)
