"""Errors of the model's server as OpenAI's errors."""

from __future__ import annotations

import logging
import re

from deepseek_triton_tools.gateway.app.handled_request import HandledRequest
from deepseek_triton_tools.gateway.protocol.openai_errors import OpenAIError
from deepseek_triton_tools.gateway.protocol.responses_request import in_own_words
from deepseek_triton_tools.gateway.triton.call import UpstreamError

_FIELD = re.compile(r"(?:sampling_param_)?([a-z_]+)(?=[\[.:,])")
_NAMES = {
    "bad": "bad_words",
    "guided_json": "response_format",
    "guided_json_object": "response_format",
    "text_input": "prompt",
    "input_ids": "prompt",
}
"""The contract's name of a field -> the name that clients know, where they differ."""
_log = logging.getLogger(__name__)


def log_failure(record: HandledRequest, error: UpstreamError) -> None:
    """Log what clients are not told, because it may have the addresses of servers."""
    if error.code in ("", "E_UNAVAILABLE"):
        _log.warning("request %s: %r", record.request_id, str(error))


def openai_error(error: UpstreamError, route: str) -> OpenAIError:
    """The answer to a request at `route` for which the server gave `error`."""
    found = _openai_error(error, prompt="prompt" if route == "/v1/completions" else "messages")
    if route == "/detokenize" and found.message.startswith("input_ids"):
        message = "tokens" + found.message.removeprefix("input_ids")
        return OpenAIError(found.status, message, kind=found.kind, param="tokens", code=found.code)
    return in_own_words(found) if route.startswith("/v1/responses") else found


def _openai_error(error: UpstreamError, *, prompt: str) -> OpenAIError:
    message = str(error)
    match error.code:
        case "E_INVALID_ARGUMENT":
            return OpenAIError(400, message, param=_field_of(message))
        case "E_UNSUPPORTED":
            return OpenAIError(400, message, param=_field_of(message), code="unsupported_parameter")
        case "E_PROMPT_TOO_LONG":
            # LiteLLM and LangChain know it by these words only.
            text = f"This model's maximum context length is exceeded (context_length_exceeded): {message}"
            return OpenAIError(400, text, param=prompt, code="context_length_exceeded")
        case "E_OVERLOADED":
            return OpenAIError(
                429, message, kind="server_error", code="overloaded", retry_after_s=error.retry_after_s or 1.0
            )
        case "E_UNAVAILABLE":
            text = "no server of this model can take the request now"
            return OpenAIError(
                503, text, kind="server_error", code="unavailable", retry_after_s=error.retry_after_s or 1.0
            )
        case "E_CANCELLED":
            return OpenAIError(503, message, kind="server_error", code="cancelled")
        case "E_INTERNAL":
            return OpenAIError(500, message, kind="server_error", code="internal_error")
    text = "the model's server failed at this request; the gateway's log says more"
    return OpenAIError(502, text, kind="server_error", code="bad_gateway")


def _field_of(message: str) -> str | None:
    """The field that the server's message begins with."""
    found = _FIELD.match(message)
    return _NAMES.get(found[1], found[1]) if found else None
