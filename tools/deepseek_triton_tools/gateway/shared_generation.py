"""One request on two servers: a context server computes the prompt, a generation server generates the answer.

The words are those of "Disaggregated serving" in docs/contract.md. The client gets the first token's text as soon as
the context server has it. The context server holds the KV cache until a generation server has fetched it, so the
second request is sent in any case.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import structs

from deepseek_triton_tools.gateway.triton_call import Call, Part, UpstreamError, prompt_tokens

Role: TypeAlias = Literal["context", "generation"]
"""The part of a request that a server does. Without context servers, generation servers do all of it."""
Generate: TypeAlias = Callable[[Call, Role], AsyncGenerator[list[Part], None]]
"""The answer of one server with the role; another is asked where one fails before its first response."""
InBackground: TypeAlias = Callable[[Coroutine[object, object, None]], object]
"""Begins work that ends by itself, whatever becomes of the request."""
_CONTEXT_LOST = "E_CONTEXT_LOST"
_RELEASE_S = 60.0
"""For a KV cache that nobody wants to be fetched."""
_RELEASE_PAUSE_S = 0.5
"""Until another generation server is asked to fetch it."""
_WITHOUT_END: dict[str, Any] = {"finish_reason": "", "stop_reason": "", "context_phase_params": ""}
_WITHOUT_END |= {"num_output_tokens": 0, "num_reasoning_tokens": None}
"""The end and the counts of a context server's part, which the generation server's answer has too."""
_log = logging.getLogger(__name__)


def is_shareable(call: Call, local_prefill_tokens: int) -> bool:
    """Whether two servers can share the request, and its prompt has more tokens, as far as it can be told here."""
    inputs = call.inputs
    if "request_type" in inputs or "task" in inputs or inputs.get("return_logprobs"):
        return False
    try:
        sampling = msgspec.json.decode(str(inputs.get("sampling_parameters", "{}")), type=dict[str, object])
    except msgspec.MsgspecError:  # the server says what is wrong with them
        return False
    if not sampling.get("n", 1) == sampling.get("best_of", 1) == 1:
        return False
    if not (sampling.get("logprobs") is sampling.get("prompt_logprobs") is None):
        return False
    # TensorRT-LLM is not known to guide an answer that two servers share. Strict tools become a guide.
    is_guided = any(value for name, value in sampling.items() if name.startswith("guided_"))
    if is_guided or '"strict"' in str(inputs.get("tools", "")):
        return False
    return prompt_tokens(call) > local_prefill_tokens


async def generate_shared(
    call: Call, generate: Generate, in_background: InBackground
) -> AsyncGenerator[list[Part], None]:
    """The answer of a context server and a generation server, as one. Raises UpstreamError."""
    request = _SharedRequest(call, generate, in_background)
    try:
        async with aclosing(request.context()) as answer:
            async for parts in answer:
                yield parts
        if request.ended:
            return
        # Where no context server has taken it, a generation server does the whole of it.
        async with aclosing(request.generation() if request.handover else generate(call, "generation")) as answer:
            async for parts in answer:
                yield parts
    finally:
        request.let_go()


class _SharedRequest:
    """One request and what has become of it.

    ended: the context server's answer is all there is. handover: what tells a generation server where the KV cache is;
    "" until a context server has it.
    """

    def __init__(self, call: Call, generate: Generate, in_background: InBackground) -> None:
        self.ended = False
        self._call = call
        self._generate = generate
        self._in_background = in_background
        self._began_s = time.monotonic()
        self.handover = ""
        self._must_fetch = False
        """A context server holds the KV cache, and no generation server has been told to fetch it."""
        self._num_text = 0
        """Characters that the client got from the context server; the generation server's answer begins with them."""
        self._num_reasoning = 0
        self._has_more = False
        """The client has got what the context server did not say."""

    async def context(self) -> AsyncGenerator[list[Part], None]:
        """The first token's text, as far as it is certain."""
        inputs = {**self._call.inputs, "request_type": "context_only"}
        # The lists are shared, not copied: each role counts its own tries, and deaths count for both.
        call = structs.replace(self._call, inputs=inputs, tried=self._call.context_tried, late=self._take_late)
        try:
            async with aclosing(self._generate(call, "context")) as answer:
                async for parts in answer:
                    self._take_handover(parts)
                    self.ended = not self.handover and any(part.finish_reason for part in parts)
                    self._num_text += sum(len(part.text) for part in parts)
                    self._num_reasoning += sum(len(part.reasoning) for part in parts)
                    if self.ended:
                        yield parts
                    elif any(part.text or part.reasoning for part in parts):
                        yield [structs.replace(part, **_WITHOUT_END) for part in parts]
        except UpstreamError as error:
            may_pass = error.unprocessed and error.code != "E_OVERLOADED"  # a generation server does all of it
            if not self.handover and (self._num_text or self._num_reasoning or not may_pass):
                raise  # with a handover the last response has come, so whatever went wrong after it means nothing
            if not self.handover:  # all of these were asked in vain
                self._call.tried.extend(self._call.context_tried)
                self._call.context_tried.clear()

    async def generation(self) -> AsyncGenerator[list[Part], None]:
        """The answer from where the client's text ends.

        Where the KV cache can't be fetched, or the server dies before it has said anything new, another server computes
        the prompt and the first token again.
        """
        for request_type in ("generation_only", "context_and_generation"):
            try:
                async with aclosing(self._continued(request_type)) as answer:
                    async for parts in answer:
                        yield parts
                return
            except UpstreamError as error:
                was_lost = error.code == _CONTEXT_LOST
                may_repeat = request_type == "generation_only" and not self._has_more
                # A server that is full will have room for the KV cache; computing the prompt there costs it more.
                if not may_repeat or error.code == "E_OVERLOADED" or not (error.unprocessed or was_lost):
                    raise
                _log.warning("the prompt of a request is computed again: %s", error)
                self._must_fetch = not was_lost  # the server may have died before it fetched
                self.let_go()

    async def _continued(self, request_type: str) -> AsyncGenerator[list[Part], None]:
        """A generation server's answer, without the text that the client has."""
        inputs = {**self._call.inputs, "request_type": request_type, "context_phase_params": self.handover}
        if isinstance(timeout_ms := inputs.get("timeout_ms"), int):
            inputs["timeout_ms"] = max(1, timeout_ms - round((time.monotonic() - self._began_s) * 1e3))
        num_text, num_reasoning = self._num_text, self._num_reasoning
        # Whatever a generation server has cached is of no use: the KV cache comes from elsewhere.
        late = self._take_late_refusal if request_type == "generation_only" else self._call.late
        # Where the KV cache was lost, the server is well, and may be asked again.
        call = structs.replace(self._call, inputs=inputs, affinity=None, tried=[], sent=[], late=late)
        has_answered = was_refused = False
        num_held = 0  # tokens that another server would generate again
        try:
            async with aclosing(self._generate(call, "generation")) as answer:
                async for parts in answer:
                    has_answered = True
                    new = []
                    for part in parts:
                        text, reasoning = part.text[num_text:], part.reasoning[num_reasoning:]
                        num_text -= len(part.text) - len(text)
                        num_reasoning -= len(part.reasoning) - len(reasoning)
                        num_held += part.num_output_tokens
                        if text or reasoning or part.finish_reason:
                            told = structs.replace(part, text=text, reasoning=reasoning, num_output_tokens=num_held)
                            new.append(told)
                            num_held, self._has_more = 0, True
                    if new:
                        yield new
        except UpstreamError:
            was_refused = not has_answered
            raise
        finally:
            self._call.tried.extend(call.tried)
            # A server fetches the KV cache of a request that it takes, even if the client has left meanwhile.
            if call.sent and not was_refused and request_type == "generation_only":
                self._must_fetch = False

    def let_go(self) -> None:
        """Have the KV cache fetched where nothing else does."""
        if self._must_fetch:
            self._must_fetch = False
            self._in_background(self._release())

    def _take_handover(self, parts: list[Part]) -> None:
        for part in parts:
            if part.context_phase_params:
                self.handover, self._must_fetch = part.context_phase_params, True

    def _take_late(self, parts: list[Part], error: UpstreamError | None) -> None:
        """The context server was told to stop; it may have finished before."""
        self._call.late(parts, error)
        self._take_handover(parts)
        self.let_go()

    def _take_late_refusal(self, parts: list[Part], error: UpstreamError | None) -> None:
        """The client left, perhaps before it was known that the generation server did not take the request."""
        self._call.late(parts, error)
        if error is not None and error.unprocessed:
            self._must_fetch = True
            self.let_go()

    async def _release(self) -> None:
        """Have a generation server fetch a KV cache that nobody wants: the context server holds it until then."""
        inputs: dict[str, object] = {
            "text_input": ".",
            "request_type": "generation_only",
            "context_phase_params": self.handover,
            "sampling_parameters": '{"max_tokens":1}',
            "timeout_ms": round(_RELEASE_S * 1e3),
        }
        until_s = time.monotonic() + _RELEASE_S
        # Another server is risked for it all the same where two have died with the request, but only one.
        died = self._call.died[:1]
        while True:
            released = Call(inputs, f"{self._call.request_id}-release", tried=[], died=died)
            try:
                async with aclosing(self._generate(released, "generation")) as answer:
                    async for _ in answer:
                        pass
            except UpstreamError as error:
                if error.unprocessed and time.monotonic() < until_s:
                    await asyncio.sleep(_RELEASE_PAUSE_S)
                    continue
                if error.code != _CONTEXT_LOST:
                    _log.warning("a context server may hold the KV cache of %s: %s", self._call.request_id, error)
            return
