"""POST /tokenize and /detokenize, and the texts of token ids that `echo` needs too."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, cast

import pytest
from starlette.testclient import TestClient

from deepseek_triton_tools.gateway.app.model_front import TEXTS_AT_ONCE, ModelFront
from deepseek_triton_tools.gateway.fleet.fleet import Fleet
from deepseek_triton_tools.gateway.settings import ModelSettings
from deepseek_triton_tools.gateway.triton.call import Call, UpstreamError
from gateway.scripted_triton import ScriptedTriton, gateway_of

USER = {"role": "user", "content": "Hi"}
BEGUN = {"role": "assistant", "content": "Hel"}


class CountingTriton(ScriptedTriton):
    """tokens: of every prompt. The text of a token is its number. refusal: what it says instead, if anything."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = [7, 8, 7]
        self.refusal = ""

    def answer_to(self, asked: dict[str, Any]) -> Any:
        super().answer_to(asked)
        if self.refusal and asked.get("task") != "describe":
            return [{"error": self.refusal}]
        if asked.get("task") == "tokenize":
            return [{"output_ids": self.tokens, "num_input_tokens": len(self.tokens)}]
        if asked.get("task") == "detokenize":
            return [{"text_output": " ".join(map(str, asked["input_ids"]))}]
        return super().answer_to(asked)


@pytest.fixture
def triton() -> CountingTriton:
    return CountingTriton()


@pytest.fixture
def client(triton: CountingTriton) -> Iterator[TestClient]:
    with gateway_of(triton) as client:
        yield client


def test_each_token_is_asked_for_once(triton: CountingTriton, client: TestClient) -> None:
    document = client.post("/tokenize", json={"prompt": "Hi", "return_token_strs": True}).json()
    assert document == {"count": 3, "max_model_len": 4096, "tokens": [7, 8, 7], "token_strs": ["7", "8", "7"]}
    assert sorted(asked["input_ids"] for asked in triton.asked[1:]) == [[7], [8]]


def test_there_are_no_texts_of_very_many_tokens(triton: CountingTriton, client: TestClient) -> None:
    triton.tokens = [*range(1025), 1]
    refused = client.post("/tokenize", json={"prompt": "Hi", "return_token_strs": True})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == (
        "return_token_strs: expected a prompt of at most 1024 different tokens, got 1025."
    )
    assert len(triton.asked) == 1
    assert client.post("/tokenize", json={"prompt": "Hi"}).json()["count"] == 1026


def test_a_conversation_is_tokenized_as_it_would_be_asked(triton: CountingTriton, client: TestClient) -> None:
    body = {"messages": [USER, BEGUN], "add_generation_prompt": False, "continue_final_message": True}
    assert client.post("/tokenize", json=body).status_code == 200
    assert json.loads(triton.asked[0]["messages"]) == [USER, {**BEGUN, "prefix": True}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [USER], "add_generation_prompt": False}, "add_generation_prompt"),
        ({"messages": [USER], "continue_final_message": True}, "messages"),
        ({"messages": [USER], "continue_final_message": "yes"}, "continue_final_message"),
        ({"messages": []}, "messages"),
        ({"messages": [], "continue_final_message": True}, "messages"),
        ({"prompt": "Hi", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"prompt": "Hi", "tools": []}, "tools"),
        ({"prompt": "Hi", "return_token_strs": 1}, "return_token_strs"),
        ({"prompt": "Hi", "messages": [USER]}, "prompt"),
        ({"prompt": "Hi", "echo": True}, "echo"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    triton: CountingTriton, client: TestClient, fields: dict[str, Any], param: str
) -> None:
    refused = client.post("/tokenize", json=fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert not triton.asked


def test_a_token_that_there_is_not_is_refused_by_its_field(triton: CountingTriton, client: TestClient) -> None:
    triton.refusal = "[E_INVALID_ARGUMENT] input_ids: expected token ids from 0 to 1279, got 99999"
    error = client.post("/detokenize", json={"tokens": [99999]}).json()["error"]
    assert (error["param"], error["message"]) == ("tokens", "tokens: expected token ids from 0 to 1279, got 99999")


class FleetThatRefusesZero:
    """asked: how many requests there were. All but that for the text of 0 wait for ever."""

    def __init__(self) -> None:
        self.asked = 0

    async def ask(self, call: Call) -> dict[str, object]:
        self.asked += 1
        if call.inputs["input_ids"] == [0]:
            raise UpstreamError("input_ids: 0 is no token", code="E_INVALID_ARGUMENT")
        await asyncio.Event().wait()
        return {}


def test_one_text_that_fails_stops_the_others() -> None:
    fleet = FleetThatRefusesZero()
    model = ModelFront(ModelSettings(("u",)), cast("Fleet", fleet))

    async def ask() -> None:
        with pytest.raises(UpstreamError, match="0 is no token"):
            await model.texts_of([[number] for number in range(20, -200, -1)])
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(ask())
    assert fleet.asked <= TEXTS_AT_ONCE + 1  # the one that failed made room
