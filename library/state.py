"""Training states: folders that hold everything a run needs to go on, complete or not there.

A state folder has the file names that accelerate uses (``model.safetensors``, ``optimizer.bin``, ``scheduler.bin``,
``scaler.pt``) plus ``random_states_<rank>.json`` and the record ``train_state.json``, which is written last and lists
size and SHA-256 of every other file and of itself. Nothing in it needs unrestricted unpickling.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import logging
import random
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from library import grad_filter
from library.errors import OptionError
from library.files import OLDER_MARK, new_folder, recover_folder, write_json
from library.optimizers import load_optimizer_state
from library.run_plan import RunPlan

log = logging.getLogger(__name__)

RECORD_NAME = "train_state.json"
RECORD_VERSION = 1
FOREIGN_RECORD = {"current_epoch", "current_step"}  # all that other trainers write
OPTIMIZER_NAME = "optimizer.bin"
SCHEDULER_NAME = "scheduler.bin"
SCALER_NAME = "scaler.pt"
PICKLED_MODEL_STEM = "pytorch_model"  # of accelerate before 0.25, and later without safe serialization


@dataclass
class StateRecord:
    """Where a run stood when its state was written.

    Attributes:
        current_epoch: epoch of the last update, from 1. current_step: updates done since the very first run.
        seed: seed of data order and augmentation. batches, processes, accumulation: sizes the position was counted in.
        optimizer: class path. parameters: names of the trained tensors in the optimizer's order.
        rates: learning rate asked for each parameter group. losses: last loss of each position in the epoch.
        epoch_ended: the saves due at the end of that epoch were done.
        version: 0 for a folder that another trainer wrote with accelerate. files: name -> size and hash.
    """

    current_epoch: int
    current_step: int
    seed: int | None = None
    batches: int | None = None
    processes: int = 1
    accumulation: int | None = None
    optimizer: str = ""
    parameters: list[str] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    epoch_ended: bool = False
    version: int = RECORD_VERSION
    files: dict[str, dict[str, Any]] = field(default_factory=dict)


def _digest_of_record(values: dict[str, Any]) -> str:
    rest = {name: value for name, value in values.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode("utf-8")).hexdigest()


def model_name(index: int) -> str:
    """Give the file name of the ``index``-th trained module."""
    return f"model_{index}.safetensors" if index else "model.safetensors"


def _digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(1 << 20):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


# ---------------------------------------------------------------------------------------------------- random numbers


def _to_text(tensor: Tensor) -> str:
    return base64.b64encode(bytes(tensor.tolist())).decode("ascii")


def _from_text(text: str) -> Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)


def random_states() -> dict[str, Any]:
    """Give the state of every random generator of this process as plain JSON values."""
    import numpy

    kind, keys, position, has_gauss, cached = numpy.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],
        "torch": _to_text(torch.get_rng_state()),
        "cuda": [_to_text(state) for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Put every random generator of this process where :func:`random_states` saw it."""
    import numpy

    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    torch.set_rng_state(_from_text(states["torch"]))
    if states["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([_from_text(state) for state in states["cuda"]])


def _restore_random_states_of_rank(folder: Path, rank: int) -> None:
    own, foreign = folder / f"random_states_{rank}.json", folder / f"random_states_{rank}.pkl"
    if own.is_file():
        restore_random_states(json.loads(own.read_text(encoding="utf-8")))
    elif foreign.is_file():
        import numpy
        from accelerate.utils import load  # restricted unpickling that admits NumPy's generator state

        states = load(foreign)
        random.setstate(states["random_state"])
        numpy.random.set_state(states["numpy_random_seed"])
        torch.set_rng_state(states["torch_manual_seed"])
        if torch.cuda.is_available() and "torch_cuda_manual_seed" in states:
            torch.cuda.set_rng_state_all(states["torch_cuda_manual_seed"])
    else:
        raise OptionError(
            f"--resume: {folder} has no random_states_{rank} file, so process {rank} cannot go on with its noise. "
            f"Resume with as many processes as wrote the state, or start anew with --network_weights"
        )


# --------------------------------------------------------------------------------------------------------- writing


def save_state(
    folder: Path,
    *,
    weights: Sequence[dict[str, Tensor]],
    optimizer: torch.optim.Optimizer,
    scheduler: Any | None,
    scaler: Any | None,
    random_states_of_ranks: Sequence[dict[str, Any]],
    record: StateRecord,
) -> None:
    """Write a state folder; it appears under its name only when everything in it is on the disk.

    Args:
        folder: target; an older folder of this name is replaced.
        weights: tensors by name of every trained module, any dtype, any device.
        optimizer: raw optimizer; its state dict carries the gradient filter's buffers.
        scheduler, scaler: written when they have a ``state_dict``; None otherwise.
        random_states_of_ranks: :func:`random_states` of every process, in rank order.
        record: position and facts of the run; ``files`` is filled in here.

    Raises:
        OSError: disk full or not writable; nothing is left under the folder's name then.
    """
    from safetensors.torch import save_file

    optimizer_state = optimizer.state_dict()
    with new_folder(folder, _bytes_in(weights) + _bytes_in(optimizer_state)) as inside:
        for index, tensors in enumerate(weights):
            cpu_weights = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            save_file(cpu_weights, inside / model_name(index))
        torch.save(optimizer_state, inside / OPTIMIZER_NAME)
        if scheduler is not None:
            torch.save(scheduler.state_dict(), inside / SCHEDULER_NAME)
        if scaler is not None:
            torch.save(scaler.state_dict(), inside / SCALER_NAME)
        for rank, states in enumerate(random_states_of_ranks):
            write_json(inside / f"random_states_{rank}.json", states)
        record.files = {path.name: _digest(path) for path in sorted(inside.iterdir())}
        values = asdict(record)
        write_json(inside / RECORD_NAME, {**values, "sha256": _digest_of_record(values)})


def _bytes_in(value: Any) -> int:
    """Give the bytes of all tensors in nested dicts and lists."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_bytes_in, value.values()))
    return sum(map(_bytes_in, value)) if isinstance(value, (list, tuple)) else 0


def check_state_can_be_read_back(optimizer: torch.optim.Optimizer) -> None:
    """Find out before the first step whether the optimizer's state survives saving and restricted loading.

    Raises:
        OptionError: it holds an object that restricted loading refuses, named in the message.
    """
    buffer = io.BytesIO()
    try:
        torch.save(optimizer.state_dict(), buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:  # pickling errors have no common base class
        reason = str(error).strip().splitlines()[0]
        raise OptionError(
            f"--save_state: the state of {type(optimizer).__name__} cannot be saved and read back: {reason}. "
            f"Use another --optimizer_type or --grad_filter, or train without --save_state"
        ) from error


# --------------------------------------------------------------------------------------------------------- reading


def read_record(folder: Path) -> StateRecord:
    """Read and check the record of a state folder, before any model is loaded.

    Raises:
        OptionError: no such folder, not a state, incomplete, written by a newer version, or a file in it is damaged.
    """
    recover_folder(folder)
    if not folder.exists():
        raise OptionError(f"--resume: there is no folder {folder}. Give a folder that --save_state wrote (*-state)")
    if folder.is_file():
        raise OptionError(
            f"--resume: {folder} is a file; a state is a folder (*-state). "
            f"To start from a LoRA file use --network_weights"
        )
    record_path = folder / RECORD_NAME
    if not record_path.is_file():
        states = sorted(path.name for path in folder.glob("*-state") if (path / RECORD_NAME).is_file())
        hint = (
            f"It contains the states {', '.join(states)}: name one of them"
            if states
            else "Name a complete *-state folder"
        )
        raise OptionError(f"--resume: {folder} is not a complete state (no {RECORD_NAME} in it). {hint}")
    try:
        values = json.loads(record_path.read_text(encoding="utf-8"))
        known = {name: values[name] for name in StateRecord.__dataclass_fields__ if name in values}
        record = StateRecord(**{"version": 0, **known})
        record.current_step, record.current_epoch = int(record.current_step), int(record.current_epoch)
        record.version = int(record.version)
    except (ValueError, TypeError, AttributeError, UnicodeDecodeError, RecursionError) as error:
        raise OptionError(f"--resume: {record_path} is damaged ({error}). Choose an older state") from error
    if record.version == 0:
        record.processes = len(list(folder.glob("random_states_*"))) or 1
    if record.version > RECORD_VERSION:
        raise OptionError(
            f"--resume: {folder} was written by a newer version (state format {record.version}, this one reads up to "
            f"{RECORD_VERSION}). Update this trainer"
        )
    if not values.keys() <= FOREIGN_RECORD and values.get("sha256") != _digest_of_record(values):
        raise OptionError(f"--resume: {record_path} is damaged (its SHA-256 differs). Choose an older state")
    for name, expected in record.files.items():
        path = folder / name
        if not path.is_file():
            raise OptionError(f"--resume: {path} is missing, the state is incomplete. Choose an older state")
        if _digest(path) != expected:
            raise OptionError(f"--resume: {path} is damaged (size or SHA-256 differs). Choose an older state")
    return record


def find_state(asked: str, folder: Path, name: str | None) -> tuple[Path | None, StateRecord | None]:
    """Give the state that ``--resume`` means, checked; both None when ``auto`` finds none of this output name.

    Args:
        asked: a folder, or ``auto``. folder: the output folder. name: the output name.
    """
    if asked == "auto":
        return newest_state(folder, name) or (None, None)
    return Path(asked), read_record(Path(asked))


def report_restored(record: StateRecord, plan: RunPlan, has_filter: bool) -> None:
    """Say in one line where the run goes on and what it took over from its state."""
    update = plan.update(record.current_step)
    log.info(
        "restored: step %d of %d, epoch %d, batch %d of %d in the epoch; %d tensors and their optimizer state (%s); "
        "gradient filter: %s; random numbers of this process",
        record.current_step,
        plan.max_steps,
        update.epoch,
        update.last_batch,
        plan.batches_per_process,
        len(record.parameters),
        record.optimizer.rpartition(".")[2] or "not named in the state",
        "its buffers" if has_filter else "none",
    )


def newest_state(folder: Path, name: str | None) -> tuple[Path, StateRecord] | None:
    """Find the complete state of an output name that stands at the highest step, and say which and why.

    Args:
        folder: the output folder. name: ``--output_name``; None means the fall-back names.

    Returns:
        Its folder and record; None when no state of this name is there at all.

    Raises:
        OptionError: there are states, and none of them is complete.
    """
    stem = f"(?:{re.escape(name)})" if name else "(?:last|epoch|at)"
    pattern = re.compile(rf"{stem}(?:-step\d{{8,}}|-\d{{6,}})?-state")
    names = {found.name for found in folder.glob("*-state") if pattern.fullmatch(found.name)}
    hidden = (found.name[1:].partition(OLDER_MARK)[0] for found in folder.glob(f".*-state{OLDER_MARK}*"))
    names |= {name for name in hidden if pattern.fullmatch(name)}  # a kill between two renames left only this one
    for found in names:
        recover_folder(folder / found)
    passed_over: list[str] = []
    for found in sorted(names, key=lambda found: (_step_of(folder / found), found), reverse=True):
        try:
            record = read_record(folder / found)
        except OptionError as error:
            passed_over.append(found)
            log.warning("--resume auto passes over %s: %s", found, str(error).removeprefix("--resume: "))
            continue
        log.info(
            "--resume auto: %s is taken, the newest complete state of %r: step %d; states of this name: %d, passed "
            "over: %d",
            folder / found,
            name or "last",
            record.current_step,
            len(names),
            len(passed_over),
        )
        return folder / found, record
    if passed_over:
        raise OptionError(
            f"--resume auto: no state in {folder} is complete ({', '.join(sorted(passed_over)[:3])}). Move them away "
            f"to begin anew, or name a state with --resume"
        )
    log.info("--resume auto: %s holds no state of %r, the run starts at its beginning", folder, name or "last")
    return None


def _step_of(folder: Path) -> tuple[int, bool]:
    """Give where a state says it stands, without looking at its files."""
    try:
        values = json.loads((folder / RECORD_NAME).read_text(encoding="utf-8"))
        return int(values["current_step"]), bool(values.get("epoch_ended"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return -1, False


def check_optimizer_matches(record: StateRecord, optimizer: str, parameters: Sequence[str]) -> None:
    """Refuse a state of another optimizer or other trained tensors, before anything of it is loaded.

    Args:
        record: of the state to resume.
        optimizer: class path of the optimizer now built.
        parameters: names of the tensors it now trains, in its order.
    """
    if record.version == 0:
        return  # another trainer's state says nothing about these
    if record.optimizer != optimizer:
        raise OptionError(
            f"--resume: the state is of optimizer {record.optimizer}, the command line asks for {optimizer}. "
            f"Use the same --optimizer_type, or start from the weights alone with --network_weights"
        )
    if record.parameters != list(parameters):
        missing = [name for name in record.parameters if name not in set(parameters)]
        added = [name for name in parameters if name not in set(record.parameters)]
        example = (
            f"{missing[0]} is in the state only" if missing else f"{added[0]} is new" if added else "order differs"
        )
        raise OptionError(
            f"--resume: the state trains {len(record.parameters)} tensors, this run {len(parameters)} ({example}). "
            f"Use the network and training options of the first run"
        )


def _load_weights(folder: Path) -> list[dict[str, Tensor]]:
    """Give the tensors of each trained module, from safetensors or from what older accelerate pickled."""
    from safetensors.torch import load_file

    if (folder / model_name(0)).is_file():
        further = sorted(folder.glob("model_*.safetensors"))
        return [load_file(path) for path in (folder / model_name(0), *further)]
    pickled = folder / f"{PICKLED_MODEL_STEM}.bin"
    if not pickled.is_file():
        raise OptionError(f"--resume: {folder} has neither {model_name(0)} nor {pickled.name}. Choose another state")
    further = sorted(folder.glob(f"{PICKLED_MODEL_STEM}_*.bin"))
    return [torch.load(path, map_location="cpu", weights_only=True) for path in (pickled, *further)]


def load_state(
    folder: Path,
    *,
    load_weights: Any,
    optimizer: torch.optim.Optimizer,
    scheduler: Any | None,
    scaler: Any | None,
    rank: int | None,
) -> None:
    """Load a checked state folder into the parts of a prepared run.

    Args:
        folder: passed :func:`read_record`.
        load_weights: called with a list of dicts, the tensors of each trained module on the CPU.
        optimizer, scheduler, scaler: the raw objects; a missing scheduler or scaler file is named in the log.
        rank: index of this process, chooses the file of random states; None restores none.

    Raises:
        OptionError: weights are missing, weights or optimizer state do not fit, or a random state is missing.
    """
    load_weights(_load_weights(folder))
    try:
        saved = torch.load(folder / OPTIMIZER_NAME, map_location="cpu", weights_only=True)
        grad_filter.report_unused_state(saved, optimizer)
        if isinstance(optimizer, torch.optim.Optimizer):
            load_optimizer_state(optimizer, saved)
        else:  # several seen as one, each of which does the same
            optimizer.load_state_dict(saved)
    except (KeyError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise OptionError(
            f"--resume: {folder / OPTIMIZER_NAME} does not fit this run's optimizer ({reason}). "
            f"Use the options of the first run"
        ) from error
    for part, name in ((scheduler, SCHEDULER_NAME), (scaler, SCALER_NAME)):
        if part is None:
            continue
        if (folder / name).is_file():
            part.load_state_dict(torch.load(folder / name, map_location="cpu", weights_only=True))
        else:
            log.warning("the state %s has no %s: that part starts fresh", folder, name)
    if rank is not None:
        _restore_random_states_of_rank(folder, rank)
