"""SIGKILL at any moment of a real run, then a resume from the newest complete state: the end is the same to the bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from library.errors import OptionError
from library.state import read_record
from tests.conftest import REPOSITORY
from tests.training import RUN_OPTIONS, arguments, first_difference, make_tiles, read_state

OPTIMIZERS = ("AdamW", "AdamW8bit", "SignSGD")
STEPS = 14
PROGRAMS = {"lora": "train_network.py", "full": "train_db.py", "pair": "train_network.py"}
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
KINDS = ("lora", "full", "lora", "full", "lora", "pair")  # 150, 100 and 50 of 300
RUNS = int(os.environ.get("KILLED_RUNS", "12"))  # of four kills each


def newest_complete_state(folder: Path) -> Path | None:
    """Give the state with the highest step whose record and files are whole."""
    found = []
    for path in folder.glob("t-step*-state"):
        try:
            found.append((read_record(path).current_step, path))
        except OptionError:
            pytest.fail(f"{path} stands under its final name and is not complete")
    return max(found)[1] if found else None


def kill_during(words: list[str], states: int, further_bytes: int) -> bool:
    """Start a program, kill it some bytes of output after it has saved a number of states; False when it was over.

    Of a pair of processes one is killed; the launcher and the other one then end by themselves.
    """
    process = subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    seen = b""
    while seen.count(b"state saved") < states and (byte := process.stderr.read(1)):
        seen += byte
    process.stderr.read(further_bytes)
    processes = [process.pid] if LAUNCHER[0] not in words else [c.pid for c in psutil.Process(process.pid).children()]
    for number in processes[-1:]:
        os.kill(number, signal.SIGKILL)
    process.stderr.read()
    return process.wait(timeout=120) != 0


def kills(count: int, seed: int, model: Path, tmp_path: Path, optimizer: str, kind: str = "lora") -> int:
    """Kill one run ``count`` times on its way, then let it finish and compare; give how many kills hit a living run."""
    chance = random.Random(seed)
    options = {
        **RUN_OPTIONS,
        "pretrained_model_name_or_path": model,
        "train_data_dir": make_tiles(tmp_path / "data"),
        "optimizer_type": optimizer,
        "grad_filter": "ema,topk_change",
        "network_dropout": 0.1,
        "save_state": True,
        "save_every_n_steps": 1,
        "max_train_steps": STEPS,
    }
    if kind == "full":
        options |= {"network_module": None, "network_dim": None, "network_dropout": None}
    program = [*LAUNCHER] * (kind == "pair") + [str(REPOSITORY / PROGRAMS[kind])]

    def run(**more) -> None:
        words = [sys.executable, *program, *arguments({**options, **more})]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)

    run(output_dir=tmp_path / "straight")
    out, hits = tmp_path / "out", 0
    for _ in range(count):
        newest = newest_complete_state(out)
        words = [*program, *arguments({**options, "output_dir": out, "resume": newest})]
        hits += kill_during(words, chance.randint(1, 3), chance.randint(0, 300))
    newest = newest_complete_state(out)
    if newest is None or read_record(newest).current_step < STEPS:
        run(output_dir=out, resume=newest)
    else:
        pytest.skip("the run was over before the last kill")
    difference = first_difference(read_state(tmp_path / "straight" / "t-state"), read_state(out / "t-state"))
    assert difference is None, f"seed {seed}: {difference}"
    return hits


def test_a_run_killed_twice_ends_where_the_unbroken_run_ends(tiny_sd1_folder, tmp_path):
    assert kills(2, seed=1, model=tiny_sd1_folder, tmp_path=tmp_path, optimizer="AdamW") > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(RUNS))
def test_many_kills(seed, tiny_sd1_folder, tmp_path, record_property):
    kind, optimizer = KINDS[seed % len(KINDS)], OPTIMIZERS[seed // len(KINDS) % len(OPTIMIZERS)]
    hits = kills(4, seed=seed, model=tiny_sd1_folder, tmp_path=tmp_path, optimizer=optimizer, kind=kind)
    record_property("counted", f"runs killed {hits} times, {kind}")
