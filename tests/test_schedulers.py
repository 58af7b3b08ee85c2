"""Learning rates before every scheduler step, against the specification's lists."""

from __future__ import annotations

import pytest
import torch

from library import args as options
from library.errors import OptionError
from library.schedulers import check_scheduler, get_scheduler_fix, put_schedule_in_force
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
        (["--lr_scheduler", "warmup_stable_decay", "--lr_warmup_steps", "15", "--lr_decay_steps", "6"], "do not fit"),
        (["--lr_scheduler", "adafactor"], "constant_with_warmup"),
        (["--lr_scheduler", "adafactor:0.1"], "works with --optimizer_type Adafactor"),
        (["--lr_scheduler_type", "ReduceLROnPlateau"], "cannot be stepped without metrics"),
        (["--lr_scheduler_type", "."], "no class"),
        (["--lr_scheduler", "inverse_sqrt", "--lr_scheduler_timescale", "0"], "at least 1 step"),
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


def test_a_warmup_longer_than_the_run_is_said(caplog):
    build("--lr_scheduler", "cosine", "--lr_warmup_steps", "50")
    assert any("before its warm-up of 50 steps is over" in record.getMessage() for record in caplog.records)


def test_the_length_is_not_judged_before_it_is_known():
    """--max_train_epochs may make the run longer than the default number of steps."""
    words = ["--lr_scheduler", "warmup_stable_decay", "--lr_warmup_steps", "15", "--lr_decay_steps", "6"]
    args = options.parse(options.script_parser("train_network"), [*words, "--max_train_steps", "20"])
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    check_scheduler(args, optimizer)
    get_scheduler_fix(args, optimizer, 1, 40)


def test_a_schedule_free_optimizer_may_have_a_warmup_left_over(caplog):
    words = ["--optimizer_type", "AdamWScheduleFree", "--lr_warmup_steps", "5", "--lr_scheduler", "constant"]
    args = options.parse(options.script_parser("train_network"), words)
    check_scheduler(args, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    assert not caplog.records
    get_scheduler_fix(args, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), 1)
    assert any("warmup_steps=100" in record.getMessage() for record in caplog.records)


def resume_with(before: tuple[str, ...], after: tuple[str, ...], steps: int, at: int):
    old, optimizer = build(*before)
    for _ in range(at):
        optimizer.step()
        old.step()
    new, other = build(*after, steps=steps)
    other.load_state_dict(optimizer.state_dict())
    new.load_state_dict(old.state_dict())
    put_schedule_in_force(new, steps - at)
    return new, other, optimizer


def test_a_resumed_run_follows_the_schedule_of_its_options(caplog):
    _, resumed, old = resume_with(("--lr_scheduler", "cosine"), ("--lr_scheduler", "cosine"), steps=20, at=7)
    assert resumed.param_groups[0]["lr"] == old.param_groups[0]["lr"] and not caplog.records
    _, resumed, old = resume_with(("--lr_scheduler", "cosine"), ("--lr_scheduler", "linear"), steps=40, at=10)
    assert resumed.param_groups[0]["lr"] == pytest.approx(0.75)
    assert any("the options are in force" in record.getMessage() for record in caplog.records)


def test_a_rate_of_zero_to_the_end_is_said(caplog):
    scheduler, optimizer = build("--lr_scheduler", "linear")
    for _ in range(20):
        optimizer.step()
        scheduler.step()
    put_schedule_in_force(scheduler, 5)
    assert any("nothing is learnt" in record.getMessage() for record in caplog.records)
