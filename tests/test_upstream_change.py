"""What the two decorators do in a trainer that is not ours: nothing when off, everything when on."""

from __future__ import annotations

import argparse
import copy
import logging
import pickle
import sys
from argparse import Namespace

import pytest
import torch

from library import grad_filter
from library.optimizers import OPTIMIZERS, find_optimizer, load_class
from tests.training import first_difference

OF_TORCH = ("Adam", "Adamax", "NAdam", "RAdam", "SGD", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD", "Muon")
NAMES = [spec.name for spec in OPTIMIZERS if not spec.needs_cuda] + [n for n in OF_TORCH if hasattr(torch.optim, n)]


def get_optimizer(args, trainable_params):
    """A stand-in for another trainer's function of this name."""
    cls = load_class(find_optimizer(args.optimizer_type))
    extra = {"momentum": 0.9} if args.optimizer_type in ("SGD", "SGDNesterov8bit") else {}
    if args.optimizer_type == "Adafactor":
        extra = {"relative_step": False, "scale_parameter": False}
    logging.getLogger("another.trainer").info("use %s", args.optimizer_type)
    optimizer = cls(trainable_params, lr=args.learning_rate, **extra)
    if hasattr(optimizer, "train"):
        optimizer.train()
    return f"{cls.__module__}.{cls.__name__}", ",".join(f"{k}={v}" for k, v in extra.items()), optimizer


def options(name: str, **more) -> Namespace:
    rate = 1.0 if find_optimizer(name).adapts_lr else 1e-3
    return Namespace(**{"optimizer_type": name, "learning_rate": rate, "optimizer_args": None, **more})


def twenty_steps(build, args):
    generator = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((80, 64), (16, 8))]
    name, text, optimizer = build(args, weights)
    for _ in range(20):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return name, text, [weight.detach() for weight in weights], optimizer.state_dict()


@pytest.mark.parametrize("off", [{}, {"grad_filter": None}, {"grad_filter": "none", "grad_filter_args": []}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_off_changes_no_byte_and_no_log_line(name, off, caplog):
    load_class(find_optimizer(name))  # a library may say something when it is loaded for the first time
    caplog.set_level(logging.DEBUG)
    plain = twenty_steps(get_optimizer, options(name))
    said = [(record.name, record.getMessage()) for record in caplog.records]
    caplog.clear()
    decorated = twenty_steps(grad_filter.with_grad_filter(get_optimizer), options(name, **off))
    assert first_difference(plain, decorated) is None
    assert [(record.name, record.getMessage()) for record in caplog.records] == said


def test_there_are_thirty_optimizers():
    assert len(NAMES) >= 30


@pytest.mark.parametrize("name", NAMES)
def test_on_filters_every_optimizer_and_keeps_its_class(name):
    args = options(name, grad_filter="topk", grad_filter_args=["keep=0.5", "policy=update"])
    weight = torch.nn.Parameter(torch.randn(64, 64))
    before = weight.detach().clone()
    _, text, optimizer = grad_filter.with_grad_filter(get_optimizer)(args, [weight])
    assert type(optimizer) is load_class(find_optimizer(name))
    assert "grad_filter=topk" in text
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        weight.grad = torch.randn(64, 64, generator=generator)
        now = weight.detach().clone()
        optimizer.step()
        moved = int((weight != now).sum())
        assert moved <= 2048, moved
    assert not torch.equal(weight, before) or name.startswith("DAdapt")


def test_parsers_get_three_plain_options():
    @grad_filter.with_grad_filter_arguments
    def add_optimizer_arguments(parser):
        parser.add_argument("--optimizer_type", type=str, default="")

    parser = argparse.ArgumentParser()
    add_optimizer_arguments(parser)
    added = [action for action in parser._actions if action.dest.startswith("grad_filter")]
    assert {action.dest for action in added} == {"grad_filter", "grad_filter_args", "grad_filter_targets"}
    for action in added:
        assert action.option_strings == [f"--{action.dest}"] and action.type is str and action.default is None


@pytest.mark.parametrize(
    "route",
    [
        {"grad_filter": "topk", "grad_filter_args": ["keep=0.25"]},
        {"grad_filter": "topk", "grad_filter_args": "keep=0.25"},
        {"grad_filter": "'topk'", "grad_filter_args": ["'keep=0.25'"]},
        {"optimizer_args": ["grad_filter=topk", "grad_filter.keep=0.25"]},
        {"optimizer_args": ["grad_filter=topk", "grad_filter_args=keep=0.25"]},
    ],
    ids=str,
)
def test_every_route_of_a_front_end_arrives(route):
    weight = torch.nn.Parameter(torch.zeros(16, 16))

    def build(args, params):
        assert not args.optimizer_args, "the filter's items never reach the optimizer"
        return "torch.optim.SGD", "", torch.optim.SGD(params, lr=1.0)

    _, _, optimizer = grad_filter.with_grad_filter(build)(options("SGD", **route), [weight])
    weight.grad = torch.randn(16, 16)
    optimizer.step()
    assert int((weight != 0).sum()) == 64


def test_deepspeed_is_refused_with_the_reason():
    with pytest.raises(grad_filter.GradFilterError, match="DeepSpeed"):
        grad_filter.with_grad_filter(get_optimizer)(options("AdamW", grad_filter="topk", deepspeed=True), [])


def test_fused_backward_filters_where_no_step_is_called():
    weight = torch.nn.Parameter(torch.zeros(16, 16))
    args = options("SGD", grad_filter="topk", grad_filter_args=["keep=0.25"], fused_backward_pass=True)
    _ = grad_filter.with_grad_filter(get_optimizer)(args, [weight])
    seen = []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(int((p.grad != 0).sum())))
    (weight * torch.randn(16, 16)).sum().backward()
    assert seen == [64]
    with pytest.raises(grad_filter.GradFilterError, match="fused_backward_pass"):
        args = options("SGD", grad_filter="topk", grad_filter_args=["policy=update"], fused_backward_pass=True)
        grad_filter.with_grad_filter(get_optimizer)(args, [torch.nn.Parameter(torch.zeros(16, 16))])


def test_fused_groups_have_a_chain_each():
    weights = [torch.nn.Parameter(torch.zeros(16, 16)) for _ in range(2)]
    build = grad_filter.with_grad_filter(get_optimizer)
    args = options("SGD", grad_filter="topk", grad_filter_args=["keep=0.25"])
    for weight in weights:
        _, _, optimizer = build(args, [{"params": [weight]}])
        weight.grad = torch.randn(16, 16)
        optimizer.step()
        assert int((weight != 0).sum()) == 64


def test_accelerate_prepares_and_saves_it(tmp_path):
    from accelerate import Accelerator

    model = torch.nn.Linear(32, 32)
    args = options("AdamW", grad_filter="ema,topk", grad_filter_args=["keep=0.5"])
    _, _, raw = grad_filter.with_grad_filter(get_optimizer)(args, list(model.parameters()))
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, raw)
    accelerator.backward(model(torch.randn(4, 32)).square().sum())
    optimizer.step()
    accelerator.save_state(str(tmp_path))
    saved = torch.load(tmp_path / "optimizer.bin", weights_only=True)
    assert first_difference(saved["grad_filter"], raw.state_dict()["grad_filter"]) is None
    accelerator.load_state(str(tmp_path))


def test_copies_keep_the_filter_or_refuse():
    weight = torch.nn.Parameter(torch.zeros(16, 16))
    _, _, optimizer = grad_filter.with_grad_filter(get_optimizer)(options("AdamW", grad_filter="ema,topk"), [weight])
    weight.grad = torch.randn(16, 16)
    optimizer.step()
    clone = copy.deepcopy(optimizer)
    assert first_difference(clone.state_dict(), optimizer.state_dict()) is None
    assert grad_filter.handle_of(clone) is not grad_filter.handle_of(optimizer)
    try:
        again = pickle.loads(pickle.dumps(optimizer))
    except grad_filter.GradFilterError:
        return
    assert grad_filter.handle_of(again) is not None


def test_the_file_needs_only_torch_and_an_old_python():
    import ast

    from tests.conftest import REPOSITORY

    for path in (REPOSITORY / "library").glob("grad_filter*.py"):
        ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))
    assert sys.version_info >= (3, 10)
