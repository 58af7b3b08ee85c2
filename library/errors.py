"""What a user's mistake looks like: one line that names the option or file and the way out, exit status 2."""

from __future__ import annotations

import difflib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

USER_ERROR_STATUS = 2
RUN_STOPPED_STATUS = 1
INTERRUPTED_STATUS = 130


class OptionError(ValueError):
    """A mistake of the user: the text is one line naming the option or file, the value and what to type instead."""


class OptionErrors(OptionError):
    """Several mistakes found in one look at the options.

    Args:
        messages: one line for each mistake, in the order found.
    """

    def __init__(self, messages: list[str]):
        self.messages = messages
        super().__init__("\n".join(messages))


class RunStopped(RuntimeError):
    """A run that had to end before its last step, told in one line; everything saved until then stays usable.

    Args:
        message: the line. status: exit status of the process.
    """

    def __init__(self, message: str, status: int = RUN_STOPPED_STATUS):
        super().__init__(message)
        self.status = status


class ErrorCollector:
    """Runs checks one after the other and keeps what they complain about."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    @contextmanager
    def check(self) -> Iterator[None]:
        """Turn an OptionError raised inside the block into one more collected message."""
        try:
            yield
        except OptionErrors as errors:
            self.messages.extend(errors.messages)
        except OptionError as error:
            self.messages.append(str(error))

    def raise_if_any(self) -> None:
        """Raise everything collected so far as one error; nothing collected, nothing raised."""
        if len(self.messages) == 1:
            raise OptionError(self.messages[0])
        if self.messages:
            raise OptionErrors(self.messages)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Give `` Did you mean 'x'?`` for the nearest known name, or an empty text when none is near."""
    by_lower_case = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), by_lower_case, n=1, cutoff=0.6)
    return f" Did you mean {by_lower_case[near[0]]!r}?" if near else ""


def process_prefix() -> str:
    """Give ``process N: `` in all processes of a run but the first, which a launcher told their numbers."""
    rank = os.environ.get("RANK", "0")
    return "" if rank == "0" else f"process {rank}: "


def run_script(main: Callable[[], None]) -> None:
    """Run a script's main function and turn what a person can act on into lines on stderr and an exit status.

    A mistake of the user gives status 2, a run that had to stop 1, Ctrl-C 130 and SIGTERM 143; anything else keeps its
    traceback.
    """
    try:
        main()
    except RunStopped as stopped:
        print(f"error: {process_prefix()}{stopped}", file=sys.stderr)
        sys.exit(stopped.status)
    except KeyboardInterrupt:
        print("error: stopped by the keyboard. Complete states and models saved so far can be used", file=sys.stderr)
        sys.exit(INTERRUPTED_STATUS)
    except ValueError as error:
        if not (isinstance(error, OptionError) or type(error).__name__ == "GradFilterError"):
            raise
        logging.getLogger(__name__).debug("the mistake was found here", exc_info=True)
        for line in str(error).splitlines():
            print(f"error: {process_prefix()}{line}", file=sys.stderr)
        sys.exit(USER_ERROR_STATUS)
