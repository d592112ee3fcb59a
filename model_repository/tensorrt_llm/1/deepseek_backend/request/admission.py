"""Admission: accept or refuse a request at once. There is no queue here; the engine has one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from deepseek_backend.contract import ErrorCode
from deepseek_backend.engines.generate_request import GenerateRequest, utf8_length
from deepseek_backend.errors import RequestError, UnavailableError

BYTES_PER_TOKEN = 4
"""Bytes of a prompt that count as one token while the engine has not counted it: about what English text has."""


@dataclass(slots=True)
class Admitted:
    """One Triton request's share of the limits."""

    admission: Admission
    num_requests: int
    num_tokens: int

    def release(self) -> None:
        """Give the share back. Calls after the first one do nothing."""
        self.admission.release(self)


class Admission:
    """Counts what is accepted and not yet answered, against the limits. Thread-safe."""

    def __init__(self, *, max_inflight: int | None, max_inflight_tokens: int | None) -> None:
        self._max_inflight = max_inflight
        self._max_inflight_tokens = max_inflight_tokens
        self._lock = threading.Lock()
        self.inflight = 0
        """Sequences in flight."""
        self.inflight_tokens = 0
        """Tokens of these sequences: prompts and max_tokens together."""

    def admit(self, requests: Sequence[GenerateRequest]) -> Admitted:
        """Admit all of `requests`, or none.

        :raises UnavailableError: E_OVERLOADED, with the numbers.
        :raises RequestError: when they would not fit even if nothing else were in flight.
        """
        num_tokens = sum(map(_num_tokens, requests))
        with self._lock:
            self._check("max_inflight", self._max_inflight, len(requests), self.inflight)
            self._check("max_inflight_tokens", self._max_inflight_tokens, num_tokens, self.inflight_tokens)
            self.inflight += len(requests)
            self.inflight_tokens += num_tokens
        return Admitted(self, len(requests), num_tokens)

    def release(self, admitted: Admitted) -> None:
        with self._lock:
            self.inflight -= admitted.num_requests
            self.inflight_tokens -= admitted.num_tokens
            admitted.num_requests = admitted.num_tokens = 0

    def _check(self, name: str, limit: int | None, asked: int, held: int) -> None:
        if limit is None or held + asked <= limit:
            return
        if asked > limit:
            raise RequestError(
                f"{name} is {limit:,} and this request alone is {asked:,}: lower max_tokens, or send fewer prompts"
            )
        raise UnavailableError(
            f"{name} is {limit:,}, {held:,} are in flight and this request is {asked:,} more: send it again later, "
            "or to another server",
            code=ErrorCode.OVERLOADED,
        )


def _num_tokens(request: GenerateRequest) -> int:
    ids = request.prompt_token_ids
    return request.max_tokens + (utf8_length(request.prompt) // BYTES_PER_TOKEN if ids is None else len(ids))
