"""Sampling parameters: everything that a request can say besides its prompt."""

import dataclasses
import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepseek_triton_client._core.exceptions import InvalidRequest
from deepseek_triton_client._core.wire import checked


def _field(
    datatype: str,
    *,
    many: bool = False,
    json: bool = False,
    neutral: Any = None,
    plain: bool = False,
    vllm: bool | str = False,
) -> Any:
    """A field of SamplingParams that goes to an input of this datatype.

    :param many: the value is a list.
    :param json: a mapping or a list is sent as its JSON.
    :param neutral: the value that asks for nothing.
    :param plain: the input has the field's own name, without the prefix of the sampling fields.
    :param vllm: it is one of vLLM's sampling parameters, under this name if it is another, and vLLM's backend returns
        its results.
    """
    metadata = {"datatype": datatype, "many": many, "json": json, "neutral": neutral, "plain": plain, "vllm": vllm}
    return dataclasses.field(default=None, metadata=metadata)


@dataclass(frozen=True, kw_only=True, repr=False)
class SamplingParams:
    """How to generate. A field left at None is not sent and has the server's default, except `n`, which is then 1.

    Only values of a wrong type, or which can't be sent, are refused here: with InvalidRequest, all problems at once.
    The ranges given below are checked by the server, and so is what its engine supports. Numbers may be numpy's.
    """

    max_tokens: int | None = _field("INT32", vllm=True)
    """Largest number of tokens to generate, 1 or more. The server reduces it to the room left in the context."""
    temperature: float | None = _field("FP32", vllm=True)
    """0 to 100: divides the logits; 0 is greedy decoding."""
    top_k: int | None = _field("INT32", neutral=0, vllm=True)
    """0 or more: sample among the k likeliest tokens; 0 is all."""
    top_p: float | None = _field("FP32", vllm=True)
    """0 to 1: sample among the likeliest tokens whose probabilities add up to p; 0 is the likeliest alone."""
    min_p: float | None = _field("FP32", neutral=0, vllm=True)
    """0 to 1: leave out tokens that are less likely than this share of the likeliest token's probability."""
    seed: int | None = _field("UINT64", vllm=True)
    """-2^63 to 2^64 - 1: makes sampling repeatable; a negative seed stands for 2^64 plus itself."""
    repetition_penalty: float | None = _field("FP32", neutral=1, vllm=True)
    """0.01 to 10: divides the logits of tokens seen in prompt or output; 1 is none."""
    presence_penalty: float | None = _field("FP32", neutral=0, vllm=True)
    """-2 to 2: subtracted from the logit of each token already generated; 0 is none."""
    frequency_penalty: float | None = _field("FP32", neutral=0, vllm=True)
    """-2 to 2: subtracted from the logit of a token once for each time it was generated; 0 is none."""
    min_tokens: int | None = _field("INT32", neutral=0, vllm=True)
    """0 to max_tokens: the text does not end by itself before this number of tokens."""
    ignore_eos: bool | None = _field("BOOL", neutral=False, vllm=True)
    """Go on after the end token, up to max_tokens."""
    stop: Sequence[str] | None = _field("BYTES", many=True, vllm=True)
    """Up to 64 strings that end the text; a single string needs no list."""
    stop_token_ids: Sequence[int] | None = _field("INT32", many=True, vllm=True)
    """Up to 64 token ids that end the text."""
    include_stop_str_in_output: bool | None = _field("BOOL", neutral=False, vllm=True)
    """Keep the stop string, or the stop token's text, at the end of the text."""
    skip_special_tokens: bool | None = _field("BOOL", neutral=True, vllm=True)
    """Leave special tokens out of the text, as by default."""
    add_special_tokens: bool | None = _field("BOOL", neutral=True)
    """Let the tokenizer put its special tokens before the prompt. False for prompts that already hold them."""
    exclude_input_from_output: bool | None = _field("BOOL", neutral=True)
    """False puts the prompt before the text."""
    n: int | None = _field("INT32", neutral=1, vllm=True)
    """1 to 64: number of answers; None is 1. Several need sampling, because greedy answers are all the same."""
    best_of: int | None = _field("INT32", neutral=1)
    """1 to 64, at least n: generate as many answers, return the n likeliest. Above n not possible in streams."""
    bad: Sequence[str] | None = _field("BYTES", many=True, vllm="bad_words")
    """Up to 64 strings that are not generated; a single string needs no list."""
    logit_bias: str | Mapping[int, float] | None = _field("BYTES", json=True, neutral={})
    """Token id -> -100 to 100, added to the token's logit, as a mapping or in JSON; up to 1,024 tokens. With -100 a
    token does not come, with 100 nothing else does."""
    logprobs: int | None = _field("INT32", vllm=True)
    """0 to 20: return log-probabilities of each token, and of this number of the likeliest tokens at its position."""
    prompt_logprobs: int | None = _field("INT32")
    """0 to 20: the same for the tokens of the prompt."""
    truncate_prompt_tokens: int | None = _field("INT32", vllm=True)
    """1 or more: keep only this number of the prompt's last tokens."""
    guided_json: str | Mapping[str, Any] | None = _field("BYTES", json=True)
    """A JSON schema that the text follows, as a mapping or in JSON. Only one guided_... field can be given."""
    guided_json_object: bool | None = _field("BOOL", neutral=False)
    """The text is some JSON object."""
    guided_regex: str | None = _field("BYTES")
    """A regular expression that the text matches."""
    guided_grammar: str | None = _field("BYTES")
    """A grammar, in EBNF, of the text."""
    guided_structural_tag: str | Mapping[str, Any] | None = _field("BYTES", json=True)
    """Constrains the text only inside given tags: TensorRT-LLM's structural_tag, as a mapping or in JSON."""
    return_perf_metrics: bool | None = _field("BOOL", neutral=False)
    """Let the engine measure the request, and return the result in `perf_metrics`."""
    stream_interval: int | None = _field("INT32", plain=True)
    """1 or more: number of tokens that a stream collects before it sends them together; 1 sends each token at once."""
    stream_interval_ms: int | None = _field("INT32", plain=True)
    """1 to 60,000 ms that a stream collects tokens for; with both intervals, the first one to end counts."""
    timeout_ms: int | None = _field("INT32", plain=True)
    """1 or more: ms that the server gives the request; then the text so far is the answer, with finish_reason
    "timeout". The limits in `Timeouts` are the client's and raise an error instead."""
    priority: int | None = _field("INT32", neutral=0, plain=True)
    """Position in the engine's queue, for engines with priorities: higher goes first; 0 is none."""
    separate_reasoning: bool | None = _field("BOOL", neutral=False, plain=True)
    """Put the model's reasoning into `reasoning` instead of `text`. By default the client asks for it in chats if the
    model can do it; otherwise the server's default holds."""
    chat_template_kwargs: str | Mapping[str, Any] | None = _field("BYTES", json=True, plain=True)
    """Further arguments of the chat template, such as {"thinking": True}, as a mapping or in JSON. For chats only."""
    tools: str | Sequence[Mapping[str, Any]] | None = _field("BYTES", json=True, plain=True)
    """The functions that the model may call, as OpenAI's API has them, as a list or in JSON. For chats only. The calls
    come in the text, in the model's own form."""
    tool_choice: str | Mapping[str, Any] | None = _field("BYTES", json=True, plain=True)
    """"auto" (by default), "none", "required", or {"type": "function", "function": {"name": ...}}."""
    return_cumulative_logprob: bool | None = _field("BOOL", neutral=False, plain=True)
    """Return `cumulative_logprob`, the sum of the text's log-probabilities."""
    return_logprobs: bool | None = _field("BOOL", neutral=False, plain=True)
    """Return `logprobs`; without the field `logprobs`, only those of the generated tokens."""
    return_output_ids: bool | None = _field("BOOL", neutral=False, plain=True)
    """Return `output_ids`, the ids of the generated tokens."""
    return_num_input_tokens: bool | None = _field("BOOL", neutral=False, plain=True)
    """Put the count on every chunk of a stream, not only on the last."""
    return_num_output_tokens: bool | None = _field("BOOL", neutral=False, plain=True)
    """Put the count on every chunk of a stream, not only on the last."""

    def __post_init__(self) -> None:
        vars(self).update(_normalized(self._set()))

    def __repr__(self) -> str:
        given = ", ".join(f"{field.name}={value!r}" for field, value in self.given())
        return f"SamplingParams({given})"

    def given(self) -> "Iterator[tuple[SamplingField, Any]]":
        """The fields that are set, and their values."""
        return ((SAMPLING_BY_NAME[name], value) for name, value in self._set().items())

    def merged(self, fields: Mapping[str, Any]) -> "SamplingParams":
        """Return a copy with `fields` set; None unsets a field. Raises InvalidRequest with every problem."""
        if not fields:
            return self
        values = {**self._set(), **_normalized(fields)}
        merged = object.__new__(type(self))  # made for each request, and checked values need no second check
        vars(merged).update(values)  # the other fields have their class default, None
        return merged

    def _set(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class SamplingField:
    """How one field is sent."""

    name: str
    datatype: str
    many: bool
    json: bool
    """Whether a mapping or a list is sent as its JSON."""
    neutral: Any
    """The value that asks for nothing; None if there is none."""
    plain: bool
    vllm: bool | str
    """Whether it is one of vLLM's sampling parameters, or its name there."""

    @property
    def tensor_name(self) -> str:
        return self.name if self.plain else f"sampling_param_{self.name}"

    def normalized(self, value: Any) -> Any:
        """Return `value` as plain Python objects, and lists as tuples; None for an empty list or text of a list,
        which can't be sent."""
        if self.many:
            elements = ((value,) if value else ()) if isinstance(value, str) else value
            if not isinstance(elements, Iterable) or isinstance(elements, (bytes, Mapping)):
                raise InvalidRequest(f"{self.name}: expected a list, got {elements!r:.200}")
            return tuple(checked(self.name, self.datatype, element) for element in elements) or None
        if self.json and isinstance(value, (list, tuple) if self.name == "tools" else Mapping):
            try:
                plain = dict(value) if isinstance(value, Mapping) else value
                value = json.dumps(plain, ensure_ascii=False, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as exc:
                raise InvalidRequest(f"{self.name}: expected values that JSON can hold: {exc}") from exc
        is_integer = self.name == "seed" and hasattr(value, "__index__") and not isinstance(value, bool)
        if is_integer and -(2**63) <= value < 0:
            value = int(value) + 2**64  # its input is unsigned
        also = ("a list or " if self.name == "tools" else "a mapping or ") if self.json else ""
        return checked(self.name, self.datatype, value, also)


def _normalized(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return checked values. Raises InvalidRequest with every problem."""
    unknown, wrong, values = [], [], {}
    if (newer := "max_completion_tokens") in fields:  # OpenAI's newer name, which wins as on the server
        fields = {name: value for name, value in fields.items() if name != newer} | {"max_tokens": fields[newer]}
    for name, value in fields.items():
        field = SAMPLING_BY_NAME.get(name)
        if field is None:
            unknown.append(f"unknown field {name!r}{_hint(name)}")
            continue
        try:
            values[name] = None if value is None else field.normalized(value)
        except InvalidRequest as exc:
            wrong.append(exc.message)
    if unknown or wrong:
        raise InvalidRequest("; ".join(unknown + wrong))
    return values


SAMPLING_FIELDS: tuple[SamplingField, ...] = tuple(
    SamplingField(field.name, **field.metadata) for field in dataclasses.fields(SamplingParams)
)
SAMPLING_BY_NAME = {field.name: field for field in SAMPLING_FIELDS}

GUIDES = tuple(name for name in SAMPLING_BY_NAME if name.startswith("guided_"))
"""Fields that say what the text has to look like. Only one can be given."""

JOINED_BY_GATEWAY = "deepseek-triton gateway --context-server URL joins context and generation servers"

LEFT_OUT: dict[str, str] = {
    **dict.fromkeys(("stream", "streaming"), "use stream() or stream_chat()"),
    "stream_mode": "chunks are increments, whatever the server sends; see the client's stream_mode",
    "sampling_parameters": "give its fields by name",
    "exclude_input_in_output": "use exclude_input_from_output",
    **dict.fromkeys(("return_finish_reason", "return_stop_reason"), "the answer always has it, where the server says"),
    "text_input": "give the prompt as the first argument",
    "input_ids": "give the prompt as the first argument, as a list of ids",
    "messages": "use chat() or stream_chat()",
    **dict.fromkeys(("request_type", "context_phase_params"), JOINED_BY_GATEWAY),
    "task": "use tokenize(), detokenize() or model_info()",
}
"""Inputs of the wire contract that the client sets itself -> what a caller does instead. Besides them there is `stop`,
the flag that ends a request: `cancel()` sends it. The name `stop` means the stop strings here."""

_OTHER_NAMES: dict[str, str] = {
    **dict.fromkeys(("max_new_tokens", "max_length", "request_output_len", "output_len"), "max_tokens"),
    **dict.fromkeys(("min_length", "min_new_tokens"), "min_tokens"),
    **dict.fromkeys(("stop_words", "stop_strings", "stop_sequences"), "stop"),
    "bad_words": "bad",
    "random_seed": "seed",
    "num_return_sequences": "n",
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "end_id": "stop_token_ids",
    "json_schema": "guided_json",
    "return_log_probs": "return_logprobs",
    "top_logprobs": "logprobs",
}
"""Names that other servers and clients give a field -> its name here."""


def _hint(name: str) -> str:
    if name in ("timeout", "timeout_s", "request_timeout"):
        return ": use timeouts=Timeouts(total=...), in seconds"
    if name in LEFT_OUT:
        return f": {LEFT_OUT[name]}"
    plain = name.removeprefix("sampling_param_")
    same = plain if plain in SAMPLING_BY_NAME else _OTHER_NAMES.get(name)
    if same is not None:
        return f": use {same}"
    nearest = difflib.get_close_matches(name, SAMPLING_BY_NAME, n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else f"; the known fields are {', '.join(SAMPLING_BY_NAME)}"
