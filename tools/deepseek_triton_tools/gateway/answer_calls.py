"""The calls of one answer as OpenAI's clients get them: with ids, and as deltas while they stream."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import msgspec

from deepseek_triton_tools.gateway.tool_call_parser import (
    ArgumentsPiece,
    CallBegins,
    CallEnds,
    ParsedPiece,
    TextPiece,
    ToolCallParser,
)

_encode = msgspec.json.encode


@dataclass(slots=True)
class AnsweredCall:
    """One call, as far as it has come."""

    call_id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)

    def document(self) -> dict[str, object]:
        """The call as an element of a message's `tool_calls`."""
        return {
            "id": self.call_id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


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
            elif not self._drop:
                kept.append(piece)
                self._keep(piece)
        return kept

    def _keep(self, piece: CallBegins | ArgumentsPiece | CallEnds) -> None:
        if isinstance(piece, CallBegins):
            self.calls.append(AnsweredCall("call_" + secrets.token_hex(12), piece.name))
        elif isinstance(piece, ArgumentsPiece):
            self.calls[piece.index].pieces.append(piece.text)
        else:
            self.complete = self._only_first
