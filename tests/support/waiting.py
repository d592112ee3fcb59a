"""Waiting in a test for what another process or thread does."""

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 240.0
"""Only ever reached by a test that fails."""

_POLLS_S = (0.001, 0.05)
"""Seconds between two looks: the first, and the longest."""
_T = TypeVar("_T")


def clients_leave() -> None:
    """A SIGTERM in the moment in which a client goes can crash tritonserver (docs/tritonserver.md), and nothing tells
    when that is over."""
    time.sleep(0.5)


def wait_for(condition: Callable[[], _T | None], explain: Callable[[], object] = lambda: "it did not come about") -> _T:
    """What `condition` returned when it became true.

    :raises TimeoutError: after PATIENCE_S, the end of a hang and no bound on speed; `explain` says what happened.
    """
    deadline = time.monotonic() + PATIENCE_S
    pause, longest = _POLLS_S
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(explain())
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return result
