"""Device, precision and trackers: what accelerate is asked for, and how scalars leave the run."""

from __future__ import annotations

import datetime
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from library.errors import OptionError
from library.processes import processes_of_launcher

log = logging.getLogger(__name__)

DDP_TIMEOUT_MIN = 30  # of --ddp_timeout, the same for every kind of device
DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class LogSettings:
    """Where scalars go.

    Attributes:
        folder: parent of the run's log folder, None switches logging off. prefix: put before the time stamp.
        tracker_name: last folder level and name shown by the tracker. config: arguments to log, or None.
        tracker_arguments: keyword arguments for the tracker's start, by tracker name.
    """

    folder: Path | None
    prefix: str = ""
    tracker_name: str = "network_train"
    config: dict[str, Any] | None = None
    tracker_arguments: dict[str, Any] | None = None


def check_precision(mixed_precision: str, full_precision: str | None) -> None:
    """Refuse precisions this machine cannot train in.

    Args:
        mixed_precision: ``no``, ``fp16`` or ``bf16``. full_precision: the same when trained weights are kept in it.

    Raises:
        OptionError: fp16 without a GPU, or full precision in another dtype than mixed precision.
    """
    if mixed_precision == "fp16" and not torch.cuda.is_available():
        raise OptionError("--mixed_precision fp16 needs a GPU, none is found here. Use --mixed_precision bf16 or no")
    if full_precision is not None and full_precision != mixed_precision:
        raise OptionError(
            f"--full_{full_precision} needs --mixed_precision {full_precision}, got {mixed_precision}. "
            f"Add --mixed_precision {full_precision}"
        )


def build_accelerator(
    mixed_precision: str,
    logs: LogSettings,
    *,
    ddp_timeout_min: int | None = None,
    ddp_gradient_as_bucket_view: bool = False,
    ddp_static_graph: bool = False,
) -> Any:
    """Build the Accelerator; it never handles accumulation, the loop counts micro-batches itself.

    Several processes without a GPU talk through gloo, which accelerate chooses only when told that they use the CPU.

    Returns:
        accelerate.Accelerator, its tracker folder chosen but no tracker started.

    Raises:
        OptionError: the launcher started several processes and they do not find each other.
    """
    from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs

    started = processes_of_launcher()
    timeout = datetime.timedelta(minutes=ddp_timeout_min or DDP_TIMEOUT_MIN)
    handlers: list[Any] = [InitProcessGroupKwargs(timeout=timeout)]
    if ddp_gradient_as_bucket_view or ddp_static_graph:
        handlers.append(
            DistributedDataParallelKwargs(
                gradient_as_bucket_view=ddp_gradient_as_bucket_view, static_graph=ddp_static_graph
            )
        )
    run_folder = None
    if logs.folder is not None:
        run_folder = logs.folder / f"{logs.prefix}{datetime.datetime.now():%Y%m%d%H%M%S}"
    accelerator = Accelerator(
        mixed_precision=mixed_precision,
        log_with="tensorboard" if logs.folder is not None else None,
        project_dir=run_folder,
        kwargs_handlers=handlers,
        cpu=started > 1 and not _has_gpu(),
    )
    if accelerator.num_processes < started:
        raise OptionError(
            f"the launcher started {started} processes, {accelerator.num_processes} of them found each other. "
            f"Start them as docs/distributed.md shows"
        )
    return accelerator


def _has_gpu() -> bool:
    return torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available())


def allow_half_gradients(accelerator: Any) -> None:
    """Let the loss scaler unscale float16 gradients, which torch refuses; trained weights in float16 have no others."""
    scaler = accelerator.scaler
    if scaler is None:
        return
    unscale = scaler._unscale_grads_

    def unscale_half_too(optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        return unscale(optimizer, inv_scale, found_inf, True)

    scaler._unscale_grads_ = unscale_half_too


class ScalarLog:
    """Scalars on their way to the trackers; a tracker that fails is switched off, the run goes on.

    Args:
        accelerator: holds the trackers. logs: where to.
    """

    def __init__(self, accelerator: Any, logs: LogSettings):
        self._accelerator = accelerator
        self._on = logs.folder is not None
        if self._on:
            config = {
                key: value for key, value in (logs.config or {}).items() if isinstance(value, (int, float, str, bool))
            }
            self._guarded(
                lambda: accelerator.init_trackers(
                    logs.tracker_name, config=config or None, init_kwargs=logs.tracker_arguments or {}
                )
            )

    @property
    def folder(self) -> Path | None:
        """Folder of this run's log files, None when logging is off."""
        return Path(self._accelerator.project_dir) if self._on else None

    def write(self, scalars: dict[str, float], step: int) -> None:
        """Send scalars for position ``step`` of their x-axis."""
        if self._on and scalars:
            self._guarded(lambda: self._accelerator.log(scalars, step=step))

    def close(self) -> None:
        """Flush and close the trackers."""
        if self._on:
            self._guarded(self._accelerator.end_training)

    def _guarded(self, action: Any) -> None:
        try:
            action()
        except Exception as error:  # a tracker may raise anything; it must not end a run
            self._on = False
            log.warning("logging is switched off for the rest of the run: %s: %s", type(error).__name__, error)
