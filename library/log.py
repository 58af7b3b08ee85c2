"""Log lines and output of a run: set up once by a script, never at import."""

from __future__ import annotations

import logging
import os
import sys
from argparse import Namespace
from typing import Any

from library.errors import process_prefix


class LinesBesideBars(logging.StreamHandler):
    """Gives every record a line of its own, also while a progress bar stands on the last line."""

    def emit(self, record: logging.LogRecord) -> None:
        bars = sys.modules.get("tqdm")
        if bars is None:
            return super().emit(record)
        with bars.tqdm.external_write_mode(file=self.stream):
            super().emit(record)


def setup_logging(level: str | None = None, file: str | None = None) -> None:
    """Send log records to stderr, or to a file in UTF-8, one line an event.

    Of several processes the first one tells what goes on; the others warn only, and say who they are.

    Args:
        level: name of the lowest level shown, as in ``logging``; None means INFO.
        file: path of a log file to append to instead of stderr.
    """
    handler: logging.Handler = logging.FileHandler(file, encoding="utf-8") if file else LinesBesideBars(sys.stderr)
    who = process_prefix()
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {who}%(message)s", datefmt="%H:%M:%S"))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level or ("WARNING" if who else "INFO"))


def setup_logging_once(args: Namespace | None = None, log_level: str | None = None, reset: bool = False) -> None:
    """Set logging up as other programs ask for it; a process that has handlers keeps them unless ``reset``."""
    if reset or not logging.getLogger().handlers:
        setup_logging(log_level or getattr(args, "console_log_level", None), getattr(args, "console_log_file", None))


def prepare_output() -> None:
    """Make stdout and stderr followable through a pipe: a line at a time, UTF-8, and no character that ends a run.

    A terminal, and a process whose user set PYTHONIOENCODING, keep their encoding.
    """
    for stream in (sys.stdout, sys.stderr):
        if not hasattr(stream, "reconfigure"):  # None without a console, or another program's replacement
            continue
        choices: dict[str, Any] = {"errors": "backslashreplace", "line_buffering": True}
        if not stream.isatty() and "PYTHONIOENCODING" not in os.environ:
            choices["encoding"] = "utf-8"
        stream.reconfigure(**choices)
