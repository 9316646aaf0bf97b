"""These tests run where SGLang is installed: ``make test-sglang``, which skips nothing. Elsewhere they are not collected."""

from importlib.metadata import version
from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("sglang") else ["test_*.py"]
# Its little server calls the cache as SGLang 0.5.20 does.
collect_ignore = [] if find_spec("sglang") and version("sglang") == "0.5.20" else ["test_shared_pages.py"]
