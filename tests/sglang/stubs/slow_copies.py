"""A plug-in for tests: with SLOW_COPIES_US set, each of cphicache's copies takes a random time, up to that many microseconds."""

import os


def slow(delay_us: int) -> None:
    from cphicache.sglang import factory
    from cphicache.transfer.streams.threads import ThreadStreams

    streams = factory.HostForwardStreams
    factory.HostForwardStreams = lambda: streams(ThreadStreams(max_delay_us=delay_us, seed=1))


def activate() -> None:
    if os.environ.get("SLOW_COPIES_US"):
        slow(int(os.environ["SLOW_COPIES_US"]))
