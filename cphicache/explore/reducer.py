"""The reduction port of one explored rank: samples go out relative, the minimum comes in from the explorer."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cphicache.agree.port import NO_FAILURE
from cphicache.explore.environment import Environment, Sample


def minimum(samples: Iterable[Sample]) -> Sample:
    """What the ranks agree on. A count beyond the first failure is cut there: nobody applies it (R21), so it tells no states apart."""
    together = list(samples)
    failed = min((sample.failed for sample in together if sample.failed is not None), default=None)
    done = min(sample.done for sample in together)
    return Sample(done if failed is None else min(done, failed + 1), failed)


class RecordedReducer:
    """Implements :class:`~cphicache.agree.port.Reducer` for a rank whose calls are run one at a time.

    The reduction that a tick issued is the explorer's to keep (``sample``), and is handed in with the next call (``begin``). A
    reduction that is waited for in the call that issued it (a drain round) is asked of the environment, which unwinds the call
    until all ranks have come to the same point. ``first_open()``: the first number that is not passed; it stays what it is from an
    issue to its wait, so that numbers relative to it mean the same on both sides.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._pending: Sample | None = None
        self.first_open: Callable[[], int] = int
        self.sample: Sample | None = None
        self.was_used = False
        """Whether the call has issued a reduction or waited for one."""

    def begin(self, pending: Sample | None) -> None:
        """The next call finds this reduction outstanding."""
        self._pending = pending
        self.sample = None
        self.was_used = False

    def issue(self, count: int, first_failed: int) -> None:
        """See :class:`~cphicache.agree.port.Reducer`."""
        if self.sample is not None or self._pending is not None:
            raise AssertionError("a reduction is outstanding: expected it to be waited for before the next one is issued")
        self.was_used = True
        base = self.first_open()
        self.sample = Sample(count - base, None if first_failed == NO_FAILURE else first_failed - base)

    def wait(self) -> tuple[int, int]:
        """See :class:`~cphicache.agree.port.Reducer`."""
        self.was_used = True
        if self.sample is not None:
            agreed, self.sample = self._environment.reduction(self.sample), None
        elif self._pending is not None:
            agreed, self._pending = self._pending, None
        else:
            raise AssertionError("no reduction is outstanding: expected an issue before the wait")
        base = self.first_open()
        return base + agreed.done, NO_FAILURE if agreed.failed is None else base + agreed.failed

    @property
    def outstanding(self) -> Sample | None:
        """The sample that waits for the next call, or the reduction that this call did not wait for."""
        return self.sample if self.sample is not None else self._pending
