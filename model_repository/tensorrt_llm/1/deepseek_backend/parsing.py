"""Tensors and request parameters -> ParsedRequest: prompts, what to generate for them and how to answer.

Pure: it knows numpy arrays, not pb_utils.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from deepseek_backend.config import BackendConfig
from deepseek_backend.contract import (
    INPUTS,
    MAX_SEQUENCES_OF_REQUEST,
    REQUEST_FIELDS,
    SAMPLING_BY_NAME,
    SAMPLING_FIELDS,
    TIMEOUT_US,
    ErrorCode,
)
from deepseek_backend.engines.generate_request import ContextHandover, RequestType, SamplingParams, read_handover
from deepseek_backend.errors import RequestError
from deepseek_backend.field_reader import FieldReader
from deepseek_backend.messages import NO_TOOLS, Prompt, ToolUse, read_tool_use, unanswerable


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    task: str = "generate"
    """One of contract.TASKS. The others generate nothing, and most of what follows means nothing to them."""
    prompts: tuple[Prompt, ...] = ()
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tool_use: ToolUse = NO_TOOLS
    streaming: bool = False
    cumulative: bool = False
    """Each chunk of a stream carries the whole text so far."""
    stream_interval: int | None = None
    """Number of tokens for which a stream's text may wait, to leave together. None: no such number."""
    stream_interval_ms: int | None = None
    """Milliseconds for which a stream's text may wait. None: no such time. Text leaves as soon as either bound is
    reached, and at once where neither is given."""
    stop: bool = False
    """End the running request that has this request's id. Besides it only return_finish_reason counts."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 0
    request_type: RequestType = "context_and_generation"
    handover: ContextHandover | None = None
    """The end of the context phase, where another server did that."""
    priority: int = 0
    timeout_ms: int | None = None
    timeout_us: int = 0
    """Triton's own timeout in microseconds, where it came in the body; 0 means none."""
    echo: bool = False
    """Put the prompt before the text."""
    separate_reasoning: bool = False
    returned: frozenset[str] = frozenset()
    """Names of the outputs asked for, beyond those that every response has."""
    names: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Field -> the name by which the client gave it, where that is another."""

    @property
    def is_shared(self) -> bool:
        """Another server does, or did, the other part of the request."""
        return self.request_type != "context_and_generation" or self.handover is not None

    @property
    def wants_few_chunks(self) -> bool:
        """A stream's text may wait for more, to leave in fewer chunks."""
        return self.stream_interval is not None or self.stream_interval_ms is not None

    @property
    def num_choices(self) -> int:
        """Number of answers to each prompt that are returned."""
        return self.sampling.n or 1

    @property
    def num_sequences_per_prompt(self) -> int:
        """Number of answers to each prompt that are generated."""
        return max(self.sampling.best_of or 1, self.num_choices)


logger = logging.getLogger(__name__)


def parse_request(
    inputs: Mapping[str, npt.NDArray[Any]], parameters: str, config: BackendConfig, supported: Mapping[str, str]
) -> ParsedRequest:
    """Read and check a request from `inputs` (tensor name -> array) and `parameters` (Triton's JSON object).

    `supported` maps each sampling field, and priority, to "" or, where the engine can't do it, to the reason.

    :raises RequestError: with every problem found, in one line.
    """
    reader = FieldReader(config)
    try:
        return _parsed(reader, inputs, parameters, config, supported)
    except RequestError as error:
        raise error.named(reader.names) from None


def _parsed(
    reader: FieldReader,
    inputs: Mapping[str, npt.NDArray[Any]],
    parameters: str,
    config: BackendConfig,
    supported: Mapping[str, str],
) -> ParsedRequest:
    reader.read(inputs, parameters)
    if reader.flags.get("stop"):
        _raise_problems(reader)
        return ParsedRequest(stop=True, returned=_returned(reader.flags, {}))
    task = reader.settings.get("task", "generate")
    if task == "describe":
        _raise_problems(reader)
        return ParsedRequest(task=task)
    prompts = reader.read_prompts(inputs)
    has_ids = any(prompt.token_ids is not None for prompt in prompts)
    template_kwargs, tool_use = _read_chat_inputs(reader, inputs)
    streaming = reader.agreed("streaming", "stream", default=False)
    no_echo = config.default_sampling.get("exclude_input_from_output", True)
    echo = not reader.agreed("exclude_input_from_output", "exclude_input_in_output", default=no_echo)
    if echo and has_ids:
        reader.problems.add("exclude_input_from_output: false needs a prompt in text, got input_ids")
    if task == "generate":
        for prompt in prompts:
            if prompt.messages and (problem := unanswerable(prompt.messages)):
                reader.problems.add(problem)
    if task == "tokenize" and has_ids:
        reader.problems.add("task: tokenize expects text_input or messages, got input_ids")
    elif task == "detokenize" and prompts and not has_ids:
        reader.problems.add("task: detokenize expects input_ids, got text")
    fields = _with_defaults(reader, config, streaming=streaming)
    returned = _returned(reader.flags, fields)
    request_type = reader.settings.get("request_type", "context_and_generation")
    handover = _handover(reader, inputs, request_type)
    if handover is not None or request_type == "context_only":
        _check_shareable(reader, task, fields, len(prompts))
    if not _YIELDING.isdisjoint(fields):
        for problem in contradictions(fields, config.default_max_tokens, streaming=streaming):
            reader.problems.add(problem)
        answers = max(fields.get("n") or 1, fields.get("best_of") or 1)
        if len(prompts) * answers > MAX_SEQUENCES_OF_REQUEST:
            reader.problems.add(
                f"n, best_of: expected at most {MAX_SEQUENCES_OF_REQUEST:,} answers to all prompts together, got "
                f"{len(prompts):,} prompts with {answers} each"
            )
    _raise_problems(reader)
    if streaming and not config.decoupled:
        raise RequestError(_ONE_RESPONSE, code=ErrorCode.UNSUPPORTED)
    settings = reader.settings
    refuse_unsupported(fields, supported)
    for name in ("priority", "request_type"):
        if name in settings:
            refuse_unsupported({name: settings[name]}, supported)
    if handover is not None and supported.get("request_type"):
        raise RequestError(f"context_phase_params: {supported['request_type']}", code=ErrorCode.UNSUPPORTED)
    if "seed" in fields:
        fields["seed"] %= 2**64
    sampling = SamplingParams.of(fields)
    intervals = settings.get("stream_interval"), settings.get("stream_interval_ms")
    if intervals == (None, None):
        intervals = config.stream_interval, config.stream_interval_ms
    return ParsedRequest(
        task=task,
        prompts=prompts,
        chat_template_kwargs=template_kwargs,
        tool_use=tool_use,
        streaming=streaming,
        cumulative=settings.get("stream_mode", config.stream_mode) == "cumulative",
        stream_interval=intervals[0],
        stream_interval_ms=intervals[1],
        sampling=sampling,
        max_tokens=sampling.max_tokens or config.default_max_tokens,
        request_type=request_type,
        handover=handover,
        priority=settings.get("priority", 0),
        timeout_ms=settings.get("timeout_ms", config.default_timeout_ms),
        timeout_us=settings.get(TIMEOUT_US.name, 0),
        echo=echo,
        separate_reasoning=reader.flags.get("separate_reasoning", config.separate_reasoning),
        returned=returned,
        names=reader.names,
    )


_ONE_RESPONSE = (
    "streaming: expected false, because this model is not decoupled: it sends one response to each request. "
    "Ask without streaming, or serve a model that was built without --no-decoupled"
)


def contradictions(fields: Mapping[str, Any], default_max_tokens: int, *, streaming: bool = False) -> list[str]:
    """Return what is wrong with sampling fields that are each right alone but not together."""
    problems = []
    n, best_of = fields.get("n") or 1, fields.get("best_of") or 1
    max_tokens, min_tokens = fields.get("max_tokens") or default_max_tokens, fields.get("min_tokens") or 0
    if min_tokens > max_tokens:
        problems.append(f"min_tokens: expected at most max_tokens, which is {max_tokens}, got {min_tokens}")
    if 1 < best_of < n:
        problems.append(f"best_of: expected at least n, which is {n}, got {best_of}")
    if best_of > n and streaming:
        problems.append(
            "best_of: more than n can't be streamed, because the best answers are known only at the end; use n"
        )
    if max(n, best_of) > 1 and SamplingParams.of(fields).greedy:
        problems.append("n, best_of: greedy decoding gives the same answer each time; set a temperature above 0")
    guided = [name for name in _GUIDED if fields.get(name)]
    if len(guided) > 1:
        problems.append(f"{', '.join(guided)}: expected one of them, got {len(guided)}")
    return problems


_GUIDED = tuple(f.name for f in SAMPLING_FIELDS if f.guided)
_YIELDING_IN_ORDER = ("min_tokens", "best_of", "n", *_GUIDED)
"""Fields whose defaults give way to what a request says, in this order. Every contradiction has one of them."""
_YIELDING = frozenset(_YIELDING_IN_ORDER)


def _with_defaults(reader: FieldReader, config: BackendConfig, *, streaming: bool) -> dict[str, Any]:
    """Merge the request's fields with the model's defaults; a default that contradicts the request is left out."""
    given, defaults = reader.sampling, config.default_sampling
    fields: dict[str, Any] = {**defaults, **given}
    if _YIELDING.isdisjoint(defaults):
        return fields

    def num_problems(candidates: Mapping[str, Any]) -> int:
        return len(contradictions(candidates, config.default_max_tokens, streaming=streaming))

    for name in _YIELDING_IN_ORDER:
        if name in fields and name not in given:
            without = {key: value for key, value in fields.items() if key != name}
            if num_problems(without) < num_problems(fields):
                fields = without
    return fields


def _read_chat_inputs(reader: FieldReader, inputs: Mapping[str, npt.NDArray[Any]]) -> tuple[dict[str, Any], ToolUse]:
    """Return the chat template's arguments and the tools, which vLLM's clients put among these arguments."""
    kwargs: dict[str, Any] = {}
    has_messages = "messages" in inputs and inputs["messages"].size > 0  # what is wrong with them is another problem
    if "chat_template_kwargs" in inputs:
        kwargs = dict(reader.read_template_kwargs(inputs["chat_template_kwargs"]))
        if kwargs and not has_messages:
            reader.problems.add("chat_template_kwargs: expected beside messages only, because nothing else is rendered")
    tools, choice = (reader.read_json_text(name, inputs) for name in ("tools", "tool_choice"))
    if kwargs.get("tools"):
        if tools:
            reader.problems.add("tools: given twice, by itself and by chat_template_kwargs; expected one of them")
        tools = json.dumps(kwargs["tools"])
    kwargs.pop("tools", None)
    if not tools and not choice:
        return kwargs, NO_TOOLS
    if not has_messages:
        reader.problems.add("tools, tool_choice: expected beside messages only, because nothing else is rendered")
    try:
        return kwargs, read_tool_use(tools, choice)
    except ValueError as error:
        reader.problems.add(str(error))
        return kwargs, NO_TOOLS


def _handover(
    reader: FieldReader, inputs: Mapping[str, npt.NDArray[Any]], request_type: RequestType
) -> ContextHandover | None:
    """Return what the context server handed on; None for a request that begins here."""
    text = reader.read_json_text("context_phase_params", inputs)
    if request_type == "generation_only" and not text:
        reader.problems.add("context_phase_params: expected with request_type generation_only, got none")
    elif request_type == "context_only" and text:
        reader.problems.add("context_phase_params: not expected with request_type context_only, which makes them")
    if not text:
        return None
    try:
        return read_handover(text)
    except ValueError as error:
        reader.problems.add(str(error))
        return None


def _check_shareable(reader: FieldReader, task: str, fields: Mapping[str, Any], num_prompts: int) -> None:
    """Check that two servers can share the request."""
    problems = {
        f"a generation, got task {task}": task != "generate",
        f"one prompt, got {num_prompts}": num_prompts > 1,
        "one answer; leave out n and best_of": max(fields.get("n") or 1, fields.get("best_of") or 1) > 1,
        "no log-probabilities": bool(fields.keys() & {"logprobs", "prompt_logprobs"}),
    }
    for problem in [problem for problem, applies in problems.items() if applies]:
        reader.problems.add(
            f"request_type: expected {problem}; a generation server does the whole of any other request"
        )


def _returned(flags: Mapping[str, bool], fields: dict[str, Any]) -> frozenset[str]:
    """Return the outputs asked for. Fields that the engine needs to make them are added to `fields`."""
    returned = {_RETURNED[name] for name, on in flags.items() if on and name in _RETURNED}
    if not returned and _FIELDS_WITH_OUTPUTS.isdisjoint(fields):
        return _NO_OUTPUTS
    returned |= {name for name in ("logprobs", "prompt_logprobs") if fields.get(name) is not None}
    if flags.get("return_logprobs") is False:
        returned.discard("logprobs")
    if returned & {"logprobs", "cumulative_logprob"} or (fields.get("best_of") or 1) > (fields.get("n") or 1):
        fields.setdefault("logprobs", 0)
    return frozenset(returned)


_RETURNED = {tensor.name: tensor.name.removeprefix("return_") for tensor in INPUTS if tensor.name.startswith("return_")}
_FIELDS_WITH_OUTPUTS = frozenset({"logprobs", "prompt_logprobs", "best_of"})
"""Fields that ask for an output, or need logprobs, without a flag."""
_NO_OUTPUTS: frozenset[str] = frozenset()


def _raise_problems(reader: FieldReader) -> None:
    if reader.warnings:
        logger.warning("passed over: %s", reader.warnings)
    if reader.problems:
        raise RequestError(str(reader.problems))


# lm-eval sends a seed with every request. Without them a greedy request is as greedy: another field makes it so.
_OF_A_DRAW = frozenset({"seed", "min_p"})
_NO_SEED = (-1, 2**64 - 1)
"""How clients of vLLM ask for none; the second is -1 in a tensor."""
_FIELDS = SAMPLING_BY_NAME | {field.name: field for field in REQUEST_FIELDS}


def refuse_unsupported(fields: dict[str, Any], supported: Mapping[str, str]) -> None:
    """Refuse, by name, fields that the engine can't honour.

    What asks for nothing is taken out instead: a neutral value, an empty list and, in greedy decoding, what only a draw
    would need.

    :raises RequestError: with the reason.
    """
    for name in [name for name in fields if supported.get(name)]:
        neutral, value = _FIELDS[name].neutral, fields[name]
        asks_for_nothing = value in (None, ()) or (neutral is not None and value == neutral)
        asks_for_nothing |= name == "seed" and value in _NO_SEED
        if not asks_for_nothing and not (name in _OF_A_DRAW and SamplingParams.of(fields).greedy):
            raise RequestError(f"{name}: {supported[name]}", code=ErrorCode.UNSUPPORTED)
        del fields[name]
