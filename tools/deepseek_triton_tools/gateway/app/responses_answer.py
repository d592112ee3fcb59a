"""The model's output as it comes from a server, put into a response of the Responses API."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deepseek_triton_tools.gateway.app.chat_answer import ChatChoice
from deepseek_triton_tools.gateway.app.token_counts import TokenCounts
from deepseek_triton_tools.gateway.protocol.chat_request import ChatRequest
from deepseek_triton_tools.gateway.protocol.responses_output import ResponseWriter
from deepseek_triton_tools.gateway.tool_calls.tool_call_parser import (
    ArgumentsPiece,
    CallBegins,
    ParsedPiece,
    TextPiece,
)
from deepseek_triton_tools.gateway.triton.call import Part


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
