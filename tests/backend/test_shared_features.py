"""Every feature of the contract in a request that two servers share: the answer of one server, or a refusal by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from deepseek_backend.config import parse_config
from deepseek_backend.contract import REQUEST_FIELDS, REQUEST_INPUTS, SAMPLING_BY_NAME, ErrorCode
from deepseek_backend.engines.context_handover import ContextHandover, read_handover
from deepseek_backend.engines.simulated.simulated_engine import SimulatedEngine
from deepseek_backend.engines.tensorrt_llm import TensorRTLLMEngine
from deepseek_backend.service import Service
from deepseek_triton_build.catalog import load_release
from standin.harness import guided_llm_args
from standin.loading import standin
from support.fakes import ListReply
from support.waiting import wait_for

RELEASE = "1.2.1"
TRANSCEIVER = {"cache_transceiver_config": {"backend": "UCX"}}
SIDES = ({**TRANSCEIVER, "disable_overlap_scheduler": True}, TRANSCEIVER)
"""LLM arguments of the context and of the generation server."""

SAMPLED = {"temperature": 0.6, "seed": 7}
MESSAGES = json.dumps([{"role": "user", "content": "Why?"}])
TOOLS = json.dumps([{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}])

SHARED: dict[str, dict[str, Any]] = {
    "text_input": {},
    "input_ids": {"input_ids": [5, 6, 7], "text_input": ""},
    "messages": {"messages": MESSAGES, "text_input": ""},
    "chat_template_kwargs": {"messages": MESSAGES, "text_input": "", "chat_template_kwargs": '{"thinking": true}'},
    "tools": {"messages": MESSAGES, "text_input": "", "tools": TOOLS},
    "tool_choice": {"messages": MESSAGES, "text_input": "", "tools": TOOLS, "tool_choice": "none"},
    "streaming": {"streaming": True},
    "stream": {"stream": True},
    "stream_mode": {"stream": True, "stream_mode": "cumulative"},
    "stream_interval": {"stream": True, "stream_interval": 4},
    "stream_interval_ms": {"stream": True, "stream_interval_ms": 5},
    "sampling_parameters": {"sampling_parameters": '{"max_tokens": 9}'},
    "exclude_input_in_output": {"exclude_input_in_output": False},
    "exclude_input_from_output": {"sampling_param_exclude_input_from_output": False},
    "return_finish_reason": {"stream": True, "return_finish_reason": True},
    "return_stop_reason": {"stream": True, "return_stop_reason": True},
    "return_output_ids": {"return_output_ids": True},
    "return_num_input_tokens": {"stream": True, "return_num_input_tokens": True},
    "return_num_output_tokens": {"stream": True, "return_num_output_tokens": True},
    "return_perf_metrics": {"return_perf_metrics": True},
    "separate_reasoning": {"text_input": "Why?<think>\n", "separate_reasoning": True},
    "timeout_ms": {"timeout_ms": 3_600_000},
    "priority": {"priority": 3},
    "task": {"task": "generate"},
    "max_tokens": {"max_tokens": 1},
    "temperature": SAMPLED,
    "seed": SAMPLED,
    "top_k": {**SAMPLED, "top_k": 40},
    "top_p": {**SAMPLED, "top_p": 0.9},
    "min_p": {**SAMPLED, "min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "min_tokens": {"min_tokens": 5},
    "ignore_eos": {"ignore_eos": True},
    "stop": {"sampling_param_stop": "zzz"},
    "stop_token_ids": {"stop_token_ids": [3]},
    "include_stop_str_in_output": {"sampling_param_stop": "zzz", "include_stop_str_in_output": True},
    "skip_special_tokens": {"skip_special_tokens": False},
    "add_special_tokens": {"add_special_tokens": False},
    "bad": {"bad": "zzz"},
    "logit_bias": {"logit_bias": '{"5": -1}'},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 2},
}
"""Feature -> a request with it. An engine that refuses it for whole requests refuses it here."""
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "n": ({**SAMPLED, "n": 2}, "request_type: expected one answer; leave out n and best_of"),
    "best_of": ({**SAMPLED, "best_of": 2}, "request_type: expected one answer; leave out n and best_of"),
    "text_input": ({"text_input": ["Why?", "How?"]}, "request_type: expected one prompt, got 2"),
    "logprobs": ({"logprobs": 1}, "request_type: expected no log-probabilities"),
    "prompt_logprobs": ({"prompt_logprobs": 1}, "request_type: expected no log-probabilities"),
    "return_logprobs": ({"return_logprobs": True}, "request_type: expected no log-probabilities"),
    "return_cumulative_logprob": ({"return_cumulative_logprob": True}, "request_type: expected no log-probabilities"),
    "task": ({"task": "tokenize"}, "request_type: expected a generation, got task tokenize"),
    "guided_json": ({"guided_json": '{"type": "object"}'}, "guided_json: "),
    "guided_json_object": ({"guided_json_object": True}, "guided_json_object: "),
    "guided_regex": ({"guided_regex": "a+"}, "guided_regex: "),
    "guided_grammar": ({"guided_grammar": 'root ::= "a"'}, "guided_grammar: "),
    "guided_structural_tag": (
        {"guided_structural_tag": '{"type": "structural_tag", "format": {"type": "any_text"}}'},
        "guided_structural_tag: ",
    ),
}
"""Feature -> a request with it, and the beginning of what each engine says of its parts."""
OF_THE_PARTS = {"request_type", "context_phase_params"}


class Pair(NamedTuple):
    context: Service
    generation: Service

    def hand_over(self, **request: Any) -> ContextHandover:
        return read_handover(answer(self.context, request_type="context_only", **request)["context_phase_params"])


@pytest.fixture(scope="module", params=["simulated", "tensorrt_llm"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with ExitStack() as stack:
        services = []
        for side in SIDES:
            service = _simulated() if request.param == "simulated" else _standin(side, tmp_path_factory, stack)
            service.start()
            stack.callback(service.stop)
            services.append(service)
        yield Pair(*services)


def _simulated() -> Service:
    config = parse_config({"model": "m", "triton_config": {}}, version_dir=Path())
    return Service(config, SimulatedEngine(config))


def _standin(side: dict[str, Any], folders: pytest.TempPathFactory, stack: ExitStack) -> Service:
    folder = folders.mktemp("standin")
    (folder / "release.yaml").write_text(load_release(RELEASE).text)
    stack.enter_context(standin(folder / "release.yaml"))
    document = {"model": "somewhere/R1", "max_seq_len": 4096, "enable_chunked_prefill": True, **side}
    document |= {"sampler_type": "TRTLLMSampler", **guided_llm_args(RELEASE), "triton_config": {}}
    config = parse_config(document, version_dir=folder)
    return Service(config, TensorRTLLMEngine(config))


TENSORS = ("text_input", "input_ids", "messages", "chat_template_kwargs", "tools", "tool_choice", "sampling_parameters")


def send(service: Service, **request: Any) -> ListReply:
    """Send a request and wait for its end."""
    request = {"text_input": "Why is the sky blue?", "max_tokens": 20, **request}
    inputs = {name: _tensor(request.pop(name)) for name in (*TENSORS, "context_phase_params") if name in request}
    reply = ListReply()
    service.accept(inputs, json.dumps(request), reply)
    wait_for(lambda: reply.finals)
    return reply


def _tensor(value: Any) -> Any:
    values = value if isinstance(value, list) else [value]
    if isinstance(values[0], int):
        return np.array(values, dtype=np.int32)
    return np.array([each if isinstance(each, bytes) else each.encode() for each in values], dtype=np.object_)


def answer(service: Service, **request: Any) -> dict[str, Any]:
    """Return the outputs of an answer, its text joined; times and KV blocks are left out."""
    reply = send(service, **request)
    assert reply.errors == []
    outputs: dict[str, Any] = dict(reply.last)
    if request.get("stream_mode") != "cumulative":
        for name in ("text_output", "reasoning_output"):
            if name in outputs:
                outputs[name] = "".join(chunk.get(name, "") for chunk, _ in reply.sent)
    if request.get("return_num_output_tokens"):
        outputs["num_output_tokens"] = sum(chunk["num_output_tokens"] for chunk, _ in reply.sent)
    for name in [name for name in outputs if name.endswith("_ns") or "kv_cache" in name or "accept" in name]:
        del outputs[name]
    return outputs


def refusal(service: Service, **request: Any) -> str:
    (error,) = send(service, **request).errors
    assert error.code in (ErrorCode.INVALID_ARGUMENT, ErrorCode.UNSUPPORTED)
    return str(error)


def parts(handover: ContextHandover) -> Iterator[dict[str, Any]]:
    """Yield what each part of a shared request has, and the whole that is computed again."""
    yield {"request_type": "context_only"}
    for request_type in ("generation_only", "context_and_generation"):
        yield {"request_type": request_type, "context_phase_params": handover.to_json()}


def test_every_feature_is_in_a_table() -> None:
    contract = {tensor.name for tensor in REQUEST_INPUTS} | {field.name for field in REQUEST_FIELDS}
    assert SHARED.keys() | REFUSED.keys() == (contract | SAMPLING_BY_NAME.keys()) - OF_THE_PARTS


@pytest.mark.parametrize("feature", SHARED)
def test_a_feature_is_shared_or_refused_as_for_one_server(pair: Pair, feature: str) -> None:
    given = SHARED[feature]
    alone = send(pair.generation, **given)
    if alone.errors:
        handover = pair.hand_over()
        for part in parts(handover):
            assert refusal(pair.context if len(part) == 1 else pair.generation, **given, **part).startswith(feature)
        answer(pair.generation, request_type="generation_only", context_phase_params=handover.to_json())
        return
    whole = answer(pair.generation, **given)
    handover = pair.hand_over(**given)
    shared = {**given, "request_type": "generation_only", "context_phase_params": handover.to_json()}
    assert answer(pair.generation, **shared) == whole


@pytest.mark.parametrize("feature", REFUSED)
def test_a_feature_that_cant_be_shared_is_refused_by_name(pair: Pair, feature: str) -> None:
    given, said = REFUSED[feature]
    handover = pair.hand_over()
    for part in parts(handover):
        assert refusal(pair.context if len(part) == 1 else pair.generation, **given, **part).startswith(said)
    answer(pair.generation, request_type="generation_only", context_phase_params=handover.to_json())
