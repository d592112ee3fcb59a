"""Which of the known Triton models answers here, and how it is spoken to.

The inputs of a model show which one it is:

    deepseek   has stream_mode, or separate_reasoning without it: this project's backend, decoupled or not
    llmapi     has streaming and sampling_param_...: TensorRT-LLM's own model for its LLM API
    vllm       has stream and sampling_parameters: Triton's vLLM backend
    plain      anything else with a text_input and a text_output, such as TensorRT-LLM's ensemble

Only this project's backend marks the end of an answer; with the others, an answer ends with its stream. For vLLM the
current backend is assumed: `guided_...` fields are sent as `structured_outputs`, which older versions do not know.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepseek_triton_client._core.checked_request import Request
from deepseek_triton_client._core.client_settings import StreamMode
from deepseek_triton_client._core.exceptions import DeepseekTritonError, InvalidRequest, ProtocolError
from deepseek_triton_client._core.interfaces import Input
from deepseek_triton_client._core.response_reader import (
    Cumulative,
    Deltas,
    Increments,
    ModelInfoReader,
    ResponseReader,
    Unknown,
)
from deepseek_triton_client._core.results import ModelMetadata, TensorMetadata
from deepseek_triton_client._core.sampling_params import GUIDES, SAMPLING_BY_NAME, SAMPLING_FIELDS, SamplingParams

_KEEPALIVE_INTERVAL_MS = 500
"""Milliseconds between chunks of a stream that the client reads for a caller who wants the whole answer: these chunks
only show the server whether the client is still there."""

_CONTENTS = {"text_input": "BYTES", "input_ids": "INT32", "messages": "BYTES", "task": "BYTES"}
"""Datatypes of the inputs that no field of SamplingParams goes to."""

_DEFAULTS: dict[str, Any] = {
    "n": 1,
    "separate_reasoning": True,
    "stream_interval_ms": _KEEPALIVE_INTERVAL_MS,
    "exclude_input_from_output": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
    "return_logprobs": True,
}
"""Values for the names of `_default_fields`."""

_OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "bad": ("bad_words",),
    "stop": ("stop_words",),
    "seed": ("random_seed",),
    "exclude_input_from_output": ("exclude_input_in_output",),
}
"""Field name -> other names of its input, in vLLM's backend and TensorRT-LLM's ensemble."""

_TAKEN_BY: dict[str, tuple[str, ...]] = {"INT32": ("INT32", "INT64"), "FP32": ("FP32", "FP64")}
"""Datatype -> the datatypes of an input that can hold all of its values."""


@dataclass(frozen=True, slots=True)
class _TargetInput:
    """An input that the model declares and that a value can be sent to."""

    name: str
    datatype: str
    length: int
    """Number of elements; -1 is any number."""
    batched: bool


class Dialect:
    """Which of the known Triton models one model is, and what its requests have to look like."""

    def __init__(self, metadata: ModelMetadata, stream_mode: StreamMode | None = None) -> None:
        """Raises ProtocolError for a model without a text input and output. `stream_mode` says how the model sends
        streams; None detects it (see `Unknown`). This project's backend is told how, so it does not matter there."""
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
        """"deepseek", "llmapi", "vllm" or "plain"."""
        self._is_decoupled = self.kind != "deepseek" or "stream_mode" in self._declared
        """The model can send streams, as far as its inputs show. One that can't gets no requests for them."""
        self._increments = _increments(self.kind, stream_mode)
        self._contents = {name: self._targets((name,), datatype) for name, datatype in _CONTENTS.items()}
        self._fields = {
            field.name: self._targets(
                (field.tensor_name, field.name, *_OTHER_NAMES.get(field.name, ())), field.datatype
            )
            for field in SAMPLING_FIELDS
        }
        self._control_inputs = {streaming: tuple(self._make_control_inputs(streaming)) for streaming in (True, False)}
        defaults = {name: _input(self._fields[name], (value,)) for name, value in _DEFAULTS.items()}
        self._defaults = {name: tensor for name, tensor in defaults.items() if tensor is not None}

    def inputs(self, request: Request, *, streamed: bool) -> Sequence[Input]:
        """Return the inputs that carry the request. Raises InvalidRequest, with all problems, for fields that the model
        has no input for.

        `streamed` asks for increments even if the caller wants the whole answer. That is done only where it can't
        change the answer: llmapi and plain models may refuse streams altogether.
        """
        params = request.params
        may_stream = self.kind in ("deepseek", "vllm") and not self._stream_problems(params)
        streaming = self._is_decoupled and (request.streaming or (streamed and may_stream))
        fields = {field.name: value for field, value in params.given()}
        sent = list(self._control_inputs[streaming])
        missing: list[str] = []
        for name, values in _contents(request):
            if (tensor := _input(self._contents[name], values)) is not None:
                sent.append(tensor)
            else:
                missing.append(name)
        for name in self._default_fields(request, fields, streaming=streaming):
            if name in self._defaults and name not in fields:
                sent.append(self._defaults[name])
        if self.kind == "vllm":
            sent.append(Input("sampling_parameters", "BYTES", (_vllm_json(fields),), self._batched))
        for field, value in params.given():
            if self.kind == "vllm" and (field.vllm or field.name in GUIDES):
                continue
            if (tensor := _input(self._fields[field.name], value if field.many else (value,))) is not None:
                sent.append(tensor)
            elif value != field.neutral:
                missing.append(field.name)
        problems = []
        if missing:
            elsewhere = "serve the model with deepseek-triton"
            if self.kind == "deepseek":
                elsewhere = "update the server" if self._is_decoupled else "build the model without --no-decoupled"
            problems = [f"{self._model} has no input for {', '.join(missing)}: leave that out, or {elsewhere}"]
        if request.streaming and self._is_decoupled:
            problems += [problem for name, problem in self._stream_problems(params).items() if name not in missing]
        if problems:
            raise InvalidRequest("; ".join(problems))
        return sent

    def stop_inputs(self) -> Sequence[Input]:
        """Return the inputs that end the request with the id sent along. Raises InvalidRequest if there are none."""
        stop = _input(self._targets(("stop",), "BOOL"), (True,))
        if stop is None:
            raise InvalidRequest(f"{self._model} has no input that ends a request by its id: close its stream instead")
        if self.kind == "deepseek":
            # Otherwise the answer is an error, whether or not there was such a request.
            told = _input(self._targets(("return_finish_reason",), "BOOL"), (True,))
            return [stop] if told is None else [stop, told]
        # Triton requires inputs that are not optional.
        return [Input("text_input", "BYTES", ("",), self._batched), stop]

    def is_stopped(self, error: DeepseekTritonError) -> bool:
        """Whether an error after `stop_inputs` means success: llmapi's does; this backend is asked for an empty end."""
        return self.kind == "llmapi" and "cancelled by client" in error.message

    def reader(self, request: Request) -> ResponseReader:
        if request.task == "describe":
            return ModelInfoReader(1, self._increments, says_end=True)
        return ResponseReader(request.params.n or 1, self._increments, says_end=self.kind == "deepseek")

    @property
    def _model(self) -> str:
        return f"model {self._model_name!r} ({self.kind})"

    def _make_control_inputs(self, streaming: bool) -> Iterator[Input]:
        """Inputs for what is no field of SamplingParams, such as streaming; only those that the model has."""
        inputs: list[tuple[tuple[str, ...], str, Any]] = [(("streaming", "stream"), "BOOL", streaming)]
        if self.kind == "deepseek":
            inputs.append((("stream_mode",), "BYTES", "delta"))
        else:
            inputs += [((name,), "BOOL", True) for name in ("return_finish_reason", "return_stop_reason")]
        for names, datatype, value in inputs:
            tensor = _input(self._targets(names, datatype), (value,))
            if tensor is not None:
                yield tensor

    def _default_fields(self, request: Request, given: Mapping[str, Any], *, streaming: bool) -> Iterator[str]:
        """Names of fields that get their value in `_DEFAULTS` unless the caller gives one or the model lacks them."""
        if self.kind == "deepseek":
            yield "n"  # the server's own default could be several
            if request.is_chat:
                yield "separate_reasoning"
            if streaming and not request.streaming and "stream_interval" not in given:
                yield "stream_interval_ms"
            return
        yield "exclude_input_from_output"  # some models put the prompt before the text by default
        yield "return_num_input_tokens"
        if self.kind == "vllm" or not streaming:  # other models may send the running count with each chunk
            yield "return_num_output_tokens"
        if self.kind == "vllm" and "logprobs" in given:
            yield "return_logprobs"

    def _stream_problems(self, params: SamplingParams) -> dict[str, str]:
        """Field name -> why the field can't be had in a stream."""
        found: dict[str, str] = {}
        n = params.n or 1
        if (params.best_of or 1) > n:
            found["best_of"] = "the best of several answers is known only at the end"
        if n > 1 and "sequence_index" not in self._outputs:
            found["n"] = f"{self._model} does not say which answer a chunk belongs to"
        if self.kind == "vllm" and params.exclude_input_from_output is False:
            found["exclude_input_from_output"] = f"{self._model} puts no prompt before a stream"
        return {name: f"{name}: {why}; use generate()" for name, why in found.items()}

    def _targets(self, names: Iterable[str], datatype: str) -> tuple[_TargetInput, ...]:
        """The inputs among `names` that the model declares, with a datatype and shape that can take the values."""
        found = (self._declared[name] for name in names if name in self._declared)
        return tuple(
            _TargetInput(tensor.name, tensor.datatype, tensor.shape[-1], self._batched)
            for tensor in found
            if tensor.datatype in _TAKEN_BY.get(datatype, (datatype,)) and len(tensor.shape) == 1 + self._batched
        )


def _input(targets: Iterable[_TargetInput], values: Sequence[Any]) -> Input | None:
    """Return the input for the first target that has room for this number of values."""
    for target in targets:
        if target.length in (-1, len(values)):
            return Input(target.name, target.datatype, values, target.batched)
    return None


def _vllm_json(fields: Mapping[str, Any]) -> str:
    """The sampling parameters for vLLM as one JSON object. Guided decoding is JSON within that JSON."""
    document = {}
    for name, value in fields.items():
        if key := SAMPLING_BY_NAME[name].vllm:
            document[key if isinstance(key, str) else name] = value
    if document.get("top_k") == 0:
        document["top_k"] = -1  # -1 means all tokens in every version of vLLM
    if fields.get("return_logprobs") or fields.get("return_cumulative_logprob"):
        document.setdefault("logprobs", 0)  # otherwise there is nothing to return
    guides = {name.removeprefix("guided_"): fields[name] for name in GUIDES if fields.get(name)}
    if guides:
        document["structured_outputs"] = json.dumps(guides, ensure_ascii=False)
    return json.dumps(document, ensure_ascii=False)


def _kind(declared: Mapping[str, TensorMetadata]) -> str:
    if "stream_mode" in declared or "separate_reasoning" in declared:
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


def _contents(request: Request) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield names and values of the inputs for what is no field of SamplingParams."""
    if request.messages is not None:
        yield "messages", (request.messages,)
    elif request.input_ids is not None:
        yield "input_ids", request.input_ids
    else:
        yield "text_input", (request.prompt,)
    if request.task is not None:
        yield "task", (request.task,)
