"""Hundreds of requests left in every way there is: nothing stays, on the server or in the client.

`tests/bench/abandon.py` does the same with thousands, and watches memory.
"""

from __future__ import annotations

import pytest
from bench import _served
from bench.abandon import CORNERS, leave, num_interrupts, settled
from bench.client_load.leaving import Plan
from bench.client_load.stayed import Limits, problems, table

from support.servers import url

NUM_STREAMS = 300
CONCURRENCY = 32
PATIENCE_S = 120
"""More than it takes, so that what hangs fails."""


@pytest.fixture(scope="module")
def paced_server(tmp_path_factory):
    """Streams of 100 tokens a second each, so that what is left would run on."""
    log = tmp_path_factory.mktemp("abandon") / "tritonserver.log"
    with _served.serving("simulated", log, engine_options={"pace": "real"}) as server:
        yield server


@pytest.fixture(scope="module")
def left(paced_server):
    """Kind of client -> what it found; all at once."""
    plans = [
        Plan(
            url=url(paced_server, scheme),
            face=face,
            num_streams=NUM_STREAMS,
            concurrency=CONCURRENCY,
            seed=1,
            num_interrupts=num_interrupts(scheme, face, 12),
        )
        for scheme, face in CORNERS.values()
    ]
    return dict(zip(CORNERS, leave(plans, PATIENCE_S), strict=True))


@pytest.mark.parametrize("client_kind", CORNERS)
def test_requests_that_are_left_leave_nothing_in_the_client(left, client_kind):
    found = left[client_kind]
    assert problems(found, Limits(idle_connections=CONCURRENCY)) == [], table(found)


@pytest.mark.usefixtures("left")
def test_and_nothing_on_the_server(paced_server):
    assert settled(paced_server).left == 0
