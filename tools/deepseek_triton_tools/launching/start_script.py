"""start.sh: its variables, the command that it runs, scripts that run it, and `launch local`.

`launch local` runs start.sh in the foreground, on this machine or in the container that the command runs in. An
instance of vLLM over several nodes has no MPI: each node starts start.sh by itself, and vLLM brings them together.
"""

import contextlib
import dataclasses
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepseek_triton_build.catalog import is_engine_variable, load_release
from deepseek_triton_build.text import for_comment
from deepseek_triton_tools import text_templates
from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.host.tritonserver import find_tritonserver
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.repository.launch_facts import LaunchFacts
from deepseek_triton_tools.tool_errors import InstallationError, ToolError

MASTER = "MASTER_ADDR"
"""start.sh's variable with the name or address of node 0."""
NODE = "NODE_RANK"
"""start.sh's variable with the number of this node."""
FIRST_NODE = {NODE: "0", MASTER: "192.0.2.1"}
"""An example of both (RFC 5737), with which start.sh can be asked what it would run."""


def needs_master(facts: LaunchFacts) -> bool:
    return facts.nodes > 1 and not facts.uses_mpi


def nodes_by_hand(facts: LaunchFacts, options: LaunchOptions, form: str) -> Iterator[str]:
    """Yield how a form that starts one node is used on each, unless it was told which node this is."""
    if needs_master(facts) and not {MASTER, NODE} <= dict(options.environment).keys():
        commands = [
            f"deepseek-triton launch {form} {shlex.quote(facts.source)} --env {NODE}={number} --env {MASTER}=ADDRESS"
            for number in range(facts.nodes)
        ]
        yield (
            f"{facts.source} takes {facts.nodes} nodes: run on each of them its own line, with the ADDRESS at which "
            f"the others reach the first: {', '.join(commands)}; or use launch slurm or kubernetes"
        )


LAUNCH_TAG = "DEEPSEEK_TRITON_LAUNCH"
"""Variable that all processes of a launch have. start.sh makes a new value at each start."""
_NO_TAG = "00000000"
# The key of Triton's closed endpoints in the command, which is a new one at each start too.
_KEY = re.compile(r"(?<=:closed=)[0-9a-f]{32}")
# Seconds; start.sh has nothing to wait for.
_DRY_RUN_S = 30


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


def exports(variables: Mapping[str, str]) -> list[str]:
    return [f"{name}={shlex.quote(value)}" for name, value in variables.items()]


def run_script(facts: LaunchFacts, options: LaunchOptions, form: str, environment: Mapping[str, str]) -> str:
    """Return a script that runs start.sh with `environment`; a comment in it shows the command that start.sh runs.

    :raises ToolError: when start.sh refuses.
    """
    command = _KEY.sub(lambda key: "0" * len(key[0]), dry_run(facts.start_script, environment, options.server_args))
    values = {
        "version": __version__,
        "form": form,
        "source": for_comment(facts.source),
        "exports": exports(environment),
        "tag": LAUNCH_TAG,
        "command": command.splitlines(),
        "start": shlex.join([str(facts.start_script), *options.server_args]),
    }
    return filled("run.sh", values)


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


def filled(name: str, values: Mapping[str, Any]) -> str:
    """Return a filled template, with its long comments wrapped.

    :param name: a file in templates/.
    """
    return text_templates.wrapped(text_templates.filled(__package__, name, values))


def local_refusals(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    if facts.nodes > 1 and facts.uses_mpi:
        yield f"{facts.source} takes {facts.nodes} nodes: use launch mpirun, slurm or kubernetes"
    yield from nodes_by_hand(facts, options, "local")


def local_requirements(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    if missing := missing_programs(facts):
        yield (f"not on PATH: {', '.join(missing)}; run it in {facts.image}, as launch docker, slurm and kubernetes do")
    elif _needs_server(facts, options):
        try:
            find_tritonserver(extra="demo" if facts.engine == "reference" else "server")
        except InstallationError as error:
            yield str(error)


def _needs_server(facts: LaunchFacts, options: LaunchOptions) -> bool:
    """Return whether start.sh, which takes tritonserver from PATH, needs to be told of another."""
    return facts.release is None and not shutil.which("tritonserver", path=dict(options.environment).get("PATH"))


def render_local(facts: LaunchFacts, options: LaunchOptions) -> str:
    environment, server_args = server_environment(options), options.server_args
    if _needs_server(facts, options):
        with contextlib.suppress(InstallationError):  # local_requirements has said why
            server = find_tritonserver()
            path = server.environment.get("PATH") or os.environ.get("PATH", os.defpath)
            on_path = {"PATH": os.pathsep.join([str(server.binary.parent), path])}
            environment = {**server.environment, **on_path, **environment}
            server_args = (*server.extra_args, *server_args)
    return run_script(facts, dataclasses.replace(options, server_args=server_args), "local", environment)
