"""`launch mpirun`: start.sh on the first of several nodes, which reaches the others by ssh."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from deepseek_triton_build.text import plain
from deepseek_triton_tools.launching import local, script
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.repository.launch_facts import LaunchFacts
from deepseek_triton_tools.tool_errors import ToolError

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SLOTS = re.compile(r"\s+(?:max[-_]?slots|slots)\s*=\s*\d+|:\d+", re.ASCII)
_LEADERS = ("GRPC_ADDRESS", "METRICS_ADDRESS")
"""Of tritonserver, which runs on the first node alone."""
_FORWARDED = ("NCCL_", "UCX_", "GLOO_", "HF_TOKEN", "HF_HOME")


def problems(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    if facts.nodes == 1:
        yield f"{facts.source} takes one node: launch local or docker"
        return
    hosts = options.hosts
    yield from (
        f"{plain(host)} can't be a host: expected a name or an IPv4 address" for host in hosts if not _is_host(host)
    )
    if not hosts:
        yield f"name the {facts.nodes} nodes, this one first: --hosts node1,node2 or --host-file FILE"
    elif twice := sorted({host for host in hosts if hosts.count(host) > 1}):
        yield f"hosts are named twice: {', '.join(map(plain, twice))}; each has {facts.ranks_per_node} ranks by itself"
    if hosts and len(set(hosts)) != facts.nodes:
        yield f"{facts.source} takes {facts.nodes} nodes, got {len(set(hosts))}: {', '.join(map(plain, hosts))}"
    if set("'\"\\") & set(options.ssh_args or ""):
        yield f"--ssh-args: mpirun splits them at blanks and knows no quotes, got {plain(options.ssh_args or '')}"


def lacking(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    """What this machine has to have before it is run."""
    if missing := local.missing_programs(facts):
        yield (
            f"not on PATH: {', '.join(missing)}; run it in {facts.image} on the first node, where launch ssh-setup "
            "starts one on each; or launch slurm or kubernetes"
        )


def warnings(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    """What is only wrong if it is run here."""
    if not is_here(options.hosts[0]):
        yield (
            f"{options.hosts[0]} is not this machine: run it there, for the first host is where mpirun starts and "
            "tritonserver answers"
        )
    kept = [name for name, _ in options.environment if not name.startswith(_FORWARDED) and name not in _LEADERS]
    if kept:
        yield (
            f"--env {', '.join(kept)}: start.sh hands only NCCL_*, UCX_*, GLOO_* and the plan's own variables to the "
            "other nodes"
        )


def environment(options: LaunchOptions) -> dict[str, str]:
    said = {
        "HOSTS": ",".join(options.hosts),
        "SSH_PORT": options.ssh_port,
        "SSH_ARGS": options.ssh_args,
    }
    return {name: str(value) for name, value in said.items() if value} | script.server_environment(options)


def render(facts: LaunchFacts, options: LaunchOptions) -> str:
    return script.run_script(facts, options, "with mpirun", environment(options))


def parse_hosts(text: str) -> tuple[str, ...]:
    """ "node1,node2"."""
    return tuple(host for host in re.split(r"[,\s]+", text) if host)


def read_host_file(path: Path, ranks_per_node: int) -> tuple[str, ...]:
    """Hosts, one a line, as mpirun's own host files have them.

    :raises ToolError: when it can't be read, or a line is none, or gives a host another number of ranks; all of them.
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
            wrong.append(f"{path}:{number}: expected a host, as in `node1` or `node1 slots=8`, got {plain(text)}")
        elif any(int(re.sub(r"\D", "", slot)) != ranks_per_node for slot in slots):
            wrong.append(f"{path}:{number}: the plan has {ranks_per_node} ranks a node, got {plain(text)}")
        elif host:
            hosts.append(host)
    if wrong:
        raise ToolError("; ".join(wrong), exit_code=2)
    return tuple(hosts)


def is_here(host: str) -> bool:
    """Whether `host` is an address of this machine: then a socket can be bound to it."""
    try:
        addresses: Sequence[tuple[object, ...]] = socket.getaddrinfo(host, 0, socket.AF_INET, socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_can_bind(address[-1]) for address in addresses)


def _can_bind(address: object) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(address)  # type: ignore[arg-type]
        except OSError:
            return False
    return True


def _is_host(text: str) -> bool:
    return _HOST.fullmatch(text) is not None
