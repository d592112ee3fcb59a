"""What each API asks of the model's server, and what a client gets of its answer."""

import asyncio
import json
import threading

import pytest

from deepseek_triton_tools.gateway.model_front import TEXTS_AT_ONCE, ModelFront
from deepseek_triton_tools.gateway.settings import ModelSettings
from deepseek_triton_tools.gateway.triton_call import UpstreamError
from gateway.asking import LAST, MESSAGES, RESPONSE, ask, error_of, events_of
from gateway.openai_facts import faults
from support.raw_triton import answer, event, refusal
from support.waiting import PATIENCE_S

HM = event(reasoning_output="hm")
CALL = '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
TWO_CALLS = f"<｜tool▁calls▁begin｜>{CALL}{CALL}<｜tool▁calls▁end｜>"
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CHAT_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 3,
    "total_tokens": 8,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 1},
    "prompt_cache_hit_tokens": 4,
    "prompt_cache_miss_tokens": 1,
}


def sampling(triton):
    return json.loads(triton.asked[0]["sampling_parameters"])


# --- Chat and text completions ---


@pytest.mark.slow
def test_a_chat(triton, client):
    triton.script = answer(HM, event(text_output="Hel"), event(text_output="lo"), LAST)
    document = ask(client, max_tokens=9, user="me", top_k=None).json()
    assert faults(document, "CreateChatCompletionResponse") == []
    [choice] = document["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None, "reasoning_content": "hm"}
    assert (choice["finish_reason"], document["usage"]) == ("stop", USAGE)
    assert document["system_fingerprint"].startswith("fp_")
    assert sampling(triton) == {"max_tokens": 9, "n": 1}
    assert triton.asked[0]["streaming"] is False


@pytest.mark.slow
def test_a_chat_streams(triton, client):
    triton.script = answer(HM, event(text_output="Hel"), event(text_output="lo"), LAST)
    text = ask(client, stream=True, stream_options={"include_usage": True}).text
    assert text.endswith("data: [DONE]\n\n")
    *chunks, usage = events_of(text)
    assert [fault for chunk in (*chunks, usage) for fault in faults(chunk, "CreateChatCompletionStreamResponse")] == []
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, None, "stop"]
    assert (usage["choices"], usage["usage"]) == ([], USAGE)


@pytest.mark.slow
def test_several_choices_are_sampled_unless_they_are_greedy(triton, client):
    """Greedy ones are one answer told several times."""
    for fields in ({"temperature": 0}, {"temperature": 1e-6}, {"top_p": 0}, {"top_k": 1}):
        triton.clear()
        document = ask(client, n=3, **fields).json()
        told = [(choice["index"], choice["message"]["content"]) for choice in document["choices"]]
        assert told == [(0, "Hello"), (1, "Hello"), (2, "Hello")]
        assert (document["usage"]["completion_tokens"], sampling(triton)["n"]) == (3, 1)
    triton.clear()
    both = {"finish_reason": ["stop", "stop"], "num_input_tokens": [5, 5], "num_output_tokens": [3, 3]}
    triton.script = answer(event(sequence_index=[0, 1], text_output=["a", "b"], **both))
    document = ask(client, n=2).json()
    assert [choice["message"]["content"] for choice in document["choices"]] == ["a", "b"]
    assert (sampling(triton), triton.asked[-1]["sampling_param_temperature"]) == ({"n": 2}, 1.0)


def test_log_probabilities(triton, client):
    told = [{"7": {"logprob": -0.5, "decoded_token": "é"}, "8": {"logprob": -0.1, "decoded_token": "b"}}]
    triton.script = answer(event(text_output="é", logprobs=json.dumps(told)), LAST)
    [token] = ask(client, logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]["content"]
    top = [{"token": "b", "logprob": -0.1, "bytes": [98]}]
    assert token == {"token": "é", "logprob": -0.5, "bytes": [195, 169], "top_logprobs": top}


# --- The Responses API ---


def test_a_response(triton, client):
    triton.script = answer(HM, event(text_output="Paris"), LAST)
    document = ask(client, RESPONSE, instructions="Be brief.").json()
    assert document["status"] == "completed"
    assert [item["content"][0]["text"] for item in document["output"]] == ["hm", "Paris"]
    assert document["usage"]["output_tokens_details"] == {"reasoning_tokens": 1}
    (asked,) = triton.asked
    assert json.loads(asked["messages"]) == [{"role": "system", "content": "Be brief."}, *MESSAGES]
    assert (asked["separate_reasoning"], asked["streaming"]) == (True, False)


def test_a_response_streams(triton, client):
    triton.script = answer(*(event(text_output=text) for text in ("Look: ", TWO_CALLS[:50], TWO_CALLS[50:])), LAST)
    streamed = ask(client, RESPONSE, tools=[TOOL], stream=True)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = events_of(streamed.text)
    assert events[-1]["type"] == "response.completed"
    kinds = [item["type"] for item in events[-1]["response"]["output"]]
    assert kinds == ["message", "function_call", "function_call"]
    assert triton.asked[0]["streaming"] is True
    assert json.loads(triton.asked[0]["tools"]) == [CHAT_TOOL]


def test_a_response_that_fails_after_its_first_event_ends_with_it(triton, client):
    """Where it has not begun, its error has a status of its own. Errors name the fields of this API."""

    def fails(wire):
        wire.head()
        wire.chunk(event(text_output="Once"))
        begun.wait(PATIENCE_S)
        wire.chunk(event(error="[E_INTERNAL] max_tokens: the engine forgot it"))
        wire.chunk(b"")

    begun = threading.Event()
    triton.script = fails
    lines = []
    with client.stream("POST", RESPONSE, json={"input": "Hi", "stream": True}) as streamed:
        for line in streamed.iter_lines():
            lines.append(line)
            if "Once" in line:
                begun.set()
    last = events_of("\n".join(lines))[-1]
    assert (streamed.status_code, last["type"]) == (200, "response.failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "max_output_tokens: the engine forgot it"}
    assert last["response"]["output"][0]["status"] == "incomplete"
    triton.script = answer(event(text_output="Hel"))  # and no end
    assert ask(client, RESPONSE).status_code == 502
    assert events_of(ask(client, RESPONSE, stream=True).text)[-1]["type"] == "response.failed"


def test_no_response_is_kept(client):
    kept = "/v1/responses/resp_1"
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        assert error_of(client.request(method, kept + path), 404)["code"] == "response_not_found"


def test_the_length_of_a_prompt(triton, client):
    triton.script = answer(event(num_input_tokens=12, output_ids=[1] * 12))
    counted = client.post("/v1/responses/input_tokens", json={"input": "Hi", "tools": [TOOL]})
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": 12}
    assert triton.asked[0]["task"] == "tokenize"
    assert {"messages", "tools"} <= triton.asked[0].keys()


def test_a_conversation_ends_with_what_can_be_answered(triton, client):
    user = {"role": "user", "content": "Hi"}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    for last, hint in (({"role": "assistant", "content": "Hello"}, "a message of the user"), (call, "the outputs of")):
        for items in ([user, last], [user, last, {"role": "system", "content": "Be brief."}]):
            error = error_of(client.post(RESPONSE, json={"input": items}), 400)
            assert (error["param"], hint in error["message"]) == ("input", True)
    assert not triton.asked


THEIR_ERRORS = {
    "[E_INVALID_ARGUMENT] max_tokens: expected at least 1": (
        "max_output_tokens",
        "max_output_tokens: expected at least 1",
    ),
    "[E_INVALID_ARGUMENT] messages[2].content: expected text": ("input", "input.content: expected text"),
    "[E_INVALID_ARGUMENT] messages[0].role: expected user, got 'it\\'s messages, too'": (
        "input",
        "input.role: expected user, got 'it\\'s messages, too'",
    ),
    "[E_INVALID_ARGUMENT] tools[1].function.name: expected 1": ("tools", "tools[1].name: expected 1"),
    "[E_INVALID_ARGUMENT] tools[1].function: no key 'a'": ("tools", "tools[1]: no key 'a'"),
    '[E_INVALID_ARGUMENT] tools: got "my messages 1"': ("tools", 'tools: got "my messages 1"'),
    "[E_UNSUPPORTED] guided_json is for engines that have it": (None, "guided_json is for engines that have it"),
    "[E_UNSUPPORTED] guided_json: no engine has it": ("text", "guided_json: no engine has it"),
    "[E_PROMPT_TOO_LONG] 9 tokens and max_tokens 7": ("input", None),
}


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/input_tokens"])
def test_the_servers_errors_name_the_fields_of_this_api(triton, client, path, subtests):
    for text, (param, message) in THEIR_ERRORS.items():
        for stream in (False, True) if path == RESPONSE else (False,):
            with subtests.test(text=text, stream=stream):
                triton.script = refusal(400, text)
                error = error_of(client.post(path, json={"input": "Hi", **({"stream": True} if stream else {})}), 400)
                assert error["param"] == param
                assert message in (None, error["message"])
                assert "max_tokens" not in error["message"]


# --- Tokenization ---


class Tokenizer:
    """Scripts of a server: `tokens` of every prompt, and the text of a token is its number."""

    def __init__(self, triton, tokens=(7, 8, 7)):
        self.triton, self.tokens = triton, list(tokens)
        triton.script = self

    def __call__(self, wire):
        asked = next(one for one in self.triton.asked if one["id"] == wire.request_id)
        if asked.get("task") == "tokenize":
            answer(event(output_ids=self.tokens, num_input_tokens=len(self.tokens)))(wire)
        else:
            answer(event(text_output=" ".join(map(str, asked["input_ids"]))))(wire)


def test_a_prompt_and_a_conversation_are_tokenized_and_each_token_is_asked_for_once(triton, client):
    Tokenizer(triton)
    document = client.post("/tokenize", json={"prompt": "Hi", "return_token_strs": True}).json()
    assert document == {"count": 3, "max_model_len": 4096, "tokens": [7, 8, 7], "token_strs": ["7", "8", "7"]}
    assert sorted(asked["input_ids"] for asked in triton.asked[1:]) == [[7], [8]]
    assert client.post("/detokenize", json={"tokens": [7, 8]}).json() == {"prompt": "7 8"}
    triton.clear()
    Tokenizer(triton, [*range(1025), 1])  # too many texts
    error = error_of(client.post("/tokenize", json={"prompt": "Hi", "return_token_strs": True}), 400)
    assert error["message"] == "return_token_strs: expected a prompt of at most 1024 different tokens, got 1025."
    assert len(triton.asked) == 1
    assert client.post("/tokenize", json={"prompt": "Hi"}).json()["count"] == 1026
    triton.clear()
    begun = {"role": "assistant", "content": "Hel"}
    body = {"messages": [*MESSAGES, begun], "add_generation_prompt": False, "continue_final_message": True}
    body |= {
        "tools": [{}],
        "tool_choice": "none",
        "response_format": {"type": "json_object"},
        "add_special_tokens": False,
    }
    assert client.post("/tokenize", json=body).status_code == 200
    asked = triton.asked[0]
    assert json.loads(asked["messages"]) == [*MESSAGES, {**begun, "prefix": True}]
    assert asked["tool_choice"] == "none"
    assert json.loads(asked["sampling_parameters"]) == {"guided_json_object": True, "add_special_tokens": False}


def test_what_cannot_be_tokenized_is_refused_by_name(triton, client):
    table = [
        ({"messages": MESSAGES, "add_generation_prompt": False}, "add_generation_prompt"),
        ({"messages": MESSAGES, "continue_final_message": True}, "messages"),
        ({"messages": MESSAGES, "continue_final_message": "yes"}, "continue_final_message"),
        ({"messages": []}, "messages"),
        ({"messages": [], "continue_final_message": True}, "messages"),
        ({"prompt": "Hi", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"prompt": "Hi", "tools": []}, "tools"),
        ({"prompt": "Hi", "return_token_strs": 1}, "return_token_strs"),
        ({"prompt": "Hi", "messages": MESSAGES}, "prompt"),
        ({"prompt": "Hi", "echo": True}, "echo"),
    ]
    named = [error_of(client.post("/tokenize", json=fields), 400)["param"] for fields, _ in table]
    assert named == [param for _, param in table]
    assert not triton.asked
    triton.script = refusal(400, "[E_INVALID_ARGUMENT] input_ids: expected token ids from 0 to 1279, got 99999")
    error = error_of(client.post("/detokenize", json={"tokens": [99999]}), 400)
    assert (error["param"], error["message"]) == ("tokens", "tokens: expected token ids from 0 to 1279, got 99999")


async def test_one_text_that_fails_stops_the_others():
    class FleetThatRefusesZero:
        """All but the text of 0 wait for ever."""

        asked = 0

        async def ask(self, call):
            self.asked += 1
            if call.inputs["input_ids"] == [0]:
                raise UpstreamError("input_ids: 0 is no token", code="E_INVALID_ARGUMENT")
            await asyncio.Event().wait()

    fleet = FleetThatRefusesZero()
    with pytest.raises(UpstreamError, match="0 is no token"):
        await ModelFront(ModelSettings(("u",)), fleet).texts_of([[number] for number in range(20, -200, -1)])
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert fleet.asked <= TEXTS_AT_ONCE + 1  # the one that failed made room
