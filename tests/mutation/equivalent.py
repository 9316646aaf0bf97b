"""Mutants that no test can tell from the original, each with the reason."""

from __future__ import annotations

STAMP = "the number is compared only between entries of one node, which equal tuples hold just as well"

TO_THE_ROOT = "every chain of parents ends in the root; mypy has to be told"
PARENTED = "what is below the root has a parent; mypy has to be told"
BEFORE_READ = "it is set anew before anybody reads it"
BELOW_EPOCHS = "epochs are 0 or more, and only whether it is older than one is asked"
TIMES = "times are only compared with each other"
PAST = "ticks are 0 or more, and only whether it is one of the past is asked"
FAR_PAST = "far enough in the past, too"
NOTHING_ASKED = "a step of a layer asks for no victims and changes none; the step that asks counts itself"
IN_COMMON = "a first part that all of them have in common tells none apart"
ROOT_ALONE = "it is given, or set at once, for all but the root, which is never evicted"
TURNED_ROUND = "forms are only compared with each other, and the answer is turned round in all of them"
NEVER_SHORT = "victims are planned only where they suffice, and nothing comes between: no second reservation is refused"

EQUIVALENT: dict[str, str] = {
    "cphicache/tree/radix.py::RadixTree.split::head: Node[B] = Node(head_id, parent, head_key, node.child_key, None if pages is None else "
    "pages[:head_pages], now=0)::0 -> 1": BEFORE_READ,
    "cphicache/tree/radix.py::RadixTree.set_device::if node.pages is not None or node.parent is None or node.parent.pages is None:::"
    "without node.parent is None": "only the root has no parent, and it is always on the device; mypy has to be told",
    'cphicache/tree/radix.py::RadixTree._leave_device::raise TreeInternalError(f"expected a node on the device, found {node}")::left out': (
        "both who call it have looked; mypy has to be told"
    ),
    "cphicache/engine/backups.py::Backups.split::head = Backup(self._state.new_node_id(), len(self._layers), bound=True, "
    "no_need=self._state.no_need)::True -> False": BEFORE_READ,
    "cphicache/engine/effects.py::Effects.on_device::return record.node is not None and record.node.pages is not None::without "
    "record.node is not None": "it is asked of committed backups, which have a node; mypy has to be told",
    "cphicache/engine/effects.py::Effects.refuse::free=[min(ledger.free(rank, name) for name in self._names) for rank in "
    "range(state.config.cp_size)],::min -> max": "every payload has equally many slots, and equally many of them are in use",
    "cphicache/engine/effects.py::Effects._parent_state::return COMMITTED if parent is None or parent.is_root else parent.backup.state::"
    "without parent is None": PARENTED,
    "cphicache/engine/effects.py::Effects.fork::head.set_generation(record.generation)::left out": BEFORE_READ,
    "cphicache/engine/host_eviction.py::HostEviction.plan::may_reclaim = may_reclaim and state.config.reclaim_device_valid::without "
    "state.config.reclaim_device_valid": "nothing is filed as reclaimable then; it only spares a walk through victims that are too few",
    "cphicache/engine/waiting.py::Waiting.retry::if not state.retries or state.retried_epoch == state.ledger.freed_epoch:::without not "
    "state.retries": "with nobody to try the epoch is noted, and who is refused from then on is no older than that",
    "cphicache/engine/requests.py::Requests._leave::self._waiting.stop(request.rid)::left out": (
        "whoever leaves has stopped waiting when it was admitted, inserted or ended"
    ),
    "cphicache/engine/loadback.py::LoadBacks._nodes::while left > 0 and node.parent is not None:::without node.parent is not None": (
        "the pages of a load-back are those of nodes below the root; mypy has to be told"
    ),
    "cphicache/engine/canonical.py::_Canonical.form::state.quarantined is not None,::is not -> is": TURNED_ROUND,
    "cphicache/tree/keys.py::RadixKey.child_key::return (self.extra_key, page) if at_root and self.extra_key is not None else page::"
    "without self.extra_key is not None": IN_COMMON,
    "cphicache/tree/keys.py::RadixKey.common_pages::if limit <= 0 or not self.is_same_kind(other):::<= -> <": (
        "of no pages none are found in common"
    ),
    "cphicache/tree/node.py::Node.__init__::priority: int = 0,::0 -> 1": ROOT_ALONE,
    "cphicache/tree/radix.py::RadixTree.count_hit::self._refresh(node)::left out": (
        "hits only rise, and a rank that has risen is seen when its node surfaces"
    ),
    "cphicache/engine/digest.py::_states::yield list(state.waiters), list(state.parked), list(state.retries), state.quarantined is not "
    "None::is not -> is": TURNED_ROUND,
    'cphicache/engine/digest.py::_digest::digest.update(b"\\n")::left out': (
        "each value is shown in brackets, so that a row of them can be read in one way only"
    ),
    "cphicache/engine/image.py::_new_record::record = Backup(node_id, len(state.config.payloads), bound=False, no_need=state.no_need)"
    "::False -> True": BEFORE_READ,
    "cphicache/engine/cache.py::CpHiRadixCache.__init__::if log is not None and log.level >= Level.OPS:::without log.level >= Level.OPS": (
        "the log itself leaves out events above its level"
    ),
    "cphicache/engine/effects.py::Effects.evict_host::for node, trigger in self._victims(record) or ():::without ()": (
        "it is asked where there are enough only; mypy has to be told"
    ),
    "cphicache/engine/waiting.py::Waiting.stop::record.refused_epoch = -1  # it was not to be reserved while somebody waited to split it"
    "::1 -> 2": BELOW_EPOCHS,
    "cphicache/engine/waiting.py::Waiting.stop::state.retried_epoch = -1::1 -> 2": BELOW_EPOCHS,
    "cphicache/engine/state.py::CacheState.__init__::self.retried_epoch = -1::1 -> 2": BELOW_EPOCHS,
    "cphicache/engine/records.py::Backup.__init__::self.refused_epoch = -1::1 -> 2": BELOW_EPOCHS,
    "cphicache/engine/records.py::Backup.__init__::self.tried_tick = -1::1 -> 2": PAST,
    "cphicache/engine/records.py::Backup.__init__::self.refused_tick = -(10**9)::** -> *": FAR_PAST,
    "cphicache/engine/records.py::Backup.__init__::self.refused_tick = -(10**9)::10 -> 11": FAR_PAST,
    "cphicache/engine/records.py::Backup.__init__::self.refused_tick = -(10**9)::9 -> 10": FAR_PAST,
    "cphicache/engine/records.py::Backup.__init__::self.void = False::False -> True": BEFORE_READ,
    "cphicache/engine/records.py::Backup.__init__::self.done_here = False::False -> True": BEFORE_READ,
    "cphicache/engine/records.py::Backup.__init__::self.order = 0::0 -> 1": BEFORE_READ,
    "cphicache/engine/records.py::Backup.__init__::self.stored_tick = -1::without -": BEFORE_READ,
    "cphicache/engine/records.py::Backup.__init__::self.stored_tick = -1::1 -> 2": BEFORE_READ,
    "cphicache/engine/records.py::Backup.__init__::self.key = OpKey(node_id, 0)::0 -> 1": BEFORE_READ,
    "cphicache/engine/requests.py::Requests.touch::while at is not None and not at.is_root:::without at is not None": TO_THE_ROOT,
    "cphicache/engine/eviction.py::DeviceEviction._write_back::while at is not None and not at.is_root and at.backup.state is "
    "DEVICE_VALID_HOST_NONE:::without at is not None": TO_THE_ROOT,
    "cphicache/engine/steps.py::Steps._counted_step::counters.eviction_retries_failed += 1::left out": NEVER_SHORT,
    "cphicache/engine/steps.py::Steps._counted_step::counters.eviction_retries_failed += 1::+= -> -=": NEVER_SHORT,
    "cphicache/engine/steps.py::Steps._counted_step::counters.eviction_retries_failed += 1::1 -> 2": NEVER_SHORT,
    "cphicache/engine/forwards.py::Forwards.layer_stored::if not batch.ops or not self._config.overlap:::without not batch.ops": (
        "without backups there is nothing to step or to submit; it only spares the calls"
    ),
    "cphicache/engine/forwards.py::Forwards.wait_layer::if batch is None or not self._state.loads:::without not self._state.loads": (
        "without load-backs there is no producer to wait for"
    ),
    "cphicache/engine/host_eviction.py::HostEviction._plan_reclaim::aside.remove(parent)::left out": (
        "at the end, and when another child of it goes, it is added once more, which changes nothing"
    ),
    "cphicache/engine/inserts.py::Inserts.insert::if node.priority < request.priority:::< -> <=": "the priority that it has is set again",
    "cphicache/engine/requests.py::Requests.touch::while at is not None and not at.is_root:::without not at.is_root": (
        "the root is never evicted, so that nobody asks when it was used"
    ),
    "cphicache/engine/state.py::CacheState.now::self.clock += 1::1 -> 2": TIMES,
    "cphicache/engine/steps.py::Steps.__init__::self.taken = 0::0 -> 1": "counts are only compared with each other",
    "cphicache/engine/loadback.py::LoadBacks._is_below::return False::False -> True": (
        "it is asked of load-backs that have not failed, below one that has"
    ),
    "cphicache/engine/inserts.py::Inserts.insert::pages = [page for node in path for page in node.pages or ()][: key.pages]::without ()": (
        "all of the path is on the device then; mypy has to be told"
    ),
    "cphicache/engine/inserts.py::Inserts._add_nodes::continue  # lost with the one before it; it may still drain under its id, so its KV "
    "gets a node with another::continue -> break": "what was reserved behind a lost one is lost with it",
    "cphicache/engine/records.py::Backup.__init__::self.key = OpKey(node_id, 0)::left out": BEFORE_READ,
    "cphicache/engine/records.py::Load::number: int = -1::without -": BEFORE_READ,
    "cphicache/engine/records.py::Load::number: int = -1::1 -> 2": BEFORE_READ,
    "cphicache/engine/records.py::Backup.__init__::self.start_page = 0::0 -> 1": BEFORE_READ,
    "cphicache/engine/records.py::Backup.__init__::self.refused_epoch = -1::without -": BEFORE_READ,
    "cphicache/engine/state.py::CacheState.__init__::self.clock = 0::0 -> 1": TIMES,
    "cphicache/engine/steps.py::Steps._counted_step::if stale is None and record.state is before and trigger is not RESERVE_RETRY:::"
    "without trigger is not RESERVE_RETRY": NEVER_SHORT,
    "cphicache/engine/records.py::Request::priority: int = 0::0 -> 1": "every request is made with one",
    "cphicache/engine/requests.py::Requests._whole::if request.whole_pages is None or key.pages <= request.whole_pages:::<= -> <": (
        "a key of that length is cut to itself"
    ),
    "cphicache/engine/steps.py::Steps._counted_step::self.taken += 1::1 -> 2": "counts are only compared with each other",
    "cphicache/engine/steps.py::Steps._step_each::self.taken += len(records)::left out": NOTHING_ASKED,
    "cphicache/engine/waiting.py::Waiting.retry::nodes = [record.node for record in due if record.node is not None and record.tried_tick < "
    "state.tick]::without record.node is not None": "only what has a node is to be tried again; mypy has to be told",
    "cphicache/engine/inserts.py::Inserts._add_nodes::self._add(chain, op.start_page, self._state.new_node_id())::left out": (
        "a reservation begins where the one before it, or what is in the tree, ends"
    ),
    "cphicache/tree/eviction.py::plan_host_victims::if joined and (node is None or joined[0][:2] < candidates.order(node)):::< -> <=": (
        "two nodes differ in their ids"
    ),
    "cphicache/tree/eviction.py::plan_host_victims::if parent is None or not parent.is_host_removable:::without parent is None": PARENTED,
    'cphicache/tree/image.py::_key_order::return extra_key is not None, extra_key or "", node.key.page(0)::is not -> is': TURNED_ROUND,
    "cphicache/tree/image.py::_key_order::return extra_key is not None, extra_key or \"\", node.key.page(0)::without ''": (
        "keys without a namespace have this part in common"
    ),
    "cphicache/lifecycle/callbacks.py::_copy_layers::if submitted & reported:  # a layer is copied once, also when it is reported again "
    "together with new ones::& -> |": "taking submitted layers out of a report that has none leaves it as it is",
    "cphicache/lifecycle/record.py::Input::layers_mask: int = field(init=False, default=0, repr=False, compare=False)::False -> True #2": (
        "inputs with equal layers have equal masks, and the layers are compared"
    ),
    "cphicache/lifecycle/validate.py::assignments::if not any(forbidden <= literals for forbidden in IMPOSSIBLE):::any -> all": (
        "there is one impossible combination"
    ),
    "cphicache/tree/eviction.py::Candidates.__init__::self._stamp = 0  # makes entries of the same node differ, so that nodes themselves "
    "are never compared::0 -> 1": STAMP,
    "cphicache/tree/eviction.py::Candidates._push::self._stamp += 1::left out": STAMP,
    "cphicache/tree/eviction.py::Candidates._push::self._stamp += 1::+= -> -=": STAMP,
    "cphicache/tree/eviction.py::Candidates._push::self._stamp += 1::1 -> 2": STAMP,
    "cphicache/tree/eviction.py::Candidates.peek::self._stamp += 1::left out": STAMP,
    "cphicache/tree/eviction.py::Candidates.peek::self._stamp += 1::+= -> -=": STAMP,
    "cphicache/tree/eviction.py::Candidates.peek::self._stamp += 1::1 -> 2": STAMP,
    "cphicache/tree/image.py::canonical_form::(node.lock_ref, node.host_ref, node.loading is not None),::is not -> is": TURNED_ROUND,
    'cphicache/tree/image.py::canonical_form::raise TreeInternalError(f"canonical: expected a parent, found none for {node}")::left out': (
        "every node that is reached below the root has a parent; mypy has to be told"
    ),
    "cphicache/tree/eviction.py::plan_host_victims::if joined and (node is None or joined[0][:2] < candidates.order(node)):::2 -> 3": (
        "two nodes differ in their ids, so that what stands behind is not compared"
    ),
    "cphicache/tree/image.py::_among_rivals::below.append(tuple([values[other] < value for other in range(at) if other not in path]) if "
    "len(path) < at else ())::< -> <=": "it spares a list that would be empty",
    "cphicache/tree/image.py::_among_rivals::below.append(tuple([values[other] < value for other in range(at) if other not in path]) if "
    "len(path) < at else ())::< -> <= #1": "no two rivals have the same value",
    "cphicache/tree/keys.py::RadixKey.of::whole = elements == pages * page_size::* -> //": "of whole pages both ways take all bytes",
    "cphicache/tree/keys.py::RadixKey.common_pages::limit = min(self.pages - start_page, other.pages - other_start_page)::- -> +": (
        "where this key ends first, the search finds its end"
    ),
}
