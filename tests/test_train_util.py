"""The table of old names: every entry exists, importing it is light, and what is called behaves."""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser, Namespace

import pytest
import torch

from library import train_util
from tests.conftest import REPOSITORY


@pytest.mark.parametrize("name", train_util.NAMES)
def test_every_old_name_exists(name):
    assert getattr(train_util, name) is not None
    assert name in dir(train_util)


def test_importing_it_costs_nothing():
    code = "import sys; import library.train_util; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = train_util.no_such_thing


@pytest.mark.parametrize(
    "name,path",
    [
        ("", "torch.optim.adamw.AdamW"),
        ("AdamW8bit", "bitsandbytes.optim.adamw.AdamW8bit"),
        ("lion", "lion_pytorch.lion_pytorch.Lion"),
        ("SGD", "torch.optim.sgd.SGD"),
        ("prodigy", "prodigyopt.prodigy.Prodigy"),
    ],
)
def test_get_optimizer_gives_name_arguments_and_the_real_class(name, path):
    parser = ArgumentParser()
    train_util.add_optimizer_arguments(parser)
    args = parser.parse_args(["--optimizer_type", name] if name else [])
    args.learning_rate = 1.0
    found, text, optimizer = train_util.get_optimizer(args, [torch.nn.Parameter(torch.zeros(4, 4))])
    assert (found, text) == (path, "")
    assert f"{type(optimizer).__module__}.{type(optimizer).__name__}" == path


def test_a_filter_reaches_the_optimizer_through_the_old_name():
    from library import grad_filter

    args = Namespace(
        optimizer_type="AdamW",
        optimizer_args=["weight_decay=0.1", "grad_filter=topk", "grad_filter.keep=0.5"],
        learning_rate=1e-3,
        lr_scheduler="constant",
    )
    _, text, optimizer = train_util.get_optimizer(args, [torch.nn.Parameter(torch.zeros(16, 16))])
    assert type(optimizer) is torch.optim.AdamW and grad_filter.handle_of(optimizer) is not None
    assert text.startswith("weight_decay=0.1") and "grad_filter" in text
    assert args.optimizer_args == ["weight_decay=0.1", "grad_filter=topk", "grad_filter.keep=0.5"]
