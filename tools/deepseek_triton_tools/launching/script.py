"""start.sh: its variables, the command that it comes to, and texts that run it."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from deepseek_triton_build.render.yaml_text import comment
from deepseek_triton_tools import text_templates
from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.repository.launch_facts import LaunchFacts
from deepseek_triton_tools.tool_errors import ToolError

MARK = "DEEPSEEK_TRITON_LAUNCH"
"""By it the processes of a launch are known; start.sh makes one for each."""
_NO_MARK = "00000000"
_DRY_RUN_S = 30
"""start.sh has nothing to wait for."""


def server_environment(options: LaunchOptions) -> dict[str, str]:
    """start.sh's variables. Those of the ports and the exit timeout always: others have to agree with them."""
    said = {
        "HTTP_PORT": options.http_port,
        "GRPC_PORT": options.grpc_port,
        "METRICS_PORT": options.metrics_port,
        "EXIT_TIMEOUT": options.exit_timeout,
        "READY_WITHIN": options.ready_within,
        "MAX_RESTARTS": options.max_restarts,
        "HTTP_ADDRESS": options.address,
        "GRPC_ADDRESS": options.address,
        "INTERFACE": options.interface,
        "READY_FILE": os.path.abspath(options.ready_file) if options.ready_file else None,
    }
    return {name: str(value) for name, value in said.items() if value is not None} | dict(options.environment)


def run_script(facts: LaunchFacts, options: LaunchOptions, form: str, environment: Mapping[str, str]) -> str:
    """A script that runs start.sh with `environment`, and what that comes to.

    :raises ToolError: when start.sh refuses.
    """
    lines = [*head(facts, form), "set -euo pipefail", ""]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    lines += ["", *comment(f"What start.sh then runs; {MARK} is another one at each start:")]
    lines += [f"#   {line}" for line in resolved(facts, environment, options.server_args).splitlines()]
    lines += ["", f"exec {words([str(facts.start_script), *options.server_args])}"]
    return "\n".join(lines) + "\n"


def head(facts: LaunchFacts, form: str) -> list[str]:
    return ["#!/usr/bin/env bash", *comment(f"Made by deepseek-triton {__version__}: launch {facts.source} --{form}")]


def resolved(facts: LaunchFacts, environment: Mapping[str, str], server_args: Sequence[str] = ()) -> str:
    """The command that start.sh would become, in its own words, which a shell takes.

    :raises ToolError: when it refuses.
    """
    return dry_run(facts.start_script, environment, server_args)


def dry_run(start_script: Path, environment: Mapping[str, str], server_args: Sequence[str] = ()) -> str:
    """What the script says to DRY_RUN=1. Programs are this machine's: a PATH in `environment` is the server's.

    :raises ToolError: when it refuses.
    """
    path = os.environ.get("PATH", os.defpath)
    try:
        answer = subprocess.run(
            ["bash", str(start_script), *server_args],
            env={**os.environ, MARK: _NO_MARK, **environment, "PATH": path, "DRY_RUN": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_DRY_RUN_S,
        )
    except subprocess.TimeoutExpired as error:
        raise ToolError(f"{start_script}: no answer to DRY_RUN=1 within {_DRY_RUN_S} s") from error
    except OSError as error:
        raise ToolError(f"bash can't be run, which {start_script} is for: {error.strerror}", exit_code=126) from error
    if answer.returncode:
        said = "; ".join(answer.stderr.splitlines()) or f"{start_script}: ends with {answer.returncode}"
        raise ToolError(said, exit_code=answer.returncode)
    return answer.stdout


def words(command: Iterable[str]) -> str:
    return " ".join(map(shlex.quote, command))


def filled(name: str, values: Mapping[str, str]) -> str:
    """
    :param name: of a file in templates/.
    """
    return text_templates.wrapped(text_templates.filled(__package__, name, values))
