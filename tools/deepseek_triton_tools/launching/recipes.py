"""`launch recipe image|wheel`: TensorRT-LLM from source, as a script.

By TensorRT-LLM's docs/source/installation/build-from-source-linux.md, docker/Makefile and docker/Dockerfile.multi of
1.2, its guide to DeepSeek-R1's performance (clone, submodules, git-lfs, architectures), and the user guide of Triton's
tensorrtllm_backend (the stage tritonrelease).
"""

from __future__ import annotations

from collections.abc import Iterator

from deepseek_triton_build.render.yaml_text import one_line
from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.launching import script
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.repository.launch_facts import LaunchFacts


def problems(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    if facts.release is None or facts.image is None:
        yield f"{facts.source} is for the {facts.engine} engine: a recipe is for TensorRT-LLM"


def render_recipe(kind: str, facts: LaunchFacts) -> str:
    """
    :param kind: `image` or `wheel`.
    """
    values = {
        "version": __version__,
        "source": one_line(facts.source),
        "kind": kind,
        "release": facts.release or "",
        "image": facts.image or "",
        "gpu": facts.gpu or "",
        "architectures": f"{facts.sm}-real",
    }
    return script.filled(f"recipe-{kind}.sh", values)
