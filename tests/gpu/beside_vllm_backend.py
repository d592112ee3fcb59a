"""This project's backend beside Triton's vllm_backend and beside the engine alone: one GPU, one run, by turns.

    python tests/gpu/beside_vllm_backend.py --vllm-backend FOLDER --output FOLDER [--seconds 420]

FOLDER is `src` of github.com/triton-inference-server/vllm_backend: model.py and utils/. All three load the tiny
checkpoint at once, on one GPU, with the same engine arguments. Then they are measured one at a time, in rounds,
forwards and backwards by turns, until the time is over. Systems:

    ours           this project's backend under tritonserver, streaming over gRPC
    vllm_backend   Triton's own, likewise
    ours-http      the same two over HTTP, generate_stream
    vllm_backend-http
    engine         AsyncLLM in one process, without Triton, with text
    engine-ids     the same without detokenization

CPU is given for tritonserver, for the stub and for the engine core, which is a process of its own in all systems.
Writes runs.jsonl, a line for each measurement with every request, and the logs.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.extend(
    str(Path(__file__).resolve().parents[2] / each)
    for each in ("model_repository/tensorrt_llm/1", "client", "build", "tools", "tests")
)

from gpu.engine_alone import EngineAlone
from gpu.measuring import Measure, alone, line, record, through
from gpu.served_engines import (
    OURS,
    THEIRS,
    TINY,
    gpu_memory_mib,
    machine,
    our_repository,
    server_of,
    set_environment,
    start,
    their_repository,
    tiny_arguments,
)
from gpu.token_streams import Load, Prompt, Target, client_processes, count_tokens
from tokenizers import Tokenizer

from deepseek_triton_tools.server.server_process import ServerProcess

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 200
LOADS = {1: 10, 64: 4, 256: 3, 1024: 2}
"""Streams at once -> requests of each, so that a measurement takes a few seconds."""


def prompts(tokenizer: Path, count: int) -> list[Prompt]:
    """Texts of PROMPT_TOKENS tokens, each another one, the begin-of-sentence token that is put before them included."""
    known = Tokenizer.from_file(str(tokenizer))
    words = ("fox", "river", "sky", "bird", "story", "blue", "apple", "seven", "night", "city", "and", "sees")
    found = []
    for number in range(count):
        text = f"Story {number}:"
        step = 0
        while len(known.encode(text).ids) < PROMPT_TOKENS:
            step += 1
            longer = f"{text} {words[(number * 7 + step * step) % len(words)]}"
            text = longer if len(known.encode(longer).ids) <= PROMPT_TOKENS else text + "."
        assert len(known.encode(text).ids) == PROMPT_TOKENS
        found.append(Prompt(text))
    return found


def orders(systems: Sequence[str]) -> Iterator[list[str]]:
    """Forwards, then backwards, and so on: what drifts hits all alike."""
    while True:
        yield list(systems)
        yield list(reversed(systems))


@contextmanager
def systems(arguments: argparse.Namespace, given: Sequence[Prompt]) -> Iterator[dict[str, Measure]]:
    """Load all of them at once, and yield what measures each."""
    engine_arguments = tiny_arguments()
    folder: Path = arguments.output
    with ExitStack() as stack:
        servers: dict[str, tuple[ServerProcess, str]] = {}
        ours = server_of(our_repository(folder / "ours", engine_arguments), folder / "ours.log")
        servers["ours"] = (stack.enter_context(ours), OURS)
        made = their_repository(folder / "vllm_backend", arguments.vllm_backend, engine_arguments)
        servers["vllm_backend"] = (stack.enter_context(server_of(made, folder / "vllm_backend.log")), THEIRS)
        engine = EngineAlone(engine_arguments, folder)
        stack.callback(engine.stop)
        began = time.monotonic()
        with ThreadPoolExecutor() as pool:
            starting = {name: pool.submit(start, server) for name, (server, _) in servers.items()}
            ready = {name: future.result() for name, future in starting.items()}
        ready["engine"] = engine.wait_until_ready()
        print(f"ready after {time.monotonic() - began:.0f} s: {ready}; GPU memory {gpu_memory_mib()} MiB", flush=True)
        clients = stack.enter_context(client_processes(8))
        found: dict[str, Measure] = {}
        for name, (server, model) in servers.items():
            target = Target(protocol="grpc", port=server.grpc_port, model=model)
            counted = count_tokens(target, given[0], OUTPUT_TOKENS)
            print(f"{name}: prompt and answer have {counted} tokens by its own count", flush=True)
            if counted != (PROMPT_TOKENS, OUTPUT_TOKENS):
                raise SystemExit(f"{name}: expected {(PROMPT_TOKENS, OUTPUT_TOKENS)} tokens, got {counted}")
            found[name] = through(server, target, clients, given)
        found["engine"] = alone(engine, given, text=True)
        found["engine-ids"] = alone(engine, given, text=False)
        for name, (server, model) in servers.items():
            target = Target(protocol="http", port=server.http_port, model=model)
            found[f"{name}-http"] = through(server, target, clients, given)
        yield found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-backend", type=Path, required=True, metavar="FOLDER", help="with model.py and utils/")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=420, help="no measurement begins later (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="at most (default: %(default)s)")
    parser.add_argument("--streams", type=int, action="append", choices=LOADS, help="again for more (default: all)")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    arguments.output.mkdir(parents=True, exist_ok=True)
    set_environment()
    loads = [
        Load(streams=streams, requests=LOADS[streams], prompt_tokens=PROMPT_TOKENS, output_tokens=OUTPUT_TOKENS)
        for streams in arguments.streams or LOADS
    ]
    given = prompts(TINY / "tokenizer.json", max(load.streams * load.requests for load in loads))
    (arguments.output / "machine.json").write_text(json.dumps(machine(), indent=1))
    with systems(arguments, given) as measures, (arguments.output / "runs.jsonl").open("w", encoding="utf-8") as runs:
        for load in loads:  # one answer of each at each width, so that what compiles at first use has compiled
            for measure in measures.values():
                measure(Load(streams=load.streams, requests=1, prompt_tokens=PROMPT_TOKENS, output_tokens=16))
        for number, order in zip(range(1, arguments.rounds + 1), orders(list(measures)), strict=False):
            for load in loads:
                for system in order:
                    if time.monotonic() > deadline:
                        print("the time is over", flush=True)
                        return 0
                    found = record(number, system, load, *measures[system](load))
                    runs.write(json.dumps(found) + "\n")
                    runs.flush()
                    print(f"round {number} {line(found)}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
