"""Scalars on their way out of a run, to TensorBoard files and to wandb; a tracker that fails cannot stop the run."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from library.errors import OptionError
from library.settings import logged_options

log = logging.getLogger(__name__)

WANDB_HOST = "api.wandb.ai"


@dataclass(frozen=True)
class LogSettings:
    """Where scalars go.

    Attributes:
        trackers: names accelerate knows, none of them switches logging off.
        folder: parent of the run's log folder, None without one. prefix: put before the time stamp.
        tracker_name: last folder level and name shown by the tracker. config: arguments to log, or None.
        tracker_arguments: keyword arguments for the tracker's start, by tracker name. api_key: of wandb.
    """

    trackers: tuple[str, ...] = ()
    folder: Path | None = None
    prefix: str = ""
    tracker_name: str = "network_train"
    config: dict[str, Any] | None = None
    tracker_arguments: dict[str, Any] = field(default_factory=dict)
    api_key: str | None = field(default=None, repr=False)


def trackers_of(log_with: str | None, logging_dir: str | None) -> tuple[str, ...]:
    """Give the names of the trackers that the options ask for."""
    if log_with is None:
        return ("tensorboard",) if logging_dir else ()
    return ("tensorboard", "wandb") if log_with == "all" else (log_with,)


def read_log_settings(args: Namespace, tracker_name: str) -> LogSettings:
    """Read where scalars go.

    Raises:
        OptionError: a tracker's package or folder is missing, or its configuration cannot be read.
    """
    trackers = trackers_of(args.log_with, args.logging_dir)
    if "tensorboard" in trackers and not args.logging_dir:
        raise OptionError(f"--log_with {args.log_with} needs --logging_dir. Example: --logging_dir logs")
    if "wandb" in trackers and importlib.util.find_spec("wandb") is None:
        raise OptionError(f"--log_with {args.log_with} needs the package wandb. Install it: pip install wandb")
    arguments: dict[str, Any] = {"wandb": {"name": args.wandb_run_name}} if args.wandb_run_name else {}
    if args.log_tracker_config:
        arguments = _read_tracker_config(Path(args.log_tracker_config))
    return LogSettings(
        trackers=trackers,
        folder=Path(args.logging_dir) if args.logging_dir else None,
        prefix=args.log_prefix or "",
        tracker_name=args.log_tracker_name or tracker_name,
        config=logged_options(args),
        tracker_arguments=arguments,
        api_key=args.wandb_api_key,
    )


def _read_tracker_config(path: Path) -> dict[str, Any]:
    import toml

    try:
        content = toml.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise OptionError(f"--log_tracker_config {path}: {error.strerror}. Give a TOML file") from error
    except (ValueError, IndexError, TypeError, KeyError) as error:  # toml leaks what its parser stumbles over
        raise OptionError(f"--log_tracker_config {path}: no valid TOML ({str(error)[:100]})") from error
    if not all(isinstance(table, dict) for table in content.values()):
        raise OptionError(f"--log_tracker_config {path}: a table for each tracker is needed. Example: [wandb]")
    return content


def hide_secrets(words: list[str], options: tuple[str, ...] = ("--wandb_api_key", "--huggingface_token")) -> list[str]:
    """Give a command line without its secrets, as trackers record it."""
    hidden = list(words)
    for place, word in enumerate(words):
        name, has_value, _ = word.partition("=")
        if len(name) > 5 and any(option.startswith(name) for option in options):  # abbreviations are allowed
            if has_value:
                hidden[place] = f"{name}=***"
            elif place + 1 < len(words):
                hidden[place + 1] = "***"
    return hidden


class ScalarLog:
    """Scalars on their way to the trackers; a tracker that fails is switched off, the run goes on.

    Args:
        accelerator: knows the log folder and starts the trackers. settings: which, and what they are told.
    """

    def __init__(self, accelerator: Any, settings: LogSettings):
        self._accelerator = accelerator
        self._trackers: dict[str, Any] = {}
        if not settings.trackers or not accelerator.is_main_process:
            return
        config = {key: value for key, value in (settings.config or {}).items() if isinstance(value, (int, float, str))}
        for name in settings.trackers:
            self._guarded(name, lambda name=name: self._start(name, settings, config))
        accelerator.trackers = list(self._trackers.values())

    def _start(self, name: str, settings: LogSettings, config: dict[str, Any]) -> None:
        arguments = {key: dict(value) for key, value in settings.tracker_arguments.items() if key == name}
        if name == "wandb":
            self._prepare_wandb(settings.api_key, arguments.setdefault(name, {}))
        accelerator = self._accelerator
        asked, accelerator.log_with = accelerator.log_with, [name]
        accelerator.trackers = []  # it would start and describe those it holds once more
        try:
            accelerator.init_trackers(settings.tracker_name, config=config or None, init_kwargs=arguments)
            self._trackers[name] = accelerator.get_tracker(name)
        finally:
            accelerator.log_with = asked

    def _prepare_wandb(self, api_key: str | None, arguments: dict[str, Any]) -> None:
        """Tell wandb its key through the environment, which no file holds; without one it must not ask for it."""
        if api_key:
            os.environ["WANDB_API_KEY"] = api_key
        elif not (os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") or _key_in_netrc()):
            os.environ["WANDB_MODE"] = "offline"
            log.warning("--log_with wandb without a key: the run is recorded offline. Send it later with 'wandb sync'")
        sys.argv[1:] = hide_secrets(sys.argv[1:])  # wandb records the command line
        if self._accelerator.project_dir:
            folder = Path(self._accelerator.project_dir)
            folder.mkdir(parents=True, exist_ok=True)
            arguments.setdefault("dir", str(folder))

    def write(self, scalars: dict[str, float], step: int, row: dict[str, int] | None = None) -> None:
        """Send scalars for position ``step`` of their x-axis; trackers that have rows get ``row`` beside them."""
        if not scalars:
            return
        for name, tracker in list(self._trackers.items()):
            if name == "wandb":
                self._guarded(name, lambda tracker=tracker: tracker.log({**scalars, **(row or {})}))
            else:
                self._guarded(name, lambda tracker=tracker: tracker.log(scalars, step=step))

    def show_sample(self, index: int, path: Path, caption: str) -> None:
        """Send a sample image to trackers that show pictures."""
        tracker = self._trackers.get("wandb")
        if tracker is not None:
            self._guarded("wandb", lambda: _log_picture(tracker, f"sample_{index}", path, caption))

    def close(self) -> None:
        """Flush and close the trackers."""
        for name, tracker in list(self._trackers.items()):
            self._guarded(name, tracker.finish)

    def _guarded(self, name: str, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # a tracker may raise anything; it must not end a run
            self._trackers.pop(name, None)
            log.warning(
                "logging with %s is switched off for the rest of the run: %s: %s",
                name,
                type(error).__name__,
                str(error)[:200],
            )


def _log_picture(tracker: Any, name: str, path: Path, caption: str) -> None:
    import wandb

    tracker.log({name: wandb.Image(str(path), caption=caption)}, commit=False)


def _key_in_netrc() -> bool:
    import netrc

    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(WANDB_HOST) is not None
    except (OSError, netrc.NetrcParseError):
        return False
