"""The request that an engine gets, and the handover that a context server makes of it for a generation server."""

import base64
import binascii
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from deepseek_backend.field_values import read_json

RequestType: TypeAlias = Literal["context_only", "generation_only", "context_and_generation"]
"""One of contract.REQUEST_TYPES; the names are TensorRT-LLM's."""
MAX_FIRST_TOKENS = 64
"""Most first tokens, and most drafts, of a handover. TensorRT-LLM makes one first token, and a draft for each of a few
MTP layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextHandover:
    """The end of a request's context phase. A generation server with the same `form` goes on from it."""

    form: str
    """The engine with its version, and the checkpoint: `Capabilities.handover_form` of the server that made it."""
    prompt_token_ids: tuple[int, ...]
    first_gen_tokens: tuple[int, ...]
    """The answer's first tokens, which the context phase generates; at least one."""
    ended: bool = False
    """The first token is an end token or one of stop_token_ids, so that the answer is complete."""
    ctx_request_id: int | None = None
    """Number of the request in the context server's engine."""
    opaque_state: bytes = b""
    """The engine's own words on where its KV cache is."""
    draft_tokens: tuple[int, ...] | None = None
    """Drafts that follow the first token, of an engine with speculative decoding."""
    num_cached_tokens: int = 0
    """Number of prompt tokens that the context server found in its KV cache."""

    def to_json(self) -> bytes:
        """Return the output `context_phase_params`, which is also the input."""
        document = {name: getattr(self, name) for name in self.__slots__}
        document["opaque_state"] = base64.b64encode(self.opaque_state).decode()
        return json.dumps(document, separators=(",", ":")).encode()


_NAME = "context_phase_params"
_MEANT = "the JSON object that a context_only request was answered with"


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _are_ids(value: Any, most: int | None = None) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return False
    return (most is None or len(value) <= most) and all(map(_is_id, value))


_CHECKS: Mapping[str, tuple[Any, str]] = {
    "form": (lambda value: isinstance(value, str), "a string"),
    "prompt_token_ids": (_are_ids, "a list of token ids"),
    "first_gen_tokens": (lambda value: _are_ids(value, MAX_FIRST_TOKENS), f"a list of 1 to {MAX_FIRST_TOKENS} ids"),
    "ended": (lambda value: isinstance(value, bool), "true or false"),
    "ctx_request_id": (
        lambda value: value is None or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63),
        "a number or null",
    ),
    "opaque_state": (lambda value: isinstance(value, str), "a string"),
    "draft_tokens": (
        lambda value: value is None or value == [] or _are_ids(value, MAX_FIRST_TOKENS),
        f"null or a list of at most {MAX_FIRST_TOKENS} ids",
    ),
    "num_cached_tokens": (_is_id, "a count"),
}


def read_handover(text: str) -> ContextHandover:
    """Return the handover that `to_json` wrote.

    :raises ValueError: with what is wrong, beginning with the name of the input.
    """
    try:
        document = read_json(text)
    except ValueError as error:
        raise ValueError(f"{_NAME}: expected {_MEANT}, got text that is not JSON ({error})") from error
    if not isinstance(document, Mapping):
        raise ValueError(f"{_NAME}: expected {_MEANT}, got {type(document).__name__}")
    if unknown := sorted(map(str, document.keys() - ContextHandover.__slots__)):
        raise ValueError(f"{_NAME}: expected {_MEANT}, got one with {', '.join(unknown[:8])}; is it a newer server's?")
    for name, (accepts, expected) in _CHECKS.items():
        if name not in document or not accepts(document[name]):
            got = f"{str(document[name])[:60]!r}" if name in document else "none"
            raise ValueError(f"{_NAME}: expected {name} to be {expected}, as a context_only answer has it, got {got}")
    try:
        state = base64.b64decode(document["opaque_state"], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{_NAME}: expected opaque_state in base64: {error}") from error
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in document.items()
    }
    return ContextHandover(**values | {"opaque_state": state})


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
    def of(cls, given: Mapping[str, Any]) -> "SamplingParams":
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
    continues_reasoning: bool = False
    """The prompt ends within the reasoning, behind some text of it."""
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
