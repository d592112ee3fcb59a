"""`deepseek-triton launch`: a generated repository, started in one of five forms, or the text that would start it.

start.sh says what runs, and the supervisor in the repository watches it; a form sets their surroundings. Every form
renders a text that runs as it is, and running a form is running that text: what --dry-run prints is what would happen.
"""

from __future__ import annotations

import argparse
import dataclasses
import ipaddress
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from deepseek_triton_tools.cli.parsing import (
    START_VARIABLES,
    VerbParser,
    add_json,
    add_verb,
    count_or_seconds,
    exit_timeout,
    option,
    path,
    port,
    positive,
    size,
    take_start_variables,
    words,
)
from deepseek_triton_tools.terminal.output_streams import complain, printable, to_reader
from deepseek_triton_tools.tool_errors import InstallationError, ToolError

if TYPE_CHECKING:
    from deepseek_triton_tools.launching.launch_settings import LaunchOptions

_DOCKER_S = 10
_SERVER = """
    --http-port PORT  http port (default: 8000)
    --grpc-port PORT  grpc port (default: 8001)
    --metrics-port PORT  metrics port (default: 8002)
    --exit-timeout S  seconds of a stop: open requests get 5 less, at least half (default: 30)
    --ready-within S  seconds until it must be ready, 0: no limit (default: by the checkpoint's size)
    --max-restarts N  restarts in a row when a server that was ready fails (default: 3)
    --ready-file FILE  file that exists while the server is ready
    --interface NAME  network interface between nodes, such as eth0
    --env NAME=VALUE  set a variable of the server; may be repeated; it is printed, so not for secrets
    """
_ADDRESS = """
    --address IP  address to listen on; 127.0.0.1: only for this machine (default: 0.0.0.0, for everybody)
    """
_CONTAINER = """
    --image IMAGE  image to use instead of the repository's own
    --name NAME  name of the container, job or objects (default: by DIR)
    --cache-dir DIR  compiled kernels (default: ~/.cache; pods: none)
    """
_GPUS = """
    --gpus WHICH  a number or none; docker also takes all, 0,1 or a UUID (default: all in docker, else the plan's)
    """
_SHM_SIZE = """
    --shm-size SIZE  size of /dev/shm (default: 1 GiB for each rank and 1 GiB more)
    """
_IPC_HOST = """
    --ipc-host  use the machine's /dev/shm instead of its own
    """
_DOCKER = """
    --network NAME  docker's network: host (default), or another, where the three ports are published
    --restart POLICY  docker's restart policy, such as unless-stopped (default: none)
    --detach  run it in the background; it stays when it has ended, with its log
    """
_NODES = """
    --hosts A,B  the nodes, this one first
    --host-file FILE  the same, one a line, or as mpirun's host file
    --ssh-port PORT  port of sshd on every node (default: ssh's own; ssh-setup: 2233)
    --ssh-args TEXT  more arguments of ssh, as in --ssh-args='-i key'
    """
_PAIR = {
    "pair of context and generation servers": """
    --context-servers N  context servers of a pair's folder (default: as it was built, else 1)
    --generation-servers N  generation servers of a pair's folder (default: as it was built, else 1)
    """
}
_JOB = """
    --partition NAME  default: the cluster's
    --account NAME  default: the cluster's
    --time LIMIT  longest run, 7-0 is 7 days (default: partition's)
    --job-name NAME  the same as --name
    --log FILE  log of all ranks (default: NAME-%%j.log)
    --slurm-mpi TYPE  value of srun's --mpi (default: pmix)
    --no-container  use no container: the nodes have tritonserver and the engine
    --no-requeue  don't start the job again after a node has failed
    --python PROGRAM  Python 3.10 or newer of the first node (default: python3)
    --sbatch OPTION  another option of sbatch, such as --sbatch=--qos=high; may be repeated
    """
_PODS = {
    "storage": """
    --claim NAME  PersistentVolumeClaim with the checkpoint
    --checkpoint-on-nodes  every node has it at the path it has here
    --rate SIZE  bytes read per second, as 2GB (default: 200MB)
    --measured FILE  take the rate from FILE, the output of `warm files --json`
    --repository-claim NAME  PersistentVolumeClaim with the repository (default: a ConfigMap)
    --cache-claim NAME  claim for compiled kernels
    """,
    "pods": """
    --namespace NAME  default: kubectl's
    --replicas N  copies of the server (default: 1)
    --max-replicas N  scale with the load up to N (default: don't)
    --target N  with --max-replicas: requests at once per copy
    --host-network  put the pods into the nodes' own network
    --rdma NAME=N  RDMA cards of each pod, such as rdma/hca=8
    --ssh-port PORT  port of sshd in the pods (default: 2222)
    --scrape  annotate the pods, so that Prometheus reads their metrics
    --node-selector LABEL=VALUE  run only on nodes with this label; may be repeated
    --pull-secret NAME  secret for the image's registry
    """,
    "gateway": """
    --gateway-image IMAGE  put OpenAI's API in front of the servers, with an image that has deepseek-triton[gateway]
    --gateway-replicas N  copies of it (default: 2)
    --gateway-keys NAME  secret whose entry keys is its file of API keys (default: anyone may ask)
    """,
    "routing and scaling": """
    --routing  who chooses a request's server: our gateway, the Gateway API's endpoint picker, or Envoy
    --route-parent GATEWAY  Gateway object whose requests are for these servers, as NAME or NAMESPACE/NAME
    --picker-image IMAGE  image of the endpoint picker, for --routing epp
    --autoscale  what follows the load up to --max-replicas: hpa needs a metrics adapter, keda KEDA (default: hpa)
    """,
}
# Form -> summary, examples, and groups of options: an option in each line, with the name of its value, and help.
_FORMS: dict[str, tuple[str, tuple[str, str], dict[str, str]]] = {
    "local": (
        "run it on this machine, where tritonserver and the engine are installed",
        ("local r1 -- --log-verbose 1", "local r1 --http-port 9000 --address 127.0.0.1"),
        {"server": _SERVER + _ADDRESS},
    ),
    "docker": (
        "run it in a docker container",
        ("docker r1 --dry-run", "docker r1 --detach --gpus 0,1"),
        {"server": _SERVER + _ADDRESS, "container": _CONTAINER + _GPUS + _SHM_SIZE + _IPC_HOST + _DOCKER},
    ),
    "mpirun": (
        "start it on several nodes by ssh, from the first of them",
        ("mpirun r1x2 --hosts node1,node2 --ssh-port 2233 --interface eth0", "mpirun r1x2 --host-file hosts --submit"),
        {"nodes": _NODES, "server": _SERVER + _ADDRESS},
    ),
    "slurm": (
        "write a batch script for Slurm, or submit it",
        ("slurm r1x2 --partition gpu --time 7-0 --submit", "slurm r1 --no-container > r1.sbatch"),
        {"job": _JOB, **_PAIR, "container": _CONTAINER + _GPUS, "server": _SERVER + _ADDRESS},
    ),
    # Without an address: pods are asked at addresses of their own.
    "kubernetes": (
        "write manifests for Kubernetes, or apply them",
        (
            "kubernetes r1 --claim models --rate 2GB --output manifests",
            "kubernetes r1 --checkpoint-on-nodes --max-replicas 4 --submit",
        ),
        {**_PODS, **_PAIR, "container": _CONTAINER + _SHM_SIZE, "server": _SERVER},
    ),
    "ssh-setup": (
        "print a script that prepares mpirun's nodes: ssh keys, sshd on each, a test",
        (
            "ssh-setup r1x2 --hosts node1,node2 > setup.sh",
            "ssh-setup r1x2 --host-file hosts --interface eth0 > setup.sh",
        ),
        {"nodes": _NODES, "container": _CONTAINER + _GPUS + _SHM_SIZE + _IPC_HOST, "server": _SERVER + _ADDRESS},
    ),
}
_COMMON = (
    "--dry-run --submit --hosts --host-file --partition --time --context-servers --generation-servers --image --gpus "
    "--detach --restart --claim --checkpoint-on-nodes --namespace --replicas --http-port --ready-within --env"
)
_DRY_RUN = "print what would run, and do nothing else"
_RUN_AT_ONCE = ("local", "docker")
_OF_TRITON = ("grpc_port", "metrics_port", "exit_timeout", "ready_within", "max_restarts", "ready_file", "interface")


def add_options(verb: VerbParser) -> None:
    forms = verb.add_forms(
        "FORM",
        "deepseek-triton launch docker r1 --dry-run",
        "deepseek-triton launch slurm r1x2 --partition gpu --time 7-0 --submit",
        notes="local and docker run at once; mpirun, slurm and kubernetes only print, unless --submit is given.\n"
        "exit codes: 0 done, or stopped in order; 1 failed or refused, or no such ID; 2 wrong command line, or a\n"
        "port is taken; 4 not ready in time; else the code of what ran, 128 + N for signal N. docs/launch.md has more.",
    )
    for form, (summary, examples, groups) in _FORMS.items():
        verb = add_verb(forms, form, summary)
        verb.set_defaults(form=form, submit=form in _RUN_AT_ONCE)
        verb.runs(_start, *(f"deepseek-triton launch {example}" for example in examples), common=_COMMON)
        verb.usage, verb.rest = "%(prog)s DIR [options] [-- ARGS...]", "server_args"
        verb.add_argument("folder", metavar="DIR", help="folder that build wrote; ARGS are for the server")
        option(verb, "--dry-run", _DRY_RUN)
        mode = verb.add_mutually_exclusive_group()
        if form not in (*_RUN_AT_ONCE, "ssh-setup"):
            option(mode, "--submit", "run or submit it, instead of printing it")
        if form == "kubernetes":
            option(mode, "--output DIR", "write each object to a file in DIR, instead of printing all", path)
        for title, table in groups.items():
            _add_group(verb, title, table)
    verb = add_verb(forms, "recipe", "print a script that builds TensorRT-LLM from source, as an image or a wheel")
    verb.set_defaults(form="recipe", submit=False, environment=[])
    verb.runs(_start, "deepseek-triton launch recipe image r1", "deepseek-triton launch recipe wheel r1")
    option(verb, "--dry-run", _DRY_RUN)
    verb.add_argument("kind", choices=("image", "wheel"), help="what to build")
    verb.add_argument("folder", metavar="DIR", help="folder that build wrote")
    verb = add_verb(forms, "stop", "stop what you have started on this machine with local, mpirun or serve")
    verb.runs(_stop, "deepseek-triton launch stop r1", "deepseek-triton launch stop --all --now")
    verb.add_argument("targets", nargs="*", type=words, metavar="ID|DIR", help="from launch list, or a folder")
    option(verb, "--all", "stop everything but containers")
    option(verb, "--now", "don't wait for open requests")
    verb = add_verb(forms, "list", "list what you have started on this machine with local, docker, mpirun or serve")
    verb.runs(_list, "deepseek-triton launch list", "deepseek-triton launch list --json")
    add_json(verb, "docs/launch.md")


def _add_group(verb: VerbParser, title: str, table: str) -> None:
    about = "Variables of start.sh, if set, are the defaults: HTTP_PORT, EXIT_TIMEOUT and so on."
    group = verb.add_argument_group(title, about if title == "server" else None)
    either = group.add_mutually_exclusive_group()
    for line in filter(None, map(str.strip, table.splitlines())):
        name, _, help_text = line.partition("  ")
        flag = name.split()[0]
        where = either if flag in ("--hosts", "--host-file") else group
        option(where, name, help_text, _TYPES.get(flag, words), **_SETTINGS.get(flag, {}))


def _matching(pattern: str, expected: str) -> Callable[[str], Any]:
    """Return the type of values that fit `pattern`: a value is the text, or the pattern's groups."""

    def parse(text: str) -> Any:
        if match := re.fullmatch(pattern, text, re.ASCII | re.DOTALL):
            return match.groups() or text
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")

    return parse


# Docker would take a dash at the beginning for an option. No kind of blank is in a name, and `build` alone takes a tag.
_image = _matching(
    r"(?u:(?!\d\d\.\d\d(?:-|$))[^\s-]\S*)",
    "an image's name without blanks, such as nvcr.io/nvidia/tritonserver:YY.MM-trtllm-python-py3",
)
_resource = _matching(r"([^=]+)=(0*[1-9]\d*)", "NAME=N, as rdma/hca=8")
_time_limit = _matching(
    r"\d+(?::\d\d){0,2}|\d+-\d+(?::\d\d){0,2}|UNLIMITED|INFINITE",
    "a time limit of Slurm's, such as 90 (minutes), 12:00:00 or 7-0 (days-hours)",
)
_assignment = _matching(r"([A-Za-z_]\w*)=(.*)", "NAME=VALUE")


def _address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an IP address of the machine, got {text!r}") from None


def _variable(text: str) -> tuple[str, str]:
    name, value = _assignment(text)
    if name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):  # two names of the same
        raise argparse.ArgumentTypeError(
            f"{name}: everybody can read a command line: export HF_TOKEN, and it is handed on by its name (pods need "
            "none: they download nothing)"
        )
    if name == "HF_HUB_CACHE":
        raise argparse.ArgumentTypeError(f"{name}: export it, and its folder is mounted too (pods: --claim)")
    own = {variable: option for option, (variable, _) in START_VARIABLES.items()} | {"DRY_RUN": "dry_run"}
    if name in own:
        raise argparse.ArgumentTypeError(f"{name}: say it with --{own[name].replace('_', '-')}")
    return name, value


# Option -> type of its value; of the others it is any text that is not blank.
_TYPES: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("--http-port", "--grpc-port", "--metrics-port", "--ssh-port"), port),
    **dict.fromkeys(("--replicas", "--max-replicas", "--target", "--gateway-replicas"), positive),
    **dict.fromkeys(("--context-servers", "--generation-servers"), positive),
    **dict.fromkeys(("--image", "--gateway-image", "--picker-image"), _image),
    **dict.fromkeys(("--measured", "--cache-dir", "--ready-file", "--host-file"), path),
    **dict.fromkeys(("--ready-within", "--max-restarts"), count_or_seconds),
    **dict.fromkeys(("--rate", "--shm-size"), size),
    **dict.fromkeys(("--hosts", "--ssh-args", "--sbatch"), str),
    "--exit-timeout": exit_timeout,
    "--time": _time_limit,
    "--interface": _matching(r"(?u:\S+)", "a network interface's name without blanks, such as eth0"),
    "--address": _address,
    "--env": _variable,
    "--node-selector": _matching("([^=]+)=(.*)", "LABEL=VALUE"),
    "--route-parent": _matching("(?:([^/]+)/)?([^/]+)", "NAME or NAMESPACE/NAME of a Gateway"),
    "--rdma": lambda text: (_resource(text)[0], int(_resource(text)[1])),
}
_SETTINGS: dict[str, dict[str, Any]] = {
    "--job-name": {"dest": "name"},
    "--no-container": {"dest": "container", "action": "store_false"},
    "--no-requeue": {"dest": "requeue", "action": "store_false"},
    "--sbatch": {"action": "append"},
    "--node-selector": {"action": "append"},
    "--env": {"dest": "environment", "action": "append", "default": []},
    "--routing": {"choices": ("gateway", "epp", "envoy")},
    "--autoscale": {"choices": ("hpa", "keda")},
}


def _start(args: argparse.Namespace) -> int:
    """Call it in the main thread: what is run may replace this process.

    :raises ToolError: with all that is wrong.
    """
    from deepseek_triton_tools.launching.launch_forms import LAUNCH_FORMS, PAIR_FORMS, PRINTED_FORMS
    from deepseek_triton_tools.launching.launch_settings import LaunchedPair, is_pair, pair_of
    from deepseek_triton_tools.repository.checkpoint_files import first_faults
    from deepseek_triton_tools.repository.launch_facts import LaunchFacts, facts_of

    launched: LaunchFacts | LaunchedPair
    if args.form in PAIR_FORMS and is_pair(args.folder):
        options, form = _options(args), PAIR_FORMS[args.form]
        launched = pair_of(args.folder, options)
    else:
        form = {**LAUNCH_FORMS, **PRINTED_FORMS}[f"recipe {args.kind}" if args.form == "recipe" else args.form]
        launched = facts_of(args.folder, without_triton=args.form == "docker")
        if launched.serve_port is not None:
            _do_without_triton(args, launched.serve_port)
        options = _options(args, launched.ranks_per_node)
        if options.context_servers or options.generation_servers:
            _refuse([f"--context-servers and --generation-servers are for a pair, and {args.folder} is one repository"])
    facts = launched.context.facts if isinstance(launched, LaunchedPair) else launched
    ports = [str(port) for port in (options.http_port, options.grpc_port, options.metrics_port)]
    is_shared = facts.has_triton and len(set(ports)) < len(ports)
    same = [f"HTTP, gRPC and metrics need a port each, got {', '.join(ports)}"] if is_shared else []
    _refuse([*same, *form.refusals(launched, options)])
    unmet, runs = list(form.unmet_requirements(launched, options)), args.submit and not args.dry_run
    if runs and form.program and shutil.which(form.program) is None:
        unmet = [f"{form.program} is not on PATH: run it where it is, or see with --dry-run what would run"]
    faults = first_faults(facts.serving.folders if facts.serving else ())
    see = f"see deepseek-triton check {shlex.quote(args.folder)}"
    incomplete = {f"{fault}; {see}": is_damaged for fault, is_damaged in faults}
    if runs:  # elsewhere, where a scheduler starts it, the files may be others
        damaged = [] if form.command else filter(incomplete.get, incomplete)
        _refuse([*unmet, *damaged], InstallationError)
    text = form.render(launched, options)
    if odd := [line for line in text.splitlines() if any("\udc80" <= character <= "\udcff" for character in line)]:
        # Printed, it would be another path.
        raise ToolError(f"expected paths and values in UTF-8, got {printable(odd[-1].strip())}", exit_code=2)
    for line in (*_left_out(args), *form.warnings(launched, options), *unmet, *incomplete):
        complain(f"note: {line}")
    if (output := getattr(args, "output", None)) and not args.dry_run:
        from deepseek_triton_tools.launching.kubernetes_yaml import write_documents

        text = "".join(f"wrote {output / name}\n" for name in write_documents(text, output))
        text += f"apply them: {shlex.join(['kubectl', 'apply', '--server-side', '--filename', str(output)])}\n"
    if not runs:
        with to_reader():
            print(text, end="")
        return 0
    if not form.command:
        _become(["bash", "-c", text, "launch"])
    sys.stdout.flush()
    # Its output is ours: sbatch prints the job's number, kubectl what it has made.
    code = subprocess.run(form.command, input=text, encoding="utf-8").returncode
    return 128 - code if code < 0 else code


def _do_without_triton(args: argparse.Namespace, port: int) -> None:
    """Take away the options of Triton and its supervisor, and give the port its default.

    Raises ToolError when one of them is set.
    """
    wrong = [f"--{name.replace('_', '-')}" for name in _OF_TRITON if vars(args).pop(name) is not None]
    _refuse([f"{', '.join(wrong)}: only for Triton and its supervisor, and serve.sh has neither"] if wrong else [])
    take_start_variables(args, ("http_port", "address"))
    args.http_port = args.http_port or port


def _options(args: argparse.Namespace, ranks_per_node: int = 1) -> LaunchOptions:
    """Raises ToolError when a host file or a variable of start.sh is wrong."""
    from deepseek_triton_tools.launching import mpirun
    from deepseek_triton_tools.launching.launch_settings import LaunchOptions

    # --address is for all three; these have no option of their own.
    if hasattr(args, "grpc_port") and getattr(args, "address", "") is None:
        others = [(name, os.environ[name]) for name in ("GRPC_ADDRESS", "METRICS_ADDRESS") if os.environ.get(name)]
        args.environment = [*others, *args.environment]
    args.environment = [*(_engine_variables(args)[0] | dict(args.environment)).items()]
    take_start_variables(args)
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in vars(args).items()
    }
    if "hosts" in given:
        from_file = args.host_file and mpirun.read_host_file(args.host_file, ranks_per_node)
        given["hosts"] = from_file or tuple((args.hosts or "").replace(",", " ").split())
    names = [field.name for field in dataclasses.fields(LaunchOptions)]
    return LaunchOptions(**{name: given[name] for name in names if given.get(name) is not None})


def _engine_variables(args: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
    """Return the variables that are set here for the engine, and the names of those that the form leaves out."""
    from deepseek_triton_tools.launching.containers import engine_variables

    in_container = hasattr(args, "image") and getattr(args, "container", True)
    return engine_variables(os.environ, in_container=in_container)


def _left_out(args: argparse.Namespace) -> list[str]:
    return [
        f"{name} is left out, because {printable(os.environ[name])} is a path of this machine and not of the "
        f"container: --env {name}=PATH sets it there"
        for name in _engine_variables(args)[1]
        if name not in dict(args.environment)
    ]


def _refuse(refusals: Iterable[str], error: type[ToolError] = ToolError) -> None:
    """Raises ToolError with all of them, if there are any."""
    if wrong := list(dict.fromkeys(refusals)):
        raise error("; ".join(wrong), exit_code=1 if error is InstallationError else 2)


def _become(command: list[str]) -> NoReturn:
    """Raises ToolError when it can't be run."""
    sys.stdout.flush()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise ToolError(f"{command[0]} can't be run: {error.strerror}", exit_code=126) from error


def _stop(args: argparse.Namespace) -> NoReturn:
    """Raises ToolError when it isn't clear what to stop."""
    if bool(args.targets) == args.all:
        raise ToolError(
            "launch stop takes what to stop: the ID or folder of launches (launch list tells them), or --all",
            exit_code=2,
        )
    # A folder may be gone.
    folders = [name for name in args.targets if os.path.isdir(name) or not re.fullmatch("[0-9a-f]{8}", name)]
    ids = [target for target in args.targets if target not in folders]
    held = []
    for name, supervisor in (_containers() if args.targets else {}).items():
        home = Path(supervisor).parent.parent.parent.resolve()  # a repository is mounted at its path here
        inside = [row["id"] for row in json.loads(_listed(name, supervisor, "--json") or "[]")] if ids else []
        targets = [each for each in args.targets if each in inside or Path(each).resolve() == home]
        held += [f"{each}: docker stop {name}" for each in targets]
    if held:
        raise ToolError(f"docker ends what runs in a container, and nothing was stopped: {'; '.join(held)}")
    options = [f"--{name}" for name in ("all", "now") if getattr(args, name)]
    named = [word for folder in folders for word in ("--repository", str(Path(folder).absolute()))]
    _become([sys.executable, _supervisor(), "stop", *named, *ids, *options])


def _containers() -> dict[str, str]:
    """Return the names of the containers that run here, each with its supervisor's path; without Triton it has none."""
    from deepseek_triton_tools.launching.containers import LABEL

    ps = ["docker", "ps", "--filter", f"label={LABEL}", "--format", f'{{{{.Names}}}}\t{{{{.Label "{LABEL}"}}}}']
    answer = ""
    try:
        if shutil.which("docker") is not None:
            answer = subprocess.run(ps, capture_output=True, encoding="utf-8", timeout=_DOCKER_S).stdout
    except subprocess.TimeoutExpired:
        complain(f"note: docker does not answer within {_DOCKER_S} s: its containers are left out")
    return dict(line.split("\t", 1) for line in answer.splitlines() if line.partition("\t")[2])


def _list(args: argparse.Namespace) -> int:
    """Print what runs here, and what each container's own supervisor knows."""
    options, rows = ["--json"] if args.json else [], list[Any]()
    if not (containers := _containers()):
        _become([sys.executable, _supervisor(), "list", *options])
    for name, supervisor in {"": _supervisor(), **containers}.items():
        said = _listed(name, supervisor, *options)
        if args.json:
            rows += [row | {"container": name or None} for row in json.loads(said or "[]")]
        elif not said.startswith("nothing"):
            rows += [f"{line}  {name}".rstrip() for line in said.splitlines()]
    with to_reader():
        print(json.dumps(rows, indent=2) if args.json else "\n".join(rows) or "nothing runs")
    return 0


def _listed(container: str, supervisor: str, *options: str) -> str:
    """Return what the supervisor in the container lists, or here where that is empty."""
    python = ["docker", "exec", container, "python3"] if container else [sys.executable]
    return subprocess.run([*python, supervisor, "list", *options], stdout=subprocess.PIPE, encoding="utf-8").stdout


def _supervisor() -> str:
    from deepseek_triton_build import version_dir
    from deepseek_triton_tools.repository.launch_facts import SUPERVISOR

    return str(version_dir() / SUPERVISOR)
