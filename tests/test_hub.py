"""Uploads to a hub that fails in every way, and states read back from one."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

import library.hub
from library.errors import OptionError
from library.hub import HubSettings, HubUploads, download_state
from tests.test_train_network import metadata_of
from tests.training import first_difference, make_tiles, read_state, train

TOKEN = "hf_secretOfTheUser0123456789"


class Hub:
    """A hub in a folder, in HfApi's words. ``fails`` names what raises, ``hangs`` what never returns."""

    def __init__(self, folder: Path, fails: tuple[str, ...] = (), hangs: tuple[str, ...] = (), error=None):
        self.folder, self.fails, self.hangs = folder, fails, hangs
        self.error = error or ConnectionError(f"500 from the hub for {TOKEN}\nand more")
        self.calls: list[str] = []
        self.made: dict = {}
        self.threads: list[str] = []

    def _called(self, name: str) -> None:
        self.calls.append(name)
        self.threads.append(threading.current_thread().name)
        if name in self.hangs:
            threading.Event().wait()
        if name in self.fails:
            raise self.error

    def create_repo(self, repo_id, repo_type, private, exist_ok):
        self._called("create_repo")
        self.made = {"repo_id": repo_id, "repo_type": repo_type, "private": private}

    def upload_file(self, path_or_fileobj, path_in_repo, repo_id, repo_type):
        self._called("upload_file")
        (self.folder / path_in_repo).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path_or_fileobj, self.folder / path_in_repo)

    def upload_folder(self, folder_path, path_in_repo, repo_id, repo_type):
        self._called("upload_folder")
        shutil.copytree(folder_path, self.folder / path_in_repo)

    def list_repo_files(self, repo_id, revision, repo_type):
        self._called("list_repo_files")
        self.asked = (repo_id, revision, repo_type)
        return sorted(path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file())

    def hf_hub_download(self, filename, repo_id, revision, repo_type):
        self._called("hf_hub_download")
        return str(self.folder / filename)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Give a function that puts a hub in the place of the real one."""

    def put(**how) -> Hub:
        made = Hub(tmp_path / "hub", **how)
        monkeypatch.setattr("library.trainer.hub_api", lambda token: made)
        monkeypatch.setattr(library.hub, "hub_api", lambda token: made)
        monkeypatch.setattr(HubUploads.__init__, "__defaults__", (1.0,))
        return made

    return put


@pytest.fixture
def options(tiny_sd1_folder, tmp_path):
    return {
        "pretrained_model_name_or_path": tiny_sd1_folder,
        "train_data_dir": make_tiles(tmp_path / "data", count=2, repeats=1),
        "output_dir": tmp_path / "out",
        "max_train_steps": 2,
        "save_every_n_steps": 1,
        "save_state": True,
    }


ASKED = {"huggingface_repo_id": "me/mine", "huggingface_token": TOKEN}


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("states", [False, True])
def test_every_saved_file_is_copied(states, in_background, hub, options, tmp_path):
    made = hub()
    more = {"huggingface_path_in_repo": "loras", "save_state_to_huggingface": states, "async_upload": in_background}
    train(**options, **ASKED, **more)
    saved = {path.name for path in (tmp_path / "out").iterdir()}
    copied = {path.name for path in (tmp_path / "hub" / "loras").iterdir()}
    assert copied == {name for name in saved if states or name.endswith(".safetensors")}
    assert (tmp_path / "hub" / "loras" / "t.safetensors").read_bytes() == (
        tmp_path / "out" / "t.safetensors"
    ).read_bytes()
    assert made.made == {"repo_id": "me/mine", "repo_type": None, "private": True}
    assert made.calls.count("create_repo") == 1


@pytest.mark.parametrize("visibility,private", [(None, True), ("public", False), ("Public", True), ("private", True)])
def test_only_public_is_public(visibility, private, hub, options):
    made = hub()
    train(**{**options, "save_state": False}, **ASKED, huggingface_repo_visibility=visibility)
    assert made.made["private"] is private


FAULTS = [
    {"fails": ("create_repo",)},
    {"fails": ("upload_file",)},
    {"fails": ("upload_folder",)},
    {"fails": ("create_repo",), "error": PermissionError("403 quota reached")},
    {"fails": ("upload_file",), "error": OSError(28, "No space left on device")},
    {"hangs": ("create_repo",)},
    {"hangs": ("upload_file",)},
    {"hangs": ("upload_folder",)},
]


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_B75_a_hub_that_fails_in_any_way_is_a_line_and_the_run_is_the_same(
    fault, in_background, hub, options, tmp_path, caplog
):
    hub(**fault)
    train(**options, **ASKED, save_state_to_huggingface=True, async_upload=in_background)
    train(**{**options, "output_dir": tmp_path / "plain"})
    states = [read_state(tmp_path / name / "t-state") for name in ("out", "plain")]
    assert first_difference(*states) is None
    names = [{path.name for path in (tmp_path / name).iterdir()} for name in ("out", "plain")]
    assert names[0] == names[1]
    lines = [r.getMessage() for r in caplog.records if r.name == "library.hub" and r.levelname == "WARNING"]
    assert any("failed" in line or "takes more than" in line for line in lines)
    assert "are missing" in lines[-1] and all("\n" not in line for line in lines)
    if "hangs" in fault:
        assert sum("takes more than" in line for line in lines) == 1  # it is waited for once


def test_a_failed_upload_is_tried_once_more(hub, tmp_path):
    made = hub(fails=("upload_file",))
    uploads = HubUploads(HubSettings("me/mine", None, None, True, False, False, TOKEN), made)
    (tmp_path / "a.txt").write_text("x", encoding="utf-8")
    uploads.upload(tmp_path / "a.txt", wait=True)
    assert made.calls == ["create_repo", "upload_file", "upload_file"] and uploads.failed == 1
    made.fails = ()
    uploads.upload(tmp_path / "a.txt", wait=True)
    assert (tmp_path / "hub" / "a.txt").read_text(encoding="utf-8") == "x"


def test_the_token_is_in_no_file_and_no_log(hub, options, tmp_path, caplog):
    hub(fails=("upload_file",))
    caplog.set_level("DEBUG")
    more = {"log_config": True, "logging_dir": tmp_path / "logs"}
    train(**options, **ASKED, **more, save_state_to_huggingface=True)
    assert TOKEN not in caplog.text and "***" in caplog.text
    assert TOKEN not in str(metadata_of(tmp_path / "out" / "t.safetensors"))
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or TOKEN.encode() not in path.read_bytes(), path
    assert TOKEN not in repr(HubSettings("a/b", None, None, True, False, False, TOKEN))


@pytest.mark.parametrize(
    "more,match",
    [
        ({**ASKED, "huggingface_repo_type": "modle"}, "known are model"),
        ({**ASKED, "huggingface_path_in_repo": "../other"}, "inside the repository"),
        ({"save_state_to_huggingface": True}, "needs --huggingface_repo_id"),
    ],
)
def test_wrong_names_are_refused_before_anything_is_loaded(more, match, hub, options):
    hub()
    with pytest.raises(OptionError, match=match):
        train(**options, **more)


# ---------------------------------------------------------------------------------------------------------- resume


def test_a_state_on_a_hub_goes_on_to_the_same_bits(hub, options, tmp_path):
    made = hub()
    train(**options, **ASKED, save_state_to_huggingface=True, huggingface_path_in_repo="runs")
    address = "me/mine/runs/t-step00000001-state:main"
    resumed = {**options, "output_dir": tmp_path / "again", "resume": address, "resume_from_huggingface": True}
    train(**resumed, huggingface_token=TOKEN)
    assert made.asked == ("me/mine", "main", "model")
    states = [read_state(tmp_path / name / "t-state") for name in ("out", "again")]
    assert first_difference(*states) is None


@pytest.mark.parametrize(
    "address,expected",
    [
        ("me/mine/s", ("me/mine", None, None)),
        ("me/mine/s:v1", ("me/mine", "v1", "model")),
        ("me/mine/s:v1:dataset", ("me/mine", "v1", "dataset")),
    ],
)
def test_addresses_are_read_as_the_reference_reads_them(address, expected, tmp_path):
    made = Hub(tmp_path)
    (tmp_path / "s" / "deep").mkdir(parents=True)
    (tmp_path / "s2").mkdir()
    for name in ("s/a", "s/deep/b", "s2/c"):
        (tmp_path / name).write_text("x", encoding="utf-8")
    assert download_state(address, None, made) == tmp_path / "s"
    assert made.asked == expected and made.calls.count("hf_hub_download") == 2


@pytest.mark.parametrize("address", ["me/mine", "x", "me/mine/nothing", "me//s", "a/b/c:d:e:f"])
@pytest.mark.parametrize("fails", [(), ("list_repo_files",), ("hf_hub_download",)])
def test_a_state_that_cannot_be_had_is_one_line_without_the_token(address, fails, tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "a").write_text("x", encoding="utf-8")
    address = "me/mine/s" if fails == ("hf_hub_download",) else address
    with pytest.raises(OptionError, match="--resume") as error:
        download_state(address, TOKEN, Hub(tmp_path, fails=fails))
    assert TOKEN not in str(error.value) and "\n" not in str(error.value)
