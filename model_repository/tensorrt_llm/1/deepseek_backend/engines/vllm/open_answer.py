"""A request of the vLLM engine: in the fields of vLLM's SamplingParams, and the steps that vLLM's tokens make."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tokenizers import Tokenizer

from deepseek_backend.contract import SAMPLING_BY_NAME, SAMPLING_FIELDS
from deepseek_backend.engines.base import TEXT_LAYER_FIELDS, FinishReason, Logprob, PerfMetrics, Step, TokenLogprobs
from deepseek_backend.engines.detokenizer import Detokenizer
from deepseek_backend.engines.generate_request import GenerateRequest, SamplingParams
from deepseek_backend.engines.loop_engine import OpenEntry
from deepseek_backend.engines.vllm.loading import VllmRelease
from deepseek_backend.errors import ASK_ANOTHER, EngineError, RequestError, UnavailableError

_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "repetition": "stop"}
"""vLLM's finish reason -> ours, where an answer ends as it should."""
Text = Callable[[int], str]
"""Makes the text of one token alone."""
APPLIED_HERE = TEXT_LAYER_FIELDS | {
    *("max_tokens", "truncate_prompt_tokens", "add_special_tokens", "skip_special_tokens", "return_perf_metrics")
}
"""Sampling fields that the backend's text layer and this engine apply themselves, with any vLLM."""
GUIDES = {field.name: field.name.removeprefix("guided_") for field in SAMPLING_FIELDS if field.guided}
"""Our field -> the field of vLLM's StructuredOutputsParams."""
_RENAMED = {"bad": "bad_words"}
"""Our field -> the field of vLLM's SamplingParams, where the names differ."""
BANNED = "_bad_words_token_ids"
"""vLLM's own field for the token ids of `bad_words`."""
MAX_BANNED_SEQUENCES = 128
MAX_BANNED_TOKENS = 1024
"""Bounds of vLLM's worker. Beyond them it fails, and the engine core with it
(vllm/v1/worker/gpu/sample/bad_words.py, 0.24.0 to 0.33.0)."""


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
            error: EngineError | UnavailableError
            if finish_reason == "abort":  # not by this engine, which has forgotten a request that it has aborted
                error = UnavailableError(f"vLLM's engine core was told to end, and has ended the request{ASK_ANOTHER}")
            elif finish_reason == "error":
                error = EngineError("vLLM ended the request with an error; the server's log has the cause")
            else:
                error = EngineError(f"vLLM ended the request with the unknown finish reason {finish_reason!r}")
            return Step(error=error, num_input_tokens=self._num_input_tokens)
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


def unsupported_fields(release: VllmRelease, llm_args: Mapping[str, Any]) -> dict[str, str]:
    """Return each field of the contract, and priority, that vLLM does not honour under `llm_args`, with the reason."""
    known, guides = set(release.record["sampling_params"]), set(release.record["structured_outputs"])
    refused = release.refused_with_drafts if llm_args.get("speculative_config") else frozenset()
    reasons: dict[str, str] = {}
    for name in SAMPLING_BY_NAME:
        its_name = _RENAMED.get(name, name)
        if name in APPLIED_HERE or name == "best_of":
            continue
        if name not in GUIDES and its_name in refused:
            reasons[name] = f"vLLM {release.version} refuses it with speculative decoding"
        elif (GUIDES[name] not in guides) if name in GUIDES else (its_name not in known):
            reasons[name] = f"vLLM {release.version} does not have it"
    if llm_args.get("scheduling_policy") != "priority":
        reasons["priority"] = "needs the engine argument scheduling_policy: priority"
    return reasons


def sampling_arguments(
    request: GenerateRequest,
    *,
    max_tokens: int,
    max_temperature: float | None,
    word_token_ids: Callable[[str], list[int]],
) -> dict[str, Any]:
    """Return keyword arguments of vLLM's SamplingParams, without the guide.

    Text, stop strings and special tokens are this engine's and the backend's own work. vLLM takes a temperature between
    0 and 0.01 for 0.01.

    :param max_tokens: the request's, cut to the room that the context leaves.
    :raises RequestError: for a temperature above `max_temperature`, and for bad words that vLLM can't take.
    """
    sampling = request.sampling
    params: dict[str, Any] = {
        "detokenize": False,
        "skip_clone": True,  # vLLM changes its copy, and the request's own is used once
        "max_tokens": max_tokens,
        # Generation ends at max_tokens anyway, and vLLM refuses a min_tokens above it.
        "min_tokens": sampling.min_tokens and min(sampling.min_tokens, max_tokens),
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        BANNED: banned_token_ids(sampling.bad, word_token_ids) if sampling.bad else None,
        "logit_bias": sampling.logit_bias or None,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logprobs": sampling.logprobs,
        "prompt_logprobs": sampling.prompt_logprobs,
    }
    # vLLM's own default is a temperature of 1, and its top_p must not be 0.
    if sampling.greedy:
        params["temperature"] = 0.0
    else:
        temperature = sampling.temperature
        if temperature is not None and max_temperature is not None and temperature > max_temperature:
            raise RequestError(
                f"temperature: expected at most {max_temperature:g}, which is vLLM's limit, got {temperature:g}"
            )
        params |= {
            "temperature": temperature,
            "top_k": sampling.top_k or None,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p or None,
            "seed": sampling.seed,
        }
    return {name: value for name, value in params.items() if value is not None}


def banned_token_ids(words: Sequence[str], token_ids_of: Callable[[str], list[int]]) -> list[list[int]]:
    """Return each word in token ids, and again with a blank before it.

    vLLM would ban a word after a blank only where it has as many tokens as without one.

    :raises RequestError: for a word without tokens, and for more than vLLM takes.
    """
    spellings: dict[str, None] = {}
    for word in words:
        bare = word if word.isspace() else word.lstrip(" ")
        spellings |= dict.fromkeys((bare,) if word.isspace() else (bare, f" {bare}"))
    banned = [token_ids_of(spelling) for spelling in spellings]
    if not all(words) or not all(banned):
        raise RequestError("bad: expected words, got one without a token")
    if len(banned) > MAX_BANNED_SEQUENCES:
        raise RequestError(
            f"bad: expected at most {MAX_BANNED_SEQUENCES // 2} words, as vLLM is told each with and without a blank "
            f"before it, got {len(words)}"
        )
    if (num_tokens := sum(map(len, banned))) > MAX_BANNED_TOKENS:
        raise RequestError(
            f"bad: expected at most {MAX_BANNED_TOKENS:,} tokens in all, each word with and without a blank before "
            f"it, got {num_tokens:,}"
        )
    return banned


def guide(sampling: SamplingParams) -> dict[str, Any]:
    """Return keyword arguments of vLLM's StructuredOutputsParams; none for a request without a guide."""
    return {its_name: value for name, its_name in GUIDES.items() if (value := getattr(sampling, name))}


def refusal(error: Exception, sampling: SamplingParams) -> RequestError:
    """Return vLLM's refusal of a request as ours. It begins with our name of the field, where that is known.

    Only some of vLLM's errors name the field themselves; in others its name is part of the message.
    """
    message = " ".join(str(error).split())
    guides = [name for name in GUIDES if getattr(sampling, name)]
    named = str(getattr(error, "parameter", None))
    ours = {_RENAMED.get(name, name): name for name in SAMPLING_BY_NAME}
    # Of a guide, vLLM repeats the client's own words.
    words = [named] if guides else [named, *(word for word in re.findall(r"\w+", message) if len(word) > 3)]
    field = next((ours[word] for word in words if word in ours), guides[0] if guides else "")
    return RequestError(f"{field}: vLLM refused it: {message}" if field else f"vLLM refused the request: {message}")
