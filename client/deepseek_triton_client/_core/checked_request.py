"""A request whose contents were checked, so that all of it can be sent."""

import json
import os
import reprlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from deepseek_triton_client._core.client_settings import Timeouts
from deepseek_triton_client._core.exceptions import InvalidRequest
from deepseek_triton_client._core.sampling_params import SamplingParams
from deepseek_triton_client._core.wire import checked, encode

Prompt = str | Sequence[int]
"""A text, or a list of token ids."""
Messages = str | Sequence[Mapping[str, Any]]
"""A conversation, [{"role": "user", "content": "..."}, ...]; a text counts as one message of the user."""
BatchItem = Prompt | Mapping[str, Any]
"""A prompt, or a mapping of arguments: {"prompt" or "messages": ..., "max_tokens": ..., ...}."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A checked request. Exactly one of `prompt`, `input_ids` and `messages` is set."""

    request_id: str
    params: SamplingParams
    timeouts: Timeouts
    streaming: bool
    """Whether the caller wants increments."""
    prompt: str | None = None
    input_ids: tuple[int, ...] | None = None
    messages: str | None = None
    """The conversation as JSON."""
    task: str | None = None
    """Task for the server: tokenize, detokenize or describe; None is to generate."""

    @property
    def is_chat(self) -> bool:
        return self.messages is not None


def prompt_request(prompt: Prompt, *, request_id: str | None, **common: Any) -> Request:
    """Make the request for a text or token ids. Raises InvalidRequest."""
    common["request_id"] = _request_id(request_id)
    if isinstance(prompt, str):
        return Request(prompt=checked("prompt", "BYTES", prompt), **common)
    if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Iterable):
        raise InvalidRequest(f"prompt: expected a text or a list of token ids, got {type(prompt).__name__}")
    ids: tuple[Any, ...] = tuple(prompt)
    if not ids:
        raise InvalidRequest("prompt: expected at least one token id, got an empty list")
    for kind, verb in ((Mapping, "chat takes a conversation"), ((str, list, tuple), "generate_many takes several")):
        if isinstance(ids[0], kind):
            raise InvalidRequest(f"prompt: expected a text or a list of token ids, got {reprlib.repr(ids)}; {verb}")
    # Plain numbers are checked all at once, because prompts are long; a wrong one is named below.
    if set(map(type, ids)) == {int}:
        with suppress(struct.error):
            encode("INT32", ids)
            return Request(input_ids=ids, **common)
    return Request(input_ids=tuple(checked("prompt", "INT32", token) for token in ids), **common)


def chat_request(messages: Messages, *, request_id: str | None, **common: Any) -> Request:
    """Make the request for a conversation. Raises InvalidRequest."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if isinstance(messages, (bytes, Mapping)) or not isinstance(messages, Iterable):
        raise InvalidRequest(f"messages: expected a text or a list of messages, got {type(messages).__name__}")
    conversation = []
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            expected = f'messages[{position}]: expected {{"role": ..., "content": ...}}'
            raise InvalidRequest(f"{expected}, got {reprlib.repr(message)}")
        conversation.append(dict(message))
    if not conversation:
        raise InvalidRequest("messages: expected at least one message, got an empty list")
    try:
        text = json.dumps(conversation, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidRequest(f"messages: expected values that JSON can hold: {exc}") from exc
    return Request(messages=checked("messages", "BYTES", text), request_id=_request_id(request_id), **common)


def tokenize_request(content: str | Messages, **common: Any) -> Request:
    """Make the request for the tokens of a text or of a conversation. Raises InvalidRequest."""
    request = prompt_request(content, **common) if isinstance(content, str) else chat_request(content, **common)
    return replace(request, task="tokenize")


def detokenize_request(token_ids: Sequence[int], **common: Any) -> Request:
    """Make the request for the text of token ids. Raises InvalidRequest."""
    if isinstance(token_ids, str):
        raise InvalidRequest("token_ids: expected a list of token ids, got a text")
    return replace(prompt_request(token_ids, **common), task="detokenize")


def describe_request(**common: Any) -> Request:
    """Make the request for what the model is."""
    return replace(prompt_request("", **common), task="describe")


def batch_request(item: BatchItem, *, params: SamplingParams, timeouts: Timeouts) -> Request:
    """Make the request of one item of a batch, whose own fields win over `params`. Raises InvalidRequest."""
    common: dict[str, Any] = {"timeouts": timeouts, "streaming": False}
    if not isinstance(item, Mapping):
        return prompt_request(item, request_id=None, params=params, **common)
    kinds = [kind for kind in ("prompt", "messages") if kind in item]
    if len(kinds) != 1:
        raise InvalidRequest(f'expected one of "prompt" and "messages", got {", ".join(map(str, item)) or "nothing"}')
    fields = {str(name): value for name, value in item.items() if name not in (*kinds, "request_id")}
    make = chat_request if kinds == ["messages"] else prompt_request
    return make(item[kinds[0]], request_id=item.get("request_id"), params=params.merged(fields), **common)


def checked_id(request_id: str) -> str:
    """Raises InvalidRequest."""
    if not checked("request_id", "BYTES", request_id):
        raise InvalidRequest("request_id: expected a text that is not empty, got ''")
    return request_id


def _request_id(request_id: str | None) -> str:
    return os.urandom(16).hex() if request_id is None else checked_id(request_id)
