"""The harness, with tiny sizes. No figure is asserted, except those of virtual time and of bytes, which are exact."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from click.testing import CliRunner

from cphicache.bench.command import bench_command, measure_all
from cphicache.bench.harness import (
    Bench,
    Effort,
    Measured,
    PeerMissing,
    Spread,
    Target,
    calibrated,
    cost_us,
    ratio,
    slope,
    times_us,
)
from cphicache.bench.report import SCHEMA, ResultsError, markdown, read_results, result_of, verdict, write_docs, write_results
from cphicache.bench.rows import BENCHES, chosen

TINY = Effort(rounds=2, sample_s=0.0, shrink=10_000)
EXACT = {"overlap-virtual", "bytes-copied"}


def _given(*values: float) -> Any:
    """A sampler of which each sample takes the next of these seconds, whatever it is asked for."""
    left = list(values)
    return lambda operations: left.pop(0) * operations


@pytest.fixture(autouse=True)
def _threads_as_before() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("bench", BENCHES, ids=lambda bench: bench.name)
def test_every_row_can_be_measured(bench: Bench) -> None:
    """R1: each row runs at a tiny size and gives an ordered spread, a unit, and details that JSON knows; or it says how to get what it
    is set against."""
    try:
        measured = bench.measure(TINY)
    except PeerMissing as missing:
        pytest.skip(str(missing))
    value = measured.value
    assert value.low <= value.median <= value.high
    assert measured.unit in {"x", "us", "bytes", "exponent"}
    assert orjson.dumps(result_of(bench, measured, TINY))
    if bench.name in EXACT:
        assert bench.target is not None
        assert bench.target.met(value.median, bench.target.aim)


def test_names_are_unique_and_chosen_by_their_beginning() -> None:
    """R1: a name, or its beginning, picks rows in the table's order; an unknown one is refused with the known ones."""
    names = [bench.name for bench in BENCHES]
    assert len(names) == len(set(names))
    assert chosen(()) == list(BENCHES)
    assert [bench.name for bench in chosen(("evict", "lifecycle-p"))] == ["lifecycle-plain", "evict-growth"]
    with pytest.raises(ValueError, match=r"no benchmark 'nothing': known are lifecycle-callbacks"):
        chosen(("nothing",))


def test_ratios_are_taken_by_round_and_sides_take_turns() -> None:
    """R1: each round's figures are set against each other, so that drift cancels; the order of the sides alternates."""
    calls: list[str] = []

    def side(name: str, seconds: list[float]) -> Any:
        def sample(operations: int) -> float:
            calls.append(name)
            return seconds.pop(0)

        return sample

    effort = Effort(rounds=3, sample_s=0.0)
    measured = ratio("b", "a", {"a": side("a", [1.0, 1.0, 2.0, 4.0]), "b": side("b", [1.0, 3.0, 6.0, 12.0])}, effort)
    assert measured.value == Spread(3.0, 3.0, 3.0)
    assert calls == ["a", "b", "a", "b", "b", "a", "a", "b"]
    assert measured.details == {"a us": 2e6, "b us": 6e6}


def test_the_median_and_the_spread_are_those_of_the_rounds() -> None:
    """R1: a cost is the median round; the lowest and highest are kept."""
    measured = cost_us("a", {"a": _given(1e-6, 1e-6, 9e-6, 3e-6)}, Effort(rounds=3, sample_s=0.0))
    assert [round(value, 6) for value in (measured.value.median, measured.value.low, measured.value.high)] == [3.0, 1.0, 9.0]
    assert list(times_us({"a": _given(0.0, 0.0)}, Effort(rounds=1, sample_s=0.0))) == ["a"]


def test_calibration_grows_until_a_sample_is_long_enough() -> None:
    """R1: operations grow until a sample takes the wanted time, and not beyond the limit when it never does."""
    assert calibrated(lambda operations: operations * 1e-3, 0.05) in range(50, 100)
    assert calibrated(lambda operations: 0.0, 1.0) == 1 << 24


def test_slope() -> None:
    """R1: flat costs have exponent 0, linear ones 1; one size has none."""
    assert slope([10, 100, 1000], [5.0, 5.0, 5.0]) == pytest.approx(0.0)
    assert slope([10, 100, 1000], [1.0, 10.0, 100.0]) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="at least two"):
        slope([10], [1.0])
    with pytest.raises(ValueError, match="at least one round"):
        Effort(rounds=0)


def _bench(name: str, better: Any, value: float) -> Bench:
    return Bench(name, f"what {name} is", Target(better, 2.0, 4.0), lambda effort: Measured(Spread(value, value, value), "x", 3))


def _missing(effort: Effort) -> Measured:
    raise PeerMissing("not installed: make bench-peer")


def _interrupted(effort: Effort) -> Measured:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("better", "value", "expected"),
    [("higher", 5, "aim"), ("higher", 3, "must"), ("higher", 1, "**not met**"), ("lower", 5, "**not met**"), ("lower", 2, "aim")],
)
def test_verdicts(better: Any, value: float, expected: str) -> None:
    """R1: a row says whether its median reaches the aim, the must, or neither."""
    bench = _bench("row", better, value)
    row = result_of(bench, bench.measure(TINY), TINY)
    assert verdict(row) == expected
    assert expected in markdown([row])


def test_a_row_without_a_target_has_no_verdict() -> None:
    """R1: where nothing was to be reached the table has figures, and neither bounds nor a verdict."""
    row = result_of(replace(_bench("row", "higher", 5), target=None), _bench("row", "higher", 5).measure(TINY), TINY)
    assert verdict(row) == ""
    assert markdown([row]).splitlines()[-1] == "| `row` | what row is | 5 x | 5 .. 5 |  |  |  |"


def test_an_interrupt_keeps_finished_rows(tmp_path: Path) -> None:
    """R1: rows before the interrupt are in the file, those after it are not; a peer that is not there is reported as such."""
    out = tmp_path / "deep" / "bench.json"
    rows = [
        _bench("one", "higher", 5),
        Bench("two", "", None, _missing),
        Bench("three", "", None, _interrupted),
        _bench("four", "lower", 1),
    ]
    seen: list[str] = []
    assert not measure_all(rows, TINY, {}, out, seen.append)
    found = read_results(out)
    assert list(found) == ["one", "two"]
    assert found["two"]["missing"] == "not installed: make bench-peer"
    assert "not installed" in markdown(list(found.values()))
    assert seen == ["one (1 of 4)", "two (2 of 4)", "three (3 of 4)"]


def test_the_page_keeps_its_prose(tmp_path: Path) -> None:
    """R39: only the generated part of a page is replaced; a page without one is refused, and results of another kind too."""
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n<!-- generated: begin -->\nold\n<!-- generated: end -->\n\nThe end.\n")
    bench = _bench("row", "higher", 5)
    row = result_of(bench, bench.measure(TINY), TINY)
    write_docs(page, [row])
    text = page.read_text()
    assert text.startswith("# Title\n\n<!-- generated: begin -->\nMade on cphicache ")
    assert text.endswith("<!-- generated: end -->\n\nThe end.\n")
    assert "| `row` | what row is | 5 x | 5 .. 5 | ≥ 2 | ≥ 4 | aim |" in text
    assert "old" not in text
    (tmp_path / "bare.md").write_text("no place")
    for name in ("bare.md", "none.md"):
        with pytest.raises(ResultsError, match="generated part"):
            write_docs(tmp_path / name, [row])
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ResultsError, match="no results of schema"):
        read_results(tmp_path / "other.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ResultsError, match="cannot be read"):
        read_results(tmp_path / "broken.json")
    with pytest.raises(ResultsError, match="cannot be written"):
        write_results(tmp_path / "page.md" / "under.json", {})


@pytest.mark.parametrize(
    ("last", "status", "said"),
    [
        (_bench("three", "higher", 1), 1, "must not met: three"),
        (_bench("three", "lower", 1), 0, None),
        (Bench("three", "", None, _interrupted), 130, "interrupted; finished rows are in {out}, go on with --resume"),
    ],
    ids=["not met", "met", "interrupted"],
)
def test_what_became_of_the_rows_is_the_status(
    last: Bench, status: int, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1: rows that were measured are in the file, in the table and on the page, whatever came of the others; that is one line and the
    status."""
    rows = (_bench("one", "higher", 5), _bench("two", "lower", 1), last)
    monkeypatch.setattr("cphicache.bench.rows.BENCHES", rows)
    monkeypatch.setattr("cphicache.bench.rows.chosen", partial(chosen, benches=rows))
    out, page = tmp_path / "bench.json", tmp_path / "page.md"
    page.write_text("<!-- generated: begin -->\n<!-- generated: end -->\n")
    done = CliRunner().invoke(bench_command, ["--out", str(out), "--docs", str(page)])
    assert done.exit_code == status, done.output
    finished = [row.name for row in rows[: 2 if status == 130 else 3]]
    assert list(read_results(out)) == finished
    assert [line.split("`")[1] for line in done.stdout.splitlines()[2:]] == finished
    assert all(f"| `{name}` |" in page.read_text() for name in finished)
    assert done.stderr == ("" if said is None else f"cphicache: {said.format(out=out)}\n")


def test_the_command(tmp_path: Path) -> None:
    """R1: the command lists, measures by name, writes JSON and table, resumes, and refuses unknown names."""
    out, runner = tmp_path / "bench.json", CliRunner()
    listed = runner.invoke(bench_command, ["--list"])
    assert listed.exit_code == 0
    assert len(listed.output.splitlines()) == len(BENCHES)
    tiny = ["--rounds", "1", "--sample-s", "0", "--shrink", "10000", "--out", str(out)]
    done = runner.invoke(bench_command, ["overlap", *tiny])
    assert done.exit_code == 0, done.output
    assert "| `overlap-virtual` |" in done.output
    assert list(read_results(out)) == ["overlap-virtual"]
    before = out.read_bytes()
    assert runner.invoke(bench_command, ["overlap", "--resume", *tiny]).exit_code == 0
    assert out.read_bytes() == before
    other = runner.invoke(bench_command, ["overlap", "--resume", *tiny, "--rounds", "2"])
    assert other.exit_code == 2
    assert other.output.startswith(
        f"cphicache: {out}: row overlap-virtual was measured with --rounds 1 --sample-s 0.0 --shrink 10000,"
    )
    assert out.read_bytes() == before
    assert runner.invoke(bench_command, ["nothing", *tiny]).exit_code == 2
    for damage in ({}, {"rows": 7}, {"rows": [{}]}):
        out.write_bytes(orjson.dumps({"schema": SCHEMA, **damage}))
        before = out.read_bytes()
        damaged = runner.invoke(bench_command, ["overlap", "--resume", *tiny])
        assert damaged.exit_code == 2
        assert "is damaged" in damaged.output
        assert out.read_bytes() == before
