"""Which inputs each kind of model gets, and how its streams are understood."""

import json

import pytest

from deepseek_triton_client import (
    Chunk,
    InvalidRequest,
    ModelMetadata,
    ProtocolError,
    SamplingParams,
    ServerError,
    TensorMetadata,
    Timeouts,
)
from deepseek_triton_client._core.checked_request import chat_request, prompt_request
from deepseek_triton_client._core.dialect import Dialect

ONE, ANY = (1,), (-1,)
OUTPUTS = {"text_output": ("BYTES", ANY), "finish_reason": ("BYTES", ANY)}

DEEPSEEK = {
    **dict.fromkeys(("text_input", "messages", "sampling_param_stop"), ("BYTES", ANY)),
    "input_ids": ("INT32", ANY),
    **dict.fromkeys(("sampling_parameters", "stream_mode"), ("BYTES", ONE)),
    **dict.fromkeys(("streaming", "stream", "stop", "separate_reasoning", "return_finish_reason"), ("BOOL", ONE)),
    **dict.fromkeys(("return_num_input_tokens", "sampling_param_exclude_input_from_output"), ("BOOL", ONE)),
    **dict.fromkeys(("stream_interval", "stream_interval_ms"), ("INT32", ONE)),
    **dict.fromkeys((f"sampling_param_{name}" for name in ("max_tokens", "n", "best_of")), ("INT32", ONE)),
}
LLMAPI = {
    **dict.fromkeys(("text_input", "sampling_param_stop"), ("BYTES", ANY)),
    **dict.fromkeys(("streaming", "stop", "return_finish_reason", "return_stop_reason"), ("BOOL", ONE)),
    "sampling_param_exclude_input_from_output": ("BOOL", ONE),
    **dict.fromkeys(("sampling_param_max_tokens", "sampling_param_best_of"), ("INT32", ONE)),
    "sampling_param_temperature": ("FP32", ONE),
}
RETURNED = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
VLLM = {
    **dict.fromkeys(("text_input", "sampling_parameters"), ("BYTES", ONE)),
    **dict.fromkeys(("stream", "exclude_input_in_output"), ("BOOL", ONE)),
    **dict.fromkeys((f"return_{name}" for name in RETURNED), ("BOOL", ONE)),
}
MODELS = {"deepseek": DEEPSEEK, "llmapi": LLMAPI, "vllm": VLLM}


def dialect(inputs, *more_outputs, stream_mode=None):
    outputs = OUTPUTS | dict.fromkeys(more_outputs, ("INT32", ANY))
    tensors = [tuple(TensorMetadata(name, *how) for name, how in each.items()) for each in (inputs, outputs)]
    return Dialect(ModelMetadata("x", ("1",), "python", *tensors), stream_mode)


def _made(make, prompt, streaming, fields):
    params = SamplingParams().merged(fields)
    return make(prompt, params=params, timeouts=Timeouts(), streaming=streaming, request_id="r1")


def asked(prompt="hi", *, streaming=True, **fields):
    return _made(prompt_request, prompt, streaming, fields)


def chat(*, streaming=True, **fields):
    return _made(chat_request, "hi", streaming, fields)


def sent(spoken, request, *, streamed=None):
    """Input name -> value, in the form of /generate."""
    inputs = spoken.inputs(request, streamed=request.streaming if streamed is None else streamed)
    values = {each.name: each.values[0] if len(each.values) == 1 else list(each.values) for each in inputs}
    assert len(values) == len(inputs)
    return values


def chunks(spoken, request, *responses):
    reader = spoken.reader(request)
    return [chunk for response in responses for chunk in reader.chunks(response)] + reader.end()


def test_each_kind_is_told_by_its_inputs():
    assert [dialect(inputs).kind for inputs in MODELS.values()] == list(MODELS)
    ensemble = dict.fromkeys(("text_input", "max_tokens", "stop_words", "stream"), ("BYTES", ANY))
    for inputs in ({}, ensemble, {"stream_mode": ("BYTES", ONE)}):
        with pytest.raises(ProtocolError, match=r"model 'x': expected deepseek-triton's, .*llmapi.* vLLM backend"):
            dialect(inputs)


def test_ours_is_always_asked_for_increments_and_one_answer():
    spoken = dialect(DEEPSEEK, stream_mode="cumulative")
    ask = {"text_input": "hi", "streaming": True, "stream_mode": "delta", "sampling_param_n": 1}
    assert sent(spoken, asked()) == ask
    assert sent(spoken, asked(streaming=False)) == ask | {"streaming": False}
    stream = [{"text_output": "a"}, {"text_output": "ab", "finish_reason": "stop"}]
    assert chunks(spoken, asked(), *stream) == [Chunk("a"), Chunk("ab", finish_reason="stop")]


STREAM_SHAPE = {"stream_mode", "stream_interval", "stream_interval_ms"}
NOT_DECOUPLED = {name: how for name, how in DEEPSEEK.items() if name not in STREAM_SHAPE}


@pytest.mark.parametrize("streaming", [True, False])
def test_ours_is_asked_for_no_stream_where_it_is_not_decoupled(streaming):
    spoken = dialect(NOT_DECOUPLED)
    assert spoken.kind == "deepseek"
    whole = {"text_input": "hi", "streaming": False, "sampling_param_n": 1}
    assert sent(spoken, asked(streaming=streaming), streamed=True) == whole
    best = asked(streaming=streaming, best_of=4)  # streams can't have that
    assert sent(spoken, best, streamed=True) == whole | {"sampling_param_best_of": 4}
    with pytest.raises(InvalidRequest, match=r"no input for stream_interval: .* without --no-decoupled"):
        sent(spoken, asked(streaming=streaming, stream_interval=3))


def test_ours_takes_token_ids_and_conversations():
    assert sent(dialect(DEEPSEEK), asked([1, 2]))["input_ids"] == [1, 2]
    values = sent(dialect(DEEPSEEK), chat())
    assert json.loads(values["messages"]) == [{"role": "user", "content": "hi"}]
    assert "text_input" not in values
    assert values["separate_reasoning"] is True
    assert sent(dialect(DEEPSEEK), chat(separate_reasoning=False))["separate_reasoning"] is False
    without = {name: how for name, how in DEEPSEEK.items() if name != "separate_reasoning"}
    assert "separate_reasoning" not in sent(dialect(without), chat())


def test_an_answer_streamed_unasked_comes_in_few_chunks():
    spoken = dialect(DEEPSEEK)
    unasked = sent(spoken, asked(streaming=False), streamed=True)
    assert (unasked["streaming"], unasked["stream_interval_ms"]) == (True, 500)
    own = sent(spoken, asked(streaming=False, stream_interval_ms=9), streamed=True)
    assert own["stream_interval_ms"] == 9
    own = sent(spoken, asked(streaming=False, stream_interval=9), streamed=True)
    assert (own["stream_interval"], own.get("stream_interval_ms")) == (9, None)
    assert "stream_interval_ms" not in sent(spoken, asked())


def test_the_best_of_several_is_not_streamed():
    spoken = dialect(DEEPSEEK, "sequence_index")
    values = sent(spoken, asked(streaming=False, best_of=3), streamed=True)
    assert (values["streaming"], values.get("stream_interval_ms")) == (False, None)
    with pytest.raises(InvalidRequest, match=r"best_of: .*use generate\(\)"):
        sent(spoken, asked(best_of=3))
    assert sent(spoken, asked(best_of=3, n=3))["streaming"] is True


def test_everything_that_a_model_has_no_input_for_is_named_at_once():
    llmapi = r"model 'x' \(llmapi\) has no input for input_ids, min_p, logprobs: leave"
    with pytest.raises(InvalidRequest, match=llmapi):
        sent(dialect(LLMAPI), asked([1, 2], min_p=0.5, logprobs=1, temperature=1))
    with pytest.raises(InvalidRequest, match=r"for messages, best_of: .*, or serve the model with deepseek-triton$"):
        sent(dialect(VLLM), chat(best_of=2))
    ours = r"\(deepseek\) has no input for min_p: leave that out, or update the server"
    with pytest.raises(InvalidRequest, match=ours):
        sent(dialect(DEEPSEEK), asked(min_p=0.5))


def test_llmapi_is_asked_for_the_outcome_and_not_for_the_prompt():
    values = sent(dialect(LLMAPI), asked(temperature=0.5, stop=["a", "b"]))
    fields = {"exclude_input_from_output": True, "temperature": 0.5, "stop": ["a", "b"]}
    flags = dict.fromkeys(("streaming", "return_finish_reason", "return_stop_reason"), True)
    assert values == {"text_input": "hi"} | flags | {f"sampling_param_{name}": fields[name] for name in fields}
    values = sent(dialect(LLMAPI), asked(exclude_input_from_output=False))
    assert values["sampling_param_exclude_input_from_output"] is False
    # What asks for nothing needs no input.
    fields = {"n": 1, "min_p": 0, "return_logprobs": False, "skip_special_tokens": True, "priority": 0}
    assert sent(dialect(LLMAPI), asked(**fields)) == sent(dialect(LLMAPI), asked())
    # Others may refuse streams, so that a whole answer is not streamed.
    assert sent(dialect(LLMAPI), asked(streaming=False), streamed=True)["streaming"] is False


def test_vllm_takes_one_json_object():
    fields = {"max_tokens": 5, "top_k": 0, "bad": ["x"], "stop": "END", "seed": 3, "guided_json": {"type": "object"}}
    values = sent(dialect(VLLM), asked(**fields, logprobs=2))
    parameters = json.loads(values.pop("sampling_parameters"))
    guides = json.loads(parameters.pop("structured_outputs"))
    assert json.loads(guides["json"]) == {"type": "object"}
    assert parameters == {"max_tokens": 5, "top_k": -1, "bad_words": ["x"], "stop": ["END"], "seed": 3, "logprobs": 2}
    flags = ("finish_reason", "num_input_tokens", "num_output_tokens", "logprobs")
    returned = {f"return_{flag}": True for flag in flags}
    assert values == {"text_input": "hi", "stream": True, "exclude_input_in_output": True} | returned
    for flag in ("return_logprobs", "return_cumulative_logprob"):  # it has to compute what it returns
        values = sent(dialect(VLLM), asked(**{flag: True}))
        assert values[flag] is True
        assert json.loads(values["sampling_parameters"]) == {"logprobs": 0}


def test_vllm_puts_the_prompt_before_whole_answers_only():
    values = sent(dialect(VLLM), asked(streaming=False, exclude_input_from_output=False), streamed=True)
    assert (values["stream"], values["exclude_input_in_output"]) == (False, False)
    with pytest.raises(InvalidRequest, match="exclude_input_from_output: model 'x'"):
        sent(dialect(VLLM), asked(exclude_input_from_output=False))
    assert sent(dialect(VLLM), asked(streaming=False), streamed=True)["stream"] is True


def test_several_answers_are_streamed_only_where_chunks_say_whose_they_are():
    with pytest.raises(InvalidRequest, match="n: model 'x'"):
        sent(dialect(VLLM), asked(n=2))
    assert sent(dialect(VLLM), asked(n=2, streaming=False), streamed=True)["stream"] is False
    assert sent(dialect(DEEPSEEK, "sequence_index"), asked(n=2))["sampling_param_n"] == 2


def test_a_running_request_is_ended_by_the_flag():
    flags = [(each.name, each.datatype, tuple(each.values)) for each in dialect(DEEPSEEK).stop_inputs()]
    assert flags == [("stop", "BOOL", (True,)), ("return_finish_reason", "BOOL", (True,))]
    assert [each.name for each in dialect(LLMAPI).stop_inputs()] == ["text_input", "stop"]
    with pytest.raises(InvalidRequest, match=r"model 'x' \(vllm\) has no input that ends a request"):
        dialect(VLLM).stop_inputs()


def test_llmapi_says_with_an_error_that_a_request_was_ended():
    said = ServerError("Request cancelled by client")
    assert dialect(LLMAPI).is_stopped(said)
    assert not dialect(LLMAPI).is_stopped(ServerError("A request id must be provided"))
    assert not dialect(DEEPSEEK).is_stopped(said)


SO_FAR = [{"text_output": "a"}, {"text_output": "ab"}, {"text_output": "abc"}]
NEW = [{"text_output": "a"}, {"text_output": "b"}, {"text_output": "c"}]


def test_streams_become_increments():
    """The mode that the caller gives decides."""
    modes = {
        "llmapi": [(None, SO_FAR), ("cumulative", SO_FAR), ("delta", NEW)],
        "vllm": [(None, NEW), ("cumulative", SO_FAR)],
    }
    for kind, streams in modes.items():
        for mode, responses in streams:
            spoken = dialect(MODELS[kind], stream_mode=mode)
            assert chunks(spoken, asked(), *responses) == [Chunk("a"), Chunk("b"), Chunk("c")], (kind, mode)
    assert chunks(dialect(LLMAPI, stream_mode="delta"), asked(), *SO_FAR[:2]) == [Chunk("a"), Chunk("ab")]
    with pytest.raises(ProtocolError, match='stream_mode="delta"'):
        chunks(dialect(LLMAPI, stream_mode="cumulative"), asked(), *NEW)
    with pytest.raises(ProtocolError, match="finish_reason"):  # only ours has to say how an answer ended
        chunks(dialect(DEEPSEEK), asked(), NEW[0])
