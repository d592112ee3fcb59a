"""POST /v1/chat/completions: asks the model and answers with a chat completion, whole or as the chunks of a stream."""

import secrets
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from deepseek_triton_tools.gateway.api_route import ApiRequest
from deepseek_triton_tools.gateway.chat_request import ChatRequest, read_chat_request, will_think
from deepseek_triton_tools.gateway.model_front import ModelFront
from deepseek_triton_tools.gateway.openai_answers import (
    Answer,
    AnswerChoice,
    chat_logprobs,
    finish_of,
    generate,
    give,
    response_identity,
)
from deepseek_triton_tools.gateway.tool_call_parser import (
    ArgumentsPiece,
    CallBegins,
    ParsedPiece,
    TextPiece,
    ToolCallParser,
)
from deepseek_triton_tools.gateway.triton_call import Part, affinity_key

_encode = msgspec.json.encode


@dataclass(slots=True)
class AnsweredCall:
    """One call, as far as it has come."""

    call_id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    def document(self) -> dict[str, object]:
        """The call as an element of a message's `tool_calls`."""
        function = {"name": self.name, "arguments": "".join(self.pieces)}
        return {"id": self.call_id, "type": "function", "function": function}


class AnswerCalls:
    """Parses the answer of one sequence and keeps its calls.

    drop: the request says tool_choice "none", so a call that the model makes all the same is left out. only_first: it
    says parallel_tool_calls false, so nothing after the first call is given.
    """

    def __init__(self, *, drop: bool = False, only_first: bool = False) -> None:
        self.calls: list[AnsweredCall] = []
        self.complete = False
        """The one call that is asked for has ended: the work on the server may be stopped."""
        self._parser = ToolCallParser()
        self._drop = drop
        self._only_first = only_first

    def feed(self, text: str) -> list[ParsedPiece]:
        """Return what the next text of the answer gives. The calls' ids are in `calls`, by their index."""
        return self._kept(self._parser.feed(text))

    def end(self) -> list[ParsedPiece]:
        """Return what was held back, at the end of the answer."""
        return self._kept(self._parser.end())

    def delta(self, piece: CallBegins | ArgumentsPiece) -> bytes:
        """The piece as an element of a chunk's `tool_calls`. Clients join all strings, so each is sent once only."""
        if isinstance(piece, ArgumentsPiece):
            return b'{"index":%d,"function":{"arguments":%b}}' % (piece.index, _encode(piece.text))
        call_id, name = _encode(self.calls[piece.index].call_id), _encode(piece.name)
        return b'{"index":%d,"id":%b,"type":"function","function":{"name":%b,"arguments":""}}' % (
            piece.index,
            call_id,
            name,
        )

    def _kept(self, pieces: list[ParsedPiece]) -> list[ParsedPiece]:
        kept: list[ParsedPiece] = []
        for piece in pieces:
            if self.complete:
                break
            if isinstance(piece, TextPiece):
                kept.append(piece)
                continue
            if self._drop:
                continue
            kept.append(piece)
            if isinstance(piece, CallBegins):
                self.calls.append(AnsweredCall("call_" + secrets.token_hex(12), piece.name))
            elif isinstance(piece, ArgumentsPiece):
                self.calls[piece.index].pieces.append(piece.text)
            else:
                self.complete = self._only_first
        return kept


class ChatChoice(AnswerChoice):
    def __init__(self, request: ChatRequest) -> None:
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.logprobs: list[dict[str, object]] = []
        self.prompt_logprobs = ""
        self.calls = (
            AnswerCalls(drop=request.drop_calls, only_first=request.only_first_call) if request.has_tools else None
        )
        self._top_logprobs = request.top_logprobs

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
            # The server says "stop" after calls: it passes them on as text, and does not know of them.
            if complete or (self.calls and self.calls.calls and self.finish_reason == "stop"):
                self.finish_reason = "tool_calls"
        return pieces


class ChatAnswer(Answer):
    """It has what both forms of the response need."""

    def __init__(self, request: ChatRequest, identity: dict[str, object], reasoning_fields: Sequence[str]) -> None:
        self.choices = [ChatChoice(request) for _ in range(request.num_choices)]
        super().__init__(self.choices)
        self.request = request
        self._identity = identity
        self._reasoning_fields = reasoning_fields if request.include_reasoning else ()
        self._thinks = request.thinks and request.include_reasoning

    @property
    def complete(self) -> bool:  # type: ignore[override]
        return self.request.only_first_call and all(choice.calls and choice.calls.complete for choice in self.choices)


class WholeChatAnswer(ChatAnswer):
    """The response to a request without `stream`."""

    def take(self, parts: Iterable[Part]) -> bytes:
        for part in parts:
            choice = self.choices[part.sequence]
            self.counts.add(part)
            if choice.finish_reason:
                continue
            choice.reasoning.append(part.reasoning)
            choice.text += [piece.text for piece in choice.take(part) if isinstance(piece, TextPiece)]
        return b""

    def end(self) -> bytes:
        choices = [self._choice(index, choice) for index, choice in enumerate(self.choices)]
        own = {"object": "chat.completion", "service_tier": None, "choices": choices}
        return _encode({**self._identity, **own, "usage": self.counts.document()})

    def _choice(self, index: int, choice: ChatChoice) -> dict[str, object]:
        calls = [call.document() for call in choice.calls.calls] if choice.calls else []
        text = "".join(choice.text)
        message: dict[str, object] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if (reasoning := "".join(choice.reasoning)) or self._thinks:
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
        super().__init__(request, identity, reasoning_fields)
        head = _encode({**self._identity, "object": "chat.completion.chunk"})[:-1]
        self._heads = [
            b'data: %b,"choices":[{"index":%d,"delta":{' % (head, index) for index in range(request.num_choices)
        ]
        self._tail = b',"usage":null}\n\n' if request.include_usage else b"}\n\n"
        self._plain_tail = b'},"logprobs":null,"finish_reason":null}]' + self._tail
        self._usage_head = b"data: %b" % head
        self._reasoning_names = [_encode(name) for name in self._reasoning_fields]
        self._no_reasoning, self._no_content, self._last_delta = b"", b"", b""
        if self._thinks:
            self._no_reasoning = b"".join(b",%b:null" % name for name in self._reasoning_names)
            self._no_content, self._last_delta = b'"content":null,', b'"content":""' + self._no_reasoning

    def begin(self) -> bytes:
        """The first chunk of each choice."""
        text = b'"content":""'
        if self._thinks:
            text = self._no_content + b",".join(b'%b:""' % name for name in self._reasoning_names)
        return b"".join(b'%b"role":"assistant",%b%b' % (head, text, self._plain_tail) for head in self._heads)

    def take(self, parts: Iterable[Part]) -> bytes:
        chunks: list[bytes] = []
        for part in parts:
            self.counts.add(part)
            choice = self.choices[part.sequence]
            # The model goes on after the one call that is wanted, until the server has been told.
            if choice.finish_reason:
                continue
            head = self._heads[part.sequence]
            pieces = choice.take(part)
            if part.reasoning and self._reasoning_names:
                value = _encode(part.reasoning)
                delta = b",".join(b"%b:%b" % (name, value) for name in self._reasoning_names)
                chunks.append(head + self._no_content + delta + self._tail_of(choice))
            for piece in pieces:
                if isinstance(piece, TextPiece):
                    delta = b'"content":%b%b' % (_encode(piece.text), self._no_reasoning)
                    chunks.append(head + delta + self._tail_of(choice))
                elif isinstance(piece, (CallBegins, ArgumentsPiece)):
                    assert choice.calls is not None
                    chunks.append(b'%b"tool_calls":[%b]%b' % (head, choice.calls.delta(piece), self._tail_of(choice)))
            if choice.finish_reason:
                more = b',"stop_reason":%b' % _encode(choice.stop_reason) if choice.stop_reason else b""
                if choice.prompt_logprobs:
                    more += b',"prompt_logprobs":%b' % choice.prompt_logprobs.encode()
                values = (self._logprobs(choice), _encode(choice.finish_reason), more, self._tail_with_usage())
                chunks.append(head + self._last_delta + b'},"logprobs":%b,"finish_reason":%b%b}]%b' % values)
        return b"".join(chunks)

    def end(self) -> bytes:
        """The last chunk, with the usage, where it is wanted, and the end of the stream."""
        if not self.request.include_usage:
            return b"data: [DONE]\n\n"
        usage = _encode(self.counts.document())
        return b'%b,"choices":[],"usage":%b}\n\ndata: [DONE]\n\n' % (self._usage_head, usage)

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
    asked.thinks = will_think(asked.inputs, (await model.info()).reasoning_efforts)
    identity = response_identity("chatcmpl", name, await model.fingerprint())
    form = StreamedChatAnswer if asked.stream else WholeChatAnswer
    answer = form(asked, identity, request.state.settings.reasoning_fields)
    await give(request, answer, chat_parts(request, asked, model), stream=asked.stream)


def chat_parts(request: ApiRequest, asked: ChatRequest, model: ModelFront) -> AsyncGenerator[list[Part], None]:
    # Calls may make the rest of an answer unwanted, which is seen in time only while it streams.
    inputs = {**asked.inputs, "streaming": asked.stream or asked.only_first_call}
    affinity = affinity_key([m for m in asked.messages if isinstance(m, dict)], hint=asked.cache_key)
    return generate(model, request.exchange.record, inputs, affinity, copies=asked.copies)
