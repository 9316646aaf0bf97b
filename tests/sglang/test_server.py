"""The HTTP server, started as a user starts it."""

import http.client
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
from contextlib import ExitStack, contextmanager, suppress

from rig import STRICT
from serving import HERE, environment, models

READY_S = 600
"""Several processes import SGLang: on a busy machine that takes minutes. A server that has ended fails its test at once."""
ANSWER_S = 300


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def post(port, path, body=None):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data=json.dumps(body or {}).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        text = answer.read().decode()
    return json.loads(text) if text.startswith("{") else text


def get(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=ANSWER_S) as answer:
        return answer.read().decode()


def wait_until(happened, server, log):
    """Ask every half second, and fail when the server ends, or after ``READY_S``."""
    deadline = time.monotonic() + READY_S
    while not happened():
        assert time.monotonic() < deadline, f"not within {READY_S} s: {log.read_text()[-4000:]}"
        with suppress(subprocess.TimeoutExpired):
            status = server.wait(0.5)
            raise AssertionError(f"the server has ended with status {status}: {log.read_text()[-4000:]}")


def is_ready(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def running(folder, *options, **variables):
    """A server with cphicache; gives (its process, its port, its log file). The end of the test ends it, if it has not ended."""
    port, log = free_port(), folder / "server.log"
    command = [
        sys.executable, "-W", "ignore", "-m", "sglang.launch_server", "--model-path", str(models() / "llama"), "--device", "cpu",
        "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--dtype", "float32", "--page-size", "1",
        "--max-total-tokens", "1024", "--context-length", "1024", "--max-running-requests", "4", "--enable-hierarchical-cache",
        "--hicache-ratio", "4", "--radix-cache-backend", "cphicache", "--enable-cache-report", "--skip-tokenizer-init",
        "--port", str(port), *options,
    ]  # fmt: skip
    strict = dict.fromkeys(STRICT, "1")
    with log.open("w") as out:
        server = subprocess.Popen(
            command, cwd=HERE, env=environment() | strict | variables, stdout=out, stderr=out, start_new_session=True
        )
    try:
        wait_until(lambda: is_ready(port), server, log)
        yield server, port, log
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def generate(port, tokens, new_tokens=6):
    sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    answer = post(port, "/generate", {"input_ids": tokens, "sampling_params": sampling})
    return answer["output_ids"], answer["meta_info"]["cached_tokens"], answer["meta_info"].get("cached_tokens_details")


@contextmanager
def streaming(port, tokens):
    """A long answer as it comes; the client goes away at the end of the block."""
    body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    try:
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        yield connection.getresponse()
    finally:
        connection.close()


def prompts(seed):
    rng = random.Random(seed)
    return lambda length: [rng.randrange(3, 500) for _ in range(length)]


def test_server_serves_from_device_and_host_and_flushes(tmp_path):
    """R24, R25, R40: through ``launch_server``: the same tokens from the device, from the host, and after a flush; configured by a file;
    the event log has the way, and the server's metrics have the counts."""
    events, config = tmp_path / "events.jsonl", tmp_path / "cphicache.toml"
    config.write_text(f'max_retries = 3\nlog = "{events}"\n')
    with running(tmp_path, "--enable-metrics", CPHICACHE_CONFIG=str(config)) as (server, port, log):
        prompt = prompts(1)
        first = prompt(320)
        tokens, cached, _ = generate(port, first)
        assert cached == 0
        assert generate(port, first) == (tokens, 319, {"device": 319, "host": 0})
        for _ in range(4):
            generate(port, prompt(400))
        assert generate(port, first) == (tokens, 319, {"device": 0, "host": 319})
        loaded = 'cphicache_load_backs_total{outcome="queued",rank="0"} 1.0'
        wait_until(lambda: loaded in get(port, "/metrics"), server, log)
        metrics = get(port, "/metrics")
        assert 'cphicache_backup_state_ticks_bucket{le="+Inf",rank="0",state="LAYERS_IN_FLIGHT"}' in metrics
        assert "Cache flushed" in post(port, "/flush_cache")
        assert generate(port, first)[:2] == (tokens, 0)
    text = log.read_text()
    assert text.count("[cphicache] configuration: ") == 1
    assert " max_retries=3 " in text
    assert "Traceback" not in text
    assert '"after":"COMMITTED"' in events.read_text()


def test_server_with_backups_in_flight_loses_clients_aborts_flushes_and_ends(tmp_path):
    """R18: clients that go away, an abort of everything, a flush and SIGTERM, all with backups in flight: the server serves on, ends by
    itself, and writes no stack trace; SGLang's own leak checks are strict and would end it."""
    with running(tmp_path, SLOW_COPIES_US="100000") as (server, port, log):
        prompt = prompts(2)
        first = prompt(300)
        tokens = generate(port, first)[0]
        for _ in range(3):
            with streaming(port, prompt(200)) as answer:
                assert answer.readline().startswith(b"data: ")
        assert generate(port, first)[0] == tokens
        with ExitStack() as stack:
            answers = [stack.enter_context(streaming(port, prompt(200))) for _ in range(6)]
            assert answers[0].readline().startswith(b"data: ")
            post(port, "/abort_request", {"abort_all": True})
            ends = [answer.read().decode() for answer in answers]
        assert all('"type":"abort"' in end.replace('": "', '":"') for end in ends), ends
        assert generate(port, first)[0] == tokens
        assert "Cache flushed" in post(port, "/flush_cache")
        assert generate(port, first)[:2] == (tokens, 0)
        server.send_signal(signal.SIGTERM)
        server.wait(READY_S)
    assert "Traceback" not in log.read_text()
