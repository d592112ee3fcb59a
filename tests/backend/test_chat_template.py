"""Chat templates: as transformers renders them, within bounds of memory and time, and those that the project writes."""

import fcntl
import json
import os
import signal
import sys
import termios
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from types import ModuleType, SimpleNamespace

import pytest

from deepseek_backend.contract import ErrorCode
from deepseek_backend.engines.bounded_template import TemplateFailure, TemplateProcess, transformers_bounded
from deepseek_backend.engines.prompting import render_chat
from deepseek_backend.engines.reference.checkpoint_loading import ChatTemplate
from deepseek_backend.engines.simulated.filler_text import render_chat_form
from deepseek_backend.errors import EngineError, RequestError
from support.waiting import PATIENCE_S, wait_for
from tiny_checkpoint.architecture import BOS, EOS

CHAT = [{"role": "user", "content": "Hi <b>"}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": 'größer "als" <3'}}]


def template(folder, source, **config):
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": source, **config}))
    return ChatTemplate(folder)


CASES = [  # a template, its arguments, and what it makes
    ("{{ messages[0].content }}", {}, "Hi <b>"),
    ("{% if true %}\n  a\n  {% endif %}\nb", {}, "  a\nb"),  # blocks take their line with them
    ("{{ tools | tojson }}", {"tools": TOOLS}, json.dumps(TOOLS, ensure_ascii=False)),
    ("{{ [1] | tojson(indent=1) }}", {}, "[\n 1\n]"),
    ("{{ tools is none }} {{ documents is none }}", {}, "True True"),
    ("{% for i in [1, 2] %}{{ i }}{% break %}{% endfor %}", {}, "1"),
    ("{{ add_generation_prompt }} {{ thinking }}", {"thinking": False}, "True False"),
    ("{{ strftime_now('%Y') }}", {}, str(datetime.now().year)),
    ("{{ bos_token }}|{{ eos_token }}|{{ unk_token is defined }}", {}, "<s>|</s>|False"),
    ("{% set n = namespace(x=1) %}{% set n.x = 2 %}{{ n.x }}", {}, "2"),
]


def test_a_template_sees_what_it_needs(tmp_path, subtests):
    tokens = {"bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": "</s>", "unk_token": None}
    for source, template_kwargs, expected in CASES:
        with subtests.test(source):
            assert render_chat(template(tmp_path, source, **tokens), CHAT, template_kwargs) == expected


def test_transformers_renders_the_same():
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
    for source, template_kwargs, expected in CASES:
        rendered, _ = utilities.render_jinja_template([CHAT], chat_template=source, **tokens, **template_kwargs)
        assert rendered == [expected]


def test_which_template_is_taken(tmp_path):
    several = [{"name": "rag", "template": "a"}, {"name": "default", "template": "b"}]
    assert render_chat(template(tmp_path, several), CHAT, {}) == "b"
    with pytest.raises(RequestError, match="no chat template; send text_input") as caught:
        render_chat(template(tmp_path, several[:1]), CHAT, {})
    assert caught.value.code is ErrorCode.UNSUPPORTED
    with pytest.raises(TemplateFailure, match=r"^TemplateSyntaxError: "):
        template(tmp_path, "{% if %}")
    with pytest.raises(EngineError, match=r"tokenizer_config.json: can't be read"):
        ChatTemplate(tmp_path / "nowhere")
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert render_chat(template(tmp_path, "from the configuration"), CHAT, {}) == "from the file"


def test_what_a_template_raises_is_the_requests_error(tmp_path):
    for source, problem in [
        ("{{ raise_exception('no such role') }}", "TemplateError: no such role"),
        ("{{ messages.append(1) }}", "SecurityError: .*"),
        ("{{ nothing.there }}", "UndefinedError: .*nothing"),
    ]:
        with pytest.raises(RequestError, match=rf"^messages: the chat template refuses them: {problem}"):
            render_chat(template(tmp_path, source), CHAT, {})
    wrong = [
        (["Hello"], {}, "TypeError: "),
        ([], {}, "ValueError: "),
        (CHAT, {"messages": []}, "TypeError: .*messages"),
        (CHAT, {"tools": [3]}, "ValueError: .*tools"),
    ]
    for messages, template_kwargs, problem in wrong:
        with pytest.raises(RequestError, match=rf"messages: the chat template refuses them: .*{problem}") as caught:
            render_chat(template(tmp_path, "{{ messages[0].content }}"), messages, template_kwargs)
        assert caught.value.code is ErrorCode.INVALID_ARGUMENT
        assert "\n" not in str(caught.value)


CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


def says(role, content, **more):
    return {"role": role, "content": content, **more}


CONVERSATIONS = [
    ([says("user", "Hi")], {}, "<｜User｜>Hi<｜Assistant｜></think>"),
    ([says("user", "Hi")], {"thinking": True}, "<｜User｜>Hi<｜Assistant｜><think>"),
    ([says("user", "Hi")], {"thinking": False}, "<｜User｜>Hi<｜Assistant｜></think>"),
    (
        [says("system", "A"), says("user", "Hi"), says("system", "B"), says("user", "")],
        {},
        "A\n\nB<｜User｜>Hi<｜User｜><｜Assistant｜></think>",
    ),
    (  # earlier thinking is left out
        [says("user", "Hi"), says("assistant", "<think>hm</think>yes</think>no"), says("user", "Why")],
        {},
        f"<｜User｜>Hi<｜Assistant｜></think>yes</think>no{EOS}<｜User｜>Why<｜Assistant｜></think>",
    ),
    (
        [says("user", "</think>"), says("assistant", "", tool_calls=[]), says("user", "{{ x }}")],
        {},
        f"<｜User｜></think><｜Assistant｜></think>{EOS}<｜User｜>{{{{ x }}}}<｜Assistant｜></think>",
    ),
]


def test_the_simulated_engine_writes_a_conversation_as_deepseek_does():
    for messages, template_kwargs, expected in CONVERSATIONS:
        assert render_chat_form(messages, template_kwargs) == BOS + expected


def test_the_simulated_engine_refuses_what_has_no_form():
    refused = [
        *(([says("assistant", content, tool_calls=CALLS)], {}, "tool_calls") for content in (None, "", "Let me see.")),
        *(([], {"thinking": value}, "thinking: expected true or false") for value in ("false", "true", 1, None)),
        ([says("tool", "4")], {}, r"messages\[1\].role: expected one of system, user, assistant, got 'tool'"),
        ([], {"thinking": True, "tools": []}, "chat_template_kwargs: .* no 'tools'"),
    ]
    for messages, template_kwargs, said in refused:
        with pytest.raises(RequestError, match=said):
            render_chat_form([says("user", "Hi"), *messages], template_kwargs)


LOOP = "{% for a in range(99999) %}"
ENDLESS = LOOP * 3 + "{% endfor %}" * 3


@pytest.fixture(scope="module")
def process():
    bounded = TemplateProcess(memory_mib=512, processor_s=1)
    yield bounded
    bounded.close()


def after(process):
    return process.render("{{ messages[0] }}", {"messages": ["well"]})


WANTS_GIGABYTES = [
    "{{ 'a' * 10 ** 10 }}",
    "{{ n * 10 ** 10 }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ 'a'.ljust(10000000000) }}",
    "{% set s = namespace(t='a') %}{% for i in range(60) %}{% set s.t = s.t ~ s.t %}{% endfor %}{{ s.t }}",
    "{{ [0] * 10 ** 10 }}",
]


@pytest.mark.slow
def test_a_template_that_wants_gigabytes_or_recurses_is_refused(process, subtests):
    for source in WANTS_GIGABYTES:
        with subtests.test(source):
            with pytest.raises(TemplateFailure, match=r"^(it needs more than 512 MiB|MemoryError: |OverflowError: )"):
                process.render(source, {"n": "a"})
            assert after(process) == "well"
    with pytest.raises(TemplateFailure, match=r"^RecursionError: "):
        process.render("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", {})
    assert after(process) == "well"


@pytest.mark.slow
def test_a_template_without_an_end_is_ended(process):
    for source in (ENDLESS, "{{ 10 ** (10 ** 8) }}"):
        with pytest.raises(TemplateFailure, match=r"^it took more than 1 s of the processor$"):
            process.render(source, {"n": 10})
        assert after(process) == "well"


@pytest.mark.slow
def test_the_process_is_started_again_and_gets_no_secret(process, monkeypatch):
    after(process)
    child = process._process
    child.kill()
    child.wait()
    assert after(process) == "well"
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fresh = TemplateProcess()
    after(fresh)
    child = fresh._process
    with open(f"/proc/{child.pid}/environ", "rb") as stream:
        assert b"hf_secret" not in stream.read()
    fresh.close()
    assert not os.path.exists(f"/proc/{child.pid}")


def test_a_request_in_a_process_that_is_killed_is_rendered_in_the_next(process):
    """The kernel kills it when memory is short. Whoever finds it dead before it asks has the test above."""
    after(process)
    child = process._process
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)  # or it takes the request on its way to the stop
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(after, process)
        try:
            wait_for(lambda: any(fcntl.ioctl(child.stdin, termios.FIONREAD, bytes(4))))  # the request is in the pipe
        finally:  # or the pool would wait for ever
            os.kill(child.pid, signal.SIGKILL)
        assert answer.result(PATIENCE_S) == "well"


OUT_OF_THE_SANDBOX = [
    "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ raise_exception.__globals__['sys'].modules }}",
    "{{ ('{0.__class__.__init__.__globals__}').format(cycler) }}",
    "{{ lipsum.__globals__.os }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
]


def test_a_template_reaches_neither_files_nor_code(process, subtests):
    for source in OUT_OF_THE_SANDBOX:
        with (
            subtests.test(source),
            pytest.raises(TemplateFailure, match=r"^(SecurityError|UndefinedError|TypeError): "),
        ):
            process.render(source, {"messages": []})


@pytest.mark.slow
def test_texts_of_any_kind_and_length_come_back_as_they_went(process):
    text = "\n".join(["größer", "\u2028", "\x00", "𝕏", "\ud800", '"', "\\"])
    assert process.render("{{ text }}", {"text": text}) == text
    bounded = TemplateProcess(most_bytes=1000)
    with pytest.raises(TemplateFailure, match=r"^expected a prompt of at most 1,000 bytes, got 3,000$"):
        bounded.render("{{ 'a' * 3000 }}", {})
    assert after(bounded) == "well"
    bounded.close()


def test_many_threads_may_render_at_once(process):
    with ThreadPoolExecutor(20) as threads:
        rendered = list(threads.map(lambda number: process.render("{{ n }}", {"n": number}), range(20)))
    assert rendered == list(map(str, range(20)))


class OfTransformers:
    """A tokenizer that renders as those of transformers do."""

    def __init__(self, utilities, source):
        self.utilities, self.source = utilities, source

    def apply_chat_template(self, conversation, *, tokenize, **values):
        return str(self.utilities._compile_jinja_template(self.source).render(messages=conversation, **values))


@pytest.mark.slow
def test_templates_of_transformers_are_bounded_too(monkeypatch):
    utilities = ModuleType("transformers.utils.chat_template_utils")
    compiled_here = []
    own = SimpleNamespace(render=lambda **_: "in this process")
    utilities._compile_jinja_template = lambda source: compiled_here.append(source) or own
    monkeypatch.setitem(sys.modules, utilities.__name__, utilities)
    chat = [{"role": "user", "content": "Hi"}]
    assert render_chat(OfTransformers(utilities, "{{ messages[0].content }}"), chat, {}) == "Hi"
    refusal = r"^messages: the chat template refuses them: it needs more than 2048 MiB of memory"
    with pytest.raises(RequestError, match=refusal):
        render_chat(OfTransformers(utilities, "{{ 'a' * 9000000000 }}"), chat, {})
    with transformers_bounded():
        pass
    assert utilities._compile_jinja_template("x").render() == "in this process"  # whoever else uses transformers
    assert compiled_here == ["x"]
