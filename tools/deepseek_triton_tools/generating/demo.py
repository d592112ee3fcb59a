"""The demo: generator, tritonserver, backend and client in one run, without a GPU."""

from __future__ import annotations

import json
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console

from deepseek_triton_build import PlanRequest, make_plan, repository_files, write_repository
from deepseek_triton_client import Client, Completion, Stream
from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.generating.completion_records import tokens_per_s
from deepseek_triton_tools.server.server_process import ServerProcess
from deepseek_triton_tools.terminal import tables
from deepseek_triton_tools.terminal.tables import Table, paragraph, show, styled, visible

PROMPTS = (
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
)
"""The prompts of TensorRT-LLM's quick start."""

_TO_THINK_ABOUT = "What is 27 + 45?"
_FOR_THE_TOOL = "What is the weather in Oslo?"
_FUNCTION: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_RESULT = {"temperature": 12, "sky": "cloudy"}
_CALL = re.compile(r"<｜tool▁call▁begin｜>(.+?)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>", re.DOTALL)
"""A call in the form of DeepSeek-V3.1's model card: name, arguments as JSON."""

_WORD_END = re.compile(r"(?<=\s)(?=\S)|(?<=｜>)")
"""Where a line may be broken: before a word, and after a special token."""

_BOLD, _DIM, _CYAN = "1", "2", "36"
_LABEL = 14
"""Columns of the labels on the left."""


@dataclass(frozen=True)
class _Embedded:
    """An engine that needs no GPU, and what the demo shows of it."""

    about: str
    max_tokens: int
    calls_tools: bool


_ENGINES = {
    "reference": _Embedded(
        "a DeepSeek-V3 of 14 million parameters, trained to answer short questions, on NVIDIA's tritonserver. It runs "
        "on this machine's CPU",
        max_tokens=200,
        calls_tools=True,
    ),
    "simulated": _Embedded(
        "a simulated engine on NVIDIA's tritonserver. The pace is a deployment's, the words are filler text",
        max_tokens=32,
        calls_tools=False,
    ),
}


def run_demo(*, engine: str, preset: str | None, max_tokens: int | None, tritonserver: Path | None) -> None:
    """Build a repository, serve it, ask it, show the answers, stop.

    :param max_tokens: most tokens of an answer; None for what suits the engine.
    :raises ToolError, BuildError, DeepseekTritonError: when a step fails; nothing is left running.
    """
    console = tables.console()
    started = time.monotonic()
    embedded = _ENGINES[engine]
    print(f"{paragraph(f'deepseek-triton demo: {embedded.about}.', '', '')}\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="deepseek-triton-demo-") as scratch:
        repository = Path(scratch, "repository")
        plan = make_plan(PlanRequest(variant="tiny", engine=engine, preset=preset))
        write_repository(repository_files(plan, version=__version__), repository)
        _say("repository", f"the files that Triton serves, in {repository} until the demo ends")
        with _serve(console, repository, tritonserver) as server:
            transcript = _Transcript(max_tokens or embedded.max_tokens)
            _talk(transcript, server, with_tool=embedded.calls_tools)
    print()
    show(_table(transcript.rows, engine, preset))
    print(f"Stopped cleanly; {time.monotonic() - started:.0f} s in all.")


def _serve(console: Console, repository: Path, tritonserver: Path | None) -> ServerProcess:
    started = time.monotonic()
    with console.status("starting tritonserver") as status:
        server = ServerProcess.serving(
            repository,
            tritonserver=tritonserver,
            on_progress=lambda progress: status.update(f"loading the model, {progress.elapsed_s:.0f} s"),
        )
    ports = f"HTTP 127.0.0.1:{server.http_port}, gRPC 127.0.0.1:{server.grpc_port}"
    _say("tritonserver", f"ready after {time.monotonic() - started:.1f} s: {ports}")
    return server


def _talk(transcript: _Transcript, server: ServerProcess, *, with_tool: bool) -> None:
    with Client(f"http://127.0.0.1:{server.http_port}") as client:
        _head("Completion: the model goes on where a prompt ends")
        for prompt in PROMPTS:
            transcript.complete(client, prompt, "HTTP")
        with Client(f"grpc://127.0.0.1:{server.grpc_port}") as other:
            transcript.complete(other, PROMPTS[0], "gRPC")
        _head("Chat: the model thinks, then answers")
        _say("user", _TO_THINK_ABOUT)
        transcript.chat(client, _TO_THINK_ABOUT, [_user(_TO_THINK_ABOUT)], {"thinking": True})
        if with_tool:
            _head("Tool call: the model asks for a tool, and answers from its result")
            _use_tool(transcript, client)


def _use_tool(transcript: _Transcript, client: Client) -> None:
    """Offer a tool, play it when the model calls it, and have the model answer from the result."""
    _say(
        "tool offered",
        f"{_FUNCTION['name']}({', '.join(_FUNCTION['parameters']['properties'])}): {_FUNCTION['description']}",
    )
    _say("user", _FOR_THE_TOOL)
    messages = [_user(_FOR_THE_TOOL)]
    call = _call(transcript.chat(client, _FOR_THE_TOOL, messages, {"tools": _TOOLS}).text)
    if call is None:
        _say("demo", "That is no whole call. A larger --max-tokens gives the model more room.")
        return
    name, arguments = call
    result = json.dumps(_RESULT)
    wrote = f"The model wrote a call in DeepSeek's form: {name} with {arguments}."
    _say("demo", f"{wrote} This demo plays the tool and makes up a result.")
    _say("tool result", result)
    called = {"type": "function", "function": {"name": name, "arguments": arguments}}
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "content": result},
    ]
    transcript.chat(client, "(the tool's result)", messages, {"tools": _TOOLS})


def _call(text: str) -> tuple[str, str] | None:
    """Return name and arguments, as JSON, of the first whole call in `text`."""
    found = _CALL.search(text)
    if found is None:
        return None
    try:
        return found[1], json.dumps(json.loads(found[2]), ensure_ascii=False)
    except ValueError:
        return None


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@dataclass(frozen=True)
class _Row:
    prompt: str
    protocol: str
    completion: Completion


class _Transcript:
    """Shows each answer while it comes, and keeps its figures."""

    def __init__(self, max_tokens: int) -> None:
        self.rows: list[_Row] = []
        self._max_tokens = max_tokens

    def complete(self, client: Client, prompt: str, protocol: str) -> None:
        _say("prompt", prompt if protocol == "HTTP" else f"{prompt} (over {protocol})")
        self._show(client.stream(prompt, max_tokens=self._max_tokens), prompt, protocol)

    def chat(
        self, client: Client, prompt: str, messages: list[dict[str, Any]], template_kwargs: dict[str, Any]
    ) -> Completion:
        stream = client.stream_chat(messages, max_tokens=self._max_tokens, chat_template_kwargs=template_kwargs)
        return self._show(stream, prompt, "HTTP")

    def _show(self, stream: Stream, prompt: str, protocol: str) -> Completion:
        part: _Part | None = None
        try:
            with stream:
                for chunk in stream:
                    for label, text, style in (("thinking", chunk.reasoning, _DIM), ("model", chunk.text, "")):
                        if not text:
                            continue
                        if part is None or part.label != label:
                            if part is not None:
                                part.end()
                            part = _Part(label, style)
                        part.write(text)
        finally:
            if part is not None:
                part.end()
        completion = stream.completion()
        self.rows.append(_Row(prompt, protocol, completion))
        return completion


class _Part:
    """One part of the transcript: a label, then text that is written as it comes and wrapped between words."""

    def __init__(self, label: str, style: str = "") -> None:
        self.label = label
        self._style = style
        self._column = 0
        self._word = ""
        self._blank = False
        print(styled(label.ljust(_LABEL), _CYAN), end="", flush=True)

    def write(self, text: str) -> None:
        *words, self._word = _WORD_END.split(self._word + text)
        for word in words:
            self._put(word)

    def end(self) -> None:
        self._put(self._word)
        print()

    def _put(self, word: str) -> None:
        bare = visible(word.strip())
        if not bare:
            return
        blank = " " if self._blank else ""
        self._blank = word[-1].isspace()
        if self._column and _LABEL + self._column + cell_len(blank + bare) > tables.width():
            print("\n" + " " * _LABEL, end="")
            self._column = 0
        shown = blank + bare if self._column else bare
        self._column += cell_len(shown)
        print(styled(shown, self._style) if self._style else shown, end="", flush=True)


def _say(label: str, text: str) -> None:
    part = _Part(label)
    part.write(text)
    part.end()


def _head(text: str) -> None:
    print(f"\n{styled(text, _BOLD)}\n")


_ENDED_BY = {"stop": "the model", "length": "--max-tokens"}
"""Finish reason -> words for people."""


def _table(rows: list[_Row], engine: str, preset: str | None) -> Table:
    pace = f", paced as {preset}" if preset else ""
    cells = [
        (
            row.prompt,
            row.protocol,
            f"{(row.completion.time_to_first_token_s or 0) * 1000:.0f} ms",
            str(row.completion.num_output_tokens),
            f"{tokens_per_s(row.completion) or 0:.0f}",
            _ENDED_BY.get(row.completion.finish_reason or "", ""),
        )
        for row in rows
    ]
    headings = ("prompt", "over", "first token", "tokens", "tokens/s", "ended by")
    return Table(title=f"Speed of the {engine} engine{pace}", headings=headings, rows=cells, is_grid=True)
