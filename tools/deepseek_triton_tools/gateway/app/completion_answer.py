"""The model's answers to the prompts of a request as a text completion: whole, or as the chunks of a stream."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from deepseek_triton_tools.gateway.app.token_counts import TokenCounts
from deepseek_triton_tools.gateway.protocol.completion_request import CompletionRequest
from deepseek_triton_tools.gateway.protocol.finish_reasons import finish_of
from deepseek_triton_tools.gateway.protocol.openai_logprobs import CompletionLogprobs, completion_logprobs
from deepseek_triton_tools.gateway.triton.call import Part

_encode = msgspec.json.encode


class _Choice:
    def __init__(self, echoed: str) -> None:
        self.echoed = echoed
        self.text = [echoed]
        self.logprobs: list[str] = []
        """The contract's JSON, the prompt's first."""
        self.finish_reason = ""
        self.stop_reason = ""
        self.num_characters = 0
        """Length of the tokens that were told, for the offsets of the next ones."""


class CompletionAnswer:
    """echoed: the text of each prompt, where the request wants it before the answer; "" where not."""

    def __init__(self, request: CompletionRequest, identity: dict[str, object], echoed: Iterable[str]) -> None:
        self._request = request
        self._choices = [_Choice(text) for text in echoed for _ in range(request.num_choices)]
        self._counts = [TokenCounts() for _ in request.prompts]
        self._identity = {**identity, "object": "text_completion"}
        self._head = b"data: %b" % _encode(self._identity)[:-1]
        self._tail = b',"usage":null}\n\n' if request.include_usage else b"}\n\n"

    @property
    def counts(self) -> TokenCounts:
        total = TokenCounts()
        for counts in self._counts:
            total = total.plus(counts)
        return total

    @property
    def done(self) -> bool:
        return all(choice.finish_reason for choice in self._choices)

    @property
    def finish_reason(self) -> str:
        """The first choice's."""
        return self._choices[0].finish_reason

    def take(self, prompt: int, parts: Iterable[Part]) -> None:
        """Keep parts of the answer to a prompt, by its number, for `document`."""
        for part in parts:
            choice = self._choices[self._index(prompt, part)]
            self._counts[prompt].add(part)
            self._keep(choice, part)
            if not self._request.only_echo:
                choice.text.append(part.text)

    def document(self) -> bytes:
        """The whole response."""
        choices = [
            {
                "index": index,
                "text": "".join(choice.text),
                "logprobs": self._logprobs(choice),
                "finish_reason": "length" if self._request.only_echo else choice.finish_reason,
                **({"stop_reason": choice.stop_reason} if choice.stop_reason else {}),
            }
            for index, choice in enumerate(self._choices)
        ]
        return _encode({**self._identity, "choices": choices, "usage": self.counts.document()})

    def chunks(self, prompt: int, parts: Iterable[Part]) -> bytes:
        """The events for parts that have come."""
        events = []
        for part in parts:
            index = self._index(prompt, part)
            choice = self._choices[index]
            self._counts[prompt].add(part)
            self._keep(choice, part)
            text = "".join(choice.text) + part.text
            choice.text.clear()
            if text or choice.finish_reason:
                events.append(self._chunk(index, choice, text))
        return b"".join(events)

    def end(self) -> bytes:
        """The last chunk, with the usage, where it is wanted, and the end of the stream."""
        if not self._request.include_usage:
            return b"data: [DONE]\n\n"
        return b'%b,"choices":[],"usage":%b}\n\ndata: [DONE]\n\n' % (self._head, _encode(self.counts.document()))

    def _index(self, prompt: int, part: Part) -> int:
        return prompt * self._request.num_choices + part.sequence

    def _keep(self, choice: _Choice, part: Part) -> None:
        if self._request.echo and part.prompt_logprobs:
            choice.logprobs.append(part.prompt_logprobs)
        if part.logprobs and not self._request.only_echo:
            choice.logprobs.append(part.logprobs)
        if part.finish_reason:
            choice.finish_reason, choice.stop_reason = finish_of(part.finish_reason, part.stop_reason)

    def _logprobs(self, choice: _Choice) -> CompletionLogprobs | None:
        if self._request.logprobs is None:
            return None
        found = completion_logprobs(
            choice.logprobs, self._request.logprobs, offset=choice.num_characters, echoed=choice.echoed
        )
        choice.num_characters += sum(map(len, found["tokens"]))
        choice.logprobs = []
        return found

    def _chunk(self, index: int, choice: _Choice, text: str) -> bytes:
        logprobs = b"null" if self._request.logprobs is None else _encode(self._logprobs(choice))
        finish = _encode(choice.finish_reason or None)
        more = b',"stop_reason":%b' % _encode(choice.stop_reason) if choice.stop_reason else b""
        tail = self._tail
        if self._request.continuous_usage:
            tail = b',"usage":%b}\n\n' % _encode(self.counts.document())
        return b'%b,"choices":[{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}]%b' % (
            self._head,
            index,
            _encode(text),
            logprobs,
            finish,
            more,
            tail,
        )
