"""What the processes of a run do together: mean gradients, agreements, random numbers, ending when one is gone."""

from __future__ import annotations

import hashlib
import os
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from library.errors import OptionError, RunStopped

T = TypeVar("T")
BUCKET_ENTRIES = 1 << 22  # small gradients travel together up to this size, larger ones alone and where they lie
# what gloo, NCCL and torch's rendezvous say when a process is gone or does not answer
LOST = re.compile(r"gloo|nccl|peer|process ?group|tcpstore|socket|timed? ?out|rendezvous|wait for connection", re.I)


def processes_of_launcher() -> int:
    """Give how many processes the launcher says it started, from torchrun's environment variables."""
    return int(os.environ.get("WORLD_SIZE", "1") or 1)


def processes() -> int:
    """Give how many processes this run has."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@contextmanager
def ends_with_the_others(timeout_min: int, several: bool = True) -> Iterator[None]:
    """Turn the failure of talking to another process into one line; its own output has the reason.

    Args:
        timeout_min: minutes after which a process that does not answer is given up. several: False changes nothing.

    Raises:
        RunStopped: in the place of the error of torch.distributed.
    """
    try:
        yield
    except RuntimeError as error:
        if not several or isinstance(error, RunStopped):
            raise
        if not (isinstance(error, getattr(dist, "DistError", ())) or LOST.search(str(error))):
            raise
        raise RunStopped(
            f"another process of this run has ended or did not answer within {timeout_min} minutes (--ddp_timeout); "
            f"its own last lines say why. Earlier saves are intact: go on with --resume auto"
        ) from error


def agree_on_facts(facts: Mapping[str, Any]) -> None:
    """Make sure that every process found the same before anything is exchanged that would hang or mix otherwise.

    Args:
        facts: plain values by the words that name them.

    Raises:
        OptionError: two processes differ, with the first fact that does.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(facts))
    for rank, other in enumerate(everyone):
        for name, value in everyone[0].items():
            if other[name] != value:
                raise OptionError(
                    f"the processes of this run do not see the same: {name} is {value!r} in process 0 and "
                    f"{other[name]!r} in process {rank}. Give all machines the same files and options"
                )


def from_main_process(value: int) -> int:
    """Give what process 0 passed."""
    told = [value]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def largest_of_all(values: Sequence[int], device: torch.device) -> list[int]:
    """Give for each place the largest value that any process passed; all pass equally many."""
    numbers = torch.tensor(list(values), dtype=torch.int64, device=device)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return [int(number) for number in numbers]


def joined(values: Tensor, longest: int, device: torch.device) -> Tensor:
    """Give the values of all processes one after the other, in rank order.

    Args:
        values: (N,), N of this process. longest: the largest N.

    Returns:
        (sum of N,), dtype of ``values``, on its device.
    """
    padded = torch.full((longest + 1,), float(len(values)), dtype=torch.float64, device=device)
    padded[1 : 1 + len(values)] = values.to(device)
    everyone = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, padded)
    return torch.cat([one[1 : 1 + int(one[0])] for one in everyone]).to(values.device, values.dtype)


@dataclass(frozen=True)
class Share:
    """This process's part of work that all processes do for each other."""

    rank: int
    processes: int

    def of(self, items: Sequence[T]) -> list[T]:
        return list(items[self.rank :: self.processes])

    def wait(self) -> None:
        """Wait until all processes are here."""
        dist.barrier()

    @staticmethod
    def of_process() -> Share | None:
        """Give the share of this process, None when it is alone."""
        return Share(dist.get_rank(), dist.get_world_size()) if processes() > 1 else None


# --------------------------------------------------------------------------------------------------------- gradients


@torch.no_grad()
def mean_gradients(params: Sequence[Tensor], device: torch.device) -> None:
    """Replace every gradient by its mean over the processes.

    A parameter that got a gradient in some processes only counts as zero in the others; one that got none anywhere
    keeps none.

    Args:
        params: the same ones in the same order in every process. device: where small messages travel.
    """
    has = torch.tensor([param.grad is not None for param in params], dtype=torch.int32, device=device)
    dist.all_reduce(has, op=dist.ReduceOp.MAX)
    gradients = []
    for param, anywhere in zip(params, has.tolist()):
        if anywhere and param.grad is None:
            param.grad = torch.zeros_like(param)
        if param.grad is not None:
            gradients.append(param.grad)
    for bucket in _buckets(gradients):
        _mean(bucket)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    waiting: dict[torch.dtype, list[Tensor]] = {}
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        kind = tensor.dtype
        if sizes.get(kind, 0) + tensor.numel() > BUCKET_ENTRIES and waiting.get(kind):
            yield waiting.pop(kind)
            sizes[kind] = 0
        waiting.setdefault(kind, []).append(tensor)
        sizes[kind] = sizes.get(kind, 0) + tensor.numel()
    yield from waiting.values()


def _mean(tensors: list[Tensor]) -> None:
    count = dist.get_world_size()
    if len(tensors) == 1 and tensors[0].is_contiguous():
        dist.all_reduce(tensors[0])
        tensors[0].div_(count)
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    flat.div_(count)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(part.view_as(tensor))


class MeansInBackward:
    """Makes each gradient the mean over the processes as soon as it is complete, for steps inside the backward pass.

    Its hooks have to be registered before those that use the gradients.

    Attributes:
        is_last: whether the running backward pass is the last one of an update; earlier ones only add up.
    """

    def __init__(self, params: Sequence[Tensor]):
        self.is_last = True
        for param in params:
            param.register_post_accumulate_grad_hook(self._arrived)

    def _arrived(self, param: Tensor) -> None:
        if self.is_last and param.grad is not None:
            with torch.no_grad():
                _mean([param.grad])


def same_weights(module: torch.nn.Module) -> None:
    """Give every process the weights and buffers of process 0."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, src=0)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.copy_(whole)


# ---------------------------------------------------------------------------------------------------- random numbers


def _seed(*parts: Any) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "little")


def own_random_numbers(*parts: Any) -> None:
    """Seed every generator of this process from numbers, of which one is its rank."""
    from accelerate.utils import set_seed

    set_seed(_seed(*parts))


@contextmanager
def shared_random_numbers(*parts: Any) -> Iterator[None]:
    """Let the block draw from generators that stand alike in every process; afterwards they go on where they stood.

    What an update draws, for rounding say, would let weights drift apart otherwise.
    """
    import numpy

    kept = random.getstate(), numpy.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        own_random_numbers(*parts)
        try:
            yield
        finally:
            random.setstate(kept[0])
            numpy.random.set_state(kept[1])


# ------------------------------------------------------------------------------------------------------------ checks

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Give a number that changes when any bit of a tensor changes or entries change places.

    Args:
        tensor: any dtype, shape and device.

    Returns:
        (), int64 on the tensor's device: the sum modulo 2^64 of the entries' bits, each times an odd number of its own.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.dtype == torch.bool:
        flat = flat.to(torch.int8)
    if flat.is_complex() or flat.element_size() not in INTEGERS:
        flat = flat.view(torch.uint8)
    bits = flat.view(INTEGERS[flat.element_size()]).to(torch.int64)
    odd = torch.arange(len(bits), device=bits.device, dtype=torch.int64) * 2 + 1
    return (bits * odd * 0x5851F42D4C957F2D).sum()


def first_that_differs(sums: Mapping[str, Tensor], device: torch.device) -> str | None:
    """Give the name of the first number that is not the same in every process, None when all are.

    Args:
        sums: a :func:`checksum` for each name; where the names differ between processes, that is the answer.
    """
    names = torch.tensor([len(sums), _seed(*sums)], dtype=torch.int64, device=device)
    if _differs(names).any():
        return "the set of tensors"
    if not sums:
        return None
    differs = _differs(torch.stack([value.to(device) for value in sums.values()]))
    return next((name for name, flag in zip(sums, differs.tolist()) if flag), None)


def _differs(numbers: Tensor) -> Tensor:
    lowest, highest = numbers.clone(), numbers.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return lowest != highest


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}/{index}")
    else:
        yield path, value


class RankCheck:
    """Stops a run when an update is not the same bits in every process.

    What is compared: each gradient that the filter gets and the one it hands on, which shows masks and thresholds,
    then every weight and everything in the optimizer's state dict, which holds moments and filter buffers.

    Args:
        optimizers: raw ones, filters attached before. names: of their parameters, by id. device: of messages.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str], device: torch.device):
        self.optimizers = list(optimizers)
        self.names = names
        self.device = device
        self.compared = 0
        self._sums: dict[str, Tensor] = {}
        for optimizer in self.optimizers:
            optimizer.register_step_pre_hook(lambda *_: self.note_gradients("gradient handed on"))

    def note_gradients(self, what: str = "gradient") -> None:
        """Take the checksums of all gradients as they are now."""
        for param, name in self._params():
            if param.grad is not None:
                self._sums[f"{what} of {name}"] = checksum(param.grad)

    def after_update(self, step: int) -> None:
        """Compare this update.

        Raises:
            RunStopped: in every process, with the first thing that differs.
        """
        for param, name in self._params():
            self._sums[f"weight {name}"] = checksum(param)
        for number, optimizer in enumerate(self.optimizers):
            for path, leaf in _leaves(optimizer.state_dict(), f"optimizer {number}"):
                self._sums[path] = checksum(leaf) if isinstance(leaf, Tensor) else torch.tensor(_seed(repr(leaf)))
        sums, self._sums = self._sums, {}
        bad = first_that_differs(sums, self.device)
        if bad is not None:
            raise RunStopped(f"--check_ranks: step {step}: {bad} is not the same in every process")
        self.compared += len(sums)

    def _params(self) -> Iterator[tuple[Tensor, str]]:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    yield param, self.names[id(param)]
