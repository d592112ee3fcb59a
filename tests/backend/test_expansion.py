from __future__ import annotations

from itertools import count
from typing import Any

from deepseek_backend.engines.generate_request import GenerateRequest, SamplingParams
from deepseek_backend.request.chat_rendering import ChatFacts, ChatRenderer
from deepseek_backend.request.expansion import expand
from deepseek_backend.request.parsed_request import ParsedRequest, Prompt
from support.fakes import ScriptedEngine


def expanded(*prompts: Prompt, **sampling: Any) -> list[GenerateRequest]:
    parsed = ParsedRequest(prompts=prompts, sampling=SamplingParams(**sampling), max_tokens=5)
    engine = ScriptedEngine()
    return expand(parsed, engine, ChatRenderer(engine, ChatFacts(form=None), eos_token=""), count(1))


def test_each_answer_to_each_prompt_is_a_request_of_its_own() -> None:
    requests = expanded(Prompt(text="a"), Prompt(token_ids=(7, 8)), n=2, temperature=1.0, seed=3)

    assert [request.request_id for request in requests] == ["1", "2", "3", "4"]
    assert [(request.prompt, request.prompt_token_ids) for request in requests[1:3]] == [("a", None), ("", (7, 8))]
    assert [request.sampling.seed for request in requests] == [3, 4, 3, 4]


def test_the_answers_to_one_prompt_share_its_token_ids_and_no_others() -> None:
    first, second, other, _ = (
        request.shared_token_ids for request in expanded(Prompt(text="a"), Prompt(text="b"), n=2)
    )
    (single,) = expanded(Prompt(text="a"))

    assert first is not None
    assert first is second
    assert first is not other
    assert single.shared_token_ids is None
