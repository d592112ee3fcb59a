"""THE wire contract: every tensor, sampling field and error code, in one place.

Parsing (`request.py`), responses (`response.py`), config.pbtxt and the reference in `docs/` all come from these tables.
Needs the standard library only, so that the generator can load this file by itself.

Usage
-----
`num_input_tokens` is the prompt's length in tokens, the same number whenever it is sent. `num_output_tokens` counts
the tokens since the previous response that carried it, so the sum over the responses of a request is its total,
streamed or not. Both are on every final response; `return_num_input_tokens` and `return_num_output_tokens` put them on
each chunk too.

Streams
-------
Chunks are increments: joined, they are byte for byte the text of the same request not streamed. `finish_reason` comes
with the last one. A request that fails after its first chunk ends with an error instead. /generate has room for one
response only, so a stream is asked of /generate_stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Dtype(str, Enum):
    """Triton data types, as config.pbtxt spells them."""

    STRING = "TYPE_STRING"
    BOOL = "TYPE_BOOL"
    INT32 = "TYPE_INT32"
    UINT64 = "TYPE_UINT64"
    FP32 = "TYPE_FP32"


class ErrorCode(str, Enum):
    """The machine-readable code that every error message begins with, in brackets.

    gRPC streams and SSE events lose Triton's status code, so the message carries it.
    """

    INVALID_ARGUMENT = "E_INVALID_ARGUMENT"
    UNSUPPORTED = "E_UNSUPPORTED"
    PROMPT_TOO_LONG = "E_PROMPT_TOO_LONG"
    OVERLOADED = "E_OVERLOADED"
    UNAVAILABLE = "E_UNAVAILABLE"
    CANCELLED = "E_CANCELLED"
    INTERNAL = "E_INTERNAL"


TRITON_CODES = {
    ErrorCode.INVALID_ARGUMENT: "INVALID_ARG",
    ErrorCode.UNSUPPORTED: "INVALID_ARG",
    ErrorCode.PROMPT_TOO_LONG: "INVALID_ARG",
    ErrorCode.OVERLOADED: "UNAVAILABLE",
    ErrorCode.UNAVAILABLE: "UNAVAILABLE",
    ErrorCode.CANCELLED: "CANCELLED",
    ErrorCode.INTERNAL: "INTERNAL",
}
"""Our code -> the name of Triton's status code.

Don't go by the HTTP status: tritonserver 2.51 answers 400 for all four when the first response of /generate is an
error. The code in the message is the same everywhere.
"""


ERROR_MEANINGS = {
    ErrorCode.INVALID_ARGUMENT: "a value, a type or a name is wrong; the message says which and what is allowed",
    ErrorCode.UNSUPPORTED: "the field is known, but this engine, or this release's sampler, does not do it",
    ErrorCode.PROMPT_TOO_LONG: "the prompt does not fit max_seq_len; the message has both numbers",
    ErrorCode.OVERLOADED: "too much is in flight; send it again later",
    ErrorCode.UNAVAILABLE: "the engine is gone or the model is stopping; send it to another server",
    ErrorCode.CANCELLED: "ended because its client had gone",
    ErrorCode.INTERNAL: "the engine failed; nothing is wrong with the request",
}


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One input or output of the model."""

    name: str
    dtype: Dtype
    dims: tuple[int, ...]
    """Shape; -1 is any length. There is no batch dimension: max_batch_size is 0 and the engine batches."""
    meaning: str
    optional: bool = True


@dataclass(frozen=True, kw_only=True)
class SamplingField:
    """One way to shape generation: input `sampling_param_<name>`, a key of `sampling_parameters`, a plain name."""

    name: str
    dtype: Dtype
    meaning: str
    low: float | None = None
    high: float | None = None
    low_excluded: bool = False
    many: bool = False
    """A list: the tensor's shape is [-1]. Not available as a plain name, which Triton limits to scalars."""
    max_items: int = 64
    """Most values of a list."""
    max_length: int = 1024
    """Most characters of a string: stop strings are looked for in every token of every stream."""
    plain_name: bool = True
    """False where the plain name means something else on the wire."""
    neutral: bool | float | None = None
    """The value that asks for nothing; a field given so counts as not given, on every engine."""

    @property
    def tensor(self) -> Tensor:
        dims = (-1,) if self.many else (1,)
        return Tensor(name=f"sampling_param_{self.name}", dtype=self.dtype, dims=dims, meaning=self.meaning)

    def range_text(self) -> str:
        """The range in words, as error messages and the reference give it; empty where there is none."""
        if self.low is None and self.high is None:
            return ""
        low = "" if self.low is None else f"{'>' if self.low_excluded else '>='} {self.low}"
        high = "" if self.high is None else f"<= {self.high}"
        return " and ".join(part for part in (low, high) if part)


INT32_MAX = 2**31 - 1

SAMPLING_FIELDS: tuple[SamplingField, ...] = (
    SamplingField(
        name="max_tokens",
        dtype=Dtype.INT32,
        low=1,
        high=INT32_MAX,
        meaning="Most tokens to generate. Not given: default_max_tokens of model.yaml. Cut to the room left.",
    ),
    SamplingField(
        name="temperature", dtype=Dtype.FP32, low=0, high=100, meaning="Divides the logits; 0 is greedy decoding."
    ),
    SamplingField(
        name="top_k",
        dtype=Dtype.INT32,
        low=0,
        high=INT32_MAX,
        neutral=0,
        meaning="Sample among the k likeliest tokens; 0 is all.",
    ),
    SamplingField(
        name="top_p",
        dtype=Dtype.FP32,
        low=0,
        high=1,
        low_excluded=True,
        meaning="Sample among the likeliest tokens whose probabilities add up to p.",
    ),
    SamplingField(
        name="min_p",
        dtype=Dtype.FP32,
        low=0,
        high=1,
        neutral=0,
        meaning="Leave out tokens less likely than this share of the likeliest one's probability.",
    ),
    SamplingField(
        name="seed",
        dtype=Dtype.UINT64,
        low=0,
        high=2**64 - 1,
        meaning="Makes sampling repeatable. Not given: a new one for each request.",
    ),
    SamplingField(
        name="repetition_penalty",
        dtype=Dtype.FP32,
        low=0.01,
        high=10,
        neutral=1,
        meaning="Divides (or multiplies, when negative) the logits of tokens seen in prompt or output; 1 is none.",
    ),
    SamplingField(
        name="presence_penalty",
        dtype=Dtype.FP32,
        low=-2,
        high=2,
        neutral=0,
        meaning="Taken from the logit of each token already generated.",
    ),
    SamplingField(
        name="frequency_penalty",
        dtype=Dtype.FP32,
        low=-2,
        high=2,
        neutral=0,
        meaning="Taken from the logit of a token once for each time it was generated.",
    ),
    SamplingField(
        name="min_tokens",
        dtype=Dtype.INT32,
        low=0,
        high=INT32_MAX,
        neutral=0,
        meaning="The end token and stop_token_ids are not sampled before this many tokens.",
    ),
    SamplingField(
        name="ignore_eos", dtype=Dtype.BOOL, neutral=False, meaning="Go on after the end token, up to max_tokens."
    ),
    SamplingField(
        name="stop",
        dtype=Dtype.STRING,
        many=True,
        plain_name=False,
        meaning="Strings that end the text; not part of it unless include_stop_str_in_output.",
    ),
    SamplingField(
        name="stop_token_ids", dtype=Dtype.INT32, many=True, low=0, high=INT32_MAX, meaning="Tokens that end the text."
    ),
    SamplingField(
        name="include_stop_str_in_output",
        dtype=Dtype.BOOL,
        neutral=False,
        meaning="Keep the stop string at the end of the text.",
    ),
    SamplingField(
        name="skip_special_tokens",
        dtype=Dtype.BOOL,
        neutral=True,
        meaning="Leave special tokens out of the text. Default true.",
    ),
    SamplingField(
        name="add_special_tokens",
        dtype=Dtype.BOOL,
        neutral=True,
        meaning="Let the tokenizer put its begin-of-sentence token before the prompt. Default true.",
    ),
    SamplingField(
        name="exclude_input_from_output",
        dtype=Dtype.BOOL,
        neutral=True,
        meaning="False puts the prompt before the text. Default true.",
    ),
)

SAMPLING_BY_NAME = {field.name: field for field in SAMPLING_FIELDS}


def _flag(name: str, meaning: str) -> Tensor:
    return Tensor(name=name, dtype=Dtype.BOOL, dims=(1,), meaning=meaning)


# Optional on the wire, so that its absence is answered by the backend, with the contract's code.
TEXT_INPUT = Tensor(name="text_input", dtype=Dtype.STRING, dims=(-1,), meaning="The prompt.")

REQUEST_INPUTS: tuple[Tensor, ...] = (
    TEXT_INPUT,
    _flag("streaming", "Send increments as they come; otherwise one response at the end."),
    _flag("stream", "The same, as Triton's vLLM backend spells it."),
    _flag("stop", "End the running request that has this request's id. Nothing is generated."),
    Tensor(
        name="sampling_parameters",
        dtype=Dtype.STRING,
        dims=(1,),
        meaning="One JSON object with any of the sampling fields, by their plain names.",
    ),
    _flag("exclude_input_in_output", "False puts the prompt before the text (the vLLM backend's spelling)."),
    _flag("return_finish_reason", "Accepted for existing clients: every final response has it."),
    _flag("return_stop_reason", "Accepted for existing clients: every final response has it where there is one."),
    _flag("return_num_input_tokens", "Put num_input_tokens on every chunk, not only on the last."),
    _flag("return_num_output_tokens", "Put num_output_tokens on every chunk, not only on the last."),
)

INPUTS: tuple[Tensor, ...] = REQUEST_INPUTS + tuple(field.tensor for field in SAMPLING_FIELDS)

OUTPUTS: tuple[Tensor, ...] = (
    Tensor(
        name="text_output",
        dtype=Dtype.STRING,
        dims=(-1,),
        meaning="The text; in a stream, what is new.",
        optional=False,
    ),
    Tensor(
        name="finish_reason",
        dtype=Dtype.STRING,
        dims=(-1,),
        meaning='On the final response: "stop", "length", "cancelled" or "timeout".',
    ),
    Tensor(
        name="stop_reason",
        dtype=Dtype.STRING,
        dims=(-1,),
        meaning="On the final response, where one ended the text: the stop string, or the stop token's id in decimal.",
    ),
    Tensor(name="num_input_tokens", dtype=Dtype.INT32, dims=(-1,), meaning="Prompt length in tokens."),
    Tensor(
        name="num_output_tokens",
        dtype=Dtype.INT32,
        dims=(-1,),
        meaning="Tokens generated since the last response that had this output.",
    ),
)

EXEMPT_PARAMETERS = frozenset({"id", "priority", "timeout", "triton_enable_empty_final_response"})
"""Request parameters that belong to Triton or its clients and are never taken for a misspelt field."""
