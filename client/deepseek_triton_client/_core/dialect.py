"""Which of the known Triton models answers here, and how it is spoken to.

The inputs of a model show which one it is:

    deepseek   has stream_mode, or separate_reasoning without it: this project's backend, decoupled or not
    llmapi     has streaming and sampling_param_...: TensorRT-LLM's own model for its LLM API
    vllm       has stream and sampling_parameters: Triton's vLLM backend
    openai     is no Triton model: `openai_transport.py` speaks OpenAI's API

Only this project's backend and OpenAI's API mark the end of an answer; with the others, it ends with its stream. For
vLLM the current backend is assumed: `guided_...` fields are sent as `structured_outputs`, which older versions lack.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from deepseek_triton_client._core.checked_request import Request
from deepseek_triton_client._core.client_settings import StreamMode
from deepseek_triton_client._core.exceptions import DeepseekTritonError, InvalidRequest, ProtocolError
from deepseek_triton_client._core.interfaces import Input
from deepseek_triton_client._core.response_reader import Cumulative, Deltas, ModelInfoReader, ResponseReader
from deepseek_triton_client._core.results import ModelMetadata
from deepseek_triton_client._core.sampling_params import GUIDES, SAMPLING_BY_NAME, SamplingParams

# Milliseconds between chunks of a stream that the client reads for a caller who wants the whole answer: these chunks
# only show the server whether the client is still there.
_KEEPALIVE_INTERVAL_MS = 500


class Dialect:
    """Which of the known Triton models one model is, and what its requests have to look like."""

    def __init__(self, metadata: ModelMetadata, stream_mode: StreamMode | None = None) -> None:
        """`stream_mode` says how a model of others sends streams, if not as usual.

        :raises ProtocolError: for a model of another kind.
        """
        self._model_name = metadata.name
        self._declared = frozenset(each.name for each in metadata.inputs)
        outputs = frozenset(each.name for each in metadata.outputs)
        self._says_whose_chunk = "sequence_index" in outputs
        self.kind = "openai" if metadata.platform == "openai" else _kind(self._declared)
        """"deepseek", "llmapi", "vllm" or "openai"."""
        if not self.kind or "text_input" not in self._declared or "text_output" not in outputs:
            raise ProtocolError(
                f"model {metadata.name!r}: expected deepseek-triton's, TensorRT-LLM's llmapi or Triton's vLLM backend, "
                f"with text_input and text_output, got the inputs {sorted(self._declared)} and the outputs "
                f"{sorted(outputs)}"
            )
        # One that can't send streams gets no requests for them.
        self._is_decoupled = self.kind != "deepseek" or "stream_mode" in self._declared
        usual: StreamMode = "cumulative" if self.kind == "llmapi" else "delta"
        mode = usual if self.kind == "deepseek" else stream_mode or usual
        self._increments = Cumulative if mode == "cumulative" else Deltas

    def inputs(self, request: Request, *, streamed: bool) -> Sequence[Input]:
        """Return the inputs that carry the request. Raises InvalidRequest, with all problems, for fields that the model
        has no input for.

        `streamed` asks for increments even if the caller wants the whole answer. That is done only where it can't
        change the answer: llmapi may refuse streams altogether.
        """
        fields = {field.name: value for field, value in request.params.given()}
        stream_problems = self._stream_problems(request.params)
        may_stream = request.streaming or (streamed and self.kind != "llmapi" and not stream_problems)
        streaming = self._is_decoupled and may_stream
        sent, missing = list(self._control_inputs(streaming)), []
        for name, datatype, values in _contents(request):
            if name in self._declared:
                sent.append(Input(name, datatype, values))
            else:
                missing.append(name)
        if self.kind == "vllm":
            sent.append(Input("sampling_parameters", "BYTES", (_vllm_json(fields),)))
        is_openai_chat = self.kind == "openai" and request.is_chat
        for name, value in {**dict(self._defaults(request, fields, streaming=streaming)), **fields}.items():
            field = SAMPLING_BY_NAME[name]
            if self.kind == "vllm" and (field.vllm or name in GUIDES):
                continue
            is_renamed = self.kind == "vllm" and name == "exclude_input_from_output"
            target = "exclude_input_in_output" if is_renamed else field.tensor_name
            if target in self._declared:
                sent.append(Input(target, field.datatype, value if field.many else (value,)))
            elif name in fields and (value != field.neutral or (name == "separate_reasoning" and is_openai_chat)):
                missing.append(name)  # OpenAI's chats keep the reasoning apart, so that False asks for something
        problems = []
        if missing:
            elsewhere = "ask Triton itself" if self.kind == "openai" else "serve the model with deepseek-triton"
            if self.kind == "deepseek":
                elsewhere = "update the server" if self._is_decoupled else "build the model without --no-decoupled"
            problems = [f"{self._model} has no input for {', '.join(missing)}: leave that out, or {elsewhere}"]
        if request.streaming and self._is_decoupled:
            problems += [problem for name, problem in stream_problems.items() if name not in missing]
        if problems:
            raise InvalidRequest("; ".join(problems))
        return sent

    def stop_inputs(self) -> Sequence[Input]:
        """Return the inputs that end the request with the id sent along. Raises InvalidRequest if there are none."""
        if "stop" not in self._declared:
            raise InvalidRequest(f"{self._model} has no input that ends a request by its id: close its stream instead")
        stop = Input("stop", "BOOL", (True,))
        if self.kind == "llmapi":
            return [Input("text_input", "BYTES", ("",)), stop]  # Triton requires inputs that are not optional
        # Without return_finish_reason the answer is an error, whether or not there was such a request.
        return [stop, *_flags(self._declared, "return_finish_reason")]

    def is_stopped(self, error: DeepseekTritonError) -> bool:
        """Whether an error after `stop_inputs` means success: llmapi's does; this backend is asked for an empty end."""
        return self.kind == "llmapi" and "cancelled by client" in error.message

    def reader(self, request: Request) -> ResponseReader:
        if request.task == "describe":
            return ModelInfoReader(1, self._increments, says_end=True)
        return ResponseReader(request.params.n or 1, self._increments, says_end=self.kind in ("deepseek", "openai"))

    @property
    def _model(self) -> str:
        return f"model {self._model_name!r} ({self.kind})"

    def _control_inputs(self, streaming: bool) -> Iterator[Input]:
        """Inputs for what is no field of SamplingParams, such as streaming; only those that the model has."""
        yield Input("stream" if self.kind == "vllm" else "streaming", "BOOL", (streaming,))
        if self.kind != "deepseek":
            yield from _flags(self._declared, "return_finish_reason", "return_stop_reason")
        elif self._is_decoupled:
            yield Input("stream_mode", "BYTES", ("delta",))

    def _defaults(self, request: Request, given: Mapping[str, Any], *, streaming: bool) -> Iterator[tuple[str, Any]]:
        """Fields that get this value unless the caller gives one or the model lacks them."""
        if self.kind == "deepseek":
            yield "n", 1  # the server's own default could be several
            if request.is_chat:
                yield "separate_reasoning", True
            if streaming and not request.streaming and "stream_interval" not in given:
                yield "stream_interval_ms", _KEEPALIVE_INTERVAL_MS
            return
        yield "exclude_input_from_output", True  # both put the prompt before the text by default
        if self.kind == "vllm":
            yield "return_num_input_tokens", True
            yield "return_num_output_tokens", True
            if "logprobs" in given:
                yield "return_logprobs", True

    def _stream_problems(self, params: SamplingParams) -> dict[str, str]:
        """Field name -> why the field can't be had in a stream."""
        reasons: dict[str, str] = {}
        n = params.n or 1
        if (params.best_of or 1) > n:
            reasons["best_of"] = "the best of several answers is known only at the end"
        if n > 1 and not self._says_whose_chunk:
            reasons["n"] = f"{self._model} does not say which answer a chunk belongs to"
        if self.kind == "vllm" and params.exclude_input_from_output is False:
            reasons["exclude_input_from_output"] = f"{self._model} puts no prompt before a stream"
        return {name: f"{name}: {why}; use generate()" for name, why in reasons.items()}


def _kind(declared: Collection[str]) -> str:
    """The kind of a model with these inputs; "" if it is none of the known ones."""
    if "stream_mode" in declared or "separate_reasoning" in declared:
        return "deepseek"
    if "stream" in declared and "sampling_parameters" in declared:
        return "vllm"
    is_llmapi = "streaming" in declared and any(name.startswith("sampling_param_") for name in declared)
    return "llmapi" if is_llmapi else ""


def _flags(declared: Collection[str], *names: str) -> Iterator[Input]:
    return (Input(name, "BOOL", (True,)) for name in names if name in declared)


def _contents(request: Request) -> Iterator[tuple[str, str, Sequence[Any]]]:
    """Yield name, datatype and values of the inputs for what is no field of SamplingParams."""
    if request.messages is not None:
        yield "messages", "BYTES", (request.messages,)
    elif request.input_ids is not None:
        yield "input_ids", "INT32", request.input_ids
    else:
        yield "text_input", "BYTES", (request.prompt,)
    if request.task is not None:
        yield "task", "BYTES", (request.task,)


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
