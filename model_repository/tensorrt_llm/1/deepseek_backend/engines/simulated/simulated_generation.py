"""One request of the simulated engine: everything that its prompt decides, and its steps."""

import math
import random
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from deepseek_backend.engines.base import FinishReason, Logprob, PerfMetrics, Step, StepSink, TokenLogprobs
from deepseek_backend.engines.generate_request import ContextHandover, GenerateRequest, SamplingParams
from deepseek_backend.engines.prompting import check_prompt_length, last_tokens
from deepseek_backend.engines.simulated.filler_text import (
    EOS_ID,
    ORDINARY_IDS,
    VOCABULARY,
    Dictation,
    Script,
    id_of,
    split_prompt,
    text_of,
    write_script,
)
from deepseek_backend.engines.simulated.kv_transfer import KvTicket, read_ticket
from deepseek_backend.engines.simulated.scheduler import ScheduledRow, Scheduler
from deepseek_backend.engines.tags import ends_inside


@dataclass(slots=True, eq=False, kw_only=True)
class SimulatedGeneration(ScheduledRow):
    """An open request. The engine's thread owns it after it has been accepted."""

    request: GenerateRequest
    sink: StepSink
    script: Script | Dictation
    finish_reason: FinishReason
    """Finish reason, unless the request is cancelled or fails before its end."""
    stop_reason: int | None = None
    ticket: KvTicket | None = None
    """Where the KV cache of a generation_only request is; of a context_only request, once its own is held."""
    prompt_ids: tuple[int, ...] = ()
    """The prompt as a context_only request hands it over."""
    delivered: int = 0
    """Number of tokens in the steps so far."""
    wants_details: bool = False
    """Whether its steps carry more than text: log-probabilities or metrics."""
    prompt_logprobs: Sequence[TokenLogprobs | None] = ()
    arrival_ns: int = 0
    scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    first_decode: int = 0
    """Number of the iteration after the one with the first token."""

    def next_step(self, scheduler: Scheduler, stamp: str) -> Step:
        """Return a step of the tokens that have not been delivered; a `stamp` that is not empty is the text of each."""
        first, end = self.delivered, self.generated
        self.delivered = end
        if end == self.length:
            step = self._last_step(first, stamp)
        else:
            token_ids, text = self._read(first, end, stamp)
            step = Step(text, token_ids, None, None, self.num_input_tokens)
        if self.wants_details:
            self._add_details(step, first, scheduler)
        return step

    def handover(self, step: Step, *, form: str, ticket: KvTicket, number: int) -> ContextHandover:
        """Return the handover of a context_only request whose only step this is."""
        return ContextHandover(
            form=form,
            prompt_token_ids=self.prompt_ids,
            first_gen_tokens=tuple(step.token_ids),
            ended=step.finish_reason == "stop",
            ctx_request_id=number,
            opaque_state=ticket.to_bytes(),
        )

    def cancelled_step(self, scheduler: Scheduler) -> Step:
        step = Step(finish_reason="cancelled", num_input_tokens=self.num_input_tokens)
        if self.request.sampling.return_perf_metrics:
            step.perf_metrics = self._perf_metrics(scheduler)
        return step

    def _last_step(self, first: int, stamp: str) -> Step:
        """Return the step from token `first` to the end. A token that ends it is counted, but seldom shown."""
        token_ids, text = self._read(first, self.length, stamp)
        if self.finish_reason == "stop":
            sampling = self.request.sampling
            if self.stop_reason is None:
                stop_id, is_shown = EOS_ID, sampling.skip_special_tokens is False
            else:
                stop_id, is_shown = self.stop_reason, bool(sampling.include_stop_str_in_output)
            token_ids = (*token_ids[:-1], stop_id)
            text = self._read(first, self.length - 1, stamp)[1] + (text_of(stop_id) if is_shown else "")
        return Step(text, token_ids, self.finish_reason, self.stop_reason, self.num_input_tokens)

    def _read(self, first: int, end: int, stamp: str) -> tuple[tuple[int, ...], str]:
        token_ids, text = self.script.read(first, end)
        return token_ids, stamp * (end - first) if stamp else text

    def _add_details(self, step: Step, first: int, scheduler: Scheduler) -> None:
        sampling = self.request.sampling
        self.last_token_ns = time.monotonic_ns()
        if first == 0:
            self.first_token_ns = self.last_token_ns
            step.prompt_logprobs = self.prompt_logprobs
        # The end of a prompt brings this token: the second where a context server generated the one before.
        if first == (self.request.handover is not None and self.ticket is None):
            self.first_decode = scheduler.num_iterations
        if sampling.logprobs is not None:
            step.logprobs = output_logprobs(step.token_ids, first, sampling)
        if sampling.return_perf_metrics and step.finish_reason is not None:
            step.perf_metrics = self._perf_metrics(scheduler)

    def _perf_metrics(self, scheduler: Scheduler) -> PerfMetrics:
        """Return the metrics. The simulated KV cache shares no prefixes, so that no block is ever reused."""
        now = scheduler.num_iterations
        first = self.first_decode if self.first_token_ns else now
        num_drafted = (now - first) * scheduler.limits.num_draft_tokens
        num_accepted = scheduler.decoded_between(first, now) - (now - first)
        num_blocks = self.blocks if self.scheduled_ns else 0
        num_prompt_blocks = -(-self.num_input_tokens // scheduler.limits.tokens_per_block)
        return PerfMetrics(
            kv_cache_missed_block=min(num_prompt_blocks, num_blocks),
            kv_cache_alloc_new_blocks=num_blocks,
            kv_cache_alloc_total_blocks=num_blocks,
            arrival_time_ns=self.arrival_ns,
            first_scheduled_time_ns=self.scheduled_ns,
            first_token_time_ns=self.first_token_ns,
            last_token_time_ns=self.last_token_ns,
            acceptance_rate=num_accepted / num_drafted if num_drafted else 0.0,
            total_accepted_draft_tokens=num_accepted,
            total_draft_tokens=num_drafted,
        )


def stamp() -> str:
    """Return the current time as a token's text: a space, and 15 digits of microseconds.

    The clock is the monotonic one, which all processes of a machine share.
    """
    return f" {time.monotonic_ns() // 1000:015d}"


def begin(
    request: GenerateRequest,
    sink: StepSink,
    *,
    max_seq_len: int,
    eos_after: int | None,
    dictated: Dictation | None = None,
) -> SimulatedGeneration:
    """Return the request, ready to be scheduled. The caller's thread does this, because a long prompt takes time.

    :param dictated: the answer, which ends after its last token; None for filler text.
    :raises RequestError: when its prompt has no tokens, or leaves no room for an answer; when its handover is not a
        simulated engine's.
    """
    sampling = request.sampling
    tokens: Sequence[str] | Sequence[int] | None = request.prompt_token_ids
    if tokens is None:
        tokens = split_prompt(request.prompt, add_special_tokens=sampling.add_special_tokens is not False)
    tokens = last_tokens(tokens, sampling.truncate_prompt_tokens)
    check_prompt_length(len(tokens), max_seq_len - 1)
    max_tokens = min(request.max_tokens, max_seq_len - len(tokens))
    ends_after = eos_after if dictated is None else len(dictated) + 1
    length: int = max_tokens
    finish_reason: FinishReason = "length"
    if ends_after is not None and not sampling.ignore_eos:
        with_eos = max(ends_after, (sampling.min_tokens or 0) + 1)
        if with_eos <= max_tokens:
            length, finish_reason = with_eos, "stop"
    ticket = read_ticket(request.handover) if request.handover is not None else None
    script: Script | Dictation | None = dictated  # an empty one counts too
    if script is None:
        script = (ticket and ticket.script) or _script(request, length)
    length, finish_reason, stop_reason = _stopped(sampling, script, length, finish_reason)
    is_context, is_generation = (request.request_type == part for part in ("context_only", "generation_only"))
    if is_context:
        max_tokens = 1
        if length > 1:
            length, finish_reason, stop_reason = 1, "length", None
    details = (sampling.logprobs, sampling.prompt_logprobs, sampling.return_perf_metrics or None)
    return SimulatedGeneration(
        num_input_tokens=len(tokens),
        max_tokens=max_tokens,
        length=length,
        priority=request.priority,
        request=request,
        sink=sink,
        script=script,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        fetches=is_generation,
        keeps_blocks=is_context,
        ticket=ticket if is_generation else None,
        prompt_ids=tuple(one if isinstance(one, int) else id_of(one) for one in tokens) if is_context else (),
        wants_details=details != (None, None, None),
        prompt_logprobs=() if sampling.prompt_logprobs is None else prompt_logprobs(tokens, sampling.prompt_logprobs),
        arrival_ns=time.monotonic_ns(),
    )


def _script(request: GenerateRequest, length: int) -> Script:
    """Return the script, which depends on the whole prompt before truncation.

    A prompt that ends inside <think> gets reasoning in the first third of the answer.
    """
    closes_at = length // 3 if ends_inside(request.prompt) else -1
    prompt = request.prompt if request.prompt_token_ids is None else request.prompt_token_ids
    seed = request.sampling.seed
    if request.sampling.greedy:
        seed = None
    elif seed is None:
        seed = random.getrandbits(64)
    return write_script(prompt, seed, closes_at=closes_at)


def _stopped(
    sampling: SamplingParams, script: Script | Dictation, length: int, finish_reason: FinishReason
) -> tuple[int, FinishReason, int | None]:
    """Return length, finish reason and stop reason with stop_token_ids. A final end token is not among these."""
    if not sampling.stop_token_ids:
        return length, finish_reason, None
    first, end = sampling.min_tokens or 0, length - (finish_reason == "stop")
    token_ids, _ = script.read(first, end)
    for index, token_id in enumerate(token_ids, first):
        if token_id in sampling.stop_token_ids:
            return index + 1, "stop", token_id
    return length, finish_reason, None


# Log-probabilities are made up with the shape of real ones, to try clients and dashboards with. They mean nothing, but
# are consistent: at each position the likeliest token has some probability, and every further rank a fixed share of the
# one before, so that all add up to 1. Greedy decoding takes rank 1; otherwise a rank comes as often as its probability
# says. The same token at the same position always gets the same numbers.


def output_logprobs(token_ids: Sequence[int], first: int, sampling: SamplingParams) -> list[TokenLogprobs]:
    """Return those of generated tokens; `first` is the index of the first one in the output."""
    last_rank = 1 if sampling.greedy else sampling.top_k or len(ORDINARY_IDS)
    count = sampling.logprobs or 0
    return [
        _invent(token_id, text_of(token_id), position, count, last_rank)
        for position, token_id in enumerate(token_ids, first)
    ]


def prompt_logprobs(prompt: Sequence[str] | Sequence[int], count: int) -> list[TokenLogprobs | None]:
    """Return those of a prompt's tokens, which are texts or ids; None for the first."""
    tokens = [(id_of(token), token) if isinstance(token, str) else (token, text_of(token)) for token in prompt]
    invented = [_invent(*token, position, count, len(ORDINARY_IDS)) for position, token in enumerate(tokens[1:], 1)]
    return [None, *invented]


def _invent(token_id: int, text: str, position: int, count: int, last_rank: int) -> TokenLogprobs:
    """Return the token, then the others among the `count` likeliest."""
    noise = zlib.crc32(b"%d at %d" % (token_id, position))
    likeliest = 0.25 + 0.7 * (noise >> 16) / 65536
    top, fall = math.log(likeliest), math.log1p(-likeliest)
    drawn = 1 + int(math.log1p(-(noise & 0xFFFF) / 65536) / fall)
    rank = min(drawn, last_rank)
    others = [other for other in range(1, count + 1) if other != rank]
    entries = [Logprob(token_id, top + (rank - 1) * fall, rank, text)]
    for distance, other in enumerate(others, 1):
        # The token at this distance in the vocabulary, which is never the same token.
        neighbour = ORDINARY_IDS[(token_id - ORDINARY_IDS.start + distance) % len(ORDINARY_IDS)]
        entries.append(Logprob(neighbour, top + (other - 1) * fall, other, VOCABULARY[neighbour]))
    return entries
