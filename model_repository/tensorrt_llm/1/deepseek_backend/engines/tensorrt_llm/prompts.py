"""The LLM's tokenizer as the engine uses it: prompts into token ids, conversations into prompts, tokens into text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deepseek_backend.engines import prompting
from deepseek_backend.engines.generate_request import GenerateRequest, Messages


class PromptTokenizer:
    """Around LLM.tokenizer. Safe from any thread."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        """Token id -> its text: with logprobs 20 tokens are looked up for each one generated."""

    @property
    def bos_token(self) -> str:
        """What `prompt_token_ids` puts before a text; "" where it is nothing."""
        return prompting.bos_token(self._tokenizer)

    def prompt_token_ids(self, request: GenerateRequest) -> list[int]:
        """The prompt in token ids, cut to truncate_prompt_tokens: TensorRT-LLM cuts prompts in text only.

        :raises RequestError: for an id that the model has no token for.
        """
        inner = prompting.unwrapped(self._tokenizer)
        vocab_size = len(inner) if hasattr(inner, "__len__") else None
        return list(prompting.prompt_token_ids(request, self._encode, vocab_size))

    def render_chat(self, messages: Messages, template_kwargs: Mapping[str, Any]) -> str:
        """As Engine.render_chat."""
        return prompting.render_chat(self._tokenizer, messages, template_kwargs)

    def text(self, token_id: int) -> str:
        """One token by itself; a part of a character is U+FFFD."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = str(self._tokenizer.decode([token_id], skip_special_tokens=False))
        return text

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """All of them together; U+FFFD stands for a character whose last bytes are missing."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
