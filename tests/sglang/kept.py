"""Keeps what the schedulers of the tests leave: ``SGLANG_TEST_LOGS=out/sglang make test-sglang``.

Three files a run: ``NAME.jsonl``, cphicache's event log; ``NAME.log``, what the process wrote to stderr; ``NAME.json``, its configuration,
the share of prompt tokens that came from the cache, the accept length with drafts, and every request.
"""

import hashlib
import json
import os
from pathlib import Path

VARIABLE = "SGLANG_TEST_LOGS"
CONTROL = "forgotten"
"""A request that is served without its draft KV, to show what that does."""


class Kept:
    """The files of one run; none without the variable."""

    def __init__(self, config):
        folder = os.environ.get(VARIABLE)
        self._path = None
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._path = Path(folder).resolve() / name_of(config)
        self._config = config

    def variables(self):
        """Environment variables that make the run write its event log."""
        if self._path is None or self._config["backend"] != "cphicache":
            return {}
        return {"CPHICACHE_LOG": f"{self._path}.jsonl"}

    def keep(self, result, stderr):
        if self._path is None:
            return
        told = {"config": self._config, **summary(result["served"]), **result}
        Path(f"{self._path}.log").write_text(stderr)
        Path(f"{self._path}.json").write_text(json.dumps(told, indent=1) + "\n")


def name_of(config):
    """Readable, and another one for every configuration."""
    options = config.get("options", {})
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]
    parts = (options.get("speculative_algorithm"), Path(config["model"]).name, config["scenario"], config["backend"], digest)
    return "-".join(part.lower() for part in parts if part)


def summary(served):
    """Of all requests of a run together, but for the control."""
    requests = [one for rid, one in served.items() if rid != CONTROL and isinstance(one, dict) and "prompt" in one]
    asked, verified = sum(one["prompt"] for one in requests), sum(one["verified"] for one in requests)
    return {
        "requests": len(requests),
        "prompt_tokens": asked,
        "hit_rate": round(sum(one["cached"] for one in requests) / asked, 4) if asked else None,
        "host_tokens": sum(one["host"] for one in requests),
        "accept_length": round(1 + sum(one["drafted_right"] for one in requests) / verified, 4) if verified else None,
    }
