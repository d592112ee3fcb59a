"""The model's answer as a chat completion: whole, or as the chunks of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from deepseek_triton_tools.gateway.app.token_counts import TokenCounts
from deepseek_triton_tools.gateway.protocol.chat_request import ChatRequest
from deepseek_triton_tools.gateway.protocol.finish_reasons import finish_of
from deepseek_triton_tools.gateway.protocol.openai_logprobs import chat_logprobs
from deepseek_triton_tools.gateway.tool_calls.answer_calls import AnswerCalls
from deepseek_triton_tools.gateway.tool_calls.tool_call_parser import ArgumentsPiece, CallBegins, ParsedPiece, TextPiece
from deepseek_triton_tools.gateway.triton.call import Part

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
        if part.finish_reason or (self.calls is not None and self.calls.complete):
            self._finish(part)
        return pieces

    def _finish(self, part: Part) -> None:
        self.finish_reason, self.stop_reason = finish_of(part.finish_reason, part.stop_reason)
        if self.calls is not None and (self.calls.complete or (self.calls.calls and self.finish_reason == "stop")):
            self.finish_reason = "tool_calls"


class ChatAnswer:
    """Takes the parts of an answer, and keeps what both forms of the response need."""

    def __init__(self, request: ChatRequest, identity: dict[str, object]) -> None:
        self.request = request
        self.counts = TokenCounts()
        self.choices = [ChatChoice(request) for _ in range(request.num_choices)]
        self._identity = identity

    @property
    def done(self) -> bool:
        """Every choice has ended."""
        return all(choice.done for choice in self.choices)

    @property
    def complete(self) -> bool:
        """All that is wanted has come, though the model would go on: the work on the server may be stopped."""
        return self.request.only_first_call and all(choice.calls and choice.calls.complete for choice in self.choices)


class WholeChatAnswer(ChatAnswer):
    """The response to a request without `stream`."""

    def __init__(self, request: ChatRequest, identity: dict[str, object], reasoning_fields: Sequence[str]) -> None:
        super().__init__(request, identity)
        self._reasoning_fields = reasoning_fields if request.include_reasoning else ()

    def take(self, parts: Iterable[Part]) -> None:
        for part in parts:
            choice = self.choices[part.sequence]
            self.counts.add(part)
            if choice.done:
                continue
            choice.reasoning.append(part.reasoning)
            choice.text += [piece.text for piece in choice.take(part) if isinstance(piece, TextPiece)]

    def document(self) -> bytes:
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
            chunks.append(head + self._last_tail(choice))

    def _tail_of(self, choice: ChatChoice) -> bytes:
        """The rest of a chunk after its delta. The log-probabilities that wait go with the next chunk."""
        if not choice.logprobs and not self.request.continuous_usage:
            return self._plain_tail
        return b'},"logprobs":%b,"finish_reason":null}]%b' % (self._logprobs(choice), self._tail_with_usage())

    def _last_tail(self, choice: ChatChoice) -> bytes:
        finish = _encode(choice.finish_reason)
        more = b',"stop_reason":%b' % _encode(choice.stop_reason) if choice.stop_reason else b""
        if choice.prompt_logprobs:
            more += b',"prompt_logprobs":%b' % choice.prompt_logprobs.encode()
        logprobs = self._logprobs(choice)
        return b'},"logprobs":%b,"finish_reason":%b%b}]%b' % (logprobs, finish, more, self._tail_with_usage())

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
