"""From the text beside an image to the text of one draw."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from library.errors import OptionError

INVISIBLE = dict.fromkeys(map(ord, "\u200b\u2060\ufeff"))
FOREIGN_COMMAS = "\uff0c\u3001\u060c"
GUESSED_ENCODINGS = ("cp932", "gbk", "cp1252")


class CaptionText(NamedTuple):
    """What a caption file holds.

    Attributes:
        text: visible text. odd_characters: invisible characters removed, plus commas that do not separate tags.
    """

    text: str
    odd_characters: int


@dataclass(frozen=True)
class CaptionOptions:
    """What happens to a caption at each draw; names and meanings as the subset options.

    Rates are probabilities. A ``token_warmup_step`` below 1 is a share of all training steps.
    """

    caption_prefix: str | None = None
    caption_suffix: str | None = None
    caption_dropout_rate: float = 0.0
    caption_dropout_every_n_epochs: int = 0
    enable_wildcard: bool = False
    shuffle_caption: bool = False
    caption_separator: str = ","
    secondary_separator: str | None = None
    keep_tokens: int = 0
    keep_tokens_separator: str = ""
    token_warmup_step: float = 0
    token_warmup_min: int = 1
    caption_tag_dropout_rate: float = 0.0

    @property
    def edits_tokens(self) -> bool:
        return self.shuffle_caption or self.token_warmup_step > 0 or self.caption_tag_dropout_rate > 0


def read_caption(path: Path, all_lines: bool) -> CaptionText:
    """Read a caption file.

    A byte-order mark, carriage returns, invisible characters and blank lines never become part of the text; a file
    with nothing else gives an empty caption.

    Args:
        path: an existing file in UTF-8. all_lines: keep every line (one is chosen at each draw), else the first only.

    Raises:
        OptionError: the file is not UTF-8.
    """
    text = decode_utf8(path.read_bytes(), str(path))
    visible = text.translate(INVISIBLE)
    lines = [line.strip() for line in visible.splitlines() if line.strip()]
    odd = len(text) - len(visible) + sum(map(visible.count, FOREIGN_COMMAS))
    return CaptionText("\n".join(lines if all_lines else lines[:1]), odd)


def decode_utf8(content: bytes, name: str) -> str:
    """Decode UTF-8 with or without a byte-order mark.

    Raises:
        OptionError: the bytes are in another encoding; the message names ``name`` and a guess.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        guess = _guess_encoding(content)
    raise OptionError(f"{name}: not UTF-8 text, perhaps {guess}. Save it as UTF-8 (in an editor: Save as, UTF-8)")


def _guess_encoding(content: bytes) -> str:
    if content.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in content:
        return "UTF-16"
    for encoding in GUESSED_ENCODINGS:
        try:
            content.decode(encoding)
        except UnicodeDecodeError:
            continue
        return encoding
    return "no text at all"


def process_caption(
    caption: str, options: CaptionOptions, rng: random.Random, *, epoch: int, step: int, max_train_steps: int
) -> str:
    """Give the caption of one draw.

    Args:
        caption: raw text, several lines when one is to be chosen. rng: the only source of chance.
        epoch: counts from 1. step: optimizer steps done before this draw. max_train_steps: of the whole run.
    """
    if options.caption_prefix:
        caption = f"{options.caption_prefix} {caption}"
    if options.caption_suffix:
        caption = f"{caption} {options.caption_suffix}"
    if _is_dropped(options, rng, epoch):
        return ""
    if options.enable_wildcard:
        caption = _choose_wildcards(caption, rng)
    else:
        caption = caption.split("\n", 1)[0]
    if options.edits_tokens:
        caption = _edit_tokens(caption, options, rng, step, max_train_steps)
    if options.secondary_separator:
        caption = caption.replace(options.secondary_separator, options.caption_separator)
    return caption


def _is_dropped(options: CaptionOptions, rng: random.Random, epoch: int) -> bool:
    if options.caption_dropout_rate > 0 and rng.random() < options.caption_dropout_rate:
        return True
    every = options.caption_dropout_every_n_epochs
    return every > 0 and epoch % every == 0


def _choose_wildcards(caption: str, rng: random.Random) -> str:
    line = rng.choice(caption.split("\n"))
    literal_open, literal_close = "\ue000", "\ue001"  # private-use characters stand for doubled braces meanwhile
    line = line.replace("{{", literal_open).replace("}}", literal_close)
    line = re.sub(r"\{([^}]+)\}", lambda choice: rng.choice(choice.group(1).split("|")), line)
    return line.replace(literal_open, "{").replace(literal_close, "}")


def _split_tokens(caption: str, options: CaptionOptions) -> tuple[list[str], list[str], list[str]]:
    def tokens(text: str) -> list[str]:
        return [token.strip() for token in text.strip().split(options.caption_separator)]

    mark = options.keep_tokens_separator
    if mark and mark in caption:
        parts = [*caption.split(mark, 2), ""]
        head, flexible, tail = ([token for token in tokens(part) if token] for part in parts[:3])
        return head, flexible, tail
    every = tokens(caption)
    return every[: options.keep_tokens], every[options.keep_tokens :], []


def _edit_tokens(caption: str, options: CaptionOptions, rng: random.Random, step: int, max_train_steps: int) -> str:
    head, flexible, tail = _split_tokens(caption, options)
    flexible = flexible[: _warmed_up_count(len(flexible), options, step, max_train_steps)]
    if options.shuffle_caption:
        rng.shuffle(flexible)
    if options.caption_tag_dropout_rate > 0:
        flexible = [token for token in flexible if rng.random() >= options.caption_tag_dropout_rate]
    return ", ".join(head + flexible + tail)


def _warmed_up_count(count: int, options: CaptionOptions, step: int, max_train_steps: int) -> int:
    warmup = options.token_warmup_step
    if 0 < warmup < 1:
        warmup = math.floor(warmup * max_train_steps)
    if step >= warmup:
        return count
    return math.floor(step * (count - options.token_warmup_min) / warmup) + options.token_warmup_min


def find_caption_file(image: Path, extension: str, exists: Callable[[Path], bool] = Path.is_file) -> Path | None:
    """Give the caption file of an image, None without one.

    The name of the image without its suffix plus ``extension`` comes first; then, for names that end in four
    numbers (face data: centre and size), the same without them.
    """
    stem = str(image.with_suffix(""))
    candidates = [Path(stem + extension)]
    pieces = stem.split("_")
    if len(pieces) >= 5:
        candidates.append(Path("_".join(pieces[:-4]) + extension))
    return next(filter(exists, candidates), None)
