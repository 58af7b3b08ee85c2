"""Starting the processes of a run where the launcher did not."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence

from library.errors import OptionError, RunStopped

STARTED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
WAY_OUT = "Use torchrun --nproc_per_node N, or accelerate launch --multi_gpu --num_processes N; see docs/distributed.md"


def processes_forgotten(environment: Mapping[str, str]) -> bool:
    """Say whether ``accelerate launch --cpu --num_processes N`` started this process: it starts one for any N.

    An address to meet at is what tells that N is more than one.
    """
    on_cpu = environment.get("ACCELERATE_USE_CPU", "").lower() == "true"
    return on_cpu and "MASTER_ADDR" in environment and not any(name in environment for name in STARTED)


def number_asked_for(command: Sequence[str]) -> int:
    """Give N of an ``accelerate launch`` command line, or of the configuration file that it reads.

    Raises:
        OptionError: it cannot be told, or is spread over machines.
    """
    from accelerate.commands.config import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    if "launch" not in command:
        raise OptionError(f"accelerate launch --cpu started one process of several. {WAY_OUT}")
    asked, _ = launch_command_parser().parse_known_args(command[command.index("launch") + 1 :])
    number = asked.num_processes
    if number is None and asked.config_file is not None:
        number = load_config_from_file(asked.config_file).num_processes
    if number is None or (asked.num_machines or 1) > 1:
        raise OptionError(f"accelerate launch --cpu started one process of several. {WAY_OUT}")
    return number


def with_its_processes(main: Callable[[], None]) -> Callable[[], None]:
    """Give what a script runs: its main function, or as many processes of the script as were asked for."""

    def start() -> None:
        if not processes_forgotten(os.environ):
            main()
            return _leave_the_others()
        import psutil

        parent = psutil.Process().parent()
        _start(number_asked_for(parent.cmdline() if parent else []))

    return start


def _leave_the_others() -> None:
    distributed = sys.modules.get("torch.distributed")  # where nobody imported torch there are no others
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _start(number: int) -> None:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name)
    words = ["--standalone", "--nproc_per_node", str(number), *sys.argv]
    try:
        run.main(words)
    except ChildFailedError as error:
        status = error.get_first_failure()[1].exitcode
        raise RunStopped(f"a process of {number} ended with status {status}, see its lines", abs(status)) from error
    except SignalException as error:
        raise RunStopped(f"{error.sigval.name}: all processes were told to end", 128 + error.sigval) from error
