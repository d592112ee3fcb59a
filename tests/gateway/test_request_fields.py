"""Each field of chat and text completions: what it sets at the model's server, and what is said of a wrong one."""

import json
import re

import pytest

from deepseek_backend.contract import SAMPLING_FIELDS
from deepseek_triton_tools.gateway.chat_request import CHAT_FIELDS, read_chat_request, will_think, with_effort
from deepseek_triton_tools.gateway.completions import COMPLETION_FIELDS, read_completion_request
from deepseek_triton_tools.gateway.model_front import openai_error
from deepseek_triton_tools.gateway.openai_fields import (
    CONTRACT_NAMES,
    INPUTS,
    MOST_ITEMS,
    MOST_TOKEN_IDS,
    REFUSED,
    SAMPLING,
    WITHOUT_EFFECT,
    OpenAIError,
)
from deepseek_triton_tools.gateway.triton_call import UpstreamError
from gateway.asking import CHAT, COMPLETION, RESPONSE

MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
FORM = {"type": "json_object"}
CALLED = [*MESSAGES, {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}]


def chat(**fields):
    return read_chat_request({"messages": MESSAGES, **fields})


def completion(**fields):
    return read_completion_request({"prompt": "Hi", **fields})


def sampling(inputs):
    """All but the one answer that is asked for unless there is an `n`, because model.yaml may ask for several."""
    found = json.loads(inputs["sampling_parameters"])
    return {name: value for name, value in found.items() if (name, value) != ("n", 1)}


def refusal(read, **fields):
    with pytest.raises(OpenAIError) as raised:
        read(**fields)
    assert raised.value.status == 400
    return raised.value


def refusals(read, table):
    """The rows of a table (fields, param, words) that are not refused so."""
    errors = [(fields, param, words, refusal(read, **fields)) for fields, param, words in table]
    return [
        (fields, error.param, error.message)
        for fields, param, words, error in errors
        if error.param != param or not re.search(words, error.message)
    ]


AS_GIVEN = {
    "temperature": 0.5,
    "top_p": 1,
    "top_k": 3,
    "min_p": 0.1,
    "n": 2,
    "seed": -5,
    "presence_penalty": -1.5,
    "frequency_penalty": 2,
    "repetition_penalty": 1.1,
    "min_tokens": 1,
    "ignore_eos": True,
    "prompt_logprobs": 1,
    "stop_token_ids": [1, 2],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "add_special_tokens": False,
    "bad_words": ["no", "never"],
    "logit_bias": {"5": -100, "6": 0.5},
    "truncate_prompt_tokens": 9,
}
VALUES = {name: (value, value) for name, value in AS_GIVEN.items()}
VALUES |= {"max_tokens": (7.0, 7), "stop": ("END", ["END"])}
ELSEWHERE = {"best_of", "logprobs", "exclude_input_from_output", "return_perf_metrics"}  # or nowhere


def test_a_sampling_field_arrives():
    assert set(VALUES) == set(SAMPLING)
    known = {CONTRACT_NAMES.get(name, name) for name in SAMPLING} | ELSEWHERE
    assert known == {field.name for field in SAMPLING_FIELDS if not field.guided}
    for name, (given, expected) in VALUES.items():
        for read in (chat, completion):
            assert sampling(read(**{name: given}).inputs) == {CONTRACT_NAMES.get(name, name): expected}, name


def test_an_input_arrives_and_a_field_without_effect_or_null_is_as_absent():
    assert {name: chat(**{name: 5}).inputs[name] for name in INPUTS} == dict.fromkeys(INPUTS, 5)
    assert refusals(chat, [({name: 2**31}, name, "") for name in INPUTS]) == []
    names = {*SAMPLING, *INPUTS, *REFUSED, "tools", "tool_choice", "stream_options", "response_format", "thinking"}
    assert chat(**dict.fromkeys(WITHOUT_EFFECT, "anything")) == chat(**dict.fromkeys(names)) == chat()
    for fields in ({"max_tokens": 9}, {"max_completion_tokens": 9}, {"max_tokens": 1, "max_completion_tokens": 9}):
        asked = chat(**fields)
        assert (asked.most_tokens, sampling(asked.inputs)) == (9, {"max_tokens": 9})


def test_a_value_of_the_wrong_type_is_refused_by_name():
    table = [({name: {"a": 1}}, name, f'^{name}: expected .*got {{"a":1}}') for name in (*SAMPLING, *INPUTS)]
    assert refusals(chat, table) + refusals(completion, table) == []


def test_a_field_is_refused_with_the_reason():
    for name, (reason, harmless) in REFUSED.items():
        error = refusal(chat, **{name: ["something"]})
        assert (error.param, error.code) == (name, "unsupported_parameter")
        assert reason in error.message
        assert [chat(**{name: value}) for value in (None, *harmless)] == [chat()] * (1 + len(harmless)), name


CALL = {"call_id": "a", "name": "f", "arguments": "{}"}
ITEMS = {"input": [CALL | {"type": f"function_call{end}"} for end in ("", "_output", "", "", "_output")]}
NO_FORM = "it has no guided decoding"
SENT = [  # the request's path and fields, the server's error, and what of it the client reads
    (CHAT, {"guided_choice": ["a"]}, f"guided_regex: {NO_FORM}", f"guided_choice: {NO_FORM}"),
    (CHAT, {"guided_json": {}}, f"guided_json: {NO_FORM}", f"guided_json: {NO_FORM}"),
    (CHAT, {"structured_outputs": {"choice": ["a"]}}, f"guided_regex: {NO_FORM}", f"structured_outputs: {NO_FORM}"),
    (CHAT, {"response_format": FORM}, f"guided_json_object: {NO_FORM}", f"response_format: {NO_FORM}"),
    (
        CHAT,
        {"response_format": FORM, "tools": [TOOL]},
        f"guided_structural_tag: {NO_FORM}",
        f"response_format: {NO_FORM}",
    ),
    (CHAT, {"tools": [TOOL], "guided_json": None}, f"guided_structural_tag: {NO_FORM}", f"tools: {NO_FORM}"),
    (CHAT, {"bad_words": ["a"]}, "bad: got 'bad: guided_json'", "bad_words: got 'bad: guided_json'"),
    (
        CHAT,
        {"max_completion_tokens": 5},
        "min_tokens: more than max_tokens",
        "min_tokens: more than max_completion_tokens",
    ),
    (CHAT, {"logprobs": True, "top_logprobs": 3}, "logprobs: at most 2", "top_logprobs: at most 2"),
    (CHAT, {"echo": False, "prompt_logprobs": 3}, "prompt_logprobs: it has none", "prompt_logprobs: it has none"),
    (COMPLETION, {"echo": True, "logprobs": 3}, "prompt_logprobs: it has none", "echo: it has none"),
    (COMPLETION, {"prompt": "Hi"}, "text_input: expected less", "prompt: expected less"),
    ("/tokenize", {"prompt": ""}, "text_input: expected more", "prompt: expected more"),
    (RESPONSE, {"input": "Hi", "text": {"format": FORM}}, f"guided_json_object: {NO_FORM}", f"text.format: {NO_FORM}"),
    (RESPONSE, ITEMS, "messages[3].tool_call_id: got 'b'", "input[4].call_id: got 'b'"),
    (RESPONSE, ITEMS, "messages[2].tool_calls[1].function.name: got ''", "input[3].name: got ''"),
    (RESPONSE, {"input": "Hi", "guided_choice": ["a"]}, f"guided_regex: {NO_FORM}", f"guided_choice: {NO_FORM}"),
]


def test_an_error_of_the_server_names_the_field_that_was_sent(subtests):
    for path, fields, error, message in SENT:
        with subtests.test(fields=fields):
            answer = openai_error(UpstreamError(error, code="E_UNSUPPORTED"), path, fields)
            assert (answer.message, answer.param) == (message, re.match(r"\w+", message)[0])


def test_an_empty_text_asks_for_nothing():
    assert [sampling(chat(**{name: ""}).inputs) for name in ("stop", "bad_words")] == [{"stop": []}, {"bad": []}]


def test_every_field_has_one_place():
    """Refusals apply to a field that nobody reads."""
    places = [set(SAMPLING), set(INPUTS), set(WITHOUT_EFFECT)]
    assert sum(map(len, places)) == len(set().union(*places))
    assert not set(REFUSED) & set().union(*places)
    assert set(REFUSED) & (CHAT_FIELDS | COMPLETION_FIELDS) == {"echo", "suffix", "best_of"}


def test_an_unknown_field_is_refused_with_the_nearest_name():
    table = [
        (chat, "temprature", "temperature"),
        (chat, "max_token", "max_tokens"),
        (chat, "prompt", ""),
        (completion, "messages", ""),
        (completion, "sufix", "suffix"),
        (chat, "topK", "top_k"),
        (chat, "x" * 500, ""),
        (chat, "", ""),
    ]
    for read, name, near in table:
        error = refusal(read, **{name: 1})
        assert (error.param, error.code) == (name[:80], "unknown_parameter")
        assert error.message.endswith(f"did you mean {near}?" if near else ".")
        assert len(error.message) < 150


BAD_CHAT = [
    ({"n": 0}, "n", "1 to 64"),
    ({"n": 65}, "n", "1 to 64"),
    ({"n": 10**30}, "n", "1 to 64"),
    ({"n": True}, "n", "a whole number"),
    ({"max_tokens": 0}, "max_tokens", "1 to 2147483647"),
    ({"max_tokens": -(10**9)}, "max_tokens", "1 to 2147483647"),
    ({"max_tokens": 1.5}, "max_tokens", "a whole number"),
    ({"max_completion_tokens": 2**31}, "max_completion_tokens", "1 to 2147483647"),
    ({"top_logprobs": 1}, "top_logprobs", "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "0 to 20"),
    ({"logprobs": 5}, "logprobs", "true or false"),
    ({"stop": ["a", 1]}, "stop", r"stop\[1\]: expected a text"),
    ({"stream": "yes"}, "stream", "true or false"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream true"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options", "true or false"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options", "unknown field 'usage'"),
    ({"tools": {}}, "tools", "a list"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "true or false"),
    ({"thinking": True}, "thinking", "an object"),
    ({"thinking": {"type": "on"}}, "thinking", "enabled, adaptive or disabled"),
    ({"thinking": {}}, "thinking", "enabled, adaptive or disabled"),
    ({"thinking": {"type": "enabled", "budgt": 5}}, "thinking", "unknown field 'budgt'"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking", "use max_tokens"),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "one of none, minimal, low"),
    ({"chat_template_kwargs": {"thinking": "yes"}}, "chat_template_kwargs", "true or false"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "an object"),
    (
        {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"thinking": False}},
        "chat_template_kwargs",
        "contradict",
    ),
    ({"add_generation_prompt": False}, "add_generation_prompt", "true"),
    ({"continue_final_message": True}, "messages", "the assistant"),
    ({"model": 5}, "model", "a text"),
    ({"logit_bias": {"5" * 1000: "x"}}, "logit_bias", r"logit_bias\[5{40}\]: expected a number"),
]


def test_a_wrong_request_is_refused():
    """An error does not quote a whole request."""
    assert refusals(chat, BAD_CHAT) + refusals(completion, BAD_COMPLETIONS) == []
    for document in (None, [], "text", 5, {}, {"messages": []}, {"messages": None}, {"messages": "a"}):
        with pytest.raises(OpenAIError, match="expected"):
            read_chat_request(document)
    assert len(refusal(chat, response_format={"type": "a" * 100_000}).message) == 4003


def test_thinking_has_four_switches():
    table = [
        ({"thinking": {"type": "enabled", "display": "omitted", "budget_tokens": None}}, True),
        ({"thinking": {"type": "disabled", "x": None}}, False),
        ({"reasoning_effort": "high"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "minimal"}, False),
        ({"chat_template_kwargs": {"thinking": True}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": True, "thinking": True}, "reasoning_effort": "none"}, True),
    ]
    found = [json.loads(with_effort(chat(**fields).inputs, None)["chat_template_kwargs"]) for fields, _ in table]
    assert found == [{"thinking": thinking} for _, thinking in table]
    assert "chat_template_kwargs" not in chat().inputs
    other = chat(chat_template_kwargs={"style": "short"}).inputs["chat_template_kwargs"]
    assert json.loads(other) == {"style": "short"}


def test_an_effort_goes_to_a_model_that_knows_it():
    for effort, efforts in (("minimal", ("minimal", "high")), (33, ("none", "1-100"))):
        inputs = with_effort(chat(reasoning_effort=effort, thinking={"type": "adaptive"}).inputs, efforts)
        assert json.loads(inputs.pop("chat_template_kwargs")) == {"thinking": True, "reasoning_effort": effort}
        assert "reasoning_effort" not in inputs
    for effort, efforts in ((33, None), (33, ("high",)), (101, ("1-100",)), ("ultra", ("high",))):
        with pytest.raises(OpenAIError) as refused:
            with_effort(chat(reasoning_effort=effort).inputs, efforts)
        assert refused.value.param == "reasoning_effort"


THINKS = [  # a request's fields, whether the model tells efforts apart -> whether it thinks
    ({}, True, True),
    ({}, False, False),
    ({"reasoning_effort": "none"}, True, False),
    ({"chat_template_kwargs": {"reasoning_effort": "none"}}, True, False),
    ({"reasoning_effort": "none", "thinking": {"type": "enabled"}}, True, True),
    ({"reasoning_effort": "max", "thinking": {"type": "disabled"}}, True, False),
    ({"thinking": {"type": "adaptive"}}, False, True),
]


def test_whether_an_answer_has_reasoning_is_known_before_it_comes():
    found = [will_think(chat(**fields).inputs, ("high",) if is_v4 else None) for fields, is_v4, _ in THINKS]
    assert found == [thinks for *_, thinks in THINKS]


def test_messages_go_on_as_they_came():
    messages = [{"role": "user", "content": [{"type": "text", "text": "Łódź 😀"}]}]
    assert json.loads(chat(messages=messages).inputs["messages"]) == messages
    last = {"role": "assistant", "content": "Once"}
    asked = chat(messages=[*MESSAGES, last], continue_final_message=True)
    assert json.loads(asked.inputs["messages"])[-1] == {**last, "prefix": True}


def test_tools():
    named = {"type": "function", "function": {"name": "f"}}
    sent = {"auto": "auto", "none": "none", "required": "required", None: None}
    for choice, expected in [*sent.items(), (named, '{"type":"function","function":{"name":"f"}}')]:
        asked = chat(tools=[TOOL], tool_choice=choice)
        assert json.loads(asked.inputs["tools"]) == [TOOL]
        assert asked.inputs.get("tool_choice") == expected
        assert (asked.has_tools, asked.drop_calls) == (True, choice == "none")
    assert not chat(tools=[], tool_choice="auto").has_tools
    assert "tool_choice" not in chat(tools=[], tool_choice="none").inputs
    assert chat(tool_choice="required").inputs["tool_choice"] == "required"  # the server says what is wrong
    assert chat(messages=CALLED).has_tools


def test_log_probabilities_and_holes():
    assert chat().top_logprobs is None
    asked = chat(logprobs=True, top_logprobs=3)
    assert (asked.top_logprobs, asked.inputs["return_logprobs"]) == (3, True)
    assert sampling(asked.inputs) == {"logprobs": 3}
    asked = completion(echo=True, logprobs=1, max_tokens=0)
    assert asked.only_echo
    assert sampling(asked.inputs) == {"max_tokens": 1, "logprobs": 1, "prompt_logprobs": 1}
    assert asked.inputs["return_logprobs"] is True
    (prompt,) = completion(prompt="def f(", suffix="return 1").prompts
    assert prompt == "<｜fim▁begin｜>def f(<｜fim▁hole｜>return 1<｜fim▁end｜>"


def test_counts_are_asked_for_where_the_last_response_may_not_come():
    counts = {"return_num_input_tokens", "return_num_output_tokens"}
    stream = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    for fields in ({"tools": [TOOL], "parallel_tool_calls": False}, stream):
        assert {name for name, value in chat(**fields).inputs.items() if name in counts and value} == counts
    assert not counts & chat().inputs.keys()


def test_prompts():
    def ids(*numbers):
        return {"text_input": "", "input_ids": list(numbers)}

    table = [
        ("Hi", [{"text_input": "Hi"}]),
        ([1, 2], [ids(1, 2)]),
        (["a", "b"], [{"text_input": "a"}, {"text_input": "b"}]),
        ([[1], [2, 3]], [ids(1), ids(2, 3)]),
        (["a", [1]], [{"text_input": "a"}, ids(1)]),
    ]
    for prompt, forms in table:
        asked = completion(prompt=prompt)
        found = [asked.prompt_inputs(each) for each in asked.prompts]
        assert found == [{**form, "sampling_parameters": '{"n":1}'} for form in forms]


BAD_COMPLETIONS = [
    ({"prompt": None}, "prompt", "a text, token ids, or a list .*got nothing"),
    ({"prompt": 5}, "prompt", "a text, token ids, or a list .*got 5"),
    ({"prompt": ""}, "prompt", "got nothing"),
    ({"prompt": []}, "prompt", "got nothing"),
    ({"prompt": ["a", ""]}, "prompt", "got nothing"),
    ({"prompt": [[]]}, "prompt", "got nothing"),
    ({"prompt": [1, "a"]}, "prompt", "a list"),
    ({"prompt": [True]}, "prompt", "a whole number"),
    ({"prompt": MESSAGES}, "prompt", "/v1/chat/completions"),
    ({"prompt": [-1]}, "prompt", "0 to 2147483647"),
    ({"prompt": [[2**31]]}, "prompt", "0 to 2147483647"),
    ({"prompt": ["a"] * 257}, "prompt", "at most 256"),
    ({"max_tokens": 0}, "max_tokens", "1 to"),
    ({"max_tokens": 0, "echo": True, "stream": True}, "stream", "nothing to stream"),
    ({"logprobs": 21}, "logprobs", "0 to 20"),
    ({"logprobs": True}, "logprobs", "a whole number"),
    ({"suffix": "b", "prompt": [1]}, "suffix", "not token ids"),
    ({"suffix": "b", "echo": True}, "echo", "not possible together"),
    ({"suffix": 5}, "suffix", "a text, got 5"),
    ({"suffix": 0}, "suffix", "a text, got 0"),
    ({"n": 0}, "n", "1 to 64"),
    ({"best_of": "two"}, "best_of", "a whole number"),
    ({"echo": 1}, "echo", "true or false"),
]


@pytest.mark.slow
def test_lists_are_read_up_to_their_limits():
    makers = {
        "stop": lambda count: ["a"] * count,
        "stop_token_ids": lambda count: [1] * count,
        "logit_bias": lambda count: {str(number): 1 for number in range(count)},
    }
    for name, make in makers.items():
        chat(**{name: make(MOST_ITEMS)})
        assert refusals(chat, [({name: make(MOST_ITEMS + 1)}, name, "at most 1,024 .*got 1025")]) == []
    assert len(completion(prompt=[7] * MOST_TOKEN_IDS).prompts[0]) == MOST_TOKEN_IDS
    too_many = {"prompt": [7] * (MOST_TOKEN_IDS + 1)}
    assert refusals(completion, [(too_many, "prompt", "at most 1,048,576 .*got 1048577")]) == []
