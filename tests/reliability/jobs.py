"""The jobs of a soak: what each asks, and the answer that it dictates, from a seed and a number alone.

Each prompt has its answer between <answer> and </answer>, and both engines say that. Every word of an answer names its
job, its sequence and its place, so that a text that is cut, out of order or another request's can't pass for a right
one. On the simulated engine a word is a token; on the stand-in for TensorRT-LLM each byte is one.
"""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

SERVER, GATEWAY, PAIR, CONTEXT, GENERATION = "server", "gateway", "pair", "context", "generation"
"""Whom a request is for: a tritonserver, the gateway before it, the gateway before a context and a generation server,
and each of these two."""
HTTP, GRPC = "HTTP", "gRPC"
LEFT = "left"
REFUSALS = frozenset({"E_INVALID_ARGUMENT", "E_UNSUPPORTED", "status 400"})
"""The outcomes of a request that asks for what can't be. Where no code begins the message, HTTP's status stands."""

_ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyz",
    "абвгдежзийклмнопрстуфхцчшщ",
    "".join(chr(0x16A0 + number) for number in range(26)),
)
"""Letters of one, two and three bytes in UTF-8. The simulated engine takes a word of up to eight for one token."""
_MAX_SEQUENCES = 4
_STANDIN_WORDS = 120
"""Most words on the stand-in, where they are up to 25 tokens each, and the context server takes 4,096."""

SHORT, MIDDLE, LONG = (1, 8), (8, 60), (100, 300)
"""Words, from and to. A long answer is one that something ends before its time."""

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
_CALL = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"

_BAD_FIELDS: tuple[Mapping[str, Any], ...] = (
    {"no_such_field": 1},
    {"max_tokens": 0},
    {"max_tokens": "ten"},
    {"temperature": 1000.0},
    {"temperature": True},
    {"n": 65, "temperature": 1.0},
    {"n": 2, "temperature": 0.0},
    {"sampling_parameters": '{"top_p": [1]}'},
    {"sampling_parameters": "{no JSON"},
    {"sampling_param_stop": ["x" * 2000]},
    {"guided_json": "{no schema"},
    {"messages": '[{"role": "user", "content": "a second prompt"}]'},
    {"text_input": ""},
)
_BAD_BODIES: tuple[Mapping[str, Any], ...] = (
    {"temperature": -1},
    {"temprature": 1},
    {"max_tokens": 0},
    {"messages": []},
    {"messages": "Hello"},
    {"n": "two"},
    {"stop": ["x"] * 100},
    {"tools": [{"type": "hammer"}]},
)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request of a job. `body` has the fields of /generate, or of OpenAI's API where `path` is not empty."""

    kind: str
    target: str = SERVER
    protocol: str = HTTP
    path: str = ""
    body: Mapping[str, Any]
    request_id: str = ""
    words: tuple[tuple[str, ...], ...] = ()
    """The words that each sequence was told to say."""
    max_tokens: int = 0
    stops: tuple[str, ...] = ()
    call: str = ""
    """The arguments of the call that follows the words, as JSON."""
    outcomes: frozenset[str]
    timeout_us: int = 0
    leave_after_chunks: int | None = None
    leave_after_s: float | None = None

    @property
    def streaming(self) -> bool:
        return bool(self.body.get("streaming") or self.body.get("stream"))

    @property
    def num_sequences(self) -> int:
        return max(1, len(self.words))


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is asked one after another, or, with `stops_after_s`, the second while the first runs."""

    number: int
    asked: tuple[Asked, ...]
    stops_after_s: float | None = None


@dataclass(frozen=True)
class Kind:
    weight: int
    make: "Callable[[Draft], Job | Asked]"


@dataclass
class Draft:
    """A job in the making: its number, its chance, and the engine that will answer."""

    number: int
    engine: str
    chance: random.Random
    kind: str = ""
    sequences: int = field(default=0, init=False)

    def say(self, length: tuple[int, int]) -> tuple[str, ...]:
        """Return the words of another sequence."""
        alphabet = _ALPHABETS[self.number % 3]
        code = _letters(self.number * _MAX_SEQUENCES + self.sequences, 5, alphabet)
        self.sequences += 1
        num_words = self.chance.randint(*length)
        if self.engine != "simulated":
            num_words = min(num_words, _STANDIN_WORDS)
        return tuple(f" {code}{_letters(place, 3, alphabet)}" for place in range(num_words))

    def max_tokens(self, words: tuple[str, ...]) -> int:
        """Return room for the whole answer, or, now and then, for less."""
        size = len(words) if self.engine == "simulated" else sum(len(word.encode()) for word in words)
        return self.chance.randint(1, size) if self.chance.random() < 0.3 else size + self.chance.randint(1, 50)

    def asked(self, words: tuple[tuple[str, ...], ...], fields: Mapping[str, Any], **more: Any) -> Asked:
        max_tokens = max(map(self.max_tokens, words))
        body: dict[str, Any] = {"max_tokens": max_tokens, **fields}
        if self.chance.random() < 0.5 and "temperature" not in body:
            body |= {"temperature": round(self.chance.uniform(0.2, 1.2), 2), "seed": self.chance.randrange(1 << 30)}
        given = {"kind": self.kind, "request_id": f"job-{self.number}", "outcomes": _ENDS, **more}
        given.setdefault("protocol", self.chance.choice((HTTP, GRPC)))
        return Asked(body=body, words=words, max_tokens=max_tokens, **given)


def _letters(number: int, length: int, alphabet: str) -> str:
    digits = []
    for _ in range(length):
        number, digit = divmod(number, len(alphabet))
        digits.append(alphabet[digit])
    return "".join(reversed(digits))


def _prompt(words: tuple[str, ...], chance: random.Random, more: str = "") -> str:
    before = chance.choice(
        ("Say", "Translate: the model predicts the next token. " * 8, "专家的注意力在缓存里。", "x\n" * 200)
    )
    return f"{before} <answer>{''.join(words)}{more}</answer>"


_ENDS = frozenset({"stop", "length"})


def _plain(draft: Draft, length: tuple[int, int], *, streaming: bool, **more: Any) -> Asked:
    words = draft.say(length)
    fields = {"text_input": _prompt(words, draft.chance)} | ({"streaming": True} if streaming else {})
    return draft.asked((words,), fields | more.pop("fields", {}), **more)


def _whole(draft: Draft) -> Asked:
    return _plain(draft, draft.chance.choice((SHORT, MIDDLE)), streaming=False)


def _stream(draft: Draft) -> Asked:
    return _plain(draft, draft.chance.choice((SHORT, MIDDLE)), streaming=True)


def _cumulative(draft: Draft) -> Asked:
    return _plain(draft, SHORT, streaming=True, fields={"stream_mode": "cumulative"})


def _long(draft: Draft) -> Asked:
    return _plain(draft, LONG, streaming=draft.chance.random() < 0.6)


def _several(draft: Draft) -> Asked:
    prompts = [draft.say(SHORT) for _ in range(draft.chance.randint(1, _MAX_SEQUENCES))]
    n = draft.chance.randint(1, 3)
    fields: dict[str, Any] = {"text_input": [_prompt(words, draft.chance) for words in prompts]}
    fields |= {"n": n, "temperature": 0.9} if n > 1 else {}
    fields |= {"streaming": True} if draft.chance.random() < 0.5 else {}
    return draft.asked(tuple(words for words in prompts for _ in range(n)), fields)


def _stop_string(draft: Draft) -> Asked:
    words = draft.say(MIDDLE)
    text = "".join(words)
    stops = ["no such text"]
    for _ in range(draft.chance.randint(1, 3)):
        at = draft.chance.randrange(len(text))
        stops.append(text[at : at + draft.chance.randint(1, 12)])
    fields = {"text_input": _prompt(words, draft.chance), "sampling_param_stop": stops}
    fields |= {"streaming": True} if draft.chance.random() < 0.6 else {}
    return draft.asked((words,), fields, stops=tuple(stops))


def _logprobs(draft: Draft) -> Asked:
    return _plain(
        draft, SHORT, streaming=draft.chance.random() < 0.5,
        fields={"logprobs": draft.chance.randint(0, 5), "return_logprobs": True},
    )  # fmt: skip


def _conversation(words: tuple[str, ...], draft: Draft, more: str = "") -> list[dict[str, str]]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": _prompt(words, draft.chance, more)}]


def _server_chat(draft: Draft) -> Asked:
    words = draft.say(MIDDLE)
    fields: dict[str, Any] = {"messages": json.dumps(_conversation(words, draft))}
    return draft.asked((words,), fields | ({"streaming": True} if draft.chance.random() < 0.6 else {}))


def _deadline(draft: Draft) -> Asked:
    outcomes = _ENDS | {"timeout"}
    if draft.chance.random() < 0.3:  # Triton's own timeout, in its own protocol
        fields, timeout_us = {"timeout_ms": 60_000}, draft.chance.randint(1, 300_000)
        return _plain(
            draft, LONG, streaming=True, fields=fields, protocol=GRPC, timeout_us=timeout_us, outcomes=outcomes
        )
    fields = {"timeout_ms": draft.chance.randint(1, 300)}
    return _plain(draft, LONG, streaming=draft.chance.random() < 0.5, fields=fields, outcomes=outcomes)


def _stopped(draft: Draft) -> Job:
    asked = _plain(draft, LONG, streaming=True, outcomes=_ENDS | {"cancelled"})
    stop = Asked(
        kind="stop request",
        protocol=draft.chance.choice((HTTP, GRPC)),
        body={"stop": True, "return_finish_reason": True},
        request_id=asked.request_id,
        # Refused where the one that it was to end has ended meanwhile.
        outcomes=frozenset({"stop", "E_INVALID_ARGUMENT"}),
    )
    return Job(number=draft.number, asked=(asked, stop), stops_after_s=draft.chance.random() * 0.3)


def _left(draft: Draft) -> Asked:
    """Left after some chunks, over HTTP: after some thousand gRPC streams that were cancelled in the middle,
    tritonserver 2.51 takes no stream any more (docs/tritonserver.md)."""
    asked = _plain(draft, LONG, streaming=True, protocol=HTTP, outcomes=_ENDS | {LEFT})
    return replace(asked, leave_after_chunks=draft.chance.choice((1, 1, 2, 5, 20)))


def _bad(draft: Draft) -> Asked:
    return _plain(
        draft, SHORT, streaming=draft.chance.random() < 0.5, fields=draft.chance.choice(_BAD_FIELDS), outcomes=REFUSALS
    )


def _openai(draft: Draft, path: str, words: tuple[str, ...], body: Mapping[str, Any], **more: Any) -> Asked:
    asked = draft.asked((words,), body, **{"target": GATEWAY, "protocol": HTTP, **more})
    fields = dict(asked.body)
    if path == "/v1/responses":
        fields["max_output_tokens"] = fields.pop("max_tokens")
        fields.pop("seed", None)
    if draft.chance.random() < 0.6:
        fields["stream"] = True
        if path != "/v1/responses":
            fields["stream_options"] = {"include_usage": True}
    return replace(asked, path=path, body=fields, request_id="")


def _chat(draft: Draft, target: str = GATEWAY) -> Asked:
    words = draft.say(draft.chance.choice((SHORT, MIDDLE)))
    return _openai(draft, "/v1/chat/completions", words, {"messages": _conversation(words, draft)}, target=target)


def _completion(draft: Draft, target: str = GATEWAY) -> Asked:
    words = draft.say(draft.chance.choice((SHORT, MIDDLE)))
    return _openai(draft, "/v1/completions", words, {"prompt": _prompt(words, draft.chance)}, target=target)


def _response(draft: Draft) -> Asked:
    words = draft.say(SHORT)
    return _openai(draft, "/v1/responses", words, {"input": _conversation(words, draft)})


def _tools(draft: Draft) -> Asked:
    words = draft.say(SHORT)
    arguments = json.dumps({"word": "".join(words).strip()}, ensure_ascii=False)
    messages = _conversation(words, draft, _CALL.format(arguments))
    asked = _openai(
        draft, "/v1/chat/completions", words, {"messages": messages, "tools": [TOOL]},
        call=arguments, outcomes=frozenset({"tool_calls"}),
    )  # fmt: skip
    # Room for all of the call, in tokens of either engine.
    return replace(asked, body={**asked.body, "max_tokens": 2000}, max_tokens=2000)


def _gateway_left(draft: Draft) -> Asked:
    words = draft.say(LONG)
    asked = _openai(
        draft, "/v1/chat/completions", words, {"messages": _conversation(words, draft)}, outcomes=_ENDS | {LEFT},
        target=draft.chance.choice((GATEWAY, PAIR)),
    )  # fmt: skip
    if asked.streaming and draft.chance.random() < 0.7:
        return replace(asked, leave_after_chunks=draft.chance.choice((1, 2, 5, 20)))
    return replace(asked, leave_after_s=draft.chance.choice((0.001, draft.chance.random() * 0.3)))


def _gateway_bad(draft: Draft) -> Asked:
    words = draft.say(SHORT)
    body = {"messages": _conversation(words, draft), **draft.chance.choice(_BAD_BODIES)}
    return _openai(
        draft, "/v1/chat/completions", words, body, outcomes=REFUSALS, target=draft.chance.choice((GATEWAY, PAIR))
    )


def _two_legs(draft: Draft) -> Job:
    """A request that the client itself carries from the context to the generation server."""
    asked = _plain(draft, draft.chance.choice((SHORT, MIDDLE)), streaming=True, protocol=HTTP)
    context = replace(
        asked, target=CONTEXT, kind="context leg", body={**asked.body, "request_type": "context_only"}, outcomes=_ENDS
    )
    generation = replace(asked, target=GENERATION, body={**asked.body, "request_type": "generation_only"})
    return Job(number=draft.number, asked=(context, generation))


KINDS: Mapping[str, Kind] = {
    "whole": Kind(14, _whole),
    "stream": Kind(14, _stream),
    "cumulative stream": Kind(3, _cumulative),
    "long": Kind(1, _long),
    "several prompts or n": Kind(5, _several),
    "stop strings": Kind(7, _stop_string),
    "log-probabilities": Kind(3, _logprobs),
    "chat": Kind(6, _server_chat),
    "deadline": Kind(5, _deadline),
    "bad input": Kind(4, _bad),
    "stopped by id": Kind(3, _stopped),
    "left by its client": Kind(5, _left),
    "gateway: chat": Kind(8, _chat),
    "gateway: completion": Kind(4, _completion),
    "gateway: response": Kind(3, _response),
    "gateway: tools": Kind(4, _tools),
    "gateway: bad input": Kind(2, _gateway_bad),
    "gateway: left by its client": Kind(3, _gateway_left),
    "pair: chat": Kind(3, lambda draft: _chat(draft, PAIR)),
    "pair: completion": Kind(2, lambda draft: _completion(draft, PAIR)),
    "pair: two legs": Kind(3, _two_legs),
}


_NOT_ON_THE_STANDIN = frozenset({"gateway: tools", "log-probabilities"})
"""Its chat template has no form for calls. The C++ sampler, which release 1.2.1 prefers, has no log-probabilities."""


def make_job(seed: int, number: int, engine: str) -> Job:
    """Return the job of this number. `engine` is "simulated", or "trtllm" for the stand-in."""
    draft = Draft(number, engine, random.Random(f"{seed}/{number}"))
    draft.kind = draft.chance.choices(list(KINDS), [kind.weight for kind in KINDS.values()])[0]
    made = KINDS[draft.kind].make(draft)
    job = made if isinstance(made, Job) else Job(number=number, asked=(made,))
    if engine != "simulated" and draft.kind in _NOT_ON_THE_STANDIN:
        return replace(job, asked=tuple(replace(asked, outcomes=REFUSALS) for asked in job.asked))
    return job
