"""A handover: everything about one prompt, but its KV cache, that a context server tells a generation server.

The KV cache itself goes from engine to engine. A context server keeps it until a generation server has fetched it, so
every handover has to reach one.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from deepseek_backend.field_values import read_json

RequestType: TypeAlias = Literal["context_only", "generation_only", "context_and_generation"]
"""One of contract.REQUEST_TYPES; the names are TensorRT-LLM's."""
MAX_FIRST_TOKENS = 64
"""Most first tokens, and most drafts, of a handover. TensorRT-LLM makes one first token, and a draft for each of a few
MTP layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextHandover:
    """The end of a request's context phase. A generation server with the same `form` goes on from it."""

    form: str
    """The engine with its version, and the checkpoint: `Capabilities.handover_form` of the server that made it."""
    prompt_token_ids: tuple[int, ...]
    first_gen_tokens: tuple[int, ...]
    """The answer's first tokens, which the context phase generates; at least one."""
    ended: bool = False
    """The first token is an end token or one of stop_token_ids, so that the answer is complete."""
    ctx_request_id: int | None = None
    """Number of the request in the context server's engine."""
    opaque_state: bytes = b""
    """The engine's own words on where its KV cache is."""
    draft_tokens: tuple[int, ...] | None = None
    """Drafts that follow the first token, of an engine with speculative decoding."""
    num_cached_tokens: int = 0
    """Number of prompt tokens that the context server found in its KV cache."""

    def to_json(self) -> bytes:
        """Return the output `context_phase_params`, which is also the input."""
        document = {
            "form": self.form,
            "prompt_token_ids": self.prompt_token_ids,
            "first_gen_tokens": self.first_gen_tokens,
            "ended": self.ended,
            "ctx_request_id": self.ctx_request_id,
            "opaque_state": base64.b64encode(self.opaque_state).decode(),
            "draft_tokens": self.draft_tokens,
            "num_cached_tokens": self.num_cached_tokens,
        }
        return json.dumps(document, separators=(",", ":")).encode()


def read_handover(text: str) -> ContextHandover:
    """Return the handover that `to_json` wrote.

    :raises ValueError: with what is wrong, beginning with the name of the input.
    """
    try:
        document = read_json(text)
    except ValueError as error:
        raise ValueError(f"{_NAME}: expected {_MEANT}, got text that is not JSON ({error})") from error
    if not isinstance(document, Mapping):
        raise ValueError(f"{_NAME}: expected {_MEANT}, got {type(document).__name__}")
    if unknown := sorted(map(str, document.keys() - ContextHandover.__slots__)):
        raise ValueError(f"{_NAME}: expected {_MEANT}, got one with {', '.join(unknown[:8])}; is it a newer server's?")
    for name, (accepts, expected) in _CHECKS.items():
        if name not in document or not accepts(document[name]):
            got = f"{str(document[name])[:60]!r}" if name in document else "none"
            raise ValueError(f"{_NAME}: expected {name} to be {expected}, as a context_only answer has it, got {got}")
    try:
        state = base64.b64decode(document["opaque_state"], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{_NAME}: expected opaque_state in base64: {error}") from error
    drafts = document["draft_tokens"]
    return ContextHandover(
        form=document["form"],
        prompt_token_ids=tuple(document["prompt_token_ids"]),
        first_gen_tokens=tuple(document["first_gen_tokens"]),
        ended=document["ended"],
        ctx_request_id=document["ctx_request_id"],
        opaque_state=state,
        draft_tokens=None if drafts is None else tuple(drafts),
        num_cached_tokens=document["num_cached_tokens"],
    )


_NAME = "context_phase_params"
_MEANT = "the JSON object that a context_only request was answered with"


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _are_ids(value: Any, most: int | None = None) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return False
    return (most is None or len(value) <= most) and all(map(_is_id, value))


_CHECKS: Mapping[str, tuple[Any, str]] = {
    "form": (lambda value: isinstance(value, str), "a string"),
    "prompt_token_ids": (_are_ids, "a list of token ids"),
    "first_gen_tokens": (lambda value: _are_ids(value, MAX_FIRST_TOKENS), f"a list of 1 to {MAX_FIRST_TOKENS} ids"),
    "ended": (lambda value: isinstance(value, bool), "true or false"),
    "ctx_request_id": (
        lambda value: value is None or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63),
        "a number or null",
    ),
    "opaque_state": (lambda value: isinstance(value, str), "a string"),
    "draft_tokens": (
        lambda value: value is None or value == [] or _are_ids(value, MAX_FIRST_TOKENS),
        f"null or a list of at most {MAX_FIRST_TOKENS} ids",
    ),
    "num_cached_tokens": (_is_id, "a count"),
}
