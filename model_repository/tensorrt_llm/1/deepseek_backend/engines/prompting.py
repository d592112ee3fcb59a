"""Prompts in every engine: rendering a conversation, making token ids and checking their number.

What renders a chat is TensorRT-LLM's tokenizer, which wraps one of transformers, vLLM's, which is one, or the reference
engine's template.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

from deepseek_backend.contract import ErrorCode
from deepseek_backend.engines.bounded_template import TemplateFailure, transformers_bounded
from deepseek_backend.engines.generate_request import GenerateRequest, Messages
from deepseek_backend.errors import RequestError, describe

_TEMPLATE_DATA = {"tools", "documents"}
"""Arguments of apply_chat_template that the template itself reads; the others control the library."""
# Further ones of transformers, which no engine takes from a request: it means the same everywhere.
_CONTROLS = {"chat_template", "continue_final_message", "return_dict", "return_tensors", "tokenizer_kwargs"}
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token")
"""Names of the special tokens that a client may ask for, as tokenizer_config.json has them."""
NO_CHAT_TEMPLATE = "chat_template is not set"
"""Part of the message of transformers' ValueError."""


def render_chat(tokenizer: Any, messages: Messages, template_kwargs: Mapping[str, Any]) -> str:
    """Return the prompt that the tokenizer's chat template makes of `messages`; it ends where the answer begins.

    :raises RequestError: when the template refuses the conversation; E_UNSUPPORTED where there is no template.
    """
    # A client must not set these. chat_template, for example, is a program that would run here.
    # Those of the wrapped tokenizer count too, to which the wrapper passes on what it does not know, as does a method
    # that overrides another, such as those of vLLM.
    classes = {*type(tokenizer).__mro__, *type(unwrapped(tokenizer)).__mro__}
    methods = [vars(one)["apply_chat_template"] for one in classes if "apply_chat_template" in vars(one)]
    named = {name for method in methods for name in inspect.signature(method).parameters}
    reserved = sorted(((named | _CONTROLS) - _TEMPLATE_DATA) & template_kwargs.keys())
    if reserved:
        raise RequestError(f"chat_template_kwargs: {', '.join(reserved)} can't be set by a request")
    try:
        with transformers_bounded():
            text = tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **template_kwargs
            )
    except TemplateFailure as error:
        raise RequestError(f"messages: the chat template refuses them: {error}") from error
    except Exception as error:
        # The checkpoint's own template may raise anything.
        # Only the error tells. A look for a template would be wrong: DeepSeek-V3.2's tokenizer has code instead of one.
        if isinstance(error, ValueError) and NO_CHAT_TEMPLATE in str(error):
            raise RequestError(
                "messages: the checkpoint has no chat template; send text_input, written the way the model expects",
                code=ErrorCode.UNSUPPORTED,
            ) from error
        raise RequestError(f"messages: the chat template refuses them: {describe(error)}") from error
    return str(text)


def unwrapped(tokenizer: Any) -> Any:
    """Return the tokenizer of transformers. TensorRT-LLM's wrapper does not offer all of its methods."""
    return getattr(tokenizer, "tokenizer", tokenizer)


def prompt_token_ids(
    request: GenerateRequest, encode: Callable[[str, bool], Sequence[int]], vocab_size: int | None
) -> Sequence[int]:
    """Return the prompt of `request` in token ids, cut to the last truncate_prompt_tokens.

    :param encode: makes token ids of a text, with special tokens around it or without.
    :param vocab_size: None where it is not known.
    :raises RequestError: for an id without a token; on a GPU it would end every request.
    """
    sampling = request.sampling
    if request.prompt_token_ids is None:
        make = partial(encode, request.prompt, sampling.add_special_tokens is not False)
        token_ids = make() if request.shared_token_ids is None else request.shared_token_ids.get(make)
    else:
        token_ids = request.prompt_token_ids
        check_ids(token_ids, vocab_size)
    return last_tokens(token_ids, sampling.truncate_prompt_tokens)


def last_tokens(tokens: Sequence[Any], most: int | None) -> Sequence[Any]:
    """Return the last `most` of `tokens`; all of them for None."""
    return tokens if most is None else tokens[-most:]


def check_prompt_length(num_tokens: int, most: int, *, limit: str = "max_seq_len") -> None:
    """Refuse a prompt without a token, and one that leaves no room for an answer.

    :param limit: name of the setting that `most` comes from.
    :raises RequestError: E_PROMPT_TOO_LONG for the longer one.
    """
    if num_tokens == 0:
        raise RequestError("the prompt has no tokens; give some text, or leave add_special_tokens on")
    if num_tokens > most:
        raise RequestError(
            f"the prompt has {num_tokens:,} tokens and at most {most:,} fit before the answer; "
            f"shorten it, let truncate_prompt_tokens cut it, or serve with a larger {limit}",
            code=ErrorCode.PROMPT_TOO_LONG,
        )


def bos_token(encode: Callable[[str, bool], Sequence[int]], decode: Callable[[Sequence[int]], str]) -> str:
    """Return the text that a tokenizer puts before a prompt; "" for none.

    :param encode: makes token ids of a text, with special tokens around it or without.
    :param decode: makes text of token ids, with special tokens.
    """
    plain = encode("a", False)
    return decode(list(takewhile(lambda token_id: token_id not in plain, encode("a", True))))


def check_ids(token_ids: Iterable[int], vocab_size: int | None, *, field: str = "input_ids") -> None:
    """Refuse ids that no token has.

    :param field: where the request has them.
    :raises RequestError: with the id.
    """
    for token_id in token_ids:
        if token_id < 0 or (vocab_size is not None and token_id >= vocab_size):
            expected = "from 0" if vocab_size is None else f"from 0 to {vocab_size - 1}"
            raise RequestError(f"{field}: expected token ids {expected}, got {token_id}")


class PromptTokenizer:
    """Wraps the tokenizer of TensorRT-LLM or vLLM. Any thread may use it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        """Token id -> its text. With logprobs, 20 tokens are looked up for each generated one."""

    @property
    def bos_token(self) -> str:
        """Text that `prompt_token_ids` puts before a prompt; "" for none."""
        return bos_token(self.encode, lambda ids: self.decode(ids, skip_special_tokens=False))

    @property
    def vocab_size(self) -> int | None:
        inner = unwrapped(self._tokenizer)
        return len(inner) if hasattr(inner, "__len__") else None

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Texts of bos_token, eos_token and pad_token, as far as there are such."""
        inner = unwrapped(self._tokenizer)
        return {name: str(text) for name in SPECIAL_TOKENS if (text := getattr(inner, name, None))}

    @property
    def chat_template(self) -> str | None:
        """Text of the chat template; None where there is none, or code in its place."""
        template = getattr(unwrapped(self._tokenizer), "chat_template", None)
        if isinstance(template, dict):  # several by name
            template = template.get("default")
        return template if isinstance(template, str) else None

    def max_prompt_bytes(self, max_seq_len: int) -> int | None:
        """Return the bytes of the longest possible prompt; None where the tokenizer does not give its vocabulary."""
        inner = unwrapped(self._tokenizer)
        if not hasattr(inner, "get_vocab"):
            return None
        return max_seq_len * max(len(token.encode()) for token in inner.get_vocab())

    def prompt_token_ids(self, request: GenerateRequest) -> list[int]:
        """Return the prompt in token ids, cut to truncate_prompt_tokens: the engines cut only prompts that are text.

        :raises RequestError: for an id without a token.
        """
        return list(prompt_token_ids(request, self.encode, self.vocab_size))

    def render_chat(self, messages: Messages, template_kwargs: Mapping[str, Any]) -> str:
        """Render a conversation, as Engine.render_chat does."""
        return render_chat(self._tokenizer, messages, template_kwargs)

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
