"""The protocol between the backend and its engines: TensorRT-LLM, vLLM, the reference and the simulated engine.

An engine pushes its results: it calls `StepSink.on_steps` once per iteration, with the steps of every request that
advanced. An iteration over a thousand requests therefore costs one call, and no hand-over between threads per token.

Every engine keeps these rules:

* `submit` never waits for the model. A request that can't be served gets a step that carries an error.
* Every submitted request gets exactly one last step (`finish_reason` or `error` set), also after `abort` and `stop`.
* Steps of one request arrive in order. `on_steps` may be called from any thread of the engine, one call at a time.
  A sink does not raise.
* `Step.text` is new text only and never ends inside a character.
* A request with `sampling.logprobs` gets one entry of `Step.logprobs` for each of `Step.token_ids`.
* A request with a handover gets its first tokens as a step before the KV cache is there. That cache is fetched in any
  case, also where the first token ends the answer or the request is aborted: else the context server keeps it for ever.
  Only a request that is refused before its first token leaves it there, for another request.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from deepseek_backend.engines.generate_request import ContextHandover, GenerateRequest, Messages
from deepseek_backend.errors import BackendError

_Value = TypeVar("_Value")
FinishReason = Literal["stop", "length", "cancelled", "timeout"]

TEXT_LAYER_FIELDS = frozenset({"stop", "include_stop_str_in_output", "exclude_input_from_output", "n"})
"""Sampling fields that the backend applies itself (`service`, `sequence_buffer`), with every engine.

It applies best_of too, where the engine has logprobs to choose by.
"""
EMBEDDED_FIELDS = TEXT_LAYER_FIELDS | {
    *("max_tokens", "min_tokens", "ignore_eos", "stop_token_ids", "truncate_prompt_tokens"),
    *("temperature", "top_k", "top_p", "min_p", "seed"),
    *("skip_special_tokens", "add_special_tokens"),
    *("logprobs", "prompt_logprobs", "return_perf_metrics"),
}
"""Sampling fields that both embedded engines support."""


class Logprob(NamedTuple):
    """One token that is, or could have been, at a position. It is a tuple because a long prompt may have millions."""

    token_id: int
    logprob: float
    """Natural logarithm of its probability, before temperature and filters where the engine can tell."""
    rank: int
    """Rank among all tokens; 1 is the likeliest. An engine that does not know it gives the lowest possible number,
    because existing clients compare ranks."""
    text: str = ""
    """Text of the token alone; U+FFFD stands for a part of a character."""


TokenLogprobs = Sequence[Logprob]
"""The log-probabilities of one position: first the token at the position, then the likeliest ones in order, without
it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerfMetrics:
    """The values for `return_perf_metrics`. The fields are contract.PERF_OUTPUTS; 0 means that there is no value."""

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
    """The result of one engine iteration for one request."""

    text: str = ""
    """New text, decoded; empty while a character is incomplete."""
    token_ids: Sequence[int] = ()
    """New token ids; usage counts them."""
    finish_reason: FinishReason | None = None
    """Reason of the end; set on the last step only."""
    stop_reason: int | str | None = None
    """Stop token id or stop string that ended the sequence, if one did."""
    num_input_tokens: int = 0
    """Prompt length in tokens; the same in every step of a request."""
    error: BackendError | None = None
    """Error of a failed request; set instead of finish_reason."""
    logprobs: Sequence[TokenLogprobs] = ()
    """One entry for each of token_ids, where sampling.logprobs asks for them."""
    prompt_logprobs: Sequence[TokenLogprobs | None] = ()
    """One entry for each prompt token, None for the first. Set on the first step, where sampling.prompt_logprobs
    asks."""
    num_cached_tokens: int | None = 0
    """Number of prompt tokens found in the KV cache, on the last step at the latest; None where that is not known."""
    perf_metrics: PerfMetrics | None = None
    """Set on the last step, where sampling.return_perf_metrics asks for them."""
    generation_s: float | None = None
    """Seconds from the first to the last of token_ids, where they are a whole answer; NaN where they are not known."""
    handover: ContextHandover | None = None
    """Set on the last step of a context_only request, unless it failed or was aborted."""


class StepSink(Protocol):
    """The receiver of an engine's steps. `on_steps` never blocks: other threads buffer and send."""

    def on_steps(self, steps: Sequence[tuple[GenerateRequest, Step]]) -> None: ...


class OpenRequest(Protocol):
    """An engine's own record of a request, with the sink of its steps."""

    @property
    def request(self) -> GenerateRequest: ...

    @property
    def sink(self) -> StepSink: ...


def group_by_sink(
    steps: Iterable[tuple[OpenRequest, Step]],
) -> Iterable[tuple[StepSink, list[tuple[GenerateRequest, Step]]]]:
    """Return the steps of one iteration by sink, in order, so that each sink gets one call of `on_steps`."""
    batches: dict[int, tuple[StepSink, list[tuple[GenerateRequest, Step]]]] = {}
    sink: StepSink | None = None
    for entry, step in steps:
        if entry.sink is not sink:  # nearly always the same one, and there are millions of steps
            sink = entry.sink
            batch = batches.setdefault(id(sink), (sink, []))[1]
        batch.append((entry.request, step))
    return batches.values()


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The abilities of an engine. A request that asks for more is refused, with the name of the field."""

    sampling_fields: frozenset[str]
    """Names of the `contract.SAMPLING_FIELDS` that the engine applies."""
    max_seq_len: int
    """Limit on prompt plus generated tokens of one request."""
    max_prompt_bytes: int | None = None
    """Limit on the bytes of a prompt: a longer one can't fit, whatever its text. It is refused before it is tokenised,
    which takes a second per megabyte."""
    bos_token: str = ""
    """Text that add_special_tokens puts before a prompt, unless the prompt begins with it."""
    priority: bool = False
    """Whether requests with a higher priority go first."""
    version: str = ""
    """Version of the engine's package; "" where it has none."""
    simulation: Mapping[str, Any] | None = None
    """The pace of a simulated engine: "preset", a name or None, and "speed". None for a real one."""
    call_form: str = ""
    """Name of the form in `request.call_forms` in which the model writes calls of tools, where its chat template can't
    tell."""
    whole_answers: bool = False
    """Whether it is cheaper to send an answer in one step, where GenerateRequest.wants_steps is False."""
    handover_form: str = ""
    """Name of the handovers that it makes and takes: engine, version and checkpoint, such as "tensorrt_llm 1.2.1
    deepseek-r1". "" where it does whole requests only; `unsupported` may say why, under "request_type"."""
    formats_refused: str = "it has no guided decoding"
    """Why a guide can't be a structural tag of xgrammar with a format; "" where it can."""
    unsupported: dict[str, str] = field(default_factory=dict)
    """Field name -> reason of its refusal, where there is more to say than "not supported by this engine"."""


@dataclass(frozen=True, kw_only=True)
class EngineHealth:
    alive: bool
    reason: str = ""
    """Cause of death, in one line; empty while it is alive."""
    worked_at_s: float = 0.0
    """Time at which the engine last ran an iteration for requests, by time.monotonic(). 0: only its steps tell."""


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    num_running: int
    """Number of requests in the running batch."""
    num_waiting: int
    """Number of requests accepted and not yet scheduled."""
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    tokens_per_block: int = 0
    """Tokens in a KV cache block; 0 where the engine does not report them."""
    num_draft_tokens: int = 0
    """Number of tokens proposed by speculative decoding since start."""
    num_accepted_draft_tokens: int = 0
    extra: dict[str, float] = field(default_factory=dict)
    """Further numbers that this engine counts."""


class ModelTokenizer(Protocol):
    """The tokenizer of an engine's checkpoint, for requests that generate nothing. Any thread may use it."""

    @property
    def chat_template(self) -> str | None:
        """Text of the template; None where there is none, or code in its place."""

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Texts of bos_token, eos_token and pad_token, as far as there are such."""

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids; None where it is not known."""

    def encode(self, text: str, add_special_tokens: bool) -> Sequence[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of all of them; U+FFFD stands for a character that is not whole."""


class Engine(Protocol):
    """One model. The constructor takes the validated configuration; `start` loads the model."""

    def start(self) -> None:
        """Load the model; return when it is ready to serve.

        :raises deepseek_backend.errors.EngineError: when it can't be loaded, with the cause in one line.
        """

    @property
    def capabilities(self) -> Capabilities:
        """Valid after `start`."""

    @property
    def tokenizer(self) -> ModelTokenizer:
        """Valid after `start`.

        :raises UnavailableError: when no request is served.
        """

    @property
    def load_seconds(self) -> Mapping[str, float]:
        """Seconds that each phase of `start` took, in order."""

    def render_chat(self, messages: Messages, template_kwargs: Mapping[str, Any]) -> str:
        """Return a conversation as a prompt, by the checkpoint's chat template. It ends where the answer begins.

        Any thread may call it.

        :raises RequestError: when the template refuses the conversation; E_UNSUPPORTED where there is no template.
        """

    def submit(self, request: GenerateRequest, sink: StepSink) -> None: ...

    def abort(self, request_id: str) -> None:
        """End a request early; its last step has finish_reason "cancelled". An id that has ended already is ignored."""

    def drop(self, request_id: str) -> None:
        """Abort a context_only request whose handover nobody gets, and free its KV cache, also after its end.

        It is the same as `abort` where the engine can't free that: then a time limit has to.
        """

    def health(self) -> EngineHealth: ...

    def stats(self) -> EngineStats: ...

    def stop(self) -> None:
        """Abort every request, release the device and join every thread. May be called twice, and before `start`."""


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add to `seconds` how long the block took, as the phase of a load."""
    started = time.monotonic()
    yield
    seconds[phase] = time.monotonic() - started


def require(value: _Value | None, message: str) -> _Value:
    """Return `value`.

    :raises RuntimeError: with `message` when it is None, because an engine is used before `start`.
    """
    if value is None:
        raise RuntimeError(message)
    return value
