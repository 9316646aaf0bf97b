"""Many random requests on the real scheduler, in every combination.  Usage: soak.py [--requests 300] [--only soak] [--docs FILE]"""

import argparse
import itertools
import sys
import time

from serving import reference, served
from workload import WHOLE, cached, differing

MODELS = ("llama", "mla")
PAGE_SIZES = (1, 16, 64)
LAYOUTS = ("layer_first", "page_first_direct")
DEVICE_TOKENS = 704
"""Less than what four long requests take, so that some are taken back, and a fraction of all prefixes."""
RATIOS = (4.0, 2.0, 1.0)
"""Host pool over device pool; 2 is SGLang's default."""
TOLERANCE = 0.01
"""Share of tokens by which ours may be fewer: hits below the load-back threshold, and SGLang's copies are synchronous on a CPU."""
TOLERANCE_FULL = 0.03
"""The same over all rows whose host pool is no larger than the device pool; docs/sglang.md says where it comes from."""
BEGIN, END = "<!-- soak-sglang: begin -->\n", "<!-- soak-sglang: end -->\n"


def options(page_size, overlap_schedule, layout, **more):
    return {
        "page_size": page_size, "disable_overlap_schedule": not overlap_schedule, "hicache_mem_layout": layout,
        "max_total_tokens": DEVICE_TOKENS, "chunked_prefill_size": 128 if page_size == 64 else 64, "schedule_conservativeness": 0.1, **more,
    }  # fmt: skip


def faults(result, expected):
    """What is wrong with a run; empty when it is as it should be."""
    watch, told = result["watch"], result["served"]
    found = [f"finding: {finding}" for finding in watch["findings"]]
    found += [f"tokens of {rid} differ from the run without cache" for rid in differing(told, expected)]
    found += [f"refused although host slots could be had: {what}" for what in watch["victims_left"]]
    for what, count in (
        ("host hits", sum(one["host"] for one in told.values())),
        ("idle checks", watch["idles"]),
        ("requests served whole", sum(one["reason"] == WHOLE for one in told.values())),
    ):
        if not count:
            found.append(f"no {what}")
    return found


def combinations():
    return list(itertools.product(MODELS, PAGE_SIZES, (True, False), LAYOUTS))


def soak(requests, say):
    """All combinations; returns the number of faults."""
    wrong = 0
    for model, page_size, overlap_schedule, layout in combinations():
        started = time.monotonic()
        result = served(model, "random", requests=requests, options=options(page_size, overlap_schedule, layout))
        found = faults(result, reference(model, requests))
        watch, told = result["watch"], result["served"]
        device, host = cached(told)
        say(
            f"{model} page size {page_size} overlap schedule {'on' if overlap_schedule else 'off'} {layout}: "
            f"{len(told)} requests, {sum(one['reason'] != WHOLE for one in told.values())} aborted, "
            f"{sum(one['retracted'] for one in told.values())} retracted, cached {device} device + {host} host tokens, "
            f"{watch['load_backs']} load-backs, {watch['deferred']} deferrals, {watch['declined']} declined, {watch['parked']} parked "
            f"({watch['parked_dropped']} dropped), refused {watch['refused'] or 0}, {watch['checks']} checks, "
            f"{watch['idles']} idle checks, {time.monotonic() - started:.0f} s: {'ok' if not found else 'WRONG'}"
        )
        for line in found:
            say(f"    {line}")
        wrong += len(found)
    return wrong


def compare(requests, say):
    """The same requests on SGLang's own cache; returns the table's rows, and how often ours had fewer tokens, beyond TOLERANCE.

    Where the host pool is no larger than the device pool both are always full, and which of two equally good victims goes first decides
    whose prefixes survive: there only the sum of all rows is judged, within TOLERANCE_FULL.
    """
    rows, fewer = [], 0
    for model, page_size, ratio in itertools.product(MODELS, PAGE_SIZES, RATIOS):
        given = options(page_size, overlap_schedule=False, layout="layer_first", hicache_ratio=ratio)
        ours, theirs = (
            served(model, "random", backend, requests=requests, options=given, aborts=False)["served"]
            for backend in ("cphicache", "built_in")
        )
        counts = [cached(mine, other) for mine, other in ((ours, theirs), (theirs, ours))]
        rows.append((model, page_size, ratio, *itertools.chain(*counts)))
        fewer += ratio > 1 and is_fewer(*counts)
        say("compare: " + " ".join(str(cell) for cell in rows[-1]))
    full = [row[3:] for row in rows if row[2] <= 1]
    return rows, fewer + is_fewer([sum(row[:2]) for row in full], [sum(row[2:]) for row in full], TOLERANCE_FULL)


def is_fewer(ours, theirs, tolerance=TOLERANCE):
    return sum(ours) < (1 - tolerance) * sum(theirs)


def table(requests, rows):
    head = ["model", "page size", "host / device pool", "cphicache: device", "host", "sum", "built in: device", "host", "sum"]
    lines = [
        f"Tokens that {requests} random requests (shared prefixes, device pool of {DEVICE_TOKENS} tokens) had from the cache:",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
    ]
    for model, page_size, ratio, device, host, their_device, their_host in rows:
        cells = (model, page_size, f"{ratio:g}", device, host, device + host, their_device, their_host, their_device + their_host)
        lines.append("| " + " | ".join(f"{cell:,}" if isinstance(cell, int) else cell for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--only", choices=("soak", "compare"), help="one half")
    parser.add_argument("--docs", help="file whose marked part gets the table of the comparison")
    asked = parser.parse_args()

    def say(line):
        print(line, flush=True)

    wrong = fewer = 0
    if asked.only != "compare":
        wrong = soak(asked.requests, say)
    if asked.only != "soak":
        rows, fewer = compare(asked.requests, say)
        say(table(asked.requests, rows))
        if asked.docs:
            with open(asked.docs, encoding="utf-8") as file:
                before, _, rest = file.read().partition(BEGIN)
            with open(asked.docs, "w", encoding="utf-8") as file:
                file.write(before + BEGIN + table(asked.requests, rows) + END + rest.partition(END)[2])
    say(f"{len(combinations())} combinations: {wrong} faults; comparisons in which cphicache had fewer cached tokens: {fewer}")
    sys.exit(bool(wrong or fewer))


if __name__ == "__main__":
    main()
