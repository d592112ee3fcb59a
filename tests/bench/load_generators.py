"""How many requests a second each load generator makes, beside the others in one run.

    python tests/bench/load_generators.py [--rounds 5] [--requests 5120] [--output FILE]

    bench     deepseek-triton bench
    aiperf    AIPerf with our plugin, from .venv-conformance (`make test-gateway` makes it)
    raw       asyncio.Protocol and httptools, which only look for the end of each answer
    h2load    nghttp2's load generator in C, which looks at no answer; left out where it is not installed

The server has a known pace and a process of its own (support/paced_server.py): each answer takes the first token's time
and 10 ms for each further one, so that nobody makes more than concurrency / that time. All send the same number of
requests for as many tokens, 256 at once, and each is asked once in every round, in an order that turns. Prints each
run, then the medians with their share of bench's; --output keeps the samples. Run by hand from the repository's root,
with nothing else on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import httptools
import uvloop

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
sys.path.insert(0, str(TESTS))

from support.paced_server import paced_server  # noqa: E402

STEP_MS = 10
FIRST_MS = 10
AIPERF = ROOT / ".venv-conformance/bin/aiperf"
TOKENIZER = ROOT / "model_repository/tensorrt_llm/1/tiny"
MODEL_PATH = "/v2/models/tensorrt_llm"


@dataclass(frozen=True, kw_only=True)
class Load:
    requests: int
    concurrency: int
    tokens: int

    @property
    def bound(self) -> float:
        """Requests a second of a generator that costs nothing."""
        return self.concurrency / (FIRST_MS + STEP_MS * (self.tokens - 1)) * 1000

    @property
    def body(self) -> bytes:
        fields = {"max_tokens": self.tokens, "ignore_eos": True, "stream": True}
        return json.dumps({"input_ids": list(range(100, 228)), **fields}).encode()


def _run(*command: object, folder: Path) -> str:
    words = [str(word) for word in command]
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{words[0]} ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def _bench(address: str, load: Load, folder: Path) -> float:
    command = [Path(sys.executable).with_name("deepseek-triton"), "bench", "run", f"http://{address}", "--json"]
    command += ["--concurrency", load.concurrency, "--num-prompts", load.requests, "--isl", 128, "--osl", load.tokens]
    (point,) = json.loads(_run(*command, folder=folder))["points"]
    figures = point["runs"][0]["figures"]
    assert figures["completed"] == load.requests, figures
    return float(figures["request_throughput"])


def _aiperf(address: str, load: Load, folder: Path) -> float:
    command = [AIPERF, "profile", "--model", "tensorrt_llm", "--url", f"http://{address}{MODEL_PATH}", "--streaming"]
    command += ["--endpoint-type", "deepseek_triton", "--tokenizer", TOKENIZER, "--use-server-token-count"]
    command += ["--isl", 128, "--osl", load.tokens, "--concurrency", load.concurrency]
    command += ["--request-count", load.requests, "--no-gpu-telemetry", "--no-server-metrics", "--ui", "none"]
    _run(*command, "--artifact-dir", folder, folder=folder)
    figures = json.loads((folder / "profile_export_aiperf.json").read_text())
    assert figures["request_count"]["avg"] == load.requests, figures
    return float(figures["request_throughput"]["avg"])


def _h2load(address: str, load: Load, folder: Path) -> float:
    (folder / "body.json").write_bytes(load.body)
    command = ["h2load", "--h1", "-n", load.requests, "-c", load.concurrency, "-d", "body.json"]
    said = _run(*command, f"http://{address}{MODEL_PATH}/generate_stream", folder=folder)
    assert f"{load.requests} succeeded" in said, said
    finished = re.search(r"finished in .*?, ([\d.]+) req/s", said)
    assert finished, said
    return float(finished[1])


def _raw(address: str, load: Load, folder: Path) -> float:
    command = [sys.executable, __file__, "--as-raw", address, "--requests", load.requests]
    return float(_run(*command, "--concurrency", load.concurrency, "--tokens", load.tokens, folder=folder))


class RawClient(asyncio.Protocol):
    """One connection, which sends the next request when an answer has ended."""

    def __init__(self, request: bytes, left: list[int], ended: asyncio.Event) -> None:
        self._request, self._left, self._ended = request, left, ended
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._send()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        assert self._parser.get_status_code() == 200
        self._left[1] -= 1
        if self._left[1] == 0:
            self._ended.set()
        self._send()

    def _send(self) -> None:
        if self._left[0] == 0:
            return
        self._left[0] -= 1
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(self._request)


async def _raw_rate(address: str, load: Load) -> float:
    host, _, port = address.partition(":")
    head = f"POST {MODEL_PATH}/generate_stream HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(load.body)}\r\n\r\n".encode() + load.body
    left, ended = [load.requests, load.requests], asyncio.Event()
    begin = time.monotonic()
    loop = asyncio.get_running_loop()
    for _ in range(load.concurrency):
        await loop.create_connection(lambda: RawClient(request, left, ended), host, int(port))
    await ended.wait()
    return load.requests / (time.monotonic() - begin)


GENERATORS: dict[str, Callable[[str, Load, Path], float]] = {
    "bench": _bench,
    "aiperf": _aiperf,
    "raw": _raw,
    "h2load": _h2load,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=5120)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--output", type=Path, help="a JSON file with every sample")
    parser.add_argument("--as-raw", metavar="HOST:PORT", help=argparse.SUPPRESS)
    given = parser.parse_args()
    load = Load(requests=given.requests, concurrency=given.concurrency, tokens=given.tokens)
    if given.as_raw:
        print(uvloop.run(_raw_rate(given.as_raw, load)))
        return

    names = [name for name in GENERATORS if name != "h2load" or shutil.which(name)]
    samples: dict[str, list[float]] = {name: [] for name in names}
    print(f"{load.requests} requests of {load.tokens} tokens, {load.concurrency} at once; bound {load.bound:.0f}/s")
    with paced_server("--step-ms", str(STEP_MS), "--first-ms", str(FIRST_MS)) as address:
        for number in range(given.rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                with TemporaryDirectory(prefix="load-generators-") as folder:
                    samples[name].append(GENERATORS[name](address, load, Path(folder)))
                print(f"round {number + 1}  {name:7} {samples[name][-1]:8.1f} requests/s", flush=True)
    medians = {name: median(values) for name, values in samples.items()}
    for name, rate in medians.items():
        print(f"median   {name:7} {rate:8.1f} requests/s  {rate / medians['bench']:5.2f} of bench")
    if given.output:
        given.output.write_text(json.dumps({"load": vars(load), "samples": samples, "medians": medians}, indent=1))


if __name__ == "__main__":
    main()
