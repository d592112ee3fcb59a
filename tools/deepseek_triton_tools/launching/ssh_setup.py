"""`launch ssh-setup`: a script that lets mpirun on the first node reach the other nodes, and tests it.

It makes keys for this purpose only, in a folder that every node has at the same path. The ssh and sshd configuration of
the machine and of the user stay unchanged.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from deepseek_triton_build.text import comment_lines, for_comment
from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.launching import docker, mpirun, start_script
from deepseek_triton_tools.launching.containers import created_folders, image_of
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.repository.launch_facts import LaunchFacts
from deepseek_triton_tools.tool_errors import ToolError

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
    container = docker.container_name(facts, options)
    values = {
        "version": __version__,
        "source": for_comment(facts.source),
        "hosts": shlex.join(options.hosts),
        "first": for_comment(options.hosts[0]),
        "port": str(options.ssh_port or DEFAULT_PORT),
        "keys": f"$HOME/.cache/deepseek-triton/ssh/{container}",
        "container": shlex.quote(container if image_of(facts, options) else ""),
        "docker": _docker_run(facts, options),
        "mpirun": _mpirun(facts, options),
        "hello": _HELLO,
        "environment": _environment(options),
        "start": shlex.quote(str(facts.start_script)),
        "folder": shlex.quote(str(facts.folder)),
        "ranks": str(facts.world_size),
    }
    return start_script.filled("ssh-setup.sh", values)


def _environment(options: LaunchOptions) -> str:
    """Return start.sh's variables without those of ssh, which the script adds itself."""
    variables = {name: value for name, value in mpirun.environment(options).items() if not name.startswith("SSH_")}
    return shlex.join(f"{name}={value}" for name, value in variables.items())


def _docker_run(facts: LaunchFacts, options: LaunchOptions) -> str:
    """Return the lines that start a container which waits for mpirun."""
    if not image_of(facts, options):
        return "    false # the engine was planned for no container"
    lines = [f"    mkdir -p -- {shlex.join(created_folders(facts, options))}", "    local command=("]
    for words, why in _command_parts(facts, options):
        lines += [*comment_lines(why, "      "), f"      {words}"]
    return "\n".join([*lines, "    )", '    "${command[@]}"'])


def _command_parts(facts: LaunchFacts, options: LaunchOptions) -> Iterator[tuple[str, str]]:
    *parts, (image, image_why), _ = docker.command_parts(facts, options)
    for command, why in parts:
        yield shlex.join(word for word in command if word != "--rm"), why
    yield '--detach --mount type=bind,source="$keys",target="$keys",readonly', "The keys, at the same path."
    yield shlex.join(image), image_why
    yield "sleep infinity", "The container waits: mpirun starts the ranks in it, by ssh."


def _mpirun(facts: LaunchFacts, options: LaunchOptions) -> str:
    """Return mpirun with exactly the variables and flags of the launch, up to the program. Those of ssh come from the
    script.

    :raises ToolError: when start.sh refuses.
    """
    environment = mpirun.environment(options) | {"SSH_PORT": "@PORT@", "SSH_ARGS": "@ARGS@"}
    command = start_script.dry_run(facts.start_script, environment, options.server_args)
    words = shlex.split(command.replace("\\\n", " "))
    if "mpirun" not in words:
        raise ToolError(f"{facts.start_script} starts no mpirun")
    start = words.index("mpirun")
    variables = [word for word in words[1 : words.index("python3")] if "=" in word]
    flags = [word for word in words[start : words.index("-n", start) + 2] if word != "--tag-output"]
    return re.sub(r"'-p @PORT@ @ARGS@'", '"$ssh_args"', shlex.join(["env", *variables, *flags]))
