"""vLLM's AsyncLLM in a process of its own, without Triton: what a server's figures are compared with.

`python engine_alone.py ARGUMENTS.json` loads the engine with these arguments of AsyncEngineArgs and says so in a line
of JSON. Then each line on its standard input is a load, {"turns": [[prompt, ...], ...], "num_tokens": N, "text": bool}:
the prompts that each client asks for, one after the other. The answer is a line with the times of all requests. With
data parallelism the clients share the ranks evenly. vLLM's own output goes to standard error. `EngineAlone` is the
other end.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

sys.path.extend(
    str(Path(__file__).resolve().parents[2] / each)
    for each in ("model_repository/tensorrt_llm/1", "client", "build", "tools", "tests")
)

from support.server_processes import kill_all, session_members


class EngineAlone:
    """The process, as the scripts here use it."""

    def __init__(self, arguments: dict[str, Any], folder: Path) -> None:
        path = folder / "engine_alone.json"
        path.write_text(json.dumps(arguments))
        self.num_ranks: int = arguments.get("data_parallel_size", 1)
        self._log = (folder / "engine_alone.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Of the process with the AsyncLLM, which leads a session; the engine core is another process in it."""
        return self._process.pid

    def wait_until_ready(self) -> float:
        """Return the seconds that the load took."""
        heard = self._hear()
        self.kv_blocks: int = heard["kv_blocks"]
        return float(heard["load_seconds"])

    def run(self, load: Any, prompts: Sequence[Any], *, text: bool = True) -> list[Any]:
        """As Clients.run; with `text` false the engine doesn't make text of the tokens."""
        from gpu.token_streams import StreamTimes

        turns = [
            [prompts[(turn * load.streams + stream) % len(prompts)] for turn in range(load.requests)]
            for stream in range(load.streams)
        ]
        job = {
            "turns": [[prompt.text or list(prompt.ids) for prompt in each] for each in turns],
            "num_tokens": load.output_tokens,
            "text": text,
        }
        return [StreamTimes(began, tuple(arrivals), tokens) for began, arrivals, tokens in self._ask(job)]

    def part_ranks(self) -> None:
        """Ask rank r for r sampled answers. All ranks begin with one seed, and greedy requests take no random numbers:
        until then, simulated routing draws the same experts on all ranks, fewer than by real tokens."""
        turns = [[[300] * 8] * rank for rank in range(self.num_ranks)]
        self._ask({"turns": turns, "num_tokens": 2, "text": False, "temperature": 1.0})

    def _ask(self, job: dict[str, Any]) -> list[Any]:
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        samples: list[Any] = self._hear()["samples"]
        return samples

    def _hear(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine alone has ended: see {self._log.name}")
        found: dict[str, Any] = json.loads(line)
        return found

    def stop(self) -> None:
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        kill_all(lambda: session_members(self.pid))  # the engine core's workers too: they hold the GPUs
        self._process.wait()
        self._log.close()


def main() -> int:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM writes there
    arguments = json.loads(Path(sys.argv[1]).read_text())
    asyncio.run(_serve(arguments, answers))
    return 0


async def _serve(arguments: dict[str, Any], answers: TextIO) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    began = time.monotonic()
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    num_blocks = engine.vllm_config.cache_config.num_gpu_blocks
    _say(answers, {"load_seconds": round(time.monotonic() - began, 1), "kv_blocks": num_blocks})
    while line := await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline):
        job = json.loads(line)
        clients = [_client(engine, number, turn, job) for number, turn in enumerate(job["turns"])]
        samples = [sample for each in await asyncio.gather(*clients) for sample in each]
        _say(answers, {"samples": samples})
    engine.shutdown()


async def _client(engine: Any, number: int, prompts: Sequence[Any], job: dict[str, Any]) -> list[Any]:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling = SamplingParams(
        temperature=job.get("temperature", 0.0),
        max_tokens=job["num_tokens"],
        ignore_eos=True,
        detokenize=job["text"],
        output_kind=RequestOutputKind.DELTA,
    )
    num_ranks = engine.vllm_config.parallel_config.data_parallel_size
    rank = number % num_ranks if num_ranks > 1 else None
    samples = []
    for turn, prompt in enumerate(prompts):
        given = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        began, arrivals, num_tokens = time.monotonic_ns(), [], 0
        name = f"{number}-{turn}-{began}"
        async for output in engine.generate(given, sampling, request_id=name, data_parallel_rank=rank):
            arrivals.append(time.monotonic_ns())
            num_tokens += len(output.outputs[0].token_ids)
        samples.append((began, arrivals, num_tokens))
    return samples


def _say(answers: TextIO, word: Any) -> None:
    answers.write(json.dumps(word) + "\n")
    answers.flush()


if __name__ == "__main__":
    raise SystemExit(main())
