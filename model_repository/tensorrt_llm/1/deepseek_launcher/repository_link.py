"""A link to the model repository, for a server whose repository has a path that a shell would split or expand.

Triton's Python backend starts its stub by a line of shell in which the path stands without quotes
(triton-inference-server/python_backend src/stub_launcher.cc@00bec0aa), and trtllm-llmapi-launch does the same with the
words of its command (NVIDIA/TensorRT-LLM tensorrt_llm/llmapi/trtllm-llmapi-launch@020c89e6).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from deepseek_launcher.launch_tag import shared_memory
from deepseek_launcher.node_identity import served_repository


def with_plain_path(command: Sequence[str], launch: str, *, make: bool) -> list[str]:
    """Return `command` with a link in place of a repository's path that needs quotes.

    The link lies among the launch's shared memory and is removed with it.

    :param make: make the link, too. One rank of a node has to.
    :raises OSError: when the link can't be made.
    """
    repository = served_repository(command)
    if repository is None or shlex.quote(str(repository)) == str(repository):
        return list(command)
    link = shared_memory(launch, "repository")
    if make:
        link.unlink(missing_ok=True)
        link.symlink_to(repository.absolute())
    return [str(link).join(word.rsplit(str(repository), 1)) if _names(word, repository) else word for word in command]


def _names(word: str, repository: Path) -> bool:
    return word == str(repository) or (word.startswith("--model-") and word.endswith(f"={repository}"))
