"""What a person watching a run sees: the bar, the epoch lines, the averaged loss."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any


class LossAverage:
    """Mean of the last recorded loss of every position in the epoch.

    In the first epoch the list grows; later epochs replace the entry of the same position. A resumed run starts with
    the saved list, so steps that were not run never count.

    Args:
        losses: entries of an earlier process, by position.
    """

    def __init__(self, losses: Sequence[float] = ()):
        self.losses = list(losses)

    def add(self, position: int, loss: float) -> None:
        """Record the loss of one batch at its 0-based position in the epoch."""
        if position < len(self.losses):
            self.losses[position] = loss
        else:
            self.losses.append(loss)

    @property
    def mean(self) -> float:
        return math.fsum(self.losses) / len(self.losses) if self.losses else 0.0  # fsum: same after a resume


class Progress:
    """The bar ``steps: ..%`` and the lines ``epoch N/M`` that front-ends read.

    Args:
        total: optimizer steps of the whole run. done: steps already behind. shown: False on all but one process.
    """

    def __init__(self, total: int, done: int, shown: bool):
        from tqdm import tqdm

        self._shown = shown
        self._bar: Any = tqdm(
            total=total, initial=done, desc="steps", disable=not shown, dynamic_ncols=sys.stderr.isatty(), smoothing=0
        )

    def epoch(self, number: int, of: int) -> None:
        """Print the line that opens an epoch."""
        if self._shown:
            self._bar.clear()
            print(f"\nepoch {number}/{of}", flush=True)

    def step(self, average_loss: float, extra: dict[str, Any] | None = None) -> None:
        """Advance the bar by one optimizer step."""
        self._bar.set_postfix({"avr_loss": f"{average_loss:.4g}", **(extra or {})}, refresh=False)
        self._bar.update(1)

    def close(self) -> None:
        self._bar.close()
