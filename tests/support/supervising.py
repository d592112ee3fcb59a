"""supervise.py as a process, and the processes with its launch's tag, looked up independently of it."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from deepseek_triton_build import model_repository
from deepseek_triton_tools.server.server_process import free_port
from support.waiting import PATIENCE_S, wait_for

SUPERVISE = model_repository() / "tensorrt_llm/1/supervise.py"
PYTHON = (sys.executable, "-S")
"""Python without site-packages: it starts faster, and proves that nothing installed is needed."""


def runs(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def tagged(launch: str) -> dict[int, str]:
    """Return the processes with the launch's tag, and their command lines."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"DEEPSEEK_TRITON_LAUNCH={launch}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return {pid: line for pid, line in found.items() if runs(pid)}


def rank_of(*command: str) -> list[str]:
    return [*PYTHON, str(SUPERVISE), "rank", "--", *command]


TREE = """\
setsid sleep 1000 &
(setsid bash -c 'trap "" TERM INT HUP; while :; do sleep 1; done' &)
(env -u DEEPSEEK_TRITON_RANK sleep 1001 &)
sleep 1002 &
echo grown
wait
"""
"""A process with a session of its own, an orphan that ignores SIGTERM, one that has lost its rank, and a plain
child."""


_given: set[int] = set()


def free_ports(number: int) -> list[int]:
    """Return ports, never the same one twice: a server opens its ports late."""
    ports: list[int] = []
    for _ in range(number):
        ports.append(free_port("127.0.0.1", _given))
        _given.add(ports[-1])
    return ports


def port_options(ports: Sequence[int]) -> list[str]:
    names = ("--http-port", "--grpc-port", "--metrics-port")
    return [word for name, port in zip(names, ports, strict=True) for word in (name, str(port))]


class Supervised:
    """`supervise.py run`, as a context manager that kills every process of the launch in the end."""

    def __init__(
        self,
        folder: Path,
        options: Sequence[str],
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
        stdout: int | None = None,
        launch: str | None = None,
    ) -> None:
        self.launch = launch or secrets.token_hex(4)
        self.ready_file: Path | None = None
        self.folder = folder
        self.environment = {
            **os.environ,
            "XDG_RUNTIME_DIR": str(folder),
            "DEEPSEEK_TRITON_LAUNCH": self.launch,
            **(environment or {}),
        }
        self._out, self._err = folder / f"{self.launch}.out", folder / f"{self.launch}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [*before, *PYTHON, str(SUPERVISE), "run", *options, "--", *command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out if stdout is None else stdout,
                stderr=err,
            )

    def __enter__(self) -> "Supervised":
        return self

    def __exit__(self, *_: object) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None or tagged(self.launch):
            if time.monotonic() > deadline:
                raise TimeoutError(f"can't be killed: {tagged(self.launch)}")
            for pid in [*tagged(self.launch), *([self.process.pid] if self.process.returncode is None else [])]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def said(self) -> str:
        """The supervisor's own messages."""
        return self._err.read_text(errors="replace")

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)

    def others(self) -> dict[int, str]:
        """The processes with the tag, without the supervisor."""
        return {pid: line for pid, line in tagged(self.launch).items() if pid != self.process.pid}

    def pid_of(self, what: str) -> int:
        """Return the first process with the tag whose command line contains `what`, without guards."""
        found = [pid for pid, line in self.others().items() if what in line and name_of(pid) != "launch_guard"]
        assert found, f"no {what} among {self.others()}"
        return min(found)

    def guard_of(self, what: str) -> int:
        return next(pid for pid, line in self.others().items() if what in line and name_of(pid) == "launch_guard")

    def named(self, name: str) -> int:
        """Return the process with the tag that ps shows under that name."""
        return next(pid for pid in self.others() if name_of(pid) == name[:15])

    def ranks(self) -> list[int]:
        """The `supervise.py rank` processes, without their guards."""
        beginning = " ".join(rank_of())
        return [
            pid for pid, line in self.others().items() if line.startswith(beginning) and name_of(pid) != "launch_guard"
        ]

    def ask(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run another verb of supervise.py, with the same folder of records, outside the launch."""
        environment = {name: value for name, value in self.environment.items() if name != "DEEPSEEK_TRITON_LAUNCH"}
        command = [*PYTHON, str(SUPERVISE), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)


def name_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def is_ready(running: Supervised) -> bool:
    assert running.ready_file is not None
    return running.ready_file.exists()


def until_ready(*launches: Supervised) -> None:
    for running in launches:
        wait_for(partial(is_ready, running))


def listed(running: Supervised) -> dict[str, Any] | None:
    found: list[dict[str, Any]] = json.loads(running.ask("list", "--json").stdout)
    return next((launch for launch in found if launch["id"] == running.launch), None)
