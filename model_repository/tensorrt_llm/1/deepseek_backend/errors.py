"""Every error of the backend.

BackendError                  has a code of the wire contract; its text is what the caller reads
├── RequestError              the caller's fault: a value, a name, a length
├── UnavailableError          the engine is gone or going: try another replica
├── CancelledError            ended by the caller or on the operator's word
└── EngineError               the engine's fault
ConfigError                   model.yaml or config.pbtxt can't be served; holds every problem found
"""

from __future__ import annotations

from collections.abc import Sequence

from deepseek_backend.contract import ErrorCode


class BackendError(Exception):
    """Base of what a request can be answered with. Never raised itself."""

    default_code = ErrorCode.INTERNAL

    def __init__(self, message: str, *, code: ErrorCode | None = None) -> None:
        super().__init__(message)
        self.code = code or self.default_code

    def wire_message(self) -> str:
        """The message as sent: `[E_CODE] text`."""
        return f"[{self.code.value}] {self}"


class RequestError(BackendError):
    default_code = ErrorCode.INVALID_ARGUMENT


class UnavailableError(BackendError):
    default_code = ErrorCode.UNAVAILABLE


class CancelledError(BackendError):
    default_code = ErrorCode.CANCELLED


class EngineError(BackendError):
    default_code = ErrorCode.INTERNAL


def one_line(error: BaseException) -> str:
    """Type and message of somebody else's exception, as part of a message of ours."""
    return " ".join(f"{type(error).__name__}: {error}".split())


class ConfigError(Exception):
    """The configuration can't be served. `problems` holds every one of them, a line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)
