"""A request to a server, the parts of its answer, and the errors between."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Protocol

import msgspec

MOST_ANSWER_BYTES = 256 * 2**20
"""Bytes of one event, or of an answer that is no stream. The log-probabilities of a long prompt are the longest."""


class Part(
    msgspec.Struct,
    gc=False,
    rename={"sequence": "sequence_index", "text": "text_output", "reasoning": "reasoning_output"},
):
    """The part of a response that is about one sequence. The names are the wire contract's outputs (docs/contract.md).

    sequence: its number in the request. finish_reason: "" while the sequence goes on. num_output_tokens: those since
    the sequence's previous Part. logprobs, prompt_logprobs: JSON, "" where there is none. context_phase_params: the
    end of a context server's answer.
    """

    sequence: int = 0
    text: str = ""
    reasoning: str = ""
    finish_reason: str = ""
    stop_reason: str = ""
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_reasoning_tokens: int = 0
    logprobs: str = ""
    prompt_logprobs: str = ""
    context_phase_params: str = ""


class Call(msgspec.Struct, frozen=True):
    """One request to the model, for any server that has it.

    inputs: the JSON body of Triton's generate endpoint without `id`. request_id: Triton's `id`, by which a stop
    request finds it. affinity: requests with equal bytes go to the same server if they can; None for no preference.
    headers: such as traceparent, added to the request. tried: the URLs of the servers that were asked, the last being
    the one that answers; filled in by whoever chooses among several. context_tried: the same of the context servers.
    died: the URLs of the servers that may have died of the request; filled in like `tried`, for both roles.
    sent: the URLs of the servers that have been sent the request and have neither refused nor lost it; filled in like
    `tried`, and by the connection to each.
    late: is given the parts that came after nobody waited for them any more, and the error in their place or after
    them, also where the server was lost meanwhile. It is not called for a request that was never sent.
    """

    inputs: dict[str, object]
    request_id: str
    affinity: bytes | None = None
    headers: dict[str, str] = {}
    tried: list[str] = []
    context_tried: list[str] = []
    died: list[str] = []
    sent: list[str] = []
    late: Callable[[list[Part], UpstreamError | None], None] | None = None


class UpstreamError(Exception):
    """A server refused a request, failed it, or could not be reached.

    code: the wire contract's error code ("E_OVERLOADED"), or "" where the server gave none. unprocessed: the server
    has nothing to show for it, so that another may be asked. died: the server had taken the request, so it may have
    died of it, and another may die too. retry_after_s: when it may be sent again.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "",
        unprocessed: bool = False,
        died: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.unprocessed = unprocessed
        self.died = died
        self.retry_after_s = retry_after_s


class Upstream(Protocol):
    """Whoever answers a Call: one server, or a fleet of them."""

    def generate(self, call: Call) -> AsyncGenerator[list[Part], None]:
        """The answer as it comes, a list for each response. Closing the generator stops the work on the server.

        Raises UpstreamError.
        """
        ...

    async def ask(self, call: Call) -> dict[str, object]:
        """The outputs of the one response to a task that generates nothing (`task`: tokenize, detokenize, describe).

        Raises UpstreamError.
        """
        ...
