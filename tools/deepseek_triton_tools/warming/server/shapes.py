"""The shapes that warm a server: requests at once x prompt tokens, and where these numbers come from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from deepseek_triton_build.arithmetic import shapes_for_llm_args
from deepseek_triton_build.text import parse_yaml
from deepseek_triton_tools.tool_errors import RepositoryError

MODEST_BATCH_SIZES = (1, 4, 8)
MODEST_INPUT_LENGTHS = (128, 1024)
"""The shapes where nothing says what the server takes: every server takes them, and they leave room for other users."""


@dataclass(frozen=True)
class Shape:
    num_requests: int
    """Requests that are open at once."""
    num_input_tokens: int
    """Prompt tokens of each request."""

    def __str__(self) -> str:
        return f"{self.num_requests} x {self.num_input_tokens:,}"


@dataclass(frozen=True)
class PlannedShapes:
    shapes: tuple[Shape, ...]
    """The shapes in the order in which they are sent."""
    source: str
    """The origin of the numbers, for people."""


def planned_shapes(
    model_name: str,
    *,
    repository: Path | None = None,
    batch_sizes: tuple[int, ...] | None = None,
    input_lengths: tuple[int, ...] | None = None,
) -> PlannedShapes:
    """The shapes by `batch_sizes` and `input_lengths` where these are given, else by the model's repository.

    :raises RepositoryError: when the repository has no such model, or its model.yaml can't be read.
    """
    if batch_sizes is not None and input_lengths is not None:
        return PlannedShapes(_combinations(batch_sizes, input_lengths), "--batch-sizes and --input-lengths")
    known = _MODEST if repository is None else _repository_shapes(repository, model_name)
    if batch_sizes is not None:
        lengths = sorted({shape.num_input_tokens for shape in known.shapes})
        return PlannedShapes(_combinations(batch_sizes, lengths), f"--batch-sizes; the lengths: {known.source}")
    if input_lengths is not None:
        sizes = sorted({shape.num_requests for shape in known.shapes})
        return PlannedShapes(_combinations(sizes, input_lengths), f"--input-lengths; the batch sizes: {known.source}")
    return known


def _combinations(batch_sizes: Iterable[int], input_lengths: Iterable[int]) -> tuple[Shape, ...]:
    return tuple(dict.fromkeys(Shape(size, length) for length, size in product(input_lengths, batch_sizes)))


_MODEST = PlannedShapes(
    _combinations(MODEST_BATCH_SIZES, MODEST_INPUT_LENGTHS),
    # Triton's metadata does not help: our config.pbtxt says max_batch_size 0, because the engine batches. The engine's
    # limits are in model.yaml only.
    "a modest choice, because Triton does not tell the engine's limits: give the repository, or --batch-sizes and "
    "--input-lengths",
)


def _repository_shapes(repository: Path, model_name: str) -> PlannedShapes:
    path = _model_yaml(repository, model_name)
    document = _read_yaml(path)
    ours = document.get("triton_config")
    ours = ours if isinstance(ours, Mapping) else {}
    warmup = ours.get("warmup")
    if isinstance(warmup, Mapping) and warmup.get("shapes"):
        return PlannedShapes(_warmup_shapes(warmup["shapes"], path), f"triton_config.warmup of {path}")
    engine = ours.get("engine", "tensorrt_llm")
    if engine != "tensorrt_llm":  # the limits of other engines are not in the LLM arguments
        return PlannedShapes(_MODEST.shapes, f"a modest choice, because {path} has no triton_config.warmup.shapes")
    pairs = shapes_for_llm_args({key: value for key, value in document.items() if key != "triton_config"})
    return PlannedShapes(tuple(Shape(*pair) for pair in pairs), f"the LLM arguments of {path}")


def _model_yaml(repository: Path, model_name: str) -> Path:
    """The model.yaml of the highest version, which Triton serves unless it is told otherwise."""
    found = [path for path in repository.glob(f"{model_name}/*/model.yaml") if path.parent.name.isdecimal()]
    if not found:
        raise RepositoryError(
            f"expected {repository}/{model_name}/VERSION/model.yaml, found none: give the server's model repository, "
            "and --model where the model has another name"
        )
    return max(found, key=lambda path: int(path.parent.name))


def _read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        document = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RepositoryError(f"{path} can't be read: {' '.join(str(error).split())}") from error
    if not isinstance(document, Mapping):
        raise RepositoryError(f"{path}: expected a mapping of LLM arguments, got {type(document).__name__}")
    return document


def _warmup_shapes(shapes: Any, path: Path) -> tuple[Shape, ...]:
    listed = shapes if isinstance(shapes, list) else [shapes]
    wrong = [shape for shape in listed if not _is_pair(shape)]
    if wrong:
        raise RepositoryError(
            f"{path}: triton_config.warmup.shapes: expected pairs [requests at once, prompt tokens] of whole numbers "
            f"from 1, got {', '.join(map(repr, wrong[:3]))}"
        )
    return tuple(dict.fromkeys(Shape(*pair) for pair in listed))


def _is_pair(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(each, int) and not isinstance(each, bool) and each > 0 for each in value)
    )
