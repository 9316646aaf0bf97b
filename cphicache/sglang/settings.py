"""What is ours alone to configure: one TOML file (``CPHICACHE_CONFIG=path``), or ``CPHICACHE_<NAME>`` variables, which win."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from cphicache.engine import WriteBackShort
from cphicache.events import Level
from cphicache.sglang.refusal import SglangRefused

PREFIX = "CPHICACHE_"
CONFIG_VARIABLE = "CPHICACHE_CONFIG"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Validated settings; the names are those of the TOML file and, in capitals behind ``CPHICACHE_``, of the variables.

    ``overlap``: submit a layer's copy when the layer has stored its KV; off: all layers at the end of the forward.
    ``max_deferral_ticks``: scheduler iterations that a request may be passed over. ``io_backend``: copy backend, empty for the one
    of ``--hicache-io-backend`` (on a CPU: ``torch``). ``log``: path of the event log, empty for none; with several ranks, one file a rank.
    ``rank_timeout_s``: seconds for which a rank is waited for, before the others name it and end.
    """

    overlap: bool = True
    max_deferral_ticks: int = 64
    max_retries: int = 4
    load_back_threshold: int = 10
    selective_hits: int = 2
    reclaim_device_valid: bool = False
    write_back_short: str = "wait"
    io_backend: str = ""
    log: str = ""
    log_level: str = "lifecycle"
    rank_timeout_s: int = 300

    def __post_init__(self) -> None:
        for name, known in (
            ("write_back_short", [item.value for item in WriteBackShort]),
            ("log_level", [level.name.lower() for level in Level]),
            ("io_backend", ["", "torch", "triton", "direct", "kernel"]),
        ):
            if getattr(self, name) not in known:
                raise SglangRefused(f"{name}={getattr(self, name)!r}: give one of {', '.join(repr(item) for item in known)}")
        if self.rank_timeout_s < 1:
            raise SglangRefused(f"rank_timeout_s={self.rank_timeout_s}: give at least 1 second")


def load_settings(environment: Mapping[str, str]) -> Settings:
    """The settings of this process. Raises :class:`SglangRefused` for a file, name or value that cannot be used, naming it."""
    kinds = {field.name: type(field.default) for field in fields(Settings)}
    values: dict[str, object] = {}
    path = environment.get(CONFIG_VARIABLE, "")
    if path:
        try:
            given = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise SglangRefused(f"{CONFIG_VARIABLE}={path}: {error}; give a readable TOML file") from error
        for name, value in given.items():
            if name not in kinds:
                raise SglangRefused(f"{path}: {name!r} is not a setting; give some of {', '.join(kinds)}")
            if type(value) is not kinds[name]:
                raise SglangRefused(f"{path}: {name}={value!r}: give a value of type {kinds[name].__name__}")
            values[name] = value
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable == CONFIG_VARIABLE:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in kinds:
            raise SglangRefused(
                f"{variable} is not a setting; unset it, or give some of {', '.join(PREFIX + n.upper() for n in kinds)}"
            )
        values[name] = _parse(variable, text, kinds[name])
    return replace(Settings(), **values)  # type: ignore[arg-type]


def _parse(variable: str, text: str, kind: type[object]) -> object:
    if kind is bool:
        if text.lower() in ("1", "true", "on"):
            return True
        if text.lower() in ("0", "false", "off"):
            return False
        raise SglangRefused(f"{variable}={text!r}: give true or false")
    if kind is int:
        try:
            return int(text)
        except ValueError as error:
            raise SglangRefused(f"{variable}={text!r}: give an integer") from error
    return text
