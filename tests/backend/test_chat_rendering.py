"""Conversations with tools become the prompt that the model was trained on, whatever its chat template leaves out."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_backend.chat_rendering import ChatFacts, ChatRenderer, find_chat_facts
from deepseek_backend.contract import ErrorCode
from deepseek_backend.engines.prompting import render_chat
from deepseek_backend.engines.reference.checkpoint_loading import ChatTemplate
from deepseek_backend.engines.tags import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    RESULT_BEGIN,
    RESULT_END,
    RESULTS_BEGIN,
    RESULTS_END,
    SEPARATOR,
)
from deepseek_backend.errors import RequestError
from deepseek_backend.messages import NO_TOOLS, ToolUse, read_messages

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
TINY = Path(__file__).parents[2] / "model_repository" / "tensorrt_llm" / "1" / "tiny"

_SYSTEM = """
{%- set ns = namespace(first=true, tool=false, first_result=true, system='', after_user=false) -%}
{%- for m in messages if m.role == 'system' -%}
  {%- set ns.system = ns.system + ('\\n\\n' if ns.system else '') + m.content -%}
{%- endfor -%}
{{- bos_token + ns.system -}}
"""

LIKE_V3 = (
    _SYSTEM
    + """
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{%- set ns.tool = false -%}{{- '<｜User｜>' + m.content -}}{%- endif -%}
  {%- if m.role == 'assistant' and m.content is none -%}
    {%- set ns.tool = false -%}
    {%- for call in m.tool_calls -%}
      {{- '<｜Assistant｜><｜tool▁calls▁begin｜>' if ns.first else '\\n' -}}
      {{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' -}}
      {{- call.function.arguments + '\\n```<｜tool▁call▁end｜>' -}}
      {{- '' if ns.first else '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' -}}
      {%- set ns.first = false -%}
    {%- endfor -%}
  {%- endif -%}
  {%- if m.role == 'assistant' and m.content is not none -%}
    {{- ('<｜tool▁outputs▁end｜>' if ns.tool else '<｜Assistant｜>') + m.content.split('</think>')[-1] + eos_token -}}
    {%- set ns.tool = false -%}
  {%- endif -%}
  {%- if m.role == 'tool' -%}
    {%- set ns.tool = true -%}
    {{- '<｜tool▁outputs▁begin｜>' if ns.first_result else '\\n' -}}
    {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' -}}
    {%- set ns.first_result = false -%}
  {%- endif -%}
{%- endfor -%}
{{- '<｜tool▁outputs▁end｜>' if ns.tool -}}
"""
)
"""Behaves as the first templates of V3 and R1: calls are written only where content is null, begun and ended once in a
conversation, and closed from the second call on. Arguments that are no text end the rendering."""
LIKE_V3_0324 = LIKE_V3 + "{{- '<｜Assistant｜>' if add_generation_prompt and not ns.tool -}}"
LIKE_R1 = LIKE_V3 + "{{- '<｜Assistant｜><think>\\n' if add_generation_prompt and not ns.tool -}}"
LIKE_V31 = (
    _SYSTEM
    + """
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{%- set ns.after_user = true -%}{{- '<｜User｜>' + m.content -}}{%- endif -%}
  {%- if m.role == 'assistant' and m.tool_calls is defined -%}
    {{- '<｜Assistant｜></think>' if ns.after_user -}}
    {%- set ns.after_user = false -%}
    {{- (m.content or '') + '<｜tool▁calls▁begin｜>' -}}
    {%- for call in m.tool_calls -%}
      {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' -}}
      {{- call.function.arguments + '<｜tool▁call▁end｜>' -}}
    {%- endfor -%}
    {{- '<｜tool▁calls▁end｜>' + eos_token -}}
  {%- elif m.role == 'assistant' -%}
    {%- if ns.after_user -%}
      {{- '<｜Assistant｜>' + ('<think>' if m.prefix is defined and m.prefix and thinking else '</think>') -}}
    {%- endif -%}
    {%- set ns.after_user = false -%}
    {{- m.content.split('</think>', 1)[-1] + eos_token -}}
  {%- elif m.role == 'tool' -%}
    {%- set ns.after_user = false -%}
    {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and ns.after_user -%}
  {{- '<｜Assistant｜>' + ('<think>' if thinking else '</think>') -}}
{%- endif -%}
"""
)
"""Behaves as V3.1's template."""
PLAIN = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
OTHER = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"


class TemplateEngine:
    """An engine that only renders."""

    def __init__(self, source, folder):
        tokens = {"bos_token": BOS, "eos_token": EOS, "chat_template": source}
        (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
        self._template = ChatTemplate(folder)

    def render_chat(self, messages, template_kwargs):
        return render_chat(self._template, messages, template_kwargs)


@pytest.fixture
def make(tmp_path):
    def make(source, *, is_v32=False):
        engine = TemplateEngine(source, tmp_path)
        return ChatRenderer(engine, find_chat_facts(engine, is_v32=is_v32), eos_token=EOS, template=source)

    return make


def tiny_template(folder):
    return str(json.loads((TINY / folder / "tokenizer_config.json").read_text())["chat_template"])


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TOOLS = ToolUse(tools=[WEATHER])


def call(name, arguments, call_id=""):
    return {"id": call_id or name, "type": "function", "function": {"name": name, "arguments": arguments}}


def user(text):
    return {"role": "user", "content": text}


def says(content, **more):
    return {"role": "assistant", "content": content, **more}


def result(content, call_id):
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def rendered(renderer, messages, tools=NO_TOOLS, **kwargs):
    return renderer.render(read_messages(json.dumps(messages)), kwargs, tools)


def prompt(renderer, messages, tools=NO_TOOLS, **kwargs):
    return rendered(renderer, messages, tools, **kwargs).prompt


TWO_ROUNDS = [
    user("1"),
    says(None, tool_calls=[call("a", {"x": "ö"}, "i"), call("b", "{}", "j"), call("c", "", "k")]),
    result("C", "k"),
    result("A", "i"),
    result("B", "j"),
    says("Look.", tool_calls=[call("d", '{"y": "</think>"}')]),
    result("D", "d"),
    says("Done."),
    user("2"),
    says("", tool_calls=[call("e", "{}")]),
    result("E", "e"),
]


def raw(name, arguments):
    return f"{CALL_BEGIN}{name}{SEPARATOR}{arguments}{CALL_END}"


def fenced(name, arguments):
    return f"{CALL_BEGIN}function{SEPARATOR}{name}\n```json\n{arguments}\n```{CALL_END}"


def given_back(*texts):
    return [f"{RESULT_BEGIN}{text}{RESULT_END}" for text in texts]


RAW_ROUNDS = (
    f"{BOS}<｜User｜>1<｜Assistant｜></think>{CALLS_BEGIN}"
    + raw("a", '{"x": "ö"}')
    + raw("b", "{}")
    + raw("c", "{}")
    + f"{CALLS_END}{EOS}{''.join(given_back('A', 'B', 'C'))}Look.{CALLS_BEGIN}"
    + raw("d", '{"y": "</think>"}')
    + f"{CALLS_END}{EOS}{''.join(given_back('D'))}Done.{EOS}<｜User｜>2<｜Assistant｜></think>{CALLS_BEGIN}"
    + raw("e", "{}")
    + f"{CALLS_END}{EOS}{''.join(given_back('E'))}"
)
FENCED_ROUNDS = (
    f"{BOS}<｜User｜>1<｜Assistant｜>{CALLS_BEGIN}"
    + "\n".join([fenced("a", '{"x": "ö"}'), fenced("b", "{}"), fenced("c", "{}")])
    + f"{CALLS_END}{EOS}{RESULTS_BEGIN}{chr(10).join(given_back('A', 'B', 'C'))}{RESULTS_END}Look.{CALLS_BEGIN}"
    + fenced("d", '{"y": "</think>"}')
    + f"{CALLS_END}{EOS}{RESULTS_BEGIN}{''.join(given_back('D'))}{RESULTS_END}Done.{EOS}"
    + f"<｜User｜>2<｜Assistant｜>{CALLS_BEGIN}"
    + fenced("e", "{}")
    + f"{CALLS_END}{EOS}{RESULTS_BEGIN}{''.join(given_back('E'))}{RESULTS_END}"
)


CHECKPOINTS = {
    "V3-0324": LIKE_V3_0324,
    "R1": LIKE_R1,
    "V3.1": LIKE_V31,
    "tiny": tiny_template("."),
    "tiny-r1": tiny_template("r1"),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_rounds_of_calls_are_what_the_model_wrote_and_got(make, name):
    rounds = RAW_ROUNDS if name in ("V3.1", "tiny") else FENCED_ROUNDS
    renderer = make(CHECKPOINTS[name])
    assert [prompt(renderer, TWO_ROUNDS, thinking=thinking) for thinking in (True, False)] == [rounds] * 2


def test_turns_of_calls_are_as_the_model_was_trained(make):
    messages = [user("1"), says("<think>Hm.</think>Look.", tool_calls=[call("f", "{}")]), result("F", "f")]
    for source in (LIKE_V3_0324, LIKE_R1, LIKE_V31):
        text = prompt(make(source), messages)
        assert f"Look.{CALLS_BEGIN}" in text
        assert "Hm." not in text
    # The text of a turn that ends with results has no end token, which no model wrote there.
    messages = [user("1"), says(None, tool_calls=[call("f", "{}")]), result("F", "f"), user("2")]
    start = f"{BOS}<｜User｜>1<｜Assistant｜></think>{CALLS_BEGIN}{raw('f', '{}')}{CALLS_END}{EOS}"
    assert prompt(make(LIKE_V31), messages) == f"{start}{given_back('F')[0]}<｜User｜>2<｜Assistant｜></think>"
    asked = prompt(make(LIKE_R1), CHAT, ToolUse(tools=[WEATHER], required=True))
    assert asked.endswith(f"<think>\n\n</think>\n\n{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}")


FACTS = [  # a template, the form of its calls, whether it shows tools, has a switch for thinking, and needs a question
    (LIKE_V3_0324, "fenced", False, False, False),
    (LIKE_R1, "fenced", False, False, False),
    (LIKE_V31, "raw_json", False, True, True),
    (tiny_template("."), "raw_json", True, True, True),
    (tiny_template("r1"), "fenced", True, False, False),
    (PLAIN, None, False, False, False),
    (OTHER, "template", True, False, False),
    (None, None, False, False, False),
]


def test_what_a_template_does_is_found_out(make):
    found = [make(source).facts for source, *_ in FACTS]
    got = [(each.form and each.form.name, each.shows_tools, each.has_switch, each.needs_question) for each in found]
    assert got == [tuple(expected) for _, *expected in FACTS]
    assert make(None, is_v32=True).facts.needs_question
    assert not any(facts.is_code for facts in found)


CHAT = [{"role": "system", "content": "Be brief."}, user("Hi")]


def test_tools_follow_the_system_text_unless_the_template_shows_them(make):
    schema = json.dumps(WEATHER["function"]["parameters"])
    tails = {"V3-0324": "<｜Assistant｜>", "R1": "<｜Assistant｜><think>\n", "V3.1": "<｜Assistant｜></think>"}
    for name, tail in tails.items():
        renderer = make(CHECKPOINTS[name])
        shown = prompt(renderer, CHAT, TOOLS)
        assert shown.startswith(f"{BOS}Be brief.\n\n## Tools\n")
        assert f"\n\n### get_weather\nDescription: The weather.\n\nParameters: {schema}\n\n" in shown
        assert shown.endswith(f"<｜User｜>Hi{tail}")
        assert prompt(renderer, CHAT[1:], TOOLS).startswith(f"{BOS}## Tools\n")
        assert "Tools" not in prompt(renderer, CHAT)
    shown = prompt(make(tiny_template(".")), CHAT, TOOLS)
    assert shown.count("get_weather") == 1
    assert "You can call these tools:" in shown


@pytest.mark.parametrize("model", ["V3-0324", "R1", "V3.1", "tiny"])
def test_a_required_call_is_begun_in_the_prompt(make, model):
    renderer, is_raw = make(CHECKPOINTS[model]), model in ("V3.1", "tiny")
    begun = f"{CALLS_BEGIN}{CALL_BEGIN}" if is_raw else f"{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}"
    after_name = SEPARATOR if is_raw else "\n```json\n"
    for name, expected in (("", begun), ("get_weather", f"{begun}get_weather{after_name}")):
        asked = rendered(renderer, CHAT, ToolUse(tools=[WEATHER], required=True, name=name), thinking=True)
        assert asked.begun == expected
        assert asked.prompt.endswith(f"</think>{expected}" if model == "V3.1" else expected)
        assert asked.prompt.count("<think>") == asked.prompt.count("</think>")


def test_tools_that_can_not_be_shown_are_refused(make):
    required = ToolUse(tools=[WEATHER], required=True)
    for source, use, problem in (
        (PLAIN, TOOLS, "^tools: "),
        (None, TOOLS, "^tools: "),
        (OTHER, required, "^tool_choice: "),
    ):
        with pytest.raises(RequestError, match=problem) as caught:
            rendered(make(source), CHAT, use)
        assert caught.value.code is ErrorCode.UNSUPPORTED


def test_a_prefix_is_continued(make):
    messages = [user("Hi"), says("He</think>l", prefix=True)]
    tags = {"V3.1": "</think>", "tiny": "</think>"}
    for name, source in CHECKPOINTS.items():
        assert prompt(make(source), messages) == f"{BOS}<｜User｜>Hi<｜Assistant｜>{tags.get(name, '')}He</think>l"
    thought = f"{BOS}<｜User｜>Hi<｜Assistant｜><think></think>He</think>l"
    assert prompt(make(LIKE_V31), messages, thinking=True, enable_thinking=False) == thought
    with pytest.raises(RequestError, match="did you mean 'thinking'"):
        prompt(make(LIKE_V31), messages, thinkng=True)
    messages = [user("1"), says(None, tool_calls=[call("f", "{}")]), result("F", "f"), says("It", prefix=True)]
    assert prompt(make(LIKE_V31), messages).endswith(f"{given_back('F')[0]}It")


def test_the_system_alone_gets_the_beginning_of_an_answer(make):
    for renderer in (make(LIKE_V31), make(None, is_v32=True), make(LIKE_R1)):
        for thinking in ({}, {"thinking": True}):
            answered = prompt(renderer, CHAT, **thinking).replace("<｜User｜>Hi", "")
            assert prompt(renderer, CHAT[:1], **thinking) == answered


def test_templates_get_arguments_as_objects_and_the_last_reasoning(make):
    source = (
        "{{ tools | map(attribute='function') | map(attribute='name') | join if tools }}"
        "{% for m in messages %}{% for call in m.tool_calls or [] %}"
        "{{ call.function.name }}<｜tool▁sep｜>{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    messages = [user("Hi"), says(None, tool_calls=[call("f", '{"a": 1}'), call("g", "no JSON")])]
    assert prompt(make(source), messages) == f'f{SEPARATOR}{{"a": 1}}g{SEPARATOR}"no JSON"'
    source = "{% for m in messages %}{{ m.reasoning_content or '-' }}{% endfor %}"
    old, new = says("", reasoning="old"), says("", reasoning="new", tool_calls=[call("f", "{}")])
    assert prompt(make(source), [user("1"), old, user("2"), new, result("F", "f")]) == "---new-"


TEXTS = st.text(st.sampled_from('aö{}\n"\\<>｜▁/tool think7'), max_size=12)
MESSAGES = st.one_of(
    TEXTS.map(user),
    TEXTS.map(says),
    st.builds(lambda text, arguments: says(text, tool_calls=[call("f", arguments)]), TEXTS, TEXTS),
    st.builds(lambda text: {"role": "tool", "content": text}, TEXTS),
)


@pytest.mark.slow
@given(messages=st.lists(MESSAGES, min_size=1, max_size=6), source=st.sampled_from([LIKE_V3_0324, LIKE_R1, LIKE_V31]))
def test_every_text_of_calls_and_results_is_in_the_prompt_unchanged(tmp_path_factory, messages, source):
    engine = TemplateEngine(source, tmp_path_factory.getbasetemp())
    renderer = ChatRenderer(engine, find_chat_facts(engine, is_v32=False), eos_token=EOS)
    text = prompt(renderer, [says(None, tool_calls=[call("f", "")]), *messages])
    place = 0
    for message in messages:
        for part in [call["function"]["arguments"] or "{}" for call in message.get("tool_calls", [])]:
            assert (place := text.find(f"{part}", place)) >= 0
        if message["role"] == "tool":
            assert (place := text.find(f"{RESULT_BEGIN}{message['content']}{RESULT_END}", place)) >= 0


D = "｜DSML｜"
DSML_CALL = (
    f'\n\n<{D}function_calls>\n<{D}invoke name="get_weather">\n<{D}parameter name="city" string="true">Łódź "x"'
    f'</{D}parameter>\n<{D}parameter name="days" string="false">[1, 2]</{D}parameter>\n</{D}invoke>\n'
    f"</{D}function_calls>"
)


@pytest.mark.parametrize("thinking", [True, False])
def test_v32_without_a_template_is_rendered_as_its_own_program_does(make, thinking):
    renderer = make(None, is_v32=True)
    arguments = {"city": 'Łódź "x"', "days": [1, 2]}
    messages = [
        *CHAT,
        says("Hello.", reasoning_content="old"),
        user("And?"),
        says("Let me see.", reasoning_content="Hm.", tool_calls=[call("get_weather", arguments)]),
        result("4", "get_weather"),
    ]
    tag = "<think>" if thinking else "</think>"
    reasoning = "Hm.</think>" if thinking else ""
    text = prompt(renderer, messages, thinking=thinking)
    assert text == (
        f"{BOS}Be brief.<｜User｜>Hi<｜Assistant｜></think>Hello.{EOS}<｜User｜>And?<｜Assistant｜>{tag}{reasoning}"
        f"Let me see.{DSML_CALL}{EOS}\n\n<function_results>\n<result>4</result>\n</function_results>\n\n{tag}"
    )


def test_v32_shows_tools_and_begins_a_required_call(make):
    renderer = make(None, is_v32=True)
    asked = rendered(renderer, CHAT, ToolUse(tools=[WEATHER], required=True, name="get_weather"), thinking=True)
    begun = f'\n\n<{D}function_calls>\n<{D}invoke name="get_weather">\n'
    assert asked.begun == begun
    assert asked.prompt.startswith(f"{BOS}Be brief.\n\n## Tools\n\n")
    assert f"<functions>\n{json.dumps(WEATHER['function'])}\n</functions>\n<｜User｜>Hi" in asked.prompt
    assert asked.prompt.endswith(f"<think></think>{begun}")


def test_v32_refuses_what_it_can_not_write_and_continues_a_prefix(make):
    renderer = make(None, is_v32=True)
    for arguments in ("[1]", "no JSON"):
        with pytest.raises(RequestError, match=r"^messages\[1\]: expected a JSON object as arguments of f, got"):
            prompt(renderer, [user("Hi"), says(None, tool_calls=[call("f", arguments)])])
    with pytest.raises(RequestError, match=r"^chat_template_kwargs: .* no 'x'"):
        prompt(renderer, CHAT, x=1)
    with pytest.raises(RequestError, match=r"^chat_template_kwargs.thinking: expected true or false, got 1"):
        prompt(renderer, CHAT, thinking=1)
    text = prompt(make(None, is_v32=True), [user("Hi"), says("He", prefix=True)], thinking=True)
    assert text == f"{BOS}<｜User｜>Hi<｜Assistant｜><think></think>He"


def test_facts_without_a_form_leave_plain_chats_alone(make):
    assert make(PLAIN).facts == ChatFacts(form=None)
    assert prompt(make(PLAIN), CHAT) == f"{BOS}system: Be brief.\nuser: Hi\n"
