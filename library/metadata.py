"""Metadata of saved networks: ss_* keys, modelspec keys, and the hashes that tools look for. All values are text."""

from __future__ import annotations

import hashlib

LEGACY_OFFSET, LEGACY_LENGTH = 0x100000, 0x10000


def safetensors_hashes(blob: bytes) -> tuple[str, str]:
    """Give (sshs_model_hash, sshs_legacy_hash) of a safetensors file's bytes with only ss_ metadata in its header.

    The first is the SHA-256 of everything behind the header, the second the first 8 digits of the SHA-256 over 64 KiB
    at offset 1 MiB.
    """
    data_start = 8 + int.from_bytes(blob[:8], "little")
    legacy = hashlib.sha256(blob[LEGACY_OFFSET : LEGACY_OFFSET + LEGACY_LENGTH]).hexdigest()[:8]
    return hashlib.sha256(blob[data_start:]).hexdigest(), legacy
