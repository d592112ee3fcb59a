"""What a token costs through the TensorRT-LLM engine, in-process on the stand-in.

    python tests/bench/llm_api.py [--runs N] [--requests N] [--max-tokens N ...] [--stream-interval N ...] [--rate R]

Run by hand from the repository's root; prints every run. `engine` is ours, with one sink that counts; `reader` is what
it is held against: an `async for` over each request's output that makes one object a response.
CPU is that of the whole process, with the stand-in's own; --rate paces each request, in tokens a second.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import multiprocessing
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "model_repository" / "tensorrt_llm" / "1"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from deepseek_backend.engines.base import Step
from deepseek_backend.engines.generate_request import GenerateRequest, SamplingParams
from deepseek_backend.errors import BackendError
from standin.harness import engines

PROMPT = "Prove that the square root of two is irrational, in one paragraph."


@dataclass(frozen=True, kw_only=True)
class Load:
    num_requests: int
    max_tokens: int
    stream_interval: int


def figures(num_tokens: int, seconds: float, cpu_s: float) -> str:
    return f"{num_tokens / seconds:9,.0f} tokens/s  {cpu_s / num_tokens * 1e6:5.1f} us CPU a token"


class CountingSink:
    def __init__(self, num_requests: int) -> None:
        self.num_tokens = 0
        self.error: BackendError | None = None
        """The last one, of a request that failed."""
        self.done = threading.Event()
        self._open = num_requests

    def on_steps(self, steps: Sequence[tuple[GenerateRequest, Step]]) -> None:
        for _, step in steps:
            self.num_tokens += len(step.token_ids)
            self.error = step.error or self.error
            if step.finish_reason is not None or step.error is not None:
                self._open -= 1
        if self._open == 0:
            self.done.set()


def run_engine(load: Load, folder: Path) -> str:
    with engines(folder) as make:
        engine = make(stream_interval=load.stream_interval).engine
        sink = CountingSink(load.num_requests)
        sampling = SamplingParams(max_tokens=load.max_tokens, ignore_eos=True)
        begun, cpu_s = time.perf_counter(), time.process_time()
        for number in range(load.num_requests):
            request = GenerateRequest(
                request_id=str(number), prompt=PROMPT, sampling=sampling, max_tokens=load.max_tokens
            )
            engine.submit(request, sink)
        sink.done.wait()
        if sink.error is not None:
            raise sink.error
        return figures(sink.num_tokens, time.perf_counter() - begun, time.process_time() - cpu_s)


def run_reader(load: Load, folder: Path) -> str:
    with engines(folder) as make:
        llm = make(stream_interval=load.stream_interval).engine._llm
        return asyncio.run(_read_all(llm, importlib.import_module("tensorrt_llm.llmapi"), load))


async def _read_all(llm: Any, llmapi: Any, load: Load) -> str:
    num_tokens = 0

    async def read(output: Any) -> None:
        nonlocal num_tokens
        async for _ in output:
            completion = output.outputs[0]
            step = Step(text=completion.text_diff, token_ids=completion.token_ids_diff)
            num_tokens += len(step.token_ids)

    params = {"max_tokens": load.max_tokens, "ignore_eos": True}
    begun, cpu_s = time.perf_counter(), time.process_time()
    prompt_token_ids = llm.tokenizer.encode(PROMPT)
    readers = []
    for _ in range(load.num_requests):
        output = llm.generate_async(
            inputs=prompt_token_ids, sampling_params=llmapi.SamplingParams(**params), streaming=True
        )
        readers.append(asyncio.create_task(read(output)))
    await asyncio.gather(*readers)
    return figures(num_tokens, time.perf_counter() - begun, time.process_time() - cpu_s)


SWITCH_INTERVAL_S = 0.001
"""As model.py has it."""
READERS: dict[str, Callable[[Load, Path], str]] = {"reader": run_reader, "engine": run_engine}


def _in_a_folder(run: Callable[[Load, Path], str], load: Load) -> str:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with tempfile.TemporaryDirectory(prefix="deepseek-triton-bench-") as folder:
        return run(load, Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[200, 2000])
    parser.add_argument("--stream-interval", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--rate", type=float, help="tokens a second of each request (default: as fast as it goes)")
    arguments = parser.parse_args()
    if arguments.rate:
        os.environ["STANDIN_TOKENS_PER_S"] = str(arguments.rate)
    print(f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores")
    # Each run in a process of its own, and both by turns: what else the machine does comes and goes.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for max_tokens in arguments.max_tokens:
            for stream_interval in arguments.stream_interval:
                load = Load(num_requests=arguments.requests, max_tokens=max_tokens, stream_interval=stream_interval)
                print(f"{load.num_requests} x {max_tokens:,} tokens, stream_interval {stream_interval}")
                for _ in range(arguments.runs):
                    for name, run in READERS.items():
                        print(f"  {name}: {pool.apply(_in_a_folder, (run, load))}", flush=True)


if __name__ == "__main__":
    main()
