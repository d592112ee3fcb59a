"""`deepseek-triton launch`: a generated repository, started in one of five forms, or the text that would start it.

start.sh says what runs, and the supervisor in the repository watches it; a form sets their surroundings. Every form
renders a text that runs as it is, and running a form is running that text: what --dry-run prints is what would happen.
"""

from __future__ import annotations

import argparse
import dataclasses
import ipaddress
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from deepseek_triton_tools.cli.parsing import (
    VerbParser,
    Verbs,
    add_json,
    add_verb,
    path,
    port,
    positive,
    size,
    words,
)
from deepseek_triton_tools.cli.start_variables import (
    START_VARIABLES,
    count_or_seconds,
    exit_timeout,
    take_start_variables,
)
from deepseek_triton_tools.terminal.output_streams import complain, printable, to_reader
from deepseek_triton_tools.tool_errors import InstallationError, ToolError

if TYPE_CHECKING:
    from deepseek_triton_tools.launching.launch_forms import Launched, LaunchForm
    from deepseek_triton_tools.launching.launch_settings import LaunchOptions
    from deepseek_triton_tools.repository.launch_facts import LaunchFacts


def add_options(verb: VerbParser) -> None:
    verb.form_first = _form_first
    forms = verb.add_forms(
        "FORM",
        "deepseek-triton launch docker r1 --dry-run",
        "deepseek-triton launch slurm r1x2 --partition gpu --time 7-0 --submit",
        notes="local and docker run at once; mpirun, slurm and kubernetes only print, unless --submit is given.\n"
        "exit codes: 0 done, or stopped in order; 1 failed or refused; 2 wrong command line, or a port is taken;\n"
        "4 not ready in time; else the code of what ran, 128 + N for signal N. docs/launch.md has more.",
    )
    _add_local(forms)
    _add_docker(forms)
    _add_mpirun(forms)
    _add_slurm(forms)
    _add_kubernetes(forms)
    _add_ssh_setup(forms)
    _add_recipe(forms)
    _add_stop(forms)
    _add_list(forms)


def _form_first(given: list[str]) -> str:
    """Say how `launch DIR --with FORM` is written now."""
    old = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    old.add_argument("--with", dest="form", nargs="?")
    old.add_argument("--recipe", nargs="?")
    old.add_argument("--ssh-setup", action="store_true")
    found, others = old.parse_known_args(given)
    form = "ssh-setup" if found.ssh_setup else f"recipe {found.recipe}" if found.recipe else found.form
    if form is None:
        first = repr(given[0])
        return f"expected a form, got {first}; as in deepseek-triton launch docker DIR; launch --help lists the forms"
    return f"the form comes first: deepseek-triton launch {form} {shlex.join(others)}"


def _add_local(forms: Verbs) -> None:
    verb = add_verb(forms, "local", "run it on this machine, where tritonserver and the engine are installed")
    verb.runs(
        _start,
        "deepseek-triton launch local r1 -- --log-verbose 1",
        "deepseek-triton launch local r1 --http-port 9000 --address 127.0.0.1",
    )
    _add_started(verb, "local", runs=True)
    _add_address(_add_server(verb))


def _add_docker(forms: Verbs) -> None:
    verb = add_verb(forms, "docker", "run it in a docker container")
    verb.runs(
        _start, "deepseek-triton launch docker r1 --dry-run", "deepseek-triton launch docker r1 --detach --gpus 0,1"
    )
    _add_started(verb, "docker", runs=True)
    _add_address(_add_server(verb))
    container = _add_container(verb)
    _add_docker_run(container)
    help_text = "docker's network: host (default), or another, where the three ports are published"
    container.add_argument("--network", type=words, metavar="NAME", help=help_text)
    help_text = "docker's restart policy, such as unless-stopped (default: none, remove the container)"
    container.add_argument("--restart", type=words, metavar="POLICY", help=help_text)
    container.add_argument("--detach", action="store_true", help="run it in the background")


def _add_mpirun(forms: Verbs) -> None:
    verb = add_verb(forms, "mpirun", "start it on several nodes by ssh, from the first of them")
    verb.runs(
        _start,
        "deepseek-triton launch mpirun r1x2 --hosts node1,node2 --ssh-port 2233 --interface eth0",
        "deepseek-triton launch mpirun r1x2 --host-file hosts --submit",
    )
    _add_started(verb, "mpirun")
    _add_hosts(verb)
    _add_address(_add_server(verb))


def _add_slurm(forms: Verbs) -> None:
    verb = add_verb(forms, "slurm", "write a batch script for Slurm, or submit it")
    verb.runs(
        _start,
        "deepseek-triton launch slurm r1x2 --partition gpu --time 7-0 --submit",
        "deepseek-triton launch slurm r1 --no-container > r1.sbatch",
    )
    _add_started(verb, "slurm")
    job = verb.add_argument_group("job")
    job.add_argument("--partition", type=words, metavar="NAME", help="default: the cluster's")
    job.add_argument("--account", type=words, metavar="NAME", help="default: the cluster's")
    job.add_argument("--time", type=words, metavar="LIMIT", help="longest run, 7-0 is 7 days (default: partition's)")
    job.add_argument("--job-name", dest="name", type=words, metavar="NAME", help="the same as --name")
    job.add_argument("--log", type=words, metavar="FILE", help="log of all ranks (default: NAME-%%j.log)")
    job.add_argument("--slurm-mpi", type=words, metavar="TYPE", help="value of srun's --mpi (default: pmix)")
    help_text = "use no container: the nodes have tritonserver and the engine"
    job.add_argument("--no-container", dest="container", action="store_false", help=help_text)
    help_text = "don't start the job again after a node has failed"
    job.add_argument("--no-requeue", dest="requeue", action="store_false", help=help_text)
    help_text = "Python 3.10 or newer of the first node (default: python3)"
    job.add_argument("--python", type=words, metavar="PROGRAM", help=help_text)
    help_text = "another option of sbatch, such as --sbatch=--qos=high; may be repeated"
    job.add_argument("--sbatch", action="append", metavar="OPTION", help=help_text)
    _add_pair(verb)
    _add_gpus(_add_container(verb))
    _add_address(_add_server(verb))


def _add_kubernetes(forms: Verbs) -> None:
    verb = add_verb(forms, "kubernetes", "write manifests for Kubernetes, or apply them")
    verb.runs(
        _start,
        "deepseek-triton launch kubernetes r1 --claim models --rate 2GB > r1.yaml",
        "deepseek-triton launch kubernetes r1 --checkpoint-on-nodes --max-replicas 4 --submit",
    )
    _add_started(verb, "kubernetes")
    storage = verb.add_argument_group("storage")
    storage.add_argument("--claim", type=words, metavar="NAME", help="PersistentVolumeClaim with the checkpoint")
    storage.add_argument("--checkpoint-on-nodes", action="store_true", help="every node has it at the path it has here")
    storage.add_argument("--rate", type=size, metavar="SIZE", help="bytes read per second, as 2GB (default: 200MB)")
    help_text = "take the rate from FILE, the output of `warm files --json`"
    storage.add_argument("--measured", type=path, metavar="FILE", help=help_text)
    help_text = "PersistentVolumeClaim with the repository (default: a ConfigMap)"
    storage.add_argument("--repository-claim", type=words, metavar="NAME", help=help_text)
    storage.add_argument("--cache-claim", type=words, metavar="NAME", help="claim for compiled kernels")
    pods = verb.add_argument_group("pods")
    pods.add_argument("--namespace", type=words, metavar="NAME", help="default: kubectl's")
    pods.add_argument("--replicas", type=positive, metavar="N", help="copies of the server (default: 1)")
    pods.add_argument("--max-replicas", type=positive, metavar="N", help="scale with the load up to N (default: don't)")
    pods.add_argument("--target", type=positive, metavar="N", help="with --max-replicas: requests at once per copy")
    pods.add_argument("--host-network", action="store_true", help="put the pods into the nodes' own network")
    pods.add_argument("--rdma", type=_resource, metavar="NAME=N", help="RDMA cards of each pod, such as rdma/hca=8")
    pods.add_argument("--ssh-port", type=port, metavar="PORT", help="port of sshd in the pods (default: 2222)")
    pods.add_argument("--scrape", action="store_true", help="annotate the pods, so that Prometheus reads their metrics")
    help_text = "run only on nodes with this label; may be repeated"
    pods.add_argument("--node-selector", action="append", type=_label, metavar="LABEL=VALUE", help=help_text)
    pods.add_argument("--pull-secret", type=words, metavar="NAME", help="secret for the image's registry")
    gateway = verb.add_argument_group("gateway")
    help_text = "put OpenAI's API in front of the servers, with an image that has deepseek-triton[gateway]"
    gateway.add_argument("--gateway-image", type=_image, metavar="IMAGE", help=help_text)
    gateway.add_argument("--gateway-replicas", type=positive, metavar="N", help="copies of it (default: 2)")
    help_text = "secret whose entry keys is its file of API keys (default: anyone may ask)"
    gateway.add_argument("--gateway-keys", type=words, metavar="NAME", help=help_text)
    routing = verb.add_argument_group("routing and scaling")
    help_text = "who chooses a request's server: deepseek-triton's gateway, the Gateway API's endpoint picker, or Envoy"
    routing.add_argument("--routing", choices=("gateway", "epp", "envoy"), help=help_text)
    help_text = "Gateway object whose requests are for these servers, as NAME or NAMESPACE/NAME"
    routing.add_argument("--route-parent", type=_parent, metavar="GATEWAY", help=help_text)
    help_text = "image of the endpoint picker, for --routing epp"
    routing.add_argument("--picker-image", type=_image, metavar="IMAGE", help=help_text)
    help_text = "what follows the load up to --max-replicas: hpa needs a metrics adapter, keda KEDA (default: hpa)"
    routing.add_argument("--autoscale", choices=("hpa", "keda"), help=help_text)
    _add_pair(verb)
    _add_shm_size(_add_container(verb))
    _add_server(verb)


def _add_pair(verb: VerbParser) -> None:
    pair = verb.add_argument_group("pair of context and generation servers")
    for role in ("context", "generation"):
        help_text = f"{role} servers of a pair's folder (default: as it was built, else 1)"
        pair.add_argument(f"--{role}-servers", type=positive, metavar="N", help=help_text)


def _add_ssh_setup(forms: Verbs) -> None:
    verb = add_verb(forms, "ssh-setup", "print a script that prepares mpirun's nodes: ssh keys, sshd on each, a test")
    verb.runs(
        _print_ssh_setup,
        "deepseek-triton launch ssh-setup r1x2 --hosts node1,node2 > setup.sh",
        "deepseek-triton launch ssh-setup r1x2 --host-file hosts --interface eth0 > setup.sh",
    )
    _add_folder(verb)
    _add_hosts(verb)
    _add_docker_run(_add_container(verb))
    _add_address(_add_server(verb))


def _add_recipe(forms: Verbs) -> None:
    verb = add_verb(forms, "recipe", "print a script that builds TensorRT-LLM from source, as an image or a wheel")
    verb.runs(_print_recipe, "deepseek-triton launch recipe image r1", "deepseek-triton launch recipe wheel r1")
    verb.add_argument("kind", choices=("image", "wheel"), help="what to build")
    verb.add_argument("folder", metavar="DIR", help="folder that build wrote")


def _add_stop(forms: Verbs) -> None:
    verb = add_verb(forms, "stop", "stop what you have started on this machine with local or mpirun")
    verb.runs(_stop, "deepseek-triton launch stop r1", "deepseek-triton launch stop --all --now")
    verb.add_argument("targets", nargs="*", type=words, metavar="ID|DIR", help="from launch list, or a folder")
    verb.add_argument("--all", action="store_true", help="stop everything that launch list shows")
    verb.add_argument("--now", action="store_true", help="don't wait for open requests")


def _add_list(forms: Verbs) -> None:
    verb = add_verb(forms, "list", "list what you have started on this machine with local or mpirun")
    verb.runs(_list, "deepseek-triton launch list", "deepseek-triton launch list --json")
    add_json(verb, "docs/launch.md")


def _add_started(verb: VerbParser, form: str, *, runs: bool = False) -> None:
    """Add the folder, and the options that say whether the form runs or is printed."""
    verb.set_defaults(form=form, submit=runs)
    _add_folder(verb)
    mode = verb.add_mutually_exclusive_group()
    mode.add_argument("--dry-run", action="store_true", help="only print what would run")
    if not runs:
        mode.add_argument("--submit", action="store_true", help="run or submit it, instead of printing it")


def _add_folder(verb: VerbParser) -> None:
    verb.usage, verb.rest = "%(prog)s DIR [options] [-- ARGS...]", "server_args"
    verb.add_argument("folder", metavar="DIR", help="folder that build wrote; ARGS are for tritonserver")


def _add_server(verb: VerbParser) -> argparse._ArgumentGroup:
    server = verb.add_argument_group(
        "server", "Variables of start.sh, if set, are the defaults: HTTP_PORT, EXIT_TIMEOUT and so on."
    )
    for name, default in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        server.add_argument(f"--{name}-port", type=port, metavar="PORT", help=f"{name} port (default: {default})")
    help_text = "seconds for open requests at a stop (default: 30)"
    server.add_argument("--exit-timeout", type=exit_timeout, metavar="S", help=help_text)
    help_text = "seconds until it must be ready, 0: no limit (default: by the checkpoint's size)"
    server.add_argument("--ready-within", type=count_or_seconds, metavar="S", help=help_text)
    help_text = "restarts in a row when a server that was ready fails (default: 3)"
    server.add_argument("--max-restarts", type=count_or_seconds, metavar="N", help=help_text)
    server.add_argument("--ready-file", type=path, metavar="FILE", help="file that exists while the server is ready")
    server.add_argument("--interface", type=words, metavar="NAME", help="network interface between nodes, such as eth0")
    server.add_argument(
        "--env",
        dest="environment",
        action="append",
        default=[],
        type=_variable,
        metavar="NAME=VALUE",
        help="set a variable of the server; may be repeated; it is printed, so not for secrets",
    )
    return server


def _add_address(server: argparse._ArgumentGroup) -> None:
    """Kubernetes has none: its pods are asked at addresses of their own."""
    help_text = "address to listen on; 127.0.0.1: only for this machine (default: 0.0.0.0, for everybody)"
    server.add_argument("--address", type=_address, metavar="IP", help=help_text)


def _add_container(verb: VerbParser) -> argparse._ArgumentGroup:
    group = verb.add_argument_group("container")
    group.add_argument("--image", type=_image, help="image to use instead of the repository's own")
    group.add_argument("--name", type=words, help="name of the container, job or objects (default: by DIR)")
    group.add_argument("--cache-dir", type=path, metavar="DIR", help="compiled kernels (default: ~/.cache; pods: none)")
    return group


def _add_docker_run(container: argparse._ArgumentGroup) -> None:
    _add_gpus(container)
    _add_shm_size(container)
    container.add_argument("--ipc-host", action="store_true", help="use the machine's /dev/shm instead of its own")


def _add_gpus(container: argparse._ArgumentGroup) -> None:
    help_text = "a number or none; docker also takes all, 0,1 or a UUID (default: all in docker, else the plan's)"
    container.add_argument("--gpus", type=words, metavar="WHICH", help=help_text)


def _add_shm_size(container: argparse._ArgumentGroup) -> None:
    help_text = "size of /dev/shm (default: 1 GiB for each rank and 1 GiB more)"
    container.add_argument("--shm-size", type=size, metavar="SIZE", help=help_text)


def _add_hosts(verb: VerbParser) -> None:
    nodes = verb.add_argument_group("nodes")
    which = nodes.add_mutually_exclusive_group()
    which.add_argument("--hosts", metavar="A,B", help="the nodes, this one first")
    which.add_argument("--host-file", type=path, metavar="FILE", help="the same, one a line, or as mpirun's host file")
    nodes.add_argument("--ssh-port", type=port, metavar="PORT", help="port of sshd on every node (default: ssh's own)")
    nodes.add_argument("--ssh-args", metavar="TEXT", help="more arguments of ssh, as in --ssh-args='-i key'")


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
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    if name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):  # two names of the same
        raise argparse.ArgumentTypeError(
            f"{name}: everybody can read a command line: export HF_TOKEN, and it is handed on by its name (pods need "
            "none: they download nothing)"
        )
    own = {variable: option for option, (variable, _) in START_VARIABLES.items()} | {"DRY_RUN": "dry_run"}
    if name in own:
        raise argparse.ArgumentTypeError(f"{name}: say it with --{own[name].replace('_', '-')}")
    return name, value


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if equals and name:
        return name, value
    raise argparse.ArgumentTypeError(f"expected LABEL=VALUE, got {text!r}")


def _parent(text: str) -> tuple[str | None, str]:
    namespace, slash, name = text.rpartition("/")
    if name and bool(slash) == bool(namespace) and "/" not in namespace:
        return namespace or None, name
    raise argparse.ArgumentTypeError(f"expected NAME or NAMESPACE/NAME of a Gateway, got {text!r}")


def _resource(text: str) -> tuple[str, int]:
    name, _, count = text.partition("=")
    if name and count.isdecimal() and int(count):
        return name, int(count)
    raise argparse.ArgumentTypeError(f"expected NAME=N, as rdma/hca=8, got {text!r}")


# --- What runs ---


def _start(args: argparse.Namespace) -> int:
    """Call it in the main thread: what is run may replace this process. Raises ToolError for all that is wrong."""
    from deepseek_triton_tools.launching.launch_forms import LAUNCH_FORMS, PAIR_FORMS
    from deepseek_triton_tools.launching.launched_pair import is_pair, pair_of

    if args.form in PAIR_FORMS and is_pair(args.folder):
        options = _options(args)
        return _launch(args, PAIR_FORMS[args.form], pair_of(args.folder, options), options)
    facts, options = _read(args)
    if options.context_servers or options.generation_servers:
        _refuse([f"--context-servers and --generation-servers are for a pair, and {args.folder} is one repository"])
    return _launch(args, LAUNCH_FORMS[args.form], facts, options)


def _launch(args: argparse.Namespace, form: LaunchForm[Launched], facts: Launched, options: LaunchOptions) -> int:
    _refuse([*_same_ports(options), *form.refusals(facts, options)])
    runs = args.submit and not args.dry_run
    if runs:
        _refuse(_missing(form, facts, options), InstallationError)
    warnings = [*_left_out(args), *form.warnings(facts, options)]
    warnings += () if runs else form.unmet_requirements(facts, options)
    text = form.render(facts, options)
    _check_encoding(text)
    for line in warnings:
        complain(f"note: {line}")
    if not runs:
        return _print(text)
    return _feed(form.command, text) if form.command else _become(["bash", "-c", text, "launch"])


def _print_ssh_setup(args: argparse.Namespace) -> int:
    from deepseek_triton_tools.launching import docker, mpirun, ssh_setup

    facts, options = _read(args)
    _refuse([*_same_ports(options), *mpirun.refusals(facts, options), *docker.invalid_options(facts, options)])
    text = ssh_setup.render_setup(facts, options)
    _check_encoding(text)
    for line in (*_left_out(args), *mpirun.warnings(facts, options)):
        complain(f"note: {line}")
    return _print(text)


def _print_recipe(args: argparse.Namespace) -> int:
    from deepseek_triton_tools.launching import recipes
    from deepseek_triton_tools.repository.launch_facts import facts_of

    facts = facts_of(args.folder)
    _refuse(recipes.refusals(facts))
    return _print(recipes.render_recipe(args.kind, facts))


def _read(args: argparse.Namespace) -> tuple[LaunchFacts, LaunchOptions]:
    """Raises ToolError when the repository, a host file or a variable of start.sh is wrong."""
    from deepseek_triton_tools.repository.launch_facts import facts_of

    facts = facts_of(args.folder)
    return facts, _options(args, facts.ranks_per_node)


def _options(args: argparse.Namespace, ranks_per_node: int = 1) -> LaunchOptions:
    """Raises ToolError when a host file or a variable of start.sh is wrong."""
    from deepseek_triton_tools.launching import mpirun
    from deepseek_triton_tools.launching.launch_settings import LaunchOptions

    if getattr(args, "address", "") is None:  # --address is for all three; these have no option of their own
        others = [(name, os.environ[name]) for name in ("GRPC_ADDRESS", "METRICS_ADDRESS") if os.environ.get(name)]
        args.environment = [*others, *args.environment]
    given_names = [name for name, _ in args.environment]
    kept, _ = _engine_variables(args)
    args.environment = [*((name, value) for name, value in kept.items() if name not in given_names), *args.environment]
    take_start_variables(args)
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in vars(args).items()
    }
    if "hosts" in given:
        from_file = args.host_file and mpirun.read_host_file(args.host_file, ranks_per_node)
        given["hosts"] = from_file or mpirun.parse_hosts(args.hosts or "")
    names = [field.name for field in dataclasses.fields(LaunchOptions)]
    return LaunchOptions(**{name: given[name] for name in names if given.get(name) is not None})


def _engine_variables(args: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
    """Return the variables that are set here for the engine, and the names of those that the form leaves out."""
    from deepseek_triton_tools.launching.containers import engine_variables

    in_container = hasattr(args, "image") and getattr(args, "container", True)
    return engine_variables(os.environ, in_container=in_container)


def _left_out(args: argparse.Namespace) -> Iterator[str]:
    _, names = _engine_variables(args)
    for name in (name for name in names if name not in dict(args.environment)):
        yield (
            f"{name} is left out, because {printable(os.environ[name])} is a path of this machine and not of the "
            f"container: --env {name}=PATH sets it there"
        )


def _refuse(refusals: Iterable[str], error: type[ToolError] = ToolError) -> None:
    """Raises ToolError with all of them, if there are any."""
    if wrong := list(dict.fromkeys(refusals)):
        raise error("; ".join(wrong), exit_code=1 if error is InstallationError else 2)


def _same_ports(options: LaunchOptions) -> Iterator[str]:
    ports = (options.http_port, options.grpc_port, options.metrics_port)
    if len(set(ports)) < len(ports):
        yield f"HTTP, gRPC and metrics need a port each, got {', '.join(map(str, ports))}"


def _missing(form: LaunchForm[Launched], facts: Launched, options: LaunchOptions) -> Iterator[str]:
    if form.program and shutil.which(form.program) is None:
        yield f"{form.program} is not on PATH: run it where it is, or see with --dry-run what would run"
    else:
        yield from form.unmet_requirements(facts, options)


def _check_encoding(text: str) -> None:
    """Raises ToolError when a path in it is not UTF-8: printed, it would be another path."""
    lines = (line.strip() for line in text.splitlines())
    if odd := [line for line in lines if any("\udc80" <= character <= "\udcff" for character in line)]:
        raise ToolError(f"expected paths and values in UTF-8, got {printable(odd[-1])}", exit_code=2)


def _print(text: str) -> int:
    with to_reader():
        print(text, end="")
    return 0


def _become(command: list[str]) -> NoReturn:
    """Raises ToolError when it can't be run."""
    sys.stdout.flush()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise ToolError(f"{command[0]} can't be run: {error.strerror}", exit_code=126) from error


def _feed(command: tuple[str, ...], text: str) -> int:
    """Run `command` on `text`. Its output is ours: sbatch prints the job's number, kubectl what it has made."""
    sys.stdout.flush()
    code = subprocess.run(command, input=text, encoding="utf-8").returncode
    return 128 - code if code < 0 else code


# --- What was started ---

_ID = re.compile(r"[0-9a-f]{8}")


def _stop(args: argparse.Namespace) -> NoReturn:
    """Raises ToolError when it isn't clear what to stop."""
    if bool(args.targets) == args.all:
        raise ToolError(
            "launch stop takes what to stop: the ID or folder of launches (launch list tells them), or --all",
            exit_code=2,
        )
    # A folder that is named by its path may be gone.
    folders = [target for target in args.targets if os.path.isdir(target) or os.sep in target]
    ids = [target for target in args.targets if target not in folders]
    _refuse(
        f"{printable(target)} is neither a folder here nor an ID of eight hexadecimal digits, as launch list shows them"
        for target in ids
        if not _ID.fullmatch(target)
    )
    options = [f"--{name}" for name in ("all", "now") if getattr(args, name)]
    named = [word for folder in folders for word in ("--repository", str(Path(folder).absolute()))]
    _supervise("stop", *named, *ids, *options)


def _list(args: argparse.Namespace) -> NoReturn:
    _supervise("list", *(["--json"] if args.json else []))


def _supervise(*command: str) -> NoReturn:
    """Become the supervisor, which knows what runs."""
    from deepseek_triton_build import version_dir
    from deepseek_triton_tools.repository.launch_facts import SUPERVISOR

    _become([sys.executable, str(version_dir() / SUPERVISOR), *command])
