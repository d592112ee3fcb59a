"""The simulated engine's chat form and the random checkpoint's template make the same prompt of a conversation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from deepseek_backend.engines.generate_request import Messages
from deepseek_backend.engines.prompting import render_chat
from deepseek_backend.engines.reference.chat_template import ChatTemplate
from deepseek_backend.engines.simulated import chat_form
from deepseek_backend.errors import RequestError
from support.random_checkpoint import BOS, CHAT_TEMPLATE, EOS

Render = Callable[[Messages, Mapping[str, Any]], str]

FORMS = ("simulated", "checkpoint")

CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


@pytest.fixture(params=FORMS)
def render(request: pytest.FixtureRequest, tmp_path: Path) -> Render:
    if request.param == "simulated":
        return chat_form.render
    tokens = {"bos_token": BOS, "eos_token": EOS, "chat_template": CHAT_TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens))
    template = ChatTemplate(tmp_path)
    return lambda messages, template_kwargs: render_chat(template, messages, template_kwargs)


def says(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CONVERSATIONS = [
    pytest.param([says("user", "Hi")], {}, "<｜User｜>Hi<｜Assistant｜></think>", id="one turn"),
    pytest.param([says("user", "Hi")], {"thinking": True}, "<｜User｜>Hi<｜Assistant｜><think>", id="thinking"),
    pytest.param([says("user", "Hi")], {"thinking": False}, "<｜User｜>Hi<｜Assistant｜></think>", id="not thinking"),
    pytest.param(
        [says("system", "A"), says("user", "Hi"), says("system", "B"), says("user", "")],
        {},
        "A\n\nB<｜User｜>Hi<｜User｜><｜Assistant｜></think>",
        id="several system messages",
    ),
    pytest.param(
        [says("user", "Hi"), says("assistant", "<think>hm</think>yes</think>no"), says("user", "Why")],
        {},
        f"<｜User｜>Hi<｜Assistant｜></think>yes</think>no{EOS}<｜User｜>Why<｜Assistant｜></think>",
        id="earlier thinking",
    ),
    pytest.param(
        [says("user", "</think>"), says("assistant", "", tool_calls=[]), says("user", "{{ x }}")],
        {},
        f"<｜User｜></think><｜Assistant｜></think>{EOS}<｜User｜>{{{{ x }}}}<｜Assistant｜></think>",
        id="nothing to leave out",
    ),
]


@pytest.mark.parametrize(("messages", "template_kwargs", "expected"), CONVERSATIONS)
def test_both_write_a_conversation_as_deepseek_does(
    render: Render, messages: Messages, template_kwargs: dict[str, Any], expected: str
) -> None:
    assert render(messages, template_kwargs) == BOS + expected


@pytest.mark.parametrize("content", [None, "", "Let me see."])
def test_both_refuse_tool_calls_by_name(render: Render, content: str | None) -> None:
    with pytest.raises(RequestError, match="tool_calls are not in this template"):
        render([says("user", "Hi"), says("assistant", content, tool_calls=CALLS)], {})


@pytest.mark.parametrize("thinking", ["false", "true", 1, None])
def test_both_take_thinking_as_true_or_false_only(render: Render, thinking: object) -> None:
    with pytest.raises(RequestError, match="thinking: expected true or false"):
        render([says("user", "Hi")], {"thinking": thinking})


def test_both_refuse_other_roles_by_name(render: Render) -> None:
    with pytest.raises(RequestError, match=r"system, user(,| or) assistant, got '?tool"):
        render([says("tool", "4")], {})
