"""The command line: options as the interface lists them, config files as front-ends write them, mistakes in a line."""

from __future__ import annotations

import argparse
import json
import logging
import re
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest

from library import args as options
from library.args_table import ALWAYS, DEPENDENT, REFUSED, ROWS, int_or_share
from library.config_util import add_config_arguments
from library.errors import OptionError
from tests.conftest import REPOSITORY, SPECIFICATION_FIXTURES
from tests.training import arguments, make_tiles

OURS = {"grad_filter", "grad_filter_args", "grad_filter_targets", "check_ranks"}
OURS_OF = {"sdxl_train": {"save_delta"}}


LISTED = ("train_network", "sdxl_train_network", "sdxl_train")


def parsed(*words: str, script: str = "train_network"):
    return options.parse(options.script_parser(script), list(words))


def listed_arguments(script: str) -> dict[str, dict]:
    """The specification's list of a script's arguments, by name."""
    path = SPECIFICATION_FIXTURES.parent / "cli" / f"{script}.json"
    if not path.is_file():
        pytest.skip("the specification's list of arguments is not beside this checkout")
    return {row["name"]: row for row in json.loads(path.read_text())}


def actions_of(script: str) -> dict[str, argparse.Action]:
    return {action.dest: action for action in options.script_parser(script)._actions if action.dest != "help"}


@pytest.mark.parametrize("script", LISTED)
def test_every_option_has_the_listed_type_default_and_choices(script):
    listed, actions = listed_arguments(script), actions_of(script)
    assert set(actions) - set(listed) == OURS | OURS_OF.get(script, set()) and set(listed) <= set(actions)
    kinds = {"str": str, "int": int, "float": float, "bool": None, "Path": Path, "int_or_float": int_or_share}
    for name, row in listed.items():
        action = actions[name]
        assert action.option_strings == row["flags"], name
        assert action.default == row["default"] and type(action.default) is type(row["default"]), name
        assert (list(action.choices) if action.choices else None) == row["choices"], name
        assert action.nargs == (0 if row["action"] == "store_true" else row["nargs"]), name
        assert (action.type or (None if row["action"] == "store_true" else str)) is kinds[row["type"]], name
        assert isinstance(action, argparse._StoreTrueAction) == (row["action"] == "store_true"), name
        assert action.required == row["required"] and action.help, name


@pytest.mark.parametrize("script", LISTED)
def test_no_prefix_became_ambiguous(script):
    """What argparse makes of every shortened option is what it made of it without ours."""
    listed, ours = sorted(listed_arguments(script)), sorted(actions_of(script))
    for name in listed:
        for end in range(1, len(name)):
            prefix = name[:end]
            alone = [other for other in listed if other.startswith(prefix)]
            if len(alone) == 1:
                assert [other for other in ours if other.startswith(prefix)] == alone, prefix


@pytest.mark.parametrize("script", options.SCRIPTS)
def test_every_parser_builds_and_prints_its_help(script):
    parser = options.script_parser(script)
    assert all(f"--{name}" in parser.format_help() for name in ("config_file", "grad_filter", "save_model_as"))
    known = {row.name for row in options.SCRIPTS[script].rows()}
    assert set(options.SCRIPTS[script].refused) <= known and set(options.SCRIPTS[script].left_out).isdisjoint(known)


def test_the_adding_functions_make_up_the_parser():
    parser = ArgumentParser()
    for add in (
        options.add_logging_arguments,
        options.add_sd_models_arguments,
        lambda p: options.add_dataset_arguments(p, True, True, True),
        lambda p: options.add_training_arguments(p, False),
        options.add_masked_loss_arguments,
        options.add_deepspeed_arguments,
        options.add_sd_saving_arguments,
        options.add_optimizer_arguments,
        add_config_arguments,
        options.add_custom_train_arguments,
        options.add_model_spec_arguments,
        options.add_sdxl_training_arguments,
    ):
        add(parser)
    added = {action.dest: action.default for action in parser._actions}
    whole = {action.dest: action.default for action in options.script_parser("sdxl_train")._actions}
    own = {"learning_rate_te1", "learning_rate_te2", "block_lr", "train_text_encoder", "fused_optimizer_groups"}
    assert whole.keys() - added.keys() == own | {"diffusers_xformers", "save_delta"}
    assert added.items() <= whole.items()


def test_building_the_parser_has_no_side_effect_and_is_light():
    code = (
        "import sys; before = list(sys.argv); import train_network; train_network.setup_parser();"
        "heavy = {'diffusers', 'transformers', 'accelerate', 'bitsandbytes', 'matplotlib', 'tensorboard'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules); assert sys.argv == before"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize(
    "text,expected", [("10", 10), ("0.1", 0.1), ("5%", 0.05), ("0", 0.0)], ids=["steps", "share", "percent", "zero"]
)
def test_step_counts_and_shares(text, expected):
    assert int_or_share(text) == expected


@pytest.mark.parametrize("text", ["1.5", "100.0", "x"])
def test_a_fraction_of_a_step_is_refused(text):
    with pytest.raises(ValueError, match=r".+"):
        int_or_share(text)


def test_prefixes_of_an_option_are_accepted():
    assert parsed("--max_train_ep", "3").max_train_epochs == 3
    assert parsed("--debiased_estimation").debiased_estimation_loss


GOOD = {"pretrained_model_name_or_path": ".", "output_dir": "out", "network_module": "networks.lora"}


def refusals() -> list[tuple[str, str]]:
    every = [(script, {*REFUSED, *entry.refused}, entry) for script, entry in options.SCRIPTS.items()]
    return [(script, row.name) for script, refused, entry in every for row in entry.rows() if row.name in refused]


@pytest.mark.parametrize("script,name", refusals())
def test_a_refused_option_is_refused_with_its_reason(script, name):
    row = next(row for row in ROWS if row.name == name)
    value = row.choices[-1] if row.choices else True if row.kind is bool else 1 if row.kind in (int, float) else "x"
    lines = options.refused_options(parsed(*arguments({name: value}), script=script), script)
    assert len(lines) == 1 and lines[0].startswith(f"--{name}: ") and "\n" not in lines[0]


@pytest.mark.parametrize("script", options.SCRIPTS)
def test_front_ends_defaults_ask_for_nothing_that_is_refused(script):
    assert not options.refused_options(parsed(script=script), script)


NOT_WRITTEN_YET: set[str] = set()


@pytest.mark.parametrize("script", sorted(set(options.SCRIPTS) - NOT_WRITTEN_YET))
def test_no_option_is_accepted_and_ignored(script):
    """An option works (its name is read somewhere), is refused, belongs to a refused one, or is always in force."""
    folders = (REPOSITORY / "library", REPOSITORY / "networks")
    code = "\n".join(
        path.read_text(encoding="utf-8")
        for path in (file for folder in folders for file in folder.glob("*.py"))
        if path.stem != "args_table"
    )
    spoken_for = {*REFUSED, *options.SCRIPTS[script].refused, *DEPENDENT, *ALWAYS}
    rows = [row for row in options.SCRIPTS[script].rows() if row.name not in spoken_for and row.group != "model_spec"]
    assert not [row.name for row in rows if not re.search(rf"\b{row.name}\b", code)]


def test_what_is_in_force_anyway_is_said(caplog):
    caplog.set_level("INFO")
    with pytest.raises(OptionError):
        options.check_options(parsed("--deepspeed"))
    args = parsed(*arguments({**GOOD, **dict.fromkeys(ALWAYS, True)}))
    options.check_options(args)
    assert all([line for line in caplog.messages if line.startswith(f"--{name}: ")] for name in ALWAYS)


def test_the_old_spelling_of_the_caption_suffix_wins(tmp_path):
    from library.config_util import load_dataset_specs

    make_tiles(tmp_path)
    args = parsed("--train_data_dir", str(tmp_path), "--resolution", "64", "--caption_extention", ".tags")
    assert load_dataset_specs(args)[0].subsets[0].caption_extension == ".tags"


def test_the_log_goes_where_the_options_say(tmp_path):
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        parsed("--console_log_file", str(tmp_path / "ö.log"), "--console_log_level", "WARNING")
        logging.getLogger("library.x").info("quiet")
        logging.getLogger("library.x").warning("loud ä")
    finally:
        root.handlers[:] = before
        root.setLevel(level)  # which forgets what loggers remembered of the other level
    assert (tmp_path / "ö.log").read_text(encoding="utf-8").endswith("WARNING loud ä\n")
    with pytest.raises(OptionError, match="console_log_file"):
        parsed("--console_log_file", str(tmp_path))


def test_options_beside_a_refused_one_are_known():
    assert set(DEPENDENT) <= {row.name for row in ROWS}
    assert set(REFUSED) <= {row.name for row in ROWS}


@pytest.mark.parametrize(
    "changed,match",
    [
        ({"pretrained_model_name_or_path": None}, "pretrained_model"),
        ({"output_dir": None}, "output_dir"),
        ({"network_module": None}, "network_module"),
        ({"max_train_steps": 0}, "max_train_steps"),
        ({"max_train_epochs": -1}, "max_train_epochs"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
        ({"learning_rate": -1}, "learning_rate"),
        ({"learning_rate": "nan"}, "learning_rate"),
        ({"learning_rate": "inf"}, "learning_rate"),
        ({"seed": -1}, "seed"),
        ({"min_timestep": 1000}, "min_timestep 1000: it must be in 0 to 999"),
        ({"max_timestep": 1001}, "max_timestep"),
        ({"seed": 2**32}, "seed"),
        ({"adaptive_noise_scale": 0.1}, "noise_offset"),
        ({"scale_v_pred_loss_like_noise_pred": True}, "v_parameterization"),
        ({"v_pred_like_loss": 0.1, "v_parameterization": True}, "v_pred_like_loss"),
        ({"output_name": "../x"}, "output_name"),
        ({"network_weights": "none.safetensors"}, "network_weights"),
        ({"dim_from_weights": True}, "network_weights"),
    ],
)
def test_wrong_combinations_are_refused(changed, match):
    with pytest.raises(OptionError, match=match):
        options.check_options(parsed(*arguments({**GOOD, **changed})))


def test_all_mistakes_are_told_together():
    with pytest.raises(OptionError) as raised:
        options.check_options(parsed("--max_train_steps", "0", "--deepspeed"))
    lines = str(raised.value).splitlines()
    assert len(lines) == 5 and all(line.startswith("--") for line in lines)


def test_parts_of_the_parser_work_on_an_empty_one():
    for add in (
        options.add_sd_models_arguments,
        lambda p: options.add_dataset_arguments(p, True, True, True),
        lambda p: options.add_training_arguments(p, True),
        options.add_optimizer_arguments,
        options.add_sd_saving_arguments,
    ):
        parser = ArgumentParser()
        add(parser)
        assert all(action.option_strings[0].startswith("--") or action.dest == "help" for action in parser._actions)


def test_the_table_in_the_docs_is_the_one_of_the_code():
    assert options.arguments_table() in (REPOSITORY / "docs" / "arguments.md").read_text(encoding="utf-8")
