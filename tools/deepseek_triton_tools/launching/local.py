"""`launch local`: start.sh in the foreground, on this machine or in the container that the command runs in."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator

from deepseek_triton_tools.host.tritonserver import find_tritonserver
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.launching.start_script import missing_programs, run_script, server_environment
from deepseek_triton_tools.launching.vllm_nodes import nodes_by_hand
from deepseek_triton_tools.repository.launch_facts import LaunchFacts
from deepseek_triton_tools.tool_errors import InstallationError


def refusals(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    if facts.nodes > 1:
        if facts.uses_mpi:
            yield f"{facts.source} takes {facts.nodes} nodes: use launch mpirun, slurm or kubernetes"
        yield from nodes_by_hand(facts, options, "local")


def unmet_requirements(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    if missing := missing_programs(facts):
        yield (f"not on PATH: {', '.join(missing)}; run it in {facts.image}, as launch docker, slurm and kubernetes do")


def render(facts: LaunchFacts, options: LaunchOptions) -> str:
    environment, server_args = _server(facts, options)
    options = dataclasses.replace(options, server_args=(*server_args, *options.server_args))
    return run_script(facts, options, "local", environment)


def _server(facts: LaunchFacts, options: LaunchOptions) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the variables, and the arguments that the tritonserver of this machine needs."""
    environment = server_environment(options)
    if facts.release is not None or shutil.which("tritonserver"):
        return environment, ()
    try:
        server = find_tritonserver()
    except InstallationError:
        return environment, ()  # start.sh reports that there is none
    # start.sh looks for the server on PATH.
    path = server.environment.get("PATH") or os.environ.get("PATH", os.defpath)
    on_path = {**server.environment, "PATH": os.pathsep.join([str(server.binary.parent), path])}
    return on_path | environment, server.extra_args
