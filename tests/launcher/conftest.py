"""Fixtures: supervisors of small trees of real processes."""

import contextlib
from pathlib import Path

import pytest

from support.supervising import PYTHON, Supervised, free_ports, port_options, rank_of

DEFAULT_SIGNALS = ("env", "--default-signal=HUP,INT,QUIT")
"""As a shell with a terminal starts a program, whatever whoever runs the tests ignores."""
SERVER = Path(__file__).with_name("fake_server.py")


@pytest.fixture
def supervise(tmp_path):
    """Start a supervisor of a command, on ports of its own."""
    with contextlib.ExitStack() as running:

        def start(*command, options=(), ports=None, before=(), **more):
            options = [*port_options(ports or free_ports(3)), *options]
            return running.enter_context(
                Supervised(tmp_path, options, command, before=[*DEFAULT_SIGNALS, *before], **more)
            )

        yield start


@pytest.fixture
def serve(supervise, tmp_path):
    """Start the fake server under a supervisor, with a repository of one model."""

    def start(*server_options, options=(), wrap=rank_of, ready_file=None, **more):
        ports = free_ports(3)
        model = tmp_path / "repository/a_model"
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.pbtxt").touch()
        ready = ready_file or tmp_path / f"ready-{ports[0]}"
        usual = ["--repository", str(tmp_path / "repository"), "--ready-file", str(ready), "--health-every", "0.1"]
        server = [*PYTHON, str(SERVER), str(ports[0]), *server_options]
        running = supervise(*wrap(*server), ports=ports, options=[*usual, *options], **more)
        running.ready_file = ready
        return running

    return start
