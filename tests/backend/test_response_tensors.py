import json
import math
from dataclasses import fields

import numpy as np

from deepseek_backend.contract import OUTPUTS, PERF_OUTPUTS, Dtype
from deepseek_backend.engines.base import Logprob, PerfMetrics
from deepseek_backend.engines.generate_request import SamplingParams
from deepseek_backend.parsing import ParsedRequest
from deepseek_backend.sequence_buffer import SequenceChunk, counts_tokens, outputs

NUMPY = {Dtype.STRING: np.object_, Dtype.INT32: np.int32, Dtype.INT64: np.int64, Dtype.FP32: np.float32}
RETURNED = frozenset(
    {"num_input_tokens", "num_output_tokens", "output_ids", "logprobs", "prompt_logprobs", "cumulative_logprob"}
)
EVERYTHING = ParsedRequest(
    separate_reasoning=True, returned=RETURNED, sampling=SamplingParams(return_perf_metrics=True, logprobs=1)
)


def ended(index=0, **values):
    return SequenceChunk(index=index, finish_reason="length", num_input_tokens=3, num_output_tokens=2, **values)


def full(index=0):
    token = [Logprob(7, -0.5, rank=1)]
    return ended(
        index,
        stop_reason=7,
        token_ids=[7, 8],
        logprobs=[token, token],
        prompt_logprobs=[None, token],
        cumulative_logprob=-1.0,
        perf_metrics=PerfMetrics(),
    )


def response(*chunks, parsed=None, several=None):
    """Output name -> its values, text as str."""
    several = len(chunks) > 1 if several is None else several
    arrays = outputs(chunks, parsed or ParsedRequest(), several=several)
    assert len({name for name, _ in arrays}) == len(arrays)
    return {name: [value.decode() if isinstance(value, bytes) else value for value in a.tolist()] for name, a in arrays}


def test_a_chunk_has_its_text_and_the_last_one_the_outcome_and_the_usage():
    assert response(SequenceChunk(index=0, text="He", num_output_tokens=1)) == {"text_output": ["He"]}
    assert response(SequenceChunk(index=2, text="a"), several=True) == {"text_output": ["a"], "sequence_index": [2]}
    sent = response(SequenceChunk(index=0, text="深", reasoning="想"), parsed=ParsedRequest(separate_reasoning=True))
    assert sent == {"text_output": ["深"], "reasoning_output": ["想"]}
    usage = {"num_input_tokens": [3], "num_output_tokens": [2], "num_cached_tokens": [1]}
    outcome = {"text_output": ["llo"], "finish_reason": ["length"]}
    assert response(ended(text="llo", num_cached_tokens=1)) == outcome | usage
    usage.pop("num_cached_tokens")
    assert response(ended(text="llo", num_cached_tokens=None)) == outcome | usage


def test_everything_asked_for_has_the_type_that_the_contract_declares():
    arrays = dict(outputs([full(0), full(1)], EVERYTHING, several=True))
    assert {name: array.dtype for name, array in arrays.items()} == {
        tensor.name: np.dtype(NUMPY[tensor.dtype])
        for tensor in OUTPUTS
        if tensor.name not in ("model_info", "context_phase_params")
    }
    assert {name: array.shape for name, array in arrays.items() if array.shape != (2,)} == {"output_ids": (4,)}
    assert all(isinstance(text, bytes) for array in arrays.values() if array.dtype == object for text in array)


def test_nothing_is_an_output_of_its_own():
    """A list of no values, or of empty ones, has a type all the same."""
    for several in (False, True):
        arrays = dict(outputs([SequenceChunk(index=0)], EVERYTHING, several=several))
        assert arrays["output_ids"].shape == (0,)
        assert arrays["output_ids"].dtype == np.int32
        assert arrays["text_output"].tolist() == [b""]


def test_several_sequences_have_a_value_each_and_say_which_they_are():
    parsed = ParsedRequest(returned=frozenset({"output_ids"}))
    first = SequenceChunk(index=1, text="a", token_ids=[5, 6], num_output_tokens=2, num_input_tokens=4)
    last = ended(3, text="b", token_ids=[9], stop_reason="b")
    assert response(first, last, parsed=parsed) == {
        "text_output": ["a", "b"],
        "finish_reason": ["None", "length"],
        "stop_reason": ["None", "b"],
        "num_input_tokens": [4, 3],
        "num_output_tokens": [2, 2],
        "num_cached_tokens": [0, 0],
        "sequence_index": [1, 3],
        "output_ids": [5, 6, 9],
    }


COUNTED = {  # what is returned, whether it is the last response, and one of several -> whether tokens are counted
    ("", False, False): False,
    ("", False, True): False,
    ("", True, False): True,
    ("num_output_tokens", False, False): True,
    ("output_ids", False, False): False,
    ("output_ids", False, True): True,
}


def test_a_count_is_on_the_responses_that_say_they_carry_it():
    for (name, is_last, several), counted in COUNTED.items():
        parsed = ParsedRequest(returned=frozenset({name} - {""}))
        sent = response(ended() if is_last else SequenceChunk(index=0), parsed=parsed, several=several)
        assert counts_tokens(parsed, ended=is_last, several=several) is counted
        assert ("num_output_tokens" in sent) is counted


def test_what_was_asked_for_is_on_every_chunk():
    for name in ("num_input_tokens", "num_output_tokens", "output_ids", "logprobs", "cumulative_logprob"):
        parsed = ParsedRequest(returned=frozenset({name}))
        assert response(SequenceChunk(index=0), parsed=parsed).keys() == {"text_output", name}
    parsed = ParsedRequest(returned=frozenset({"finish_reason", "stop_reason"}))
    reasons = {"finish_reason": ["None"], "stop_reason": ["None"]}
    assert response(SequenceChunk(index=0, text="a"), parsed=parsed) == {"text_output": ["a"], **reasons}


def test_logprobs_are_json_with_the_generated_token_first():
    tokens = [[Logprob(9, -2.0, 2, "深"), Logprob(8, -0.5, 1, '"')], [Logprob(7, -0.25, 1)]]
    chunk = SequenceChunk(index=0, logprobs=[*tokens])
    [text] = response(chunk, parsed=ParsedRequest(returned=frozenset({"logprobs"})))["logprobs"]
    first, second = json.loads(text)
    assert list(first) == ["9", "8"]
    assert first["9"] == {"logprob": -2.0, "rank": 2, "decoded_token": "深"}
    assert second == {"7": {"logprob": -0.25, "rank": 1, "decoded_token": ""}}
    parsed = ParsedRequest(returned=frozenset({"prompt_logprobs"}))
    sent = response(SequenceChunk(index=0, prompt_logprobs=[None, [Logprob(7, -0.25, rank=1)]]), parsed=parsed)
    assert json.loads(sent["prompt_logprobs"][0])[0] is None
    assert "prompt_logprobs" not in response(SequenceChunk(index=0), parsed=parsed)


def test_an_impossible_token_leaves_the_json_valid():
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    chunk = SequenceChunk(index=0, logprobs=[[Logprob(7, -0.25, rank=1), Logprob(8, -math.inf, rank=2)]])
    [text] = response(chunk, parsed=ParsedRequest(returned=frozenset({"logprobs"})))["logprobs"]
    assert json.loads(text, parse_constant=refuse)[0]["8"]["logprob"] == -9999.0


def test_perf_metrics_have_an_output_each_when_asked_for_and_known():
    metrics = PerfMetrics(kv_cache_hit_rate=0.5, last_token_time_ns=2**40)
    parsed = ParsedRequest(sampling=SamplingParams(return_perf_metrics=True))
    sent = response(SequenceChunk(index=0), ended(1, perf_metrics=metrics), parsed=parsed)
    assert sent["kv_cache_hit_rate"] == [0.0, 0.5]
    assert sent["last_token_time_ns"] == [0, 2**40]
    assert {tensor.name for tensor in PERF_OUTPUTS} <= set(sent)
    assert [field.name for field in fields(PerfMetrics)] == [tensor.name for tensor in PERF_OUTPUTS]
    assert "kv_cache_hit_rate" not in response(ended(perf_metrics=PerfMetrics()))
    assert "kv_cache_hit_rate" not in response(ended(), parsed=parsed)
