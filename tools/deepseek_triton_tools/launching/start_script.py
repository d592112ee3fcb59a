"""start.sh: its variables, the command that it runs, and scripts that run it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from deepseek_triton_build.catalog import is_engine_variable, load_release
from deepseek_triton_build.text import comment_lines
from deepseek_triton_tools import text_templates
from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.repository.launch_facts import LaunchFacts
from deepseek_triton_tools.tool_errors import ToolError

LAUNCH_TAG = "DEEPSEEK_TRITON_LAUNCH"
"""Variable that all processes of a launch have. start.sh makes a new value at each start."""
_NO_TAG = "00000000"
_KEY = re.compile(r"(?<=:closed=)[0-9a-f]{32}")
"""The key of Triton's closed endpoints in the command, which is a new one at each start too."""
_DRY_RUN_S = 30
"""Seconds; start.sh has nothing to wait for."""


def server_environment(options: LaunchOptions) -> dict[str, str]:
    """Return start.sh's variables. Ports and exit timeout are always set, because other parts have to agree on them."""
    given = {
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
    return {name: str(value) for name, value in given.items() if value is not None} | dict(options.environment)


def missing_programs(facts: LaunchFacts) -> list[str]:
    """Return the programs that start.sh runs by name and that are not on PATH."""
    if facts.release is None:
        return []
    record = load_release(facts.release).record["mpi"]
    return [name for name in (record["ranks"][0], *record["entry_point"]) if shutil.which(name) is None]


def run_script(facts: LaunchFacts, options: LaunchOptions, form: str, environment: Mapping[str, str]) -> str:
    """Return a script that runs start.sh with `environment`; a comment in it shows the command that start.sh runs.

    :raises ToolError: when start.sh refuses.
    """
    lines = [*head(facts, form), "set -euo pipefail", ""]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    lines += ["", *comment_lines(f"start.sh then runs this command, with a new {LAUNCH_TAG} and key at each start:")]
    command = _KEY.sub(lambda key: "0" * len(key[0]), dry_run(facts.start_script, environment, options.server_args))
    lines += [f"#   {line}" for line in command.splitlines()]
    lines += ["", f"exec {shlex.join([str(facts.start_script), *options.server_args])}"]
    return "\n".join(lines) + "\n"


def head(facts: LaunchFacts, form: str) -> list[str]:
    return [
        "#!/usr/bin/env bash",
        *comment_lines(f"Made by deepseek-triton {__version__}: launch {form} {facts.source}"),
    ]


def dry_run(start_script: Path, environment: Mapping[str, str], server_args: Sequence[str] = ()) -> str:
    """Return what start.sh prints with DRY_RUN=1: the command that it would become, which a shell can run.

    Its programs are looked for on this machine's PATH; a PATH in `environment` is meant for the server. The engine's
    variables are those of `environment` only.

    :raises ToolError: when start.sh refuses.
    """
    path = os.environ.get("PATH", os.defpath)
    own = {name: value for name, value in os.environ.items() if not is_engine_variable(name)}
    try:
        answer = subprocess.run(
            ["bash", str(start_script), *server_args],
            env={**own, LAUNCH_TAG: _NO_TAG, **environment, "PATH": path, "DRY_RUN": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_DRY_RUN_S,
        )
    except subprocess.TimeoutExpired as error:
        raise ToolError(f"{start_script}: no answer to DRY_RUN=1 within {_DRY_RUN_S} s") from error
    except OSError as error:
        raise ToolError(f"bash can't be run, and {start_script} needs it: {error.strerror}", exit_code=126) from error
    if answer.returncode:
        message = "; ".join(answer.stderr.splitlines()) or f"{start_script} ended with {answer.returncode}"
        raise ToolError(message, exit_code=answer.returncode)
    return answer.stdout


def filled(name: str, values: Mapping[str, str]) -> str:
    """Return a filled template, with its long comments wrapped.

    :param name: a file in templates/.
    """
    return text_templates.wrapped(text_templates.filled(__package__, name, values))
