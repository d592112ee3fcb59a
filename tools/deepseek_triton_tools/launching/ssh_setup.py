"""`launch ssh-setup`: a script that lets mpirun on the first node reach the others, and tries it.

Keys of its own for this one purpose, in a folder that every node has at the same path: ssh's and sshd's configuration
of the machine and of the user stay as they are.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from deepseek_triton_build.render.yaml_text import comment, one_line
from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.launching import docker, mpirun, script
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.repository.launch_facts import LaunchFacts
from deepseek_triton_tools.tool_errors import ToolError

DEFAULT_PORT = 2233
"""Of the sshd in the containers, which have the host's network: 22 is the host's own."""
_HELLO = """\
import collections, socket
from mpi4py import MPI
hosts = MPI.COMM_WORLD.gather(socket.gethostname())
total = MPI.COMM_WORLD.allreduce(1)
if MPI.COMM_WORLD.rank == 0:
    print("hello from", total, "ranks:", *(f"{host} x {n}" for host, n in collections.Counter(hosts).items()))
"""


def problems(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    return docker.wrong_values(facts, options)


def render_setup(facts: LaunchFacts, options: LaunchOptions) -> str:
    """
    :raises ToolError: when start.sh refuses.
    """
    port = options.ssh_port or DEFAULT_PORT
    keys = f"$HOME/.cache/deepseek-triton/ssh/{docker.container_name(facts, options)}"
    values = {
        "version": __version__,
        "source": one_line(facts.source),
        "hosts": script.words(options.hosts),
        "first": one_line(options.hosts[0]),
        "port": str(port),
        "keys": keys,
        "container": shlex.quote(docker.container_name(facts, options) if facts.image or options.image else ""),
        "docker": _container(facts, options),
        "mpirun": _mpirun(facts, options),
        "hello": _HELLO,
        "environment": _environment(options),
        "start": shlex.quote(str(facts.start_script)),
        "folder": shlex.quote(str(facts.folder)),
        "ranks": str(facts.world_size),
    }
    return script.filled("ssh-setup.sh", values)


def _environment(options: LaunchOptions) -> str:
    """start.sh's variables but those of ssh, which the script has."""
    said = {name: value for name, value in mpirun.environment(options).items() if not name.startswith("SSH_")}
    return script.words(f"{name}={value}" for name, value in said.items())


def _container(facts: LaunchFacts, options: LaunchOptions) -> str:
    """The lines of `docker run` between its name and the image, for a container that waits."""
    if not (options.image or facts.image):
        return "    false # the engine was planned for no container"
    lines = [f"    mkdir -p -- {script.words(docker.made_folders(facts, options))}", "    local command=("]
    for words, why in _waiting(facts, options):
        lines += [*comment(why, "      "), f"      {words}"]
    return "\n".join([*lines, "    )", '    "${command[@]}"'])


def _waiting(facts: LaunchFacts, options: LaunchOptions) -> Iterator[tuple[str, str]]:
    *parts, (image, image_why), _ = docker.parts(facts, options)
    for command, why in parts:
        yield script.words(word for word in command if word != "--rm"), why
    yield '--detach --mount type=bind,source="$keys",target="$keys",readonly', "The keys, at the same path."
    yield script.words(image), image_why
    yield "sleep infinity", "It waits: mpirun starts the ranks in it, by ssh."


def _mpirun(facts: LaunchFacts, options: LaunchOptions) -> str:
    """mpirun with the very variables and flags of the launch, up to the program; ssh's come from the script.

    :raises ToolError: when start.sh refuses.
    """
    environment = mpirun.environment(options) | {"SSH_PORT": "@PORT@", "SSH_ARGS": "@ARGS@"}
    words = shlex.split(script.resolved(facts, environment, options.server_args).replace("\\\n", " "))
    if "mpirun" not in words:
        raise ToolError(f"{facts.start_script} starts no mpirun")
    start = words.index("mpirun")
    variables = [word for word in words[1 : words.index("python3")] if "=" in word]
    flags = [word for word in words[start : words.index("-n", start) + 2] if word != "--tag-output"]
    return re.sub(r"'-p @PORT@ @ARGS@'", '"$ssh_args"', script.words(["env", *variables, *flags]))
