"""A value that is not finite, wherever it comes in, never reaches a file, and stops or skips the step it came in at."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file

from library import trainer_hooks
from library.errors import RunStopped
from library.loop import TrainingLoop
from tests.training import leaves, make_tiles, read_state, train

AT = 3


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_tiles(tmp_path_factory.mktemp("data"))


def put_in(place: str, value: float, monkeypatch) -> None:
    """Let a value come in at step AT: into the loss, a gradient, a weight or a filter buffer."""
    if place == "loss":
        real_loss, calls = trainer_hooks.TrainerHooks.post_process_loss, []

        def post_process(self, loss, *words):
            calls.append(1)
            return real_loss(self, loss, *words) * (value if len(calls) == AT else 1.0)

        monkeypatch.setattr(trainer_hooks.TrainerHooks, "post_process_loss", post_process)
        return
    real = TrainingLoop._apply_gradients

    def apply(self, results):
        if self.step == AT:
            param = next(p for p in self.parts.network.get_trainable_params() if p.grad is not None and p.grad.any())
            if place == "gradient":
                param.grad.view(-1)[0] = value
            elif place == "weight":
                param.data.view(-1)[0] = value
            else:
                buffers = (b for e in self.filters[0].export_state()["params"] for b in e["buffers"].values())
                next(buffer for buffer in buffers if buffer.any()).view(-1)[0] = value
        real(self, results)

    monkeypatch.setattr(TrainingLoop, "_apply_gradients", apply)


CELLS = [
    pytest.param(place, value, precision, chosen, marks=[pytest.mark.slow] * (value == math.inf))
    for place in ("loss", "gradient", "weight", "buffer")
    for value in (math.nan, math.inf)
    for precision in ("no", "bf16")
    for chosen in (None, "ema,topk")
    if place != "buffer" or chosen
]


@pytest.mark.parametrize("place,value,precision,chosen", CELLS)
def test_R16_nothing_that_is_not_finite_is_saved(
    place, value, precision, chosen, data, tiny_sd1_folder, tmp_path, monkeypatch, caplog
):
    put_in(place, value, monkeypatch)
    options = {
        "pretrained_model_name_or_path": tiny_sd1_folder,
        "train_data_dir": data,
        "output_dir": tmp_path,
        "mixed_precision": precision,
        "grad_filter": chosen,
        "save_state": True,
        "save_every_n_steps": 1,
        "max_train_steps": 5,
    }
    stopped = ""
    try:
        train(**options)
    except RunStopped as error:
        stopped = str(error)
    skipped = place == "gradient" and chosen is not None
    assert bool(stopped) != skipped and "\n" not in stopped
    last = 5 if skipped else AT - 1
    states = sorted(path.name for path in tmp_path.glob("t-step*-state"))
    assert states == [f"t-step{step:08d}-state" for step in range(1, last + 1)]
    if skipped:
        assert "the step is left out" in caplog.text
    for path in tmp_path.glob("*.safetensors"):
        assert all(torch.isfinite(tensor).all() for tensor in load_file(path).values()), path
    for name in states:
        for where, leaf in leaves(read_state(tmp_path / name)):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                assert torch.isfinite(leaf).all(), (name, where)
