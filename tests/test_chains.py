"""Runs that are stopped again and again, at random places and with random options, end where the unbroken run ends."""

from __future__ import annotations

import os
import random
import signal

import pytest
from safetensors.torch import load_file

from tests.test_signals import stopped_at
from tests.training import first_difference, make_tiles, read_state, train

CHAINS = int(os.environ.get("CHAINS", "12"))
OPTIMIZERS = ("AdamW", "AdamW8bit", "Prodigy", "Lion", "SignSGD", "AdamWScheduleFree", "Adafactor", "SGDNesterov")
OWN = {
    "Prodigy": {"learning_rate": 1.0},
    "Adafactor": {"optimizer_args": ["relative_step=False", "scale_parameter=False", "warmup_init=False"]},
}
FILTERS = (None, "topk_change", "ema,topk", "random")


def drawn(chance: random.Random, steps: int) -> dict[str, object]:
    """Draw the options of a run."""
    optimizer = chance.choice(OPTIMIZERS)
    return {
        "optimizer_type": optimizer,
        "grad_filter": chance.choice(FILTERS),
        "gradient_accumulation_steps": chance.choice((1, 3)),
        "max_data_loader_n_workers": chance.choice((0, 0, 2)),
        "lr_scheduler": "constant" if optimizer.endswith("ScheduleFree") else chance.choice(("constant", "cosine")),
        "network_dropout": chance.choice((None, 0.1)),
        "shuffle_caption": chance.random() < 0.5,
        "save_every_n_steps": chance.choice((None, 2, 5)),
        "save_every_n_epochs": chance.choice((None, 1)),
        "save_last_n_steps": chance.choice((None, 4)),
        "save_state": True,
        "max_train_steps": steps,
        **OWN.get(optimizer, {}),
    }


def names_of(folder) -> set[str]:
    return {path.name for path in folder.iterdir() if path.suffix == ".safetensors"}


def chain(seed: int, model, tmp_path, monkeypatch, steps: int = 24) -> int:
    """Go through one chain and give how many times it was stopped."""
    chance = random.Random(seed)
    options = {
        **drawn(chance, steps),
        "pretrained_model_name_or_path": model,
        "train_data_dir": make_tiles(tmp_path / "data"),
    }
    train(**options, output_dir=tmp_path / "straight")
    stops = sorted(chance.sample(range(1, steps), chance.randint(2, 5)))
    out, before = tmp_path / "out", 0
    for stop in stops:
        stopped_at(stop - before, signal.SIGTERM, monkeypatch, **options, output_dir=out, resume="auto")
        before = stop
    train(**options, output_dir=out, resume="auto")
    told = f"seed {seed}, stops {stops}, {options}"
    states = [read_state(folder / "t-state") for folder in (out, tmp_path / "straight")]
    assert first_difference(*states) is None, told
    assert names_of(out) == names_of(tmp_path / "straight"), told
    for name in names_of(out):
        assert first_difference(*(load_file(folder / name) for folder in (out, tmp_path / "straight"))) is None, told
    return len(stops)


def test_R7_a_chain_of_resumes(tiny_sd1_folder, tmp_path, monkeypatch):
    assert chain(1000, tiny_sd1_folder, tmp_path, monkeypatch, steps=9) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(CHAINS))
def test_R7_many_chains_of_resumes(seed, tiny_sd1_folder, tmp_path, monkeypatch, record_property):
    stops = chain(seed, tiny_sd1_folder, tmp_path, monkeypatch)
    record_property("counted", f"chains of {stops} resumes")
