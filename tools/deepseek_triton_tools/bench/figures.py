"""What is measured: the times of each request, and the figures of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["completed", "failed", "cancelled"]
"""failed: an error, or an end that is none (finish reason "timeout"). cancelled: left by the client."""


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """Times are seconds since the start of the run, on one clock for all processes of it."""

    index: int
    """Number of the conversation in the dataset."""
    turn: int = 0
    due_s: float | None = None
    """Open loop and trace: when it was to be sent."""
    sent_s: float = 0.0
    chunk_s: Sequence[float] = field(default_factory=list)
    """When each chunk that held tokens came."""
    chunk_tokens: Sequence[int] = field(default_factory=list)
    """The number of tokens in each of them. They add up to `num_output_tokens`."""
    ended_s: float = 0.0
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    asked_tokens: int | None = None
    """The number of tokens that the answer was to have; None: as many as the model likes."""
    num_cached_tokens: int | None = None
    outcome: Outcome = "completed"
    finish_reason: str | None = None
    error: str = ""
    """For a request that failed, the machine-readable code if there is one, and the message."""
    url: str = ""
    """The server that was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """The values of one quantity; all zero when nothing was measured."""

    mean: float = 0.0
    std: float = 0.0
    min: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0
    count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Limits that a request must keep to count for goodput, in milliseconds; None is no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    itl_ms: float | None = None
    """The request's longest gap between two tokens."""
    e2el_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineBin:
    """One part of the run's time."""

    at_s: float
    """Its begin."""
    inflight: float
    """Requests under way, on average."""
    output_tokens: int
    requests_sent: int
    requests_ended: int
    failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSummary:
    """One series of a server's /metrics during a run."""

    first: float
    last: float
    mean: float
    max: float

    @property
    def increase(self) -> float:
        return self.last - self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Only completed requests count, but for the numbers that say otherwise. Times are in milliseconds.

    Several tools call different things TPS/user; here each has a name of its own.
    """

    duration_s: float
    """From the first request sent to the last end."""
    completed: int
    failed: int
    cancelled: int
    short: int = 0
    """Completed requests with fewer tokens than were asked for with ignore_eos: the server has a limit."""
    errors: dict[str, int] = field(default_factory=dict)
    """Error -> how often, the most frequent ones; what the server cancelled is one too."""
    total_input_tokens: int
    total_output_tokens: int
    total_cached_tokens: int = 0
    input_tokens: Distribution = Distribution()
    """A value for each request; this holds of the next one too."""
    output_tokens: Distribution = Distribution()
    request_throughput: float
    """Completed requests a second."""
    output_throughput: float
    """Output tokens a second."""
    total_token_throughput: float
    """Input and output tokens a second."""
    peak_output_throughput: float = 0.0
    """The most tokens in one second; seconds are counted from the first request."""
    peak_concurrency: int = 0
    """The most requests under way at once; failed and cancelled ones too."""
    output_throughput_per_gpu: float | None = None
    """None where the number of GPUs is not known."""
    user_throughput: float
    """Mean over requests of output tokens / end-to-end latency: trtllm-bench's and benchmark_serving's TPS/user."""
    decode_user_throughput: float
    """1000 / mean TPOT in ms: without the first token; InferenceX's interactivity."""
    decode_speed: Distribution = Distribution()
    """For each request 1000 / TPOT in ms, tokens a second: AIPerf's TPS/user, trtllm-bench's GTPS."""
    concurrency_user_throughput: float | None = None
    """Output throughput / concurrency: vLLM's Pareto plot. None in an open loop."""
    ttft_ms: Distribution
    """Time to first token."""
    tpot_ms: Distribution
    """For each request (last chunk - first chunk) / (tokens - those of the first chunk)."""
    itl_ms: Distribution
    """For each token the gap between chunks, divided by the tokens of the later chunk."""
    chunk_gap_ms: Distribution
    """The gap between two chunks: what benchmark_serving calls ITL."""
    e2el_ms: Distribution
    lag_ms: Distribution
    """Open loop and trace: from when a request was due to when it was sent; of all requests, failed ones too. A large
    one means that this client, not the server, was the limit."""
    client_delay_ms: float = 0.0
    """How late the load processes woke up, 99th percentile: times are not exact to more than this."""
    goodput: float | None = None
    """Requests a second that kept the SLO; None without one."""
    good_share: float | None = None
    """Those requests / all that were sent."""

    def value(self, path: str) -> float | None:
        """Return a number by its path, such as "goodput" or "ttft_ms.p99"; None where nothing was measured."""
        name, _, statistic = path.partition(".")
        value: Distribution | float | None = getattr(self, name)
        if isinstance(value, Distribution):
            return float(getattr(value, statistic)) if value.count else None
        return value
