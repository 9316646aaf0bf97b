"""The transition table as a graph, in Mermaid's and in graphviz's words.

Drawn like a UML state machine: a step that keeps the state stands inside its box, other edges are arrows, and the steps of
``reserve`` are a chain of questions, so that their order can be followed with a finger.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from cphicache.lifecycle import ROWS, Row, State, Trigger

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


# -- Mermaid --------------------------------------------------------------------------------------------------------------------


def mermaid_text(rows: Sequence[Row] = ROWS) -> str:
    """A ``stateDiagram-v2``. A second line under a state's name is Mermaid's form of a step that stays inside the box."""
    drawn = graph(rows)
    lines = ["stateDiagram-v2", "    direction TB", f"    [*] --> {START}"]
    lines += [f"    {state} : {line}" for state, inside in drawn.inside.items() for line in inside]
    lines += [f"    state {question.name} <<choice>>" for question in drawn.questions]
    lines += [f"    {arrow.source} --> {arrow.dest} : {'<br/>'.join(arrow.lines)}" for arrow in drawn.arrows]
    return "\n".join(lines) + "\n"


# -- graphviz -------------------------------------------------------------------------------------------------------------------

_FONT = 'fontname="Helvetica,Arial,sans-serif"'
_TITLE = "Backup of a radix node:  trigger [guards] / work that can fail, then work that cannot"


def dot_text(rows: Sequence[Row] = ROWS) -> str:
    """The same as graphviz input, top to bottom. An arrow has the colour of the state that it leads to."""
    drawn = graph(rows)
    lines = [
        "digraph backup_lifecycle {",
        f'  graph [rankdir=TB, nodesep=0.5, ranksep=0.55, pad=0.2, labelloc=t, fontsize=16, label="{_TITLE}\\n ", {_FONT}];',
        f"  node [fontsize=12, {_FONT}];",
        f"  edge [fontsize=11, arrowsize=0.8, {_FONT}];",
        '  start [shape=circle, style=filled, fillcolor=black, width=0.15, fixedsize=true, label=""];',
        f"  start -> {START};",
    ]
    lines += [f"  {state} [shape=plain, label=<{_box(state, inside)}>];" for state, inside in drawn.inside.items()]
    lines += [f'  {asked.name} [shape=diamond, margin=0.02, label="{asked.guard}?"];' for asked in drawn.questions]
    for arrow in drawn.arrows:
        label = "".join(f"  {line}  \\l" for line in arrow.lines)
        ink = INKS.get(arrow.dest, "#000000")
        lines.append(f'  {arrow.source} -> {arrow.dest} [color="{ink}", fontcolor="{ink}", label="{label}"];')
    return "\n".join([*lines, "}"]) + "\n"


def _box(state: State, inside: Sequence[str]) -> str:
    head = f'<TR><TD BGCOLOR="{FILLS[state]}"><B>{state}</B></TD></TR>'
    body = "".join(f'{escape(line)}<BR ALIGN="LEFT"/>' for line in inside)
    rest = f'<TR><TD ALIGN="LEFT" BALIGN="LEFT"><FONT POINT-SIZE="11">{body}</FONT></TD></TR>' if inside else ""
    return f'<TABLE BORDER="0" CELLBORDER="1" CELLSPACING="0" CELLPADDING="5">{head}{rest}</TABLE>'
