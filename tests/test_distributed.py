"""Two processes on the CPU are one run: shared data, mean gradients, same masks, one writer, the same bits again."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from library import grad_filter
from library.errors import OptionError
from library.launch import number_asked_for, processes_forgotten
from library.processes import checksum
from tests.conftest import REPOSITORY
from tests.training import RUN_OPTIONS, arguments, first_difference, make_tiles, read_state, train

LIMIT_S = 300  # nothing here takes that long; a hang fails instead of lasting
RUNS = [
    "straight",
    "resumed",
    "from_one_process",
    "without_seed",
    "told_by_the_trainer",
    "not_averaged",
    "another_buffer",
    "loss_not_finite",
    "stopped",
    "another_data_set",
    "micro",
    "sdxl_lora",
    "sdxl_full",
    "sdxl_fused",
    "sdxl_groups",
    "every_filter",
    "killed",
]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Pair:
    """Two processes of tests/distributed_worker.py, from their start to their end.

    Attributes:
        out: folder of results. statuses: exit status of each. output: what each wrote to stderr.
    """

    def __init__(self, plan: dict[str, Any]):
        self.out = Path(plan["out"])
        self.out.mkdir(parents=True, exist_ok=True)
        file = self.out / "plan.json"
        file.write_text(json.dumps({key: value if key == "runs" else str(value) for key, value in plan.items()}))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.distributed_worker", str(file)],
                cwd=REPOSITORY,
                env={**os.environ, **meeting, "RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                stderr=(self.out / f"{rank}.log").open("w"),
            )
            for rank in "01"
        ]
        try:
            self.statuses = [process.wait(timeout=LIMIT_S) for process in started]
        finally:
            for process in started:
                process.kill()
        self.output = [(self.out / f"{rank}.log").read_text(encoding="utf-8") for rank in "01"]

    def notes(self, run: str) -> list[dict[str, Any]]:
        """Give what each process noted of a run, in rank order."""
        files = sorted(self.out.glob("notes_*.json"))
        return [json.loads(path.read_text(encoding="utf-8"))[run] for path in files]

    def gave(self, run: str) -> list[Any]:
        """Give what a run gave in each process; fails where it ended with an error."""
        notes = self.notes(run)
        assert len(notes) == 2 and not any("error" in note for note in notes), (notes, self.output)
        return [note["gave"] for note in notes]

    def errors(self, run: str) -> list[str]:
        notes = self.notes(run)
        assert all("error" in note for note in notes), notes
        return [note["error"] for note in notes]

    def state(self, *names: str) -> dict[str, Any]:
        return read_state(self.out.joinpath(*names))


@pytest.fixture(scope="module")
def plan(tiny_sd1_folder, tiny_sdxl_folder, tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("pair")
    plan = {
        "sd1": tiny_sd1_folder,
        "sdxl": tiny_sdxl_folder,
        "data": make_tiles(folder / "data", count=4, repeats=2),
        "more_data": make_tiles(folder / "more", count=5, repeats=2),
        "out": folder / "out",
        "of_one": folder / "one" / "t-step00000002-state",
        "runs": RUNS,
    }
    train(
        pretrained_model_name_or_path=tiny_sd1_folder,
        train_data_dir=plan["data"],
        output_dir=folder / "one",
        grad_filter="topk_change",
        save_state=True,
        save_every_n_steps=2,
        lr_scheduler="cosine",
        max_train_steps=4,
    )
    return plan


@pytest.fixture(scope="module")
def pair(plan) -> Pair:
    return Pair(plan)


def test_every_image_is_seen_once_an_epoch_by_one_process(pair):
    images = [list(itertools.chain(*noted["images"])) for noted in pair.gave("straight")]
    assert len(images[0]) == len(images[1]) == 6  # an epoch of 8 batches has 4 steps
    first = sorted(images[0][:4] + images[1][:4])
    assert [first.count(name) for name in sorted(set(first))] == [2, 2, 2, 2]


def test_noise_differs_between_processes_and_steps(pair):
    noise = [digest for noted in pair.gave("straight") for digest in noted["noise"]]
    assert len(noise) == len(set(noise)) == 12


def test_the_filter_sees_the_mean_of_all_gradients(pair):
    pair.gave("straight")
    ours, theirs = (torch.load(pair.out / f"gradients_{rank}.pt", weights_only=True) for rank in (0, 1))
    assert len(ours["local"]) == 6
    for own, other, mean, same in zip(ours["local"], theirs["local"], ours["means"], theirs["means"]):
        assert torch.equal(mean, same) and torch.equal(mean, (own + other) / 2)
        assert not torch.equal(own, other)


def test_one_process_writes_and_each_image_is_cached_by_one(pair):
    written = [name for noted in pair.gave("straight") for name in noted["written"]]
    assert len(written) == len(set(written)) == 4
    names = {path.name for path in (pair.out / "straight").iterdir()}
    assert names == {
        "t.safetensors",
        "t-state",
        *(f"t-step0000000{step}{end}" for step in (3, 6) for end in (".safetensors", "-state")),
        "t-grad_filter",
    }


def test_B76_a_state_has_the_random_numbers_of_every_process_and_resumes_to_the_same_bits(pair):
    pair.gave("straight"), pair.gave("resumed")
    straight, resumed = pair.state("straight", "t-state"), pair.state("resumed", "t-state")
    assert straight["random_states_0.json"] != straight["random_states_1.json"]
    assert straight["train_state.json"]["processes"] == 2
    assert first_difference(straight, resumed) is None
    weights = [load_file(pair.out / name / "t.safetensors") for name in ("straight", "resumed")]
    assert first_difference(*weights) is None


def test_a_state_of_one_process_goes_on_in_two(pair):
    pair.gave("from_one_process")
    record = pair.state("from_one", "t-state")["train_state.json"]
    assert (record["current_step"], record["processes"]) == (6, 2)
    assert "random numbers start anew in every process, as the state is of 1" in pair.output[0]
    assert pair.state("from_one", "t-state")["scheduler.bin"]["last_epoch"] == 12  # two to a step


def test_a_state_of_two_processes_goes_on_in_one(pair, plan, tmp_path, caplog):
    pair.gave("straight")
    train(
        pretrained_model_name_or_path=plan["sd1"],
        train_data_dir=plan["data"],
        output_dir=tmp_path,
        grad_filter="topk_change",
        save_state=True,
        resume=pair.out / "straight" / "t-step00000003-state",
        max_train_steps=5,
    )
    record = read_state(tmp_path / "t-state")["train_state.json"]
    assert (record["current_step"], record["processes"]) == (5, 1)
    assert "as the state is of 2" in caplog.text
    assert read_state(tmp_path / "t-state")["scheduler.bin"]["last_epoch"] == 5


@pytest.mark.parametrize("run", ["straight", "without_seed", "told_by_the_trainer", "sdxl_lora", "sdxl_groups"])
def test_every_update_is_the_same_in_both_processes(run, pair):
    pair.gave(run)
    assert "checksums were the same in every process" in pair.output[0]


def test_whole_models_train_save_and_resume_to_the_same_bits(pair):
    pair.gave("sdxl_full")
    assert first_difference(pair.state("full", "t-state"), pair.state("full_resumed", "t-state")) is None


def test_steps_inside_the_backward_pass_round_alike(pair):
    pair.gave("sdxl_fused")


def test_every_filter_chooses_the_same_in_both_processes(pair):
    for found in pair.gave("every_filter"):
        assert set(found.values()) == {None}, {name: text for name, text in found.items() if text}
        assert len(found) >= len(grad_filter.known_filters()) - 2


@pytest.mark.parametrize(
    "run,what", [("not_averaged", "gradient of"), ("another_buffer", "grad_filter/params"), ("micro", "micro_agree")]
)
def test_a_difference_between_processes_stops_all_of_them(run, what, pair):
    texts = pair.errors(run)
    assert texts[0] == texts[1] and what in texts[0] and "\n" not in texts[0]


def test_a_loss_that_is_not_finite_in_one_process_stops_both_at_that_step(pair):
    main, spoilt = pair.errors("loss_not_finite")
    assert main == "step 2: the loss of process 1 is not finite, see its message"
    assert spoilt.startswith("step 2: the loss is nan for ")
    assert (pair.out / "loss" / "t-step00000001-state").is_dir()
    assert not (pair.out / "loss" / "t-step00000002-state").exists()


def test_a_signal_to_one_process_stops_both_after_the_same_step_with_a_state(pair):
    for note in pair.notes("stopped"):
        assert note["status"] == 143 and "stopped after step 2 of 6" in note["error"]
    state = pair.state("stopped", "t-step00000002-state")
    assert {"random_states_0.json", "random_states_1.json"} <= set(state)


def test_processes_that_see_other_data_say_so(pair):
    for text in pair.errors("another_data_set"):
        assert "the number of batches is 8 in process 0 and 10 in process 1" in text


def test_a_killed_process_ends_the_other_with_a_line_and_the_last_state_is_whole(pair):
    assert pair.statuses == [0, -signal.SIGKILL]  # the worker notes the error and ends
    note = json.loads((pair.out / "notes_0.json").read_text(encoding="utf-8"))["killed"]
    assert note["status"] == 1 and note["error"].startswith("another process of this run has ended")
    assert pair.state("killed", "t-step00000003-state")["train_state.json"]["current_step"] == 3


@pytest.mark.slow
def test_a_run_goes_on_after_a_kill_to_the_bits_of_the_unbroken_one(pair, plan):
    again = Pair({**plan, "runs": ["after_the_kill"]})
    again.gave("after_the_kill")
    assert first_difference(pair.state("killed", "t-state"), pair.state("straight", "t-state")) is None


# ------------------------------------------------------------------------------------------------------------ parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_a_checksum_notices_every_bit_and_every_swap(dtype):
    tensor = torch.arange(24).reshape(4, 6).to(dtype)
    assert checksum(tensor) == checksum(tensor.clone())
    if dtype != torch.bool:
        assert checksum(tensor.t()) != checksum(tensor)
    for bit in range(8 if dtype != torch.bool else 1):
        changed = tensor.clone()
        changed.view(torch.uint8).reshape(-1)[3 if dtype == torch.bool else 13] ^= 1 << bit
        assert checksum(changed) != checksum(tensor)


def test_one_process_of_several_is_noticed():
    cpu = {"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert processes_forgotten(cpu)
    assert not processes_forgotten({"ACCELERATE_USE_CPU": "True"})
    assert not processes_forgotten({**cpu, "RANK": "0"})
    assert not processes_forgotten({**cpu, "ACCELERATE_USE_CPU": "False"})


def test_the_number_of_processes_is_that_of_the_command_or_its_file(tmp_path):
    words = ["python", "accelerate", "launch", "--cpu"]
    assert number_asked_for([*words, "--num_processes", "3", "train_network.py", "--num_processes", "9"]) == 3
    assert number_asked_for([*words, "--num-processes=2", "train_network.py"]) == 2
    config = tmp_path / "config.yaml"
    config.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_processes: 4\n")
    assert number_asked_for([*words, "--config_file", str(config), "train_network.py"]) == 4
    for unclear in (["python", "own.py"], [*words, "--num_processes", "4", "--num_machines", "2", "train_network.py"]):
        with pytest.raises(OptionError, match="torchrun"):
            number_asked_for(unclear)


LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
    "accelerate": ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"],
    "accelerate --cpu": ["accelerate.commands.accelerate_cli", "launch", "--num_processes", "2", "--cpu"],
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_way_to_launch_starts_two_processes_that_are_one_run(launcher, tiny_sd1_folder, tmp_path):
    options = {
        **RUN_OPTIONS,
        "pretrained_model_name_or_path": tiny_sd1_folder,
        "train_data_dir": make_tiles(tmp_path / "data"),
        "output_dir": tmp_path / "out",
        "max_train_steps": 2,
        "check_ranks": True,
        "save_state": True,
    }
    words = [sys.executable, "-m", *LAUNCHERS[launcher], str(REPOSITORY / "train_network.py"), *arguments(options)]
    done = subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert read_state(tmp_path / "out" / "t-state")["train_state.json"]["processes"] == 2


def test_the_tables_of_traffic_are_those_of_the_program():
    from tools.traffic import MODELS, gradient_bytes, selection_bytes, sharded_table, whole_table

    text = (REPOSITORY / "docs" / "distributed.md").read_text(encoding="utf-8")
    assert whole_table() in text and sharded_table() in text
    lora = MODELS[0]
    assert gradient_bytes(lora, 2, sharded=False) == lora.entries * 4  # a half each way, there and back
    assert selection_bytes(lora, 64, "tensor", sharded=False) == 0
