"""What is trained on: data set options from a file, from folder names or from the command line, checked together.

Every option is declared once, in :class:`SubsetSpec` or :class:`DatasetSpec`. A value is looked for in the subset,
then its data set, then ``[general]``, then the command line; the first one found counts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import re
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from library.errors import ErrorCollector, OptionError, OptionErrors, did_you_mean
from library.old_names import lookup

log = logging.getLogger(__name__)

PLUGINS = {".avif": "pillow_avif", ".jxl": "pillow_jxl"}  # newer Pillow reads AVIF without one
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
INTERPOLATIONS = ("lanczos", "box", "nearest", "bilinear", "linear", "bicubic", "cubic", "area")
FOLDERS_OF_ARCHIVES = {"__MACOSX"}


class Kind(str, Enum):
    """How the images of a data set are found."""

    DREAMBOOTH = "DreamBooth"
    FINE_TUNING = "fine-tuning"
    MASK = "mask"


ALL_KINDS = frozenset(Kind)
FOLDER_KINDS = frozenset({Kind.DREAMBOOTH, Kind.MASK})


class Declared(NamedTuple):
    """Where an option may stand: levels of a file (``G`` general, ``D`` data set, ``S`` subset), kinds, argument."""

    levels: str
    kinds: frozenset[Kind]
    argument: str | None


def option(
    default: Any,
    levels: str,
    example: Any,
    *,
    kinds: Iterable[Kind] = ALL_KINDS,
    argument: str | None = "",
    **bounds: Any,
) -> Any:
    """Declare one option.

    Args:
        default: value when no level gives one. levels: where a file may give it, of "GDS".
        example: a value shown when the given one is refused. kinds: data sets that know it at D and S level.
        argument: name on the command line; empty for the same name, None for none. bounds: as pydantic's ``Field``.
    """
    declared = Declared(levels, frozenset(kinds), argument)
    return Field(default, examples=[example], json_schema_extra={"declared": declared}, **bounds)  # type: ignore[arg-type]


def _refuse_text(value: Any) -> Any:
    if isinstance(value, str):
        raise ValueError("text where a number or true/false belongs")
    return value


def _parse_resolution(value: Any) -> Any:
    if isinstance(value, str):
        pieces = value.split(",")
        if not all(re.fullmatch(r"\s*\d+\s*", piece) for piece in pieces):
            raise ValueError("a resolution is one or two whole numbers")
        value = [int(piece) for piece in pieces]
    if isinstance(value, (int, float)):
        value = [value]
    return [*value, *value] if len(value) == 1 else value


def _parse_range(value: Any) -> Any:
    if isinstance(value, str):
        try:
            value = [float(piece) for piece in value.split(",")]
        except ValueError:
            raise ValueError("a range is two numbers") from None
    if isinstance(value, (list, tuple)) and len(value) == 2 and not 0 < value[0] <= value[1]:
        raise ValueError("a range is two positive numbers, the smaller one first")
    return value


def _parse_interpolation(value: Any) -> Any:
    if value is not None and value not in INTERPOLATIONS:
        raise ValueError(f"known: {', '.join(INTERPOLATIONS)}.{did_you_mean(str(value), INTERPOLATIONS)}")
    return value


Whole = Annotated[int, BeforeValidator(_refuse_text)]
Number = Annotated[float, BeforeValidator(_refuse_text)]
Switch = Annotated[bool, BeforeValidator(_refuse_text)]
Side = Annotated[int, Field(gt=0)]
Resolution = Annotated[tuple[Side, Side], BeforeValidator(_parse_resolution)]
Range = Annotated[tuple[float, float], BeforeValidator(_parse_range)]
Interpolation = Annotated[str, BeforeValidator(_parse_interpolation)]


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def declared(cls) -> dict[str, Declared]:
        """Give every option a person may set, by name."""
        extras = {name: field.json_schema_extra for name, field in cls.model_fields.items()}
        return {name: extra["declared"] for name, extra in extras.items() if isinstance(extra, dict)}  # type: ignore[misc]


class SubsetSpec(_Spec):
    """One folder (or metadata file) of images and what is done to them and their captions."""

    image_dir: str | None = option(None, "S", "data/10_cat", argument=None)
    metadata_file: str | None = option(None, "S", "data/metadata.json", kinds=[Kind.FINE_TUNING], argument=None)
    conditioning_data_dir: str | None = option(None, "S", "data/masks", kinds=[Kind.MASK], argument=None)
    is_reg: Switch = option(False, "S", "true", kinds=[Kind.DREAMBOOTH], argument=None)
    alpha_mask: Switch = option(False, "S", "true", kinds=[Kind.DREAMBOOTH, Kind.FINE_TUNING])
    class_tokens: str | None = option(None, "GDS", "cat", kinds=[Kind.DREAMBOOTH], argument=None)
    caption_extension: str = option(".caption", "GDS", ".txt", kinds=FOLDER_KINDS)
    cache_info: Switch = option(False, "GDS", "false", kinds=FOLDER_KINDS)
    num_repeats: Whole = option(1, "GDS", 10, argument="dataset_repeats")
    shuffle_caption: Switch = option(False, "GDS", "true")
    caption_separator: str = option(",", "GDS", ",", min_length=1)
    keep_tokens: Whole = option(0, "GDS", 1, ge=0)
    keep_tokens_separator: str = option("", "GDS", "|||")
    secondary_separator: str | None = option(None, "GDS", ";;;")
    enable_wildcard: Switch = option(False, "GDS", "true")
    caption_prefix: str | None = option(None, "GDS", "a photo of")
    caption_suffix: str | None = option(None, "GDS", "high quality")
    caption_dropout_rate: Number = option(0.0, "GDS", 0.1, ge=0, le=1)
    caption_dropout_every_n_epochs: Whole = option(0, "GDS", 5, ge=0)
    caption_tag_dropout_rate: Number = option(0.0, "GDS", 0.1, ge=0, le=1)
    token_warmup_min: Whole = option(1, "GDS", 1, ge=0)
    token_warmup_step: Number = option(0, "GDS", 0.2, ge=0)
    color_aug: Switch = option(False, "GDS", "true")
    flip_aug: Switch = option(False, "GDS", "true")
    random_crop: Switch = option(False, "GDS", "true")
    face_crop_aug_range: Range | None = option(None, "GDS", "[1.0, 2.0]")
    resize_interpolation: Interpolation | None = option(None, "GDS", "lanczos")
    custom_attributes: dict[str, Any] = option({}, "GDS", "{ diff_output_preservation = true }", argument=None)

    @property
    def name(self) -> str:
        """Name of the folder or metadata file, without the folders above it."""
        return Path(self.metadata_file or self.image_dir or "").name


class DatasetSpec(_Spec):
    """Subsets that share sizes and batches.

    ``source`` says where the data set was described; ``kind`` how its images are found.
    """

    source: str
    kind: Kind
    subsets: tuple[SubsetSpec, ...]
    resolution: Resolution = option(..., "GD", 512)
    batch_size: Whole = option(1, "GD", 1, argument="train_batch_size", ge=1)
    enable_bucket: Switch = option(False, "GD", "true")
    min_bucket_reso: Whole = option(256, "GD", 256, ge=1)
    max_bucket_reso: Whole = option(1024, "GD", 1024, ge=1)
    bucket_reso_steps: Whole = option(64, "GD", 64, ge=1)
    bucket_no_upscale: Switch = option(False, "GD", "true")
    validation_split: Number = option(0.0, "GD", 0.1)
    validation_seed: Whole | None = option(None, "GD", 42)
    network_multiplier: Number = option(1.0, "GD", 1.0, argument=None)
    resize_interpolation: Interpolation | None = option(None, "GD", "lanczos")
    prior_loss_weight: Number = option(1.0, "", 1.0)


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the option that names a data set file."""
    parser.add_argument(
        "--dataset_config", type=Path, default=None, help="TOML or JSON file that describes data sets and their subsets"
    )


# ------------------------------------------------------------------------------------------------- reading a file


def load_user_config(file: str | Path) -> dict[str, Any]:
    """Read a data set file.

    Raises:
        OptionError: the file is missing, no TOML or JSON by its name, not UTF-8, or cannot be parsed.
    """
    path = Path(file)
    suffix = path.suffix.lower()
    if suffix not in (".toml", ".json"):
        raise OptionError(f"--dataset_config {path}: the name must end in .toml or .json. Example: dataset.toml")
    if not path.is_file():
        raise OptionError(f"--dataset_config {path}: no such file. Give the path of an existing .toml or .json file")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise OptionError(f"--dataset_config {path}: not UTF-8 text. Save the file as UTF-8") from None
    return _parse_json(path, text) if suffix == ".json" else _parse_toml(path, text)


def _parse_json(path: Path, text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise OptionError(f"--dataset_config {path}: no valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise OptionError(f'--dataset_config {path}: must hold one object. Example: {{"datasets": [...]}}')
    return content


def _parse_toml(path: Path, text: str) -> dict[str, Any]:
    import toml

    try:
        return toml.loads(text)
    except (ValueError, IndexError, TypeError, KeyError) as error:  # toml leaks what its parser stumbles over
        line = getattr(error, "lineno", None)
        hint = " Write paths in single quotes or with / instead of backslashes." if "\\" in text else ""
        place = "" if line is None else f", line {line}"
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise OptionError(f"--dataset_config {path}{place}: no valid TOML: {reason}.{hint}") from None


# --------------------------------------------------------------------------------------------- looking values up


@dataclass(frozen=True)
class _Level:
    """Values of one level of the file, and how a message names the place."""

    place: str
    values: Mapping[str, Any]

    def table(self, key: str) -> list[_Level]:
        """Give the tables of an array of tables, numbered from 1 as a person counts them."""
        items = self.values.get(key, [])
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise OptionError(f"{self.place}: {key} must be a list of tables. Example: [[{key}]]")
        return [_Level(f"{self.place}, {key}[{number}]", item) for number, item in enumerate(items, start=1)]


def _check_keys(level: _Level, known: Iterable[str], elsewhere: Mapping[str, str]) -> Iterator[str]:
    """Give a message for every key of a level that does not belong there."""
    known = set(known)
    for key in level.values:
        if key in known:
            continue
        if key in elsewhere:
            yield f"{level.place}: {key} does not belong here, {elsewhere[key]}"
        else:
            yield f"{level.place}: unknown key {key!r}.{did_you_mean(key, known)} Known: {', '.join(sorted(known))}"


LEVEL_NAMES = {"G": "[general]", "D": "[[datasets]]", "S": "[[datasets.subsets]]"}


def _keys_at(level: str, kind: Kind | None) -> set[str]:
    declared = [*SubsetSpec.declared().items(), *DatasetSpec.declared().items()]
    return {name for name, at in declared if level in at.levels and (kind is None or kind in at.kinds)}


def _places(kind: Kind) -> dict[str, str]:
    """Say of every known key where it may stand instead."""
    places = {}
    for name, at in [*SubsetSpec.declared().items(), *DatasetSpec.declared().items()]:
        if kind not in at.kinds:
            places[name] = f"a {kind.value} data set does not use it: remove the line"
        elif at.levels:
            places[name] = f"put it into {' or '.join(LEVEL_NAMES[level] for level in at.levels)}"
    return places


def _argument_level(args: Namespace, spec: type[_Spec]) -> _Level:
    """Read the command-line values that options of ``spec`` fall back to; None means not given."""
    values = {}
    for name, at in spec.declared().items():
        value = None if at.argument is None else getattr(args, at.argument or name, None)
        if name == "caption_extension":  # an old misspelling of the option wins over it
            value = getattr(args, "caption_extention", None) or value
        if value is not None:
            values[name] = value
    return _Level("command line", values)


def _build(spec: type[Any], levels: Sequence[_Level], fixed: Mapping[str, Any]) -> Any:
    """Look every option of ``spec`` up and check it.

    Raises:
        OptionErrors: values that do not fit, each with its place.
    """
    found = {
        name: (level, level.values[name])
        for name in spec.declared()
        for level in levels  # the nearest comes last and replaces what the others say
        if name in level.values
    }
    try:
        return spec(**{name: value for name, (_, value) in found.items()}, **fixed)
    except ValidationError as errors:
        raise OptionErrors(
            list(dict.fromkeys(_message(spec, str(error["loc"][0]), found, error, levels) for error in errors.errors()))
        ) from None


def _message(spec: type[_Spec], name: str, found: Mapping[str, Any], error: Any, levels: Sequence[_Level]) -> str:
    example = (spec.model_fields[name].examples or [""])[0]
    if name not in found:
        return f"{levels[-1].place}: no {name} given. Example: {name} = {example}, or --{name} {example}"
    level, value = found[name]
    reason = error["msg"].removeprefix("Value error, ")
    if level.place == "command line":
        argument = spec.declared()[name].argument or name
        return f"--{argument} {value}: {reason}. Example: --{argument} {example}"
    return f"{level.place}: {name} = {value!r}: {reason}. Example: {name} = {example}"


# ------------------------------------------------------------------------------------------------ building specs


def parse_resolution(value: Any) -> tuple[int, int] | None:
    """Give (width, height) of what ``--resolution`` holds, None without one.

    Raises:
        OptionError: it is no one or two numbers.
    """
    if not value:
        return None
    try:
        width, height = _parse_resolution(value)
    except ValueError as error:
        raise OptionError(f"--resolution {value}: {error}. Example: --resolution 512,512") from error
    return int(width), int(height)


def load_dataset_specs(args: Namespace) -> list[DatasetSpec]:
    """Read what to train on from the parsed options.

    Raises:
        OptionError: anything that keeps training from finding its images, with the place and an example.
    """
    if getattr(args, "dataset_config", None):
        source, config = f"--dataset_config {args.dataset_config}", load_user_config(args.dataset_config)
        _warn_of_ignored(args)
    elif getattr(args, "in_json", None):
        source = f"--in_json {args.in_json}"
        subset = {"image_dir": getattr(args, "train_data_dir", None), "metadata_file": str(args.in_json)}
        config = {"datasets": [{"subsets": [{key: value for key, value in subset.items() if value}]}]}
    else:
        source = f"--train_data_dir {getattr(args, 'train_data_dir', None)}"
        subsets = subsets_of_folders(getattr(args, "train_data_dir", None), getattr(args, "reg_data_dir", None))
        config = {"datasets": [{"subsets": subsets}]}
    specs = build_specs(config, source, args)
    _check_folders(specs)
    return specs


def _warn_of_ignored(args: Namespace) -> None:
    ignored = [name for name in ("train_data_dir", "reg_data_dir", "in_json") if getattr(args, name, None)]
    if ignored:
        log.warning("--dataset_config describes the data: %s not used", ", ".join(f"--{name}" for name in ignored))


def build_specs(config: Mapping[str, Any], source: str, args: Namespace) -> list[DatasetSpec]:
    """Turn the content of a data set file into checked specs.

    Args:
        config: tables as in a file. source: how messages name it. args: what missing values fall back to.

    Raises:
        OptionError: unknown keys, misplaced keys, values that do not fit, no data set; all of them together.
    """
    top = _Level(source, config)
    general_values = config.get("general", {})
    if not isinstance(general_values, dict):
        raise OptionError(f"{source}: [general] must be one table, not a list of tables")
    general = _Level(f"{source}, [general]", general_values)
    errors = ErrorCollector()
    errors.messages += _check_keys(top, ("general", "datasets"), {})
    errors.messages += _check_keys(general, _keys_at("G", None), _places(Kind.DREAMBOOTH))
    levels = top.table("datasets")
    if not getattr(args, "dataset_config", None):  # a person knows the option, not the table made from it
        levels = [replace(level, place=source) for level in levels]
    specs = []
    for level in levels:
        with errors.check():
            specs.append(_build_dataset(level, general, args))
    errors.raise_if_any()
    if not specs:
        raise OptionError(f"{source}: no data set in it. Example: [[datasets]] with [[datasets.subsets]] below")
    return specs


def _build_dataset(level: _Level, general: _Level, args: Namespace) -> DatasetSpec:
    errors = ErrorCollector()
    subset_levels = level.table("subsets")
    if not subset_levels:
        raise OptionError(f'{level.place}: no subsets. Example: [[datasets.subsets]] with image_dir = "data/10_cat"')
    kind = _kind_of(level, subset_levels, bool(getattr(args, "masked_loss", False)))
    errors.messages += _check_keys(level, {*_keys_at("D", kind), "subsets"}, _places(kind))
    base = [_argument_level(args, SubsetSpec), general, level]
    subsets: list[SubsetSpec] = []
    for subset_level in subset_levels:
        errors.messages += _check_keys(subset_level, _keys_at("S", kind), _places(kind))
        with errors.check():
            subset = _build(SubsetSpec, [*base, subset_level], {})
            _check_source(subset, kind, subset_level)
            subsets.append(_with_dotted_extension(subset, subset_level))
    fixed = {"source": level.place, "kind": kind, "subsets": _without_duplicates(subsets, level.place)}
    with errors.check():
        spec = _build(DatasetSpec, [_argument_level(args, DatasetSpec), general, level], fixed)
    errors.raise_if_any()
    return spec


def _kind_of(level: _Level, subsets: Sequence[_Level], masked_loss: bool) -> Kind:
    def count(key: str) -> int:
        return sum(key in subset.values for subset in subsets)

    if masked_loss and count("conditioning_data_dir") == len(subsets):
        return Kind.MASK
    with_metadata = count("metadata_file")
    if 0 < with_metadata < len(subsets):
        raise OptionError(
            f"{level.place}: {with_metadata} of {len(subsets)} subsets have a metadata_file. "
            f"Put subsets with and without one into two [[datasets]]"
        )
    return Kind.FINE_TUNING if with_metadata else Kind.DREAMBOOTH


def _check_source(subset: SubsetSpec, kind: Kind, level: _Level) -> None:
    if not subset.image_dir and kind is not Kind.FINE_TUNING:
        raise OptionError(f'{level.place}: no image_dir given. Example: image_dir = "data/10_cat"')


def _with_dotted_extension(subset: SubsetSpec, level: _Level) -> SubsetSpec:
    extension = subset.caption_extension
    if not extension or "." in extension:
        return subset
    log.warning("%s: caption_extension %r has no dot: using %r", level.place, extension, f".{extension}")
    return subset.model_copy(update={"caption_extension": f".{extension}"})


def _without_duplicates(subsets: Sequence[SubsetSpec], place: str) -> tuple[SubsetSpec, ...]:
    kept: dict[str, SubsetSpec] = {}
    for subset in subsets:
        source = subset.metadata_file or subset.image_dir or ""
        if source in kept:
            log.warning("%s: %s is listed twice, the second subset is dropped", place, source)
        kept.setdefault(source, subset)
    return tuple(kept.values())


# ------------------------------------------------------------------------------------------------------- folders


@lru_cache(maxsize=1)
def readable_suffixes() -> frozenset[str]:
    """Give the suffixes of image files that can be read here, all lower and all upper case."""
    from PIL import features

    lower = {*IMAGE_SUFFIXES, *(suffix for suffix, module in PLUGINS.items() if importlib.util.find_spec(module))}
    if features.check("avif"):
        lower.add(".avif")
    return frozenset(lower | {suffix.upper() for suffix in lower})


def list_images(folder: Path) -> list[Path]:
    """List the images that lie directly in a folder, sorted; hidden files and leftovers of archives are no images."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix in readable_suffixes() and not path.name.startswith(".") and path.is_file()
    )


def repeats_of_name(name: str) -> int | None:
    """Give the number a folder name starts with (``10_cat``), None when it starts with none."""
    try:
        return int(name.split("_", 1)[0])
    except ValueError:
        return None


def subsets_of_folders(train_data_dir: str | None, reg_data_dir: str | None) -> list[dict[str, Any]]:
    """Describe the ``N_name`` folders below the two parents as subsets of a data set file.

    Raises:
        OptionError: a parent is missing, or there is no such folder with training images.
    """
    if not train_data_dir:
        raise OptionError(
            "no training data: give --train_data_dir data (with images in data/10_name) or --dataset_config"
        )
    train = _subsets_below(Path(train_data_dir), "--train_data_dir", is_reg=False)
    if not train:
        raise OptionError(_explain_nothing_found(Path(train_data_dir)))
    if not reg_data_dir:
        return train
    return train + _subsets_below(Path(reg_data_dir), "--reg_data_dir", is_reg=True)


def _subsets_below(parent: Path, argument: str, is_reg: bool) -> list[dict[str, Any]]:
    if not parent.is_dir():
        raise OptionError(f"{argument} {parent}: no such folder. Example: a folder data with images in data/10_cat")
    subsets = []
    for folder in sorted(path for path in parent.iterdir() if path.is_dir()):
        if folder.name.startswith(".") or folder.name in FOLDERS_OF_ARCHIVES:
            continue
        repeats = repeats_of_name(folder.name)
        if repeats is None or repeats < 1:
            log.warning("%s: %s ignored, its name does not start with a count (as 10_cat)", argument, folder)
            continue
        class_tokens = folder.name.partition("_")[2]
        subset = {"image_dir": str(folder), "num_repeats": repeats, "class_tokens": class_tokens}
        subsets.append({**subset, "is_reg": True} if is_reg else subset)
    return subsets


def _explain_nothing_found(parent: Path) -> str:
    images = len(list_images(parent))
    folders = [path.name for path in sorted(parent.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    wanted = f"--train_data_dir {parent}: looked for folders named like 10_cat"
    if images and repeats_of_name(parent.name):
        return f"{wanted} in it, found {images} images. Give the folder above instead: --train_data_dir {parent.parent}"
    if images:
        return f"{wanted} in it, found {images} images. Move them one level down, for example to {parent / '10_name'}"
    if folders:
        return f"{wanted} in it, found {', '.join(folders[:5])}. Rename, for example to {parent / f'10_{folders[0]}'}"
    return f"{wanted} in it, found nothing. Put images into {parent / '10_name'}"


def _check_folders(specs: Sequence[DatasetSpec]) -> None:
    """Refuse folders that are not there and data sets without a single training image."""
    errors = ErrorCollector()
    for spec in specs:
        for subset in spec.subsets:
            with errors.check():
                _check_folder(subset, spec.source)
    errors.raise_if_any()
    for spec in specs:
        if spec.kind in FOLDER_KINDS:
            _check_training_images(spec)


def _check_folder(subset: SubsetSpec, place: str) -> None:
    for name in ("image_dir", "conditioning_data_dir"):
        folder = getattr(subset, name)
        if folder and not Path(folder).is_dir():
            raise OptionError(f"{place}: {name} {folder}: no such folder. Give a folder that holds images")
    if subset.metadata_file and not Path(subset.metadata_file).is_file():
        raise OptionError(f"{place}: metadata_file {subset.metadata_file}: no such file. Give a .json or .jsonl file")


def _check_training_images(spec: DatasetSpec) -> None:
    training = [subset for subset in spec.subsets if not subset.is_reg and subset.num_repeats > 0]
    if not training:
        raise OptionError(f"{spec.source}: only regularization images. Add a folder without is_reg to train on")
    if any(list_images(Path(subset.image_dir or "")) for subset in training):
        return
    folder = Path(training[0].image_dir or "")
    below = sorted(path for path in folder.iterdir() if path.is_dir() and list_images(path))
    hint = f"Images lie one level deeper, in {below[0]}" if below else "Put images directly into it"
    raise OptionError(
        f"{spec.source}: no images ({', '.join(IMAGE_SUFFIXES)}) in {folder}. {hint}. "
        f"Example: {folder / 'picture.png'} with {folder / 'picture.txt'}"
    )


# names of other programs
__getattr__, _ = lookup(
    __name__,
    dict.fromkeys(
        (
            "ConfigSanitizer",
            "BlueprintGenerator",
            "generate_dataset_group_by_blueprint",
            "generate_dreambooth_subsets_config_by_subdirs",
        ),
        "library.old_signatures",
    ),
)
