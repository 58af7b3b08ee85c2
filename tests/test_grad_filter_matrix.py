"""Every optimizer of the table with every filter: a sample in each test run, all cells with ``-m slow``."""

from __future__ import annotations

import copy
import io
import itertools
import pickle

import pytest
import torch

from library import grad_filter as gf
from library.optimizers import OPTIMIZERS, build_optimizer, find_optimizer

MORE = [
    "torch.optim.NAdam",
    "torch.optim.RAdam",
    "torch.optim.Adagrad",
    "torch.optim.RMSprop",
    "bitsandbytes.optim.AdEMAMix8bit",
    "pytorch_optimizer.CAME",
    "pytorch_optimizer.AdEMAMix",
]
NAMES = [spec.name for spec in OPTIMIZERS if not spec.needs_cuda or torch.cuda.is_available()] + MORE
FILTERS = [name for name in sorted(gf.known_filters()) if name != "mask_file"]
EXTRA = {"clamp": "clamp lo=-0.5 hi=0.5"}
POLICIES = ["zero", "update", "moments", "freeze"]
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(64, 80), (16, 3, 3, 3), (100,), (7,)]
# D-Adaptation's AdaGrad and SGD lose the precision of their estimate in bfloat16 weights, also without a filter
CELLS = list(itertools.product(NAMES, FILTERS, DTYPES))
SAMPLE = [cell for place, cell in enumerate(CELLS) if place % 13 == 0]


def build(name, dtype=torch.float32, seed=0):
    spec = find_optimizer(name)
    options = {"relative_step": False} if spec.name == "Adafactor" else {}
    generator = torch.Generator().manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    if spec.needs_cuda:
        params = [torch.nn.Parameter(param.detach().cuda()) for param in params]
    rate = 1.0 if spec.adapts_lr else 1e-3
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    optimizer, _ = build_optimizer(spec, groups, rate, options)
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    return params, optimizer


def run(params, optimizer, first, last):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param)
        optimizer.step()


def leaves(value, path=""):
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}/{index}")
    else:
        yield path, value


def differences(one, other):
    a, b = dict(leaves(one)), dict(leaves(other))
    for path in a.keys() | b.keys():
        x, y = a.get(path), b.get(path)
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            if x.dtype != y.dtype or not torch.equal(x.cpu(), y.cpu()):
                yield path
        elif type(x) is not type(y) or x != y:
            yield path


def through_file(state):
    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


def check_cell(name, filter_name, dtype, policy):
    """Steps are finite, and a resume through restricted loading gives the bits of the run that went on."""
    spec = f"{EXTRA.get(filter_name, filter_name)} policy={policy}"
    params, optimizer = build(name, dtype)
    gf.attach(optimizer, spec)
    run(params, optimizer, 0, 3)
    saved, weights = through_file(optimizer.state_dict()), [param.detach().clone() for param in params]
    run(params, optimizer, 3, 5)
    assert all(torch.isfinite(param).all() for param in params)

    twins, resumed = build(name, dtype)
    for twin, weight in zip(twins, weights):
        twin.data.copy_(weight)
    gf.attach(resumed, spec)
    resumed.load_state_dict(saved)
    assert not list(differences(resumed.state_dict()["grad_filter"], saved["grad_filter"]))
    run(twins, resumed, 3, 5)
    if resumes_by_itself(name, dtype):
        assert not list(differences([p.detach() for p in twins], [p.detach() for p in params]))
        assert not list(differences(resumed.state_dict(), optimizer.state_dict()))
    else:
        own = [o.state_dict()["grad_filter"]["params"] for o in (optimizer, resumed)]
        assert not list(
            differences([[p["shape"], p["step"]] for p in own[0]], [[p["shape"], p["step"]] for p in own[1]])
        )


_resumes: dict = {}


def resumes_by_itself(name, dtype):
    """Say whether an optimizer without a filter goes on to the same bits after its state was loaded."""
    if (name, dtype) not in _resumes:
        params, optimizer = build(name, dtype)
        run(params, optimizer, 0, 3)
        saved, weights = through_file(optimizer.state_dict()), [param.detach().clone() for param in params]
        run(params, optimizer, 3, 5)
        twins, resumed = build(name, dtype)
        for twin, weight in zip(twins, weights):
            twin.data.copy_(weight)
        resumed.load_state_dict(saved)
        run(twins, resumed, 3, 5)
        _resumes[name, dtype] = not list(differences([p.detach() for p in twins], [p.detach() for p in params]))
    return _resumes[name, dtype]


def ids(value):
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize("name,filter_name,dtype", SAMPLE, ids=ids)
def test_cells_of_the_matrix(name, filter_name, dtype):
    policy = POLICIES[(NAMES.index(name) + FILTERS.index(filter_name)) % len(POLICIES)]
    check_cell(name, filter_name, dtype, policy)


@pytest.mark.parametrize("name,filter_name", [("DAdaptAdan", "agree"), ("DAdaptAdanIP", "snr")])
def test_what_is_measured_of_an_optimizer_does_not_depend_on_how_far_its_run_has_come(name, filter_name):
    check_cell(name, filter_name, torch.bfloat16, "moments")


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name,filter_name,dtype", CELLS, ids=ids)
def test_all_cells_of_the_matrix(name, filter_name, dtype, policy):
    check_cell(name, filter_name, dtype, policy)


def test_most_optimizers_resume_by_themselves():
    """So that the matrix cannot pass because nothing was compared."""
    alone = [name for name in NAMES if not resumes_by_itself(name, torch.float32)]
    assert alone == [], alone


# ---------------------------------------------------------------------------------------------- one test an optimizer

KEEP_ALL = ["topk keep=1", "topk keep=1 policy=update", "topk keep=1 policy=freeze", "threshold value=0", "random p=1"]


@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
@pytest.mark.parametrize("name", NAMES)
def test_a_filter_that_passes_everything_changes_no_bit(name, dtype):
    params, optimizer = build(name, dtype)
    run(params, optimizer, 0, 4)
    for spec in KEEP_ALL:
        twins, other = build(name, dtype)
        gf.attach(other, spec)
        run(twins, other, 0, 4)
        assert not list(differences([p.detach() for p in twins], [p.detach() for p in params])), spec
        assert not list(differences(gf.handle_of(other).bare("state_dict")(), optimizer.state_dict())), spec


@pytest.mark.parametrize("name", NAMES)
def test_the_share_that_passes_is_the_share_asked(name):
    params, optimizer = build(name)
    gf.attach(optimizer, "topk keep=0.25")
    run(params, optimizer, 0, 3)
    for param in params:
        expected = gf.keep_count(0.25, param.numel()) if param.numel() >= 64 else param.numel()
        assert param.grad.count_nonzero() == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_step_left_out_changes_neither_weights_nor_states(name):
    params, optimizer = build(name)
    handle = gf.attach(optimizer, "ema,topk policy=freeze")
    run(params, optimizer, 0, 3)
    before, weights = copy.deepcopy(optimizer.state_dict()), [param.detach().clone() for param in params]
    for param in params:
        param.grad = torch.ones_like(param)
    params[1].grad.view(-1)[5] = float("inf")
    optimizer.step()
    assert handle.skipped_steps == 1
    found = [path for path in differences(optimizer.state_dict(), before) if "counters" not in path]
    assert not found
    assert not list(differences([p.detach() for p in params], weights))
    run(params, optimizer, 4, 5)
    assert all(torch.isfinite(param).all() for param in params)


@pytest.mark.parametrize("name", NAMES)
def test_absent_and_zero_gradients_leave_buffers_alone(name):
    params, optimizer = build(name)
    handle = gf.attach(optimizer, "ema,topk_change")
    run(params, optimizer, 0, 2)
    before = copy.deepcopy(handle.export_state()["params"])
    params[0].grad, params[1].grad = None, torch.zeros_like(params[1])
    params[2].grad = torch.ones_like(params[2])
    optimizer.step()
    changed = {path.split("/")[1] for path in differences(handle.export_state()["params"], before)}
    assert changed == {"2"}


@pytest.mark.parametrize("name", NAMES)
def test_copies_and_pickles_keep_the_filter_where_the_optimizer_can_be_copied(name):
    params, optimizer = build(name)
    try:
        copy.deepcopy(optimizer)
    except Exception as error:
        pytest.skip(f"{name} cannot be copied without a filter either: {error}")
    gf.attach(optimizer, "ema,topk policy=update")
    run(params, optimizer, 0, 2)
    for clone in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(clone) is type(optimizer)
        assert not list(differences(gf.handle_of(clone).export_state(), gf.handle_of(optimizer).export_state()))


@pytest.mark.parametrize("name", NAMES)
def test_a_closure_and_a_new_learning_rate_are_taken(name):
    params, optimizer = build(name)
    handle = gf.attach(optimizer, "topk keep=0.25")

    def closure():
        for param in params:
            param.grad = torch.ones_like(param) * torch.linspace(1, 2, param.numel()).view(param.shape)
        return torch.tensor(1.0)

    optimizer.step(closure)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.5
    optimizer.step(closure)
    assert handle.step == 2
    assert params[0].grad.count_nonzero() == gf.keep_count(0.25, params[0].numel())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: loss scaling with fused=True")
@pytest.mark.parametrize("fused", [True, False])
def test_half_precision_with_a_scaler_on_a_gpu(fused):
    param = torch.nn.Parameter(torch.randn(64, 64, device="cuda"))
    optimizer = torch.optim.AdamW([param], lr=1e-3, fused=fused)
    handle = gf.attach(optimizer, "ema,topk keep=0.1 policy=update")
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**16)
    for step in range(4):
        data = torch.randn(64, 64, device="cuda")
        if step == 2:
            data[0, 0] = float("inf")
        before = param.detach().clone()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = (param * data).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = int((param != before).sum())
        assert moved == (0 if step == 2 else gf.keep_count(0.1, param.numel()))
    assert handle.step == 3
