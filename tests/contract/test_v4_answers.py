"""What backend and gateway together make of V4's and V4.1's text, beside DeepSeek's own parser."""

import json
from pathlib import Path

from deepseek_backend.engines.base import Step
from deepseek_backend.engines.generate_request import SamplingParams
from deepseek_backend.messages import read_messages, read_tool_use
from deepseek_backend.parsing import ParsedRequest
from deepseek_backend.sequence_buffer import SequenceBuffer
from deepseek_backend.v4_prompt import V4, V41, render_v4, v4_form
from deepseek_triton_build.catalog import variants
from deepseek_triton_tools.gateway.chat import StreamedChatAnswer, WholeChatAnswer
from deepseek_triton_tools.gateway.chat_request import read_chat_request
from deepseek_triton_tools.gateway.triton_call import Part
from gateway.test_chat_answers import IDENTITY, compared, joined, told

RECORDED = json.loads((Path(__file__).parent / "recorded" / "v4_answers.json").read_text())
FORMS = {"v4": V4, "v41": V41}
USER = {"role": "user", "content": "a json"}
# DeepSeek's arguments end within the name, as no JSON. Here there is no parameter.
OTHERWISE = {"v41/string_attribute_missing": {"calls": [["get_weather", "{}"]]}}


def parts_of(case, body, size):
    """The parts of the answer when the engine's text comes in pieces of `size` characters."""
    tool_use = read_tool_use(json.dumps(body.get("tools", [])), body.get("tool_choice"))
    thinks = body.get("thinking", {}).get("type") != "disabled"
    messages = read_messages(json.dumps(body["messages"]))
    prompt, begun, inside = render_v4(FORMS[case["id"].split("/")[0]], messages, {"thinking": thinks}, tool_use)
    parsed = ParsedRequest(separate_reasoning=True, sampling=SamplingParams(stop=tuple(case.get("stop", ()))))
    sequence = SequenceBuffer(0, parsed, prompt, begun, continues_reasoning=inside)
    output = case["output"]
    steps = [Step(text=output[at : at + size]) for at in range(0, len(output), size)]
    for step in [*steps, Step(finish_reason=case.get("ended_by", "stop"))]:
        if not sequence.ended:
            sequence.add(step)
            chunk = sequence.take(counted=True)
            yield Part(text=chunk.text, reasoning=chunk.reasoning, finish_reason=str(chunk.finish_reason or ""))


def said(choice):
    found = compared(choice)
    calls = [[call["name"], call["arguments"]] for call in found["calls"]]
    return found["reasoning"], found["content"], calls, found["finish_reason"]


def test_answers_are_those_of_deepseek_however_they_are_cut(subtests):
    for case in RECORDED["answers"]:
        body = {name: case[name] for name in ("thinking", "tool_choice", "response_format") if name in case}
        body |= {"messages": case.get("messages", [USER]), "stream": True}
        if case.get("has_tools"):
            body["tools"] = RECORDED["tools"]
        request = read_chat_request(body)
        with subtests.test(case["id"]):
            right = case | OTHERWISE.get(case["id"], {})
            reasoning, calls = right.get("reasoning_content", ""), right.get("calls", [])
            expected = reasoning, right["content"], calls, right["finish_reason"]
            for size in (1, 2, 3, 7, len(case["output"])):
                parts = list(parts_of(case, body, size))
                whole = WholeChatAnswer(request, IDENTITY, ["reasoning_content"])
                whole.take(parts)
                stream = StreamedChatAnswer(request, IDENTITY, ["reasoning_content"])
                events = stream.begin() + b"".join(stream.take([part]) for part in parts) + stream.end()
                choices = json.loads(whole.end())["choices"] + joined(told(events), 1)
                assert [said(choice) for choice in choices] == [expected, expected]


def test_a_variants_encoding_is_that_of_its_checkpoints_name():
    for variant in (variant for name, variant in variants().items() if name.startswith("deepseek-v4")):
        form = v4_form("", "", variant.chat_encoding)
        kind = "deepseek_v41" if form is V41 else "deepseek_v4"
        for checkpoint in variant.checkpoints.values():
            assert v4_form(kind, checkpoint.model) is form, checkpoint.model
