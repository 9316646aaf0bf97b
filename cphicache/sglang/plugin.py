"""The entry point: called once in every process of the server, before its arguments are known."""

from __future__ import annotations

from typing import Any

from cphicache.sglang import hooks
from cphicache.sglang.refusal import say

BACKEND = "cphicache"


def activate() -> None:
    """Register the radix cache backend ``cphicache`` and its hooks. Idempotent; an error is told on stderr and by the backend."""
    from sglang.srt.mem_cache.registry import get_radix_cache_factory, register_radix_cache_backend

    if get_radix_cache_factory(BACKEND) is not None:
        return
    problem: str | None = None
    try:
        hooks.register()
    except Exception as error:  # SGLang swallows what a plug-in raises: the backend must be there to refuse, with the reason
        problem = f"hooks could not be registered: {type(error).__name__}: {error}"
        say(problem)

    def build(context: Any) -> Any:
        from cphicache.sglang.factory import build_cache

        return build_cache(context, problem)

    register_radix_cache_backend(BACKEND, build)
