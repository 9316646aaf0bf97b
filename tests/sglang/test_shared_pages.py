"""The real ``PageInterleavePoolAllocator`` of SGLang under cphicache, two ranks; SGLang 0.5.20's server cannot switch it on."""

import json

from test_scheduler import call


def test_pages_that_two_ranks_share():
    """R1, R4, R20: the allocator is recognised, its placement used: each rank copies what it owns, a load-back brings every byte to its
    rank, chains begin where SGLang's do and their owners go round; both ranks decide the same, and no page is lost."""
    done = call("shared_pages.py")
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    whole = 2 * 12 * 4
    assert found["findings"] == []
    assert found["first"] == found["longer"] == [[0, 0], [True, True], [0]]
    assert found["free"] == [whole, whole]
    assert found["back"] == [[16, 16], [True, True], [0]]
    assert found["twins"] == [[0, 0], [True, True], [0, 1]], (
        "the second of two equal prompts was expected to begin with the other rank"
    )
    assert found["round"] == [True, True]
    assert found["held"] == [whole, whole]
    assert found["same"]
    assert found["committed"] == [3, 3]
