"""How the plug-in gets into SGLang: its entry point and hooks, against stand-ins for the few names of SGLang's that they look up."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import Enum
from functools import wraps
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cphicache.sglang import hooks, plugin
from cphicache.sglang.checks import check_version
from cphicache.sglang.contracts import CONTRACTS, Contract
from cphicache.sglang.refusal import SglangRefused


class HookType(Enum):
    AFTER = "after"
    AROUND = "around"


class Registry:
    """SGLang's registries of backends and of hooks. ``error``: what registering a hook raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.backends: dict[str, Callable[..., Any]] = {}
        self.hooks: list[tuple[str, Callable[..., Any], HookType]] = []
        self._error = error

    def register(self, target: str, hook: Callable[..., Any], kind: HookType) -> None:
        if self._error is not None:
            raise self._error
        self.hooks.append((target, hook, kind))

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Registry:
        module(
            monkeypatch,
            "sglang.srt.mem_cache.registry",
            get_radix_cache_factory=self.backends.get,
            register_radix_cache_backend=self.backends.__setitem__,
        )
        module(
            monkeypatch,
            "sglang.srt.plugins.hook_registry",
            HookRegistry=SimpleNamespace(register=self.register),
            HookType=HookType,
        )
        return self


def module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> ModuleType:
    """Let ``name`` be importable, with these members, and the packages that it is in."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        package = ".".join(parts[:end])
        if package not in sys.modules:
            monkeypatch.setitem(sys.modules, package, ModuleType(package))
            if end > 1:
                monkeypatch.setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[package], raising=False)
    made = sys.modules[name]
    for member, value in members.items():
        monkeypatch.setattr(made, member, value, raising=False)
    return made


def test_activation_registers_backend_and_hooks_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """R35: the entry point registers the backend and every hook, and nothing more when it is called again."""
    registry = Registry().install(monkeypatch)
    plugin.activate()
    plugin.activate()
    assert list(registry.backends) == ["cphicache"]
    assert registry.hooks == [(target, hook, HookType(kind)) for target, kind, hook in hooks.HOOKS]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [None, KeyError("no such target")])
def test_the_backend_is_told_why_hooks_are_missing(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """R35: SGLang swallows what a plug-in raises: the backend is there all the same, and is told the reason to refuse with."""
    registry = Registry(error).install(monkeypatch)
    module(monkeypatch, "cphicache.sglang.factory", build_cache=lambda context, problem: (context, problem))
    plugin.activate()
    problem = None if error is None else "hooks could not be registered: KeyError: 'no such target'"
    assert registry.backends["cphicache"]("context") == ("context", problem)
    assert capsys.readouterr().err == ("" if problem is None else f"[cphicache] {problem}\n")


class Cache:
    """A cache of ours that notes what the hooks ask of it."""

    is_cphicache = True

    def __init__(self, *, waits: bool = False) -> None:
        self.asked: list[Any] = []
        self.waits = waits

    def must_wait(self, req: str) -> bool:
        return self.waits

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *given: self.asked.append((name, *given))


def test_a_forward_is_begun_reported_layer_by_layer_and_ended() -> None:
    """R10, R11, R12: a prefill batch is reserved when its locations are known; layers are reported between begin and end, and to nobody
    outside of them."""
    cache = Cache()
    owner = SimpleNamespace(tree_cache=cache)
    backend = SimpleNamespace(token_to_kv_pool="pool")
    hooks.after_prepare_for_extend(None, owner)

    def report(layer: int) -> None:
        hooks.after_attention(None, backend, None, None, None, SimpleNamespace(layer_id=layer), None)

    def run(scheduler: Any, batch: str) -> str:
        report(0)
        report(1)
        return "ran"

    assert hooks.around_run_batch(run, owner, "batch") == "ran"
    report(2)
    expected = [("begin_forward", "batch"), ("layer_stored", "pool", 0), ("layer_stored", "pool", 1), ("end_forward",)]
    assert cache.asked == [("reserve_batch", owner), *expected]


def test_a_forward_that_raises_is_not_ended_and_no_later_layer_is_its_own() -> None:
    """R30: the error is SGLang's to handle; reports that come after it belong to no forward."""
    cache = Cache()

    def fails(scheduler: Any, batch: str) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        hooks.around_run_batch(fails, SimpleNamespace(tree_cache=cache), "batch")
    hooks.after_attention(None, None, None, None, None, SimpleNamespace(layer_id=0), None)
    assert cache.asked == [("begin_forward", "batch")]


def test_who_has_to_wait_is_passed_over_and_nobody_makes_room_for_him(monkeypatch: pytest.MonkeyPatch) -> None:
    """R17: a request that would divide a pending node is passed over for this round; others are added and preempt as ever."""
    module(monkeypatch, "sglang.srt.managers.schedule_policy", AddReqResult=SimpleNamespace(CONTINUE="next"))
    for waits, added, preempted in ((True, "next", False), (False, "added", True)):
        adder = SimpleNamespace(tree_cache=Cache(waits=waits), preempt_list=[])
        assert hooks.around_add_one_req(lambda adder, req: "added", adder, "req") == added
        assert hooks.around_preempt(lambda adder, req: True, adder, "req") is preempted


def test_a_flush_brings_backups_to_their_end_first() -> None:
    """R18: what is in flight is settled before SGLang asks whether the cache is idle."""
    cache = Cache()
    scheduler = SimpleNamespace(tree_cache=cache)
    assert hooks.around_flush(lambda scheduler: [*cache.asked], scheduler) == [("settle",)]


def test_a_hook_that_did_not_take_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """R35: SGLang only logs a hook that it could not apply. A hook is found under whatever others wrap it, and one is missing whose
    target is not there, is not hooked, or is hooked by somebody else."""
    target, _, hook = hooks.HOOKS[0]
    owner, _, name = target.rpartition(".")

    def hooked(by: Callable[..., Any], inner: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(inner)
        def wrapper(*given: Any) -> Any:
            return by(inner(*given), *given)

        return wrapper

    def original(batch: Any) -> None: ...

    def other(result: Any, *given: Any) -> None: ...

    batch = type("ScheduleBatch", (), {})
    module(monkeypatch, owner.rpartition(".")[0], **{owner.rpartition(".")[2]: batch})
    everything = [each for each, _, _ in hooks.HOOKS]
    assert hooks.missing() == everything
    for wrapped, is_there in (
        (original, False),
        (hooked(other, original), False),
        (hooked(hook, original), True),
        (hooked(other, hooked(hook, original)), True),
    ):
        setattr(batch, name, wrapped)
        assert hooks.missing() == (everything[1:] if is_there else everything)


@pytest.mark.parametrize(
    ("version", "contract", "missing", "says"),
    [
        (CONTRACTS[0].version, CONTRACTS[0], [], None),
        (CONTRACTS[0].version, CONTRACTS[0], ["a.b"], "no hook took on a.b; use a tested version"),
        ("0.4.9", CONTRACTS[1], [], "SGLang 0.4.9 has no .*BasePrefixCache.checkpoint.*, unlike 0.5.23, which is nearest"),
    ],
)
def test_a_version_that_lacks_something_is_refused(
    version: str, contract: Contract, missing: list[str], says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R35: the installed version's names and hooks are looked at before anything is made; what is not there is named."""
    monkeypatch.setattr("cphicache.sglang.checks.metadata.version", lambda name: version)
    monkeypatch.setattr(hooks, "missing", lambda: missing)
    names = ("cache_unfinished_req", "cache_finished_req")
    base = type("BasePrefixCache", (), dict.fromkeys(names))
    module(
        monkeypatch,
        "sglang.srt.mem_cache.base_prefix_cache",
        BasePrefixCache=base,
        MatchResult=type("MatchResult", (), {"device_indices": None}),
    )
    if says is None:
        check_version(contract)
        return
    with pytest.raises(SglangRefused, match=says):
        check_version(contract)


def test_an_untested_version_is_served_with_a_word(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """R35: a version that lacks nothing is served, and said to be untested."""
    monkeypatch.setattr("cphicache.sglang.checks.metadata.version", lambda name: "0.5.99")
    monkeypatch.setattr(hooks, "missing", list)
    check_version(Contract(version="0.5.23", adapter="", names=("os.path.join",)))
    assert capsys.readouterr().err == "[cphicache] SGLang 0.5.99 is not among the tested versions (0.5.20, 0.5.23)\n"
