"""The command line: parsers built from the table of options, and checks before anything is loaded."""

from __future__ import annotations

import json
import logging
import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from library import grad_filter
from library.args_table import ALWAYS, BY_NAME, DEPENDENT, REFUSED, ROWS, SCRIPTS, Row
from library.config_file import read_config_from_file
from library.errors import ErrorCollector, OptionError
from library.log import setup_logging
from library.naming import check_output_name, check_writable

log = logging.getLogger(__name__)

# --------------------------------------------------------------------------------------------------------- parsers


def _add(parser: ArgumentParser, row: Row) -> None:
    if row.kind is bool:
        parser.add_argument(f"--{row.name}", action="store_true", help=row.help.replace("%", "%%"))
    else:
        parser.add_argument(
            f"--{row.name}",
            type=row.kind,
            default=row.default,
            choices=row.choices,
            nargs=row.nargs,
            help=row.help.replace("%", "%%"),
        )


def _add_groups(parser: ArgumentParser, *groups: str) -> None:
    for row in ROWS:
        if row.group in groups:
            _add(parser, row)


def add_sd_models_arguments(parser: ArgumentParser) -> None:
    _add_groups(parser, "models")


def add_dataset_arguments(
    parser: ArgumentParser, support_dreambooth: bool, support_caption: bool, support_caption_dropout: bool
) -> None:
    """Add the data set options; the three flags leave out what a script has no use for."""
    left_out = set()
    if not support_dreambooth:
        left_out |= {"reg_data_dir"}
    if not support_caption:
        left_out |= {"in_json", "dataset_repeats"}
    if not support_caption_dropout:
        left_out |= {"caption_dropout_rate", "caption_dropout_every_n_epochs", "caption_tag_dropout_rate"}
    for row in ROWS:
        if row.group == "dataset" and row.name not in left_out:
            _add(parser, row)


def add_training_arguments(parser: ArgumentParser, support_dreambooth: bool) -> None:
    """Add the options of a run; ``prior_loss_weight`` belongs to scripts with regularisation images."""
    _add_groups(parser, "training")
    if support_dreambooth:
        _add(parser, BY_NAME["prior_loss_weight"])


def add_masked_loss_arguments(parser: ArgumentParser) -> None:
    _add_groups(parser, "masked_loss")


def add_sd_saving_arguments(parser: ArgumentParser) -> None:
    """Add the options that name the file format of a full model."""
    for row in SCRIPTS["sdxl_train"].rows():
        if row.group in ("file_format", "old_format"):
            _add(parser, row)


@grad_filter.with_grad_filter_arguments
def add_optimizer_arguments(parser: ArgumentParser) -> None:
    """Add the options of optimizer, schedule and gradient filter."""
    _add_groups(parser, "optimizer")


def add_custom_train_arguments(parser: ArgumentParser, support_weighted_captions: bool = True) -> None:
    for row in ROWS:
        if row.group == "custom_train" and (support_weighted_captions or row.name != "weighted_captions"):
            _add(parser, row)


def add_deepspeed_arguments(parser: ArgumentParser) -> None:
    _add_groups(parser, "deepspeed")


def add_model_spec_arguments(parser: ArgumentParser) -> None:
    _add_groups(parser, "model_spec")


def add_logging_arguments(parser: ArgumentParser) -> None:
    _add_groups(parser, "logging")


def add_sdxl_training_arguments(parser: ArgumentParser, support_text_encoder_caching: bool = True) -> None:
    """Add the options that only the SDXL scripts have."""
    for row in ROWS:
        if row.group == "sdxl" and (support_text_encoder_caching or not row.name.startswith("cache_text_encoder")):
            _add(parser, row)


def script_parser(name: str) -> ArgumentParser:
    """Build the parser of a script.

    Args:
        name: of the script, without ``.py``; a key of ``args_table.SCRIPTS``.
    """
    script = SCRIPTS[name]
    parser = ArgumentParser(description=script.summary, allow_abbrev=True)
    for row in script.rows():
        _add(parser, row)
    grad_filter.add_arguments(parser)
    return parser


def with_defaults(args: Namespace) -> Namespace:
    """Give a copy in which every option of every script has a value, so that one trainer serves all of them.

    Namespaces that other programs fill by hand come here too: one value stands for a list of one, a text for its words.
    """
    full = Namespace(**{**{row.name: False if row.kind is bool else row.default for row in ROWS}, **vars(args)})
    for row in ROWS:
        value = getattr(full, row.name)
        if row.nargs and value is not None and not isinstance(value, (list, tuple)):
            words = value.split() if isinstance(value, str) else [value]
            setattr(full, row.name, [row.kind(word) for word in words])
    for name in grad_filter.SETTINGS:
        setattr(full, name, getattr(args, name, None))
    return full


# ---------------------------------------------------------------------------------------------------------- checks


def refused_options(args: Namespace, script: str) -> list[str]:
    """Give one line for every refused option that asks for something."""
    lines = []
    for name, reason in {**REFUSED, **SCRIPTS[script].refused}.items():
        value = getattr(args, name, None)
        if value and value != BY_NAME[name].default:
            lines.append(f"--{name}: {reason}")
    return lines


def verify_command_line_training_args(args: Namespace) -> None:
    """Warn of a secret on the command line, where other users of the machine can read it."""
    for name in ("wandb_api_key", "huggingface_token"):
        if getattr(args, name, None):
            log.warning("--%s on the command line can be read by every user of this machine. Use a config file", name)


def check_options(args: Namespace, script: str = "train_network") -> None:
    """Check everything that needs no file's content, before anything is loaded.

    Args:
        script: name of the script whose options these are; scripts refuse different ones.

    Raises:
        OptionError: one line for each mistake.
    """
    args = with_defaults(args)
    errors = ErrorCollector()
    errors.messages += refused_options(args, script)
    with errors.check():
        _check_paths(args, {row.name for row in SCRIPTS[script].rows()})
    for check in (_check_lengths, _check_numbers, check_combinations):
        with errors.check():
            check(args)
    errors.raise_if_any()
    _say_what_wins(args)


def _check_paths(args: Namespace, options: Collection[str]) -> None:
    errors = ErrorCollector()
    need = {
        "pretrained_model_name_or_path": "Give a base model: a .safetensors file or a Diffusers folder",
        "output_dir": "Give a folder for the results, for example --output_dir output",
        "network_module": "Give a network, for example --network_module networks.lora",
    }
    for name, way_out in need.items():
        if name in options and not getattr(args, name):
            errors.messages.append(f"--{name} is missing. {way_out}")
    if args.output_dir:
        with errors.check():
            check_writable(Path(args.output_dir), "--output_dir")
    with errors.check():
        check_output_name(args.output_name)
    for name in ("network_weights", "vae"):
        value = getattr(args, name, None)
        if value and not Path(value).exists():
            errors.messages.append(f"--{name} {value}: there is no such file or folder. Check the path")
    if args.network_weights and args.output_dir and args.output_name:
        target = Path(args.output_dir) / f"{args.output_name}.{args.save_model_as}"
        if target.resolve() == Path(args.network_weights).resolve():
            errors.messages.append(
                f"--output_name: the result would replace --network_weights {target}. Use another name"
            )
    errors.raise_if_any()


POSITIVE = ("max_train_steps", "max_train_epochs", "gradient_accumulation_steps", "train_batch_size", "vae_batch_size")


def _check_lengths(args: Namespace) -> None:
    errors = ErrorCollector()
    for name in POSITIVE:
        value = getattr(args, name)
        if value is not None and value < 1:
            errors.messages.append(f"--{name} {value}: it must be at least 1. Example: --{name} 1")
    if args.max_data_loader_n_workers < 0:
        errors.messages.append("--max_data_loader_n_workers must be at least 0. Example: --max_data_loader_n_workers 0")
    errors.raise_if_any()


NOT_NEGATIVE = ("learning_rate", "unet_lr", "max_grad_norm", "scale_weight_norms", "noise_offset", "min_snr_gamma")


def _check_numbers(args: Namespace) -> None:
    errors = ErrorCollector()
    for name in NOT_NEGATIVE:
        value = getattr(args, name, None)
        if value is not None and not 0 <= value < math.inf:
            errors.messages.append(
                f"--{name} {value}: it must be a number of at least 0. Leave it out to switch it off"
            )
    if args.seed is not None and not 0 <= args.seed < 2**32:
        errors.messages.append(f"--seed {args.seed}: it must be in 0 to 4294967295. Leave it out to have one drawn")
    for value in args.text_encoder_lr or ():
        if not value >= 0:
            errors.messages.append(f"--text_encoder_lr {value}: it must be a number of at least 0")
    if args.network_dropout is not None and not 0 <= args.network_dropout < 1:
        errors.messages.append(f"--network_dropout {args.network_dropout}: it must be in [0, 1). Example: 0.1")
    if args.clip_skip is not None and args.clip_skip < 1:
        errors.messages.append(f"--clip_skip {args.clip_skip}: layers are counted from 1. Example: --clip_skip 2")
    for name, last in (("min_timestep", 999), ("max_timestep", 1000)):
        value = getattr(args, name)
        if value is not None and not 0 <= value <= last:
            errors.messages.append(f"--{name} {value}: it must be in 0 to {last}")
    errors.raise_if_any()


def check_combinations(args: Namespace) -> None:
    """Refuse options that contradict each other.

    Raises:
        OptionError: one line for each pair.
    """
    errors = ErrorCollector()
    if args.adaptive_noise_scale is not None and not args.noise_offset:
        errors.messages.append("--adaptive_noise_scale needs --noise_offset. Example: --noise_offset 0.05")
    if args.scale_v_pred_loss_like_noise_pred and not args.v_parameterization:
        errors.messages.append(
            "--scale_v_pred_loss_like_noise_pred needs --v_parameterization. Leave one out or add it"
        )
    if args.v_pred_like_loss and args.v_parameterization:
        errors.messages.append("--v_pred_like_loss does not go with --v_parameterization. Leave one of them out")
    if args.full_fp16 and args.full_bf16:
        errors.messages.append("--full_fp16 and --full_bf16 together: give one of them")
    if args.dim_from_weights and not args.network_weights:
        errors.messages.append("--dim_from_weights needs --network_weights. Give the file whose ranks are meant")
    if args.persistent_data_loader_workers and args.max_data_loader_n_workers == 0:
        log.info("--persistent_data_loader_workers has no effect with 0 workers")
    errors.raise_if_any()


def _say_what_wins(args: Namespace) -> None:
    for name, reason in ALWAYS.items():
        if getattr(args, name, False):
            log.info("--%s: %s", name, reason)
    if args.max_train_epochs is not None and args.max_train_steps != BY_NAME["max_train_steps"].default:
        log.info("--max_train_epochs %d wins over --max_train_steps %d", args.max_train_epochs, args.max_train_steps)
    if args.v2 and args.clip_skip:
        log.warning("--v2 with --clip_skip: models of Stable Diffusion 2.x are made for their last layer")
    if args.zero_terminal_snr and not args.v_parameterization:
        log.warning(
            "--zero_terminal_snr is meant for --v_parameterization: noise prediction learns nothing at the last step"
        )


def arguments_table() -> str:
    """Give docs/arguments.md's table: every option, where it is known, its type and default, and whether it works."""
    lines = ["| option | type | default | scripts | works | meaning |", "|---|---|---|---|---|---|"]
    rows_of = {name: {row.name: row for row in script.rows()} for name, script in SCRIPTS.items()}
    for row in ROWS:
        kind = "switch" if row.kind is bool else row.kind.__name__ + (" *" if row.nargs else "")
        scripts = [name for name, rows in rows_of.items() if row.name in rows]
        default = ", ".join(_once(json.dumps(rows_of[name][row.name].default) for name in scripts)).replace("null", "")
        where = "all" if len(scripts) == len(SCRIPTS) else ", ".join(scripts)
        help_text = row.help.replace("|", "\\|")
        lines.append(f"| `--{row.name}` | {kind} | {default} | {where} | {_works(row.name, scripts)} | {help_text} |")
    return "\n".join(lines) + "\n"


def _once(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def _works(name: str, scripts: Sequence[str]) -> str:
    if name in REFUSED:
        return f"refused: {REFUSED[name]}"
    if name in DEPENDENT:
        return f"only beside {DEPENDENT[name]}"
    if name in ALWAYS:
        return f"yes: {ALWAYS[name]}"
    reasons = {script: SCRIPTS[script].refused[name] for script in scripts if name in SCRIPTS[script].refused}
    if not reasons:
        return "yes"
    working = [script for script in scripts if script not in reasons]
    texts = [f"refused by {', '.join(reasons)}: {'; '.join(_once(reasons.values()))}"]
    return "; ".join(([f"in {', '.join(working)}"] if working else []) + texts)


def parse(parser: ArgumentParser, words: Sequence[str] | None) -> Namespace:
    """Parse a command line (None: the process's own) with its config file, and log as it says."""
    if words is not None:
        previous, sys.argv = sys.argv, [sys.argv[0], *words]
        try:
            args = read_config_from_file(parser.parse_args(), parser)
        finally:
            sys.argv = previous
    else:
        typed = parser.parse_args()
        verify_command_line_training_args(typed)
        args = read_config_from_file(typed, parser)
    if args.console_log_level or args.console_log_file:
        try:
            setup_logging(args.console_log_level, args.console_log_file)
        except OSError as error:
            raise OptionError(f"--console_log_file {args.console_log_file}: {error.strerror}. Give a file") from error
    return args
