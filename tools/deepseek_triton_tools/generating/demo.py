"""The demo: generator, tritonserver, backend and client in one run, without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from deepseek_triton_build import PlanRequest, make_plan, repository_files, version_dir, write_repository
from deepseek_triton_client import Client, Completion
from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.generating.completion_records import tokens_per_s
from deepseek_triton_tools.pages import install_extra
from deepseek_triton_tools.server.server_process import ServerProcess
from deepseek_triton_tools.terminal import tables
from deepseek_triton_tools.terminal.tables import Table, paragraph, show
from deepseek_triton_tools.tool_errors import ToolError

PROMPTS = (
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
)
"""The prompts of TensorRT-LLM's quick start."""

_ABOUT = {
    "reference": "real forward passes of DeepSeek-V3's code; the tiny checkpoint's weights are random, its text is "
    "nonsense",
    "simulated": "a simulated engine: the pace is a deployment's, the words are filler text",
}


@dataclass(frozen=True)
class _Row:
    prompt: str
    protocol: str
    completion: Completion


def run_demo(*, engine: str, preset: str | None, max_tokens: int, tritonserver: Path | None) -> None:
    """Make a checkpoint, build a repository, serve it, ask it, show the answers, stop. Raises ToolError."""
    console = tables.console()
    started = time.monotonic()
    print(f"{paragraph(f'deepseek-triton demo: {_ABOUT[engine]}.', '')}\n", flush=True)
    checkpoint = _make_checkpoint(console) if engine == "reference" else "none"
    with tempfile.TemporaryDirectory(prefix="deepseek-triton-demo-") as scratch:
        repository = _build_repository(console, Path(scratch, "repository"), engine, preset)
        with _serve(console, repository, tritonserver) as server:
            rows = _ask_all(console, server, max_tokens)
    show(_table(rows, engine, preset, checkpoint))
    console.print(f"Stopped cleanly; {time.monotonic() - started:.0f} s in all.")


def _make_checkpoint(console: Console) -> str:
    """Return the name of the demo's checkpoint, made or cached. Another process makes it: torch isn't imported here."""
    with console.status("making the checkpoint"):
        command = [sys.executable, "-m", "deepseek_backend.engines.reference.tiny_checkpoint"]
        environment = os.environ | {"PYTHONPATH": str(version_dir()), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        cause = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ToolError(f"the demo's checkpoint can't be made: {cause}{_way_out(cause)}")
    folder = done.stdout.strip().splitlines()[-1]
    console.print(f"checkpoint    {folder}", soft_wrap=True)
    return Path(folder).name


def _way_out(cause: str) -> str:
    """Say what to do about an exception, by its last line: its kind, or the number of an error of the system."""
    if cause.startswith(("ModuleNotFoundError", "ImportError")):
        return f"; {install_extra('demo')}"
    if re.search(r"\[Errno \d+\]|\(os error \d+\)", cause):
        return "; the variable XDG_CACHE_HOME names another folder than ~/.cache for it"
    return ""


def _build_repository(console: Console, folder: Path, engine: str, preset: str | None) -> Path:
    plan = make_plan(PlanRequest(variant="tiny", engine=engine, preset=preset))
    write_repository(repository_files(plan, version=__version__), folder)
    console.print(f"repository    {folder}", soft_wrap=True)
    return folder


def _serve(console: Console, repository: Path, tritonserver: Path | None) -> ServerProcess:
    started = time.monotonic()
    with console.status("starting tritonserver") as status:
        server = ServerProcess.serving(
            repository,
            tritonserver=tritonserver,
            on_progress=lambda progress: status.update(f"loading the model, {progress.elapsed_s:.0f} s"),
        )
    console.print(
        f"tritonserver  HTTP 127.0.0.1:{server.http_port}, gRPC 127.0.0.1:{server.grpc_port}, "
        f"ready after {time.monotonic() - started:.1f} s\n"
    )
    return server


def _ask_all(console: Console, server: ServerProcess, max_tokens: int) -> list[_Row]:
    rows = []
    with Client(f"http://127.0.0.1:{server.http_port}") as client:
        rows += [_Row(prompt, "HTTP", _ask(console, client, prompt, max_tokens)) for prompt in PROMPTS]
    with Client(f"grpc://127.0.0.1:{server.grpc_port}") as client:
        rows.append(_Row(PROMPTS[0], "gRPC", _ask(console, client, PROMPTS[0], max_tokens)))
    return rows


def _ask(console: Console, client: Client, prompt: str, max_tokens: int) -> Completion:
    """Show the answer while it comes."""
    console.print(f"[bold]{prompt}[/bold]", end="", soft_wrap=True)
    with client.stream(prompt, max_tokens=max_tokens) as stream:
        for chunk in stream:
            console.out(chunk.text, end="", highlight=False)
            console.file.flush()
    console.print("\n")
    return stream.completion()


def _table(rows: list[_Row], engine: str, preset: str | None, checkpoint: str) -> Table:
    pace = f", paced as {preset}" if preset else ""
    cells = [
        (
            row.prompt,
            row.protocol,
            f"{(row.completion.time_to_first_token_s or 0) * 1000:.0f} ms",
            str(row.completion.num_output_tokens),
            f"{tokens_per_s(row.completion) or 0:.0f}",
            row.completion.finish_reason or "",
        )
        for row in rows
    ]
    headings = ("prompt", "over", "first token", "tokens", "tokens/s", "ended by")
    return Table(title=f"engine {engine}{pace}, checkpoint {checkpoint}", headings=headings, rows=cells, is_grid=True)
