"""Errors as OpenAI's clients read them: a status and `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import msgspec

_LONGEST_MESSAGE = 4000
"""Characters. Most messages have less than 200."""


class OpenAIError(Exception):
    """The answer to a request that was refused or failed.

    status: the HTTP status. kind: OpenAI's `type`, such as "invalid_request_error". param: the field that is wrong.
    code: a word for programs, such as "context_length_exceeded". retry_after_s: written as Retry-After, in whole
    seconds, rounded up. headers: others of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        # A message may quote what the client sent, which can be as long as its request.
        message = message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]}..."
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.headers = headers

    def body(self) -> bytes:
        """The JSON of the response, and of the one event that tells a stream that it failed."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def invalid(message: str, *, param: str | None = None, code: str | None = None) -> OpenAIError:
    """A request that is wrong in itself: 400."""
    return OpenAIError(400, message, param=param, code=code)
