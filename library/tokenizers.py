"""CLIP tokenizers, found without any network: beside the model, in a local cache, or from a shipped vocabulary."""

from __future__ import annotations

import gzip
import importlib.util
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from library.errors import OptionError

BOS, EOS = "<|startoftext|>", "<|endoftext|>"
MAX_TOKENS = 77
MERGES = 49152 - 256 - 2  # size of CLIP's vocabulary less bytes and the two marks
VOCABULARY_FILE = "bpe_simple_vocab_16e6.txt.gz"


@dataclass(frozen=True)
class TokenizerKind:
    """Where a tokenizer comes from and how it pads.

    Attributes:
        hub_id, subfolder: where its files lie in a hub cache. pad_token: the token that fills a text up.
    """

    hub_id: str
    subfolder: str
    pad_token: str


KINDS = {
    "sd1": TokenizerKind("openai/clip-vit-large-patch14", "", EOS),
    "sd2": TokenizerKind("stabilityai/stable-diffusion-2", "tokenizer", "!"),  # "!" is id 0
    "sdxl1": TokenizerKind("openai/clip-vit-large-patch14", "", EOS),
    "sdxl2": TokenizerKind("laion/CLIP-ViT-bigG-14-laion2B-39B-b160k", "", "!"),
}


def byte_symbols() -> list[str]:
    """Give the printable symbol CLIP writes for each byte, in the order of its vocabulary.

    Printable Latin-1 bytes stand for themselves and come first; every other byte follows under the code points from
    256 upwards. Source: the byte-level encoding of GPT-2.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(256 + index) for index in range(len(rest))]


def write_tokenizer_files(folder: Path, vocabulary: Path, pad_token: str) -> None:
    """Write the files transformers' CLIPTokenizer reads, derived from the gzip list of merges.

    Args:
        folder: made when missing. vocabulary: the list as the open_clip_torch package ships it. pad_token: text.
    """
    lines = gzip.decompress(vocabulary.read_bytes()).decode("utf-8").split("\n")
    merges = lines[1 : MERGES + 1]
    symbols = byte_symbols()
    tokens = [
        *symbols,
        *(symbol + "</w>" for symbol in symbols),
        *("".join(merge.split()) for merge in merges),
        BOS,
        EOS,
    ]
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {token: index for index, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")
    special = {"bos_token": BOS, "eos_token": EOS, "unk_token": EOS, "pad_token": pad_token}
    config = {"tokenizer_class": "CLIPTokenizer", "model_max_length": MAX_TOKENS, "do_lower_case": True, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2), encoding="utf-8")


def shipped_vocabulary() -> Path | None:
    """Find the merge list inside an installed open_clip package without importing it, None without one."""
    spec = importlib.util.find_spec("open_clip")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(next(iter(spec.submodule_search_locations))) / VOCABULARY_FILE
    return path if path.is_file() else None


def find_tokenizer(kind: str, model_folder: Path | None = None, cache_dir: Path | None = None) -> Any:
    """Find a tokenizer on this machine.

    Looked for in this order: ``model_folder``/tokenizer, ``cache_dir`` (sub-folder = hub id with ``_`` for ``/``), the
    local hub cache, the vocabulary of an installed open_clip package.

    Args:
        kind: a key of ``KINDS``. model_folder: a Diffusers folder. cache_dir: ``--tokenizer_cache_dir``.

    Returns:
        transformers.CLIPTokenizer.

    Raises:
        OptionError: it is in none of these places.
    """
    from huggingface_hub import try_to_load_from_cache
    from transformers import CLIPTokenizer

    source = KINDS[kind]
    cached = cache_dir / source.hub_id.replace("/", "_") if cache_dir else None
    inside = model_folder / ("tokenizer_2" if kind == "sdxl2" else "tokenizer") if model_folder else None
    for folder in (inside, cached):
        if folder is not None and (folder / "vocab.json").is_file():
            return CLIPTokenizer.from_pretrained(str(folder))
    in_hub_cache = try_to_load_from_cache(source.hub_id, "/".join(filter(None, (source.subfolder, "vocab.json"))))
    if isinstance(in_hub_cache, str):
        return CLIPTokenizer.from_pretrained(str(Path(in_hub_cache).parent))
    vocabulary = shipped_vocabulary()
    if vocabulary is None:
        raise OptionError(
            f"no CLIP tokenizer on this machine for a single-file model ({source.hub_id} is not in the local hub "
            f"cache). Install its vocabulary: pip install --no-deps open_clip_torch"
        )
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer_files(Path(folder), vocabulary, source.pad_token)
        return CLIPTokenizer.from_pretrained(folder)
