"""DeepSeek-R1 at full size in 4-bit weights on four GPUs, with dummy weights: through Triton and the engine alone.

    python tests/gpu/full_size_r1.py --output FOLDER [--phases alone,triton,alone] [--seconds 1300]

Two engines of this size do not fit the GPUs, so they take turns, each after a load of some minutes: a phase loads one,
measures every load in rounds, and ends it. The engine alone comes before and after Triton, so that its own spread is
known. The prompts are random token ids, the same in all phases; the weights are random, and the routing of experts is
uniform. Writes runs.jsonl as beside_vllm_backend.py does. A phase begins only if the seconds that are left hold another
one as long as the longest so far.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import yaml

sys.path.extend(
    str(Path(__file__).resolve().parents[2] / each)
    for each in ("model_repository/tensorrt_llm/1", "client", "build", "tools", "tests")
)

from gpu.engine_alone import EngineAlone
from gpu.measuring import Measure, alone, line, record, through
from gpu.served_engines import (
    OURS,
    ROOT,
    gpu_memory_mib,
    machine,
    our_repository,
    server_of,
    set_environment,
    start,
    wait_for,
)
from gpu.token_streams import Load, Prompt, Target, client_processes

LOADS = ((1, 7902, 1000), (1, 1024, 256), (8, 1024, 256), (32, 1024, 256), (64, 1024, 256))
"""Streams, tokens of the prompt and of the answer."""
W4A16 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head", "re:.*self_attn.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 128,
                "dynamic": False,
                "actorder": None,
                "observer": "minmax",
                "block_structure": None,
            },
        }
    },
}
"""In groups of 128; attention and the output layer keep 16 bits."""
FREE_MIB = 4000
"""By which the GPUs' memory in use may differ from before, when the next engine loads."""
GONE_WITHIN_S = 60
ENVIRONMENT = {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random"}
"""Dummy weights would route every token to the same experts."""


def checkpoint(folder: Path) -> Path:
    """Write a config.json of R1's published shape, and a tokenizer of made-up words: no weights, as vLLM makes its own.

    Every id below the vocabulary's size has a text, so that text is made of the tokens as with the real tokenizer.
    """
    catalog = ROOT / "build/deepseek_triton_build/data/catalog/architectures.yaml"
    shape = yaml.safe_load(catalog.read_text(encoding="utf-8"))["deepseek-v3"]
    config = {
        "architectures": [shape["class_name"]],
        "model_type": shape["model_type"],
        "num_hidden_layers": shape["num_layers"],
        "first_k_dense_replace": shape["num_dense_layers"],
        "num_nextn_predict_layers": shape["num_mtp_layers"],
        "n_routed_experts": shape["num_routed_experts"],
        "n_shared_experts": shape["num_shared_experts"],
        "num_experts_per_tok": shape["num_experts_per_token"],
        "num_attention_heads": shape["num_heads"],
        "num_key_value_heads": shape["num_heads"],
        **{
            name: shape[name]
            for name in (
                "hidden_size",
                "intermediate_size",
                "moe_intermediate_size",
                "q_lora_rank",
                "kv_lora_rank",
                "qk_nope_head_dim",
                "qk_rope_head_dim",
                "v_head_dim",
                "vocab_size",
                "max_position_embeddings",
            )
        },
        "bos_token_id": 0,
        "eos_token_id": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "moe_layer_freq": 1,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "quantization_config": W4A16,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    _tokenizer(shape["vocab_size"]).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _tokenizer(size: int) -> Any:
    """Bytes, and a made-up word with a space before it for every further id."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<bos>", "<eos>", *letters]
    names += [f"Ġw{number}" for number in range(size - len(names))]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    return tokenizer


def engine_arguments(model: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "load_format": "dummy",
        "tensor_parallel_size": 4,
        "enable_expert_parallel": True,
        # NCCL alone: virtual machines often have no direct access from one GPU to another.
        "disable_custom_all_reduce": True,
        "max_model_len": 10240,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.85,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        **more,
    }


def prompts(load: Load, vocabulary: int = 129280) -> list[Prompt]:
    """Random ids, the same at each call for the same load."""
    chosen = random.Random(f"{load.name}")
    return [
        Prompt(ids=tuple(chosen.randrange(300, vocabulary) for _ in range(load.prompt_tokens)))
        for _ in range(load.streams * load.requests)
    ]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that the phases share."""

    arguments: dict[str, Any]
    """Of the engine."""
    loads: Sequence[Load]
    rounds: int
    end_s: float
    """No measurement begins later, by time.monotonic()."""
    runs: TextIO

    def measure(self, system: str, phase: int, measure_of: Callable[[Sequence[Prompt]], Measure]) -> None:
        """`measure_of` gives what measures a load with these prompts."""
        for load in self.loads:  # what compiles at first use has compiled then
            began = time.monotonic()
            measure_of(prompts(load))(replace(load, output_tokens=8))
            print(f"{system}: warm at {load.name} after {time.monotonic() - began:.1f} s", flush=True)
        for number in range(1, self.rounds + 1):
            for load in self.loads:
                if time.monotonic() > self.end_s:
                    print("the time is over", flush=True)
                    return
                found = record(number, system, load, *measure_of(prompts(load))(load)) | {"phase": phase}
                self.runs.write(json.dumps(found) + "\n")
                self.runs.flush()
                print(f"phase {phase} round {number} {line(found)}", flush=True)

    def phase(self, number: int, system: str, folder: Path) -> None:
        """Load one engine, measure it, and end it."""
        folder.mkdir()
        if system == "alone":
            engine = EngineAlone(self.arguments, folder)
            try:
                print(f"phase {number}: the engine alone loaded in {engine.wait_until_ready()} s", flush=True)
                print(f"GPU memory in use: {gpu_memory_mib()} MiB", flush=True)
                self.measure("engine", number, lambda asked: alone(engine, asked))
            finally:
                engine.stop()
            return
        made = our_repository(folder / "repository", self.arguments)
        with server_of(made, folder / "tritonserver.log") as server, client_processes(4) as clients:
            print(f"phase {number}: ready through Triton after {start(server)} s", flush=True)
            print(f"GPU memory in use: {gpu_memory_mib()} MiB", flush=True)
            target = Target(protocol="grpc", port=server.grpc_port, model=OURS)
            self.measure("ours", number, lambda asked: through(server, target, clients, asked))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--phases", default="alone,triton,alone", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=2, help="of each phase (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1300, help="of the whole run (default: %(default)s)")
    parser.add_argument("--engine-arguments", default="{}", metavar="JSON", help="added to those of both")
    arguments = parser.parse_args()
    end_s = time.monotonic() + arguments.seconds
    folder: Path = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    set_environment(ENVIRONMENT)
    given = engine_arguments(checkpoint(folder / "checkpoint"), **json.loads(arguments.engine_arguments))
    loads = [
        Load(streams=streams, requests=1, prompt_tokens=prompt, output_tokens=output)
        for streams, prompt, output in LOADS
    ]
    (folder / "machine.json").write_text(json.dumps(machine() | {"engine_arguments": given}, indent=1))
    longest, idle = 0.0, gpu_memory_mib()
    with (folder / "runs.jsonl").open("w", encoding="utf-8") as runs:
        run = Run(arguments=given, loads=loads, rounds=arguments.rounds, end_s=end_s, runs=runs)
        for phase, system in enumerate(arguments.phases.split(","), start=1):
            wait_for(lambda: idle is None or (gpu_memory_mib() or 0) <= idle + FREE_MIB, GONE_WITHIN_S)
            if time.monotonic() + longest > end_s:
                print(f"no time is left for phase {phase}, {system}", flush=True)
                break
            began = time.monotonic()
            run.phase(phase, system, folder / f"phase{phase}")
            longest = max(longest, time.monotonic() - began)
            print(f"phase {phase}, {system}: {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
