"""The options of `deepseek-triton launch`."""

from __future__ import annotations

import argparse
import ipaddress
import re

from deepseek_triton_tools.cli.parsing import (
    VerbParser,
    Verbs,
    add_json,
    add_verb,
    number,
    path,
    port,
    positive,
    seconds,
    size,
    words,
)

FORMS = ("local", "docker", "mpirun", "slurm", "kubernetes")
RECIPES = ("image", "wheel")


def add_launch(verbs: Verbs) -> None:
    verb = add_verb(
        verbs,
        "launch",
        _launch,
        "start a generated repository and keep it running: here, in docker, over several nodes, on a cluster",
        "deepseek-triton launch r1 --with docker --dry-run\n"
        "  deepseek-triton launch r1 --with local -- --log-verbose 1\n"
        "  deepseek-triton launch r1x2 --with mpirun --hosts node1,node2 --ssh-port 2233 --interface eth0\n"
        "  deepseek-triton launch r1x2 --with slurm --partition gpu --time 7-0 --submit\n"
        "  deepseek-triton launch r1 --with kubernetes > r1.yaml\n"
        "  deepseek-triton launch r1 --recipe image\n"
        "  deepseek-triton launch list\n"
        "  deepseek-triton launch stop r1\n\n"
        "local and docker run; mpirun, slurm and kubernetes print, as --dry-run does, unless there is --submit.\n"
        "exit codes: 0 done, or stopped in order; 1 it failed or was refused; 2 the command line, or a port is taken;\n"
        "4 not ready in time; of what runs in the foreground its own, 128 + N for signal N. docs/launch.md has more.",
    )
    verb.usage = (
        "%(prog)s DIR --with FORM [options] [-- ARGS...]\n"
        "       %(prog)s DIR --recipe image|wheel\n"
        "       %(prog)s stop ID|DIR|--all [--now]\n"
        "       %(prog)s list [--json]"
    )
    verb.words, verb.rest = "names", "server_args"
    verb.add_argument("what", metavar="DIR", help="what deepseek-triton build wrote; or stop, or list")
    verb.add_argument("names", nargs="*", default=[], help=argparse.SUPPRESS)
    verb.add_argument("--with", dest="form", choices=FORMS, help="by what it is started")
    verb.add_argument("--dry-run", action="store_true", help="print what would run, which runs as it is printed")
    verb.add_argument("--submit", action="store_true", help="run it: mpirun, sbatch or kubectl")
    verb.add_argument(
        "--recipe", choices=RECIPES, help="print how TensorRT-LLM is built from source, as an image or a wheel"
    )
    _add_server(verb)
    _add_containers(verb)
    _add_mpirun(verb)
    _add_slurm(verb)
    _add_kubernetes(verb)
    _add_running(verb)


def _add_server(verb: VerbParser) -> None:
    server = verb.add_argument_group(
        "server", "Defaults are what start.sh's variables say here: HTTP_PORT, EXIT_TIMEOUT and so on."
    )
    for name, default in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        server.add_argument(f"--{name}-port", type=port, metavar="PORT", help=f"default: {default}")
    server.add_argument(
        "--address",
        type=_address,
        metavar="IP",
        help="where they listen, 127.0.0.1 for this machine alone (default: 0.0.0.0, for everybody who reaches it)",
    )
    server.add_argument(
        "--exit-timeout", type=seconds, metavar="S", help="what open requests get on a stop (default: 30)"
    )
    server.add_argument(
        "--ready-within",
        type=seconds,
        metavar="S",
        help="deadline of the start, 0 for none (default: by the checkpoint's bytes)",
    )
    server.add_argument(
        "--max-restarts", type=number, metavar="N", help="after a failure of what had been ready (default: 3)"
    )
    server.add_argument("--ready-file", type=path, metavar="FILE", help="is there while it is ready")
    server.add_argument("--interface", type=words, metavar="NAME", help="network interface between the ranks or nodes")
    server.add_argument(
        "--env",
        action="append",
        default=[],
        type=_variable,
        metavar="NAME=VALUE",
        help="a variable of the server, and no secret: it is printed; may be repeated",
    )


def _add_containers(verb: VerbParser) -> None:
    group = verb.add_argument_group("containers: docker, slurm, kubernetes")
    group.add_argument("--image", type=_image, help="instead of the repository's own")
    group.add_argument("--name", type=words, help="of the container, the job, the objects (default: by DIR)")
    group.add_argument(
        "--gpus", type=words, metavar="WHICH", help="all, none, a number, or for docker devices: 0,1 or a UUID"
    )
    group.add_argument("--shm-size", type=size, metavar="SIZE", help="of /dev/shm (default: 1 GiB a rank, and 1)")
    group.add_argument("--cache-dir", type=path, metavar="DIR", help="for compiled kernels (default: ~/.cache)")
    docker = verb.add_argument_group("docker")
    docker.add_argument("--ipc-host", action="store_true", help="the machine's /dev/shm instead of one of its own")
    docker.add_argument(
        "--network", type=words, metavar="NAME", help="host (default), or another, with the ports published"
    )
    docker.add_argument(
        "--restart", type=words, metavar="POLICY", help="as docker's own; without it, the container is removed"
    )
    docker.add_argument("--detach", action="store_true", help="do not wait for it")


def _add_mpirun(verb: VerbParser) -> None:
    group = verb.add_argument_group("mpirun")
    group.add_argument("--hosts", metavar="A,B", help="the nodes, this one first")
    group.add_argument("--host-file", type=path, metavar="FILE", help="the same, one a line, also as `host slots=8`")
    group.add_argument("--ssh-port", type=port, metavar="PORT", help="of every node's sshd (default: ssh's own)")
    group.add_argument("--ssh-args", metavar="TEXT", help="further arguments of ssh")
    group.add_argument(
        "--ssh-setup", action="store_true", help="print a script: keys, sshd on every node, a test over all of them"
    )


def _add_slurm(verb: VerbParser) -> None:
    group = verb.add_argument_group("slurm")
    group.add_argument("--partition", type=words, metavar="NAME")
    group.add_argument("--account", type=words, metavar="NAME")
    group.add_argument(
        "--time", type=words, metavar="LIMIT", help="of the job, as sbatch has it (default: the partition's)"
    )
    group.add_argument("--job-name", dest="name", type=words, metavar="NAME", help="the same as --name")
    group.add_argument(
        "--log", type=words, metavar="FILE", help="of the job (default: NAME-%%j.log where it is submitted)"
    )
    group.add_argument("--slurm-mpi", type=words, metavar="TYPE", help="as srun's --mpi (default: pmix)")
    group.add_argument("--no-container", action="store_true", help="the nodes have tritonserver and the engine")
    group.add_argument("--no-requeue", action="store_true", help="not again after a node's failure")
    group.add_argument(
        "--python", type=words, metavar="PROGRAM", help="of the first node, 3.10 or newer (default: python3)"
    )
    group.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help="as --sbatch=--qos=high")


def _add_kubernetes(verb: VerbParser) -> None:
    group = verb.add_argument_group("kubernetes")
    group.add_argument("--namespace", type=words, metavar="NAME")
    group.add_argument("--rate", type=size, metavar="SIZE", help="bytes a second of the storage (default: assumed)")
    group.add_argument("--replicas", type=positive, metavar="N", help="of the whole instance (default: 1)")
    group.add_argument("--max-replicas", type=positive, metavar="N", help="as many as the load needs, up to N")
    group.add_argument("--claim", type=words, metavar="NAME", help="PersistentVolumeClaim of the checkpoint")
    group.add_argument("--measured", type=path, metavar="FILE", help="the rate, of a warm --json of this checkpoint")
    group.add_argument(
        "--repository-claim", type=words, metavar="NAME", help="the repository's claim (default: a ConfigMap)"
    )
    group.add_argument("--cache-claim", type=words, metavar="NAME", help="the compiled kernels' claim")
    group.add_argument("--checkpoint-on-nodes", action="store_true", help="every node has it where it is here")
    group.add_argument("--target", type=positive, metavar="N", help="sequences in flight to aim at, of each replica")
    group.add_argument("--host-network", action="store_true", help="pods in the nodes' own network")
    group.add_argument("--rdma", type=_resource, metavar="NAME=N", help="network cards of each pod: rdma/hca=8")
    group.add_argument("--scrape", action="store_true", help="annotate pods for Prometheus")
    group.add_argument(
        "--node-selector",
        action="append",
        default=[],
        type=_label,
        metavar="LABEL=VALUE",
        help="nodes that will do; may be repeated",
    )
    group.add_argument("--pull-secret", type=words, metavar="NAME", help="secret of the image's registry")


def _add_running(verb: VerbParser) -> None:
    group = verb.add_argument_group("stop and list: what was started on this machine by this user")
    group.add_argument("--all", action="store_true", help="stop all of them")
    group.add_argument("--now", action="store_true", help="without waiting for open requests")
    add_json(group)


def _image(text: str) -> str:
    if re.fullmatch(r"[^\s-]\S*", text):  # docker would take a dash for an option
        return text
    raise argparse.ArgumentTypeError(f"expected an image's name, without blanks, got {text!r}")


def _address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an IP address of the machine, got {text!r}") from None


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if equals and re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        return name, value
    raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if equals and name:
        return name, value
    raise argparse.ArgumentTypeError(f"expected LABEL=VALUE, got {text!r}")


def _resource(text: str) -> tuple[str, int]:
    name, _, count = text.partition("=")
    if name and count.isdecimal() and int(count):
        return name, int(count)
    raise argparse.ArgumentTypeError(f"expected NAME=N, as rdma/hca=8, got {text!r}")


def _launch(args: argparse.Namespace) -> int:
    from deepseek_triton_tools.cli.launch import run_launch

    return run_launch(args)
