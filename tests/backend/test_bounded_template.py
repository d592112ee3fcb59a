"""A chat template runs within bounds of memory and time, and what it does is no harm to the server."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from deepseek_backend.engines.bounded_template import TemplateFailure, TemplateProcess, transformers_bounded
from deepseek_backend.engines.prompting import render_chat
from deepseek_backend.errors import RequestError

LOOP = "{% for a in range(99999) %}"
ENDLESS = LOOP * 3 + "{% endfor %}" * 3


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    bounded = TemplateProcess(memory_mib=512, processor_s=1)
    yield bounded
    bounded.close()


def after(process: TemplateProcess) -> str:
    return process.render("{{ messages[0] }}", {"messages": ["well"]})


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 10 }}",
        "{{ n * 10 ** 10 }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ 'a'.ljust(10000000000) }}",
        "{% set s = namespace(t='a') %}{% for i in range(60) %}{% set s.t = s.t ~ s.t %}{% endfor %}{{ s.t }}",
        "{{ [0] * 10 ** 10 }}",
    ],
)
def test_a_template_that_wants_gigabytes_is_refused(process: TemplateProcess, source: str) -> None:
    with pytest.raises(
        TemplateFailure, match=r"^(it needs more than 512 MiB of memory|MemoryError: .*|OverflowError: .*)$"
    ):
        process.render(source, {"n": "a"})
    assert after(process) == "well"


@pytest.mark.slow
@pytest.mark.parametrize(
    "source", [ENDLESS, "{{ 10 ** (10 ** 8) }}", "{{ n ** (n ** 8) }}"], ids=["loop", "compile", "power"]
)
def test_a_template_without_an_end_is_ended(process: TemplateProcess, source: str) -> None:
    with pytest.raises(TemplateFailure, match=r"^it took more than 1 s of the processor$"):
        process.render(source, {"n": 10})
    assert after(process) == "well"


def test_a_template_that_recurses_is_refused(process: TemplateProcess) -> None:
    with pytest.raises(TemplateFailure, match=r"^RecursionError: "):
        process.render("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", {})
    assert after(process) == "well"


def test_a_prompt_has_at_most_so_many_bytes() -> None:
    bounded = TemplateProcess(most_bytes=1000)
    with pytest.raises(TemplateFailure, match=r"^expected a prompt of at most 1,000 bytes, got 3,000$"):
        bounded.render("{{ 'a' * 3000 }}", {})
    assert after(bounded) == "well"
    bounded.close()


def test_a_killed_process_is_started_again(process: TemplateProcess) -> None:
    after(process)
    child = process._process
    assert child is not None
    child.kill()
    child.wait()
    assert after(process) == "well"


def test_the_process_gets_no_secret_and_no_files(process: TemplateProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fresh = TemplateProcess()
    after(fresh)
    child = fresh._process
    assert child is not None
    with open(f"/proc/{child.pid}/environ", "rb") as stream:
        assert b"hf_secret" not in stream.read()
    fresh.close()
    assert not os.path.exists(f"/proc/{child.pid}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['sys'].modules }}",
        "{{ ('{0.__class__.__init__.__globals__}').format(cycler) }}",
        "{{ lipsum.__globals__.os }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_a_template_reaches_neither_files_nor_code(process: TemplateProcess, source: str) -> None:
    with pytest.raises(TemplateFailure, match=r"^(SecurityError|UndefinedError|TypeError): .*"):
        process.render(source, {"messages": []})


def test_texts_of_any_kind_come_back_as_they_went(process: TemplateProcess) -> None:
    text = "\n".join(["größer", "\u2028", "\x00", "𝕏", "\ud800", '"', "\\"])
    assert process.render("{{ text }}", {"text": text}) == text


def test_many_threads_may_render_at_once(process: TemplateProcess) -> None:
    got: dict[int, str] = {}

    def render(number: int) -> None:
        got[number] = process.render("{{ n }}", {"n": number})

    threads = [threading.Thread(target=render, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {number: str(number) for number in range(20)}


class OfTransformers:
    """A tokenizer that renders as those of transformers do."""

    def __init__(self, utilities: Any, source: str) -> None:
        self.utilities, self.source = utilities, source

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, **values: Any) -> str:
        return str(self.utilities._compile_jinja_template(self.source).render(messages=conversation, **values))


def test_templates_of_transformers_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    utilities: Any = ModuleType("transformers.utils.chat_template_utils")
    compiled_here: list[str] = []

    class Compiled:
        def render(self, **values: Any) -> str:
            return "in this process"

    def compile_template(source: str) -> Compiled:
        compiled_here.append(source)
        return Compiled()

    utilities._compile_jinja_template = compile_template
    monkeypatch.setitem(sys.modules, utilities.__name__, utilities)

    chat = [{"role": "user", "content": "Hi"}]
    assert render_chat(OfTransformers(utilities, "{{ messages[0].content }}"), chat, {}) == "Hi"
    with pytest.raises(
        RequestError, match=r"^messages: the chat template refuses them: it needs more than 2048 MiB of memory"
    ):
        render_chat(OfTransformers(utilities, "{{ 'a' * 9000000000 }}"), chat, {})
    with transformers_bounded():
        pass
    assert utilities._compile_jinja_template("x").render() == "in this process"  # whoever else uses transformers
    assert compiled_here == ["x"]


def test_the_real_transformers_is_bounded(tmp_path: Any) -> None:
    pytest.importorskip("transformers.utils.chat_template_utils")
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast  # type: ignore[import-not-found]

    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    tokenizer.chat_template = "{% generation %}{{ messages[0].content }}{% endgeneration %}{{ tools | tojson }}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = [{"role": "user", "content": "Hi"}]
    assert render_chat(tokenizer, chat, {"tools": tools}) == "Hi" + json.dumps(tools)
    tokenizer.chat_template = "{{ 'a' * 9000000000 }}"
    with pytest.raises(RequestError, match=r"it needs more than 2048 MiB of memory"):
        render_chat(tokenizer, chat, {})
