"""The meaning of a server's refusals and failures: for the request, and for asking another server."""

from __future__ import annotations

import re

import msgspec

from deepseek_triton_tools.gateway.triton.call import UpstreamError

_CODED = re.compile(r"\[(E_[A-Z_]+)\]\s*(.*)", re.DOTALL)
_REFUSALS = {"E_OVERLOADED", "E_UNAVAILABLE"}
"""Codes of a server that has nothing to show for the request."""
_DRAINING = "; send the request to another"
"""The backend's words while it is being stopped. Other refusals with E_UNAVAILABLE come from an engine that died."""
_UNKNOWN_MODEL = "Request for unknown model"
"""Triton's words for a model that it hasn't got, or that is not ready."""
_DEAD_PROCESS = re.compile(r"Stub process .* is not healthy")
"""Triton's words when the model's process has died; some releases put others before them. With `on_fatal: unready` it
says for ever that it is ready."""
_UNPROCESSED = {401, 403, 404, 429, 502, 503}
"""Statuses of a server, or of a proxy before it, that has nothing to show for the request."""
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for what is no JSON, or no UTF-8, or nested too deep."""
_QUOTED = 200
"""Characters of an answer that is not Triton's."""


def error_of_message(message: str, *, code: str = "", unprocessed: bool = False, died: bool = False) -> UpstreamError:
    """The error for what a server says went wrong. The others are for words that don't tell."""
    coded = _CODED.match(message)
    if coded:
        code, text = coded.groups()
        died = code == "E_UNAVAILABLE" and _DRAINING not in text
        return UpstreamError(text, code=code, unprocessed=code in _REFUSALS, died=died)
    if message.startswith(_UNKNOWN_MODEL):
        return UpstreamError(message, code="E_UNAVAILABLE", unprocessed=True)
    if _DEAD_PROCESS.search(message):
        return UpstreamError(message, code="E_UNAVAILABLE", unprocessed=True, died=True)
    return UpstreamError(message, code=code, unprocessed=unprocessed, died=died)


def error_of_status(status: int, body: bytes) -> UpstreamError:
    """The error for a response other than 200."""
    try:
        document = msgspec.json.decode(body.removeprefix(b"data:"))  # Triton refuses a stream with an event
    except NOT_JSON:
        document = None
    if isinstance(document, dict) and isinstance(document.get("error"), str):
        text = document["error"]
    else:
        text = f"the server answered HTTP {status}: {body[:_QUOTED].decode(errors='replace')!r}"
    if status in (401, 403):
        text = f"the gateway was refused: {text}"
    code = "E_OVERLOADED" if status == 429 else ""
    return error_of_message(text, code=code, unprocessed=status in _UNPROCESSED, died=status == 502)
