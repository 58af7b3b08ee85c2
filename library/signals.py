"""Ctrl-C and SIGTERM: the first one asks a run to end after its step, a second one ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS_TOGETHER_S = 5.0  # a launcher hands on to its processes what a terminal or job system sent to them already
NAMES = ("SIGINT", "SIGTERM", "SIGBREAK")  # the last one exists on Windows only


class StopRequest:
    """Notes the first signal while the block runs; outside the block signals do what they did before.

    Args:
        together_s: further signals within this many seconds count as the first one. now: clock, in seconds.

    Attributes:
        number: of the signal that came, 0 while none has.
    """

    def __init__(self, together_s: float = 0.0, now: Callable[[], float] = time.monotonic) -> None:
        self.number = 0
        self._together_s, self._now, self._came = together_s, now, 0.0
        self._before: dict[int, Any] = {}

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name if self.number else ""

    @property
    def status(self) -> int:
        """Exit status that says which signal it was: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.number

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # nowhere else are handlers allowed
            for number in (getattr(signal, name) for name in NAMES if hasattr(signal, name)):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.number and self._now() - self._came >= self._together_s:
            os._exit(128 + number)
        if self.number:
            return
        self.number, self._came = number, self._now()
        text = f"\n{self.name}: the run ends after this step. Once more ends it at once, without saving\n"
        os.write(2, text.encode())  # not through logging: its lock may be held right now


def leave_signals_to_the_run(_: int) -> None:
    """Let a loader process ignore what a terminal or a job system sends to all processes: the run ends it itself."""
    for number in (getattr(signal, name) for name in NAMES if hasattr(signal, name)):
        signal.signal(number, signal.SIG_IGN)
