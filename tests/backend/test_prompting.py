from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from deepseek_backend.admission import expand
from deepseek_backend.chat_rendering import ChatFacts, ChatRenderer
from deepseek_backend.contract import ErrorCode
from deepseek_backend.engines.base import Step, group_by_sink
from deepseek_backend.engines.generate_request import SamplingParams, SharedTokenIds
from deepseek_backend.engines.prompting import check_prompt_length, prompt_token_ids, render_chat
from deepseek_backend.errors import RequestError
from deepseek_backend.messages import Prompt
from deepseek_backend.parsing import ParsedRequest
from support.engine_driver import make_request
from support.fakes import ScriptedEngine

CHAT = [{"role": "user", "content": "Hi"}]


class Inner:
    def apply_chat_template(self, conversation, tools=None, chat_template="", tokenize=True, **kwargs):
        return f"{conversation} {tools} {kwargs}"


class Wrapper:
    """A wrapper that names no arguments which it passes on, like TensorRT-LLM's."""

    def __init__(self):
        self.tokenizer = Inner()

    def apply_chat_template(self, messages, **kwargs):
        return self.tokenizer.apply_chat_template(messages, **kwargs)


def test_reserved_arguments_are_found_in_both_tokenizers():
    for tokenizer in (Inner(), Wrapper()):
        for name in ("chat_template", "tokenize", "conversation"):
            with pytest.raises(RequestError, match=f"chat_template_kwargs: {name} can't be set by a request"):
                render_chat(tokenizer, CHAT, {"thinking": True, name: "x"})
        text = render_chat(tokenizer, CHAT, {"tools": [1], "thinking": True})
        assert text == f"{CHAT} [1] {{'add_generation_prompt': True, 'thinking': True}}"


def request(prompt="", token_ids=None, **sampling):
    return make_request("r", prompt, prompt_token_ids=token_ids, max_tokens=1, **sampling)


def encode(text, add_special_tokens):
    return [0] * add_special_tokens + list(map(ord, text))


TOKENISED = [
    (request("ab"), [0, 97, 98]),
    (request("ab", add_special_tokens=False), [97, 98]),
    (request("ab", truncate_prompt_tokens=1), [98]),
    (request("ab", truncate_prompt_tokens=9), [0, 97, 98]),
    (request(token_ids=(5, 7)), [5, 7]),
    (request(token_ids=(5, 7), truncate_prompt_tokens=1), [7]),
    (request(token_ids=()), []),
]


def test_a_prompt_becomes_token_ids():
    assert [list(prompt_token_ids(one, encode, 100)) for one, _ in TOKENISED] == [ids for _, ids in TOKENISED]


def test_a_prompt_with_several_answers_is_tokenised_once_unless_it_failed():
    tokenizer = Mock(side_effect=[ValueError("ab"), [97, 98]])
    shared = SharedTokenIds()
    answers = [replace(request("ab", seed=seed), shared_token_ids=shared) for seed in (1, 2, 3)]
    with pytest.raises(ValueError, match="ab"):
        prompt_token_ids(answers[0], tokenizer, 100)
    assert [prompt_token_ids(answer, tokenizer, 100) for answer in answers] == [[97, 98]] * 3


def test_prompts_that_can_not_be_served_are_refused():
    with pytest.raises(RequestError, match=r"^input_ids: expected token ids from 0 to 7, got 8$"):
        prompt_token_ids(request(token_ids=(8, 1), truncate_prompt_tokens=1), encode, 8)
    with pytest.raises(RequestError, match=r"^input_ids: expected token ids from 0, got -1$"):
        prompt_token_ids(request(token_ids=(8, -1)), encode, None)
    check_prompt_length(1, 1)
    with pytest.raises(RequestError, match="no tokens; give some text") as caught:
        check_prompt_length(0, 1)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    with pytest.raises(RequestError, match=r"has 1,235 tokens and at most 19 fit .* a larger max_num_tokens") as caught:
        check_prompt_length(1235, 19, limit="max_num_tokens")
    assert caught.value.code is ErrorCode.PROMPT_TOO_LONG


class Sink:
    """A sink that equals every other one: sinks are told apart by identity."""

    def __eq__(self, other):
        return True


def test_each_sink_gets_its_steps_in_order():
    left, right = Sink(), Sink()
    entries = [SimpleNamespace(sink=sink, request=request()) for sink in (left, left, right, left, right)]
    steps = [Step(text=str(number)) for number in range(5)]
    calls = group_by_sink(zip(entries, steps, strict=True))
    assert [(sink is left, [step.text for _, step in batch]) for sink, batch in calls] == [
        (True, ["0", "1", "3"]),
        (False, ["2", "4"]),
    ]
    assert list(group_by_sink([])) == []


def expanded(*prompts, **sampling):
    parsed = ParsedRequest(prompts=prompts, sampling=SamplingParams(**sampling), max_tokens=5)
    engine = ScriptedEngine()
    return expand(parsed, engine, ChatRenderer(engine, ChatFacts(form=None), eos_token=""), count(1))


def test_each_answer_is_a_request_and_those_to_one_prompt_share_its_token_ids():
    requests = expanded(Prompt(text="a"), Prompt(token_ids=(7, 8)), n=2, temperature=1.0, seed=2**53)
    assert [request.request_id for request in requests] == ["1", "2", "3", "4"]
    assert [(request.prompt, request.prompt_token_ids) for request in requests[1:3]] == [("a", None), ("", (7, 8))]
    assert [request.sampling.seed for request in requests] == [2**53, 2**53 + 1] * 2
    first, second, other, _ = (
        request.shared_token_ids for request in expanded(Prompt(text="a"), Prompt(text="b"), n=2)
    )
    (single,) = expanded(Prompt(text="a"))
    assert first is not None
    assert first is second
    assert first is not other
    assert single.shared_token_ids is None
