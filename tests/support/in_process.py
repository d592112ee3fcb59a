"""Starting the program in_process_server.py, which has a Triton server inside, and speaking to it."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from deepseek_triton_tools.host.tritonserver import find_tritonserver
from support.waiting import PATIENCE_S

PROGRAM = Path(__file__).with_name("in_process_server.py")


class InProcess:
    """The program, started and spoken to."""

    def __init__(self, process, log):
        self.process = process
        self._log = log

    def ask(self, **request):
        assert self.process.stdin
        print(json.dumps(request), file=self.process.stdin, flush=True)

    def answer(self):
        """The next response, of whichever request."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, self.log()
        return json.loads(line)

    def wait(self):
        """Its exit code, or minus the signal that ended it."""
        return self.process.wait(PATIENCE_S)

    def log(self):
        return self._log.read_text()


@contextmanager
def in_process(repository, log, before=()):
    """The program on the wheel's library, ready. It is killed at the end if it still runs.

    `before` is a command that runs the command after it.
    """
    found = find_tritonserver()
    if found.kind != "wheel":
        pytest.skip("the server is not the nvidia-pytriton wheel's, whose files are known")
    (library,) = found.binary.parents[3].glob("nvidia_pytriton.libs/libtritonserver*.so")
    backends = found.extra_args[0].partition("=")[2]
    command = [*before, sys.executable, str(PROGRAM), str(library), backends, str(repository)]
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, **found.environment},
            start_new_session=True,
        ) as process,
    ):
        server = InProcess(process, log)
        try:
            assert server.answer() == {"ready": True}
            yield server
        finally:
            process.kill()
