"""A way through a world as a text that people read and that can be played again.

    # world chain-1: parent and child, ...
    # violation: ...
    admit a
      node 1 generation 1 RESERVED layers 0/0 0/0
    tick | ended | flying
      ...

A line at the margin is an event; behind each ``|`` stand the answers of one rank's environment, in the order in which its engine asked:
fates of copies, and for a drain round ``agreed=COUNT,FAILED``. What is indented follows from it: the state of rank 0 after the event
(layers: submitted/confirmed by payload).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cphicache.engine import CpHiRadixCache
from cphicache.explore.audit import TakeCensus
from cphicache.explore.environment import Answer, Fate, Sample, Undecided, WrongAnswer
from cphicache.explore.product import Product, WorldState
from cphicache.explore.reducer import minimum
from cphicache.explore.script import World
from cphicache.explore.search import Happening, Violation

_AGREED = "agreed="


class ScenarioError(ValueError):
    """The text is no scenario, or does not fit its world."""


def write(world: World, violation: Violation, take_census: TakeCensus) -> str:
    """The text of a violation, with what each event led to."""
    lines = [f"# world {world.name}: {world.about}", f"# violation: {violation.what}"]
    lines.extend(play(world, (*violation.way, *violation.cycle), take_census))
    if violation.cycle:
        lines.append(f"# the last {len(violation.cycle)} events repeat for ever")
    return "\n".join(lines) + "\n"


def read(text: str) -> tuple[str, list[Happening]]:
    """Name of the world, and the events. Raises :class:`ScenarioError`."""
    name, happenings = "", []
    for line in text.splitlines():
        if line.startswith("# world "):
            name = line.removeprefix("# world ").partition(":")[0]
        elif line.strip() and not line.startswith((" ", "#")):
            event, *answers = (part.strip() for part in line.split("|"))
            happenings.append(Happening(event, tuple(map(answers_of, answers))))
    if not name:
        raise ScenarioError("no line '# world NAME: ...': give a file that explore has written")
    return name, happenings


def play(world: World, happenings: Sequence[Happening], take_census: TakeCensus) -> list[str]:
    """Lines of a scenario: the events, and below each what it led to. Ends at the first rule that is broken."""
    product = Product(world, take_census)
    state, lines = product.first, list[str]()
    for happening in happenings:
        answers = happening.answers or tuple(() for _ in product.ranks)
        if len(answers) != len(product.ranks):
            raise ScenarioError(f"{happening.event}: answers of {len(answers)} ranks, in a world of {len(product.ranks)}")
        lines.append(" | ".join((happening.event, *(" ".join(map(_word, each)) for each in answers))).rstrip(" |"))
        if happening.event not in product.ranks[0].states[state.ranks[0]].events:
            raise ScenarioError(f"event {happening.event!r} cannot come here: {product.ranks[0].states[state.ranks[0]].events}")
        broken, reached = _step(product, state, Happening(happening.event, answers))
        if reached is None:
            lines.append(f"  {broken}")
            break
        state = reached
        lines.extend(f"  {line}" for line in describe(product.ranks[0].cache, state.pending))
    return lines


def _step(product: Product, state: WorldState, happening: Happening) -> tuple[str, WorldState | None]:
    reached, samples = [], []
    for rank, number, answers in zip(product.ranks, state.ranks, happening.answers, strict=True):
        try:
            outcome = rank.step(number, happening.event, state.pending, answers)
        except Undecided as undecided:
            raise ScenarioError(f"{happening.event}: no answer to {undecided}") from undecided
        except WrongAnswer as wrong:
            raise ScenarioError(f"{happening.event}: {wrong}") from wrong
        if outcome.broken is not None:
            return f"rank {product.ranks.index(rank)}: {outcome.broken}", None
        if outcome.state is None:
            return f"rank {product.ranks.index(rank)} waits for a reduction, and there is none", None
        reached.append(outcome.state)
        samples.append(outcome.sample)
    if len({rank.states[number].logical for rank, number in zip(product.ranks, reached, strict=True)}) > 1:
        return "the logical halves of the ranks differ after equal events", None
    product.ranks[0].restore(reached[0])
    issued = [sample for sample in samples if sample is not None]
    return "", WorldState(tuple(reached), minimum(issued) if issued else None, None)


def describe(cache: CpHiRadixCache, pending: Sample | None) -> Iterator[str]:
    """The state of an engine in a few lines."""
    state = cache.state
    for node in state.tree.nodes():
        where = "host" if node.pages is None else f"pages {' '.join(map(str, node.pages))}"
        yield f"{node.backup.describe()} {where} lock {node.lock_ref} hold {node.host_ref}"
    for record in state.pending.values():
        if record.node is None:
            yield f"{record.describe()} pages {' '.join(map(str, record.pages))} of {record.request}"
    for load in state.loads.values():
        yield f"load-back {load.load_id} number {load.number} {load.state} of the {load.pages} pages up to node {load.last.id}"
    free = [min(state.ledger.free(rank, name) for name in cache.config.payload_names) for rank in range(cache.config.cp_size)]
    waiting = "".join(f", {rid} waits for node {waiter.node_id}" for rid, waiter in state.waiters.items())
    parked = "".join(f", {rid} parked" for rid in state.parked)
    reduction = "" if pending is None else f", reduction {_word(pending)}"
    yield f"free host slots {' '.join(map(str, free))}{waiting}{parked}{reduction}"


def answers_of(text: str) -> tuple[Answer, ...]:
    """The answers of one rank's environment as a scenario has them. Raises :class:`ScenarioError`."""
    return tuple(map(_answer, text.split()))


def _word(answer: Answer) -> str:
    if isinstance(answer, Sample):
        return f"{_AGREED}{answer.done},{'none' if answer.failed is None else answer.failed}"
    return str(answer)


def _answer(word: str) -> Answer:
    try:
        if not word.startswith(_AGREED):
            return Fate(word)
        count, failed = word.removeprefix(_AGREED).split(",")
        return Sample(int(count), None if failed == "none" else int(failed))
    except ValueError as error:
        known = ", ".join(Fate)
        raise ScenarioError(f"answer {word!r}: give one of {known}, or {_AGREED}COUNT,FAILED") from error
