"""Gradient filters for any optimizer: decide, just before a step, which entries of every gradient pass.

    handle = attach(torch.optim.AdamW(params), "topk keep=0.1 policy=update")

One file that stands alone (standard library and torch; NumPy is used for selection on the CPU when it is there). In a
trainer, decorate the function that adds the optimizer's options and the function that builds it:

    @with_grad_filter_arguments
    def add_optimizer_arguments(parser): ...

    @with_grad_filter
    def get_optimizer(args, params): ...        # -> (name, args text, optimizer)

In this file, in order: the contract of a filter, selection, the built-in stages, options, targets, the engine, its
attachment to an optimizer, the decorators, the command line.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import fnmatch
import functools
import hashlib
import importlib
import importlib.util
import inspect
import logging
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

STATE_KEY = "grad_filter"
STATE_VERSION = 1
PATH_VARIABLE = "GRAD_FILTER_PATH"
OFF_WORDS = ("", "none", "off")


class GradFilterError(ValueError):
    """A wrong filter, option or use; one line that names it and says what to type instead."""


# ---------------------------------------------------------------------------------------------- contract of a filter


class GradFilter:
    """Base of a filter: it decides, the engine acts. It never touches ``param.grad``, the optimizer or a file.

    A filter offers exactly one of

    * ``score(grad, state)``: how informative is each entry? Any real numbers, shape of grad; the engine passes the
      share ``keep`` with the largest scores, exactly that many, ties by lowest index;
    * ``mask(grad, state)``: bool, shape of grad, True passes;
    * ``transform(grad, state)``: a new gradient, shape of grad.

    ``grad`` is float32 (shape of the parameter, any device) and must not be changed or kept. ``state`` holds what
    :meth:`init_state` declared and may be changed in place; it is saved and restored with the optimizer. A method may
    ask for more by naming it: ``step`` (int, filtered steps of this parameter so far), ``index`` (position of the
    parameter), ``param`` (the parameter, read-only), ``context`` (dict: total_steps, timesteps, losses, ...).
    Options are the arguments of ``__init__``; wrong ones raise ``GradFilterError``.
    """

    nonnegative_scores = False  # True lets the engine order scores by their bits without a look at signs

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        """Give the tensors kept for one parameter."""
        return {}


@dataclass(frozen=True)
class Registered:
    """A filter known by name."""

    name: str
    summary: str
    factory: Callable[..., GradFilter]


FILTERS: dict[str, Registered] = {}
PRESETS: dict[str, str] = {"sd2085": "ema,topk_change"}
KINDS = ("score", "mask", "transform")


def register_filter(name: str, summary: str = "") -> Callable[[Any], Any]:
    """Make a class or function known by ``name``.

    A function ``f(grad, state, option=...)`` is a filter too: one that returns bool is a mask, otherwise a score.
    """

    def register(target: Any) -> Any:
        first_line = (inspect.getdoc(target) or "").partition("\n")[0]
        FILTERS[name] = Registered(name, summary or first_line, _factory_of(target, name))
        return target

    return register


class _FunctionFilter(GradFilter):
    """A plain function as a filter; its further arguments are its options."""

    def __init__(self, function: Callable[..., Tensor], options: dict[str, Any]):
        self._function = function
        self._options = options

    def score_or_mask(self, grad: Tensor, state: dict[str, Tensor]) -> Tensor:
        return (
            self._function(grad, state, **self._options)
            if self._takes_state()
            else self._function(grad, **self._options)
        )

    def _takes_state(self) -> bool:
        return "state" in inspect.signature(self._function).parameters


def _factory_of(target: Any, name: str) -> Callable[..., GradFilter]:
    if inspect.isclass(target):
        if not issubclass(target, GradFilter) and not any(hasattr(target, kind) for kind in KINDS):
            raise GradFilterError(f"{name}: the class offers none of {', '.join(KINDS)}. Give it one of these methods")
        return target
    if callable(target):
        parameters = [p for p in inspect.signature(target).parameters.values() if p.name not in ("grad", "state")]

        def build(**options: Any) -> GradFilter:
            return _FunctionFilter(target, options)

        build.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
        )
        build.__doc__ = target.__doc__
        return build
    raise GradFilterError(f"{name}: {target!r} is neither a class nor a function. Name a filter")


# ------------------------------------------------------------------------------------------------------- selection


def keep_count(keep: float, size: int) -> int:
    """Give how many of ``size`` entries the share ``keep`` is: rounded half up, at least one."""
    return min(size, max(1, int(keep * size + 0.5)))


def select_largest(scores: Tensor, count: int, nonnegative: bool = False) -> Tensor:
    """Give the mask of the ``count`` largest scores: exactly that many, ties by lowest index.

    Args:
        scores: float32, any shape. count: 0 to the number of entries. nonnegative: no score is below zero.

    Returns:
        bool, shape and device of ``scores``. NaN counts as the smallest score.
    """
    size = scores.numel()
    if count >= size:
        return torch.ones_like(scores, dtype=torch.bool)
    if count <= 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    flat = scores.reshape(-1)
    if not nonnegative:
        flat = torch.where(torch.isnan(flat), torch.full_like(flat, -torch.inf), flat)
    threshold = _kth_largest(flat, count, nonnegative)
    mask = flat > threshold
    missing = count - int(mask.sum())
    tied = flat == threshold
    if int(tied.sum()) != missing:
        tied &= torch.cumsum(tied, dim=0) <= missing
    return (mask | tied).reshape(scores.shape)


def _kth_largest(flat: Tensor, count: int, nonnegative: bool) -> Tensor:
    numpy = _numpy()
    if flat.device.type != "cpu" or numpy is None:
        return torch.topk(flat, count, sorted=False).values.min()
    # the bits of non-negative floats order like the floats, and integers partition faster
    view = flat.contiguous().view(torch.int32).numpy() if nonnegative else flat.numpy()
    place = flat.numel() - count
    found = numpy.partition(view, place)[place]
    return torch.from_numpy(numpy.asarray([found])).view(torch.float32)[0]


@functools.lru_cache(maxsize=1)
def _numpy() -> Any:
    try:
        return importlib.import_module("numpy")
    except ImportError:
        return None


def seed_of(*parts: int) -> int:
    """Give a 63-bit seed that depends on all ``parts``, the same on every process and platform."""
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


# --------------------------------------------------------------------------------------------------- built-in stages


def _require(condition: bool, stage: str, key: str, value: Any, allowed: str, example: str) -> None:
    if not condition:
        raise GradFilterError(f"{stage}: {key} must be {allowed}, got {value}. Example: {key}={example}")


@register_filter("finite", summary="leave out steps with NaN or Inf (nan=skip), or zero such entries (nan=zero)")
class Finite(GradFilter):
    """Guard against NaN and Inf. Always first, also when it is not named; naming it changes what it does.

    Args:
        nan: ``skip`` leaves the whole step out and changes no buffer; ``zero`` lets the other entries pass.
    """

    def __init__(self, nan: str = "skip"):
        _require(nan in ("skip", "zero"), "finite", "nan", nan, "skip or zero", "skip")
        self.nan = nan

    def transform(self, grad: Tensor, state: dict[str, Tensor]) -> Tensor:
        return torch.nan_to_num(grad, nan=0.0, posinf=0.0, neginf=0.0) if self.nan == "zero" else grad


@register_filter("topk", summary="pass the share keep of entries with the largest magnitude")
class TopK(GradFilter):
    """Pass the entries with the largest |g|. No state. Source: GMT; rai_toolbox's top-q; deep gradient compression."""

    nonnegative_scores = True

    def score(self, grad: Tensor, state: dict[str, Tensor]) -> Tensor:
        return grad.abs()


@register_filter("topk_change", summary="pass entries whose value changed most against the last masked gradient")
class TopKChange(GradFilter):
    """Pass the largest relative changes r = |u - P| / (|P| + eps); then P becomes the masked u.

    The filter of the feature request, bit for bit. P starts at 0. Because P holds the masked gradient, keeping at most
    half never lets two consecutive masks overlap, and at exactly half two complementary halves alternate for ever.

    Args:
        topk_ratio: share that is dropped, in [0, 1]; k = int(n * (1 - topk_ratio)), k = 0 passes everything.
        eps: added to |P|. previous: what P becomes: ``masked`` (the request) or ``raw`` (the whole u).

    State: ``prev``, float32, shape of the parameter.
    """

    def __init__(self, topk_ratio: float = 0.9, eps: float = 1e-8, previous: str = "masked"):
        _require(0.0 <= topk_ratio <= 1.0, "topk_change", "topk_ratio", topk_ratio, "in [0, 1]", "0.9")
        _require(eps > 0.0, "topk_change", "eps", eps, "above 0", "1e-8")
        _require(previous in ("masked", "raw"), "topk_change", "previous", previous, "masked or raw", "masked")
        self.topk_ratio, self.eps, self.previous = topk_ratio, eps, previous

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        return {"prev": torch.zeros_like(param, dtype=torch.float32)}

    def mask(self, grad: Tensor, state: dict[str, Tensor]) -> Tensor:
        previous = state["prev"]
        change = (grad - previous).abs_().div_(previous.abs().add_(self.eps))
        count = int(grad.numel() * (1.0 - self.topk_ratio))
        mask = select_largest(change, count or grad.numel(), nonnegative=True)
        if self.previous == "raw":
            previous.copy_(grad)
        else:
            previous.copy_(grad).masked_fill_(~mask, 0.0)
        return mask


@register_filter("ema", summary="replace the gradient by its running mean")
class Ema(GradFilter):
    """Smooth: u = beta * u + (1 - beta) * g. With momentum-free SignSGD behind it, this is signed momentum.

    Args:
        beta: share of the old mean kept each step, in [0, 1). debias: divide by 1 - beta^t.

    State: ``mean``, float32, shape of the parameter.
    """

    def __init__(self, beta: float = 0.9, debias: bool = False):
        _require(0.0 <= beta < 1.0, "ema", "beta", beta, "in [0, 1)", "0.9")
        self.beta, self.debias = beta, debias

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        return {"mean": torch.zeros_like(param, dtype=torch.float32)}

    def transform(self, grad: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
        mean = state["mean"]
        mean.mul_(self.beta).add_(grad * (1.0 - self.beta))  # no fused multiply-add: bits as written out
        return mean / (1.0 - self.beta ** (step + 1)) if self.debias else mean.clone()


@register_filter("sign", summary="replace every entry by its sign")
class Sign(GradFilter):
    """Give -1, 0 or 1. Source: signSGD; rai_toolbox's SignedGradientOptim."""

    def transform(self, grad: Tensor, state: dict[str, Tensor]) -> Tensor:
        return grad.sign()


@register_filter("threshold", summary="pass entries whose magnitude reaches a bound")
class Threshold(GradFilter):
    """Pass |g| >= value, or |g| >= value * RMS(g) when ``relative``.

    Args:
        value: the bound, at least 0. relative: in units of the root mean square of the tensor.
    """

    def __init__(self, value: float = 1.0, relative: bool = True):
        _require(value >= 0.0, "threshold", "value", value, "at least 0", "1.0")
        self.value, self.relative = value, relative

    def mask(self, grad: Tensor, state: dict[str, Tensor]) -> Tensor:
        bound = grad.square().mean().sqrt() * self.value if self.relative else self.value
        return grad.abs() >= bound


@register_filter("random", summary="pass each entry with a fixed probability")
class Random(GradFilter):
    """Pass entries at random, drawn from (seed, step, parameter) and never from a global generator.

    Args:
        p: probability that an entry passes, in (0, 1]. seed: any whole number.
    """

    def __init__(self, p: float = 0.1, seed: int = 0):
        _require(0.0 < p <= 1.0, "random", "p", p, "in (0, 1]", "0.1")
        self.p, self.seed = p, seed

    def mask(self, grad: Tensor, state: dict[str, Tensor], step: int, index: int) -> Tensor:
        generator = torch.Generator(device=grad.device).manual_seed(seed_of(self.seed, step, index))
        return torch.rand(grad.shape, generator=generator, device=grad.device) < self.p


# --------------------------------------------------------------------------------------------------------- options

POLICIES = ("zero", "update")
STAGE_OPTION_KEEP = "keep"


@dataclass(frozen=True)
class ChainOptions:
    """Options of the whole chain.

    Attributes:
        policy: what happens at masked entries: ``zero`` gives the optimizer zeros; ``update`` gives it the whole
            gradient and puts the weights back after the step, so that they neither move nor decay.
        warmup: steps before the filter starts. every: filter each n-th step only. until: last filtered step, 0 for ever.
        min_numel: smaller tensors pass untouched. log_every: steps between statistics.
    """

    policy: str = "zero"
    warmup: int = 0
    every: int = 1
    until: int = 0
    min_numel: int = 64
    log_every: int = 10

    def __post_init__(self) -> None:
        _require(self.policy in POLICIES, "grad_filter", "policy", self.policy, " or ".join(POLICIES), "update")
        for key, least in (("warmup", 0), ("every", 1), ("until", 0), ("min_numel", 0), ("log_every", 1)):
            value = getattr(self, key)
            _require(value >= least, "grad_filter", key, value, f"at least {least}", str(least))

    def active(self, step: int) -> bool:
        """Say whether the filter acts at 0-based ``step``."""
        return step >= self.warmup and (step - self.warmup) % self.every == 0 and (not self.until or step < self.until)


@dataclass(frozen=True)
class StageSpec:
    """One stage: the name typed, and its options."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class ChainSpec:
    """Stages in order and the chain's options."""

    stages: tuple[StageSpec, ...]
    options: ChainOptions = field(default_factory=ChainOptions)

    def canonical(self) -> str:
        """Give the text that describes the chain completely: same text, same behaviour."""
        default = ChainOptions()
        words = [",".join(stage.name for stage in self.stages)]
        words += [f"{stage.name}.{key}={_text(value)}" for stage in self.stages for key, value in stage.options]
        for key in vars(default):
            value = getattr(self.options, key)
            if value != getattr(default, key):
                words.append(f"{key}={_text(value)}")
        return " ".join(words)


@dataclass(frozen=True)
class Target:
    """A rule for some parameters: another chain (None: no filter) where ``pattern`` matches."""

    pattern: str
    chain: ChainSpec | None


@dataclass(frozen=True)
class FilterSpec:
    """Everything that was asked for; later targets win over earlier ones, any target over ``chain``."""

    chain: ChainSpec
    targets: tuple[Target, ...] = ()
    target_words: tuple[str, ...] = ()

    def canonical(self) -> str:
        return " ".join([self.chain.canonical(), *(f"@{word}" for word in self.target_words)])

    def metadata(self) -> dict[str, str]:
        """Give the two entries recorded with a trained network."""
        names, _, rest = self.canonical().partition(" ")
        return {"ss_grad_filter": names, "ss_grad_filter_args": rest}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _words(value: Any) -> list[str]:
    """Give the words of a setting that arrives as a list, as one string, or not at all; strips one pair of quotes."""
    items = value.split() if isinstance(value, str) else [] if value is None else list(value)
    words = []
    for item in items:
        word = str(item).strip()
        if len(word) > 1 and word[0] == word[-1] == "'":
            word = word[1:-1].strip()
        if word:
            words.append(word)
    return words


def _suggest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def resolve(name: str, allow_code: bool = True) -> Registered:
    """Find a filter by name: built in, a file of a filter folder, ``package.module:Name`` or ``file.py:Name``.

    Raises:
        GradFilterError: unknown, not importable, or code where ``allow_code`` is False.
    """
    if name in FILTERS:
        return FILTERS[name]
    if ":" in name:
        if not allow_code:
            raise GradFilterError(
                f"grad_filter {name!r} names code, which a config file may not. Give it on the command line, or put "
                f"the file into custom_filters/"
            )
        source, _, attribute = name.rpartition(":")
        module = _load_file(Path(source)) if source.endswith(".py") else _import(source)
        target = getattr(module, attribute, None)
        if target is None:
            known = [key for key, value in vars(module).items() if callable(value)]
            raise GradFilterError(f"grad_filter {name!r}: {source} has no {attribute}.{_suggest(attribute, known)}")
        log.info("grad_filter: %s is %s of %s", name, attribute, getattr(module, "__file__", source))
        return Registered(name, "", _factory_of(target, name))
    for folder in filter_folders():
        path = folder / f"{name}.py"
        if path.is_file():
            module = _load_file(path)
            if name in FILTERS:
                return FILTERS[name]
            own = [v for v in vars(module).values() if inspect.isclass(v) and v.__module__ == module.__name__]
            target = getattr(module, name, own[0] if len(own) == 1 else None)
            if target is None:
                raise GradFilterError(f"grad_filter {name!r}: {path} defines no {name}. Name the class or function so")
            return Registered(name, "", _factory_of(target, name))
    known = sorted({*FILTERS, *PRESETS, *(path.stem for folder in filter_folders() for path in folder.glob("*.py"))})
    raise GradFilterError(
        f"grad_filter: no filter is called {name!r}.{_suggest(name, known)} Known: {', '.join(known)}. "
        f"Example: --grad_filter topk"
    )


def filter_folders() -> list[Path]:
    """Give the folders whose files are filters: custom_filters/ beside the library, and those of GRAD_FILTER_PATH."""
    named = [Path(part) for part in os.environ.get(PATH_VARIABLE, "").split(os.pathsep) if part]
    return [folder for folder in (Path(__file__).resolve().parent.parent / "custom_filters", *named) if folder.is_dir()]


def _load_file(path: Path) -> types.ModuleType:
    if not path.is_file():
        raise GradFilterError(f"grad_filter: there is no file {path}. Give an existing file.py:Name")
    spec = importlib.util.spec_from_file_location(f"grad_filter_file_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    # a file that is run as a script registers with the running copy of this module
    sys.modules.setdefault("library.grad_filter", sys.modules[__name__])
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise GradFilterError(f"grad_filter: {path} cannot be run: {type(error).__name__}: {error}") from error
    return module


def _import(name: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise GradFilterError(f"grad_filter: cannot import {name} ({error}). Check the name or install it") from error


def _option_parameters(registered: Registered) -> dict[str, inspect.Parameter]:
    """Give the options a filter takes; a scoring one also takes ``keep``."""
    factory = registered.factory
    parameters = dict(inspect.signature(factory).parameters)
    if _is_scoring(factory):
        keep = inspect.Parameter(STAGE_OPTION_KEEP, inspect.Parameter.KEYWORD_ONLY, default=0.1, annotation="float")
        parameters.setdefault(STAGE_OPTION_KEEP, keep)
    return parameters


def _is_scoring(factory: Any) -> bool:
    return hasattr(factory, "score") if inspect.isclass(factory) else True


def _parse_value(text: Any, default: Any, where: str) -> Any:
    """Convert the text of an option to the type of its default."""
    kind = type(default)
    word = str(text).strip()
    try:
        if kind is bool:
            if word.lower() in ("true", "1", "yes", "on", "false", "0", "no", "off"):
                return word.lower() in ("true", "1", "yes", "on")
            raise ValueError
        if kind is int:
            number = float(word)
            if number != int(number):
                raise ValueError
            return int(number)
        if kind is float:
            number = float(word.rstrip("%")) / (100.0 if word.endswith("%") else 1.0)
            if number != number or number in (float("inf"), float("-inf")):
                raise ValueError
            return number
    except (ValueError, OverflowError) as error:
        expected = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise GradFilterError(
            f"grad_filter_args: {where}={word} must be {expected}. Example: {where}={default}"
        ) from error
    return None if word.lower() == "none" else word


def _parse_chain(names: str, words: Sequence[str], allow_code: bool, base: ChainSpec | None = None) -> ChainSpec:
    """Parse stage names and ``key=value`` words into a chain; ``base`` gives names and options to start from."""
    names = PRESETS.get(names, names)
    stage_names = [part.strip() for part in names.split(",") if part.strip()] if names else []
    if base is not None and not stage_names:
        stage_names = [stage.name for stage in base.stages]
    if len(set(stage_names)) != len(stage_names):
        raise GradFilterError(f"grad_filter {names!r}: a stage is named twice. Name each stage once")
    if "finite" in stage_names:
        stage_names.sort(key=lambda name: name != "finite")  # it always comes first
    registered = {name: resolve(name, allow_code) for name in stage_names}
    accepted = {name: _option_parameters(found) for name, found in registered.items()}
    values: dict[str, dict[str, Any]] = {name: {} for name in stage_names}
    chain_values: dict[str, Any] = {}
    if base is not None:
        values |= {stage.name: dict(stage.options) for stage in base.stages if stage.name in values}
        chain_values = dict(vars(base.options))
    for word in words:
        stage, key, text = _split_word(word, accepted)
        if stage is None:
            chain_values[key] = _parse_value(text, getattr(ChainOptions(), key), key)
        else:
            values[stage][key] = _parse_value(text, _default_of(accepted[stage][key]), key)
    options = ChainOptions(**chain_values)
    chain = ChainSpec(tuple(StageSpec(name, tuple(sorted(values[name].items()))) for name in stage_names), options)
    for stage_spec in chain.stages:
        _build_stage(stage_spec, allow_code)  # ranges are checked by building it
    return chain


def _default_of(parameter: inspect.Parameter) -> Any:
    if parameter.default is not inspect.Parameter.empty and parameter.default is not None:
        return parameter.default
    return {"int": 0, "float": 0.0, "bool": False}.get(
        str(getattr(parameter.annotation, "__name__", parameter.annotation)), ""
    )


def _split_word(word: str, accepted: Mapping[str, Mapping[str, Any]]) -> tuple[str | None, str, str]:
    """Give (stage or None for the chain, key, text) of a ``key=value`` or ``stage.key=value`` word."""
    left, equals, text = word.partition("=")
    if not equals or not left or not text:
        raise GradFilterError(f"grad_filter_args: {word!r} is not key=value. Example: --grad_filter_args keep=0.1")
    chain_keys = list(vars(ChainOptions()))
    for stage in accepted:  # a stage's own name may hold dots, so match whole names
        if left.startswith(f"{stage}."):
            key = left[len(stage) + 1 :]
            if key in accepted[stage]:
                return stage, key, text
            known = ", ".join(accepted[stage]) or "none"
            raise GradFilterError(
                f"grad_filter_args: {stage} has no option {key!r}.{_suggest(key, accepted[stage])} Known: {known}"
            )
    owners = [stage for stage, keys in accepted.items() if left in keys]
    if len(owners) > 1:
        choices = " or ".join(f"{stage}.{left}={text}" for stage in owners)
        raise GradFilterError(f"grad_filter_args: several stages have {left!r}. Write {choices}")
    if owners:
        return owners[0], left, text
    if left in chain_keys:
        return None, left, text
    known_words = sorted({*chain_keys, *(key for keys in accepted.values() for key in keys)})
    raise GradFilterError(
        f"grad_filter_args: no option is called {left!r}.{_suggest(left, known_words)} Known: {', '.join(known_words)}"
    )


def parse_spec(
    grad_filter: Any, grad_filter_args: Any = None, grad_filter_targets: Any = None, *, allow_code: bool = True
) -> FilterSpec | None:
    """Read the three settings, however they arrive, and check every part of them.

    Args:
        grad_filter: stages with commas, or a preset; empty, ``none`` or absent is off.
        grad_filter_args: ``key=value`` words. grad_filter_targets: ``pattern=stages``, ``pattern=none`` or
            ``pattern:key=value`` words. allow_code: whether ``file.py:Name`` may be used.

    Returns:
        The specification, None when the filter is off.

    Raises:
        GradFilterError: an unknown name or a wrong value.
    """
    names = ",".join(_words(grad_filter)) if not isinstance(grad_filter, str) else " ".join(_words(grad_filter))
    words, target_words = _words(grad_filter_args), _words(grad_filter_targets)
    if " " in names:  # "topk keep=0.1" in one string
        names, *more = names.split(" ")
        words = [*more, *words]
    if names.lower() in OFF_WORDS:
        if words or target_words:
            raise GradFilterError(
                f"grad_filter_args {' '.join([*words, *target_words])!r} without a filter. Example: --grad_filter topk"
            )
        return None
    chain = _parse_chain(names, words, allow_code)
    return FilterSpec(
        chain, tuple(_parse_target(word, chain, allow_code) for word in target_words), tuple(target_words)
    )


def _parse_target(word: str, chain: ChainSpec, allow_code: bool) -> Target:
    pattern, colon, setting = word.partition(":")
    if colon and "=" in setting and "=" not in pattern:
        return Target(pattern, _parse_chain("", setting.split(","), allow_code, base=chain))
    pattern, equals, names = word.partition("=")
    if not pattern or not equals:
        raise GradFilterError(
            f"grad_filter_targets: {word!r} is neither pattern=stages nor pattern:key=value. Example: te=none up:keep=0.5"
        )
    if names.lower() in OFF_WORDS:
        return Target(pattern, None)
    return Target(pattern, _parse_chain(names, [], allow_code, base=chain))


def _build_stage(spec: StageSpec, allow_code: bool = True) -> tuple[GradFilter, float | None]:
    registered = resolve(spec.name, allow_code)
    options = dict(spec.options)
    keep = None
    if _is_scoring(registered.factory) and STAGE_OPTION_KEEP not in inspect.signature(registered.factory).parameters:
        keep = options.pop(STAGE_OPTION_KEEP, 0.1)
        _require(0.0 < keep <= 1.0, spec.name, "keep", keep, "in (0, 1]", "0.1")
    return registered.factory(**options), keep


# --------------------------------------------------------------------------------------------------------- targets


@dataclass
class Tags:
    """What a parameter is called; the trainer says it with :func:`tag_parameter`."""

    name: str = ""
    role: str = ""
    block: str = ""


def tag_parameter(param: Tensor, name: str, role: str = "", block: str = "") -> None:
    """Name a parameter for targets, plans, pictures and saved states.

    Args:
        name: full name. role: ``down`` or ``up`` in a LoRA. block: block of the model, as IN08 or TE.
    """
    param._grad_filter_tags = Tags(name, role, block)  # type: ignore[attr-defined]


def _tags(param: Tensor) -> Tags:
    return getattr(param, "_grad_filter_tags", None) or Tags()


def matches(pattern: str, tags: Tags, group: int, index: int, shape: Sequence[int]) -> bool:
    """Say whether a target pattern means this parameter.

    A pattern is compared with the role (up, lora_up), the block (IN08), the part (unet, te), the group (group0), the
    position (index3), the shape (16x320) and the name; ``%`` or ``*`` stands for anything, and a part of the name is
    enough.
    """
    wanted = pattern.replace("%", "*").lower()
    part = "te" if tags.name.startswith(("lora_te", "text")) else "unet" if tags.name else ""
    words = [
        tags.role,
        f"lora_{tags.role}",
        tags.block,
        part,
        f"group{group}",
        f"index{index}",
        "x".join(map(str, shape)),
    ]
    if any(word and fnmatch.fnmatchcase(word.lower(), wanted) for word in words):
        return True
    return bool(tags.name) and (fnmatch.fnmatchcase(tags.name.lower(), wanted) or wanted in tags.name.lower())


# ---------------------------------------------------------------------------------------------------------- engine


class Stage:
    """A stage ready to run: which of the three methods it offers, and what that method wants to know."""

    def __init__(self, spec: StageSpec):
        self.name = spec.name
        self.filter, self.keep = _build_stage(spec)
        if isinstance(self.filter, _FunctionFilter):
            self.kind, method = "score_or_mask", self.filter.score_or_mask
        else:
            self.kind = next(kind for kind in KINDS if hasattr(self.filter, kind))
            method = getattr(self.filter, self.kind)
        self._method: Callable[..., Tensor] = method
        self._wants = tuple(
            k for k in inspect.signature(method).parameters if k in ("step", "index", "param", "context")
        )

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        state = self.filter.init_state(param.detach()) if hasattr(self.filter, "init_state") else {}
        for key, value in state.items():
            if not isinstance(value, Tensor):
                raise GradFilterError(
                    f"{self.name}: init_state gave {key} of type {type(value).__name__}, not a tensor"
                )
        return state

    def run(
        self, grad: Tensor, state: dict[str, Tensor], facts: Mapping[str, Any]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Give (new gradient, None) of a transform or (None, mask) of the others."""
        result = self._method(grad, state, **{key: facts[key] for key in self._wants})
        if not isinstance(result, Tensor) or result.shape != grad.shape:
            got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise GradFilterError(f"{self.name}: gave {got} for a gradient of shape {tuple(grad.shape)}")
        if self.kind == "transform":
            return result, None
        if self.kind == "mask" or result.dtype is torch.bool:
            return None, result
        nonnegative = self.filter.nonnegative_scores if isinstance(self.filter, GradFilter) else False
        return None, select_largest(result.float(), keep_count(self.keep or 1.0, result.numel()), nonnegative)


@dataclass
class Chain:
    """A chain ready to run."""

    spec: ChainSpec
    stages: list[Stage]
    skips_non_finite: bool

    @classmethod
    def build(cls, spec: ChainSpec) -> Chain:
        guards = [stage for stage in spec.stages if stage.name == "finite"]
        skips = not guards or dict(guards[0].options).get("nan", "skip") == "skip"
        return cls(spec, [Stage(stage) for stage in spec.stages], skips)


@dataclass
class Slot:
    """What is kept for one parameter: its chain, its buffers, how often it was filtered, and the running step's mask."""

    param: Tensor
    index: int
    group: int
    tags: Tags
    chain: Chain | None
    buffers: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    step: int = 0
    mask: Tensor | None = None
    before: dict[str, Tensor] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.tags.name or f"group{self.group}.index{self.index}"


class Statistics:
    """What the filter let through, gathered on the device and read only when asked.

    Kept shares of every tensor are remembered for pictures, thinned out so that memory stays bounded.
    """

    COLUMNS = 512

    def __init__(self) -> None:
        self.stride = 1
        self.steps: list[int] = []
        self.kept: list[dict[int, Tensor]] = []
        self._latest: dict[str, Tensor] = {}
        self.skipped_steps = 0
        self.zero_tensors = 0

    def record(self, step: int, kept: dict[int, Tensor], sizes: dict[int, int], energy: tuple[Tensor, Tensor]) -> None:
        """Remember the counts of passed entries of one step, by parameter position."""
        if not kept:
            return
        total = torch.stack([count.float() for count in kept.values()]).sum() / float(sum(sizes[i] for i in kept))
        passed, whole = energy
        self._latest = {"kept": total, "energy_kept": passed / whole.clamp(min=1e-30), "norm_before": whole.sqrt()}
        self._latest["norm_after"] = passed.sqrt()
        if len(self.steps) % self.stride == 0 or not self.steps or step % self.stride == 0:
            self.steps.append(step)
            self.kept.append({index: count.float() / sizes[index] for index, count in kept.items()})
        if len(self.steps) > self.COLUMNS:
            self.steps, self.kept, self.stride = self.steps[::2], self.kept[::2], self.stride * 2

    def scalars(self) -> dict[str, float]:
        """Give the latest numbers under ``grad_filter/``; this waits for the device."""
        latest = {f"grad_filter/{key}": float(value) for key, value in self._latest.items()}
        self._latest = {}
        if latest:
            latest["grad_filter/skipped_steps"] = float(self.skipped_steps)
        return latest

    def density(self) -> tuple[list[int], dict[int, list[float]]]:
        """Give the remembered steps and, by parameter position, the kept share at each of them (NaN where absent)."""
        positions = sorted({index for column in self.kept for index in column})
        rows = {i: [float(column[i]) if i in column else float("nan") for column in self.kept] for i in positions}
        return self.steps, rows


# ------------------------------------------------------------------------------------------------------ attachment

WEIGHT_LIKE_STATES = ("z",)  # schedule-free keeps a second copy of the weights there; it must stand still too


class FilterHandle:
    """A filter attached to an optimizer. Made by :func:`attach`.

    Attributes:
        spec: what was asked for. step: optimizer steps seen, left-out ones not counted.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, spec: FilterSpec, in_backward: bool = False):
        self.spec = spec
        self.step = 0
        self.statistics = Statistics()
        self.context: dict[str, Any] = {}
        self._optimizer = optimizer
        self._in_backward = in_backward
        self._chains: dict[str, Chain] = {}
        self._slots: dict[Tensor, Slot] = {}
        self._running: list[types.FrameType] = []
        self._left_out: tuple[list[tuple[Tensor, Tensor]], list[dict[str, Any]]] | None = None
        self._removers: list[Any] = []
        self._install()

    # ------------------------------------------------------------------------------------------- on and off

    def _install(self) -> None:
        optimizer = self._optimizer
        if self._in_backward:
            for slot in self._all_slots():
                hook = functools.partial(self._after_accumulation, slot)
                self._removers.append(slot.param.register_post_accumulate_grad_hook(hook))
        else:
            self._removers.append(optimizer.register_step_pre_hook(self._before_step))
            self._removers.append(optimizer.register_step_post_hook(self._after_step))
        optimizer._grad_filter_handle = self  # type: ignore[attr-defined]
        self._wrapped = {name: vars(optimizer).get(name) for name in ("state_dict", "load_state_dict")}
        for name, function in (
            ("state_dict", _state_dict),
            ("load_state_dict", _load_state_dict),
            ("__deepcopy__", _deepcopy),
            ("__reduce_ex__", _refuse_pickling),
        ):
            setattr(optimizer, name, types.MethodType(function, optimizer))

    def detach(self) -> None:
        """Leave the optimizer exactly as it was before :func:`attach`."""
        for remover in self._removers:
            remover.remove()
        self._removers = []
        for name in ("state_dict", "load_state_dict", "__deepcopy__", "__reduce_ex__"):
            vars(self._optimizer).pop(name, None)
            if self._wrapped.get(name) is not None:
                setattr(self._optimizer, name, self._wrapped[name])
        vars(self._optimizer).pop("_grad_filter_handle", None)

    def original(self, name: str) -> Callable[..., Any]:
        """Give the optimizer's own method that the filter stands in front of."""
        return self._wrapped[name] or types.MethodType(getattr(type(self._optimizer), name), self._optimizer)

    # ----------------------------------------------------------------------------------------------- slots

    def _all_slots(self) -> list[Slot]:
        index = 0
        slots = []
        for group_number, group in enumerate(self._optimizer.param_groups):
            for param in group["params"]:
                if param not in self._slots:
                    self._slots[param] = self._new_slot(param, index, group_number)
                slots.append(self._slots[param])
                index += 1
        return slots

    def _new_slot(self, param: Tensor, index: int, group: int) -> Slot:
        tags = _tags(param)
        chain: ChainSpec | None = self.spec.chain
        for target in self.spec.targets:
            if matches(target.pattern, tags, group, index, param.shape):
                chain = target.chain
        if chain is not None and param.numel() < chain.options.min_numel:
            chain = None
        if chain is None:
            return Slot(param, index, group, tags, None)
        built = self._chains.setdefault(chain.canonical(), Chain.build(chain))
        if self._in_backward and chain.options.policy != "zero":
            raise GradFilterError(
                f"grad_filter: policy={chain.options.policy} cannot work with --fused_backward_pass, where no step "
                f"ends. Use policy=zero"
            )
        return Slot(param, index, group, tags, built)

    # ------------------------------------------------------------------------------------------------ steps

    def set_context(self, **facts: Any) -> None:
        """Tell filters what this step is about: total_steps, timesteps and losses of its samples, and the like."""
        self.context = facts

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if self._is_inside(frame):
            return None  # a subclass that calls its parent's step
        self._running.append(frame)
        self._left_out = None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is None:
            self._filter_all()
            return None

        calls = 0

        def closure_then_filter() -> Any:
            nonlocal calls
            with torch.enable_grad():
                loss = closure()
            calls += 1
            self._filter_all(first=calls == 1)
            return loss

        return (
            ((args[0], closure_then_filter, *args[2:]), kwargs)
            if len(args) > 1
            else (args, {**kwargs, "closure": closure_then_filter})
        )

    def _is_inside(self, frame: types.FrameType | None) -> bool:
        """Say whether a step that began is still on the stack; a step that raised is not, and is forgotten."""
        stack = set()
        while frame is not None:
            stack.add(id(frame))
            frame = frame.f_back
        self._running = [running for running in self._running if id(running) in stack]
        return bool(self._running)

    @torch.no_grad()
    def _filter_all(self, first: bool = True) -> None:
        slots = [slot for slot in self._all_slots() if slot.param.grad is not None]
        scale, overflow = self._scaler_facts()
        if overflow or not slots:
            return
        largest = _largest_entries([slot.param.grad for slot in slots])  # one wait for the device a step
        finite = [value == value and value != float("inf") for value in largest]
        if any(slot.chain and slot.chain.skips_non_finite for slot, fine in zip(slots, finite) if not fine):
            bad = next(slot.name for slot, fine in zip(slots, finite) if not fine)
            self._leave_step_out(bad)
            return
        log_step = self.step % self.spec.chain.options.log_every == 0
        kept: dict[int, Tensor] = {}
        energies: list[tuple[Tensor, Tensor]] = []
        for slot, value in zip(slots, largest):
            if slot.chain is None:
                continue
            if value == 0.0:
                self.statistics.zero_tensors += 1
            elif slot.chain.spec.options.active(self.step):
                count, energy = self._filter_one(slot, scale, log_step)
                if log_step and count is not None:
                    kept[slot.index] = count
                    energies.append(energy)
        if log_step and energies:
            sizes = {slot.index: slot.param.numel() for slot in slots}
            passed, whole = (torch.stack(list(part)).sum() for part in zip(*energies))
            self.statistics.record(self.step, kept, sizes, (passed, whole))
        if first:
            self.step += 1

    def _scaler_facts(self) -> tuple[Tensor | None, bool]:
        """Read what a GradScaler left on a fused optimizer: the scale still on the gradients, and an overflow."""
        scale = getattr(self._optimizer, "grad_scale", None)
        found_inf = getattr(self._optimizer, "found_inf", None)
        return scale, bool(found_inf is not None and float(found_inf))

    def _filter_one(
        self, slot: Slot, scale: Tensor | None, measure: bool
    ) -> tuple[Tensor | None, tuple[Tensor, Tensor]]:
        """Run a parameter's chain and put the result into its gradient; give counts for the statistics."""
        assert slot.chain is not None and slot.param.grad is not None
        policy = slot.chain.spec.options.policy
        gradient = slot.param.grad
        if gradient.is_sparse:
            raise GradFilterError(f"grad_filter: the gradient of {slot.name} is sparse. Exclude it: {slot.name}=none")
        work = gradient.float() if scale is None else gradient.float() / scale
        start = work
        if not slot.buffers:
            slot.buffers = {stage.name: stage.init_state(slot.param) for stage in slot.chain.stages}
        facts = {"step": slot.step, "index": slot.index, "param": slot.param.detach(), "context": self.context}
        mask: Tensor | None = None
        for stage in slot.chain.stages:
            new, stage_mask = stage.run(work, slot.buffers[stage.name], facts)
            if new is not None:
                work = new
            elif stage_mask is not None:
                mask = stage_mask if mask is None else mask & stage_mask
                if policy == "zero":
                    work = torch.where(stage_mask, work, torch.zeros((), dtype=work.dtype, device=work.device))
        slot.step += 1
        if work is not start:
            gradient.copy_(work if scale is None else work * scale)
        if mask is not None and policy == "update":
            self._remember(slot, mask)
        if not measure or mask is None:
            return None, (start.new_zeros(()), start.new_zeros(()))
        whole = work if policy == "update" else start
        return mask.sum(), (torch.where(mask, whole, 0.0).square().sum(), whole.square().sum())

    def _remember(self, slot: Slot, mask: Tensor) -> None:
        slot.mask = mask
        state = self._optimizer.state.get(slot.param, {})
        slot.before = {"weight": slot.param.detach().clone()}
        for name in WEIGHT_LIKE_STATES:
            if isinstance(state.get(name), Tensor):
                slot.before[name] = state[name].clone()

    def _leave_step_out(self, bad: str) -> None:
        """Hide every gradient from the optimizer, so that it changes nothing; :meth:`_after_step` brings them back."""
        self.statistics.skipped_steps += 1
        log.warning("grad_filter: the gradient of %s is not finite, this step is left out", bad)
        gradients = [(slot.param, slot.param.grad) for slot in self._all_slots() if slot.param.grad is not None]
        groups = [{k: copy.copy(v) for k, v in g.items() if k != "params"} for g in self._optimizer.param_groups]
        for param, _ in gradients:
            param.grad = None
        self._left_out = (gradients, groups)

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._running or sys._getframe(1) is not self._running[-1]:
            return
        self._running.pop()
        if self._left_out is not None:
            gradients, groups = self._left_out
            for param, gradient in gradients:
                param.grad = gradient
            for group, values in zip(optimizer.param_groups, groups):
                group.update(values)  # counters that advance without any gradient
            self._left_out = None
        for slot in self._slots.values():
            if slot.mask is not None:
                self._put_back(slot)

    def _put_back(self, slot: Slot) -> None:
        assert slot.mask is not None
        slot.param.copy_(torch.where(slot.mask, slot.param, slot.before["weight"]))
        state = self._optimizer.state.get(slot.param, {})
        for name in WEIGHT_LIKE_STATES:
            now = state.get(name)
            if isinstance(now, Tensor) and now.shape == slot.param.shape:
                # before its first step the optimizer has no copy yet; it starts as the weights
                now.copy_(torch.where(slot.mask, now, slot.before.get(name, slot.before["weight"]).to(now.dtype)))
        slot.mask, slot.before = None, {}

    @torch.no_grad()
    def _after_accumulation(self, slot: Slot, param: Tensor) -> None:
        """Filter one parameter inside the backward pass, where no step is called."""
        if slot.chain is None or param.grad is None or not slot.chain.spec.options.active(slot.step):
            return
        largest = _largest_entries([param.grad])[0]
        if largest != largest or largest == float("inf"):
            if slot.chain.skips_non_finite:
                self.statistics.skipped_steps += 1
                param.grad = None
                return
        if largest != 0.0:
            self._filter_one(slot, None, measure=False)

    # ------------------------------------------------------------------------------------------ saved state

    def export_state(self) -> dict[str, Any]:
        """Give everything the filter must remember as tensors and plain values."""
        params = [
            {
                "name": slot.tags.name,
                "shape": list(slot.param.shape),
                "step": slot.step,
                "buffers": {f"{stage}.{key}": t for stage, own in slot.buffers.items() for key, t in own.items()},
            }
            for slot in self._all_slots()
        ]
        return {
            "version": STATE_VERSION,
            "spec": self.spec.canonical(),
            "step": self.step,
            "skipped_steps": self.statistics.skipped_steps,
            "params": params,
        }

    def import_state(self, saved: Mapping[str, Any]) -> None:
        """Take over a saved state; what does not fit starts fresh, with one line that says so."""
        if saved["spec"] != self.spec.canonical():
            log.warning(
                "grad_filter: the state was written with %r, %r is in force; buffers that differ start fresh",
                saved["spec"],
                self.spec.canonical(),
            )
        self.step = saved["step"]
        self.statistics.skipped_steps = saved["skipped_steps"]
        fresh = []
        slots = self._all_slots()
        for slot, entry in zip(slots, saved["params"]):
            if list(slot.param.shape) != entry["shape"] or (
                slot.tags.name and entry["name"] not in ("", slot.tags.name)
            ):
                fresh.append(slot.name)
                continue
            slot.step = entry["step"]
            slot.buffers = self._fitting_buffers(slot, entry["buffers"]) if slot.chain and entry["buffers"] else {}
        fresh += [slot.name for slot in slots[len(saved["params"]) :]]
        if fresh:
            log.warning(
                "grad_filter: the state does not fit %d tensors (first %s), they start fresh", len(fresh), fresh[0]
            )

    def _fitting_buffers(self, slot: Slot, saved: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        assert slot.chain is not None
        buffers = {stage.name: stage.init_state(slot.param) for stage in slot.chain.stages}
        for stage, own in buffers.items():
            for key, tensor in own.items():
                value = saved.get(f"{stage}.{key}")
                if value is not None and value.shape == tensor.shape:
                    own[key] = value.detach().to(tensor.device, tensor.dtype, copy=True)
        return buffers

    # ---------------------------------------------------------------------------------------------- reports

    def plan(self) -> list[str]:
        """Give lines for the start of a run: what is filtered how, what passes, what memory it takes."""
        slots = self._all_slots()
        by_chain: dict[str, list[Slot]] = {}
        for slot in slots:
            by_chain.setdefault(slot.chain.spec.canonical() if slot.chain else "", []).append(slot)
        lines = []
        for chain, members in by_chain.items():
            entries = sum(slot.param.numel() for slot in members)
            if not chain:
                lines.append(f"grad_filter: {len(members)} tensors ({entries} entries) pass untouched")
                continue
            built = members[0].chain
            assert built is not None
            probe = torch.zeros(1)
            buffers = sum(t.element_size() for stage in built.stages for t in stage.init_state(probe).values())
            extra = buffers * entries / 1e6
            lines.append(
                f"grad_filter: {chain} on {len(members)} tensors, {entries} entries, {extra:.1f} MB of buffers"
            )
        return lines

    def scalars(self) -> dict[str, float]:
        """Give the numbers of the latest logged step under ``grad_filter/``, empty between them."""
        return self.statistics.scalars()

    def metadata(self) -> dict[str, str]:
        """Give the entries recorded with a trained network."""
        return self.spec.metadata()

    def save_pictures(self, folder: Path) -> list[Path]:
        """Draw the kept share of every tensor over the steps; needs matplotlib and grad_filter_plots beside this file."""
        steps, rows = self.statistics.density()
        if not steps:
            return []
        from library import grad_filter_plots

        names = {slot.index: slot.name for slot in self._all_slots()}
        title = self.spec.canonical()
        return [
            grad_filter_plots.density_map(folder / "density.png", steps, {names[i]: r for i, r in rows.items()}, title)
        ]


def _largest_entries(gradients: Sequence[Tensor]) -> list[float]:
    """Give the largest magnitude in each gradient, NaN or Inf where it holds one, with one wait for each device."""
    dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    maxima = [
        gradient.abs().max().float() if gradient.numel() else gradient.new_zeros((), dtype=torch.float32)
        for gradient in dense
    ]
    if len({maximum.device for maximum in maxima}) == 1:
        return torch.stack(maxima).tolist()
    return [float(maximum) for maximum in maxima]


def _state_dict(optimizer: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    handle = optimizer._grad_filter_handle
    content = handle.original("state_dict")(*args, **kwargs)
    content[STATE_KEY] = handle.export_state()
    return content


def _load_state_dict(optimizer: Any, state_dict: dict[str, Any]) -> Any:
    handle = optimizer._grad_filter_handle
    rest = {key: value for key, value in state_dict.items() if key != STATE_KEY}
    result = handle.original("load_state_dict")(rest)
    saved = state_dict.get(STATE_KEY)
    if saved is None:
        log.warning("grad_filter: the loaded state was written without a filter, its buffers start fresh")
    elif saved.get("version", 0) > STATE_VERSION:
        raise GradFilterError(f"grad_filter: the state has version {saved['version']}, this file reads {STATE_VERSION}")
    else:
        handle.import_state(saved)
    return result


def report_unused_state(state_dict: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Say in one line that a state's filter buffers are not used, because no filter is attached."""
    if STATE_KEY in state_dict and handle_of(optimizer) is None:
        log.warning("grad_filter: the loaded state holds buffers of %r, no filter is on", state_dict[STATE_KEY]["spec"])


def _deepcopy(optimizer: Any, memo: dict[int, Any]) -> Any:
    handle: FilterHandle = optimizer._grad_filter_handle
    handle.detach()
    try:
        clone = copy.deepcopy(optimizer, memo)
    finally:
        handle._install()
    copied = FilterHandle(clone, handle.spec, handle._in_backward)
    copied.import_state(copy.deepcopy(handle.export_state()))
    memo[id(optimizer)] = clone
    return clone


def _refuse_pickling(optimizer: Any, protocol: int) -> Any:
    raise GradFilterError(
        "grad_filter: an optimizer with a filter cannot be pickled, its buffers would be lost. Save optimizer.state_dict()"
    )


def attach(optimizer: torch.optim.Optimizer, spec: FilterSpec | str, *, in_backward: bool = False) -> FilterHandle:
    """Put a filter in front of an optimizer; class, name, groups and signature of the optimizer stay what they are.

    Args:
        optimizer: any torch optimizer. spec: from :func:`parse_spec`, or text such as ``topk keep=0.1``.
        in_backward: the trainer never calls ``step``; filter each gradient as soon as it is complete.

    Raises:
        GradFilterError: a filter is attached already, or ``spec`` is wrong or off.
    """
    if handle_of(optimizer) is not None:
        raise GradFilterError("grad_filter: this optimizer has a filter already. Call its handle's detach() first")
    parsed = parse_spec(spec) if isinstance(spec, str) else spec
    if parsed is None:
        raise GradFilterError(
            "grad_filter: the specification is off, there is nothing to attach. Example: topk keep=0.1"
        )
    return FilterHandle(optimizer, parsed, in_backward)


def handle_of(optimizer: Any) -> FilterHandle | None:
    """Give the handle of the filter on an optimizer, None without one."""
    return getattr(optimizer, "_grad_filter_handle", None)


# ------------------------------------------------------------------------------------------------------ decorators


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the filter's options to a parser."""
    parser.add_argument(
        "--grad_filter", type=str, default=None, help="gradient filter: stages with commas or a preset, e.g. topk"
    )
    parser.add_argument(
        "--grad_filter_args", type=str, nargs="*", default=None, help="filter options, e.g. keep=0.1 policy=update"
    )
    parser.add_argument(
        "--grad_filter_targets",
        type=str,
        nargs="*",
        default=None,
        help="rules for some tensors, e.g. te=none up:keep=0.5",
    )


def with_grad_filter_arguments(add_optimizer_arguments: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that adds optimizer options to a parser: it adds the filter's options too."""

    @functools.wraps(add_optimizer_arguments)
    def wrapper(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        result = add_optimizer_arguments(parser, *args, **kwargs)
        add_arguments(parser)
        return result

    return wrapper


def _without_filter_items(optimizer_args: Any) -> tuple[Any, dict[str, list[str]]]:
    """Split ``optimizer_args`` into what is the optimizer's and the filter's settings among them."""
    found: dict[str, list[str]] = {"grad_filter": [], "grad_filter_args": [], "grad_filter_targets": []}
    rest = []
    for word in _words(optimizer_args):
        key, _, value = word.partition("=")
        if key in found:
            found[key].append(value)
        elif key.startswith("grad_filter."):
            found["grad_filter_args"].append(f"{key[len('grad_filter.') :]}={value}")
        else:
            rest.append(word)
    return (rest if any(found.values()) else optimizer_args), found


def spec_from_args(args: Any) -> FilterSpec | None:
    """Read the filter's settings from parsed options, wherever a front-end put them.

    Names of code are accepted from the command line only: ``args.config_keys`` may name options a file has set.

    Raises:
        GradFilterError: a wrong setting.
    """
    _, items = _without_filter_items(getattr(args, "optimizer_args", None))
    from_file = getattr(args, "config_keys", ())
    source = "optimizer_args" if items["grad_filter"] else "grad_filter"
    return parse_spec(
        (items["grad_filter"] or [None])[-1] or getattr(args, "grad_filter", None),
        [*_words(getattr(args, "grad_filter_args", None)), *items["grad_filter_args"]],
        [*_words(getattr(args, "grad_filter_targets", None)), *items["grad_filter_targets"]],
        allow_code=source not in from_file,
    )


def with_grad_filter(get_optimizer: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function ``(args, params) -> (name, args text, optimizer)``: it attaches the filter asked for.

    When the filter is off, the function runs as if it were not decorated.
    """

    @functools.wraps(get_optimizer)
    def wrapper(args: Any, trainable_params: Any, *more: Any, **kwargs: Any) -> Any:
        spec = spec_from_args(args)
        if spec is None:
            return get_optimizer(args, trainable_params, *more, **kwargs)
        original = getattr(args, "optimizer_args", None)
        rest, items = _without_filter_items(original)
        if any(items.values()):
            args.optimizer_args = rest
        try:
            name, text, optimizer = get_optimizer(args, trainable_params, *more, **kwargs)
        finally:
            if any(items.values()):
                args.optimizer_args = original
        handle = attach(optimizer, spec, in_backward=bool(getattr(args, "fused_backward_pass", False)))
        for line in handle.plan():
            log.info(line)
        recorded = f"grad_filter={spec.canonical().replace(' ', '|')}"
        return name, f"{text},{recorded}" if text else recorded, optimizer

    return wrapper


# ---------------------------------------------------------------------------------------------------- command line


def describe(name: str) -> str:
    """Give the documentation and the options of a filter."""
    registered = resolve(name)
    options = [f"  {key} = {_text(parameter.default)}" for key, parameter in _option_parameters(registered).items()]
    return "\n".join(
        [f"{name}: {registered.summary}", "", inspect.getdoc(registered.factory) or "", "", "Options:", *options]
    )


def check(name: str) -> list[str]:
    """Try a filter on small tensors and give one line for each promise it breaks.

    Raises:
        GradFilterError: the filter cannot be found or built.
    """
    problems: list[str] = []
    for shape in ((64,), (8, 16), (4, 4, 3, 3)):
        for dtype in (torch.float32, torch.bfloat16):

            def run(steps: int, resume_at: int | None, shape: Any = shape, dtype: Any = dtype) -> Tensor:
                param = torch.nn.Parameter(
                    torch.linspace(-1, 1, 64 if len(shape) == 1 else int(torch.tensor(shape).prod()))
                    .reshape(shape)
                    .to(dtype)
                )
                optimizer = torch.optim.SGD([param], lr=0.1)
                attach(optimizer, f"{name} min_numel=0")
                generator = torch.Generator().manual_seed(1)
                for step in range(steps):
                    if step == resume_at:
                        saved = copy.deepcopy(optimizer.state_dict())
                        optimizer = torch.optim.SGD([param], lr=0.1)
                        attach(optimizer, f"{name} min_numel=0")
                        optimizer.load_state_dict(saved)
                    gradient = torch.randn(shape, generator=generator).to(dtype)
                    param.grad = gradient.clone()
                    optimizer.step()
                    if not torch.isfinite(param).all():
                        raise GradFilterError(f"{name}: weights are not finite after step {step + 1}")
                return param.detach()

            label = f"shape {tuple(shape)}, {str(dtype).removeprefix('torch.')}"
            try:
                if not torch.equal(run(6, None), run(6, None)):
                    problems.append(f"{label}: two equal runs differ; draw random numbers from step and index")
                if not torch.equal(run(6, None), run(6, 3)):
                    problems.append(f"{label}: a resumed run differs; keep everything in state, nothing on self")
            except GradFilterError as error:
                problems.append(f"{label}: {error}")
            except Exception as error:
                problems.append(f"{label}: {type(error).__name__}: {error}")
    return problems


def main(words: Sequence[str] | None = None) -> int:
    """Run ``python -m library.grad_filter list | describe NAME | check FILE.py:Name``."""
    parser = argparse.ArgumentParser(prog="python -m library.grad_filter", description="look at gradient filters")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="print every filter")
    for command, text in (("describe", "print what a filter does"), ("check", "try a filter of your own")):
        commands.add_parser(command, help=text).add_argument("name")
    options = parser.parse_args(words)
    try:
        if options.command == "list":
            rows = [f"{found.name:16} {found.summary}" for found in sorted(FILTERS.values(), key=lambda row: row.name)]
            print("\n".join([*rows, *(f"{name:16} preset: {stages}" for name, stages in PRESETS.items())]))
        elif options.command == "describe":
            print(describe(options.name))
        else:
            problems = check(options.name)
            print("\n".join(problems) if problems else f"{options.name}: every check passed")
            return 1 if problems else 0
    except GradFilterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
