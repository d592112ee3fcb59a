"""The demo: generator, tritonserver, backend and client in one run, without a GPU."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from deepseek_triton_build import PlanRequest, make_plan, repository_files, write_repository
from deepseek_triton_client import Client, Completion
from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.generating.completion_records import tokens_per_s
from deepseek_triton_tools.server.server_process import ServerProcess
from deepseek_triton_tools.terminal import tables
from deepseek_triton_tools.terminal.tables import Table, paragraph, show

PROMPTS = (
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
)
"""The prompts of TensorRT-LLM's quick start."""

_ABOUT = {
    "reference": "real forward passes of a tiny DeepSeek-V3, in numpy",
    "simulated": "a simulated engine: the pace is a deployment's, the words are filler text",
}


@dataclass(frozen=True)
class _Row:
    prompt: str
    protocol: str
    completion: Completion


def run_demo(*, engine: str, preset: str | None, max_tokens: int, tritonserver: Path | None) -> None:
    """Build a repository, serve it, ask it, show the answers, stop. Raises ToolError."""
    console = tables.console()
    started = time.monotonic()
    print(f"{paragraph(f'deepseek-triton demo: {_ABOUT[engine]}.', '')}\n", flush=True)
    checkpoint = "tiny" if engine == "reference" else "none"
    with tempfile.TemporaryDirectory(prefix="deepseek-triton-demo-") as scratch:
        repository = _build_repository(console, Path(scratch, "repository"), engine, preset)
        with _serve(console, repository, tritonserver) as server:
            rows = _ask_all(console, server, max_tokens)
    show(_table(rows, engine, preset, checkpoint))
    console.print(f"Stopped cleanly; {time.monotonic() - started:.0f} s in all.")


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
