"""Supervisors of small trees of real processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from supervising import Supervised, free_ports, port_options

Supervise = Callable[..., Supervised]


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Supervise]:
    """Starts a supervisor of a command, on ports of its own."""
    with contextlib.ExitStack() as running:

        def start(
            *command: str, options: Sequence[str] = (), ports: Sequence[int] | None = None, **more: object
        ) -> Supervised:
            options = [*port_options(ports or free_ports(3)), *options]
            return running.enter_context(Supervised(tmp_path, options, command, **more))

        yield start
