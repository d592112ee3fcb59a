"""The interface of the parser, which is fed a model's answer piece by piece."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text for the reader: no part of a call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call begins. index: its number in the answer, from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """The next part of a call's arguments. All of them joined are the JSON text of an object."""

    index: int
    text: str


ParsedPiece = TextPiece | CallBegins | ArgumentsPiece
