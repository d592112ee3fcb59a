"""Filler text, made without a model: a tokenizer that only splits text, and a small vocabulary.

Prompt and seed fix the tokens of a request, so that its text is the same in every batch, process and run. A prompt that
ends inside <think> gets a </think>, at a position that also depends on the request's length. A prompt may also dictate
its answer.
"""

import hashlib
import random
import re
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from deepseek_backend.engines.generate_request import Messages
from deepseek_backend.engines.tags import CLOSING, OPENING
from deepseek_backend.errors import RequestError
from deepseek_backend.field_values import listed, quoted

EOS_ID = 1
"""Id of the end token. SPECIAL_TOKENS have the same ids as in DeepSeek's vocabulary."""

SPECIAL_TOKENS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
BOS, EOS = SPECIAL_TOKENS

_WORDS = """
the a of to and in is that it for as with on by this be at from or one all we can more if so what about into some could
time them other then now only new way may first also after back work year make well even want because any these give
most day us between think over know take people see look come good than its just model token layer expert cache latent
head batch prompt stream memory weight gate route draft accept prefill decode step queue block page rank tensor query
key value score soft max norm scale embed logit sample text word sentence answer question reason proof number sum prime
square root even odd limit series point line plane angle circle matrix vector field group ring graph tree node edge path
café naïve façade über señor Ærø Łódź Москва
"""
_UNSPACED = [
    *"的一是在有和不这中大为上个国我以要他时来用们",
    *("模型", "推理", "专家", "注意力", "缓存", "词元", "北京", "你好"),
]
_UNSPACED += [",", ".", ".\n\n", ";", ":", "-", "?", "!", "\n", "。", ",", " 🚀", " 🧠", " ✨", " 👩‍💻", " 🇨🇳"]

_ORDINARY_TOKENS = (*(f" {word}" for word in _WORDS.split()), *_UNSPACED)
ORDINARY_IDS = range(len(SPECIAL_TOKENS), len(SPECIAL_TOKENS) + len(_ORDINARY_TOKENS))
"""Ids of the tokens that filler text is made of."""

VOCABULARY: tuple[str, ...] = (*SPECIAL_TOKENS, *_ORDINARY_TOKENS, OPENING, CLOSING)
"""Token id -> text. As in DeepSeek's vocabulary, the reasoning tags are no special tokens."""

CLOSING_ID = VOCABULARY.index(CLOSING)

_IDS = {text: token_id for token_id, text in enumerate(VOCABULARY)}
_DEEPSEEK_VOCABULARY_SIZE = 129280
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"

_SINGLES = [(token_id,) for token_id in range(len(VOCABULARY))]

_TAPE_LENGTH = 1 << 16
_MASK = _TAPE_LENGTH - 1
_draw = random.Random(61)
_TAPE = [_draw.randrange(ORDINARY_IDS.start, ORDINARY_IDS.stop) for _ in range(_TAPE_LENGTH)]

# A word with the space before it (a long one in pieces), three digits, or one character. A real tokenizer splits
# English, Chinese and numbers into about as many tokens.
_TOKEN = re.compile(
    r"<｜[^｜]{1,32}｜>|</?think>|[ ]?[^\W\d_\u2e80-\U0003ffff]{1,8}|\d{1,3}|[ ]?[^\w\s]|\s+|.", re.DOTALL
)
_USER, _ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
_ROLES = ("system", "user", "assistant")


def split_prompt(prompt: str, *, add_special_tokens: bool) -> list[str]:
    """Return the texts of the prompt's tokens; at least one, because a model needs a token to start from."""
    tokens: list[str] = _TOKEN.findall(prompt)
    if add_special_tokens or not tokens:
        tokens.insert(0, BOS)
    return tokens


def id_of(text: str) -> int:
    """Return the token's id. A text that is not in the vocabulary has an id beyond it, always the same one."""
    token_id = _IDS.get(text)
    if token_id is not None:
        return token_id
    size = len(VOCABULARY)
    return size + zlib.crc32(text.encode(errors="surrogatepass")) % (_DEEPSEEK_VOCABULARY_SIZE - size)


def text_of(token_id: int) -> str:
    """Return the token's text; U+FFFD for an id that only a real tokenizer knows."""
    return VOCABULARY[token_id] if token_id < len(VOCABULARY) else _UNKNOWN


class FillerTokenizer:
    """A `ModelTokenizer` of filler text. It has text only for the ids of its small vocabulary."""

    chat_template: str | None = None
    special_tokens: Mapping[str, str] = MappingProxyType({"bos_token": BOS, "eos_token": EOS})
    vocab_size = _DEEPSEEK_VOCABULARY_SIZE

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [id_of(token) for token in split_prompt(text, add_special_tokens=add_special_tokens)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        hidden = len(SPECIAL_TOKENS) if skip_special_tokens else 0
        return "".join(text_of(token_id) for token_id in token_ids if token_id >= hidden)


@dataclass(frozen=True, slots=True)
class Script:
    """All tokens that a request may generate: a walk over the tape."""

    start: int
    """Position of the first token on the tape."""
    stride: int
    """Step of the walk; it is odd, so that the walk covers the whole tape before it repeats."""
    closes_at: int = -1
    """Index at which a </think> replaces the tape's token; -1 for none."""

    def read(self, first: int, end: int) -> tuple[tuple[int, ...], str]:
        """Return ids and text of the tokens from `first` up to `end`."""
        if end - first == 1:  # nearly every call is for a single token
            token_id = CLOSING_ID if first == self.closes_at else _TAPE[(self.start + first * self.stride) & _MASK]
            return _SINGLES[token_id], VOCABULARY[token_id]
        ids = [_TAPE[(self.start + index * self.stride) & _MASK] for index in range(first, end)]
        if first <= self.closes_at < end:
            ids[self.closes_at - first] = CLOSING_ID
        return tuple(ids), "".join([VOCABULARY[token_id] for token_id in ids])


@dataclass(frozen=True, slots=True)
class Dictation:
    """An answer that the prompt itself says, for tests of what is made of answers: a `Script` of given tokens."""

    texts: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.texts)

    def read(self, first: int, end: int) -> tuple[tuple[int, ...], str]:
        """Return ids and text of the tokens from `first` up to `end`; after the last one come end tokens."""
        texts = self.texts[first:end]
        return (*map(id_of, texts), *[EOS_ID] * (end - first - len(texts))), "".join(texts)


def dictation(prompt: str) -> Dictation | None:
    """Return the answer between the prompt's last <answer> and the </answer> after it; None where there is none."""
    _, opening, rest = prompt.rpartition("<answer>")
    answer, closing, _ = rest.partition("</answer>")
    return Dictation(tuple(_TOKEN.findall(answer))) if opening and closing else None


def write_script(prompt: str | Sequence[int], seed: int | None = None, *, closes_at: int = -1) -> Script:
    """Return the script for a prompt, which is text or token ids; None for `seed` means greedy decoding."""
    salt = "" if seed is None else str(seed)
    content = prompt.encode(errors="surrogatepass") if isinstance(prompt, str) else array("q", prompt).tobytes()
    digest = hashlib.blake2b(f"{salt}\0".encode() + content, digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    return Script(number & _MASK, (number >> 16) & _MASK | 1, closes_at)


def render_chat_form(messages: Messages, template_kwargs: Mapping[str, Any]) -> str:
    """Return the prompt: all system messages, then the turns, up to where the answer begins.

    :raises RequestError: for an unknown role or argument, and for tool calls.
    """
    if unknown := [name for name in template_kwargs if name != "thinking"]:
        raise RequestError(
            f"chat_template_kwargs: the simulated engine's chat form has no {listed(unknown)}; it knows thinking"
        )
    thinking = template_kwargs.get("thinking", False)
    if not isinstance(thinking, bool):
        raise RequestError(f"chat_template_kwargs.thinking: expected true or false, got {quoted(thinking)}")
    turns = ""
    for position, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role not in _ROLES:
            raise RequestError(f"messages[{position}].role: expected one of {', '.join(_ROLES)}, got {quoted(role)}")
        if message.get("tool_calls"):
            raise RequestError(f"messages[{position}]: tool_calls are not in this template")
        if role == "user":
            turns += f"{_USER}{content}"
        elif role == "assistant":
            answer = content.split(CLOSING, 1)[-1]  # without its reasoning
            turns += f"{_ASSISTANT}{CLOSING}{answer}{EOS}"
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    return f"{BOS}{system}{turns}{_ASSISTANT}{OPENING if thinking else CLOSING}"
