"""One sequence of a request, between the engine's steps and the named arrays of its responses.

Pure and not thread-safe: it knows numpy, not pb_utils.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from deepseek_backend.answer_text import ReasoningSplitter, StopStringFilter
from deepseek_backend.contract import OUTPUTS, PERF_OUTPUTS, Dtype
from deepseek_backend.engines.base import FinishReason, PerfMetrics, Step, TokenLogprobs
from deepseek_backend.engines.generate_request import ContextHandover
from deepseek_backend.engines.tags import CLOSING, ends_inside
from deepseek_backend.parsing import ParsedRequest

Outputs = list[tuple[str, npt.NDArray[Any]]]
"""(output name, array of the dtype that contract.OUTPUTS declares)"""

_NUMPY_DTYPES: dict[Dtype, npt.DTypeLike] = {
    Dtype.STRING: np.object_,
    Dtype.INT32: np.int32,
    Dtype.INT64: np.int64,
    Dtype.FP32: np.float32,
}
# It stands for minus infinity, the value of a token that guided decoding rules out: JSON has no such number.
_LEAST_LOGPROB = -9999.0
_DTYPES = {tensor.name: _NUMPY_DTYPES[tensor.dtype] for tensor in OUTPUTS}


def outputs(chunks: "Sequence[SequenceChunk]", parsed: ParsedRequest, *, several: bool) -> Outputs:
    """Return the outputs of one response, each of shape [len(chunks)], except output_ids: all chunks' ids in one array.

    `several`: the request has more than one sequence.
    """
    result = [_output("text_output", [chunk.text.encode() for chunk in chunks])]
    if (
        len(chunks) == 1
        and chunks[0].finish_reason is None
        and not (several or parsed.separate_reasoning or parsed.returned)
    ):
        return result  # nearly every response
    ended = any(chunk.finish_reason is not None for chunk in chunks)
    if ended or "finish_reason" in parsed.returned:
        result.append(_output("finish_reason", [str(chunk.finish_reason).encode() for chunk in chunks]))
    if "stop_reason" in parsed.returned or any(chunk.stop_reason is not None for chunk in chunks):
        result.append(_output("stop_reason", [str(chunk.stop_reason).encode() for chunk in chunks]))
    if ended or "num_input_tokens" in parsed.returned:
        result.append(_output("num_input_tokens", [chunk.num_input_tokens for chunk in chunks]))
    if counts_tokens(parsed, ended=ended, several=several):
        result.append(_output("num_output_tokens", [chunk.num_output_tokens for chunk in chunks]))
    if several:
        result.append(_output("sequence_index", [chunk.index for chunk in chunks]))
    if parsed.separate_reasoning:
        result.append(_output("reasoning_output", [chunk.reasoning.encode() for chunk in chunks]))
    if ended:
        if None not in (cached := [chunk.num_cached_tokens for chunk in chunks]):
            result.append(_output("num_cached_tokens", cached))
        if parsed.separate_reasoning:
            result.append(_output("num_reasoning_tokens", [chunk.num_reasoning_tokens for chunk in chunks]))
    if chunks and (handover := chunks[0].handover) is not None:
        result.append(_output("context_phase_params", [handover.to_json()]))
    return result + _token_outputs(chunks, parsed)


def task_outputs(**values: Sequence[Any]) -> Outputs:
    """Return the outputs of a task's one response: `values`, and those that every last response has."""
    return [_output(name, each) for name, each in {"text_output": [b""], "finish_reason": [b"stop"], **values}.items()]


def num_bytes(response: Outputs) -> int:
    """Return about how many bytes `response` takes in the memory that the stub shares with the server."""
    return sum(sum(map(len, array)) if array.dtype == np.object_ else array.nbytes for _, array in response)


def counts_tokens(parsed: ParsedRequest, *, ended: bool, several: bool) -> bool:
    """Whether the response carries num_output_tokens. Without it the ids of several sequences can't be told apart."""
    return ended or "num_output_tokens" in parsed.returned or (several and "output_ids" in parsed.returned)


def _token_outputs(chunks: "Sequence[SequenceChunk]", parsed: ParsedRequest) -> Outputs:
    """Return the outputs that a request has to ask for."""
    returned, result = parsed.returned, []
    if "output_ids" in returned:
        result.append(_output("output_ids", [token_id for chunk in chunks for token_id in chunk.token_ids]))
    if "logprobs" in returned:
        result.append(_output("logprobs", [_logprobs_json(chunk.logprobs) for chunk in chunks]))
    if "prompt_logprobs" in returned and any(chunk.prompt_logprobs for chunk in chunks):
        result.append(_output("prompt_logprobs", [_logprobs_json(chunk.prompt_logprobs) for chunk in chunks]))
    if "cumulative_logprob" in returned:
        result.append(
            _output("cumulative_logprob", [max(chunk.cumulative_logprob, _LEAST_LOGPROB) for chunk in chunks])
        )
    if parsed.sampling.return_perf_metrics and any(chunk.perf_metrics for chunk in chunks):
        for tensor in PERF_OUTPUTS:
            values = [getattr(chunk.perf_metrics, tensor.name, 0) for chunk in chunks]
            result.append(_output(tensor.name, values))
    return result


def _logprobs_json(tokens: Sequence[TokenLogprobs | None]) -> bytes:
    """Return JSON as Triton's vLLM backend writes it: for each token, token id -> {logprob, rank, decoded_token}."""
    document = [
        None
        if token is None
        else {
            str(token_id): {"logprob": max(_LEAST_LOGPROB, logprob), "rank": rank, "decoded_token": text}
            for token_id, logprob, rank, text in token
        }
        for token in tokens
    ]
    return json.dumps(document, ensure_ascii=False).encode()


def _output(name: str, values: Sequence[Any]) -> tuple[str, npt.NDArray[Any]]:
    return name, np.array(values, dtype=_DTYPES[name])


# Characters that a cumulative stream may send in all before each further chunk has to be larger: enough for about 700
# tokens, one by one.
_FREE_CHARACTERS = 1 << 20
# An answer leaves in at least this many chunks, however late it is: one lump at the end is no stream.
_PIECES = 5
_SMALL_PIECE = 128
"""Characters that are sent as one chunk in any case; about 32 tokens."""


_NO_ENDS: Mapping[int, int] = MappingProxyType({})


@dataclass(slots=True, kw_only=True)
class SequenceChunk:
    """The part of a response that belongs to one sequence."""

    index: int
    text: str = ""
    reasoning: str = ""
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    """Tokens since the previous response that carried the count."""
    finish_reason: FinishReason | None = None
    """Set with the sequence's last chunk."""
    stop_reason: int | str | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    num_cached_tokens: int | None = 0
    num_reasoning_tokens: int = 0
    perf_metrics: PerfMetrics | None = None
    handover: ContextHandover | None = None


class SequenceBuffer:
    """The text and the numbers of one sequence that its client has not got yet."""

    def __init__(
        self,
        index: int,
        parsed: ParsedRequest,
        prompt: str,
        begun: str = "",
        reasoning_ends: Mapping[int, int] = _NO_ENDS,
        continues_reasoning: bool = False,
    ) -> None:
        """Begin a sequence.

        :param prompt: the text given to the engine; empty for a prompt in token ids.
        :param begun: the end of it that is the beginning of the answer.
        :param reasoning_ends: id of a token that ends the reasoning -> 1 if it counts to it, else 0.
        """
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.num_input_tokens = 0
        self.num_cached_tokens: int | None = 0
        self.num_output_tokens = 0
        """Tokens of the whole sequence so far."""
        self.cumulative_logprob = 0.0
        self._awaits_metrics = False
        """A stop string has ended the text, and the engine's last step with the performance metrics has not come."""
        self._num_counted = 0
        """The part of num_output_tokens that responses have carried."""
        sampling = parsed.sampling
        self._parsed = parsed
        self._filter = StopStringFilter(sampling.stop, include_stop=bool(sampling.include_stop_str_in_output))
        is_inside = continues_reasoning or ends_inside(prompt)
        self._splitter = None
        if parsed.separate_reasoning:
            self._splitter = ReasoningSplitter(opened=is_inside, closed=prompt.endswith(CLOSING))
        self._echo = prompt.removesuffix(begun) if parsed.echo else ""
        """The prompt, to be put before the text. It waits for the first step, which has the counts that go with it."""
        self._begun = begun
        """The answer's beginning, which waits too."""
        self._reasoning_ends = reasoning_ends
        self._num_reasoning = 0
        """Tokens up to the end of the reasoning, or so far."""
        self._reasoning_is_over = self._splitter is None
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._length = 0
        """Characters of the sequence so far."""
        self._length_waiting = 0
        """Characters not sent yet."""
        self._length_sent = 0
        """Characters of the last chunk of a cumulative stream."""
        self._characters_sent = 0
        """Characters of all chunks of a cumulative stream together."""
        self._news = False
        """Something has come since the last chunk."""
        self._chunk = SequenceChunk(index=index)

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None

    @property
    def matched_stop(self) -> bool:
        """A stop string ended the text; the engine may still be generating."""
        return self._filter.matched is not None

    @property
    def settled(self) -> bool:
        """The sequence has ended, and nothing more is expected of the engine."""
        return self.ended and not self._awaits_metrics

    def add(self, step: Step) -> None:
        """Take one step. The caller handles its error."""
        if self.finish_reason is not None:
            # Of a step after a stop string only the metrics are part of the answer.
            if step.finish_reason is not None or step.error is not None:
                self._awaits_metrics = False
                self._chunk.perf_metrics = step.perf_metrics
                if step.num_cached_tokens != 0:
                    self.num_cached_tokens = step.num_cached_tokens
            return
        if self._echo or self._begun:
            self._write_lead()
        self.num_input_tokens = step.num_input_tokens or self.num_input_tokens
        self.num_output_tokens += len(step.token_ids)
        if step.num_cached_tokens != 0:  # which steps before the one with the number have
            self.num_cached_tokens = step.num_cached_tokens
        if step.logprobs:
            self.cumulative_logprob += sum(token[0].logprob for token in step.logprobs)
        if returned := self._parsed.returned:
            if "output_ids" in returned:
                self._chunk.token_ids += step.token_ids
            if "logprobs" in returned:
                self._chunk.logprobs += step.logprobs
            if "prompt_logprobs" in returned:
                self._chunk.prompt_logprobs += step.prompt_logprobs
        if step.perf_metrics is not None:
            self._chunk.perf_metrics = step.perf_metrics
        if step.handover is not None:
            self._chunk.handover = step.handover
        if step.text:
            self._split(step.text)
        if not self._reasoning_is_over:
            self._count_reasoning(step.token_ids)
        if self._filter.matched is not None:
            self.end("stop", self._filter.matched)
            self._awaits_metrics = bool(self._parsed.sampling.return_perf_metrics) and step.finish_reason is None
        elif step.finish_reason is not None:
            self.end(step.finish_reason, step.stop_reason)

    def end(self, finish_reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Fix the outcome. The first call counts."""
        self._awaits_metrics = False
        if self.ended:
            return
        self._write_lead()
        self.finish_reason = finish_reason
        self._news = True
        self._chunk.stop_reason = stop_reason
        if self._chunk.handover is not None:
            return  # text that is held back is not certain: the generation server goes on with it
        reasoning, text = self._splitter.finish() if self._splitter is not None else ("", "")
        self._keep(reasoning, self._filter.push(text) + self._filter.finish())
        if self._filter.matched is not None:
            self.finish_reason, self._chunk.stop_reason = "stop", self._filter.matched

    def has_news(self) -> bool:
        """There is something for a stream's next chunk, and it is due."""
        if not self._news or self._awaits_metrics:
            return False
        if self.ended or not self._parsed.cumulative or self._characters_sent < _FREE_CHARACTERS:
            return True
        # Triton takes every response at once and keeps those that its client has not read, so the total that a stream
        # sends has to be bounded. Growth by a sixteenth makes it proportional to the text, a chunk for every token to
        # the square of the text.
        return self._length >= self._length_sent * 17 / 16

    @property
    def is_one_piece(self) -> bool:
        """The waiting text is short enough for one chunk: `take_piece` would take all of it."""
        return self._length_waiting <= _SMALL_PIECE or self._length_waiting <= self._piece_length

    def take_piece(self) -> SequenceChunk:
        """Take the beginning of the waiting text, and nothing but text. Not for cumulative streams."""
        reasoning, text, most = "".join(self._reasoning), "".join(self._text), self._piece_length
        chunk = SequenceChunk(index=self.index, reasoning=reasoning[:most])
        chunk.text = text[: most - len(chunk.reasoning)]
        self._reasoning, self._text = [reasoning[len(chunk.reasoning) :]], [text[len(chunk.text) :]]
        self._length_waiting -= len(chunk.reasoning) + len(chunk.text)
        return chunk

    def take(self, *, counted: bool) -> SequenceChunk:
        """Take what is new, or in a cumulative stream the text so far.

        `counted`: the response carries the token count.
        """
        chunk, self._chunk = self._chunk, SequenceChunk(index=self.index)
        chunk.text, chunk.reasoning = "".join(self._text), "".join(self._reasoning)
        chunk.finish_reason = self.finish_reason
        chunk.cumulative_logprob = self.cumulative_logprob
        if self._splitter is not None and self._splitter.has_reasoned:
            chunk.num_reasoning_tokens = self._num_reasoning
        chunk.num_input_tokens, chunk.num_cached_tokens = self.num_input_tokens, self.num_cached_tokens
        chunk.num_output_tokens = self.num_output_tokens - self._num_counted
        if counted:
            self._num_counted = self.num_output_tokens
        self._length_sent = self._length
        self._length_waiting = 0
        self._characters_sent += self._length
        # The joined text is kept, so that a cumulative stream does not join all its pieces again for every chunk.
        self._text = [chunk.text] if self._parsed.cumulative and chunk.text else []
        self._reasoning = [chunk.reasoning] if self._parsed.cumulative and chunk.reasoning else []
        self._news = False
        return chunk

    @property
    def _piece_length(self) -> int:
        num_left = _PIECES - (self._length > self._length_waiting)  # the first one has left already
        return max(_SMALL_PIECE, -(-self._length // num_left))

    def _write_lead(self) -> None:
        """Write what comes before the engine's text. No stop string is searched in it."""
        if self._echo:
            self._keep("", self._echo)
        if self._begun:
            self._keep(*self._splitter.push(self._begun) if self._splitter is not None else ("", self._begun))
        self._echo = self._begun = ""

    def _count_reasoning(self, token_ids: Sequence[int]) -> None:
        """Count the tokens of a step up to the end of the reasoning, which a token or else the text tells."""
        counted = len(token_ids)
        for place, token_id in enumerate(token_ids):
            if token_id in self._reasoning_ends:
                counted = place + self._reasoning_ends[token_id]
                self._reasoning_is_over = True
                break
        self._num_reasoning += counted
        self._reasoning_is_over |= self._splitter is not None and self._splitter.is_past

    def _split(self, text: str) -> None:
        """Keep the engine's text. As at DeepSeek, no stop string is searched in the reasoning."""
        reasoning, text = self._splitter.push(text) if self._splitter is not None else ("", text)
        self._keep(reasoning, self._filter.push(text))

    def _keep(self, reasoning: str, text: str) -> None:
        if reasoning:
            self._reasoning.append(reasoning)
        if text:
            self._text.append(text)
        if reasoning or text:
            length = len(reasoning) + len(text)
            self._length += length
            self._length_waiting += length
            self._news = True
