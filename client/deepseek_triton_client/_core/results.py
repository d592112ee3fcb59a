"""What the server's answers become."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token and its log-probability at one place of the text."""

    token_id: int
    logprob: float
    rank: int | None
    """1 is the likeliest."""
    text: str | None


TokenLogprobs = tuple[Logprob, ...]
"""At one place: the token that was generated first, then the likeliest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerfMetrics:
    """What the engine measured, with `return_perf_metrics`. Times are in nanoseconds on the engine's own clock."""

    kv_cache_reused_block: int | None = None
    kv_cache_missed_block: int | None = None
    kv_cache_alloc_new_blocks: int | None = None
    kv_cache_alloc_total_blocks: int | None = None
    kv_cache_hit_rate: float | None = None
    arrival_time_ns: int | None = None
    first_scheduled_time_ns: int | None = None
    first_token_time_ns: int | None = None
    last_token_time_ns: int | None = None
    acceptance_rate: float | None = None
    total_accepted_draft_tokens: int | None = None
    total_draft_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is new of one answer. `str(chunk)` is its text, so `print(chunk, end="")` shows a stream as it comes."""

    text: str
    """Joined, the chunks are the text of the same request not streamed."""
    index: int = 0
    """Which answer it belongs to, where `n` asked for several."""
    reasoning: str = ""
    """The thinking, where `separate_reasoning` keeps it out of the text."""
    finish_reason: str | None = None
    """On an answer's last chunk: "stop", "length", "cancelled" or "timeout". The last two leave the text incomplete."""
    stop_reason: str | None = None
    """On the last chunk, where one ended the text: the stop string, or the stop token's id in decimal."""
    num_input_tokens: int | None = None
    """Prompt length in tokens. On the last chunk."""
    num_output_tokens: int | None = None
    """Tokens since the chunk before that had this count. On the last chunk."""
    num_cached_tokens: int | None = None
    """Prompt tokens found in the KV cache. On the last chunk."""
    output_ids: tuple[int, ...] = ()
    """With `return_output_ids`: the new tokens."""
    cumulative_logprob: float | None = None
    """With `return_cumulative_logprob`: the sum so far."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """With `logprobs`: of the new tokens."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    """With `prompt_logprobs`, on the first chunk; None for the prompt's first token."""
    perf_metrics: PerfMetrics | None = None
    """With `return_perf_metrics`, on the last chunk."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One text of a completion. The fields are those of `Chunk`, put together."""

    text: str
    reasoning: str = ""
    finish_reason: str | None = None
    """None where the server never says."""
    stop_reason: str | None = None
    num_output_tokens: int | None = None
    output_ids: tuple[int, ...] = ()
    cumulative_logprob: float | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Completion:
    """A whole response. `str(completion)` is its text, and that of the first answer where `n` asked for several."""

    answers: tuple[Answer, ...]
    """`n` of them, at least one."""
    num_input_tokens: int | None
    """Prompt length in tokens; None where the server does not count."""
    num_output_tokens: int | None
    """Of all answers together; None where the server does not count."""
    num_cached_tokens: int | None
    """Prompt tokens found in the KV cache."""
    perf_metrics: PerfMetrics | None
    request_id: str
    url: str
    """Of the server that answered."""
    time_to_first_token_s: float | None
    """From sending the request, connecting and retries included. None where the whole text came at once."""
    total_s: float
    """From sending the request to the last token."""

    @property
    def text(self) -> str:
        return self.answers[0].text

    @property
    def reasoning(self) -> str:
        return self.answers[0].reasoning

    @property
    def finish_reason(self) -> str | None:
        return self.answers[0].finish_reason

    @property
    def stop_reason(self) -> str | None:
        return self.answers[0].stop_reason

    @property
    def message(self) -> dict[str, str]:
        """To append to the messages of a conversation. Without the thinking, as DeepSeek's models expect it."""
        return {"role": "assistant", "content": self.text}

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else f"{self.text[:57]}..."
        counts = f"{_count(self.num_input_tokens)}+{_count(self.num_output_tokens)} tokens"
        several = f", {len(self.answers)} answers" if len(self.answers) > 1 else ""
        return f"<Completion {text!r} {self.finish_reason or 'ended'}, {counts}{several}, {self.total_s:.3g} s>"


def _count(number: int | None) -> str:
    return "?" if number is None else str(number)


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


@dataclass(frozen=True, slots=True)
class Readiness:
    """How far a server is. `str()` is a line for people."""

    url: str
    state: Literal["unreachable", "starting", "loading", "ready"]
    """unreachable: nobody answers; starting: Triton is not ready; loading: the model isn't."""
    waited_s: float
    detail: str = ""

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.url}: {self.state} after {self.waited_s:.0f} s{detail}"
