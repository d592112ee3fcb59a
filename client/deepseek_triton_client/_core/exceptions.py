"""All errors that this package raises on purpose, but RuntimeError for wrong programs, as one tree.

    DeepseekTritonError
    ├── InvalidRequest        the request is wrong and would be refused again
    │   └── ModelNotFound     Triton has no such model or version
    ├── AccessDenied          the token or certificate is missing, wrong or not enough
    ├── Overloaded            the server is at its limits; try later, or another server
    ├── ServerUnavailable     unreachable, not ready, stopping, or the connection was lost
    │   └── ModelNotReady     Triton has the model, which loads, unloads or could not be loaded
    ├── Cancelled             ended before its time, by the caller or by the server
    ├── DeadlineExceeded      one of the caller's own time limits ran out
    ├── ServerError           the server failed at a correct request
    └── ProtocolError         what answered does not speak this protocol

The backend's messages begin with a code (`[E_OVERLOADED] ...`), because gRPC streams and SSE events lose Triton's
status, and Triton 2.51 answers 400 to every error that comes before the first chunk. If a message has a code, the code
decides which error it becomes; otherwise the status does.
"""

import re


class DeepseekTritonError(Exception):
    """The root of the tree: catching it catches everything that can happen to a request."""

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        request_id: str | None = None,
        url: str | None = None,
        unprocessed: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        """Description of what happened, without the code; in the server's words if the server sent it."""
        self.code = code
        """Code of the backend, such as "E_OVERLOADED"; None for errors of Triton, the network and the client."""
        self.request_id = request_id
        """Id of the request; None if the error does not belong to one request."""
        self.url = url
        """URL of the server that was asked; None if the error came before any server was asked."""
        self.unprocessed = unprocessed
        """Whether surely nothing was generated for it, so that sending it again, here or elsewhere, is safe."""
        self.retry_after_s = 0.0
        """Seconds after which the server asked to be tried again; 0 where it did not."""

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}" if self.code else self.message


class InvalidRequest(DeepseekTritonError):
    """The request, or a setting of the client, is wrong. The message names the wrong part."""


class ModelNotFound(InvalidRequest):
    """Triton has no model of this name and version."""


class AccessDenied(DeepseekTritonError):
    """The server, or a proxy before it, wants another token or certificate."""


class Overloaded(DeepseekTritonError):
    """The server refused the request at once because it is full. Nothing was generated."""


class ServerUnavailable(DeepseekTritonError):
    """The server can't be reached, or is loading or stopping; or the connection broke in the middle of an answer."""


class ModelNotReady(ServerUnavailable):
    """Triton has the model, but it loads, unloads or could not be loaded. Nothing was generated."""


class Cancelled(DeepseekTritonError):
    """The request was ended before its time."""


class DeadlineExceeded(DeepseekTritonError):
    """A limit of `Timeouts`, or the limit of `wait_until_ready`, ran out."""


class ServerError(DeepseekTritonError):
    """The server failed. The request may be correct; the server's log says more."""


class ProtocolError(DeepseekTritonError):
    """The answer can't be understood: the server is no Triton or has another model, or a proxy changed the answer."""


BY_CODE: dict[str, type[DeepseekTritonError]] = {
    "E_INVALID_ARGUMENT": InvalidRequest,
    "E_UNSUPPORTED": InvalidRequest,
    "E_PROMPT_TOO_LONG": InvalidRequest,
    "E_OVERLOADED": Overloaded,
    "E_UNAVAILABLE": ServerUnavailable,
    "E_CONTEXT_LOST": ServerUnavailable,
    "E_CANCELLED": Cancelled,
    "E_INTERNAL": ServerError,
}

# Codes with which the backend refuses a request that another server, or the same one later, should get.
_REFUSALS = frozenset({"E_OVERLOADED", "E_UNAVAILABLE"})

_CODED = re.compile(r"\[(E_[A-Z_]+)\]\s*(.*)", re.DOTALL)

# Triton's own words for a missing model. On a gRPC stream they come without any status. Its messages about a model
# that loads, unloads or could not be loaded begin so too; another server may be able to answer then.
_UNKNOWN_MODEL = "Request for unknown model"
_NOT_LOADED = ("has no available versions", "is not at ready state")


def error_from_server(
    text: str, *, otherwise: type[DeepseekTritonError], unprocessed: bool = False
) -> DeepseekTritonError:
    """Return the error for a server's message. `otherwise` and `unprocessed` apply if the message does not tell."""
    coded = _CODED.match(text)
    if coded:
        code, message = coded.groups()
        return BY_CODE.get(code, otherwise)(message, code=code, unprocessed=code in _REFUSALS)
    if not text.startswith(_UNKNOWN_MODEL):
        return otherwise(text, unprocessed=unprocessed)
    if text.endswith(_NOT_LOADED):
        return ModelNotReady(text, unprocessed=True)
    return ModelNotFound(text, unprocessed=unprocessed)
