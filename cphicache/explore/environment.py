"""What an engine cannot decide: how its copies fare, and what the other ranks contributed. Answered from a list, or asked for.

A call of the engine is run with the answers that are known so far. Where a fate is missing the first possible one is taken, and it is
noted what else was possible there; the explorer goes back to the state before the call and runs it again with each of these. Where a
reduction of a drain round is missing the call is unwound, and run again when all ranks have come. So every possible outcome of a call
is reached by the real code, and nothing has to be known about the call beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, TypeAlias


class Fate(StrEnum):
    """What became of copies (or of a local reservation) when the engine looked."""

    FLYING = "flying"
    """Still going on."""
    ENDED = "ended"
    """All of them have ended well (or, if one had failed before, the others have ended too)."""
    FAILED = "failed"
    """One failed, and all have ended."""
    FAILING = "failing"
    """One failed, others still go on."""
    TAKEN = "taken"
    """The local pool had the slots."""
    EXHAUSTED = "exhausted"
    """The local pool had fewer slots than the ledger says (R22)."""


FAULTS = frozenset({Fate.FAILED, Fate.FAILING, Fate.EXHAUSTED})
"""Fates that use up one of a world's faults."""


class Sample(NamedTuple):
    """A rank's sample, or the minimum over all ranks, counted from the first number that is not passed yet.

    ``done``: operations finished in sequence order. ``failed``: first failed one, None if there is none.
    """

    done: int
    failed: int | None


Answer: TypeAlias = Fate | Sample


class Undecided(Exception):
    """A call got to a point where the environment decides, no answer was given, and none may be chosen."""


class WrongAnswer(ValueError):
    """An answer was given that is none to the question. The text is one line."""


class Blocked(Exception):
    """A call waits for the other ranks' samples of a drain round."""

    def __init__(self, sample: Sample) -> None:
        super().__init__(f"waits for a reduction of {sample}")
        self.sample = sample


class Environment:
    """The answers for one call, in the order in which they are asked for.

    ``taken``: those that the call got. ``others``: what else was possible where none was given, by place in ``taken``.
    """

    def __init__(self) -> None:
        self._answers: Sequence[Answer] = ()
        self._chooses = False
        self.taken: list[Answer] = []
        self.others: dict[int, Sequence[Fate]] = {}

    def begin(self, answers: Sequence[Answer], *, chooses: bool) -> None:
        """The next call gets these answers. ``chooses``: the first option where a fate is missing."""
        self._answers = answers
        self._chooses = chooses
        self.taken = []
        self.others = {}

    def fate(self, about: str, options: Sequence[Fate]) -> Fate:
        """The next answer, one of ``options`` (the first of them is no fault); raises :class:`Undecided` when there is none and none
        may be chosen, :class:`WrongAnswer` when it is another."""
        at = len(self.taken)
        if at < len(self._answers):
            answer = self._answers[at]
            if answer not in options or not isinstance(answer, Fate):
                raise WrongAnswer(f"answer {str(answer)!r} to {about}: give one of {', '.join(options)}")
        elif self._chooses:
            answer, self.others[at] = options[0], options[1:]
        else:
            raise Undecided(f"{about}: {'/'.join(options)}?")
        self.taken.append(answer)
        return answer

    def reduction(self, own: Sample) -> Sample:
        """The minimum over all ranks; raises :class:`Blocked` when it is not known, :class:`WrongAnswer` when a fate is given."""
        if len(self.taken) >= len(self._answers):
            raise Blocked(own)
        answer = self._answers[len(self.taken)]
        if not isinstance(answer, Sample):
            raise WrongAnswer(f"answer {str(answer)!r} to a reduction: give what the ranks agreed on")
        self.taken.append(answer)
        return answer
