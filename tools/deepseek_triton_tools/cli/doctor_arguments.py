"""The options of `deepseek-triton doctor`."""

from __future__ import annotations

import argparse
import os

from deepseek_triton_tools.cli.parsing import Verbs, add_verb, path, port, words
from deepseek_triton_tools.tool_errors import ToolError

_PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}


def add_doctor(verbs: Verbs) -> None:
    verb = add_verb(
        verbs,
        "doctor",
        _doctor,
        "say what is wrong with this machine, or several, before a model is loaded; and what works here",
        "deepseek-triton doctor\n"
        "  deepseek-triton doctor r1\n"
        "  deepseek-triton doctor r1 --hosts node1,node2 --ssh-port 2233 --interface eth0\n"
        "  deepseek-triton doctor r1 --through 'docker exec -i triton'\n"
        "  deepseek-triton doctor --json -v\n\n"
        "exit codes: 0 nothing worse than a note; 3 warnings; 1 errors; 2 the command line. docs/doctor.md has\n"
        "every check.",
    )
    verb.add_argument("repository", nargs="?", type=path, metavar="DIR", help="the model repository to be served")
    verb.add_argument("--model", type=path, metavar="PATH", help="where the checkpoint it names is on these machines")
    verb.add_argument("-v", "--verbose", action="store_true", help="what is in order and what was skipped, too")
    verb.add_argument("--json", action="store_true", help="one JSON document instead (docs/doctor.md)")
    _add_hosts(verb.add_argument_group("where", "The checks travel: a host needs python3 and keeps nothing."))
    ports = verb.add_argument_group(
        "ports of the server", "Defaults are what start.sh's variables say here: HTTP_PORT and so on."
    )
    for name, default in _PORTS.items():
        ports.add_argument(f"--{name}-port", type=port, metavar="PORT", help=f"default: {default}")


def _add_hosts(where: argparse._ArgumentGroup) -> None:
    which = where.add_mutually_exclusive_group()
    which.add_argument("--hosts", type=_hosts, metavar="A,B", help="the machines it is to run on, reached by ssh")
    which.add_argument("--host-file", type=path, metavar="FILE", help="the same, a host on each line")
    which.add_argument("--through", metavar="COMMAND", help="a command that runs another here: 'docker exec -i NAME'")
    where.add_argument("--ssh-port", type=port, metavar="N", help="where sshd listens on them (default: 22)")
    where.add_argument("--ssh-args", metavar="TEXT", help="further arguments of ssh, as in --ssh-args '-i key'")
    where.add_argument("--interface", type=words, metavar="NAME", help="network interface between them")
    where.add_argument(
        "--python", type=words, metavar="PROGRAM", help="the Python that the server uses, here and on the hosts"
    )


def _hosts(text: str) -> list[str]:
    hosts = list(dict.fromkeys(host.strip() for host in text.split(",")))
    if all(hosts) and not any(host.startswith("-") for host in hosts):
        return hosts
    raise argparse.ArgumentTypeError(f"expected names separated by commas, as node1,node2, got {text!r}")


def _server_port(args: argparse.Namespace, name: str) -> int:
    """As start.sh takes it: what this says of its ports is to be what it finds.

    :raises ToolError: when the variable is no port.
    """
    given: int | None = getattr(args, f"{name}_port")
    variable = f"{name.upper()}_PORT"
    text = os.environ.get(variable)
    if given is not None or not text:
        return given or _PORTS[name]
    try:
        return port(text)
    except argparse.ArgumentTypeError as error:
        raise ToolError(f"{variable}: {error}", exit_code=2) from error


def _doctor(args: argparse.Namespace) -> int:
    from deepseek_triton_tools.cli.doctor import DoctorOptions, doctor

    options = DoctorOptions(
        repository=args.repository,
        model=args.model,
        hosts=tuple(args.hosts or ()),
        host_file=args.host_file,
        through=args.through,
        ssh_port=args.ssh_port,
        ssh_args=args.ssh_args,
        interface=args.interface,
        python=args.python,
        http_port=_server_port(args, "http"),
        grpc_port=_server_port(args, "grpc"),
        metrics_port=_server_port(args, "metrics"),
        verbose=args.verbose,
    )
    return doctor(options, as_json=args.json)
