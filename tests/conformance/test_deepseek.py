"""V4 and V4.1 through the gateway, beside DeepSeek's own renderer and parser (deepseek-recipe), and asked by the openai
package as the guides of DeepSeek's API ask it.

The stand-in for TensorRT-LLM says what a message dictates, so that any answer can be had, and takes guides.
"""

import itertools
import json
import random
from contextlib import ExitStack

import deepseek_recipe as recipe
import httpx
import pytest
from openai import OpenAI

from conformance import made_conversations
from conformance.asked import BERLIN_ANSWER, BERLIN_RESULT, FRANCE, PARIS, WEATHER_TOOL
from conformance.running import gateway, triton
from support.servers import build, change_yaml, standin_repository

MODELS = {  # the name here -> the setting, DeepSeek's name and its encoding
    "v4": ("v4-0731", "DeepSeek-V4-Pro", recipe.DeepseekV4Encoding),
    "v41": ("v4.1", "DeepSeek-V4.1-Flash", recipe.DeepseekV41Encoding),
}
BLANKS = {"v4": "", "v41": " "}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A gateway in front of both models, without /v1."""
    folder = tmp_path_factory.mktemp("deepseek")
    with ExitStack() as running:
        named = []
        for name, (encoding, *_) in MODELS.items():
            repository = standin_repository(folder / name)
            change_yaml(repository / "tensorrt_llm/1/model.yaml", chat_encoding=encoding, warmup=None)
            named += ["--model", f"{name}={running.enter_context(triton(repository, folder / f'{name}.log'))}"]
        yield running.enter_context(gateway(log=folder / "gateway.log", options=tuple(named)))


@pytest.fixture(scope="module")
def http(url):
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def clients(url):
    """By the path of the base URL."""
    with ExitStack() as opened:
        yield {
            path: opened.enter_context(OpenAI(base_url=url + path, api_key="none", max_retries=0))
            for path in ("", "/beta")
        }


def converted(model, body):
    """The request as DeepSeek takes it."""
    request = recipe.ChatCompletionRequest(json.dumps({**body, "model": MODELS[model][1]}))
    return request.convert(recipe.ConversionOptions())


def prompt_of(model, body):
    return MODELS[model][2]().render_conversation(converted(model, body).conversation).prompt


def shown(http, model, body):
    """The prompt that the model gets, by its tokens; None for a chat that is refused."""
    response = http.post("/tokenize", json={"model": model, **body})
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        return None
    return http.post("/detokenize", json={"model": model, "tokens": response.json()["tokens"]}).json()["prompt"]


@pytest.mark.sample
@pytest.mark.parametrize("model", MODELS)
def test_prompts_are_those_of_deepseek(http, model, subtests):
    chance = random.Random(f"prompts of {model}")
    for number in range(120):
        body = made_conversations.request(chance)
        with subtests.test(number, body=body):
            try:
                expected = prompt_of(model, body)
            except recipe.ConversionError as refusal:
                expected = {400: None}[refusal.status_code]
            is_begun = expected is None and body.get("tool_choice", "none") not in ("auto", "none")  # without thinking
            assert is_begun or shown(http, model, body) == expected


def read_by_deepseek(model, body, text):
    request = converted(model, {**body, "stream": True})
    processor = recipe.StreamProcessor(
        recipe.ChatCompletionRequest.chunk_generator(request, "id", model), request.parsing_options
    )
    chunks = processor.push(recipe.InferenceChunk.ready()) + processor.push(recipe.InferenceChunk.text(text))
    if not processor.finished:  # a stop string has not ended it
        chunks += processor.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop))
    response = recipe.ChatCompletionResponse("id", model, 0, 1, 0)
    for chunk in chunks + processor.finish():
        response.accumulate(chunk)
    return said(json.loads(response.to_json())["choices"][0])


def said(choice):
    """What a choice has, in one form."""
    message = choice["message"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or []]
    return [message.get("reasoning_content"), message["content"] or "", choice["finish_reason"], calls]


def ask(client, *, streamed, **fields):
    """The answer, which the package puts together where it is streamed."""
    if not streamed:
        return client.chat.completions.create(**fields)
    with client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as stream:
        return stream.get_final_completion()


def dictate(text):
    return [{"role": "user", "content": f"<answer>{text}</answer>"}]


def thinking(on):
    return {"thinking": {"type": "enabled" if on else "disabled"}}


@pytest.mark.sample
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_answers_are_read_as_deepseek_reads_them(clients, model, streamed, subtests):
    chance = random.Random(f"answers of {model}, {streamed}")
    for number in range(60):
        thinks, has_tools = chance.random() < 0.6, chance.random() < 0.8
        text = made_conversations.answer(chance, BLANKS[model], thinks=thinks, has_tools=has_tools)
        body = {"messages": dictate(text), "stop": chance.choice([["Hi", "a <"], None, None, None])}
        if has_tools:
            body["tools"] = made_conversations.TOOLS
        with subtests.test(number, text=text, body=body):
            expected = read_by_deepseek(model, {**body, **thinking(thinks)}, text)
            fields = {**body, "model": model, "max_tokens": 1000, "extra_body": thinking(thinks)}
            found = said(ask(clients[""], streamed=streamed, **fields).choices[0].model_dump())
            # Where a call is cut, both have the beginning of arguments, one somewhat more of it.
            arguments = [calls.pop() for *_, calls in (found, expected) if calls and not text.endswith("calls>")]
            assert found == expected
            assert not arguments or any(a[0] == b[0] and a[1].startswith(b[1]) for a, b in (arguments, arguments[::-1]))


EFFORTS = {"none": 0, "minimal": 1, "low": 1, "medium": 2, "high": 2, "xhigh": 2, "max": 3, "ultra": 3}


@pytest.mark.parametrize("model", MODELS)
def test_thinking_at_each_effort_and_what_it_costs(clients, model):
    texts = {}
    for effort, rank in EFFORTS.items():
        text = "Hi" if effort == "none" else "Hm.</think>Hi"
        asked = {"messages": dictate(text), "reasoning_effort": effort}
        found = ask(clients[""], streamed=rank % 2 == 1, model=model, **asked)
        assert said(found.choices[0].model_dump()) == [None if rank == 0 else "Hm.", "Hi", "stop", []]
        usage, prompt = found.usage.model_dump(), prompt_of(model, asked)
        num_prompt, num_output = len(prompt.encode()), usage["completion_tokens"]
        assert (usage["prompt_tokens"], usage["total_tokens"]) == (num_prompt, num_prompt + num_output)
        assert 0 <= usage["completion_tokens_details"]["reasoning_tokens"] - (rank > 0) < num_output
        assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_cache_hit_tokens"] > 0
        assert usage["prompt_cache_miss_tokens"] == num_prompt - usage["prompt_cache_hit_tokens"]
        texts[rank] = prompt.partition(asked["messages"][0]["content"])[0]
    assert len(set(texts.values())) == 4 - (model == "v4")  # V4 says nothing about a low effort


def call_text(model, *calls):
    dsml, word = f"｜DSML｜{BLANKS[model]}", {"v4": "tool_calls", "v41": "calls"}[model]
    written = ""
    for name, value in calls:
        parameter = f'<{dsml}parameter name="city" string="true">{value}</{dsml}parameter>\n'
        written += f'<{dsml}invoke name="{name}">\n{parameter}</{dsml}invoke>\n'
    return f"\n\n<{dsml}{word}>\n{written}</{dsml}{word}>"


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CITY_TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "strict": True, "parameters": {**CITY, "additionalProperties": False}},
    }
    for name in ("get_weather", "get_time")
]
CALLED = [["get_weather", '{"city": "Łódź"}'], ["get_time", '{"city": "Łódź"}']]


@pytest.mark.sample
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_two_calls_their_results_and_the_reasoning_that_is_sent_back(clients, model, streamed):
    text = call_text(model, ("get_weather", "Łódź"), ("get_time", "Łódź"))
    messages = dictate(f"I need both.</think>{text}")
    asked = {"model": model, "tools": CITY_TOOLS, "max_tokens": 1000, "reasoning_effort": "high"}
    choice = ask(clients[""], streamed=streamed, messages=messages, **asked, extra_body=thinking(True)).choices[0]
    assert said(choice.model_dump()) == ["I need both.", "", "tool_calls", CALLED]
    message = choice.message.model_dump(exclude_none=True)
    for call in message["tool_calls"]:  # the package's streams add their own
        call.pop("index", None), call["function"].pop("parsed_arguments", None)
    message.pop("parsed", None)
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": answer}
        for call, answer in zip(
            message["tool_calls"], ["Sunny", "<answer>Now.</think>Sunny, noon</answer>"], strict=True
        )
    ]
    messages += [message, *results]
    found = ask(clients[""], streamed=streamed, messages=messages, **asked)
    assert said(found.choices[0].model_dump()) == ["Now.", "Sunny, noon", "stop", []]
    prompt = prompt_of(model, {"messages": messages, "tools": CITY_TOOLS})
    assert "I need both." in prompt
    assert found.usage.prompt_tokens == len(prompt.encode())


@pytest.mark.parametrize("path", ["", "/beta"])
@pytest.mark.parametrize("model", MODELS)
def test_prefix_required_calls_and_fim(clients, model, path):
    client = clients[path]

    def begun(**fields):
        question, prefix = dictate(fields.pop("answer")), {"role": "assistant", "prefix": True, **fields.pop("prefix")}
        found = client.chat.completions.create(model=model, messages=[*question, prefix], **fields)
        return said(found.choices[0].model_dump())

    code = {"answer": "\nprint(1)\n```\nThat was it.", "prefix": {"content": "```python"}, "stop": ["```"]}
    assert begun(**code, extra_body=thinking(False)) == [None, "\nprint(1)\n", "stop", []]
    reasoned = {"content": "", "reasoning_content": "Let me"}
    assert begun(answer=" think.</think>Yes", prefix=reasoned) == [" think.", "Yes", "stop", []]

    inside = call_text(model, ("get_weather", "Łódź")).partition(">\n")[2]
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        asked = {"model": model, "messages": dictate(inside), "tools": CITY_TOOLS, "tool_choice": choice}
        for switch in ({}, thinking(True), thinking(False)):  # DeepSeek's API refuses all but the last
            found = client.chat.completions.create(**asked, extra_body=switch).choices[0]
            assert said(found.model_dump())[1:] == ["", "tool_calls", CALLED[:1]]

    filled = client.completions.create(model=model, prompt="one, <answer> two,</answer>", suffix=" three", max_tokens=9)
    assert (filled.choices[0].text, filled.choices[0].finish_reason) == (" two,", "stop")
    told = filled.usage
    assert told.prompt_cache_hit_tokens + told.prompt_cache_miss_tokens == told.prompt_tokens


@pytest.mark.parametrize("model", MODELS)
def test_json_is_asked_for_in_the_prompt_and_by_a_guide(clients, model):
    asked = {"messages": [{"role": "user", "content": "As json."}], "response_format": {"type": "json_object"}}
    found = clients[""].chat.completions.create(model=model, **asked, extra_body=thinking(False))
    assert json.loads(found.choices[0].message.content).keys() == {"guided"}  # the stand-in's object
    assert found.usage.prompt_tokens == len(prompt_of(model, {**asked, **thinking(False)}).encode())
    asked["messages"] = dictate('json</think>{"a": 1}')
    found = clients[""].chat.completions.create(model=model, **asked)
    assert said(found.choices[0].model_dump()) == ["json", '{"a": 1}', "stop", []]
    assert found.usage.prompt_tokens == len(prompt_of(model, asked).encode())


def test_the_chunks_are_deepseeks(clients):
    asked = {"model": "v4", "messages": dictate("Hm.</think>Hi"), "stream": True}
    deltas = [chunk.choices[0].delta for chunk in clients[""].chat.completions.create(**asked)]
    first, last = deltas[0], deltas[-1]
    assert (first.role, first.content, first.reasoning_content) == ("assistant", None, "")
    assert (last.content, last.reasoning_content) == ("", None)
    assert "".join(delta.reasoning_content or "" for delta in deltas) == "Hm."


# --- The tiny model in V4's form, which answers by itself ---


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny_v4")
    with ExitStack() as running:
        server = running.enter_context(triton(build(folder / "repository", "tiny-v4"), folder / "log"))
        url = running.enter_context(gateway(server, log=folder / "gateway.log"))
        yield running.enter_context(OpenAI(base_url=url, api_key="none", max_retries=0))


@pytest.mark.parametrize("streamed", [False, True])
def test_the_tiny_model_in_v4s_form(tiny, streamed):
    def chat(messages, **fields):
        found = ask(tiny, streamed=streamed, model="tiny", messages=messages, temperature=0, **fields)
        return found.choices[0].message, said(found.choices[0].model_dump())

    reasonings = []
    for effort in ("none", "low", "high", "max"):
        _, (reasoning, *answer) = chat(FRANCE, reasoning_effort=effort)
        assert answer == [PARIS, "stop", []]
        reasonings.append(reasoning or "")
    assert all(len(more) > len(less) and more.startswith(less) for less, more in itertools.pairwise(reasonings))

    question = [{"role": "user", "content": "What is the weather in Berlin and Rome?"}]
    message, (reasoning, text, reason, calls) = chat(question, tools=[WEATHER_TOOL])
    assert (bool(reasoning), text, reason) == (True, "", "tool_calls")
    assert calls == [["get_weather", '{"city": "Berlin"}'], ["get_weather", '{"city": "Rome"}']]
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": result}
        for call, result in zip(message.tool_calls, [BERLIN_RESULT, BERLIN_RESULT], strict=True)
    ]
    _, answer = chat([*question, message, *results], tools=[WEATHER_TOOL])
    assert answer[1].startswith(BERLIN_ANSWER)

    begun = {"role": "assistant", "content": "The capital of", "prefix": True}
    assert chat([*FRANCE, begun], extra_body=thinking(False))[1][1] == PARIS.removeprefix(begun["content"])
