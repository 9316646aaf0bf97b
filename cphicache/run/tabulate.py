"""Tables as Markdown: the transition table, which cell does what and every row in full; and what copies what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cphicache.lifecycle import ROWS, Row, State, Trigger
from cphicache.lifecycle.table import COLUMNS, cells
from cphicache.transfer.support import COMPONENTS_BY_KIND, KV_DTYPES, SUPPORT, Support

LEGEND = (
    "`→` an edge: what follows is the new state (`stays` when it is the same) with the guards in brackets, `!` negates. "
    "`·` a stale no-op, logged under this name. `✗` our bug: an error, nothing changes."
)


def table_text(rows: Sequence[Row] = ROWS) -> str:
    """The file ``fsm_diagrams/transition_table.md``."""
    return (
        "# The transition table of a backup\n\n"
        f"{len(rows)} rows decide {len(State)} states x {len(Trigger)} triggers. The source is `cphicache/lifecycle/table.py`.\n\n"
        "## Every cell\n\n"
        f"{matrix_text(rows)}\n"
        "## Every row\n\n"
        "Work *before* can fail, and then the state is as it was; work *after* cannot. "
        "An empty guard column means that the row does not ask.\n\n"
        f"{_rows_text(rows)}"
    )


def matrix_text(rows: Sequence[Row] = ROWS) -> str:
    """Triggers down, states across, one entry a row of the table."""
    by_cell = cells(rows)
    body = [[f"`{trigger}`", *(_cell(by_cell.get((state, trigger), ())) for state in State)] for trigger in Trigger]
    return f"{LEGEND}\n\n{_markdown(['trigger', *State], body)}"


def _cell(members: Iterable[Row]) -> str:
    entries: dict[str, list[str]] = {}
    for row in members:
        if row.dest is not None:
            kind = "→ stays" if row.dest == row.source else f"→ {row.dest}"
        else:
            kind = f"· {row.stale}" if row.stale else f"✗ {row.error}"
        entries.setdefault(kind, []).append(f" [{', '.join(row.when)}]" if row.when else "")
    return "<br>".join(kind + " or".join(guards) for kind, guards in entries.items())


def _rows_text(rows: Sequence[Row]) -> str:
    head = ["in", "trigger", *COLUMNS, "other guards", "before", "becomes", "after"]
    body = [
        [
            row.source,
            f"`{row.trigger}`",
            *(_column(row, name) for name in COLUMNS),
            ", ".join(name for name in row.when if name.removeprefix("!") not in COLUMNS),
            ", ".join(row.before),
            row.dest or (f"· {row.stale}" if row.stale else f"✗ {row.error}"),
            ", ".join(row.after),
        ]
        for row in sorted(rows, key=lambda row: list(Trigger).index(row.trigger))
    ]
    return _markdown(head, body)


def _column(row: Row, name: str) -> str:
    return "yes" if name in row.when else "no" if f"!{name}" in row.when else ""


def pools_text(rows: Sequence[Support] = SUPPORT) -> str:
    """What each kind of pool carries, every combination of kind, layout and backend, and every dtype: a part of docs/pools.md."""
    carried = {row.kind: row.carries for row in rows}
    kinds = [[f"`{kind}`", carried[kind]] for kind in COMPONENTS_BY_KIND]
    works = [
        [*(f"`{value}`" for value in row[:3]), row.d2h_layer, row.d2h_all, row.h2d_layer] for row in rows if row.reason is None
    ]
    refused = [[*(f"`{value}`" for value in row[:3]), row.reason or ""] for row in rows if row.reason is not None]
    dtypes = [
        [
            f"`{name}`",
            f"`torch.{dtype.torch_name}`",
            f"refused: {dtype.reason}" if dtype.reason else "packed rows" if dtype.packed else "yes",
        ]
        for name, dtype in KV_DTYPES.items()
    ]
    return (
        f"### What a layer is made of\n\n{_markdown(['kind', 'components, in copy order'], kinds)}\n"
        f"### Supported\n\n{_markdown(['kind', 'layout', 'backend', 'D2H of a layer', 'D2H of all', 'H2D of a layer'], works)}\n"
        f"### Refused at start\n\n{_markdown(['kind', 'layout', 'backend', 'reason'], refused)}\n"
        f"### KV dtypes\n\n{_markdown(['option', 'elements', 'supported'], dtypes)}"
    )


def _markdown(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(cells_)} |\n" for cells_ in lines)
