"""Runs schedulers for the tests and for the soak run, each in a process of its own, and keeps what came out."""

import fcntl
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from kept import Kept
from nursery import Nursery

HERE = Path(__file__).parent
WORK = HERE.parents[1] / ".sglang"
LIMIT_S = 240


def environment():
    return os.environ | {
        "PYTHONPATH": os.pathsep.join((str(HERE / "stubs"), str(HERE.parents[1]))), "PYTHONDONTWRITEBYTECODE": "1",
        "SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1",
        "TORCH_EXTENSIONS_DIR": str(WORK / "torch_extensions"), "SGLANG_CACHE_DIR": str(WORK / "cache"),
    }  # fmt: skip


def run_script(*arguments, limit_s=LIMIT_S, **variables):
    """Run one of this folder's scripts in a process of its own."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments], cwd=HERE, env=environment() | variables, capture_output=True, text=True,
        timeout=limit_s, check=False,
    )  # fmt: skip


@cache
def models():
    """The folder of the models, which are made once; two test processes wait for each other."""
    WORK.mkdir(exist_ok=True)
    with (WORK / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (WORK / "mtp" / "model.safetensors").exists():
            done = run_script("models.py", str(WORK))
            assert done.returncode == 0, done.stderr[-4000:]
    return WORK


@cache
def _nursery():
    return Nursery(environment())


def call(config, **variables):
    """Serve a configuration (see worker.py) and say how that process ended."""
    return _nursery().run(config, **variables)


@cache
def _served(text):
    config = json.loads(text)
    kept = Kept(config)
    done = call(config, **(kept.variables() | config.get("variables", {})))
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    kept.keep(result, done.stderr)
    return result


def served(model, scenario, backend="cphicache", **config):
    """What came out of a scenario; asked for again, it is not run again."""
    config |= {"model": str(models() / model), "scenario": scenario, "backend": backend}
    return _served(json.dumps(config, sort_keys=True))


def reference(model, requests):
    """The random requests on a scheduler without any cache, none aborted."""
    return served(model, "random", "none", requests=requests, aborts=False, options={"max_total_tokens": 4096})["served"]
