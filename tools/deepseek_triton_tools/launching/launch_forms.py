"""The forms in which a repository is launched, and how each differs from the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from deepseek_triton_tools.launching import docker, kubernetes, local, mpirun, slurm
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.repository.launch_facts import LaunchFacts

Problems = Callable[[LaunchFacts, LaunchOptions], Iterable[str]]
"""Each problem is one line."""


def _none(facts: LaunchFacts, options: LaunchOptions) -> Iterable[str]:
    return ()


@dataclass(frozen=True, kw_only=True)
class LaunchForm:
    render: Callable[[LaunchFacts, LaunchOptions], str]
    """The text that starts the repository, and runs as it is."""
    problems: Problems
    """Reasons why the text can't be rendered."""
    lacking: Problems = _none
    """Things that this machine lacks to run the text."""
    warnings: Problems = _none
    """Things that would be wrong only if the text were run on this machine."""
    program: str | None = None
    """The program that has to be on PATH to run the text."""
    command: tuple[str, ...] = ()
    """The command that reads the text from its standard input. Empty: the text is a script that takes the place of this
    process."""


LAUNCH_FORMS: Mapping[str, LaunchForm] = {
    "local": LaunchForm(render=local.render, problems=local.problems, lacking=local.lacking),
    "docker": LaunchForm(render=docker.render, problems=docker.problems, lacking=docker.lacking, program="docker"),
    "mpirun": LaunchForm(
        render=mpirun.render,
        problems=mpirun.problems,
        lacking=mpirun.lacking,
        warnings=mpirun.warnings,
        program="mpirun",
    ),
    "slurm": LaunchForm(
        render=slurm.render, problems=slurm.problems, program="sbatch", command=("sbatch", "--parsable")
    ),
    "kubernetes": LaunchForm(
        render=kubernetes.render,
        problems=kubernetes.problems,
        lacking=kubernetes.lacking,
        program="kubectl",
        command=("kubectl", "apply", "--server-side", "--filename", "-"),
    ),
}
