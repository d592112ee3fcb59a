"""What the model on a server takes and gives: ours, or one of those that others serve.

Which it is, its inputs show:

    deepseek   has stream_mode: this project's backend
    llmapi     has streaming and sampling_param_...: TensorRT-LLM's own model for its LLM API
    vllm       has stream and sampling_parameters: Triton's vLLM backend
    plain      anything else with a text_input and a text_output, such as TensorRT-LLM's ensemble

Only ours says for sure when an answer is complete; of the others the end of the stream is the end. Of vLLM's backend
the present version is meant: `guided_...` fields go as `structured_outputs`, which older ones did not know.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepseek_triton_client._core.checked_request import Request
from deepseek_triton_client._core.client_settings import StreamMode
from deepseek_triton_client._core.exceptions import DeepseekTritonError, InvalidRequest, ProtocolError
from deepseek_triton_client._core.response_reader import ResponseReader
from deepseek_triton_client._core.results import ModelMetadata, TensorMetadata
from deepseek_triton_client._core.sampling_params import SAMPLING_FIELDS, SamplingField, SamplingParams
from deepseek_triton_client._core.text_increments import Cumulative, Deltas, Increments, Unknown
from deepseek_triton_client._core.transport import Input

_UNASKED_INTERVAL_MS = 500
"""Between the chunks of a stream that nobody reads as one: they only show whether the client is still there."""


@dataclass(frozen=True, slots=True)
class _InputPlace:
    """An input of the model that something can go to."""

    name: str
    datatype: str
    length: int
    """-1 is any."""
    batched: bool


class Dialect:
    """How to speak to one model."""

    def __init__(self, metadata: ModelMetadata, stream_mode: StreamMode | None = None) -> None:
        """`stream_mode` says how the model sends streams; None finds out (see `Unknown`). Ours is told, so it does not
        matter there. Raises ProtocolError for a model that is nothing like a text generator.
        """
        self._model_name = metadata.name
        self._declared = {each.name: each for each in metadata.inputs}
        self._outputs = {each.name: each for each in metadata.outputs}
        text = self._declared.get("text_input")
        if not _is_text(text) or not _is_text(self._outputs.get("text_output")):
            raise ProtocolError(
                f"model {metadata.name!r}: expected an input text_input and an output text_output of type BYTES, got "
                f"the inputs {sorted(self._declared)} and the outputs {sorted(self._outputs)}"
            )
        self._batched = text is not None and len(text.shape) == 2
        self.kind = _kind(self._declared)
        """deepseek, llmapi, vllm or plain."""
        self._increments = _increments(self.kind, stream_mode)
        self._prompts = {name: self._places((name,), datatype) for name, datatype in _PROMPTS.items()}
        self._fields = {field.name: self._places(_names(field), field.datatype) for field in SAMPLING_FIELDS}
        self._asides = {streaming: tuple(self._make_asides(streaming)) for streaming in (True, False)}
        defaults = {name: _input(self._fields[name], (value,)) for name, value in _DEFAULTS.items()}
        self._defaults = {name: tensor for name, tensor in defaults.items() if tensor is not None}

    def inputs(self, request: Request, *, streamed: bool) -> Sequence[Input]:
        """Raises InvalidRequest, all problems at once, for what this model has no input for.

        `streamed` asks for increments also where the caller wants the whole answer. That is done only where it can't
        change the answer: llmapi and plain models may refuse streams altogether.
        """
        params = request.params
        streaming = request.streaming or (streamed and self._may_stream_unasked(params))
        given = {field.name: value for field, value in params.given()}
        sent, missing = self._prompt(request)
        sent.extend(self._asides[streaming])
        left_open = self._left_open(request, given, streaming=streaming)
        sent.extend(self._defaults[name] for name in left_open if name in self._defaults and name not in given)
        if self.kind == "vllm":
            sent.append(Input("sampling_parameters", "BYTES", (_vllm_json(given),), self._batched))
            given = {name: value for name, value in given.items() if name not in _VLLM_FIELDS}
        for name, value in given.items():
            tensor = _input(self._fields[name], value if _FIELDS[name].many else (value,))
            if tensor is not None:
                sent.append(tensor)
            elif value != _FIELDS[name].neutral:
                missing.append(name)
        problems = [f"{self._model} has no input for {', '.join(missing)}: {self._advice}"] if missing else []
        if request.streaming:
            problems += [problem for name, problem in self._not_as_stream(params).items() if name not in missing]
        if problems:
            raise InvalidRequest("; ".join(problems))
        return sent

    def stop_inputs(self) -> Sequence[Input]:
        """What ends the running request whose id is sent along. Raises InvalidRequest where the model can't."""
        stop = _input(self._places(("stop",), "BOOL"), (True,))
        if stop is None:
            raise InvalidRequest(f"{self._model} has no input that ends a request by its id: close its stream instead")
        if self.kind == "deepseek":
            return [stop]
        return [Input("text_input", "BYTES", ("",), self._batched), stop]  # Triton wants inputs that are not optional

    def is_stopped(self, error: DeepseekTritonError) -> bool:
        """The answer to `stop_inputs` says that it is done: llmapi has an error for that, ours an empty end."""
        return self.kind == "llmapi" and "cancelled by client" in error.message

    def reader(self, request: Request) -> ResponseReader:
        return ResponseReader(request.params.n or 1, self._increments, says_end=self.kind == "deepseek")

    @property
    def _model(self) -> str:
        return f"model {self._model_name!r} ({self.kind})"

    @property
    def _advice(self) -> str:
        elsewhere = "update the server" if self.kind == "deepseek" else "serve the model with deepseek-triton"
        return f"leave that out, or {elsewhere}"

    def _prompt(self, request: Request) -> tuple[list[Input], list[str]]:
        """Its input; or the name of one that the model doesn't have."""
        name, values = _prompt(request)
        tensor = _input(self._prompts[name], values)
        return ([], [name]) if tensor is None else ([tensor], [])

    def _make_asides(self, streaming: bool) -> Iterator[Input]:
        """What is no field of SamplingParams, of what the model has."""
        asides: list[tuple[tuple[str, ...], str, Any]] = [(("streaming", "stream"), "BOOL", streaming)]
        if self.kind == "deepseek":
            asides.append((("stream_mode",), "BYTES", "delta"))
        else:
            asides += [((name,), "BOOL", True) for name in ("return_finish_reason", "return_stop_reason")]
        for names, datatype, value in asides:
            tensor = _input(self._places(names, datatype), (value,))
            if tensor is not None:
                yield tensor

    def _left_open(self, request: Request, given: Mapping[str, Any], *, streaming: bool) -> Iterator[str]:
        """Fields that the client does not leave open: they get their value of `_DEFAULTS` unless the caller gives one
        or the model doesn't have them.
        """
        if self.kind == "deepseek":
            yield "n"  # a server's own default could be several
            if request.is_chat:
                yield "separate_reasoning"
            if streaming and not request.streaming and "stream_interval" not in given:
                yield "stream_interval_ms"
            return
        yield "exclude_input_from_output"  # left open, some put the prompt before the text
        yield "return_num_input_tokens"
        if self.kind == "vllm" or not streaming:  # else it may be the count so far, on each chunk
            yield "return_num_output_tokens"
        if self.kind == "vllm" and "logprobs" in given:
            yield "return_logprobs"

    def _may_stream_unasked(self, params: SamplingParams) -> bool:
        return self.kind in ("deepseek", "vllm") and not self._not_as_stream(params)

    def _not_as_stream(self, params: SamplingParams) -> dict[str, str]:
        """Field -> why it can't be."""
        found: dict[str, str] = {}
        n = params.n or 1
        if (params.best_of or 1) > n:
            found["best_of"] = "the best of several is known at the end"
        if n > 1 and "sequence_index" not in self._outputs:
            found["n"] = f"{self._model} does not say which answer a chunk belongs to"
        if self.kind == "vllm" and params.exclude_input_from_output is False:
            found["exclude_input_from_output"] = f"{self._model} puts no prompt before a stream"
        return {name: f"{name}: {why}; use generate()" for name, why in found.items()}

    def _places(self, names: Iterable[str], datatype: str) -> tuple[_InputPlace, ...]:
        """Those of `names` that the model declares, and declares so that they can take the datatype."""
        found = (self._declared[name] for name in names if name in self._declared)
        return tuple(
            _InputPlace(tensor.name, tensor.datatype, tensor.shape[-1], self._batched)
            for tensor in found
            if tensor.datatype in _TAKEN_BY.get(datatype, (datatype,)) and len(tensor.shape) == 1 + self._batched
        )


def _names(field: SamplingField) -> tuple[str, ...]:
    """Of its input, the likeliest first."""
    return (field.tensor_name, field.name, *_OTHER_NAMES.get(field.name, ()))


def _input(places: Iterable[_InputPlace], values: Sequence[Any]) -> Input | None:
    """For the first place that has room for so many."""
    for place in places:
        if place.length in (-1, len(values)):
            return Input(place.name, place.datatype, values, place.batched)
    return None


_FIELDS = {field.name: field for field in SAMPLING_FIELDS}

_PROMPTS = {"text_input": "BYTES", "input_ids": "INT32", "messages": "BYTES"}
"""Input -> datatype; each request has one of them."""

_DEFAULTS: dict[str, Any] = {
    "n": 1,
    "separate_reasoning": True,
    "stream_interval_ms": _UNASKED_INTERVAL_MS,
    "exclude_input_from_output": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
    "return_logprobs": True,
}
"""See `_left_open`."""

_OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "bad": ("bad_words",),
    "stop": ("stop_words",),
    "seed": ("random_seed",),
    "exclude_input_from_output": ("exclude_input_in_output",),
}
"""Of a field's input, in vLLM's backend and TensorRT-LLM's ensemble."""

_TAKEN_BY: dict[str, tuple[str, ...]] = {"INT32": ("INT32", "INT64"), "FP32": ("FP32", "FP64")}
"""Datatypes of an input that have room for each value of another."""

_VLLM_GUIDES = {
    "guided_json": "json",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_structural_tag": "structural_tag",
}

_VLLM_FIELDS: dict[str, str] = {
    "bad": "bad_words",
    **{
        name: name
        for name in (
            "max_tokens",
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "seed",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "min_tokens",
            "ignore_eos",
            "stop",
            "stop_token_ids",
            "include_stop_str_in_output",
            "skip_special_tokens",
            "n",
            "logprobs",
            "truncate_prompt_tokens",
        )
    },
    **dict.fromkeys(_VLLM_GUIDES, "structured_outputs"),
}
"""Field -> key of vLLM's sampling parameters. It takes more, but its backend doesn't return what they ask for."""


def _vllm_json(fields: Mapping[str, Any]) -> str:
    """One object of what vLLM itself is to do; its guides are JSON within JSON."""
    document = {key: fields[name] for name, key in _VLLM_FIELDS.items() if name in fields and name not in _VLLM_GUIDES}
    if document.get("top_k") == 0:
        document["top_k"] = -1  # all tokens, in every version
    if fields.get("return_logprobs") or fields.get("return_cumulative_logprob"):
        document.setdefault("logprobs", 0)  # without it there is nothing to return
    guides = {key: fields[name] for name, key in _VLLM_GUIDES.items() if fields.get(name)}
    if guides:
        document["structured_outputs"] = json.dumps(guides, ensure_ascii=False)
    return json.dumps(document, ensure_ascii=False)


def _kind(declared: Mapping[str, TensorMetadata]) -> str:
    if "stream_mode" in declared:
        return "deepseek"
    if "stream" in declared and "sampling_parameters" in declared:
        return "vllm"
    if "streaming" in declared and any(name.startswith("sampling_param_") for name in declared):
        return "llmapi"
    return "plain"


def _increments(kind: str, stream_mode: StreamMode | None) -> Callable[[], Increments]:
    if kind == "deepseek" or stream_mode == "delta":
        return Deltas
    if stream_mode == "cumulative":
        return Cumulative
    return Deltas if kind == "vllm" else Unknown


def _is_text(tensor: TensorMetadata | None) -> bool:
    return tensor is not None and tensor.datatype == "BYTES" and len(tensor.shape) in (1, 2)


def _prompt(request: Request) -> tuple[str, Sequence[Any]]:
    """Input and values."""
    if request.messages is not None:
        return "messages", (request.messages,)
    if request.input_ids is not None:
        return "input_ids", request.input_ids
    return "text_input", (request.prompt,)
