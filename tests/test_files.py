"""Files that are there as a whole, or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from cphicache.files import check_place, whole_file


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    """R37: the old content stays until the new one is complete, also when writing fails; nothing is left beside it."""
    path = tmp_path / "report"
    path.write_text("old")

    def fail_half_way() -> None:
        with whole_file(path) as place:
            place.write_text("half")
            raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        fail_half_way()
    assert path.read_text() == "old"
    with whole_file(path) as place:
        place.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_symlink_stays_and_a_pipe_is_written_itself(tmp_path: Path) -> None:
    """R37: what stands for another file, or is none, is not replaced by a regular one."""
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.write_text("old")
    link.symlink_to(target)
    with whole_file(link) as place:
        place.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    os.mkfifo(pipe)
    with whole_file(pipe) as place:
        assert place == pipe.resolve()
    assert pipe.is_fifo()


def test_a_pipe_that_must_not_be_written_is_told_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R35: what is no regular file is not opened to find out (that would wait for a reader); the line is that of a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_place(pipe)
    monkeypatch.setattr("cphicache.files.os.access", lambda path, mode: False)  # as it is for others than root
    with pytest.raises(PermissionError, match="pipe") as caught:
        check_place(pipe)
    assert caught.value.strerror == os.strerror(errno.EACCES)


def test_a_place_is_checked_without_touching_what_is_there(tmp_path: Path) -> None:
    """R35: what could not be written is told before the work; a place that can be has its folder then, its old content, and no more."""
    path = tmp_path / "deep" / "report"
    check_place(path)
    assert list(path.parent.iterdir()) == []
    path.write_text("old")
    check_place(path)
    assert list(path.parent.iterdir()) == [path]
    assert path.read_text() == "old"
    check_place(Path("/dev/null"))
    for wrong in (path / "below a file", path.parent, tmp_path / ("x" * 300)):
        with pytest.raises(OSError, match=r"\[Errno"):
            check_place(wrong)
