"""The HTTP server, started as a user starts it."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

from serving import HERE, environment, models

READY_S = 180


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def post(port, path, body=None):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data=json.dumps(body or {}).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read().decode()
    return json.loads(text) if text.startswith("{") else text


def wait_until_ready(port, server, log):
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise AssertionError(f"the server was not ready within {READY_S} s: {log.read_text()[-4000:]}")


def test_server_serves_from_device_and_host_and_flushes(tmp_path):
    """R24, R25: through ``launch_server``: the same tokens from the device, from the host, and after a flush; the event log has the way."""
    port, log, events = free_port(), tmp_path / "server.log", tmp_path / "events.jsonl"
    command = [
        sys.executable, "-W", "ignore", "-m", "sglang.launch_server", "--model-path", str(models() / "llama"), "--device", "cpu",
        "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--dtype", "float32", "--page-size", "1",
        "--max-total-tokens", "1024", "--context-length", "1024", "--max-running-requests", "4", "--enable-hierarchical-cache",
        "--hicache-ratio", "4", "--radix-cache-backend", "cphicache", "--enable-cache-report", "--skip-tokenizer-init",
        "--skip-server-warmup", "--port", str(port),
    ]  # fmt: skip
    with log.open("w") as out:
        server = subprocess.Popen(
            command, cwd=HERE, env=environment() | {"CPHICACHE_LOG": str(events)}, stdout=out, stderr=out, start_new_session=True
        )
    try:
        wait_until_ready(port, server, log)
        rng = random.Random(1)

        def generate(tokens):
            sampling = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
            answer = post(port, "/generate", {"input_ids": tokens, "sampling_params": sampling})
            return answer["output_ids"], answer["meta_info"]["cached_tokens"], answer["meta_info"].get("cached_tokens_details")

        def prompt(length):
            return [rng.randrange(3, 500) for _ in range(length)]

        first = prompt(320)
        tokens, cached, _ = generate(first)
        assert cached == 0
        assert generate(first) == (tokens, 319, {"device": 319, "host": 0})
        for _ in range(4):
            generate(prompt(400))
        assert generate(first) == (tokens, 319, {"device": 0, "host": 319})
        assert "Cache flushed" in post(port, "/flush_cache")
        assert generate(first)[:2] == (tokens, 0)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    text = log.read_text()
    assert text.count("[cphicache] configuration: ") == 1
    assert "/cphicache/sglang/" not in text, "a stack trace goes through cphicache"
    assert '"after":"COMMITTED"' in events.read_text()
