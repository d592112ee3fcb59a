"""Results: chunks, completions, metrics, and what a server says about itself."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from deepseek_triton_client._core.exceptions import ProtocolError


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token and its log-probability at one position of the text."""

    token_id: int
    logprob: float
    rank: int | None
    """Rank of the token by probability; 1 is the likeliest token."""
    text: str | None


TokenLogprobs = tuple[Logprob, ...]
"""Log-probabilities at one position: the generated token first, then the likeliest tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerfMetrics:
    """Measurements of the engine, with `return_perf_metrics`. Times are in nanoseconds on the engine's own clock."""

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
    """The next part of one answer. `str(chunk)` is its text, so `print(chunk, end="")` shows a stream as it comes."""

    text: str
    """New text. The joined texts of all chunks equal the text of the same request without streaming."""
    index: int = 0
    """Index of the answer that the chunk belongs to; for requests with `n` above 1."""
    reasoning: str = ""
    """New reasoning, if `separate_reasoning` keeps it out of the text."""
    finish_reason: str | None = None
    """"stop", "length", "cancelled" or "timeout" on an answer's last chunk. The last two leave the text incomplete."""
    stop_reason: str | None = None
    """The stop string, or the decimal id of the stop token, that ended the text. On the last chunk."""
    num_input_tokens: int | None = None
    """Prompt length in tokens. On the last chunk."""
    num_output_tokens: int | None = None
    """Number of tokens since the previous chunk that had this count. On the last chunk."""
    num_cached_tokens: int | None = None
    """Number of prompt tokens found in the KV cache. On the last chunk."""
    num_reasoning_tokens: int | None = None
    """Number of tokens of the reasoning, with `separate_reasoning`. On the last chunk."""
    output_ids: tuple[int, ...] = ()
    """Ids of the new tokens, with `return_output_ids`."""
    cumulative_logprob: float | None = None
    """Sum of log-probabilities so far, with `return_cumulative_logprob`."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the new tokens, with `logprobs`."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    """Those of the prompt's tokens, with `prompt_logprobs`. On the first chunk; None for the first token."""
    perf_metrics: PerfMetrics | None = None
    """Measurements of the engine, with `return_perf_metrics`. On the last chunk."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer of a completion. Its fields are those of its `Chunk`s, put together."""

    text: str
    reasoning: str = ""
    finish_reason: str | None = None
    """See `Chunk`; None if the server never tells."""
    stop_reason: str | None = None
    num_output_tokens: int | None = None
    num_reasoning_tokens: int | None = None
    output_ids: tuple[int, ...] = ()
    cumulative_logprob: float | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Completion:
    """The whole response to a request. `str(completion)` is its text; with several answers, that of the first."""

    answers: tuple[Answer, ...]
    """The `n` answers, at least one."""
    num_input_tokens: int | None
    """Prompt length in tokens; None if the server does not count."""
    num_output_tokens: int | None
    """Number of generated tokens, all answers together; None if the server does not count."""
    num_cached_tokens: int | None
    """Number of prompt tokens found in the KV cache; None if the server does not count."""
    num_reasoning_tokens: int | None = None
    """Number of tokens of the reasoning, all answers together; None if the server does not count."""
    perf_metrics: PerfMetrics | None
    request_id: str
    url: str
    """URL of the server that answered."""
    time_to_first_token_s: float | None
    """Seconds from the call to the first token, with connecting and retries. None if all text came at once."""
    total_s: float
    """Seconds from the call to the last token."""

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
        """The answer as a message for the conversation. Its reasoning is left out of prompts that need none of it."""
        message = {"role": "assistant", "content": self.text}
        return {**message, "reasoning_content": self.reasoning} if self.reasoning else message

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
    """An input or output that the model declares; -1 in the shape is any length."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """Triton's description of the model."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


@dataclass(frozen=True, slots=True)
class Readiness:
    """State of a server. `str()` is one line for people."""

    url: str
    state: Literal["unreachable", "starting", "missing", "loading", "ready"]
    """unreachable: nothing answers; starting: Triton is not ready; missing: it has no such model; loading: not yet."""
    waited_s: float
    """Seconds since `wait_until_ready` began; 0 outside of it."""
    detail: str = ""

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.url}: {self.state} after {self.waited_s:.0f} s{detail}"


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the metrics: a number with its name and labels."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Metrics:
    """A server's metrics at one moment."""

    samples: tuple[Sample, ...]
    text: str = field(repr=False)
    """The text that the server sent."""

    @classmethod
    def parse(cls, text: str) -> "Metrics":
        """Parse the text. Raises ProtocolError, quoting the first line that is not in this format."""
        lines = ((number, line.strip()) for number, line in enumerate(text.split("\n"), start=1))
        return cls(tuple(_sample(number, line) for number, line in lines if line and not line.startswith("#")), text)

    def value(self, name: str, /, **labels: str) -> float:
        """Return the sum of all samples with this name, and these labels among theirs. Raises KeyError for none."""
        named = [sample for sample in self.samples if sample.name == name]
        values = [sample.value for sample in named if labels.items() <= sample.labels.items()]
        if named and not values:
            raise KeyError(f"no sample of {name} has {labels}")
        if not named:
            near = difflib.get_close_matches(name, {sample.name for sample in self.samples})
            raise KeyError(f"no metric {name}" + (f"; near: {', '.join(near)}" if near else ""))
        return sum(values)


_LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"'
_LABELS = re.compile(_LABEL)
_SAMPLE = re.compile(
    rf"""([a-zA-Z_:][a-zA-Z0-9_:]*)                        # name
         (?:\s*\{{\s*((?:{_LABEL}\s*(?:,\s*|(?=\}})))*)\}})?    # labels; a comma may follow the last one
         \s*(?<=[\s}}])(\S+)                               # value
         (?:\s+-?\d+)?                                     # time of the sample, in milliseconds
    """,
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(.)")


def _sample(number: int, line: str) -> Sample:
    match = _SAMPLE.fullmatch(line)
    if match is None:
        raise ProtocolError(f"expected metrics in Prometheus's text format, got in line {number}: {line[:200]!r}")
    name, value = match[1], match[5]
    labels = {
        label: _ESCAPE.sub(lambda escape: "\n" if escape[1] == "n" else escape[1], text)
        for label, text in _LABELS.findall(match[2] or "")
    }
    try:
        return Sample(name, labels, float(value))
    except ValueError as exc:
        raise ProtocolError(f"expected a number in line {number} of the metrics, got {value[:200]!r}") from exc
