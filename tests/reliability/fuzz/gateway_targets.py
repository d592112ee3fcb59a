"""The parsers of the gateway: what clients ask, what servers answer, what models write, what operators list."""

import asyncio
import json
import socket
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import msgspec
from starlette.testclient import TestClient

from deepseek_triton_tools.gateway import tool_call_parser
from deepseek_triton_tools.gateway.chat import AnswerCalls
from deepseek_triton_tools.gateway.chat_request import read_chat_request
from deepseek_triton_tools.gateway.completions import read_completion_request
from deepseek_triton_tools.gateway.fleet_member import ToldModel
from deepseek_triton_tools.gateway.guard import KeysFileError, parse_keys
from deepseek_triton_tools.gateway.openai_answers import chat_logprobs, completion_logprobs
from deepseek_triton_tools.gateway.openai_fields import OpenAIError
from deepseek_triton_tools.gateway.responses_request import read_responses_request
from deepseek_triton_tools.gateway.settings import ServersFile, SourceError, parse_source
from deepseek_triton_tools.gateway.triton_call import EventReader, UpstreamError, error_of_status, outputs_of
from deepseek_triton_tools.gateway.triton_server import ConnectionFailed, TritonConnection
from deepseek_triton_tools.tool_errors import ToolError
from gateway.scripted_triton import ScriptedTriton, gateway_of
from reliability.fuzz.mutation import cuts
from reliability.fuzz.refusals import LONGEST_MESSAGE, check_message, may_refuse

ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/tokenize",
    "/detokenize",
)


def _reads(read: Callable[[object], object]) -> Callable[[bytes], None]:
    """RecursionError is the route's to answer, which says that the values are nested too deep."""

    def target(data: bytes) -> None:
        try:
            document = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        try:
            read(document)
        except RecursionError:
            assert data.count(b"[") + data.count(b"{") > 100
        except OpenAIError as error:
            check_message(error.message)
            error.body()

    return target


chat_request = _reads(read_chat_request)
completion_request = _reads(read_completion_request)
responses_request = _reads(read_responses_request)


def gateway_app(data: bytes) -> None:
    """A request to the application, in front of a server: its number among ROUTES, and its body."""
    route = ROUTES[data[0] % len(ROUTES)] if data else ROUTES[0]
    client = _app()
    answer = client.post(route, content=data[1:], headers={"content-type": "application/json"})
    assert answer.status_code < 500, f"{answer.status_code}: {answer.text[:500]}"
    if answer.status_code != 200:
        error = answer.json()["error"]
        check_message(error["message"])
        assert len(error["param"] or "") <= LONGEST_MESSAGE


_CLOSED = ExitStack()
"""Ends the application and its server when the process ends."""


@cache
def _app() -> TestClient:
    triton = ScriptedTriton()
    triton.events = (
        {
            "text_output": "Hi.",
            "finish_reason": "stop",
            "num_input_tokens": 2,
            "num_output_tokens": 2,
            "output_ids": [1, 2],
            "logprobs": '[{"1": {"logprob": -0.5, "rank": 1, "decoded_token": "Hi"}}]',
        },
    )
    return _CLOSED.enter_context(gateway_of(triton))


def close_app() -> None:
    _CLOSED.close()
    _app.cache_clear()


def tool_calls(data: bytes) -> None:
    """A model's text with calls. The pieces joined do not depend on where the text is cut, and none is lost."""
    text = data.decode("utf-8", "replace")
    results = set()
    for pieces in ([text], list(text), [text[at : at + 5] for at in range(0, len(text), 5)]):
        parser = tool_call_parser.ToolCallParser()
        results.add(_put_together([each for piece in pieces for each in parser.feed(piece)] + parser.end()))
    assert len(results) == 1, results
    for options in ({"drop": True}, {"only_first": True}, {}):
        calls = AnswerCalls(**options)
        for piece in [*calls.feed(text), *calls.end()]:
            if isinstance(piece, tool_call_parser.CallBegins | tool_call_parser.ArgumentsPiece):
                json.loads(calls.delta(piece))


def _put_together(pieces: Iterable[tool_call_parser.ParsedPiece]) -> tuple[str, tuple[tuple[str, str, bool], ...]]:
    text, calls, arguments = "", [], ""
    for piece in pieces:
        if isinstance(piece, tool_call_parser.TextPiece):
            text += piece.text
        elif isinstance(piece, tool_call_parser.CallBegins):
            calls.append((piece.name, "", True))
            arguments = ""
        elif isinstance(piece, tool_call_parser.ArgumentsPiece):
            arguments += piece.text
        elif isinstance(piece, tool_call_parser.CallEnds):
            calls[-1] = (calls[-1][0], arguments, piece.cut)
    return text, tuple(calls)


def upstream_events(data: bytes) -> None:
    """A server's event stream."""
    results = set()
    for pieces in ([data], cuts(data), [data[at : at + 1] for at in range(len(data))]):
        reader = EventReader()
        parts = []
        for piece in pieces:
            if reader.error is None:
                parts += reader.feed(piece)
        if reader.error is not None:
            check_message(str(reader.error) or "x")
        results.add((repr(parts), str(reader.error)))
    assert len(results) == 1, results
    with may_refuse(UpstreamError):
        outputs_of(data)


def upstream_error(data: bytes) -> None:
    """A server's answer of another status than 200: the status in two bytes, and the body."""
    str(error_of_status(400 + int.from_bytes(data[:1], "little") % 200, data[1:]))


def upstream_http(data: bytes) -> None:
    """The bytes of a connection to a server."""
    asyncio.run(_read_connection(data))


async def _read_connection(data: bytes) -> None:
    connection = TritonConnection()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: connection, sock=ours)
        connection.send(b"GET / HTTP/1.1\r\n\r\n")
        for piece in cuts(data):
            connection.data_received(piece)
        connection.connection_lost(None)
        try:
            await connection.status()
            await connection.read_all()
        except ConnectionFailed:
            pass
        finally:
            transport.abort()


def upstream_logprobs(data: bytes) -> None:
    """Log-probabilities in a server's answer, which has been decoded as text."""
    text = data.decode("utf-8", "replace")
    with may_refuse(OpenAIError):
        chat_logprobs(text, 3)
        completion_logprobs([text], 3, echoed="Hi")


def upstream_model_info(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    with may_refuse(msgspec.MsgspecError, RecursionError):  # as who asks for it takes them
        str(msgspec.json.decode(text, type=ToldModel).identity)


def keys_file(data: bytes) -> None:
    try:
        parse_keys(data.decode("utf-8", "replace"))
    except KeysFileError as error:
        for problem in str(error).split("; line "):
            check_message(problem)


def servers_file(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "servers")
        path.write_bytes(data)
        try:
            asyncio.run(ServersFile("file:servers", path).read())
        except SourceError as error:
            for problem in str(error).split("; "):
                check_message(problem)


def server_option(data: bytes) -> None:
    with may_refuse(SourceError):
        parse_source(data.decode("utf-8", "replace"))


def gateway_options(data: bytes) -> None:
    """The file of --config."""
    from deepseek_triton_tools.cli import gateway as command
    from deepseek_triton_tools.cli.main import _parsed

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "gateway.yaml")
        path.write_bytes(data)
        try:
            command.settings_of(_parsed(["gateway", "--config", str(path)], "gateway"))
        except ToolError as error:
            for problem in str(error).split("; "):
                check_message(problem)
