"""Twenty bugs, each one replacement in the text of a source file, and what catches it.

The places are those that the promise rests on: slots, locks, the agreed sequence, visibility, splits, load-backs, retries, keys, and the
two tools that look for such bugs.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Bug:
    """``old`` stands exactly once in the files ``where`` (a pattern) and becomes ``new``. ``catcher``: a subcommand of ``cphicache`` with
    its arguments, or ``test`` and a test."""

    name: str
    where: str
    old: str
    new: str
    catcher: str

    @property
    def kind(self) -> str:
        """``explore``, ``simulate`` or ``test``."""
        return self.catcher.partition(" ")[0]

    @property
    def path(self) -> Path:
        """The file in which ``old`` stands. Raises LookupError unless it stands in one, once."""
        found = [path for path in sorted(ROOT.glob(self.where)) for _ in range(path.read_text().count(self.old))]
        if len(found) != 1:
            raise LookupError(f"{self.name}: expected its text once in {self.where}, found it {len(found)} times")
        return found[0]

    @property
    def source(self) -> str:
        """The file with the bug in it."""
        return self.path.read_text().replace(self.old, self.new)

    @property
    def place(self) -> str:
        """File, and function if it is in one, for people."""
        text = self.path.read_text()
        line = text[: text.index(self.old)].count("\n") + 1
        names = [
            node.name
            for node in ast.walk(ast.parse(text))
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.lineno <= line <= (node.end_lineno or line)
        ]
        return ": ".join(filter(None, (str(self.path.relative_to(ROOT / "cphicache")), ".".join(names))))


BUGS = (
    Bug(
        "a rollback keeps its host slots",
        "cphicache/engine/*.py",
        "        state.ledger.give(record.need)\n        self._give_wasted(record)\n",
        "        self._give_wasted(record)\n",
        "explore chain-disjoint",
    ),
    Bug(
        "a commit keeps the lock on the device pages",
        "cphicache/engine/*.py",
        "        self._give_wasted(record)\n        self._holds.release_device(record)\n        del",
        "        self._give_wasted(record)\n        del",
        "explore chain-disjoint",
    ),
    Bug(
        "the sample counts over an operation that is still copying",
        "cphicache/engine/agreement.py",
        "elif not gap:",
        "else:",
        "explore chain-disjoint",
    ),
    Bug(
        "what stands behind a failed operation is passed with it",
        "cphicache/engine/agreement.py",
        "end = min(count, first_failed + 1)",
        "end = count",
        "test tests/engine/test_backups_agreement.py::test_two_failures_in_one_sample_are_applied_one_by_one",
    ),
    Bug(
        "children of a lost extent stay pending",
        "cphicache/engine/*.py",
        "        self._steps.follow(PARENT_LOST, sorted(pending, key=_reservation_order))\n",
        "",
        "explore chain-disjoint",
    ),
    Bug(
        "a node is divided while its copies are in flight",
        "cphicache/engine/matching.py",
        "return node if node.backup.state in PENDING else None",
        "return None",
        "explore split",
    ),
    Bug(
        "the head of a divided node is not locked",
        "cphicache/tree/radix.py",
        "head.lock_ref, head.host_ref = node.lock_ref, node.host_ref",
        "head.host_ref = node.host_ref",
        "explore split",
    ),
    Bug(
        "a layer that is reported twice is copied twice",
        "cphicache/lifecycle/callbacks.py",
        "given.layers_mask & ~record.submitted[given.payload] != 0",
        "True",
        "test tests/engine/test_backups_layers.py::test_a_layer_reported_twice_is_copied_once",
    ),
    Bug(
        "a load-back that failed keeps its readers",
        "cphicache/engine/loadback.py",
        "            state.requests[rid].poisoned = True\n",
        "            pass\n",
        "test tests/engine/test_loadback_failure.py::test_several_readers_are_all_poisoned_and_others_are_not",
    ),
    Bug(
        "a forward goes on without the load-backs of a request that ended in it",
        "cphicache/engine/*.py",
        "producers.update(load.producer for load in self._state.loads.values())",
        "pass",
        "simulate --seed 943",
    ),
    Bug(
        "a request that ends early keeps a page",
        "cphicache/engine/*.py",
        "self._state.alloc.free(list(own[request.protected_pages :]))",
        "self._state.alloc.free(list(own[request.protected_pages + 1 :]))",
        "simulate --seed 1",
    ),
    Bug(
        "adopted pages are still counted as host-only",
        "cphicache/engine/*.py",
        "        self.count_host_only(node.backup, -1)\n",
        "",
        "test tests/engine/test_loadback_adoption.py",
    ),
    Bug(
        "a leaf is evicted though it is locked",
        "cphicache/tree/node.py",
        "and not self.lock_ref and self.parent is not None\n\n    @property\n    def is_host_removable",
        "and self.parent is not None\n\n    @property\n    def is_host_removable",
        "simulate --seed 1",
    ),
    Bug(
        "a node that is still being backed up counts as a host hit",
        "cphicache/engine/matching.py",
        "        if node.backup.state is COMMITTED:\n            last_host_node = node",
        "        last_host_node = node",
        "test tests/engine/test_loadback_match.py::test_pending_nodes_are_device_hits_only",
    ),
    Bug(
        "slots freed by its own rollback count for a retry",
        "cphicache/engine/*.py",
        "        record.refused_epoch = state.ledger.freed_epoch  # slots freed by its own rollback do not count (R15)\n",
        "",
        "test tests/engine/test_backups_order.py::test_its_own_freed_slots_are_no_reason_to_try_again",
    ),
    Bug(
        "slots freed by a reclaim count for a retry",
        "cphicache/ledger/ledger.py",
        "if counts_for_retry and any(need):",
        "if any(need):",
        "test tests/ledger/test_host_ledger.py::test_epoch_counts_only_slots_worth_a_retry",
    ),
    Bug(
        "a page too many is matched in part",
        "cphicache/tree/keys.py",
        "while high - low > 1:",
        "while high - low > 2:",
        "test tests/tree/test_keys.py::test_every_position_of_the_first_difference_is_found",
    ),
    Bug(
        "explore overlooks states from which nothing comes to rest",
        "cphicache/explore/graph.py",
        "return None if lost < 0 else",
        "return None if lost else",
        "test tests/explore/test_graph.py",
    ),
    Bug(
        "explore does not compare the ranks",
        "cphicache/explore/product.py",
        "            broken = self._disagreement(chosen, reached)\n",
        "            pass\n",
        "test tests/explore/test_planted_bugs.py -k alone",
    ),
    Bug(
        "simulate excuses every wrong byte",
        "cphicache/run/simulate/judge.py",
        "if not self.explains(mismatch)]",
        "if False]",
        "test tests/simulate/test_command.py::test_wrong_bytes_end_with_10",
    ),
)
