"""The installed TensorRT-LLM's own word on LLM arguments, where there is one, as in its container."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from deepseek_triton_build.check.codes import REFUSED_BY_ENGINE
from deepseek_triton_build.check.documents import Document
from deepseek_triton_build.check.finding import Finding
from deepseek_triton_build.check.schema import TRITON_SECTION, UPSTREAM_KEYS
from deepseek_triton_build.data.releases import Release
from deepseek_triton_build.text import printable_line

_MOST_SECONDS = 300
"""Limit of one question. The import alone takes up to a minute on a slow disk."""
_OF_A_RANK = ("OMPI_", "PMIX_", "PMI_", "SLURM_")
"""Beginnings of the variables by which a process would take itself for a rank of the job it is asked in."""
_CLASS = "TensorRT-LLM's own TorchLlmArgs"


def engine_problems(document: Document, release: Release) -> tuple[list[str], list[Finding]]:
    """Return why the installed TensorRT-LLM could not be asked, and what it refuses in `document`.

    Where it is not installed, both are empty.
    """
    if importlib.util.find_spec("tensorrt_llm") is None:
        return [], []
    answer = _ask(document)
    if "failed" in answer:
        return [f"{_CLASS}, because it can't be asked: {printable_line(str(answer['failed']))}"], []
    version = str(answer["version"])
    if not version.startswith(release.version):
        return [f"{_CLASS}, because {version} is installed and {release.version} is checked against"], []
    return [], [_finding(document, key, message, version) for key, message in answer["problems"]]


def _finding(document: Document, key: str, message: str, version: str) -> Finding:
    text = f"{key or 'model.yaml'}: TensorRT-LLM {version} refuses it: {message}"
    fix = "correct it as the message says"
    return REFUSED_BY_ENGINE.finding(text, fix, file=document.file, line=document.line(key), key=key or None)


def _ask(document: Document) -> dict[str, Any]:
    """Ask in a process of its own, which finds modules where this one does."""
    import subprocess

    import yaml

    program = Path(__file__).with_name("ask_engine.py").read_text(encoding="utf-8")
    command = [sys.executable, "-c", program, "model", TRITON_SECTION, *UPSTREAM_KEYS]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_RANK)}
    environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, sys.path))
    text = yaml.safe_dump(dict(document.values))
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=_MOST_SECONDS, env=environment, cwd="/"
        )
        answer: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"failed": f"no answer in {_MOST_SECONDS} seconds"}
    except (OSError, ValueError):
        return {"failed": f"its process ended with {done.returncode}: {done.stderr[-200:]}"}
    return answer
