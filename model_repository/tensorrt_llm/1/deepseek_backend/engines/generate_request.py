"""What an engine is asked for: one sequence to generate, its prompt and its sampling fields."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""A conversation: each message has a role and a content, and whatever else the chat template reads."""
GREEDY_BELOW = 1e-5
"""A temperature below this is 0: it would pick the likeliest token anyway, or overflow."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The sampling fields of contract.SAMPLING_FIELDS, checked. None: not given."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    exclude_input_from_output: bool | None = None
    n: int | None = None
    best_of: int | None = None
    bad: tuple[str, ...] = ()
    logprobs: int | None = None
    """The likeliest tokens at each place, beside the generated one if it is not among them; 0: that one alone."""
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    guided_json: str | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_structural_tag: str | None = None
    return_perf_metrics: bool | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> SamplingParams:
        """As `SamplingParams(**given)` makes it, in a quarter of the time: what is not given stays the class's."""
        params = object.__new__(cls)
        params.__dict__.update(given)
        return params

    @property
    def greedy(self) -> bool:
        """No sampling asked for: temperature 0, or none of temperature, top_k, top_p and min_p given (0 is none)."""
        if self.top_k == 1 or self.top_p == 0 or (self.temperature is not None and self.temperature < GREEDY_BELOW):
            return True
        return self.temperature is None and not self.top_k and self.top_p is None and not self.min_p


class SharedTokenIds:
    """A prompt in token ids, made once for all answers to it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._token_ids: Sequence[int] | None = None

    def get(self, make: Callable[[], Sequence[int]]) -> Sequence[int]:
        """Of `make`, by the first who asks; the others wait for it."""
        with self._lock:
            if self._token_ids is None:
                self._token_ids = make()
            return self._token_ids


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerateRequest:
    """One sequence to generate, as engines see it. Compared by identity."""

    request_id: str
    """Unique among the requests the backend holds; made by the backend, not the client's id."""
    prompt: str
    prompt_token_ids: tuple[int, ...] | None = None
    """The prompt in token ids, taken as they are; `prompt` is empty then."""
    shared_token_ids: SharedTokenIds | None = None
    """Of `prompt`, between all answers to it; None for a single one."""
    sampling: SamplingParams
    """n and best_of are none of an engine's business: every answer is a request of its own."""
    max_tokens: int
    """sampling.max_tokens or the model's default. The engine cuts it to the room its context leaves."""
    priority: int = 0
    """Other than 0 only for engines whose capabilities have it; higher goes first."""


def utf8_length(text: str) -> int:
    """Bytes of `text`; of a prompt in English without a look at it."""
    return len(text) if text.isascii() else len(text.encode())
