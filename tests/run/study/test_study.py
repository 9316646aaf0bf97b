"""Studies: the local half without bytes, a trace served over it, what overlap gains, hit rates, and their plots."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import orjson
import pytest
from click.testing import CliRunner

from cphicache.run.failure import Failure
from cphicache.run.plots import write_plots
from cphicache.run.plots_command import plots_command
from cphicache.run.study.command import study_command
from cphicache.run.study.flame import boxes_of, draw
from cphicache.run.study.hits import infinite_hits, row_of, study
from cphicache.run.study.overlap import PRESETS, Setting, run
from cphicache.run.study.results import read_rows, write_rows
from cphicache.run.study.serve import LONGEST_IDLE_US, ServeConfig, TraceServer
from cphicache.run.study.transfer import Clock, Link, MetadataTransfer
from cphicache.run.synthetic import synthetic_trace
from cphicache.run.trace import TraceRequest
from cphicache.spaces.types import LogicalPage
from cphicache.transfer.port import LoadItem, OpKey

SMALL = ServeConfig(device_tokens=16_384, host_tokens=24_576, layers=3, chunk_tokens=1024, max_batch=16)


def _transfer() -> MetadataTransfer:
    return MetadataTransfer(Clock(), {"target": 2}, 100.0, Link(10.0), Link(20.0), cp_size=2)


def test_copies_take_the_time_of_their_bytes_one_after_the_other() -> None:
    """R34: of 4 pages of 100 bytes a layer, each of two ranks copies 200 bytes a layer: 20 us at 10 bytes/us, not before the store, not
    before the copy ahead; the link's busy time and bytes add up."""
    transfer = _transfer()
    first, second = OpKey(1, 1), OpKey(2, 1)
    transfer.reserve(first, [LogicalPage(n) for n in range(4)])
    transfer.reserve(second, [LogicalPage(9)])
    transfer.clock.compute = 50.0
    transfer.submit_layers([first], "target", [0])
    transfer.submit_layers([second], "target", [0, 1])
    assert transfer.next_end_us() == 70.0
    transfer.clock.now = 70.0
    assert [transfer.status(op).drained for op in (first, second)] == [True, False]
    assert transfer.next_end_us() == 80.0
    assert (transfer.d2h.busy_us, transfer.d2h.moved_bytes, transfer.d2h.free_us) == (30.0, 300.0, 80.0)
    transfer.wait_backup(second)
    assert transfer.clock.now == 80.0


def test_loads_come_layer_by_layer_and_the_forward_waits_for_its_layer() -> None:
    """R34: 2 pages are 5 us a layer at 20 bytes/us; the forward's clock moves to the end of the layer that it reads."""
    transfer = _transfer()
    assert transfer.start_loads() == -1
    transfer.queue_load(7, [LoadItem(1, [LogicalPage(1), LogicalPage(2)])])
    assert not transfer.load_status(7).drained
    producer = transfer.start_loads()
    transfer.wait_layer(producer, "target", 0)
    assert transfer.clock.compute == 5.0
    transfer.wait_layer(producer, "target", 1)
    assert transfer.clock.compute == 10.0
    transfer.wait_load(7)
    assert transfer.clock.now == 10.0
    assert transfer.load_status(7).drained


def test_a_load_back_that_is_waited_for_starts_and_others_go_on() -> None:
    """R34: waiting for a load-back that was not started starts it; the layers of another one are waited for after it has ended."""
    transfer = _transfer()
    assert transfer.free_slots() == {}, "the ledger is the account"
    transfer.queue_load(7, [LoadItem(1, [LogicalPage(1), LogicalPage(2)])])
    transfer.wait_load(7)
    assert transfer.clock.now == 10.0
    transfer.queue_load(8, [LoadItem(2, [LogicalPage(3), LogicalPage(4)])])
    later = transfer.start_loads()
    transfer.end_load(7)
    transfer.wait_layer(later, "target", 1)
    assert transfer.clock.compute == 20.0
    transfer.end_load(8)


def test_a_prompt_that_is_in_the_way_is_computed_again() -> None:
    """R1: where a request that decodes needs a page and a prompt is half computed, the prompt's pages go, and it comes again."""
    config = replace(SMALL, page_size=16, chunk_tokens=16, device_tokens=2640, host_tokens=8192)
    requests = [TraceRequest(0, 0, 512, 400, (1,)), TraceRequest(1, 12, 2048, 1, (10, 11, 12, 13))]
    served = TraceServer(config, requests).run()
    assert (served.finished, served.retracted, served.refused) == (2, 1, 0)


def test_a_prefix_that_holds_too_much_is_computed_again() -> None:
    """R24: the lock of a node that is matched in part holds all of it; where the rest of the prompt has no room beside it, the part is
    computed again."""
    config = replace(SMALL, chunk_tokens=16_384)
    long = TraceRequest(0, 0, 25 * 512, 1, tuple(range(25)))
    other = TraceRequest(1, 10**6, 19 * 512, 1, (*range(6), *range(100, 113)))
    served = TraceServer(config, [long, other]).run()
    assert (served.finished, served.refused, served.retracted) == (2, 0, 0)
    assert served.tokens_device == 0
    fits = replace(other, input_length=8 * 512, hash_ids=(*range(6), 100, 101))
    assert TraceServer(config, [long, fits]).run().tokens_device == 6 * 512


def test_results_that_are_none_are_refused(tmp_path: Path) -> None:
    """R35: without a file there are no rows yet; one that is not JSON, or a folder, is refused in one line that names it."""
    assert read_rows(tmp_path / "absent.json", "hits") == {"study": "hits", "about": {}, "rows": []}
    (tmp_path / "torn.json").write_bytes(b'{"study": "hi')
    for path in (tmp_path / "torn.json", tmp_path):
        with pytest.raises(Failure, match=f"^{path}: cannot be read as results .*; give another file, or remove it$"):
            read_rows(path, "hits")


def test_host_pages_are_counted_through_shrink_split_and_release() -> None:
    """R20: a page counts from its reservation until it is freed; what a shrink keeps counts to the end of the operation."""
    transfer = _transfer()
    committed, released = OpKey(1, 1), OpKey(2, 1)
    transfer.reserve(committed, [LogicalPage(n) for n in range(5)])
    transfer.reserve(released, [LogicalPage(n) for n in range(5, 8)])
    transfer.shrink(committed, 1, free_now=True)
    transfer.shrink(committed, 1, free_now=False)
    assert transfer.used_pages == 7
    transfer.commit(committed)
    transfer.release(released)
    assert transfer.used_pages == 3
    transfer.split_node(1, 3, 1)
    transfer.free_node(3)
    assert transfer.used_pages == 2
    transfer.free_node(1)
    assert transfer.used_pages == 0


@pytest.mark.parametrize("cp_size", [1, 4])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_trace_is_served_to_its_end_and_its_tokens_add_up(cp_size: int, overlap: bool) -> None:
    """R1: every request ends, each prompt token comes from the device, the host or the model, both tiers evict, and the local half counts
    the host slots that the ledger does (checked by the server itself)."""
    done: list[int] = []
    requests = synthetic_trace(60, 3)
    server = TraceServer(replace(SMALL, cp_size=cp_size, overlap=overlap), requests, lambda: done.append(1))
    served, counters = server.run(), server.cache.counters
    assert served.finished == len(done) == 60
    assert served.prompts == sum(request.input_length for request in requests)
    assert served.tokens_device + served.tokens_host + served.tokens_computed >= served.prompts
    assert served.tokens_device > 0
    assert 0 < served.tokens_host <= counters.load_back_tokens  # a retracted request loads again
    assert counters.device_evictions > 0
    assert counters.host_evictions > 0
    assert counters.committed + sum(counters.rolled_back.values()) == counters.reserved


@pytest.mark.parametrize(
    ("late", "from_request"),
    [(10**12, 0), (1_760_000_000_000, 0), (10**18, 0), (10**12, 30), (10**18, 30)],
    ids=["a late day", "epoch", "as late as can be", "a gap", "a gap as long as can be"],
)
def test_idle_time_is_skipped(late: int, from_request: int) -> None:
    """R1, R35: a trace that begins late, or pauses for long, is served as one that begins at 0, or pauses for hours: the same figures,
    and the same virtual time."""
    requests = [TraceRequest(n, 100 * n, 1024, 40, (n % 7, 100 + n % 11)) for n in range(60)]

    def figures(later_ms: int) -> dict[str, Any]:
        moved = [replace(each, timestamp_ms=each.timestamp_ms + later_ms * (each.index >= from_request)) for each in requests]
        row = row_of(SMALL, moved)
        return {name: value for name, value in row.items() if name not in ("cpu s", "seconds by part")}

    hours_ms = int(LONGEST_IDLE_US) // 500
    found = figures(late)
    assert found == figures(hours_ms if from_request else 0)
    assert found["requests"] == 60
    assert found["device hits"] > 0
    assert found["virtual s"] < 3600


def test_lack_of_pages_retracts_and_too_long_requests_are_refused() -> None:
    """R1: with a pool of little more than two requests the youngest is retracted and served again; what can never fit is refused."""
    requests = [TraceRequest(n, 0, 512, 600, (n,)) for n in range(3)] + [TraceRequest(3, 0, 5120, 1, tuple(range(100, 110)))]
    server = TraceServer(replace(SMALL, device_tokens=2048), requests)
    served = server.run()
    assert served.finished == 3
    assert served.refused == 1
    assert served.retracted > 0


def test_no_cache_passes_the_bound() -> None:
    """R1: by hand: the second prompt has the first one's 512 tokens and 100 of its next block's 200, in whole pages of 64; a prompt's last
    token is never a hit. A cache with room for everything comes near, and none is above."""
    requests = [
        TraceRequest(0, 0, 712, 1, (1, 2)),
        TraceRequest(1, 10**6, 612, 1, (1, 2)),
        TraceRequest(2, 2 * 10**6, 512, 1, (1,)),
    ]
    assert infinite_hits(requests, 64) == (1836, 576 + 448)
    ample = row_of(replace(SMALL, device_tokens=1 << 20, host_tokens=1 << 20), requests)
    assert ample["device hits"] == 576 + 448
    synthetic = synthetic_trace(40, 1)
    tokens, bound = infinite_hits(synthetic, 64)
    row = row_of(SMALL, synthetic)
    assert row["prompt tokens"] == tokens
    assert row["device hits"] + row["host hits"] <= bound


def test_finished_sizes_are_kept(tmp_path: Path) -> None:
    """R1: a size that is known is not served again, and each new one is told of when it is finished."""
    requests, seen = synthetic_trace(5, 1), []
    known = [{"device tokens": 4096, "host tokens": 4096}]
    study(SMALL, requests, [(4096, 4096), (16_384, 4096)], known, on_row=lambda: seen.append(len(known)))
    assert seen == [2]
    write_rows(tmp_path / "deep" / "rows.json", {"study": "hits", "about": {}, "rows": known})
    assert read_rows(tmp_path / "deep" / "rows.json", "hits")["rows"] == known
    with pytest.raises(Failure, match="no results of study overlap"):
        read_rows(tmp_path / "deep" / "rows.json", "overlap")


def test_overlap_hides_all_but_the_last_layer() -> None:
    """R11: with copies shorter than compute, layer by layer ends one layer's copy after the last store, and all layers at once as many as
    there are; in a pool of one chunk the forward waits for that time, and copies take as much of the link either way."""
    setting = Setting(
        layers=8, compute_us=100.0, gb_per_s=1.0, cp_size=1, tokens=64, token_layer_bytes=1000, pool_chunks=1.0, chunks=5
    )
    assert setting.copy_us == 64.0
    layered, whole = (run(setting, overlap=overlap) for overlap in (True, False))
    assert layered.copied_us == pytest.approx(64.0)
    assert whole.copied_us == pytest.approx(8 * 64.0)
    assert layered.stall < whole.stall
    assert layered.held_chunks < whole.held_chunks
    with pytest.raises(ValueError, match="at least one chunk"):
        run(replace(setting, pool_chunks=0.5), overlap=True)
    assert PRESETS["gb300"].copy_us < PRESETS["h100"].copy_us


def test_the_command_line_writes_what_plots_draw(tmp_path: Path) -> None:
    """R1: both studies and the rows of a benchmark become SVG files with axes, units and a legend; nothing to draw is an error."""
    runner, results = CliRunner(), tmp_path / "out"
    with pytest.raises(ValueError, match="run cphicache bench or cphicache study first"):
        write_plots(tmp_path, tmp_path / "plots")
    overlap = ["overlap", "--chunks", "3", "--layers", "4", "--out", str(results / "study-overlap.json")]
    hits = ["hits", "--requests", "20", "--device-tokens", "16384", "--host-tokens", "16384", "--host-tokens", "32768"]
    for arguments in (overlap, [*hits, "--out", str(results / "study-hits.json")]):
        found = runner.invoke(study_command, arguments)
        assert found.exit_code == 0, found.output
    shown = runner.invoke(study_command, overlap[:-2])  # without --out
    assert "layer by layer" in shown.output
    assert "last KV store to copies done" in shown.output
    row = {
        "name": "tick-growth",
        "what": "a tick, x",
        "median": 0.01,
        "details": {"over": "nodes", "sizes": [1, 10], "us": [1.0, 1.1]},
    }
    (results / "bench.json").write_bytes(orjson.dumps({"rows": [row]}))
    written = write_plots(results, tmp_path / "plots")
    drawn = runner.invoke(plots_command, ["--results", str(results), "--to", str(tmp_path / "again")])
    assert drawn.exit_code == 0, drawn.output
    assert drawn.output.splitlines() == [str(tmp_path / "again" / path.name) for path in written]
    assert [path.name for path in written] == ["cost-over-tree.svg", "overlap.svg", "hits.svg"]
    assert all(path.read_text(encoding="utf-8").rstrip().endswith("</svg>") for path in written)


@pytest.mark.parametrize("name", ["bench.json", "study-overlap.json", "study-hits.json"])
@pytest.mark.parametrize(
    "text",
    ["{", "{}", "[1]", '{"rows": [{}], "about": 3}', '{"rows": [{"name": "tick-growth", "details": {"sizes": 3}}], "about": 3}'],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, text: str) -> None:
    """R35: results that are cut short, or are something else, are one line with the file and the remedy, and nothing is drawn."""
    (tmp_path / name).write_text(text, encoding="utf-8")
    found = CliRunner().invoke(plots_command, ["--results", str(tmp_path), "--to", str(tmp_path / "plots")])
    assert found.exit_code == 2
    assert found.output.startswith(f"cphicache: {tmp_path / name}: is damaged, or of another version (")
    assert found.output.endswith("have it written anew, or remove it\n")
    assert not (tmp_path / "plots").exists()


@pytest.mark.parametrize("rows", [[], [{"name": "peer"}], [{"name": "tick-growth", "details": {}}]])
def test_a_file_without_a_row_to_draw_is_named(rows: list[Any], tmp_path: Path) -> None:
    """R35: it is there, so that "none is there" would be no help."""
    (tmp_path / "bench.json").write_bytes(orjson.dumps({"rows": rows}))
    found = CliRunner().invoke(plots_command, ["--results", str(tmp_path), "--to", str(tmp_path / "plots")])
    assert found.exit_code == 2
    assert found.output.startswith(f"cphicache: {tmp_path / 'bench.json'}: no row to draw; run cphicache bench")
    assert not (tmp_path / "plots").exists()


def test_plots_that_cannot_be_drawn_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R35: a folder that cannot be written to, and a package that is not installed, are told with the remedy."""
    row = {
        "name": "tick-growth",
        "what": "a tick",
        "median": 0.01,
        "details": {"over": "nodes", "sizes": [1, 10], "us": [1.0, 1.1]},
    }
    (tmp_path / "bench.json").write_bytes(orjson.dumps({"rows": [row]}))
    arguments = ["--results", str(tmp_path), "--to", str(tmp_path / "bench.json" / "plots")]
    refused = CliRunner().invoke(plots_command, arguments)
    assert (refused.exit_code, refused.output.count("\n")) == (2, 1)
    assert refused.output.startswith(f"cphicache: {arguments[-1]}: cannot be written (")
    unread = CliRunner().invoke(plots_command, ["--results", str(tmp_path / ("x" * 300))])
    assert (unread.exit_code, unread.output.count("\n")) == (2, 1)
    assert unread.output.endswith("cannot be read (File name too long); give other --results\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"] + ["matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    missing = CliRunner().invoke(plots_command, arguments)
    assert (missing.exit_code, missing.output.count("\n")) == (2, 1)
    assert missing.output.endswith("pip install 'cphicache[plots]'\n")


@pytest.mark.parametrize("written", [True, False])
def test_overlap_on_a_trace_serves_it_in_both_modes(written: bool, tmp_path: Path) -> None:
    """R1, R11: with ``--trace`` both modes serve the same prompts, their figures are in the table and, on demand, in the file, with what
    they are about."""
    trace, out = tmp_path / "own.jsonl", tmp_path / "rows.json"
    lines = [{"timestamp": 10 * n, "input_length": 1024, "output_length": 2, "hash_ids": [n % 4, 9 + n]} for n in range(12)]
    trace.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    sizes = ["--device-tokens", "8192", "--host-tokens", "16384", "--layers", "4", "--cp-size", "2"]
    arguments = ["overlap", "--trace", str(trace), "--requests", "10", *sizes, *(["--out", str(out)] if written else [])]
    found = CliRunner().invoke(study_command, arguments)
    assert found.exit_code == 0, found.output
    shown = {cells[0]: cells[1:] for line in found.output.splitlines() if len(cells := re.split(r"\s{2,}", line.strip())) == 3}
    assert list(shown) == [
        "device hits",
        "host hits",
        "recomputed tokens",
        "evicted without host copy",
        "backups refused",
        "retracted",
        "virtual time",
    ]
    assert out.exists() is written
    if written:
        results = read_rows(out, "overlap-trace")
        assert results["about"]["trace"] == "own.jsonl"
        assert (results["about"]["cp_size"], results["about"]["layers"]) == (2, 4)
        layered, whole = results["rows"]
        assert (layered["overlap"], whole["overlap"]) == (True, False)
        assert layered["requests"] == whole["requests"] == 10
        for name in list(shown)[:-1]:
            assert shown[name] == [f"{layered[name]:,}", f"{whole[name]:,}"]


class _Profiler:
    """What is used of pyinstrument's."""

    def __init__(self, *, interval: float, async_mode: str) -> None:
        self.calls = [f"{interval} {async_mode}"]

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")

    def output(self, renderer: object) -> str:
        if isinstance(renderer, _Speedscope):
            assert renderer.processors == ["aggregated", "relevant"], "calls of one stack are one box"
            return orjson.dumps(PROFILE).decode()
        return " ".join([*self.calls, str(renderer)])


class _Speedscope:
    processors: Sequence[object] = ()


def _opened(frame: int, at: float) -> dict[str, object]:
    return {"type": "O", "frame": frame, "at": at}


def _closed(frame: int, at: float) -> dict[str, object]:
    return {"type": "C", "frame": frame, "at": at}


PROFILE: dict[str, Any] = {
    "shared": {
        "frames": [
            {"name": "run", "file": "/somewhere/cphicache/run/serve.py"},
            {"name": "fire<R>", "file": "/somewhere/cphicache/engine/steps.py"},
            {"name": "sort", "file": "<built-in>"},
        ]
    },
    "profiles": [
        {"events": [_opened(0, 0.0), _opened(1, 1.0), _opened(2, 1.0), _closed(2, 1.001), _closed(1, 3.0), _closed(0, 4.0)]}
    ],
}


def _with_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    package, renderers, processors = (ModuleType(f"pyinstrument{part}") for part in ("", ".renderers", ".processors"))
    vars(package)["Profiler"] = _Profiler
    vars(renderers).update(HTMLRenderer=lambda: "html", SpeedscopeRenderer=_Speedscope)
    vars(processors).update(aggregate_repeated_calls="aggregated", remove_irrelevant_nodes="relevant")
    for module in (package, renderers, processors):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_what_a_trace_costs_is_written_and_shown(tmp_path: Path) -> None:
    """R27: ``study serve`` gives requests a second, time a part and memory; its figures are the server's own, in the file and on the
    screen."""
    out = tmp_path / "out" / "serve.json"
    sizes = ["--device-tokens", "65536", "--host-tokens", "131072", "--layers", "2"]
    found = CliRunner().invoke(study_command, ["serve", "--requests", "20", *sizes, "--out", str(out)])
    assert found.exit_code == 0, found.output
    results = read_rows(out, "serve")
    (row,) = results["rows"]
    assert (row["requests"], row["of"], row["too long"]) == (20, 20, 0)
    assert row["backups committed"] == row["backups reserved"] - row["backups rolled back"] > 0
    assert row["tokens a committed backup"] >= 64
    assert row["peak memory bytes"] > 1 << 20
    assert sum(row["seconds by part"].values()) == pytest.approx(row["cpu s"])
    assert "alloc and evict" in row["seconds by part"]
    assert results["about"]["trace"] == "synthetic"
    assert (results["about"]["profiled"], results["about"]["whole"]) == (False, True)
    assert f"{row['backups committed']:,}" in found.output
    assert "alloc and evict" in found.output


@pytest.mark.parametrize("ending", ["html", "json", "svg"])
def test_a_flame_graph_is_of_the_whole_run(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R27: ``--flame`` profiles the run, without the clock of its parts; by its ending it is a page, a speedscope file or a picture."""
    _with_profiler(monkeypatch)
    out, flame = tmp_path / "serve.json", tmp_path / "deep" / f"flame.{ending}"
    found = CliRunner().invoke(
        study_command, ["serve", "--requests", "3", "--layers", "1", "--out", str(out), "--flame", str(flame)]
    )
    assert found.exit_code == 0, found.output
    results = read_rows(out, "serve")
    assert results["about"]["profiled"] is True
    assert list(results["rows"][0]["seconds by part"]) == ["all (time of the parts was not taken)"]
    wanted = {
        "html": "0.001 disabled start stop html",
        "json": orjson.dumps(PROFILE).decode(),
        "svg": draw(PROFILE, "the scheduler's thread"),
    }
    assert flame.read_text() == wanted[ending]


def test_boxes_are_as_wide_as_their_calls_are_long() -> None:
    """R27: a flame graph has a box a call, below its caller, with its share; calls too short to see are left out, names are escaped."""
    boxes = boxes_of(PROFILE)
    assert [(box.function, box.depth, box.begin, box.end) for box in boxes] == [
        ("run", 0, 0.0, 4.0), ("fire<R>", 1, 1.0, 3.0), ("sort", 2, 1.0, 1.001),
    ]  # fmt: skip
    picture = ElementTree.fromstring(draw(PROFILE, "a & b"))
    groups = picture.findall("{*}g")
    assert [group.findtext("{*}title") for group in groups] == ["run run: 100.0%", "engine fire<R>: 50.0%"]
    outer, inner = (group.find("{*}rect") for group in groups)
    assert outer is not None
    assert inner is not None
    assert float(inner.attrib["width"]) == pytest.approx(float(outer.attrib["width"]) / 2, abs=0.1)
    assert float(inner.attrib["y"]) > float(outer.attrib["y"])
    assert outer.attrib["fill"] != inner.attrib["fill"]
    events = [_opened(2, 0.0), _closed(2, 1.0)]
    (elsewhere,) = ElementTree.fromstring(draw({**PROFILE, "profiles": [{"events": events}]}, "of Python's own")).findall("{*}g")
    assert elsewhere.findtext("{*}title") == "python sort: 100.0%"
    with pytest.raises(ValueError, match="frame 1 closes"):
        boxes_of({**PROFILE, "profiles": [{"events": [_opened(0, 0.0), _closed(1, 1.0)]}]})


def test_an_interrupted_trace_says_how_far_it_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R27: an interrupt ends with status 130; what was served until then is shown and written, the flame graph too."""
    _with_profiler(monkeypatch)
    finish = TraceServer._finish

    def interrupted(server: TraceServer, job: object) -> None:
        finish(server, job)  # type: ignore[arg-type]
        if server.served.finished == 7:
            raise KeyboardInterrupt

    monkeypatch.setattr(TraceServer, "_finish", interrupted)
    out, flame = tmp_path / "serve.json", tmp_path / "flame.json"
    found = CliRunner().invoke(
        study_command, ["serve", "--requests", "20", "--layers", "1", "--out", str(out), "--flame", str(flame)]
    )
    assert found.exit_code == 130
    assert "interrupted after 7 of 20 requests" in found.output
    results = read_rows(out, "serve")
    assert results["about"]["whole"] is False
    assert results["rows"][0]["requests"] == 7
    assert flame.read_text() == orjson.dumps(PROFILE).decode()


def test_a_flame_graph_that_cannot_be_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R35: another ending, a profiler that is not there, and a place that cannot be written to are told with the remedy."""
    runner = CliRunner()
    arguments = ["serve", "--requests", "2", "--layers", "1", "--out", str(tmp_path / "serve.json"), "--flame"]
    monkeypatch.setitem(sys.modules, "pyinstrument", None)
    for name, remedy in (("flame.png", "give one of these"), ("flame.html", "pip install 'cphicache[profile]'")):
        found = runner.invoke(study_command, [*arguments, str(tmp_path / name)])
        assert found.exit_code == 2
        (line,) = found.output.splitlines()
        assert line.endswith(remedy)
    _with_profiler(monkeypatch)
    (tmp_path / "file").write_text("")
    found = runner.invoke(study_command, [*arguments, str(tmp_path / "file" / "flame.html")])
    assert found.exit_code == 2
    assert "give another file" in found.output
