"""Log lines of a run: set up once by a script, never at import."""

from __future__ import annotations

import logging
import sys


def setup_logging(level: str | None = None, file: str | None = None) -> None:
    """Send log records to stderr, or to a file in UTF-8, one line an event.

    Args:
        level: name of the lowest level shown, as in ``logging``; None means INFO.
        file: path of a log file to append to instead of stderr.
    """
    handler: logging.Handler = (
        logging.FileHandler(file, encoding="utf-8") if file else logging.StreamHandler(sys.stderr)
    )
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level or "INFO")
