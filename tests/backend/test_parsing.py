import contextlib
import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_backend import contract
from deepseek_backend.config import parse_config
from deepseek_backend.engines.generate_request import SamplingParams
from deepseek_backend.errors import RequestError
from deepseek_backend.request.parsing import parse_request

SUPPORTED = {field.name: "" for field in contract.SAMPLING_FIELDS} | {"priority": ""}


def config(**ours):
    from pathlib import Path

    return parse_config({"model": "m", "triton_config": ours}, version_dir=Path())


def text(*values):
    return np.array([value.encode() for value in values], dtype=np.object_)


def parse(inputs=None, parameters=None, supported=SUPPORTED, **ours):
    inputs = {"text_input": text("hello")} | (inputs or {})
    return parse_request(
        {k: v for k, v in inputs.items() if v is not None}, json.dumps(parameters or {}), config(**ours), supported
    )


def refusal(*args, **kwargs):
    with pytest.raises(RequestError) as caught:
        parse(*args, **kwargs)
    return caught.value


def test_the_longest_texts_are_read():
    longest = "a" * contract.MAX_CHAT_BYTES
    sampling = '{"max_tokens": 7}'.ljust(contract.MAX_CHAT_BYTES)
    parsed = parse({"text_input": text(longest), "sampling_parameters": text(sampling)})
    assert (parsed.prompts[0].text, parsed.max_tokens) == (longest, 7)


def test_a_bare_prompt_takes_every_default():
    parsed = parse(default_max_tokens=77)

    assert ([p.text for p in parsed.prompts], parsed.streaming, parsed.max_tokens, parsed.echo) == (
        ["hello"],
        False,
        77,
        False,
    )
    assert (parsed.cumulative, parsed.timeout_ms, parsed.separate_reasoning, parsed.returned) == (
        False,
        None,
        False,
        set(),
    )
    assert parsed.sampling == SamplingParams()
    assert parsed.sampling.greedy


def test_sampling_params_are_the_same_however_they_are_made():
    given = {"max_tokens": 5, "stop": ("END",)}
    made = SamplingParams.of(given)

    assert made == SamplingParams(**given)
    assert dataclasses.replace(made, seed=1) == SamplingParams(**given, seed=1)
    assert hash(made) == hash(SamplingParams(**given))


def test_every_sampling_field_is_a_field_of_sampling_params():
    assert {f.name for f in contract.SAMPLING_FIELDS} == set(SamplingParams.__dataclass_fields__)


@pytest.mark.parametrize(
    ("inputs", "parameters"),
    [
        pytest.param({"sampling_param_temperature": np.array([0.8], np.float32)}, {}, id="tensor"),
        pytest.param({"sampling_parameters": text('{"temperature": 0.8}')}, {}, id="sampling_parameters"),
        pytest.param({"sampling_parameters": text('{"temperature": "0.8"}')}, {}, id="as vLLM's clients send it"),
        pytest.param({}, {"temperature": 0.8}, id="plain name"),
        pytest.param({}, {"temperature": "0.8"}, id="plain name as vLLM's sample client sends it"),
        pytest.param({}, {"sampling_param_temperature": 0.8}, id="full name as a parameter"),
    ],
)
def test_a_value_is_the_same_however_it_comes(inputs, parameters):
    assert parse(inputs, parameters).sampling.temperature == 0.8


def test_later_places_win_over_earlier_ones():
    inputs = {"sampling_parameters": text('{"top_k": 2, "seed": 3}'), "sampling_param_top_k": np.array([5], np.int32)}

    sampling = parse(inputs, {"top_k": 4, "max_tokens": 9}, default_sampling={"top_k": 1, "top_p": 0.5}).sampling

    assert (sampling.top_k, sampling.seed, sampling.top_p, sampling.max_tokens) == (5, 3, 0.5, 9)


def test_lists_come_as_tensors_and_in_json():
    inputs = {"sampling_param_stop": text("a", "b"), "sampling_parameters": text('{"stop_token_ids": [1, 2]}')}

    sampling = parse(inputs).sampling

    assert sampling.stop == ("a", "b")
    assert sampling.stop_token_ids == (1, 2)


@pytest.mark.parametrize("name", ["stream", "streaming"])
def test_streaming_has_two_names(name):
    assert parse({name: np.array([True])}).streaming
    assert parse(parameters={name: True}).streaming


@pytest.mark.parametrize(
    ("inputs", "parameters", "expected"),
    [
        pytest.param(
            {"text_input": None},
            {},
            "text_input: expected a prompt in one of text_input, messages, input_ids, got none",
            id="no prompt",
        ),
        pytest.param(
            {"input_ids": np.array([1], np.int32)}, {}, "got text_input and input_ids", id="a prompt in two forms"
        ),
        pytest.param(
            {"text_input": None, "input_ids": np.array([3, -1], np.int32)},
            {},
            "input_ids: expected token ids from 0, got -1",
            id="negative token id",
        ),
        pytest.param(
            {"text_input": None, "messages": text("[{")}, {}, "messages: expected a JSON array", id="messages no JSON"
        ),
        pytest.param({"text_input": text(*["a"] * 257)}, {}, "at most 256 prompts, got 257", id="many prompts"),
        pytest.param(
            {"chat_template_kwargs": text("3")}, {}, "chat_template_kwargs: expected a JSON object, got 3", id="kwargs"
        ),
        pytest.param(
            {"chat_template_kwargs": text('{"a": 1}')},
            {},
            "chat_template_kwargs: expected beside messages only",
            id="no chat",
        ),
        pytest.param(
            {"chat_template_kwargs": text('{"a": "\\ud83d"}')},
            {},
            "chat_template_kwargs: expected whole characters",
            id="half a character",
        ),
        pytest.param({}, {"n": 2}, "greedy decoding gives the same answer each time", id="n without sampling"),
        pytest.param(
            {}, {"n": 3, "best_of": 2, "top_k": 5}, "best_of: expected at least n, which is 3, got 2", id="best_of < n"
        ),
        pytest.param(
            {},
            {"best_of": 2, "top_k": 5, "stream": True},
            "best_of: more than n can't be streamed",
            id="best_of stream",
        ),
        pytest.param(
            {},
            {"min_tokens": 9, "max_tokens": 8},
            "min_tokens: expected at most max_tokens, which is 8",
            id="min > max",
        ),
        pytest.param(
            {}, {"stream": True, "streaming": False}, "streaming: expected one value, got streaming false", id="stream"
        ),
        pytest.param(
            {"exclude_input_in_output": np.array([True])},
            {"exclude_input_from_output": False},
            "exclude_input_from_output: expected one value",
            id="echo or not",
        ),
        pytest.param(
            {"text_input": None, "input_ids": np.array([3], np.int32)},
            {"exclude_input_from_output": False},
            "exclude_input_from_output: false needs a prompt in text, got input_ids",
            id="echo of ids",
        ),
        pytest.param(
            {}, {"stream_mode": "all"}, "stream_mode: expected 'delta' or 'cumulative', got 'all'", id="stream mode"
        ),
        pytest.param({}, {"timeout_ms": 0}, "timeout_ms: expected a number >= 1", id="timeout"),
        pytest.param({}, {"logprobs": 21}, "logprobs: expected a number >= 0 and <= 20, got 21", id="logprobs"),
        pytest.param({}, {"guided_json": "{"}, "guided_json: expected a JSON object, got text", id="schema no JSON"),
        pytest.param(
            {}, {"guided_json": "{}", "guided_regex": "a+"}, "guided_json, guided_regex: expected one", id="two guides"
        ),
        pytest.param({"text_input": text("")}, {}, "text_input: expected a prompt, got an empty string", id="empty"),
        pytest.param(
            {"text_input": np.array([b"a\xff"], np.object_)},
            {},
            "expected UTF-8 text, got byte 0xff at 1",
            id="not UTF-8",
        ),
        pytest.param({}, {"max_tokens": -5}, "max_tokens: expected a number >= 1 and <= 2147483647, got -5", id="low"),
        pytest.param({}, {"max_tokens": "many"}, "max_tokens: expected a whole number, got 'many'", id="wrong type"),
        pytest.param({}, {"max_tokens": 1.5}, "max_tokens: expected a whole number, got 1.5", id="fraction"),
        pytest.param({}, {"max_tokens": True}, "max_tokens: expected a whole number, got True", id="bool is no number"),
        pytest.param({}, {"top_p": 1.01}, "top_p: expected a number >= 0 and <= 1, got 1.01", id="limit"),
        pytest.param(
            {"sampling_param_temperature": np.array([np.nan], np.float32)},
            {},
            "temperature: expected a number, got nan",
            id="nan",
        ),
        pytest.param({}, {"max_token": 5}, "unknown parameter 'max_token'; did you mean 'max_tokens'?", id="misspelt"),
        pytest.param(
            {}, {"prompt": "x"}, "unknown parameter 'prompt'; here it is 'text_input'", id="other server's name"
        ),
        pytest.param({}, {"stop": "END"}, 'stop strings are "sampling_param_stop"', id="plain stop is the cancel flag"),
        pytest.param(
            {"sampling_parameters": text("{")}, {}, "sampling_parameters: expected a JSON object", id="not JSON"
        ),
        pytest.param({"sampling_parameters": text("[1]")}, {}, "expected a JSON object, got [1]", id="not an object"),
        pytest.param(
            {"sampling_parameters": text('{"temprature": 1}')},
            {},
            "no field 'temprature'; did you mean 'temperature'?",
            id="misspelt in JSON",
        ),
        pytest.param({}, {"temperature": 10**400}, "temperature: expected a number >= 0 and <= 100", id="huge integer"),
        pytest.param({"sampling_parameters": text("[" * 100_000)}, {}, "text that is not JSON", id="deep nesting"),
        pytest.param(
            {"text_input": text("a" * (contract.MAX_CHAT_BYTES + 1))},
            {},
            "text_input: expected at most 4,194,304 bytes, got 4,194,305",
            id="prompt without end",
        ),
        pytest.param(
            {"sampling_parameters": text(" " * contract.MAX_CHAT_BYTES + "{}")},
            {},
            "sampling_parameters: expected at most 4,194,304 bytes, got 4,194,306",
            id="JSON without end",
        ),
        pytest.param(
            {"sampling_param_stop": np.array([b"\xff"], np.object_)},
            {},
            "stop: expected UTF-8 text",
            id="stop not UTF-8",
        ),
        pytest.param(
            {"sampling_parameters": text(json.dumps({"stop": ["x"] * 65}))},
            {},
            "stop: expected at most 64 values, got 65",
            id="many stops",
        ),
        pytest.param(
            {"sampling_param_stop": text("x" * 1025)}, {}, "stop: expected at most 1024 characters", id="long stop"
        ),
        pytest.param(
            {}, {"repetition_penalty": 1e-40}, "repetition_penalty: expected a number >= 0.01", id="tiny penalty"
        ),
        pytest.param(
            {"sampling_param_stop": text("")}, {}, "stop: expected a string that is not empty", id="empty stop"
        ),
    ],
)
def test_bad_input_is_refused_in_one_clear_line(inputs, parameters, expected):
    error = refusal(inputs, parameters)

    assert expected in str(error)
    assert "\n" not in str(error)
    assert len(str(error)) < 300
    assert error.code is contract.ErrorCode.INVALID_ARGUMENT


def test_all_problems_are_reported_at_once():
    message = str(refusal({"text_input": None}, {"max_tokens": 0, "tpo_p": 1}))

    assert all(part in message for part in ("text_input", "max_tokens", "tpo_p"))


def test_a_field_the_engine_lacks_is_refused_by_name_and_its_neutral_value_is_not():
    supported = SUPPORTED | {"repetition_penalty": "the Torch sampler of 1.2.1 ignores it"}

    error = refusal(parameters={"repetition_penalty": 1.1}, supported=supported)

    assert str(error) == "repetition_penalty: the Torch sampler of 1.2.1 ignores it"
    assert error.code is contract.ErrorCode.UNSUPPORTED
    assert parse(parameters={"repetition_penalty": 1.0}, supported=supported).sampling.repetition_penalty is None


def test_a_neutral_value_overrides_the_models_default():
    defaults = {"repetition_penalty": 1.1, "top_k": 50, "exclude_input_from_output": False}

    parsed = parse(
        parameters={"repetition_penalty": 1.0, "top_k": 0, "exclude_input_from_output": True}, default_sampling=defaults
    )

    assert (parsed.sampling.repetition_penalty, parsed.sampling.top_k, parsed.echo) == (1.0, 0, False)


def test_a_value_is_quoted_in_part_where_it_is_long():
    assert len(str(refusal(parameters={"max_tokens": "9" * 5_000_000}))) < 200


def test_parameters_of_triton_and_ignored_patterns_pass():
    parse(parameters={"id": "x", "priority": 1, "x-trace": "y"}, ignored_parameters=["x-*"])


def test_tritons_own_timeout_counts_where_it_comes_in_the_body():
    assert parse(parameters={"timeout": 2_500_000}).timeout_us == 2_500_000
    assert "timeout: expected a whole number, got 'soon'" in str(refusal(parameters={"timeout": "soon"}))


@pytest.mark.parametrize("mode", ["warn", "ignore"])
def test_unknown_parameters_pass_when_the_model_says_so(mode):
    assert parse(parameters={"unheard_of": 1}, unknown_parameters=mode).prompts[0].text == "hello"


def test_several_prompts_are_kept_in_order():
    assert [prompt.text for prompt in parse({"text_input": text("a", "b", "a")}).prompts] == ["a", "b", "a"]


def test_a_prompt_may_be_token_ids():
    (prompt,) = parse({"text_input": None, "input_ids": np.array([5, 6], np.int32)}).prompts

    assert (prompt.text, prompt.token_ids) == ("", (5, 6))


def test_a_prompt_may_be_a_conversation():
    inputs = {"text_input": None, "messages": text('[{"role": "user", "content": "hi"}]')}

    parsed = parse(inputs | {"chat_template_kwargs": text('{"thinking": true}')})

    assert parsed.prompts[0].messages == [{"role": "user", "content": "hi"}]
    assert parsed.chat_template_kwargs == {"thinking": True}


def test_settings_come_as_tensors_or_parameters():
    inputs = {"timeout_ms": np.array([500], np.int32), "priority": np.array([3], np.int32)}

    parsed = parse(inputs, {"stream_mode": "cumulative"})

    assert (parsed.timeout_ms, parsed.priority, parsed.cumulative) == (500, 3, True)


@pytest.mark.parametrize("name", ["timeout_ms", "stream_interval", "stream_interval_ms"])
def test_a_settings_number_is_not_read_out_of_a_string(name):
    assert getattr(parse(parameters={name: 5}), name) == 5
    assert str(refusal(parameters={name: "5"})) == f"{name}: expected a whole number, got '5'"


def test_settings_of_the_model_hold_where_the_request_says_nothing():
    ours = {"default_timeout_ms": 9, "stream_mode": "cumulative", "separate_reasoning": True}

    assert (parse(**ours).timeout_ms, parse(**ours).cumulative, parse(**ours).separate_reasoning) == (9, True, True)
    flags = {"timeout_ms": 7, "stream_mode": "delta", "separate_reasoning": False}
    parsed = parse(parameters=flags, **ours)
    assert (parsed.timeout_ms, parsed.cumulative, parsed.separate_reasoning) == (7, False, False)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [({}, (8, 100)), ({"stream_interval": 2}, (2, None)), ({"stream_interval_ms": 3}, (None, 3))],
)
def test_the_models_intervals_hold_where_the_request_gives_neither(parameters, expected):
    parsed = parse(parameters=parameters, stream_interval=8, stream_interval_ms=100)

    assert (parsed.stream_interval, parsed.stream_interval_ms) == expected


@pytest.mark.parametrize(
    ("parameters", "returned", "logprobs"),
    [
        ({"logprobs": 3}, {"logprobs"}, 3),
        ({"return_logprobs": True}, {"logprobs"}, 0),
        ({"return_cumulative_logprob": True}, {"cumulative_logprob"}, 0),
        ({"return_cumulative_logprob": False}, set(), None),
        ({"best_of": 2, "temperature": 1.0}, set(), 0),
        ({"return_output_ids": True}, {"output_ids"}, None),
        ({"prompt_logprobs": 0}, {"prompt_logprobs"}, None),
    ],
)
def test_what_is_returned_decides_what_is_asked_of_the_engine(parameters, returned, logprobs):
    parsed = parse(parameters=parameters)

    assert (parsed.returned, parsed.sampling.logprobs) == (returned, logprobs)


def test_a_guide_may_be_an_object_in_sampling_parameters():
    parsed = parse({"sampling_parameters": text('{"guided_json": {"type": "object"}}')})

    assert parsed.sampling.guided_json == '{"type": "object"}'


@pytest.mark.parametrize(
    ("inputs", "parameters"),
    [
        ({"sampling_parameters": text('{"logit_bias": {"5": -100, "0": 0.5}}')}, {}),
        ({"sampling_param_logit_bias": text('{"5": -100, "0": 0.5}')}, {}),
        ({}, {"logit_bias": '{"5": -100, "0": 0.5}'}),
    ],
    ids=["sampling_parameters", "tensor", "plain name"],
)
def test_a_bias_is_read_by_token(inputs, parameters):
    assert parse(inputs, parameters).sampling.logit_bias == {5: -100.0, 0: 0.5}


@pytest.mark.parametrize(
    ("bias", "problem"),
    [
        ({"5": 100.5}, "expected a number >= -100 and <= 100, got 100.5"),
        ({"5": True}, "expected a number, got True"),
        ({"5": "1"}, "expected a number, got '1'"),
        ({"5": math.nan}, "expected a number, got nan"),
        ({"05": 1}, "expected token ids from 0 as keys, got '05'"),
        ({"-1": 1}, "expected token ids from 0 as keys, got '-1'"),
        ({"the": 1}, "expected token ids from 0 as keys, got 'the'"),
        ({str(token_id): 1 for token_id in range(1025)}, "expected at most 1,024 tokens, got 1,025"),
        ([5], "expected a JSON object, got [5]"),
    ],
    ids=["range", "bool", "text", "nan", "two spellings", "negative", "word", "too many", "list"],
)
def test_what_is_wrong_with_a_bias_is_named(bias, problem):
    document = text(json.dumps({"logit_bias": bias}))

    assert str(refusal({"sampling_parameters": document})) == f"logit_bias: {problem}"


def test_a_bias_of_no_token_asks_for_nothing():
    supported = SUPPORTED | {"logit_bias": "the simulated engine has no logits to apply it to"}

    assert parse(parameters={"logit_bias": "{}"}, supported=supported).sampling.logit_bias is None


@pytest.mark.parametrize(
    "document",
    ['{"structured_outputs": "{\\"regex\\": \\"a+\\"}"}', '{"guided_decoding": {"regex": "a+", "json": null}}'],
)
def test_guides_come_in_vllms_forms_too(document):
    assert parse({"sampling_parameters": text(document)}).sampling.guided_regex == "a+"


WHOLE_DATACLASS = {
    "json": None,
    "regex": None,
    "choice": None,
    "grammar": None,
    "json_object": None,
    "disable_any_whitespace": False,
    "disable_additional_properties": False,
    "whitespace_pattern": None,
    "structural_tag": None,
    "_backend": None,
    "_backend_was_auto": False,
}
"""vLLM's StructuredOutputsParams where nothing is asked for."""


@pytest.mark.parametrize(
    ("guide", "value", "expected"),
    [
        ("json", {"type": "object"}, '{"type": "object"}'),
        ("json_object", True, True),
        ("regex", "a+", "a+"),
        ("grammar", "root ::= 'a'", "root ::= 'a'"),
        ("structural_tag", {"begin": "<a>"}, '{"begin": "<a>"}'),
    ],
)
@pytest.mark.parametrize("name", ["structured_outputs", "guided_decoding"])
def test_vllms_whole_dataclass_is_a_guide(name, guide, value, expected):
    whole = WHOLE_DATACLASS | {guide: value}

    in_json = parse({"sampling_parameters": text(json.dumps({name: whole}))})
    as_text = parse({"sampling_parameters": text(json.dumps({name: json.dumps(whole)}))})
    as_parameter = parse(parameters={name: json.dumps(whole)})

    assert in_json.sampling == SamplingParams.of({f"guided_{guide}": expected})
    assert as_text.sampling == as_parameter.sampling == in_json.sampling


def test_vllms_dataclass_that_asks_for_nothing_is_no_guide():
    assert parse({"sampling_parameters": text(json.dumps({"structured_outputs": WHOLE_DATACLASS}))}) == parse()


@pytest.mark.parametrize(
    ("guides", "expected"),
    [
        ({"choice": ["a", "b"]}, "structured_outputs: no guide 'choice'; here it is 'regex'"),
        ({"jsn": {}}, "structured_outputs: no guide 'jsn'; did you mean 'json'?"),
        ({"json": {}, "disable_any_whitespace": True}, "structured_outputs: no guide 'disable_any_whitespace'"),
        ({"regex": 5}, "guided_regex: expected a string that is not empty, got 5"),
    ],
)
def test_a_guide_that_is_not_served_is_named_as_it_was_written(guides, expected):
    assert expected in str(refusal({"sampling_parameters": text(json.dumps({"structured_outputs": guides}))}))


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [({"max_completion_tokens": 5}, 5), ({"max_completion_tokens": 5, "max_tokens": 5}, 5), ({"max_tokens": 4}, 4)],
)
def test_max_completion_tokens_is_max_tokens(fields, max_tokens):
    assert parse(parameters=fields).max_tokens == max_tokens
    assert parse({"sampling_parameters": text(json.dumps(fields))}).max_tokens == max_tokens


def test_max_completion_tokens_is_checked_as_max_tokens_is():
    assert "max_tokens: expected a number >= 1" in str(refusal(parameters={"max_completion_tokens": 0}))
    twice = {"max_completion_tokens": 5, "max_tokens": 6}
    assert "max_tokens: given twice, by itself and by max_completion_tokens" in str(refusal(parameters=twice))


@pytest.mark.parametrize("name", ["bad_words", "stop_words"])
def test_lists_of_words_are_read_and_empty_ones_pass(name):
    field = name.removesuffix("_words")
    defaults = {field: ["x"]}

    assert getattr(parse(parameters={name: ""}, default_sampling=defaults).sampling, field) == ("x",)
    for empty in ("", [], None):
        sent = {"sampling_parameters": text(json.dumps({name: empty}))}
        assert getattr(parse(sent, default_sampling=defaults).sampling, field) == ("x",)
    words = {"sampling_parameters": text(json.dumps({name: ["a", "b"]}))}
    assert getattr(parse(words).sampling, field) == ("a", "b")


@pytest.mark.parametrize(
    ("name", "as_parameter", "in_json"),
    [
        ("bad_words", "here it is 'sampling_param_bad'", "here it is 'bad'"),
        ("stop_words", "here it is 'sampling_param_stop'", "here it is 'stop'"),
        ("end_id", "here it is 'sampling_param_stop_token_ids'", "here it is 'stop_token_ids'"),
        ("random_seed", "here it is 'seed'", "here it is 'seed'"),
        ("tempreature", "did you mean 'temperature'?", "did you mean 'temperature'?"),
        ("time_out", "did you mean 'timeout'?", "no field 'time_out'"),
    ],
)
def test_a_hint_names_the_field_as_it_is_written_there(name, as_parameter, in_json):
    assert str(refusal(parameters={name: "x"})).endswith(as_parameter)
    assert str(refusal({"sampling_parameters": text(json.dumps({name: "x"}))})).endswith(in_json)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sampling_param_top_k", "here it is 'top_k'"),
        ("stream", "it belongs beside sampling_parameters, not into it"),
        ("text_input", "it belongs beside sampling_parameters, not into it"),
    ],
)
def test_an_inputs_name_in_json_is_told_apart(name, expected):
    assert str(refusal({"sampling_parameters": text(json.dumps({name: 1}))})).endswith(expected)


def test_a_hint_names_nothing_where_nothing_does_the_same():
    assert str(refusal(parameters={"length_penalty": 1.0})) == "unknown parameter 'length_penalty'"


def test_what_openai_clients_say_for_not_is_not():
    assert parse({"sampling_parameters": text('{"logprobs": false, "seed": null}')}).sampling == SamplingParams()


def test_logprobs_of_0_is_not_false():
    assert parse({"sampling_parameters": text('{"logprobs": 0}')}).sampling.logprobs == 0


def test_a_guide_given_twice_is_refused():
    document = {"guided_json": {"a": 1}, "structured_outputs": {"json": {"b": 1}}}

    assert "guided_json: given twice" in str(refusal({"sampling_parameters": text(json.dumps(document))}))


def test_problems_without_end_are_counted_and_not_told():
    message = str(refusal(parameters={f"unheard_of_{number}": 1 for number in range(50_000)}))

    assert message.endswith("; and 49,992 more")
    assert len(message) < 1000


def test_an_input_tensors_name_as_a_parameter_is_told_apart():
    assert "messages: expected an input tensor, got a request parameter" in str(refusal(parameters={"messages": "[]"}))


@pytest.mark.parametrize("value", ["1_000", " 5 ", "٥", "0x10", "1e3"])
def test_only_plain_digits_are_a_number_in_a_string(value):
    assert "max_tokens: expected a whole number" in str(refusal(parameters={"max_tokens": value}))


def test_an_empty_list_clears_the_models_default():
    inputs = {"sampling_param_stop": np.array([], np.object_)}

    assert parse(inputs, default_sampling={"stop": ["END"]}).sampling.stop == ()


def test_the_models_default_decides_on_the_echo_where_the_request_does_not():
    defaults = {"exclude_input_from_output": False}

    assert parse(default_sampling=defaults).echo
    assert not parse(parameters={"exclude_input_in_output": True}, default_sampling=defaults).echo


@pytest.mark.parametrize(
    ("defaults", "given", "left_out"),
    [
        ({"n": 4, "temperature": 1}, {"temperature": 0}, "n"),
        ({"min_tokens": 10}, {"max_tokens": 5}, "min_tokens"),
        ({"best_of": 4, "temperature": 1}, {"stream": True}, "best_of"),
        ({"best_of": 4, "temperature": 1}, {"n": 8}, "best_of"),
        ({"guided_json_object": True}, {"guided_grammar": "a"}, "guided_json_object"),
    ],
)
def test_a_default_that_contradicts_the_request_gives_way(defaults, given, left_out):
    sampling = parse(parameters=given, default_sampling=defaults).sampling

    assert getattr(sampling, left_out) is None


def test_more_answers_than_one_request_may_have_are_refused():
    error = refusal({"text_input": text(*["a"] * 256)}, {"n": 5, "temperature": 1})

    assert "expected at most 1,024 answers to all prompts together, got 256 prompts with 5 each" in str(error)


def test_log_probabilities_that_are_not_wanted_back_are_not_returned():
    parsed = parse(parameters={"return_logprobs": False}, default_sampling={"logprobs": 2})

    assert parsed.returned == frozenset()


def test_a_negative_seed_counts_from_the_end():
    assert parse(parameters={"seed": -1}).sampling.seed == 2**64 - 1


def test_priority_is_refused_where_the_engine_has_none():
    supported = SUPPORTED | {"priority": "this engine has none"}
    high, none = ({"priority": np.array([value], np.int32)} for value in (2, 0))

    assert str(refusal(high, supported=supported)) == "priority: this engine has none"
    assert parse(none, supported=supported).priority == 0


@pytest.mark.parametrize("empty", [text(""), text("", ""), np.zeros([1], np.bytes_), np.array([], np.object_)])
def test_an_empty_text_input_beside_another_prompt_is_none(empty):
    assert parse({"text_input": empty, "input_ids": np.array([0], np.int32)}).prompts[0].token_ids == (0,)
    chat = text('[{"role": "user", "content": "hi"}]')
    assert parse({"text_input": empty, "messages": chat}).prompts[0].messages
    assert "got text_input and messages" in str(refusal({"text_input": text("", "x"), "messages": chat}))


@pytest.mark.parametrize("name", ["streaming", "stream", "Streaming"])
def test_a_model_that_is_not_decoupled_refuses_streams_and_says_the_way_out(name):
    error = refusal(parameters={name: True}, decoupled=False)

    assert error.code is contract.ErrorCode.UNSUPPORTED
    assert all(words in str(error) for words in ("streaming: ", "not decoupled", "Ask without", "--no-decoupled"))
    assert parse(parameters={name: False}, decoupled=False).prompts
    assert parse(parameters={name: True}).streaming


def test_stop_needs_no_prompt():
    assert parse({"text_input": None, "stop": np.array([True])}).stop


@pytest.mark.parametrize(
    ("fields", "greedy"),
    [
        ({}, True),
        ({"temperature": 0.0, "top_p": 0.9}, True),
        ({"top_k": 1, "temperature": 1.0}, True),
        ({"top_k": 0}, True),
        ({"min_p": 0.0}, True),
        ({"temperature": 1e-310}, True),
        ({"temperature": 0.8}, False),
        ({"top_p": 0.0, "temperature": 1.0}, True),
        ({"top_p": 0.9}, False),
        ({"top_k": 5}, False),
        ({"min_p": 0.1}, False),
    ],
)
def test_greedy_is_what_asks_for_no_sampling(fields, greedy):
    assert SamplingParams(**fields).greedy is greedy


@given(
    st.dictionaries(
        st.sampled_from([f.name for f in contract.SAMPLING_FIELDS] + ["x", "id", "stop"]),
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers(), max_size=2)),
    )
)
def test_any_parameters_are_parsed_or_refused_but_never_crash(parameters):
    with contextlib.suppress(RequestError):
        parsed = parse(parameters=json.loads(json.dumps(parameters)))
        for field in contract.SAMPLING_FIELDS:
            value = getattr(parsed.sampling, field.name)
            if field.low is not None and isinstance(value, (int, float)) and field.name != "seed":
                assert field.low <= value <= field.high


CHAT = {"text_input": None, "messages": text('[{"role": "user", "content": "Hi"}]')}
TOOL = {"type": "function", "function": {"name": "f"}}
TOOLS = {"tools": text(json.dumps([TOOL]))}


def test_tools_come_with_messages_from_either_place():
    own = parse(CHAT | TOOLS | {"tool_choice": text("required")})
    arguments = {"thinking": True, "tools": [TOOL]}
    among_arguments = parse(CHAT | {"chat_template_kwargs": text(json.dumps(arguments))})

    assert (own.tool_use.tools, own.tool_use.name) == ([TOOL], "f")
    assert (among_arguments.tool_use.tools, among_arguments.chat_template_kwargs) == ([TOOL], {"thinking": True})


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        (TOOLS, "^tools, tool_choice: expected beside messages only"),
        (CHAT | TOOLS | {"chat_template_kwargs": text(json.dumps({"tools": [TOOL]}))}, "^tools: given twice"),
        (CHAT | {"tools": text("[1]")}, r"^tools\[0\]: expected "),
        (CHAT | {"tools": np.array([b"\xff"], dtype=np.object_)}, "^tools: expected UTF-8 text, got byte 0xff"),
        (CHAT | {"tools": text(" " * (contract.MAX_CHAT_BYTES + 1))}, "^tools: expected at most 4,194,304 bytes, got "),
        (CHAT | {"tool_choice": text("required")}, "^tool_choice: expected tools beside 'required', got none"),
        (
            {"task": text("embed")},
            "^task: expected 'generate' or 'tokenize' or 'detokenize' or 'describe', got 'embed'",
        ),
        ({"task": text("detokenize")}, "^task: detokenize expects input_ids, got text"),
        (
            {"task": text("tokenize"), "text_input": None, "input_ids": np.array([1], dtype=np.int32)},
            "^task: tokenize expects text_input or messages, got input_ids",
        ),
    ],
)
def test_tools_and_tasks_are_checked(inputs, problem):
    with pytest.raises(RequestError, match=problem):
        parse(inputs)


def test_tasks_read_what_they_need():
    assert parse().task == "generate"
    assert parse(CHAT, {"task": "tokenize"}).task == "tokenize"
    ids = {"text_input": None, "input_ids": np.array([5], dtype=np.int32)}
    assert parse(ids, {"task": "detokenize"}).prompts[0].token_ids == (5,)
    assert parse({"text_input": text("")}, {"task": "describe"}).prompts == ()
