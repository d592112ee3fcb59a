"""The tiny checkpoint on a GPU through a real tritonserver and this project's vLLM engine: does it do what it should?

    python tests/gpu/tiny_through_triton.py --output FOLDER

Three servers load at once. One has the MTP layer; the others lose their engine core, or their stub, to SIGKILL. Each
check is a line of checks.jsonl and of the output; the exit status is 1 when one has failed. Meanwhile the reference
engine answers the same prompts on the CPU.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.extend(
    str(Path(__file__).resolve().parents[2] / each)
    for each in ("model_repository/tensorrt_llm/1", "client", "build", "tools", "tests")
)

from gpu.compare_answers import compare_demo
from gpu.served_engines import (
    OURS,
    TINY,
    gpu_memory_mib,
    machine,
    our_repository,
    roles,
    server_of,
    set_environment,
    start,
    tiny_arguments,
    wait_for,
)
from gpu.tiny_answers import DEMO_PROMPTS
from gpu.token_streams import Load, Prompt, Target, client_processes, figures

from deepseek_triton_client import Client, DeepseekTritonError, Retries
from deepseek_triton_tools.host.processes import is_running
from deepseek_triton_tools.server.server_process import ServerProcess
from tiny_checkpoint.questions import questions

NUM_QUESTIONS = 60
MAX_TOKENS = 220
SURE = 0.5
"""Difference of log-probabilities above which the reference engine's token was no matter of rounding."""
MTP = {"method": "mtp", "num_speculative_tokens": 1}
GONE_WITHIN_S = 30
FREE_MIB = 100
"""By which the GPU's memory in use may differ from before."""

REFERENCE = """\
import json, sys
from tiny_checkpoint.answering import demo, loaded
from pathlib import Path
given = json.loads(Path(sys.argv[2]).read_text())
with loaded(Path(sys.argv[1])) as engine:
    Path(sys.argv[3]).write_text(json.dumps({"demo": demo(engine, given)}))
"""


class Checks:
    """What was found, as lines of JSON."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self.failed: list[str] = []

    def note(self, name: str, ok: bool, **found: Any) -> None:
        self._file.write(json.dumps({"check": name, "ok": ok, **found}, ensure_ascii=False) + "\n")
        self._file.flush()
        if not ok:
            self.failed.append(name)
        brief = {key: value for key, value in found.items() if len(str(value)) < 400}
        print(f"{'ok    ' if ok else 'FAILED'} {name}: {brief}", flush=True)

    def run(self, check: Callable[..., None], *given: Any) -> None:
        """A check that breaks off has failed; the next one runs."""
        try:
            check(self, *given)
        except Exception as error:
            self.note(check.__name__, False, error=f"{type(error).__name__}: {error}"[:2000])


def asked() -> list[str]:
    """The demo's prompts, and questions of all kinds."""
    known = [question.prompt for question in questions()]
    return [*DEMO_PROMPTS, *known[:: max(1, len(known) // NUM_QUESTIONS)]]


def client_of(server: ServerProcess) -> Client:
    url = f"grpc://127.0.0.1:{server.grpc_port}"
    return Client(url, metrics_url=server.metrics_url, retries=Retries(attempts=1))


def metric(server: ServerProcess, name: str) -> float:
    with client_of(server) as client:
        return client.metrics().value(f"deepseek_triton_{name}")


def texts(checks: Checks, name: str, server: ServerProcess, reference: subprocess.Popen[bytes], path: Path) -> None:
    """The greedy text is the reference engine's, but where rounding decided."""
    before = metric(server, "draft_tokens_proposed_total"), metric(server, "draft_tokens_accepted_total")
    fields = {"max_tokens": MAX_TOKENS, "temperature": 0.0, "add_special_tokens": False, "return_output_ids": True}
    with client_of(server) as client:
        batch = client.generate_many(asked(), concurrency=16, **fields)
        completions = list(batch)
    if failed := [one for one in completions if isinstance(one, BaseException)]:
        raise failed[0]
    if reference.wait(600):
        raise RuntimeError("the reference engine failed: see reference.log")
    expected = json.loads(path.read_text())["demo"]
    ids = [list(one.answers[0].output_ids) for one in completions]
    found = [{"prompt": prompt, "token_ids": each} for prompt, each in zip(asked(), ids, strict=True)]
    ends = [1]
    for each, other in zip(found, expected, strict=True):
        if other["token_ids"][-1:] == ends and each["token_ids"][-1:] != ends and len(each["token_ids"]) < MAX_TOKENS:
            each["token_ids"] += ends  # an engine may keep the end token to itself
    lines = list(compare_demo({"demo": expected}, {"demo": found}))
    different = [line for line in lines if line.startswith("differs")]
    sure = [line for line in different if float((line.partition("margin ")[2] or "9").partition(":")[0]) > SURE]
    shown = [completion.text for completion in completions[:4]]
    checks.note(f"greedy text, {name}", not sure, same=len(lines) - len(different), of=len(lines), shown=shown)
    (path.parent / f"texts {name}.txt").write_text("\n".join(lines))
    for line in different[:8]:
        print(f"       {line:.160}")
    wait_for(lambda: metric(server, "draft_tokens_proposed_total") > before[0] and _settled(server), 5)
    proposed = metric(server, "draft_tokens_proposed_total") - before[0]
    accepted = metric(server, "draft_tokens_accepted_total") - before[1]
    if name == "MTP":
        rate = accepted / proposed if proposed else 0.0
        checks.note("MTP acceptance", 0.3 < rate <= 1, proposed=proposed, accepted=accepted, rate=round(rate, 3))


def _settled(server: ServerProcess) -> bool:
    return metric(server, "engine_running_requests") == 0 and metric(server, "inflight_sequences") == 0


def cancel(checks: Checks, server: ServerProcess) -> None:
    """A client that leaves its stream frees the engine's slot and its KV blocks."""
    wait_for(lambda: _settled(server), 10)
    idle = metric(server, "kv_cache_used_blocks")
    with (
        client_of(server) as client,
        client.stream("Once upon a time", max_tokens=3800, temperature=0.0, ignore_eos=True) as stream,
    ):
        for _ in range(20):
            next(stream)
        seen = wait_for(lambda: metric(server, "engine_running_requests") == 1, 10)
        during = metric(server, "kv_cache_used_blocks")
    freed = wait_for(lambda: _settled(server) and metric(server, "kv_cache_used_blocks") == idle, 10)
    checks.note("cancel", freed is not None and seen is not None, freed_after_s=freed, kv_blocks=[idle, during])


def many_streams(checks: Checks, server: ServerProcess) -> None:
    """256 streams at once have all their tokens."""
    before = metric(server, "generated_tokens_total")
    load = Load(streams=256, requests=1, prompt_tokens=0, output_tokens=200)
    given = [Prompt(f"Story {number}: once upon a time") for number in range(load.streams)]
    target = Target(protocol="grpc", port=server.grpc_port, model=OURS)
    with client_processes(4) as clients:
        samples = clients.run(target, load, given)
    expected = load.streams * load.output_tokens
    counted = wait_for(lambda: metric(server, "generated_tokens_total") - before >= expected, 10)
    made = metric(server, "generated_tokens_total") - before
    found = figures(samples)
    checks.note(
        "256 streams",
        counted is not None and made == expected and not found.errors and len(samples) == load.streams,
        tokens=made,
        tokens_per_second=round(found.tokens_per_second),
        ttft_ms=found.ttft_ms,
        itl_ms=found.itl_ms,
        errors=found.errors,
    )


def drain(checks: Checks, server: ServerProcess) -> None:
    """After SIGTERM the open streams end with all their tokens, new ones are refused, and the server ends with 0."""
    processes = [pid for pids in roles(server.pid).values() for pid in pids]
    load = Load(streams=64, requests=1, prompt_tokens=0, output_tokens=1500)
    given = [Prompt(f"Story {number}: once upon a time") for number in range(load.streams)]
    target = Target(protocol="grpc", port=server.grpc_port, model=OURS)
    with client_processes(4) as clients, ThreadPoolExecutor() as pool:
        running = pool.submit(clients.run, target, load, given)
        busy = wait_for(lambda: metric(server, "engine_running_requests") == load.streams, 30)
        began = time.monotonic()
        server.request_stop(signal.SIGTERM)
        time.sleep(0.3)
        refused = _refusal(server)
        samples = running.result()
        streams_s = time.monotonic() - began
    ended = wait_for(lambda: server.returncode is not None, 60)
    gone = wait_for(lambda: not any(map(is_running, processes)), GONE_WITHIN_S)
    errors = sorted({sample.error for sample in samples if sample.error})
    checks.note(
        "drain",
        busy is not None and not errors and server.returncode == 0 and gone is not None and bool(refused),
        streams_ended_after_s=round(streams_s, 2),
        server_ended_after_s=round(time.monotonic() - began, 2) if ended is not None else None,
        exit_code=server.returncode,
        refused=refused,
        errors=errors[:3],
        processes_gone=gone,
    )


def _refusal(server: ServerProcess) -> str:
    try:
        with client_of(server) as client:
            client.generate("Hello", max_tokens=1)
    except DeepseekTritonError as error:
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def _open_streams(server: ServerProcess, count: int, ended: list[str]) -> list[threading.Thread]:
    """Streams in threads of their own, each with 10 chunks read; how each ends is put into `ended`."""
    started = threading.Barrier(count + 1)

    def read(number: int) -> None:
        waits = True
        try:
            with (
                client_of(server) as client,
                client.stream(f"Story {number}:", max_tokens=3800, temperature=0.0, ignore_eos=True) as stream,
            ):
                for index, _ in enumerate(stream):
                    if index == 10:
                        waits = False
                        started.wait(60)
            ended.append("all its tokens")
        except DeepseekTritonError as error:
            ended.append(error.code or type(error).__name__)
        finally:
            if waits:
                started.abort()

    threads = [threading.Thread(target=read, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    started.wait(60)
    return threads


def killed(checks: Checks, role: str, server: ServerProcess) -> None:
    """The process dies: every stream is answered, the server ends with an error, and nothing is left."""
    found = roles(server.pid)
    ended: list[str] = []
    threads = _open_streams(server, 16, ended)
    memory = gpu_memory_mib()
    began = time.monotonic()
    os.kill(found[role][0], signal.SIGKILL)
    engine_gone = wait_for(lambda: not any(map(is_running, found["engine"])), GONE_WITHIN_S)
    wait_for(lambda: not any(thread.is_alive() for thread in threads), GONE_WITHIN_S)
    answered = round(time.monotonic() - began, 2)
    server_ended = wait_for(lambda: server.returncode is not None, 10)
    code = server.returncode
    processes = [pid for pids in found.values() for pid in pids]
    if code is not None:
        wait_for(lambda: not any(map(is_running, processes)), GONE_WITHIN_S)
    left = {role: [pid for pid in pids if is_running(pid)] for role, pids in found.items()}
    checks.note(
        f"SIGKILL of the {role}",
        engine_gone is not None
        and "all its tokens" not in ended
        # Of a stub's death nothing here is told: an older Triton serves on, and supervise.py ends it.
        and (role == "stub" or (ended == ["E_UNAVAILABLE"] * 16 and code not in (None, 0) and not any(left.values()))),
        streams={one: ended.count(one) for one in set(ended)},
        streams_ended_within_s=answered,
        engine_gone_after_s=engine_gone,
        server_ended_after_s=server_ended,
        exit_code=code,
        processes_left=left,
        gpu_mib=[memory, gpu_memory_mib()],
    )


def servers(folder: Path) -> Iterator[tuple[str, ServerProcess]]:
    for name, own in (("mtp", {"speculative_config": MTP}), ("core", {}), ("stub", {})):
        repository = our_repository(folder / name, tiny_arguments(max_num_seqs=256, **own), metrics_period_s=0.2)
        yield name, server_of(repository, folder / f"{name}.log")


def reference_engine(folder: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """The reference engine at work in a process of its own, and the file that it will write."""
    given, answers = folder / "prompts.json", folder / "reference.json"
    given.write_text(json.dumps(asked()))
    command = [sys.executable, "-c", REFERENCE, str(TINY), str(given), str(answers)]
    path = os.pathsep.join(sys.path)
    with (folder / "reference.log").open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=log, stderr=log)
    return process, answers


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    arguments = parser.parse_args(argv)
    folder: Path = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    set_environment()
    idle = gpu_memory_mib()
    checks = Checks(folder / "checks.jsonl")
    (folder / "machine.json").write_text(json.dumps(machine(), indent=1))
    reference, path = reference_engine(folder)
    with ExitStack() as stack:
        stack.callback(reference.kill)
        all_servers = dict(servers(folder))
        for server in all_servers.values():
            stack.enter_context(server)
        with ThreadPoolExecutor() as pool:
            starting = {name: pool.submit(start, server) for name, server in all_servers.items()}
            ready = {name: future.result() for name, future in starting.items()}
        checks.note("start", True, ready_after_s=ready, gpu_mib=[idle, gpu_memory_mib()])
        checks.run(texts, "MTP", all_servers["mtp"], reference, path)
        checks.run(texts, "without MTP", all_servers["core"], reference, path)
        checks.run(cancel, all_servers["mtp"])
        checks.run(many_streams, all_servers["mtp"])
        checks.run(killed, "engine", all_servers["core"])
        checks.run(killed, "stub", all_servers["stub"])
        checks.run(drain, all_servers["mtp"])
        for name in ("core", "stub", "mtp"):
            all_servers[name].stop()
        freed = wait_for(lambda: idle is None or (gpu_memory_mib() or 0) <= idle + FREE_MIB, GONE_WITHIN_S)
        checks.note("nothing is left on the GPU", freed is not None, gpu_mib=[idle, gpu_memory_mib()])
    print(f"failed: {', '.join(checks.failed)}" if checks.failed else "all is as it should be", flush=True)
    return 1 if checks.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
