"""Repositories that tests serve with vLLM: on a GPU, or without one, with an executor of the tests."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from deepseek_triton_build import model_repository
from deepseek_triton_build.data.vllm import load_vllm
from support.vllm_arguments import COMMON_ARGUMENTS, installed_version


def vllm_repository(folder: Path, *, model: Path, ours: Mapping[str, Any] | None = None, **arguments: Any) -> Path:
    """Write a repository for the installed vLLM, and return it.

    :param ours: keys under triton_config.
    :param arguments: engine arguments beside those of every test.
    """
    source, target = model_repository() / "tensorrt_llm", folder / "tensorrt_llm"
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "tiny"))
    settings = {"engine": "vllm", "metrics_period_s": 0.1, **(ours or {})}
    document = {"model": str(model), **COMMON_ARGUMENTS, **arguments, "triton_config": settings}
    (target / "1/model.yaml").write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    (target / "1/release.yaml").write_text(load_vllm(installed_version()).text, encoding="utf-8")
    return folder
