"""Realistic faults, each with the code and the words by which `check` has to find it.

tests/build/test_check_faults.py puts them to it. PYTHONPATH=tests python -m support.check_faults prints what is missed.
"""

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

from deepseek_triton_build import (
    DISAGGREGATED,
    DisaggregatedRequest,
    PlanRequest,
    format_files,
    make_disaggregated_plan,
    make_plan,
    pair_files,
    write_repository,
)
from deepseek_triton_build.check import CheckOptions, check_repository
from support.checked import safetensors

RECIPES_FILE, TABLE_FILE = (Path(__file__).with_name(f"check_{name}.yaml") for name in ("recipes", "faults"))
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

    request: PlanRequest | DisaggregatedRequest | None = None
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
        if isinstance(self.request, DisaggregatedRequest):
            files = pair_files(make_disaggregated_plan(self.request), version="0", format=self.format)
            write_repository(files, root / "repository")
        elif self.request is not None:
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
        "pair": Base(request=DisaggregatedRequest(both=_r1(profile=DISAGGREGATED)), format="trtllm-serve"),
        "quickstart": Base(request=_r1(), format="quickstart"),
        "tiny": Base(request=PlanRequest(variant="tiny"), weights=True),
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


def folder(path):
    return lambda root: (root / path).mkdir()


def copied(path, to):
    return lambda root: shutil.copy(root / path, root / to)


def moved(path, to):
    return lambda root: (root / path).rename(root / to)


def unrunnable(script):
    return lambda root: (root / script).chmod(0o644)


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
        return any(self.code == one.code and self.words in f"{one.file}: {one.message}; {one.fix}" for one in findings)


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


PROGRAM = [f"tensorrt_llm/1/deepseek_backend/{name}.py" for name in ("__init__", "config", "service")]
FILES = {
    "MODEL_YAML": "repository/tensorrt_llm/1/model.yaml",
    "CONFIG": "repository/tensorrt_llm/config.pbtxt",
    "START": "repository/start.sh",
    "SERVE": "repository/serve.sh",
    "EXTRA": "repository/extra-llm-api-config.yml",
    "RECIPE": "repository/extra.yaml",
    "STAMP": "repository/tensorrt_llm/deepseek-triton.json",
    "JSON": "repository/r1/1/model.json",
    "CONTEXT": "repository/context",
    "CONTEXT_STAMP": "repository/context/deepseek-triton.json",
    "GENERATION": "repository/generation",
    "GENERATION_STAMP": "repository/generation/deepseek-triton.json",
    "VLLM_CONFIG": "repository/r1/config.pbtxt",
    "QUICKSTART": "repository/quickstart.sh",
    "BENCH": "repository/bench.sh",
    "RECORD": "repository/tensorrt_llm/1/release.yaml",
    "FIRST_SHARD": "weights/model-00001-of-000002.safetensors",
    "SECOND_SHARD": "weights/model-00002-of-000002.safetensors",
    "WEIGHTS_CONFIG": "weights/config.json",
    "QUANT_CONFIG": "weights/hf_quant_config.json",
    "TOKENIZER": "weights/tokenizer.json",
    "TOKENIZER_CONFIG": "weights/tokenizer_config.json",
}
"""Name in the table -> the file that it stands for."""
WAYS = [put, rename, drop, line, below, indent, replace, gone, written, settled, json_name, both, cut, moved, export]
WAYS += [folder, copied, unrunnable, gpu_device_ids]
WAYS_BY_NAME = {way.__name__: way for way in WAYS}
TABLE = yaml.safe_load(TABLE_FILE.read_text("utf-8"))


def spoiled_by(words):
    """The way that the table names, with its arguments."""
    if not words:
        return nothing
    name, *arguments = words
    values = arguments.pop() if isinstance(arguments[-1], dict) else {}
    given = [spoiled_by(each) if isinstance(each, list) else FILES.get(each, each) for each in arguments]
    return WAYS_BY_NAME[name](*given, **values)


FAULTS = [
    Fault(base, name, spoiled_by(way), code, words, *options)
    for base, rows in TABLE.items()
    for name, code, words, way, *options in rows
]


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
    rows = [row for base in TABLE for row in missed(base).items()]
    print(*rows, f"{len(rows)} missed of {len(FAULTS)}", sep="\n")
