"""Where cphicache looks into SGLang's scheduler: nine hooks, which do nothing while another backend is selected.

Nothing heavy is imported here: SGLang loads plug-ins in every process of the server.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

SRT = "sglang.srt."
_forwarding: list[Any] = []
"""The cache whose prefill forward is running now in this process: empty, or one. Layer reports cannot say whose they are."""
_drafts: list[Any] = []
"""The draft model's KV pools while a cache is made in this process: SGLang tells the cache's factory of some of them only."""


def _ours(owner: Any) -> Any:
    """The owner's tree cache if it is ours, else None."""
    cache = getattr(owner, "tree_cache", None)
    return cache if getattr(cache, "is_cphicache", False) else None


def after_prepare_for_extend(result: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """``ScheduleBatch.prepare_for_extend``: the locations of a prefill batch are known."""
    cache = _ours(batch)
    if cache is not None:
        cache.reserve_batch(batch)


def around_run_batch(run: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """``Scheduler.run_batch``: begin and end of the batch's forward (a model's own forward may be one of several)."""
    cache = _ours(scheduler)
    if cache is None:
        return run(scheduler, batch, *args, **kwargs)
    cache.begin_forward(batch)
    _forwarding.append(cache)
    try:
        result = run(scheduler, batch, *args, **kwargs)
    finally:
        _forwarding.clear()
    cache.end_forward()
    return result


def after_attention(  # noqa: PLR0917 - SGLang's signature
    result: Any, backend: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> None:
    """``AttentionBackend.forward``: a layer's KV store has been issued."""
    if _forwarding:
        _forwarding[0].layer_stored(getattr(backend, "token_to_kv_pool", None), layer.layer_id)


def around_add_one_req(add: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """``PrefillAdder.add_one_req``: pass a request over for this round, and only this one (R17)."""
    cache = _ours(adder)
    if cache is None:
        return add(adder, req, *args, **kwargs)
    cache.touch(req)
    if cache.must_wait(req):
        from sglang.srt.managers.schedule_policy import AddReqResult

        return AddReqResult.CONTINUE
    return add(adder, req, *args, **kwargs)


def around_preempt(preempt: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """``PrefillAdder.preempt_to_schedule``: nobody is preempted for a request that would be passed over."""
    cache = _ours(adder)
    if cache is None:
        return preempt(adder, req, *args, **kwargs)
    if cache.must_wait(req):
        return False
    done = preempt(adder, req, *args, **kwargs)
    cache.preempted = adder.preempt_list
    return done


def around_new_prefill(plan: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """``Scheduler.get_new_batch_prefill``: requests that were preempted go back to the queue, whether or not anything was admitted.

    The pages that a preemption frees may be held by backups for some ticks, so that there is no room yet. SGLang 0.5.20 forgets the
    preempted when it admits nothing.
    """
    cache = _ours(scheduler)
    if cache is None:
        return plan(scheduler, *args, **kwargs)
    cache.preempted = []
    result = plan(scheduler, *args, **kwargs)
    for req in cache.preempted:
        if req not in scheduler.waiting_queue:
            scheduler._add_request_to_queue(req)
    return result


def around_flush(flush: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """``Scheduler.flush_cache``: backups in flight are brought to their end first."""
    cache = _ours(scheduler)
    if cache is not None:
        cache.settle()
    return flush(scheduler, *args, **kwargs)


def around_build_cache(build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``build_kv_cache``: remember the draft's pools for the cache that is made inside."""
    plan = kwargs.get("hicache_draft_plan")
    _drafts[:] = () if plan is None else plan.device_pools
    try:
        return build(*args, **kwargs)
    finally:
        _drafts.clear()


def draft_pools() -> tuple[Any, ...]:
    """The draft model's KV pools, for the factory of the cache that is being made."""
    return tuple(_drafts)


def around_register_draft(register: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``maybe_register_hicache_draft``: SGLang's own cache makes a host pool for the draft's; ours was made with one."""
    if getattr(kwargs.get("tree_cache"), "is_cphicache", False):
        return None
    return register(*args, **kwargs)


HOOKS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    (SRT + "managers.schedule_batch.ScheduleBatch.prepare_for_extend", "after", after_prepare_for_extend),
    (SRT + "managers.scheduler.Scheduler.run_batch", "around", around_run_batch),
    (SRT + "managers.scheduler.Scheduler.get_new_batch_prefill", "around", around_new_prefill),
    (SRT + "managers.scheduler.Scheduler.flush_cache", "around", around_flush),
    (SRT + "mem_cache.kv_cache_builder.build_kv_cache", "around", around_build_cache),
    (SRT + "mem_cache.kv_cache_builder.maybe_register_hicache_draft", "around", around_register_draft),
    (SRT + "layers.attention.base_attn_backend.AttentionBackend.forward", "after", after_attention),
    (SRT + "managers.schedule_policy.PrefillAdder.add_one_req", "around", around_add_one_req),
    (SRT + "managers.schedule_policy.PrefillAdder.preempt_to_schedule", "around", around_preempt),
)


def register() -> None:
    """Register every hook; SGLang applies them when all plug-ins are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, kind, hook in HOOKS:
        HookRegistry.register(target, hook, HookType(kind))


def missing() -> list[str]:
    """The targets that do not call our hook: SGLang only logs a hook that it could not apply."""
    return [target for target, _, hook in HOOKS if hook not in _hooks_on(target)]


def _hooks_on(target: str) -> Iterator[object]:
    owner, _, name = target.rpartition(".")
    try:
        at: Any = getattr(pkgutil.resolve_name(owner), name)
    except (ImportError, AttributeError):  # not in this version of SGLang: nothing calls our hook, which is the answer
        return
    while at is not None:
        for cell in getattr(at, "__closure__", None) or ():
            yield cell.cell_contents
        at = getattr(at, "__wrapped__", None)
