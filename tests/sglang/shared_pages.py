"""Two ranks whose pages SGLang's ``PageInterleavePoolAllocator`` shares out, in one process; its server does not let a plug-in have it.

SGLang's allocation and placement, cphicache's cache; the forward is a function of token, position and layer. Prints the findings in JSON.
"""

import json
from array import array
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import torch
from sglang.srt.mem_cache.allocation import alloc_paged_token_slots_extend
from sglang.srt.mem_cache.allocator.page_interleave import PageInterleavePoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.page_interleave import PageInterleavePlacement, PageShardSpec
from sglang.srt.mem_cache.radix_cache import RadixKey

from cphicache.agree.local import InProcessGroup
from cphicache.check.conservation import check, check_quiet
from cphicache.engine import CacheConfig, CpHiRadixCache
from cphicache.run.census import take_census
from cphicache.sglang.contracts import installed_contract
from cphicache.sglang.factory import adopt_allocator
from cphicache.sglang.streams import HostForwardStreams
from cphicache.transfer.pools.device import DevicePool, KVShape
from cphicache.transfer.pools.host import make_host_pool
from cphicache.transfer.rank import RankTransfer

TELLS_LOCATIONS = hasattr(MatchResult, "device_indices")
"""SGLang 0.5.20: a match is the locations of its tokens. 0.5.23: it is their number."""
PAGE, RANKS, LAYERS, PAGES_A_RANK = 4, 2, 2, 12
SHAPE = KVShape("mha", LAYERS, {"k": 4, "v": 4}, torch.float32)


def value(layer, name, tokens, positions):
    """What the forward stores for these tokens, one row a token."""
    return (tokens * 1000.0 + positions * 10 + layer * 2 + (name == "v"))[:, None].expand(-1, 4)


class Handle:
    """Of an attempt; hashed by identity."""

    def __init__(self, rid):
        self.rid = rid


class Request(SimpleNamespace):
    def __init__(self, rid, slot, tokens):
        super().__init__(
            rid=rid, cache_request_handle=Handle(rid), origin_input_ids=tokens, output_ids=[], extra_key=None, cache_salt=None,
            full_untruncated_fill_ids=tokens, extend_range=SimpleNamespace(end=len(tokens)), kv_rotation_base=None, last_node=None,
            kv=SimpleNamespace(req_pool_idx=slot, cache_protected_len=0, kv_allocated_len=len(tokens)), prefix_indices=(), to_finish=None,
            extend_end=len(tokens), prefix_len=0, lock=None,
        )  # fmt: skip

    def get_fill_ids(self):
        return self.origin_input_ids

    def finished(self):
        return True


class Rank:
    """One rank: SGLang's allocator and placement, cphicache's cache, and a device pool of its own."""

    def __init__(self, rank, group):
        spec = PageShardSpec(shard_rank=rank, shard_size=RANKS, page_size=PAGE, max_prefix_tokens=64, chunk_tokens=64)
        self.rank, self.placement = rank, PageInterleavePlacement(spec)
        self.server = PageInterleavePoolAllocator(PAGES_A_RANK * PAGE, PAGE, RANKS, torch.float32, "cpu", None, True, spec)
        self.server.debug_mode = True
        layout, allocator = adopt_allocator(self.server)
        self.pool = DevicePool(SHAPE, (PAGES_A_RANK + 1) * PAGE)
        self.streams = HostForwardStreams()
        host = make_host_pool("layer_first", SHAPE, 64 * PAGE, PAGE)
        self.transfer = RankTransfer(layout, {"target": self.pool}, {"target": host}, self.streams)
        config = CacheConfig(
            page_size=PAGE, cp_size=layout.cp_size, base=layout.base, usable_pages=len(allocator.usable_pages),
            payloads=(("target", LAYERS),), host_slots=64 * PAGE, load_back_threshold=1,
        )  # fmt: skip
        self.engine = CpHiRadixCache(config, self.transfer, group.member(rank), allocator=allocator)
        rows = torch.zeros((8, 256), dtype=torch.int32)
        self.rows = SimpleNamespace(req_to_token=rows, write=rows.__setitem__)
        params = SimpleNamespace(
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.server,
            page_size=PAGE,
            enable_metrics=False,
            enable_kv_cache_events=False,
        )
        self.target = SimpleNamespace(start_layer=0)
        self.cache = installed_contract().cache_class()(
            params,
            self.engine,
            self.transfer,
            pools={"target": self.target},
            alone=False,
            on_tick=lambda tick: None,
            close=self.streams.close,
        )

    def take_match(self, req, match):
        """What SGLang does with a match, of its request; returns the tokens that are loaded back."""
        req.last_node, loaded = match.last_device_node, 0
        if TELLS_LOCATIONS:
            req.prefix_indices = match.device_indices
        else:
            req.prefix_len = match.device_prefix_len
        if match.host_hit_length:
            answer, req.last_node = self.cache.init_load_back(
                InitLoadBackParams(best_match_node=match.best_match_node, host_hit_length=match.host_hit_length, req=req)
            )
            loaded = len(answer) if TELLS_LOCATIONS else answer
            if TELLS_LOCATIONS:
                req.prefix_indices = torch.cat([match.device_indices, answer])
        if TELLS_LOCATIONS:
            self.cache.inc_lock_ref(req.last_node)
        else:
            req.prefix_len += loaded
            req.lock = self.cache.lock(req.last_node)
            req.prefix_indices = self.cache.prefix_device_indices(req)
        return loaded

    def admit(self, requests):
        """Match, load back, allocate with SGLang's function, reserve, store every layer. Returns the tokens that came from the host."""
        loaded, prefixes = 0, []
        for req in requests:
            key = RadixKey(array("q", req.origin_input_ids[:-1]))
            match = self.cache.match_prefix(MatchPrefixParams(key=key, req=req))
            loaded += self.take_match(req, match)
            req.kv.cache_protected_len = len(req.prefix_indices)
            prefixes.append(len(req.prefix_indices))
        lengths = [len(req.origin_input_ids) for req in requests]
        before, after = torch.tensor(prefixes), torch.tensor(lengths)
        last = torch.tensor([int(req.prefix_indices[-1]) if len(req.prefix_indices) else -1 for req in requests])
        batch = SimpleNamespace(reqs=requests, prefix_lens=prefixes)
        locs = alloc_paged_token_slots_extend(
            self.cache, before, before, after, after, last, sum(lengths) - sum(prefixes), batch=batch
        )
        at = 0
        for req, prefix, length in zip(requests, prefixes, lengths, strict=True):
            self.rows.req_to_token[req.kv.req_pool_idx, :prefix] = torch.as_tensor(req.prefix_indices, dtype=torch.int32)
            self.rows.req_to_token[req.kv.req_pool_idx, prefix:length] = locs[at : at + length - prefix].int()
            at += length - prefix
        batch.out_cache_loc = locs
        self.cache.ready_to_load_host_cache()
        self.cache.reserve_batch(batch)
        self.cache.begin_forward(batch)
        for layer in range(LAYERS):
            self.cache.wait_layer("target", layer)
            for req, prefix in zip(requests, prefixes, strict=True):
                self.store(req, layer, prefix)
            self.cache.layer_stored(self.target, layer)
        self.cache.end_forward()
        return loaded

    def finish(self, requests, at):
        req = requests[self.rank][at]
        if TELLS_LOCATIONS:
            self.cache.cache_finished_req(req, kv_len_to_handle=len(req.origin_input_ids))
        else:
            self.cache.checkpoint(req, up_to=len(req.origin_input_ids))

    def owned(self, req, start):
        """This rank's pool rows of the request's tokens from ``start`` on, as SGLang places them, with token and position of each."""
        length = len(req.origin_input_ids)
        locs = self.rows.req_to_token[req.kv.req_pool_idx, start:length].long()
        mine = self.placement.local_mask(locs, self.rank)
        positions = torch.arange(start, length)[mine]
        return self.placement.filter_local(locs, self.rank), torch.tensor(req.origin_input_ids)[positions], positions

    def store(self, req, layer, start):
        rows, tokens, positions = self.owned(req, start)
        for name in ("k", "v"):
            self.pool.rows(layer, name).view(torch.float32)[rows] = value(layer, name, tokens, positions)

    def holds(self, req):
        """Whether this rank's rows of the request have what its forward would have stored."""
        rows, tokens, positions = self.owned(req, 0)
        return len(rows) > 0 and all(
            torch.equal(self.pool.rows(layer, name).view(torch.float32)[rows], value(layer, name, tokens, positions))
            for layer in range(LAYERS)
            for name in ("k", "v")
        )

    def goes_round(self):
        """Whether the owners of every chain in the tree go round from its first page on, as SGLang's forward reads them."""
        for node in self.engine.state.tree.nodes():
            chain = [node]
            while not chain[0].parent.is_root:
                chain.insert(0, chain[0].parent)
            owners = [owner for part in chain for owner in self.engine.state.owners(part.pages or ()) or part.backup.owners]
            if owners != [(owners[0] + at) % RANKS for at in range(len(owners))]:
                return False
        return True

    def census(self):
        return take_census(self.engine, self.cache.running_rows(), self.transfer.free_slots(), self.rank)


def main():
    group = InProcessGroup(RANKS)
    ranks = [Rank(rank, group) for rank in range(RANKS)]
    findings, out = [], {}
    threads = ThreadPoolExecutor(RANKS)

    def both(work):
        # side by side: at the end of a request that has read a load-back, each waits for the other's word on it
        done = list(threads.map(work, ranks))
        for rank in ranks:
            findings.extend(str(finding) for finding in check(rank.census()))
        return done

    def settle():
        for rank in ranks:
            for record in list(rank.engine.state.pending.values()):
                rank.transfer.wait_backup(record.key)
            for load in list(rank.engine.state.loads):
                rank.transfer.wait_load(load)
        for _ in range(3):
            both(lambda rank: rank.cache.check_hicache_events())

    def serve(*given):
        """These requests (name, tokens) as one batch, to their ends; returns by rank what came from the host, and who holds it."""
        requests = [[Request(name, slot, tokens) for slot, (name, tokens) in enumerate(given)] for _ in ranks]
        loaded = both(lambda rank: rank.admit(requests[rank.rank]))
        held = [all(rank.holds(req) for req in requests[rank.rank]) for rank in ranks]
        bases = [req.kv_rotation_base for req in requests[0]]
        assert bases == [req.kv_rotation_base for req in requests[1]]
        for at in range(len(given)):
            both(partial(Rank.finish, requests=requests, at=at))
        settle()
        return loaded, held, bases

    stem = list(range(1, 4 * PAGE + 4))
    # An odd number of pages: the next chain begins with the other rank.
    out["first"] = serve(("a", stem[: 3 * PAGE]))
    out["longer"] = serve(("b", stem))
    both(lambda rank: rank.cache.evict(SimpleNamespace(num_tokens=RANKS * PAGES_A_RANK * PAGE)))
    out["free"] = [rank.server.aggregate_free_size() for rank in ranks]
    out["back"] = serve(("c", stem))
    # Equal prompts in one batch, each a chain of its own that begins with another rank: one insert of the two is declined.
    twin = list(range(100, 100 + 3 * PAGE))
    out["twins"] = serve(("d", twin), ("e", [*twin, *range(200, 200 + PAGE)]))
    out["held"] = [rank.engine.evictable_size() + rank.server.aggregate_free_size() for rank in ranks]
    out["round"] = [rank.goes_round() for rank in ranks]
    out["same"] = ranks[0].engine.canonical(local=False) == ranks[1].engine.canonical(local=False)
    out["committed"] = [rank.engine.counters.committed for rank in ranks]
    for rank in ranks:
        findings.extend(str(finding) for finding in check_quiet(rank.census()))
        rank.streams.close()
    threads.shutdown()
    print(json.dumps({**out, "findings": findings[:5]}))


if __name__ == "__main__":
    main()
