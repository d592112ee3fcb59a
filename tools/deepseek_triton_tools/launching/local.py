"""`launch local`: start.sh in the foreground, on this machine or in the container that this is run in."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator

from deepseek_triton_build.data.releases import load_release
from deepseek_triton_tools.host.tritonserver import Installation, find_tritonserver
from deepseek_triton_tools.launching import script
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.repository.launch_facts import LaunchFacts
from deepseek_triton_tools.tool_errors import InstallationError


def problems(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    if facts.nodes > 1:
        yield f"{facts.source} takes {facts.nodes} nodes: launch mpirun, slurm or kubernetes"


def lacking(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    """What this machine has to have before it is run."""
    if missing := missing_programs(facts):
        yield (
            f"not on PATH: {', '.join(missing)}; run it in {facts.image}, as launch docker does, or as "
            "launch slurm or kubernetes do"
        )


def missing_programs(facts: LaunchFacts) -> list[str]:
    """What start.sh runs by name."""
    if facts.release is None:
        return []
    record = load_release(facts.release).record["mpi"]
    return [name for name in (record["ranks"][0], *record["entry_point"]) if shutil.which(name) is None]


def render(facts: LaunchFacts, options: LaunchOptions) -> str:
    """
    :raises ToolError: when start.sh refuses.
    """
    environment, own = _server(facts, options)
    options = dataclasses.replace(options, server_args=(*own, *options.server_args))
    return script.run_script(facts, options, "with local", environment)


def _server(facts: LaunchFacts, options: LaunchOptions) -> tuple[dict[str, str], tuple[str, ...]]:
    """The variables, and arguments that the server of this machine needs."""
    environment = script.server_environment(options)
    if facts.release is not None or shutil.which("tritonserver"):
        return environment, ()
    try:
        server = find_tritonserver()
    except InstallationError:
        return environment, ()  # start.sh says it
    return _beside(server) | environment, server.extra_args


def _beside(server: Installation) -> dict[str, str]:
    """start.sh takes the server from PATH."""
    path = server.environment.get("PATH") or os.environ.get("PATH", os.defpath)
    return {**server.environment, "PATH": os.pathsep.join([str(server.binary.parent), path])}
