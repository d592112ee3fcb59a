"""The engine's own tokenizer, for prompts, conversations and the text of single tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deepseek_backend.engines import prompting
from deepseek_backend.engines.generate_request import GenerateRequest, Messages


class PromptTokenizer:
    """Wraps the tokenizer of TensorRT-LLM or vLLM. Any thread may use it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        """Token id -> its text. With logprobs, 20 tokens are looked up for each generated one."""

    @property
    def bos_token(self) -> str:
        """Text that `prompt_token_ids` puts before a prompt; "" for none."""
        return prompting.bos_token(self.encode, lambda ids: self.decode(ids, skip_special_tokens=False))

    @property
    def vocab_size(self) -> int | None:
        inner = prompting.unwrapped(self._tokenizer)
        return len(inner) if hasattr(inner, "__len__") else None

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Texts of bos_token, eos_token and pad_token, as far as there are such."""
        inner = prompting.unwrapped(self._tokenizer)
        return {name: str(text) for name in prompting.SPECIAL_TOKENS if (text := getattr(inner, name, None))}

    @property
    def chat_template(self) -> str | None:
        """Text of the chat template; None where there is none, or code in its place."""
        template = getattr(prompting.unwrapped(self._tokenizer), "chat_template", None)
        if isinstance(template, dict):  # several by name
            template = template.get("default")
        return template if isinstance(template, str) else None

    def max_prompt_bytes(self, max_seq_len: int) -> int | None:
        """Return the bytes of the longest possible prompt; None where the tokenizer does not give its vocabulary."""
        inner = prompting.unwrapped(self._tokenizer)
        if not hasattr(inner, "get_vocab"):
            return None
        return max_seq_len * max(len(token.encode()) for token in inner.get_vocab())

    def prompt_token_ids(self, request: GenerateRequest) -> list[int]:
        """Return the prompt in token ids, cut to truncate_prompt_tokens: the engines cut only prompts that are text.

        :raises RequestError: for an id without a token.
        """
        return list(prompting.prompt_token_ids(request, self.encode, self.vocab_size))

    def word_token_ids(self, word: str) -> list[int]:
        """Return a word in token ids, without the special tokens that begin a prompt."""
        return self.encode(word, add_special_tokens=False)

    def render_chat(self, messages: Messages, template_kwargs: Mapping[str, Any]) -> str:
        """Render a conversation, as Engine.render_chat does."""
        return prompting.render_chat(self._tokenizer, messages, template_kwargs)

    def text(self, token_id: int) -> str:
        """Return the text of one token alone; U+FFFD stands for a part of a character."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = str(self._tokenizer.decode([token_id], skip_special_tokens=False))
        return text

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of all of them; U+FFFD stands for a character whose last bytes are missing."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
