"""The parts of the corpus' documents: the words, and a question with its answer in one of DeepSeek's prompt forms.

Words come from texts.yaml; with made-up ones the model learns to copy.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

import yaml

from deepseek_backend.messages import ToolUse
from deepseek_backend.v4_prompt import V4, render_v4
from tiny_checkpoint.architecture import END_THINK, EOS
from tiny_checkpoint.chat_templates import Form, Message, Tool, render

Mode = Literal["v31", "v31_thinking", "r1", "v4_none", "v4_low", "v4_high", "v4_max"]
V4_MODES: tuple[Mode, ...] = ("v4_none", "v4_low", "v4_high", "v4_max")

TEXTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("texts.yaml").read_text(encoding="utf-8"))
WORDS = {name: tuple(text.split()) for name, text in TEXTS["words"].items()}
PHRASES = {name: tuple(text.split(" | ")) for name, text in TEXTS["phrases"].items()}
_ENDS = ("", "", "n", "r", "l", "s", "t", "m", "nd", "rk", "x")


def made_up(random: Random, syllables: int = 2) -> str:
    """Return a word that means nothing, such as `flonder`."""
    parts = (random.choice(WORDS["starts"]) + random.choice(WORDS["middles"]) for _ in range(syllables))
    return "".join(parts) + random.choice(_ENDS)


def any_name(random: Random) -> str:
    """Return a known name, or a made-up one."""
    if random.random() < 0.5:
        return random.choice(WORDS["names"])
    return made_up(random, random.randint(1, 3)).capitalize()


def any_words(random: Random, most: int = 6) -> str:
    """Return up to `most` words, some of them made up."""
    return " ".join(
        random.choice(WORDS["plain"]) if random.random() < 0.8 else made_up(random)
        for _ in range(random.randint(1, most))
    )


def filled(form: str, /, **words: object) -> str:
    """Put words into the places of a form, such as {w}."""
    for place, word in words.items():
        form = form.replace(f"{{{place}}}", str(word))
    return form


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a document; the model writes the learned ones, the others are prompts."""

    text: str
    learned: bool


@dataclass(frozen=True, slots=True)
class Document:
    """Segments that are encoded one by one, without inserted special tokens, and joined."""

    kind: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question, the one answer to it and the thought before that answer; `short` is the answer in one word."""

    question: str
    answer: str
    thought: str
    short: str = ""


def held_out(*key: object) -> bool:
    """Tell whether training leaves this combination out: one in twelve, decided by a hash."""
    return zlib.crc32("|".join(map(str, key)).encode()) % 12 == 0


def form_of(mode: Mode) -> Form:
    return "r1" if mode == "r1" else "v4" if mode in V4_MODES else "v31"


def random_mode(random: Random, v4: float = 0.3) -> Mode:
    """Return a mode, in this share of the draws one of V4's."""
    if random.random() < v4:
        return random.choices(V4_MODES, (4, 2, 2, 2))[0]
    draw = random.random()
    return "v31" if draw < 0.42 else "v31_thinking" if draw < 0.66 else "r1"


def thought_of(thought: str, mode: Mode) -> str:
    """Return the thought before an answer; V4's is longer at a higher effort."""
    checked = {"v4_high": " I checked this once.", "v4_max": " I checked this once. I checked it twice."}
    return "" if mode in ("v31", "v4_none") else thought + checked.get(mode, "")


def written(answer: str, thought: str, mode: Mode) -> str:
    """Return what the model writes after the prompt of `mode`, without the end token."""
    if not (thought := thought_of(thought, mode)):
        return answer
    return f"{thought}\n{END_THINK}\n\n{answer}" if mode == "r1" else f"{thought}{END_THINK}{answer}"


def chat_prompt(
    messages: Sequence[Message], mode: Mode, tools: Sequence[Tool] = (), tools_text: str = "", **v4: Any
) -> str:
    """Return the prompt.

    :param v4: `required` and `reply_format`, which V4's prompts alone have.
    """
    if mode in V4_MODES:
        effort, use = {"reasoning_effort": mode[3:]}, ToolUse(tools=tools, required=v4.get("required", False))
        return render_v4(V4, messages, effort, use, v4.get("reply_format", "")).prompt
    return render(
        messages,
        form_of(mode),
        tools_text=tools_text,
        tools=() if tools_text else tools,
        thinking=mode == "v31_thinking",
    )


def reminded(random: Random, messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the system's text as V4's reminder, right before or behind the last question."""
    reminders = [message | {"role": "latest_reminder"} for message in messages if message["role"] == "system"]
    *before, question = (message for message in messages if message["role"] != "system")
    last = [*reminders, question] if random.random() < 0.5 else [question, *reminders]
    return [*before, *last]


def begun(random: Random, exchange: Exchange, mode: Mode) -> tuple[Message, str]:
    """Return the beginning of V4's answer as a message that goes on, perhaps within its thought, and the rest."""
    thought, answer = thought_of(exchange.thought, mode), exchange.answer
    if thought and random.random() < 0.5:
        head, rest = _cut(random, thought)
        return {"role": "assistant", "content": "", "reasoning_content": head, "prefix": True}, (
            f"{rest}{END_THINK}{answer}"
        )
    head, rest = _cut(random, answer)
    reasoning = thought if random.random() < 0.5 else ""
    return {"role": "assistant", "content": head, "reasoning_content": reasoning, "prefix": True}, rest


def _cut(random: Random, text: str) -> tuple[str, str]:
    """Cut a text before a blank, or behind its only word."""
    place = random.choice([place for place, letter in enumerate(text) if letter == " "] or [len(text)])
    return text[:place], text[place:]


def document(kind: str, prompt: str, text: str) -> Document:
    return Document(kind, (Segment(prompt, learned=False), Segment(text + EOS, learned=True)))


def chat_document(kind: str, messages: Sequence[Message], exchange: Exchange, mode: Mode) -> Document:
    """Return the document of an exchange whose question is already the last message."""
    return document(kind, chat_prompt(messages, mode), written(exchange.answer, exchange.thought, mode))


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}
