"""Bad input without end, on a real tritonserver and through a real gateway: `python tests/reliability/bad_input.py`.

Mutated requests, wrong framing, wrong tensors and requests that cost much, over raw sockets and gRPC, with canaries
between them: good requests whose answers are known. --seed decides every input. Fails, with exit code 1, where a
request has no end or several, where an error is ours to have prevented (a traceback, E_INTERNAL, a 5xx of the gateway),
where a canary is answered wrong, where a process ends or its memory grows beyond a bound, or where a log has a
traceback.
Errors in tritonserver's own words, which it gives before the model sees a request, are counted by themselves.

Everything raw is written to --out, and the summary to tests/reliability/records/ with --record. Run by hand from the
repository's root.
"""

import argparse
import asyncio
import json
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "model_repository" / "tensorrt_llm" / "1"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import grpc
import httpx
from bench._harness import cpu_s
from bench._load import infer_message
from bench._served import default_folder, memory_mib, serving, stub_pid
from tritonclient.grpc import service_pb2 as pb

from conformance.running import gateway_process
from deepseek_triton_tools.server.server_process import ServerProcess
from reliability.bad_answers import judged, judged_error, judged_stream, parsed
from reliability.bad_requests import MODEL, BadInput, expensive, http_request, make
from reliability.run_verdict import write_run_record
from support.waiting import wait_for

AT_ONCE = 24
ANSWER_S = 120.0
"""A request without an end for so long counts as unanswered."""
CANARY_EACH = 40
"""One of so many requests is good."""
GROWTH_MIB = {"server": 1024, "stub": 512, "gateway": 512}
"""Most resident memory above that of the beginning, while no input is larger than a MiB."""
EXPENSIVE_MIB = {"server": 2048, "stub": 1024, "gateway": 1024}
"""The same while bodies of up to 64 MiB come, some of which are nothing but brackets."""
EXPENSIVE_CPU_S = 60.0
"""Most processor time of the stub for one input."""
_TRACES = re.compile(r"Traceback|Segmentation fault|Signal \((?!15\))\d+\) received|terminate called|core dumped")
_MOST_OVERLOADED = 0.02


@dataclass
class History:
    """How the inputs ended, by kind; and each that ended as none may."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    violations: list[dict[str, Any]] = field(default_factory=list)
    canaries: Counter[str] = field(default_factory=Counter)
    costs: list[dict[str, Any]] = field(default_factory=list)
    done: int = 0

    def add(self, number: int, given: BadInput, outcome: str) -> None:
        self.done += 1
        name, _, detail = outcome.partition(": ")
        self.outcomes[given.kind, name] += 1
        if name == "VIOLATION":
            self.violate(f"input {number} ({given.kind}): {detail}", given.data)

    def check_refused(self) -> None:
        """Add a violation where so many were refused as overload that the run says little."""
        for what, refused, total in (
            ("canaries", self.canaries["overloaded"], self.canaries.total()),
            ("inputs", sum(n for (_, name), n in self.outcomes.items() if name == "overloaded"), self.done),
        ):
            if refused > _MOST_OVERLOADED * total:
                self.violate(f"{refused} of {total} {what} were refused as overload")

    def violate(self, text: str, data: bytes = b"") -> None:
        self.violations.append({"what": text[:600], "input": repr(data[:1500])})
        print(f"\nVIOLATION: {text[:400]}", flush=True)


class Driver:
    """Sends inputs and canaries to a server and a gateway."""

    def __init__(self, server: ServerProcess, gateway_port: int, history: History) -> None:
        self._ports = {"server": server.http_port, "gateway": gateway_port}
        self._grpc_port = server.grpc_port
        self.history = history
        self._known: dict[str, Any] = {}

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self._grpc_port}", options=options) as channel:
            service = "/inference.GRPCInferenceService/"
            self._stream = channel.stream_stream(
                f"{service}ModelStreamInfer", None, pb.ModelStreamInferResponse.FromString
            )
            self._unary = channel.unary_unary(f"{service}ModelInfer", None, pb.ModelInferResponse.FromString)
            for way in _CANARIES:
                self._known[way] = await self._ask_canary(way)
                if not _is_whole(self._known[way]):
                    raise SystemExit(f"the first canary ({way}) was answered {self._known[way]!r}")
            yield

    async def send(self, number: int, given: BadInput) -> None:
        try:
            work = self._grpc(given) if given.where == "grpc" else self._http(given)
            outcome = await asyncio.wait_for(work, ANSWER_S)
        except asyncio.TimeoutError:
            outcome = f"VIOLATION: no end within {ANSWER_S:g} s"
        except OSError as error:
            outcome = f"closed: {error!r}" if not given.whole else f"VIOLATION: no answer: {error!r}"
        self.history.add(number, given, outcome)

    # HTTP

    async def _http(self, given: BadInput) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._ports[given.where], limit=1 << 26)
        try:
            size, early = -(-len(given.data) // given.pieces) or 1, ""
            try:
                for at in range(0, len(given.data), size):
                    writer.write(given.data[at : at + size])
                    await writer.drain()
                if not given.whole and writer.can_write_eof():
                    writer.write_eof()  # else the server may wait for the rest as long as it likes
            except OSError as error:  # it has been answered, perhaps: what has come can still be read
                early = repr(error)
            answer = await self._read(reader)
        finally:
            writer.close()
        if not answer:
            return "closed" if not given.whole else f"VIOLATION: the connection ended without an answer {early}"
        return judged(given, answer)

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        pieces: list[bytes] = []
        try:
            while piece := await reader.read(1 << 20):
                pieces.append(piece)
        except ConnectionError:
            if not pieces:
                raise
        return b"".join(pieces)

    # gRPC

    async def _grpc(self, given: BadInput) -> str:
        try:
            if not given.stream:
                response = await self._unary(given.data, timeout=ANSWER_S)
                return "answered" if len(response.outputs) else "answered without outputs"
            call = self._stream(iter([given.data]), timeout=ANSWER_S)
            return judged_stream(given, [message async for message in call])
        except grpc.aio.AioRpcError as error:
            return judged_error(error.details() or "", code=error.code().name)

    # Canaries

    async def canary(self, number: int) -> None:
        way = list(_CANARIES)[number // CANARY_EACH % len(_CANARIES)]
        try:
            answer = await asyncio.wait_for(self._ask_canary(way), ANSWER_S)
        except (asyncio.TimeoutError, OSError, grpc.aio.AioRpcError, ValueError, LookupError) as error:
            self.history.violate(f"canary {number} ({way}): {error!r}")
            return
        if answer == "overloaded":
            self.history.canaries["overloaded"] += 1
        elif answer != self._known[way]:
            self.history.violate(f"canary {number} ({way}): expected {self._known[way]!r}, got {answer!r}")
        else:
            self.history.canaries[way] += 1

    async def _ask_canary(self, way: str) -> Any:
        if way == "gRPC":
            message = infer_message(MODEL, {**_CANARY, "streaming": True})
            texts = []
            async for response in self._stream(iter([message.SerializeToString()]), timeout=ANSWER_S):
                if response.error_message:
                    return "overloaded" if "E_OVERLOADED" in response.error_message else response.error_message
                outputs = [output.name for output in response.infer_response.outputs]
                if "text_output" in outputs:
                    raw = response.infer_response.raw_output_contents[outputs.index("text_output")]
                    texts.append(raw[4:])
            return b"".join(texts)
        where, path, body = _CANARIES[way]
        reader, writer = await asyncio.open_connection("127.0.0.1", self._ports[where], limit=1 << 26)
        try:
            writer.write(http_request(path, json.dumps(body).encode()))
            answer = await self._read(reader)
        finally:
            writer.close()
        read = parsed(answer)
        if read.status == 429 or b"E_OVERLOADED" in answer:
            return "overloaded"
        if where == "gateway":
            (document,) = read.documents
            return document["choices"], document["usage"]
        text = "".join(document["text_output"] for document in read.documents)
        return read.status, text, read.documents[-1]["finish_reason"]


def _is_whole(answer: Any) -> bool:
    """Tell whether the first answer of a way can be what later ones are compared with."""
    return bool(answer) if isinstance(answer, bytes) else answer[0] == 200 or isinstance(answer[0], list)


_CANARY = {"text_input": "The capital of France is", "max_tokens": 6, "temperature": 0.0}
_CANARIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "HTTP": ("server", f"/v2/models/{MODEL}/generate", _CANARY),
    "HTTP stream": ("server", f"/v2/models/{MODEL}/generate_stream", {**_CANARY, "streaming": True}),
    "gRPC": ("server", "", {}),
    "gateway": (
        "gateway",
        "/v1/chat/completions",
        {
            "model": "m",
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 6,
            "temperature": 0,
            "ignore_eos": True,
        },
    ),
}


class Memory:
    """Resident memory of the processes, sampled."""

    def __init__(self, pids: dict[str, int], history: History) -> None:
        self._pids, self._history = pids, history
        self.first: dict[str, float] = {}
        self.most: dict[str, float] = {}
        """Of the phase."""
        self.most_of_input: dict[str, float] = {}
        self.gone = False

    async def watch(self) -> None:
        while True:
            self.sample()
            await asyncio.sleep(0.25)

    def sample(self) -> None:
        self.now: dict[str, float] = {}
        for name, pid in self._pids.items():
            try:
                self.now[name] = memory_mib(pid)["rss"]
            except (OSError, KeyError):
                if not self.gone:
                    self._history.violate(f"the process of the {name} has ended")
                self.gone = True
                self.now[name] = 0.0
        for most in (self.most, self.most_of_input):
            most.update({name: max(size, most.get(name, 0.0)) for name, size in self.now.items()})
        self.first = self.first or self.now

    def check(self, bounds: dict[str, int], phase: str) -> dict[str, Any]:
        """Compare with the bounds, and begin anew. Returns MiB by process."""
        self.sample()
        found = {
            name: {"first": round(self.first[name]), "most": round(self.most[name]), "last": round(self.now[name])}
            for name in self._pids
        }
        for name, sizes in found.items():
            if sizes["most"] - sizes["first"] > bounds[name]:
                grown = f"from {sizes['first']:,} MiB to {sizes['most']:,}, by more than {bounds[name]:,}"
                self._history.violate(f"{phase}: the {name} grew {grown}")
        self.most = {}
        return found


async def _run(arguments: argparse.Namespace, driver: Driver, memory: Memory, stub: int) -> dict[str, Any]:
    numbers = iter(range(arguments.first, arguments.first + arguments.inputs))

    async def work() -> None:
        for number in numbers:
            if memory.gone:
                return
            await driver.send(number, make(number, arguments.seed))
            if number % CANARY_EACH == 0:
                await driver.canary(number)

    async with driver.connected():
        watching = asyncio.create_task(memory.watch())
        try:
            await asyncio.gather(*(work() for _ in range(AT_ONCE)))
            found = {"mutants": memory.check(GROWTH_MIB, "mutants")}
            if arguments.expensive and not memory.gone:
                await _run_expensive(driver, memory, stub)
                found["expensive"] = memory.check(EXPENSIVE_MIB, "expensive")
            for number in range(0, 4 * CANARY_EACH, CANARY_EACH):  # each way once more
                await driver.canary(number)
            driver.history.check_refused()
        finally:
            watching.cancel()
    return found


async def _run_expensive(driver: Driver, memory: Memory, stub: int) -> None:
    """One after the other, while canaries go on."""
    history = driver.history
    ended = asyncio.Event()

    async def canaries() -> None:
        number = 0
        while not ended.is_set() and not memory.gone:
            await driver.canary(number)
            number += CANARY_EACH
            await asyncio.sleep(0.02)

    singing = asyncio.create_task(canaries())
    for number, given in enumerate(expensive()):
        if memory.gone:
            break
        before, first = cpu_s(stub), dict(memory.now)
        memory.most_of_input = dict(memory.now)
        await driver.send(-number, given)
        memory.sample()
        used_s = round(cpu_s(stub) - before, 2) if not memory.gone else 0.0
        cost = {
            "kind": given.kind.removeprefix("expensive: ") + f" ({given.where})",
            "mib": round(len(given.data) / 2**20, 1),
            "stub_cpu_s": used_s,
            "memory_mib": {name: round(memory.most_of_input[name] - first[name]) for name in first},
        }
        history.costs.append(cost)
        print(json.dumps(cost), flush=True)
        if used_s > EXPENSIVE_CPU_S:
            history.violate(f"{given.kind}: {used_s} s of the stub's processor time", given.data[:300])
    ended.set()
    await singing


def _check_logs(history: History, *logs: Path) -> None:
    for log in logs:
        lines = log.read_text(errors="replace").splitlines()
        for number, line in enumerate(lines):
            if _TRACES.search(line):
                history.violate(f"{log.name} line {number + 1}: " + " | ".join(lines[number : number + 25]))
                break


def _summary(arguments: argparse.Namespace, history: History, memory: Any, seconds: float) -> dict[str, Any]:
    kinds: dict[str, dict[str, int]] = {}
    for (kind, outcome), count in sorted(history.outcomes.items()):
        kinds.setdefault("expensive" if kind.startswith("expensive") else kind, Counter())[outcome] += count
    return {
        "engine": arguments.engine,
        "seed": arguments.seed,
        "inputs": history.done,
        "seconds": round(seconds),
        "outcomes": kinds,
        "canaries": dict(history.canaries),
        "memory_mib": memory,
        "memory_bounds_mib": {"mutants": GROWTH_MIB, "expensive": EXPENSIVE_MIB},
        "expensive": sorted(history.costs, key=lambda cost: -cost["stub_cpu_s"]),
        "violations": history.violations,
    }


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000, help="mutants (default: 100,000)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first one (default: 0)")
    parser.add_argument("--engine", choices=("simulated", "trtllm"), default="simulated", help="trtllm: the stand-in")
    parser.add_argument("--seed", type=int, default=1, help="decides every input (default: 1)")
    parser.add_argument("--no-expensive", dest="expensive", action="store_false", help="leave the expensive inputs out")
    parser.add_argument("--record", action="store_true", help="write the summary to tests/reliability/records/")
    parser.add_argument("--out", type=Path, help="a new folder for logs (default: one in ~/.cache)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = _arguments(argv)
    out = arguments.out or default_folder("bad-input")
    out.mkdir(parents=True)
    server_log, gateway_log = out / "tritonserver.log", out / "gateway.log"
    history, began = History(), time.monotonic()
    print(f"{arguments.inputs:,} inputs, seed {arguments.seed}, {arguments.engine} engine; logs in {out}", flush=True)
    with (
        serving(arguments.engine, server_log, default_timeout_ms=3000, warmup=None) as server,
        gateway_process(log=gateway_log, options=("--model", f"m={server.http_url}")) as (gateway, gateway_pid),
    ):
        wait_for(lambda: httpx.get(f"{gateway}/ready", trust_env=False).status_code == 200)
        stub = stub_pid(server)
        memory = Memory({"server": server.pid, "stub": stub, "gateway": gateway_pid}, history)
        memory.sample()
        found = asyncio.run(_run(arguments, Driver(server, httpx.URL(gateway).port or 0, history), memory, stub))
    _check_logs(history, server_log, gateway_log)
    summary = _summary(arguments, history, found, time.monotonic() - began)
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    if arguments.record:
        print(f"wrote {write_run_record('bad_input', summary)}")
    print(json.dumps({name: value for name, value in summary.items() if name != "expensive"}, indent=1)[:6000])
    print(f"{len(history.violations)} violations in {history.done:,} inputs" if history.violations else "ok")
    return int(bool(history.violations))


if __name__ == "__main__":
    sys.exit(main())
