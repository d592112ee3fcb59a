"""/v1/responses: a chat with other words around it. Nothing is kept, so no response can be asked for later."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from deepseek_triton_tools.gateway.api_route import ApiRequest
from deepseek_triton_tools.gateway.chat import ChatChoice, chat_parts, give
from deepseek_triton_tools.gateway.chat_request import ChatRequest
from deepseek_triton_tools.gateway.model_front import log_failure, openai_error
from deepseek_triton_tools.gateway.openai_answers import TokenCounts
from deepseek_triton_tools.gateway.responses_output import ResponseWriter
from deepseek_triton_tools.gateway.responses_request import not_kept, read_responses_request
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
        self._stream = chat.stream

    @property
    def finish_reason(self) -> str:
        return self.choice.finish_reason

    @property
    def done(self) -> bool:
        return self.choice.done

    complete = done  # calls end the only answer, though the model would go on

    def begin(self) -> bytes:
        return self._writer.begin()

    def take(self, parts: Iterable[Part]) -> bytes:
        events = b""
        for part in parts:
            self.counts.add(part)
            if not self.choice.done:
                events += self._writer.reasoning(part.reasoning) if part.reasoning else b""
                events += self._write(self.choice.take(part))
        return events

    def end(self) -> bytes:
        if self.choice.finish_reason == "length":
            events = self._writer.end("incomplete", usage=self._usage(), reason="max_output_tokens")
        else:
            events = self._writer.end("completed", usage=self._usage())
        return events if self._stream else msgspec.json.encode(self._writer.document)

    def fail(self, code: str, message: str) -> bytes:
        """The last events of a response whose first events a client has already."""
        return self._writer.end("failed", usage=self._usage(), error={"code": code, "message": message})

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
    name, model = await request.model(asked.chat.model, asked.chat.most_tokens)
    answer = ResponsesAnswer(ResponseWriter(name, asked.echoed), asked.chat)
    exchange = request.exchange
    try:
        await give(request, answer, chat_parts(request, asked.chat, model), stream=asked.chat.stream)
    except UpstreamError as error:
        if not exchange.has_events:
            raise
        log_failure(exchange.record, error)
        code = "rate_limit_exceeded" if error.code == "E_OVERLOADED" else "server_error"
        exchange.record.error_code = code
        await exchange.end_stream(answer.fail(code, openai_error(error, exchange.record.route).message))


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
