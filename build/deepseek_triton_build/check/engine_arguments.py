"""The installed TensorRT-LLM's own word on LLM arguments, where there is one, as in its container."""

import importlib.util
import inspect
import json
import os
import sys
from typing import Any

from deepseek_triton_build.check import codes
from deepseek_triton_build.check.documents import Document
from deepseek_triton_build.check.schema import TRITON_SECTION, UPSTREAM_KEYS
from deepseek_triton_build.data.finding import Finding
from deepseek_triton_build.data.releases import Release
from deepseek_triton_build.text import printable_line

# Limit of one question. The import alone takes up to a minute on a slow disk.
_MOST_SECONDS = 300
# Beginnings of the variables by which a process would take itself for a rank of the job it is asked in.
_OF_A_RANK = ("OMPI_", "PMIX_", "PMI_", "SLURM_")
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
    problems = [
        (key, f"{key or 'model.yaml'}: TensorRT-LLM {version} refuses it: {why}") for key, why in answer["problems"]
    ]
    fix = "correct it as the message says"
    return [], [
        codes.REFUSED_BY_ENGINE.finding(text, fix, file=document.file, line=document.line(key), key=key or None)
        for key, text in problems
    ]


def _ask(document: Document) -> dict[str, Any]:
    """Ask in a process of its own, which finds modules where this one does."""
    import subprocess

    import yaml

    program = f"{inspect.getsource(_answer)}\n_answer()\n"
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


def _answer() -> None:
    """Answer the arguments in YAML on stdin with the release, and its problems with them as pairs of dotted key and
    message, in JSON on stdout. The words of the command are the model's name and the top-level keys of others.

    A process of its own runs the text of this function, without the rest of this package: importing TensorRT-LLM takes
    many seconds, prints, and starts MPI.
    """
    import json
    import os
    import sys
    from importlib import import_module

    import yaml

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what TensorRT-LLM prints is no part of the answer
    model, *other_keys = sys.argv[1:]
    arguments = {key: value for key, value in yaml.safe_load(sys.stdin.read()).items() if key not in other_keys}
    answer = {}
    try:
        answer["version"] = import_module("tensorrt_llm").__version__
        llm_args, llm_utils = (import_module(f"tensorrt_llm.llmapi.{name}") for name in ("llm_args", "llm_utils"))
    except Exception as error:  # a library that is not there, or no driver
        answer["failed"] = f"{type(error).__name__}: {error}"
    else:
        answer["problems"] = []
        try:
            llm_args.TorchLlmArgs(**llm_utils.update_llm_args_with_extra_dict({"model": model}, arguments))
        except Exception as error:  # pydantic's ValidationError, or what from_dict raises
            listed: list[Any] = getattr(error, "errors", list)()
            problems = [[".".join(map(str, entry["loc"])), str(entry["msg"])] for entry in listed]
            answer["problems"] = problems or [["", str(error)]]
    answers.write(json.dumps(answer))
    answers.flush()
    os._exit(0)  # MPI's and CUDA's ends may hang
