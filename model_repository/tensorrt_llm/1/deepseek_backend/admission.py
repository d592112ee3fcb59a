"""A parsed request -> one request to the engine for each answer to each prompt; and whether they are accepted, at once.

There is no queue here; the engine has one.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deepseek_backend.answer_format import with_answer_format
from deepseek_backend.chat_rendering import ChatRenderer
from deepseek_backend.contract import ErrorCode
from deepseek_backend.engines.base import Capabilities, Engine
from deepseek_backend.engines.generate_request import (
    ContextHandover,
    GenerateRequest,
    SamplingParams,
    SharedTokenIds,
    utf8_length,
)
from deepseek_backend.engines.prompting import check_ids, last_tokens
from deepseek_backend.errors import RequestError, UnavailableError
from deepseek_backend.field_values import quoted
from deepseek_backend.messages import Prompt
from deepseek_backend.parsing import ParsedRequest
from deepseek_backend.v4_prompt import JSON_OBJECT, Rendered

MAX_ECHO_CHARACTERS = 16 << 20
"""Most characters of prompts repeated in one response: each answer to a prompt repeats it."""


def expand(
    parsed: ParsedRequest, engine: Engine, chat: ChatRenderer, ids: Iterator[int], *, wants_steps: bool = True
) -> list[GenerateRequest]:
    """Return the requests to the engine, prompt by prompt, with ids from `ids`.

    :raises RequestError: for a prompt that can't be served, or a conversation that can't be rendered.
    """
    answers, capabilities = parsed.num_sequences_per_prompt, engine.capabilities
    requests: list[GenerateRequest] = []
    echoed = 0
    for prompt in parsed.prompts:
        text, begun, continues_reasoning = rendered(prompt, parsed, chat)
        token_ids = prompt.token_ids
        if parsed.handover is not None:
            check_form(parsed.handover, capabilities)
            tokens = (*parsed.handover.first_gen_tokens, *(parsed.handover.draft_tokens or ()))
            check_ids(tokens, engine.tokenizer.vocab_size, field="context_phase_params")
            token_ids = parsed.handover.prompt_token_ids
        if parsed.handover is not None or parsed.sampling.truncate_prompt_tokens is None:
            _check_size(text, token_ids, capabilities)
        echoed += len(text) * answers if parsed.echo else 0
        if echoed > MAX_ECHO_CHARACTERS:
            raise RequestError(
                f"exclude_input_from_output: false repeats the prompts, {echoed:,} characters in all; expected at most "
                f"{MAX_ECHO_CHARACTERS:,}: leave the prompts out, or send fewer at once"
            )
        sampling = with_answer_format(
            parsed.sampling,
            parsed.tool_use,
            chat.facts.form,
            prompt=text,
            begun=begun,
            refused=capabilities.formats_refused,
            continues_reasoning=continues_reasoning,
            has_switch=chat.facts.has_switch,
        )
        sampling = _without_second_bos(text, sampling, capabilities.bos_token)
        shared = SharedTokenIds() if answers > 1 else None
        requests += [
            GenerateRequest(
                request_id=str(next(ids)),
                prompt=text,
                begun=begun,
                continues_reasoning=continues_reasoning,
                prompt_token_ids=token_ids,
                shared_token_ids=shared,
                # Several answers with one seed would be the same answer several times.
                sampling=sampling
                if not choice or sampling.seed is None
                else dataclasses.replace(sampling, seed=(sampling.seed + choice) % 2**64),
                max_tokens=parsed.max_tokens,
                priority=parsed.priority,
                wants_steps=wants_steps,
                request_type=parsed.request_type,
                handover=parsed.handover,
            )
            for choice in range(answers)
        ]
    return requests


def rendered(prompt: Prompt, parsed: ParsedRequest, chat: ChatRenderer) -> Rendered:
    """Return a prompt as text, "" for one in token ids.

    :raises RequestError: for a conversation that can't be rendered.
    """
    if prompt.messages is None:
        return Rendered(prompt.text)
    sampling = parsed.sampling
    reply_format = json.loads(sampling.guided_json) if sampling.guided_json else ""
    if sampling.guided_json_object:
        reply_format = JSON_OBJECT
    return chat.render(prompt.messages, parsed.chat_template_kwargs, parsed.tool_use, reply_format)


def prompt_tokens(parsed: ParsedRequest, engine: Engine, chat: ChatRenderer) -> list[Sequence[int]]:
    """Return the token ids of each prompt, as the engine would get them.

    :raises RequestError: for a conversation that can't be rendered.
    """
    found = []
    for prompt in parsed.prompts:
        text = rendered(prompt, parsed, chat).prompt
        sampling = _without_second_bos(text, parsed.sampling, engine.capabilities.bos_token)
        token_ids = engine.tokenizer.encode(text, sampling.add_special_tokens is not False)
        found.append(last_tokens(token_ids, sampling.truncate_prompt_tokens))
    return found


def text_of_ids(parsed: ParsedRequest, engine: Engine) -> str:
    """Return the text of the prompt in token ids.

    :raises RequestError: for an id without a token.
    """
    token_ids = parsed.prompts[0].token_ids or ()
    check_ids(token_ids, engine.tokenizer.vocab_size)
    return engine.tokenizer.decode(token_ids, skip_special_tokens=bool(parsed.sampling.skip_special_tokens))


def check_form(handover: ContextHandover, capabilities: Capabilities) -> None:
    """Check that this engine understands the handover.

    :raises RequestError: E_UNSUPPORTED for another engine's, another version's or another checkpoint's.
    """
    if handover.form != capabilities.handover_form:
        raise RequestError(
            f"context_phase_params: expected those of a context server with {capabilities.handover_form}, got those "
            f"of one with {quoted(handover.form)}: both servers have the same engine, version and checkpoint",
            code=ErrorCode.UNSUPPORTED,
        )


def _check_size(text: str, token_ids: Sequence[int] | None, capabilities: Capabilities) -> None:
    """Check that the prompt can fit the context.

    :raises RequestError: when it can't, with both numbers.
    """
    if token_ids is not None:
        if len(token_ids) >= capabilities.max_seq_len:
            raise RequestError(
                f"input_ids: {len(token_ids):,} tokens do not fit the context of {capabilities.max_seq_len:,}, "
                "with one left for the answer: shorten the prompt",
                code=ErrorCode.PROMPT_TOO_LONG,
            )
        return
    most = capabilities.max_prompt_bytes
    if most is not None and (size := utf8_length(text)) > most:
        raise RequestError(
            f"the prompt has {size:,} bytes; more than {most:,} can't fit the context: shorten it",
            code=ErrorCode.PROMPT_TOO_LONG,
        )


def _without_second_bos(text: str, sampling: SamplingParams, bos_token: str) -> SamplingParams:
    """Ask for no special tokens where a rendered chat begins with the one that the tokenizer would put before it."""
    if not bos_token or sampling.add_special_tokens is not None or not text.startswith(bos_token):
        return sampling
    return dataclasses.replace(sampling, add_special_tokens=False)


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
        num_tokens = 0
        for request in requests:
            ids = request.prompt_token_ids
            length = utf8_length(request.prompt) // BYTES_PER_TOKEN if ids is None else len(ids)
            num_tokens += request.max_tokens + length
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
            lower = "n or best_of" if name == "max_inflight" else "max_tokens, n or best_of"
            why = f"{name} is {limit:,} and this request alone is {asked:,}"
            raise RequestError(f"{why}: lower {lower}, or send fewer prompts")
        raise UnavailableError(
            f"{name} is {limit:,}, {held:,} are in flight and this request is {asked:,} more: send it again later, "
            "or to another server",
            code=ErrorCode.OVERLOADED,
        )
