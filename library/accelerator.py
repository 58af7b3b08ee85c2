"""Device and precision: what accelerate is asked for."""

from __future__ import annotations

import datetime
import logging
from typing import Any

import torch

from library.errors import OptionError
from library.processes import processes_of_launcher
from library.trackers import LogSettings

log = logging.getLogger(__name__)

DDP_TIMEOUT_MIN = 30  # of --ddp_timeout, the same for every kind of device
DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


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
        log_with=list(logs.trackers) or None,
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
