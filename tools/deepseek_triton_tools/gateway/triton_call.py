"""A request to a server, what it weighs and where it belongs, the parts of its answer, and the errors between."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from deepseek_triton_client._http.http_transport import METRICS_PORT

MOST_ANSWER_BYTES = 256 * 2**20
"""Bytes of one event, or of an answer that is no stream. The log-probabilities of a long prompt are the longest."""


class Part(
    msgspec.Struct,
    gc=False,
    rename={"sequence": "sequence_index", "text": "text_output", "reasoning": "reasoning_output"},
):
    """The part of a response that is about one sequence. The names are the wire contract's outputs (docs/contract.md).

    sequence: its number in the request. finish_reason: "" while the sequence goes on. num_output_tokens: those since
    the sequence's previous Part. num_cached_tokens, num_reasoning_tokens: None where the part doesn't tell. logprobs,
    prompt_logprobs: JSON, "" where there is none. context_phase_params: the end of a context server's answer.
    """

    sequence: int = 0
    text: str = ""
    reasoning: str = ""
    finish_reason: str = ""
    stop_reason: str = ""
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int | None = None
    num_reasoning_tokens: int | None = None
    logprobs: str = ""
    prompt_logprobs: str = ""
    context_phase_params: str = ""


class Call(msgspec.Struct, frozen=True):
    """One request to the model, for any server that has it.

    inputs: the JSON body of Triton's generate endpoint without `id`. request_id: Triton's `id`, by which a stop
    request finds it. affinity: requests with equal bytes go to the same server if they can; None for no preference.
    default_max_tokens: the model's, in tokens, of a request that names no max_tokens. headers: such as traceparent,
    added to the request. tried: the URLs of the servers that were asked, the last being the one that answers; filled in
    by whoever chooses among several. context_tried: the same of the context servers.
    died: the URLs of the servers that may have died of the request; filled in like `tried`, for both roles.
    sent: the URLs of the servers that have been sent the request and have neither refused nor lost it; filled in like
    `tried`, and by the connection to each.
    late: is given the parts that came after nobody waited for them any more, and the error in their place or after
    them, also where the server was lost meanwhile. It is not called for a request that was never sent.
    """

    inputs: dict[str, object]
    request_id: str
    affinity: bytes | None = None
    # msgspec gives each call an empty one of its own, unlike a function's default.
    headers: dict[str, str] = {}
    tried: list[str] = []
    context_tried: list[str] = []
    died: list[str] = []
    sent: list[str] = []
    late: Callable[[list[Part], UpstreamError | None], None] = lambda parts, error: None
    default_max_tokens: int = 0


@dataclass(eq=False, repr=False)
class UpstreamError(Exception):
    """A server refused a request, failed it, or could not be reached.

    code: the wire contract's error code ("E_OVERLOADED"), or "" where the server gave none. unprocessed: the server
    has nothing to show for it, so that another may be asked. died: the server had taken the request, so it may have
    died of it, and another may die too. retry_after_s: when it may be sent again. told: the part of the
    message that clients may be told; "" where its code decides.
    """

    message: str
    _: KW_ONLY
    code: str = ""
    unprocessed: bool = False
    died: bool = False
    retry_after_s: float | None = None
    told: str = ""


_CODED = re.compile(r"\[(E_[A-Z_]+)\]\s*(.*)", re.DOTALL)
# Codes of a server that has nothing to show for the request.
_REFUSALS = {"E_OVERLOADED", "E_UNAVAILABLE"}
_DRAINING = "; send the request to another"
"""The backend's words while it is being stopped. Other refusals with E_UNAVAILABLE come from an engine that died."""
_UNKNOWN_MODEL = "Request for unknown model"
"""Triton's words for a model that it hasn't got, or that is not ready."""
# Triton's words when the model's process has died; some releases put others before them. With `on_fatal: unready` it
# says for ever that it is ready.
_DEAD_PROCESS = re.compile(r"Stub process .* is not healthy")
_UNPROCESSED = {401, 403, 404, 429, 502, 503}
"""Statuses of a server, or of a proxy before it, that has nothing to show for the request."""
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for what is no JSON, or no UTF-8, or nested too deep."""
_QUOTED = 200
"""Characters of an answer that is not Triton's."""


def error_of_message(message: str, *, code: str = "", unprocessed: bool = False, died: bool = False) -> UpstreamError:
    """The error for what a server says went wrong. The others are for words that don't tell."""
    coded = _CODED.match(message)
    if coded:
        code, text = coded.groups()
        died = code == "E_UNAVAILABLE" and _DRAINING not in text
        return UpstreamError(text, code=code, unprocessed=code in _REFUSALS, died=died)
    if message.startswith(_UNKNOWN_MODEL):
        return UpstreamError(message, code="E_UNAVAILABLE", unprocessed=True)
    if _DEAD_PROCESS.search(message):
        return UpstreamError(message, code="E_UNAVAILABLE", unprocessed=True, died=True)
    return UpstreamError(message, code=code, unprocessed=unprocessed, died=died)


def error_of_status(status: int, body: bytes) -> UpstreamError:
    """The error for a response other than 200."""
    try:
        document = msgspec.json.decode(body.removeprefix(b"data:"))  # Triton refuses a stream with an event
    except NOT_JSON:
        document = None
    if isinstance(document, dict) and isinstance(document.get("error"), str):
        text = document["error"]
    else:
        text = f"the server answered HTTP {status}: {body[:_QUOTED].decode(errors='replace')!r}"
    if status in (401, 403):
        text = f"the gateway was refused: {text} (--upstream-header)"
    elif status == 405:
        text += f", {METRICS_PORT}"
    code = "E_OVERLOADED" if status == 429 else ""
    return error_of_message(text, code=code, unprocessed=status in _UNPROCESSED, died=status == 502)


_decode_part = msgspec.json.Decoder(Part).decode
_decode_event = msgspec.json.Decoder(dict[str, object]).decode
_NOTHING = Part()
_NONE = "None"
"""The model's word for a finish reason and a stop reason that are not there."""


class EventReader:
    """Takes the bytes of a stream as they come."""

    def __init__(self) -> None:
        self.error: UpstreamError | None = None
        """Set by an event that is an error, or that is no event of the model. Nothing after it counts."""
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Part]:
        """Return the parts of the events that are whole now, up to one that is an error."""
        if self._rest or not data.endswith(b"\n\n"):
            data = self._whole_events(data)
        parts: list[Part] = []
        for event in data.split(b"\n\n"):
            _, data_field, document = event.partition(b"data:")
            if data_field:
                try:
                    parts += _parts_of(document)
                except UpstreamError as error:
                    self.error = error
                    break
        return parts

    def _whole_events(self, data: bytes) -> bytes:
        """The bytes up to the last end of an event; the others are kept."""
        # An event may have many megabytes, so only what is new is searched for its end.
        begin = max(0, len(self._rest) - 1)
        self._rest += data
        if len(self._rest) > MOST_ANSWER_BYTES:
            self.error = UpstreamError(f"the server sent an event of more than {MOST_ANSWER_BYTES:,} bytes")
            self._rest.clear()
            return b""
        end = self._rest.rfind(b"\n\n", begin) + 2
        if end < 2:
            return b""
        whole = bytes(self._rest[:end])
        del self._rest[:end]
        return whole


def _parts_of(document: bytes) -> list[Part]:
    """The parts in the JSON of one response. Raises UpstreamError."""
    try:
        parts = [_decode_part(document)]
    except NOT_JSON:  # it has lists, or is broken
        parts = _several(document)
    else:
        # The decoder passes over fields that it does not know, so an error looks like a part without any.
        if parts[0] == _NOTHING:
            parts = _several(document)
    for part in parts:
        if part.finish_reason == _NONE:
            part.finish_reason = ""
        if part.stop_reason == _NONE:
            part.stop_reason = ""
    return parts


def _several(document: bytes) -> list[Part]:
    """The parts of a response about several sequences, whose outputs have a value for each, in a list."""
    try:
        event = _decode_event(document)
        if "error" in event:
            raise error_of_message(str(event["error"]))
        sequences = event.get("sequence_index", 0)
        number = len(sequences) if isinstance(sequences, list) else 1
        several = [
            {name: value[at] if isinstance(value, list) else value for name, value in event.items()}
            for at in range(number)
        ]
        return msgspec.convert(several, list[Part])
    except NOT_JSON as error:
        raise UpstreamError(f"the server sent an event that is not the model's: {error}") from error
    except IndexError:
        text = f"expected a value for each of {number} sequences, got less"
        raise UpstreamError(f"the server sent an event that is not the model's: {text}") from None


def outputs_of(event: bytes) -> dict[str, object]:
    """The outputs in the one event of a task's answer. Raises UpstreamError."""
    try:
        outputs = _decode_event(event.partition(b"data:")[2])
    except NOT_JSON as error:
        raise UpstreamError(f"the server sent an answer that is not the model's: {error}") from error
    if "error" in outputs:
        raise error_of_message(str(outputs["error"]))
    return outputs


_PROMPT_CHARACTERS = 1024
"""How much of a prompt without messages counts. Longer prompts that begin alike share KV blocks."""
_PROMPT_IDS = 256


def affinity_key(prompt: str | Sequence[int] | Sequence[Mapping[str, object]], *, hint: str = "") -> bytes:
    """The value of `Call.affinity` for a text, token ids, or a conversation's messages.

    Every turn of a conversation has the same key: that of its messages up to the first of the user. With `hint`, such
    as OpenAI's `prompt_cache_key`, only the hint counts.
    """
    if hint:
        beginning: object = hint
    elif isinstance(prompt, str):
        beginning = prompt[:_PROMPT_CHARACTERS]
    elif prompt and isinstance(prompt[0], Mapping):
        # Roles and contents only: clients add other fields to the messages that they send back.
        messages = [(one.get("role"), one.get("content")) for one in prompt if isinstance(one, Mapping)]
        first_user = next((at for at, (role, _) in enumerate(messages) if role == "user"), len(messages))
        beginning = messages[: first_user + 1]
    else:
        beginning = prompt[:_PROMPT_IDS]
    # Not hash(), which differs from process to process: all workers and gateways must agree.
    return blake2b(msgspec.json.encode(beginning), digest_size=8).digest()


_CHARACTERS_PER_TOKEN = 4
_PROMPTS = ("messages", "text_input", "tools")


class Load(NamedTuple):
    """Work in flight. tokens: of prompts, and those that may be generated."""

    sequences: int = 0
    tokens: int = 0

    def plus(self, other: Load) -> Load:
        return Load(self.sequences + other.sequences, self.tokens + other.tokens)

    def minus(self, other: Load) -> Load:
        """Never less than nothing."""
        return Load(max(0, self.sequences - other.sequences), max(0, self.tokens - other.tokens))


class _Sizes(msgspec.Struct):
    """The sampling parameters that decide how much is generated."""

    max_tokens: int | None = None
    n: int = 1
    best_of: int = 1


def prompt_tokens(call: Call) -> int:
    """About how many tokens the prompt has, before any server has counted them."""
    characters = sum(len(value) for name in _PROMPTS if isinstance(value := call.inputs.get(name), str))
    ids = call.inputs.get("input_ids")
    return characters // _CHARACTERS_PER_TOKEN + (len(ids) if isinstance(ids, list) else 0)


def estimated_load(call: Call) -> Load:
    """The load of a request, before any server has counted its tokens."""
    tokens = prompt_tokens(call)
    try:
        sizes = msgspec.json.decode(str(call.inputs.get("sampling_parameters", "{}")), type=_Sizes)
    except msgspec.MsgspecError:  # the server says what is wrong with them
        sizes = _Sizes()
    num_answers = max(1, sizes.n, sizes.best_of)
    # As the server counts them, which does not look at the context either.
    max_tokens = call.default_max_tokens if sizes.max_tokens is None else max(0, sizes.max_tokens)
    return Load(num_answers, num_answers * (tokens + max_tokens))
