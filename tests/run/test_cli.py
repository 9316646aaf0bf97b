"""The command line: exit status, one line for what is wrong, and what is written where."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cphicache.events import read_events
from cphicache.run import config as config_module
from cphicache.run import world as world_module
from cphicache.run.cli import main, report_run
from cphicache.run.config import RunConfig
from cphicache.run.jobs import Job, load_requests
from cphicache.run.launch import Outcome
from cphicache.run.pools import make_pools
from cphicache.run.report import MUST_SEE
from cphicache.run.scheduler import Scheduler
from cphicache.run.world import RankResult, run_world
from cphicache.transfer.backends.port import PageSlots
from cphicache.transfer.pools.device import DevicePool
from cphicache.transfer.rank import RankTransfer
from tests.run.worlds import SMALL

TWO_RANKS = RunConfig(**{**SMALL, "cp_size": 2})
QUICK = [
    "run",
    *(part for name, value in SMALL.items() for part in (f"--{name.replace('_', '-')}", str(value)) if "latent" not in name),
]


def cphicache(*arguments: str | Path | int) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def quick(*arguments: str | Path) -> Result:
    """A run of a fraction of a second."""
    return cphicache(*QUICK, *arguments)


def one_line(result: Result, status: int) -> str:
    """Everything on stderr, which must be one clear line, with nothing on stdout and no traceback."""
    assert result.exit_code == status, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    (line,) = result.stderr.splitlines()
    assert line.startswith("cphicache: ")
    return line


# -- fine --------------------------------------------------------------------------------------------------------------------------


def test_a_run_ends_with_a_table() -> None:
    """R40, R30: a run that is fine ends with status 0 and a table with tokens by source, backups by outcome and the checks."""
    result = quick()
    assert result.exit_code == 0, result.output
    for row in ("device hit", "host hit", "computed", "committed", "D2H", "H2D", "collectives", "ticks to host-visible", "leaks"):
        assert row in result.stdout
    assert result.stderr == ""


def test_json_is_all_there_is_on_stdout() -> None:
    """R40: ``--json`` prints valid JSON and nothing else on stdout; warnings go to stderr."""
    result = quick("--json", "--host-tokens", "128")
    assert result.exit_code == 0
    summary = json.loads(result.stdout)
    assert summary["checks"]["mismatches"] == 0
    assert summary["checks"]["bytes compared"] > 0
    assert "smaller than the device pool" in result.stderr
    assert "--reclaim-device-valid" in result.stderr
    assert quick("--json", "--host-tokens", "128", "--reclaim-device-valid").stderr == ""


def test_a_real_process_runs_and_refuses() -> None:
    """R40, R35: as a process of its own: status 0 with JSON on stdout and a silent stderr; status 2 with one line on stderr."""

    def process(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cphicache.run.cli", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2], timeout=300)

    done = process(*QUICK, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["checks"]["leaks"] == 0
    assert done.stderr == ""
    refused = process("run", "--policy", "write_around")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("cphicache: --policy write_around: is unknown")
    assert len(refused.stderr.splitlines()) == 1


def test_out_has_the_summary_and_the_log(tmp_path: Path) -> None:
    """R36: ``--out DIR`` makes the folder and writes summary.json, as whole as what ``--json`` prints, and one log a rank; nothing
    half-written is left beside them."""
    out = tmp_path / "new" / "out"
    result = quick("--json", "--out", out)
    assert result.exit_code == 0
    assert (out / "summary.json").read_text() == result.stdout
    assert sorted(path.name for path in out.iterdir()) == ["events.rank0.jsonl", "events.rank1.jsonl", "summary.json"]
    for rank in range(2):
        assert sum(1 for _ in read_events(out / f"events.rank{rank}.jsonl")) > 100


def test_log_and_out_can_be_apart_and_the_log_can_be_off(tmp_path: Path) -> None:
    """R36: ``--log FILE`` puts the log elsewhere than ``--out``; ``--log-level off`` writes none."""
    assert quick("--cp-size", "1", "--out", tmp_path / "a", "--log", tmp_path / "events").exit_code == 0
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["summary.json"]
    assert sum(1 for _ in read_events(tmp_path / "events")) > 100
    assert quick("--out", tmp_path / "b", "--log-level", "off").exit_code == 0
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["summary.json"]


def test_a_summary_that_cannot_be_written_leaves_nothing_half_written(tmp_path: Path) -> None:
    """R36: summary.json is there as a whole or not at all: what stands in its way is named, in one line."""
    (tmp_path / "summary.json").mkdir()
    line = one_line(quick("--json", "--out", tmp_path, "--log-level", "off"), 2)
    assert "summary.json: cannot be written" in line
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


# -- unusable input ----------------------------------------------------------------------------------------------------------------

BAD_OPTIONS: list[tuple[list[str], list[str]]] = [
    (["--requests", "0"], ["--requests 0", "1 to"]),
    (["--device-tokens", "-4"], ["--device-tokens -4", "1 to"]),
    (["--host-tokens", "0"], ["--host-tokens 0", "1 to"]),
    (["--layers", "0"], ["--layers 0", "1 to"]),
    (["--draft-layers", "-1"], ["--draft-layers -1", "0 to"]),
    (["--cp-size", "0"], ["--cp-size 0", "1 to 8"]),
    (["--page-size", "-16"], ["--page-size -16", "1 to 1024"]),
    (["--scale", "0"], ["--scale 0", "more than 0"]),
    (["--tick-ms", "nan"], ["--tick-ms nan", "more than 0"]),
    (["--page-size", "48", "--chunk-tokens", "128"], ["--chunk-tokens 128", "page_size 48", "give 96"]),
    (["--host-tokens", "63"], ["--host-tokens 63", "below one page a payload", "at least 64"]),
    (["--policy", "write_around"], ["--policy write_around", "write_back"]),
    (["--streams", "fibres"], ["--streams fibres", "threads, virtual"]),
    (["--kv", "gqa"], ["--kv gqa", "mla, mha"]),
    (["--log", "x", "--log-level", "off"], ["--log x", "log_level off"]),
    (["--cp-sise", "4"], ["--cp-sise", "--cp-size"]),
    (["--cp-size", "four"], ["--cp-size", "four", "integer"]),
    (["--cp-size"], ["--cp-size", "requires an argument"]),
    (["somewhere"], ["unexpected", "somewhere"]),
    (["--metrics-port", "0", "--launch", "processes"], ["--metrics-port 0", "--launch threads"]),
]


@pytest.mark.parametrize(("options", "wanted"), BAD_OPTIONS)
def test_an_option_that_cannot_work_is_refused_in_one_line(options: list[str], wanted: list[str]) -> None:
    """R35: zero and negative sizes, a page that does not divide the chunk, a host pool below one page a payload, unknown names and
    options: status 2 and one line that names option, value and remedy."""
    line = one_line(cphicache("run", *options), 2)
    for text in wanted:
        assert text in line


@pytest.mark.parametrize("arguments", [["runn"], ["--bogus"], ["diagrams", "--bogus"]])
def test_what_is_no_command_is_refused_in_one_line(arguments: list[str]) -> None:
    """R35: an unknown command, or an unknown option of any command: the same one line."""
    assert arguments[-1] in one_line(cphicache(*arguments), 2)


@pytest.mark.parametrize(
    ("arguments", "first", "last"),
    [
        (["run", "--kv", "x" * 100_000], "--kv xxx", "choose one of mla, mha, dsa"),
        (["run", "--seed", "9" * 4000], "--seed 999", f"give 0 to {2**63 - 1}"),
        (["run", "--seed", "9" * 5000], "Invalid value for '--seed'", "is not a valid integer."),
        (["run", "--cp-size", "9" * 4000], "--cp-size 999", "give 1 to 8"),
        (["x" * 3000], "No such command 'xxx", "'."),
        (["run", "--xx" + "x" * 3000], "No such option", ""),
        (["explore", "x" * 3000], "unknown world 'xxx", "load-back"),
        (["plan", "--model", "x" * 3000], "--model xxx", "qwen3-235b"),
        (["replay", "x" * 3000], "xxx", "cannot be a file (File name too long); give another name"),
        (["run", "--trace", "x" * 3000], "xxx", "give a readable trace file"),
        (["run", "line\nfeed"], "Got unexpected extra argument (line\\nfeed)", ""),
    ],
    ids=lambda value: " ".join(value)[:20] if isinstance(value, list) else "",
)
def test_a_message_is_one_line_of_bounded_length(arguments: list[str], first: str, last: str) -> None:
    """R35: whatever is repeated in it; its beginning and the remedy at its end stay."""
    line = one_line(cphicache(*arguments), 2).removeprefix("cphicache: ")
    assert len(line) < 1100
    assert line.startswith(first)
    assert line.endswith(last)


GOOD_LINE = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
BAD_LINES: list[tuple[str, str]] = [
    ("{oops", "is not JSON"),
    ("[1, 2]", "a list of 2"),
    (json.dumps({**GOOD_LINE, "timestamp": -1}), 'field "timestamp"'),
    (json.dumps({**GOOD_LINE, "input_length": 0}), 'field "input_length"'),
    (json.dumps({**GOOD_LINE, "output_length": "5"}), 'field "output_length"'),
    (json.dumps({**GOOD_LINE, "hash_ids": [1]}), 'field "hash_ids"'),
    (json.dumps({**GOOD_LINE, "hash_ids": [1, 2.5]}), 'field "hash_ids"[1]'),
    (json.dumps({name: value for name, value in GOOD_LINE.items() if name != "input_length"}), 'field "input_length"'),
]


@pytest.mark.parametrize(("line", "wanted"), BAD_LINES)
def test_a_malformed_trace_line_is_named(line: str, wanted: str, tmp_path: Path) -> None:
    """R35: a malformed trace line: status 2 and one line with file, line number and field."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f"{json.dumps(GOOD_LINE)}\n{line}\n")
    told = one_line(cphicache("run", "--trace", trace), 2)
    assert f"{trace} line 2: " in told
    assert wanted in told


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    """R35: a trace that is missing, a folder or not text, a log in a missing folder, an output folder that is a file: one line each,
    with the path and what to do."""
    (tmp_path / "file").write_bytes(b"\xff\xfe\n")
    missing = tmp_path / "missing"
    cases: list[tuple[list[str | Path], str]] = [
        (["--trace", missing], f"{missing}: cannot be read"),
        (["--trace", tmp_path], f"{tmp_path}: cannot be read"),
        (["--trace", tmp_path / "file"], f"{tmp_path / 'file'} line 1: is not UTF-8"),
        (["--log", missing / "log"], "cannot be opened"),
        (["--out", tmp_path / "file"], f"--out {tmp_path / 'file'}: cannot be made"),
    ]
    for arguments, wanted in cases:
        line = one_line(quick(*arguments), 2)
        assert wanted in line
        assert "; " in line


# -- something is wrong --------------------------------------------------------------------------------------------------------


def _forgetful_pools(*args: Any, **kwargs: Any) -> Any:
    """The run's pools, but each D2H copy of the target's layer 1 changes one byte on its way."""
    devices, hosts = make_pools(*args, **kwargs)
    host = hosts["target"]
    copy = host.backup_from_device_per_layer

    def forgetful(device_pool: DevicePool, host_indices: PageSlots, *rest: Any) -> None:
        copy(device_pool, host_indices, *rest)
        if rest[1] == 1:
            slot = host_indices.slots[:1]
            items = host.read(1, slot)
            for item in items.values():
                item[0, 3] ^= 0x40
            host.store(1, slot, items)

    host.backup_from_device_per_layer = forgetful  # type: ignore[method-assign]
    return devices, hosts


def test_a_wrong_byte_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """R33: one byte that changes on its way: status 1, and the first evidence names node, layer, payload, position, expected and
    found."""
    monkeypatch.setattr(world_module, "make_pools", _forgetful_pools)
    result = quick("--json", "--draft-layers", "0")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("cphicache: wrong bytes: request r")
    for text in (" node ", " target layer 1 latent position ", " byte 3: expected 0x", ", found 0x"):
        assert text in line
    expected, found = (int(part.split("0x")[1][:2], 16) for part in line.split(" byte 3: ")[1].split(", "))
    assert expected ^ found == 0x40
    assert json.loads(result.stdout)["checks"]["mismatches"] > 0


class _LeakyTransfer(RankTransfer):
    """Forgets a node's host copy without giving its slots back."""

    def free_node(self, node: int) -> None:
        del self._nodes[node]


def test_a_leak_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """R30: slots that are not given back: status 1 and the broken account, from the checker, during the run."""
    monkeypatch.setattr(world_module, "RankTransfer", _LeakyTransfer)
    result = quick("--json", "--cp-size", "1", "--host-tokens", "256")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith("cphicache: broken invariant: rank 0: ")


def test_the_bare_run_must_see_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """R16, R17, R25: without options the run fails unless it has met each situation that it is for; with options it need not."""
    monkeypatch.setattr(config_module, "SYNTHETIC_REQUESTS", 2)
    result = cphicache("run", "--json")
    assert result.exit_code == 1
    unseen = json.loads(result.stdout)["unseen"]
    assert "load-backs under eviction" in unseen
    (line,) = result.stderr.splitlines()
    assert line == f"cphicache: the default run should have seen, and has not: {', '.join(unseen)}"
    assert cphicache("run", "--json", "--seed", "0").exit_code == 0


def test_the_default_run_sees_everything() -> None:
    """R16, R17, R25: the run without options sees each of: deferred split, declined insert, eviction-retry that succeeded, refused
    reservation, zero-owned rank, rollback, abort, retraction, duplicate bind, chunked prompt, load-back under eviction."""
    result = cphicache("run", "--json")
    assert result.exit_code == 0, result.stderr
    summary = json.loads(result.stdout)
    assert all(summary["seen"][name] > 0 for name in MUST_SEE)
    assert len(MUST_SEE) == 11
    assert summary["tokens"]["host hit"] > 0
    assert summary["backups"]["committed"] > 0


# -- interrupted ---------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("default_sigint")
@pytest.mark.parametrize(
    ("cp_size", "by", "end"),
    [
        (1, signal.SIGINT, (130, "interrupted")),
        (2, signal.SIGINT, (130, "interrupted")),
        (2, signal.SIGTERM, (143, "ended by SIGTERM")),
        (2, signal.SIGHUP, (129, "ended by SIGHUP")),
    ],
)
def test_an_interrupt_ends_the_run_cleanly(
    cp_size: int, by: signal.Signals, end: tuple[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R18: Ctrl-C, or a signal to end, ends every rank after its tick: its status, one line, no summary; every rank's log is whole lines,
    and no thread of the run is left."""
    run_world = world_module.run_world
    done: list[Job] = []
    main_thread = threading.main_thread().ident
    assert main_thread is not None

    def interrupted(*arguments: Any, **named: Any) -> Any:
        def on_tick(scheduler: Scheduler) -> None:
            if scheduler.tick == 40:
                signal.pthread_kill(main_thread, by)

        return run_world(*arguments, **{**named, "on_tick": on_tick, "on_done": done.append})

    monkeypatch.setattr(world_module, "run_world", interrupted)
    threads = set(threading.enumerate())
    result = quick("--cp-size", str(cp_size), "--requests", "600", "--max-batch", "1", "--out", tmp_path)
    status, told = end
    assert one_line(result, status) == f"cphicache: {told}"
    assert result.stdout == ""
    assert set(threading.enumerate()) <= threads
    assert len(done) < 600
    logs = sorted(tmp_path.iterdir())
    assert len(logs) == cp_size
    for log in logs:
        assert max(event.get("tick", 0) for event in read_events(log)) >= 39


def test_an_earlier_run_in_the_same_folder_is_not_mixed_in(tmp_path: Path) -> None:
    """R36: logs and summary of an earlier run into the same folder go, so that nobody reads two runs as one."""
    assert quick("--out", tmp_path, "--cp-size", "4").exit_code == 0
    assert len(list(tmp_path.glob("events.rank*.jsonl"))) == 4
    assert quick("--out", tmp_path, "--cp-size", "2").exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.rank0.jsonl", "events.rank1.jsonl", "summary.json"]


@pytest.mark.parametrize("refused", [["--launch", "processes"], []])
def test_a_run_that_is_refused_leaves_an_earlier_one(refused: list[str], tmp_path: Path) -> None:
    """R35, R36: what an earlier run has written goes when the next one begins, not when that is refused for its port."""
    assert quick("--out", tmp_path).exit_code == 0
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--metrics-port {port}: " in one_line(quick("--out", tmp_path, "--metrics-port", str(port), *refused), 2)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_an_earlier_run_left_and_cannot_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R35: where two runs would be mixed, nothing is served."""
    old = tmp_path / "events.rank7.jsonl"
    old.write_text("old")

    def refused(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(Path, "unlink", refused)
    line = one_line(quick("--out", tmp_path), 2)
    assert line == f"cphicache: {old}: is of an earlier run and cannot be removed (Operation not permitted); give another --out"
    assert list(tmp_path.iterdir()) == [old]


@pytest.mark.parametrize("page_size", [512, 1024])
def test_large_pages_need_no_other_option(page_size: int) -> None:
    """R31: where the pools are left open they hold at least two chunks and pages of any legal size."""
    result = cphicache("run", "--requests", "3", "--page-size", page_size, "--chunk-tokens", page_size, "--json")
    assert result.exit_code == 0


PLAN = ["plan", "--model", "glm-5", "--device-gib", "40", "--host-gib", "100"]


@pytest.mark.parametrize("arguments", [["run", "--requests", "3"], PLAN], ids=["more than its buffer", "less"])
def test_a_full_standard_output_is_one_line(arguments: list[str]) -> None:
    """R35: what cannot be printed is said in one line, with a status that does not mean wrong bytes, and not once more at the exit."""
    if not Path("/dev/full").is_char_device():
        pytest.skip("needs the device /dev/full")
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        command = [sys.executable, "-m", "cphicache.run.cli", *arguments]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    (line,) = (line for line in done.stderr.splitlines() if not line.startswith("warning: "))
    assert line == "cphicache: standard output: cannot be written (No space left on device); give room, or another place"


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written without a name goes into a folder of its own."""
    monkeypatch.chdir(tmp_path)


class _Refusing(io.StringIO):
    """A standard output that cannot be written."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def write(self, text: str) -> int:
        raise OSError(self._number, os.strerror(self._number))


REFUSED_OUTPUT = [
    ["--help"],
    ["--version"],
    ["study", "--help"],
    ["study", "serve", "--requests", "2", "--layers", "1"],
    ["explore", "--list"],
    ["diagram"],
    [*PLAN, "--json"],
    [*QUICK, "--json"],
]


@pytest.mark.parametrize(
    ("number", "status", "arguments"),
    [
        *((errno.ENOSPC, 2, arguments) for arguments in REFUSED_OUTPUT),
        (errno.EIO, 2, ["diagram"]),
        (errno.EPIPE, 1, ["diagram"]),
        (errno.EPIPE, 1, [*QUICK, "--json"]),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else errno.errorcode.get(value),
)
@pytest.mark.usefixtures("in_folder")
def test_every_command_says_that_standard_output_cannot_be_written(
    number: int, status: int, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """R35: one line and status 2; who reads only the first lines (``--json | head``) is not told to give room: it ends as other programs
    do."""
    monkeypatch.setattr(sys, "stdout", _Refusing(number))
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == status
    said = f"cphicache: standard output: cannot be written ({os.strerror(number)}); give room, or another place\n"
    assert capsys.readouterr().err == (said if status == 2 else "")


def test_a_device_is_no_log_of_several_ranks() -> None:
    """R36: ranks write files of their own beside ``--log``; where that makes no sense nothing is created."""
    assert "--log /dev/null: is not a file" in one_line(quick("--log", "/dev/null"), 2)
    assert not Path("/dev/null.rank0").exists()


@pytest.fixture(scope="module")
def served() -> list[RankResult]:
    """What two ranks that are fine report."""
    return run_world(TWO_RANKS, load_requests(TWO_RANKS))


def changed(result: RankResult, **served: Any) -> RankResult:
    """The same, with other figures of what was served."""
    return replace(result, served=replace(result.served, **served))


@pytest.mark.parametrize(
    ("report", "said", "status"),
    [
        (lambda a, b: Outcome([a, b], {}, None), [], 0),
        (lambda a, b: Outcome([a], {1: "was killed by SIGKILL"}, None), ["rank 1 was killed by SIGKILL"], 1),
        (
            lambda a, b: Outcome([replace(a, broken="rank 1 does not answer", gone="gone: 3 pages")], {1: "was killed"}, None),
            ["rank 1 was killed", "rank 1 does not answer", "gone: 3 pages"],
            1,
        ),
        (
            lambda a, b: Outcome([replace(each, quarantined="rank 2 does not answer") for each in (a, b)], {2: "was killed"}, None),
            ["rank 2 was killed", "rank 2 does not answer"],
            0,
        ),
        (lambda a, b: Outcome([a, replace(b, ticks=b.ticks + 1)], {}, None), ["the ranks' logical figures differ"], 1),
        (lambda a, b: Outcome([a, b], {}, "the logs of ranks 0 and 1 differ"), ["the logs of ranks 0 and 1 differ"], 1),
        (lambda a, b: Outcome([changed(a, refusals=["request 3: too long"]), b], {}, None), ["request 3: too long"], 0),
    ],
    ids=["fine", "lost when all was served", "lost", "lost and not needed", "other figures", "other logs", "refused"],
)
def test_what_is_wrong_with_ranks_is_said_and_is_the_status(
    report: Callable[[RankResult, RankResult], Outcome],
    said: list[str],
    status: int,
    served: list[RankResult],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """R20, R22, R30: each thing is one line, said once although survivors say the same; a rank that is lost when nobody needs it any more
    is not all right: its part is not proved. With replicated KV the others have proved everything."""
    first, second = served
    assert report_run(TWO_RANKS, report(first, second), bare=False) == status
    out, err = capsys.readouterr()
    assert err.splitlines() == [f"cphicache: {line}" for line in said]
    assert "by rank" not in out


def test_figures_of_ranks_that_are_processes_are_shown_rank_by_rank(
    served: list[RankResult], capsys: pytest.CaptureFixture[str]
) -> None:
    """R23: over processes each rank has its own bytes and waits, in a column of its own; what is no figure has no row."""
    waited = [replace(result, waits=1000 + result.rank, blocked_s=0.25) for result in served]
    assert report_run(TWO_RANKS, Outcome(waited, {}, None), bare=False) == 0
    _, table = capsys.readouterr().out.split("by rank")
    cut = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in table.splitlines()]
    rows = {cells[0]: cells[1:] for cells in cut if cells}
    assert rows["what"] == ["rank 0", "rank 1"]
    assert rows["waits"] == ["1,000", "1,001"]
    assert rows["blocked ms"] == ["250.0", "250.0"]
    assert rows["D2H"] == [f"{result.transfer.d2h_bytes:,}" for result in served]
    assert not {"rank", "quarantined", "broken", "gone"} & set(rows)
