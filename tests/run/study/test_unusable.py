"""Studies asked for what cannot be: one line with the option, and exit status 2, before any work (R35)."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import orjson
import pytest
from click.testing import CliRunner

from cphicache.bench.command import bench_command
from cphicache.run.explore_command import explore_command
from cphicache.run.plan_command import plan_command
from cphicache.run.simulate.command import simulate_command
from cphicache.run.study import command, hits
from cphicache.run.study.command import study_command
from cphicache.run.study.serve import ServeConfig, TraceServer
from cphicache.run.trace import TraceRequest

HITS = ["hits", "--requests", "5", "--device-tokens", "16384", "--host-tokens", "16384"]
SERVE = ["serve", "--requests", "3", "--layers", "1"]
TRACE_LINE = b'{"timestamp": 0, "input_length": 500, "output_length": 2, "hash_ids": [1]}\n'


def _refused(command: Any, arguments: list[str]) -> str:
    """The one line."""
    found = CliRunner().invoke(command, arguments)
    assert found.exit_code == 2, found.output
    (line,) = found.output.splitlines()
    assert line.startswith("cphicache: ")
    return line


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (study_command, ["overlap", "--gb-per-s"]),
        (study_command, ["overlap", "--compute-us"]),
        (study_command, ["overlap", "--pool-chunks"]),
        (explore_command, ["--list", "--max-seconds"]),
        (simulate_command, ["--seed", "1", "--cpu-s"]),
        (bench_command, ["--list", "--sample-s"]),
        (plan_command, ["--model", "deepseek-v3.2", "--device-gib", "1", "--host-gib", "1", "--gb-per-s"]),
        (plan_command, ["--model", "deepseek-v3.2", "--host-gib", "1", "--device-gib"]),
        (plan_command, ["--model", "deepseek-v3.2", "--device-gib", "1", "--host-gib"]),
        (plan_command, ["--model", "deepseek-v3.2", "--device-gib", "1", "--host-ratio"]),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else value.name,
)
def test_numbers_are_finite(command: Any, arguments: list[str], value: str) -> None:
    """R35: what is no number, or no finite one, is refused by every option that takes a fraction; it names itself."""
    assert arguments[-1] in _refused(command, [*arguments, value])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["overlap", "--tokens", str(2**31 + 1)], "--tokens"),
        (["overlap", "--pool-chunks", "1e300"], "--pool-chunks"),
        (["overlap", "--tokens", str(2**31), "--pool-chunks", "2"], "--pool-chunks 2 of --tokens 2147483648"),
        (["hits", "--device-tokens", str(2**31 + 1)], "--device-tokens"),
        (["hits", "--host-tokens", str(2**31 + 1)], "--host-tokens"),
        (["serve", "--device-tokens", str(2**31 + 1)], "--device-tokens"),
        (["serve", "--host-tokens", str(2**31 + 1)], "--host-tokens"),
        (["hits", "--device-tokens", "4096", "--device-tokens", "1", "--cp-size", "2"], "--device-tokens 1: "),
        (["hits", "--host-tokens", "127", "--cp-size", "2"], "--host-tokens 127: "),
        (["serve", "--device-tokens", "127", "--cp-size", "2"], "--device-tokens 127: "),
        (["overlap", "--requests", "3"], "--requests: is for a trace"),
        (["overlap", "--device-tokens", "262144", "--host-tokens", "64"], "--device-tokens, --host-tokens: is for a trace"),
        (["overlap", "--chunks", "3", "--trace"], "--chunks: is for a stream"),
        (["overlap", "--pool-chunks", "2", "--trace"], "--pool-chunks: is for a stream"),
        (["overlap", "--device-tokens", "1", "--cp-size", "2", "--trace"], "--device-tokens 1: "),
    ],
)
def test_sizes_are_what_can_be(arguments: list[str], said: str, tmp_path: Path) -> None:
    """R35: a pool is at most as large as that of ``run``, and has a page for every rank; what would be ignored is refused."""
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(TRACE_LINE)
    line = _refused(study_command, [*arguments, str(trace)] if arguments[-1] == "--trace" else arguments)
    assert said in line
    if said.endswith(": "):
        assert line.endswith("give at least 128")


def test_a_request_that_is_too_long_is_refused_before_its_tokens_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """R35: 2**31 - 1 tokens of output would take 16 GiB."""
    made = []
    monkeypatch.setattr("cphicache.run.study.serve.output_tokens", lambda request, count: made.append(count))
    served = TraceServer(ServeConfig(layers=1), [TraceRequest(0, 0, 500, 2**31 - 1, (1,))]).run()
    assert served.refused == 1
    assert made == []


def test_a_study_that_memory_does_not_hold_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R35: in any study."""

    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(TraceServer, "step", full)
    for arguments in (HITS, SERVE):
        assert "--requests" in _refused(study_command, [*arguments, "--out", str(tmp_path / "rows.json")])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["--requests", "6"], "--requests is 5 there and 6 here"),
        (["--page-size", "32"], "--page-size is 64 there and 32 here"),
        (["--cp-size", "2"], "--cp-size is 1 there and 2 here"),
        (["--layers", "3"], "--layers is 1 there and 3 here"),
        (["--reclaim-device-valid"], "--reclaim-device-valid is false there and true here"),
        (["--trace", "own.jsonl"], '--trace is "synthetic" there and "own.jsonl" here'),
    ],
)
def test_a_study_goes_on_only_as_it_began(changed: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R35: rows of two configurations are never in one file: what differs is named with both values, and the file stays."""
    monkeypatch.chdir(tmp_path)
    Path("own.jsonl").write_bytes(TRACE_LINE)
    out = tmp_path / "rows.json"
    assert CliRunner().invoke(study_command, [*HITS, "--out", str(out)]).exit_code == 0
    before = out.read_bytes()
    assert said in _refused(study_command, [*HITS, "--resume", "--out", str(out), *changed, "--device-tokens", "32768"])
    assert out.read_bytes() == before
    same = CliRunner().invoke(study_command, [*HITS, "--resume", "--out", str(out), "--device-tokens", "32768"])
    assert same.exit_code == 0, same.output
    assert [row["device tokens"] for row in orjson.loads(out.read_bytes())["rows"]] == [16384, 32768]


@pytest.mark.parametrize("arguments", [HITS, SERVE, ["overlap"]], ids=lambda arguments: arguments[0])
def test_a_trace_that_is_none_is_one_line(arguments: list[str], tmp_path: Path) -> None:
    """R35: in every study, with the line's number; nothing is written."""
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(TRACE_LINE + b"{oops\n")
    out = tmp_path / "rows.json"
    assert f"{trace} line 2: is not JSON" in _refused(study_command, [*arguments, "--trace", str(trace), "--out", str(out)])
    assert list(tmp_path.iterdir()) == [trace]


def test_a_trace_of_the_same_name_and_size_is_another(tmp_path: Path) -> None:
    """R35: requests that come at other times are not those of the rows that are kept."""
    trace, out = tmp_path / "trace.jsonl", tmp_path / "rows.json"
    arguments = [*HITS, "--trace", str(trace), "--out", str(out)]
    trace.write_bytes(TRACE_LINE)
    assert CliRunner().invoke(study_command, arguments).exit_code == 0
    trace.write_bytes(TRACE_LINE.replace(b'"timestamp": 0', b'"timestamp": 9'))
    assert "digest of the requests" in _refused(study_command, [*arguments, "--resume"])


@pytest.mark.parametrize(
    "damage",
    [
        lambda found: {"study": "hits"},
        lambda found: {**found, "rows": {}},
        lambda found: {**found, "rows": [7]},
        lambda found: {**found, "rows": [{}]},
        lambda found: {**found, "rows": [{**found["rows"][0], "too long": None}]},
        lambda found: {**found, "about": []},
        lambda found: {**found, "about": {}},
    ],
)
def test_damaged_results_are_one_line_and_stay(damage: Any, tmp_path: Path) -> None:
    """R35: ``--resume`` takes only what it has written."""
    out = tmp_path / "rows.json"
    assert CliRunner().invoke(study_command, [*HITS, "--out", str(out)]).exit_code == 0
    out.write_bytes(orjson.dumps(damage(orjson.loads(out.read_bytes()))))
    before = out.read_bytes()
    assert str(out) in _refused(study_command, [*HITS, "--resume", "--out", str(out)])
    assert out.read_bytes() == before


def test_places_are_checked_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R35: nothing is served, not even read, for a file that cannot be written."""
    monkeypatch.setattr(command, "_read", lambda *_: pytest.fail("the trace was read"))
    monkeypatch.setattr("cphicache.run.study.overlap.run", lambda *_, **named: pytest.fail("the stream was run"))
    for part in ("", ".renderers", ".processors"):
        monkeypatch.setitem(sys.modules, f"pyinstrument{part}", ModuleType(f"pyinstrument{part}"))
    (tmp_path / "file").write_text("")
    wrong = str(tmp_path / "file" / "rows.svg")
    for arguments in (HITS, SERVE, ["overlap"]):
        assert f"--out {wrong}: cannot be written" in _refused(study_command, [*arguments, "--out", wrong])
    line = _refused(study_command, [*SERVE, "--out", str(tmp_path / "rows.json"), "--flame", wrong])
    assert f"--flame {wrong}: cannot be written" in line


def test_what_was_found_is_shown_although_it_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R35: a disk that fills up during the run takes the file, not the table."""
    folder, run = tmp_path / "deep", TraceServer.run

    def spoiled(server: TraceServer) -> object:
        folder.rmdir()
        folder.write_text("")
        return run(server)

    monkeypatch.setattr(TraceServer, "run", spoiled)
    found = CliRunner().invoke(study_command, [*SERVE, "--out", str(folder / "rows.json")])
    assert found.exit_code == 2
    assert "requests a second" in found.output
    assert "cannot be written" in found.output.splitlines()[-1]


@pytest.mark.parametrize("finished", [0, 1])
def test_an_interrupt_claims_only_what_was_written(finished: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R37: before the first size is finished there is no file to go on with."""
    done, row_of = [], hits.row_of

    def interrupted(*arguments: Any) -> dict[str, Any]:
        if len(done) == finished:
            raise KeyboardInterrupt
        done.append(arguments)
        return row_of(*arguments)

    monkeypatch.setattr(hits, "row_of", interrupted)
    out = tmp_path / "rows.json"
    found = CliRunner().invoke(study_command, [*HITS, "--device-tokens", "32768", "--out", str(out)])
    assert found.exit_code == 130
    assert ("finished sizes are in" in found.output) is out.exists() is bool(finished)
    assert ("no size was finished" in found.output) is not finished
