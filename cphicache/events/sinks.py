"""Where records go: into memory, or to a writer that renders them and puts whole lines into a file."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock, Thread

from cphicache.events.render import Record, Renderer

BUFFER_BYTES = 1 << 16
"""Rendered lines are handed to the system in pieces of about this size."""


class EventLogError(RuntimeError):
    """The event log cannot be written. The text is one line: the path, the cause, the remedy."""


def part_path(path: Path, part: int) -> Path:
    """Name of a closed part of a rotated log: ``events.jsonl.1`` is the first. The last part has the log's own name."""
    return path.with_name(f"{path.name}.{part}")


class LineFile:
    """Lines to a file under its final name. Only whole lines are handed to the system, many at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[bytes] = []
        self._waiting_bytes = 0
        self.size_bytes = 0
        try:
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise EventLogError(
                f"event log {path}: cannot be opened ({error.strerror}); create its directory or name another file"
            ) from error

    def add(self, line: bytes) -> None:
        """Take a line; write what waits when it is much."""
        self._lines.append(line)
        self._waiting_bytes += len(line) + 1
        self.size_bytes += len(line) + 1
        if self._waiting_bytes >= BUFFER_BYTES:
            self.write()

    def write(self) -> None:
        """Write what waits. A failure closes the file: what was not written is lost, and said so once."""
        if not self._lines:
            return
        rest = memoryview(b"\n".join(self._lines) + b"\n")
        self._lines.clear()
        self._waiting_bytes = 0
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._file.close()
            raise EventLogError(
                f"event log {self._path}: cannot be written ({error.strerror}); {len(rest)} bytes are lost: give room, or name another file"
            ) from error

    def close(self) -> None:
        """Write what waits and close the file."""
        try:
            self.write()
        finally:
            self._file.close()


class FileWriter:
    """Takes records from a buffer, renders them and writes them, on a thread of its own every ``flush_interval_s`` or when woken.

    Whoever holds the lock does the work, so a flush is done by its caller and the order is that of the buffer. A part that would
    outgrow ``max_file_bytes`` is closed and renamed (:func:`part_path`); of those, the newest ``keep_parts`` stay (None: all).
    ``header``: encoded fields of the log's header, for the later parts.
    """

    def __init__(
        self,
        path: Path,
        records: deque[Record],
        renderer: Renderer,
        header: bytes,
        *,
        flush_interval_s: float,
        max_file_bytes: int | None,
        keep_parts: int | None,
        on_failure: Callable[[], None],
    ) -> None:
        self._path = path
        self._on_failure = on_failure
        self._records = records
        self._renderer = renderer
        self._flush_interval_s = flush_interval_s
        self._max_file_bytes = max_file_bytes
        self._keep_parts = keep_parts
        self._file = LineFile(path)
        self._header = header
        self._part = 1
        self._written_seq = -1
        self.taken_bytes = 0
        """Bytes of encoded facts that have been taken from the buffer."""
        self.failure: EventLogError | None = None
        self._told = False
        self._lock = Lock()
        self._wake = Event()
        self._stopping = False
        self._thread = Thread(target=self._run, name=f"event log {path.name}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Let the thread begin now."""
        if not self._wake.is_set():
            self._wake.set()

    def drain(self) -> None:
        """Write what is in the buffer. A failure is remembered, and told by :meth:`raise_failure`."""
        with self._lock:
            if self.failure is not None:
                self._records.clear()
                return
            try:
                while self._records:
                    self._write(self._records.popleft())
                self._file.write()
            except EventLogError as error:
                self._fail(error)
            except Exception as error:
                what = f"event log {self._path}: an event cannot be encoded ({error}); it and those after it are lost"
                failure = EventLogError(what)
                failure.__cause__ = error
                self._fail(failure)

    def _fail(self, failure: EventLogError) -> None:
        self.failure = failure
        self._records.clear()
        with suppress(EventLogError):  # one failure is told, the first
            self._file.close()
        self._on_failure()

    def raise_failure(self) -> None:
        """Tell a failure to the caller's thread, once."""
        if self.failure is not None and not self._told:
            self._told = True
            raise self.failure

    def close(self) -> None:
        """Drain, end the thread and close the file."""
        self._stopping = True
        self._wake.set()
        self._thread.join()
        self.drain()
        if self.failure is None:
            self._file.close()

    def _write(self, record: Record) -> None:
        if len(record) == 2:
            self.taken_bytes += len(record[1])
        line = self._renderer.render(record)
        limit = self._max_file_bytes
        if limit is not None and self._file.size_bytes and self._file.size_bytes + len(line) + 1 > limit:
            self._rotate()
        self._file.add(line)
        self._written_seq = self._renderer.seq

    def _rotate(self) -> None:
        self._file.close()
        try:
            self._path.rename(part_path(self._path, self._part))
            if self._keep_parts is not None and self._part > self._keep_parts:
                part_path(self._path, self._part - self._keep_parts).unlink(missing_ok=True)
        except OSError as error:
            raise EventLogError(
                f"event log {self._path}: cannot be rotated ({error.strerror}); give it a folder of its own"
            ) from error
        self._file = LineFile(self._path)
        self._part += 1
        self._file.add(self._renderer.render_part_header(self._header, self._part, self._written_seq))

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(self._flush_interval_s)
            self._wake.clear()
            self.drain()
