"""Tokens a second of the simulated engine in-process, unpaced: what the engine itself costs the path to the client.

    python tests/bench/engine.py [--runs N] [--logprobs K]

Run by hand from the repository's root; prints every run. One sink counts tokens and does nothing else.
"""

from __future__ import annotations

import argparse
import platform
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "model_repository" / "tensorrt_llm" / "1"))

from deepseek_backend.config import BackendConfig
from deepseek_backend.engines.base import Step
from deepseek_backend.engines.generate_request import GenerateRequest, SamplingParams
from deepseek_backend.engines.simulated import SimulatedEngine

CONCURRENCIES = (1, 64, 256, 1024)
TOKENS_PER_RUN = 400_000
PROMPT = "Prove that the square root of two is irrational, in one paragraph."


class CountingSink:
    def __init__(self, num_requests: int) -> None:
        self.num_tokens = 0
        self.done = threading.Event()
        self._open = num_requests

    def on_steps(self, steps: Sequence[tuple[GenerateRequest, Step]]) -> None:
        for _, step in steps:
            self.num_tokens += len(step.token_ids)
            if step.finish_reason is not None:
                self._open -= 1
        if self._open == 0:
            self.done.set()


def tokens_per_second(concurrency: int, logprobs: int | None = None) -> float:
    engine = SimulatedEngine(BackendConfig(engine="simulated", engine_options={"pace": "none"}))
    engine.start()
    sink = CountingSink(concurrency)
    max_tokens = TOKENS_PER_RUN // concurrency
    begun = time.perf_counter()
    for number in range(concurrency):
        sampling = SamplingParams(max_tokens=max_tokens, logprobs=logprobs)
        engine.submit(
            GenerateRequest(request_id=str(number), prompt=PROMPT, sampling=sampling, max_tokens=max_tokens), sink
        )
    sink.done.wait()
    seconds = time.perf_counter() - begun
    engine.stop()
    return sink.num_tokens / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--logprobs", type=int, help="ask for so many alternatives of each token (default: no logprobs)"
    )
    arguments = parser.parse_args()
    print(f"Python {platform.python_version()}, {platform.machine()}; about {TOKENS_PER_RUN:,} tokens a run")
    for concurrency in CONCURRENCIES:
        rates = [tokens_per_second(concurrency, arguments.logprobs) for _ in range(arguments.runs)]
        print(f"{concurrency:5} concurrent: " + "  ".join(f"{rate:9,.0f}" for rate in rates) + "  tokens/s")


if __name__ == "__main__":
    main()
