"""TensorBoard and wandb: what they are told, that they cannot stop a run, and that they never hold a secret."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import pytest

import library.trackers
from library.errors import OptionError
from library.trackers import ScalarLog, hide_secrets, trackers_of
from tests.test_train_network import scalars_of
from tests.training import first_difference, make_tiles, read_state, train

SECRET = "secret-of-the-user-0123456789abcdef012345"


class Recorder:
    """Stands for the wandb package: notes what it is told, fails where it is asked to."""

    def __init__(self, fails: str = ""):
        self.fails = fails
        self.init_arguments: dict = {}
        self.rows: list[dict] = []
        self.finished = False

    def module(self) -> types.ModuleType:
        module = types.ModuleType("wandb")
        module.__spec__ = importlib.util.spec_from_loader("wandb", None)
        module.init = self.init
        module.Image = lambda path, caption: (Path(path).name, caption)
        module.config = types.SimpleNamespace(update=self.update)
        return module

    def init(self, **arguments):
        self._may_fail("init")
        self.init_arguments = arguments
        return self

    def update(self, *_, **__):
        self._may_fail("config")

    def log(self, row, **_):
        self._may_fail("log")
        self.rows.append(row)

    def finish(self):
        self._may_fail("finish")
        self.finished = True

    def _may_fail(self, place):
        if place == self.fails:
            raise ConnectionError(f"no network at {place}")


@pytest.fixture
def wandb(monkeypatch):
    """Give a function that puts a recorder in the package's place."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", "/nonexistent")
    monkeypatch.setattr("accelerate.tracking.is_wandb_available", lambda: True)
    from accelerate import tracking

    if "wandb" not in [str(getattr(name, "value", name)) for name in tracking._available_trackers]:
        monkeypatch.setattr(tracking, "_available_trackers", [*tracking._available_trackers, "wandb"])

    def put(fails: str = "") -> Recorder:
        recorder = Recorder(fails)
        monkeypatch.setitem(sys.modules, "wandb", recorder.module())
        return recorder

    return put


@pytest.fixture
def options(tiny_sd1_folder, tmp_path):
    return {
        "pretrained_model_name_or_path": tiny_sd1_folder,
        "train_data_dir": make_tiles(tmp_path / "data", count=2, repeats=1),
        "output_dir": tmp_path / "out",
        "max_train_steps": 2,
    }


@pytest.mark.parametrize(
    "log_with,folder,expected",
    [
        (None, None, ()),
        (None, "logs", ("tensorboard",)),
        ("tensorboard", "logs", ("tensorboard",)),
        ("wandb", None, ("wandb",)),
        ("all", "logs", ("tensorboard", "wandb")),
    ],
)
def test_which_trackers_the_options_ask_for(log_with, folder, expected):
    assert trackers_of(log_with, folder) == expected


def test_wandb_gets_rows_with_their_place_and_the_samples(wandb, options, tmp_path):
    recorder = wandb()
    prompts = tmp_path / "p.txt"
    prompts.write_text("a cat --w 64 --h 64 --s 1 --d 1", encoding="utf-8")
    more = {"sample_prompts": prompts, "sample_every_n_steps": 1, "wandb_run_name": "mine", "log_config": True}
    train(**options, **more, log_with="all", logging_dir=tmp_path / "logs", log_tracker_name="project")
    assert recorder.init_arguments["project"] == "project" and recorder.init_arguments["name"] == "mine"
    assert str(tmp_path / "logs") in recorder.init_arguments["dir"] and recorder.finished
    steps = [row for row in recorder.rows if "loss/current" in row]
    assert [(row["global_step"], row["epoch"]) for row in steps] == [(1, 1), (2, 1)]
    assert [row["sample_0"][1] for row in recorder.rows if "sample_0" in row] == ["a cat"] * 2
    assert [step for step, _ in scalars_of(tmp_path / "logs")["loss/current"]] == [1, 2]
    assert len(list((tmp_path / "logs").rglob("hparams.yml"))) == 1  # each tracker is started once


@pytest.mark.parametrize("place", ["init", "config", "log", "finish"])
def test_wandb_that_fails_is_one_line_and_nothing_else_notices(place, wandb, options, tmp_path, caplog):
    wandb(place)
    options = {**options, "save_state": True, "log_config": True}
    train(**options, log_with="all", logging_dir=tmp_path / "logs")
    train(**{**options, "output_dir": tmp_path / "plain"})
    lines = [r.getMessage() for r in caplog.records if "switched off" in r.getMessage()]
    assert len(lines) == 1 and lines[0].startswith("logging with wandb is switched off")
    assert len(scalars_of(tmp_path / "logs")["loss/current"]) == 2
    assert first_difference(*[read_state(tmp_path / name / "t-state") for name in ("out", "plain")]) is None


def test_tensorboard_that_fails_is_one_line(options, tmp_path, caplog, monkeypatch):
    from accelerate.tracking import TensorBoardTracker

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorBoardTracker, "log", full)
    train(**options, logging_dir=tmp_path / "logs")
    assert len([r for r in caplog.records if "tensorboard is switched off" in r.getMessage()]) == 1
    assert (tmp_path / "out" / "t.safetensors").is_file()


@pytest.mark.parametrize("key", [None, SECRET])
def test_wandb_never_asks_for_a_key(key, wandb, options, monkeypatch, caplog):
    import os

    wandb()
    monkeypatch.setenv("WANDB_MODE", "")
    train(**options, log_with="wandb", wandb_api_key=key)
    assert os.environ["WANDB_MODE"] == ("" if key else "offline")
    assert os.environ.get("WANDB_API_KEY") == key
    assert any("recorded offline" in record.getMessage() for record in caplog.records) == (key is None)
    os.environ.pop("WANDB_API_KEY", None)


def test_secrets_are_in_no_file_and_no_log(wandb, options, tmp_path, caplog, monkeypatch):
    import os

    recorder = wandb()
    monkeypatch.setattr(sys, "argv", ["train_network.py", "--wandb_api_key", SECRET])
    caplog.set_level("DEBUG")
    more = {"wandb_api_key": SECRET, "log_config": True, "save_state": True}
    train(**options, **more, log_with="all", logging_dir=tmp_path / "logs")
    os.environ.pop("WANDB_API_KEY", None)
    assert caplog.text and SECRET not in caplog.text + str(recorder.init_arguments) + str(recorder.rows) + str(sys.argv)
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes(), path


@pytest.mark.parametrize(
    "words,hidden",
    [
        (["--wandb_api_key", "x", "--seed", "1"], ["--wandb_api_key", "***", "--seed", "1"]),
        (["--huggingface_token=x"], ["--huggingface_token=***"]),
        (["--wandb_api", "x"], ["--wandb_api", "***"]),
        (["--wandb_api_key"], ["--wandb_api_key"]),
        (["--wandb_run_name", "x"], ["--wandb_run_name", "x"]),
    ],
)
def test_secrets_of_a_command_line_are_hidden(words, hidden):
    assert hide_secrets(words) == hidden


def test_a_tracker_configuration_replaces_the_other_arguments(wandb, options, tmp_path):
    recorder = wandb()
    file = tmp_path / "tracker.toml"
    file.write_text("[wandb]\ntags = ['a']\n", encoding="utf-8")
    train(**options, log_with="wandb", log_tracker_config=file, wandb_run_name="lost")
    assert recorder.init_arguments["tags"] == ["a"] and "name" not in recorder.init_arguments


@pytest.mark.parametrize(
    "content,match", [(None, "Give a TOML file"), ("[", "no valid TOML"), ("x = 1", "a table for each tracker")]
)
def test_a_tracker_configuration_that_cannot_be_read_is_one_line(content, match, options, tmp_path):
    file = tmp_path / "tracker.toml"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(OptionError, match=match):
        train(**options, logging_dir=tmp_path / "logs", log_tracker_config=file)


def test_trackers_that_cannot_be_used_are_refused_before_anything_is_loaded(options, monkeypatch):
    with pytest.raises(OptionError, match="needs --logging_dir"):
        train(**options, log_with="tensorboard")
    monkeypatch.setattr(library.trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match="pip install wandb"):
        train(**options, log_with="wandb")


def test_no_tracker_is_no_work():
    accelerator = types.SimpleNamespace(is_main_process=True, project_dir=None, log_with=[])
    nothing = ScalarLog(accelerator, library.trackers.LogSettings())
    nothing.write({"a": 1.0}, 1)
    nothing.close()
