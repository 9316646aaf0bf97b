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


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        (b'"ticks":2', b'"ticks":-1', "field 'ticks' of 'pinned' is -1 where a whole number from 0 on was expected"),
        (b'"nodes":[2]', b'"nodes":[-1]', "field 'nodes' of 'pinned' is [-1] where a list of whole numbers from 0 on was expected"),
        (b'"tick":2,', b"", "'pinned' has no field 'tick'; a whole number from 0 on was expected"),
    ],
)
def test_a_wrong_field_is_named_behind_right_ones(tmp_path: Path, right: bytes, wrong: bytes, says: str) -> None:
    """R36: an event is refused for a field that is wrong, with its line, also when events just like it have come before."""
    with EventLog(tmp_path / "whole", rank=0, level=Level.LIFECYCLE, wall_clock=None, header={}) as log:
        for tick in range(3):
            log.note(tick, "pinned", nodes=[tick], ticks=tick)
    lines = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    assert right in lines[3]
    events, text = read(tmp_path, [*lines[:3], lines[3].replace(right, wrong), lines[4]])
    assert events == 3
    assert f"line 4: {says}: the file was damaged or edited" in text


def test_what_is_not_known_is_read_as_it_is(tmp_path: Path) -> None:
    """R36: events and fields of a newer version are yielded with whatever is in them; what all events have is checked of these too."""
    news = {"what": [None, {}], "nodes": "all"}
    with EventLog(tmp_path / "news", rank=0, level=Level.LIFECYCLE, wall_clock=None, header={}) as log:
        log.note(0, "news", **news)
        log.note(0, "device", in_use=1, evictable=0, what=news)
    _, first, second, _ = read_events(tmp_path / "news")
    assert news.items() <= first.items()
    assert second["what"] == news
    lines = (tmp_path / "news").read_bytes().splitlines(keepends=True)
    assert "'news' has no field 'rank'" in read(tmp_path, [lines[0], lines[1].replace(b'"rank":0,', b""), *lines[2:]])[1]
