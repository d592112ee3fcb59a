"""/v1/responses: a chat with other words around it. Nothing is kept, so no response can be asked for later."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing

import msgspec

from deepseek_triton_tools.gateway.api_route import ApiRequest
from deepseek_triton_tools.gateway.chat import UNFINISHED, ChatChoice, generate, note
from deepseek_triton_tools.gateway.chat_request import ChatRequest
from deepseek_triton_tools.gateway.model_front import log_failure, openai_error
from deepseek_triton_tools.gateway.openai_answers import TokenCounts
from deepseek_triton_tools.gateway.responses_output import ResponseWriter
from deepseek_triton_tools.gateway.responses_request import not_kept, read_responses_request
from deepseek_triton_tools.gateway.routing import affinity_key
from deepseek_triton_tools.gateway.tool_call_parser import (
    ArgumentsPiece,
    CallBegins,
    ParsedPiece,
    TextPiece,
)
from deepseek_triton_tools.gateway.triton_call import Part, UpstreamError


class ResponsesAnswer:
    """Takes the parts of an answer, and returns the events that tell a client of them."""

    def __init__(self, writer: ResponseWriter, chat: ChatRequest) -> None:
        """chat: the chat request that asks the same."""
        self.counts = TokenCounts()
        self.choice = ChatChoice(chat)
        self._writer = writer

    def take(self, parts: Iterable[Part]) -> bytes:
        events = b""
        for part in parts:
            self.counts.add(part)
            if not self.choice.done:
                events += self._take(part)
        return events

    def end(self) -> bytes:
        """The last events, after all parts."""
        if self.choice.finish_reason == "length":
            return self._writer.end("incomplete", usage=self._usage(), reason="max_output_tokens")
        return self._writer.end("completed", usage=self._usage())

    def fail(self, code: str, message: str) -> bytes:
        """The last events of a response whose first events a client has already."""
        return self._writer.end("failed", usage=self._usage(), error={"code": code, "message": message})

    def _take(self, part: Part) -> bytes:
        events = self._writer.reasoning(part.reasoning) if part.reasoning else b""
        return events + self._write(self.choice.take(part))

    def _write(self, pieces: Sequence[ParsedPiece]) -> bytes:
        events = b""
        for piece in pieces:
            if isinstance(piece, TextPiece):
                events += self._writer.text(piece.text, self.choice.logprobs)
                self.choice.logprobs = []  # those of the next text
            elif isinstance(piece, ArgumentsPiece):
                events += self._writer.arguments(piece.text)
            elif isinstance(piece, CallBegins):
                assert self.choice.calls is not None
                events += self._writer.begin_call(self.choice.calls.calls[piece.index].call_id, piece.name)
            else:
                events += self._writer.end_call(cut=piece.cut)
        return events

    def _usage(self) -> dict[str, object]:
        counts = self.counts
        return {
            "input_tokens": counts.num_input,
            "input_tokens_details": {"cached_tokens": counts.num_cached, "cache_write_tokens": 0},
            "output_tokens": counts.num_output,
            "output_tokens_details": {"reasoning_tokens": counts.num_reasoning},
            "total_tokens": counts.num_input + counts.num_output,
        }


_PROMPT_INPUTS = ("messages", "tools", "tool_choice", "chat_template_kwargs")
"""The inputs that a prompt is made of."""


async def create_response(request: ApiRequest) -> None:
    asked = read_responses_request(request.document)
    chat = asked.chat
    name, model = await request.model(chat.model, chat.most_tokens)
    record = request.exchange.record
    record.stream = chat.stream
    # Calls may make the rest of an answer unwanted, which is seen in time only while it streams.
    inputs = {**chat.inputs, "streaming": chat.stream or chat.only_first_call}
    affinity = affinity_key([m for m in chat.messages if isinstance(m, dict)], hint=chat.cache_key)
    writer = ResponseWriter(name, asked.echoed)
    answer = ResponsesAnswer(writer, chat)
    parts = generate(model, record, inputs, affinity, copies=chat.copies)
    async with aclosing(parts):
        try:
            if chat.stream:
                await _stream(request, writer, answer, parts)
            else:
                await _respond(request, writer, answer, parts)
        finally:
            note(record, answer.counts)
            record.finish_reason = answer.choice.finish_reason


async def count_input_tokens(request: ApiRequest) -> None:
    """How long the prompt of a request would be. Nothing is generated."""
    chat = read_responses_request(request.document).chat
    _, model = await request.model(chat.model)
    inputs = {name: chat.inputs[name] for name in _PROMPT_INPUTS if name in chat.inputs}
    outputs = await model.ask({"text_input": "", "task": "tokenize", **inputs})
    document = {"object": "response.input_tokens", "input_tokens": int(str(outputs["num_input_tokens"]))}
    await request.exchange.respond(200, msgspec.json.encode(document))


async def kept_response(request: ApiRequest) -> None:
    raise not_kept(request.exchange.path_parameters["response_id"])


async def _stream(
    request: ApiRequest, writer: ResponseWriter, answer: ResponsesAnswer, parts: AsyncGenerator[list[Part], None]
) -> None:
    exchange = request.exchange
    exchange.expect_stream()
    try:
        async for some in parts:
            if not exchange.has_events:
                # Only now, so that a refusal of the server is a response with its own status.
                await exchange.start_stream()
                await exchange.send_events(writer.begin() + answer.take(some))
            elif events := answer.take(some):
                await exchange.send_events(events)
            if answer.choice.done:
                break
        if not answer.choice.done:
            raise UNFINISHED
    except UpstreamError as error:
        if not exchange.has_events:
            raise
        log_failure(exchange.record, error)
        code = "rate_limit_exceeded" if error.code == "E_OVERLOADED" else "server_error"
        exchange.record.error_code = code
        await exchange.end_stream(answer.fail(code, openai_error(error, exchange.record.route).message))
    else:
        await exchange.end_stream(answer.end())


async def _respond(
    request: ApiRequest, writer: ResponseWriter, answer: ResponsesAnswer, parts: AsyncGenerator[list[Part], None]
) -> None:
    async for some in parts:
        answer.take(some)
        if answer.choice.done:
            break
    if not answer.choice.done:
        raise UNFINISHED
    answer.end()
    await request.exchange.respond(200, msgspec.json.encode(writer.document))
