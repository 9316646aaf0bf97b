"""Reading traces, scaling requests, and making their tokens."""

import codecs
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cphicache.run import trace
from cphicache.run.trace import (
    BLOCK_TOKENS,
    VOCAB_SIZE,
    TraceError,
    TraceRequest,
    output_tokens,
    prompt_tokens,
    read_trace,
    scale_request,
)

GOOD = {"timestamp": 7, "input_length": 1000, "output_length": 3, "hash_ids": [4, 5]}


def line(**changed: Any) -> str:
    return json.dumps({name: value for name, value in {**GOOD, **changed}.items() if value is not ...})


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "trace.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def request(hash_ids: tuple[int, ...], last: int = BLOCK_TOKENS, output: int = 10, index: int = 0) -> TraceRequest:
    return TraceRequest(index, 0, (len(hash_ids) - 1) * BLOCK_TOKENS + last, output, hash_ids)


def refusal(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    text = str(caught.value)
    assert text.isprintable(), "one line"
    assert text.startswith(str(path))
    return text


def test_requests_are_read_in_order_of_arrival(tmp_path: Path) -> None:
    """R24: requests come sorted by timestamp, equal ones in file order, numbered from 0; blank lines and extra fields pass."""
    lines = ["", line(timestamp=9, hash_ids=[1, 2]), "  \t", line(hash_ids=[3, 4], other="x"), line(hash_ids=[5, 6]), ""]
    found = read_trace(written(tmp_path, "\r\n".join(lines)))
    assert [(r.index, r.timestamp_ms, r.hash_ids) for r in found] == [(0, 7, (3, 4)), (1, 7, (5, 6)), (2, 9, (1, 2))]
    assert found[0] == TraceRequest(0, 7, 1000, 3, (3, 4))
    assert found[0].block_tokens == (512, 488)


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    """R24: editors of some systems put one at the beginning, before a blank line too; anywhere else it is no JSON."""
    mark = codecs.BOM_UTF8
    for before in (mark, mark + b"\n", mark + b"\r\n\r\n"):
        (found,) = read_trace(written(tmp_path, before + line().encode()))
        assert found == TraceRequest(0, 7, 1000, 3, (4, 5))
    assert "line 2: is not JSON" in refusal(written(tmp_path, line().encode() + b"\n" + mark + line().encode()))


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_line_is_bounded(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R35: of a file without line ends, such as a device, no more than a line is read; the bound is told."""
    most = len(line()) + 1
    monkeypatch.setattr(trace, "LINE_BYTES", most + 1)
    assert len(read_trace(written(tmp_path, f"{line()}\n{line()}{end}"))) == 2
    assert f" line 2: is longer than {most} bytes; give" in refusal(written(tmp_path, f"{line()}\n{line()}  {end}"))


def test_a_limit_takes_the_first_lines_and_looks_no_further(tmp_path: Path) -> None:
    """R24: a limit of N takes the file's first N requests; what follows is not read, so not judged either."""
    path = written(tmp_path, f"{line(timestamp=5)}\n\n{line(timestamp=1)}\nbroken\n")
    assert [r.timestamp_ms for r in read_trace(path, limit=2)] == [1, 5]
    assert len(read_trace(written(tmp_path, line()), limit=99)) == 1
    with pytest.raises(ValueError, match="limit 0 is below 1"):
        read_trace(path, limit=0)


@pytest.mark.parametrize(
    ("bad", "wanted"),
    [
        ("{", ["is not JSON", "one JSON object a line"]),
        ('{"timestamp": ' + "1" * 5000 + "}", ["is not JSON"]),
        ("[" * 100_000, ["nested too deeply"]),
        (b"\xff{}", ["is not UTF-8 at byte 0"]),
        ("[1, 2]", ["found a list of 2", "one JSON object a line"]),
        ("null", ["found null"]),
        (line(timestamp=...), ['field "timestamp": found nothing', "add it"]),
        (line(input_length=...), ['field "input_length": found nothing']),
        (line(output_length=...), ['field "output_length": found nothing']),
        (line(hash_ids=...), ['field "hash_ids": found nothing']),
        (line(timestamp=-1), ['field "timestamp": found -1', "milliseconds, at least 0"]),
        (line(timestamp=float("nan")), ['field "timestamp": found NaN']),
        (line(timestamp=None), ['field "timestamp": found null']),
        (line(input_length=0, hash_ids=[]), ['field "input_length": found 0', "at least 1"]),
        (line(input_length=-5), ['field "input_length": found -5']),
        (line(input_length=True), ['field "input_length": found true', "whole number"]),
        (line(input_length=1000.0), ['field "input_length": found 1000.0']),
        (line(input_length="1\n0"), ['field "input_length": found "1\\n0"']),
        (line(input_length="9" * 999), ['field "input_length": found "999', "..."]),
        (line(input_length={}), ['field "input_length": found an object of 0']),
        (line(output_length=-1), ['field "output_length": found -1']),
        (line(output_length=2**31), ['field "output_length": found 2147483648', "below 2**31"]),
        (line(timestamp=2**63), ['field "timestamp": found 9223372036854775808', "below 2**63"]),
        (line(hash_ids="12"), ['field "hash_ids": found "12"', "a list"]),
        (line(hash_ids=[1, -2]), ['field "hash_ids"[1]: found -2']),
        (line(hash_ids=[False, 2]), ['field "hash_ids"[0]: found false']),
        (line(hash_ids=[[[1]], 2]), ['field "hash_ids"[0]: found a list of 1']),
        (line(hash_ids=[1]), ['field "hash_ids": found 1 ids for input_length 1000; give 2']),
        (line(hash_ids=[1, 2, 3]), ['field "hash_ids": found 3 ids for input_length 1000; give 2']),
        (line(input_length=1025), ['field "hash_ids": found 2 ids for input_length 1025; give 3']),
    ],
)
def test_a_malformed_line_is_refused_in_one_line(tmp_path: Path, bad: str | bytes, wanted: list[str]) -> None:
    """R35: a malformed trace line gives one line of text that names file, line number (blank lines count), field, value, remedy."""
    data = bad if isinstance(bad, bytes) else bad.encode()
    text = refusal(written(tmp_path, line().encode() + b"\n\n" + data + b"\n"))
    assert " line 3: " in text
    assert len(text) < len(str(tmp_path)) + 250
    for part in wanted:
        assert part in text


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    """R35: an empty file, a missing one and a folder are refused with the reason."""
    assert "holds no request" in refusal(written(tmp_path, ""))
    assert "holds no request" in refusal(written(tmp_path, "\n \n"))
    assert "cannot be read (No such file" in refusal(tmp_path / "absent.jsonl")
    assert "cannot be read" in refusal(tmp_path)


def test_a_request_knows_its_blocks() -> None:
    """R24: block lengths sum up to the input; lengths and ids that do not fit each other are refused."""
    assert request((1, 2, 3), last=1).block_tokens == (512, 512, 1)
    assert request((1,)).block_tokens == (512,)
    for input_length, hash_ids in ((0, ()), (512, ()), (512, (1, 2)), (513, (1,)), (0, (1,))):
        with pytest.raises(ValueError, match="does not fit"):
            TraceRequest(0, 0, input_length, 1, hash_ids)


@pytest.mark.parametrize(
    ("factor", "last", "output", "blocks", "scaled_output"),
    [
        (0.125, 512, 80, (64, 64, 64), 10),
        (0.125, 100, 3, (64, 64, 12), 1),
        (0.05, 512, 500, (26, 26, 26), 25),
        (0.05, 5, 0, (26, 26, 1), 1),
        (0.0001, 300, 1, (1, 1, 1), 1),
        (1, 7, 9, (512, 512, 7), 9),
    ],
)
def test_scaling_rounds_blocks_last_parts_and_outputs(
    factor: float, last: int, output: int, blocks: tuple[int, ...], scaled_output: int
) -> None:
    """R24: a block is max(1, round(512 F)) tokens, a last part and the output likewise; ids, index and arrival stay."""
    whole = request((1, 2, 3), last=last, output=output, index=4)
    scaled = scale_request(whole, factor)
    assert scaled.block_tokens == blocks
    assert scaled.input_length == sum(blocks)
    assert scaled.output_length == scaled_output
    assert (scaled.index, scaled.timestamp_ms, scaled.hash_ids) == (4, 0, (1, 2, 3))


@pytest.mark.parametrize("factor", [0, -1, 1.5, float("nan"), float("inf")])
def test_a_factor_that_does_not_shrink_is_refused(factor: float) -> None:
    """R35: factors outside (0, 1] are refused by value."""
    with pytest.raises(ValueError, match=f"scale factor {factor!r} is outside"):
        scale_request(request((1,)), factor)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    ids=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    other_ids=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    lasts=st.tuples(st.integers(1, 512), st.integers(1, 512)),
    factor=st.sampled_from([1.0, 0.125, 0.05, 0.01, 0.0005]),
)
def test_scaling_keeps_sharing(ids: list[int], other_ids: list[int], lasts: tuple[int, int], factor: float) -> None:
    """R24: under one factor, equal ids are equal tokens at equal positions, as far as both blocks go."""
    one = scale_request(request(tuple(ids), lasts[0]), factor)
    two = scale_request(request(tuple(other_ids), lasts[1]), factor)
    tokens, others = prompt_tokens(one), prompt_tokens(two)
    assert (len(tokens), len(others)) == (one.input_length, two.input_length)
    size = one.block_size_tokens
    for place, (a, b) in enumerate(zip(one.hash_ids, two.hash_ids, strict=False)):
        shared = min(one.block_tokens[place], two.block_tokens[place]) if a == b else 0
        first = place * size
        assert tokens[first : first + shared] == others[first : first + shared]


def test_prompt_tokens_are_a_pure_function_of_id_and_offset() -> None:
    """R24: a block's tokens depend on its id and the offset alone, not on its place or request; ids tell them apart."""
    tokens = prompt_tokens(request((9, 2**63 - 1, 9), last=100, index=1))
    assert tokens[1024:] == tokens[:100]
    assert tokens[:512] == prompt_tokens(request((9,), index=77))
    many = np.frombuffer(prompt_tokens(request(tuple(range(400)))), dtype=np.int64)
    assert many.min() >= 0
    assert many.max() < VOCAB_SIZE == 131072
    assert len({block.tobytes() for block in many.reshape(400, 512)}) == 400
    assert len(np.unique(many)) > 0.7 * VOCAB_SIZE, "tokens spread over the vocabulary"
    assert list(tokens[:4]) == [55357, 125966, 84579, 82717], "the same on every platform"


def test_output_tokens_are_a_pure_function_of_index_and_position() -> None:
    """R24: output token i of a request never depends on how many are asked for; requests differ; the prompt is another stream."""
    one = request((3,), index=3)
    assert output_tokens(one, 100)[:10] == output_tokens(request((8,), index=3), 10)
    assert output_tokens(one, 100) != output_tokens(request((3,), index=4), 100)
    assert output_tokens(one, 100) != prompt_tokens(one)[:100]
    assert not output_tokens(one, 0)
    assert all(0 <= token < VOCAB_SIZE for token in output_tokens(one, 1000))
    with pytest.raises(ValueError, match="n -1 is negative"):
        output_tokens(one, -1)
