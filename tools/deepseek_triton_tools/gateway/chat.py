"""POST /v1/chat/completions: asks the model and answers with a chat completion, whole or as the chunks of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec
from msgspec import structs

from deepseek_triton_tools.gateway.answer_calls import AnswerCalls
from deepseek_triton_tools.gateway.api_route import ApiRequest
from deepseek_triton_tools.gateway.chat_request import ChatRequest, read_chat_request
from deepseek_triton_tools.gateway.model_front import ModelFront
from deepseek_triton_tools.gateway.observers import HandledRequest
from deepseek_triton_tools.gateway.openai_answers import TokenCounts, chat_logprobs, finish_of
from deepseek_triton_tools.gateway.openai_fields import COUNTS
from deepseek_triton_tools.gateway.routing import affinity_key
from deepseek_triton_tools.gateway.tool_call_parser import ArgumentsPiece, CallBegins, ParsedPiece, TextPiece
from deepseek_triton_tools.gateway.triton_call import Call, Part, UpstreamError

UNFINISHED = UpstreamError("the server ended its response before the answer's end")
"""For a response that is complete HTTP, and whose answer lacks its last part."""


async def generate(
    model: ModelFront,
    record: HandledRequest,
    inputs: dict[str, object],
    affinity: bytes | None,
    *,
    suffix: str = "",
    copies: int = 1,
) -> AsyncGenerator[list[Part], None]:
    """The model's answer, with what the record has to know of the way to it.

    suffix: of the request's id at the server. copies: how many sequences the answer's one is given as.
    """
    if record.counts_responses:
        inputs = {**inputs, **COUNTS}
    call = Call(inputs, record.upstream_id + suffix, affinity, record.upstream_headers, [], [])
    try:
        async with aclosing(model.fleet.generate(call)) as answer:
            async for parts in answer:
                record.token_came()
                if copies > 1:
                    # Tokens of a copy were generated once, so they count once.
                    parts = parts + [
                        structs.replace(part, sequence=number, num_output_tokens=0, num_reasoning_tokens=0)
                        for number in range(1, copies)
                        for part in parts
                    ]
                yield parts
    finally:
        if call.tried:
            record.server = call.tried[-1]
            record.retries += len(call.tried) - 1
        if call.context_tried:
            record.context_server = call.context_tried[-1]
            record.retries += len(call.context_tried) - 1


class Answer(Protocol):
    """What a client gets, in the form that it asked for: the events of a stream, or one document at the end."""

    @property
    def counts(self) -> TokenCounts: ...

    @property
    def finish_reason(self) -> str:
        """The first choice's."""
        ...

    @property
    def done(self) -> bool:
        """Every choice has ended."""
        ...

    @property
    def complete(self) -> bool:
        """All that is wanted has come, though the model would go on: the work on the server may be stopped."""
        ...

    def begin(self) -> bytes:
        """The events before those of the first parts."""
        ...

    def take(self, parts: Iterable[Part]) -> bytes:
        """Keep the parts, and return the events of a stream that tell of them."""
        ...

    def end(self) -> bytes:
        """The last events of a stream, or the whole document, after all parts."""
        ...


async def give(request: ApiRequest, answer: Answer, parts: AsyncGenerator[list[Part], None], *, stream: bool) -> None:
    """Send the model's answer, as it comes or once it is whole.

    :raises UpstreamError: when it doesn't come to its end; a stream may have begun.
    """
    exchange, record = request.exchange, request.exchange.record
    record.stream = stream
    if stream:
        exchange.expect_stream()
    async with aclosing(parts):
        try:
            async for some in parts:
                if not stream:
                    answer.take(some)
                elif not exchange.has_events:
                    # Only now, so that a refusal of the server is a response with its own status.
                    await exchange.start_stream()
                    await exchange.send_events(answer.begin() + answer.take(some))
                elif events := answer.take(some):
                    await exchange.send_events(events)
                if answer.complete:
                    break
        finally:
            counts = answer.counts
            record.num_input_tokens, record.num_output_tokens = counts.num_input, counts.num_output
            record.num_cached_tokens, record.num_reasoning_tokens = counts.num_cached, counts.num_reasoning
            record.finish_reason = answer.finish_reason
    if not answer.done:
        raise UNFINISHED
    if stream:
        await exchange.end_stream(answer.end())
    else:
        await exchange.respond(200, answer.end())


def response_identity(kind: str, model: str, fingerprint: str) -> dict[str, object]:
    """The fields that each chunk of a response repeats. kind: the beginning of its id."""
    return {
        "id": f"{kind}-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": fingerprint,
    }


_encode = msgspec.json.encode


class ChatChoice:
    """One answer, as far as it has come."""

    def __init__(self, request: ChatRequest) -> None:
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.logprobs: list[dict[str, object]] = []
        self.finish_reason = ""
        self.stop_reason = ""
        self.prompt_logprobs = ""
        self.calls = (
            AnswerCalls(drop=request.drop_calls, only_first=request.only_first_call) if request.has_tools else None
        )
        self._top_logprobs = request.top_logprobs

    @property
    def done(self) -> bool:
        return bool(self.finish_reason)

    def take(self, part: Part) -> Sequence[ParsedPiece]:
        """Return the pieces that the text of `part` gives. The last one of a choice sets `finish_reason`."""
        if part.logprobs and self._top_logprobs is not None:
            self.logprobs += chat_logprobs(part.logprobs, self._top_logprobs)
        self.prompt_logprobs = self.prompt_logprobs or part.prompt_logprobs
        pieces: Sequence[ParsedPiece]
        if self.calls is None:
            pieces = (TextPiece(part.text),) if part.text else ()
        else:
            pieces = self.calls.feed(part.text) if part.text else ()
            if part.finish_reason:
                pieces = [*pieces, *self.calls.end()]
        complete = self.calls is not None and self.calls.complete
        if part.finish_reason or complete:
            self.finish_reason, self.stop_reason = finish_of(part.finish_reason, part.stop_reason)
            if complete or (self.calls and self.calls.calls and self.finish_reason == "stop"):
                self.finish_reason = "tool_calls"
        return pieces


class ChatAnswer:
    """Takes the parts of an answer, and keeps what both forms of the response need."""

    def __init__(self, request: ChatRequest, identity: dict[str, object]) -> None:
        self.request = request
        self.counts = TokenCounts()
        self.choices = [ChatChoice(request) for _ in range(request.num_choices)]
        self._identity = identity

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason

    @property
    def done(self) -> bool:
        return all(choice.done for choice in self.choices)

    @property
    def complete(self) -> bool:
        return self.request.only_first_call and all(choice.calls and choice.calls.complete for choice in self.choices)


class WholeChatAnswer(ChatAnswer):
    """The response to a request without `stream`."""

    def __init__(self, request: ChatRequest, identity: dict[str, object], reasoning_fields: Sequence[str]) -> None:
        super().__init__(request, identity)
        self._reasoning_fields = reasoning_fields if request.include_reasoning else ()

    def begin(self) -> bytes:
        return b""

    def take(self, parts: Iterable[Part]) -> bytes:
        for part in parts:
            choice = self.choices[part.sequence]
            self.counts.add(part)
            if choice.done:
                continue
            choice.reasoning.append(part.reasoning)
            choice.text += [piece.text for piece in choice.take(part) if isinstance(piece, TextPiece)]
        return b""

    def end(self) -> bytes:
        choices = [self._choice(index, choice) for index, choice in enumerate(self.choices)]
        return _encode(
            {
                **self._identity,
                "object": "chat.completion",
                "service_tier": None,
                "choices": choices,
                "usage": self.counts.document(),
            }
        )

    def _choice(self, index: int, choice: ChatChoice) -> dict[str, object]:
        calls = [call.document() for call in choice.calls.calls] if choice.calls else []
        text = "".join(choice.text)
        message: dict[str, object] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if reasoning := "".join(choice.reasoning):
            message |= dict.fromkeys(self._reasoning_fields, reasoning)
        if calls:
            message["tool_calls"] = calls
        document: dict[str, object] = {
            "index": index,
            "message": message,
            "logprobs": None if self.request.top_logprobs is None else {"content": choice.logprobs, "refusal": None},
            "finish_reason": choice.finish_reason,
        }
        if choice.stop_reason:
            document["stop_reason"] = choice.stop_reason
        if choice.prompt_logprobs:
            document["prompt_logprobs"] = msgspec.Raw(choice.prompt_logprobs.encode())
        return document


class StreamedChatAnswer(ChatAnswer):
    """The events of a stream. Chunks are made from templates, because there is one for each token."""

    def __init__(self, request: ChatRequest, identity: dict[str, object], reasoning_fields: Sequence[str]) -> None:
        super().__init__(request, identity)
        head = _encode({**self._identity, "object": "chat.completion.chunk"})[:-1]
        self._heads = [
            b'data: %b,"choices":[{"index":%d,"delta":{' % (head, index) for index in range(request.num_choices)
        ]
        self._tail = b',"usage":null}\n\n' if request.include_usage else b"}\n\n"
        self._plain_tail = b'},"logprobs":null,"finish_reason":null}]' + self._tail
        self._usage_head = b"data: %b" % head
        self._reasoning_names = [_encode(name) for name in reasoning_fields] if request.include_reasoning else []

    def begin(self) -> bytes:
        """The first chunk of each choice."""
        return b"".join(head + b'"role":"assistant","content":""' + self._plain_tail for head in self._heads)

    def take(self, parts: Iterable[Part]) -> bytes:
        """The chunks for parts that have come."""
        chunks: list[bytes] = []
        for part in parts:
            self.counts.add(part)
            choice = self.choices[part.sequence]
            if not choice.done:
                self._write(chunks, part, choice)
        return b"".join(chunks)

    def end(self) -> bytes:
        """The last chunk, with the usage, where it is wanted, and the end of the stream."""
        if not self.request.include_usage:
            return b"data: [DONE]\n\n"
        usage = _encode(self.counts.document())
        return b'%b,"choices":[],"usage":%b}\n\ndata: [DONE]\n\n' % (self._usage_head, usage)

    def _write(self, chunks: list[bytes], part: Part, choice: ChatChoice) -> None:
        head = self._heads[part.sequence]
        pieces = choice.take(part)
        if part.reasoning and self._reasoning_names:
            value = _encode(part.reasoning)
            delta = b",".join(b"%b:%b" % (name, value) for name in self._reasoning_names)
            chunks.append(head + delta + self._tail_of(choice))
        for piece in pieces:
            if isinstance(piece, TextPiece):
                chunks.append(b'%b"content":%b%b' % (head, _encode(piece.text), self._tail_of(choice)))
            elif isinstance(piece, (CallBegins, ArgumentsPiece)):
                assert choice.calls is not None
                chunks.append(b'%b"tool_calls":[%b]%b' % (head, choice.calls.delta(piece), self._tail_of(choice)))
        if choice.done:
            more = b',"stop_reason":%b' % _encode(choice.stop_reason) if choice.stop_reason else b""
            if choice.prompt_logprobs:
                more += b',"prompt_logprobs":%b' % choice.prompt_logprobs.encode()
            values = (head, self._logprobs(choice), _encode(choice.finish_reason), more, self._tail_with_usage())
            chunks.append(b'%b},"logprobs":%b,"finish_reason":%b%b}]%b' % values)

    def _tail_of(self, choice: ChatChoice) -> bytes:
        """The rest of a chunk after its delta. The log-probabilities that wait go with the next chunk."""
        if not choice.logprobs and not self.request.continuous_usage:
            return self._plain_tail
        return b'},"logprobs":%b,"finish_reason":null}]%b' % (self._logprobs(choice), self._tail_with_usage())

    def _logprobs(self, choice: ChatChoice) -> bytes:
        if not choice.logprobs:
            return b"null"
        content = _encode({"content": choice.logprobs, "refusal": None})
        choice.logprobs = []
        return content

    def _tail_with_usage(self) -> bytes:
        if not self.request.continuous_usage:
            return self._tail
        return b',"usage":%b}\n\n' % _encode(self.counts.document())


async def chat_completion(request: ApiRequest) -> None:
    asked = read_chat_request(request.document)
    name, model = await request.model(asked.model, asked.most_tokens)
    identity = response_identity("chatcmpl", name, await model.fingerprint())
    form = StreamedChatAnswer if asked.stream else WholeChatAnswer
    answer = form(asked, identity, request.state.settings.reasoning_fields)
    await give(request, answer, chat_parts(request, asked, model), stream=asked.stream)


def chat_parts(request: ApiRequest, asked: ChatRequest, model: ModelFront) -> AsyncGenerator[list[Part], None]:
    # Calls may make the rest of an answer unwanted, which is seen in time only while it streams.
    inputs = {**asked.inputs, "streaming": asked.stream or asked.only_first_call}
    affinity = affinity_key([m for m in asked.messages if isinstance(m, dict)], hint=asked.cache_key)
    return generate(model, request.exchange.record, inputs, affinity, copies=asked.copies)
