"""Guards and callbacks by the names that the table uses. Each is a line or two: it keeps the record's columns or calls the port."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cphicache.lifecycle.port import LifecyclePort
from cphicache.lifecycle.record import BackupRecord, Input

Port = LifecyclePort[Any]
Guard = Callable[[BackupRecord, Port, Input], bool]
Callback = Callable[[BackupRecord, Port, Input], None]


def _complete(record: BackupRecord, port: Port, given: Input) -> bool:
    return all(mask == (1 << port.layers_of(i)) - 1 for i, mask in enumerate(record.submitted))


GUARDS: dict[str, Guard] = {
    "bound": lambda record, port, given: record.bound,
    "numbered": lambda record, port, given: record.number is not None,
    "agreed": lambda record, port, given: record.agreed,
    "new_layers": lambda record, port, given: given.layers_mask & ~record.submitted[given.payload] != 0,
    "complete": _complete,
    "fit": lambda record, port, given: port.fit(record),
    "room": lambda record, port, given: port.room(record),
    "victims_suffice": lambda record, port, given: port.victims_suffice(record),
    "parent_committed": lambda record, port, given: port.parent_committed(record),
    "on_device": lambda record, port, given: port.on_device(record),
}


def _count_hit(record: BackupRecord, port: Port, given: Input) -> None:
    record.hits += 1


def _copy_layers(record: BackupRecord, port: Port, given: Input) -> None:
    at, reported, masks = given.payload, given.layers_mask, record.submitted
    submitted = masks[at]
    if submitted & reported:  # a layer is copied once, also when it is reported again together with new ones
        given = replace(given, layers=tuple(layer for layer in given.layers if not submitted >> layer & 1))
    port.copy_layers(record, given)
    mask = submitted | reported
    record.submitted = (mask,) if len(masks) == 1 else (*masks[:at], mask, *masks[at + 1 :])


def _take_number(record: BackupRecord, port: Port, given: Input) -> None:
    record.number = port.take_number(record)


def _mark_agreed(record: BackupRecord, port: Port, given: Input) -> None:
    record.agreed = True


def _confirm(record: BackupRecord, port: Port, given: Input) -> None:
    record.confirmed = record.submitted


def _remember_failure(record: BackupRecord, port: Port, given: Input) -> None:
    record.failed_here = True


def _attach(record: BackupRecord, port: Port, given: Input) -> None:
    port.attach(record, given)
    record.bound = True


def _release(record: BackupRecord, port: Port, given: Input) -> None:
    port.release(record)
    _forget_operation(record)


def _release_host(record: BackupRecord, port: Port, given: Input) -> None:
    port.release_host(record, given)
    _forget_operation(record)


def _forget_operation(record: BackupRecord) -> None:
    record.number = None
    record.agreed = False
    record.failed_here = False
    record.wasted_pages = 0
    record.submitted = record.confirmed = (0,) * len(record.submitted)


def _shrink_now(record: BackupRecord, port: Port, given: Input) -> None:
    port.shrink(record, given.pages, free_now=True)


def _shrink_at_end(record: BackupRecord, port: Port, given: Input) -> None:
    port.shrink(record, given.pages, free_now=False)
    record.wasted_pages += given.pages


CALLBACKS: dict[str, Callback] = {
    "count_hit": _count_hit,
    "copy_layers": _copy_layers,
    "take_number": _take_number,
    "mark_agreed": _mark_agreed,
    "confirm": _confirm,
    "remember_failure": _remember_failure,
    "attach": _attach,
    "release": _release,
    "release_host": _release_host,
    "shrink_now": _shrink_now,
    "shrink_at_end": _shrink_at_end,
    "refuse": lambda record, port, given: port.refuse(record, given),
    "reserve_slots": lambda record, port, given: port.reserve_slots(record, given),
    "evict_host": lambda record, port, given: port.evict_host(record, given),
    "commit": lambda record, port, given: port.commit(record),
    "defer_split": lambda record, port, given: port.defer_split(record, given),
    "fork": lambda record, port, given: port.fork(record, given),
    "drop_device": lambda record, port, given: port.drop_device(record),
    "begin_load": lambda record, port, given: port.begin_load(record, given),
    "end_load": lambda record, port, given: port.end_load(record),
    "fail_load": lambda record, port, given: port.fail_load(record),
    "undo_load": lambda record, port, given: port.undo_load(record),
    "reserve_again": lambda record, port, given: port.reserve_again(record),
    "commit_children": lambda record, port, given: port.commit_children(record),
    "lose_children": lambda record, port, given: port.lose_children(record),
    "drain_now": lambda record, port, given: port.drain_now(record),
    "wake": lambda record, port, given: port.wake(record),
}
