"""The parts of the corpus' documents: the words, and a question with its answer in one of DeepSeek's prompt forms.

Words come from texts.yaml; with made-up ones the model learns to copy.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

import yaml

from tiny_checkpoint.architecture import BOS, END_THINK, EOS
from tiny_checkpoint.chat_templates import Form, Message, Tool, render

Mode = Literal["v31", "v31_thinking", "r1"]

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
    return "r1" if mode == "r1" else "v31"


def random_mode(random: Random) -> Mode:
    draw = random.random()
    return "v31" if draw < 0.5 else "v31_thinking" if draw < 0.75 else "r1"


def written(answer: str, thought: str, mode: Mode) -> str:
    """Return what the model writes after the prompt of `mode`, without the end token."""
    if mode == "v31":
        return answer
    if mode == "v31_thinking":
        return f"{thought}{END_THINK}{answer}"
    return f"{thought}\n{END_THINK}\n\n{answer}"


def chat_prompt(messages: Sequence[Message], mode: Mode, tools: Sequence[Tool] = (), tools_text: str = "") -> str:
    return render(messages, form_of(mode), tools_text=tools_text, tools=tools, thinking=mode == "v31_thinking")


def document(kind: str, prompt: str, text: str) -> Document:
    return Document(kind, (Segment(prompt, learned=False), Segment(text + EOS, learned=True)))


def chat_document(kind: str, messages: Sequence[Message], exchange: Exchange, mode: Mode) -> Document:
    """Return the document of an exchange whose question is already the last message."""
    return document(kind, chat_prompt(messages, mode), written(exchange.answer, exchange.thought, mode))


def completion_document(kind: str, prompt: str, text: str) -> Document:
    return document(kind, BOS + prompt, text)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}
