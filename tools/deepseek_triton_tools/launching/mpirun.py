"""`launch mpirun`: start.sh on the first of several nodes, which reaches the others by ssh."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from deepseek_triton_build.catalog import is_for_every_rank
from deepseek_triton_build.text import safe_name
from deepseek_triton_tools.doctor.hosts import is_here
from deepseek_triton_tools.doctor.machine import Machine
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.launching.start_script import missing_programs, run_script, server_environment
from deepseek_triton_tools.launching.vllm_nodes import nodes_by_hand
from deepseek_triton_tools.repository.launch_facts import LaunchFacts
from deepseek_triton_tools.tool_errors import ToolError

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SLOTS = re.compile(r"\s+(?:max[-_]?slots|slots)\s*=\s*\d+|:\d+", re.ASCII)
_LEADER_ONLY = ("GRPC_ADDRESS", "METRICS_ADDRESS")
"""Variables that only tritonserver needs, which runs on the first node."""


def refusals(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    if facts.nodes == 1:
        yield f"{facts.source} takes one node: use launch local or docker"
        return
    if not facts.uses_mpi:
        yield f"vLLM's nodes are not started by MPI; {'; '.join(nodes_by_hand(facts, options, 'docker'))}"
        return
    hosts = options.hosts
    yield from (
        f"{safe_name(host)} can't be a host: expected a name or an IPv4 address" for host in hosts if not _is_host(host)
    )
    if not hosts:
        yield f"name the {facts.nodes} nodes, this one first: --hosts node1,node2 or --host-file FILE"
    elif twice := sorted({host for host in hosts if hosts.count(host) > 1}):
        yield f"hosts are named twice: {', '.join(map(safe_name, twice))}; name each node once"
    if hosts and len(set(hosts)) != facts.nodes:
        yield f"{facts.source} takes {facts.nodes} nodes, got {len(set(hosts))}: {', '.join(map(safe_name, hosts))}"
    if set("'\"\\") & set(options.ssh_args or ""):
        yield f"--ssh-args: mpirun splits them at blanks and knows no quotes, got {safe_name(options.ssh_args or '')}"


def unmet_requirements(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    if missing := missing_programs(facts):
        yield (
            f"not on PATH: {', '.join(missing)}; run it in {facts.image} on the first node (launch ssh-setup starts "
            "that container on each node), or use launch slurm or kubernetes"
        )


def warnings(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    if not is_here(options.hosts[0], Machine()):
        here = "run it there, because mpirun and tritonserver run on the first host"
        yield f"{options.hosts[0]} is not this machine: {here}"
    kept = [name for name, _ in options.environment if not is_for_every_rank(name) and name not in _LEADER_ONLY]
    if kept:
        yield (
            f"--env {', '.join(kept)}: start.sh hands only the variables of the engine and of what is below it "
            "(TRTLLM_*, CUDA_*, NCCL_* and so on) to the other nodes"
        )


def environment(options: LaunchOptions) -> dict[str, str]:
    given = {"HOSTS": ",".join(options.hosts), "SSH_PORT": options.ssh_port, "SSH_ARGS": options.ssh_args}
    return {name: str(value) for name, value in given.items() if value} | server_environment(options)


def render(facts: LaunchFacts, options: LaunchOptions) -> str:
    return run_script(facts, options, "mpirun", environment(options))


def parse_hosts(text: str) -> tuple[str, ...]:
    """Split "node1,node2"; blanks separate too."""
    return tuple(host for host in re.split(r"[,\s]+", text) if host)


def read_host_file(path: Path, ranks_per_node: int) -> tuple[str, ...]:
    """Read a host from each line, in the form of mpirun's own host files.

    :raises ToolError: when the file can't be read, or names all lines that hold no host or another number of ranks.
    """
    try:
        lines = path.read_text("utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ToolError(f"--host-file {path} can't be read: {error.strerror}", exit_code=2) from error
    hosts, wrong = [], []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        slots = _SLOTS.findall(text)
        host = _SLOTS.sub("", text).strip()
        if host and not _is_host(host):
            wrong.append(f"{path}:{number}: expected a host, as in `node1` or `node1 slots=8`, got {safe_name(text)}")
        elif any(int(re.sub(r"\D", "", slot)) != ranks_per_node for slot in slots):
            wrong.append(f"{path}:{number}: the plan has {ranks_per_node} ranks a node, got {safe_name(text)}")
        elif host:
            hosts.append(host)
    if wrong:
        raise ToolError("; ".join(wrong), exit_code=2)
    return tuple(hosts)


def _is_host(text: str) -> bool:
    return _HOST.fullmatch(text) is not None
