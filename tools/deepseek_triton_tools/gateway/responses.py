"""/v1/responses: a chat with other words around it. Nothing is kept, so no response can be asked for later."""

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from deepseek_triton_tools.gateway.api_route import ApiRequest
from deepseek_triton_tools.gateway.chat import ChatChoice, chat_parts
from deepseek_triton_tools.gateway.chat_request import EFFORT, ChatRequest
from deepseek_triton_tools.gateway.model_front import log_failure, openai_error
from deepseek_triton_tools.gateway.openai_answers import Answer, give
from deepseek_triton_tools.gateway.openai_fields import OpenAIError, invalid
from deepseek_triton_tools.gateway.responses_request import NO_STATE, read_responses_request
from deepseek_triton_tools.gateway.tool_call_parser import ArgumentsPiece, CallBegins, TextPiece
from deepseek_triton_tools.gateway.triton_call import Part, UpstreamError

_encode = msgspec.json.encode

EndStatus = Literal["completed", "incomplete", "failed"]


@dataclass(slots=True)
class _Item:
    """The output item that grows.

    stem: of the types of its events. document: what clients get of it; its text is put in at the end. part: its one
    part of content as it begins; None for a call, which has none.
    """

    stem: str
    document: dict[str, object]
    part: dict[str, object] | None
    pieces: list[str] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)


class ResponseWriter:
    """Puts a response together from the pieces of the model's output, in their order.

    Each method returns the server-sent events that tell a streaming client of it; without a stream they are left
    unused. One item grows at a time: a piece that belongs to another item ends it.
    """

    def __init__(self, model: str, echoed: Mapping[str, object]) -> None:
        """echoed: fields of the request that the response repeats."""
        self.number = 0
        self._output: list[dict[str, object]] = []
        self._item: _Item | None = None
        self.document: dict[str, object] = {
            "id": _new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": self._output,
            "previous_response_id": None,
            "service_tier": "default",
            # Whatever the request says: a client that believed true would send the next id instead of the items.
            "store": False,
            "truncation": "disabled",
            **echoed,
        }
        """The response as it is now."""

    def begin(self) -> bytes:
        return self._event("response.created", {"response": self.document}) + self._event(
            "response.in_progress", {"response": self.document}
        )

    def reasoning(self, text: str) -> bytes:
        events = b""
        if self._item is None or self._item.stem != "reasoning_text":
            document = {"type": "reasoning", "summary": [], "content": []}
            events = self._begin_item("reasoning_text", "rs", document, {"type": "reasoning_text", "text": ""})
        return events + self._delta(text, b'"content_index":0,')

    def text(self, text: str, logprobs: Sequence[object] = ()) -> bytes:
        """logprobs: of the tokens of this text, in OpenAI's form."""
        events = b""
        if self._item is None or self._item.stem != "output_text":
            part: dict[str, object] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            document = {"type": "message", "role": "assistant", "content": []}
            events = self._begin_item("output_text", "msg", document, part)
        assert self._item is not None
        self._item.logprobs += logprobs
        extra = b'"content_index":0,"logprobs":' + (_encode(list(logprobs)) if logprobs else b"[]") + b","
        return events + self._delta(text, extra)

    def begin_call(self, call_id: str, name: str) -> bytes:
        document = {"type": "function_call", "call_id": call_id, "name": name, "arguments": ""}
        return self._begin_item("function_call_arguments", "fc", document, None)

    def arguments(self, text: str) -> bytes:
        return self._delta(text)

    def end_call(self, *, cut: bool = False) -> bytes:
        return self._end_item("incomplete" if cut else "completed")

    def end(
        self,
        status: EndStatus,
        *,
        usage: Mapping[str, object] | None = None,
        reason: str | None = None,
        error: Mapping[str, object] | None = None,
    ) -> bytes:
        """reason: why the response is incomplete. error: {code, message} of one that failed."""
        events = self._end_item("completed" if status == "completed" else "incomplete")
        completed_at = int(time.time()) if status == "completed" else None
        details = {"reason": reason} if reason is not None else None
        ended = {"status": status, "error": error, "completed_at": completed_at, "incomplete_details": details}
        self.document |= ended if usage is None else {**ended, "usage": usage}
        return events + self._event(f"response.{status}", {"response": self.document})

    def _begin_item(
        self, stem: str, prefix: str, document: Mapping[str, object], part: dict[str, object] | None
    ) -> bytes:
        events = self._end_item()
        self._item = _Item(stem, {"id": _new_id(prefix), **document, "status": "in_progress"}, part)
        self._output.append(self._item.document)
        events += self._event("response.output_item.added", {"output_index": self._index, "item": self._item.document})
        if part is not None:
            events += self._event("response.content_part.added", {**self._place(self._item), "part": part})
        return events

    def _delta(self, text: str, extra: bytes = b"") -> bytes:
        item = self._item
        assert item is not None
        item.pieces.append(text)
        self.number += 1
        kind = b"response.%b.delta" % item.stem.encode()
        # A template, because this is the one event of which there are many. Ids and types need no escapes.
        return (
            b'event: %b\ndata: {"type":"%b","sequence_number":%d,"item_id":"%b","output_index":%d,%b"delta":%b}\n\n'
            % (kind, kind, self.number - 1, str(item.document["id"]).encode(), self._index, extra, _encode(text))
        )

    def _end_item(self, status: str = "completed") -> bytes:
        item = self._item
        if item is None:
            return b""
        item.document["status"] = status
        text, place = "".join(item.pieces), self._place(item)
        if item.part is None:
            item.document["arguments"] = text
            whole = {"name": item.document["name"], "arguments": text}
            events = self._event(f"response.{item.stem}.done", {**place, **whole})
        else:
            logprobs = {"logprobs": item.logprobs} if "logprobs" in item.part else {}
            part = {**item.part, "text": text, **logprobs}
            item.document["content"] = [part]
            events = self._event(f"response.{item.stem}.done", {**place, "text": text, **logprobs})
            events += self._event("response.content_part.done", {**place, "part": part})
        events += self._event("response.output_item.done", {"output_index": self._index, "item": item.document})
        self._item = None
        return events

    def _place(self, item: _Item) -> dict[str, object]:
        place = {"item_id": item.document["id"], "output_index": self._index}
        return place if item.part is None else {**place, "content_index": 0}

    @property
    def _index(self) -> int:
        return len(self._output) - 1

    def _event(self, kind: str, fields: Mapping[str, object]) -> bytes:
        data = _encode({"type": kind, "sequence_number": self.number, **fields})
        self.number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


class ResponsesAnswer(Answer):
    """Takes the parts of an answer, and returns the events that tell a client of them."""

    def __init__(self, writer: ResponseWriter, chat: ChatRequest) -> None:
        """chat: the chat request that asks the same."""
        self.choice = ChatChoice(chat)
        super().__init__([self.choice])
        self._writer = writer
        self._stream = chat.stream

    @property
    def complete(self) -> bool:  # type: ignore[override]
        return self.done  # calls end the only answer, though the model would go on

    def begin(self) -> bytes:
        return self._writer.begin()

    def take(self, parts: Iterable[Part]) -> bytes:
        events = b""
        for part in parts:
            self.counts.add(part)
            if self.done:
                continue
            if part.reasoning:
                events += self._writer.reasoning(part.reasoning)
            for piece in self.choice.take(part):
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

    def end(self) -> bytes:
        if (self.choice.finish_reason, self.choice.stop_reason) == ("length", "cancelled"):
            events = self.fail("server_error", "The server ended the answer before it was complete.")
        elif self.choice.finish_reason == "length":
            events = self._writer.end("incomplete", usage=self._usage(), reason="max_output_tokens")
        else:
            events = self._writer.end("completed", usage=self._usage())
        return events if self._stream else _encode(self._writer.document)

    def fail(self, code: str, message: str) -> bytes:
        """The last events of a response that has begun, which keeps what there is of it."""
        return self._writer.end("failed", usage=self._usage(), error={"code": code, "message": message})

    def _usage(self) -> dict[str, object]:
        counts = self.counts
        return {
            "input_tokens": counts.num_input,
            "input_tokens_details": {"cached_tokens": counts.num_cached or 0, "cache_write_tokens": 0},
            "output_tokens": counts.num_output,
            "output_tokens_details": {"reasoning_tokens": counts.num_reasoning or 0},
            "total_tokens": counts.num_input + counts.num_output,
        }


_PROMPT_INPUTS = ("messages", "tools", "tool_choice", "chat_template_kwargs", EFFORT, "sampling_parameters")
"""The inputs that a prompt is made of."""


async def create_response(request: ApiRequest) -> None:
    asked = read_responses_request(request.document)
    turns = (turn for turn in reversed(asked.chat.messages) if isinstance(turn, dict))
    last = next((turn for turn in turns if turn["role"] not in ("system", "developer")), {})
    if last.get("role") == "assistant":  # chat's way to have it continued is not this API's
        hint = "the outputs of its calls" if last.get("tool_calls") else "a message of the user"
        raise invalid(f"input: expected {hint} at the end, got an answer of the assistant.", param="input")
    name, model = await request.model(asked.chat.model, asked.chat.most_tokens)
    writer = ResponseWriter(name, asked.echoed)
    answer = ResponsesAnswer(writer, asked.chat)
    exchange = request.exchange
    try:
        await give(request, answer, chat_parts(request, asked.chat, model), stream=asked.chat.stream)
    except UpstreamError as error:
        if not exchange.has_events:
            raise
        log_failure(exchange.record, error)
        code = "rate_limit_exceeded" if error.code == "E_OVERLOADED" else "server_error"
        exchange.record.error_code = code
        message = openai_error(error, exchange.record.route, request.document).message
        await exchange.end_stream(answer.fail(code, message))
    finally:
        exchange.num_events = writer.number


async def count_input_tokens(request: ApiRequest) -> None:
    """How long the prompt of a request would be. Nothing is generated."""
    chat = read_responses_request(request.document).chat
    _, model = await request.model(chat.model)
    inputs = {name: chat.inputs[name] for name in _PROMPT_INPUTS if name in chat.inputs}
    outputs = await model.ask({"text_input": "", "task": "tokenize", **inputs})
    document = {"object": "response.input_tokens", "input_tokens": int(str(outputs["num_input_tokens"]))}
    await request.exchange.respond(200, msgspec.json.encode(document))


async def kept_response(request: ApiRequest) -> None:
    response_id = request.exchange.path_parameters["ID"]
    message = f"No response with the id {response_id!r} is here, because {NO_STATE}."
    raise OpenAIError(404, message, param="response_id", code="response_not_found")
