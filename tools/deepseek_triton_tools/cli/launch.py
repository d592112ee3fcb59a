"""`deepseek-triton launch`: a generated repository, started in one of five forms, or the text that would start it.

start.sh says what runs, and the supervisor in the repository watches it; this sets their surroundings. Every form
renders a text that runs as it is, and running a form is running that text: what --dry-run prints is what would happen.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from deepseek_triton_build.data.model_source import version_dir
from deepseek_triton_build.text import plain
from deepseek_triton_tools.cli.launch_options import (
    OTHERS,
    given,
    not_for,
    options_of,
    refuse,
    same_ports,
    wrong_options,
)
from deepseek_triton_tools.launching import docker, local, mpirun, recipes, slurm, ssh_setup
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.repository.launch_facts import SUPERVISOR, LaunchFacts, facts_of
from deepseek_triton_tools.terminal.output_streams import complain, to_reader
from deepseek_triton_tools.tool_errors import InstallationError, ToolError

_ID = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True, kw_only=True)
class Form:
    """How one form differs from the others."""

    render: Callable[[LaunchFacts, LaunchOptions], str]
    problems: Callable[[LaunchFacts, LaunchOptions], Iterable[str]]
    """Why it can't be rendered."""
    lacking: Callable[[LaunchFacts, LaunchOptions], Iterable[str]]
    """Why what is rendered can't be run here."""
    warnings: Callable[[LaunchFacts, LaunchOptions], Iterable[str]]
    runs: bool
    """Without --submit."""
    command: tuple[str, ...]
    """What the text is fed to; empty: it is a script that takes the place of this process."""
    program: str | None
    """What has to be on PATH."""


def _nothing(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    return iter(())


def _kubernetes(facts: LaunchFacts, options: LaunchOptions) -> str:
    from deepseek_triton_tools.launching import kubernetes

    return kubernetes.render(facts, options)


def _kubernetes_problems(facts: LaunchFacts, options: LaunchOptions) -> Iterable[str]:
    from deepseek_triton_tools.launching import kubernetes

    return kubernetes.refusals(facts, options)


def _kubernetes_lacking(facts: LaunchFacts, options: LaunchOptions) -> Iterable[str]:
    from deepseek_triton_tools.launching import kubernetes

    return kubernetes.unmet_requirements(facts, options)


FORMS: Mapping[str, Form] = {
    "local": Form(
        render=local.render,
        problems=local.refusals,
        lacking=local.unmet_requirements,
        warnings=_nothing,
        runs=True,
        command=(),
        program=None,
    ),
    "docker": Form(
        render=docker.render,
        problems=docker.refusals,
        lacking=docker.unmet_requirements,
        warnings=_nothing,
        runs=True,
        command=(),
        program="docker",
    ),
    "mpirun": Form(
        render=mpirun.render,
        problems=mpirun.refusals,
        lacking=mpirun.unmet_requirements,
        warnings=mpirun.warnings,
        runs=False,
        command=(),
        program="mpirun",
    ),
    "slurm": Form(
        render=slurm.render,
        problems=slurm.refusals,
        lacking=_nothing,
        warnings=_nothing,
        runs=False,
        command=("sbatch", "--parsable"),
        program="sbatch",
    ),
    "kubernetes": Form(
        render=_kubernetes,
        problems=_kubernetes_problems,
        lacking=_kubernetes_lacking,
        warnings=_nothing,
        runs=False,
        command=("kubectl", "apply", "--server-side", "--filename", "-"),
        program="kubectl",
    ),
}


def run_launch(args: argparse.Namespace) -> int:
    """Call it in the main thread: what is run may take the place of this process.

    :raises ToolError: for everything that is wrong, in one line.
    """
    if args.what in ("stop", "list"):
        return _supervise(args)
    refuse(wrong_options(args))
    facts = facts_of(args.what)
    if args.recipe:
        options = LaunchOptions()
        refuse(recipes.refusals(facts, options))
        return _print(recipes.render_recipe(args.recipe, facts))
    form = FORMS[args.form]
    options = options_of(args, facts)
    setup = ssh_setup.refusals(facts, options) if args.ssh_setup else ()
    refuse([*same_ports(options), *form.problems(facts, options), *setup])
    runs = (form.runs or args.submit) and not args.dry_run and not args.ssh_setup
    if runs:
        refuse(_missing(form, facts, options), InstallationError)
    # Where --ssh-setup is for, everything is in the containers that it starts.
    lacking = () if runs or args.ssh_setup else form.lacking(facts, options)
    warnings = [*form.warnings(facts, options), *lacking]
    text = ssh_setup.render_setup(facts, options) if args.ssh_setup else form.render(facts, options)
    refuse(_unwritable(text))
    for line in warnings:
        complain(f"note: {line}")
    if not runs:
        return _print(text)
    return _feed(form.command, text) if form.command else _become(["bash", "-c", text, "launch"])


def _print(text: str) -> int:
    with to_reader():
        print(text, end="")
    return 0


def _missing(form: Form, facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    if form.program and shutil.which(form.program) is None:
        yield f"{form.program} is not on PATH: run it where it is, or see with --dry-run what would run"
    else:
        yield from form.lacking(facts, options)


def _unwritable(text: str) -> Iterator[str]:
    """A path may be of any bytes, and would be another one when it is printed."""
    lines = (line.strip() for line in text.splitlines())
    if odd := [line for line in lines if any("\udc80" <= character <= "\udcff" for character in line)]:
        yield f"expected paths and values in UTF-8, got {plain(odd[-1])}"


def _become(command: list[str]) -> NoReturn:
    """:raises ToolError: when it can't be run."""
    sys.stdout.flush()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise ToolError(f"{command[0]} can't be run: {error.strerror}", exit_code=126) from error


def _feed(command: tuple[str, ...], text: str) -> int:
    """Its standard output is ours: sbatch prints the job's number, kubectl what it has made."""
    sys.stdout.flush()
    code = subprocess.run(command, input=text, encoding="utf-8").returncode
    return 128 - code if code < 0 else code


# --- stop, list ---


def _supervise(args: argparse.Namespace) -> NoReturn:
    """:raises ToolError: when the command line is wrong."""
    verb = args.what
    forms = ["form"] if args.form else []
    wrong = [not_for(name, f"launch {verb}") for name in [*forms, *given(args)] if name not in OTHERS[verb]]
    if args.names and verb == "list":
        wrong.append(f"launch list takes no names, got {', '.join(map(plain, args.names))}")
    if verb == "stop" and bool(args.names) == args.all:
        wrong.append("launch stop takes what to stop: the ID or folder of launches (launch list tells them), or --all")
    folders = [target for target in args.names if _is_folder(target)]
    ids = [target for target in args.names if target not in folders]
    wrong += [
        f"{plain(target) or 'an empty text'} is neither a folder here nor an ID of eight hexadecimal digits, as launch "
        "list shows them"
        for target in ids
        if not _ID.fullmatch(target)
    ]
    refuse(wrong)
    words = [word for folder in folders for word in ("--repository", str(Path(folder).absolute()))] + ids
    words += [f"--{name}" for name in ("all", "now", "json") if getattr(args, name)]
    _become([sys.executable, str(version_dir() / SUPERVISOR), verb, *words])


def _is_folder(target: str) -> bool:
    """One that is named by its path may be gone."""
    return os.path.isdir(target) or os.sep in target
