"""Copies of saved files on a hub, and states read back from one; an upload that fails or hangs cannot stop a run."""

from __future__ import annotations

import logging
import queue
import threading
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from library.errors import OptionError

log = logging.getLogger(__name__)

TRIES = 2
LIMIT_S = 600.0  # that a run waits for uploads
REPO_TYPES = ("model", "dataset", "space")


@dataclass(frozen=True)
class HubSettings:
    """Where copies go. ``background``: the run does not wait for them, but for the last model's."""

    repo_id: str
    repo_type: str | None
    folder: str | None
    private: bool
    states: bool
    background: bool
    token: str | None = field(repr=False)


def read_hub_settings(args: Namespace) -> HubSettings | None:
    """Read where copies go, None without ``--huggingface_repo_id``.

    Raises:
        OptionError: a name that no hub knows, or states without a repository.
    """
    if not args.huggingface_repo_id:
        if args.save_state_to_huggingface:
            raise OptionError(
                "--save_state_to_huggingface needs --huggingface_repo_id. Example: --huggingface_repo_id me/x"
            )
        return None
    if args.huggingface_repo_type not in (None, *REPO_TYPES):
        raise OptionError(f"--huggingface_repo_type {args.huggingface_repo_type}: known are {', '.join(REPO_TYPES)}")
    folder = args.huggingface_path_in_repo
    if folder and (PurePosixPath(folder).is_absolute() or ".." in PurePosixPath(folder).parts):
        raise OptionError(f"--huggingface_path_in_repo {folder}: give a folder inside the repository, such as loras")
    return HubSettings(
        repo_id=args.huggingface_repo_id,
        repo_type=args.huggingface_repo_type,
        folder=folder,
        private=args.huggingface_repo_visibility != "public",
        states=args.save_state_to_huggingface,
        background=args.async_upload,
        token=args.huggingface_token,
    )


def hub_api(token: str | None) -> Any:
    """Give the client of the hub; without a token it uses what the machine is logged in with."""
    from huggingface_hub import HfApi

    return HfApi(token=token)


class HubUploads:
    """Copies files and folders one after the other, in a thread that ends with the process.

    Args:
        settings: where to. api: of :func:`hub_api`. limit_s: seconds that the run waits for an upload, or at its end.
    """

    def __init__(self, settings: HubSettings, api: Any, limit_s: float = LIMIT_S):
        self.settings = settings
        self.failed = 0
        self._api = api
        self._limit_s = limit_s
        self._jobs: queue.Queue[tuple[Path, threading.Event]] = queue.Queue()
        self._waiting: list[threading.Event] = []
        self._repository_made = False
        self._hangs = False
        threading.Thread(target=self._work, daemon=True, name="hub uploads").start()

    def upload(self, path: Path, wait: bool) -> None:
        """Copy a finished file or folder; with ``wait`` return when it is there, has failed, or takes too long."""
        if self._hangs:
            self.failed += 1
            return
        done = threading.Event()
        self._waiting.append(done)
        self._jobs.put((path, done))
        if wait:
            self._wait_for(done, path.name)

    def close(self) -> None:
        """Wait for what is under way, and say how many copies there are not."""
        for done in self._waiting:
            if self._hangs:
                break
            self._wait_for(done, "an earlier file")
        unfinished = sum(not done.is_set() for done in self._waiting)
        if self.failed + unfinished:
            log.warning(
                "%d uploads to %s are missing: the files themselves are complete in the output folder",
                self.failed + unfinished,
                self.settings.repo_id,
            )

    def _wait_for(self, done: threading.Event, name: str) -> None:
        if not done.wait(self._limit_s):
            self._hangs = True
            log.warning("upload of %s takes more than %g s: the run goes on, nothing more is sent", name, self._limit_s)

    def _work(self) -> None:
        while True:
            path, done = self._jobs.get()
            error: Exception | None = None
            for _ in range(TRIES):
                error = self._try(path)
                if error is None:
                    log.info("uploaded %s to %s", path.name, self.settings.repo_id)
                    break
            if error is not None:
                self.failed += 1
                log.warning("upload of %s failed: %s: %s", path.name, type(error).__name__, self._without_token(error))
            done.set()

    def _try(self, path: Path) -> Exception | None:
        place = {"repo_id": self.settings.repo_id, "repo_type": self.settings.repo_type}
        target = "/".join(filter(None, ((self.settings.folder or "").strip("/"), path.name)))
        try:
            if not self._repository_made:
                self._api.create_repo(**place, private=self.settings.private, exist_ok=True)
                self._repository_made = True
            if path.is_dir():
                self._api.upload_folder(folder_path=str(path), path_in_repo=target, **place)
            else:
                self._api.upload_file(path_or_fileobj=str(path), path_in_repo=target, **place)
        except Exception as error:  # networks and hubs fail in every way; the training is what counts
            return error
        return None

    def _without_token(self, error: Exception) -> str:
        line = " ".join(str(error).split())
        return (line.replace(self.settings.token, "***") if self.settings.token else line)[:200]


def copies_to(uploads: HubUploads | None, final_model: Path) -> Callable[[Path, bool], None]:
    """Give what is called with (path, whether it is a state) after each save."""

    def saved(path: Path, is_state: bool) -> None:
        if uploads is not None and (uploads.settings.states or not is_state) and path.exists():
            uploads.upload(path, wait=not uploads.settings.background or path == final_model)

    return saved


def download_state(address: str, token: str | None, api: Any = None) -> Path:
    """Fetch a state from a hub into its local cache.

    Args:
        address: ``owner/repo/path[:revision[:repo_type]]``. token: access token, None for the machine's own.

    Returns:
        The folder that holds the state.

    Raises:
        OptionError: the address is none, or the state cannot be had.
    """
    where, *rest = address.split(":")
    owner, _, inside = where.partition("/")
    repository, _, path = inside.partition("/")
    revision = rest[0] if rest else None
    repo_type = (rest[1] if len(rest) > 1 else "model") if rest else None
    if not (owner and repository and path) or len(rest) > 2:
        raise OptionError(
            f"--resume {address}: with --resume_from_huggingface give owner/repository/path[:revision[:repo_type]]"
        )
    place = {"repo_id": f"{owner}/{repository}", "revision": revision, "repo_type": repo_type}
    api = hub_api(token) if api is None else api
    try:
        names = [name for name in api.list_repo_files(**place) if name.startswith(f"{path.rstrip('/')}/")]
        files = [Path(api.hf_hub_download(filename=name, **place)) for name in names]
    except Exception as error:  # networks and hubs fail in every way
        reason = " ".join(str(error).split()).replace(token or "\0", "***")[:150]
        raise OptionError(
            f"--resume {address}: cannot be fetched ({type(error).__name__}: {reason}). Check the address, the token "
            f"and the network, or download the folder and give it with --resume"
        ) from error
    if not files:
        raise OptionError(f"--resume {address}: {place['repo_id']} has no files below {path}. Check the path")
    depth = len(PurePosixPath(names[0]).parts) - len(PurePosixPath(path).parts)
    return files[0].parents[depth - 1]
