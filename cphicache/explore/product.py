"""All ranks together: their automata step side by side and meet in the reductions.

A logical event reaches all ranks as one step. Their calls could be interleaved in any other way and nothing would be different: until
the next reduction no rank sees what another does.

States that differ only in *which* rank an operation's copies stand how are one state. What a rank tells of its copies is its sample,
and the minimum over the samples follows, for each number, from whether all ranks are done with it and whether any has failed it;
permuting the ranks of one operation changes neither, whoever owns what. (The ranks' own local halves are audited before that.)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import product
from typing import NamedTuple, TypeAlias

from cphicache.explore.audit import TakeCensus
from cphicache.explore.environment import Answer, Sample
from cphicache.explore.lateness import Standing, latest
from cphicache.explore.rank import UNTOUCHED, Forms, Mark, Outcome, Rank
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
    """An event with the answers of the environment. ``state``: reached; None if something was broken on the way."""

    event: str
    answers: Answers
    state: WorldState | None
    marks: int
    broken: str | None


class Product:
    """The explored world."""

    def __init__(self, world: World, take_census: TakeCensus, *, exact: bool = False) -> None:
        self.world = world
        self.forms = Forms()
        self._exact = exact
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
        if len(state.ranks) == 1:
            return state
        at = [rank.states[number] for rank, number in zip(self.ranks, state.ranks, strict=True)]
        copies = tuple(_together(each) for each in zip(*(rank_state.copies for rank_state in at), strict=True))
        return at[0].logical, copies, state.pending, state.faults_left

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
        for together in product(*outcomes):
            faults = sum(outcome.faults for outcome in together)
            if state.faults_left is not None and faults > state.faults_left:
                continue
            broken = next((f"rank {rank}: {each.broken}" for rank, each in enumerate(together) if each.broken is not None), None)
            if broken is None and all(outcome.state is None for outcome in together):
                agreed = minimum([outcome.sample for outcome in together if outcome.sample is not None])
                rounds.add((tuple((*outcome.answers, agreed) for outcome in together), agreed))
                continue
            move = self._move(state, event, together, faults, broken)
            if move.state is None:
                yield move
            else:
                logical = self.ranks[0].states[move.state.ranks[0]].logical
                moves.setdefault((logical, move.state.pending, move.marks & ~Mark.FAULT), []).append(move)
        for alike in moves.values():
            yield from alike if self._exact else self._latest(alike)
        for answers, _ in sorted(rounds, key=repr):
            yield from self._moves(state, event, answers)

    def _latest(self, moves: list[Move]) -> list[Move]:
        """Without those that differ from others only by copies that have ended unseen."""
        if len(moves) == 1:
            return moves
        reached = [move.state.ranks for move in moves if move.state is not None]
        standings = [[rank.states[at].copies for rank, at in zip(self.ranks, numbers, strict=True)] for numbers in reached]
        return [moves[index] for index in latest(standings, wait_may_fail=self.world.wait_may_fail)]

    def _move(self, state: WorldState, event: str, together: Sequence[Outcome], faults: int, broken: str | None) -> Move:
        answers = tuple(outcome.answers for outcome in together)
        reached = [outcome.state for outcome in together if outcome.state is not None]
        if broken is None:
            broken = self._disagreement(together, reached)
        if broken is not None:
            return Move(event, answers, None, 0, broken)
        samples = [outcome.sample for outcome in together if outcome.sample is not None]
        pending = None if not samples else state.pending if samples[0] is UNTOUCHED else minimum(samples)
        left = None if state.faults_left is None else state.faults_left - faults
        marks = together[0].marks | (Mark.FAULT if faults else 0)
        return Move(event, answers, WorldState(tuple(reached), pending, left), marks, None)

    def _disagreement(self, together: Sequence[Outcome], reached: Sequence[int]) -> str | None:
        if len(reached) != len(together):
            waiting = [rank for rank, outcome in enumerate(together) if outcome.state is None]
            return f"ranks {waiting} wait for a reduction that the others do not join"
        if len({(outcome.sample is None, outcome.sample is UNTOUCHED) for outcome in together}) > 1:
            return f"some ranks have issued a reduction, others not: {[outcome.sample for outcome in together]}"
        if len({rank.states[number].logical for rank, number in zip(self.ranks, reached, strict=True)}) > 1:
            return "the logical halves of the ranks differ after equal events"
        return None


def _together(standings: tuple[Standing, ...]) -> Hashable:
    """How an operation stands on all ranks, whichever is which. When all are done, it only counts whether any has failed."""
    if all(standing.done_here for standing in standings):
        return any(standing.failed_here for standing in standings)
    return tuple(sorted(standings))
