"""What the server's answers become."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One response of a stream. `str(chunk)` is its text, so `print(chunk, end="")` shows a stream as it comes."""

    text: str
    """What is new. Joined, the chunks are the text of the same request not streamed."""
    finish_reason: str | None = None
    """On the last chunk: "stop", "length", "cancelled" or "timeout". The last two leave the text incomplete."""
    stop_reason: str | None = None
    """On the last chunk, where one ended the text: the stop string, or the stop token's id in decimal."""
    num_input_tokens: int | None = None
    """Prompt length in tokens. On the last chunk."""
    num_output_tokens: int | None = None
    """Tokens since the chunk before that had this count. On the last chunk."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer. `str(completion)` is its text."""

    text: str
    finish_reason: str
    stop_reason: str | None
    num_input_tokens: int
    num_output_tokens: int
    request_id: str
    time_to_first_token_s: float | None
    """From sending the request, connecting included. None unless streamed."""
    total_s: float
    """From sending the request to the last token."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """An input or output as the model declares it; -1 in the shape is any length."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """What Triton knows of the model."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]
