"""Every error of the backend.

BackendError                  has a code of the wire contract; the client reads its text
├── RequestError              the client's fault: a value, a name, a length
├── UnavailableError          the engine is dead or being stopped: try another server
├── ContextLostError          the KV cache that another server was to hand over is gone; this server is well
├── CancelledError            the request was ended because its client had gone; the answer to a stop request
└── EngineError               the engine's fault
ConfigError                   model.yaml or config.pbtxt can't be served; holds every problem found
"""

import re
from collections.abc import Mapping, Sequence

from deepseek_backend.contract import ErrorCode

ASK_ANOTHER = "; send the request to another server"
"""Ends the text of each UnavailableError for which no engine has died. The gateway asks as many other servers then as
there are; after a death it asks one, because the request may be what killed the engine."""


class BackendError(Exception):
    """Base of the errors with which a request can be answered. Never raised itself."""

    default_code = ErrorCode.INTERNAL

    def __init__(self, message: str, *, code: ErrorCode | None = None) -> None:
        super().__init__(message)
        self.code = code or self.default_code

    def wire_message(self) -> str:
        """The message as it is sent: `[E_CODE] text`."""
        return f"[{self.code.value}] {self}"

    def without_frames(self) -> "BackendError":
        """Drop the frames that the error came through, and the errors behind it. Return the error itself.

        A frame refers to the request that the error ends. If the request kept them too, only the garbage collector
        would free both, with 20 KB each, and it seldom runs.
        """
        self.__traceback__ = self.__context__ = self.__cause__ = None
        return self


# What is quoted came from the client. A name without "_" may be a word of the sentence, unless it begins a problem.
_QUOTED_OR_NAMED = re.compile(
    r"""(?<!\w)(['"])(?:\\.|(?!\1).)*(?:\1|$)|[a-z]+(?:_[a-z]+)+|[a-z]+(?=[:,.\[])""", re.DOTALL
)


class RequestError(BackendError):
    default_code = ErrorCode.INVALID_ARGUMENT

    def named(self, names: Mapping[str, str]) -> "RequestError":
        """Return the error with the names by which the client gave its fields, where `names` has others than ours."""
        if not names:
            return self
        message = _QUOTED_OR_NAMED.sub(lambda part: names.get(part[0], part[0]), str(self))
        return RequestError(message, code=self.code)


class UnavailableError(BackendError):
    default_code = ErrorCode.UNAVAILABLE


class ContextLostError(BackendError):
    default_code = ErrorCode.CONTEXT_LOST


class CancelledError(BackendError):
    default_code = ErrorCode.CANCELLED


class EngineError(BackendError):
    default_code = ErrorCode.INTERNAL


def describe(error: BaseException) -> str:
    """Return type and message of an exception that is not ours, for use inside a message of ours."""
    return " ".join(f"{type(error).__name__}: {error}".split())


UNREADABLE_YAML = (ValueError, ArithmeticError, LookupError, AttributeError, TypeError, RecursionError)
"""Errors of PyYAML beside its own: for a tag that does not fit its text, a date that is none, deep nesting, and bytes
that are not UTF-8."""


class ConfigError(Exception):
    """The configuration can't be served. `problems` holds every problem found, one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)
