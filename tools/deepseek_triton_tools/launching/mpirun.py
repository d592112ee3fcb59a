"""`launch mpirun`: start.sh on the first of several nodes, which reaches the others by ssh; and `launch ssh-setup`.

The script of ssh-setup lets mpirun on the first node reach the other nodes, and tests it. It makes keys for this
purpose only, in a folder that every node has at the same path. The ssh and sshd configuration of the machine and of the
user stay unchanged.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from deepseek_triton_build.catalog import is_for_every_rank
from deepseek_triton_build.text import for_comment, safe_name
from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.doctor.hosts import is_here
from deepseek_triton_tools.doctor.machine import Machine
from deepseek_triton_tools.launching import containers, start_script
from deepseek_triton_tools.launching.containers import image_of
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.launching.start_script import missing_programs, nodes_by_hand, run_script, server_environment
from deepseek_triton_tools.repository.launch_facts import LaunchFacts
from deepseek_triton_tools.tool_errors import ToolError

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SLOTS = re.compile(r"\s+(?:max[-_]?slots|slots)\s*=\s*\d+|:\d+", re.ASCII)
# Variables that only tritonserver needs, which runs on the first node.
_LEADER_ONLY = ("GRPC_ADDRESS", "METRICS_ADDRESS")


def refusals(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    yield from containers.invalid_options(facts, options)  # of ssh-setup's container
    if facts.nodes == 1:
        yield f"{facts.source} takes one node: use launch local or docker"
        return
    if not facts.uses_mpi:
        yield f"vLLM's nodes are not started by MPI; {'; '.join(nodes_by_hand(facts, options, 'docker'))}"
        return
    hosts = options.hosts
    yield from (
        f"{safe_name(host)} can't be a host: expected a name or an IPv4 address"
        for host in hosts
        if not _HOST.fullmatch(host)
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
    yield from containers.warnings(facts, options)
    if not is_here(options.hosts[0], Machine()):
        yield f"{options.hosts[0]} is not this machine: run it there, as mpirun and tritonserver run on the first host"
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
        if host and not _HOST.fullmatch(host):
            wrong.append(f"{path}:{number}: expected a host, as in `node1` or `node1 slots=8`, got {safe_name(text)}")
        elif any(int(re.sub(r"\D", "", slot)) != ranks_per_node for slot in slots):
            wrong.append(f"{path}:{number}: the plan has {ranks_per_node} ranks a node, got {safe_name(text)}")
        elif host:
            hosts.append(host)
    if wrong:
        raise ToolError("; ".join(wrong), exit_code=2)
    return tuple(hosts)


DEFAULT_PORT = 2233
"""Port of the sshd in the containers. They share the host's network, in which the host's own sshd has port 22."""
_HELLO = """\
import collections, socket
from mpi4py import MPI
hosts = MPI.COMM_WORLD.gather(socket.gethostname())
total = MPI.COMM_WORLD.allreduce(1)
if MPI.COMM_WORLD.rank == 0:
    print("hello from", total, "ranks:", *(f"{host} x {n}" for host, n in collections.Counter(hosts).items()))
"""


def render_setup(facts: LaunchFacts, options: LaunchOptions) -> str:
    """:raises ToolError: when start.sh refuses."""
    container = containers.container_name(facts, options)
    # The script adds the variables of ssh itself.
    variables = {name: value for name, value in environment(options).items() if not name.startswith("SSH_")}
    values = {
        "version": __version__,
        "source": for_comment(facts.source),
        "hosts": shlex.join(options.hosts),
        "first": for_comment(options.hosts[0]),
        "port": str(options.ssh_port or DEFAULT_PORT),
        "ssh_args": f'"{shlex.quote(f" {options.ssh_args}")}"' if options.ssh_args else "",
        "keys": f"$HOME/.cache/deepseek-triton/ssh/{container}",
        "container": shlex.quote(container if image_of(facts, options) else ""),
        "is_removed": False,
        "mpirun": _mpirun(facts, options),
        "hello": _HELLO,
        "environment": shlex.join(f"{name}={value}" for name, value in variables.items()),
        "start": shlex.quote(str(facts.start_script)),
        "folder": shlex.quote(str(facts.folder)),
        "ranks": str(facts.world_size),
    }
    return start_script.filled("ssh-setup.sh", containers.docker_run(facts, options) | values)


def _mpirun(facts: LaunchFacts, options: LaunchOptions) -> str:
    """Return mpirun with exactly the variables and flags of the launch, up to the program. Those of ssh come from the
    script.

    :raises ToolError: when start.sh refuses.
    """
    placeholders = {"SSH_PORT": "@PORT@", "SSH_ARGS": "@ARGS@"}
    command = start_script.dry_run(facts.start_script, environment(options) | placeholders, options.server_args)
    words = shlex.split(command.replace("\\\n", " "))
    if "mpirun" not in words:
        raise ToolError(f"{facts.start_script} starts no mpirun")
    start = words.index("mpirun")
    variables = [word for word in words[1 : words.index("python3")] if "=" in word]
    flags = [word for word in words[start : words.index("-n", start) + 2] if word != "--tag-output"]
    return re.sub(r"'-p @PORT@ @ARGS@'", '"$ssh_args"', shlex.join(["env", *variables, *flags]))
