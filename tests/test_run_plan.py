"""Step arithmetic against a calculator that walks through a run batch by batch."""

from __future__ import annotations

import itertools

import pytest

from library.errors import OptionError
from library.run_plan import RunPlan, initial_step


def walk(batches: int, processes: int, accumulation: int, max_steps: int) -> list[tuple[int, int, int, int]]:
    """Count (step, epoch, first, last) the slow way: take one batch at a time until the step limit is reached."""
    updates: list[tuple[int, int, int, int]] = []
    epoch = 0
    while len(updates) < max_steps:
        epoch += 1
        mine = [b for b in range(batches + processes) if b * processes < batches]
        group: list[int] = []
        for position in range(len(mine)):
            group.append(position)
            if len(group) == accumulation or position == len(mine) - 1:
                updates.append((len(updates) + 1, epoch, group[0], group[-1] + 1))
                group = []
                if len(updates) == max_steps:
                    break
    return updates


@pytest.mark.parametrize("batches,processes,accumulation", itertools.product(range(1, 22), (1, 2), range(1, 5)))
def test_plan_equals_a_walk_through_the_run(batches, processes, accumulation):
    for max_steps in (1, 5, 11):
        plan = RunPlan(batches, processes, accumulation, max_steps)
        seen = [plan.update(step) for step in range(1, max_steps + 1)]
        expected = walk(batches, processes, accumulation, max_steps)
        assert [(u.step, u.epoch, u.first_batch, u.last_batch) for u in seen] == expected
        assert plan.epochs == expected[-1][1]
        by_epoch = [step for epoch in range(1, plan.epochs + 1) for step in plan.steps_of_epoch(epoch)]
        assert by_epoch == list(range(1, max_steps + 1))


@pytest.mark.parametrize("batches,processes,accumulation", itertools.product(range(1, 22), (1, 2), range(1, 5)))
def test_epoch_limit_gives_whole_epochs(batches, processes, accumulation):
    plan = RunPlan.from_limits(batches, processes, accumulation, max_steps=1, max_epochs=3)
    assert plan.epochs == 3
    assert plan.update(plan.max_steps).ends_epoch


def test_a_resumed_run_goes_on_inside_its_epoch():
    plan = RunPlan(batches=5, processes=1, accumulation=2, max_steps=9)
    assert plan.epoch_after(4) == 2
    assert list(plan.steps_of_epoch(2, after_step=4)) == [5, 6]


def test_options_win_over_the_state():
    plan = RunPlan(5, 1, 1, 20)
    assert initial_step(plan, 7, None, None) == (7, "the resumed state")
    assert initial_step(plan, 7, None, 3)[0] == 10
    assert initial_step(plan, 7, 2, 3)[0] == 2


@pytest.mark.parametrize("resumed,step,epoch", [(20, None, None), (None, 20, None), (None, None, 9), (None, -1, None)])
def test_nothing_left_to_do_is_said(resumed, step, epoch):
    with pytest.raises(OptionError, match=r"step \d+ of 20|cannot start before"):
        initial_step(RunPlan(5, 1, 1, 20), resumed, step, epoch)


@pytest.mark.parametrize("ratio,interval", [(1, 12), (4, 3), (5, 2), (12, 1), (50, 1)])
def test_a_ratio_saves_at_least_so_many_models(ratio, interval):
    plan = RunPlan(batches=2, processes=1, accumulation=1, max_steps=24)
    assert plan.save_interval_for_ratio(ratio) == interval
    assert plan.epochs // interval >= min(ratio, plan.epochs)


def test_the_beginning_is_step_0():
    plan = RunPlan(5, 1, 1, 20)
    assert initial_step(plan, None, None, None) == (0, "the beginning")
    assert initial_step(plan, 7, 0, None)[0] == 0
