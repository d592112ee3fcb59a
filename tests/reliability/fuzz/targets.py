"""All fuzz targets, each with inputs to begin with. A target may raise nothing: what its parser may raise, it takes."""

import base64
import io
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from reliability.fuzz import backend_targets as backend
from reliability.fuzz import client_targets as client
from reliability.fuzz import gateway_targets as gateway
from reliability.fuzz import generator_targets as generator
from reliability.fuzz import tool_targets as tool
from support.checked import CONFIG, MODEL_YAML
from support.faked_machine import BASIC, HEALTH, topology
from support.nvidia_smi_xml import HEAD

ROOT = Path(__file__).resolve().parents[3]
CORPUS = Path(__file__).with_name("corpus")
"""A folder for each target, with inputs that once found something, or reach what others do not."""


@dataclass(frozen=True)
class FuzzTarget:
    run: Callable[[bytes], None]
    seeds: tuple[bytes, ...]


def _json(*documents: object) -> tuple[bytes, ...]:
    return tuple(json.dumps(document, ensure_ascii=False).encode() for document in documents)


def _texts(*texts: str) -> tuple[bytes, ...]:
    return tuple(text.encode() for text in texts)


_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_TOOL = {"type": "function", "function": {"name": "weather", "description": "", "strict": True, "parameters": _SCHEMA}}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
_MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
    {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "Sun."},
    {"role": "assistant", "content": "It", "prefix": True},
]
_BODY = {
    "text_input": "The capital of France is",
    "max_tokens": 8,
    "temperature": 0.7,
    "sampling_param_stop": [".", "\n"],
    "sampling_parameters": json.dumps({"n": 2, "logit_bias": {"5": -1.5}, "guided_json": _SCHEMA, "seed": 7}),
    "return_num_output_tokens": True,
    "stream_interval": 4,
    "id": "r1",
}
_CHAT_BODY = {
    "text_input": "",
    "messages": json.dumps(_MESSAGES[:-1]),
    "tools": json.dumps([_TOOL]),
    "tool_choice": json.dumps({"type": "function", "function": {"name": "weather"}}),
    "chat_template_kwargs": '{"thinking": true}',
    "sampling_parameters": json.dumps({"structured_outputs": {"regex": "[a-z]+"}}),
    "streaming": True,
}
_OPENAI_TOOL = {"type": "function", "name": "weather", "parameters": _SCHEMA, "strict": True}
_CHAT = {
    "model": "tiny",
    "messages": _MESSAGES,
    "tools": [_TOOL],
    "tool_choice": "auto",
    "max_tokens": 8,
    "temperature": 0.5,
    "n": 2,
    "stop": ["."],
    "logprobs": True,
    "top_logprobs": 2,
    "logit_bias": {"5": 1},
    "seed": 3,
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}},
    "stream": True,
    "stream_options": {"include_usage": True},
    "reasoning_effort": "low",
}
_COMPLETION = {"model": "tiny", "prompt": ["Hi", "Ho"], "max_tokens": 4, "echo": True, "logprobs": 1, "suffix": None}
_RESPONSE = {
    "model": "tiny",
    "instructions": "Be short.",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "Sun."},
    ],
    "tools": [_OPENAI_TOOL],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]},
    "text": {"format": {"type": "json_schema", "name": "a", "schema": _SCHEMA}},
    "include": ["message.output_text.logprobs"],
    "reasoning": {"effort": "low"},
    "max_output_tokens": 8,
}
_CALLS = (
    "Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"a": [1, "}"]}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜> Done.",
    '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">'
    'Par<is</｜DSML｜parameter>\n<｜DSML｜parameter name="n" string="false">[1, 2]</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
)
_EVENT = {
    "model_name": "tensorrt_llm",
    "model_version": "1",
    "text_output": "Paris",
    "finish_reason": "stop",
    "stop_reason": "None",
    "num_output_tokens": 2,
    "num_input_tokens": 5,
    "sequence_index": 0,
    "cumulative_logprob": -0.5,
    "logprobs": '[{"5": {"logprob": -0.5, "rank": 1, "decoded_token": "P"}}, null]',
}
_SEVERAL = {
    "text_output": ["a", "b"],
    "finish_reason": ["None", "length"],
    "sequence_index": [1, 0],
    "num_output_tokens": [2, 1],
    "output_ids": [7, 8, 9],
    "num_input_tokens": 3,
}
_ERROR = {"error": "[E_INVALID_ARGUMENT] max_tokens: expected a number >= 1, got 0"}
_INFO = {"name": "tiny", "checkpoint": "/models/tiny", "max_seq_len": 4096, "fields": {"request_type": ""}}
_EVENTS = b"".join(b"data: %b\n\n" % each for each in _json({"text_output": "é"}, _EVENT))
_METRICS = (
    "# HELP nv_a b\n# TYPE nv_a counter\n"
    'nv_a{model="m",version="1"} 5.000000\nnv_b 1e3 1700000000000\nnv_c{le="+Inf",} NaN\n'
)
_FILES = {name: {"sha256": "0" * 64, "size": 5} for name in ("config.json", "model.safetensors")}


def _http(body: bytes, *, status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 %b\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" % status
    return head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


def _parts(*parts: str | bytes) -> tuple[bytes, ...]:
    return (b"\n---\n".join(part if isinstance(part, bytes) else part.encode() for part in parts),)


def _archives() -> Iterator[bytes]:
    for path in sorted((ROOT / "tests/tools/checkpoints/torch_archives").rglob("*.pt")):
        yield path.read_bytes()


def _pickles() -> Iterator[bytes]:
    for content in _archives():
        if zipfile.is_zipfile(io.BytesIO(content)):
            archive = zipfile.ZipFile(io.BytesIO(content))
            yield from (archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl"))


def _tiny(name: str) -> bytes:
    return (backend.TINY / name).read_bytes()


def _index(weights: bytes = b"") -> bytes:
    return json.dumps({"metadata": {"total_size": 6}, "weight_map": {"w": "model.safetensors"}}).encode() + weights


_SAFETENSORS = generator.safetensors_seed()
_MODEL_YAML = (ROOT / "model_repository/tensorrt_llm/1/model.yaml").read_bytes()
_MANIFEST = {
    "format": "triton",
    "options": "deepseek-r1 --gpu h200",
    "version": "1",
    "files": {"config.pbtxt": "0" * 64},
}
_MEMINFO = "MemTotal: 100 kB\nMemAvailable: 50 kB\nMlocked: 0 kB\n"
_CGROUP = "0::/a\n4:memory:/b\n"
_MOUNTS = "36 35 98:0 / /sys/fs/cgroup rw shared:1 - cgroup2 cgroup rw\n25 1 8:1 / / rw - ext4 /dev/a\\040b rw,ro\n"
_LAUNCH = {
    "id": "0123abcd",
    "namespace": "pid:[4026531836]",
    "state": "ready",
    "pid": 1,
    "started": 5,
    "restarts": 0,
    "ports": {"http": 8000},
    "exit_timeout_s": 30,
    "repository": "/r",
}
_LOG = (
    'I1124 19:53:17.000000 5 server.cc:1] "started"\n'
    "E1124 19:53:17.000000 5 model_lifecycle.cc:1] failed to load 'tensorrt_llm' version 1: Internal: "
    "ConfigError: a\n\n"
    "At:\n  /a/model.py(61): initialize\n"
    "| tensorrt_llm | 1 | UNAVAILABLE: Internal: b |\nerror: creating server: Internal - failed to load all models\n"
    "2026-11-24T19:53:17Z ERROR deepseek-triton: the engine is dead: CUDA error\n"
)
_START = "#!/bin/sh\nexport TLLM_LOG_LEVEL=INFO\nexec trtllm-serve /models/r1 --tp_size 8 \\\n  --host a\n"
_ROWS = b"\n".join(_json({"prompt": "a", "max_tokens": 5}, {"messages": [{"role": "user", "content": "a"}], "id": 3}))

TARGETS: Mapping[str, FuzzTarget] = {
    "backend_request": FuzzTarget(backend.generate_request, _json(_BODY, _CHAT_BODY, {"task": "describe"})),
    "backend_messages": FuzzTarget(backend.messages, _json(_MESSAGES, _MESSAGES[:2])),
    "backend_tools": FuzzTarget(
        backend.tools, (json.dumps([_TOOL]).encode() + b"\nrequired", *_json([_TOOL], [{**_TOOL, "strict": False}]))
    ),
    "backend_handover": FuzzTarget(
        backend.context_handover,
        _json(
            {
                "format": "tensorrt_llm 1.2.1",
                "first_gen_tokens": [5],
                "ctx_request_id": 7,
                "opaque_state": base64.b64encode(b"{}").decode(),
                "draft_tokens": None,
            }
        ),
    ),
    "backend_stop_strings": FuzzTarget(backend.stop_strings, _texts("aab\nab\n\naaab aab", "END\n\nThe ENEND")),
    "backend_reasoning": FuzzTarget(backend.reasoning, _texts("<think>\nHm <b></think>\n\nYes", *_CALLS)),
    "backend_model_yaml": FuzzTarget(backend.model_yaml, (_MODEL_YAML, MODEL_YAML.encode())),
    "backend_release_record": FuzzTarget(backend.release_record, _texts("version: 1.2.1\nfields: {a: {type: int}}\n")),
    "backend_checkpoint_config": FuzzTarget(backend.reference_config, (_tiny("config.json"),)),
    "backend_checkpoint_tensors": FuzzTarget(backend.reference_tensors, (_SAFETENSORS,)),
    "launcher_rank_lines": FuzzTarget(
        backend.rank_lines,
        _texts(
            '[1,0]<stdout>:deepseek-triton rank {"rank":0,"event":"started","host":"a","pid":5,"launch":"0123abcd"}\r\n'
            '[1,1]<stderr>:deepseek-triton rank {"rank":1,"event":"alive","cpu_s":1.5,"launch":"0123abcd"}\nab\rcd'
        ),
    ),
    "launcher_record": FuzzTarget(backend.launch_file, _json(_LAUNCH)),
    "client_server_events": FuzzTarget(
        client.server_events, (_EVENTS, b"\xef\xbb\xbfdata:a\r\ndata: b\r\r: c\nid: 1\n\n")
    ),
    "client_http": FuzzTarget(
        client.http_answer,
        (
            _http(_EVENTS),
            _http(_json(_ERROR)[0], status=b"400 Bad Request"),
            b"HTTP/1.1 302 A\r\nLocation: http://a\r\n\r\n",
        ),
    ),
    "client_responses": FuzzTarget(client.responses, (b"\n".join(_json(_EVENT, _SEVERAL)), *_json(_EVENT, _ERROR))),
    "client_tensor": FuzzTarget(client.tensor, (b"\0\x02\0\0\0Hi\0\0\0\0", b"\x06\0\0\x80\x3f")),
    "client_grpc": FuzzTarget(client.grpc_response, (client.grpc_seed(),)),
    "client_model_info": FuzzTarget(client.model_info, _json(_INFO)),
    "client_metadata": FuzzTarget(
        client.model_metadata,
        _json(
            {
                "name": "m",
                "versions": ["1"],
                "platform": "python",
                "inputs": [{"name": "a", "datatype": "BYTES", "shape": [-1]}],
                "outputs": [],
            }
        ),
    ),
    "client_metrics": FuzzTarget(client.client_metrics, _texts(_METRICS)),
    "client_url": FuzzTarget(client.server_url, _texts("http://h:8000/a", "grpcs://[::1%eth0]:8001", "h", "ü.de:1")),
    "gateway_chat": FuzzTarget(gateway.chat_request, _json(_CHAT)),
    "gateway_completion": FuzzTarget(gateway.completion_request, _json(_COMPLETION, {**_COMPLETION, "prompt": [1, 2]})),
    "gateway_responses": FuzzTarget(gateway.responses_request, _json(_RESPONSE, {"model": "tiny", "input": "Hi"})),
    "gateway_app": FuzzTarget(
        gateway.gateway_app,
        (
            b"\0" + _json({**_CHAT, "response_format": {"type": "text"}})[0],
            b"\0" + _json({"model": "tiny", "messages": _MESSAGES[:2], "n": 1})[0],
            b"\1" + _json({"model": "tiny", "prompt": "Hi", "max_tokens": 2, "logprobs": 1})[0],
            b"\2" + _json(_RESPONSE)[0],
            b"\3" + _json({"model": "tiny", "input": "Hi"})[0],
            b"\4" + _json({"messages": _MESSAGES[:2], "tools": [_TOOL]})[0],
            b"\5" + _json({"tokens": [1, 2]})[0],
        ),
    ),
    "gateway_tool_calls": FuzzTarget(gateway.tool_calls, _texts(*_CALLS)),
    "gateway_upstream_events": FuzzTarget(
        gateway.upstream_events,
        (_EVENTS, b"data: " + _json(_SEVERAL)[0] + b"\n\n", b"data: " + _json(_ERROR)[0] + b"\n\n"),
    ),
    "gateway_upstream_error": FuzzTarget(gateway.upstream_error, (b"\0" + _json(_ERROR)[0], b"\1<html>")),
    "gateway_upstream_http": FuzzTarget(gateway.upstream_http, (_http(_EVENTS),)),
    "gateway_upstream_logprobs": FuzzTarget(gateway.upstream_logprobs, _texts(str(_EVENT["logprobs"]))),
    "gateway_upstream_info": FuzzTarget(gateway.upstream_model_info, _json(_INFO)),
    "gateway_keys_file": FuzzTarget(
        gateway.keys_file, _texts(f"# a\nsha256:{'0' * 64} name=a models=b,c tokens_per_minute=5 admin=yes\n")
    ),
    "gateway_servers_file": FuzzTarget(
        gateway.servers_file, _texts("# a\nhttp://a:8000#metrics=8002\nhttps://[::1] # b\n")
    ),
    "gateway_server_option": FuzzTarget(gateway.server_option, _texts("http://a:8000", "dns+http://a:1", "file:/a")),
    "gateway_options": FuzzTarget(
        gateway.gateway_options, _texts("server: [http://a:1]\nport: 9000\nmodel: [a=http://b:2]\nmetrics-port: off\n")
    ),
    "check_model_yaml": FuzzTarget(generator.checked_model_yaml, (MODEL_YAML.encode(), _MODEL_YAML)),
    "check_config_pbtxt": FuzzTarget(generator.checked_config_pbtxt, (CONFIG.encode(),)),
    "check_start_script": FuzzTarget(generator.checked_start_script, (_START.encode(),)),
    "check_serve_script": FuzzTarget(
        generator.checked_vllm_script,
        (
            _START.encode(),
            b"#!/bin/sh\nexec vllm serve /models/r1 --tensor-parallel-size 8 --hf-overrides '{\"a\": 1}'\n",
        ),
    ),
    "check_manifest": FuzzTarget(generator.checked_manifest, _json(_MANIFEST)),
    "check_checkpoint": FuzzTarget(
        generator.checked_checkpoint,
        _parts(
            _tiny("config.json"),
            '{"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}',
            '{"metadata": {"total_size": 6}, "weight_map": {"w": "model-00001-of-000001.safetensors"}}',
            _SAFETENSORS,
        ),
    ),
    "check_safetensors": FuzzTarget(generator.safetensors_header, (_SAFETENSORS,)),
    "build_generation_config": FuzzTarget(
        generator.generation_config, _json({"temperature": 0.6, "top_p": 0.95, "do_sample": True})
    ),
    "build_default_sampling": FuzzTarget(
        generator.default_sampling, _json(0.5, ["a"], {"5": -1}, '{"type": "object"}')
    ),
    "checkpoint_torch_archive": FuzzTarget(tool.torch_archive, tuple(_archives())),
    "checkpoint_torch_pickle": FuzzTarget(tool.torch_pickle, tuple(_pickles())),
    "checkpoint_tensors": FuzzTarget(tool.stored_tensors, (_SAFETENSORS,)),
    "checkpoint_index": FuzzTarget(tool.stored_checkpoint, _parts(_index(), _tiny("config.json"))),
    "checkpoint_manifest": FuzzTarget(
        tool.checkpoint_manifest, _json({"source": "hub", "commit": "0" * 40, "files": _FILES})
    ),
    "checkpoint_checksums": FuzzTarget(
        tool.checksums, _texts(f"{'0' * 64}  a\n\\{'1' * 64} *b\\nc\nSHA256 (d) = {'2' * 64}\n")
    ),
    "checkpoint_lock": FuzzTarget(tool.lock_file, _json({"machine": "a", "pid": 5, "started": "7", "host": "h"})),
    "checkpoint_hub_name": FuzzTarget(tool.hub_name, _texts("deepseek-ai/DeepSeek-R1@main", "/a/b")),
    "server_log": FuzzTarget(tool.server_log, _texts(_LOG)),
    "host_mounts": FuzzTarget(tool.mount_table, _texts(_MOUNTS)),
    "host_memory": FuzzTarget(tool.host_memory, _parts(_MEMINFO, _CGROUP, _MOUNTS, "file_mapped 5\nshmem 3\n")),
    "doctor_gpus": FuzzTarget(
        tool.gpu_tables, _parts(BASIC.format(0, 9), HEALTH.format(0), "5, a, b, 100\n", topology(count=2))
    ),
    "doctor_gpu_xml": FuzzTarget(
        tool.gpu_xml,
        _texts(f"{HEAD}<nvidia_smi_log><gpu id='1'><product_name>NVIDIA H200</product_name></gpu></nvidia_smi_log>"),
    ),
    "doctor_checkpoint": FuzzTarget(tool.checkpoint_of_host, _parts(_index(), _SAFETENSORS)),
    "doctor_host_report": FuzzTarget(
        tool.host_report,
        _json(
            {
                "host": "a",
                "facts": {"driver": "1"},
                "findings": [
                    {
                        "check": "a",
                        "title": "b",
                        "host": "a",
                        "needs": [],
                        "finding": {"severity": "ok", "result": "a", "cause": "", "fix": ""},
                    }
                ],
                "settings": [],
            }
        ),
    ),
    "doctor_rank_steps": FuzzTarget(tool.rank_steps, _texts('[1,0]<stdout>:{"rank": 0, "step": "a"}\n')),
    "bench_result": FuzzTarget(tool.bench_result, _json({"schema": "deepseek-triton/bench/1", "points": []})),
    "bench_dataset": FuzzTarget(
        tool.bench_dataset,
        (
            _ROWS,
            *_json(
                {"input_tokens": 5, "output_tokens": 3, "timestamp": 100},
                [{"conversations": [{"from": "human", "value": "a b c d e"}, {"from": "gpt", "value": "f g h i j"}]}],
            ),
        ),
    ),
    "eval_kept_answers": FuzzTarget(
        tool.kept_answers, (b'{"server": {"url": "u"}}\n{"key": "a", "text": "b"}\n{"key": "c', b"")
    ),
    "eval_rows": FuzzTarget(tool.task_rows, _json({"question": "a", "answer": "b"})),
    "eval_table": FuzzTarget(tool.task_table, _texts('question,answer\n"a\nb",c\n')),
    "chat_conversation": FuzzTarget(
        tool.conversation, _json({"messages": [{"role": "user", "content": "a"}], "params": {"n": 1}, "model": "m"})
    ),
    "generate_messages": FuzzTarget(tool.prompt_messages, _json(_MESSAGES)),
    "generate_batch": FuzzTarget(tool.batch_rows, (_ROWS,)),
    "warm_document": FuzzTarget(
        tool.warm_document,
        _json(
            {"schema": "deepseek-triton/warm/1", "result": {"read_bytes_per_s": 5, "read_bytes": 5, "done_bytes": 5}}
        ),
    ),
    "sla_pace": FuzzTarget(tool.pace_document, _json({"name": "a", "paces": []})),
    "launch_host_file": FuzzTarget(tool.host_file, _texts("node1 slots=8\n# a\n10.0.0.2 slots=8\n")),
    "plan_diff": FuzzTarget(tool.edited_settings, (MODEL_YAML.encode(),)),
}


def inputs_of(name: str) -> tuple[bytes, ...]:
    """The seeds, and what the corpus has."""
    folder = CORPUS / name
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    return (*TARGETS[name].seeds, *(path.read_bytes() for path in found))
