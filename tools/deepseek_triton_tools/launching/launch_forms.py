"""The forms in which a repository is launched, how each differs from the others, and `launch recipe image|wheel`.

A recipe is a script that builds TensorRT-LLM from source. Sources: TensorRT-LLM's
docs/source/installation/build-from-source-linux.md, docker/Makefile and docker/Dockerfile.multi of 1.2, its guide to
DeepSeek-R1's performance (clone, submodules, git-lfs, architectures), and the user guide of Triton's
tensorrtllm_backend (the stage tritonrelease).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from deepseek_triton_build.text import for_comment
from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.launching import containers, kubernetes, mpirun, slurm, start_script
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.launching.launched_pair import LaunchedPair
from deepseek_triton_tools.launching.start_script import filled
from deepseek_triton_tools.repository.launch_facts import LaunchFacts

_VLLM = "; vLLM is built in a container of Triton's, or by pip install vllm"


def recipe_refusals(facts: LaunchFacts) -> Iterator[str]:
    if facts.release is None or facts.image is None:
        otherwise = _VLLM if facts.vllm else ""
        yield f"{facts.source} is for the {facts.engine} engine: a recipe is for TensorRT-LLM{otherwise}"


def render_recipe(kind: str, facts: LaunchFacts) -> str:
    """:param kind: `image` or `wheel`."""
    values = {
        "version": __version__,
        "source": for_comment(facts.source),
        "kind": kind,
        "release": facts.release or "",
        "image": facts.image or "",
        "gpu": facts.gpu or "",
        "architectures": f"{facts.sm}-real",
    }
    return filled(f"recipe-{kind}.sh", values)


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
    "local": LaunchForm(
        render=start_script.render_local,
        refusals=start_script.local_refusals,
        unmet_requirements=start_script.local_requirements,
    ),
    "docker": LaunchForm(
        render=containers.render,
        refusals=containers.refusals,
        unmet_requirements=containers.unmet_requirements,
        program="docker",
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
    "slurm": LaunchForm(render=slurm.render_pair, refusals=slurm.pair_refusals, program="sbatch", command=_SBATCH),
    "kubernetes": LaunchForm(
        render=kubernetes.render_pair,
        refusals=kubernetes.pair_refusals,
        unmet_requirements=kubernetes.pair_requirements,
        program="kubectl",
        command=_KUBECTL,
    ),
}
