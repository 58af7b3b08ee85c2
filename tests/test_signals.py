"""Ctrl-C and SIGTERM end a run after its step with its state saved; a second signal ends it at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from library.errors import RunStopped
from library.signals import StopRequest, leave_signals_to_the_run
from tests.conftest import REPOSITORY
from tests.training import RUN_OPTIONS, arguments, first_difference, make_tiles, read_state, train

STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}


@pytest.mark.parametrize("number", STATUS, ids=lambda number: number.name)
def test_the_first_signal_is_noted_and_handlers_come_back(number, capfd):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert (stop.number, stop.name) == (0, "")
        os.kill(os.getpid(), number)
        assert (stop.number, stop.name, stop.status) == (number, number.name, STATUS[number])
    assert signal.getsignal(number) is before
    assert f"{number.name}: the run ends after this step" in capfd.readouterr().err


@pytest.mark.parametrize("number", STATUS, ids=lambda number: number.name)
def test_a_second_signal_ends_the_process_at_once(number):
    program = (
        "import os, signal\nfrom library.signals import StopRequest\n"
        f"with StopRequest():\n    os.kill(os.getpid(), {int(number)})\n    os.kill(os.getpid(), {int(number)})\n"
        "    print('still here')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == STATUS[number] and "still here" not in done.stdout


def test_a_loader_process_ignores_what_a_terminal_sends_to_all():
    program = (
        "import os, signal\nfrom library.signals import leave_signals_to_the_run as leave\nleave(0)\n"
        "os.kill(os.getpid(), signal.SIGINT)\nos.kill(os.getpid(), signal.SIGTERM)\nprint('still here')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stdout.strip() == "still here"
    assert leave_signals_to_the_run.__module__ == "library.signals"


def test_the_script_ends_with_the_status_of_the_signal():
    program = (
        "from library.errors import RunStopped, run_script\n"
        "def main(): raise RunStopped('SIGTERM: stopped after step 3 of 9. Go on', 143)\nrun_script(main)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (143, "error: SIGTERM: stopped after step 3 of 9. Go on")


@pytest.fixture(scope="module")
def straight(tiny_sd1_folder, tmp_path_factory):
    """Options of a run of 5 steps, and the folder of one that nobody stopped."""
    folder = tmp_path_factory.mktemp("straight")
    options = {
        "pretrained_model_name_or_path": tiny_sd1_folder,
        "train_data_dir": make_tiles(folder / "data"),
        "grad_filter": "topk_change",
        "network_dropout": 0.1,
        "save_state": True,
        "max_train_steps": 5,
        "max_data_loader_n_workers": 1,
    }
    train(**options, output_dir=folder / "out")
    return options, folder / "out"


def stopped_at(step: int, number: int, monkeypatch, **options) -> RunStopped:
    from library.loop import TrainingLoop

    real = TrainingLoop._apply_gradients

    def signalled(self, results):
        signalled.calls += 1
        if signalled.calls == step:
            os.kill(os.getpid(), number)  # in the middle of the step
        real(self, results)

    signalled.calls = 0
    with monkeypatch.context() as patch, pytest.raises(RunStopped) as raised:
        patch.setattr(TrainingLoop, "_apply_gradients", signalled)
        train(**options)
    return raised.value


def test_a_stopped_run_goes_on_with_resume_auto_to_the_same_bits(straight, tmp_path, monkeypatch, caplog):
    options, unbroken = straight
    out = tmp_path / "out"
    stopped = stopped_at(3, signal.SIGTERM, monkeypatch, **options, output_dir=out, resume="auto")
    assert stopped.status == 143 and "after step 3 of 5" in str(stopped)
    assert [path.name for path in out.glob("*state")] == ["t-step00000003-state"]
    assert "t-step00000003-state" in str(stopped) and not list(out.glob("*.safetensors"))
    caplog.set_level("INFO")
    train(**options, output_dir=out, resume="auto")
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "--resume auto" in said and "restored: step 3 of 5, epoch 1, batch 3 of 6 in the epoch" in said
    assert "gradient filter: its buffers" in said and "(AdamW)" in said
    assert first_difference(read_state(out / "t-state"), read_state(unbroken / "t-state")) is None


def test_a_run_without_states_says_so_when_it_is_stopped(straight, tmp_path, monkeypatch):
    options = {**straight[0], "save_state": False, "output_dir": tmp_path / "out"}
    stopped = stopped_at(1, signal.SIGINT, monkeypatch, **options)
    assert stopped.status == 130 and "add --save_state" in str(stopped)
    assert not list(Path(tmp_path / "out").glob("*"))


def test_signals_that_a_launcher_hands_on_are_no_second_one(monkeypatch):
    times, ended = iter([10.0, 12.0, 15.0]), []
    monkeypatch.setattr("library.signals.os._exit", ended.append)
    with StopRequest(together_s=5.0, now=lambda: next(times)) as stop:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.number, ended) == (signal.SIGTERM, [])
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended == [143]


def test_the_program_with_loader_processes_ends_when_it_is_stopped(straight, tmp_path):
    options = {**RUN_OPTIONS, **straight[0], "output_dir": tmp_path, "max_data_loader_n_workers": 2}
    options |= {"max_train_steps": 500, "save_every_n_steps": 1, "save_last_n_steps": 1}
    process = subprocess.Popen(
        [sys.executable, "train_network.py", *arguments(options)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    try:
        assert any(b"state saved" in line for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 143 and b"error: SIGTERM: stopped after step" in rest


def test_a_stopped_run_leaves_no_loader_processes(straight, tmp_path, monkeypatch):
    options = {**straight[0], "output_dir": tmp_path, "max_data_loader_n_workers": 2}
    before = set(multiprocessing.active_children())
    stopped = stopped_at(2, signal.SIGTERM, monkeypatch, **options)
    assert stopped.status == 143 and set(multiprocessing.active_children()) <= before
