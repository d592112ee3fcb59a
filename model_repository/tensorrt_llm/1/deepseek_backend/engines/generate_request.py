"""The request that an engine gets: one sequence to generate, with its prompt and sampling fields."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from deepseek_backend.engines.context_handover import ContextHandover, RequestType

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""A conversation. Each message has a role and a content, and further keys that the chat template may read."""
GREEDY_BELOW = 1e-5
"""A temperature below this counts as 0: it would choose the likeliest token anyway, or overflow."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The checked values of contract.SAMPLING_FIELDS. None means that the field was not given."""

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
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    """Number of likeliest tokens at each position. The generated token always comes with them; 0 means that one
    alone."""
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
        """Return `SamplingParams(**given)` in a quarter of the time: other fields stay those of the class."""
        params = object.__new__(cls)
        params.__dict__.update(given)
        return params

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always chosen.

        So it is with temperature 0, and when none of temperature, top_k, top_p and min_p is given; a top_k or min_p of
        0 counts as not given.
        """
        if self.top_k == 1 or self.top_p == 0 or (self.temperature is not None and self.temperature < GREEDY_BELOW):
            return True
        return self.temperature is None and not self.top_k and self.top_p is None and not self.min_p


class SharedTokenIds:
    """A prompt in token ids, made once for all answers to it. Several threads may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._token_ids: Sequence[int] | None = None

    def get(self, make: Callable[[], Sequence[int]]) -> Sequence[int]:
        """Return the token ids. The first caller makes them with `make`, and the others wait for it."""
        with self._lock:
            if self._token_ids is None:
                self._token_ids = make()
            return self._token_ids


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerateRequest:
    """One sequence to generate. Requests are compared by identity."""

    request_id: str
    """Id that the backend makes, unique among its open requests; not the client's id."""
    prompt: str
    begun: str = ""
    """The end of `prompt` that is the beginning of the answer, and part of its text."""
    prompt_token_ids: tuple[int, ...] | None = None
    """The prompt in token ids, used unchanged. `prompt` is empty then, but for a request with a handover, whose prompt
    was tokenised by the context server."""
    shared_token_ids: SharedTokenIds | None = None
    """Token ids of `prompt`, shared by all answers to it; None for a single answer."""
    sampling: SamplingParams
    """Sampling fields. Engines ignore n and best_of, because every answer is a request of its own."""
    max_tokens: int
    """sampling.max_tokens or the model's default. The engine cuts it to the room that its context leaves."""
    priority: int = 0
    """Priority; a higher one goes first. It is 0 for engines whose capabilities lack it."""
    wants_steps: bool = True
    """False: the whole answer may come in the last step, which an abort brings too, with the text so far."""
    request_type: RequestType = "context_and_generation"
    """context_only: compute the prompt, generate one token and keep the KV cache for a generation server. Its last
    step has the handover, and finish_reason "length", or "stop" where the token ends the answer.
    generation_only: fetch the KV cache of `handover`, and go on from there."""
    handover: ContextHandover | None = None
    """The end of the context phase; first_gen_tokens are the first step's tokens, and count to max_tokens. Its
    num_cached_tokens are those of the request. With
    context_and_generation its KV cache is not fetched: the engine computes the prompt and these tokens again."""


def utf8_length(text: str) -> int:
    """Return the bytes of `text` in UTF-8. Pure ASCII, such as English, needs no encoding."""
    return len(text) if text.isascii() else len(text.encode())
