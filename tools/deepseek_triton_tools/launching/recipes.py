"""`launch recipe image|wheel`: a script that builds TensorRT-LLM from source.

Sources: TensorRT-LLM's docs/source/installation/build-from-source-linux.md, docker/Makefile and docker/Dockerfile.multi
of 1.2, its guide to DeepSeek-R1's performance (clone, submodules, git-lfs, architectures), and the user guide of
Triton's tensorrtllm_backend (the stage tritonrelease).
"""

from __future__ import annotations

from collections.abc import Iterator

from deepseek_triton_build.text import for_comment
from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.launching.start_script import filled
from deepseek_triton_tools.repository.launch_facts import LaunchFacts

_VLLM = "; vLLM is built in a container of Triton's, or by pip install vllm"


def refusals(facts: LaunchFacts) -> Iterator[str]:
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
