"""The fields that chat and text completions have in common: what each may be, what it sets at the model's server, and
the errors that name them."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TypeVar

import msgspec

from deepseek_triton_tools.tool_errors import nearest

_LONGEST_MESSAGE = 4000
"""Characters. Most messages have less than 200."""


@dataclass(eq=False, repr=False)
class OpenAIError(Exception):
    """The answer to a request that was refused or failed.

    status: the HTTP status. kind: OpenAI's `type`, such as "invalid_request_error". param: the field that is wrong.
    code: a word for programs, such as "context_length_exceeded". retry_after_s: written as Retry-After, in whole
    seconds, rounded up. headers: others of the response.
    """

    status: int
    message: str
    _: KW_ONLY
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    headers: tuple[tuple[bytes, bytes], ...] = ()

    def __post_init__(self) -> None:
        # A message may quote what the client sent, which can be as long as its request.
        if len(self.message) > _LONGEST_MESSAGE:
            self.message = f"{self.message[:_LONGEST_MESSAGE]}..."
        super().__init__(self.message)

    def body(self) -> bytes:
        """The JSON of the response."""
        return msgspec.json.encode({"error": self._document()})

    def event(self, number: int | None) -> bytes:
        """The last event of a stream that failed. number: of it among the Responses API's; None for another API."""
        if number is None:
            return b"data: %b\n\n" % self.body()
        document = self._document()
        # OpenAI's clients raise what they find under "error", others go by the type.
        typed = {**document, "type": "error", "sequence_number": number, "error": document}
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(typed)

    def _document(self) -> dict[str, str | None]:
        return {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}


def invalid(message: str, *, param: str | None = None, code: str | None = None) -> OpenAIError:
    """A request that is wrong in itself: 400."""
    return OpenAIError(400, message, param=param, code=code)


def with_names(message: str, names: Mapping[str, str]) -> str:
    """The message with other names of fields, but for what it quotes: that came from the client."""
    if not names:
        return message
    words = "|".join(map(re.escape, names))
    pattern = rf"""(?<!\w)(['"])(?:\\.|(?!\1).)*(?:\1|$)|(?<![\w.])(?P<word>{words})(?!\w)"""
    return re.sub(pattern, lambda part: names.get(part["word"], part[0]), message, flags=re.DOTALL)


Reader = Callable[[str, object], object]
_Kind = TypeVar("_Kind")
MOST_INT32 = 2**31 - 1
MOST_ITEMS = 1024
"""Values of a list or an object by token, as many as the wire contract has in the longest of them, logit_bias."""
MOST_TOKEN_IDS = 2**20
"""The wire contract's limit of `input_ids`."""
_MOST_CHOICES = 64
"""The wire contract's limit of `n`."""
# Characters of an unknown field's name: finding the nearest one takes longer than its square.
_HINT_CHARACTERS = 80


def number(name: str, value: object) -> float:
    # Python's true is 1, but whoever sends true for a number has mixed up two fields.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise wrong(name, "a number", value)
    return value


def integer(name: str, value: object) -> int:
    # JavaScript has one kind of number, so some of its clients write 7.0.
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong(name, "a whole number", value)
    return value


def between(name: str, value: object, low: int, high: int) -> int:
    """A whole number that the gateway itself counts with, or that Triton could not even read."""
    found = integer(name, value)
    if not low <= found <= high:
        raise wrong(name, f"{low} to {high}", found)
    return found


def int32(name: str, value: object) -> int:
    return between(name, value, -MOST_INT32 - 1, MOST_INT32)


def token_ids(name: str, value: object) -> list[int]:
    elements = a_list(name, value)
    if len(elements) > MOST_TOKEN_IDS:
        raise wrong(name, f"at most {MOST_TOKEN_IDS:,} token ids", len(elements))
    return [
        # Nearly all are right at once, and a name for each of a million would take a second.
        element
        if type(element) is int and 0 <= element <= MOST_INT32
        else between(f"{name}[{at}]", element, 0, MOST_INT32)
        for at, element in enumerate(elements)
    ]


def _of_type(kind: type[_Kind], expected: str) -> Callable[[str, object], _Kind]:
    def read(name: str, value: object) -> _Kind:
        if not isinstance(value, kind):
            raise wrong(name, expected, value)
        return value

    return read


boolean = _of_type(bool, "true or false")
text = _of_type(str, "a text")
a_list: Callable[[str, object], list[object]] = _of_type(list, "a list")
an_object: Callable[[str, object], dict[str, object]] = _of_type(dict, "an object")


def closed_object(name: str, value: object, keys: Collection[str]) -> dict[str, object]:
    """An object with none but these keys. A null is the same as absent."""
    found = an_object(name, value)
    for key in found:
        if found[key] is not None and key not in keys:
            message = f"{name}: unknown field {key!r:.80}; expected none but {', '.join(keys)}."
            raise invalid(message, param=name, code="unknown_parameter")
    return found


def texts(name: str, value: object) -> list[str]:
    """A list of texts, or one text; the empty one asks for nothing."""
    if isinstance(value, str):
        return [value] if value else []
    return [text(f"{name}[{at}]", element) for at, element in enumerate(a_short_list(name, value))]


def integers(name: str, value: object) -> list[int]:
    return [integer(f"{name}[{at}]", element) for at, element in enumerate(a_short_list(name, value))]


def a_short_list(name: str, value: object) -> list[object]:
    """A list that the model's server takes dozens of, so that thousands need not be read one by one."""
    elements = a_list(name, value)
    if len(elements) > MOST_ITEMS:
        raise wrong(name, f"at most {MOST_ITEMS:,} values", len(elements))
    return elements


def numbers_by_token(name: str, value: object) -> dict[str, float]:
    found = an_object(name, value)
    if len(found) > MOST_ITEMS:
        raise wrong(name, f"at most {MOST_ITEMS:,} tokens", len(found))
    if not all(map(str.isdecimal, found)):
        raise wrong(name, "token ids as keys", value)
    return {token_id: number(f"{name}[{token_id:.40}]", each) for token_id, each in found.items()}


SAMPLING: Mapping[str, Reader] = {
    "max_tokens": integer,
    "temperature": number,
    "top_p": number,
    "top_k": integer,
    "min_p": number,
    "n": integer,
    "stop": texts,
    "seed": integer,
    "presence_penalty": number,
    "frequency_penalty": number,
    "repetition_penalty": number,
    "min_tokens": integer,
    "ignore_eos": boolean,
    "stop_token_ids": integers,
    "include_stop_str_in_output": boolean,
    "skip_special_tokens": boolean,
    "add_special_tokens": boolean,
    "bad_words": texts,
    "logit_bias": numbers_by_token,
    "prompt_logprobs": integer,
    "truncate_prompt_tokens": integer,
}
"""Sampling field of OpenAI, vLLM, SGLang or TensorRT-LLM -> its type. The model's server holds the limits of each."""
CONTRACT_NAMES = {"bad_words": "bad"}
"""Field -> the wire contract's name of it, where that is another."""
INPUTS: Mapping[str, Reader] = {"priority": int32, "timeout_ms": int32}
"""Fields that are inputs of the wire contract."""
OWN_TEMPERATURE = "sampling_param_temperature"
"""The gateway's own, OpenAI's default, for several answers of a model whose defaults are greedy."""

WITHOUT_EFFECT = (
    "user",
    "user_id",
    "safety_identifier",
    "metadata",
    "store",
    "service_tier",
    "prompt_cache_retention",
    "prediction",
    "spaces_between_special_tokens",
    "stream_reasoning",
)
"""Fields that are accepted and change nothing, because clients send them everywhere. A null is the same as absent."""

REFUSED: Mapping[str, tuple[str, tuple[object, ...]]] = {
    "audio": ("the model writes text only", ()),
    "modalities": ("the model writes text only", (["text"],)),
    "web_search_options": ("the gateway runs no tools itself: give the search as a function in tools", ()),
    "verbosity": ("ask for it in the prompt", ("medium",)),
    "functions": ("use tools", ([],)),
    "function_call": ("use tool_choice", ("none", "auto")),
    "use_beam_search": ("beam search is not offered: use n", (False,)),
    "length_penalty": ("it belongs to beam search, which is not offered", (1, 1.0)),
    "early_stopping": ("it belongs to beam search, which is not offered", (False,)),
    "documents": ("put the documents into the messages", ([],)),
    "chat_template": ("the checkpoint's own template is used", ()),
    "request_id": ("send it as the header X-Request-Id", ()),
    "return_token_ids": ("token ids are given by Triton's generate endpoint only", (False,)),
    "logits_processors": ("code is not taken from requests", ([],)),
    "mm_processor_kwargs": ("the model reads text only", ({},)),
    "cache_salt": ("the KV cache is not divided between users", ()),
    "lora_path": ("there are no adapters", ()),
    "kv_transfer_params": ("the gateway decides itself which servers work together", ()),
    "moderation": ("there is no moderation here", ()),
    "echo": ("it belongs to /v1/completions", (False,)),
    "suffix": ("it belongs to /v1/completions", ("",)),
    "best_of": ("it belongs to /v1/completions: use n", (1,)),
    "allowed_token_ids": ("no engine behind the gateway takes it in every release", ([],)),
    "thinking_token_budget": ("no engine behind the gateway counts thinking apart: use max_tokens", ()),
    "return_tokens_as_token_ids": ("token ids are given by Triton's generate endpoint only", (False,)),
    "return_hidden_states": ("the model answers with tokens only", (False,)),
    "stop_regex": ("stop takes texts", ([],)),
    "no_stop_trim": ("use include_stop_str_in_output", (False,)),
    "session_params": ("nothing is kept here: send the whole conversation", ({},)),
    "custom_logit_processor": ("code is not taken from requests", ()),
    "rid": ("send it as the header X-Request-Id", ()),
    "input_ids": ("use /v1/completions with token ids as the prompt", ()),
    "enable_thinking": ("put it into chat_template_kwargs", ()),
    "reasoning": ("use reasoning_effort or thinking", ({},)),
    "extra_body": ("it is a word of OpenAI's SDKs; put its content at the top level", ({},)),
    "truncation_side": ("truncate_prompt_tokens keeps the last tokens", ("left",)),
    "session_id": ("use prompt_cache_key", ()),
    "logprob_token_ids": ("use top_logprobs", ([],)),
    "vllm_xargs": ("they are for extensions of vLLM", ({},)),
    "repetition_detection": ("use repetition_penalty", ()),
}
"""Field -> why it is refused, and its values that ask for nothing, which are accepted."""


def given_fields(document: object) -> dict[str, object]:
    """The fields of a request that are not null. Raises OpenAIError for JSON that is no object."""
    if not isinstance(document, dict):
        raise invalid(f"the request's body: expected a JSON object, got {json_text(document)[:60]}.")
    return {name: value for name, value in document.items() if value is not None}


def check_names(given: Mapping[str, object], own: Iterable[str]) -> None:
    """Raises OpenAIError for fields that are refused or unknown. own: those that the kind of request has alone."""
    known = {*SAMPLING, *INPUTS, *WITHOUT_EFFECT, *own}
    for name, value in given.items():
        if name in known:
            continue
        if name in REFUSED:
            reason, harmless = REFUSED[name]
            if value in harmless:
                continue
            raise invalid(f"{name} is not supported: {reason}.", param=name, code="unsupported_parameter")
        near = nearest(name[:_HINT_CHARACTERS], known) or "."
        raise invalid(f"unknown field {name!r:.80}{near}", param=name[:_HINT_CHARACTERS], code="unknown_parameter")


def model_inputs(given: Mapping[str, object], sampling: Mapping[str, object]) -> dict[str, object]:
    """The inputs that the common fields give, with `sampling` too, in the JSON of Triton's generate endpoint."""
    fields = {
        CONTRACT_NAMES.get(name, name): SAMPLING[name](name, value) for name, value in given.items() if name in SAMPLING
    }
    inputs = {name: INPUTS[name](name, value) for name, value in given.items() if name in INPUTS}
    if "temperature" not in given and (sampling["n"] != 1 or "best_of" in sampling):
        inputs[OWN_TEMPERATURE] = 1.0
    return {**inputs, "sampling_parameters": json_text({**fields, **sampling})}


COUNTS: Mapping[str, object] = {"return_num_input_tokens": True, "return_num_output_tokens": True}
"""The inputs that put the counts of tokens on each response, for answers whose last response may never come."""


def choices(given: Mapping[str, object]) -> tuple[int, int, int, dict[str, object]]:
    """How many choices are wanted, as how many of them each answer is given, how many answers are made, and the
    sampling fields for it.

    Greedy decoding gives the same answer each time. The model's server refuses to repeat it, OpenAI does not. A
    temperature below 1e-5 is 0 there.
    """
    wanted = integer("n", given.get("n", 1))
    best_of = integer("best_of", given.get("best_of", wanted))
    if not 1 <= wanted <= _MOST_CHOICES:
        raise wrong("n", f"1 to {_MOST_CHOICES}", wanted)
    if not wanted <= best_of <= _MOST_CHOICES:
        raise wrong("best_of", f"n, which is {wanted}, to {_MOST_CHOICES}", best_of)
    if best_of == 1:
        return 1, 1, 1, {"n": 1}  # model.yaml may have another default
    if number("temperature", given.get("temperature", 1)) < 1e-5 or given.get("top_p") == 0 or given.get("top_k") == 1:
        return wanted, wanted, 1, {"n": 1}
    return wanted, 1, best_of, {"n": wanted} if best_of == wanted else {"n": wanted, "best_of": best_of}


def stream_options(given: Mapping[str, object]) -> tuple[bool, bool]:
    """Whether a stream ends with its usage, and whether each chunk has it."""
    keys = ("include_usage", "continuous_usage_stats", "include_obfuscation")
    options = closed_object("stream_options", given.get("stream_options", {}), keys)
    if options and not given.get("stream"):
        raise invalid("stream_options is for requests with stream true.", param="stream_options")
    for name, value in options.items():
        if value is not None:
            boolean(f"stream_options.{name}", value)
    continuous = bool(options.get("continuous_usage_stats"))
    return bool(options.get("include_usage")) or continuous, continuous


def json_text(value: object) -> str:
    """For the inputs of the model that are JSON in a text."""
    return msgspec.json.encode(value).decode()


def wrong(name: str, expected: str, got: object, *, param: str | None = None) -> OpenAIError:
    """param: where it is not the first word of `name`."""
    text = "nothing" if got is None else json_text(got)
    text = text if len(text) <= 60 else text[:57] + "..."
    return invalid(f"{name}: expected {expected}, got {text}.", param=param or re.split(r"[.\[]", name)[0])
