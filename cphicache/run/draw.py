"""The transition table as a graph, in Mermaid's and in graphviz's words.

Drawn like a UML state machine: a step that keeps the state stands inside its box, other edges are arrows, and the steps of
``reserve`` are a chain of questions, so that their order can be followed with a finger.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from cphicache.lifecycle import ROWS, Row, State, Trigger

if TYPE_CHECKING:
    from cphicache.replay import Way

ASKED_IN_ORDER = (Trigger.RESERVE, Trigger.RESERVE_RETRY)
"""Triggers whose guards are drawn as a chain of questions, in the order in which the table's rows name them."""
FOLLOWED_BY = {"reserve_again": Trigger.RESERVE_RETRY}
"""A callback that fires the next chain of questions."""
START = State.DEVICE_VALID_HOST_NONE

FILLS: Mapping[State, str] = {
    State.DEVICE_VALID_HOST_NONE: "#eeeeee",
    State.RESERVED: "#fff2cc",
    State.LAYERS_IN_FLIGHT: "#dae8fc",
    State.COMMITTED: "#d5e8d4",
    State.ROLLED_BACK: "#f8cecc",
}
INKS: Mapping[str, str] = {
    State.DEVICE_VALID_HOST_NONE: "#555555",
    State.RESERVED: "#8a6100",
    State.LAYERS_IN_FLIGHT: "#1f4e9e",
    State.COMMITTED: "#2b6a2b",
    State.ROLLED_BACK: "#a32020",
}


GREY = "#b4bac4"
"""What a marked way does not go through."""


@dataclass(frozen=True, slots=True)
class Question:
    """One guard of a chain; ``name`` is its node in the drawing."""

    name: str
    guard: str


@dataclass(frozen=True, slots=True)
class Arrow:
    """An arrow between two nodes (states or questions), with its label's lines."""

    source: str
    dest: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """What both languages draw: lines inside each state's box, questions, arrows."""

    inside: Mapping[State, tuple[str, ...]]
    questions: tuple[Question, ...]
    arrows: tuple[Arrow, ...]


def graph(rows: Sequence[Row] = ROWS) -> Graph:
    """Arrange the table's edges for drawing. Every edge is in exactly one place."""
    edges = [row for row in rows if row.is_edge]
    plain = [row for row in edges if not _is_asked(row)]
    inside = {state: tuple(_labels(row for row in plain if row.source == row.dest == state)) for state in State}
    chains = _Chains([row for row in edges if _is_asked(row)])
    arrows = list(chains.arrows)
    between = {(row.source, row.dest): None for row in plain if row.source != row.dest}
    for source, dest in between:
        lines = tuple(_labels(row for row in plain if (row.source, row.dest) == (source, dest)))
        arrows.append(Arrow(source, str(dest), lines))
    return Graph(inside, tuple(chains.questions), tuple(arrows))


def _is_asked(row: Row) -> bool:
    return row.source is START and row.trigger in ASKED_IN_ORDER


# -- labels -------------------------------------------------------------------------------------------------------------------


def _labels(rows: Iterable[Row]) -> Iterator[str]:
    """One line for all rows that differ in their trigger only, then one for those whose guards differ only."""
    by_guards: dict[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for row in rows:
        by_guards.setdefault((row.when, row.before, row.after), []).append(row.trigger)
    merged: dict[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], list[tuple[str, ...]]] = {}
    for (when, before, after), triggers in by_guards.items():
        merged.setdefault((tuple(triggers), before, after), []).append(when)
    for (triggers_, before, after), guards in merged.items():
        asked = " or ".join(f"[{', '.join(when)}]" for when in guards if when)
        yield f"{', '.join(triggers_)}{' ' if asked else ''}{asked}{_work(before, after)}"


def _work(before: Sequence[str], after: Sequence[str]) -> str:
    parts = [", ".join(before)] if before else []
    if after:
        parts.append(f"then {', '.join(after)}")
    return f" / {', '.join(parts)}" if parts else ""


# -- chains of questions --------------------------------------------------------------------------------------------------------


class _Chains:
    """Rows of ``ASKED_IN_ORDER``: a question a guard; its answers lead to a state, to the next question or to the next chain."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.questions: list[Question] = []
        self.arrows: list[Arrow] = []
        followed = {FOLLOWED_BY[name] for row in rows for name in row.after if name in FOLLOWED_BY}
        for trigger in ASKED_IN_ORDER:
            members = [row for row in rows if row.trigger is trigger]
            if members and trigger not in followed:
                self.arrows.append(Arrow(START, _question(trigger, 1), (str(trigger),)))
            self._ask(trigger, 1, members, list(dict.fromkeys(name.removeprefix("!") for row in members for name in row.when)))

    def _ask(self, trigger: Trigger, place: int, rows: Sequence[Row], guards: Sequence[str]) -> None:
        if not guards:
            return
        name = _question(trigger, place)
        self.questions.append(Question(name, guards[0]))
        for literal in (f"!{guards[0]}", guards[0]):
            answered = [row for row in rows if literal in row.when]
            if len(answered) == 1:
                row = answered[0]
                chains = [_question(FOLLOWED_BY[after], 1) for after in row.after if after in FOLLOWED_BY]
                dest = chains[0] if chains else str(row.dest)
                self.arrows.append(Arrow(name, dest, (f"[{literal}]{_work(row.before, row.after)}",)))
            elif answered:
                self.arrows.append(Arrow(name, _question(trigger, place + 1), (f"[{literal}]",)))
                self._ask(trigger, place + 1, answered, guards[1:])


def _question(trigger: Trigger, place: int) -> str:
    return f"{trigger}_{place}"


# -- a node's way -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Marks:
    """What of a graph a node went through: lines to add to its arrows and inside its states, arrows to highlight, states visited."""

    on_arrows: Mapping[tuple[str, str], tuple[str, ...]]
    inside: Mapping[State, tuple[str, ...]]
    taken: frozenset[tuple[str, str]]
    visited: frozenset[str]


NO_MARKS = Marks({}, {}, frozenset(), frozenset())


def marks_of(way: Way, drawn: Graph) -> Marks:
    """Where a node's way is in a drawing.

    A question's answer is not in the log: of a refused ``reserve`` only the arrow to the first question is marked, unless one way only
    leads to the refusal.
    """
    arrows: dict[tuple[str, str], list[str]] = {}
    inside: dict[State, list[str]] = {}
    taken: set[tuple[str, str]] = set()
    for step, ticks in way.steps.items():
        line = f"\N{BLACK RIGHT-POINTING TRIANGLE} {step.trigger} \N{MULTIPLICATION SIGN}{len(ticks)} at {_ticks(ticks)}"
        if step.before is START and step.trigger in ASKED_IN_ORDER:
            first = _question(step.trigger, 1)
            goal = _question(Trigger.RESERVE_RETRY, 1) if step.before is step.after and not step.refused else str(step.after)
            path = _only_path(drawn, first, goal)
            entry = (str(START), first) if step.trigger is Trigger.RESERVE else path[-1] if path else (first, goal)
            taken.update(path if step.trigger is Trigger.RESERVE_RETRY else [entry, *path])
            arrows.setdefault(entry, []).append(line)
        elif step.before is step.after:
            inside.setdefault(step.after, []).append(line)
        else:
            pair = (str(step.before), str(step.after))
            taken.add(pair)
            arrows.setdefault(pair, []).append(line)
    visited = {state for pair in taken for state in pair} | {str(state) for state in inside}
    return Marks(
        {pair: tuple(lines) for pair, lines in arrows.items()},
        {state: tuple(lines) for state, lines in inside.items()},
        frozenset(taken),
        frozenset(visited),
    )


TICKS_SHOWN = 4


def _ticks(all_ticks: Sequence[int]) -> str:
    ticks = list(dict.fromkeys(all_ticks))
    if len(ticks) <= TICKS_SHOWN:
        return f"tick {', '.join(str(tick) for tick in ticks)}"
    return f"tick {', '.join(str(tick) for tick in ticks[: TICKS_SHOWN - 1])} ... {ticks[-1]}"


def _only_path(drawn: Graph, start: str, goal: str) -> list[tuple[str, str]]:
    """The arrows from question ``start`` through questions of its chain to ``goal``, or nothing when several ways lead there."""
    asked = {question.name for question in drawn.questions}
    found: list[list[tuple[str, str]]] = []
    pending: list[tuple[str, list[tuple[str, str]]]] = [(start, [])]
    while pending:
        at, path = pending.pop()
        for arrow in drawn.arrows:
            if arrow.source != at:
                continue
            longer = [*path, (arrow.source, arrow.dest)]
            if arrow.dest == goal:
                found.append(longer)
            elif arrow.dest in asked and _same_chain(arrow.dest, start):
                pending.append((arrow.dest, longer))
    return found[0] if len(found) == 1 else []


def _same_chain(one: str, other: str) -> bool:
    return one.rpartition("_")[0] == other.rpartition("_")[0]


# -- Mermaid --------------------------------------------------------------------------------------------------------------------


def mermaid_text(rows: Sequence[Row] = ROWS, way: Way | None = None) -> str:
    """A ``stateDiagram-v2``. A second line under a state's name is Mermaid's form of a step that stays inside the box.

    With a node's ``way`` the states that it went through are coloured, and steps that it took are told with their ticks.
    """
    drawn = graph(rows)
    marks = NO_MARKS if way is None else marks_of(way, drawn)
    lines = ["stateDiagram-v2", "    direction TB", f"    [*] --> {START}"]
    lines += [f"    {state} : {line}" for state, inside in drawn.inside.items() for line in inside]
    lines += [f"    {state} : {line}" for state, told in marks.inside.items() for line in told]
    lines += [f"    state {question.name} <<choice>>" for question in drawn.questions]
    for arrow in drawn.arrows:
        told = marks.on_arrows.get((arrow.source, arrow.dest), ())
        lines.append(f"    {arrow.source} --> {arrow.dest} : {'<br/>'.join((*arrow.lines, *told))}")
    visited = [state.value for state in State if state in marks.visited]
    if visited:
        lines += ["    classDef visited fill:#dae8fc,stroke:#1f4e9e,stroke-width:4px", f"    class {','.join(visited)} visited"]
    return "\n".join(lines) + "\n"


# -- graphviz -------------------------------------------------------------------------------------------------------------------

_FONT = 'fontname="Helvetica,Arial,sans-serif"'
_TITLE = "Backup of a radix node:  trigger [guards] / work that can fail, then work that cannot"


def dot_text(rows: Sequence[Row] = ROWS, way: Way | None = None) -> str:
    """The same as graphviz input, top to bottom. An arrow has the colour of the state that it leads to.

    With a node's ``way`` what it did not go through is grey, and steps that it took are told with their ticks.
    """
    drawn = graph(rows)
    marks = NO_MARKS if way is None else marks_of(way, drawn)
    title = _TITLE if way is None else f"{_TITLE}\\nmarked: the way of node {way.node}, rank {way.rank}"
    lines = [
        "digraph backup_lifecycle {",
        f'  graph [rankdir=TB, nodesep=0.5, ranksep=0.55, pad=0.2, labelloc=t, fontsize=16, label="{title}\\n ", {_FONT}];',
        f"  node [fontsize=12, {_FONT}];",
        f"  edge [fontsize=11, arrowsize=0.8, {_FONT}];",
        '  start [shape=circle, style=filled, fillcolor=black, width=0.15, fixedsize=true, label=""];',
        f"  start -> {START};",
    ]
    for state, inside in drawn.inside.items():
        grey = way is not None and state not in marks.visited
        lines.append(f"  {state} [shape=plain, label=<{_box(state, inside, marks.inside.get(state, ()), grey=grey)}>];")
    lines += [f'  {asked.name} [shape=diamond, margin=0.02, label="{asked.guard}?"];' for asked in drawn.questions]
    for arrow in drawn.arrows:
        pair = (arrow.source, arrow.dest)
        label = "".join(f"  {line}  \\l" for line in (*arrow.lines, *marks.on_arrows.get(pair, ())))
        taken = pair in marks.taken
        ink = INKS.get(arrow.dest, "#000000") if way is None or taken else GREY
        wide = ", penwidth=3" if taken else ""
        lines.append(f'  {arrow.source} -> {arrow.dest} [color="{ink}", fontcolor="{ink}", label="{label}"{wide}];')
    return "\n".join([*lines, "}"]) + "\n"


def _box(state: State, inside: Sequence[str], told: Sequence[str], *, grey: bool) -> str:
    ink = f' COLOR="{GREY}"' if grey else ""
    fill = "#ffffff" if grey else FILLS[state]
    name = f'<FONT COLOR="{GREY}">{state}</FONT>' if grey else f"<B>{state}</B>"
    head = f'<TR><TD BGCOLOR="{fill}">{name}</TD></TR>'
    body = "".join(f'{escape(line)}<BR ALIGN="LEFT"/>' for line in inside)
    body += "".join(f'<B>{escape(line)}</B><BR ALIGN="LEFT"/>' for line in told)
    rest = f'<TR><TD ALIGN="LEFT" BALIGN="LEFT"><FONT POINT-SIZE="11"{ink}>{body}</FONT></TD></TR>' if body else ""
    return f'<TABLE BORDER="0" CELLBORDER="1" CELLSPACING="0" CELLPADDING="5"{ink}>{head}{rest}</TABLE>'
