"""The forms in which a repository is launched, how each differs from the others, and `launch recipe image|wheel`.

A recipe is a script that builds TensorRT-LLM from source. Sources: TensorRT-LLM's
docs/source/installation/build-from-source-linux.md, docker/Makefile and docker/Dockerfile.multi of 1.2, its guide to
DeepSeek-R1's performance (clone, submodules, git-lfs, architectures), and the user guide of Triton's
tensorrtllm_backend (the stage tritonrelease).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from deepseek_triton_build.text import for_comment
from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.launching import containers, kubernetes, mpirun, slurm, start_script
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.repository.launch_facts import LaunchFacts

Problems = Callable[[Any, LaunchOptions], Iterable[str]]
"""Lines about the facts of a repository, or about a pair of them."""


def _of_sides(problems: Problems) -> Problems:
    return lambda pair, options: dict.fromkeys(line for side in pair.sides for line in problems(side.facts, options))


_pair_warnings = _of_sides(containers.warnings)


def _no_problems(launched: object, options: LaunchOptions) -> Iterable[str]:
    return ()


@dataclass(frozen=True, kw_only=True)
class LaunchForm:
    render: Callable[[Any, LaunchOptions], str]
    """The text that starts the repository, and runs as it is. A ToolError is raised when start.sh refuses."""
    refusals: Problems
    """Reasons why the text can't be rendered."""
    unmet_requirements: Problems = _no_problems
    """Things that this machine lacks to run the text."""
    warnings: Problems = _no_problems
    """Things that would be wrong only if the text were run on this machine."""
    program: str | None = None
    """The program that has to be on PATH to run the text."""
    command: tuple[str, ...] = ()
    """The command that reads the text from standard input. Empty: the text is a script that replaces this process."""


def _recipe(kind: str) -> LaunchForm:
    def refusals(facts: LaunchFacts, options: LaunchOptions) -> Iterable[str]:
        if facts.release is None or facts.image is None:
            otherwise = "; vLLM is built in a container of Triton's, or by pip install vllm" if facts.vllm else ""
            yield f"{facts.source} is for the {facts.engine} engine: a recipe is for TensorRT-LLM{otherwise}"

    def render(facts: LaunchFacts, options: LaunchOptions) -> str:
        values = {
            "version": __version__,
            "source": for_comment(facts.source),
            "kind": kind,
            "release": facts.release or "",
            "image": facts.image or "",
            "gpu": facts.gpu or "",
            "architectures": f"{facts.sm}-real",
        }
        return start_script.filled(f"recipe-{kind}.sh", values)

    return LaunchForm(render=render, refusals=refusals)


LAUNCH_FORMS: Mapping[str, LaunchForm] = {
    "local": LaunchForm(
        render=start_script.render_local,
        refusals=start_script.local_refusals,
        unmet_requirements=start_script.local_requirements,
        warnings=containers.warnings,
    ),
    "docker": LaunchForm(
        render=containers.render,
        refusals=containers.refusals,
        unmet_requirements=containers.unmet_requirements,
        warnings=containers.warnings,
        program="docker",
    ),
    "mpirun": LaunchForm(
        render=mpirun.render,
        refusals=mpirun.refusals,
        unmet_requirements=mpirun.unmet_requirements,
        warnings=mpirun.warnings,
        program="mpirun",
    ),
    "slurm": LaunchForm(
        render=slurm.render,
        refusals=slurm.refusals,
        warnings=containers.warnings,
        program="sbatch",
        command=("sbatch", "--parsable"),
    ),
    "kubernetes": LaunchForm(
        render=kubernetes.render,
        refusals=kubernetes.refusals,
        unmet_requirements=kubernetes.unmet_requirements,
        warnings=containers.warnings,
        program="kubectl",
        command=("kubectl", "apply", "--server-side", "--filename", "-"),
    ),
}
PAIR_FORMS: Mapping[str, LaunchForm] = {
    "slurm": replace(
        LAUNCH_FORMS["slurm"], render=slurm.render_pair, refusals=slurm.pair_refusals, warnings=_pair_warnings
    ),
    "kubernetes": replace(
        LAUNCH_FORMS["kubernetes"],
        render=kubernetes.render_pair,
        refusals=kubernetes.pair_refusals,
        unmet_requirements=_of_sides(kubernetes.unmet_requirements),
        warnings=_pair_warnings,
    ),
}
PRINTED_FORMS: Mapping[str, LaunchForm] = {
    "ssh-setup": LaunchForm(render=mpirun.render_setup, refusals=mpirun.refusals, warnings=mpirun.warnings),
    "recipe image": _recipe("image"),
    "recipe wheel": _recipe("wheel"),
}
