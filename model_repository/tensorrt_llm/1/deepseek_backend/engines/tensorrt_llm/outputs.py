"""Makes steps of a request's output: the text and tokens that its sink has not got yet.

The output grows in place with every response that is read. The new part is counted from what was sent. TensorRT-LLM's
own text_diff and token_ids_diff won't do, because they know the last response only: several may have been read since,
the last step's text may be longer than TensorRT-LLM's, and a tokenizer without an incremental form may change the end
of an earlier text.

The second half is for requests that two servers share: the context server computes the prompt, and the generation
server the answer. What TensorRT-LLM does there, and this engine makes up for:

* On the context side it keeps the KV cache where the answer goes on, but not where the first token is the end token.
  That handover has no opaque_state, and nothing is fetched for it.
* On the generation side it does not look whether the first token ends the answer.
* It may repeat the first token there, as the release record says. A token that is not equal to it is never left out.
* Its text there begins anywhere. A character may lie in the first token and the ones behind it, so that all text of
  shared requests is made here.
* It drops a request that is aborted during the transfer, and the context server keeps the KV cache for ever.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any

from deepseek_backend.contract import ErrorCode
from deepseek_backend.engines.base import Step, TokenLogprobs
from deepseek_backend.engines.generate_request import ContextHandover, GenerateRequest, SamplingParams
from deepseek_backend.engines.prompting import PromptTokenizer
from deepseek_backend.engines.tensorrt_llm import translation
from deepseek_backend.errors import EngineError, RequestError
from deepseek_backend.release import EngineRelease


class OutputIncrements:
    """The steps of one request; `output` is its RequestOutput."""

    def __init__(
        self, request: GenerateRequest, output: Any, tokenizer: PromptTokenizer, *, is_whole: bool = False
    ) -> None:
        """`is_whole`: the answer comes in one response, with its performance metrics."""
        self._sampling = request.sampling
        self._is_whole = is_whole
        self._output = output
        self._tokenizer = tokenizer
        self._decode = partial(tokenizer.decode, skip_special_tokens=request.sampling.skip_special_tokens is not False)
        self._num_chars_sent = 0
        self.num_tokens_sent = 0

    def take(self, *, cut_short: bool) -> Step:
        """Return a step with what is new, which may be nothing; the last step once there is a finish reason.

        :param cut_short: the request was aborted, or reading it has failed, so that tokens may have no logprobs.
        :raises EngineError: for logprobs that do not belong to the tokens.
        """
        output = self._output.outputs[0]  # read once, because each access copies or sorts a list
        reason = output.finish_reason
        token_ids = self._new_token_ids(output)
        text = self._new_text(output, token_ids)
        logprobs: Sequence[TokenLogprobs] = ()
        if self._sampling.logprobs is not None:
            may_be_short = reason == "cancelled" or (reason is None and cut_short)
            token_ids, logprobs = self._with_logprobs(output, token_ids, may_be_short=may_be_short)
        step = Step(text, token_ids, logprobs=logprobs)
        step.num_cached_tokens = num_cached_tokens(self._output)
        self.num_tokens_sent += len(token_ids)
        if reason is not None:
            step.finish_reason, step.stop_reason = translation.finish_reason(reason), output.stop_reason
            if self._is_whole:
                step.generation_s = translation.generation_seconds(output.request_perf_metrics)
            if self._sampling.return_perf_metrics and output.request_perf_metrics is not None:
                step.perf_metrics = translation.perf_metrics(output.request_perf_metrics)
        return step

    def _new_token_ids(self, output: Any) -> Sequence[int]:
        token_ids: Sequence[int] = output.token_ids[self.num_tokens_sent :]
        return token_ids

    def _new_text(self, output: Any, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, the new ones, with what was held back before them."""
        final = output.finish_reason is not None
        whole = translation.whole_text(output.text, output.token_ids, self._decode) if final else output.text
        text = translation.complete_text(whole, self._num_chars_sent, final=final)
        self._num_chars_sent += len(text)
        return text

    def _with_logprobs(
        self, output: Any, token_ids: Sequence[int], *, may_be_short: bool
    ) -> tuple[Sequence[int], Sequence[TokenLogprobs]]:
        """Return the tokens and their logprobs. TensorRT-LLM lists those of a stop word behind the tokens' own."""
        start = self.num_tokens_sent
        entries = (output.logprobs or [])[start : start + len(token_ids)]
        if may_be_short:
            token_ids = token_ids[: len(entries)]
        return token_ids, translation.token_logprobs(token_ids, entries, self._sampling, self._tokenizer.text)


def num_cached_tokens(output: Any) -> int | None:
    """Return a RequestOutput's number of prompt tokens from the KV cache; None before 1.2, which doesn't tell."""
    cached: int | None = getattr(output, "cached_tokens", None)
    return cached


@dataclass(frozen=True, kw_only=True)
class SharingSupport:
    """The kinds of requests that a release can share under given LLM arguments."""

    form: str = ""
    """Capabilities.handover_form."""
    refusal: str = ""
    """Why no request can be shared; "" where some can."""
    context_refusal: str = ""
    """Why this is no context server; "" where it is one."""
    repeats_first_token: bool = False
    """Whether the generation side's output begins with the token of the context side."""
    guides_refused: str = ""

    def check(self, request: GenerateRequest) -> None:
        """Check that TensorRT-LLM can do its part of a shared request.

        :raises RequestError: E_UNSUPPORTED for what it can't do; E_INVALID_ARGUMENT for a handover of another kind.
        """
        if request.request_type == "context_only" and self.context_refusal:
            raise RequestError(f"request_type: {self.context_refusal}", code=ErrorCode.UNSUPPORTED)
        if guides := translation.guide(request.sampling):
            raise RequestError(f"guided_{next(iter(guides))}: {self.guides_refused}", code=ErrorCode.UNSUPPORTED)
        if request.handover is None:
            return
        if len(request.handover.first_gen_tokens) != 1:
            raise RequestError("context_phase_params: expected one token in first_gen_tokens, as TensorRT-LLM makes it")
        if not request.handover.ended and not request.handover.opaque_state:
            raise RequestError("context_phase_params: expected opaque_state, unless the answer has ended; got none")


def sharing_support(release: EngineRelease, llm_args: Mapping[str, Any]) -> SharingSupport:
    """Return what the release can share with `llm_args`."""
    facts = release.record.get("disaggregated_params", {})
    name = f"TensorRT-LLM {release.version}"
    if "repeats_first_token" not in facts:
        return SharingSupport(refusal=f"not established for {name}, which does whole requests only")
    if not (llm_args.get("cache_transceiver_config") or {}).get("backend"):
        return SharingSupport(
            refusal="model.yaml has no cache_transceiver_config with a backend, so that this server does whole "
            "requests only; build with --profile ctx or gen"
        )
    has_overlap = not llm_args.get("disable_overlap_scheduler")
    return SharingSupport(
        form=f"tensorrt_llm {release.version} {PurePath(str(llm_args['model'])).name}",
        context_refusal="expected a context server, whose model.yaml has disable_overlap_scheduler: true; got "
        "context_only on one without; build with --profile ctx"
        if has_overlap
        else "",
        repeats_first_token=facts["repeats_first_token"]["value"],
        guides_refused=f"not established for a request that two servers share, with {name}",
    )


def is_shared(request: GenerateRequest) -> bool:
    """Whether another server computes a part of the request, or has done so."""
    return request.request_type == "context_only" or request.handover is not None


def fetches(request: GenerateRequest) -> bool:
    """Whether a context server keeps a KV cache for the request until this server has fetched it."""
    handover = request.handover
    return request.request_type == "generation_only" and handover is not None and bool(handover.opaque_state)


def part_arguments(
    request: GenerateRequest, params: dict[str, Any], token_ids: list[int], llmapi: Any
) -> dict[str, Any]:
    """Return the keyword arguments of LLM.generate_async for this server's part.

    :param params: keyword arguments of SamplingParams for the whole request. TensorRT-LLM changes the max_tokens of a
        context_only request's, so that each request has SamplingParams of its own.
    :param llmapi: the module tensorrt_llm.llmapi.
    """
    params = {**params, "detokenize": False}
    handover = request.handover
    arguments: dict[str, Any] = {"inputs": token_ids, "streaming": handover is not None}
    if request.request_type == "context_only":
        arguments["disaggregated_params"] = llmapi.DisaggregatedParams(request_type="context_only")
    elif handover is not None and request.request_type == "generation_only":
        drafts = handover.draft_tokens
        arguments["disaggregated_params"] = llmapi.DisaggregatedParams(
            request_type="generation_only",
            first_gen_tokens=list(handover.first_gen_tokens),
            ctx_request_id=handover.ctx_request_id,
            opaque_state=handover.opaque_state,
            draft_tokens=None if drafts is None else list(drafts),
        )
    elif handover is not None:
        arguments["inputs"] = [*token_ids, *handover.first_gen_tokens]
        params["max_tokens"] -= len(handover.first_gen_tokens)
        if "min_tokens" in params:
            params["min_tokens"] = max(0, params["min_tokens"] - len(handover.first_gen_tokens))
    return {**arguments, "sampling_params": llmapi.SamplingParams(**params)}


class GrowingText:
    """The text of one answer, made of its tokens in pieces that never end inside a character."""

    def __init__(self, tokenizer: PromptTokenizer, sampling: SamplingParams) -> None:
        self._decode = partial(tokenizer.decode, skip_special_tokens=sampling.skip_special_tokens is not False)
        self._before: list[int] = []
        """The tokens of the last piece. What a token is as text may depend on the ones before."""
        self._held: list[int] = []
        """Tokens behind them, which end inside a character."""

    def add(self, token_ids: Iterable[int], *, final: bool) -> str:
        """Return the new text. In the last piece U+FFFD stands for an incomplete character."""
        text = ""
        for token_id in token_ids:
            self._held.append(token_id)
            if not (new := self._text_held()).endswith(translation.INCOMPLETE):
                text += new
                self._before, self._held = self._held, []
        return text + self._text_held() if final else text

    def _text_held(self) -> str:
        return self._decode(self._before + self._held)[len(self._decode(self._before)) :]


def first_step(request: GenerateRequest, handover: ContextHandover, text: GrowingText, *, is_whole: bool) -> Step:
    """Return the step of the first token; it is the last one where the answer ends there.

    :param is_whole: there is no room for another token.
    """
    (token,) = handover.first_gen_tokens
    ended = handover.ended
    step = Step(num_cached_tokens=handover.num_cached_tokens)
    if ended or is_whole:
        step.finish_reason = "stop" if ended else "length"
    if ended and token in request.sampling.stop_token_ids:
        step.stop_reason = token
        if not request.sampling.include_stop_str_in_output:
            return step
    step.token_ids = (token,)
    step.text = text.add([token], final=step.finish_reason is not None)
    return step


class ContextAnswer:
    """The only step of a context_only request; `output` is its RequestOutput."""

    num_tokens_sent = 0

    def __init__(
        self, request: GenerateRequest, output: Any, text: GrowingText, form: str, prompt_token_ids: Sequence[int]
    ) -> None:
        self._request = request
        self._output = output
        self._text = text
        self._form = form
        self._prompt_token_ids = tuple(prompt_token_ids)

    def take(self, *, cut_short: bool) -> Step:
        """Return the step, or an empty one before the end.

        :param cut_short: the request was aborted. Where its KV cache is kept already, the step has the handover still.
        :raises EngineError: where TensorRT-LLM has not kept the KV cache.
        """
        if not self._output.finished:
            return Step()
        output = self._output.outputs[0]
        if output.finish_reason == "cancelled":
            return Step(finish_reason="cancelled")
        handover = self._handover(output)
        step = first_step(self._request, handover, self._text, is_whole=False)
        step.finish_reason = step.finish_reason or "length"  # TensorRT-LLM may call it not_finished
        step.handover = handover
        return step

    def _handover(self, output: Any) -> ContextHandover:
        kept = None if output.finish_reason == "stop" else output.disaggregated_params
        if output.finish_reason == "stop":
            first, ended = output.token_ids[:1] or [output.stop_reason], True
        elif kept is None or not kept.first_gen_tokens or not kept.opaque_state:
            raise EngineError("TensorRT-LLM ended a context_only request without the parameters of its KV cache")
        else:
            first = kept.first_gen_tokens
            # Its check for stop tokens comes after the one for max_tokens, which it sets to 1.
            ended = first[0] in self._request.sampling.stop_token_ids
        return ContextHandover(
            form=self._form,
            prompt_token_ids=self._prompt_token_ids,
            first_gen_tokens=tuple(first),
            ended=ended,
            ctx_request_id=kept and kept.ctx_request_id,
            opaque_state=kept.opaque_state if kept else b"",
            draft_tokens=None if kept is None or kept.draft_tokens is None else tuple(kept.draft_tokens),
            num_cached_tokens=num_cached_tokens(self._output) or 0,
        )


class ContinuedAnswer(OutputIncrements):
    """The steps behind the first token, whether the KV cache was fetched or is computed again."""

    def __init__(
        self,
        request: GenerateRequest,
        output: Any,
        text: GrowingText,
        tokenizer: PromptTokenizer,
        sharing: SharingSupport,
    ) -> None:
        super().__init__(request, output, tokenizer)
        self._text = text
        self._request = request
        self._may_repeat = sharing.repeats_first_token and request.request_type == "generation_only"

    def take(self, *, cut_short: bool) -> Step:
        step = super().take(cut_short=cut_short)
        if self._request.request_type == "generation_only" and self._request.handover is not None:
            step.num_cached_tokens = self._request.handover.num_cached_tokens
        return step

    def _new_token_ids(self, output: Any) -> Sequence[int]:
        token_ids: Sequence[int] = output.token_ids
        handover = self._request.handover
        repeats = self._may_repeat and handover is not None and tuple(token_ids[:1]) == handover.first_gen_tokens
        return token_ids[repeats + self.num_tokens_sent :]

    def _new_text(self, output: Any, token_ids: Sequence[int]) -> str:
        return self._text.add(token_ids, final=output.finish_reason is not None)
