"""What only the virtual clock does: times by arithmetic, order by seed."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings

from cphicache.transfer.port import Wait
from cphicache.transfer.streams.errors import StreamError
from cphicache.transfer.streams.virtual import TAIL_LIMIT, VirtualStreams
from tests.streams.programs import (
    PROGRAMS,
    Program,
    Record,
    Submit,
    WaitFor,
    drive,
    legal_orders,
    simulate,
)


def nothing() -> None:
    """Work without effect."""


def run_order(program: Program, seed: int) -> tuple[int, ...]:
    streams = VirtualStreams(seed=seed, jitter=1.0)
    order: list[int] = []
    drive(streams, program, order.append)
    streams.close()
    return tuple(order)


def test_start_and_end_by_worked_numbers() -> None:
    """R34: start = max(submission, previous end, events waited for), end = start + cost.

    compute: A 0..100, B (submitted at 30) 100..150. write: waits for A, C 100..120; at 200 idle: D 200..205.
    """
    streams = VirtualStreams()
    compute, write = streams.stream("compute"), streams.stream("write")
    compute.submit(nothing, cost_us=100.0)
    after_a = compute.record()
    streams.pause(30.0)
    compute.submit(nothing, cost_us=50.0)
    write.wait(after_a, Wait.STORE_TO_COPY)
    write.submit(nothing, cost_us=20.0)
    assert [streams.completion_us(event) for event in (after_a, compute.record(), write.record())] == [100.0, 150.0, 120.0]
    streams.pause(170.0)
    write.submit(nothing, cost_us=5.0)
    assert streams.completion_us(write.record()) == 205.0
    assert streams.completion_us(compute.record()) == 200.0  # empty since 150: complete when recorded


def test_effects_come_at_their_end_and_not_before() -> None:
    """R34: without jitter work is called when the clock reaches its end, seen in now_us, and not a microsecond earlier."""
    streams = VirtualStreams()
    stream, times = streams.stream("write"), list[float]()
    stream.submit(lambda: times.append(streams.now_us), cost_us=10.0)
    stream.submit(lambda: times.append(streams.now_us), cost_us=5.0)
    streams.pause(9.0)
    assert times == []
    streams.pause(1.0)
    assert times == [10.0]
    streams.pause(100.0)
    assert times == [10.0, 15.0]
    assert streams.now_us == 110.0


def test_two_streams_overlap() -> None:
    """R34: two streams of 3 x 10 us end at 30 us, not 60, and their effects interleave in global order of time."""
    streams = VirtualStreams()
    order: list[str] = []
    for index in range(3):
        streams.stream("compute").submit(functools.partial(order.append, f"store {index}"), cost_us=10.0)
        streams.stream("write").submit(functools.partial(order.append, f"copy {index}"), cost_us=10.0)
    streams.synchronize(streams.stream("write").record())
    assert streams.now_us == 30.0
    assert order == ["store 0", "copy 0", "store 1", "copy 1", "store 2", "copy 2"]


def test_layer_copies_hide_behind_the_forward() -> None:
    """R10: four layers of 100 us with a 40 us copy each, ordered by events: everything ends at 440 us, 40 us after the forward."""
    streams = VirtualStreams()
    compute, write = streams.stream("compute"), streams.stream("write")
    for _ in range(4):
        compute.submit(nothing, cost_us=100.0)
        write.wait(compute.record(), Wait.STORE_TO_COPY)
        write.submit(nothing, cost_us=40.0)
    assert streams.completion_us(compute.record()) == 400.0
    assert streams.completion_us(write.record()) == 440.0


def test_synchronize_advances_to_the_event_and_never_back() -> None:
    """R34: the clock goes to the completion of the event and stays where it is for a past one; query agrees with the clock."""
    streams = VirtualStreams()
    stream = streams.stream("load")
    stream.submit(nothing, cost_us=25.0)
    event = stream.record()
    assert not streams.query(event, Wait.LOAD_TO_READ)
    streams.pause(24.0)
    assert not streams.query(event, Wait.LOAD_TO_READ)
    streams.synchronize(event)
    assert streams.now_us == 25.0
    assert streams.query(event, Wait.LOAD_TO_READ)
    streams.pause(5.0)
    streams.synchronize(event)
    assert streams.now_us == 30.0


def test_free_work_runs_at_once_but_in_order() -> None:
    """R34: work of cost 0 on an idle stream runs inside submit; behind unfinished work it waits for its turn."""
    streams = VirtualStreams()
    stream, order = streams.stream("write"), list[str]()
    stream.submit(lambda: order.append("free"))
    assert order == ["free"]
    stream.submit(lambda: order.append("costly"), cost_us=3.0)
    stream.submit(lambda: order.append("free again"))
    assert order == ["free"]
    streams.pause(3.0)
    assert order == ["free", "costly", "free again"]


def test_equal_times_run_in_submission_order() -> None:
    """R34: effects of one instant on several streams run in the order of their submission."""
    streams = VirtualStreams()
    order: list[str] = []
    for name in ("load", "compute", "write"):
        streams.stream(name).submit(functools.partial(order.append, name), cost_us=7.0)
    streams.close()
    assert order == ["load", "compute", "write"]


@settings(derandomize=True, max_examples=150, deadline=None)
@given(program=PROGRAMS)
def test_equals_a_brute_force_simulation(program: Program) -> None:
    """R34: order and times of all effects and events equal a simulation that walks from microsecond to microsecond."""
    streams = VirtualStreams()
    effects: list[tuple[float, int]] = []
    events = drive(streams, program, lambda index: effects.append((streams.now_us, index)))
    streams.close()
    assert (effects, [streams.completion_us(event) for event in events]) == simulate(program)


RACE: Program = [
    Submit("compute", 10),
    Record("compute"),
    Submit("compute", 10),
    WaitFor("write", 0),
    Submit("write", 10),
    Submit("load", 10),
    Submit("load", 10),
]


def test_a_seed_gives_one_order_and_seeds_give_all_legal_orders() -> None:
    """R34: a run repeats under its seed; over the seeds all legal orders occur and no other (naive: try every permutation)."""
    seen = {run_order(RACE, seed) for seed in range(1500)}
    assert seen == legal_orders(RACE)
    assert len(seen) == 20
    for seed in range(20):
        assert run_order(RACE, seed) == run_order(RACE, seed)


def test_jittered_durations_are_bounded_and_differ() -> None:
    """R34: cost <= duration <= cost x (1 + jitter x bound), rarely the same twice, sometimes more than 10 x cost."""
    durations = []
    for seed in range(500):
        streams = VirtualStreams(seed=seed, jitter=0.5)
        stream = streams.stream("write")
        stream.submit(nothing, cost_us=8.0)
        durations.append(streams.completion_us(stream.record()))
    assert min(durations) >= 8.0
    assert max(durations) <= 8.0 * (1.0 + 0.5 * TAIL_LIMIT)
    assert max(durations) > 80.0
    assert len(set(durations)) > 490


def test_jittered_effects_come_at_start_or_end_only() -> None:
    """R34: an effect happens at once, at the start or at the end of its item; both occur over the seeds."""
    moments = set()
    for seed in range(50):
        streams = VirtualStreams(seed=seed, jitter=1.0)
        times: list[float] = []
        stream = streams.stream("write")
        streams.pause(5.0)
        stream.submit(lambda times=times, streams=streams: times.append(streams.now_us), cost_us=8.0)  # type: ignore[misc]
        end_us = streams.completion_us(stream.record())
        streams.close()
        assert times in ([5.0], [end_us])
        moments.add(times[0] == end_us)
    assert moments == {True, False}


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_impossible_times_are_refused(value: float) -> None:
    """R35: negative, infinite and undefined durations are caller misuse, named with their value; nothing is queued."""
    streams = VirtualStreams()
    ran: list[bool] = []
    with pytest.raises(ValueError, match=f"cost_us is {value}"):
        streams.stream("write").submit(lambda: ran.append(True), cost_us=value)
    with pytest.raises(ValueError, match=f"duration_us is {value}"):
        streams.pause(value)
    with pytest.raises(ValueError, match=f"jitter is {value}"):
        VirtualStreams(jitter=value)
    streams.close()
    assert ran == []
    assert streams.now_us == 0.0


def test_two_open_clocks_do_not_compare() -> None:
    """R34: an event of other virtual streams that are still open is refused instead of being compared with a foreign clock."""
    one, other = VirtualStreams(), VirtualStreams()
    event = other.stream("write").record()
    with pytest.raises(ValueError, match="their clock is not this one"):
        one.stream("write").wait(event, Wait.COPY_TO_REUSE)
    other.close()
    one.stream("write").wait(event, Wait.COPY_TO_REUSE)
    assert one.completion_us(event) == 0.0


def test_partial_work_is_named_by_its_function() -> None:
    """R34: the report of work that raised names the function inside a partial, and a callable object by its repr."""

    class Copy:
        def __call__(self) -> None:
            raise OSError("gone")

        def __repr__(self) -> str:
            return "Copy(layer=3)"

    streams = VirtualStreams()
    streams.stream("write").submit(functools.partial(int, "x"))  # type: ignore[arg-type]
    with pytest.raises(StreamError, match=r"work int raised ValueError"):
        streams.close()
    streams = VirtualStreams()
    streams.stream("write").submit(Copy())
    with pytest.raises(StreamError, match=r"work Copy\(layer=3\) raised OSError: gone"):
        streams.close()
