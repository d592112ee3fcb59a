"""The engine protocol: what the backend asks of TensorRT-LLM, transformers and the simulator alike.

Push-shaped: an engine calls `StepSink.on_steps` once per iteration with the steps of every request that moved, so that
one iteration over a thousand requests costs one call and no hand-over per token.

The rules every engine keeps:

* `submit` never blocks on the model. A request that can't be served is answered with a step that carries an error.
* Every submitted request gets exactly one last step (`finish_reason` or `error` set), also after `abort` and `stop`.
* Steps of one request arrive in order. `on_steps` may be called from any thread of the engine, one call at a time.
  A sink does not raise.
* `Step.text` is new text only and never ends inside a character.
* A request with `sampling.logprobs` gets one entry of `Step.logprobs` for each of `Step.token_ids`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from deepseek_backend.engines.generate_request import GenerateRequest, Messages
from deepseek_backend.errors import BackendError

FinishReason = Literal["stop", "length", "cancelled", "timeout"]

TEXT_LAYER_FIELDS = frozenset({"stop", "include_stop_str_in_output", "exclude_input_from_output", "n"})
"""Sampling fields that the backend does itself (`service`, `sequence`), whatever the engine.

best_of too, where the engine has logprobs to choose by.
"""


class Logprob(NamedTuple):
    """One token that was, or could have been, at some place. A tuple: there may be millions in a long prompt."""

    token_id: int
    logprob: float
    """Natural logarithm of its probability, before temperature and filters where the engine can."""
    rank: int
    """1 is the likeliest. Existing clients compare ranks: there always is one, if only the lowest it can be."""
    text: str = ""
    """The token by itself; a part of a character is U+FFFD."""


TokenLogprobs = Sequence[Logprob]
"""The token that stands there first, then the likeliest ones in order; it is not repeated among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerfMetrics:
    """What `return_perf_metrics` asks for; the fields are contract.PERF_OUTPUTS, and 0 is an honest "none"."""

    kv_cache_reused_block: int = 0
    kv_cache_missed_block: int = 0
    kv_cache_alloc_new_blocks: int = 0
    kv_cache_alloc_total_blocks: int = 0
    kv_cache_hit_rate: float = 0.0
    arrival_time_ns: int = 0
    first_scheduled_time_ns: int = 0
    first_token_time_ns: int = 0
    last_token_time_ns: int = 0
    acceptance_rate: float = 0.0
    total_accepted_draft_tokens: int = 0
    total_draft_tokens: int = 0


@dataclass(slots=True)
class Step:
    """What one engine iteration added to one sequence of a request."""

    text: str = ""
    """New text, decoded; may be empty while a character is incomplete."""
    token_ids: Sequence[int] = ()
    """New token ids. Their number is what usage counts."""
    finish_reason: FinishReason | None = None
    """Set on the last step only."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the sequence, where one did."""
    num_input_tokens: int = 0
    """Prompt length in tokens; the same in every step of a request."""
    error: BackendError | None = None
    """Set instead of finish_reason when the request failed."""
    logprobs: Sequence[TokenLogprobs] = ()
    """For each of token_ids, where sampling.logprobs asks for it."""
    prompt_logprobs: Sequence[TokenLogprobs | None] = ()
    """For each token of the prompt, None for the first; on the first step, where sampling.prompt_logprobs asks."""
    num_cached_tokens: int = 0
    """Of the prompt, found in the KV cache; on the last step at the latest."""
    perf_metrics: PerfMetrics | None = None
    """On the last step, where sampling.return_perf_metrics asks for it."""


class StepSink(Protocol):
    """Where an engine delivers. Implementations never block: buffering and sending are someone else's thread."""

    def on_steps(self, steps: Sequence[tuple[GenerateRequest, Step]]) -> None: ...


class OpenRequest(Protocol):
    """A request as an engine keeps it, with where its steps go."""

    @property
    def request(self) -> GenerateRequest: ...

    @property
    def sink(self) -> StepSink: ...


def group_by_sink(
    steps: Iterable[tuple[OpenRequest, Step]],
) -> Iterable[tuple[StepSink, list[tuple[GenerateRequest, Step]]]]:
    """The steps of one iteration as the one call of `on_steps` that each sink gets, in order."""
    batches: dict[int, tuple[StepSink, list[tuple[GenerateRequest, Step]]]] = {}
    sink: StepSink | None = None
    for entry, step in steps:
        if entry.sink is not sink:  # mostly all have the same one, and there are millions
            sink = entry.sink
            batch = batches.setdefault(id(sink), (sink, []))[1]
        batch.append((entry.request, step))
    return batches.values()


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an engine can do. A request that asks for more is refused by name, never silently served without it."""

    sampling_fields: frozenset[str]
    """Names of `contract.SAMPLING_FIELDS` the engine honours."""
    max_seq_len: int
    """Prompt plus generated tokens of one request."""
    max_prompt_bytes: int | None = None
    """A longer prompt can't fit, whatever it says: refused before it is tokenised, which takes a second a megabyte."""
    bos_token: str = ""
    """What add_special_tokens puts before a prompt; a prompt that begins with it already is not given another."""
    priority: bool = False
    """Requests with a higher priority go first."""
    unsupported: dict[str, str] = field(default_factory=dict)
    """Field name -> why it is refused, where more can be said than "not supported by this engine"."""


@dataclass(frozen=True, kw_only=True)
class EngineHealth:
    alive: bool
    reason: str = ""
    """Why it is not alive, in one line."""


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    num_running: int
    """Requests in the running batch."""
    num_waiting: int
    """Requests accepted and not yet scheduled."""
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    num_draft_tokens: int = 0
    """Proposed by speculative decoding since start."""
    num_accepted_draft_tokens: int = 0
    extra: dict[str, float] = field(default_factory=dict)
    """What else this engine counts."""


class Engine(Protocol):
    """One loaded model. Constructed with the validated configuration; `start` does the slow part."""

    def start(self) -> None:
        """Load and return when ready to serve.

        :raises deepseek_backend.errors.EngineError: with the cause in one line, when it can't be loaded.
        """

    @property
    def capabilities(self) -> Capabilities:
        """Valid after `start`."""

    @property
    def load_seconds(self) -> Mapping[str, float]:
        """Phase of `start` -> how long it took, in their order."""

    def render_chat(self, messages: Messages, template_kwargs: Mapping[str, Any]) -> str:
        """The prompt that the checkpoint's chat template makes of a conversation, ready for the answer to follow.

        Safe from any thread.

        :raises RequestError: when the template refuses it, or E_UNSUPPORTED where there is none.
        """

    def submit(self, request: GenerateRequest, sink: StepSink) -> None: ...

    def abort(self, request_id: str) -> None:
        """End a request early; its last step has finish_reason "cancelled". Unknown ids are ignored: it may be over."""

    def health(self) -> EngineHealth: ...

    def stats(self) -> EngineStats: ...

    def stop(self) -> None:
        """Abort what runs, release the device, join every thread. Safe to call twice and before `start`."""


def require(value: Any, message: str) -> Any:
    """`value`, or a RuntimeError when an engine is used before `start`."""
    if value is None:
        raise RuntimeError(message)
    return value
