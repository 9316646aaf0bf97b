"""A rank's result as JSON, for the launcher."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import orjson

from cphicache.engine import Counters
from cphicache.run.model import Mismatch, Verdict
from cphicache.run.scheduler import Served
from cphicache.run.world import RankResult
from cphicache.transfer.rank import TransferCounters

_NUMBER_KEYS = frozenset({"ticks_to_visible"})
"""Counters whose keys are numbers, which JSON makes strings of."""


def encode(result: RankResult) -> str:
    """One line of JSON."""
    values: dict[str, Any] = {field.name: getattr(result, field.name) for field in fields(RankResult)}
    values["served"] = asdict(result.served)
    values["counters"] = {field.name: getattr(result.counters, field.name) for field in fields(Counters)}
    values["transfer"] = list(result.transfer)
    values["verdict"] = [
        result.verdict.mismatches,
        result.verdict.bytes_checked,
        [list(mismatch) for mismatch in result.verdict.evidence],
    ]
    values["log"] = None if result.log is None else os.fsencode(result.log).decode("latin-1")  # a path is bytes, in any encoding
    return orjson.dumps(values, option=orjson.OPT_NON_STR_KEYS).decode()


def decode(text: bytes) -> RankResult:
    """The result that :func:`encode` was given."""
    values = orjson.loads(text)
    mismatches, bytes_checked, evidence = values["verdict"]
    values["served"] = Served(**values["served"])
    values["counters"] = Counters(**{name: _count(name, value) for name, value in values["counters"].items()})
    values["transfer"] = TransferCounters(*values["transfer"])
    values["verdict"] = Verdict(mismatches, bytes_checked, [Mismatch(*each) for each in evidence])
    values["log"] = None if values["log"] is None else Path(os.fsdecode(values["log"].encode("latin-1")))
    return RankResult(**values)


def _count(name: str, value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return Counter({int(key) if name in _NUMBER_KEYS else key: count for key, count in value.items()})
