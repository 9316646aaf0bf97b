"""Re-steps the lifecycles of one log and keeps their accounts: columns, watermarks, slots, locks, parents, numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cphicache.events import Line
from cphicache.lifecycle import PENDING, Row, State, Trigger
from cphicache.replay.expect import judge
from cphicache.replay.findings import Kind
from cphicache.replay.live import Live
from cphicache.replay.sequence import Sequence, Tell

N, R, L, C, B = (
    State.DEVICE_VALID_HOST_NONE,
    State.RESERVED,
    State.LAYERS_IN_FLIGHT,
    State.COMMITTED,
    State.ROLLED_BACK,
)
(
    AGREED,
    AGREED_FAILED,
    BIND,
    LAYER_STORED,
    LOAD_AGREED,
    LOAD_DRAINED,
    LOAD_QUEUED,
    SPLIT,
    SPLIT_WANTED,
) = (
    Trigger.AGREED,
    Trigger.AGREED_FAILED,
    Trigger.BIND,
    Trigger.LAYER_STORED,
    Trigger.LOAD_AGREED,
    Trigger.LOAD_DRAINED,
    Trigger.LOAD_QUEUED,
    Trigger.SPLIT,
    Trigger.SPLIT_WANTED,
)  # looked up once: a member access through the enum is slow
_STATES: Mapping[str, State] = {state.value: state for state in State}
_TRIGGERS: Mapping[str, Trigger] = {trigger.value: trigger for trigger in Trigger}


class NotAStep(ValueError):
    """A step has a state or a trigger that nobody knows."""


class Stepper:
    """Lifecycles of one log. ``live`` holds what is pending or has a host copy: its size follows the host pool, not the log.

    ``schema``: version of the log; checks that need later fields are left out. ``unsure`` nodes, and all of them after a loss, are
    followed without findings until they are known again.
    """

    def __init__(self, schema: int) -> None:
        self.live: dict[int, Live] = {}
        self.sequence = Sequence()
        self.layers: dict[str, int] | None = None
        """Layers by payload, once the log has told them."""
        self._schema = schema
        self._children: dict[int, set[int]] = {}
        self._generation: int | None = 0
        self._account = 0
        self._drift = 0
        self._missed = False
        self._unsure: set[int] = set()

    def lose_track(self) -> None:
        """Events are missing here: any backup may have gone on, begun or ended."""
        self._missed = True
        self._generation = None
        self._unsure.update(self.live)
        self.sequence.lose_track()

    # -- one step ---------------------------------------------------------------------------------------------------------------
    def step(self, line: Line, tell: Tell) -> tuple[Live, State]:
        """Take the step of a line. Returns the backup as it is now and its state before. Raises :class:`NotAStep`."""
        event = line.event
        node, generation, bound, stale = event["node"], event["generation"], event["bound"], event.get("stale")
        try:
            trigger, before, after = _TRIGGERS[event["trigger"]], _STATES[event["before"]], _STATES[event["after"]]
        except KeyError:
            what = f"unknown: {event['trigger']!r} in {event['before']!r} gives {event['after']!r}"
            raise NotAStep(what) from None
        live = self.live.get(node)
        known = live is not None
        if live is None:
            live = Live(node, bound=bound)
            live.since_tick, live.since_wall = event["tick"], event.get("wall")
            live.submitted, live.confirmed = dict.fromkeys(event["submitted"], 0), dict.fromkeys(event["submitted"], 0)
        may_be_new = self._missed or (self._schema < 2 and before is C)  # of schema 1, a split's head has no step of its own
        trusted = node not in self._unsure and (known or before is N or not may_be_new)
        if live.state is not before and trusted:
            last = f"its last state was {live.state} (line {live.last[2]})" if known else "it was not pending and had no host copy"
            tell(Kind.STATE_BEFORE, f"{trigger} in {before}, but {last}")
            trusted = False
        live.state = before
        verdict = judge(before, trigger, after, stale, self._guards(live, event, before) if trusted else {})
        if verdict.wrong:
            tell(self._kind_of(verdict.against, after), verdict.wrong)
        row = verdict.row
        if trusted and row is not None:
            self._check_columns(live, row, event, tell)
            self._check_watermarks(live, row, trigger, event, tell)
        self._check_confirmed(event, tell)
        self._follow_number(live, row, trigger, line, tell, trusted=trusted)
        self._follow_generation(live, row, generation, tell, trusted=trusted and known)
        self._follow_slots(live, row, event, tell, trusted=trusted)
        if trusted and self._schema >= 2:
            self._check_lock(live, row, bound, event, tell)
        self._adopt(live, event, trusted=trusted)
        grandparent = live.parent
        if "parent" in event:
            self._set_parent(live, event["parent"])
        live.state, live.generation = after, generation
        if before is C and after is N:
            self._check_children(live, tell)
        if trigger is SPLIT and row is not None:
            self._split(live, event, grandparent)
        self._follow_load(live, trigger, tell, trusted=trusted)
        live.last = (event["tick"], event["seq"], line.number)
        if after in PENDING or before in PENDING:
            live.history.append(line)
        else:
            live.history.clear()
        self._unsure.discard(node)
        if after is N:
            self._forget(live)
        else:
            self.live[node] = live
        return live, before

    def _guards(self, live: Live, event: dict[str, Any], before: State) -> dict[str, bool]:
        guards = {"bound": live.bound, "numbered": live.number is not None, "agreed": live.agreed}
        if self.layers is not None and set(self.layers) == set(live.submitted):
            guards["complete"] = all(live.submitted[name] == (1 << layers) - 1 for name, layers in self.layers.items())
        if "layers" in event:
            guards["new_layers"] = bool(_mask(event["layers"]) & ~live.submitted.get(event["payload"], 0))
        if "parent" in event:
            parent = event["parent"]
            if parent == 0 or (parent not in self._unsure and (parent in self.live or not self._missed)):
                guards["parent_committed"] = parent == 0 or self._state_of(parent) is C
            if not parent and event.get("refused") != "split_awaited":
                guards["fit"] = event.get("refused") in (None, "no_host_slots")
        return guards

    def _state_of(self, node: int) -> State:
        live = self.live.get(node)
        return N if live is None else live.state

    @staticmethod
    def _kind_of(against: tuple[str, ...], after: State) -> Kind:
        if after is C and "parent_committed" in against:
            return Kind.PARENT_UNCOMMITTED
        if "complete" in against:
            return Kind.COMMIT_INCOMPLETE
        return Kind.ILLEGAL_EDGE

    # -- columns and watermarks ---------------------------------------------------------------------------------------------------
    @staticmethod
    def _check_columns(live: Live, row: Row, event: dict[str, Any], tell: Tell) -> None:
        forgets = "release" in row.before or "release_host" in row.before
        expected = {
            "bound": live.bound or "attach" in row.before,
            "agreed": not forgets and (live.agreed or "mark_agreed" in row.before),
        }
        for name, value in expected.items():
            if event[name] is not value:
                tell(Kind.COLUMN, f"{name} is {event[name]} where the step makes it {value}")
        if "take_number" not in row.before and event.get("number") != live.number:
            tell(Kind.COLUMN, f"its number is {event.get('number')} where it was {live.number}")

    def _check_watermarks(self, live: Live, row: Row, trigger: Trigger, event: dict[str, Any], tell: Tell) -> None:
        submitted, confirmed = event["submitted"], event["confirmed"]
        masks, expected_confirmed = dict(live.submitted), dict(live.confirmed)
        if "copy_layers" in row.before and "layers" in event:
            masks[event["payload"]] = masks.get(event["payload"], 0) | _mask(event["layers"])
        if "confirm" in row.before:
            expected_confirmed = {name: mask.bit_count() for name, mask in masks.items()}
        if "release" in row.before or "release_host" in row.before:
            masks, expected_confirmed = dict.fromkeys(masks, 0), dict.fromkeys(masks, 0)
        counts = {name: mask.bit_count() for name, mask in masks.items()}
        if submitted != counts and (trigger is not LAYER_STORED or "layers" in event):
            tell(Kind.WATERMARK, f"submitted layers are {submitted} where the steps make them {counts}")
        if confirmed != expected_confirmed:
            tell(Kind.WATERMARK, f"confirmed layers are {confirmed} where the steps make them {expected_confirmed}")
        live.submitted = masks

    @staticmethod
    def _check_confirmed(event: dict[str, Any], tell: Tell) -> None:
        for name, count in event["confirmed"].items():
            submitted = event["submitted"].get(name, 0)
            if count > submitted:
                tell(Kind.CONFIRMED_EARLY, f"{count} {name} layers confirmed, {submitted} submitted")

    def _adopt(self, live: Live, event: dict[str, Any], *, trusted: bool) -> None:
        """What the log says is how things are: one wrong value is one finding."""
        live.bound, live.agreed = event["bound"], event["agreed"]
        live.confirmed = dict(event["confirmed"])
        for name, count in event["submitted"].items():
            if live.submitted.get(name, 0).bit_count() != count:  # which ones is unknown: the first so many
                live.submitted[name] = (1 << count) - 1
        if "request" in event and event["trigger"] != SPLIT_WANTED:
            live.request = event["request"]
        elif event["trigger"] == BIND and event.get("reason"):
            live.request = event["reason"]
        if not trusted:
            live.number = event.get("number")

    # -- the sequence ---------------------------------------------------------------------------------------------------------------
    def _follow_number(self, live: Live, row: Row | None, trigger: Trigger, line: Line, tell: Tell, *, trusted: bool) -> None:
        number = line.event.get("number")
        if row is None:
            live.number = number
            return
        if "take_number" in row.before:
            self.sequence.give(number, (live.node, f"line {line.number}"), tell)
            live.number = number
        elif trigger is AGREED and number is not None:
            self.sequence.agree(number, tell)
        elif trigger is AGREED_FAILED and row.is_edge and number is not None:
            self.sequence.fail(number, tell)
        if "release" in row.before or "release_host" in row.before:
            live.number = None
        elif not trusted or number is not None:
            live.number = number

    def _follow_generation(self, live: Live, row: Row | None, generation: int, tell: Tell, *, trusted: bool) -> None:
        if row is not None and "reserve_slots" in row.before:
            expected = None if self._generation is None else self._generation + 1
            if expected is not None and generation != expected:
                tell(Kind.GENERATION, f"generation {generation} begins where {expected} is the next")
            self._generation = generation if expected is None else max(generation, expected)
        elif trusted and generation != live.generation:
            tell(Kind.GENERATION, f"generation {generation} where generation {live.generation} is pending or committed")

    # -- slots, locks, parents, loads -------------------------------------------------------------------------------------------------
    def _follow_slots(self, live: Live, row: Row | None, event: dict[str, Any], tell: Tell, *, trusted: bool) -> None:
        slots, held = event["slots"], live.slots
        work = () if row is None else row.before
        if trusted:
            self._check_slots(slots, held, work, event, tell)
        self._account += slots - held
        live.slots = slots
        if "head_slots" in event:
            self._account += event["head_slots"]
        if "used" not in event:
            return
        drift = event["used"] - self._account
        if drift != self._drift and not self._missed:
            change = drift - self._drift
            if change > 0:
                tell(Kind.SLOTS_LEAKED, f"{change} more host slots are in use than the backups hold: taken twice, or not released")
            else:
                tell(Kind.SLOTS_TWICE, f"{-change} fewer host slots are in use than the backups hold: released twice")
        self._drift = drift

    def _check_slots(self, slots: int, held: int, work: tuple[str, ...], event: dict[str, Any], tell: Tell) -> None:
        if "reserve_slots" in work:
            if slots < 1 or held:
                tell(Kind.SLOTS, f"reserved with {slots} host slots, {held} before")
        elif "release" in work or "release_host" in work:
            if slots:
                tell(Kind.SLOTS, f"{slots} of {held} host slots were not released")
            elif not held:
                tell(Kind.SLOTS, "released host slots that it did not hold")
        elif "fork" in work:
            if "head_slots" in event and slots + event["head_slots"] != held:
                tell(Kind.SLOTS, f"divided into {event['head_slots']} and {slots} host slots, {held} before")
        elif "shrink_now" in work or "commit" in work:
            if slots > held or (not slots and "commit" in work):
                tell(Kind.SLOTS, f"{slots} host slots where it held {held}")
        elif slots != held:
            tell(Kind.SLOTS, f"{slots} host slots where it held {held}, and the step changes none")

    @staticmethod
    def _check_lock(live: Live, row: Row | None, bound: bool, event: dict[str, Any], tell: Tell) -> None:
        work = () if row is None else row.before
        taken = ("attach" in work) + ("reserve_slots" in work and bound)
        expected = taken - ("commit" in work) - ("release" in work and bound)
        change = event.get("locks", 0)
        live.locks += change
        if change > expected:
            what = "was not released" if expected < 0 else "was taken once too often"
            tell(Kind.LOCK_LEAKED, f"the node's device lock {what}: changed by {change}, the step changes it by {expected}")
        elif change < expected:
            what = "was not taken" if expected > 0 else "was released once too often"
            tell(Kind.LOCK_TWICE, f"the node's device lock {what}: changed by {change}, the step changes it by {expected}")

    def _check_children(self, live: Live, tell: Tell) -> None:
        for child in sorted(self._children.get(live.node, ())):
            other = self.live.get(child)
            if other is not None and other.bound and other.state in (R, L, C):
                tell(Kind.PARENT_FREED, f"its host copy goes while node {child} below it is {other.state}")

    def _set_parent(self, live: Live, parent: int) -> None:
        if live.parent is not None:
            self._leave_parent(live)
        live.parent = parent
        self._children.setdefault(parent, set()).add(live.node)

    def _leave_parent(self, live: Live) -> None:
        if live.parent is not None:
            siblings = self._children[live.parent]
            siblings.discard(live.node)
            if not siblings:
                del self._children[live.parent]
            live.parent = None

    def _split(self, live: Live, event: dict[str, Any], grandparent: int | None) -> None:
        if "head" not in event or live.state is N:
            return
        head = Live(event["head"], bound=live.bound)
        head.state, head.generation, head.loading = live.state, live.generation, live.loading
        head.submitted, head.confirmed = dict.fromkeys(live.submitted, 0), dict.fromkeys(live.confirmed, 0)
        head.slots, head.request = event["head_slots"], live.request
        head.since_tick, head.since_wall, head.last = live.since_tick, live.since_wall, live.last
        self.live[head.node] = head
        if grandparent is not None:
            self._set_parent(head, grandparent)

    @staticmethod
    def _follow_load(live: Live, trigger: Trigger, tell: Tell, *, trusted: bool) -> None:
        if trigger is LOAD_QUEUED:
            if live.loading and trusted:
                tell(Kind.ILLEGAL_EDGE, "a load-back is queued for a node that another one is loading")
            live.loading = True
        elif trigger in (LOAD_AGREED, LOAD_DRAINED):
            if not live.loading and trusted:
                tell(Kind.ILLEGAL_EDGE, f"{trigger}, but no load-back of the node is in flight")
            live.loading = False
        elif live.loading and live.state is N and trusted:
            tell(Kind.PARENT_FREED, "its host copy goes while a load-back reads it")

    def _forget(self, live: Live) -> None:
        self._leave_parent(live)
        self.live.pop(live.node, None)


def _mask(layers: list[int]) -> int:
    mask = 0
    for layer in layers:
        mask |= 1 << layer
    return mask
