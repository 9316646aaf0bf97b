"""Importing SGLang takes far longer than making a scheduler: one process imports it, and every test's scheduler is a fork of that.

    nursery.py     (reads one order a line from stdin, in JSON, and answers each with the exit status of the fork that carried it out)

SGLang's configuration is one a process, so that every combination runs in a fork of its own.
"""

import atexit
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import NamedTuple

LIMIT_S = 300
"""Longest time of one fork."""


NEEDED = (
    "sglang.srt.managers.scheduler", "sglang.srt.models.registry", "cphicache.check.conservation", "cphicache.run.census",
    "cphicache.sglang.factory", "worker",
)  # fmt: skip


class Done(NamedTuple):
    """How a fork ended."""

    returncode: int
    stdout: str
    stderr: str


class Nursery:
    """The process that forks; it ends with this one."""

    def __init__(self, environment):
        self._temporary = tempfile.TemporaryDirectory(prefix="cphicache-sglang-")
        self._folder = folder = Path(self._temporary.name)
        atexit.register(self._temporary.cleanup)
        with (folder / "nursery.log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__], cwd=Path(__file__).parent, env=environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip

    def run(self, config, **variables):
        """Serve ``config`` (see worker.py) in a fork with these environment variables beside the common ones."""
        out, err = self._folder / "fork.out", self._folder / "fork.err"
        self._process.stdin.write(json.dumps([config, variables, str(out), str(err)]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, (self._folder / "nursery.log").read_text()[-4000:]
        return Done(int(answer), out.read_text(), err.read_text())


def preload():
    """Import what a scheduler needs, all model classes included; no thread may be running afterwards."""
    for name in NEEDED:
        importlib.import_module(name)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    importlib.import_module("torch").set_num_threads(1)
    gc.collect()
    gc.freeze()  # SGLang collects garbage when it makes a scheduler, and a collection copies what it looks at
    assert threading.active_count() == 1, threading.enumerate()


def carry_out(config, variables, out, err):
    """In the fork: serve, and end."""
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
    signal.alarm(LIMIT_S)
    os.environ.update(variables)
    try:
        sys.modules["worker"].serve(config)
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # neither the nursery's clean-up nor that of threads which wait for a request


def main():
    answers = os.fdopen(os.dup(1), "w")  # what SGLang prints while it is imported goes to the log
    os.dup2(2, 1)
    preload()
    for order in sys.stdin:
        child = os.fork()
        if not child:
            carry_out(*json.loads(order))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)


if __name__ == "__main__":
    main()
