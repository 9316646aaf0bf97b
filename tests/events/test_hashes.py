"""Names of pages in the log."""

from __future__ import annotations

import pytest

from cphicache.events import page_hashes

PAGES = [b"aaaa", b"bbbb", b"aaaa"]


def test_names_are_chained() -> None:
    """R36: a page's name depends on all pages before it, so that equal names mean equal prefixes."""
    names = page_hashes(PAGES, b"secret")
    assert len(set(names)) == 3
    assert page_hashes(PAGES[:2], b"secret") == names[:2]
    assert page_hashes([b"xxxx", *PAGES[1:]], b"secret")[2] != names[2]
    assert page_hashes([], b"secret") == []


def test_names_are_keyed() -> None:
    """R36: another secret gives other names; a secret of no bytes, or of too many, is refused."""
    assert not set(page_hashes(PAGES, b"secret")) & set(page_hashes(PAGES, b"other"))
    for secret in (b"", bytes(65)):
        with pytest.raises(ValueError, match=f"secret has {len(secret)} bytes"):
            page_hashes(PAGES, secret)


def test_names_are_short() -> None:
    """R36: a name is 16 hex digits, whatever the page's size."""
    assert {len(name) for name in page_hashes([b"", bytes(100_000)], b"secret")} == {16}
