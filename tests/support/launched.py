"""The parts of a launch over several hosts: a generated repository for sixteen GPUs with the stand-in engine in it, and
the container's programs on PATH. trtllm-llmapi-launch is the stand-in of tests/standin/launcher."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deepseek_triton_tools.host.tritonserver import find_tritonserver
from support.hosts import Host, HostsError
from support.servers import build, with_standin

RANKS = 16

_COMMAND_LINE = [sys.executable, "-m", "deepseek_triton_tools.cli.main"]
_TESTS = Path(__file__).resolve().parents[1]
_INSTALL = _TESTS / "live/install_launchers.sh"
_LAUNCHER = _TESTS / "standin/launcher/trtllm-llmapi-launch"


@dataclass(frozen=True)
class Launched:
    """A repository, and the environment in which it is started."""

    repository: Path
    environment: Mapping[str, str]

    def launch(self, form: str, *options: str) -> list[str]:
        """Return the command line of `deepseek-triton launch FORM` for the repository."""
        return [*_COMMAND_LINE, "launch", form, str(self.repository), "--exit-timeout", "5", *options]

    def generate(self, host: Host) -> str:
        """Ask the server on `host` with our client on the same host, and return the answer."""
        asking = ["generate", "--url", "http://127.0.0.1:8000", "--max-tokens", "5", "--raw", "Why?"]
        done = host.run(*_COMMAND_LINE, *asking, env=self.environment)
        assert done.returncode == 0, done.stderr
        return done.stdout


def install_launchers() -> Path:
    """Install what is missing, and return the folder with mpi4py. Everything else is installed where it belongs.

    :raises HostsError: when something can't be installed.
    """
    cache = _TESTS.parent / ".cache/launchers"
    folder = cache / "mpi4py-py{}.{}".format(*sys.version_info)
    done = subprocess.run([_INSTALL, sys.executable, folder], text=True, capture_output=True)
    if done.returncode:
        raise HostsError(done.stderr.strip())
    return folder


TWO_NODES = ("deepseek-r1", "--gpu", "h100", "--gpus", str(RANKS))


def prepare(folder: Path, mpi4py: Path, *plan: str) -> Launched:
    """Build the repository, by default for two nodes of eight H100, and the programs. Its path is one that a shell
    would split.

    :param plan: the words after `build`.
    """
    repository = with_standin(build(folder / "a repository", *(plan or TWO_NODES)))
    programs = folder / "bin"
    programs.mkdir()
    installation = find_tritonserver()
    server = " ".join(f'"{word}"' for word in (installation.binary, *installation.extra_args))
    _program(programs / "tritonserver", f'exec {server} "$@"')
    _program(programs / _LAUNCHER.name, f'STANDIN_MPI4PY="{mpi4py}" exec "{_LAUNCHER}" "$@"')
    environment = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ}
    environment |= installation.environment
    environment["PATH"] = f"{programs}:{environment['PATH']}"
    return Launched(repository, environment)


def last_words(output: str) -> str:
    """Return the supervisor's last line."""
    return [line for line in output.splitlines() if line.startswith("deepseek-triton: ")][-1]


def _program(path: Path, body: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)
