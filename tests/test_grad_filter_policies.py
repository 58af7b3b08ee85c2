"""What happens at masked entries, looked at bit by bit, for every optimizer of the table that runs here."""

from __future__ import annotations

import math

import pytest
import torch

from library import grad_filter as gf
from library import grad_filter_policies as policies
from library.optimizers import OPTIMIZERS, build_optimizer, find_optimizer

MORE = [
    "torch.optim.Adam",
    "torch.optim.NAdam",
    "torch.optim.RAdam",
    "torch.optim.Adagrad",
    "torch.optim.RMSprop",
    "bitsandbytes.optim.AdEMAMix8bit",
    "pytorch_optimizer.CAME",
    "pytorch_optimizer.AdEMAMix",
]
SHARED = {"Adafactor", "pytorch_optimizer.CAME"}
RUNNABLE = [spec.name for spec in OPTIMIZERS if not spec.needs_cuda] + MORE
SHAPES = [(80, 60), (30, 10), (100,)]


def build(name, shapes=SHAPES, lr=None, **options):
    spec = find_optimizer(name)
    if spec.name == "Adafactor":
        options |= {"relative_step": False}
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    optimizer, _ = build_optimizer(spec, [{"params": params}], lr or (1.0 if spec.adapts_lr else 1e-3), options)
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    return params, optimizer


def give_gradients(params, step):
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def states_of(optimizer, param):
    return {k: v.clone() for k, v in optimizer.state.get(param, {}).items() if isinstance(v, torch.Tensor)}


def steps_with_masks(params, optimizer, count, before_step=None):
    """Do steps; give for each the weights and states before it, and the masks in force."""
    handle = gf.handle_of(optimizer)
    end_steps = handle._end_steps
    for step in range(count):
        give_gradients(params, step)
        if before_step:
            before_step(step)
        before = [(param.detach().clone(), states_of(optimizer, param)) for param in params]
        masks = {}

        def note_masks(masks=masks):
            masks.update({slot.index: slot.mask for slot in handle.slots()})
            end_steps()

        handle._end_steps = note_masks
        optimizer.step()
        yield before, masks


@pytest.mark.parametrize("unit", ["entry", "tile"])
@pytest.mark.parametrize("name", RUNNABLE)
def test_freeze_leaves_weights_and_states_of_masked_entries_as_they_are(name, unit):
    params, optimizer = build(name)
    gf.attach(optimizer, f"topk keep=0.3 policy=freeze unit={unit}")
    moved = [0] * len(params)
    for before, masks in steps_with_masks(params, optimizer, 7):  # RAdam rests for five
        for index, (param, (weight, states)) in enumerate(zip(params, before)):
            rests = ~masks[index].reshape(-1)
            assert torch.equal(param.view(-1)[rests], weight.view(-1)[rests])
            moved[index] += int((param != weight).sum())
            if name in SHARED and param.dim() > 1:
                continue
            for key, old in states.items():
                entries = param.numel()
                exact = old.dtype is not torch.uint8 or unit == "tile"
                if old.numel() > 1 and old.numel() % entries == 0 and exact:
                    now = optimizer.state[param][key].view(-1, entries)
                    assert torch.equal(now[:, rests], old.view(-1, entries)[:, rests]), key
                if key.startswith("absmax") and unit == "tile":
                    tiles = policies._tiles(~masks[index]).all(dim=1)
                    tiles[-1] = False
                    now = optimizer.state[param][key].view(-1, old.shape[-1])
                    assert torch.equal(now[:, tiles], old.view(-1, old.shape[-1])[:, tiles])
    assert all(moved)


@pytest.mark.parametrize("name", RUNNABLE)
def test_update_leaves_masked_weights_and_everything_else_dense(name):
    params, optimizer = build(name)
    gf.attach(optimizer, "topk keep=0.3 policy=update")
    for before, masks in steps_with_masks(params, optimizer, 3):
        for index, (param, (weight, _)) in enumerate(zip(params, before)):
            rests = ~masks[index]
            assert torch.equal(param[rests], weight[rests])
            assert torch.isfinite(param).all()


@pytest.mark.parametrize("policy", ["update", "freeze"])
@pytest.mark.parametrize("name", [spec.name for spec in OPTIMIZERS if spec.name.endswith("ScheduleFree")])
def test_evaluation_weights_of_resting_entries_do_not_drift(name, policy, tmp_path):
    from safetensors.torch import save_file

    params, optimizer = build(name)
    masks = {}
    for index, param in enumerate(params):
        gf.tag_parameter(param, f"p{index}")
        masks[f"p{index}"] = (torch.arange(param.numel()) % 3 == 0).view(param.shape).to(torch.uint8)
    save_file(masks, tmp_path / "m.safetensors")
    start = [param.detach().clone() for param in params]
    gf.attach(optimizer, f"mask_file path={tmp_path / 'm.safetensors'} policy={policy}")
    for step in range(5):
        give_gradients(params, step)
        optimizer.step()
    optimizer.eval()
    for index, (param, old) in enumerate(zip(params, start)):
        rests = masks[f"p{index}"] == 0
        torch.testing.assert_close(param[rests], old[rests], rtol=0, atol=1e-6)
        assert (param[~rests] != old[~rests]).float().mean() > 0.9


# ----------------------------------------------------------------------------------------------------------- moments


def sparse_gradient(shape, step, aligned=False):
    generator = torch.Generator().manual_seed(step)
    grad = torch.randn(shape, generator=generator)
    count = grad.numel() // policies.TILE if aligned else grad.numel()
    zero = torch.rand(count, generator=generator) < 0.6
    if aligned:
        zero = zero.repeat_interleave(policies.TILE)
    return grad.masked_fill_(zero.view(shape), 0.0)


def test_nonzero_with_policy_moments_is_an_adam_whose_moments_skip_zeros():
    param = torch.nn.Parameter(torch.randn(40, 30, generator=torch.Generator().manual_seed(9)))
    weight, mean, square = param.detach().clone(), torch.zeros(40, 30), torch.zeros(40, 30)
    optimizer = torch.optim.Adam([param], lr=1e-3)
    gf.attach(optimizer, "nonzero policy=moments")
    for step in range(200):
        grad = sparse_gradient((40, 30), step)
        there = grad != 0
        mean = torch.where(there, 0.9 * mean + 0.1 * grad, mean)
        square = torch.where(there, 0.999 * square + 0.001 * grad * grad, square)
        unbiased = (square / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8
        weight = weight - 1e-3 * (mean / (1 - 0.9 ** (step + 1))) / unbiased
        before = states_of(optimizer, param)
        param.grad = grad
        optimizer.step()
        for key in ("exp_avg", "exp_avg_sq"):
            if key in before:
                assert torch.equal(optimizer.state[param][key][~there], before[key][~there])
        torch.testing.assert_close(param.detach(), weight, rtol=0, atol=1e-6)


def plain_lion(weight, state, grad, there, lr):
    mean = state.setdefault("mean", torch.zeros_like(weight))
    update = torch.where(there, 0.9 * mean + 0.1 * grad, mean).sign()
    state["mean"] = torch.where(there, 0.99 * mean + 0.01 * grad, mean)
    return weight - lr * update


def plain_signsgd(weight, state, grad, there, lr):
    mean = state.setdefault("mean", torch.zeros_like(weight))
    state["mean"] = torch.where(there, 0.9 * mean + 0.1 * grad, mean)
    return weight - lr * state["mean"].sign()


@pytest.mark.parametrize("name,plain", [("Lion", plain_lion), ("SignSGD", plain_signsgd)])
def test_the_same_rule_holds_for_sign_optimizers(name, plain):
    (param,), optimizer = build(name, [(40, 30)])
    gf.attach(optimizer, "nonzero policy=moments")
    weight, state = param.detach().clone(), {}
    for step in range(100):
        grad = sparse_gradient((40, 30), step)
        weight = plain(weight, state, grad, grad != 0, 1e-3)
        param.grad = grad
        optimizer.step()
    assert (param.detach() - weight).abs().gt(1e-5).float().mean() < 1e-3  # a sign at the edge of rounding may differ


@pytest.mark.parametrize("name", ["Prodigy", "AdamW8bit", "Lion8bit", "bitsandbytes.optim.AdEMAMix8bit"])
def test_moments_of_resting_entries_are_untouched_and_still_move_the_weights(name):
    (param,), optimizer = build(name, [(64, 80)])
    gf.attach(optimizer, "nonzero policy=moments")
    give_gradients([param], 1000)
    optimizer.step()
    for step in range(3):
        param.grad = sparse_gradient((64, 80), step, aligned=True)
        rests = param.grad.view(-1) == 0
        before, weight = states_of(optimizer, param), param.detach().clone()
        optimizer.step()
        for key, old in before.items():
            if old.numel() % param.numel() == 0 and key not in ("p0",):
                now = optimizer.state[param][key].view(-1, param.numel())
                assert torch.equal(now[:, rests], old.view(-1, param.numel())[:, rests]), key
        assert (param.detach() != weight).view(-1)[rests].float().mean() > 0.9


def test_8bit_adam_moves_resting_entries_as_their_moments_say():
    (param,), optimizer = build("AdamW8bit", [(64, 80)], weight_decay=0.0)
    gf.attach(optimizer, "nonzero policy=moments")
    give_gradients([param], 1000)
    optimizer.step()
    state = optimizer.state[param]

    def decoded(number):
        values = (
            state[f"qmap{number}"][state[f"state{number}"].view(-1, 256).long()] * state[f"absmax{number}"][:, None]
        )
        return values.view(64, 80)

    mean, square = decoded(1).clone(), decoded(2).clone()
    weight = param.detach().clone()
    param.grad = sparse_gradient((64, 80), 5, aligned=True)
    rests = param.grad == 0
    optimizer.step()
    expected = 1e-3 * (mean / (1 - 0.9**2)) / ((square / (1 - 0.999**2)).sqrt() + 1e-8)
    torch.testing.assert_close((weight - param.detach())[rests], expected[rests], rtol=1e-3, atol=1e-7)


# ---------------------------------------------------------------------------------------------- 8-bit, partly masked


def test_partly_masked_tiles_are_restored_to_within_half_a_code_step():
    (param,), optimizer = build("AdamW8bit", [(64, 80)])
    gf.attach(optimizer, "topk keep=0.3 policy=freeze")
    for step, (before, masks) in enumerate(steps_with_masks([param], optimizer, 4)):
        if step == 0:
            continue
        rests = ~masks[0].view(-1)
        for number in ("1", "2"):
            qmap = optimizer.state[param][f"qmap{number}"]
            half_step = (qmap[1:] - qmap[:-1]).max() / 2

            def decoded(state, number=number, qmap=qmap):
                scale = state[f"absmax{number}"].repeat_interleave(256)
                return qmap[state[f"state{number}"].view(-1).long()] * scale, scale

            old, _ = decoded(before[0][1])
            now, scale = decoded(optimizer.state[param])
            assert ((now - old).abs() <= half_step * scale * 1.001)[rests].all()


def test_nearest_codes_are_those_of_a_slow_search():
    from bitsandbytes.functional import create_dynamic_map

    qmap = create_dynamic_map()
    values = torch.rand(2000, generator=torch.Generator().manual_seed(1)) * 2 - 1
    slow = (values[:, None] - qmap[None]).abs().min(dim=1).values
    fast = (qmap[policies.nearest_codes(values, qmap).long()] - values).abs()
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-7)


# --------------------------------------------------------------------------------------------- freeze, further options


def waking_mask(tmp_path, shape):
    """A filter that lets the upper half pass at every step and the lower half from step 50 on."""
    path = tmp_path / "waking.py"
    path.write_text(
        "import torch\n\n\ndef waking(grad, step):\n"
        "    mask = torch.ones_like(grad, dtype=torch.bool)\n"
        "    mask[len(mask) // 2 :] = step >= 50\n"
        "    return mask\n"
    )
    return f"{path}:waking"


@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.AdamW])
def test_an_entry_that_wakes_takes_a_step_of_one_learning_rate(optimizer_class, tmp_path):
    movement = {}
    for correction in ("entry", "global"):
        param = torch.nn.Parameter(torch.randn(20, 10, generator=torch.Generator().manual_seed(3)))
        optimizer = optimizer_class([param], lr=1e-3, weight_decay=0.0)
        gf.attach(optimizer, f"{waking_mask(tmp_path, (20, 10))} policy=freeze bias_correction={correction}")
        for step in range(51):
            give_gradients([param], step)
            before = param.detach().clone()
            optimizer.step()
        movement[correction] = (param.detach() - before).abs()
    torch.testing.assert_close(movement["entry"][10:], torch.full((10, 10), 1e-3), rtol=1e-3, atol=0)
    assert ((movement["global"][10:] - 1e-3).abs() > 2e-4).all()  # the common counter is wrong for a first step
    torch.testing.assert_close(movement["entry"][:10], movement["global"][:10], rtol=1e-4, atol=0)


def test_entry_counts_equal_adam_started_later(tmp_path):
    param = torch.nn.Parameter(torch.randn(20, 10, generator=torch.Generator().manual_seed(3)))
    late = torch.nn.Parameter(param.detach()[10:].clone())
    optimizer, other = (torch.optim.AdamW([p], lr=1e-3, weight_decay=0.1) for p in (param, late))
    gf.attach(optimizer, f"{waking_mask(tmp_path, (20, 10))} policy=freeze bias_correction=entry")
    for step in range(60):
        give_gradients([param], step)
        late.grad = param.grad[10:].clone()
        optimizer.step()
        if step >= 50:
            other.step()
    torch.testing.assert_close(param.detach()[10:], late.detach(), rtol=1e-5, atol=1e-7)


def test_decay_all_lets_weight_decay_through():
    params, optimizer = build("AdamW", weight_decay=0.1)
    gf.attach(optimizer, "topk keep=0.1 policy=freeze decay=all")
    for before, masks in steps_with_masks(params, optimizer, 3):
        for index, (param, (weight, _)) in enumerate(zip(params, before)):
            rests = ~masks[index]
            torch.testing.assert_close(param[rests], weight[rests] * (1 - 1e-3 * 0.1))


def test_shared_states_are_named_at_the_start():
    _, optimizer = build("Adafactor")
    lines = gf.attach(optimizer, "topk policy=freeze").plan()
    assert any("policy=freeze is policy=update on 2 tensors" in line and "exp_avg_sq_row" in line for line in lines)
    _, optimizer = build("AdamW8bit")
    assert any("unit=tile" in line for line in gf.attach(optimizer, "topk policy=freeze").plan())
    _, optimizer = build("Prodigy")
    assert any("starve" in line or "far too low" in line for line in gf.attach(optimizer, "topk policy=update").plan())


def test_prodigy_finds_its_step_size_under_freeze_and_not_under_update():
    found = {}
    for policy in ("zero", "freeze", "update"):
        (param,), optimizer = build("Prodigy", [(40, 40)])
        gf.attach(optimizer, f"topk keep=0.1 policy={policy}")
        target = param.detach() + 1.0
        for _ in range(60):
            param.grad = (param.detach() - target) * torch.linspace(0.5, 1.5, 1600).view(40, 40)
            optimizer.step()
        found[policy] = optimizer.param_groups[0]["d"]
    assert found["freeze"] > 1e-5
    assert found["update"] < found["freeze"]


# ---------------------------------------------------------------------------------------------------------- residual


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_residual_is_error_feedback(decay):
    param = torch.nn.Parameter(torch.zeros(30, 10))
    optimizer = torch.optim.SGD([param], lr=1.0)
    gf.attach(optimizer, f"topk keep=0.1 policy=residual decay={decay}")
    weight, rest = torch.zeros(30, 10), torch.zeros(30, 10)
    for step in range(10):
        give_gradients([param], step)
        whole = param.grad + decay * rest
        mask = torch.zeros(300, dtype=torch.bool)
        mask[whole.abs().view(-1).topk(30).indices] = True
        mask = mask.view(30, 10)
        weight = weight - torch.where(mask, whole, 0.0)
        rest = torch.where(mask, 0.0, whole)
        optimizer.step()
    torch.testing.assert_close(param.detach(), weight)


# ---------------------------------------------------------------------------------------------------------- rescale


@pytest.mark.parametrize("rescale", ["none", "norm", "cautious", "keep"])
@pytest.mark.parametrize("policy", ["zero", "update"])
def test_rescale_multiplies_what_passes(rescale, policy):
    param = torch.nn.Parameter(torch.zeros(20, 10))
    optimizer = torch.optim.SGD([param], lr=1.0)
    gf.attach(optimizer, f"topk keep=0.25 policy={policy} rescale={rescale}")
    give_gradients([param], 0)
    grad = param.grad.clone()
    optimizer.step()
    mask = param != 0
    passing = torch.where(mask, grad, 0.0)
    factor = {"none": 1.0, "norm": grad.norm() / passing.norm(), "cautious": 200 / 51, "keep": 4.0}[rescale]
    assert mask.sum() == 50
    torch.testing.assert_close(param.detach(), -passing * factor)


# ------------------------------------------------------------------------------------------- options that do not fit


@pytest.mark.parametrize(
    "spec,message",
    [
        ("topk decay=0.5", "decay"),
        ("topk policy=freeze decay=0.5", "decay must be all"),
        ("topk policy=residual decay=2", r"decay must be in \(0, 1\]"),
        ("topk policy=residual decay=half", r"decay must be in \(0, 1\]"),
        ("topk,agree policy=residual", "exactly one stage"),
        ("sign policy=residual", "exactly one stage"),
        ("topk bias_correction=entry", "needs policy=freeze"),
    ],
)
def test_options_that_do_not_fit_are_refused(spec, message):
    with pytest.raises(gf.GradFilterError, match=message):
        gf.parse_spec(spec)


def test_entry_counts_are_refused_where_they_are_not_understood():
    _, optimizer = build("Lion")
    with pytest.raises(gf.GradFilterError, match="Lion"):
        gf.attach(optimizer, "topk policy=freeze bias_correction=entry")


@pytest.mark.parametrize("policy", ["freeze", "moments", "residual", "update"])
@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit", "AdamWScheduleFree"])
def test_a_resumed_run_is_the_run_that_was_never_stopped(name, policy):
    import copy

    def make():
        params, optimizer = build(name)
        gf.attach(optimizer, f"ema,topk policy={policy}")
        return params, optimizer

    def run(params, optimizer, first, last):
        for step in range(first, last):
            give_gradients(params, step)
            optimizer.step()

    params, optimizer = make()
    run(params, optimizer, 0, 3)
    saved, weights = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]
    run(params, optimizer, 3, 6)
    twins, resumed = make()
    for twin, weight in zip(twins, weights):
        twin.data.copy_(weight)
    resumed.load_state_dict(saved)
    run(twins, resumed, 3, 6)
    assert all(torch.equal(a, b) for a, b in zip(twins, params))


def test_the_inventory_of_adam_is_its_two_moments_and_their_decays():
    params, optimizer = build("AdamW")
    inventory = policies.take_inventory(optimizer, 0, params[0])
    assert list(inventory.entries) == ["exp_avg", "exp_avg_sq"] and not inventory.shared
    decays = [float(kept.decay) for kept in inventory.entries.values()]
    assert math.isclose(decays[0], 0.9, rel_tol=1e-5) and math.isclose(decays[1], 0.999, rel_tol=1e-5)
    assert not optimizer.state  # measuring leaves the optimizer alone
