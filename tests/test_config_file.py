"""Config files as front-ends write them: every way in which TOML skips the checks of a command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from library import args as options
from library.args_table import OBSOLETE, ROWS, int_or_share
from library.errors import OptionError
from tests.conftest import SPECIFICATION_FIXTURES
from tests.training import arguments


def parsed(*words: str, script: str = "train_network"):
    return options.parse(options.script_parser(script), list(words))


def config(tmp_path: Path, text: str, name: str = "run.toml") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_command_line_wins_over_file_wins_over_default(tmp_path):
    path = config(tmp_path, "network_dim = 8\nlearning_rate = 1\nseed = 3\n")
    args = parsed("--config_file", str(path), "--seed", "5", "--network_dim", "4")
    assert (args.network_dim, args.learning_rate, args.seed, args.train_batch_size) == (4, 1.0, 5, 1)
    assert args.config_keys == {"learning_rate"}
    assert parsed(f"--config_file={path.with_suffix('')}").network_dim == 8


@pytest.mark.parametrize(
    "line,name,expected",
    [
        ("network_alpha = 16", "network_alpha", 16.0),
        ("max_grad_norm = 0", "max_grad_norm", 0.0),
        ("network_dim = 16.0", "network_dim", 16),
        ('network_dim = "16"', "network_dim", 16),
        ('network_dim = "16.0"', "network_dim", 16),
        ('seed = " 3 "', "seed", 3),
        ("seed = false", "seed", None),
        ('max_grad_norm = "1.0"', "max_grad_norm", 1.0),
        ("persistent_data_loader_workers = 1", "persistent_data_loader_workers", True),
        ('cache_latents = "true"', "cache_latents", True),
        ("save_last_n_epochs_state = false", "save_last_n_epochs_state", None),
        ("max_token_length = 75", "max_token_length", None),
        ("max_token_length = 255", "max_token_length", None),
        ("max_token_length = 225", "max_token_length", 225),
        ('dynamo_backend = "no"', "dynamo_backend", "inductor"),
        ("text_encoder_lr = 1e-5", "text_encoder_lr", [1e-5]),
        ("text_encoder_lr = [1e-5, 2e-5]", "text_encoder_lr", [1e-5, 2e-5]),
        ("text_encoder_lr = 0", "text_encoder_lr", [0.0]),
        ("text_encoder_lr = []", "text_encoder_lr", None),
        ('text_encoder_lr = "1e-5, 2e-5"', "text_encoder_lr", [1e-5, 2e-5]),
        ('text_encoder_lr = ["1e-5", "0"]', "text_encoder_lr", [1e-5, 0.0]),
        (
            'optimizer_args = "weight_decay=0.1 betas=0.9,0.99"',
            "optimizer_args",
            ["weight_decay=0.1", "betas=0.9,0.99"],
        ),
        ('optimizer_args = [""]', "optimizer_args", None),
        ('network_args = ["conv_dim=4", "conv_alpha=1",]', "network_args", ["conv_dim=4", "conv_alpha=1"]),
        ('lr_scheduler_args = ""', "lr_scheduler_args", None),
        ('optimizer_args = "weight_decay=0.1"', "optimizer_args", ["weight_decay=0.1"]),
        ("optimizer_args = []", "optimizer_args", None),
        ('vae = ""', "vae", None),
        ("lr_warmup_steps = 0.05", "lr_warmup_steps", 0.05),
        ("lr_warmup_steps = 100", "lr_warmup_steps", 100),
        ("lr_warmup_steps = 100.0", "lr_warmup_steps", 100),
        ('lr_warmup_steps = "5%"', "lr_warmup_steps", 0.05),
        ("lr_warmup_steps = 0", "lr_warmup_steps", 0),
        ('grad_filter_args = "keep=0.1 policy=update"', "grad_filter_args", ["keep=0.1", "policy=update"]),
        ("[any_name]\nnetwork_dim = 8", "network_dim", 8),
        ("resolution = 512", "resolution", "512"),
        ("resolution = [512, 768]", "resolution", "512,768"),
        ("output_name = 2024", "output_name", "2024"),
        ("output_name = 2024-05-01", "output_name", "2024-05-01"),
        ("persistent_data_loader_workers = 0", "persistent_data_loader_workers", False),
        ("sdpa = 1.0", "sdpa", True),
        ('cache_latents = "False"', "cache_latents", False),
        ('log_with = ""', "log_with", None),
        ("log_with = false", "log_with", None),
        ('max_token_length = "255"', "max_token_length", None),
        ('grad_filter = "none"', "grad_filter", "none"),
        ('grad_filter_targets = "unet=topk te=none"', "grad_filter_targets", ["unet=topk", "te=none"]),
    ],
)
def test_values_of_a_file_are_converted_as_on_the_command_line(tmp_path, line, name, expected):
    value = getattr(parsed("--config_file", str(config(tmp_path, line))), name)
    assert value == expected and type(value) is type(expected)


def test_unknown_keys_are_listed_once_and_old_ones_named(tmp_path, caplog):
    caplog.set_level("INFO")
    text = "lerning_rate = 1e-4\nsome_thing = 1\nepoch = 3\n[a]\nsdxl = true\ncache_text_encoder_outputs = true\n"
    parsed("--config_file", str(config(tmp_path, text)))
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "lerning_rate (did you mean 'learning_rate'?), some_thing" in line]
    assert [line for line in lines if line.endswith("epoch, sdxl, cache_text_encoder_outputs")]
    assert len(lines) == 2


@pytest.mark.parametrize("name", sorted(OBSOLETE))
def test_what_front_ends_send_without_meaning_does_not_stop_a_run(tmp_path, caplog, name):
    caplog.set_level("INFO")
    args = parsed("--config_file", str(config(tmp_path, f"{name} = 0")))
    assert not hasattr(args, name) and [line for line in caplog.messages if name in line]


def test_a_table_named_like_an_option_is_told(tmp_path, caplog):
    args = parsed("--config_file", str(config(tmp_path, "optimizer_args = { momentum = 0.9 }\nseed = 3")))
    assert args.optimizer_args is None and args.seed == 3
    assert [line for line in caplog.messages if "optimizer_args" in line and '["momentum=0.9"]' in line]
    assert parsed("--config_file", str(config(tmp_path, '[grad_filter]\ngrad_filter = "topk"'))).grad_filter == "topk"


@pytest.mark.parametrize(
    "text,match",
    [
        ('grad_filtr = "topk"', "Did you mean 'grad_filter'"),
        ("network_dim = 1.5", "network_dim=1.5 must be a whole number"),
        ('learning_rate = "fast"', "learning_rate"),
        ('loss_type = "l3"', "l2"),
        ('image = "C:\\data\\new"', "single quotes"),
        ("cache_latents = 3", "true or false"),
        ("network_dim = true", "network_dim=True must be a whole number"),
        ("max_grad_norm = true", "max_grad_norm=True must be a number"),
        ("lr_warmup_steps = 1.5", "lr_warmup_steps=1.5 must be a number of steps"),
        ('text_encoder_lr = "none"', "text_encoder_lr='none' must be a number"),
        ("[a]\nnetwork_dim = {x = 1}", "network_dim is a table"),
        ("[grad_filter]\nkeep = 0.1", r'grad_filter_args = \["keep=0.1"\]'),
        ("grad_filter.keep = 0.1", r'grad_filter_args = \["keep=0.1"\]'),
        ('optimizer_args = [["a=1"]]', "inside its list"),
        ("max_token_length = 100", "150, 225"),
        ('mixed_precision = "bf1"', "Did you mean 'bf16'"),
        ("a = ", "line 1|TOML|Invalid|invalid|value"),
    ],
)
def test_a_bad_file_is_told_in_one_line(tmp_path, text, match):
    with pytest.raises(OptionError, match=match) as raised:
        parsed("--config_file", str(config(tmp_path, text)))
    assert "\n" not in str(raised.value) and "run.toml" in str(raised.value)


def test_a_missing_or_foreign_file_is_told(tmp_path):
    with pytest.raises(OptionError, match="no such file"):
        parsed("--config_file", str(tmp_path / "none"))
    (tmp_path / "x.toml").write_bytes("output_name = 'é'".encode("latin-1"))
    with pytest.raises(OptionError, match="UTF-8"):
        parsed("--config_file", str(tmp_path / "x.toml"))


def test_output_config_writes_what_is_read_back(tmp_path):
    path = tmp_path / "out.toml"
    words = ["--config_file", str(path), "--network_dim", "8", "--cache_latents", "--optimizer_args", "betas=0.9,0.99"]
    with pytest.raises(SystemExit) as stopped:
        parsed(*words, "--output_config")
    assert stopped.value.code == 0
    args = parsed("--config_file", str(path))
    assert (args.network_dim, args.cache_latents, args.optimizer_args) == (8, True, ["betas=0.9,0.99"])
    with pytest.raises(OptionError, match="exists already"):
        parsed(*words, "--output_config")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the reader of mixed lists comes with Python 3.11")
def test_whole_numbers_and_fractions_may_stand_in_one_list(tmp_path):
    assert parsed("--config_file", str(config(tmp_path, "text_encoder_lr = [0, 1e-5]"))).text_encoder_lr == [0.0, 1e-5]


SAMPLES = {int: ("3", 3), float: ("0.5", 0.5), int_or_share: ("7", 7), str: ("word", "word"), Path: ("a/b", "a/b")}


@pytest.mark.parametrize("script", options.SCRIPTS)
def test_a_file_gives_every_option_what_the_command_line_gives(script, tmp_path, monkeypatch):
    """Each option once as a word, once as its TOML type, once as a text; the namespaces are the same."""
    import toml

    monkeypatch.setattr(options, "setup_logging", lambda level, file: None)  # the log of this process stays where it is
    words, typed = {}, {}
    for row in options.SCRIPTS[script].rows():
        if row.name in ("config_file", "output_config"):
            continue
        word, value = ("true", True) if row.kind is bool else SAMPLES[row.kind]
        if row.choices:
            word, value = str(row.choices[-1]), row.choices[-1]
        words[row.name] = True if row.kind is bool else [word] if row.nargs else word
        typed[row.name] = [value] if row.nargs else value
    expected = vars(parsed(*arguments(words), script=script))
    texts = {name: " ".join(value) if isinstance(value, list) else str(value) for name, value in words.items()}
    for content in (typed, texts, {"a": typed}):
        found = vars(parsed("--config_file", str(config(tmp_path, toml.dumps(content))), script=script))
        assert {name: found[name] for name in words} == {name: expected[name] for name in words}
        assert all(type(found[name]) is type(expected[name]) for name in words)
        assert found["config_keys"] == set(words)


@pytest.mark.parametrize("script", options.SCRIPTS)
def test_empty_values_and_false_mean_not_given(script, tmp_path):
    rows = [row for row in options.SCRIPTS[script].rows() if row.name not in ("config_file", "output_config")]
    defaults = vars(parsed(script=script))
    for empty in ('""', "[]", "false"):
        text = "\n".join(f"{row.name} = {empty}" for row in rows)
        found = vars(parsed("--config_file", str(config(tmp_path, text)), script=script))
        assert {row.name: found[row.name] for row in rows} == {row.name: defaults[row.name] for row in rows}


def test_bytes_of_other_editors_are_read(tmp_path):
    path = tmp_path / "ordner ä 漢字" / "läuft.toml"
    path.parent.mkdir()
    path.write_bytes(b"\xef\xbb\xbfseed = 3\r\noutput_name = '\xc3\xa4 \xe6\xbc\xa2'\r\n")
    args = parsed(f"--config_file={path}")
    assert (args.seed, args.output_name, args.config_file) == (3, "ä 漢", str(path))


def test_a_list_on_the_command_line_replaces_the_list_of_the_file(tmp_path):
    path = config(tmp_path, 'optimizer_args = ["betas=0.8,0.9"]\ncache_latents = true\nlr_scheduler = "cosine"')
    args = parsed("--optimizer_args", "eps=1e-6", "--config_file", str(path), "--lr_scheduler", "constant")
    assert (args.optimizer_args, args.cache_latents, args.lr_scheduler) == (["eps=1e-6"], True, "constant")


def test_output_config_without_a_file_is_refused():
    with pytest.raises(OptionError, match="--output_config needs --config_file"):
        parsed("--output_config")


def test_no_key_of_the_options_is_called_obsolete_where_it_works():
    for script in ("train_network", "sdxl_train_network", "sdxl_train"):
        assert OBSOLETE.isdisjoint(row.name for row in options.SCRIPTS[script].rows())
    assert {row.name for row in ROWS} & OBSOLETE == {
        "no_token_padding",
        "learning_rate_te",
        "stop_text_encoder_training",
    }


EXAMPLES = {0: "train_network", 1: "sdxl_train_network", 3: "sdxl_train"}  # position in gui.md: script


@pytest.mark.parametrize("position,script", EXAMPLES.items())
def test_the_examples_of_front_ends_are_read_without_a_complaint(position, script, tmp_path, caplog):
    path = SPECIFICATION_FIXTURES.parent / "gui.md"
    if not path.is_file():
        pytest.skip("the specification of front-ends is not beside this checkout")
    blocks = [block.split("```")[0] for block in path.read_text(encoding="utf-8").split("```toml\n")[1:]]
    args = parsed("--config_file", str(config(tmp_path, blocks[position])), script=script)
    assert args.pretrained_model_name_or_path and not options.refused_options(args, script)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
