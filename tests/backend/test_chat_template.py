"""A checkpoint's chat template is rendered as transformers renders it."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from deepseek_backend.contract import ErrorCode
from deepseek_backend.engines.bounded_template import TemplateFailure
from deepseek_backend.engines.prompting import render_chat
from deepseek_backend.engines.reference.chat_template import ChatTemplate
from deepseek_backend.errors import EngineError, RequestError

CHAT = [{"role": "user", "content": "Hi <b>"}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": 'größer "als" <3'}}]


def template(folder: Path, source: Any, **config: Any) -> ChatTemplate:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": source, **config}))
    return ChatTemplate(folder)


CASES = [
    pytest.param("{{ messages[0].content }}", {}, "Hi <b>", id="nothing is escaped"),
    pytest.param("{% if true %}\n  a\n  {% endif %}\nb", {}, "  a\nb", id="blocks take their line with them"),
    pytest.param("{{ tools | tojson }}", {"tools": TOOLS}, json.dumps(TOOLS, ensure_ascii=False), id="JSON as it is"),
    pytest.param("{{ [1] | tojson(indent=1) }}", {}, "[\n 1\n]", id="JSON, indented"),
    pytest.param("{{ tools is none }} {{ documents is none }}", {}, "True True", id="nothing given"),
    pytest.param("{% for i in [1, 2] %}{{ i }}{% break %}{% endfor %}", {}, "1", id="break"),
    pytest.param("{{ add_generation_prompt }} {{ thinking }}", {"thinking": False}, "True False", id="variables"),
    pytest.param("{{ strftime_now('%Y') }}", {}, str(datetime.now().year), id="date"),
    pytest.param("{{ bos_token }}|{{ eos_token }}|{{ unk_token is defined }}", {}, "<s>|</s>|False", id="tokens"),
    pytest.param("{% set n = namespace(x=1) %}{% set n.x = 2 %}{{ n.x }}", {}, "2", id="namespace"),
]


@pytest.mark.parametrize(("source", "template_kwargs", "expected"), CASES)
def test_a_template_sees_what_it_needs(
    tmp_path: Path, source: str, template_kwargs: dict[str, Any], expected: str
) -> None:
    tokens = {"bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": "</s>", "unk_token": None}
    assert render_chat(template(tmp_path, source, **tokens), CHAT, template_kwargs) == expected


@pytest.mark.parametrize(("source", "template_kwargs", "expected"), CASES)
def test_transformers_renders_the_same(
    tmp_path: Path, source: str, template_kwargs: dict[str, Any], expected: str
) -> None:
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    rendered, _ = utilities.render_jinja_template(
        [CHAT], chat_template=source, add_generation_prompt=True, **tokens, **template_kwargs
    )
    assert rendered == [expected]


def test_a_file_of_its_own_counts_more(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert render_chat(template(tmp_path, "from the configuration"), CHAT, {}) == "from the file"


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    several = [{"name": "rag", "template": "a"}, {"name": "default", "template": "b"}]
    assert render_chat(template(tmp_path, several), CHAT, {}) == "b"
    with pytest.raises(RequestError, match="no chat template; send text_input") as caught:
        render_chat(template(tmp_path, several[:1]), CHAT, {})
    assert caught.value.code is ErrorCode.UNSUPPORTED


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{{ raise_exception('no such role') }}", "TemplateError: no such role"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError: .*unsafe"),
        ("{{ messages.append(1) }}", "SecurityError: .*"),
        ("{{ nothing.there }}", "UndefinedError: .*nothing"),
    ],
)
def test_what_a_template_raises_is_the_requests_error(tmp_path: Path, source: str, problem: str) -> None:
    with pytest.raises(RequestError, match=rf"^messages: the chat template refuses them: {problem}"):
        render_chat(template(tmp_path, source), CHAT, {})


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "add_generation_prompt", "conversation"])
def test_a_request_sets_no_argument_of_the_renderer(tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestError, match=rf"^chat_template_kwargs: {name} can't be set by a request$"):
        render_chat(template(tmp_path, "a"), CHAT, {name: "x"})


def test_a_wrong_template_is_found_at_load(tmp_path: Path) -> None:
    with pytest.raises(TemplateFailure, match=r"^TemplateSyntaxError: "):
        template(tmp_path, "{% if %}")
    with pytest.raises(EngineError, match=r"tokenizer_config.json: can't be read"):
        ChatTemplate(tmp_path / "nowhere")
