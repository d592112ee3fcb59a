from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from deepseek_backend.contract import ErrorCode
from deepseek_backend.engines.base import Step, group_by_sink
from deepseek_backend.engines.generate_request import GenerateRequest, SamplingParams, SharedTokenIds
from deepseek_backend.engines.prompting import check_prompt_length, prompt_token_ids, render_chat
from deepseek_backend.errors import RequestError

CHAT = [{"role": "user", "content": "Hi"}]


class Inner:
    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: object = None,
        chat_template: str = "",
        tokenize: bool = True,
        **kwargs: Any,
    ) -> str:
        return f"{conversation} {tools} {kwargs}"


class Wrapper:
    """A wrapper that names no arguments which it passes on, like TensorRT-LLM's."""

    def __init__(self) -> None:
        self.tokenizer = Inner()

    def apply_chat_template(self, messages: Sequence[Any], **kwargs: Any) -> str:
        return self.tokenizer.apply_chat_template(messages, **kwargs)


@pytest.mark.parametrize("tokenizer", [Inner(), Wrapper()], ids=["transformers", "wrapped"])
@pytest.mark.parametrize("name", ["chat_template", "tokenize", "conversation"])
def test_reserved_arguments_are_found_in_both_tokenizers(tokenizer: Any, name: str) -> None:
    with pytest.raises(RequestError, match=f"chat_template_kwargs: {name} can't be set by a request"):
        render_chat(tokenizer, CHAT, {name: "x"})
    text = render_chat(tokenizer, CHAT, {"tools": [1], "thinking": True})
    assert text == f"{CHAT} [1] {{'add_generation_prompt': True, 'thinking': True}}"


def request(prompt: str = "", token_ids: tuple[int, ...] | None = None, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        prompt=prompt,
        prompt_token_ids=token_ids,
        sampling=SamplingParams(**sampling),
        max_tokens=1,
    )


def encode(text: str, add_special_tokens: bool) -> list[int]:
    return [0] * add_special_tokens + list(map(ord, text))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (request("ab"), [0, 97, 98]),
        (request("ab", add_special_tokens=False), [97, 98]),
        (request("ab", truncate_prompt_tokens=1), [98]),
        (request("ab", truncate_prompt_tokens=9), [0, 97, 98]),
        (request(token_ids=(5, 7)), [5, 7]),
        (request(token_ids=(5, 7), truncate_prompt_tokens=1), [7]),
        (request(token_ids=()), []),
    ],
)
def test_a_prompt_becomes_token_ids(given: GenerateRequest, expected: list[int]) -> None:
    assert list(prompt_token_ids(given, encode, 100)) == expected


def test_a_prompt_with_several_answers_is_tokenised_once() -> None:
    texts: list[str] = []

    def encode_once(text: str, add_special_tokens: bool) -> list[int]:
        texts.append(text)
        return encode(text, add_special_tokens)

    shared = SharedTokenIds()
    answers = [replace(request("ab", add_special_tokens=False, seed=seed), shared_token_ids=shared) for seed in (1, 2)]

    assert [prompt_token_ids(answer, encode_once, 100) for answer in answers] == [[97, 98], [97, 98]]
    assert texts == ["ab"]


def test_the_next_answer_tries_again_where_tokenising_failed() -> None:
    def fail(text: str, add_special_tokens: bool) -> list[int]:
        raise ValueError(text)

    answer = replace(request("ab"), shared_token_ids=SharedTokenIds())

    with pytest.raises(ValueError, match="ab"):
        prompt_token_ids(answer, fail, 100)
    assert prompt_token_ids(answer, encode, 100) == [0, 97, 98]


def test_ids_are_checked_before_they_are_cut() -> None:
    with pytest.raises(RequestError, match=r"^input_ids: expected token ids from 0 to 7, got 8$"):
        prompt_token_ids(request(token_ids=(8, 1), truncate_prompt_tokens=1), encode, 8)
    with pytest.raises(RequestError, match=r"^input_ids: expected token ids from 0, got -1$"):
        prompt_token_ids(request(token_ids=(8, -1)), encode, None)


def test_too_long_and_empty_prompts_are_refused_with_the_fix() -> None:
    check_prompt_length(1, 1)
    with pytest.raises(RequestError, match="no tokens; give some text") as caught:
        check_prompt_length(0, 1)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    with pytest.raises(RequestError, match=r"has 1,235 tokens and at most 19 fit .* a larger max_num_tokens") as caught:
        check_prompt_length(1235, 19, limit="max_num_tokens")
    assert caught.value.code is ErrorCode.PROMPT_TOO_LONG


class Entry:
    def __init__(self, sink: Any) -> None:
        self.sink = sink
        self.request = request()


class Sink:
    """A sink that equals every other one: sinks are told apart by identity."""

    def __eq__(self, other: object) -> bool:
        return True

    def on_steps(self, steps: Sequence[tuple[GenerateRequest, Step]]) -> None:
        raise NotImplementedError


def test_each_sink_gets_its_steps_in_order() -> None:
    left, right = Sink(), Sink()
    entries = [Entry(sink) for sink in (left, left, right, left, right)]
    steps = [Step(text=str(number)) for number in range(5)]
    calls = group_by_sink(zip(entries, steps, strict=True))
    assert [(sink is left, [step.text for _, step in batch]) for sink, batch in calls] == [
        (True, ["0", "1", "3"]),
        (False, ["2", "4"]),
    ]
    assert list(group_by_sink([])) == []
