"""Pictures and tables made from the transition table."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from cphicache.lifecycle import ROWS, Row, State, Trigger, table_hash
from cphicache.run.cli import main as cphicache
from cphicache.run.diagrams import DiagramError, main, stale, write_all
from cphicache.run.draw import Arrow, dot_text, graph, mermaid_text
from cphicache.run.tabulate import matrix_text, pools_text, table_text
from cphicache.transfer.support import KV_DTYPES, SUPPORT, support_hash

WITH_PLACE = "# Title\n\n<!-- generated: begin -->\n<!-- generated: end -->\n\nThe end.\n"
NAMES = {
    "fsm_diagrams/backup_lifecycle.mmd",
    "fsm_diagrams/backup_lifecycle.svg",
    "fsm_diagrams/transition_table.md",
    "README.md",
    "docs/lifecycle.md",
    "docs/pools.md",
}


def stamp(name: str) -> str:
    """The hash of the table that a file is made from."""
    return support_hash() if name == "docs/pools.md" else table_hash()


needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="needs graphviz's dot")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(WITH_PLACE)
    (tmp_path / "docs/lifecycle.md").write_text(WITH_PLACE)
    (tmp_path / "docs/pools.md").write_text(WITH_PLACE)
    return tmp_path


def variants() -> list[tuple[Row, ...]]:
    """The table without one edge, and with one callback or guard of an edge gone."""
    found = []
    for i, row in enumerate(ROWS):
        if not row.is_edge:
            continue
        found.append(ROWS[:i] + ROWS[i + 1 :])
        for part in ("when", "before", "after"):
            names = getattr(row, part)
            found += [(*ROWS[:i], replace(row, **{part: names[:k] + names[k + 1 :]}), *ROWS[i + 1 :]) for k in range(len(names))]
    return found


def test_every_edge_guard_and_callback_shows() -> None:
    """R39: a table that lacks any one edge, guard or callback gives another drawing, another Markdown table and another hash."""
    for rows in variants():
        assert table_hash(rows) != table_hash()
        assert table_text(rows) != table_text()
        assert mermaid_text(rows) != mermaid_text()
        assert dot_text(rows) != dot_text()


def test_reserve_is_a_chain_of_questions() -> None:
    """R6, R16: fit, then room, then eviction and one more try, then refusal: the order shows in the drawing."""
    drawn = graph()
    n, r = State.DEVICE_VALID_HOST_NONE, State.RESERVED
    assert [question.guard for question in drawn.questions] == ["fit", "room", "victims_suffice", "room"]
    chain = {arrow for arrow in drawn.arrows if "reserve" in arrow.source + arrow.dest}
    assert chain == {
        Arrow(n, "reserve_1", ("reserve",)),
        Arrow("reserve_1", n, ("[!fit] / refuse",)),
        Arrow("reserve_1", "reserve_2", ("[fit]",)),
        Arrow("reserve_2", r, ("[room] / reserve_slots",)),
        Arrow("reserve_2", "reserve_3", ("[!room]",)),
        Arrow("reserve_3", n, ("[!victims_suffice] / refuse",)),
        Arrow("reserve_3", "reserve_retry_1", ("[victims_suffice] / evict_host, then reserve_again",)),
        Arrow("reserve_retry_1", r, ("[room] / reserve_slots",)),
        Arrow("reserve_retry_1", n, ("[!room] / refuse",)),
    }


def test_the_matrix_decides_every_cell() -> None:
    """R7, R39: the Markdown matrix has a line a trigger and an entry in each of its five cells."""
    body = [line for line in matrix_text().splitlines() if line.startswith("| `")]
    assert [line.split("`")[1] for line in body] == list(Trigger)
    for line in body:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == 1 + len(State)
        assert all(cell[0] in "→·✗" for cell in cells[1:]), line


def test_the_full_table_has_every_row() -> None:
    """R39: the Markdown file lists each row once, with the columns bound, numbered and agreed."""
    rows_part = table_text().split("## Every row")[1]
    assert "| bound | numbered | agreed |" in rows_part
    assert sum(line.startswith("| ") and "`" in line for line in rows_part.splitlines()) == len(ROWS)


def test_the_table_of_pools_decides_every_combination() -> None:
    """R32, R39: docs/pools.md has a line for each kind, layout and backend, supported ones with what copies, refused ones with the
    reason, and one for each dtype."""
    lines = pools_text().splitlines()
    for kind, layout, io_backend, reason, *moves in SUPPORT:
        (line,) = [line for line in lines if line.startswith(f"| `{kind}` | `{layout}` | `{io_backend}` |")]
        assert all(text in line for text in ([reason] if reason else moves))
    for name, dtype in KV_DTYPES.items():
        (line,) = [line for line in lines if line.startswith(f"| `{name}` |")]
        assert ("refused" in line) == (dtype.reason is not None)


@needs_dot
def test_what_was_written_is_not_stale(root: Path) -> None:
    """R39: after writing nothing is stale, text around a generated part is kept, each file holds the hash, no scraps stay."""
    assert {str(path.relative_to(root)) for path in write_all(root)} == NAMES
    assert stale(root) == []
    assert main(["--check", "--root", str(root)]) == 0
    readme = (root / "README.md").read_text()
    assert readme.startswith("# Title\n")
    assert readme.endswith("The end.\n")
    assert mermaid_text() in readme
    assert all(stamp(name) in (root / name).read_text() for name in NAMES)
    assert not list(root.rglob("*.new"))
    write_all(root)
    assert (root / "README.md").read_text() == readme


@needs_dot
@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_stale_file_is_named_with_the_command(name: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R39: a file made from another table, or one that is gone, is named, and so is the command; the status is 1."""
    write_all(root)
    path = root / name
    path.write_text(path.read_text().replace(stamp(name), "0" * 12))
    assert main(["--check", "--root", str(root)]) == 1
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith(f"{name}: ")
    assert "another table" in first
    assert "make diagrams" in last
    path.unlink()
    assert stale(root) == [f"{name}: missing"]


@needs_dot
def test_a_change_by_hand_is_found(root: Path) -> None:
    """R39: a text whose hash is right but whose content is not is stale."""
    write_all(root)
    path = root / "fsm_diagrams/transition_table.md"
    path.write_text(path.read_text().replace("count_hit", "count_hits"))
    assert stale(root) == ["fsm_diagrams/transition_table.md: changed by hand"]


Told = tuple[int, list[str], list[str]]
"""Exit status, and the lines of both outputs."""


@pytest.fixture(params=["python -m cphicache.run.diagrams", "cphicache diagrams"])
def told_by(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Callable[..., Told]:
    """Runs one or the other of both commands."""

    def run(*arguments: str) -> Told:
        if request.param.startswith("python"):
            status, (out, err) = main(arguments), capsys.readouterr()
        else:
            done = CliRunner().invoke(cphicache, ["diagrams", *arguments])
            status, out, err = done.exit_code, done.stdout, done.stderr
        return status, out.splitlines(), err.splitlines()

    return run


@needs_dot
def test_both_commands_check_and_write(told_by: Callable[..., Told], root: Path) -> None:
    """R39: a check names each file that is stale, with status 1, and writes nothing; writing names each file; then a check is silent."""
    status, out, err = told_by("--check", "--root", str(root))
    assert (status, out) == (1, [])
    assert {line.partition(":")[0] for line in err if ": " in line} == NAMES
    assert not (root / "fsm_diagrams").exists()
    status, out, err = told_by("--root", str(root))
    assert (status, {str(Path(line).relative_to(root)) for line in out}, err) == (0, NAMES, [])
    assert told_by("--check", "--root", str(root)) == (0, [], [])


def test_both_commands_refuse_a_wrong_root(told_by: Callable[..., Told], root: Path) -> None:
    """R39: one line that names the file, and status 2."""
    (root / "README.md").unlink()
    status, out, (line,) = told_by("--root", str(root))
    assert (status, out) == (2, [])
    assert line.endswith(f"{root / 'README.md'}: not there; run in the repository's root")


def test_a_drawing_that_fails_is_one_line_with_what_graphviz_said(
    told_by: Callable[..., Told], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R39: graphviz's own words, in one line, and nothing is written."""
    dot = root / "dot"
    dot.write_text("#!/bin/sh\necho 'Format: svg not recognized.\nUse one of:' >&2\nexit 1\n")
    dot.chmod(0o755)
    monkeypatch.setenv("PATH", str(root), prepend=os.pathsep)
    status, out, (line,) = told_by("--root", str(root))
    assert (status, out) == (2, [])
    assert line.endswith(f"{dot} failed: Format: svg not recognized. Use one of:")
    assert (root / "README.md").read_text() == WITH_PLACE
    assert not (root / "fsm_diagrams").exists()


def test_without_graphviz_one_line_says_how_to_get_it(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """R39: with no `dot` nothing is written, one line names the package, and the status is 2."""
    monkeypatch.setenv("PATH", str(root))
    assert main(["--root", str(root)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "graphviz" in line
    assert (root / "README.md").read_text() == WITH_PLACE
    assert not (root / "fsm_diagrams").exists()


@pytest.mark.parametrize("content", [None, "# no place\n"])
def test_a_wrong_root_is_refused(root: Path, content: str | None) -> None:
    """R39: without a README that has a place for the diagram nothing is written; the error names the file."""
    (root / "README.md").unlink()
    if content is not None:
        (root / "README.md").write_text(content)
    with pytest.raises(DiagramError, match=r"README\.md: (not there|no generated part)"):
        write_all(root)
    assert not (root / "fsm_diagrams").exists()
