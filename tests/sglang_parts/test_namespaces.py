"""SGLang's extra keys and cache salts as the engine's namespaces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cphicache.sglang.requests import join_namespace, split_namespace

KEYS = st.none() | st.text("0:a", max_size=4)
"""Made of what the joined form is made of, too."""


@given(KEYS, KEYS)
def test_a_namespace_comes_apart_as_it_was_joined(extra_key: str | None, salt: str | None) -> None:
    """R30: no two pairs of extra key and salt share a namespace; an empty salt is none, an empty extra key is one."""
    assert split_namespace(join_namespace(extra_key, salt)) == (extra_key, salt or None)


def test_no_namespace_is_none() -> None:
    """R30: requests without extra key and salt share the plain namespace."""
    assert join_namespace(None, None) is None
