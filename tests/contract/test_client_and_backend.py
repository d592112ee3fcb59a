"""What the client puts on either wire is what the backend reads, and the other way round, in one process."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from deepseek_backend import contract
from deepseek_backend.config import parse_config
from deepseek_backend.contract import Dtype
from deepseek_backend.engines import base
from deepseek_backend.messages import Prompt
from deepseek_backend.parsing import ParsedRequest, parse_request
from deepseek_backend.parsing import SamplingParams as BackendParams
from deepseek_backend.sequence_buffer import SequenceChunk, outputs, task_outputs
from deepseek_triton_client import Chunk, Logprob, PerfMetrics, ProtocolError, SamplingParams, Timeouts
from deepseek_triton_client._core.checked_request import (
    chat_request,
    describe_request,
    detokenize_request,
    prompt_request,
    tokenize_request,
)
from deepseek_triton_client._core.dialect import Dialect
from deepseek_triton_client._core.response_reader import read_model_info
from deepseek_triton_client._core.wire import decode_json, decode_tensors, encode, encode_json
from support.contract_metadata import METADATA

NUMPY = {Dtype.STRING: np.object_, Dtype.BOOL: np.bool_, Dtype.INT32: np.int32, Dtype.UINT64: np.uint64}
NUMPY |= {Dtype.FP32: np.float32}
DTYPES = {tensor.name: NUMPY[tensor.dtype] for tensor in contract.INPUTS}
CONFIG = parse_config({"model": "m", "triton_config": {}}, version_dir=Path())
SUPPORTED = {field.name: "" for field in contract.SAMPLING_FIELDS} | {"priority": ""}

COMMON = {"params": SamplingParams(), "timeouts": Timeouts(), "streaming": False, "request_id": None}


def over_json(inputs):
    """Return arrays by the name of their input, and the request's parameters, as Triton hands them to the model."""
    body = json.loads(encode_json("r1", inputs))
    assert body.pop("id") == "r1"
    arrays = {}
    for name in [name for name in body if name in DTYPES]:
        values = body.pop(name)
        values = values if isinstance(values, list) else [values]
        arrays[name] = np.array([v.encode() if isinstance(v, str) else v for v in values], dtype=DTYPES[name])
    return arrays, body


def over_tensors(inputs):
    arrays = {}
    for tensor in inputs:
        data = encode(tensor.datatype, tensor.values)
        texts = tensor.datatype == "BYTES"
        array = deserialize_bytes_tensor(data) if texts else np.frombuffer(data, DTYPES[tensor.name])
        arrays[tensor.name] = array.reshape(len(tensor.values))
    return arrays, {}


def json_response(response):
    """Write JSON as the server does: an output of one value stands without its brackets."""
    document = {"model_name": "tensorrt_llm", "model_version": "1"}
    for name, array in response:
        values = [value.decode() if isinstance(value, bytes) else value for value in array.tolist()]
        document[name] = values[0] if len(values) == 1 else values
    return decode_json(json.dumps(document).encode())


def tensor_response(response):
    return decode_tensors((name, *_contents(array)) for name, array in response)


def _contents(array):
    if array.dtype == np.object_:
        return "BYTES", serialize_byte_tensor(array).item() if array.size else b""
    return {"i4": "INT32", "i8": "INT64", "f4": "FP32"}[array.dtype.str[1:]], array.tobytes()


WIRES = pytest.mark.parametrize("wire", [over_json, over_tensors])
RESPONSES = pytest.mark.parametrize("wire", [json_response, tensor_response])

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
documents = st.dictionaries(texts, st.integers(0, 9) | texts, max_size=3)
by_token = st.dictionaries(st.integers(0, 2**31), st.integers(-100, 100), max_size=3)


def value(field):
    """Return a strategy for values in the field's range."""
    if field.dtype is Dtype.BOOL:
        return st.booleans()
    if field.dtype is Dtype.STRING:
        one = by_token if field.by_token else documents if field.json else texts
    elif field.dtype is Dtype.FP32:
        # Of six digits, which the nearest FP32 gives back.
        one = st.integers(round(field.low * 10_000), round(field.high * 10_000)).map(lambda drawn: drawn / 10_000)
    else:
        one = st.integers(int(field.low or 0), int(field.high or 2**31 - 1))
    return st.lists(one, min_size=1, max_size=3) if field.many else one


AT_ODDS = ("min_tokens", "best_of", "n", *(field.name for field in contract.SAMPLING_FIELDS if field.guided))
"""Fields that may contradict others, or one another: they are drawn one at a time."""

fields = st.fixed_dictionaries(
    {}, optional={f.name: value(f) for f in contract.SAMPLING_FIELDS if f.name not in AT_ODDS}
)


def parsed(wire, request, *, streamed):
    arrays, parameters = wire(Dialect(METADATA).inputs(request, streamed=streamed))
    return parse_request(arrays, json.dumps(parameters), CONFIG, SUPPORTED)


def asked(prompt="hi", *, streaming=True, **given_fields):
    params = SamplingParams().merged(given_fields)
    return prompt_request(prompt, params=params, timeouts=Timeouts(), streaming=streaming, request_id="r1")


def expected(given_fields):
    """Return the fields as the backend holds them."""
    found = {"n": 1}
    for name, given_value in given_fields.items():
        held = tuple(given_value) if isinstance(given_value, list) else given_value
        is_text = isinstance(held, dict) and name != "logit_bias"
        held = json.dumps(held, ensure_ascii=False) if is_text else held
        found[name] = held % 2**64 if name == "seed" else held
    return BackendParams(**found)


@pytest.mark.slow
@WIRES
@given(given_fields=fields)
def test_fields_arrive_as_they_were_given(wire, given_fields):
    got = parsed(wire, asked(**given_fields), streamed=True)
    assert got.sampling == expected(given_fields)
    assert got.returned == {name for name in ("logprobs", "prompt_logprobs") if name in given_fields}


@pytest.mark.slow
@WIRES
@settings(max_examples=300)
@given(data=st.data(), name=st.sampled_from(AT_ODDS))
def test_fields_at_odds_with_others_arrive_alone(wire, data, name):
    given_fields = {name: data.draw(value(contract.SAMPLING_BY_NAME[name])), "temperature": 1.0}
    given_fields["max_tokens"] = 2**31 - 1
    got = parsed(wire, asked(streaming=False, **given_fields), streamed=False)
    assert getattr(got.sampling, name) == getattr(expected(given_fields), name)


@pytest.mark.slow
@WIRES
@settings(max_examples=40)
@given(text=texts, streaming=st.booleans(), ids=st.lists(st.integers(0, 2**31 - 1), min_size=1), kwargs=documents)
def test_a_prompt_of_each_form_arrives(wire, text, streaming, ids, kwargs):
    got = parsed(wire, asked(text, streaming=streaming), streamed=streaming)
    assert [each.text for each in got.prompts] == [text]
    assert (got.streaming, got.cumulative, got.num_sequences_per_prompt) == (streaming, False, 1)
    (prompt,) = parsed(wire, asked(ids), streamed=True).prompts
    assert prompt.token_ids == tuple(ids)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": text}]
    chat = {**COMMON, "params": SamplingParams(chat_template_kwargs=kwargs)}
    got = parsed(wire, chat_request(messages, **chat), streamed=True)
    assert [each.messages for each in got.prompts] == [messages]
    assert (got.chat_template_kwargs, got.separate_reasoning) == (kwargs, True)


@WIRES
def test_what_concerns_the_whole_request_arrives(wire):
    returned = ("cumulative_logprob", "logprobs", "output_ids", "num_input_tokens", "num_output_tokens")
    settings = {"stream_interval": 3, "stream_interval_ms": 40, "timeout_ms": 500, "priority": -2}
    flags = {f"return_{name}": True for name in returned} | {"separate_reasoning": True}
    got = parsed(wire, asked(**settings, **flags), streamed=True)
    assert {name: getattr(got, name) for name in settings} == settings
    assert got.separate_reasoning
    assert got.returned == set(returned)


@WIRES
def test_a_whole_answer_that_is_streamed_unasked_says_how_seldom(wire):
    got = parsed(wire, asked(streaming=False), streamed=True)
    assert (got.streaming, got.stream_interval, got.stream_interval_ms) == (True, None, 500)
    got = parsed(wire, asked(streaming=False, temperature=1, best_of=3), streamed=True)
    assert (got.streaming, got.num_sequences_per_prompt) == (False, 3)


@WIRES
def test_a_request_is_ended_by_its_id(wire):
    arrays, parameters = wire(Dialect(METADATA).stop_inputs())
    assert parse_request(arrays, json.dumps(parameters), CONFIG, SUPPORTED).stop


EVERYTHING = ParsedRequest(
    separate_reasoning=True,
    returned=frozenset(
        {"num_input_tokens", "num_output_tokens", "output_ids", "logprobs", "prompt_logprobs", "cumulative_logprob"}
    ),
    sampling=BackendParams(return_perf_metrics=True, logprobs=1),
)
FLOAT = st.floats(-100, 0, width=32)
logprob = st.builds(base.Logprob, st.integers(0, 2**31 - 1), FLOAT, rank=st.integers(1, 9), text=texts)
place = st.lists(logprob, min_size=1, max_size=3, unique_by=lambda entry: entry.token_id)


def sequence_chunks(*, everything):
    """Draw the content of one response: of one sequence, or of some of four."""
    counts = st.integers(0, 2**31 - 1)
    one = st.builds(
        SequenceChunk,
        index=st.integers(0, 3),
        text=st.text(),
        reasoning=st.text() if everything else st.just(""),
        num_input_tokens=counts,
        num_cached_tokens=counts,
        num_reasoning_tokens=counts,
        finish_reason=st.sampled_from([None, "stop", "length", "cancelled", "timeout"]),
        stop_reason=st.none() | texts.filter(lambda text: text != "None"),
        token_ids=st.lists(counts, max_size=3),
        logprobs=st.lists(place, max_size=2),
        prompt_logprobs=st.lists(st.none() | place, max_size=2),
        cumulative_logprob=FLOAT,
        perf_metrics=st.builds(base.PerfMetrics, arrival_time_ns=st.integers(1, 2**62)),
    )
    return st.lists(one, min_size=1, max_size=4, unique_by=lambda chunk: chunk.index).map(counted)


def counted(chunks):
    for chunk in chunks:
        chunk.num_output_tokens = len(chunk.token_ids)
    return chunks


def read(tokens):
    return tuple(
        None if token is None else tuple(Logprob(e.token_id, e.logprob, e.rank, e.text) for e in token)
        for token in tokens
    )


def as_chunk(said):
    metrics = {tensor.name: getattr(said.perf_metrics, tensor.name) for tensor in contract.PERF_OUTPUTS}
    return Chunk(
        said.text,
        said.index,
        reasoning=said.reasoning,
        finish_reason=said.finish_reason,
        stop_reason=None if said.stop_reason is None else str(said.stop_reason),
        num_input_tokens=said.num_input_tokens,
        num_output_tokens=said.num_output_tokens,
        output_ids=tuple(said.token_ids),
        cumulative_logprob=said.cumulative_logprob,
        logprobs=read(said.logprobs),
        prompt_logprobs=read(said.prompt_logprobs),
        perf_metrics=PerfMetrics(**metrics),
    )


@pytest.mark.slow
@RESPONSES
@given(said=sequence_chunks(everything=True))
def test_everything_a_response_says_is_read(wire, said):
    reader = Dialect(METADATA).reader(asked(n=4, temperature=1))
    ended = any(chunk.finish_reason for chunk in said)
    wanted = [as_chunk(chunk) for chunk in said]
    got = reader.chunks(wire(outputs(said, EVERYTHING, several=True)))
    assert [chunk.num_cached_tokens for chunk in got] == [s.num_cached_tokens if ended else None for s in said]
    assert [chunk.num_reasoning_tokens for chunk in got] == [s.num_reasoning_tokens if ended else None for s in said]
    assert [replace(chunk, num_cached_tokens=None, num_reasoning_tokens=None) for chunk in got] == wanted
    assert reader.finished == (sum(chunk.finish_reason is not None for chunk in said) == 4)


@WIRES
def test_a_task_is_what_was_asked(wire):
    messages = [{"role": "user", "content": "Hi"}]
    for request, task, prompts in (
        (tokenize_request("Hi", **COMMON), "tokenize", (Prompt(text="Hi"),)),
        (tokenize_request(messages, **COMMON), "tokenize", (Prompt(messages=messages),)),
        (detokenize_request([5, 7], **COMMON), "detokenize", (Prompt(token_ids=(5, 7)),)),
        (describe_request(**COMMON), "describe", ()),
    ):
        understood = parsed(wire, request, streamed=False)
        assert (understood.task, understood.prompts) == (task, prompts)


@WIRES
def test_tools_are_those_that_were_given(wire):
    tools = [{"type": "function", "function": {"name": "f"}}]
    choice = {"type": "function", "function": {"name": "f"}}
    for given_tools, given_choice in ((tools, choice), (json.dumps(tools), json.dumps(choice)), (tuple(tools), choice)):
        params = SamplingParams(tools=given_tools, tool_choice=given_choice)
        use = parsed(wire, chat_request("Hi", **{**COMMON, "params": params}), streamed=False).tool_use
        assert (list(use.tools), use.required, use.name) == (tools, True, "f")


@RESPONSES
def test_the_answers_to_tasks_are_read(wire):
    dialect = Dialect(METADATA)
    (chunk,) = dialect.reader(tokenize_request("Hi", **COMMON)).chunks(
        wire(task_outputs(output_ids=[5, 7], num_input_tokens=[2]))
    )
    assert (chunk.output_ids, chunk.num_input_tokens, chunk.finish_reason) == ((5, 7), 2, "stop")
    (chunk,) = dialect.reader(describe_request(**COMMON)).chunks(wire(task_outputs(model_info=[b'{"name": "m"}'])))
    assert read_model_info(chunk.text) == {"name": "m"}
    for text in ("", "[]", "{"):
        with pytest.raises(ProtocolError, match=r"^model_info: expected a JSON object"):
            read_model_info(text)


@pytest.mark.slow
@RESPONSES
@given(pieces=st.lists(st.text(), min_size=1), reason=st.sampled_from(["stop", "length", "cancelled", "timeout"]))
def test_a_stream_is_read(wire, pieces, reason):
    reader = Dialect(METADATA).reader(asked())
    said = [SequenceChunk(index=0, text=piece, num_output_tokens=1) for piece in pieces]
    said[-1].finish_reason, said[-1].num_input_tokens = reason, 3
    chunks = [chunk for each in said for chunk in reader.chunks(wire(outputs([each], ParsedRequest(), several=False)))]
    assert "".join(chunk.text for chunk in chunks) == "".join(pieces)
    assert (chunks[-1].finish_reason, chunks[-1].num_input_tokens, chunks[-1].num_output_tokens) == (reason, 3, 1)
    assert reader.finished
    assert reader.end() == []
