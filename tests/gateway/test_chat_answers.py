"""Answers, whole and streamed: both say the same, however the model's output is cut."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_triton_tools.gateway.chat import StreamedChatAnswer, WholeChatAnswer
from deepseek_triton_tools.gateway.chat_request import read_chat_request
from deepseek_triton_tools.gateway.completions import CompletionAnswer, read_completion_request
from deepseek_triton_tools.gateway.triton_call import EventReader, Part
from support.raw_triton import event

IDENTITY = {"id": "chatcmpl-1", "created": 1, "model": "tiny", "system_fingerprint": None}
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL = '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "é"}<｜tool▁call▁end｜>'
CALLS = f"<｜tool▁calls▁begin｜>{CALL}{CALL}<｜tool▁calls▁end｜>"
TEXTS = ["Hello Łódź 😀", f"Look: {CALLS}", CALLS, "a <b> ｜ c", '"quoted"\n\\', "", "<｜tool▁calls▁begin｜>cut off"]


def told(events):
    """The JSON of the events of a stream, which must end as streams do."""
    assert events.endswith(b"data: [DONE]\n\n")
    documents = []
    for each in events.removesuffix(b"data: [DONE]\n\n").split(b"\n\n")[:-1]:
        assert each.startswith(b"data: ")
        assert b"\n" not in each
        documents.append(json.loads(each[6:]))
    return documents


def joined(chunks, num_choices):
    """The choices as clients put them together of the deltas."""
    choices = [
        {"message": {"role": None, "content": "", "reasoning_content": "", "tool_calls": []}, "logprobs": []}
        for _ in range(num_choices)
    ]
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        for choice in chunk["choices"]:
            kept = choices[choice["index"]]
            assert "finish_reason" not in kept, "a chunk came after the last one"
            delta, message = choice["delta"], kept["message"]
            if message["role"] is None:
                assert delta == {"role": "assistant", "content": ""}
            message["role"] = delta.pop("role", message["role"])
            for call in delta.pop("tool_calls", []):
                if len(message["tool_calls"]) == call["index"]:
                    message["tool_calls"].append({**call, "function": {**call["function"]}})
                    assert call["id"]
                    assert call["type"] == "function"
                else:
                    assert call.keys() == {"index", "function"}
                    message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            for name, text in delta.items():
                message[name] += text
            kept["logprobs"] += (choice["logprobs"] or {}).get("content", [])
            if choice["finish_reason"] is not None:
                kept |= {name: choice.get(name) for name in ("finish_reason", "stop_reason", "prompt_logprobs")}
    return choices


def compared(choice):
    """A choice without ids, which are drawn, and without what is the same in two forms."""
    message = choice["message"]
    logprobs = choice["logprobs"]
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning_content", ""),
        "calls": [call["function"] for call in message.get("tool_calls", [])],
        "logprobs": logprobs if isinstance(logprobs, list) else (logprobs or {"content": []})["content"],
        **{name: choice.get(name) for name in ("finish_reason", "stop_reason", "prompt_logprobs")},
    }


def logprobs_of(text):
    return json.dumps(
        [{"5": {"logprob": -0.5, "rank": 1, "decoded_token": text}, "6": {"logprob": None, "decoded_token": "x"}}]
    )


@st.composite
def answers(draw):
    """The events of an answer with any number of sequences, each cut anywhere and in any order; and that number."""
    num_choices = draw(st.integers(1, 3))
    queues = []
    for sequence in range(num_choices):
        text, reasoning = draw(st.sampled_from(TEXTS)), draw(st.sampled_from(["", "hm, é", "let me see"]))
        cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        queue = [{"reasoning_output": each} for each in ([reasoning[:2], reasoning[2:]] if reasoning else [])]
        queue += [{"text_output": piece, "logprobs": logprobs_of(piece)} for piece in pieces]
        if draw(st.booleans()) and queue:  # the end of thinking and the beginning of the text in one response
            queue[0] = {**queue[-1], **queue[0]} if len(queue) == 1 else queue[0]
        reason = draw(st.sampled_from(["stop", "length", "cancelled", "timeout"]))
        queue[-1] |= {
            "finish_reason": reason,
            "stop_reason": draw(st.sampled_from(["None", "END", "7"])),
            "num_input_tokens": 5,
            "num_cached_tokens": 2,
            "num_reasoning_tokens": 1,
        }
        queue[0]["prompt_logprobs"] = '[null,{"5":{"logprob":-1.0,"rank":1,"decoded_token":"i"}}]'
        for outputs in queue:
            outputs |= {"num_output_tokens": 1, "sequence_index": sequence}
        queues.append(queue)
    events = []
    while any(queues):
        queue = draw(st.sampled_from([queue for queue in queues if queue]))
        events.append(event(**queue.pop(0)))
    return events, num_choices


def batches(events, cuts):
    """The parts as they come of bytes that are cut in these places."""
    data, reader = b"".join(events), EventReader()
    places = sorted(cut % (len(data) + 1) for cut in cuts)
    pieces = [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]
    return [parts for piece in pieces if (parts := reader.feed(piece))]


def whole(request, some):
    answer = WholeChatAnswer(request, IDENTITY, ["reasoning_content"])
    for parts in some:
        answer.take(parts)
    return json.loads(answer.end())


def streamed(request, some):
    answer = StreamedChatAnswer(request, IDENTITY, ["reasoning_content"])
    return told(answer.begin() + b"".join(answer.take(parts) for parts in some) + answer.end())


@pytest.mark.slow
@settings(deadline=None, max_examples=80)
@given(
    made=answers(),
    cuts=st.lists(st.integers(0, 10_000), max_size=12),
    tools=st.booleans(),
    parallel=st.booleans(),
    choice=st.sampled_from(["auto", "none"]),
    logprobs=st.booleans(),
    reasoning=st.booleans(),
)
def test_a_stream_says_what_the_whole_answer_says(made, cuts, tools, parallel, choice, logprobs, reasoning):
    events, num_choices = made
    request = read_chat_request(
        {
            "messages": MESSAGES,
            "n": num_choices,
            "logprobs": logprobs,
            "include_reasoning": reasoning,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": parallel} if tools else {}),
        }
    )
    expected = whole(request, batches(events, []))
    chunks = streamed(request, batches(events, cuts))
    assert list(map(compared, joined(chunks, num_choices))) == list(map(compared, expected["choices"]))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == expected["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert expected["usage"]["prompt_tokens"] == 5
    assert expected["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_choices}


def one(*parts, **fields):
    return whole(read_chat_request({"messages": MESSAGES, **fields}), [list(parts)])["choices"][0]


def test_finish_reasons():
    table = {
        ("stop", ""): ("stop", None),
        ("stop", "END"): ("stop", "END"),
        ("length", ""): ("length", None),
        ("timeout", ""): ("length", "timeout"),
        ("cancelled", ""): ("length", "cancelled"),
    }
    for (reason, stop_reason), told in table.items():
        part = Part(text="a", finish_reason=reason, stop_reason=stop_reason)
        [last] = streamed(read_chat_request({"messages": MESSAGES, "stream": True}), [[part]])[-1]["choices"]
        for choice in (one(part), last):
            assert (choice["finish_reason"], choice.get("stop_reason")) == told
    table = [("stop", True, "tool_calls", 2), ("length", True, "length", 2), ("length", False, "tool_calls", 1)]
    for reason, parallel, finish, calls in table:
        choice = one(Part(text=CALLS, finish_reason=reason), tools=[TOOL], parallel_tool_calls=parallel)
        assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == (finish, calls)


def test_an_answer_has_the_fields_that_openai_requires():
    message = {"role": "assistant", "content": "a", "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    assert one(Part(text="a", finish_reason="stop")) == choice
    assert one(Part(finish_reason="stop"))["message"] == {**message, "content": ""}
    assert one(Part(text=CALLS, finish_reason="stop"))["message"] == {**message, "content": CALLS}
    assert one(Part(text=CALLS, finish_reason="stop"), tools=[TOOL])["message"]["content"] is None
    assert one(Part(prompt_logprobs="[null]"), Part(finish_reason="stop"))["prompt_logprobs"] == [None]


def test_usage_in_each_chunk_at_the_end_or_not_at_all():
    options = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    request = read_chat_request({"messages": MESSAGES, **options})
    parts = [Part(text=text, num_input_tokens=5, num_output_tokens=1) for text in "ab"]
    chunks = streamed(request, [*([part] for part in parts), [Part(finish_reason="stop", num_input_tokens=5)]])
    assert [chunk["usage"] and chunk["usage"]["completion_tokens"] for chunk in chunks] == [None, 1, 2, 2, 2]
    for usage in (True, False):
        fields = {"stream": True, "stream_options": {"include_usage": usage}}
        chunks = streamed(read_chat_request({"messages": MESSAGES, **fields}), [[Part(text="a", finish_reason="stop")]])
        assert ("usage" in chunks[0], chunks[-1]["choices"] == []) == (usage, usage)


DELTAS = [  # as deepseek-recipe 0.2.0 writes them
    {"role": "assistant", "content": None, "reasoning_content": ""},
    {"content": None, "reasoning_content": "Hm"},
    {"content": "a", "reasoning_content": None},
    {"content": "", "reasoning_content": None},
]


def test_an_answer_of_a_model_that_thinks_has_the_fields_of_the_reasoning_everywhere():
    parts = [Part(reasoning="Hm"), Part(text="a"), Part(finish_reason="stop")]
    for include, expected in (True, DELTAS), (False, [{"role": "assistant", "content": ""}, {"content": "a"}, {}]):
        fields = {"messages": MESSAGES, "include_reasoning": include}
        request = read_chat_request({**fields, "stream": True})
        request.thinks = True
        found = streamed(request, [[part] for part in parts])
        assert [chunk["choices"][0]["delta"] for chunk in found] == expected
        message = whole(request, [parts[1:]])["choices"][0]["message"]
        assert message.get("reasoning_content") == ("" if include else None)


COUNTS = [  # what the parts tell, and the usage beside the three counts that are always there
    ([{}], {}),
    ([{}, {"num_cached_tokens": 0}], {"hit": 0, "miss": 5}),
    ([{"num_cached_tokens": 4}, {"num_reasoning_tokens": 0}], {"hit": 4, "miss": 1, "reasoning": 0}),
]


def test_what_no_server_counts_is_left_out_of_the_usage():
    for told_by, expected in COUNTS:
        parts = [Part(text="a", finish_reason="stop", num_input_tokens=5, **fields) for fields in told_by]
        usage = whole(read_chat_request({"messages": MESSAGES}), [parts])["usage"]
        assert [usage.pop(name) for name in ("prompt_tokens", "completion_tokens", "total_tokens")] == [5, 0, 5]
        wanted = {}
        if "hit" in expected:
            wanted = {f"prompt_cache_{kind}_tokens": expected[kind] for kind in ("hit", "miss")}
            wanted["prompt_tokens_details"] = {"cached_tokens": expected["hit"]}
        if "reasoning" in expected:
            wanted["completion_tokens_details"] = {"reasoning_tokens": expected["reasoning"]}
        assert usage == wanted


# --- text completions -------------------------------------------------------------------------------------------------


def tokens(*texts):
    return json.dumps([text and {"1": {"logprob": -1.0, "decoded_token": text}} for text in texts])


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    prompts=st.lists(st.sampled_from(["Hi é", "one two"]), min_size=1, max_size=3),
    num_choices=st.integers(1, 2),
    echo=st.booleans(),
    pieces=st.lists(st.sampled_from(["a", "bé ", "", "😀", '"']), min_size=1, max_size=6),
    data=st.data(),
)
def test_a_stream_of_completions_says_what_the_whole_says(prompts, num_choices, echo, pieces, data):
    fields = {"prompt": prompts, "n": num_choices, "echo": echo, "logprobs": 1}
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    echoed = [prompt if echo else "" for prompt in prompts]
    takers = [CompletionAnswer(read_completion_request(fields | more), IDENTITY, echoed) for more in ({}, streaming)]
    queues = [
        [
            Part(
                sequence=number * num_choices + choice,
                text=piece,
                logprobs=tokens(piece or "held"),
                num_output_tokens=1,
                prompt_logprobs=tokens(None, prompt[1:]) if echo and not at else "",
                finish_reason="stop" if at == len(pieces) - 1 else "",
                num_input_tokens=2 if at == len(pieces) - 1 else 0,
            )
            for at, piece in enumerate(pieces)
        ]
        for number, prompt in enumerate(prompts)
        for choice in range(num_choices)
    ]
    events = b""
    while any(queues):
        index = data.draw(st.sampled_from([index for index, queue in enumerate(queues) if queue]))
        part = queues[index].pop(0)
        takers[0].take([part])
        events += takers[1].take([part])
    document = json.loads(takers[0].end())
    chunks = told(events + takers[1].end())
    assert chunks[-1]["usage"] == document["usage"]
    assert document["usage"]["prompt_tokens"] == 2 * len(prompts)
    for choice in document["choices"]:
        mine = [each for chunk in chunks for each in chunk["choices"] if each["index"] == choice["index"]]
        assert "".join(each["text"] for each in mine) == choice["text"]
        assert [each["finish_reason"] for each in mine][-1] == choice["finish_reason"]
        for name, values in choice["logprobs"].items():
            assert [value for each in mine for value in each["logprobs"][name]] == values
        if echo and "" not in pieces:
            text, found = choice["text"], choice["logprobs"]
            for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
                assert text[offset : offset + len(token)] == token
            assert found["tokens"][0] == text[0]
            assert found["token_logprobs"][0] is None


def test_a_first_token_that_is_not_in_the_text():
    request = read_completion_request({"prompt": "Hi", "echo": True, "logprobs": 0, "max_tokens": 0})
    answer = CompletionAnswer(request, IDENTITY, ["Hi"])
    logprobs = {"prompt_logprobs": tokens(None, "Hi"), "logprobs": tokens("!")}
    answer.take([Part(text="!", num_output_tokens=1, finish_reason="length", **logprobs)])
    document = json.loads(answer.end())
    (choice,) = document["choices"]
    assert document["usage"]["completion_tokens"] == 0
    assert (choice["text"], choice["finish_reason"]) == ("Hi", "length")
    assert choice["logprobs"]["tokens"] == ["", "Hi"]
    assert choice["logprobs"]["text_offset"] == [0, 0]
    assert math.isclose(choice["logprobs"]["token_logprobs"][1], -1)
