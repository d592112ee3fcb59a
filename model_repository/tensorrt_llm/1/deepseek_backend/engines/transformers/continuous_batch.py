"""Iteration-level batching: requests join the batch when there is room and leave it when they are done.

One iteration decodes a token of every running request in one forward pass, then prefills waiting ones, first come first
served. Single-threaded: the engine's thread owns it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal

from deepseek_backend.contract import ErrorCode
from deepseek_backend.engines.base import FinishReason, Step, StepSink
from deepseek_backend.engines.transformers.checkpoint import Checkpoint
from deepseek_backend.engines.transformers.detokenizer import Detokenizer
from deepseek_backend.engines.transformers.model_runner import ModelRunner
from deepseek_backend.engines.transformers.sampling import TokenSampler, sample_tokens
from deepseek_backend.errors import BackendError, RequestError
from deepseek_backend.request import GenerateRequest

PREFILL_TOKENS = 2048
"""Prompt tokens prefilled per iteration before the running requests get their next token; one prompt at the least."""


class Generation:
    """One request in the engine: its prompt, and how its tokens are chosen, written out and ended."""

    def __init__(self, request: GenerateRequest, sink: StepSink, checkpoint: Checkpoint, max_seq_len: int) -> None:
        sampling = request.sampling
        self.request = request
        self.sink = sink
        add_special_tokens = sampling.add_special_tokens is not False
        self.prompt_ids: Sequence[int] = checkpoint.tokenizer.encode(
            request.prompt, add_special_tokens=add_special_tokens
        ).ids
        self.last_token_id = -1
        self.num_generated = 0
        self._max_seq_len = max_seq_len
        self._max_tokens = min(request.max_tokens, max_seq_len - len(self.prompt_ids))
        self._eos_token_ids = frozenset() if sampling.ignore_eos else checkpoint.eos_token_ids
        self._detokenizer = Detokenizer(
            checkpoint.tokenizer, skip_special_tokens=sampling.skip_special_tokens is not False
        )
        self.sampler = TokenSampler(
            sampling,
            prompt_ids=self.prompt_ids,
            end_ids=checkpoint.eos_token_ids.union(sampling.stop_token_ids),
            vocab_size=checkpoint.vocab_size,
            device=checkpoint.model.device,
        )

    def refusal(self) -> RequestError | None:
        """Why the prompt can't be served."""
        num_tokens, most = len(self.prompt_ids), self._max_seq_len - 1
        if num_tokens > most:
            return RequestError(
                f"the prompt has {num_tokens} tokens and at most {most} fit, with one left for the answer; "
                "shorten the prompt or raise engine_options.max_seq_len",
                code=ErrorCode.PROMPT_TOO_LONG,
            )
        if num_tokens == 0:
            return RequestError("the prompt has no tokens; give some text, or leave add_special_tokens on")
        return None

    def advance(self, token_id: int) -> Step:
        """The step that `token_id` makes. The token that ends the text counts, but is not in the text."""
        self.last_token_id = token_id
        self.num_generated += 1
        finish_reason, stop_reason = self._ending(token_id)
        text = "" if finish_reason == "stop" else self._detokenizer.add(token_id)
        if finish_reason is not None:
            text += self._detokenizer.flush()
        return self.step(text=text, token_ids=(token_id,), finish_reason=finish_reason, stop_reason=stop_reason)

    def step(
        self,
        *,
        text: str = "",
        token_ids: Sequence[int] = (),
        finish_reason: FinishReason | None = None,
        stop_reason: int | None = None,
        error: BackendError | None = None,
    ) -> Step:
        return Step(
            text=text,
            token_ids=token_ids,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_input_tokens=len(self.prompt_ids),
            error=error,
        )

    def _ending(self, token_id: int) -> tuple[Literal["stop", "length"] | None, int | None]:
        """finish_reason and stop_reason after `token_id`."""
        if token_id in self._eos_token_ids:
            return "stop", None
        if token_id in self.request.sampling.stop_token_ids:
            return "stop", token_id
        return ("length" if self.num_generated >= self._max_tokens else None), None


class ContinuousBatch:
    """The waiting and the running requests of one model. What happens to them is collected in `steps`."""

    def __init__(self, runner: ModelRunner, max_num_seqs: int) -> None:
        self._runner = runner
        self._max_num_seqs = max_num_seqs
        self._waiting: deque[Generation] = deque()
        self._running: list[Generation] = []  # by row of the runner
        self.steps: list[tuple[Generation, Step]] = []
        """Kept here rather than returned, so that what came before an exception is not lost with it."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_cached_tokens(self) -> int:
        return sum(self._runner.lengths)

    def add(self, generations: Iterable[Generation]) -> None:
        """Queue them; those that can't be served are answered at once."""
        for generation in generations:
            refusal = generation.refusal()
            if refusal is None:
                self._waiting.append(generation)
            else:
                self.steps.append((generation, generation.step(error=refusal)))

    def iterate(self) -> None:
        """One decode of all running requests, then prefills."""
        if self._running:
            self._decode()
        num_tokens = 0
        while self._waiting and len(self._running) < self._max_num_seqs:
            num_tokens += len(self._waiting[0].prompt_ids)
            if num_tokens > max(PREFILL_TOKENS, len(self._waiting[0].prompt_ids)):
                break
            self._prefill()

    def cancel(self, request_ids: set[str]) -> None:
        """End those of the open requests. Bytes of an incomplete character are dropped."""
        kept = [generation for generation in self._waiting if generation.request.request_id not in request_ids]
        dropped = [generation for generation in self._waiting if generation.request.request_id in request_ids]
        self._waiting = deque(kept)
        for row in reversed(range(len(self._running))):
            if self._running[row].request.request_id in request_ids:
                dropped.append(self._running[row])
                self._remove(row)
        self.steps += [(generation, generation.step(finish_reason="cancelled")) for generation in dropped]

    def close(self) -> list[Generation]:
        """Forget all open requests and return them."""
        generations = [*self._running, *self._waiting]
        self._running, self._waiting = [], deque()
        return generations

    def _decode(self) -> None:
        logits = self._runner.decode([generation.last_token_id for generation in self._running])
        token_ids = sample_tokens(logits, [generation.sampler for generation in self._running])
        # From the last row: removing a row moves the last one into its place, which has had its turn then.
        for row in reversed(range(len(token_ids))):
            self._advance(row, token_ids[row])

    def _prefill(self) -> None:
        generation = self._waiting[0]
        logits = self._runner.prefill(generation.prompt_ids)
        (token_id,) = sample_tokens(logits, [generation.sampler])
        self._running.append(self._waiting.popleft())
        self._advance(len(self._running) - 1, token_id)

    def _advance(self, row: int, token_id: int) -> None:
        generation = self._running[row]
        step = generation.advance(token_id)
        if step.finish_reason is not None:
            self._remove(row)
        self.steps.append((generation, step))

    def _remove(self, row: int) -> None:
        self._runner.remove(row)
        self._running[row] = self._running[-1]
        self._running.pop()
