"""What a long run must not do, seen on a short one: nothing grows from one step to the next."""

from __future__ import annotations

import gc
import os

import psutil
import pytest
import torch

from library.grad_filter_statistics import Statistics
from library.loop import TrainingLoop
from tests.training import make_tiles, train

STEPS = int(os.environ.get("LONG_RUN_STEPS", "14"))
SETTLED = 7  # one epoch of 6 updates and the first of the next


@pytest.mark.parametrize("grad_filter", [None, "ema,topk_change"])
def test_R21_tensors_open_files_and_saved_files_stay_the_same_in_number(
    grad_filter, tiny_sd1_folder, tmp_path, monkeypatch
):
    seen, real, out = [], TrainingLoop._apply_gradients, tmp_path / "out"

    def apply(self, results):
        gc.collect()
        tensors = sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())
        seen.append((tensors, len(psutil.Process().open_files()), len(list(out.glob("t-step*")))))
        real(self, results)

    monkeypatch.setattr(TrainingLoop, "_apply_gradients", apply)
    monkeypatch.setattr(Statistics, "COLUMNS", 2)  # of what pictures remember; reached at once
    train(
        pretrained_model_name_or_path=tiny_sd1_folder,
        train_data_dir=make_tiles(tmp_path / "data"),
        output_dir=out,
        logging_dir=tmp_path / "logs",
        grad_filter=grad_filter,
        grad_filter_args=grad_filter and ["log_every=1"],
        save_state=True,
        save_every_n_steps=1,
        save_last_n_steps=2,
        max_train_steps=STEPS,
    )
    assert len(seen) == STEPS
    assert len(set(seen[SETTLED:])) == 1, "\n".join(map(str, seen))
