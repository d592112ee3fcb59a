"""The needs of a model repository, read by the generator's own code, and the findings of `check` about it."""

import math
import os
import re
from collections.abc import Iterable
from pathlib import Path

from deepseek_triton_build.catalog import containers, gpus, last_image, vllm_drivers
from deepseek_triton_build.check import NO_MODEL_HERE, CheckedModel, Report, read_stamp, read_yaml
from deepseek_triton_build.text import is_path
from deepseek_triton_tools.doctor.findings import (
    NEED_REPOSITORY,
    TENSORRT_LLM,
    VLLM,
    Expected,
    MachineFinding,
    Reported,
)
from deepseek_triton_tools.repository.launch_facts import OWN_PORT, SERVE_SCRIPT, START_SCRIPT, node_memory, serving_of
from deepseek_triton_tools.tool_errors import CheckpointError

_ON_GPUS = (TENSORRT_LLM, VLLM)
# A line of start.sh that lets DeepGEMM compile with NVCC.
_NVCC = re.compile(r"^export TRTLLM_DG_JIT_USE_NVCC=\W*(?:TRTLLM_DG_JIT_USE_NVCC:-)?1\b", re.M)


def expected_of(repository: Path, report: Report, model: Path | None) -> Expected:
    """Return what its first model for an engine on GPUs expects, or its first model when there is none.

    :param report: what `check` found in the repository.
    :param model: where the checkpoint is, if it is not where model.yaml says.
    """
    checked = next((model for model in report.models if model.engine in _ON_GPUS), report.models[0])
    home = (repository / checked.file).parent if repository.is_dir() else repository.parent
    stamp = read_stamp(home if checked.backend == "none" else home.parent, "")[0]
    target = gpus().get(checked.gpu or "")
    world = _world_size(repository, checked)
    tag = (stamp.text("image") or "").rpartition(":")[2].partition("-")[0]  # such as 26.07
    is_vllm = checked.engine == VLLM
    drivers = vllm_drivers() if is_vllm else {tag: container.driver for tag, container in containers().items()}
    checkpoint = _checkpoint(repository, checked, model)
    try:
        checkpoint_bytes = serving_of(str(model or repository)).size if checkpoint else None
    except CheckpointError:  # neither the files nor the catalogue know it
        checkpoint_bytes = None
    folder = repository if repository.is_dir() else repository.parent
    try:
        script = (folder / (SERVE_SCRIPT if checked.backend == "none" else START_SCRIPT)).read_text("utf-8", "replace")
    except OSError:
        script = ""
    nodes = -(-world // target.gpus_per_node) if target and world else 1
    return Expected(
        repository=os.path.abspath(folder),
        is_ours=checked.backend == "deepseek-triton",
        by_triton=checked.backend != "none",
        engine=checked.engine,
        release=checked.release if checked.engine == "tensorrt_llm" else None,
        vllm=stamp.text("vllm"),
        image=stamp.text("image"),
        driver=drivers.get(tag),
        gpu=checked.gpu,
        gpus_per_node=min(world, target.gpus_per_node) if target and world else world,
        world_size=world,
        uses_nvcc=_NVCC.search(script) is not None,
        checkpoint=checkpoint,
        checkpoint_bytes=checkpoint_bytes,
        tables=node_memory(stamp, nodes) if is_vllm else (0, 0),
        http_port=int(port[1]) if (port := OWN_PORT.search(script)) else 8000,
        drivers=drivers,
        last_image="" if is_vllm else last_image(),
    )


def _world_size(repository: Path, checked: CheckedModel) -> int | None:
    """Return the GPUs of one instance, by model.yaml; None for an engine that needs none."""
    if checked.engine not in _ON_GPUS:
        return None
    document, _ = read_yaml(repository / checked.file, checked.file)
    if document is None:
        return checked.num_gpus
    ways = ("tensor", "pipeline", *(["data"] if checked.engine == VLLM else []))
    sizes = [document.values.get(f"{way}_parallel_size", 1) for way in ways]
    return math.prod(sizes) if all(isinstance(size, int) and size > 0 for size in sizes) else checked.num_gpus


def _checkpoint(repository: Path, checked: CheckedModel, model: Path | None) -> str | None:
    """Return the checkpoint's folder or name; None for an engine that reads none."""
    if checked.engine == "simulated" or not checked.model:
        return None
    if model is not None:
        return os.path.abspath(model)
    # The backend too takes a relative path from model.yaml's folder.
    inside = (repository / checked.file).parent / checked.model
    if checked.engine == "reference" or is_path(checked.model) or os.path.exists(inside):
        return os.path.abspath(inside)
    return checked.model


def check_findings(report: Report, host: str) -> Iterable[Reported]:
    """Yield what `deepseek-triton check` found, except a missing checkpoint, which a check of the machine reports."""
    for fault in report.findings:
        if fault.code in NO_MODEL_HERE:
            continue
        where = fault.file + (f":{fault.line}" if fault.line else "")
        finding = MachineFinding(
            level=fault.severity, result=f"{where}: {fault.message}", fix=fault.fix, blocks=fault.severity == "error"
        )
        yield Reported(check=f"check:{fault.code}", title="check", host=host, finding=finding, needs=NEED_REPOSITORY)
