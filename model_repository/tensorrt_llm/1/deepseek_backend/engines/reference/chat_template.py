"""A checkpoint's chat template, rendered by jinja2 as transformers does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepseek_backend.engines.bounded_template import render_template
from deepseek_backend.engines.prompting import NO_CHAT_TEMPLATE
from deepseek_backend.engines.reference.deepseek_config import read_json

_FILE = "chat_template.jinja"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """The template in a checkpoint's chat_template.jinja, or else in its tokenizer_config.json.

    `apply_chat_template` has transformers' name for it, because `prompting.render_chat` also takes the tokenizer of
    TensorRT-LLM, which is transformers'.
    """

    def __init__(self, folder: Path) -> None:
        """Compile the template.

        :raises EngineError: when tokenizer_config.json can't be read.
        :raises TemplateFailure: when the template is wrong.
        """
        config = read_json(folder / "tokenizer_config.json")
        source = config.get("chat_template")
        if (folder / _FILE).is_file():
            source = (folder / _FILE).read_text(encoding="utf-8")
        if isinstance(source, list):  # several by name
            source = {one["name"]: one["template"] for one in source}.get("default")
        self.source: str | None = source
        if source is not None:
            render_template(source, None)
        self.special_tokens = {name: token for name in _SPECIAL_TOKENS if (token := _token(config.get(name)))}

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **template_kwargs: Any,
    ) -> str:
        """Return the conversation as a prompt. It is always text: `tokenize` is False.

        :raises ValueError: when there is no template, no message, or a tool that is not an object.
        :raises TemplateFailure: when it can't be rendered.
        """
        if self.source is None:
            raise ValueError(NO_CHAT_TEMPLATE)
        if not conversation:
            raise ValueError("expected at least one message, got an empty list")
        if not all(isinstance(message, Mapping) for message in conversation):
            raise TypeError("expected each message to be an object with a role and a content")
        if tools is not None and not all(isinstance(tool, Mapping) for tool in tools):
            raise ValueError("expected each of the tools to be an object, the JSON schema of a function")
        values = dict(
            **self.special_tokens,
            messages=conversation,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            **template_kwargs,
        )
        return render_template(self.source, values)


def _token(given: Any) -> str:
    """Return a special token's text; a configuration may also give an object with its flags."""
    return str(given.get("content", "")) if isinstance(given, dict) else given or ""
