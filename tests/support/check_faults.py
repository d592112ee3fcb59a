"""Realistic faults, each with the code and the words by which `check` has to find it.

tests/build/test_check_faults.py puts them to it; run by itself, this prints what is not found so.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from deepseek_triton_build import PlanRequest, format_files, make_plan, write_repository
from deepseek_triton_build.check import CheckOptions, check_repository
from support.checked import safetensors

RECIPES_FILE = Path(__file__).with_name("check_recipes.yaml")
MODEL_YAML = "repository/tensorrt_llm/1/model.yaml"
CONFIG = "repository/tensorrt_llm/config.pbtxt"
START = "repository/start.sh"
SERVE = "repository/serve.sh"
EXTRA = "repository/extra-llm-api-config.yml"
RECIPE = "repository/extra.yaml"
STAMP = "repository/tensorrt_llm/deepseek-triton.json"
SHARDS = {"model-00001-of-000002.safetensors": "embed", "model-00002-of-000002.safetensors": "head"}
FIRST, SECOND = SHARDS

# From config.json, hf_quant_config.json and the tokenizer's files of deepseek-ai/DeepSeek-R1, deepseek-ai/DeepSeek-V3.2
# and nvidia/DeepSeek-V3.1-NVFP4. The vocabulary is cut to the tokens that matter.
R1_CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
    "v_head_dim": 128,
    "vocab_size": 129280,
}
TOKENS = {"<｜begin▁of▁sentence｜>": 0, "<｜end▁of▁sentence｜>": 1, "<think>": 128798, "</think>": 128799}
NVFP4 = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}


# A model of Triton's own vLLM backend, in the form of triton-inference-server/vllm_backend samples/model_repository
JSON, VLLM_CONFIG = "repository/r1/1/model.json", "repository/r1/config.pbtxt"
_VLLM_CONFIG = 'backend: "vllm"\ninstance_group [\n  {\n    count: 1\n    kind: KIND_MODEL\n  }\n]\n'
_MODEL_JSON = """\
{
    "model": "deepseek-ai/DeepSeek-R1",
    "tensor_parallel_size": 8,
    "enable_expert_parallel": true,
    "trust_remote_code": true,
    "gpu_memory_utilization": 0.9,
    "max_model_len": 65536,
    "max_num_batched_tokens": 32768,
    "kv_cache_dtype": "auto",
    "moe_backend": "auto",
    "enable_prefix_caching": false,
    "seed": 0,
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 1}
}
"""
_VLLM_SERVE = """\
#!/usr/bin/env bash
set -euo pipefail
export VLLM_USE_DEEP_GEMM=1
exec vllm serve deepseek-ai/DeepSeek-R1 \\
  --tensor-parallel-size 8 \\
  --enable-expert-parallel \\
  --max-model-len 65536 \\
  --max-num-batched-tokens 32k \\
  --no-enable-prefix-caching \\
  --gpu-memory-utilization 0.9 \\
  --speculative-config '{"method": "mtp", "num_speculative_tokens": 1}' \\
  --host 0.0.0.0 --port 8000 \\
  "$@"
"""
_EIGHT = {"gpu": "h200", "num_gpus": 8}


# The folders that are spoiled


@dataclass(frozen=True, kw_only=True)
class Base:
    """A folder that `check` finds no error in."""

    request: PlanRequest | None = None
    """What `build` writes into repository/; None for a recorded file."""
    format: str = "triton"
    files: Mapping[str, str] = field(default_factory=dict)
    """Path -> content of a folder that `build` did not write."""
    recipe: str = ""
    weights: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def write(self, root):
        for path, content in self.files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(content)
        if self.request is not None:
            write_repository(format_files(self.format, make_plan(self.request), version="0"), root / "repository")
        elif self.recipe:
            (root / "repository").mkdir(parents=True)
            arguments = recipes()[self.recipe]["arguments"]
            (root / RECIPE).write_text(yaml.safe_dump(arguments, sort_keys=False))
        if self.weights:
            write_weights(root / "weights", is_fp4=self.request is not None and self.request.gpu == "b200")

    def check(self, root, options):
        given = dict(self.options)
        if self.recipe:
            row = recipes()[self.recipe]
            given = {key: row[key] for key in ("variant", "precision", "gpu", "release") if key in row}
            given["num_gpus"] = row["gpus"]
        if self.weights:
            given["model_root"] = root / "weights"
        path = root / RECIPE if self.recipe else root / "repository"
        return check_repository(path, CheckOptions(**{**given, **options}))


def _r1(gpu="h200", **more):
    return PlanRequest(variant="deepseek-r1", gpu=gpu, **more)


@cache
def recipes():
    return {row["name"]: row for row in yaml.safe_load(RECIPES_FILE.read_text("utf-8"))}


@cache
def bases():
    named = {
        "r1": Base(request=_r1()),
        "mtp": Base(request=_r1(profile="latency")),
        "fp4": Base(request=_r1("b200", profile="throughput")),
        "v32": Base(request=PlanRequest(variant="deepseek-v3.2-exp", gpu="b200")),
        "old": Base(request=_r1(release="1.1.0", profile="latency")),
        "serve": Base(request=_r1(), format="trtllm-serve"),
        "copied": Base(request=_r1("gb200-nvl72", profile="wide-ep", release="1.0.0"), format="trtllm-serve"),
        "bench": Base(request=_r1(), format="trtllm-bench"),
        "wide": Base(request=_r1("gb200-nvl72", profile="wide-ep"), format="trtllm-serve"),
        "quickstart": Base(request=_r1(), format="quickstart"),
        "weights": Base(request=_r1(), weights=True),
        "mtp weights": Base(request=_r1(profile="latency"), weights=True),
        "fp4 weights": Base(request=_r1("b200"), weights=True),
        "vllm": Base(request=_r1(engine="vllm")),
        "vllm mtp": Base(request=_r1("b200", engine="vllm", profile="latency", precision="fp8", mtp=1)),
        "vllm dp": Base(request=_r1(engine="vllm", parallel="dp", vllm="0.33.0")),
        "vllm serve": Base(request=_r1(engine="vllm"), format="vllm-serve"),
        "vllm backend": Base(files={JSON: _MODEL_JSON, VLLM_CONFIG: _VLLM_CONFIG}, options=_EIGHT),
        "vllm weights": Base(files={JSON: _MODEL_JSON, VLLM_CONFIG: _VLLM_CONFIG}, weights=True, options=_EIGHT),
        "vllm script": Base(files={SERVE: _VLLM_SERVE}, options={**_EIGHT, "vllm": "0.25.1"}),
    }
    return named | {f"recipe {name}": Base(recipe=name) for name in recipes()}


def write_weights(folder, *, is_fp4=False):
    """Write a checkpoint of R1 with two small tensors."""
    folder.mkdir(parents=True)
    for name, tensor in SHARDS.items():
        (folder / name).write_bytes(safetensors({tensor: 64}))
    tokenizer = {"added_tokens": [{"id": number, "content": name} for name, number in TOKENS.items()], "model": {}}
    bos, eos = list(TOKENS)[:2]
    files = {
        "config.json": R1_CONFIG,
        "model.safetensors.index.json": {"weight_map": {tensor: name for name, tensor in SHARDS.items()}},
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"bos_token": {"content": bos}, "eos_token": {"content": eos}},
    }
    if is_fp4:
        files["config.json"] = {key: value for key, value in R1_CONFIG.items() if key != "quantization_config"}
        files["hf_quant_config.json"] = {"quantization": NVFP4}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


# The ways to spoil them


def put(file, key, value):
    """Give the first `key` of a YAML file, at any depth, another value."""
    return replace(file, rf"(?m)^( *){key}:.*$", rf"\g<1>{key}: {value}")


def rename(file, key, to):
    return replace(file, rf"(?m)^( *){key}:", rf"\g<1>{to}:")


def drop(file, key):
    return replace(file, rf"(?m)^ *{key}:.*\n", "")


def line(file, text):
    """Put `text` before the first key of a YAML file, or after the first line of a script."""
    first = r"\A(#!.*\n)" if file.endswith(".sh") else r"\A((?:#.*\n)*)"
    return replace(file, first, lambda found: found[1] + text + "\n")


def below(file, section, text):
    return replace(file, rf"(?m)^{section}:\n", lambda found: found[0] + text + "\n")


def indent(file, key, *, by):
    """Move a key to the right, or with a negative number to the left."""

    def moved(found):
        return " " * (len(found[1]) + by) + found[2]

    return replace(file, rf"(?m)^( {{{max(0, -by)},}})({key}:)", moved)


def replace(file, pattern, new):
    """Replace the first match of `pattern`; in a script, the first one outside of comments."""

    def spoil(root):
        text = (root / file).read_text("utf-8")
        skipped = 0 if pattern.startswith(r"\A") or not file.endswith(".sh") else _first_command(text, pattern)
        changed, count = re.subn(pattern, new, text[skipped:], count=1)
        assert count == 1, f"{pattern!r} is not in {file}"
        (root / file).unlink()
        (root / file).write_text(text[:skipped] + changed, "utf-8")

    return spoil


def _first_command(text, pattern):
    """Return where the first line begins that is no comment and holds a match."""
    starts = (found.start() for found in re.finditer(r"(?m)^(?!#).*\n", text))
    return next(start for start in starts if re.match(rf".*{pattern}", text[start:]))


def gone(path):
    return lambda root: shutil.rmtree(root / path) if (root / path).is_dir() else (root / path).unlink()


def written(path, content):
    return lambda root: (root / path).write_bytes(content.encode() if isinstance(content, str) else content)


def settled(path, **values):
    """Change keys of a JSON file; None removes one."""

    def spoil(root):
        document = json.loads((root / path).read_text("utf-8")) | values
        document = {key: value for key, value in document.items() if value is not None}
        (root / path).write_text(json.dumps(document), "utf-8")

    return spoil


def json_name(name, to):
    """Give a key of model.json another name."""
    return replace(JSON, f'"{name}"', f'"{to}"')


def both(*spoils):
    return lambda root: [spoil(root) for spoil in spoils]


def cut(path, size):
    """Keep `size` bytes of a file; of a negative number, all but so many."""
    return lambda root: (root / path).write_bytes((root / path).read_bytes()[:size])


def moved(path, to):
    return lambda root: (root / path).rename(root / to)


def export(script, text):
    return line(script, f"export {text}")


def gpu_device_ids(text):
    parameter = f'parameters {{ key: "gpu_device_ids" value {{ string_value: "{text}" }} }}'
    return replace(CONFIG, r"\A", f"{parameter}\n")


def nothing(root):
    """Leave the folder alone, where the options are the fault."""


# The table


@dataclass(frozen=True)
class Fault:
    base: str
    name: str
    spoil: Callable[[Path], Any]
    code: str
    words: str
    """Part of the message or the fix, which names the cause."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def report(self, folder):
        """Write the base into `folder`, spoil it and check it."""
        shutil.copytree(_written_base(self.base), folder, dirs_exist_ok=True)
        self.spoil(folder)
        return bases()[self.base].check(folder, self.options)

    def is_found_in(self, findings):
        return any(self.code == one.code and self.words in f"{one.message}; {one.fix}" for one in findings)


@cache
def _scratch():
    return tempfile.TemporaryDirectory()


@cache
def _written_base(name):
    """Write a base with little of the program, whose many files would be copied and read for each fault."""
    root = Path(_scratch().name, name)
    bases()[name].write(root)
    if (root / STAMP).exists():
        stamp = json.loads((root / STAMP).read_text("utf-8"))
        kept = {path: sum for path, sum in stamp["files"].items() if "/deepseek_" not in path or path in PROGRAM}
        for path in stamp["files"].keys() - kept.keys():
            (root / "repository" / path).unlink()
        (root / STAMP).write_text(json.dumps(stamp | {"files": kept}), "utf-8")
    return root


Y, M, S, W = MODEL_YAML, "repository/tensorrt_llm/1", SERVE, "weights"
Q, B, R = "repository/quickstart.sh", "repository/bench.sh", f"{M}/release.yaml"
PROGRAM = [f"tensorrt_llm/1/deepseek_backend/{name}.py" for name in ("__init__", "config", "service")]
W1, W2, WC, WQ = f"{W}/{FIRST}", f"{W}/{SECOND}", f"{W}/config.json", f"{W}/hf_quant_config.json"
WT, WTC = f"{W}/tokenizer.json", f"{W}/tokenizer_config.json"
RELAXED = "speculative_config: {decoding_type: MTP, use_relaxed_acceptance_for_thinking: true}"
BLOCKS_OF_64 = {"quant_method": "fp8", "weight_block_size": [64, 64]}
AWQ = {"quant_method": "awq", "bits": 4}
LLAMAS = [{"id": 1, "content": "<s>"}, {"id": 2, "content": "</s>"}]
IN_FP8 = replace(S, "nvidia/DeepSeek-R1-FP4", "deepseek-ai/DeepSeek-R1")
NOT_DECOUPLED = "model_transaction_policy { decoupled: false }\n"

TABLE = {
    "r1": [
        # model.yaml: misspelled keys, keys of another release or place, wrong values
        ("a key misspelled", rename(Y, "tensor_parallel_size", "tensor_parallel_sizes"), "S011", "parallel_size?"),
        ("a key with a dash", rename(Y, "max_num_tokens", "max-num-tokens"), "S011", "max_num_tokens?"),
        ("a key in capitals", rename(Y, "max_seq_len", "MAX_SEQ_LEN"), "S011", "max_seq_len?"),
        ("a key below misspelled", rename(Y, "  tokens_per_block", "  token_per_block"), "S011", "tokens_per_block"),
        ("a section misspelled", rename(Y, "kv_cache_config", "kvcache_config"), "S011", "kv_cache_config?"),
        ("0.21's moe_backend", line(Y, "moe_backend: CUTLASS"), "S013", "under moe_config: write backend: CUTLASS"),
        ("0.21's use_cuda_graph", line(Y, "use_cuda_graph: true"), "S013", "cuda_graph_config"),
        ("0.21's kv_cache_dtype", line(Y, "kv_cache_dtype: fp8"), "S013", "under kv_cache_config: write dtype: fp8"),
        ("0.19's section", line(Y, "pytorch_backend_config: {use_cuda_graph: true}"), "S013", "cuda_graph_config"),
        ("1.0's mixed sampler", line(Y, "enable_mixed_sampler: true"), "S013", "sampler_type"),
        ("the engine's build_config", line(Y, "build_config:\n  max_seq_len: 8192"), "S013", "write max_seq_len: 8192"),
        ("a flag as a key", line(Y, "kv_cache_free_gpu_memory_fraction: 0.8"), "S013", "free_gpu_memory_fraction: 0.8"),
        ("a flag's short name as a key", line(Y, "tp_size: 8"), "S013", "write tensor_parallel_size: 8"),
        ("chunked prefill's older name", line(Y, "enable_chunked_context: true"), "S013", "enable_chunked_prefill"),
        ("padding's older name", rename(Y, "enable_padding", "padding_enabled"), "S013", "enable_padding: true"),
        ("a key of a later release", line(Y, "model_kwargs: {}"), "S011", "model_kwargs"),
        ("a number in quotes", put(Y, "max_num_tokens", '"8192"'), "S014", "without quotes"),
        ("a number with a unit", put(Y, "max_num_tokens", "8k"), "S014", "a whole number"),
        ("a number with a comma", put(Y, "  free_gpu_memory_fraction", '"0,8"'), "S014", "a number"),
        ("a switch in quotes", put(Y, "enable_attention_dp", '"true"'), "S014", "true or false"),
        ("a share in percent", put(Y, "  free_gpu_memory_fraction", "80"), "S016", "0 to 1"),
        ("no GPU", put(Y, "tensor_parallel_size", "0"), "S016", "from 1"),
        ("a back end misspelled", put(Y, "  backend", "CUTLAS"), "S015", "CUTLASS?"),
        ("a back end in small letters", put(Y, "  backend", "cutlass"), "S015", "CUTLASS?"),
        ("a sampler misspelled", put(Y, "sampler_type", "TRTLLM_Sampler"), "S015", "TRTLLMSampler?"),
        ("a value left out", put(Y, "tensor_parallel_size", ""), "S017", "leave the key out"),
        ("a section as a value", both(put(Y, "moe_config", "CUTLASS"), drop(Y, "  backend")), "S018", "below it"),
        ("a key twice", line(Y, "max_seq_len: 4096"), "S004", "remove one"),
        ("a tab as an indent", replace(Y, r"(?m)^  dtype: fp8", "\tdtype: fp8"), "S002", "correct it"),
        ("a colon without a blank", replace(Y, "max_num_tokens: ", "max_num_tokens:"), "S002", "correct it"),
        ("a bracket not closed", line(Y, "env_overrides: {A: b"), "S002", "correct it"),
        ("an empty file", written(Y, ""), "S003", "write keys and values"),
        ("half of a file", cut(Y, 200), "S003", "keys and values"),
        ("no model", drop(Y, "model"), "S020", "the checkpoint's folder or name"),
        ("the KV cache's dtype at the left", line(Y, "dtype: fp8"), "K011", "under kv_cache_config: dtype: fp8"),
        ("a section's first key not indented", indent(Y, "dtype", by=-2), "S002", "correct it"),
        ("an argument indented", indent(Y, "sampler_type", by=2), "S011", "sampler_type is not a key of moe_config"),
        ("a setting of the backend not indented", line(Y, "default_max_tokens: 256"), "S011", "under triton_config"),
        ("an argument of the engine", below(Y, "triton_config", "  max_num_tokens: 4096"), "T001", "to the top level"),
        ("our setting misspelled", rename(Y, "  default_max_tokens", "  default_max_token"), "T001", "tokens?"),
        ("a wrong setting of the backend", below(Y, "triton_config", "  stream_mode: all"), "T002", "delta"),
        ("an answer longer than the context", put(Y, "  default_max_tokens", "131072"), "L011", "no room for a prompt"),
        ("a wrong default temperature", put(Y, "    temperature", "7000"), "T002", "temperature"),
        ("an unknown sampling default", below(Y, "  default_sampling", "    topp: 0.9"), "T001", "top_p?"),
        ("an engine that there is not", put(Y, "  engine", "trtllm"), "T002", "tensorrt_llm"),
        # model.yaml: settings that don't go together, or with the machine
        ("random weights", line(Y, "load_format: dummy"), "E005", "random weights"),
        ("no tokenizer", line(Y, "skip_tokenizer_init: true"), "E006", "skip_tokenizer_init"),
        ("another family's tokenizer", line(Y, "tokenizer: meta-llama/Llama-3.1-8B"), "E008", "deepseek-r1"),
        ("a sister's tokenizer", line(Y, "tokenizer: deepseek-ai/DeepSeek-V3"), "E008", "deepseek-r1"),
        ("a tokenizer's folder that is not there", line(Y, "tokenizer: /models/none"), "W001", "not on this machine"),
        ("V3.2's tokenizer", line(Y, "custom_tokenizer: deepseek_v32"), "E007", "for V3.2 only"),
        ("the TensorRT engine", put(Y, "backend", "tensorrt"), "E004", "set backend: pytorch"),
        ("AutoDeploy", put(Y, "backend", "_autodeploy"), "E004", "set backend: pytorch"),
        ("balance without attention DP", line(Y, "attention_dp_config: {enable_balance: true}"), "A008", "no effect"),
        ("V3.2's attention", line(Y, "sparse_attention_config:\n  algorithm: dsa"), "V009", "no sparse attention"),
        ("a parser with an underscore", line(Y, "reasoning_parser: deepseek_r1"), "E009", "deepseek-r1"),
        ("another model's parser", line(Y, "reasoning_parser: qwen3"), "E009", "deepseek-r1"),
        ("half a node", line(Y, "gpus_per_node: 4"), "P008", "usually has 8"),
        ("half of the GPUs", put(Y, "tensor_parallel_size", "4"), "T014", "8 GPUs for 4 ranks"),
        ("more ranks than GPUs", put(Y, "tensor_parallel_size", "16"), "T013", "8 GPUs for 16 ranks"),
        ("pipeline ranks too", put(Y, "pipeline_parallel_size", "2"), "T013", "8 GPUs for 16 ranks"),
        ("experts over three ranks", put(Y, "moe_expert_parallel_size", "3"), "P003", "does not divide"),
        ("experts that are no power of two", put(Y, "moe_expert_parallel_size", "6"), "P002", "can't be divided"),
        ("heads over twelve ranks", put(Y, "tensor_parallel_size", "12"), "P001", "can't be divided"),
        ("a context too long", put(Y, "max_seq_len", "200000"), "L003", "163,840"),
        ("a chunk that is no whole block", put(Y, "max_num_tokens", "8200"), "A001", "tokens_per_block"),
        ("a full batch that doesn't fit", put(Y, "max_num_tokens", "64"), "L004", "full batch"),
        ("an iteration that fills the GPU", put(Y, "max_num_tokens", "1048576"), "T017", "KV cache of"),
        ("an FP4 KV cache", put(Y, "  dtype", "nvfp4"), "K003", "only auto and fp8"),
        ("nearly all memory for the KV cache", put(Y, "  free_gpu_memory_fraction", "0.99"), "K006", "0.9 or less"),
        ("Hopper with small blocks", put(Y, "  tokens_per_block", "32"), "K008", "64"),
        ("Blackwell's experts", put(Y, "  backend", "DEEPGEMM"), "M002", "CUTLASS"),
        ("slots without their experts", below(Y, "moe_config", "  load_balancer: {num_slots: 250}"), "M005", "250"),
        ("both lists of graphs", below(Y, "cuda_graph_config", "  batch_sizes: [1, 2, 4]"), "L002", "leave one"),
        ("a section twice", line(Y, "kv_cache_config:\n  max_tokens: 4096"), "S004", "kv_cache_config"),
        ("drafts by the newer key", line(Y, "speculative_config: {decoding_type: MTP, max_draft_len: 3}"), "D003", "3"),
        ("drafts without a kind", line(Y, "speculative_config: {num_nextn_predict_layers: 1}"), "S015", "MTP"),
        ("a kind of drafts in small letters", line(Y, "speculative_config: {decoding_type: mtp}"), "S015", "MTP?"),
        ("FP4 weights by name", put(Y, "model", "nvidia/DeepSeek-R1-FP4"), "W006", "expected fp8 weights"),
        ("another model by name", put(Y, "model", "deepseek-ai/DeepSeek-V3"), "W004", "deepseek-v3"),
        ("another model's folder", put(Y, "model", "/models/DeepSeek-V3.1"), "W019", "deepseek-v3.1"),
        ("a folder that is not there", put(Y, "model", "/models/r1"), "W002", "no folder", {"strict": True}),
        ("a GPU that is too small", nothing, "T016", "take 16 h100", {"gpu": "h100"}),
        ("Ampere", nothing, "H001", "SM80", {"gpu": "a100"}),
        ("Blackwell", nothing, "M002", "DEEPGEMM", {"gpu": "b200"}),
        ("a release without the sampler's key", nothing, "S013", "enable_trtllm_sampler", {"release": "1.0.0"}),
        # config.pbtxt
        ("another name", replace(CONFIG, 'name: "tensorrt_llm"', 'name: "deepseek"'), "C004", "tensorrt_llm"),
        ("the C++ backend", replace(CONFIG, 'backend: "python"', 'backend: "tensorrtllm"'), "C005", "python"),
        ("vLLM's backend without its folder", replace(CONFIG, '"python"', '"vllm"'), "C005", "backends/vllm"),
        ("not decoupled in one file", replace(CONFIG, "decoupled: true", "decoupled: false"), "C006", "decoupled"),
        ("no policy", replace(CONFIG, r"model_transaction_policy.*\n", ""), "C006", "decoupled: true"),
        ("batches by Triton", replace(CONFIG, "max_batch_size: 0", "max_batch_size: 8"), "C006", "max_batch_size"),
        ("an input gone", replace(CONFIG, r'input \[ \{ name: "messages".*\n', ""), "C008", "messages"),
        ("an input misspelled", replace(CONFIG, '"sampling_param_seed"', '"sampling_param_sede"'), "C009", "seed?"),
        ("another type", replace(CONFIG, '("input_ids", data_type: TYPE_)INT32', r"\1INT64"), "C008", "INT32"),
        ("a required input", replace(CONFIG, r'("messages".*), optional: true', r"\1"), "C008", "optional"),
        ("a GPU kind", replace(CONFIG, "KIND_CPU", "KIND_GPU"), "T015", "KIND_CPU"),
        ("two instances", replace(CONFIG, "count: 1", "count: 2"), "T011", "gpu_device_ids"),
        ("no instance group", replace(CONFIG, r"instance_group.*\n", ""), "T015", "KIND_CPU"),
        ("GPUs of half an instance", gpu_device_ids("0,1,2,3"), "T013", "4 GPUs for 8 ranks"),
        ("a GPU twice", gpu_device_ids("0,1,2,3,4,5,6,6"), "T012", "GPU 6"),
        ("a brace missing", replace(CONFIG, "decoupled: true }", "decoupled: true"), "C003", "correct"),
        ("a field misspelled", replace(CONFIG, "max_batch_size", "max_batchsize"), "C003", "max_batchsize"),
        ("no config.pbtxt", gone(CONFIG), "C002", "write it"),
        ("a renamed folder", moved("repository/tensorrt_llm", "repository/r1"), "C004", "r1"),
        # Files
        ("model.py gone", gone(f"{M}/model.py"), "S008", "model.py"),
        ("a module gone", gone(f"{M}/deepseek_backend/service.py"), "S008", "service.py"),
        ("the backend's package gone", gone(f"{M}/deepseek_backend"), "S008", "deepseek_backend"),
        ("the supervisor gone", gone(f"{M}/supervise.py"), "S008", "supervise.py"),
        ("start.sh gone", gone(START), "S008", "start.sh"),
        ("the record gone", gone(R), "S008", "release.yaml"),
        ("model.yaml gone", gone(Y), "S001", "model.yaml"),
        ("model.py edited", replace(f"{M}/model.py", "import", "import os\nimport"), "S009", "model.py"),
        ("a module edited", replace(f"{M}/deepseek_backend/config.py", "import", "import os, "), "S009", "config.py"),
        ("the record edited", replace(R, '"1.2.1"', '"1.1.0"'), "S009", "release.yaml"),
        ("the record of a release that there is not", replace(R, '"1.2.1"', '"1.9"'), "S006", "1.9"),
        ("a folder as start.sh", both(gone(START), lambda root: (root / START).mkdir()), "S001", "start.sh"),
        ("half of the stamp", written(STAMP, '{"a'), "S002", "not JSON"),
        ("a stamp for a GPU that there is not", settled(STAMP, gpu="h20000"), "S006", "h20000"),
        ("a variable misspelled", export(START, "TRTLLM_ENABLE_PLD=1"), "S025", "TRTLLM_ENABLE_PDL?"),
        ("a variable without its end", export(START, "TRTLLM_DG_ENABLE=0"), "S025", "TRTLLM_DG_ENABLED?"),
        ("a word for a switch", export(START, "TRTLLM_ENABLE_PDL=true"), "S026", "0 or 1"),
        ("an option of torch's", export(START, "PYTORCH_ALLOC_CONF=max_split_size_mb=8192"), "S026", "name:value"),
        ("a log level that there is not", export(START, "TLLM_LOG_LEVEL=verbos"), "S026", "verbose"),
        ("layers left out", export(START, "TLLM_OVERRIDE_LAYER_NUM=4 NCCL_DEBUG=INFO"), "E002", "NUM=4 loads"),
        ("DeepGEMM off", export(START, "TRTLLM_DG_ENABLED=0"), "E003", "fast FP8"),
        ("half of the GPUs shown", export(START, "CUDA_VISIBLE_DEVICES=0,1,2,3"), "T013", "shows 4 GPUs"),
        ("a quote not closed", export(START, 'NCCL_DEBUG="INFO'), "S010", "quote"),
        ("an if not closed", line(START, "if true; then"), "S010", "bash"),
    ],
    "mtp": [
        ("the C++ sampler", line(Y, "sampler_type: TRTLLMSampler"), "D010", "MTP has a sampler"),
        ("a default that MTP ignores", below(Y, "  default_sampling", "    min_p: 0.1"), "D009", "min_p"),
        ("a bias", below(Y, "  default_sampling", "    logit_bias: {5: -100}"), "D009", "sampling.logit_bias with"),
        ("acceptance without its switch", below(Y, "speculative_config", "  relaxed_topk: 10"), "D002", "no effect"),
        ("both lengths", below(Y, "speculative_config", "  max_draft_len: 1"), "D004", "overwritten"),
        ("more drafts than anybody", put(Y, "  num_nextn_predict_layers", "5"), "D012", "5 tokens"),
        ("pipeline parallelism", put(Y, "pipeline_parallel_size", "2"), "P006", "MTP with pipeline"),
        ("drafts misspelled", rename(Y, "  num_nextn_predict_layers", "  num_nextn_layers"), "S011", "num_nextn"),
    ],
    "old": [
        ("guided decoding beside MTP", line(Y, "guided_decoding_backend: xgrammar"), "D007", "turn one of the two off"),
        ("a key of a later release", below(Y, "speculative_config", "  allow_advanced_sampling: true"), "S011", "1.2"),
    ],
    "fp4": [
        ("Hopper", nothing, "H002", "need Blackwell", {"gpu": "h200"}),
        ("Hopper's experts", put(Y, "  backend", "DEEPGEMM"), "M002", "CUTLASS or TRTLLM"),
        ("attention DP off, its settings left", put(Y, "enable_attention_dp", "false"), "A008", "no effect"),
        ("four GPUs", nothing, "T013", "4 GPUs for 8 ranks", {"num_gpus": 4}),
    ],
    "v32": [
        ("small blocks", put(Y, "  tokens_per_block", "32"), "V002", "64"),
        ("a release that is too old", nothing, "H006", "too old", {"release": "1.1.0"}),
        ("an FP8 cache on Hopper", nothing, "V001", "Blackwell only", {"gpu": "h200"}),
        ("a long iteration", put(Y, "max_num_tokens", "16384"), "V007", "8,192"),
        ("reuse", put(Y, "  enable_block_reuse", "true"), "V005", "new"),
        ("a tokenizer misspelled", line(Y, "custom_tokenizer: deepseek_v3.2"), "E007", "deepseek_v32"),
        ("relaxed acceptance", line(Y, RELAXED), "D001", "R1 only"),
    ],
    "serve": [
        # The other formats
        ("half of the GPUs", replace(S, "--tp_size 8", "--tp_size 4"), "T014", "8 GPUs for 4 ranks"),
        ("more ranks than GPUs", replace(S, "--pp_size 1", "--pp_size 2"), "T013", "8 GPUs for 16 ranks"),
        ("a flag misspelled", replace(S, "--tp_size", "--tp_sizes"), "S022", "--tp_size?"),
        ("a flag with dashes", replace(S, "--max_num_tokens", "--max-num-tokens"), "S022", "--max_num_tokens?"),
        ("a word for a number", replace(S, "--max_batch_size 128", "--max_batch_size many"), "S014", "whole number"),
        ("a number out of range", replace(S, "--max_batch_size 128", "--max_batch_size 0"), "S016", "from 1"),
        ("a section's flag", replace(S, "--tp_size", "--free_gpu_memory_fraction 0.5 --tp_size"), "S023", "no effect"),
        ("a flag that the file overrules", line(EXTRA, "max_batch_size: 64"), "S023", "gives max_batch_size: 64"),
        ("the file not passed", replace(S, r"  --extra_llm_api_options.*\\\n", ""), "S024", "--extra_llm_api_options"),
        ("the file gone", gone(EXTRA), "S008", "extra-llm-api-config.yml"),
        ("another file passed", replace(S, "extra-llm-api-config.yml", "other.yml"), "S001", "other.yml"),
        ("the script gone", gone(S), "S008", "serve.sh"),
        ("a parser's name", replace(S, "parser deepseek-r1", "parser deepseek_r1"), "E009", "-r1"),
        ("the TensorRT engine", replace(S, "--backend pytorch", "--backend tensorrt"), "E004", "pytorch"),
        ("experts over three ranks", replace(S, "--ep_size 8", "--ep_size 3"), "P003", "does not divide"),
        ("a context too long", replace(S, "--max_seq_len 65536", "--max_seq_len 200000"), "L003", "163,840"),
        ("a chunk that is no whole block", replace(S, "num_tokens 8192", "num_tokens 8200"), "A001", "8,200"),
        ("an empty file", written(EXTRA, ""), "S003", "keys and values"),
        ("a key misspelled", rename(EXTRA, "enable_chunked_prefill", "enable_chunk_prefill"), "S011", "prefill?"),
        ("FP4 weights on Hopper", replace(S, "deepseek-ai/DeepSeek-R1", "nvidia/DeepSeek-R1-FP4"), "W006", "fp8"),
        ("a variable misspelled", export(S, "TRTLLM_ENABLE_PLD=1"), "S025", "TRTLLM_ENABLE_PDL?"),
        ("a line that ends", replace(S, r"--tp_size 8 \\", "--tp_size 8"), "S024", "extra-llm-api-config.yml"),
    ],
    "wide": [
        ("experts on one node", replace(S, "--ep_size 32", "--ep_size 8"), "M002", "expert parallelism 8"),
        ("slots that can't be divided", put(EXTRA, "    num_slots", "280"), "M005", "32"),
        ("attention DP off", put(EXTRA, "enable_attention_dp", "false"), "M007", "enable_attention_dp: true"),
        ("no NVL72", nothing, "M003", "gb200-nvl72", {"gpu": "gb200"}),
        ("FP8 weights", both(IN_FP8, settled("repository/deepseek-triton.json", precision="fp8")), "M004", "no expert"),
    ],
    "copied": [
        # the script passes a copy of the YAML file, in which the balancer's path is whole
        ("experts on one node", replace(S, "--ep_size 32", "--ep_size 8"), "M002", "expert parallelism 8"),
        ("attention DP off", put(EXTRA, "enable_attention_dp", "false"), "M007", "enable_attention_dp: true"),
        ("the balancer's file gone", gone("repository/moe-load-balancer.yaml"), "S008", "moe-load-balancer.yaml"),
    ],
    "bench": [
        ("more ranks than GPUs", replace(B, "--tp 8", "--tp 16"), "T013", "16 ranks"),
        ("serve's flag", replace(B, "--max_seq_len", "--max_seqlen"), "S022", "--max_seq_len?"),
    ],
    "quickstart": [
        ("Blackwell's experts", replace(Q, "backend CUTLASS", "backend DEEPGEMM"), "M002", "CUTLASS"),
        ("more ranks than GPUs", replace(Q, "--tp_size 8", "--tp_size 16"), "T013", "16 ranks"),
        ("a flag misspelled", replace(Q, "--moe_ep_size", "--moe_ep_sizes"), "S022", "ep_size?"),
    ],
    "weights": [
        # The checkpoint
        ("a shard missing", gone(W2), "W008", SECOND),
        ("a shard cut off", cut(W2, -9), "W010", "truncated"),
        ("a pointer of Git LFS", written(W2, "version https://git-lfs.github.com/spec/v1\n"), "W009", "LFS"),
        ("another checkpoint's shard", lambda root: shutil.copy(root / W / FIRST, root / W / SECOND), "W011", "head"),
        ("a shard too many", lambda root: shutil.copy(root / W / FIRST, root / W / "x.safetensors"), "W012", "index"),
        ("no shard", both(gone(W1), gone(W2)), "W008", "2 of 2"),
        ("no config.json", gone(WC), "S001", "config.json"),
        ("half of config.json", written(WC, '{"a": '), "S002", "not JSON"),
        ("V3.2's config.json", settled(WC, architectures=["DeepseekV32ForCausalLM"]), "W004", "deepseek-r1"),
        ("a Llama", settled(WC, architectures=["LlamaForCausalLM"]), "W004", "deepseek-r1"),
        ("16-bit weights", settled(WC, quantization_config=None), "W006", "no quantization"),
        ("layers cut off", settled(WC, num_hidden_layers=4), "W016", "num_hidden_layers 4, not 61"),
        ("Kimi's experts", settled(WC, n_routed_experts=384), "W016", "n_routed_experts 384"),
        ("another vocabulary", settled(WC, vocab_size=32000), "W016", "vocab_size 32000, not 129280"),
        ("a short context", settled(WC, max_position_embeddings=4096), "L003", "4,096"),
        ("other blocks", settled(WC, quantization_config=BLOCKS_OF_64), "W018", "[128, 128]"),
        ("NVFP4 weights", written(WQ, json.dumps({"quantization": NVFP4})), "W006", "NVFP4"),
        ("no tokenizer.json", gone(WT), "W014", "tokenizer.json"),
        ("no tokenizer_config.json", gone(WTC), "W014", "tokenizer_config.json"),
        ("half of tokenizer.json", written(WT, '{"mod'), "S002", "not JSON"),
        ("a larger tokenizer", settled(WT, model={"vocab": {"a": 151645}}), "W015", "151,645"),
        (
            "Llama's tokenizer",
            both(settled(WT, added_tokens=LLAMAS), settled(WTC, bos_token="<s>")),
            "W015",
            "json says 0",
        ),
    ],
    "mtp weights": [
        ("no MTP layer", settled(WC, num_nextn_predict_layers=None), "W017", "MTP"),
        ("zero MTP layers", settled(WC, num_nextn_predict_layers=0), "W017", "found 0"),
    ],
    "fp4 weights": [
        *(
            (name, written(WQ, json.dumps(content)), "W018", words)
            for name, content, words in (
                ("an algorithm misspelled", {"quantization": {**NVFP4, "quant_algo": "NVPF4"}}, "NVFP4?"),
                ("small letters", {"quantization": {**NVFP4, "kv_cache_quant_algo": "fp8"}}, "write FP8"),
                ("a section misspelled", {"quantisation": NVFP4}, "quantisation"),
                ("a key misspelled", {"quantization": {**NVFP4, "kv_cache_quant": "FP8"}}, "kv_cache_quant_algo?"),
                ("larger groups", {"quantization": {**NVFP4, "group_size": 32}}, "16"),
                ("an INT8 cache", {"quantization": {**NVFP4, "kv_cache_quant_algo": "INT8"}}, "FP8 or null"),
            )
        ),
        ("FP8 weights", both(gone(WQ), written(WC, json.dumps(R1_CONFIG))), "W006", "expected fp4 weights"),
    ],
    "vllm": [
        # A repository for vLLM: model.yaml, the record, config.pbtxt and start.sh
        ("a key misspelled", rename(Y, "max_num_seqs", "max_num_seq"), "S011", "max_num_seqs?"),
        ("a setting not indented", line(Y, "max_inflight: 64"), "S011", "so that it stands under triton_config"),
        ("an argument indented", line(Y, "triton_config:\n  max_model_len: 8192"), "S004", "given twice"),
        ("TensorRT-LLM's share", line(Y, "kv_cache_config: {free_gpu_memory_fraction: 0.8}"), "S013", "memory_util"),
        ("TensorRT-LLM's backend", line(Y, "backend: pytorch"), "S013", "vLLM has one"),
        ("another engine", put(Y, "  engine", "tensorrt_llm"), "S029", "a version of TensorRT-LLM"),
        ("an engine misspelled", put(Y, "  engine", "vlm"), "T002", "vllm"),
        ("the record of TensorRT-LLM", written(R, 'release: "1.2.1"\n'), "S029", "a version of vLLM"),
        ("an unknown version's record", written(R, 'vllm: "0.22.1"\n'), "S006", "26.06 has"),
        ("the record edited", replace(R, "max_num_seqs", "max_num_seq"), "S009", "was changed"),
        ("half of the ranks", put(Y, "tensor_parallel_size", "4"), "T014", "8 GPUs for 4 ranks"),
        ("ranks that don't divide the heads", put(Y, "tensor_parallel_size", "6"), "X004", "128 attention heads"),
        ("data parallelism on top", line(Y, "data_parallel_size: 8"), "T013", "8 GPUs for 64 ranks"),
        ("a context too long", put(Y, "max_model_len", "200000"), "X014", "163,840"),
        ("fewer tokens than requests", put(Y, "max_num_batched_tokens", "64"), "X013", "less than max_num_seqs"),
        ("an FP8 cache on FA", put(Y, "kv_cache_dtype", "fp8\nattention_backend: FLASH_ATTN_MLA"), "X007", "_MLA"),
        ("Blackwell's attention", line(Y, "attention_backend: CUTLASS_MLA"), "X008", "runs on Blackwell"),
        ("a block size of another backend", line(Y, "attention_backend: FLASHMLA\nblock_size: 32"), "X009", "64"),
        ("too small a share", put(Y, "gpu_memory_utilization", "0.58"), "T017", "vLLM does not start"),
        ("all of the memory", put(Y, "gpu_memory_utilization", "1"), "X021", "0.94 or less"),
        ("no priorities", put(Y, "scheduling_policy", "fcfs"), "X022", "scheduling_policy: priority"),
        ("H100", nothing, "T016", "h100", {"gpu": "h100"}),
        ("Ampere", nothing, "X001", "Ampere", {"gpu": "a100"}),
        ("NVFP4 on Hopper", nothing, "X002", "Blackwell", {"precision": "fp4"}),
        ("the recipe's attention", export(START, "VLLM_ATTENTION_BACKEND=FLASHMLA"), "S028", "attention_backend: F"),
        ("the recipe's experts", export(START, "VLLM_USE_FLASHINFER_MOE_FP8=1"), "S028", "moe_backend: flashinfer"),
        ("a variable misspelled", export(START, "VLLM_USE_DEEPGEMM=1"), "S025", "VLLM_USE_DEEP_GEMM?"),
        ("a variable of TensorRT-LLM", export(START, "TLLM_LOG_LEVEL=info"), "S028", "TensorRT-LLM's variables"),
        ("hidden GPUs", export(START, "CUDA_VISIBLE_DEVICES=0,1,2,3"), "T013", "shows 4 GPUs to 8 ranks"),
        ("two instances", replace(CONFIG, "count: 1", "count: 2"), "T012", "all take the same GPUs"),
        ("decoupled in one place", put(Y, "  decoupled", "false"), "C006", "decoupled"),
    ],
    "vllm mtp": [
        ("drafts and min_p", below(Y, "  default_sampling", "    min_p: 0.1"), "X018", "refuses it"),
        ("drafts and a bias", below(Y, "  default_sampling", "    logit_bias: {5: -100}"), "X018", "logit_bias "),
        ("more drafts than layers", put(Y, "  num_speculative_tokens", "3"), "X017", "with 1 layer"),
        ("TensorRT-LLM's method", rename(Y, "  method", "  decoding_type"), "S013", "write method: mtp"),
    ],
    "vllm dp": [
        ("an argument that is gone", line(Y, "max_num_partial_prefills: 2"), "S011", "vLLM 0.24.0 has it"),
        ("more ranks than a node has", put(Y, "data_parallel_size", "16"), "X006", "a node's 8 GPUs"),
        ("0.24.0's record", written(R, 'vllm: "0.24.0"\n'), "S009", "was changed"),
    ],
    "vllm serve": [
        ("a flag misspelled", replace(S, "--max-num-seqs", "--max-num-seq"), "S022", "--max-num-seqs?"),
        ("a share in percent", replace(S, "utilization 0.9", "utilization 95"), "S016", "from 0 to 1"),
        ("a context too long", replace(S, "65536", "200000"), "X014", "163,840"),
        ("half of the ranks", replace(S, "--tensor-parallel-size 8", "-tp 4"), "T014", "8 GPUs for 4 ranks"),
        ("the recipe's attention", export(S, "VLLM_ATTENTION_BACKEND=CUTLASS_MLA"), "S028", "attention-backend"),
        ("the script edited", export(S, "MINE=1"), "S005", "changed"),
    ],
    "vllm backend": [
        # Triton's own vLLM backend: names and values of engine arguments, those of other versions, and config.pbtxt
        ("an argument misspelled", json_name("tensor_parallel_size", "tensor_paralel_size"), "S011", "parallel_size?"),
        ("an argument with dashes", json_name("max_model_len", "max-model-len"), "S011", "max_model_len?"),
        ("a number as text", settled(JSON, tensor_parallel_size="8"), "S014", "write 8 as a number"),
        ("a switch as text", settled(JSON, enable_expert_parallel="yes"), "S014", "true or false"),
        ("a share in percent", settled(JSON, gpu_memory_utilization=95), "S016", "from 0 to 1"),
        ("no ranks", settled(JSON, tensor_parallel_size=0), "S016", "from 1"),
        ("no seed", replace(JSON, '"seed": 0', '"seed": null'), "S017", "leave the key out"),
        ("a backend of experts misspelled", settled(JSON, moe_backend="deepgemm"), "S015", "did you mean deep_gemm?"),
        ("a type of KV cache", settled(JSON, kv_cache_dtype="fp8_e4m"), "S015", "did you mean fp8_e4m3?"),
        ("MTP's method misspelled", replace(JSON, '"mtp"', '"mpt"'), "S015", "did you mean mtp?"),
        ("MTP's number misspelled", json_name("num_speculative_tokens", "num_speculative_token"), "S011", "under spec"),
        ("no draft tokens", replace(JSON, '_tokens": 1', '_tokens": 0'), "S016", "from 1"),
        ("MTP as a word", settled(JSON, speculative_config="mtp"), "S018", "write its keys below it"),
        ("0.9's logging", settled(JSON, disable_log_requests=True), "S013", "write enable_log_requests: false"),
        ("0.10's guides", settled(JSON, guided_decoding_backend="xgrammar"), "S013", "write backend: xgrammar"),
        ("0.8's drafts", settled(JSON, num_speculative_tokens=1), "S013", "write num_speculative_tokens: 1"),
        ("V0's swapping", settled(JSON, swap_space=16), "S013", "computes what it preempted again"),
        ("TensorRT-LLM's batch size", settled(JSON, max_batch_size=128), "S013", "write max_num_seqs: 128"),
        ("TensorRT-LLM's KV cache", settled(JSON, kv_cache_config={"dtype": "fp8"}), "S013", "kv_cache_dtype: fp8"),
        ("an argument of a newer version", settled(JSON, max_num_active_seqs=64), "S011", "vLLM 0.33.0 has it"),
        ("a lost argument", settled(JSON, calculate_kv_scales=True), "S011", "0.24.0 has it", {"vllm": "0.33.0"}),
        ("our setting", settled(JSON, max_inflight=64), "S011", "is not an argument"),
        ("a comma too many", replace(JSON, "1}\n}", "1},\n}"), "S002", "not JSON"),
        ("an argument twice", replace(JSON, '"seed": 0', '"max_model_len": 8192'), "S004", "given twice"),
        ("no model", settled(JSON, model=None), "S020", "no model is named"),
        ("a sister", settled(JSON, model="deepseek-ai/DeepSeek-V3"), "W004", "deepseek-v3", {"variant": "deepseek-r1"}),
        ("four GPUs", nothing, "T013", "4 GPUs for 8 ranks (tensor x pipeline x data parallelism)", {"num_gpus": 4}),
        ("data parallelism on top", settled(JSON, data_parallel_size=2), "T013", "8 GPUs for 16 ranks"),
        ("two instances", put(VLLM_CONFIG, "count", "2"), "T012", "all take the same GPUs"),
        ("instances of one GPU", put(VLLM_CONFIG, "kind", "KIND_GPU"), "C010", "write kind: KIND_MODEL"),
        ("another backend", replace(VLLM_CONFIG, '"vllm"', '"python"'), "C010", 'write backend: "vllm"'),
        ("not decoupled", replace(VLLM_CONFIG, r"\A", NOT_DECOUPLED), "C010", "decoupled: true"),
        ("batches of Triton's", replace(VLLM_CONFIG, r"\A", "max_batch_size: 8\n"), "C010", "write max_batch_size: 0"),
        ("another name", replace(VLLM_CONFIG, r"\A", 'name: "r2"\n'), "C004", "rename the folder"),
    ],
    "vllm weights": [
        ("a shard gone", gone(W2), "W008", SECOND),
        ("no MTP layer", settled(WC, num_nextn_predict_layers=None), "W017", "asks for MTP"),
        ("another architecture", settled(WC, architectures=["Qwen3ForCausalLM"]), "W005", "found 'Qwen3"),
        ("no tokenizer", gone(WT), "W014", "no tokenizer"),
        ("other figures", settled(WC, num_hidden_layers=60), "W016", "num_hidden_layers 60, not 61"),
        ("weights of 4 bits", settled(WC, quantization_config=AWQ), "W006", "found W4A16"),
    ],
    "vllm script": [
        # A script with `vllm serve`, and variables of the published recipe that newer versions lost
        ("a flag misspelled", replace(S, "expert-parallel", "expert-paralel"), "S022", "--enable-expert-parallel?"),
        ("a flag of TensorRT-LLM", replace(S, "--tensor-parallel-size", "--tp_size"), "S022", "not a flag"),
        ("a flag of 0.9", replace(S, "no-enable-prefix-caching", "disable-log-requests"), "S013", "no-enable-log"),
        ("TensorRT-LLM's length", replace(S, "--max-model-len", "--max_seq_len"), "S013", "--max-model-len 65536"),
        ("a value of a wrong type", replace(S, "65536", "long"), "S014", "a whole number"),
        ("a share in percent", replace(S, "utilization 0.9", "utilization 95"), "S016", "from 0 to 1"),
        ("JSON that is none", replace(S, '{"method": "mtp", ', "{method: mtp, "), "S014", "expected a JSON object"),
        ("JSON misspelled", replace(S, "num_speculative_tokens", "num_spec_tokens"), "S011", "num_speculative"),
        ("the recipe's attention", export(S, "VLLM_ATTENTION_BACKEND=CUTLASS_MLA"), "S028", "backend CUTLASS_MLA"),
        ("the recipe's experts in FP8", export(S, "VLLM_USE_FLASHINFER_MOE_FP8=1"), "S028", "moe-backend flashinfer"),
        ("the recipe's experts in FP4", export(S, "VLLM_USE_FLASHINFER_MOE_FP4=1"), "S028", "moe-backend flashinfer"),
        ("the recipe's dispatch", export(S, "VLLM_ALL2ALL_BACKEND=deepep_low_latency"), "S028", "all2all-backend d"),
        ("V1 asked for", export(S, "VLLM_USE_V1=1"), "S028", "V1 is the only engine"),
        ("a variable misspelled", replace(S, "USE_DEEP_GEMM", "USE_DEEPGEMM"), "S025", "VLLM_USE_DEEP_GEMM?"),
        ("a variable of TensorRT-LLM", export(S, "TRTLLM_DG_ENABLED=1"), "S028", "TensorRT-LLM's variables"),
        ("hidden GPUs", export(S, "CUDA_VISIBLE_DEVICES=0,1,2,3"), "T013", "shows 4 GPUs to 8 ranks"),
        ("four GPUs", nothing, "T013", "4 GPUs for 8 ranks", {"num_gpus": 4}),
        ("no quote", replace(S, "1}'", "1}"), "S010", "bash can't read it"),
        (
            "a key's flag misspelled",
            replace(S, "enable-expert", "speculative-config.methods mtp --enable-expert"),
            "S022",
            "method",
        ),
    ],
    "recipe curated-deepgemm": [
        # Published files on other machines and for other releases
        ("Hopper", nothing, "M002", "CUTLASS", {"gpu": "h200"}),
        ("0.21", nothing, "S013", "use_cuda_graph: true", {"release": "0.21.0"}),
        ("1.0 on Hopper", nothing, "M002", "CUTLASS", {"release": "1.0.0", "gpu": "h200"}),
        ("four GPUs", nothing, "T013", "4 GPUs for 8 ranks", {"num_gpus": 4}),
        ("W4A8 weights", nothing, "H003", "Hopper only", {"precision": "w4a8"}),
        ("a key misspelled", rename(RECIPE, "stream_interval", "stream_intervall"), "S011", "stream_interval?"),
        ("the experts' limit not indented", indent(RECIPE, "max_num_tokens", by=-2), "S004", "max_num_tokens"),
    ],
    "recipe database-r1-0528-h200-8k1k-tp8-conc4": [
        ("Blackwell", nothing, "M002", "DEEPGEMM", {"gpu": "b200"}),
        ("H100", nothing, "T016", "take 16 h100", {"gpu": "h100"}),
        ("Ampere", nothing, "H001", "Ampere", {"gpu": "a100"}),
        ("W4A8 weights", nothing, "K002", "W4AFP8", {"precision": "w4a8"}),
        ("a share not indented", indent(RECIPE, "free_gpu_memory_fraction", by=-2), "S013", "kv_cache_config"),
    ],
    "recipe database-r1-0528-fp4-v2-b200-1k1k-tp4-conc256": [
        ("Hopper", nothing, "H002", "need Blackwell", {"gpu": "h200"}),
        ("balance without attention DP", put(RECIPE, "enable_attention_dp", "false"), "A008", "no effect"),
        ("FP8 weights", nothing, "M002", "DEEPGEMM", {"precision": "fp8"}),
        ("two GPUs", nothing, "T013", "2 GPUs for 4 ranks", {"num_gpus": 2}),
    ],
    "recipe curated-latency": [
        ("V3", nothing, "D001", "R1 only", {"variant": "deepseek-v3"}),
        ("three expert ranks", put(RECIPE, "moe_expert_parallel_size", "3"), "P003", "does not divide"),
    ],
    "recipe readme-0.19": [
        ("1.2.1", nothing, "S013", "disable_overlap_scheduler: false", {"release": "1.2.1"}),
    ],
    "recipe v32-max-throughput": [
        ("1.1", nothing, "H006", "too old", {"release": "1.1.0"}),
    ],
    "recipe wide-ep-generation": [
        ("no NVL72", nothing, "M003", "gb200-nvl72", {"gpu": "gb200"}),
        ("attention DP off", put(RECIPE, "enable_attention_dp", "false"), "M007", "enable_attention_dp: true"),
        ("FP8 weights", nothing, "M004", "no expert", {"precision": "fp8"}),
        ("slots that can't be divided", put(RECIPE, "num_slots", "280"), "M005", "32"),
        ("a transceiver in small letters", replace(RECIPE, "backend: DEFAULT", "backend: default"), "S015", "DEFAULT?"),
    ],
    "recipe disaggregated-context": [
        ("a transceiver that there is not", replace(RECIPE, "backend: DEFAULT", "backend: RDMA"), "S015", "NIXL"),
        ("its buffer's older name", rename(RECIPE, "  max_tokens_in_buffer", "  max_num_tokens"), "S013", "in_buffer"),
    ],
}
"""Base -> its faults: what is done, by which code and with which words it is found, and perhaps options."""
FAULTS = [Fault(base, *row) for base, rows in TABLE.items() for row in rows]


def missed(base):
    """Return each fault of the base that is not found with the right explanation, and what is found instead."""
    told = {}
    for fault in (one for one in FAULTS if one.base == base):
        with tempfile.TemporaryDirectory() as folder:
            findings = fault.report(Path(folder)).findings
        if not fault.is_found_in(findings):
            told[fault.name, fault.code] = [f"{one.code} {one.message}; {one.fix}" for one in findings]
    return told


if __name__ == "__main__":
    print(*(row for base in TABLE for row in missed(base).items()), f"of {len(FAULTS)}", sep="\n")
