"""Tokens a second of the reference engine at batch 1, 8 and 32, and their ratio to another checkout's engine.

    python tests/bench/reference_speed.py [--peer CHECKOUT] [--engine transformers] [--threads 1] [--rounds 5]

Run by hand from the repository's root, on an idle machine. The checkpoint has random weights and the embedded
checkpoint's widths. Each engine runs in a process of its own, and the two take turns: a slow moment is slow for both.
The peer gets the same weights in float32. Greedy, 16 tokens in, 128 out; the median of all rounds is compared.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
VERSION_DIR = Path("model_repository/tensorrt_llm/1")
BATCHES = (1, 8, 32)
TOKENS_IN, TOKENS_OUT = 16, 128


class _LastStep(threading.Event):
    """A sink that is set when every request has had its last step."""

    def __init__(self, num_requests: int) -> None:
        super().__init__()
        self._open = num_requests
        self.num_tokens = 0

    def on_steps(self, steps: Sequence[tuple[Any, Any]]) -> None:
        for _, step in steps:
            assert step.error is None, step.error
            self.num_tokens += len(step.token_ids)
            self._open -= step.finish_reason is not None
        if not self._open:
            self.set()


def work(checkout: Path, name: str, folder: Path, threads: int | None) -> None:
    """Measure for the process above: a batch size in each line of stdin, tokens a second in each of stdout."""
    sys.path.insert(0, str(checkout / VERSION_DIR))
    from deepseek_backend.config import BackendConfig
    from deepseek_backend.engines import create_engine
    from deepseek_backend.engines.generate_request import GenerateRequest, SamplingParams

    options = {} if threads is None else {"num_threads": threads}
    engine = create_engine(BackendConfig(engine=name, llm_args={"model": str(folder)}, engine_options=options))
    engine.start()
    for line in sys.stdin:
        batch = int(line)
        sink = _LastStep(batch)
        started = time.perf_counter()
        for number in range(batch):
            token_ids = tuple(100 + (number * 37 + index * 11) % 800 for index in range(TOKENS_IN))
            request = GenerateRequest(
                request_id=str(number),
                prompt="",
                prompt_token_ids=token_ids,
                sampling=SamplingParams(ignore_eos=True),
                max_tokens=TOKENS_OUT,
            )
            engine.submit(request, sink)
        sink.wait()
        print(sink.num_tokens / (time.perf_counter() - started), flush=True)
    engine.stop()


class _Worker:
    """An engine in a process of its own."""

    def __init__(self, checkout: Path, name: str, folder: Path, threads: int | None) -> None:
        options = [str(checkout), name, str(folder), json.dumps(threads)]
        command = [sys.executable, __file__, "--work", *options]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tokens_per_s(self, batch: int) -> float:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{batch}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def stop(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def write_checkpoints(folder: Path) -> tuple[Path, Path]:
    """Write the checkpoint in FP8 and in float32, both with the tokenizer of the random checkpoint."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.checkpoint_variants import write_variant
    from support.random_checkpoint import build_tokenizer, write_checkpoint

    vocab_size = len(build_tokenizer()["model"]["vocab"])
    fp8, float32 = folder / "fp8", folder / "float32"
    fp8.mkdir()
    write_checkpoint(fp8)
    shutil.copytree(fp8, float32)
    write_variant("production", fp8, vocab_size=vocab_size)
    write_variant("production", float32, vocab_size=vocab_size, dequantized=True)
    return fp8, float32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, help="a checkout with another engine (default: none)")
    parser.add_argument("--engine", default="transformers", help="the peer's engine (default: transformers)")
    parser.add_argument("--threads", type=int, help="engine_options.num_threads of both (default: not set)")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fp8, float32 = write_checkpoints(Path(folder))
        workers = {"reference": _Worker(ROOT, "reference", fp8, arguments.threads)}
        if arguments.peer:
            workers["peer"] = _Worker(arguments.peer, arguments.engine, float32, arguments.threads)
        for batch in BATCHES:
            rates: dict[str, list[float]] = {name: [] for name in workers}
            for number in range(arguments.rounds + 1):
                for name, worker in workers.items():
                    rate = worker.tokens_per_s(batch)
                    if number:  # the first round warms up
                        rates[name].append(rate)
            medians = {name: statistics.median(each) for name, each in rates.items()}
            said = "  ".join(
                f"{name} {median:7,.0f} ({min(rates[name]):,.0f}-{max(rates[name]):,.0f})"
                for name, median in medians.items()
            )
            ratio = f"  ratio {medians['reference'] / medians['peer']:.2f}" if arguments.peer else ""
            print(f"batch {batch:2}: {said}{ratio}", flush=True)
        for worker in workers.values():
            worker.stop()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), json.loads(sys.argv[5]))
    else:
        main()
