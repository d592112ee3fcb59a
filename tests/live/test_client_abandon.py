"""Requests left in every way there is: nothing stays, on the server or in the client.

`tests/bench/abandon.py` does the same with thousands, and watches memory.
"""

import pytest
from bench import _served
from bench.abandon import CORNERS, leave, num_interrupts, settled
from bench.abandon_load.leaving import Plan
from bench.abandon_load.stayed import Limits, problems, table

from support.servers import url

CONCURRENCY = 32
PATIENCE_S = 600
"""More than it takes, so that what hangs fails."""


@pytest.mark.slow
@pytest.mark.parametrize("num_streams", [40, pytest.param(300, marks=pytest.mark.nightly)])
def test_requests_that_are_left_leave_nothing(num_streams, tmp_path, monkeypatch):
    """Streams of 100 tokens a second each, so that what is left would run on; all kinds of client at once."""
    log = tmp_path / "tritonserver.log"
    with _served.serving("simulated", log, engine_options={"pace": "real"}) as server:
        plans = [
            Plan(
                url=url(server, scheme),
                face=face,
                num_streams=num_streams,
                concurrency=CONCURRENCY,
                seed=1,
                num_interrupts=num_interrupts(scheme, face, 12),
            )
            for scheme, face in CORNERS.values()
        ]
        monkeypatch.setenv("MALLOC_ARENA_MAX", "1")  # with many heaps each grows to what it once needed
        stayed = dict(zip(CORNERS, leave(plans, PATIENCE_S), strict=True))
        limits = Limits(idle_connections=CONCURRENCY)
        wrong = {kind: (problems(found, limits), table(found)) for kind, found in stayed.items()}
        assert {kind: both for kind, both in wrong.items() if both[0]} == {}
        assert settled(server).left == 0
