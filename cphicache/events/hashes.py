"""Names for pages of tokens that can be compared but not read: chained, keyed hashes (R36)."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

DIGEST_BYTES = 8
"""Short, because a log holds many; two of a million pages are equal by chance once in 37 million logs."""


def page_hashes(key_bytes_per_page: Iterable[bytes], secret: bytes) -> list[str]:
    """One name a page, 16 hex digits each: equal names mean equal pages after equal prefixes.

    The ``secret`` (1..64 bytes) keeps the tokens from being guessed from the names; logs compare only under equal secrets.
    """
    if not 1 <= len(secret) <= blake2b.MAX_KEY_SIZE:
        raise ValueError(f"secret has {len(secret)} bytes: give 1 to {blake2b.MAX_KEY_SIZE}")
    names = []
    previous = bytes(DIGEST_BYTES)
    for page in key_bytes_per_page:
        previous = blake2b(previous + page, digest_size=DIGEST_BYTES, key=secret).digest()
        names.append(previous.hex())
    return names
