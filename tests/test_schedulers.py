"""Learning rates before every scheduler step, against the specification's lists."""

from __future__ import annotations

import pytest
import torch

from library import args as options
from library.errors import OptionError
from library.schedulers import get_scheduler_fix
from tests.conftest import SPECIFICATION_FIXTURES, spec_fixture

CASES = spec_fixture("lr_schedules.json") if (SPECIFICATION_FIXTURES / "lr_schedules.json").is_file() else []


def build(*words: str, steps: int = 20, processes: int = 1, lr: float = 1.0):
    args = options.parse(options.script_parser("train_network"), [*words, "--max_train_steps", str(steps)])
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    return get_scheduler_fix(args, optimizer, processes), optimizer


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case["args"]).replace("--lr_", ""))
def test_rates_equal_the_specification(case):
    scheduler, optimizer = build(
        *case["args"], steps=case["max_train_steps"], processes=case["num_processes"], lr=case["base_lr"]
    )
    rates = []
    for _ in case["lr_before_each_scheduler_step"]:
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx(case["lr_before_each_scheduler_step"], abs=2e-8)


def test_there_are_cases():
    assert CASES or not SPECIFICATION_FIXTURES.is_dir()


@pytest.mark.parametrize(
    "words,match",
    [
        (["--lr_scheduler", "cosin"], "Did you mean 'cosine'"),
        (["--lr_scheduler", "constant", "--lr_warmup_steps", "5"], "constant_with_warmup"),
        (["--lr_scheduler", "cosine_with_min_lr"], "min_lr_ratio"),
        (["--lr_scheduler", "piecewise_constant"], "step_rules"),
        (["--lr_scheduler", "cosine", "--lr_warmup_steps", "50"], "lr_warmup_steps"),
        (["--lr_scheduler_type", "CosineAnnealing"], "CosineAnnealingLR"),
        (["--lr_scheduler_type", "os.system"], "no learning-rate scheduler"),
        (["--lr_scheduler_type", "CosineAnnealingLR", "--lr_scheduler_args", "T_maxi=4"], "lr_scheduler_args"),
        (["--lr_scheduler_type", "CosineAnnealingLR", "--lr_scheduler_args", "T_max"], "key=value"),
    ],
)
def test_what_cannot_work_is_told_in_one_line(words, match):
    with pytest.raises(OptionError, match=match) as raised:
        build(*words)
    assert "\n" not in str(raised.value)


def test_a_torch_class_is_used_with_its_arguments():
    scheduler, _ = build("--lr_scheduler_type", "CosineAnnealingLR", "--lr_scheduler_args", "T_max=4")
    assert isinstance(scheduler, torch.optim.lr_scheduler.CosineAnnealingLR) and scheduler.T_max == 4
