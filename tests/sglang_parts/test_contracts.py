"""The table of SGLang's versions, and its requests in the engine's terms. SGLang is not needed."""

from __future__ import annotations

from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import cphicache.sglang
from cphicache.sglang import contracts
from cphicache.sglang.contracts import CONTRACTS, Contract, installed_contract
from cphicache.sglang.requests import ServerRequests
from cphicache.spaces import LogicalPage
from cphicache.tree import RadixKey

PAGE = 4


def test_what_a_version_lacks_is_named() -> None:
    """R35: names that the installed package does not have are told, whether a module, a class or an attribute of it is missing."""
    names = ("collections.OrderedDict.move_to_end", "collections.OrderedDict.lock", "collections.NoSuch.x", "no_such_package.a.b")
    assert Contract(version="1", adapter="", names=names).lacking() == list(names[1:])


def test_the_contract_that_lacks_least_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """R35: a version between two tested ones is served by the adapter whose names it has, or has most of."""
    old = Contract(version="1", adapter="collections:Counter", names=("collections.Counter.gone", "collections.Counter.update"))
    new = Contract(version="2", adapter="collections:OrderedDict", names=("collections.OrderedDict.move_to_end",))
    monkeypatch.setattr(contracts, "CONTRACTS", (old, new))
    assert installed_contract() is new
    assert installed_contract().cache_class().__name__ == "OrderedDict"
    monkeypatch.setattr(contracts, "CONTRACTS", (old,))
    assert installed_contract().lacking() == ["collections.Counter.gone"]


def test_every_contract_has_its_module() -> None:
    """R35: the versions differ, and each has an adapter in a module of its own."""
    folder = Path(cphicache.sglang.__file__).parent
    modules = [contract.adapter.partition(":")[0].rpartition(".")[2] for contract in CONTRACTS]
    assert len({contract.version for contract in CONTRACTS}) == len(set(modules)) == len(CONTRACTS)
    assert all((folder / f"{module}.py").exists() for module in modules)


class Rows:
    """SGLang's table of rows: 2 rows of 16 tokens."""

    def __init__(self) -> None:
        self.req_to_token = torch.zeros(2, 16, dtype=torch.int32)

    def write(self, at: Any, locs: torch.Tensor) -> None:
        assert locs.dtype == torch.int32
        self.req_to_token[at] = locs


class Handle(NamedTuple):
    """SGLang's handle of an attempt."""

    rid: str
    attempt_id: int


def request(attempt: int, row: int = 0, **more: Any) -> Any:
    fields = {"extra_key": None, "cache_salt": None, "kv": SimpleNamespace(req_pool_idx=row), **more}
    return SimpleNamespace(rid="r", cache_request_handle=Handle("r", attempt), **fields)


def served(rows: Rows) -> ServerRequests:
    return ServerRequests(lambda tokens, extra_key: RadixKey.of(tokens, PAGE, extra_key), rows, PAGE, "cpu")


def test_attempts_of_one_request_have_names_of_their_own() -> None:
    """R12: a request that starts again is another one to the engine; a name lasts until the attempt is forgotten."""
    requests = served(Rows())
    first, second = request(1), request(2)
    name = requests.name_of(first)
    assert requests.name_of(first) == name
    assert requests.name_of(second) != name
    assert not requests.is_running(first)
    requests.start(first)
    assert requests.running_name(first) == name
    assert requests.running == {name: first}
    assert requests.take_waiting(first.cache_request_handle) is None, "it runs"
    assert requests.take_waiting(second.cache_request_handle) is not None
    assert requests.take_waiting(second.cache_request_handle) is None, "it is forgotten"
    requests.forget(first)
    assert not requests.running
    with pytest.raises(AssertionError, match="request r: expected it to have been admitted"):
        requests.running_name(first)
    again = requests.name_of(first)
    assert again != name
    requests.clear()
    assert requests.name_of(first) not in (name, again), "a flush forgets all"


def test_keys_are_apart_by_namespace() -> None:
    """R24: equal tokens of another LoRA adapter or another salt are another key, and no extra key can pass for a salt."""
    requests = served(Rows())
    tokens = array("q", range(8))
    keys = [
        requests.key(tokens, extra, salt) for extra, salt in ((None, None), ("a", None), (None, "a"), ("b", "a"), ("1:ab", None))
    ]
    assert len({key.extra_key for key in keys}) == len(keys)
    assert len({key.data for key in keys}) == 1
    assert requests.key_of(request(1), tokens) == keys[0]
    assert requests.key_of(request(1, positional_embed_overrides=[0.5]), tokens).pages == 0


def test_rows_are_read_and_pointed_to_the_trees_pages() -> None:
    """R24: a row is read in pages, its last part of a page included; pointed to the tree's pages, it keeps what lies before and after."""
    rows = Rows()
    rows.req_to_token[1] = torch.arange(20, 36)
    requests = served(rows)
    req = request(1, row=1)
    assert requests.row_pages(req, 9) == [5, 6, 7]
    assert requests.row(req, 3).tolist() == [20, 21, 22]
    pages = [LogicalPage(5), LogicalPage(2)]
    assert requests.locs(pages).tolist() == [20, 21, 22, 23, 8, 9, 10, 11]
    requests.point_row(req, 4, pages)
    assert rows.req_to_token[1, :9].tolist() == [20, 21, 22, 23, 8, 9, 10, 11, 28]
    requests.point_row(req, 8, pages)
    assert rows.req_to_token[1, :9].tolist() == [20, 21, 22, 23, 8, 9, 10, 11, 28]
    assert rows.req_to_token[0].tolist() == [0] * 16
