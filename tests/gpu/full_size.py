"""A model at full width on the GPUs that its plan names, with dummy weights: through Triton and the engine alone.

    python tests/gpu/full_size.py --output FOLDER [--model deepseek-r1] [--shapes 7902/1000 ...] [--seconds 1300]

`deepseek-triton build MODEL --engine vllm` writes the repository, and the engine alone gets the same arguments.
Two engines of this size do not fit the GPUs, so they take turns, each after a load of some minutes: a phase loads one,
measures every load in rounds, and ends it. The engine alone comes before and after Triton, so that its own spread is
known. The prompts are random token ids, the same in all phases; the weights are random, and the routing of experts is
uniform. With --layers fewer GPUs hold what each of eight holds of the whole model.

Writes runs.jsonl as beside_vllm_backend.py does, and memory.json: the plan's budget of a GPU beside what vLLM and the
GPUs reported. A phase begins only if the seconds that are left hold another one as long as the longest so far.
"""

import argparse
import contextlib
import importlib.metadata
import io
import json
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import yaml

sys.path.extend(
    str(Path(__file__).resolve().parents[2] / each)
    for each in ("model_repository/tensorrt_llm/1", "client", "build", "tools", "tests")
)

from gpu.engine_alone import EngineAlone
from gpu.measuring import Measure, alone, line, record, through
from gpu.served_engines import OURS, gpu_memory_mib, machine, server_of, set_environment, start, wait_for
from gpu.token_streams import Load, Prompt, Target, client_processes

from deepseek_triton_tools.cli.main import main as program

MODELS: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("full_size_models.yaml").read_text("utf-8"))
SHAPES = ("7902/1000",)
"""Tokens of the prompt and of the answer; the vLLM recipes' guide measured 7,902 / 1,000."""
BATCHES = (1, 16, 32, 64, 128, 256)
FREE_MIB = 4000
"""By which the GPUs' memory in use may differ from before, when the next engine loads."""
GONE_WITHIN_S = 60
ENVIRONMENT = {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random"}
"""Dummy weights would route every token to the same experts."""


def checkpoint(folder: Path, name: str, precision: str | None = None, num_layers: int | None = None) -> Path:
    """Write a config.json of the published shape, or of its first layers, and a tokenizer of made-up words: no
    weights, as vLLM makes its own.

    Every id below the vocabulary's size has a text, so that text is made of the tokens as with the real tokenizer.
    """
    model = MODELS[name]
    config = dict(model["config"])
    config["num_hidden_layers"] = num_layers or config["num_hidden_layers"]
    config["quantization_config"] = model["quantization"][precision or next(iter(model["quantization"]))]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    # A checkpoint of V4 with fewer layers is known as a cut one by its index.
    index = {"weight_map": {"layers.0.attn_norm.weight": "none.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    special: list[str] = model["special_tokens"]
    _tokenizer(special, config["vocab_size"]).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": special[0], "eos_token": special[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _tokenizer(special: list[str], size: int) -> Any:
    """Bytes, and a made-up word with a space before it for every further id."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*special, *letters]
    names += [f"Ġw{number}" for number in range(size - len(names))]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return tokenizer


SETTINGS = {
    "load_format": "dummy",
    # A cached prefix would make the second measurement look faster than the first.
    "enable_prefix_caching": "false",
    # NCCL alone: virtual machines often have no direct access from one GPU to another.
    "disable_custom_all_reduce": "true",
}


def build(folder: Path, name: str, model: Path, options: Sequence[str], vllm: str) -> dict[str, Any]:
    """Write the repository as users do, and return the plan."""
    settings = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    command = ["build", name, "--engine", "vllm", "--vllm", vllm, "--gpu", "h200", "--model", str(model)]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = program([*command, *settings, *options, "--json", "--output", str(folder)])
    if code:
        raise SystemExit(code)
    plan: dict[str, Any] = json.loads(said.getvalue())["plan"]
    return plan


def engine_arguments(repository: Path) -> dict[str, Any]:
    """Of AsyncEngineArgs, as model.yaml has them."""
    found: dict[str, Any] = yaml.safe_load((repository / OURS / "1/model.yaml").read_text(encoding="utf-8"))
    del found["triton_config"]
    return found


def memory_found(log: str) -> dict[str, float]:
    """What vLLM's log says of the first GPU it names, in GiB, and the tokens that its KV cache holds.

    What it found nothing of is left out.
    """
    patterns = {
        "weights": r"Model loading took ([\d.]+) GiB",
        "kv_cache": r"Available KV cache memory: ([\d.]+) GiB",
        "cuda_graphs": r"Graph capturing finished in .* took (-?[\d.]+) GiB",
        "kv_tokens": r"GPU KV cache size: ([\d,]+) tokens",
    }
    return {
        name: float(at[1].replace(",", "")) for name, pattern in patterns.items() if (at := re.search(pattern, log))
    }


def memory_planned(plan: Mapping[str, Any], block_tokens: int | None = None) -> dict[str, float]:
    """The same of the plan, in GiB; `total` is the GPU's. Of a cache with blocks of `block_tokens` vLLM's log counts
    the tokens otherwise: then the blocks are told."""
    memory = plan["memory"]
    parts = {name: round(memory[name] / 2**30, 2) for name in ("weights", "kv_cache", "cuda_graphs", "free", "total")}
    if block_tokens:
        return parts | {"kv_blocks": memory["kv_tokens"] // block_tokens}
    return parts | {"kv_tokens": memory["kv_tokens"]}


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

    repository: Path
    planned: Mapping[str, float]
    loads: Sequence[Load]
    rounds: int
    lengths: Sequence[int]
    """Of prompts that are asked first."""
    end_s: float
    """No measurement begins later, by time.monotonic()."""
    runs: TextIO
    memory: dict[str, Any] = field(default_factory=dict)
    """By phase: what was planned and found."""

    def measure(self, system: str, phase: int, measure_of: Callable[[Sequence[Prompt]], Measure]) -> None:
        """`measure_of` gives what measures a load with these prompts."""
        for load in self.warming():  # what compiles at first use has compiled then
            began = time.monotonic()
            measure_of(prompts(load))(load)
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

    def warming(self) -> Iterator[Load]:
        """Single prompts, a few whole ones of each length, and every batch with short ones."""
        for tokens in self.lengths:
            yield Load(streams=1, requests=1, prompt_tokens=tokens, output_tokens=2)
        for tokens in dict.fromkeys(load.prompt_tokens for load in self.loads):
            yield Load(streams=4, requests=1, prompt_tokens=tokens, output_tokens=8)
        for streams in dict.fromkeys(load.streams for load in self.loads):
            yield Load(streams=streams, requests=1, prompt_tokens=64, output_tokens=8)

    def phase(self, number: int, system: str, folder: Path) -> None:
        """Load one engine, measure it, and end it."""
        folder.mkdir()
        if system == "alone":
            engine = EngineAlone(engine_arguments(self.repository), folder)
            try:
                print(f"phase {number}: the engine alone loaded in {engine.wait_until_ready()} s", flush=True)
                self.report_memory(number, folder / "engine_alone.log", kv_blocks=engine.kv_blocks)
                if engine.num_ranks > 1:
                    if number == 1:
                        self.measure("engine-in-step", number, lambda asked: alone(engine, asked))
                    engine.part_ranks()
                self.measure("engine", number, lambda asked: alone(engine, asked))
            finally:
                engine.stop()
            return
        log = folder / "tritonserver.log"
        with server_of(self.repository, log) as server, client_processes(8) as clients:
            print(f"phase {number}: ready through Triton after {start(server)} s", flush=True)
            self.report_memory(number, log)
            target = Target(protocol="grpc", port=server.grpc_port, model=OURS)
            self.measure("ours", number, lambda asked: through(server, target, clients, asked))

    def report_memory(self, number: int, log: Path, **more: float) -> None:
        found = memory_found(log.read_text(encoding="utf-8", errors="replace")) | more
        self.memory[f"phase {number}"] = {"found": found, "in_use_of_all_mib": gpu_memory_mib()}
        for name, planned in self.planned.items():
            if name in found:
                print(f"{name}: planned {planned:,.2f}, found {found[name]:,.2f}", flush=True)
        print(f"GPU memory in use: {gpu_memory_mib()} MiB", flush=True)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--model", choices=list(MODELS), default="deepseek-r1", help="default: %(default)s")
    parser.add_argument("--precision", choices=["fp8", "w4a16"], help="default: the published one; w4a16 is R1's alone")
    parser.add_argument("--gpus", type=int, metavar="N", help="default: 8 for R1, 1 for V4")
    parser.add_argument("--parallel", choices=["tp", "dp"], default="tp", help="of attention (default: %(default)s)")
    parser.add_argument("--layers", type=int, metavar="N", help="only the first ones (default: all)")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="IN/OUT", help="tokens (default: 7902/1000)")
    parser.add_argument(
        "--batches", nargs="+", type=int, default=BATCHES, metavar="N", help="default: 1 16 32 64 128 256"
    )
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="as build's")
    parser.add_argument("--rounds", type=int, default=1, help="of each phase (default: %(default)s)")
    parser.add_argument("--phases", nargs="+", choices=["alone", "triton"], default=["alone", "triton", "alone"])
    parser.add_argument("--seconds", type=float, default=1300, help="of the whole run (default: %(default)s)")
    return parser.parse_args(argv)


def loads_of(arguments: argparse.Namespace) -> list[Load]:
    return [
        Load(streams=streams, requests=1, prompt_tokens=prompt, output_tokens=output)
        for prompt, output in (map(int, shape.split("/")) for shape in arguments.shapes)
        for streams in arguments.batches
    ]


def warm_lengths(model: Mapping[str, Any], given: Mapping[str, Any]) -> Sequence[int]:
    """Prompts after which every kernel that depends on an iteration's tokens has been compiled."""
    longest = min(given["max_num_batched_tokens"], given["max_model_len"] - 2)
    return range(step, longest + 1, step) if (step := model.get("compiles_every")) else ()


def prepare(arguments: argparse.Namespace, vllm: str) -> tuple[Path, dict[str, Any]]:
    """Write checkpoint and repository for a version of vLLM, and return the repository with its plan."""
    name = arguments.model
    model = checkpoint(arguments.output / "checkpoint", name, arguments.precision, arguments.layers)
    loads = loads_of(arguments)
    options = {
        "--precision": arguments.precision,
        "--gpus": arguments.gpus or MODELS[name]["gpus"],
        "--parallel": arguments.parallel,
        "--concurrency": max(load.streams for load in loads),
        "--isl": max(load.prompt_tokens for load in loads),
        "--osl": max(load.output_tokens for load in loads),
    }
    repository = arguments.output / "repository"
    words = [word for option, value in options.items() if value is not None for word in (option, str(value))]
    words += [word for setting in arguments.set for word in ("--set", setting)]
    return repository, build(repository, name, model, words, vllm)


def main() -> int:
    arguments = parse_arguments()
    end_s = time.monotonic() + arguments.seconds
    folder: Path = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    set_environment({**ENVIRONMENT, **MODELS[arguments.model].get("environment", {})})
    repository, plan = prepare(arguments, importlib.metadata.version("vllm").partition("+")[0])
    planned = memory_planned(plan, MODELS[arguments.model].get("block_tokens"))
    given = engine_arguments(repository)
    (folder / "machine.json").write_text(json.dumps(machine() | {"engine_arguments": given}, indent=1))
    longest, idle = 0.0, gpu_memory_mib()
    with (folder / "runs.jsonl").open("w", encoding="utf-8") as runs:
        run = Run(
            repository=repository,
            planned=planned,
            loads=loads_of(arguments),
            rounds=arguments.rounds,
            lengths=warm_lengths(MODELS[arguments.model], given),
            end_s=end_s,
            runs=runs,
        )
        for phase, system in enumerate(arguments.phases, start=1):
            wait_for(lambda: idle is None or (gpu_memory_mib() or 0) <= idle + FREE_MIB, GONE_WITHIN_S)
            if time.monotonic() + longest > end_s:
                print(f"no time is left for phase {phase}, {system}", flush=True)
                break
            began = time.monotonic()
            run.phase(phase, system, folder / f"phase{phase}")
            (folder / "memory.json").write_text(json.dumps({"planned": planned, **run.memory}, indent=1))
            longest = max(longest, time.monotonic() - began)
            print(f"phase {phase}, {system}: {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
