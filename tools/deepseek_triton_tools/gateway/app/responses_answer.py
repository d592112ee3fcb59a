"""The model's output as it comes from a server, put into a response of the Responses API."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deepseek_triton_tools.gateway.protocol.responses_output import ResponseWriter
from deepseek_triton_tools.gateway.tool_calls.answer_calls import AnswerCalls
from deepseek_triton_tools.gateway.tool_calls.tool_call_parser import (
    ArgumentsPiece,
    CallBegins,
    ParsedPiece,
    TextPiece,
)
from deepseek_triton_tools.gateway.triton.call import Part


class ResponsesAnswer:
    """Takes the parts of one sequence, and returns the events that tell a client of them."""

    def __init__(
        self,
        writer: ResponseWriter,
        calls: AnswerCalls | None,
        logprobs_of: Callable[[Part], Sequence[object]] | None = None,
    ) -> None:
        """calls: finds the calls in the text; None for a request without tools. logprobs_of: in OpenAI's form."""
        self._writer = writer
        self._calls = calls
        self._logprobs_of = logprobs_of
        self._last = Part()
        self._num_output_tokens = 0

    @property
    def complete(self) -> bool:
        """All that is wanted has come, though the model would go on: the work on the server may be stopped."""
        return self._calls is not None and self._calls.complete

    @property
    def num_output_tokens(self) -> int:
        return self._num_output_tokens

    def take(self, part: Part) -> bytes:
        self._num_output_tokens += part.num_output_tokens
        self._last = part
        events = self._writer.reasoning(part.reasoning) if part.reasoning else b""
        logprobs = self._logprobs_of(part) if self._logprobs_of is not None and part.logprobs else ()
        if part.text:
            pieces: Sequence[ParsedPiece] = [TextPiece(part.text)]
            events += self._write(self._calls.feed(part.text) if self._calls is not None else pieces, logprobs)
        return events

    def end(self) -> bytes:
        """The last events, after all parts."""
        events = self._write(self._calls.end(), ()) if self._calls is not None else b""
        cut = self._last.finish_reason in ("length", "timeout") and not self.complete
        if cut:
            return events + self._writer.end("incomplete", usage=self._usage(), reason="max_output_tokens")
        return events + self._writer.end("completed", usage=self._usage())

    def fail(self, code: str, message: str) -> bytes:
        """The last events of a response whose first events a client has already."""
        return self._writer.end("failed", usage=self._usage(), error={"code": code, "message": message})

    def _write(self, pieces: Sequence[ParsedPiece], logprobs: Sequence[object]) -> bytes:
        """logprobs: of the text that the pieces are made of. They go with the first text in it."""
        events = b""
        for piece in pieces:
            if isinstance(piece, TextPiece):
                events += self._writer.text(piece.text, logprobs)
                logprobs = ()
            elif isinstance(piece, ArgumentsPiece):
                events += self._writer.arguments(piece.text)
            elif isinstance(piece, CallBegins):
                assert self._calls is not None
                events += self._writer.begin_call(self._calls.calls[piece.index].call_id, piece.name)
            else:
                events += self._writer.end_call(cut=piece.cut)
        return events

    def _usage(self) -> dict[str, object]:
        last = self._last
        return {
            "input_tokens": last.num_input_tokens,
            "input_tokens_details": {"cached_tokens": last.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self._num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": last.num_reasoning_tokens},
            "total_tokens": last.num_input_tokens + self._num_output_tokens,
        }
