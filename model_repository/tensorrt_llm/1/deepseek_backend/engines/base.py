"""The engine protocol: what the backend asks of TensorRT-LLM, transformers and the simulator alike.

Push-shaped: an engine calls `StepSink.on_steps` once per iteration with the steps of every request that moved, so that
one iteration over a thousand requests costs one call and no hand-over per token.

The rules every engine keeps:

* `submit` never blocks on the model. A request that can't be served is answered with a step that carries an error.
* Every submitted request gets exactly one last step (`finish_reason` or `error` set), also after `abort` and `stop`.
* Steps of one request arrive in order. `on_steps` may be called from any thread of the engine, one call at a time.
  A sink does not raise.
* `Step.text` is new text only and never ends inside a character.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from deepseek_backend.errors import BackendError
from deepseek_backend.request import GenerateRequest

FinishReason = Literal["stop", "length", "cancelled", "timeout"]

TEXT_LAYER_FIELDS = frozenset({"stop", "include_stop_str_in_output", "exclude_input_from_output"})
"""Sampling fields that the backend's text layer does (`lifecycle`, `text`), whatever the engine."""


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


class StepSink(Protocol):
    """Where an engine delivers. Implementations never block: buffering and sending are someone else's thread."""

    def on_steps(self, steps: Sequence[tuple[GenerateRequest, Step]]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an engine can do. A request that asks for more is refused by name, never silently served without it."""

    sampling_fields: frozenset[str]
    """Names of `contract.SAMPLING_FIELDS` the engine honours."""
    max_seq_len: int
    """Prompt plus generated tokens of one request."""
    max_prompt_bytes: int | None = None
    """A longer prompt can't fit, whatever it says: refused before it is tokenised, which takes a second a megabyte."""
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
    extra: dict[str, float] = field(default_factory=dict)


class Engine(Protocol):
    """One loaded model. Constructed with the validated configuration; `start` does the slow part."""

    def start(self) -> None:
        """Load and return when ready to serve.

        :raises deepseek_backend.errors.EngineError: with the cause in one line, when it can't be loaded.
        """

    @property
    def capabilities(self) -> Capabilities:
        """Valid after `start`."""

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
