"""Chunks of sequences -> named, typed arrays. Pure: it knows numpy, not pb_utils."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deepseek_backend.answer.sequence_buffer import SequenceChunk
from deepseek_backend.contract import OUTPUTS, PERF_OUTPUTS, Dtype
from deepseek_backend.engines.base import TokenLogprobs
from deepseek_backend.request.parsed_request import ParsedRequest

Outputs = list[tuple[str, npt.NDArray[Any]]]
"""(output name, array of the dtype that contract.OUTPUTS declares)"""

_NUMPY_DTYPES: dict[Dtype, npt.DTypeLike] = {
    Dtype.STRING: np.object_,
    Dtype.INT32: np.int32,
    Dtype.INT64: np.int64,
    Dtype.FP32: np.float32,
}
_LEAST_LOGPROB = -9999.0
"""It stands for minus infinity, the value of a token that guided decoding rules out: JSON has no such number."""
_DTYPES = {tensor.name: _NUMPY_DTYPES[tensor.dtype] for tensor in OUTPUTS}


def outputs(chunks: Sequence[SequenceChunk], parsed: ParsedRequest, *, several: bool) -> Outputs:
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
        result.append(_output("num_cached_tokens", [chunk.num_cached_tokens for chunk in chunks]))
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


def _token_outputs(chunks: Sequence[SequenceChunk], parsed: ParsedRequest) -> Outputs:
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
    document = [None if token is None else {str(entry.token_id): _entry(entry) for entry in token} for token in tokens]
    return json.dumps(document, ensure_ascii=False).encode()


def _entry(entry: Any) -> dict[str, Any]:
    return {"logprob": max(_LEAST_LOGPROB, entry.logprob), "rank": entry.rank, "decoded_token": entry.text}


def _output(name: str, values: Sequence[Any]) -> tuple[str, npt.NDArray[Any]]:
    return name, np.array(values, dtype=_DTYPES[name])
