"""Run generated scripts for real, with programs on PATH that record how they were called."""

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from deepseek_triton_build import FORMATS, Plan, format_files, write_repository

PROGRAMS = (
    "mpirun",
    "trtllm-llmapi-launch",
    "tritonserver",
    "trtllm-serve",
    "trtllm-bench",
    "trtllm-eval",
    "vllm",
    "python3",
)


class Run(NamedTuple):
    code: int
    error: str
    output: str
    argv: list[str]
    """Words of the program that the script became; empty when it became none."""
    environment: dict[str, str]


def script_runner(tmp_path: Path, folder: str = "with a space") -> Callable[..., Run]:
    """Return a function that writes a plan in a format below `folder` and runs its script, or the one named `script`.

    A plan that is there already is not written again, and none of the program's many modules is.
    The container's folder /app is `tmp_path`/app, which is empty at first.
    """
    commands, record = tmp_path / "bin", tmp_path / "record"
    there: dict[str, Plan] = {}
    commands.mkdir()
    for program in PROGRAMS:
        path = commands / program
        path.write_text('#!/usr/bin/env bash\nprintf "%s\\0" "${0##*/}" "$@" > "$RECORD"; env -0 > "$RECORD.env"\n')
        path.chmod(0o755)

    def run(plan: Plan, format: str, *arguments: str, script: str = "", **variables: str) -> Run:
        place = tmp_path / folder / format
        if there.get(format) is not plan:
            files = format_files(format, plan, version="1.0")
            write_repository([file for file in files if "/deepseek_" not in str(file.path)], place, force=True)
            there[format] = plan
        environment = {"PATH": f"{commands}:{os.environ['PATH']}", "RECORD": str(record), **variables}
        record.unlink(missing_ok=True)
        path = place / (script or FORMATS[format].start)
        app = re.compile(r"^(\s+)(/app/\S+)$", re.MULTILINE)  # a place in a list
        path.write_text(app.sub(lambda found: found[1] + shlex.quote(f"{tmp_path}{found[2]}"), path.read_text()))
        done = subprocess.run([path, *arguments], env=environment, capture_output=True, text=True)
        if not record.exists():
            return Run(done.returncode, done.stderr, done.stdout, [], {})
        lines = Path(f"{record}.env").read_text().split("\0")
        argv = record.read_text().split("\0")[:-1]
        return Run(0, done.stderr, done.stdout, argv, dict(line.split("=", 1) for line in lines if line))

    return run


def files_of(plan: Plan, format: str) -> dict[str, str]:
    return {file.path.as_posix(): file.content.decode() for file in format_files(format, plan, version="1.0")}


def parameters_of(argv: Sequence[str]) -> dict[str, str]:
    """Return the parameters that mpirun gets by -mca, name -> value."""
    return {name: value for option, name, value in zip(argv, argv[1:], argv[2:], strict=False) if option == "-mca"}


def forwarded_by(argv: Sequence[str]) -> list[str]:
    """Return the variables that mpirun forwards by -x."""
    return [name for option, name in pairwise(argv) if option == "-x"]
