"""Every feature of the contract in a request that two servers share: the answer of one server, or a refusal by name."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from deepseek_backend.config import parse_config
from deepseek_backend.contract import REQUEST_FIELDS, REQUEST_INPUTS, SAMPLING_BY_NAME, ErrorCode
from deepseek_backend.engines.generate_request import read_handover
from deepseek_backend.engines.simulated.simulated_engine import SimulatedEngine
from deepseek_backend.engines.tensorrt_llm import TensorRTLLMEngine
from deepseek_backend.service import Service
from deepseek_triton_build.catalog import load_release
from standin.harness import guided_llm_args
from standin.loading import standin
from support import fakes
from support.fakes import wait

RELEASE = "1.2.1"
TRANSCEIVER = {"cache_transceiver_config": {"backend": "UCX"}}
SIDES = ({**TRANSCEIVER, "disable_overlap_scheduler": True}, TRANSCEIVER)
"""LLM arguments of the context and of the generation server."""

SAMPLED = {"temperature": 0.6, "seed": 7}
CHAT = {"messages": json.dumps([{"role": "user", "content": "Why?"}]), "text_input": ""}
TOOLS = json.dumps([{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}])
STREAMED = ("return_finish_reason", "return_stop_reason", "return_num_input_tokens", "return_num_output_tokens")
ALONE = {
    "streaming": True, "stream": True, "exclude_input_in_output": False, "return_output_ids": True,
    "return_perf_metrics": True, "timeout_ms": 3_600_000, "priority": 3, "task": "generate", "max_tokens": 1,
    "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5, "min_tokens": 5, "ignore_eos": True,
    "stop_token_ids": [3], "skip_special_tokens": False, "add_special_tokens": False, "bad": "zzz",
    "logit_bias": '{"5": -1}', "truncate_prompt_tokens": 2, "sampling_parameters": '{"max_tokens": 9}',
}  # fmt: skip
SHARED = {
    **{name: {name: value} for name, value in ALONE.items()},
    **{name: {"stream": True, name: True} for name in STREAMED},
    "text_input": {},
    "input_ids": {"input_ids": [5, 6, 7], "text_input": ""},
    "messages": CHAT,
    "chat_template_kwargs": {**CHAT, "chat_template_kwargs": '{"thinking": true}'},
    "tools": {**CHAT, "tools": TOOLS},
    "tool_choice": {**CHAT, "tools": TOOLS, "tool_choice": "none"},
    "stream_mode": {"stream": True, "stream_mode": "cumulative"},
    "stream_interval": {"stream": True, "stream_interval": 4},
    "stream_interval_ms": {"stream": True, "stream_interval_ms": 5},
    "exclude_input_from_output": {"sampling_param_exclude_input_from_output": False},
    "separate_reasoning": {"text_input": "Why?<think>\n", "separate_reasoning": True},
    "temperature": SAMPLED,
    "seed": SAMPLED,
    "top_k": {**SAMPLED, "top_k": 40},
    "top_p": {**SAMPLED, "top_p": 0.9},
    "min_p": {**SAMPLED, "min_p": 0.1},
    "stop": {"sampling_param_stop": "zzz"},
    "include_stop_str_in_output": {"sampling_param_stop": "zzz", "include_stop_str_in_output": True},
}
"""Feature -> a request with it. An engine that refuses it for whole requests refuses it here."""
REFUSED = {
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

    def hand_over(self, **request):
        return read_handover(answer(self.context, request_type="context_only", **request)["context_phase_params"])


@pytest.fixture(scope="module", params=["simulated", "tensorrt_llm"])
def pair(request, tmp_path_factory):
    with ExitStack() as stack:
        services = []
        for side in SIDES:
            service = _simulated() if request.param == "simulated" else _standin(side, tmp_path_factory, stack)
            service.start()
            stack.callback(service.stop)
            services.append(service)
        yield Pair(*services)


def _simulated():
    config = parse_config({"model": "m", "triton_config": {}}, version_dir=Path())
    return Service(config, SimulatedEngine(config))


def _standin(side, folders, stack):
    folder = folders.mktemp("standin")
    (folder / "release.yaml").write_text(load_release(RELEASE).text)
    stack.enter_context(standin(folder / "release.yaml"))
    document = {"model": "somewhere/R1", "max_seq_len": 4096, "enable_chunked_prefill": True, **side}
    document |= {"sampler_type": "TRTLLMSampler", **guided_llm_args(RELEASE), "triton_config": {}}
    config = parse_config(document, version_dir=folder)
    return Service(config, TensorRTLLMEngine(config))


TENSORS = ("text_input", "input_ids", "messages", "chat_template_kwargs", "tools", "tool_choice", "sampling_parameters")


def send(service, **request):
    """Send a request and wait for its end."""
    request = {"text_input": "Why is the sky blue?", "max_tokens": 20, **request}
    inputs = {name: _tensor(request.pop(name)) for name in (*TENSORS, "context_phase_params") if name in request}
    return wait(fakes.send(service, inputs=inputs, **request))


def _tensor(value):
    values = value if isinstance(value, list) else [value]
    return np.array(values, dtype=np.int32) if isinstance(values[0], int) else fakes.array(*values)


def answer(service, **request):
    """Return the outputs of an answer, its text joined; times and KV blocks are left out."""
    reply = send(service, **request)
    assert reply.errors == []
    outputs = dict(reply.last)
    if request.get("stream_mode") != "cumulative":
        for name in ("text_output", "reasoning_output"):
            if name in outputs:
                outputs[name] = "".join(chunk.get(name, "") for chunk, _ in reply.sent)
    if request.get("return_num_output_tokens"):
        outputs["num_output_tokens"] = sum(chunk["num_output_tokens"] for chunk, _ in reply.sent)
    for name in [name for name in outputs if name.endswith("_ns") or "kv_cache" in name or "accept" in name]:
        del outputs[name]
    return outputs


def refusal(service, **request):
    (error,) = send(service, **request).errors
    assert error.code in (ErrorCode.INVALID_ARGUMENT, ErrorCode.UNSUPPORTED)
    return str(error)


def parts(handover):
    """Yield what each part of a shared request has, and the whole that is computed again."""
    yield {"request_type": "context_only"}
    for request_type in ("generation_only", "context_and_generation"):
        yield {"request_type": request_type, "context_phase_params": handover.to_json()}


def test_every_feature_is_in_a_table():
    contract = {tensor.name for tensor in REQUEST_INPUTS} | {field.name for field in REQUEST_FIELDS}
    assert SHARED.keys() | REFUSED.keys() == (contract | SAMPLING_BY_NAME.keys()) - OF_THE_PARTS


def check_refusal(pair, given, said):
    handover = pair.hand_over()
    for part in parts(handover):
        assert refusal(pair.context if len(part) == 1 else pair.generation, **given, **part).startswith(said)
    answer(pair.generation, request_type="generation_only", context_phase_params=handover.to_json())


@pytest.mark.slow
def test_a_feature_is_shared_or_refused_as_for_one_server(pair, subtests):
    for feature, given in SHARED.items():
        with subtests.test(feature):
            if send(pair.generation, **given).errors:
                check_refusal(pair, given, feature)
                continue
            whole = answer(pair.generation, **given)
            handover = pair.hand_over(**given)
            shared = {**given, "request_type": "generation_only", "context_phase_params": handover.to_json()}
            assert answer(pair.generation, **shared) == whole


@pytest.mark.slow
def test_a_feature_that_cant_be_shared_is_refused_by_name(pair, subtests):
    for feature, (given, said) in REFUSED.items():
        with subtests.test(feature):
            check_refusal(pair, given, said)
