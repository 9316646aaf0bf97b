"""Rows of the running requests, as the calls of their owner tell them: what the outside checker must know."""

from __future__ import annotations

from collections.abc import Sequence

from cphicache.engine import CpHiRadixCache
from cphicache.reexecute.player import Call, Result
from cphicache.spaces.types import LogicalPage


class Rows:
    """Follows who has which page outside the tree. Pages whose owner has not been told yet are ``loose``."""

    def __init__(self) -> None:
        self.rows: dict[str, list[LogicalPage]] = {}
        self.loose: set[LogicalPage] = set()
        self._guessed: set[LogicalPage] = set()
        self._coming: dict[str, list[LogicalPage]] = {}
        self._untold: set[str] = set()
        """Running requests whose match was found without a call: nothing says which pages they begin with until they tell their row."""

    def is_known(self, cache: CpHiRadixCache) -> bool:
        """Whether every page has an owner here and every running request a row: else the checker cannot be asked now."""
        return not self.loose and self.rows.keys() == cache.state.requests.keys() - cache.state.parked.keys()

    def take(self, call: Call, result: Result) -> None:
        """The call has been made."""
        rid = call.get("request", "")
        match call["call"]:
            case "prepare":
                self._coming[rid] = list(result.pages)
                return
            case "load_back":
                self._coming.setdefault(rid, []).extend(result.pages)
                return
            case "admit":
                self._admitted(rid, self._coming.pop(rid, []), call["pages"])
                return
            case "alloc":
                self._allocated(list(result.pages), call["after"])
                return
            case "free":
                gone = set(call["pages"])
                self.loose -= gone
                for row in self.rows.values():
                    row[:] = [page for page in row if page not in gone]
                return
        if "row" in call:
            self._owned(rid, call["row"])
        if call["call"] in ("finish", "end_request"):
            self.rows.pop(rid, None)
            self._untold.discard(rid)
        elif "row" in call and (rid in self.rows or rid in self._untold):
            self.rows[rid] = [*result.pages, *call["row"][len(result.pages) :]]
            self._untold.discard(rid)

    def _admitted(self, rid: str, given: list[LogicalPage], pages: int) -> None:
        if len(given) < pages:
            self._untold.add(rid)
        else:
            self.rows[rid] = given[:pages]

    def _allocated(self, pages: list[LogicalPage], after: LogicalPage | None) -> None:
        """They go to whom they continue: the row that ends in ``after``, or the empty row that was begun last."""
        for row in (*reversed(self.rows.values()), *self._coming.values()):
            if (row[-1] if row else None) == after:
                row.extend(pages)
                self._guessed.update(pages)
                return
        self.loose.update(pages)

    def _owned(self, rid: str, row: Sequence[LogicalPage]) -> None:
        """The owner of these pages is told: two rows that end in one page of the tree may have been taken for each other."""
        self.loose.difference_update(row)
        wrong = self._guessed.intersection(self.rows.get(rid, ())).difference(row)
        self._guessed -= wrong
        self.loose |= wrong
        told = self._guessed.intersection(row)
        if told:
            self._guessed -= told
            for other in (*(row for name, row in self.rows.items() if name != rid), *self._coming.values()):
                other[:] = [page for page in other if page not in told]
