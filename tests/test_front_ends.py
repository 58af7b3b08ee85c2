"""Front-ends: every text box through which the filter's settings come, what they import, and what they read."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from library import args as options
from library import grad_filter
from library.errors import OptionError
from library.log import prepare_output
from tests.conftest import REPOSITORY
from tests.training import RUN_OPTIONS, arguments, make_tiles, train

# what a person types into any of the boxes; every route below must give the same filter
WISHES = {
    "one": {"grad_filter": "topk", "grad_filter_args": "keep=0.1"},
    "policy and schedule": {"grad_filter": "topk", "grad_filter_args": "keep=0.5 policy=update"},
    "chain": {"grad_filter": "ema,topk_change", "grad_filter_args": "topk_ratio=0.9 ema.beta=0.9"},
    "targets": {"grad_filter": "topk", "grad_filter_args": "keep=0.2", "grad_filter_targets": "te=none up:keep=0.5"},
    "preset alone": {"grad_filter": "finite"},
}
SCRIPT = "train_network"


def spec_of(words: list[str], script: str = SCRIPT) -> str:
    spec = grad_filter.spec_from_args(options.parse(options.script_parser(script), words))
    assert spec is not None
    return spec.canonical()


def plain(wish: dict[str, str]) -> list[str]:
    return [word for name, text in wish.items() for word in (f"--{name}", *text.split())]


def with_file(folder: Path, content: str) -> list[str]:
    path = folder / "run.toml"
    path.write_text(content, encoding="utf-8")
    return ["--config_file", str(path)]


def kohya_words(wish: dict[str, str], folder: Path) -> list[str]:
    """Double quotes go, the text is split at blanks, and every word is quoted for a shell that never sees it."""
    typed = " ".join(f'--{name} "{text}"' for name, text in wish.items())
    return [shlex.quote(word) for word in typed.replace('"', "").split(" ")]


def kohya_words_quoted(wish: dict[str, str], folder: Path) -> list[str]:
    """What arrives when a word does not look harmless to the shell quoter."""
    return [word if word.startswith("--") else f"'{word}'" for word in kohya_words(wish, folder)]


def equal_signs(wish: dict[str, str], folder: Path) -> list[str]:
    words = [f"--grad_filter={wish['grad_filter']}"]
    for name in ("grad_filter_args", "grad_filter_targets"):
        words += [f"--{name}", *wish[name].split()] if name in wish else []
    return words


def optimizer_items(wish: dict[str, str]) -> list[str]:
    items = [f"grad_filter={wish['grad_filter']}"]
    items += [f"grad_filter.{word}" for word in wish.get("grad_filter_args", "").split()]
    return items + [f"grad_filter_targets={word}" for word in wish.get("grad_filter_targets", "").split()]


def optimizer_box(wish: dict[str, str], folder: Path) -> list[str]:
    items = " ".join(["weight_decay=0.1", *optimizer_items(wish)]).split(" ")
    return with_file(folder, f"optimizer_args = [ {', '.join(json.dumps(item) for item in items)},]")


def optimizer_words(wish: dict[str, str], folder: Path) -> list[str]:
    return ["--optimizer_args", "betas=0.9,0.99", *optimizer_items(wish)]


def extra_rows(wish: dict[str, str], folder: Path) -> list[str]:
    """A name and a value a line, always a text."""
    return with_file(folder, "\n".join(f"{name} = {json.dumps(text)}" for name, text in wish.items()))


def custom_toml(wish: dict[str, str], folder: Path) -> list[str]:
    lists = {name: text.split() if name != "grad_filter" else text for name, text in wish.items()}
    return with_file(folder, "[custom]\n" + "\n".join(f"{name} = {json.dumps(value)}" for name, value in lists.items()))


def file_and_words(wish: dict[str, str], folder: Path) -> list[str]:
    return [*with_file(folder, "seed = 1\nlearning_rate = 1"), *kohya_words(wish, folder)]


ROUTES = (
    kohya_words,
    kohya_words_quoted,
    equal_signs,
    optimizer_box,
    optimizer_words,
    extra_rows,
    custom_toml,
    file_and_words,
)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)
@pytest.mark.parametrize("wish", WISHES.values(), ids=list(WISHES))
def test_every_route_gives_the_filter_that_was_typed(route, wish, tmp_path):
    assert spec_of(route(wish, tmp_path)) == spec_of(plain(wish))


@pytest.mark.parametrize("script", options.SCRIPTS)
def test_every_script_takes_the_filter(script):
    wish = plain(WISHES["targets"])
    assert spec_of(wish, script) == spec_of(wish)


@pytest.mark.parametrize("off", ['""', '"none"', '" "', "[]", "false"])
def test_an_empty_row_or_none_switches_nothing_on(off, tmp_path):
    args = options.parse(options.script_parser(SCRIPT), with_file(tmp_path, f"grad_filter = {off}"))
    assert grad_filter.spec_from_args(args) is None


@pytest.mark.parametrize("wish", [*WISHES.values(), {"grad_filter": "x/file.py:Name"}], ids=str)
def test_everything_can_be_typed_with_characters_that_survive(wish):
    assert all(re.fullmatch(r"[A-Za-z0-9@%+=:,./_ -]*", text) for text in wish.values())


def test_every_filter_and_option_survives_the_shell_quoter():
    names = [*grad_filter.known_filters(), *grad_filter.PRESETS, *sorted(grad_filter.SETTINGS)]
    assert [name for name in names if shlex.quote(name) != name] == []


# ------------------------------------------------------------------------------------------- forms made of the parser


def form_of(parser) -> dict[str, dict]:
    """What form generators make of a parser: no type is a checkbox, choices a list, several words a split text."""
    fields = {}
    for action in parser._actions:
        if action.dest == "help":
            continue
        assert type(action).__name__ in ("_StoreAction", "_StoreTrueAction"), "forms know no other action"
        assert action.option_strings[0] == f"--{action.dest}" and action.help
        kind = "checkbox" if action.nargs == 0 else "list" if action.choices else "text"
        fields[action.dest] = {"kind": kind, "several": action.nargs == "*", "default": action.default}
    return fields


@pytest.mark.parametrize("script", options.SCRIPTS)
def test_a_form_made_of_the_parser_gives_back_its_defaults(script):
    parser = options.script_parser(script)
    words: list[str] = []
    for name, field in form_of(parser).items():
        value = field["default"]
        if value in (None, "", False):
            continue
        words += [f"--{name}", *([str(value)] if not field["several"] else value)]
    assert vars(parser.parse_args(words)) == {
        **vars(parser.parse_args([])),
        "lr_warmup_steps": 0.0,
        "lr_decay_steps": 0.0,
    }


def test_the_filters_fields_are_texts_in_every_form():
    from argparse import ArgumentParser

    parser = ArgumentParser()
    options.add_optimizer_arguments(parser)
    fields = form_of(parser)
    assert len(fields) == 16 + 3
    for name in grad_filter.SETTINGS:
        action = next(action for action in parser._actions if action.dest == name)
        assert fields[name]["kind"] == "text" and action.type is str and action.default is None


# -------------------------------------------------------------------------------------------- a run as they start it


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return make_tiles(tmp_path_factory.mktemp("data"))


def run(words: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(REPOSITORY / "train_network.py"), *words],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # front-ends merge the two
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def test_what_a_watching_program_reads(tiny_sd1_folder, data, tmp_path):
    """One pipe for both streams, an output that knows ASCII only, prompts in an empty file, names in two scripts."""
    (tmp_path / "prompt.txt").write_bytes(b"")
    words = arguments(
        {
            **RUN_OPTIONS,
            "pretrained_model_name_or_path": tiny_sd1_folder,
            "train_data_dir": data,
            "output_dir": tmp_path / "out 漢",
            "output_name": "ü 漢字",
            "max_train_steps": 4,
            "max_train_epochs": 2,
            "save_every_n_epochs": 1,
            "sample_prompts": tmp_path / "prompt.txt",
            "sample_every_n_epochs": 1,
            "grad_filter": "topk",
            "xformers": True,
            "sdpa": False,
        }
    )
    (tmp_path / "out 漢").mkdir()
    (tmp_path / "out 漢" / "ü 漢字.safetensors").write_bytes(b"an older result")
    done = run(words, tmp_path, PYTHONIOENCODING="ascii")
    text = done.stdout.decode("ascii")
    assert done.returncode == 0, text[-2000:]
    assert (tmp_path / "out 漢" / "ü 漢字.safetensors").stat().st_size > 1000
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", text)]
    assert [line for line in lines if re.match(r"epoch \d", line)] == ["epoch 1/2", "epoch 2/2"]
    bars = [line for line in lines if line.startswith("steps:")]
    assert re.search(r"^steps: +100%\|.*\| 12/12 \[.*avr_loss=\d", bars[-1])
    others = [line for line in lines if line not in bars]
    assert not [line for line in others if "steps:" in line or re.search(r".epoch \d+/\d+", line)]
    assert [line for line in others if re.search(r"saved: .*-000001\.safetensors$", line)]
    assert "Traceback" not in text and "prepare optimizer" in text


def test_the_output_of_a_pipe_is_utf8(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="cp1252"))
    monkeypatch.setattr(sys, "stderr", None)  # a process without a console
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)
    prepare_output()
    print("größe 漢 \udce6")
    assert raw.getvalue().decode("utf-8") == f"größe 漢 \\udce6{os.linesep}"  # there before anything is flushed


def test_a_closed_input_stops_nothing(tmp_path):
    code = "import os, runpy, sys; os.close(0); sys.stdin = None; sys.argv = ['x', '--help'];"
    code += f"runpy.run_path({str(REPOSITORY / 'train_network.py')!r}, run_name='__main__')"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.DEVNULL).returncode == 0


def test_nothing_asks_a_question():
    for path in [
        *REPOSITORY.glob("*.py"),
        *(REPOSITORY / "library").glob("*.py"),
        *(REPOSITORY / "networks").glob("*.py"),
    ]:
        assert not re.search(r"(?<![\w.])input\(|getpass", path.read_text(encoding="utf-8")), path.name


def test_a_wrong_setting_ends_before_a_model_is_loaded(tiny_sd1_folder, data, tmp_path):
    with pytest.raises(OptionError, match=r"keep"):
        train(
            pretrained_model_name_or_path=tiny_sd1_folder,
            train_data_dir=data,
            output_dir=tmp_path / "out",
            optimizer_args=["grad_filter=topk", "grad_filter.kep=0.1"],
        )
    assert not (tmp_path / "out").exists()


# ----------------------------------------------------------------------------------------------- other platforms


def test_data_travels_to_a_process_that_is_started_not_forked(tiny_sd1_folder, data):
    """Windows and macOS start workers from nothing: what they get is pickled."""
    import functools
    import pickle

    import torch

    from library.config_util import load_dataset_specs
    from library.dataset import BatchKey, TrainingData
    from library.model_families import SD
    from library.tokenizers import find_tokenizer

    words = ["--train_data_dir", str(data), "--resolution", "64", "--caption_extension", ".txt", "--flip_aug"]
    specs = load_dataset_specs(options.script_parser(SCRIPT).parse_args(words))
    training = TrainingData(specs, seed=1, bucket_divisor=64)
    training.tokenize = functools.partial(SD.tokenize, [find_tokenizer("sd1", tiny_sd1_folder)], max_token_length=None)
    again = pickle.loads(pickle.dumps(training))
    one, other = training[BatchKey(1, 0, 0)], again[BatchKey(1, 0, 0)]
    assert torch.equal(one["images"], other["images"]) and one["captions"] == other["captions"]
    assert torch.equal(one["input_ids_list"][0], other["input_ids_list"][0])


@pytest.mark.slow
def test_a_run_with_started_workers(tiny_sd1_folder, data, tmp_path):
    words = arguments(
        {
            **RUN_OPTIONS,
            "pretrained_model_name_or_path": tiny_sd1_folder,
            "train_data_dir": data,
            "output_dir": tmp_path / "out",
            "max_data_loader_n_workers": 1,
        }
    )
    (tmp_path / "start.py").write_text(
        "import multiprocessing, runpy, sys\n"
        "if __name__ == '__main__':\n"
        "    multiprocessing.set_start_method('spawn')\n"
        f"    sys.argv = ['train_network.py', *{words!r}]\n"
        f"    runpy.run_path({str(REPOSITORY / 'train_network.py')!r}, run_name='__main__')\n",
        encoding="utf-8",
    )
    subprocess.run([sys.executable, str(tmp_path / "start.py")], check=True, stdin=subprocess.DEVNULL, cwd=tmp_path)
    assert (tmp_path / "out" / "t.safetensors").is_file()


@pytest.mark.parametrize("path", sorted((REPOSITORY / "library").glob("*.py")), ids=lambda path: path.stem)
def test_text_files_are_opened_as_utf8(path):
    """The encoding of a locale is another one on every Windows; what only POSIX has is not used."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        modes = [arg.value for arg in node.args if isinstance(arg, ast.Constant)] if name == "open" else []
        if name in ("read_text", "write_text") or (name == "open" and any(mode in ("r", "w", "a") for mode in modes)):
            own = name == "write_text" and not isinstance(node.func, ast.Attribute)  # library.files', always UTF-8
            assert own or any(keyword.arg == "encoding" for keyword in node.keywords), f"{path.name}:{node.lineno}"
        assert name not in ("fork", "getuid", "killpg", "symlink", "mkfifo"), f"{path.name}:{node.lineno}"
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert not modules & {"fcntl", "resource", "pwd", "grp", "termios"}
