"""Request traces in the public Mooncake JSONL form, and the tokens that they stand for.

One JSON object a line: ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens) and ``hash_ids``, one id per 512 tokens of
the prompt. Equal ids are equal blocks, so two prompts whose first k ids agree share k x 512 tokens. Source of the form: the trace
release of github.com/kvcache-ai/Mooncake (FAST'25). The trace holds no text; the token ids here are made from the hash ids.
"""

from __future__ import annotations

import codecs
import json
import os
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cphicache.events.reader import LINE_BYTES

BLOCK_TOKENS = 512
"""Tokens that one hash id stands for in an unscaled trace; the last id of a prompt may stand for fewer."""
VOCAB_SIZE = 1 << 17
"""Token ids lie in ``[0, VOCAB_SIZE)``."""

_BITS, _OUTPUT_BITS = 63, 31
_TOKEN_SHIFT = np.uint64(64 - 17)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_PROMPT_DOMAIN = 0x70726F6D70740001
_OUTPUT_DOMAIN = 0x6F75747075740002

_Words = npt.NDArray[np.uint64]


class TraceError(ValueError):
    """A trace that cannot be read or written. The text is one line: file, line number, field, value, remedy."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. Lengths are tokens; ``index`` counts the requests of a trace in order of arrival, from 0.

    Block i of the prompt (``hash_ids[i]``) is ``block_tokens[i]`` long: ``block_size_tokens`` each, except that the last may be
    shorter: ``0 < input_length - (len(hash_ids) - 1) * block_size_tokens <= block_size_tokens``. ValueError otherwise.
    """

    index: int
    timestamp_ms: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    block_size_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        if not self.hash_ids or not 0 < self._last_block_tokens <= self.block_size_tokens:
            raise ValueError(
                f"input_length {self.input_length} does not fit {len(self.hash_ids)} hash_ids of {self.block_size_tokens} tokens; "
                f"give ceil(input_length / {self.block_size_tokens}) ids"
            )

    @property
    def _last_block_tokens(self) -> int:
        return self.input_length - (len(self.hash_ids) - 1) * self.block_size_tokens

    @property
    def block_tokens(self) -> tuple[int, ...]:
        """Tokens of each block, as long as ``hash_ids``; the sum is ``input_length``."""
        return (self.block_size_tokens,) * (len(self.hash_ids) - 1) + (self._last_block_tokens,)


def read_trace(path: str | os.PathLike[str], limit: int | None = None) -> list[TraceRequest]:
    """Read a Mooncake JSONL file: its first ``limit`` requests (all when None), sorted by timestamp, equal ones in file order.

    Lines after the last one that is needed are not looked at; blank lines, unknown fields and a byte order mark are ignored. A line is
    shorter than 64 MiB, as that of an event log. Numbers are whole and
    below 2**63, ``output_length`` below 2**31 (its tokens are made); ``len(hash_ids)`` is ``ceil(input_length / 512)``, as in both
    public traces.
    Raises :class:`TraceError` for anything else, and ValueError for a limit below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit {limit} is below 1; give a positive number of requests, or None for all")
    name = _one_line(os.fspath(path))
    requests: list[TraceRequest] = []
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(iter(partial(file.readline, LINE_BYTES), b""), start=1):
                where = f"{name} line {number}"
                if len(line) == LINE_BYTES:
                    raise TraceError(f"{where}: is longer than {LINE_BYTES - 1} bytes; give one JSON object a line")
                request = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if request.strip():
                    requests.append(_parse_line(request, where))
                    if len(requests) == limit:
                        break
    except OSError as error:
        raise TraceError(f"{name}: cannot be read ({error.strerror or error}); give a readable trace file") from error
    if not requests:
        raise TraceError(f"{name}: holds no request; give a file with one JSON object a line")
    requests.sort(key=lambda request: request.timestamp_ms)
    return [replace(request, index=index) for index, request in enumerate(requests)]


def scale_request(request: TraceRequest, factor: float) -> TraceRequest:
    """The same request with shorter blocks: a whole block becomes ``max(1, round(512 F))`` tokens, a last part and the output
    likewise (an output of 0 becomes 1: every request decodes).

    All requests of a trace are scaled by one factor; then equal ids are still equal tokens at equal positions.
    Raises ValueError unless ``0 < factor <= 1``.
    """
    if not 0 < factor <= 1:
        raise ValueError(f"scale factor {factor!r} is outside (0, 1]; give a share such as 0.125")
    block = _scaled(request.block_size_tokens, factor)
    last = _scaled(request.block_tokens[-1], factor)
    return replace(
        request,
        input_length=(len(request.hash_ids) - 1) * block + last,
        output_length=_scaled(request.output_length, factor),
        block_size_tokens=block,
    )


def prompt_tokens(request: TraceRequest) -> array[int]:
    """Token ids of the prompt (int64, ``input_length`` of them), each a pure function of (hash id, offset in its block).

    A block that is cut short holds the first tokens of the whole block.
    """
    size = request.block_size_tokens
    keys = _mix(np.array(request.hash_ids, dtype=np.uint64) + np.uint64(_PROMPT_DOMAIN))
    offsets = np.arange(size, dtype=np.uint64) * _GOLDEN
    words = _mix(keys[:, None] + offsets[None, :]) >> _TOKEN_SHIFT
    return _as_array(words.reshape(-1)[: request.input_length])


def output_tokens(request: TraceRequest, n: int) -> array[int]:
    """The first ``n`` token ids that the request decodes (int64), each a pure function of (request index, position in the output).

    A trace says nothing about them: a later prompt never continues them, except by accident. ValueError for a negative ``n``.
    """
    if n < 0:
        raise ValueError(f"n {n} is negative; give the number of output tokens wanted")
    key = _mix(np.array([request.index], dtype=np.uint64) + np.uint64(_OUTPUT_DOMAIN))
    return _as_array(_mix(key + np.arange(n, dtype=np.uint64) * _GOLDEN) >> _TOKEN_SHIFT)


def _parse_line(line: bytes, where: str) -> TraceRequest:
    try:
        parsed: Any = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise TraceError(f"{where}: is not UTF-8 at byte {error.start}; give one JSON object a line") from error
    except RecursionError as error:
        raise TraceError(f"{where}: is nested too deeply; give one flat JSON object a line") from error
    except ValueError as error:
        raise TraceError(f"{where}: is not JSON ({_one_line(str(error))}); give one JSON object a line") from error
    if not isinstance(parsed, dict):
        raise TraceError(f"{where}: found {_show(parsed)}; give one JSON object a line")
    timestamp_ms = _number(parsed, "timestamp", where, least=0, unit="milliseconds")
    input_length = _number(parsed, "input_length", where, least=1, unit="tokens")
    output_length = _number(parsed, "output_length", where, least=0, unit="tokens", bits=_OUTPUT_BITS)
    hash_ids = _field(parsed, "hash_ids", where)
    if not isinstance(hash_ids, list):
        raise TraceError(f'{where}: field "hash_ids": found {_show(hash_ids)}; give a list with one id per {BLOCK_TOKENS} tokens')
    for place, hash_id in enumerate(hash_ids):
        _check_number(hash_id, f'{where}: field "hash_ids"[{place}]', least=0, unit="ids")
    wanted = -(-input_length // BLOCK_TOKENS)
    if len(hash_ids) != wanted:
        raise TraceError(
            f'{where}: field "hash_ids": found {len(hash_ids)} ids for input_length {input_length}; '
            f"give {wanted}, one per {BLOCK_TOKENS} tokens"
        )
    return TraceRequest(0, timestamp_ms, input_length, output_length, tuple(hash_ids))


def _field(parsed: Mapping[str, Any], field: str, where: str) -> Any:
    if field not in parsed:
        raise TraceError(f'{where}: field "{field}": found nothing; add it (timestamp, input_length, output_length, hash_ids)')
    return parsed[field]


def _number(parsed: Mapping[str, Any], field: str, where: str, *, least: int, unit: str, bits: int = _BITS) -> int:
    value = _field(parsed, field, where)
    _check_number(value, f'{where}: field "{field}"', least=least, unit=unit, bits=bits)
    return int(value)


def _check_number(value: object, where: str, *, least: int, unit: str, bits: int = _BITS) -> None:
    # JSON's true is a Python int, and NaN and 1.0 are floats: neither is a count.
    if type(value) is not int or not least <= value < 1 << bits:
        raise TraceError(f"{where}: found {_show(value)}; give a whole number of {unit}, at least {least} and below 2**{bits}")


def _show(value: object) -> str:
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _one_line(text: str) -> str:
    return text if text.isprintable() else ascii(text)


def _scaled(tokens: int, factor: float) -> int:
    return max(1, round(tokens * factor))


def _mix(words: _Words) -> _Words:
    """Scramble 64-bit words (a bijection, shifts and odd multipliers of MurmurHash3's finaliser)."""
    words = (words ^ (words >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    words = (words ^ (words >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return words ^ (words >> np.uint64(33))


def _as_array(words: _Words) -> array[int]:
    tokens: array[int] = array("q")
    tokens.frombytes(words.astype(np.int64).tobytes())
    return tokens
