"""The ``cphicache`` command, also ``python -m cphicache``. It owns its process, and so the signals that end it."""

from __future__ import annotations

import signal
import sys

from cphicache.signals import deferred_signals


def main() -> None:
    """Run the command line and leave with its status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with deferred_signals():
            from cphicache.run.cli import main as command
        command()
    except KeyboardInterrupt:
        sys.stderr.write("cphicache: interrupted\n")
        sys.exit(130)
    finally:  # the status is decided: who asks twice waits for the end, and sees no trace of it
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
