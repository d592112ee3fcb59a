"""The forms in which a repository is launched, and how each differs from the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from deepseek_triton_tools.launching import docker, kubernetes, kubernetes_pair, local, mpirun, slurm, slurm_pair
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.launching.launched_pair import LaunchedPair
from deepseek_triton_tools.repository.launch_facts import LaunchFacts

Launched = TypeVar("Launched", LaunchFacts, LaunchedPair)
"""The facts about one repository, or about a pair of them."""
Problems = Callable[[Launched, LaunchOptions], Iterable[str]]
"""Each problem is one line."""


def _none(facts: object, options: LaunchOptions) -> Iterable[str]:
    return ()


@dataclass(frozen=True, kw_only=True)
class LaunchForm(Generic[Launched]):
    render: Callable[[Launched, LaunchOptions], str]
    """The text that starts the repository, and runs as it is. A ToolError is raised when start.sh refuses."""
    refusals: Problems[Launched]
    """Reasons why the text can't be rendered."""
    unmet_requirements: Problems[Launched] = _none
    """Things that this machine lacks to run the text."""
    warnings: Problems[Launched] = _none
    """Things that would be wrong only if the text were run on this machine."""
    program: str | None = None
    """The program that has to be on PATH to run the text."""
    command: tuple[str, ...] = ()
    """The command that reads the text from standard input. Empty: the text is a script that replaces this process."""


_SBATCH = ("sbatch", "--parsable")
_KUBECTL = ("kubectl", "apply", "--server-side", "--filename", "-")

LAUNCH_FORMS: Mapping[str, LaunchForm[LaunchFacts]] = {
    "local": LaunchForm(render=local.render, refusals=local.refusals, unmet_requirements=local.unmet_requirements),
    "docker": LaunchForm(
        render=docker.render, refusals=docker.refusals, unmet_requirements=docker.unmet_requirements, program="docker"
    ),
    "mpirun": LaunchForm(
        render=mpirun.render,
        refusals=mpirun.refusals,
        unmet_requirements=mpirun.unmet_requirements,
        warnings=mpirun.warnings,
        program="mpirun",
    ),
    "slurm": LaunchForm(render=slurm.render, refusals=slurm.refusals, program="sbatch", command=_SBATCH),
    "kubernetes": LaunchForm(
        render=kubernetes.render,
        refusals=kubernetes.refusals,
        unmet_requirements=kubernetes.unmet_requirements,
        program="kubectl",
        command=_KUBECTL,
    ),
}

PAIR_FORMS: Mapping[str, LaunchForm[LaunchedPair]] = {
    "slurm": LaunchForm(render=slurm_pair.render, refusals=slurm_pair.refusals, program="sbatch", command=_SBATCH),
    "kubernetes": LaunchForm(
        render=kubernetes_pair.render,
        refusals=kubernetes_pair.refusals,
        unmet_requirements=kubernetes_pair.unmet_requirements,
        program="kubectl",
        command=_KUBECTL,
    ),
}
