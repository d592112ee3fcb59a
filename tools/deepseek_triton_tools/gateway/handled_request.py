"""All that is known of one request: handlers fill it in, and the log, the metrics and the traces read it."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(slots=True)
class HandledRequest:
    """One HTTP request to the API, from its first line to its last byte.

    Times are those of time.perf_counter(), in seconds. Counts are those of all choices together.
    """

    request_id: str
    """The client's X-Request-Id, or one that was made."""
    route: str
    """The path as the gateway declares it, such as /v1/chat/completions."""
    began_s: float = field(default_factory=time.perf_counter)
    upstream_id: str = ""
    """Triton's `id` of the request. It differs from every other request's, whatever clients send."""
    key_name: str = ""
    """Whose API key it was; "" without a keys file."""
    model: str = ""
    """The name by which the gateway serves it; "" until it is known to exist."""
    stream: bool = False
    server: str = ""
    """The URL of the server that answered, or the last that was tried."""
    context_server: str = ""
    """The URL of the server that computed the prompt for it; "" where that server did all of it."""
    retries: int = 0
    """How many servers were asked in vain before that one."""
    status: int = 0
    """The response's; 0 where the client left before there was one."""
    error_code: str = ""
    """The error's code, or its type where it has none; "" for an answer."""
    finish_reason: str = ""
    """The first choice's."""
    counts_responses: bool = False
    """The model's server tells the counts of tokens with each response, because a key's limit needs them of an answer
    that is left before its end too."""
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_reasoning_tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None
    client_left: bool = False
    """The client closed the connection before the answer was complete."""
    trace_parent: str = ""
    """The client's `traceparent` header."""
    upstream_headers: dict[str, str] = field(default_factory=dict)
    """Headers of the request to Triton beside the settings' headers, such as a `traceparent` of our own span."""

    def end(self) -> None:
        """Note that the response is complete."""
        self.ended_s = time.perf_counter()

    def token_came(self) -> None:
        """Note the time of tokens, the first and the last."""
        self.last_token_s = time.perf_counter()
        if self.first_token_s is None:
            self.first_token_s = self.last_token_s

    @property
    def duration_s(self) -> float:
        return (self.ended_s or time.perf_counter()) - self.began_s

    @property
    def ttft_s(self) -> float | None:
        """Time to a stream's first token, from the request's first line. Other answers come all at once."""
        return self.first_token_s - self.began_s if self.stream and self.first_token_s is not None else None

    @property
    def mean_itl_s(self) -> float | None:
        """The mean time between two tokens of a stream; None for less than two."""
        if not self.stream or self.first_token_s is None or self.last_token_s is None or self.num_output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_output_tokens - 1)


class RequestObserver(Protocol):
    """Who is told about each request: the access log, the metrics, the traces.

    Neither method raises or waits.
    """

    def begins(self, record: HandledRequest) -> None:
        """The request's headers have come. It may set `upstream_headers`."""
        ...

    def ends(self, record: HandledRequest) -> None:
        """The response has been sent, or its client has gone."""
        ...

    def close(self) -> None: ...


def begin_record(route: str, headers: Iterable[tuple[bytes, bytes]]) -> HandledRequest:
    """The record of a request with these headers, as ASGI gives them.

    An X-Request-Id that isn't of at most 128 letters, digits and . _ : - is replaced, because it goes into headers and
    logs.
    """
    given = {name: value for name, value in headers if name in (b"x-request-id", b"traceparent")}
    request_id = given.get(b"x-request-id", b"").decode("latin-1")
    unique = uuid.uuid4().hex
    if not _REQUEST_ID.fullmatch(request_id):
        request_id = f"req-{unique}"
    # Clients send an id again with a retry, and a stop request at Triton ends every request that has the id.
    upstream_id = request_id if request_id.endswith(unique) else f"{request_id}-{unique[:12]}"
    trace_parent = given.get(b"traceparent", b"").decode("latin-1")
    return HandledRequest(request_id, route, upstream_id=upstream_id, trace_parent=trace_parent)
