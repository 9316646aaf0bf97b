"""All ranks together: their automata step side by side and meet in the reductions.

A logical event reaches all ranks as one step. Their calls could be interleaved in any other way and nothing would be different: until
the next reduction no rank sees what another does.

Nor does it matter *which* rank an operation's copies stand how, or on how many (``lateness.Together``). What a rank tells of its
copies is its sample, and the minimum over the samples follows, for each number, from whether all ranks are done with it and whether any
has failed it; permuting the ranks of one operation changes neither, whoever owns what. (The ranks' own local halves are audited before
that.)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import product
from typing import NamedTuple, TypeAlias

from cphicache.explore.audit import TakeCensus
from cphicache.explore.environment import Answer, Sample
from cphicache.explore.lateness import Standing, Together, latest_together, together
from cphicache.explore.rank import FAULT, UNTOUCHED, Forms, Outcome, Rank
from cphicache.explore.reducer import minimum
from cphicache.explore.script import World

Answers: TypeAlias = tuple[tuple[Answer, ...], ...]
"""Answers of the environment by rank."""


class WorldState(NamedTuple):
    """States of the ranks, the reduction that is outstanding, and how many faults are left (None: any number)."""

    ranks: tuple[int, ...]
    pending: Sample | None
    faults_left: int | None


class Move(NamedTuple):
    """An event with the answers of the environment, ``faults`` of them. ``state``: reached; None if something was broken on the way."""

    event: str
    answers: Answers
    state: WorldState | None
    marks: int
    faults: int
    broken: str | None


_NO_REDUCTION: tuple[bool, Sample | None] = False, None
_SAYS_NOTHING: tuple[bool, Sample | None] = True, Sample(0, None)
"""A reduction in which nothing new is done or failed on all ranks: waiting for it changes nothing. Being outstanding, and what it says."""


class Product:
    """The explored world."""

    def __init__(self, world: World, take_census: TakeCensus, *, exact: bool = False) -> None:
        self.world = world
        self.forms = Forms()
        self._exact = exact
        self._standings: dict[tuple[int, ...], tuple[Together, ...]] = {}
        self._same: dict[tuple[Together, ...], tuple[Together, ...]] = {}
        self.ranks = [Rank(world, rank, self.forms, take_census, exact=exact) for rank in range(world.config.cp_size)]

    @property
    def first(self) -> WorldState:
        """Before anything has happened."""
        return WorldState(tuple(rank.first for rank in self.ranks), None, self.world.max_faults)

    @property
    def steps(self) -> int:
        """Calls of the engines so far."""
        return sum(rank.steps for rank in self.ranks)

    def key(self, state: WorldState) -> Hashable:
        """Equal for states that are one."""
        first = self.ranks[0].states[state.ranks[0]]
        reduction = (first.outstanding, state.pending)
        if self._exact:
            return first.finest, self._by_rank(state.ranks), reduction, state.faults_left
        if reduction == _SAYS_NOTHING:
            reduction = _NO_REDUCTION
        return first.logical, self._together(state.ranks), reduction, state.faults_left

    def is_at_rest(self, state: WorldState) -> bool:
        """Whether nothing is left to do."""
        return state.pending is None and self.ranks[0].states[state.ranks[0]].at_rest

    def moves(self, state: WorldState) -> Iterator[Move]:
        """Everything that may happen next."""
        for event in self.ranks[0].states[state.ranks[0]].events:
            given: Answers = tuple(() for _ in self.ranks)
            yield from self._moves(state, event, given)

    def _moves(self, state: WorldState, event: str, given: Answers) -> Iterator[Move]:
        outcomes = [
            rank.outcomes(number, event, state.pending, state.faults_left, answers)
            for rank, number, answers in zip(self.ranks, state.ranks, given, strict=True)
        ]
        rounds: set[tuple[Answers, Sample]] = set()
        moves: dict[Hashable, list[Move]] = {}
        for chosen in product(*outcomes):
            faults = sum(outcome.faults for outcome in chosen)
            if state.faults_left is not None and faults > state.faults_left:
                continue
            broken = next((f"rank {rank}: {each.broken}" for rank, each in enumerate(chosen) if each.broken is not None), None)
            if broken is None and all(outcome.state is None for outcome in chosen):
                agreed = minimum([outcome.sample for outcome in chosen if outcome.sample is not None])
                rounds.add((tuple((*outcome.answers, agreed) for outcome in chosen), agreed))
                continue
            move = self._move(state, event, chosen, faults, broken)
            if move.state is None:
                yield move
            else:
                reached = self.ranks[0].states[move.state.ranks[0]]
                alike = (reached.logical, reached.outstanding, move.state.pending, move.marks & ~FAULT)
                moves.setdefault(alike, []).append(move)
        for group in moves.values():
            yield from group if self._exact else self._latest(group)
        for answers, _ in sorted(rounds, key=repr):
            yield from self._moves(state, event, answers)

    def _latest(self, moves: list[Move]) -> list[Move]:
        """Without those that differ from others only by copies that have ended unseen."""
        if len(moves) == 1:
            return moves
        reached = [(self._together(move.state.ranks), move.faults) for move in moves if move.state is not None]
        return [moves[index] for index in latest_together(reached, wait_may_fail=self.world.wait_may_fail)]

    def _by_rank(self, ranks: Sequence[int]) -> tuple[tuple[Standing, ...], ...]:
        """How each operation stands, on whichever rank it stands so."""
        copies = [rank.states[number].copies for rank, number in zip(self.ranks, ranks, strict=True)]
        return tuple(tuple(sorted(each)) for each in zip(*copies, strict=True))

    def _together(self, ranks: tuple[int, ...]) -> tuple[Together, ...]:
        """How each operation stands on all ranks together."""
        found = self._standings.get(ranks)
        if found is None:
            copies = [rank.states[number].copies for rank, number in zip(self.ranks, ranks, strict=True)]
            found = tuple(together(each) for each in zip(*copies, strict=True))
            found = self._standings[ranks] = self._same.setdefault(found, found)
        return found

    def _move(self, state: WorldState, event: str, chosen: Sequence[Outcome], faults: int, broken: str | None) -> Move:
        answers = tuple(outcome.answers for outcome in chosen)
        reached = [outcome.state for outcome in chosen if outcome.state is not None]
        if broken is None:
            broken = self._disagreement(chosen, reached)
        if broken is not None:
            return Move(event, answers, None, 0, faults, broken)
        samples = [outcome.sample for outcome in chosen if outcome.sample is not None]
        pending = None if not samples else state.pending if samples[0] is UNTOUCHED else minimum(samples)
        left = None if state.faults_left is None else state.faults_left - faults
        marks = chosen[0].marks | (FAULT if faults else 0)
        return Move(event, answers, WorldState(tuple(reached), pending, left), marks, faults, None)

    def _disagreement(self, chosen: Sequence[Outcome], reached: Sequence[int]) -> str | None:
        if len(reached) != len(chosen):
            waiting = [rank for rank, outcome in enumerate(chosen) if outcome.state is None]
            return f"ranks {waiting} wait for a reduction that the others do not join"
        if len({(outcome.sample is None, outcome.sample is UNTOUCHED) for outcome in chosen}) > 1:
            return f"some ranks have issued a reduction, others not: {[outcome.sample for outcome in chosen]}"
        at = [rank.states[number] for rank, number in zip(self.ranks, reached, strict=True)]
        if len({(rank_state.logical, rank_state.outstanding) for rank_state in at}) > 1:
            return "the logical halves of the ranks differ after equal events"
        return None
