"""Logs that are not whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cphicache.events import EventLog, EventReadError, Level, read_events, reader


@pytest.fixture
def lines(tmp_path: Path) -> list[bytes]:
    with EventLog(tmp_path / "whole", rank=0, level=Level.OPS, wall_clock=None, header={}) as log:
        for tick in range(3):
            log.note(tick, "fact")
    return (tmp_path / "whole").read_bytes().splitlines(keepends=True)


def read(tmp_path: Path, lines: list[bytes]) -> tuple[int, str]:
    """Write and read ``lines``; the number of events before the error, and its text."""
    path = tmp_path / "broken"
    path.write_bytes(b"".join(lines))
    events: list[dict[str, Any]] = []
    with pytest.raises(EventReadError) as caught:
        events.extend(read_events(path))  # keeps what came before the error
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return len(events), str(caught.value)


def test_a_cut_last_line_is_reported_as_such(tmp_path: Path, lines: list[bytes]) -> None:
    """R36: the whole lines of a truncated log are read, then the cut is named with its line."""
    events, text = read(tmp_path, [*lines[:3], lines[3][:-1]])
    assert events == 3
    assert "line 4: the line is cut short" in text


def test_a_bad_line_is_named(tmp_path: Path, lines: list[bytes]) -> None:
    """R36: a line that is not JSON, or not an event, is named by its number."""
    events, text = read(tmp_path, [*lines[:2], b"{nonsense}\n", lines[3]])
    assert events == 2
    assert "line 3: not JSON" in text
    assert "line 2: not an event" in read(tmp_path, [lines[0], b"[1]\n"])[1]


def test_losses_are_found(tmp_path: Path, lines: list[bytes]) -> None:
    """R36: a missing line, a missing start and an empty file are errors."""
    events, text = read(tmp_path, [*lines[:2], lines[3]])
    assert events == 2
    assert "line 3: sequence number 3 where 2 was expected" in text
    assert "line 1: 'fact' where the header was expected" in read(tmp_path, lines[1:])[1]
    assert "empty" in read(tmp_path, [])[1]


def test_a_newer_schema_is_refused(tmp_path: Path, lines: list[bytes]) -> None:
    """R36: a log of a newer schema version is refused with both versions, one without a version too."""
    newer = lines[0].replace(b'"schema":2', b'"schema":3')
    assert "schema version 3, newer than 2" in read(tmp_path, [newer, *lines[1:]])[1]
    assert "schema version 'x'" in read(tmp_path, [lines[0].replace(b'"schema":2', b'"schema":"x"')])[1]


def test_an_older_schema_is_read(tmp_path: Path, lines: list[bytes]) -> None:
    """R36: a log of schema version 1, which has no end, is read as it is."""
    path = tmp_path / "old"
    path.write_bytes(b"".join([lines[0].replace(b'"schema":2', b'"schema":1'), *lines[1:4]]))
    assert [event["event"] for event in read_events(path)] == ["header", "fact", "fact", "fact"]


def test_an_unreadable_file_is_one_clear_line(tmp_path: Path) -> None:
    """R36: a file that is not there is an EventReadError with the path."""
    with pytest.raises(EventReadError, match=r"nowhere: cannot be read \(No such file"):
        list(read_events(tmp_path / "nowhere"))


def test_what_has_no_line_ends_is_not_read_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R36: a line is read up to a length that no event has, and named."""
    monkeypatch.setattr(reader, "LINE_BYTES", 1000)
    endless = tmp_path / "endless"
    endless.write_bytes(bytes(5000))
    with pytest.raises(EventReadError, match="line 1: longer than 1000 bytes: not a line of an event log"):
        list(read_events(endless))
