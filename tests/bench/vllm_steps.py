"""What a token costs on the loop thread of the vLLM engine, beside vLLM's own generate().

    .venv-vllm/bin/python tests/bench/vllm_steps.py [--runs N] [--requests N] [--max-tokens N] [--step-ms MS]

Run by hand; `make test-vllm` makes the environment, and no GPU is needed. One engine serves all runs, by turns: `core`
is the engine as it is, `calls` is the engine on vLLM's public way, and `generate` is what both are held against: a task
a request that reads AsyncLLM.generate() with vLLM's own text. --step-ms is the time of an iteration, 25 as on a GPU;
with 0 the core is faster than its readers, which get the tokens of several iterations at once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "model_repository" / "tensorrt_llm" / "1"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.llm_api import PROMPT, SWITCH_INTERVAL_S, CountingSink

from deepseek_backend.config import parse_config
from deepseek_backend.engines.generate_request import GenerateRequest, SamplingParams
from deepseek_backend.engines.vllm import VllmEngine
from deepseek_backend.engines.vllm.generate_calls import GenerateCalls
from deepseek_triton_build.data.vllm import load_vllm
from support.vllm_arguments import COMMON_ARGUMENTS, filler_arguments, installed_version


class Bench:
    """One engine, and the ways to it."""

    def __init__(self, engine: VllmEngine, num_requests: int, max_tokens: int) -> None:
        self.engine = engine
        self.core = engine._connection
        self.calls = GenerateCalls(engine._llm, engine._known.tokenizer.text, engine._deliver)
        self.num_requests = num_requests
        self.max_tokens = max_tokens
        self._num_submitted = 0

    def run_core(self) -> None:
        self._use(self.core)
        self._submit()

    def run_calls(self) -> None:
        self._use(self.calls)
        self._submit()

    def run_generate(self) -> None:
        self._use(self.calls)
        self._on_loop(self._read_all)

    def thread_cpu_s(self) -> float:
        """Return the CPU seconds of the loop thread so far."""
        found: list[float] = []

        async def look() -> None:
            found.append(time.thread_time())

        self._on_loop(look)
        return found[0]

    def _use(self, connection: Any) -> None:
        """Have one of the two read the outputs of the engine core: they come once."""
        engine = self.engine

        async def switch() -> None:
            for task in [task for task in engine._tasks if task is not asyncio.current_task()]:
                task.cancel()
            if (handler := engine._llm.output_handler) is not None:
                handler.cancel()
                engine._llm.output_handler = None
            await asyncio.sleep(0.01)
            engine._connection = connection
            engine._keep(engine._read())

        self._on_loop(switch)

    def _submit(self) -> None:
        sink = CountingSink(self.num_requests)
        for _ in range(self.num_requests):
            self._num_submitted += 1
            sampling = SamplingParams(max_tokens=self.max_tokens, ignore_eos=True)
            request = GenerateRequest(
                request_id=str(self._num_submitted), prompt=PROMPT, sampling=sampling, max_tokens=self.max_tokens
            )
            self.engine.submit(request, sink)
        assert sink.done.wait(600), "the requests did not end"
        assert sink.error is None, sink.error
        assert sink.num_tokens == self.num_requests * self.max_tokens, sink.num_tokens

    async def _read_all(self) -> None:
        from vllm.sampling_params import RequestOutputKind
        from vllm.sampling_params import SamplingParams as VllmSamplingParams

        token_ids = self.engine._llm.get_tokenizer().encode(PROMPT)

        async def read(number: int) -> int:
            params = VllmSamplingParams(
                max_tokens=self.max_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA, temperature=0.0
            )
            num_tokens = 0
            prompt = {"type": "token", "prompt_token_ids": token_ids}
            async for output in self.engine._llm.generate(prompt, params, f"bench-{number}"):
                num_tokens += len(output.outputs[0].token_ids)
            return num_tokens

        counts = await asyncio.gather(*(read(number) for number in range(self.num_requests)))
        assert sum(counts) == self.num_requests * self.max_tokens

    def _on_loop(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.engine._loop.run(function, 600)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=25)
    arguments = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with tempfile.TemporaryDirectory(prefix="deepseek-triton-bench-") as folder:
        Path(folder, "release.yaml").write_text(load_vllm(installed_version()).text, encoding="utf-8")
        document = {
            "model": str(Path(__file__).parents[2] / "model_repository" / "tensorrt_llm" / "1" / "tiny"),
            **COMMON_ARGUMENTS,
            **filler_arguments(step_s=arguments.step_ms / 1000, kv_bytes=2 << 30),
            "max_num_seqs": arguments.requests,
            "max_num_batched_tokens": 32_768,
            "triton_config": {"engine": "vllm"},
        }
        engine = VllmEngine(parse_config(document, version_dir=Path(folder)))
        engine.start()
        try:
            _measure(Bench(engine, arguments.requests, arguments.max_tokens), arguments.runs)
        finally:
            engine.stop()


def _measure(bench: Bench, num_runs: int) -> None:
    print(f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores")
    print(f"{bench.num_requests} x {bench.max_tokens:,} tokens, {threading.active_count()} threads", flush=True)
    for number in range(num_runs + 1):
        for name, run in (("core", bench.run_core), ("calls", bench.run_calls), ("generate", bench.run_generate)):
            begun, cpu_s = time.perf_counter(), bench.thread_cpu_s()
            run()
            cpu_s, seconds = bench.thread_cpu_s() - cpu_s, time.perf_counter() - begun
            num_tokens = bench.num_requests * bench.max_tokens
            if number:  # the first run of each warms it up
                print(
                    f"  {name:8}: {cpu_s / num_tokens * 1e6:5.1f} us CPU a token on the loop thread "
                    f"{num_tokens / seconds:9,.0f} tokens/s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
