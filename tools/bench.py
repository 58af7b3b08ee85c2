"""What a gradient filter adds to a training step: ratios measured side by side in one process.

    make bench

Builds the small model, prepares one real run for each setting, and alternates single optimizer steps between them, so
that a machine whose speed drifts slows all of them alike. Prints medians and ratios, and the start-up of the trainer.
"""

from __future__ import annotations

import argparse
import logging
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

SETTINGS: dict[str, dict[str, Any]] = {
    "no filter": {},
    "topk keep=0.1": {"grad_filter": "topk", "grad_filter_args": ["keep=0.1"]},
    "topk keep=0.1 policy=update": {"grad_filter": "topk", "grad_filter_args": ["keep=0.1", "policy=update"]},
    "topk_change": {"grad_filter": "topk_change"},
    "ema,topk_change": {"grad_filter": "ema,topk_change"},
    "threshold": {"grad_filter": "threshold"},
    "random": {"grad_filter": "random"},
}


class Run:
    """A prepared run that makes one optimizer step at a time and remembers how long each took.

    The loop of the trainer runs in a generator of its own: its progress callback hands control back after each step.
    """

    def __init__(self, name: str, options: dict[str, Any]):
        import threading

        from library.loop import TrainingLoop
        from tests.training import train

        self.name = name
        self.seconds: list[float] = []
        self._turn, self._done = threading.Semaphore(0), threading.Semaphore(0)
        run = self

        class Stepwise(TrainingLoop):
            def _one_update(self, update: Any) -> None:
                run._turn.acquire()
                start = time.perf_counter()
                super()._one_update(update)
                run.seconds.append(time.perf_counter() - start)
                run._done.release()

        from library import trainer

        def body() -> None:
            trainer.TrainingLoop = Stepwise  # type: ignore[misc]
            train(**options)

        self._thread = threading.Thread(target=body, daemon=True)
        self._thread.start()

    def step(self) -> None:
        self._turn.release()
        self._done.acquire()


def measure(steps: int, folder: Path, rank: int, width: int) -> dict[str, list[float]]:
    """Give the seconds of every step of every setting, steps taken in turn."""
    from tests.training import make_tiles
    from tools.make_tiny_model import make_tiny_model

    model = make_tiny_model(folder / "model", "sd1", width=width)
    data = make_tiles(folder / "data")
    runs = []
    for number, (name, options) in enumerate(SETTINGS.items()):
        common = {"pretrained_model_name_or_path": model, "train_data_dir": data, "network_dim": rank}
        common |= {"output_dir": folder / f"out{number}", "max_train_steps": steps + 2, "optimizer_type": "AdamW"}
        run = Run(name, {**common, **options})
        run.step()  # the first step builds everything; the run is ready when it is over
        runs.append(run)
    for number in range(steps):
        for run in runs if number % 2 else reversed(runs):
            run.step()
    return {run.name: run.seconds[1:] for run in runs}


def start_up(folder: Path) -> float:
    """Give the seconds of a whole one-step run as a program."""
    from tests.training import RUN_OPTIONS, arguments

    options = {**RUN_OPTIONS, "pretrained_model_name_or_path": folder / "model", "train_data_dir": folder / "data"}
    options |= {"output_dir": folder / "out", "max_train_steps": 1}
    start = time.perf_counter()
    command = [sys.executable, str(REPOSITORY / "train_network.py"), *arguments(options)]
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="ratios of training steps with a gradient filter over steps without")
    parser.add_argument("--steps", type=int, default=15, help="measured steps of each setting")
    parser.add_argument("--rank", type=int, default=32, help="rank of the LoRA")
    parser.add_argument("--width", type=int, default=64, help="channels of the first U-Net level")
    options = parser.parse_args()
    import torch

    logging.disable(logging.INFO)
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as name:
        seconds = measure(options.steps, Path(name), options.rank, options.width)
        whole = start_up(Path(name))
    base = statistics.median(seconds["no filter"])
    print(
        f"\n{platform.processor() or platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads"
    )
    print(
        f"small SD1 (width {options.width}), 64 px, batch 1, LoRA rank {options.rank}, AdamW, {options.steps} steps\n"
    )
    print(f"{'setting':30} {'median ms':>10} {'step with / without':>20}")
    for setting, values in seconds.items():
        pairs = [value / without for value, without in zip(values, seconds["no filter"])]
        print(f"{setting:30} {statistics.median(values) * 1e3:10.1f} {statistics.median(pairs):20.3f}")
    print(f"\nwhole program, start to first saved model: {whole:.1f} s, of which one step is {base:.2f} s")


if __name__ == "__main__":
    main()
