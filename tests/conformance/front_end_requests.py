"""The requests that the tests of Triton's own OpenAI front end make, and what a right answer to each is.

Recorded from triton-inference-server/server, commit e1db8a603, python/openai/tests, which has 136 test functions. Each
row names the function that it stands for. `differs` says where the gateway answers otherwise, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.asked import TIME_TOOL, WEATHER_TOOL

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
PROMPT = "What is machine learning?"
MESSAGES = [{"role": "user", "content": PROMPT}]
TIME_CHOICE = {"type": "function", "function": {"name": TIME_TOOL["function"]["name"]}}
BIG_BODY_BYTES = 64 * 2**20
"""The front end's limit of a body, which is the gateway's too."""

Answers = list[Mapping[str, Any]]
Judge = Callable[[Answers], None]
"""Asserts something about the answers to a row's requests, in their order."""


@dataclass(frozen=True)
class Row:
    """Requests of one test. bodies: each is added to the model's name and, unless `bare`, MESSAGES or PROMPT."""

    test: str
    path: str
    bodies: tuple[Mapping[str, Any], ...] = ({},)
    status: int = 200
    judge: Judge = field(default=lambda answers: None)
    bare: bool = False
    differs: str = ""

    def __str__(self) -> str:
        return f"{self.test}-{self.bodies[0]}"[:90]


# --- judges -----------------------------------------------------------------------------------------------------------


def content(answer: Mapping[str, Any]) -> str:
    choice = answer["choices"][0]
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


def has_text(answers: Answers) -> None:
    for answer in answers:
        assert content(answer).strip()
        assert answer["choices"][0].get("message", {"role": "assistant"})["role"] == "assistant"
        assert_usage(answer)


def assert_usage(answer: Mapping[str, Any]) -> None:
    usage = answer["usage"]
    assert usage["prompt_tokens"] > 0
    assert usage["completion_tokens"] > 0
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def two_choices(answers: Answers) -> None:
    assert [choice["index"] for choice in answers[0]["choices"]] == [0, 1]


def one_word_then_more(answers: Answers) -> None:
    words = [content(answer).split() for answer in answers]
    assert [len(found) for found in words[:-1]] == [1] * (len(words) - 1)
    assert len(words[-1]) > 1


def one_word(answers: Answers) -> None:
    assert len(content(answers[0]).split()) == 1


def equal(answers: Answers) -> None:
    assert len({content(answer) for answer in answers}) == 1


def only_the_last_differs(answers: Answers) -> None:
    equal(answers[:-1])
    assert content(answers[-1]) != content(answers[0])


def differ(answers: Answers) -> None:
    assert len({content(answer) for answer in answers}) == len(answers)


def chat_logprobs(answers: Answers) -> None:
    tokens = answers[0]["choices"][0]["logprobs"]["content"]
    assert tokens
    for token in tokens:
        assert isinstance(token["token"], str)
        assert isinstance(token["logprob"], float | int)
        assert isinstance(token["bytes"], list)
        assert len(token["top_logprobs"]) == 2
        assert all({"token", "logprob", "bytes"} <= top.keys() for top in token["top_logprobs"])


def completion_logprobs(answers: Answers) -> None:
    found = answers[0]["choices"][0]["logprobs"]
    lengths = {len(found[key]) for key in ("tokens", "token_logprobs", "text_offset", "top_logprobs")}
    assert lengths == {len(found["tokens"])}
    assert found["tokens"]
    for token, offset, top in zip(found["tokens"], found["text_offset"], found["top_logprobs"], strict=True):
        assert isinstance(token, str)
        assert isinstance(offset, int)
        assert all(isinstance(value, float | int) for value in top.values())


def no_logprobs(answers: Answers) -> None:
    assert answers[0]["choices"][0]["logprobs"] is None


def names(*words: str) -> Judge:
    """The error names the field that is wrong."""

    def judge(answers: Answers) -> None:
        error = answers[0]["error"]
        assert error["type"] == "invalid_request_error"
        assert error.keys() == {"message", "type", "param", "code"}
        assert any(word in error["message"] for word in words), error

    return judge


def ends_at_once(answers: Answers) -> None:
    """Token 1 is the end of the text."""
    assert content(answers[0]) == ""
    assert answers[0]["usage"]["completion_tokens"] == 1


def echoes(answers: Answers) -> None:
    assert content(answers[0]).startswith(PROMPT)
    assert PROMPT not in content(answers[1])


# --- rows -------------------------------------------------------------------------------------------------------------

NESTED_400 = "the front end answers 422 with FastAPI's own {'detail': [...]}: OpenAI's clients read 400 with 'error'"
_WILD = {"temperature": 1.9, "max_tokens": 120, "ignore_eos": True}
"""After its own end the tiny model is sure of nothing; before, it says the same at any temperature."""
_STORY = {"messages": [{"role": "user", "content": "Tell me a story."}], **_WILD}
_STORY_TEXT = {"prompt": "Once upon a time", **_WILD}


def _ok(test: str, path: str, *bodies: Mapping[str, Any], judge: Judge = has_text, differs: str = "") -> Row:
    return Row(test, path, bodies or ({},), judge=judge, differs=differs)


def _refused(test: str, path: str, *fields: Mapping[str, Any]) -> list[Row]:
    return [Row(test, path, (one,), 400, names(*one), differs=NESTED_400) for one in fields]


_SAMPLING: tuple[Mapping[str, Any], ...] = (
    *({"temperature": 0.7}, {"max_tokens": 10}, {"top_p": 0.9}, {"frequency_penalty": 0.5}),
    *({"presence_penalty": 0.2}, {"n": 1}, {"min_tokens": 16}, {"ignore_eos": True, "max_tokens": 30}),
)
_WRONG: tuple[Mapping[str, Any], ...] = (
    *({"temperature": -0.1}, {"max_tokens": -1}, {"top_p": 1.1}, {"frequency_penalty": 3}, {"frequency_penalty": -3}),
    *({"presence_penalty": 2.1}, {"presence_penalty": -2.1}, {"min_tokens": -1}, {"ignore_eos": 123}),
)
_BIASED = "the front end refuses logit_bias"
_HOT = "the front end takes 2 for the largest temperature; the engine decides here"

CHAT_ROWS = [
    _ok("test_chat_completions_defaults", CHAT),
    _ok(
        "test_chat_completions_system_prompt",
        CHAT,
        {"messages": [{"role": "system", "content": "You are a Triton Inference Server expert."}, *MESSAGES]},
    ),
    _ok(
        "test_chat_completions_system_prompt_only",
        CHAT,
        {"messages": [{"role": "system", "content": "You are a Triton Inference Server expert."}]},
    ),
    _ok("test_chat_completions_user_prompt_str", CHAT),
    _ok(
        "test_chat_completions_user_prompt_dict",
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]},
    ),
    *(_ok("test_chat_completions_sampling_parameters", CHAT, one) for one in _SAMPLING),
    _ok("test_chat_completions_sampling_parameters", CHAT, {"max_completion_tokens": 10}),
    *(_ok("test_chat_completions_sampling_parameters", CHAT, {"stop": stop}) for stop in (".", [], [".", ","])),
    _ok("test_chat_completions_sampling_parameters", CHAT, {"logprobs": True}),
    _ok("test_chat_completions_sampling_parameters", CHAT, {"logit_bias": {"0": 0}}, differs=_BIASED),
    *_refused("test_chat_completions_invalid_sampling_parameters", CHAT, *_WRONG, {"max_completion_tokens": -1}),
    _ok("test_chat_completions_invalid_sampling_parameters", CHAT, {"temperature": 2.1}, differs=_HOT),
    _ok(
        "test_chat_completions_max_tokens",
        CHAT,
        *({"max_tokens": 1}, {"max_tokens": 1}, {"max_tokens": 100}),
        judge=one_word_then_more,
    ),
    _ok(
        "test_chat_completions_max_tokens",
        CHAT,
        *({"max_completion_tokens": 1}, {"max_completion_tokens": 1}, {"max_completion_tokens": 100}),
        judge=one_word_then_more,
    ),
    _ok(
        "test_chat_completions_max_completion_tokens_precedence",
        CHAT,
        {"max_tokens": 50, "max_completion_tokens": 1},
        judge=one_word,
    ),
    _ok("test_chat_completions_temperature_vllm", CHAT, {"temperature": 0}, {"temperature": 0}, judge=equal),
    _ok("test_chat_completions_temperature_vllm", CHAT, _STORY, _STORY, judge=differ),
    _ok(
        "test_chat_completions_temperature_tensorrtllm",
        CHAT,
        *(_STORY | {"temperature": 0}, _STORY | {"temperature": 0}, _STORY),
        judge=only_the_last_differs,
    ),
    _ok(
        "test_chat_completions_seed",
        CHAT,
        *(_STORY | {"seed": 1}, _STORY | {"seed": 1}, _STORY | {"seed": 2}),
        judge=only_the_last_differs,
        differs="the front end's default temperature is 0.7; the gateway's is the engine's",
    ),
    Row("test_chat_completions_no_message", CHAT, ({"messages": []},), 400, names("messages"), differs=NESTED_400),
    Row("test_chat_completions_empty_message", CHAT, ({"messages": [{}]},), 400, names("role"), differs=NESTED_400),
    _ok(
        "test_chat_completions_multiple_choices",
        CHAT,
        {"n": 2},
        judge=two_choices,
        differs="the front end refuses n above 1",
    ),
    _ok("test_chat_completions_no_streaming", CHAT, {"stream": False}),
    _ok("test_request_n_choices", CHAT, {"n": 2}, judge=two_choices, differs="not implemented in the front end"),
    _ok("test_request_logit_bias", CHAT, {"logit_bias": {"1": 100}}, judge=ends_at_once, differs=_BIASED),
    _ok("test_usage_response", CHAT),
    _ok(
        "test_chat_completions_logprobs",
        CHAT,
        {"logprobs": True, "top_logprobs": 2, "max_tokens": 10},
        judge=chat_logprobs,
    ),
    _ok("test_chat_completions_logprobs_false", CHAT, {"logprobs": False, "max_tokens": 10}, judge=no_logprobs),
    Row("test_chat_completions_top_logprobs_without_logprobs", CHAT, ({"top_logprobs": 5},), 400, names("logprobs")),
    Row(
        "test_chat_completions_top_logprobs_validation",
        CHAT,
        ({"logprobs": True, "top_logprobs": 25},),
        400,
        names("top_logprobs"),
        differs=NESTED_400,
    ),
]

_MORE = "the front end gives at most 5 likely tokens, the gateway 20"

COMPLETION_ROWS = [
    _ok("test_completions_defaults", COMPLETIONS),
    *(_ok("test_completions_sampling_parameters", COMPLETIONS, one) for one in _SAMPLING),
    _ok("test_completions_sampling_parameters", COMPLETIONS, {"logprobs": 5}),
    _ok("test_completions_sampling_parameters", COMPLETIONS, {"logit_bias": {"0": 0}}, differs=_BIASED),
    _ok(
        "test_completions_max_tokens",
        COMPLETIONS,
        *({"max_tokens": 1}, {"max_tokens": 1}, {"max_tokens": 100}),
        judge=one_word_then_more,
    ),
    _ok("test_completions_temperature_vllm", COMPLETIONS, {"temperature": 0}, {"temperature": 0}, judge=equal),
    _ok("test_completions_temperature_vllm", COMPLETIONS, _STORY_TEXT, _STORY_TEXT, judge=differ),
    _ok(
        "test_completions_temperature_tensorrtllm",
        COMPLETIONS,
        *(_STORY_TEXT | {"temperature": 0}, _STORY_TEXT | {"temperature": 0}, _STORY_TEXT),
        judge=only_the_last_differs,
    ),
    _ok(
        "test_completions_seed",
        COMPLETIONS,
        *(_STORY_TEXT | {"seed": 1}, _STORY_TEXT | {"seed": 1}, _STORY_TEXT | {"seed": 2}),
        judge=only_the_last_differs,
        differs="the front end's default temperature is 0.7; the gateway's is the engine's",
    ),
    *_refused("test_completions_invalid_sampling_parameters", COMPLETIONS, *_WRONG),
    _ok("test_completions_invalid_sampling_parameters", COMPLETIONS, {"temperature": 2.1}, differs=_HOT),
    Row("test_completions_empty_request", COMPLETIONS, ({},), 400, names("prompt"), bare=True, differs=NESTED_400),
    Row(
        "test_completions_no_prompt",
        COMPLETIONS,
        ({"model": None},),
        400,
        names("prompt"),
        bare=True,
        differs=NESTED_400,
    ),
    Row("test_no_prompt", COMPLETIONS, ({"model": None},), 400, names("prompt"), bare=True, differs=NESTED_400),
    Row("test_completions_empty_prompt", COMPLETIONS, ({"prompt": ""},), 400, names("prompt", "text_input")),
    _ok(
        "test_completions_multiple_choices",
        COMPLETIONS,
        {"n": 2},
        judge=two_choices,
        differs="the front end refuses n above 1",
    ),
    Row("test_completions_multiple_choices", COMPLETIONS, ({"n": 2, "best_of": 1},), 400, names("best_of")),
    _ok("test_echo", COMPLETIONS, {"echo": True}, {"echo": False}, judge=echoes),
    _ok("test_usage_response", COMPLETIONS),
    _ok("test_completions_logprobs", COMPLETIONS, {"logprobs": 3, "max_tokens": 10}, judge=completion_logprobs),
    Row(
        "test_completions_logprobs_validation", COMPLETIONS, ({"logprobs": 21},), 400, names("logprobs"), differs=_MORE
    ),
]

TOOL_ROWS = [
    Row("test_inconsistent_tool_choice_and_tools", CHAT, (fields,), 400, names("tool"))
    for fields in (
        {"tool_choice": TIME_CHOICE},
        {"tool_choice": TIME_CHOICE, "tools": [WEATHER_TOOL]},
        {"tool_choice": "required", "tools": []},
    )
]

ROWS = [*CHAT_ROWS, *COMPLETION_ROWS, *TOOL_ROWS]

# --- what became of each function -------------------------------------------------------------------------------------

_SDK = "test_openai_sdk.py: "

ELSEWHERE: Mapping[str, str] = {
    "test_chat_completions_streaming": _SDK + "test_a_chat_streams",
    "test_function_calling": _SDK + "test_a_tool_is_called_and_its_result_is_told",
    "test_openai_client_models": _SDK + "test_models_are_listed",
    "test_openai_client_completion": _SDK + "test_a_completion",
    "test_openai_client_chat_completion": _SDK + "test_a_chat_is_answered",
    "test_openai_client_completion_echo": _SDK + "test_echo_with_logprobs",
    "test_openai_client_function_calling": _SDK + "test_a_tool_is_called_and_its_result_is_told",
    "test_chat_streaming_usage_option": _SDK + "test_the_last_chunk_has_the_usage_of_the_whole_answer",
    "test_tool_call_and_choice": _SDK + "test_a_call_streams",
    "test_tool_call_with_reply_response": _SDK + "test_a_tool_is_called_and_its_result_is_told",
    "test_tool_call_with_named_tool_choice": _SDK + "test_the_stream_helper_puts_calls_together",
    "test_tool_call_with_required_tool_choice": _SDK + "test_the_stream_helper_puts_calls_together",
    "test_chat_completion_logprobs": _SDK + "test_logprobs",
}
"""Function -> the test that stands for it, because a client of OpenAI makes its requests."""

SHAPES: Mapping[str, tuple[str, ...]] = {
    "test_openai_client.py": (
        *("test_completion_streaming", "test_chat_streaming", "test_completion_streaming_usage_option"),
        *("test_stream_options_without_streaming", "test_completion_logprobs", "test_top_logprobs_requires_logprobs"),
        *("test_chat_top_logprobs_exceeds_max", "test_completion_logprobs_exceeds_max"),
    ),
    "test_completions.py": ("test_completions_no_model", "test_completions_logprobs_zero"),
    "test_observability.py": (
        *("test_not_found", "test_startup_success", "test_startup_metrics", "test_models_list", "test_models_get"),
    ),
    "test_request_size.py": (
        *("test_body_at_limit_is_not_rejected", "test_body_over_limit_is_rejected"),
        *("test_chunked_body_over_limit_is_rejected", "test_get_without_body_is_unaffected"),
        *("test_non_integer_content_length_rejected_with_400", "test_negative_content_length_rejected_with_400"),
    ),
    "test_openai_restricted_apis.py": ("test_restricted_endpoints_with_auth", "test_unrestricted_endpoints"),
    "test_model_management.py": ("test_load_and_unload_rejected",),
}
"""File -> its functions that have a test in test_front_end.py."""

_LORA = "DeepSeek's checkpoints are served without LoRA adapters"
_EMBEDDINGS = "a language model has no embeddings: the gateway answers 404"
_LOADING = "Triton's own API loads the models of a fleet; a gateway never does"
_OPTIONS = "it is about the options and log lines of the front end's own way to keep APIs apart"
_TOKENIZER = "the gateway has no tokenizer, so that none can be missing or wrong"
_BUFFER = "arguments of calls stream as they come, so that no buffer can be full"

NOT_APPLICABLE: tuple[tuple[str, int, str], ...] = (
    ("test_chat_completions.py: test_lora, test_multi_lora", 2, _LORA),
    ("test_completions.py: test_lora, test_multi_lora", 2, _LORA),
    ("test_lora.py", 6, _LORA),
    ("test_embeddings.py", 9, _EMBEDDINGS),
    ("test_model_management.py, all others", 23, _LOADING),
    ("test_openai_restricted_apis.py: the two about log lines, three about arguments", 5, _OPTIONS),
    ("test_openai_restricted_apis.py: TestOpenAIServerMultipleRestrictions", 3, _OPTIONS),
    ("test_chat_completions.py: TestChatCompletionsTokenizers", 3, _TOKENIZER),
    ("test_tool_calling.py: TestStreamingToolParseLimit", 3, _BUFFER),
)
"""Functions, how many they are, and why none of their requests is made."""

TWICE = ("test_openai_client_models", "test_openai_client_completion", "test_openai_client_chat_completion")
"""Functions that the front end has for the blocking client and for the asynchronous one."""
BOTH_APIS = ("test_usage_response",)
"""Functions of the same name for chat and for completions."""
NUM_FUNCTIONS = 136
