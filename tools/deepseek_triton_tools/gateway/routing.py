"""Chooses the server for a request: by load, and by affinity, which keeps a conversation where its KV cache is."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from deepseek_triton_tools.gateway.triton_call import Call

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
        # Roles and contents only: clients add other fields to the messages that they send back.
        messages = [(one.get("role"), one.get("content")) for one in prompt if isinstance(one, Mapping)]
        first_user = next((at for at, (role, _) in enumerate(messages) if role == "user"), len(messages))
        beginning = messages[: first_user + 1]
    else:
        beginning = prompt[:_PROMPT_IDS]
    return blake2b(msgspec.json.encode(beginning), digest_size=8).digest()


def rendezvous_score(key: bytes, url: str) -> bytes:
    """Servers in the order of their scores are a key's order of servers. A server that comes or goes changes the first
    place of its own share of the keys only."""
    return blake2b(url.encode(), key=key, digest_size=8).digest()


MOST_LOAD = 1.25
"""A request goes to the server of its affinity while that has at most this many times the mean load, as in
"Consistent Hashing with Bounded Loads" (https://arxiv.org/abs/1608.01350)."""
FREE_SEQUENCES = 4
"""A server with fewer sequences counts as idle: it is no slower for one more, so the KV cache decides."""
_CHARACTERS_PER_TOKEN = 4
_PROMPTS = ("messages", "text_input", "tools")


class Load(NamedTuple):
    """Work in flight. tokens: of prompts, and those that may be generated."""

    sequences: int = 0
    tokens: int = 0

    def plus(self, other: Load) -> Load:
        return Load(self.sequences + other.sequences, self.tokens + other.tokens)

    def minus(self, other: Load) -> Load:
        """Never less than nothing."""
        return Load(max(0, self.sequences - other.sequences), max(0, self.tokens - other.tokens))


class Candidate(Protocol):
    """A server that may be chosen."""

    url: str

    @property
    def load(self) -> Load: ...


_Candidate = TypeVar("_Candidate", bound=Candidate)


class _Sizes(msgspec.Struct):
    """The sampling parameters that decide how much is generated."""

    max_tokens: int = 0
    n: int = 1


def prompt_tokens(call: Call) -> int:
    """About how many tokens the prompt has, before any server has counted them."""
    characters = sum(len(value) for name in _PROMPTS if isinstance(value := call.inputs.get(name), str))
    ids = call.inputs.get("input_ids")
    return characters // _CHARACTERS_PER_TOKEN + (len(ids) if isinstance(ids, list) else 0)


def estimated_load(call: Call) -> Load:
    """The load of a request, before any server has counted its tokens."""
    tokens = prompt_tokens(call)
    try:
        sizes = msgspec.json.decode(str(call.inputs.get("sampling_parameters", "{}")), type=_Sizes)
    except msgspec.MsgspecError:  # the server says what is wrong with them
        sizes = _Sizes()
    num_answers = max(1, sizes.n)
    return Load(num_answers, num_answers * (tokens + max(0, sizes.max_tokens)))


def choose(candidates: Sequence[_Candidate], call: Call, rng: random.Random) -> _Candidate:
    """The server of the call's affinity, unless it has too much to do; without affinity the less loaded of two that
    are drawn. `candidates` has at least one server."""
    if len(candidates) == 1:
        return candidates[0]
    if call.affinity is None:
        return less_loaded(rng.sample(candidates, 2))
    return nearest(candidates, call.affinity, estimated_load(call))


def less_loaded(candidates: Sequence[_Candidate]) -> _Candidate:
    total = _total(candidates)
    return min(candidates, key=lambda candidate: _share(candidate.load, total))


def nearest(candidates: Sequence[_Candidate], affinity: bytes, cost: Load) -> _Candidate:
    """The first in the affinity's order of servers whose load, with `cost` added, is within the bound."""
    total = _total(candidates).plus(cost)
    most = MOST_LOAD / len(candidates)
    order = sorted(candidates, key=lambda candidate: rendezvous_score(affinity, candidate.url))
    for candidate in order:
        load = candidate.load
        if load.sequences < FREE_SEQUENCES or _share(load.plus(cost), total) <= most:
            return candidate
    return less_loaded(order)


def _total(candidates: Sequence[Candidate]) -> Load:
    loads = [candidate.load for candidate in candidates]
    return Load(sum(load.sequences for load in loads), sum(load.tokens for load in loads))


def _share(load: Load, total: Load) -> float:
    """A server's share of all load, from 0 to 1: the mean of its shares of sequences and of tokens."""
    of_sequences = load.sequences / max(1, total.sequences)
    return (of_sequences + load.tokens / total.tokens) / 2 if total.tokens else of_sequences
