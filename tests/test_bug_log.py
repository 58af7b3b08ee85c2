"""Rows of the collection of public bug reports that no other test file covers; each test stands for a row's kind."""

from __future__ import annotations

import logging
import re
import signal

import pytest
import torch
from safetensors.torch import load_file

from library import args as options_module
from library import grad_filter, trainer, trainer_hooks
from library.errors import OptionError
from library.loop import TrainingLoop
from library.optimizers import MovementWatch
from library.sampling import load_prompts
from tests.conftest import REPOSITORY
from tests.test_signals import stopped_at
from tests.training import first_difference, make_tiles, read_state, train


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_tiles(tmp_path_factory.mktemp("data"))


@pytest.fixture
def options(tiny_sd1_folder, data, tmp_path):
    return {
        "pretrained_model_name_or_path": tiny_sd1_folder,
        "train_data_dir": data,
        "output_dir": tmp_path / "out",
        "save_state": True,
    }


@pytest.mark.parametrize("script", ["train_network", "sdxl_train_network", "sdxl_train", "train_db"])
def test_B02_every_script_does_only_the_steps_that_are_left(script, options, tiny_sdxl_folder, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    if script.startswith("sdxl"):
        options["pretrained_model_name_or_path"] = tiny_sdxl_folder
    options |= {"script": script, "max_train_steps": 4, "save_every_n_steps": 2}
    train(**options)
    resumed = {**options, "output_dir": tmp_path / "resumed", "resume": tmp_path / "out" / "t-step00000002-state"}
    caplog.clear()
    train(**resumed)
    assert "training starts after step 2 of 4 (the resumed state), epoch 1" in caplog.text
    saved = sorted(path.name for path in (tmp_path / "resumed").glob("t-step*-state"))
    assert saved == ["t-step00000004-state"]
    states = [read_state(folder / "t-state") for folder in (tmp_path / "out", tmp_path / "resumed")]
    assert first_difference(*states) is None


def test_B05_previews_and_validations_of_a_resumed_run_are_those_of_one_run(options, tmp_path, monkeypatch):
    events: list[tuple] = []

    def draw(prompts, build, modules, sampler, v, image_name, *more):
        events.append(("preview", image_name(0, 1).name.split("_")[1]))

    def validate(self, accelerator, validation, update, at_epoch_end, training_loss):
        events.append(("validation", update.step, at_epoch_end))

    monkeypatch.setattr(trainer, "generate_samples", draw)
    monkeypatch.setattr(trainer_hooks.TrainerHooks, "_log_validation", validate)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat")
    options |= {"sample_prompts": prompts, "sample_every_n_epochs": 1, "validation_split": 0.4}
    options |= {"validate_every_n_epochs": 1, "max_train_epochs": 3}
    train(**options)
    straight, events[:] = list(events), []
    assert {kind for kind, *_ in straight} == {"preview", "validation"} and len(straight) >= 6
    stopped_at(7, signal.SIGTERM, monkeypatch, **{**options, "output_dir": tmp_path / "stopped"})
    first, events[:] = list(events), []
    train(**{**options, "resume": "auto", "output_dir": tmp_path / "stopped"})
    assert first and events and [*first, *events] == straight


@pytest.mark.parametrize("rate,warned", [(1e-9, True), (1e-2, False)])
def test_B31_updates_that_are_rounded_away_are_told(rate, warned, options, caplog):
    caplog.set_level(logging.INFO)
    low = {"full_bf16": True, "mixed_precision": "bf16", "learning_rate": rate, "save_state": False}
    train(**{**options, **low, "max_train_steps": 3, "script": "train_db"})
    said = [record for record in caplog.records if "entries of 16 bit weights" in record.getMessage()]
    assert len(said) == 1 and (said[0].levelno == logging.WARNING) == warned
    assert "in 3 updates" in said[0].getMessage()


def test_B31_movement_is_looked_at_once_and_only_in_weights_of_16_bits(caplog):
    caplog.set_level(logging.INFO)
    whole, half = torch.ones(10), torch.tensor([1.0] * 10 + [0.0] * 5, dtype=torch.bfloat16)
    watch = MovementWatch([whole, half], updates=2, sample=15)
    whole += 1
    half[:3] = 2
    half[10:] = 2
    for _ in range(4):
        watch.after_update()
    watch.report()
    assert [record.getMessage() for record in caplog.records] == [
        "30.0 % of the entries of 16 bit weights have changed in 2 updates"
    ]


def test_B31_random_rounding_goes_on_after_a_resume(options, tiny_sdxl_folder, tmp_path):
    options |= {"script": "sdxl_train", "pretrained_model_name_or_path": tiny_sdxl_folder, "max_train_steps": 3}
    options |= {"full_bf16": True, "mixed_precision": "bf16", "fused_backward_pass": True, "save_every_n_steps": 2}
    options |= {"optimizer_type": "Adafactor", "lr_scheduler": "constant", "learning_rate": 1e-5}
    options["optimizer_args"] = ["relative_step=False", "scale_parameter=False", "warmup_init=False"]
    train(**options)
    middle = tmp_path / "out" / "t-step00000002-state"
    train(**{**options, "resume": middle, "output_dir": tmp_path / "resumed"})
    ours, theirs = (read_state(tmp_path / name / "t-state") for name in ("out", "resumed"))
    assert first_difference(ours, theirs) is None
    assert first_difference(ours["model.safetensors"], read_state(middle)["model.safetensors"]) is not None


@pytest.mark.parametrize("limits,updates", [({"max_train_epochs": 1, "max_train_steps": 2}, 6), ({}, 1600)])
def test_B63_the_limit_that_wins_is_said(limits, updates, options, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    plans = []

    def stop(self, *words):
        plans.append(words[4])
        raise OptionError("seen enough")

    monkeypatch.setattr(trainer.NetworkTrainer, "_create_optimizer", stop)
    from tests.training import RUN_OPTIONS

    monkeypatch.delitem(RUN_OPTIONS, "max_train_steps")
    with pytest.raises(OptionError, match="seen enough"):
        train(**{**options, **limits})
    assert plans[0].max_steps == updates
    assert ("--max_train_epochs 1 wins over --max_train_steps 2" in caplog.text) == bool(limits)


@pytest.mark.parametrize("name", options_module.POSITIVE)
@pytest.mark.parametrize("value", [0, -1])
def test_B63_lengths_below_one_are_refused(name, value, options, tmp_path):
    with pytest.raises(OptionError, match=f"--{name} {value}: it must be at least 1") as raised:
        train(**{**options, name: value})
    assert "\n" not in str(raised.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("limit", [1e-4, 1e4, 0])
@pytest.mark.parametrize("chosen", [None, "probe"])
def test_B66_the_norm_is_limited_once_for_the_whole_update(accumulation, limit, chosen, options, monkeypatch, request):
    true, seen, squares = [], [], []
    apply = TrainingLoop._apply_gradients

    def probe(grad):
        squares[-1] += float(grad.square().sum())
        return torch.zeros_like(grad)

    grad_filter.register_filter("probe", kind="transform")(probe)
    request.addfinalizer(lambda: grad_filter.FILTERS.pop("probe"))

    def norm_of(params):
        return float(torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in params if p.grad is not None])))

    def watched(self, results):
        params = list(self.parts.network.get_trainable_params())
        true.append(norm_of(params))
        squares.append(0.0)
        if not seen:  # behind the filter's own hook
            self.parts.raw_optimizer.register_step_pre_hook(lambda *_: seen.append(norm_of(params)))
        apply(self, results)

    monkeypatch.setattr(TrainingLoop, "_apply_gradients", watched)
    train(
        **{**options, "gradient_accumulation_steps": accumulation, "max_grad_norm": limit, "max_train_steps": 2},
        grad_filter=chosen,
        grad_filter_args=["min_numel=0"] if chosen else None,
    )
    expected = [min(1.0, limit / norm) * norm if limit else norm for norm in true]
    assert len(true) == len(seen) == 2
    if chosen:  # the limit comes first, then the filter
        assert [square**0.5 for square in squares] == pytest.approx(expected, rel=1e-3)
        assert seen == [0.0, 0.0]
    else:
        assert seen == pytest.approx(expected, rel=1e-3)


def test_B66_a_negative_limit_is_refused(options):
    with pytest.raises(OptionError, match="--max_grad_norm -1"):
        train(**options, max_grad_norm=-1)


PROMPT_FILES = {
    "empty.txt": ("", []),
    "comments.txt": ("# a cat\n\n  # a dog\n", []),
    "no_extension": ("a cat --w 500 --h 70 --s 0 --l x --d 3\n", [("a cat", 496, 64, 1, 7.5)]),
    "json.json": ('[{"prompt": "a cat", "width": 65}, {"width": 64}, {"prompt": ""}]', [("a cat", 64, 512, 30, 7.5)]),
    "option_like.txt": ("n a cat\nw 500 cats\n", [("n a cat", 512, 512, 30, 7.5), ("w 500 cats", 512, 512, 30, 7.5)]),
    "unknown.txt": ("a cat --zz 3 --w many\n", [("a cat", 512, 512, 30, 7.5)]),
    "toml.toml": ('[prompt]\nwidth = 72\n[[prompt.subset]]\nprompt = "a cat"\n', [("a cat", 72, 512, 30, 7.5)]),
}


@pytest.mark.parametrize("name", PROMPT_FILES)
def test_B71_prompts_are_read_before_the_first_step_and_bad_parts_left_out(name, tmp_path):
    text, expected = PROMPT_FILES[name]
    (tmp_path / name).write_text(text, encoding="utf-8")
    found = load_prompts(str(tmp_path / name))
    assert [(p.prompt, p.width, p.height, p.sample_steps, p.scale) for p in found] == expected


@pytest.mark.parametrize("content,match", [("[{", "syntax"), ('{"prompt": 3}', "list"), (b"\xff\xfe\x00", "UTF-8")])
def test_B71_a_prompt_file_that_cannot_be_read_ends_the_run_at_once(content, match, options, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer.NetworkTrainer, "_load_model", lambda *a: pytest.fail("a model was loaded"))
    path = tmp_path / "p.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(OptionError, match=match) as raised:
        train(**options, sample_prompts=path)
    assert "\n" not in str(raised.value) and "sample_prompts" in str(raised.value)


def test_B71_a_long_prompt_draws_and_changes_nothing(options, tmp_path):
    prompts = tmp_path / "p.txt"
    prompts.write_text(" ".join(["cat"] * 400) + " --w 64 --h 64 --s 1")
    train(**{**options, "max_train_steps": 2}, sample_prompts=prompts, sample_every_n_steps=1)
    assert len(list((tmp_path / "out" / "sample").glob("*.png"))) == 2
    train(**{**options, "max_train_steps": 2, "output_dir": tmp_path / "bare"})
    weights = [load_file(tmp_path / name / "t.safetensors") for name in ("out", "bare")]
    assert first_difference(*weights) is None


def test_every_row_of_the_collection_is_in_the_docs_with_tests_that_exist():
    text = (REPOSITORY / "docs" / "reliability.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| B")]
    numbers = sorted(int(name[1:]) for row in rows for name in re.findall(r"B\d\d", row[1]))
    assert numbers == list(range(1, 81))
    code = "\n".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "tests").glob("test_*.py"))
    for row in rows:
        for name in re.findall(r"test_\w+", row[3]):
            assert f"def {name}" in code or (REPOSITORY / "tests" / f"{name}.py").is_file(), name
        for kind in re.findall(r'BAD\["([^"]+)"\]', row[3]):
            assert f'"{kind}":' in code, kind
