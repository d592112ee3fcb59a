"""`deepseek-triton demo`: generator, tritonserver, backend and client in one run, without a GPU."""

import argparse
import json
import re
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from deepseek_triton_client import Client, Completion, Stream
from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.cli.parsing import VerbParser, add_tritonserver, option, positive
from deepseek_triton_tools.generating.records import tokens_per_s
from deepseek_triton_tools.server.server_process import ServerProcess
from deepseek_triton_tools.terminal import tables
from deepseek_triton_tools.terminal.tables import Table, paragraph, show, styled, visible


def add_options(verb: VerbParser) -> None:
    verb.runs(
        _demo, "deepseek-triton demo", "deepseek-triton demo --engine simulated --preset h200x8-r1-fp8-min-latency"
    )
    engines = ("reference", "simulated")
    text = "reference computes the answers, simulated sends filler text (default: %(default)s)"
    option(verb, "--engine", text, choices=engines, default=engines[0])
    option(verb, "--preset NAME", "the deployment whose speed the simulated engine imitates; an unknown name lists all")
    most = "default: 200; of the simulated engine, which always takes all, 32"
    option(verb, "--max-tokens N", f"the most tokens of an answer ({most})", positive)
    add_tritonserver(verb)


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

_ENGINES = {
    "reference": (
        "a DeepSeek-V3 of 14 million parameters, trained to answer short questions, on NVIDIA's tritonserver. It runs "
        "on this machine's CPU"
    ),
    "simulated": "a simulated engine on NVIDIA's tritonserver. The pace is a deployment's, the words are filler text",
}
"""Engine that needs no GPU -> what the demo shows of it."""
_MAX_TOKENS = {"reference": 200, "simulated": 32}

_ENDED_BY = {"stop": "the model", "length": "--max-tokens"}
"""Finish reason -> words for people."""


def _demo(args: argparse.Namespace) -> int:
    """Build a repository, serve it, ask it, show the answers, stop.

    :raises ToolError, BuildError, DeepseekTritonError: when a step fails; nothing is left running.
    """
    from deepseek_triton_build import PlanRequest, make_plan, repository_files, write_repository

    started, engine = time.monotonic(), args.engine
    plan = make_plan(PlanRequest(variant="tiny", engine=engine, preset=args.preset))
    print(f"{paragraph(f'deepseek-triton demo: {_ENGINES[engine]}.', '', '')}\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="deepseek-triton-demo-") as scratch:
        repository = Path(scratch, "repository")
        write_repository(repository_files(plan, version=__version__), repository)
        _say("repository", f"the files that Triton serves, in {repository} until the demo ends")
        with _serve(repository, args.tritonserver) as server:
            transcript = _Transcript(args.max_tokens or _MAX_TOKENS[engine])
            _talk(transcript, server)
            if engine == "reference":
                _use_tool(transcript, server)
    print()
    headings = ("prompt", "over", "first token", "tokens", "tokens/s", "ended by")
    title = f"Speed of the {engine} engine" + (f", paced as {args.preset}" if args.preset else "")
    show(Table(title=title, headings=headings, rows=transcript.rows, is_grid=True))
    print(f"Stopped cleanly; {time.monotonic() - started:.0f} s in all.")
    return 0


def _serve(repository: Path, tritonserver: Path | None) -> ServerProcess:
    started = time.monotonic()
    with tables.console().status("starting tritonserver") as status:
        server = ServerProcess.serving(
            repository,
            tritonserver=tritonserver,
            on_progress=lambda progress: status.update(f"loading the model, {progress.elapsed_s:.0f} s"),
        )
    ports = f"HTTP 127.0.0.1:{server.http_port}, gRPC 127.0.0.1:{server.grpc_port}"
    _say("tritonserver", f"ready after {time.monotonic() - started:.1f} s: {ports}")
    return server


class _Transcript:
    """Shows each answer while it comes, and keeps its figures as rows of a table."""

    def __init__(self, max_tokens: int) -> None:
        self.rows: list[tuple[str, ...]] = []
        self._max_tokens = max_tokens

    def complete(self, client: Client, prompt: str, protocol: str) -> None:
        _say("prompt", prompt if protocol == "HTTP" else f"{prompt} (over {protocol})")
        self._show(client.stream(prompt, max_tokens=self._max_tokens), prompt, protocol)

    def chat(self, client: Client, prompt: str, messages: list[dict[str, Any]], **template_kwargs: Any) -> Completion:
        stream = client.stream_chat(messages, max_tokens=self._max_tokens, chat_template_kwargs=template_kwargs)
        return self._show(stream, prompt, "HTTP")

    def _show(self, stream: Stream, prompt: str, protocol: str) -> Completion:
        with stream:
            chunks = ((("thinking", chunk.reasoning, _DIM), ("model", chunk.text, "")) for chunk in stream)
            _speak(part for parts in chunks for part in parts)
            completion = stream.completion()
        self.rows.append(
            (
                prompt,
                protocol,
                f"{(completion.time_to_first_token_s or 0) * 1000:.0f} ms",
                str(completion.num_output_tokens),
                f"{tokens_per_s(completion) or 0:.0f}",
                _ENDED_BY.get(completion.finish_reason or "", ""),
            )
        )
        return completion


def _talk(transcript: _Transcript, server: ServerProcess) -> None:
    with Client(f"http://127.0.0.1:{server.http_port}") as client:
        _head("Completion: the model goes on where a prompt ends")
        for prompt in PROMPTS:
            transcript.complete(client, prompt, "HTTP")
        with Client(f"grpc://127.0.0.1:{server.grpc_port}") as other:
            transcript.complete(other, PROMPTS[0], "gRPC")
        _head("Chat: the model thinks, then answers")
        _say("user", _TO_THINK_ABOUT)
        transcript.chat(client, _TO_THINK_ABOUT, [_user(_TO_THINK_ABOUT)], thinking=True)


def _use_tool(transcript: _Transcript, server: ServerProcess) -> None:
    """Offer a tool, play it when the model calls it, and have the model answer from the result."""
    _head("Tool call: the model asks for a tool, and answers from its result")
    parameters = ", ".join(_FUNCTION["parameters"]["properties"])
    _say("tool offered", f"{_FUNCTION['name']}({parameters}): {_FUNCTION['description']}")
    _say("user", _FOR_THE_TOOL)
    messages = [_user(_FOR_THE_TOOL)]
    with Client(f"http://127.0.0.1:{server.http_port}") as client:
        call = _CALL.search(transcript.chat(client, _FOR_THE_TOOL, messages, tools=_TOOLS).text)
        arguments = None
        with suppress(ValueError):
            arguments = call and json.dumps(json.loads(call[2]), ensure_ascii=False)
        if call is None or arguments is None:
            _say("demo", "That is no whole call. A larger --max-tokens gives the model more room.")
            return
        result = json.dumps(_RESULT)
        wrote = f"The model wrote a call in DeepSeek's form: {call[1]} with {arguments}."
        _say("demo", f"{wrote} This demo plays the tool and makes up a result.")
        _say("tool result", result)
        function = {"type": "function", "function": {"name": call[1], "arguments": arguments}}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [function]},
            {"role": "tool", "content": result},
        ]
        transcript.chat(client, "(the tool's result)", messages, tools=_TOOLS)


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _head(text: str) -> None:
    print(f"\n{styled(text, _BOLD)}\n")


def _say(label: str, text: str) -> None:
    _speak([(label, text, "")])


def _speak(parts: Iterable[tuple[str, str, str]]) -> None:
    """Print parts (label, text, style) as they come, wrapped between words, with the label where it changes."""
    from rich.cells import cell_len

    speaker, code, rest = "", "", ""
    column, is_apart = 0, False

    def put(word: str) -> None:
        nonlocal column, is_apart
        if not (bare := visible(word.strip())):
            return
        blank, is_apart = " " if is_apart else "", word[-1].isspace()
        if column and _LABEL + column + cell_len(blank + bare) > tables.width():
            print("\n" + " " * _LABEL, end="")
            column = 0
        shown = blank + bare if column else bare
        column += cell_len(shown)
        print(styled(shown, code) if code else shown, end="", flush=True)

    try:
        for label, text, style in parts:
            if text and label != speaker:
                if speaker:
                    put(rest)
                    print()
                print(styled(label.ljust(_LABEL), _CYAN), end="", flush=True)
                speaker, code, rest = label, style, ""
                column, is_apart = 0, False
            if text:
                *words, rest = _WORD_END.split(rest + text)
                for word in words:
                    put(word)
    finally:
        if speaker:
            put(rest)
            print()
