import contextlib
import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_backend import contract
from deepseek_backend.config import parse_config
from deepseek_backend.contract import MAX_CHAT_BYTES, MAX_INPUT_IDS, ErrorCode
from deepseek_backend.engines.generate_request import SamplingParams
from deepseek_backend.errors import RequestError
from deepseek_backend.parsing import parse_request

SUPPORTED = {field.name: "" for field in contract.SAMPLING_FIELDS} | {"priority": ""}


def text(*values):
    return np.array([value.encode() for value in values], dtype=np.object_)


def ids(*values):
    return {"text_input": None, "input_ids": np.array(values, np.int32)}


def flag(value):
    return np.array([value])


def in_json(**fields):
    """The fields in the input sampling_parameters."""
    return {"sampling_parameters": text(json.dumps(fields))}


def parse(inputs=None, parameters=None, supported=SUPPORTED, **ours):
    inputs = {"text_input": text("hello")} | (inputs or {})
    config = parse_config({"model": "m", "triton_config": ours}, version_dir=Path())
    inputs = {name: value for name, value in inputs.items() if value is not None}
    return parse_request(inputs, json.dumps(parameters or {}), config, supported)


def refusal(*args, **kwargs):
    with pytest.raises(RequestError) as caught:
        parse(*args, **kwargs)
    return caught.value


def check_refusals(rows, subtests):
    """Each row: inputs, parameters, and a part of what the refusal says."""
    for inputs, parameters, said in rows:
        with subtests.test(said):
            error = refusal(inputs, parameters)
            assert said in str(error)
            assert "\n" not in str(error)
            assert len(str(error)) < 300
            assert error.code is ErrorCode.INVALID_ARGUMENT


def test_a_bare_prompt_takes_every_default():
    parsed = parse(default_max_tokens=77)
    assert ([p.text for p in parsed.prompts], parsed.task, parsed.max_tokens) == (["hello"], "generate", 77)
    assert (parsed.streaming, parsed.echo, parsed.cumulative, parsed.separate_reasoning) == (False,) * 4
    assert (parsed.timeout_ms, parsed.returned, parsed.sampling) == (None, set(), SamplingParams())
    assert parsed.sampling.greedy


def test_sampling_params_are_the_same_however_they_are_made():
    given = {"max_tokens": 5, "stop": ("END",)}
    made = SamplingParams.of(given)
    assert made == SamplingParams(**given)
    assert dataclasses.replace(made, seed=1) == SamplingParams(**given, seed=1)
    assert hash(made) == hash(SamplingParams(**given))
    assert {f.name for f in contract.SAMPLING_FIELDS} == set(SamplingParams.__dataclass_fields__)
    greedy = [SamplingParams(**fields).greedy for fields in GREEDY + SAMPLING]
    assert greedy == [True] * len(GREEDY) + [False] * len(SAMPLING)


BIAS = '{"5": -100, "0": 0.5}'
GUIDE_JSON = '{"type": "object"}'
READ = [  # inputs, parameters, the field, and its value
    ({"sampling_param_temperature": np.array([0.8], np.float32)}, {}, "temperature", 0.8),
    (in_json(temperature=0.8), {}, "temperature", 0.8),
    (in_json(temperature="0.8"), {}, "temperature", 0.8),  # as vLLM's clients send it
    ({}, {"temperature": 0.8}, "temperature", 0.8),
    ({}, {"temperature": "0.8"}, "temperature", 0.8),
    ({}, {"sampling_param_temperature": 0.8}, "temperature", 0.8),
    ({"sampling_param_stop": text("a", "b")}, {}, "stop", ("a", "b")),
    (in_json(stop_token_ids=[1, 2]), {}, "stop_token_ids", (1, 2)),
    ({"sampling_parameters": text(f'{{"logit_bias": {BIAS}}}')}, {}, "logit_bias", {5: -100.0, 0: 0.5}),
    ({"sampling_param_logit_bias": text(BIAS)}, {}, "logit_bias", {5: -100.0, 0: 0.5}),
    ({}, {"logit_bias": BIAS}, "logit_bias", {5: -100.0, 0: 0.5}),
    (in_json(guided_json={"type": "object"}), {}, "guided_json", GUIDE_JSON),
    (in_json(structured_outputs='{"regex": "a+"}'), {}, "guided_regex", "a+"),
    (in_json(guided_decoding={"regex": "a+", "json": None}), {}, "guided_regex", "a+"),
    ({}, {"max_completion_tokens": 5}, "max_tokens", 5),
    ({}, {"max_completion_tokens": 5, "max_tokens": 5}, "max_tokens", 5),
    (in_json(max_completion_tokens=5), {}, "max_tokens", 5),
    (in_json(logprobs=0), {}, "logprobs", 0),
    (in_json(logprobs=False, seed=None), {}, "logprobs", None),  # as OpenAI's clients say "not"
    (in_json(logprobs=False, seed=None), {}, "seed", None),
    ({}, {"seed": -1}, "seed", 2**64 - 1),
]


def test_a_value_is_the_same_however_it_comes():
    read = [getattr(parse(inputs, parameters).sampling, name) for inputs, parameters, name, _ in READ]
    assert read == [value for *_, value in READ]


def test_later_places_win_over_earlier_ones():
    inputs = in_json(top_k=2, seed=3) | {"sampling_param_top_k": np.array([5], np.int32)}
    sampling = parse(inputs, {"top_k": 4, "max_tokens": 9}, default_sampling={"top_k": 1, "top_p": 0.5}).sampling
    assert (sampling.top_k, sampling.seed, sampling.top_p, sampling.max_tokens) == (5, 3, 0.5, 9)


def test_the_longest_texts_are_read():
    sampling = '{"max_tokens": 7}'.ljust(MAX_CHAT_BYTES)
    parsed = parse({"text_input": text("a" * MAX_CHAT_BYTES), "sampling_parameters": text(sampling)})
    assert (parsed.prompts[0].text, parsed.max_tokens) == ("a" * MAX_CHAT_BYTES, 7)
    long = text("a" * (MAX_CHAT_BYTES + 1))
    for prompt in ({"text_input": long}, CHAT | {"tools": long}, ids(*[5] * (MAX_INPUT_IDS + 1))):
        assert refusal(prompt).code is ErrorCode.PROMPT_TOO_LONG


NO_FIELD = {"text_input": None}
TIMES = ("timeout_ms", "stream_interval", "stream_interval_ms")
REFUSED = [
    (NO_FIELD, {}, "text_input: expected a prompt in one of text_input, messages, input_ids, got none"),
    ({"input_ids": np.array([1], np.int32)}, {}, "got text_input and input_ids"),
    (ids(3, -1), {}, "input_ids: expected token ids from 0, got -1"),
    (NO_FIELD | {"messages": text("[{")}, {}, "messages: expected a JSON array"),
    ({"text_input": text(*["a"] * 257)}, {}, "at most 256 prompts, got 257"),
    ({"chat_template_kwargs": text("3")}, {}, "chat_template_kwargs: expected a JSON object, got 3"),
    ({"chat_template_kwargs": text('{"a": 1}')}, {}, "chat_template_kwargs: expected beside messages only"),
    ({"chat_template_kwargs": text('{"a": "\\ud83d"}')}, {}, "chat_template_kwargs: expected whole characters"),
    ({}, {"n": 2}, "n, best_of: greedy"),
    ({}, {"n": 3, "best_of": 2, "top_k": 5}, "best_of: expected at least n, which is 3, got 2"),
    ({}, {"best_of": 2, "top_k": 5, "stream": True}, "best_of: more than n"),
    ({}, {"min_tokens": 9, "max_tokens": 8}, "min_tokens: expected at most max_tokens, which is 8"),
    ({}, {"stream": True, "streaming": False}, "streaming: expected one value, got streaming false"),
    ({"exclude_input_in_output": flag(True)}, {"exclude_input_from_output": False}, "_from_output: expected one value"),
    (ids(3), {"exclude_input_from_output": False}, "exclude_input_from_output: false needs a prompt in text"),
    ({}, {"stream_mode": "all"}, "stream_mode: expected 'delta' or 'cumulative', got 'all'"),
    ({}, {"timeout": "soon"}, "timeout: expected a whole number, got 'soon'"),
    ({}, {"guided_json": "{"}, "guided_json: expected a JSON object, got text"),
    ({}, {"guided_json": "{}", "guided_regex": "a+"}, "guided_json, guided_regex: expected one"),
    ({"text_input": text("")}, {}, "text_input: expected a prompt, got an empty string"),
    ({"text_input": np.array([b"a\xff"], np.object_)}, {}, "text_input: expected UTF-8 text, got byte 0xff at 1"),
    ({}, {"max_tokens": 1.5}, "max_tokens: expected a whole number, got 1.5"),
    ({}, {"max_tokens": True}, "max_tokens: expected a whole number, got True"),
    # Only plain digits are a number in a string.
    *(({}, {"max_tokens": value}, "max_tokens: expected a whole number") for value in ("many", "1_000", " 5 ", "٥")),
    *(({}, {"max_tokens": value}, "max_tokens: expected a whole number") for value in ("0x10", "1e3")),
    *(({}, {name: "5"}, f"{name}: expected a whole") for name in TIMES),
    ({"sampling_param_temperature": np.array([np.nan], np.float32)}, {}, "temperature: expected a number, got nan"),
    ({}, {"temperature": 10**400}, "temperature: expected a number >= 0 and <= 100"),
    ({}, {"repetition_penalty": 1e-40}, "repetition_penalty: expected a number >= 0.01"),
    ({}, {"max_completion_tokens": 0}, "max_completion_tokens: expected a number >= 1"),
    ({}, {"max_completion_tokens": 5, "max_tokens": 6}, "max_tokens: given twice"),
    (in_json(guided_json={"a": 1}, structured_outputs={"json": {"b": 1}}), {}, "guided_json: given twice"),
    ({}, {"stop": "END"}, 'stop strings are "sampling_param_stop"'),
    ({}, {"messages": "[]"}, "messages: expected an input tensor, got a request parameter"),
    ({"sampling_parameters": text("{")}, {}, "sampling_parameters: expected a JSON object"),
    ({"sampling_parameters": text("[1]")}, {}, "expected a JSON object, got [1]"),
    ({"sampling_parameters": text("[" * 100_000)}, {}, "text that is not JSON"),
    ({"sampling_parameters": text(" " * MAX_CHAT_BYTES + "{}")}, {}, "at most 4,194,304 bytes, got 4,194,306"),
    ({"sampling_param_stop": np.array([b"\xff"], np.object_)}, {}, "stop: expected UTF-8 text"),
    ({"sampling_param_stop": text("x" * 1025)}, {}, "stop: expected at most 1024 characters"),
    ({"text_input": text(*["a"] * 256)}, {"n": 5, "temperature": 1}, "at most 1,024 answers to all prompts together"),
    (in_json(logit_bias={"5": 100.5}), {}, "logit_bias: expected a number >= -100 and <= 100, got 100.5"),
    (in_json(logit_bias={"5": True}), {}, "logit_bias: expected a number, got True"),
    (in_json(logit_bias={"5": "1"}), {}, "logit_bias: expected a number, got '1'"),
    (in_json(logit_bias={"5": math.nan}), {}, "logit_bias: expected a number, got nan"),
    *((in_json(logit_bias={key: 1}), {}, f"as keys, got '{key}'") for key in ("05", "-1", "the")),
    (in_json(logit_bias=dict.fromkeys(map(str, range(1025)), 1)), {}, "logit_bias: expected at most 1,024 tokens"),
    (in_json(logit_bias=[5]), {}, "logit_bias: expected a JSON object, got [5]"),
    # A guide that is not served is named as it was written.
    (in_json(structured_outputs={"choice": [1]}), {}, "structured_outputs.choice: expected a list of texts"),
    (in_json(guided_choice=[""]), {}, "guided_choice: expected a list of texts"),
    (in_json(guided_choice=["a"], guided_regex="b"), {}, "guided_regex: given twice, by itself and by guided_choice"),
    (in_json(structured_outputs={"jsn": {}}), {}, "structured_outputs: no guide 'jsn'; did you mean 'json'?"),
    (in_json(structured_outputs={"json": {}, "disable_any_whitespace": True}), {}, "'disable_any_whitespace'"),
    (in_json(structured_outputs={"regex": 5}), {}, "structured_outputs.regex: expected a string that is not empty"),
    (in_json(bad_words=["bad: x", ""]), {}, "bad_words: expected a string that is not empty"),
    (in_json(max_completion_tokens=5, min_tokens=9), {}, "expected at most max_completion_tokens, which is 5, got 9"),
]


def test_bad_input_is_refused_in_one_clear_line(subtests):
    check_refusals(REFUSED, subtests)


HINTS = [  # the name, and the end of what is said of it as a parameter and in JSON
    ("bad_words", "here it is 'sampling_param_bad'", "here it is 'bad'"),
    ("stop_words", "here it is 'sampling_param_stop'", "here it is 'stop'"),
    ("end_id", "here it is 'sampling_param_stop_token_ids'", "here it is 'stop_token_ids'"),
    ("random_seed", "here it is 'seed'", "here it is 'seed'"),
    ("prompt", "unknown parameter 'prompt'; here it is 'text_input'", "no field 'prompt'; here it is 'text_input'"),
    ("max_token", "unknown parameter 'max_token'; did you mean 'max_tokens'?", "did you mean 'max_tokens'?"),
    ("tempreature", "did you mean 'temperature'?", "no field 'tempreature'; did you mean 'temperature'?"),
    ("topK", "did you mean 'top_k'?", "did you mean 'top_k'?"),
    ("time_out", "did you mean 'timeout'?", "no field 'time_out'"),
    ("length_penalty", "unknown parameter 'length_penalty'", "no field 'length_penalty'"),
    ("sampling_param_top_k", "", "here it is 'top_k'"),
    ("stream", "", "it belongs beside sampling_parameters, not into it"),
    ("text_input", "", "it belongs beside sampling_parameters, not into it"),
]


def test_a_hint_names_the_field_as_it_is_written_there(subtests):
    for name, as_parameter, in_document in HINTS:
        with subtests.test(name):
            assert str(refusal(parameters={name: "x"})).endswith(as_parameter)
            assert str(refusal(in_json(**{name: "x"}))).endswith(in_document)


@pytest.mark.slow
def test_problems_are_reported_at_once_but_not_without_end():
    message = str(refusal(NO_FIELD, {"max_tokens": 0, "tpo_p": 1}))
    assert all(part in message for part in ("text_input", "max_tokens", "tpo_p"))
    message = str(refusal(parameters={f"unheard_of_{number}": 1 for number in range(50_000)}))
    assert message.endswith("; and 49,992 more")
    assert len(message) < 1000
    assert len(str(refusal(parameters={"max_tokens": "9" * 5_000_000}))) < 200


def test_a_field_the_engine_lacks_is_refused_by_name_and_its_neutral_value_is_not():
    lacking = dict.fromkeys(("repetition_penalty", "priority", "logit_bias"), "it has none")
    supported = SUPPORTED | lacking
    error = refusal(parameters={"repetition_penalty": 1.1}, supported=supported)
    assert (str(error), error.code) == ("repetition_penalty: it has none", ErrorCode.UNSUPPORTED)
    assert parse(parameters={"repetition_penalty": 1.0}, supported=supported).sampling.repetition_penalty is None
    assert parse(parameters={"logit_bias": "{}"}, supported=supported).sampling.logit_bias is None
    high, none = ({"priority": np.array([value], np.int32)} for value in (2, 0))
    assert str(refusal(high, supported=supported)) == "priority: it has none"
    assert parse(none, supported=supported).priority == 0


def test_a_neutral_or_empty_value_overrides_the_models_default():
    defaults = {"repetition_penalty": 1.1, "top_k": 50, "exclude_input_from_output": False, "stop": ["END"]}
    neutral = {"repetition_penalty": 1.0, "top_k": 0, "exclude_input_from_output": True}
    parsed = parse({"sampling_param_stop": np.array([], np.object_)}, neutral, default_sampling=defaults)
    assert (parsed.sampling.repetition_penalty, parsed.sampling.top_k, parsed.echo) == (1.0, 0, False)
    assert parsed.sampling.stop == ()
    assert parse(default_sampling=defaults).echo
    assert not parse(parameters={"exclude_input_in_output": True}, default_sampling=defaults).echo


def test_what_other_servers_clients_send_for_nothing_is_accepted_by_every_engine(subtests):
    """Whatever the engine lacks, in each of the places where a request may have the field."""
    lacking = dict.fromkeys(SUPPORTED, "it has none")
    defaults = {"top_k": 50, "truncate_prompt_tokens": 7}
    for name, value, read in (("top_k", -1, 0), ("truncate_prompt_tokens", -1, None)):
        tensor = {f"sampling_param_{name}": np.array([value], np.int32)}
        in_document = in_json(**{name: value})
        for inputs, parameters in ((tensor, {}), (in_document, {}), ({}, {name: value}), ({}, {name: "-1"})):
            with subtests.test(name, inputs=list(inputs), parameters=parameters):
                assert getattr(parse(inputs, parameters, default_sampling=defaults).sampling, name) == read
                assert getattr(parse(inputs, parameters, supported=lacking).sampling, name) is None
    for field in contract.SAMPLING_FIELDS:
        empty = [in_json(**{field.name: []})] * field.many + [in_json(**{field.name: field.neutral})]
        for inputs in empty:
            with subtests.test(field.name, inputs=inputs):
                assert not getattr(parse(inputs, supported=lacking).sampling, field.name)
    for name in ("bad", "bad_words", "stop", "stop_words", "stop_token_ids"):
        with subtests.test(name):
            parse(in_json(**{name: []}), supported=lacking)
            parse(in_json(**{name: ""}), supported=lacking)
    for fields in (VLLMS_PARAMS, TENSORRT_LLMS_PARAMS, {"seed": -1}, {"beam_width": 1, "return_log_probs": False}):
        with subtests.test(str(fields)):
            assert parse(in_json(**fields), supported=lacking) == parse()
    assert str(refusal(parameters={"use_beam_search": True})).startswith("unknown parameter 'use_beam_search'")


VLLMS_PARAMS = json.loads("""{
"n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "top_k": -1, "min_p": 0.0,
"seed": null, "stop": [], "stop_token_ids": [], "ignore_eos": false, "max_tokens": null, "min_tokens": 0,
"logprobs": null, "prompt_logprobs": null, "flat_logprobs": false, "detokenize": true, "extra_args": null,
"skip_special_tokens": true, "spaces_between_special_tokens": true, "include_stop_str_in_output": false,
"output_kind": 0, "output_text_buffer_length": 0, "structured_outputs": null, "bad_words": [], "skip_clone": false,
"logit_bias": {}, "allowed_token_ids": [], "truncate_prompt_tokens": -1, "skip_reading_prefix_cache": false}""")
"""The whole of vLLM's SamplingParams where nothing is asked for."""
TENSORRT_LLMS_PARAMS = json.loads("""{
"end_id": null, "pad_id": null, "bad": null, "bad_token_ids": null, "stop": null, "embedding_bias": null, "top_k": null,
"best_of": null, "length_penalty": 1.0, "early_stopping": 0, "beam_search_diversity_rate": 0.0, "guided_decoding": null,
"apply_batched_logits_processor": false, "use_beam_search": false, "return_context_logits": false, "ignore_eos": false,
"return_generation_logits": false, "return_encoder_output": false, "return_perf_metrics": false, "detokenize": true,
"add_special_tokens": true, "skip_special_tokens": true, "n": 1, "spaces_between_special_tokens": true}""")
"""The same of TensorRT-LLM's (tensorrt_llm/sampling_params.py, 1.0)."""


def test_an_answer_is_continued_where_that_is_said_and_never_answered():
    answered = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "He"}]
    begun = [answered[0], {**answered[1], "prefix": True}]

    def conversation(messages):
        return {"text_input": None, "messages": text(json.dumps(messages))}

    called = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    for messages, hint in (
        (answered, 'add "prefix": true to it'),
        ([*answered, {"role": "system", "content": "Be brief."}], 'add "prefix": true to it, and put it last'),
        ([answered[0], called], "send the results of its calls, as messages of role tool"),
        ([answered[0], {"role": "assistant"}], "leave it out"),
    ):
        said = str(refusal(conversation(messages)))
        assert said.startswith("messages[1]: expected a last message of the user")
        assert said.endswith(hint)
    for messages, task in ((begun, "generate"), (answered, "tokenize")):
        assert parse(conversation(messages), {"task": task}).prompts[0].messages == messages


def test_a_fault_of_messages_is_the_only_one_beside_tools():
    inputs = {"text_input": None, "messages": text('[{"role": "user", "content": 7}]'), "tool_choice": text("auto")}
    inputs |= {"tools": text(json.dumps([{"type": "function", "function": {"name": "f"}}]))}
    error = refusal(inputs | {"chat_template_kwargs": text('{"thinking": true}')})
    assert str(error).startswith("messages[0].content: ")
    assert ";" not in str(error)


def test_a_whole_number_may_be_written_with_a_point():
    assert parse(parameters={"max_tokens": 8.0, "top_k": -1.0}).sampling == SamplingParams(max_tokens=8, top_k=0)


def test_a_seed_is_refused_only_where_a_token_is_drawn():
    lacking = SUPPORTED | dict.fromkeys(("seed", "min_p"), "drafts have none")
    for greedy in ({}, {"temperature": 0}, {"temperature": 0.0, "min_p": 0.1}, {"top_k": 1, "temperature": 0.8}):
        assert parse(parameters={"seed": 1234, **greedy}, supported=lacking).sampling.seed is None
    for drawn in ({"temperature": 0.8}, {"top_k": 5}, {"top_p": 0.5}):
        assert str(refusal(parameters={"seed": 1234, **drawn}, supported=lacking)) == "seed: drafts have none"
    assert "min_p: drafts" in str(refusal(parameters={"min_p": 0.1}, supported=lacking))


def test_which_unknown_parameters_pass():
    parse(parameters={"id": "x", "priority": 1, "x-trace": "y"}, ignored_parameters=["x-*"])
    for mode in ("warn", "ignore"):
        assert parse(parameters={"unheard_of": 1}, unknown_parameters=mode).prompts[0].text == "hello"


CHAT = {"text_input": None, "messages": text('[{"role": "user", "content": "hi"}]')}


def test_a_prompt_may_be_texts_token_ids_or_a_conversation():
    assert [prompt.text for prompt in parse({"text_input": text("a", "b", "a")}).prompts] == ["a", "b", "a"]
    (prompt,) = parse(ids(5, 6)).prompts
    assert (prompt.text, prompt.token_ids) == ("", (5, 6))
    parsed = parse(CHAT | {"chat_template_kwargs": text('{"thinking": true}')})
    assert parsed.prompts[0].messages == [{"role": "user", "content": "hi"}]
    assert parsed.chat_template_kwargs == {"thinking": True}


def test_an_empty_text_input_beside_another_prompt_is_none():
    for empty in (text(""), text("", ""), np.zeros([1], np.bytes_), np.array([], np.object_)):
        assert parse(ids(0) | {"text_input": empty}).prompts[0].token_ids == (0,)
        assert parse(CHAT | {"text_input": empty}).prompts[0].messages
    assert "got text_input and messages" in str(refusal(CHAT | {"text_input": text("", "x")}))


def test_settings_come_as_tensors_or_parameters():
    inputs = {"timeout_ms": np.array([500], np.int32), "priority": np.array([3], np.int32)}
    parsed = parse(inputs, {"stream_mode": "cumulative", "timeout": 2_500_000})
    assert (parsed.timeout_ms, parsed.priority, parsed.cumulative, parsed.timeout_us) == (500, 3, True, 2_500_000)
    for name in TIMES:
        assert getattr(parse(parameters={name: 5}), name) == 5
    for name in ("stream", "streaming"):
        assert parse({name: flag(True)}).streaming
        assert parse(parameters={name: True}).streaming


def test_settings_of_the_model_hold_where_the_request_says_nothing():
    ours = {"default_timeout_ms": 9, "stream_mode": "cumulative", "separate_reasoning": True}
    assert (parse(**ours).timeout_ms, parse(**ours).cumulative, parse(**ours).separate_reasoning) == (9, True, True)
    flags = {"timeout_ms": 7, "stream_mode": "delta", "separate_reasoning": False}
    parsed = parse(parameters=flags, **ours)
    assert (parsed.timeout_ms, parsed.cumulative, parsed.separate_reasoning) == (7, False, False)
    for parameters, expected in [
        ({}, (8, 100)),
        ({"stream_interval": 2}, (2, None)),
        ({"stream_interval_ms": 3}, (None, 3)),
    ]:
        parsed = parse(parameters=parameters, stream_interval=8, stream_interval_ms=100)
        assert (parsed.stream_interval, parsed.stream_interval_ms) == expected


RETURNED = [  # parameters, the outputs that are returned, and the logprobs asked of the engine
    ({"logprobs": 3}, {"logprobs"}, 3),
    ({"return_logprobs": True}, {"logprobs"}, 0),
    ({"return_cumulative_logprob": True}, {"cumulative_logprob"}, 0),
    ({"return_cumulative_logprob": False}, set(), None),
    ({"best_of": 2, "temperature": 1.0}, set(), 0),
    ({"return_output_ids": True}, {"output_ids"}, None),
    ({"prompt_logprobs": 0}, {"prompt_logprobs"}, None),
]


def test_what_is_returned_decides_what_is_asked_of_the_engine():
    parsed = [parse(parameters=parameters) for parameters, *_ in RETURNED]
    assert [(one.returned, one.sampling.logprobs) for one in parsed] == [(row[1], row[2]) for row in RETURNED]
    assert parse(parameters={"return_logprobs": False}, default_sampling={"logprobs": 2}).returned == frozenset()


WHOLE_DATACLASS = {
    **dict.fromkeys(("json", "regex", "choice", "grammar", "json_object", "whitespace_pattern", "structural_tag")),
    **dict.fromkeys(("disable_any_whitespace", "disable_additional_properties", "_backend_was_auto"), False),
    "_backend": None,
}
"""vLLM's StructuredOutputsParams where nothing is asked for."""


def test_vllms_whole_dataclass_is_a_guide():
    guides = {"json": {"type": "object"}, "json_object": True, "regex": "a+", "grammar": "root ::= 'a'"}
    for guide, value in (guides | {"structural_tag": {"begin": "<a>"}}).items():
        expected = SamplingParams.of({f"guided_{guide}": json.dumps(value) if isinstance(value, dict) else value})
        whole = WHOLE_DATACLASS | {guide: value}
        for name in ("structured_outputs", "guided_decoding"):
            text_of_it = {name: json.dumps(whole)}
            ways = parse(in_json(**{name: whole})), parse(in_json(**text_of_it)), parse(parameters=text_of_it)
            assert [way.sampling for way in ways] == [expected] * 3
    assert parse(in_json(structured_outputs=WHOLE_DATACLASS)) == parse()


def test_a_choice_of_answers_is_a_regular_expression():
    texts = ["a.b", "1 + 1 = 2?", "[x]{y}(z)", "a\\b", "^$|", "é/-"]
    ways = (
        in_json(structured_outputs=WHOLE_DATACLASS | {"choice": texts}),
        in_json(guided_decoding={"choice": texts}),
        in_json(guided_choice=texts),
    )
    [pattern] = {parse(way).sampling.guided_regex for way in ways}
    assert [text for text in texts if not re.fullmatch(pattern, text) or re.fullmatch(pattern, text + "x")] == []


def test_switches_may_be_written_as_text():
    read = [parse(in_json(ignore_eos=text)).sampling.ignore_eos for text in ("true", "True", "false")]
    assert read == [True, True, False]


def test_lists_of_words_are_read_and_empty_ones_pass():
    for name in ("bad_words", "stop_words"):
        field = name.removesuffix("_words")
        empty = [parse(in_json(**{name: none}), default_sampling={field: ["x"]}) for none in ("", [], None)]
        empty.append(parse(parameters={name: ""}, default_sampling={field: ["x"]}))
        assert [getattr(each.sampling, field) for each in empty] == [("x",)] * 4
        assert getattr(parse(in_json(**{name: ["a", "b"]})).sampling, field) == ("a", "b")


def test_a_default_that_contradicts_the_request_gives_way():
    for defaults, given_fields, left_out in [
        ({"n": 4, "temperature": 1}, {"temperature": 0}, "n"),
        ({"min_tokens": 10}, {"max_tokens": 5}, "min_tokens"),
        ({"best_of": 4, "temperature": 1}, {"stream": True}, "best_of"),
        ({"best_of": 4, "temperature": 1}, {"n": 8}, "best_of"),
        ({"guided_json_object": True}, {"guided_grammar": "a"}, "guided_json_object"),
    ]:
        assert getattr(parse(parameters=given_fields, default_sampling=defaults).sampling, left_out) is None


def test_a_model_that_is_not_decoupled_refuses_streams():
    for name in ("streaming", "stream", "Streaming"):
        error = refusal(parameters={name: True}, decoupled=False)
        assert error.code is ErrorCode.UNSUPPORTED
        assert str(error).startswith("streaming: ")
        assert parse(parameters={name: False}, decoupled=False).prompts
        assert parse(parameters={name: True}).streaming


GREEDY = [{}, {"temperature": 0.0, "top_p": 0.9}, {"top_k": 1, "temperature": 1.0}, {"top_k": 0}, {"min_p": 0.0}]
GREEDY += [{"temperature": 1e-310}, {"top_p": 0.0, "temperature": 1.0}]
SAMPLING = [{"temperature": 0.8}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}]


VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers(), max_size=2))


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from([f.name for f in contract.SAMPLING_FIELDS] + ["x", "id", "stop"]), VALUES))
def test_any_parameters_are_parsed_or_refused_but_never_crash(parameters):
    with contextlib.suppress(RequestError):
        parsed = parse(parameters=json.loads(json.dumps(parameters)))
        for field in contract.SAMPLING_FIELDS:
            value = getattr(parsed.sampling, field.name)
            if field.low is not None and isinstance(value, (int, float)) and field.name != "seed":
                assert field.low <= value <= field.high


TOOL = {"type": "function", "function": {"name": "f"}}
TOOLS = {"tools": text(json.dumps([TOOL]))}


def test_tools_come_with_messages_from_either_place():
    own = parse(CHAT | TOOLS | {"tool_choice": text("required")})
    arguments = {"thinking": True, "tools": [TOOL]}
    among_arguments = parse(CHAT | {"chat_template_kwargs": text(json.dumps(arguments))})
    assert (own.tool_use.tools, own.tool_use.name) == ([TOOL], "f")
    assert (among_arguments.tool_use.tools, among_arguments.chat_template_kwargs) == ([TOOL], {"thinking": True})


def test_tools_and_tasks_are_checked(subtests):
    twice = CHAT | TOOLS | {"chat_template_kwargs": text(json.dumps({"tools": [TOOL]}))}
    rows = [
        (TOOLS, {}, "tools, tool_choice: expected beside messages only"),
        (twice, {}, "tools: given twice"),
        (CHAT | {"tools": np.array([b"\xff"], dtype=np.object_)}, {}, "tools: expected UTF-8 text, got byte 0xff"),
        ({"task": text("embed")}, {}, "task: expected 'generate' or 'tokenize' or 'detokenize' or 'describe'"),
        ({"task": text("detokenize")}, {}, "task: detokenize expects input_ids, got text"),
        (ids(1) | {"task": text("tokenize")}, {}, "task: tokenize expects text_input or messages, got input_ids"),
    ]
    check_refusals(rows, subtests)


def test_tasks_and_stops_read_what_they_need():
    assert parse(CHAT, {"task": "tokenize"}).task == "tokenize"
    assert parse(ids(5), {"task": "detokenize"}).prompts[0].token_ids == (5,)
    assert parse({"text_input": text("")}, {"task": "describe"}).prompts == ()
    assert parse(NO_FIELD | {"stop": flag(True)}).stop
