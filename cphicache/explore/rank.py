"""One rank as an automaton: the real engine, its recorded ports and its driver, stepped from stored states.

A rank depends on the others through reductions only (R20), so what an event does to it is a function of its state, of the outstanding
reduction and of the answers of its environment. Each such step is made once, by the real code, and remembered.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from enum import IntFlag
from operator import attrgetter
from typing import Any, NamedTuple

from cphicache.engine import Counters, CpHiRadixCache
from cphicache.engine.canonical import ANYTHING, Outlook
from cphicache.engine.records import Backup
from cphicache.explore.audit import TakeCensus, audit, audit_local, check_loaded, is_at_rest
from cphicache.explore.driver import Driver
from cphicache.explore.environment import FAULTS, Answer, Blocked, Environment, Sample, Undecided, WrongAnswer
from cphicache.explore.images import Images, PackedImage
from cphicache.explore.lateness import Standing, Standings, latest
from cphicache.explore.reducer import RecordedReducer
from cphicache.explore.script import ONCE_OUTSIDE, TICK, World
from cphicache.explore.transfer import RecordedTransfer
from cphicache.lifecycle import State
from cphicache.spaces.types import LogicalPage
from cphicache.transfer.port import OpKey


class Mark(IntFlag):
    """What a step did, for the questions that are asked of the whole graph."""

    RETRY = 1
    RECLAIM = 2
    DEFERRAL = 4
    ROLLBACK = 8
    PROGRESS = 16
    """A backup was committed, a load-back ended, or a request got on."""
    FAULT = 32
    OUTSIDE = 64
    """The event comes from outside and need never come."""


FAULT = int(Mark.FAULT)


class Outcome(NamedTuple):
    """One way in which a step can go on this rank.

    ``state``: reached; None while the call waits for a reduction of ``sample``, and when it has failed (``broken`` says how).
    ``sample``: what is outstanding after the step (:data:`UNTOUCHED`: what was before it).
    """

    answers: tuple[Answer, ...]
    state: int | None
    sample: Sample | None
    marks: int
    faults: int
    broken: str | None


UNTOUCHED = Sample(-1, None)
"""Stands for the reduction that was outstanding before the step."""


@dataclass(frozen=True, slots=True)
class RankState:
    """``logical``: number of the logical half's canonical form (equal on all ranks), but for whether a reduction is ``outstanding``.
    ``finest``: the same, or where the exploration is exact, that of the form which leaves out nothing for the calls that cannot come.
    ``events``: what may come next. ``at_rest``: nothing is left to do."""

    image: PackedImage
    logical: int
    finest: int
    outstanding: bool
    copies: Standings
    events: tuple[str, ...]
    at_rest: bool


class Forms:
    """Numbers for canonical forms. Shared by the ranks of a world: equal forms get equal numbers."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._finest: dict[Hashable, int] = {}
        self.audited: set[Hashable] = set()
        """Of which the outside checker has been asked."""

    def number(self, form: Hashable, *, finest: bool = False) -> int:
        """The form's number, a new one for a new form. Those that leave out nothing are numbered apart, and not counted."""
        numbers = self._finest if finest else self._numbers
        return numbers.setdefault(form, len(numbers))

    def __len__(self) -> int:
        return len(self._numbers)


class Rank:
    """One rank of an explored world. ``steps``: calls of the engine so far. ``seen``: what its counters have counted on any way."""

    def __init__(self, world: World, rank: int, forms: Forms, take_census: TakeCensus, *, exact: bool = False) -> None:
        self._world = world
        self._exact = exact
        self._rank = rank
        self._forms = forms
        self._take_census = take_census
        self._environment = Environment()
        self.transfer = RecordedTransfer(
            world.config,
            rank,
            self._environment,
            reserve_may_fail=world.reserve_may_fail,
            wait_may_fail=world.wait_may_fail,
        )
        if not exact:
            self.transfer.is_given_up = self._is_given_up
        self._reducer = RecordedReducer(self._environment)
        self.cache = CpHiRadixCache(world.config, self.transfer, self._reducer)
        self._reducer.first_open = lambda: self.cache.state.resolved
        self.driver = Driver(world, self.cache)
        pages = map(LogicalPage, self.cache.state.alloc.usable_pages)
        self._owners = {page: self.cache.state.layout.owner_of_page(page) for page in pages}
        self.states: list[RankState] = []
        self._known: dict[Hashable, int] = {}
        self._outcomes: dict[Hashable, tuple[Outcome, ...]] = {}
        self._loaded: tuple[int, tuple[Any, Any, Any]] = (-1, (None, None, None))
        self._images = Images()
        self.steps = 0
        self.seen: set[str] = set()
        self.first = self._arrive()

    def outcomes(
        self, state: int, event: str, pending: Sample | None, faults_left: int | None, given: tuple[Answer, ...] = ()
    ) -> tuple[Outcome, ...]:
        """All outcomes of an event in a state, with the reduction ``pending`` outstanding. ``given``: answers up to a reduction that
        a drain round waits for, that one included."""
        key: Hashable = (state, event, pending, faults_left, given)
        found = self._outcomes.get((state, event)) or self._outcomes.get(key)
        if found is None:
            found = tuple(self._explore(state, event, pending, faults_left, given))
            if len(found) == 1 and not found[0].answers and not self._reducer.was_used:
                key = (state, event)  # nothing was asked: so it goes with any reduction and any number of faults
                found = (found[0]._replace(sample=UNTOUCHED),)
            self._outcomes[key] = found
        return found

    def _explore(
        self, state: int, event: str, pending: Sample | None, faults_left: int | None, given: tuple[Answer, ...]
    ) -> list[Outcome]:
        outcomes: dict[Hashable, Outcome] = {}
        open_answers = [given]
        while open_answers:
            outcome = self.step(state, event, pending, open_answers.pop(), chooses=True)
            for at, options in self._environment.others.items():
                before = outcome.answers[:at]
                may_fail = faults_left is None or sum(answer in FAULTS for answer in before) < faults_left
                open_answers.extend((*before, option) for option in options if may_fail or option not in FAULTS)
            # Of several ways to the same, the one with fewest faults stands for all, so that the budget forbids none of it.
            way = None if outcome.state is not None else outcome.answers
            same = (outcome.state, outcome.sample, outcome.broken, outcome.marks & ~FAULT, way)
            other = outcomes.get(same)
            if other is None or outcome.faults < other.faults:
                outcomes[same] = outcome
        return list(outcomes.values()) if self._exact else self._latest(list(outcomes.values()))

    def _latest(self, outcomes: list[Outcome]) -> list[Outcome]:
        """Without those that differ from others only by copies that have ended unseen."""
        alike: dict[Hashable, list[Outcome]] = {}
        kept: list[Outcome] = []
        for outcome in outcomes:
            if outcome.state is None:
                kept.append(outcome)
            else:
                same = (self.states[outcome.state].logical, outcome.sample, outcome.marks & ~FAULT)
                alike.setdefault(same, []).append(outcome)
        for group in alike.values():
            standings = [(self.states[outcome.state].copies,) for outcome in group if outcome.state is not None]
            kept.extend(group[index] for index in latest(standings, wait_may_fail=self._world.wait_may_fail))
        return kept

    def step(self, state: int, event: str, pending: Sample | None, given: tuple[Answer, ...], *, chooses: bool = False) -> Outcome:
        """Make one event happen. Where an answer is missing the first option is taken (``chooses``), or :class:`Undecided` raised;
        :class:`WrongAnswer` for one that is none of the options."""
        self.restore(state)
        self._environment.begin(given, chooses=chooses)
        self._reducer.begin(pending)
        before = _counts(self.cache.counters)
        self.steps += 1
        arrived = waits_with = broken = None
        try:
            self.driver.perform(event)
            arrived = self._arrive()
        except Blocked as blocked:
            waits_with = blocked.sample
        except (Undecided, WrongAnswer):
            raise
        except Exception as error:  # whatever the engine raises here is a violation; it is reported with the way to it
            broken = f"{type(error).__name__}: {error}"
        answers = tuple(self._environment.taken)
        faults = sum(answer in FAULTS for answer in answers)
        if arrived is None:
            return Outcome(answers, None, waits_with, 0, faults, broken)
        self.seen.update(_seen(self.cache.counters))
        marks = self._marks(before, event) | (FAULT if faults else 0)
        return Outcome(answers, arrived, self._reducer.outstanding, marks, faults, None)

    def restore(self, state: int) -> None:
        """Become a state."""
        if self._loaded[0] != state:  # most steps come in a row from one state
            self._loaded = state, self._images.unpack(self.states[state].image)
        image, transfer, driver = self._loaded[1]
        self.cache.restore(image)
        self.transfer.restore(transfer)
        self.driver.restore(driver)

    def _arrive(self) -> int:
        """The number of the state in which the rank is now. A new one is audited first."""
        cache, state = self.cache, self.cache.state
        cache.take_events()
        check_loaded(state, self.transfer)
        logical = self._form(self.driver.outlook())
        finest = self._form(ANYTHING) if self._exact else logical
        copies = self._copies()
        counters = state.counters
        open_tokens = counters.tokens_submitted - counters.tokens_committed - counters.tokens_wasted
        form = (finest, state.outstanding, copies, open_tokens)  # the last one follows from the others if the accounts are right
        known = self._known.get(form)
        if known is not None:
            return known
        # What the checker is told follows from the form but for totals of its own; so these are part of what it was asked about.
        asked = (finest, state.outstanding, open_tokens, cache.evictable_size(), cache.protected_size())
        if asked not in self._forms.audited:
            census = self._take_census(cache, self.driver.rows(), self.transfer.free_slots(), self._rank)
            audit(cache, self.driver, census)
            self._forms.audited.add(asked)
        audit_local(state, self.transfer, self._rank)
        number = self._known[form] = len(self.states)
        image = self._images.pack(cache.snapshot(), self.transfer.snapshot(), self.driver.snapshot())
        events = self._images.same(self.driver.events())
        at_rest = is_at_rest(state, self.driver)
        self.states.append(RankState(image, logical, finest, state.outstanding, copies, events, at_rest))
        return number

    def _form(self, outlook: Outlook) -> int:
        names = _PageNames(self._owners)
        engine = self.cache.canonical(local=False, page_name=names, outstanding=False, outlook=outlook)
        return self._forms.number((engine, self.driver.canonical(names)), finest=outlook is ANYTHING)

    def _copies(self) -> Standings:
        state = self.cache.state
        backups = sorted(state.pending.values(), key=lambda record: record.order)
        return (
            *map(self._copies_of, backups),
            *(Standing(*self.transfer.canonical(load.load_id), load.done_here, load.failed_here) for load in state.loads.values()),
        )

    def _copies_of(self, record: Backup) -> Standing:
        flying, failed = self.transfer.canonical(record.key)
        if self._exact or record.state is not State.ROLLED_BACK:
            return Standing(flying, failed, record.done_here, record.failed_here, record.void)
        return Standing(flying, False, record.done_here, False)  # it is only waited for

    def _is_given_up(self, op: OpKey) -> bool:
        record = self.cache.state.pending.get(op.node)
        return record is not None and record.generation == op.generation and record.state is State.ROLLED_BACK

    def _marks(self, before: tuple[int, ...], event: str) -> int:
        marks = 0
        for mark, new, old in zip(_COUNTED, _counts(self.cache.counters), before, strict=True):
            if new != old:
                marks |= mark
        name = event.partition(" ")[0]
        if self.driver.deferred:
            marks |= _DEFERRAL
        elif name not in (TICK, "start"):
            marks |= _PROGRESS
        return marks | (_OUTSIDE if name in ONCE_OUTSIDE else 0)


_TOTALS = tuple(field.name for field in fields(Counters) if field.default_factory is MISSING)
# How long a backup took is no event, and has no bound.
_BY_KEY = tuple(
    field.name for field in fields(Counters) if field.default_factory is not MISSING and field.name != "ticks_to_visible"
)
_totals_of = attrgetter(*_TOTALS)
_by_key_of = attrgetter(*_BY_KEY)


def _seen(counters: Counters) -> Iterator[str]:
    """Names of what has happened, by the engine's own count."""
    for name, total in zip(_TOTALS, _totals_of(counters), strict=True):
        if total:
            yield name
    for name, by_key in zip(_BY_KEY, _by_key_of(counters), strict=True):
        for key in by_key:
            yield f"{name}:{key}"


class _PageNames:
    """Names pages by owner, and by the order in which they are first asked for: states that differ by a renumbering are one."""

    def __init__(self, owners: Mapping[LogicalPage, int]) -> None:
        self._owners = owners
        self._names: dict[LogicalPage, tuple[int, int]] = {}

    def __call__(self, page: LogicalPage) -> Hashable:
        name = self._names.get(page)
        if name is None:
            name = self._names[page] = (self._owners[page], len(self._names))
        return name


# As plain integers: flags are combined several times in each of millions of steps.
_COUNTED = (int(Mark.RETRY), int(Mark.RECLAIM), int(Mark.ROLLBACK), int(Mark.PROGRESS))
_DEFERRAL, _PROGRESS, _OUTSIDE = int(Mark.DEFERRAL), int(Mark.PROGRESS), int(Mark.OUTSIDE)


def _counts(counters: Counters) -> tuple[int, ...]:
    return (
        counters.retries,
        counters.reclaims,
        sum(counters.rolled_back.values()),
        counters.committed + counters.load_backs + counters.load_backs_failed,
    )
