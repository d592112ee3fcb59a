"""The facts about a model repository or a checkpoint that a deployment needs: names, bytes, image, GPUs."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from deepseek_triton_build.catalog import KnownCheckpoint, gpus, variant_of_model, variants
from deepseek_triton_build.check import Stamp, read_stamp, read_yaml
from deepseek_triton_build.text import safe_name
from deepseek_triton_tools.repository.checkpoint_files import (
    ServedModel,
    find_checkpoints,
    model_yamls,
    served_models,
)
from deepseek_triton_tools.repository.hub_cache import hub_cache, parse_hub_name
from deepseek_triton_tools.tool_errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The checkpoints that are served, and what serves them."""

    source: str
    """The repository or checkpoint as the user wrote it."""
    folders: tuple[str, ...]
    """Absolute paths of the checkpoints that are folders."""
    names: tuple[str, ...]
    """Names of the checkpoints that are in the Hugging Face cache."""
    hub_cache: str
    """The folder of the Hugging Face cache on this machine."""
    size: int
    """Bytes of all weights."""
    size_from: str
    """The source of `size`, for people."""
    image: str | None = None
    """The container image that a generated repository was made for."""
    num_gpus: int | None = None
    """GPUs of one instance: tensor_parallel_size x pipeline_parallel_size, and for vLLM x data_parallel_size."""
    gpus_per_node: int | None = None
    """GPUs of a machine that has the plan's GPU; None where the GPU is not known."""

    @property
    def gpus_of_node(self) -> int | None:
        """GPUs of the instance on one node."""
        if self.num_gpus is None or self.gpus_per_node is None:
            return self.num_gpus
        return min(self.num_gpus, self.gpus_per_node)

    @property
    def mounts(self) -> Mapping[str, str]:
        """Folders that a container mounts for `folders`: path in the container -> path on this machine."""
        return {place: source for folder in self.folders for place, source in _mounts(folder)}

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """All checkpoints, as arguments of `deepseek-triton warm files`."""
        return (*self.folders, *self.names)


def serving_of(source: str) -> Serving:
    """Read the facts about the model repository or checkpoint at `source`.

    :raises CheckpointError: when there is no checkpoint, or its size is not known.
    """
    yamls = model_yamls(Path(source)) if os.path.exists(source) else []
    if not yamls:
        is_folder = os.path.exists(source)
        return Serving(
            source=source,
            folders=(os.path.abspath(source),) if is_folder else (),
            names=() if is_folder else (source,),
            hub_cache=str(hub_cache()[0]),
            size=sum(checkpoint.size for checkpoint in find_checkpoints(source)),
            size_from="its files",
        )
    served = [model for model_yaml in yamls for model in served_models(model_yaml)]
    first = served[0].model_yaml.resolve()
    stamp, _ = read_stamp(first.parent.parent, "")
    size, size_from = _size(source, served, stamp)
    gpu = gpus().get(stamp.text("gpu") or "")
    return Serving(
        source=source,
        folders=tuple(dict.fromkeys(os.path.abspath(model.path) for model in served if not _is_name(model))),
        names=tuple(
            dict.fromkeys(
                f"{model.name}@{model.revision}" if model.revision else model.name
                for model in served
                if _is_name(model)
            )
        ),
        hub_cache=str(hub_cache()[0]),
        size=size,
        size_from=size_from,
        image=stamp.text("image"),
        num_gpus=_num_gpus(first),
        gpus_per_node=gpu.gpus_per_node if gpu else None,
    )


def _size(source: str, served: Iterable[ServedModel], stamp: Stamp) -> tuple[int, str]:
    """(bytes, where that was found): by the files where they are on this machine, else by the catalogue."""
    try:
        return sum(checkpoint.size for checkpoint in find_checkpoints(source)), "its files"
    except CheckpointError:
        known = [_known(model, stamp) for model in served]
    by = ", ".join(f"{each.bytes_status} for {each.model}" for each in known)
    return sum(each.weight_bytes for each in known), f"the catalogue, {by}: it is not on the machine this was made on"


def _known(model: ServedModel, stamp: Stamp) -> KnownCheckpoint:
    named = variant_of_model(model.name)
    if named is not None:
        return named[1]
    variant = variants().get(stamp.text("variant") or "")
    planned = variant.checkpoints.get(stamp.text("precision") or "") if variant and not model.is_draft else None
    if planned is None:
        raise CheckpointError(
            f"{model}: {safe_name(model.name)} is neither on this machine nor known by name, so its size is not known; "
            "print the form on a machine that has the checkpoint"
        )
    return planned


def _is_name(model: ServedModel) -> bool:
    return not os.path.exists(model.path) and parse_hub_name(model.name) is not None


def _mounts(folder: str) -> Iterator[tuple[str, str]]:
    """(path in the container, path on this machine) of each folder that the files of `folder` lie in.

    A snapshot in a Hugging Face cache holds links to ../../blobs, so the model's whole folder is mounted. Elsewhere it
    is the folder itself, and the folders that links in it lead to.
    """
    parent = os.path.dirname(folder)
    if os.path.basename(parent) == "snapshots":
        yield os.path.dirname(parent), os.path.dirname(parent)
        return
    yield folder, folder
    for path in sorted(Path(folder).glob("*")):
        if path.is_symlink():
            there = os.path.dirname(os.path.normpath(os.path.join(folder, os.readlink(path))))
            if not Path(there).is_relative_to(folder):
                yield there, os.path.dirname(os.path.realpath(path))


def _num_gpus(model_yaml: Path) -> int | None:
    document, _ = read_yaml(model_yaml, str(model_yaml))
    values = document.values if document else {}
    tensor, others = values.get("tensor_parallel_size"), ("pipeline_parallel_size", "data_parallel_size")
    if not isinstance(tensor, int):
        return None
    return math.prod(size for size in (tensor, *map(values.get, others)) if isinstance(size, int))
