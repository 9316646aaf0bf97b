"""These tests run where SGLang is installed: ``make test-sglang``, which skips nothing. Elsewhere they are not collected."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("sglang") else ["test_*.py"]
