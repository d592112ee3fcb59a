"""Asks the installed TensorRT-LLM whether it takes LLM arguments: YAML on stdin, the answer as JSON on stdout.

This runs in a process of its own, as text, without the rest of this package: importing TensorRT-LLM takes many seconds,
prints, and starts MPI.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what TensorRT-LLM prints is no part of the answer
    answers.write(json.dumps(_ask(sys.stdin.read(), sys.argv[1], sys.argv[2:])))
    answers.flush()
    os._exit(0)  # MPI's and CUDA's ends may hang


def _ask(text: str, model: str, other_keys: list[str]) -> dict[str, Any]:
    """Return the release, and its problems with the arguments as pairs of dotted key and message.

    :param model: the model's name, where the arguments don't give it.
    :param other_keys: top-level keys that are not the engine's.
    """
    try:
        import tensorrt_llm
        import yaml
        from tensorrt_llm.llmapi.llm_args import TorchLlmArgs
        from tensorrt_llm.llmapi.llm_utils import update_llm_args_with_extra_dict
    except Exception as error:  # a library that is not there, or no driver
        return {"failed": f"{type(error).__name__}: {error}"}
    arguments = {key: value for key, value in yaml.safe_load(text).items() if key not in other_keys}
    try:
        TorchLlmArgs(**update_llm_args_with_extra_dict({"model": model}, arguments))
    except Exception as error:  # pydantic's ValidationError, or what from_dict raises
        listed: list[Any] = getattr(error, "errors", list)()
        problems = [[".".join(map(str, entry["loc"])), str(entry["msg"])] for entry in listed]
        return {"version": tensorrt_llm.__version__, "problems": problems or [["", str(error)]]}
    return {"version": tensorrt_llm.__version__, "problems": []}


if __name__ == "__main__":
    main()
