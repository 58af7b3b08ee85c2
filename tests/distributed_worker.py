"""What each process of tests/test_distributed.py does: runs one after the other in a process group, notes for the test.

Started as ``python -m tests.distributed_worker PLAN`` with the environment that torchrun sets; PLAN is a JSON file with
the model folders, the data, the folder for results and the names of the runs. The notes of each process are written to
``notes_RANK.json`` after every run.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from library import grad_filter, latent_cache, processes, trainer_hooks
from library.errors import OptionError, RunStopped
from library.log import setup_logging
from library.loop import TrainingLoop
from tests.training import train

RANK = int(os.environ["RANK"])
LORA = {"grad_filter": "topk_change", "network_dropout": 0.1, "check_ranks": True, "save_state": True}
FULL = {
    "script": "sdxl_train",
    "network_module": None,
    "network_dim": None,
    "max_train_steps": 2,
    "network_dropout": None,
}


@contextmanager
def replaced(owner: Any, name: str, build: Any) -> Iterator[None]:
    """Put ``build(what was there)`` in the place of an attribute."""
    before = getattr(owner, name)
    setattr(owner, name, build(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


class Runs:
    """The runs by name; each gives what the test is to see of this process."""

    def __init__(self, plan: dict[str, Any]):
        self.plan, self.out = plan, Path(plan["out"])
        self.options = {
            "pretrained_model_name_or_path": plan["sd1"],
            "train_data_dir": plan["data"],
            "max_train_steps": 6,
        }

    def train(self, name: str, **options: Any) -> None:
        train(**{**self.options, **LORA, "output_dir": self.out / name, **options})

    def straight(self) -> dict[str, Any]:
        """Six steps; notes the images, noise and gradients of this process."""
        images: list[list[str]] = []
        noise: list[str] = []
        local: list[torch.Tensor] = []
        means: list[torch.Tensor] = []
        writes: list[str] = []

        def note_batch(real: Any) -> Any:
            def process_batch(self: Any, batch: Any, *words: Any, **more: Any) -> Any:
                images.append(list(batch["image_keys"]))
                return real(self, batch, *words, **more)

            return process_batch

        def note_noise(real: Any) -> Any:
            def disturb(*words: Any) -> Any:
                disturbed = real(*words)
                noise.append(hashlib.sha256(disturbed.target.numpy().tobytes()).hexdigest())
                return disturbed

            return disturb

        def note_gradients(real: Any) -> Any:
            def all_reduce(self: Any, accelerator: Any, network: Any) -> None:
                params = list(network.get_trainable_params())
                local.append(torch.cat([param.grad.reshape(-1) for param in params]))
                real(self, accelerator, network)
                means.append(torch.cat([param.grad.reshape(-1) for param in params]))

            return all_reduce

        def note_write(real: Any) -> Any:
            def write(request: Any, *words: Any) -> Any:
                writes.append(request.name)
                return real(request, *words)

            return write

        with (
            replaced(trainer_hooks.TrainerHooks, "process_batch", note_batch),
            replaced(trainer_hooks, "disturb", note_noise),
            replaced(trainer_hooks.TrainerHooks, "all_reduce_network", note_gradients),
            replaced(latent_cache, "_write", note_write),
        ):
            self.train("straight", save_every_n_steps=3, cache_latents_to_disk=True)
        torch.save({"local": local, "means": means}, self.out / f"gradients_{RANK}.pt")
        return {"images": images, "noise": noise, "written": writes}

    def resumed(self) -> None:
        """Goes on from the middle of ``straight``."""
        self.train("resumed", resume=self.out / "straight" / "t-step00000003-state")

    def from_one_process(self) -> None:
        """Goes on from a state of one process."""
        self.train("from_one", resume=self.plan["of_one"])

    def without_seed(self) -> None:
        """Nobody says a seed, so every process would draw its own; modules that drop out have no gradient in one."""
        self.train("without_seed", seed=None, network_args=["module_dropout=0.5"], max_train_steps=3)

    def told_by_the_trainer(self) -> None:
        """A stage that asks for the noise levels of the step, which are of all processes together."""
        self.train("told", grad_filter="snr", grad_filter_args=["per=timestep"], max_train_steps=3)

    def not_averaged(self) -> None:
        """A fault: gradients stay those of each process."""
        with replaced(trainer_hooks, "mean_gradients", lambda real: lambda params, device: None):
            self.train("not_averaged", max_train_steps=2)

    def another_buffer(self) -> None:
        """A fault: one bit of a filter buffer flips in one process."""

        def flip(real: Any) -> Any:
            def apply(self: Any, results: Any) -> None:
                real(self, results)
                if RANK == 1:
                    for entry in self.filters[0].export_state()["params"]:
                        for buffer in entry["buffers"].values():
                            return buffer.view(torch.uint8).reshape(-1)[:1].bitwise_xor_(1) and None

            return apply

        with replaced(TrainingLoop, "_apply_gradients", flip):
            self.train("another_buffer", max_train_steps=2)

    def loss_not_finite(self) -> None:
        """A loss of one process is not a number at step 2."""

        def spoil(real: Any) -> Any:
            def post_process(self: Any, loss: Any, *words: Any) -> Any:
                spoil.calls += 1
                return real(self, loss, *words) * (float("nan") if RANK == 1 and spoil.calls == 2 else 1.0)

            return post_process

        spoil.calls = 0  # type: ignore[attr-defined]
        with replaced(trainer_hooks.TrainerHooks, "post_process_loss", spoil):
            self.train("loss", save_every_n_steps=1)

    def stopped(self) -> None:
        """One process gets a signal in the middle of step 2."""
        with replaced(TrainingLoop, "_refuse_non_finite_loss", signalled(1, 2, signal.SIGTERM)):
            self.train("stopped")

    def another_data_set(self) -> None:
        """The processes see different data."""
        self.train("other_data", train_data_dir=self.plan["more_data"] if RANK else self.plan["data"])

    def micro(self) -> None:
        """A filter that looks at the batches of one process."""
        self.train("micro", grad_filter="micro_agree")

    def sdxl_lora(self) -> None:
        self.train("sdxl", script="sdxl_train_network", pretrained_model_name_or_path=self.plan["sdxl"])

    def sdxl_full(self) -> None:
        """The whole model, with the rank check, saved and resumed."""
        options = {**FULL, "pretrained_model_name_or_path": self.plan["sdxl"], "grad_filter": "ema,topk"}
        options |= {"max_train_steps": 3, "save_every_n_steps": 2}
        self.train("full", **options)
        self.train("full_resumed", **options, resume=self.out / "full" / "t-step00000002-state")

    def sdxl_fused(self) -> None:
        """Steps inside the backward pass, rounded at random: the processes must round alike."""
        options = {**FULL, "pretrained_model_name_or_path": self.plan["sdxl"], "mixed_precision": "bf16"}
        adafactor = ["relative_step=False", "scale_parameter=False", "warmup_init=False"]
        options |= {"optimizer_type": "Adafactor", "optimizer_args": adafactor, "lr_scheduler": "constant"}
        self.train("fused", **options, full_bf16=True, fused_backward_pass=True, grad_filter="topk")

    def sdxl_groups(self) -> None:
        """Several optimizers, each stepping inside the backward pass."""
        options = {**FULL, "pretrained_model_name_or_path": self.plan["sdxl"], "grad_filter": "ema,topk"}
        self.train("groups", **options, fused_optimizer_groups=4, gradient_accumulation_steps=2)

    def every_filter(self) -> dict[str, str | None]:
        """Each known filter on mean gradients of a few tensors: masks, buffers and weights are compared."""
        found: dict[str, str | None] = {}
        for name in sorted(grad_filter.known_filters()):
            registered = grad_filter.known_filters()[name]
            if name == "mask_file" or getattr(registered.target, "watches_micro_steps", False):
                continue
            shapes = [(64, 16), (24, 3, 3, 3), (100,)]
            start = torch.Generator().manual_seed(0)
            params = [torch.nn.Parameter(torch.randn(shape, generator=start)) for shape in shapes]
            optimizer = torch.optim.AdamW(params, lr=1e-2)
            handle = grad_filter.attach(optimizer, {"clamp": "clamp lo=-0.5 hi=0.5"}.get(name, name))
            names = {id(param): f"p{index}" for index, param in enumerate(params)}
            check = processes.RankCheck([optimizer], names, torch.device("cpu"))
            own = torch.Generator().manual_seed(100 + RANK)
            found[name] = None
            try:
                for step in range(1, 4):
                    for param in params:
                        param.grad = torch.randn(param.shape, generator=own)
                    processes.mean_gradients(params, torch.device("cpu"))
                    losses = processes.joined(torch.rand(2 + RANK, generator=own), 3, torch.device("cpu"))
                    levels = processes.joined(torch.tensor([10, 990, 500][: 2 + RANK]), 3, torch.device("cpu"))
                    handle.set_context(total_steps=3, micro_steps=2, losses=losses, timesteps=levels)
                    check.note_gradients()
                    with processes.shared_random_numbers(step):
                        optimizer.step()
                    check.after_update(step)
            except RunStopped as stopped:
                found[name] = str(stopped)
        return found

    def killed(self) -> None:
        """One process is killed in the middle of step 4; has to be the last run."""
        with replaced(TrainingLoop, "_refuse_non_finite_loss", signalled(1, 4, signal.SIGKILL)):
            self.train("killed", save_every_n_steps=1)

    def after_the_kill(self) -> None:
        self.train("killed", save_every_n_steps=1, resume="auto")


def signalled(rank: int, step: int, number: int) -> Any:
    """Send a signal to one process once, at a step."""

    def build(real: Any) -> Any:
        def refuse(self: Any, update: Any, *words: Any) -> None:
            if rank == RANK and update.step == step:
                os.kill(os.getpid(), number)
            real(self, update, *words)

        return refuse

    return build


def main(plan_file: str) -> None:
    plan = json.loads(Path(plan_file).read_text(encoding="utf-8"))
    runs, notes = Runs(plan), {}
    torch.set_num_threads(1)
    setup_logging("INFO")
    for name in plan["runs"]:
        started = time.perf_counter()
        try:
            notes[name] = {"gave": getattr(runs, name)()}
        except (OptionError, RunStopped) as error:
            notes[name] = {"error": str(error), "status": getattr(error, "status", 2)}
        notes[name]["seconds"] = round(time.perf_counter() - started, 1)
        path = Path(plan["out"]) / f"notes_{RANK}.json"
        path.write_text(json.dumps(notes), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
