"""Keeps a conversation on the server that has its KV cache: keys of prompts, and each key's order of servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

import msgspec

_PROMPT_CHARACTERS = 1024
"""How much of a prompt without messages counts. Longer prompts that begin alike share KV blocks."""
_PROMPT_IDS = 256


def affinity_key(prompt: str | Sequence[int] | Sequence[Mapping[str, object]], *, hint: str = "") -> bytes:
    """The value of `Call.affinity` for a text, token ids, or a conversation's messages.

    Every turn of a conversation has the same key: that of its messages up to the first of the user. With `hint`, such
    as OpenAI's `prompt_cache_key`, only the hint counts.
    """
    if hint:
        beginning: object = hint
    elif isinstance(prompt, str):
        beginning = prompt[:_PROMPT_CHARACTERS]
    elif prompt and isinstance(prompt[0], Mapping):
        beginning = _first_messages(prompt)
    else:
        beginning = prompt[:_PROMPT_IDS]
    return blake2b(msgspec.json.encode(beginning), digest_size=8).digest()


def _first_messages(messages: Sequence[object]) -> list[tuple[object, object]]:
    """Roles and contents only: clients add other fields to the messages that they send back."""
    first = []
    for message in messages:
        if isinstance(message, Mapping):
            first.append((message.get("role"), message.get("content")))
            if message.get("role") == "user":
                break
    return first


def rendezvous_score(key: bytes, url: str) -> bytes:
    """Servers in the order of their scores are a key's order of servers. A server that comes or goes changes the first
    place of its own share of the keys only."""
    return blake2b(url.encode(), key=key, digest_size=8).digest()
