"""Where rendered lines go. A sink takes whole lines and never lets half of one out of its own accord."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Protocol

BUFFER_BYTES = 1 << 16


class EventLogError(RuntimeError):
    """The event log cannot be written. The text is one line: the path, the cause, the remedy."""


class Sink(Protocol):
    """What structlog calls a logger: it gets the rendered line."""

    def msg(self, line: bytes) -> None:
        """Take one line, without its line end."""

    def flush(self) -> None:
        """Hand on what is buffered."""

    def close(self) -> None:
        """Flush and let go of the file. Idempotent."""


class FileSink:
    """Lines to a file under its final name. Only whole lines are handed to the system, many at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[bytes] = []
        self._size_bytes = 0
        try:
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise EventLogError(
                f"event log {path}: cannot be opened ({error.strerror}); create its directory or name another file"
            ) from error

    def msg(self, line: bytes) -> None:
        """Buffer a line; write the buffer when it is full."""
        if self._file.closed:
            raise EventLogError(f"event log {self._path}: an event came after it was closed")
        self._lines.append(line)
        self._size_bytes += len(line) + 1
        if self._size_bytes >= BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered. A failure closes the log: what was not written is lost, and said so once."""
        if not self._lines:
            return
        rest = memoryview(b"\n".join(self._lines) + b"\n")
        self._lines.clear()
        self._size_bytes = 0
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._file.close()
            raise EventLogError(
                f"event log {self._path}: cannot be written ({error.strerror}); {len(rest)} bytes are lost"
            ) from error

    def close(self) -> None:
        """Write what is buffered and close the file."""
        try:
            self.flush()
        finally:
            self._file.close()


class MemorySink:
    """The newest ``keep`` lines in memory; older ones are dropped and counted."""

    def __init__(self, keep: int) -> None:
        self.lines: deque[bytes] = deque(maxlen=keep)
        self.dropped = 0

    def msg(self, line: bytes) -> None:
        """Keep a line."""
        self.dropped += len(self.lines) == self.lines.maxlen
        self.lines.append(line)

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""

    def close(self) -> None:
        """Do nothing: the lines stay readable."""
