"""A request of the vLLM engine that has not had its last step, and the steps of it that vLLM's tokens make."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tokenizers import Tokenizer

from deepseek_backend.engines.base import FinishReason, Logprob, PerfMetrics, Step, TokenLogprobs
from deepseek_backend.engines.detokenizer import Detokenizer
from deepseek_backend.engines.generate_request import GenerateRequest
from deepseek_backend.engines.loop_engine import OpenEntry
from deepseek_backend.errors import ASK_ANOTHER, EngineError, UnavailableError

_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "repetition": "stop"}
"""vLLM's finish reason -> ours, where an answer ends as it should."""


class GrowingAnswer:
    """The text and tokens of a request so far. A request that wants no steps gets them all with the last one."""

    def __init__(self, request: GenerateRequest, tokenizer: Tokenizer, num_input_tokens: int, arrived_s: float) -> None:
        """`arrived_s`: time at which the engine got the request; this and every other time is by time.monotonic()."""
        sampling = request.sampling
        self._sampling = sampling
        self._is_whole = not request.wants_steps
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=sampling.skip_special_tokens is not False)
        self._num_input_tokens = num_input_tokens
        self._arrived_s = arrived_s
        self.scheduled_s = 0.0
        """Time at which vLLM scheduled the request; 0 while it is not known."""
        self._first_token_s = self._last_token_s = 0.0
        self.num_cached_tokens = 0
        """Number of prompt tokens that vLLM found in its cache."""
        self.prompt_logprobs: Sequence[TokenLogprobs | None] = ()
        """Log-probabilities of the prompt that the next step carries."""
        self._kept_ids: list[int] = []
        self._kept_logprobs: list[TokenLogprobs] = []

    def advance(self, token_ids: Sequence[int], at_s: float, logprobs: Sequence[TokenLogprobs] = ()) -> Step | None:
        """Return a step of further tokens; None without any, and for an answer that is kept until it is whole.

        :param at_s: time of the tokens.
        """
        if not token_ids:
            return None
        self._last_token_s = at_s
        if self._is_whole:
            self._keep(token_ids, token_ids, logprobs, at_s)
            return None
        add = self._detokenizer.add
        text = add(token_ids[0]) if len(token_ids) == 1 else "".join([add(token_id) for token_id in token_ids])
        if self._first_token_s:
            return Step(text, token_ids, None, None, self._num_input_tokens, None, logprobs)
        self._first_token_s = at_s
        return self._step(text, token_ids, logprobs)

    def end(
        self,
        finish_reason: str,
        stop_reason: Any = None,
        token_ids: Sequence[int] = (),
        at_s: float | None = None,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> Step:
        """Return the last step, by vLLM's finish reason, with the last tokens and the text that was held back.

        A token that ends the answer is counted, but its text is shown only on request, and an end token's never.
        """
        if finish_reason not in _FINISH_REASONS:
            return Step(error=_error(finish_reason), num_input_tokens=self._num_input_tokens)
        stopped_by = stop_reason if stop_reason in self._sampling.stop_token_ids else None
        shown = token_ids
        if finish_reason == "stop" and not (stopped_by is not None and self._sampling.include_stop_str_in_output):
            shown = token_ids[:-1]
        return self._end(_FINISH_REASONS[finish_reason], stopped_by, shown, token_ids, at_s, logprobs)

    def cancel(self) -> Step:
        """Return the last step of a request that is ended early."""
        return self._end("cancelled", None, (), (), None, ())

    def _end(
        self,
        finish_reason: FinishReason,
        stop_reason: int | None,
        shown: Sequence[int],
        token_ids: Sequence[int],
        at_s: float | None,
        logprobs: Sequence[TokenLogprobs],
    ) -> Step:
        if at_s is not None:
            self._last_token_s = at_s
        if self._is_whole:
            self._keep(shown, token_ids, logprobs, at_s)
            text, token_ids, logprobs = "", self._kept_ids, self._kept_logprobs
        else:
            text = "".join([self._detokenizer.add(token_id) for token_id in shown])
            self._first_token_s = self._first_token_s or (at_s or 0.0)
        step = self._step(text + self._detokenizer.flush(), token_ids, logprobs)
        step.finish_reason, step.stop_reason = finish_reason, stop_reason
        if self._is_whole:
            step.generation_s = max(0.0, self._last_token_s - self._first_token_s) if token_ids else None
        if self._sampling.return_perf_metrics and finish_reason != "cancelled":
            step.perf_metrics = self._perf_metrics()
        return step

    def _keep(
        self, shown: Sequence[int], token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], at_s: float | None
    ) -> None:
        self._first_token_s = self._first_token_s or (at_s or 0.0)
        self._detokenizer.hold(shown)
        self._kept_ids.extend(token_ids)
        self._kept_logprobs.extend(logprobs)

    def _step(self, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Step:
        prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, ()
        return Step(
            text,
            token_ids,
            num_input_tokens=self._num_input_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
        )

    def _perf_metrics(self) -> PerfMetrics:
        """Return the times. vLLM reports neither the blocks nor the drafts of a single request."""
        return PerfMetrics(
            kv_cache_hit_rate=self.num_cached_tokens / self._num_input_tokens if self._num_input_tokens else 0.0,
            arrival_time_ns=_nanoseconds(self._arrived_s),
            first_scheduled_time_ns=_nanoseconds(self.scheduled_s),
            first_token_time_ns=_nanoseconds(self._first_token_s),
            last_token_time_ns=_nanoseconds(self._last_token_s),
        )


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _error(finish_reason: str) -> EngineError | UnavailableError:
    if finish_reason == "abort":  # not by this engine, which has forgotten a request that it has aborted
        return UnavailableError(f"vLLM's engine core was told to end, and has ended the request{ASK_ANOTHER}")
    if finish_reason == "error":
        return EngineError("vLLM ended the request with an error; the server's log has the cause")
    return EngineError(f"vLLM ended the request with the unknown finish reason {finish_reason!r}")


@dataclass(eq=False)
class OpenAnswer(OpenEntry):
    """An open request. By vLLM's public way its task also reads the answer."""

    arrived_s: float = field(default_factory=time.monotonic)
    """Time at which the engine got it, by time.monotonic()."""
    answer: GrowingAnswer | None = None
    """None until the prompt is tokenised."""
    rank: int | None = None
    """Its rank of data parallelism; None where vLLM chooses."""
    core_id: str = ""
    """Id of the request in vLLM's engine core; "" before it is there."""
    is_open: bool = True
    """False from its last step on."""


Deliver = Callable[[Sequence[tuple[OpenAnswer, Step]]], None]
"""Takes the steps of an iteration; those of requests that are no longer open are dropped."""


class RequestPath(Protocol):
    """A way to vLLM's engine core."""

    @property
    def worked_at_s(self) -> float:
        """Time at which the last output came, by time.monotonic(); 0 before the first."""

    def prepare(self, entry: OpenAnswer, prompt: dict[str, Any], params: Any, priority: int) -> Any:
        """Return what `submit` sends. Any thread may call it; it raises what vLLM raises for a request it refuses."""

    async def submit(self, entry: OpenAnswer, prepared: Any) -> None:
        """Send a request. Its steps follow."""

    def flush(self) -> None:
        """Deliver the steps that wait for others of their iteration."""

    async def abort(self, entries: Sequence[OpenAnswer]) -> None:
        """Have vLLM drop requests that have had their last step."""

    async def read(self) -> None:
        """Read outputs until vLLM's engine core is dead, and raise why."""


Text = Callable[[int], str]
"""Makes the text of one token alone."""


def array_logprobs(rows: Any, num_likeliest: int, text: Text) -> list[TokenLogprobs]:
    """Return the entries of a LogprobsLists (numpy) or LogprobsTensors (torch), with the `num_likeliest` of each row.

    The rows are as wide as the request that asks for the most in the iteration needs.

    Its first three fields are token ids [n, k + 1], log-probabilities [n, k + 1] and the ranks [n] of the first token
    of each row. The first one is the token at the position, and the others are the likeliest ones, in order.
    """
    token_ids, logprobs = (field[:, : 1 + num_likeliest].tolist() for field in rows[:2])
    ranks = rows[2].tolist()
    return [
        [
            Logprob(ids[0], values[0], rank, text(ids[0])),
            *(
                Logprob(token_id, value, place, text(token_id))
                for place, (token_id, value) in enumerate(zip(ids[1:], values[1:], strict=True), 1)
                if token_id != ids[0]
            ),
        ]
        for ids, values, rank in zip(token_ids, logprobs, ranks, strict=True)
    ]


def mapped_logprobs(rows: Sequence[Mapping[int, Any] | None], text: Text) -> list[TokenLogprobs | None]:
    """Return the entries of a RequestOutput: token id -> vLLM's Logprob, the token at the position first."""
    return [
        None
        if row is None
        else [Logprob(token_id, entry.logprob, entry.rank, text(token_id)) for token_id, entry in row.items()]
        for row in rows
    ]
