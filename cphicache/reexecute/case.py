"""Plays a script on an engine of its own, and says what goes wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cphicache.agree.port import GroupBroken
from cphicache.check.conservation import InvariantBroken, require
from cphicache.engine import CacheMisuse, CpHiRadixCache
from cphicache.reexecute.local import ReplayTransfer
from cphicache.reexecute.player import NO_RESULT, EngineFactory, Player, Unplayable, config_of
from cphicache.reexecute.rows import Rows
from cphicache.reexecute.script import GroupReducer, Resolver, Scripted, statuses_of
from cphicache.run.census import take_census

_GIST = (
    "event",
    "call",
    "trigger",
    "before",
    "after",
    "stale",
    "reason",
    "refused",
    "locks",
    "bound",
    "agreed",
    "tokens",
    "dropped",
)
Gist = tuple[str, ...]
NO_EVENT: Gist = ("no further event",)
"""Stands for an event that does not come."""


def gist(event: Mapping[str, Any], fields: Sequence[str] = ()) -> Gist:
    """What of an event stays when operations before it are left out: what happened, not to which number. ``fields``: others to tell."""
    return tuple(f"{name}={event[name]}" for name in dict.fromkeys((*_GIST, *fields)) if event.get(name) is not None)


@dataclass(frozen=True, slots=True)
class Trouble:
    """What went wrong in a played script. ``kind``: :func:`error_kind`, the checker's first rule, or ``differs``."""

    kind: str
    text: str
    found: tuple[Gist, ...] = ()


def run_case(
    config: Mapping[str, Any],
    operations: Sequence[Scripted],
    expected: Sequence[Sequence[str]] | None = None,
    *,
    fields: Sequence[str] = (),
    engine: EngineFactory = CpHiRadixCache,
) -> str | None:
    """Play a script (:data:`~cphicache.reexecute.script.Scripted`) on a new engine; what went wrong in a line, None if nothing did.

    ``config``: fields of :class:`~cphicache.engine.CacheConfig`. ``expected``: the gist of the first events of the last operation,
    ``fields``: what it tells besides the usual. The engine must not raise, and after the last operation the outside checker must find
    nothing. Raises :class:`~cphicache.reexecute.player.Unplayable` for a script that breaks the order of calls.
    """
    trouble = play(
        config, operations, None if expected is None else tuple(tuple(each) for each in expected), fields=fields, engine=engine
    )
    return None if trouble is None else trouble.text


def play(
    config: Mapping[str, Any],
    operations: Sequence[Scripted],
    expected: tuple[Gist, ...] | None,
    *,
    fields: Sequence[str] = (),
    engine: EngineFactory = CpHiRadixCache,
) -> Trouble | None:
    """Like :func:`run_case`, with the kind of trouble."""
    transfer = ReplayTransfer()
    reducer = GroupReducer(transfer)
    player = Player(config_of(config), transfer, reducer, rank=0, engine=engine)
    resolver, rows = Resolver(transfer), Rows()
    for scripted in operations:
        player.log.take()
        reducer.numbered = player.cache.state.numbered
        call = resolver.call(scripted)
        transfer.begin(scripted["at"], statuses_of(scripted), [(name, text) for name, text in scripted.get("no_slots", ())])
        reducer.begin(scripted)
        result = NO_RESULT
        try:
            result = player.play(call)
        except (CacheMisuse, Unplayable) as error:
            raise Unplayable(f"call {scripted['at']} ({scripted['call']}): {error}") from error
        except GroupBroken as broken:
            if not scripted.get("lost"):
                return Trouble(error_kind(broken, scripted), f"{scripted['call']} raised {type(broken).__name__}: {broken}")
        except Exception as error:  # whatever a broken engine raises is the trouble that is looked for
            return Trouble(error_kind(error, scripted), f"{scripted['call']} raised {type(error).__name__}: {error}")
        rows.take(call, result)
        resolver.keep(scripted, result)
    if expected is not None:
        found = tuple(gist(event, fields) for event in player.log.take())
        trouble = compare_gists(expected, found)
        if trouble is not None:
            return trouble
    return examine(player, rows)


def error_kind(error: Exception, call: Mapping[str, Any]) -> str:
    """What sort of trouble an error is: its type, and the call that raised it."""
    return f"{type(error).__name__} in {call['call']}"


def compare_gists(expected: tuple[Gist, ...], found: tuple[Gist, ...]) -> Trouble | None:
    """The first event that differs, as far as they are expected."""
    for index, wanted in enumerate(expected):
        got = found[index] if index < len(found) else NO_EVENT
        if wanted != got:
            text = f"event {index} of the last operation: expected {', '.join(wanted)}; found {', '.join(got)}"
            return Trouble("differs", text, (*found[:index], got))
    return None


def examine(player: Player, rows: Rows) -> Trouble | None:
    """Ask the outside checker, unless the pages of some caller are not known now."""
    if not rows.is_known(player.cache):
        return None
    try:
        require(take_census(player.cache, rows.rows, None, 0))
    except InvariantBroken as broken:
        return Trouble(str(broken.findings[0].rule), f"the checker found {broken}")
    return None
