"""The wire contract: every tensor, sampling field and error code, in one place.

Parsing, responses, config.pbtxt and the tables of docs/contract.md, which says what they mean together, come from here.
This file needs the standard library only, so that the generator can load it by itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial


class Dtype(str, Enum):
    """Triton data types, as config.pbtxt spells them."""

    STRING = "TYPE_STRING"
    BOOL = "TYPE_BOOL"
    INT32 = "TYPE_INT32"
    INT64 = "TYPE_INT64"
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
    CONTEXT_LOST = "E_CONTEXT_LOST"
    CANCELLED = "E_CANCELLED"
    INTERNAL = "E_INTERNAL"


TRITON_CODES = {
    ErrorCode.INVALID_ARGUMENT: "INVALID_ARG",
    ErrorCode.UNSUPPORTED: "INVALID_ARG",
    ErrorCode.PROMPT_TOO_LONG: "INVALID_ARG",
    ErrorCode.OVERLOADED: "UNAVAILABLE",
    ErrorCode.UNAVAILABLE: "UNAVAILABLE",
    ErrorCode.CONTEXT_LOST: "UNAVAILABLE",
    ErrorCode.CANCELLED: "CANCELLED",
    ErrorCode.INTERNAL: "INTERNAL",
}
"""Our code -> the name of Triton's status code.

Don't rely on the HTTP status: tritonserver 2.51 answers 400 for all four when the first response of /generate is an
error. The code in the message is the same everywhere.
"""

ERROR_MEANINGS = {
    ErrorCode.INVALID_ARGUMENT: "a value, a type or a name is wrong; the message says which one and what is allowed",
    ErrorCode.UNSUPPORTED: "the field is known, but this engine, this release's sampler or a model that is not "
    "decoupled does not support it",
    ErrorCode.PROMPT_TOO_LONG: "the prompt is longer than max_seq_len or than any may be; the message has both",
    ErrorCode.OVERLOADED: "too many requests or tokens are in flight; send the request again later",
    ErrorCode.UNAVAILABLE: "the engine is dead or the model is being stopped; send the request to another server",
    ErrorCode.CONTEXT_LOST: "the KV cache of context_phase_params can't be fetched; send the request again, with "
    "request_type context_and_generation",
    ErrorCode.CANCELLED: "the request was ended because its client had gone; also the answer to a stop request",
    ErrorCode.INTERNAL: "the engine failed; nothing is wrong with the request",
}


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of the model."""

    name: str
    meaning: str
    dtype: Dtype
    dims: tuple[int, ...]
    """Shape; -1 stands for any length. There is no batch dimension: max_batch_size is 0 and the engine batches."""
    optional: bool = True


@dataclass(frozen=True)
class SamplingFieldSpec:
    """One field that shapes generation. A request gives it as the input `sampling_param_<name>`, as a key of
    `sampling_parameters`, or by its plain name.

    REQUEST_FIELDS are checked by the same rules; a request gives them by their plain names only.
    """

    name: str
    meaning: str
    dtype: Dtype
    guided: bool = False
    """The field constrains the text to a form. A request may have only one such field."""
    low: float | None = None
    high: float | None = None
    many: bool = False
    """The value is a list and the tensor's shape is [-1]. A plain name can't hold one: Triton limits it to scalars."""
    max_items: int = 64
    """Most values of a list, or entries of an object by token."""
    max_length: int = 1024
    """Most characters of a string. It is short because stop strings are searched for in every token of every stream."""
    plain_name: bool = True
    """False where the plain name means something else on the wire."""
    choices: tuple[str, ...] = ()
    """The only strings allowed, where there are any."""
    json: bool = False
    """The value is a string that holds JSON; in `sampling_parameters` an object may stand in its place."""
    by_token: bool = False
    """The JSON is an object of token id -> number. The range holds for each number, and max_items for all entries."""
    neutral: bool | float | str | Mapping[int, float] | None = field(default=None, hash=False)
    """The value that asks for nothing. A field with this value counts as not given, on every engine."""
    off: int | None = None
    """The value by which clients of vLLM and SGLang ask for nothing. It is read as `neutral`, and where there is none,
    as not given."""

    @property
    def tensor(self) -> TensorSpec:
        dims = (-1,) if self.many else (1,)
        return TensorSpec(f"sampling_param_{self.name}", self.meaning, self.dtype, dims)

    def range_text(self) -> str:
        """The allowed range in words, for error messages and the reference; empty where there is none."""
        if self.low is None and self.high is None:
            return ""
        low = "" if self.low is None else f">= {self.low}"
        high = "" if self.high is None else f"<= {self.high}"
        return " and ".join(part for part in (low, high) if part)


INT32_MAX = 2**31 - 1
MAX_STREAM_INTERVAL_MS = 60_000
MAX_SEQUENCES = 64
"""Most answers to one prompt."""
MAX_PROMPTS = 256
"""Most prompts of one request."""
MAX_SEQUENCES_OF_REQUEST = 1024
"""Most answers to all prompts of one request."""
MAX_INPUT_IDS = 1 << 20
MAX_CHAT_BYTES = 4 << 20
"""Most bytes of one prompt, of a conversation in JSON, and of each other input that is JSON: several times what the
longest context holds."""
MAX_MESSAGES = 10_000
"""Most messages of a conversation. A chat template takes tens of microseconds for each, while nobody else is served."""
MAX_JSON_DEPTH = 128
"""Most levels of nesting in JSON, in which everything after its reading can still go down and write it again. Schemas
of real tools have a dozen."""
MAX_TOOLS = 128
"""Most tools of a request; the limit of DeepSeek's and OpenAI's own APIs."""
MAX_LOGPROBS = 20
"""Most alternatives to one token; OpenAI's own limit."""
MAX_BIASED_TOKENS = 1024
"""Most tokens of logit_bias, the limit of vLLM's worker (vllm/v1/worker/gpu/sample/logit_bias.py, 0.25.1)."""
_LONG_TEXT = 1 << 16
"""Most characters of a schema, regular expression or grammar, or of an object by token."""

# Kinds of fields and inputs. Each is called with a name and a meaning, then with what the kind leaves open.
_integer = partial(SamplingFieldSpec, dtype=Dtype.INT32, high=INT32_MAX)
_number = partial(SamplingFieldSpec, dtype=Dtype.FP32)
_share = partial(_number, low=0, high=1)
_penalty = partial(_number, low=-2, high=2, neutral=0)
_num_answers = partial(_integer, low=1, high=MAX_SEQUENCES, neutral=1)
_num_logprobs = partial(_integer, low=0, high=MAX_LOGPROBS)
_switch = partial(SamplingFieldSpec, dtype=Dtype.BOOL, neutral=False)
_text = partial(SamplingFieldSpec, dtype=Dtype.STRING)
_guide = partial(_text, guided=True, max_length=_LONG_TEXT)
_flag = partial(TensorSpec, dtype=Dtype.BOOL, dims=(1,))
_json = partial(TensorSpec, dtype=Dtype.STRING, dims=(1,))
_text_output = partial(TensorSpec, dtype=Dtype.STRING, dims=(-1,))

SAMPLING_FIELDS: tuple[SamplingFieldSpec, ...] = (
    _integer(
        "max_tokens",
        "The largest number of tokens to generate. The space that is left in the context is a limit too. "
        "Default: default_max_tokens of model.yaml.",
        low=1,
    ),
    _number("temperature", "Divides the logits; 0 means greedy decoding.", low=0, high=100),
    _integer("top_k", "Sample among the k likeliest tokens; 0 or -1 means all tokens.", low=0, neutral=0, off=-1),
    _share(
        "top_p", "Sample among the likeliest tokens whose probabilities add up to p; 0 means the likeliest token only."
    ),
    _share("min_p", "Leave out tokens whose probability is less than this share of the likeliest token's.", neutral=0),
    SamplingFieldSpec(
        "seed",
        "Makes sampling repeatable; a negative seed s means 2^64 + s. Default: a new seed for each request. From "
        "2^63 on it is sent as sampling_param_seed: Triton rounds the plain number, which is refused.",
        dtype=Dtype.UINT64,
        low=-(2**63),
        high=2**64 - 1,
    ),
    _number(
        "repetition_penalty",
        "Divides positive logits, and multiplies negative ones, of tokens seen in prompt or output; 1 means no "
        "penalty.",
        low=0.01,
        high=10,
        neutral=1,
    ),
    _penalty("presence_penalty", "Subtracted from the logit of each token that has already been generated."),
    _penalty("frequency_penalty", "Subtracted from the logit of a token once for each time it has been generated."),
    _integer(
        "min_tokens",
        "The end token and stop_token_ids are not sampled before this many tokens have been generated.",
        low=0,
        neutral=0,
    ),
    _switch("ignore_eos", "Go on after the end token, up to max_tokens."),
    _text(
        "stop",
        "Strings that end the text. They are not part of it unless include_stop_str_in_output is true. With "
        "separate_reasoning they are not searched in the reasoning.",
        many=True,
        plain_name=False,
    ),
    _integer("stop_token_ids", "Tokens that end the text.", many=True, low=0),
    _switch("include_stop_str_in_output", "Keep the stop string, or the stop token's text, at the end of the text."),
    _switch("skip_special_tokens", "Leave special tokens out of the text. Default: true.", neutral=True),
    _switch(
        "add_special_tokens",
        "Let the tokenizer put its begin-of-sentence token before the prompt. Default: true.",
        neutral=True,
    ),
    _switch("exclude_input_from_output", "False puts the prompt before the text. Default: true.", neutral=True),
    _num_answers(
        "n", "Number of answers to each prompt. It needs sampling: greedy decoding gives the same answer every time."
    ),
    _num_answers(
        "best_of",
        "Generate this many answers to each prompt and return the n with the highest cumulative_logprob. Not "
        "for streams: the best answers are known only at the end.",
    ),
    _text("bad", "Strings that must not be generated.", many=True),
    _text(
        "logit_bias",
        "Added to the logits of single tokens, before penalties and temperature: a JSON object of token id -> number, "
        f'such as {{"5": -100}}, of at most {MAX_BIASED_TOKENS:,} tokens. With -100 a token does not come, with 100 '
        "nothing else does. Log-probabilities are those of the model, without it.",
        low=-100,
        high=100,
        json=True,
        by_token=True,
        max_items=MAX_BIASED_TOKENS,
        max_length=_LONG_TEXT,
        neutral={},
    ),
    _num_logprobs(
        "logprobs",
        "For each generated token, put into the output logprobs its log-probability and those of this many of "
        "the likeliest tokens at that position. 0 means the generated token only.",
    ),
    _num_logprobs("prompt_logprobs", "Like logprobs, but for the tokens of the prompt, in the output prompt_logprobs."),
    _integer(
        "truncate_prompt_tokens", "Keep only the last tokens of the prompt, this many; -1 keeps all.", low=1, off=-1
    ),
    _guide("guided_json", "A JSON schema that the text must follow.", json=True),
    _switch("guided_json_object", "The text must be a JSON object.", guided=True),
    _guide("guided_regex", "A regular expression that the text must match."),
    _guide("guided_grammar", "A grammar in EBNF that the text must follow."),
    _guide(
        "guided_structural_tag", "Constrains only the text inside given tags; TensorRT-LLM's structural_tag.", json=True
    ),
    _switch(
        "return_perf_metrics",
        "Put the performance metrics on the final response, unless a timeout, a stop request or the server "
        "ended the request early.",
    ),
)

SAMPLING_BY_NAME = {field.name: field for field in SAMPLING_FIELDS}

TASKS = ("generate", "tokenize", "detokenize", "describe")
REQUEST_TYPES = ("context_only", "generation_only", "context_and_generation")
ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")

REQUEST_FIELDS: tuple[SamplingFieldSpec, ...] = (
    _text(
        "stream_mode",
        '"delta": each chunk carries new text. "cumulative": each chunk carries the whole text so far; all '
        "other outputs carry what is new. Default: stream_mode of model.yaml.",
        choices=("delta", "cumulative"),
    ),
    _integer(
        "stream_interval",
        "The text of a stream may wait until this many tokens can be sent together. The first text does not "
        "wait; 1 means no waiting.",
        low=1,
    ),
    _integer(
        "stream_interval_ms",
        "Milliseconds for which the text of a stream may wait for more text. With stream_interval too, the text "
        "is sent as soon as one of the two is reached; with neither of them, model.yaml decides.",
        low=1,
        high=MAX_STREAM_INTERVAL_MS,
    ),
    _integer(
        "timeout_ms",
        "The largest number of milliseconds from the request's arrival to the last token. After that the text "
        'so far is the answer, with finish_reason "timeout".',
        low=1,
    ),
    _integer(
        "priority",
        "Requests with a higher priority go first, on engines that support it; 0 means no priority.",
        low=-INT32_MAX,
        neutral=0,
    ),
    _text(
        "request_type",
        'Of a request that two servers share, the part that this one does; see "Disaggregated serving". Default: '
        '"context_and_generation", all of it.',
        choices=REQUEST_TYPES,
        neutral="context_and_generation",
    ),
    _text(
        "task",
        '"generate": the default. "tokenize", "detokenize" and "describe" generate nothing; see "Tasks".',
        choices=TASKS,
    ),
)
"""Fields of the request as a whole. Each has one value."""

# Clients that fill in a model's inputs from its config.pbtxt, such as triton_cli, leave out the optional ones. Triton
# only counts the inputs of a request, so another one in its place is enough (infer_request.cc of Triton's core).
TEXT_INPUT = TensorSpec(
    "text_input",
    "The prompt. Each of several prompts gets its own answer. It may be empty beside messages or input_ids.",
    dtype=Dtype.STRING,
    dims=(-1,),
    optional=False,
)

REQUEST_INPUTS: tuple[TensorSpec, ...] = (
    TEXT_INPUT,
    TensorSpec("input_ids", "The prompt in token ids, instead of text_input.", dtype=Dtype.INT32, dims=(-1,)),
    TensorSpec(
        "messages",
        "A conversation, instead of text_input: a JSON array of {role, content}, rendered with the "
        "checkpoint's own chat template. Each of several conversations gets its own answer.",
        dtype=Dtype.STRING,
        dims=(-1,),
    ),
    _json(
        "chat_template_kwargs", 'A JSON object of further arguments for the chat template, such as {"thinking": true}.'
    ),
    _json(
        "context_phase_params", "The output of the same name that the same request got with request_type context_only."
    ),
    _json(
        "tools",
        'The tools that the model may call, beside messages: a JSON array of {"type": "function", "function": {"name", '
        '"description", "parameters"}}, as OpenAI\'s API has them.',
    ),
    _json(
        "tool_choice",
        '"auto": the model decides (the default). "none": the tools are not shown to it. "required": it must call one. '
        '{"type": "function", "function": {"name": N}} as JSON: it must call this one.',
    ),
    _flag("streaming", "Send increments as they are made; otherwise there is one response at the end."),
    _flag("stream", "The same as streaming, under the name that Triton's vLLM backend uses."),
    _flag(
        "stop",
        "End the running requests that have this request's id; they are answered with their text so far. Nothing is "
        "generated. The answer is the error E_CANCELLED, whether or not there was such a request. With "
        'return_finish_reason it is a response with finish_reason "stop", or an error if nobody has the id.',
    ),
    _json("sampling_parameters", "One JSON object with any of the sampling fields, under their plain names."),
    _flag(
        "exclude_input_in_output",
        "False puts the prompt before the text. This is the vLLM backend's name for `exclude_input_from_output`.",
    ),
    _flag("return_finish_reason", 'Put finish_reason on every chunk; it is "None" on all but the last.'),
    _flag("return_stop_reason", 'Put stop_reason on every chunk; it is "None" where there is none.'),
    *(TensorSpec(field.name, field.meaning, field.dtype, (1,)) for field in REQUEST_FIELDS),
    _flag("separate_reasoning", "Put the model's reasoning into reasoning_output instead of text_output."),
    _flag(
        "return_cumulative_logprob", "Put cumulative_logprob, the sum of the log-probabilities so far, on every chunk."
    ),
    _flag(
        "return_logprobs",
        "Put logprobs on every chunk. If the field logprobs is not set, only the log-probabilities of the "
        "generated tokens are given.",
    ),
    _flag("return_output_ids", "Put output_ids on every chunk."),
    _flag("return_num_input_tokens", "Put num_input_tokens on every chunk, not only on the last."),
    _flag("return_num_output_tokens", "Put num_output_tokens on every chunk, not only on the last."),
)

INPUTS: tuple[TensorSpec, ...] = REQUEST_INPUTS + tuple(field.tensor for field in SAMPLING_FIELDS)

_STREAM_SHAPE = frozenset({"stream_mode", "stream_interval", "stream_interval_ms"})


def declared_inputs(*, decoupled: bool) -> tuple[TensorSpec, ...]:
    """The inputs in config.pbtxt. A model that is not decoupled has no streams, so it lacks those that shape them; by
    that clients know it. It keeps `streaming` and `stream`, which existing clients send as false."""
    return INPUTS if decoupled else tuple(tensor for tensor in INPUTS if tensor.name not in _STREAM_SHAPE)


def _output(name: str, dtype: Dtype, meaning: str) -> TensorSpec:
    return TensorSpec(name, meaning, dtype, dims=(-1,))


PERF_OUTPUTS: tuple[TensorSpec, ...] = (
    _output("kv_cache_reused_block", Dtype.INT32, "KV blocks of the prompt that were found in the cache."),
    _output("kv_cache_missed_block", Dtype.INT32, "KV blocks of the prompt that were not found in the cache."),
    _output("kv_cache_alloc_new_blocks", Dtype.INT32, "KV blocks newly allocated."),
    _output("kv_cache_alloc_total_blocks", Dtype.INT32, "KV blocks allocated in total."),
    _output("kv_cache_hit_rate", Dtype.FP32, "reused / (reused + missed)."),
    _output(
        "arrival_time_ns",
        Dtype.INT64,
        "Time at which the engine got the request, in nanoseconds of the engine's clock.",
    ),
    _output("first_scheduled_time_ns", Dtype.INT64, "Time at which the request was first scheduled."),
    _output("first_token_time_ns", Dtype.INT64, "Time of its first token."),
    _output("last_token_time_ns", Dtype.INT64, "Time of its last token."),
    _output("acceptance_rate", Dtype.FP32, "Accepted / proposed draft tokens; 0 without speculative decoding."),
    _output("total_accepted_draft_tokens", Dtype.INT32, "Draft tokens that were accepted."),
    _output("total_draft_tokens", Dtype.INT32, "Draft tokens that were proposed."),
)
"""Outputs on the final response with `return_perf_metrics`. The names are upstream's; the types are those that upstream
declares, though it sends others."""

OUTPUTS: tuple[TensorSpec, ...] = (
    TensorSpec("text_output", "The text; in a stream, the new text.", dtype=Dtype.STRING, dims=(-1,), optional=False),
    _text_output(
        "finish_reason",
        'With the last chunk of a sequence: "stop", "length", "cancelled" or "timeout". "None" for a sequence that '
        "goes on.",
    ),
    _text_output(
        "stop_reason",
        "Sent together with finish_reason: the stop string that ended the text, or the id of the stop token, in "
        "decimal.",
    ),
    _output(
        "num_input_tokens", Dtype.INT32, "Prompt length in tokens; 0 if the request ended before the length was known."
    ),
    _output("num_output_tokens", Dtype.INT32, "Tokens generated since the previous response that had this output."),
    _output(
        "num_cached_tokens",
        Dtype.INT32,
        "On the final response: prompt tokens found in the KV cache. TensorRT-LLM before 1.2 does not tell.",
    ),
    _output(
        "num_reasoning_tokens",
        Dtype.INT32,
        "On the final response, with separate_reasoning: generated tokens up to the end of the reasoning, its closing "
        "tag with them; 0 where there was none.",
    ),
    _output("sequence_index", Dtype.INT32, "Numbers of the sequences in the response, where a request has several."),
    _text_output("reasoning_output", "The reasoning, if separate_reasoning is true; in a stream, only the new part."),
    _output("output_ids", Dtype.INT32, "Ids of the generated tokens; in a stream, the new ones."),
    _output("cumulative_logprob", Dtype.FP32, "Sum of the log-probabilities of the tokens so far."),
    _text_output(
        "logprobs",
        "JSON: for each token an object of token id -> {logprob, rank, decoded_token}, the generated token first.",
    ),
    _text_output(
        "prompt_logprobs",
        "Like logprobs, but for the tokens of the prompt. It comes with the first chunk; the prompt's first "
        "token has null.",
    ),
    _text_output(
        "context_phase_params",
        "The answer to request_type context_only: a JSON object for the generation server's input of the same name.",
    ),
    _text_output("model_info", 'The answer to the task "describe": a JSON object, see "Tasks".'),
    *PERF_OUTPUTS,
)

EXEMPT_PARAMETERS = frozenset({"id", "priority", "triton_enable_empty_final_response"})
"""Request parameters that belong to Triton or its clients and are never taken for misspelt fields."""

TIMEOUT_US = _integer(
    "timeout",
    "Triton's own request timeout: timeout_ms in microseconds; 0 means none, and of the two the shorter one counts.",
    low=0,
    high=2**63 - 1,
)
"""It comes as a request parameter only, and gRPC's another way; there is no input of this name."""
