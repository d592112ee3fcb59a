"""The command line of `launch` as LaunchOptions, and which of its options belong to what."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from deepseek_triton_build.text import plain
from deepseek_triton_tools.cli.parsing import MOST_DIGITS
from deepseek_triton_tools.launching import mpirun
from deepseek_triton_tools.launching.kubernetes_settings import KubernetesOptions
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.repository.launch_facts import LaunchFacts
from deepseek_triton_tools.tool_errors import InstallationError, ToolError

_CONTAINER = frozenset({"image", "name", "cache_dir"})
_DOCKER = frozenset({"gpus", "shm_size", "ipc_host", "network", "restart", "detach"})
_MPIRUN = frozenset({"hosts", "host_file", "ssh_port", "ssh_args", "ssh_setup"})
_SLURM = frozenset(
    {
        *("partition", "account", "time", "log", "slurm_mpi", "no_container", "no_requeue", "python", "sbatch"),
        "gpus",
    }
)
_ADDRESS = frozenset({"address"})
"""Pods are asked at addresses of their own."""
_KUBERNETES = frozenset(
    {
        *("namespace", "rate", "replicas", "max_replicas", "claim", "pull_secret", "shm_size", "ssh_port"),
        *(field.name for field in dataclasses.fields(KubernetesOptions)),
    }
)
_SERVER = frozenset(
    {
        *("http_port", "grpc_port", "metrics_port", "exit_timeout", "ready_within", "max_restarts", "ready_file"),
        *("interface", "env", "server_args", "dry_run", "submit"),
    }
)
_SETUP = _CONTAINER | {"gpus", "shm_size", "ipc_host"}
"""Of the containers that --ssh-setup starts."""

FORM_OPTIONS: Mapping[str, frozenset[str]] = {
    "local": _ADDRESS,
    "docker": _ADDRESS | _CONTAINER | _DOCKER,
    "mpirun": _ADDRESS | _MPIRUN,
    "slurm": _ADDRESS | _CONTAINER | _SLURM,
    "kubernetes": _CONTAINER | _KUBERNETES,
}
"""Besides the server's."""
OTHERS: Mapping[str, frozenset[str]] = {
    "stop": frozenset({"all", "now"}),
    "list": frozenset({"json"}),
    "recipe": frozenset({"recipe"}),
}

_NUMBERS: dict[str, tuple[str, range]] = {
    "http_port": ("HTTP_PORT", range(1, 65536)),
    "grpc_port": ("GRPC_PORT", range(1, 65536)),
    "metrics_port": ("METRICS_PORT", range(1, 65536)),
    "exit_timeout": ("EXIT_TIMEOUT", range(10**6)),
    "ready_within": ("READY_WITHIN", range(10**9)),
    "max_restarts": ("MAX_RESTARTS", range(10**9)),
    "ssh_port": ("SSH_PORT", range(1, 65536)),
}
"""start.sh's variables, which are an option's default where they are set: option -> variable, and what it may be."""
_TEXTS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "address": ("HTTP_ADDRESS", str),
    "ready_file": ("READY_FILE", Path),
    "interface": ("INTERFACE", str),
    "hosts": ("HOSTS", str),
    "ssh_args": ("SSH_ARGS", str),
}
"""Those that are no numbers, and what an option makes of them."""
_OTHER_ADDRESSES = ("GRPC_ADDRESS", "METRICS_ADDRESS")
"""They have no option: it is --address's for all."""


def refuse(problems: Iterable[str], error: type[ToolError] = ToolError) -> None:
    """:raises ToolError: with all of them, if there are any."""
    if wrong := list(dict.fromkeys(problems)):
        raise error("; ".join(wrong), exit_code=1 if error is InstallationError else 2)


def wrong_options(args: argparse.Namespace) -> Iterator[str]:
    """What can't go together on the command line."""
    if not args.recipe and not args.form:
        yield f"name a form: --with {', '.join(FORM_OPTIONS)}"
        return
    for one, other in (("recipe", "form"), ("dry_run", "submit"), ("hosts", "host_file"), ("ssh_setup", "submit")):
        if getattr(args, one) and getattr(args, other):
            yield f"expected {_option(one)} or {_option(other)}, got both"
    if args.names:
        yield f"expected one folder, got {', '.join(map(plain, (args.what, *args.names)))}"
    yield from _own_variables(args)
    yield from _too_large(args)
    takes = _taken(args)
    yield from (not_for(name, args.form or "--recipe") for name in given(args) if name not in takes)


def _taken(args: argparse.Namespace) -> frozenset[str]:
    """The options of what is asked for."""
    takes = OTHERS["recipe"] if args.recipe else _SERVER | FORM_OPTIONS[args.form]
    return takes | (_SETUP if args.ssh_setup else frozenset())


def _own_variables(args: argparse.Namespace) -> Iterator[str]:
    own = {variable: name for name, (variable, _) in (_NUMBERS | _TEXTS).items()} | {"DRY_RUN": "dry_run"}
    yield from (f"--env {name}: say it with {_option(own[name])}" for name, _ in args.env if name in own)
    if "HF_TOKEN" in dict(args.env):
        why = "everybody can read a command line: export it, and it is handed on by its name"
        if args.form == "kubernetes":
            why = "everybody who sees the pods can read it: leave it out, for they download nothing"
        yield f"--env HF_TOKEN: {why}"


def _too_large(args: argparse.Namespace) -> Iterator[str]:
    for name, (_, allowed) in _NUMBERS.items():
        value = getattr(args, name)
        if value is not None and value not in allowed:
            yield f"{_option(name)}: {_expected(allowed)}, got {plain(str(value))}"


def _expected(allowed: range) -> str:
    return f"expected a number from {allowed[0]} to {allowed[-1]}"


def same_ports(options: LaunchOptions) -> Iterator[str]:
    ports = (options.http_port, options.grpc_port, options.metrics_port)
    if len(set(ports)) < len(ports):
        yield f"HTTP, gRPC and metrics need a port each, got {', '.join(map(str, ports))}"


def given(args: argparse.Namespace) -> Iterator[str]:
    known = _SERVER.union(*FORM_OPTIONS.values(), *OTHERS.values())
    return (name for name in sorted(known) if getattr(args, name) not in (None, False, []))


def not_for(name: str, what: str) -> str:
    """That an option has no place with a form or a verb, and where it has one."""
    users = [form for form, options in FORM_OPTIONS.items() if name in options]
    users += [f"launch {verb}" for verb in ("stop", "list") if name in OTHERS[verb]]
    return f"{_option(name)} is not for {what}" + (f" but for {', '.join(users)}" if users else "")


def _option(name: str) -> str:
    if name == "server_args":
        return "ARGS after --"
    return "--with" if name == "form" else f"--{name.replace('_', '-')}"


def options_of(args: argparse.Namespace, facts: LaunchFacts) -> LaunchOptions:
    """:raises ToolError: when a host file or a variable of start.sh is wrong."""
    said = _of_same_name(args, LaunchOptions) | _variables(args)
    hosts = mpirun.parse_hosts(said.get("hosts", ""))
    if args.host_file:
        hosts = mpirun.read_host_file(args.host_file, facts.ranks_per_node)
    return LaunchOptions(
        **said
        | {
            "hosts": hosts,
            "environment": (*_other_addresses(args), *args.env),
            "server_args": tuple(args.server_args),
            "sbatch": tuple(args.sbatch),
            "container": not args.no_container,
            "requeue": not args.no_requeue,
            "kubernetes": KubernetesOptions(
                **_of_same_name(args, KubernetesOptions) | {"node_selector": tuple(args.node_selector)}
            ),
        }
    )


def _of_same_name(args: argparse.Namespace, settings: type[LaunchOptions] | type[KubernetesOptions]) -> dict[str, Any]:
    """What was given of the fields that an option has the name of."""
    values = {field.name: getattr(args, field.name, None) for field in dataclasses.fields(settings)}
    return {name: value for name, value in values.items() if value is not None}


def _variables(args: argparse.Namespace) -> dict[str, Any]:
    """What start.sh's variables say and no option does.

    :raises ToolError: for those that are wrong.
    """
    said: dict[str, Any] = {}
    wrong = []
    for name in _unsaid(args, _NUMBERS):
        variable, allowed = _NUMBERS[name]
        text = os.environ[variable]
        is_number = text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS
        if is_number and int(text) in allowed:
            said[name] = int(text)
        else:
            wrong.append(f"{variable}: {_expected(allowed)}, got {plain(text)}")
    refuse(wrong)
    for name in _unsaid(args, _TEXTS):
        variable, made = _TEXTS[name]
        said[name] = made(os.environ[variable])
    return said


def _unsaid(args: argparse.Namespace, variables: Mapping[str, tuple[str, Any]]) -> list[str]:
    """Options that this form takes, that are not given, and whose variable is set."""
    takes = [name for name in variables if name in _taken(args) and getattr(args, name) is None]
    return [name for name in takes if os.environ.get(variables[name][0])]


def _other_addresses(args: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    if args.address is not None or "address" not in _taken(args):
        return ()
    return tuple((name, os.environ[name]) for name in _OTHER_ADDRESSES if os.environ.get(name))
