"""Read sampling defaults from a checkpoint's own generation_config.json."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepseek_triton_build.build_errors import UnusableCheckpointError
from deepseek_triton_build.data.setting_types import sampling_problem
from deepseek_triton_build.text import printable_line

SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The sampling fields that have the same name in Hugging Face's GenerationConfig and in the wire contract."""


def sampling_defaults(checkpoint: Path) -> Mapping[str, float] | None:
    """Return the sampling defaults that the makers of the checkpoint in the folder `checkpoint` advise.

    Greedy decoding (`do_sample` is false) is temperature 0. None when there is no generation_config.json, or none of
    SAMPLING_FIELDS in it.

    :raises UnusableCheckpointError: when the file can't be read, or a request may not have one of its values.
    """
    path = checkpoint / "generation_config.json"
    if not os.path.lexists(path):
        return None
    config = read_json_object(path)
    if config.get("do_sample") is False:
        return {"temperature": 0.0}
    defaults = {name: config[name] for name in SAMPLING_FIELDS if config.get(name) is not None}
    wrong = [f"{name}: {problem}" for name, value in defaults.items() if (problem := sampling_problem(name, value))]
    if wrong:
        raise UnusableCheckpointError(f"{path}: {'; '.join(wrong)}; correct the file or remove it")
    return defaults or None


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file `path`.

    :raises UnusableCheckpointError: when the file can't be read or isn't a JSON object.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe would never end
            raise UnusableCheckpointError(f"{path}: expected a file, found something else; download it again")
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UnusableCheckpointError(f"{path}: can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UnusableCheckpointError(
            f"{path}: expected JSON: {printable_line(str(error))}; download it again"
        ) from error
    if not isinstance(value, dict):
        raise UnusableCheckpointError(
            f"{path}: expected a JSON object, found {type(value).__name__}; download it again"
        )
    return value
