"""Page-aligned token keys of the radix tree.

A key is one ``bytes`` object of native int64 values, so that comparing two keys is ``memcmp`` and a chain of many nodes is matched
by moving an offset along the key instead of copying what is left of it at every node.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

PAGE_SIZE_MAX = 1024
"""Largest page size in tokens (R28)."""

ChildKey = bytes | tuple[str, bytes]
"""What a node is filed under in ``parent.children``: its first page, and under the root its namespace as well."""

_INT64_BYTES = 8


def check_page_size(page_size: int) -> int:
    """Return ``page_size`` (tokens) if it is one that the tree supports; ValueError otherwise."""
    if not 1 <= page_size <= PAGE_SIZE_MAX:
        raise ValueError(f"page_size {page_size} is not in 1..{PAGE_SIZE_MAX}: give the page size of the KV pool in tokens")
    return page_size


@dataclass(frozen=True, slots=True)
class RadixKey:
    """A token key of whole pages. Build it with :meth:`of`; the fields are read-only.

    Fields: ``data`` native int64 values (bigram: two an element), ``page_size`` in tokens, ``extra_key`` the namespace (LoRA
    adapter, salt; None and the empty string are two namespaces), ``is_bigram`` EAGLE keys, ``pages`` length in pages,
    ``page_bytes`` bytes a page. In a bigram key the element (t[i], t[i+1]) counts as one token.
    """

    data: bytes
    page_size: int
    extra_key: str | None
    is_bigram: bool
    pages: int
    page_bytes: int

    @classmethod
    def of(
        cls, tokens: Sequence[int] | array[int], page_size: int, extra_key: str | None = None, is_bigram: bool = False
    ) -> RadixKey:
        """Key of ``tokens``, cut down to whole pages; n tokens are n - 1 elements of a bigram key.

        Raises ValueError for a page size outside 1..1024 or a token that is not an int64.
        """
        check_page_size(page_size)
        if isinstance(tokens, array) and tokens.typecode == "q":
            values = tokens
        else:
            # array() would read a bytes object as raw int64 memory, hence the list.
            source = tokens if isinstance(tokens, (array, list, tuple)) else list(tokens)
            try:
                values = array("q", source)
            except (OverflowError, TypeError) as error:
                raise ValueError(f"a token of the key is not an int64 ({error}): give token ids as integers") from error
        element_bytes = _INT64_BYTES
        elements = len(values)
        if is_bigram:
            element_bytes = 2 * _INT64_BYTES
            elements = max(elements - 1, 0)
            pairs = array("q", bytes(elements * element_bytes))
            pairs[0::2] = values[:elements]
            pairs[1::2] = values[1:]
            values = pairs
        pages = elements // page_size
        page_bytes = page_size * element_bytes
        whole = elements == pages * page_size
        data = values.tobytes() if whole else memoryview(values).cast("B")[: pages * page_bytes].tobytes()
        return cls(data, page_size, extra_key, is_bigram, pages, page_bytes)

    @property
    def len_tokens(self) -> int:
        """Length in tokens (bigram: in elements); a multiple of the page size."""
        return self.pages * self.page_size

    def page(self, index: int) -> bytes:
        """The tokens of one page, which is the child key of a node that starts there below another node; IndexError outside."""
        if not 0 <= index < self.pages:
            raise IndexError(f"page {index} of a key of {self.pages} pages")
        start = index * self.page_bytes
        return self.data[start : start + self.page_bytes]

    def child_key(self, index: int, *, at_root: bool) -> ChildKey:
        """What a node that starts at page ``index`` is filed under. Under the root the namespace belongs to it, so that keys of
        two namespaces part at the root and share no node."""
        page = self.page(index)
        return (self.extra_key, page) if at_root and self.extra_key is not None else page

    def slice(self, start_page: int, end_page: int) -> RadixKey:
        """Pages ``[start_page, end_page)`` as a key of their own (a copy); IndexError when they are not inside the key."""
        if not 0 <= start_page <= end_page <= self.pages:
            raise IndexError(f"pages [{start_page}, {end_page}) of a key of {self.pages} pages")
        width = self.page_bytes
        data = self.data[start_page * width : end_page * width]
        return RadixKey(data, self.page_size, self.extra_key, self.is_bigram, end_page - start_page, width)

    def is_same_kind(self, other: RadixKey) -> bool:
        """Whether the two keys can share a prefix at all: same page size, namespace and bigram flag."""
        return self.page_bytes == other.page_bytes and self.is_bigram == other.is_bigram and self.extra_key == other.extra_key

    def common_pages(self, start_page: int, other: RadixKey, other_start_page: int = 0) -> int:
        """Number of equal pages of ``self`` from ``start_page`` on and ``other`` from ``other_start_page`` on.

        Copies nothing: one ``memcmp`` when all is equal, else a binary search for the first page that differs, which compares
        every byte at most twice.
        """
        limit = min(self.pages - start_page, other.pages - other_start_page)
        if limit <= 0 or not self.is_same_kind(other):
            return 0
        width = self.page_bytes
        mine, my_start = self.data, start_page * width
        # bytes.startswith is memcmp; == on memoryviews compares item by item.
        if limit == other.pages and mine.startswith(other.data, my_start):
            return limit  # the usual case of a walk, a whole node, needs no view
        theirs, their_start = memoryview(other.data), other_start_page * width
        if mine.startswith(theirs[their_start : their_start + limit * width], my_start):
            return limit
        low, high = 0, limit  # the first `low` pages are equal, the first page that differs is in [low, high)
        while high - low > 1:
            middle = (low + high) // 2
            if mine.startswith(theirs[their_start + low * width : their_start + middle * width], my_start + low * width):
                low = middle
            else:
                high = middle
        return low
