"""The faults: what each does, what it may do to requests, and what must hold afterwards.

A strike injects the fault and takes it back; the campaign then brings the system back and asks it. What a strike itself
expects and does not see is a FieldError.
"""

import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from deepseek_triton_tools.tool_errors import ToolError
from reliability.battlefield import HOSTS, MAX_INFLIGHT, Battlefield, FieldError, wait_until
from reliability.chaos_proxy import FINE, Weather
from reliability.checker import FAILED, LOST
from reliability.history import NO_END
from reliability.jobs import CONTEXT, GATEWAY, GENERATION, PAIR, SERVER
from support.servers import MODEL_KILLED

EVERYBODY = frozenset({SERVER, CONTEXT, GENERATION, GATEWAY, PAIR})
GATEWAYS = frozenset({GATEWAY, PAIR})
THROUGH_PROXY = frozenset({GATEWAY})
NOTHING: frozenset[str] = frozenset()
GONE = frozenset({LOST, FAILED, "E_UNAVAILABLE", "E_CONTEXT_LOST", "status 503"})
"""What requests may get when a server or a gateway that has them ends: a lost connection where they went straight to
it, else an error that says to try again."""
MODEL_GONE = GONE | {"E_INTERNAL", "an error without a code", "status 400", "status 500"}
"""tritonserver itself answers for a model whose process has gone, in its own words, until the guard ends it."""
TOLD = frozenset({FAILED, "status 503"})
"""What the gateway may answer where it loses a server: nobody loses the connection to the gateway itself."""
DRAINED = GONE | {"cancelled", "an error without a code", "status 400", "status 404"}
"""tritonserver itself answers, in its own words, once it has begun to unload the model."""
BUSY = frozenset({"E_OVERLOADED", "status 429", "status 503", FAILED})
NO_ROOM = GONE | {"E_INTERNAL", "status 500", "status 502", "an error without a code"}
_STORM = 2_000
_SHM = Path("/dev/shm")
_CGROUPS = Path("/sys/fs/cgroup/memory")


@dataclass(frozen=True)
class Fault:
    name: str
    promise: str
    """What is documented, in a sentence."""
    strike: Callable[[Battlefield, random.Random], object]
    ends: frozenset[str]
    """Outcomes that requests may have while it lasts, beside those of their kind."""
    targets: frozenset[str] = EVERYBODY
    """Only requests to these may end so. Requests to others end as ever."""
    strikes_all: bool = False
    """Whether it strikes the bystander too, and not only the victim and the gateways."""
    spares: bool = True
    """Whether servers and gateways must still run after it."""
    missing: Callable[[], str] = lambda: ""
    """Return what this machine lacks for it; "" for nothing."""

    def inject(self, field: Battlefield, chance: random.Random) -> None:
        """:raises FieldError: when it does not do what it should, or ends what it should spare."""
        self.strike(field, chance)
        if self.spares:
            field.see_that_all_run()


# --- processes ---


def _kill_model(field: Battlefield, chance: random.Random) -> None:
    os.kill(field.stub, signal.SIGKILL)
    code = field.await_victim()
    if code - 128 not in MODEL_KILLED:
        raise FieldError(f"tritonserver ended with {code} after its model's process was killed")


def _kill_guard(field: Battlefield, chance: random.Random) -> None:
    os.kill(field.guard, signal.SIGKILL)
    time.sleep(chance.random())
    if field.victim.returncode is not None:
        raise FieldError("the server ended with its guard")


def _guard_then_server(field: Battlefield, chance: random.Random) -> None:
    _kill_guard(field, chance)
    field.kill_victim()
    field.victim.stop()  # as `launch` does: without the guard, nobody else ends the model's process


def _terminate(field: Battlefield, chance: random.Random) -> None:
    if chance.random() < 0.5:  # answers are shorter than the usual second, so that most end by themselves
        field.kill_victim()
        field.change_victim(drain_s=0)
        field.start_victim()
        time.sleep(chance.random())
    field.victim.request_stop()
    # 1: a client has kept its connection, or Triton has lost the end of a stream, and it has waited until its exit
    # timeout (docs/tritonserver.md, Stopping). A crash then is Triton's own, and a violation all the same.
    if (code := field.await_victim()) not in (0, 1):
        raise FieldError(f"told to exit, the server ended with {code}")


def _terminate_twice(field: Battlefield, chance: random.Random) -> None:
    field.victim.request_stop()
    time.sleep(chance.random())
    if field.victim.returncode is None:
        field.kill_victim()


def _freeze(pid_of: Callable[[Battlefield], int]) -> Callable[[Battlefield, random.Random], None]:
    def strike(field: Battlefield, chance: random.Random) -> None:
        pid = pid_of(field)
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(chance.uniform(0.05, 2.0))
        finally:
            os.kill(pid, signal.SIGCONT)

    return strike


def _kill_while_starting(field: Battlefield, chance: random.Random) -> None:
    field.kill_victim()
    for _ in range(chance.randint(1, 3)):
        field.start_victim(wait=False)
        time.sleep(chance.random() * 2)
        field.kill_victim()
        field.victim.stop()  # as `launch` does: its guard may not have started


def _engine(option: str, *, ends: bool) -> Callable[[Battlefield, random.Random], None]:
    """Return a strike that starts the victim with an engine that fails after some thousand tokens."""

    def strike(field: Battlefield, chance: random.Random) -> None:
        field.kill_victim()
        options = {"pace": "real", "speed": 4, "text": "dictated", option: chance.randint(200, 4000)}
        field.change_victim(engine_options=options)
        field.start_victim()
        if ends:
            _expect(field.await_victim(), 128 + signal.SIGKILL)
            return
        wait_until(lambda: not _model_is_ready(field), "a server whose engine hangs says that it is ready")
        field.kill_victim()

    return strike


def _model_is_ready(field: Battlefield) -> bool:
    """By the backend's own metric: this tritonserver does not ask the model."""
    text = httpx.get(field.victim.metrics_url, trust_env=False).text
    lines = [line for line in text.splitlines() if line.startswith("deepseek_triton_ready{")]
    if not lines:
        raise FieldError("the server does not tell whether it is ready")
    return float(lines[0].split()[-1]) == 1


def _gateway(number: int, code: int | None) -> Callable[[Battlefield, random.Random], None]:
    def strike(field: Battlefield, chance: random.Random) -> None:
        for gateway in (field.gateway, field.pair):
            ended = gateway.end(number)
            if code is not None:
                _expect(ended, code)
        time.sleep(chance.random() * 0.3)

    return strike


def _expect(got: int, expected: int) -> None:
    if got != expected:
        raise FieldError(f"ended with exit code {got}, expected {expected}")


# --- clients ---


_STORM_PROGRAM = """\
import asyncio, sys
port, path, body, number = int(sys.argv[1]), sys.argv[2], sys.argv[3].encode(), int(sys.argv[4])
head = f"POST {path} HTTP/1.1\\r\\nHost: x\\r\\n"
head += f"Content-Type: application/json\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
async def client():
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return None
    writer.write(head.encode() + body)
    return reader, writer
async def is_refused(pair):
    try:
        said = await pair[0].read(4096)
        while b"{" not in said and (piece := await pair[0].read(4096)):
            said += piece
    except OSError:
        return False
    return b"E_OVERLOADED" in said or said.startswith(b"HTTP/1.1 429 ")
async def main():
    kept = [pair for pair in [await client() for _ in range(number)] if pair is not None]
    print(len(kept), flush=True)
    print(sum(await asyncio.gather(*map(is_refused, kept))), flush=True)
    await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""


def _storm(field: Battlefield, chance: random.Random) -> None:
    """Two thousand clients come at once and go at once, killed: half of them to the server, half to the gateway."""
    # An answer takes six minutes, so that those of a busy machine, whose clients come slowly, meet all the same.
    streams = {"text_input": "storm", "max_tokens": 150_000, "streaming": True}
    completions = {"model": field.model, "prompt": "storm", "max_tokens": 150_000, "stream": True}
    sides = (
        (field.victim.http_port, "/v2/models/tensorrt_llm/generate_stream", streams),
        (field.gateway.port, "/v1/completions", completions),
    )
    half = _STORM // 2
    with contextlib.ExitStack() as stack:
        storm = []
        for port, path, body in sides:
            command = [sys.executable, "-c", _STORM_PROGRAM, str(port), path, json.dumps(body), str(half)]
            clients = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            storm.append(stack.enter_context(clients))
            stack.callback(clients.kill)
        for clients in storm:
            came = int(clients.stdout.readline())
            if came < 0.9 * half:
                raise FieldError(f"only {came} of {half} clients could connect")
        refused = [int(clients.stdout.readline()) for clients in storm if clients.stdout is not None]
        if not refused[0]:
            raise FieldError(f"{half} clients came to a server that takes {MAX_INFLIGHT}, and it refused none")
        time.sleep(chance.random())


def _slow_readers(field: Battlefield, chance: random.Random) -> None:
    """Clients with small buffers that read nothing for a while, and then everything."""
    words = "".join(f" w{chr(97 + number % 26)}{chr(97 + number // 26)}" for number in range(400))
    kept = []
    body = {"text_input": f"<answer>{words}</answer>", "max_tokens": 1000, "streaming": True, "return_logprobs": True}
    for _ in range(10):
        kept.append(_raw_request(field.victim.http_port, "/v2/models/tensorrt_llm/generate_stream", body, small=True))
    time.sleep(chance.uniform(0.2, 1.5))
    for connection in kept:
        with connection:
            text, is_whole = _stream_text(connection)
        if text and not is_whole and words.startswith(text):
            field.num_torn += 1  # docs/tritonserver.md, HTTP streams under load
        elif text != words:
            raise FieldError(f"a slow reader got {len(text)} of {len(words)} characters: {text[-60:]!r}")


def _raw_request(port: int, path: str, body: Mapping[str, Any], *, small: bool = False) -> socket.socket:
    connection = socket.socket()
    if small:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", port))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def _stream_text(connection: socket.socket) -> tuple[str, bool]:
    """Return the text of a stream, and whether its end came.

    :raises FieldError: for another status than 200, and for an error.
    """
    events = []
    with connection.makefile("rb") as lines, contextlib.suppress(TimeoutError):
        status = lines.readline()
        if b" 200 " not in status:
            raise FieldError(f"a slow reader got {status!r}")
        for line in lines:
            if line.startswith(b"data:"):
                events.append(json.loads(line[5:]))
    if errors := [event["error"] for event in events if "error" in event]:
        raise FieldError(f"a slow reader got {errors}")
    return "".join(event.get("text_output", "") for event in events), any(
        event.get("finish_reason") for event in events
    )


def _half_open(field: Battlefield, chance: random.Random) -> None:
    """Connections that say nothing, half a head, or half a body, and stay."""
    beginnings = (
        b"",
        b"POST /v2/models/tensorrt_llm/gen",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{",
    )
    kept = []
    for number in range(300):
        port = (field.victim.http_port, field.victim.grpc_port, field.gateway.port)[number % 3]
        connection = socket.create_connection(("127.0.0.1", port), timeout=30)
        connection.sendall(beginnings[number // 3 % 3])
        kept.append(connection)
    time.sleep(chance.random())
    for connection in kept:
        connection.close()


def _resets(field: Battlefield, chance: random.Random) -> None:
    """Clients that break their connections in the middle of an answer, with a reset."""
    body = {"text_input": "reset", "max_tokens": 2000, "streaming": True}
    kept = [_raw_request(field.victim.http_port, "/v2/models/tensorrt_llm/generate_stream", body) for _ in range(100)]
    completion = {"model": field.model, "prompt": "reset", "max_tokens": 2000, "stream": True}
    kept += [_raw_request(field.gateway.port, "/v1/completions", completion) for _ in range(100)]
    time.sleep(chance.random() * 0.5)
    for connection in kept:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


# --- what a machine runs out of ---


@contextmanager
def _full(folder: Path) -> Iterator[None]:
    """Fill a file system to its last byte."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * (1 << 20))
        with contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * 4096)
    try:
        yield
    finally:
        filler.unlink()


def _shm_full(field: Battlefield, chance: random.Random) -> None:
    with _full(_SHM):
        time.sleep(chance.uniform(0.1, 1.5))
    # What could not grow may have ended the model; then the server ends with it.
    time.sleep(0.3)


def _disk_full(field: Battlefield, chance: random.Random) -> None:
    with _full(field.shell_folder / "log"):
        time.sleep(chance.uniform(0.1, 1.5))


def _memory_limit(field: Battlefield, chance: random.Random) -> None:
    """The model's process may take one more MiB, and is asked for more."""
    group = _memory_group()
    try:
        (group / "memory.limit_in_bytes").write_text(str(1 << 20))
        (group / "cgroup.procs").write_text(str(field.stub))
        with contextlib.suppress(httpx.TransportError):
            body = {"text_input": "memory " * 100_000, "max_tokens": 1}
            httpx.post(
                f"{field.victim.http_url}/v2/models/tensorrt_llm/generate", json=body, trust_env=False, timeout=20
            )
        code = field.await_victim()
        if code - 128 not in MODEL_KILLED:
            raise FieldError(f"tritonserver ended with {code} after the kernel killed its model's process")
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text().strip(), "processes stay in the memory cgroup")
        group.rmdir()


def _memory_group() -> Path:
    group = _CGROUPS / f"deepseek_triton_{os.getpid()}"
    group.mkdir()
    return group


def _no_memory_groups() -> str:
    try:
        _memory_group().rmdir()
    except OSError as error:
        return f"a memory cgroup (version 1) that this user may make: {error.strerror}"
    return ""


def _few_descriptors(pid_of: Callable[[Battlefield], int]) -> Callable[[Battlefield, random.Random], None]:
    def strike(field: Battlefield, chance: random.Random) -> None:
        pid = pid_of(field)
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        used = len(os.listdir(f"/proc/{pid}/fd"))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 2, before[1]))
        try:
            time.sleep(chance.uniform(0.1, 1.5))
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)

    return strike


# --- time, names, files ---


def _clock_jumps(field: Battlefield, chance: random.Random) -> None:
    """A gateway and a server whose wall clock jumps by hours, to and fro."""
    stamp = field.folder / "faketime"
    stamp.write_text("+0")
    variables = {
        "LD_PRELOAD": str(_faketime_library()), "FAKETIME_TIMESTAMP_FILE": str(stamp), "FAKETIME_CACHE_DURATION": "1",
        "DONT_FAKE_MONOTONIC": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }  # fmt: skip
    field.kill_victim()
    field.start_victim(variables)
    field.gateway.end(signal.SIGKILL)
    field.gateway.start(variables)
    for _ in range(3):
        stamp.write_text(f"{chance.choice('+-')}{chance.randint(1, 100)}h")
        time.sleep(1.1)
    if not field.gateway.runs:
        raise FieldError("the gateway ended when its clock jumped")
    field.kill_victim()
    field.gateway.end(signal.SIGKILL)


def _faketime_library() -> Path:
    import libfaketime

    return next(Path(libfaketime.__file__).parent.rglob("libfaketime.so.1"))


def _no_faketime() -> str:
    try:
        _faketime_library()
    except (ImportError, StopIteration):
        return "libfaketime: pip install libfaketime"
    return ""


def _names_gone(field: Battlefield, chance: random.Random) -> None:
    before = HOSTS.read_text()
    HOSTS.write_text("127.0.0.1 localhost\n")
    try:
        field.proxy.cut_all()  # what is open needs no name
        time.sleep(chance.uniform(0.2, 2.0))
    finally:
        HOSTS.write_text(before)


def _port_stolen(field: Battlefield, chance: random.Random) -> None:
    """While the server is down, a stranger listens on its port and answers nonsense, or nothing."""
    field.kill_victim()
    answers = chance.choice((b"", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", b"220 mail.example ESMTP\r\n"))
    with socket.create_server(("127.0.0.1", field.victim_options.http_port), backlog=512) as stranger:
        stranger.settimeout(0.05)
        with contextlib.ExitStack() as open_ones:
            until = time.monotonic() + chance.uniform(0.3, 1.5)
            while time.monotonic() < until:
                with contextlib.suppress(OSError):
                    connection, _ = stranger.accept()
                    open_ones.callback(connection.close)
                    connection.sendall(answers)
            try:
                field.start_victim(wait=False)
            except ToolError as error:
                if str(field.victim_options.http_port) not in str(error):
                    raise FieldError(f"the error about a taken port does not name it: {error}") from error
            else:
                raise FieldError("a server was started on a port that is taken")


def _files_edited(field: Battlefield, chance: random.Random) -> None:
    """Somebody saves nonsense over the files of the model that is being served."""
    folder = field.victim_options.repository / "tensorrt_llm"
    names = ("config.pbtxt", "1/model.yaml", "1/model.py", "1/deepseek_backend/service.py")
    before = {name: (folder / name).read_bytes() for name in names}
    try:
        for name in names:
            (folder / name).write_bytes(b"\0 no such thing {{{")
        time.sleep(chance.uniform(0.1, 1.5))
        if field.victim.returncode is not None:
            raise FieldError("the server ended when its files were edited")
    finally:
        for name, content in before.items():
            (folder / name).write_bytes(content)


def _broken_start(field: Battlefield, chance: random.Random) -> None:
    """A server that is started with a broken model.yaml ends by itself, and says why."""
    field.kill_victim()
    model_yaml = field.victim_options.repository / "tensorrt_llm/1/model.yaml"
    model_yaml.write_text(chance.choice(("{", "triton_config: 7\n", "model: [\n", "\0")))
    try:
        field.start_victim()
    except ToolError as error:
        if not {"model.yaml", "triton_config"} & set(re.split(r"[^\w.]+", f"{error} {field.victim.log_tail}")):
            raise FieldError(f"neither error nor log say what is wrong with model.yaml: {error}") from error
    else:
        raise FieldError("a server with a broken model.yaml became ready")


# --- the network ---


def _weather(make: Callable[[random.Random], Weather]) -> Callable[[Battlefield, random.Random], None]:
    def strike(field: Battlefield, chance: random.Random) -> None:
        field.proxy.weather = make(chance)
        time.sleep(chance.uniform(0.2, 2.0))
        field.proxy.weather = FINE

    return strike


def _cut(field: Battlefield, chance: random.Random) -> None:
    for _ in range(chance.randint(1, 5)):
        field.proxy.cut_all()
        time.sleep(chance.random() * 0.3)


def _network_down(field: Battlefield, chance: random.Random) -> None:
    """The campaign's loopback device goes down, and comes back."""
    ip = shutil.which("ip")
    subprocess.run([ip, "link", "set", "lo", "down"], check=True)
    try:
        time.sleep(chance.uniform(0.05, 0.8))
    finally:
        subprocess.run([ip, "link", "set", "lo", "up"], check=True)
        subprocess.run([ip, "address", "replace", "127.0.0.1/8", "dev", "lo"], check=True)


def _netem(field: Battlefield, chance: random.Random) -> None:
    delay, loss = chance.randint(1, 60), chance.randint(0, 5)
    rule = ["delay", f"{delay}ms", f"{delay}ms", "loss", f"{loss}%"]
    subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", "netem", *rule], check=True)
    try:
        time.sleep(chance.uniform(0.2, 2.0))
    finally:
        subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=True)


def _no_netem() -> str:
    tc = shutil.which("tc")
    if tc is None:
        return "tc, of iproute2"
    command = [tc, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"the kernel's netem: {tried.stderr.strip().splitlines()[0]}"
    subprocess.run([tc, "qdisc", "del", "dev", "lo", "root"], check=True)
    return ""


FAULTS = (
    Fault("server killed", "Nothing of it stays; the gateway asks the other server, or says 503.",
          lambda field, _: _expect(field.kill_victim(), 128 + signal.SIGKILL), GONE, spares=False),
    Fault("model's process killed", "The guard ends the server, so that it is started again.",
          _kill_model, MODEL_GONE, spares=False),
    Fault("guard killed",
          "The server goes on without it. If the server is killed too, `launch` ends the model's process.",
          _guard_then_server, GONE, spares=False),
    Fault("server told to exit", "What is open ends with its text within drain_s; what comes is refused.",
          _terminate, DRAINED, spares=False),
    Fault("killed while it drains", "As a server that is killed.", _terminate_twice, DRAINED, spares=False),
    Fault("killed while it starts",
          "The next start works. A model's process whose guard had not started may stay until `launch` ends it.",
          _kill_while_starting, GONE, spares=False),
    Fault("server frozen", "Requests wait up to two seconds, and none is lost.",
          _freeze(lambda field: field.victim.pid or 0), NOTHING),
    Fault("model's process frozen",
          "After a second Triton takes it for dead. It and the server end when it goes on, or after a minute.",
          _freeze(lambda field: field.stub), MODEL_GONE, spares=False),
    Fault("guard frozen", "Nothing happens.", _freeze(lambda field: field.guard), NOTHING),
    Fault("gateway frozen", "Requests wait up to two seconds, and none is lost.",
          _freeze(lambda field: field.gateway.pid), NOTHING),
    Fault("engine dies", "Open requests get E_UNAVAILABLE, and the server ends with 137.",
          _engine("fail_after", ends=True), GONE, spares=False),
    Fault("engine's thread ends", "The backend answers for it: E_UNAVAILABLE, and the server ends with 137.",
          _engine("crash_after", ends=True), GONE, spares=False),
    Fault("engine hangs", "After hang_s without a token the model is not ready any more.",
          _engine("hang_after", ends=False), GONE, spares=False),
    Fault("gateways killed", "Servers notice that its requests are nobody's, and end them.",
          _gateway(signal.SIGKILL, None), GONE, targets=GATEWAYS, spares=False),
    Fault("gateways told to exit", "What is open may end within --drain-seconds; the exit code is 0.",
          _gateway(signal.SIGTERM, 0), GONE, targets=GATEWAYS, spares=False),
    Fault("2,000 clients come and are killed", "What is too much is refused with numbers; what they had is freed.",
          _storm, BUSY, strikes_all=True),
    Fault("slow readers",
          "Others are not held up, and the slow ones get every character, unless Triton tears the stream.",
          _slow_readers, NOTHING),
    Fault("half-open connections", "Others are not held up.", _half_open, NOTHING),
    Fault("clients that reset", "Their requests end in the engine.", _resets, BUSY),
    Fault("/dev/shm full",
          "A request without room gets an error; later ones are answered, or the server ends and comes back.",
          _shm_full, NO_ROOM, strikes_all=True, spares=False),
    Fault("disk full", "The gateway goes on without its access log.", _disk_full, NOTHING),
    Fault("memory limit reached", "The kernel kills the model's process, and the guard ends the server.",
          _memory_limit, MODEL_GONE, missing=_no_memory_groups, spares=False),
    Fault("server out of descriptors", "New connections wait or are refused; those that are open go on.",
          _few_descriptors(lambda field: field.victim.pid or 0), GONE),
    Fault("gateway out of descriptors", "New connections wait or are refused with 503; those that are open go on.",
          _few_descriptors(lambda field: field.gateway.pid), GONE, targets=GATEWAYS),
    Fault("wall clock jumps",
          "Our time limits go by the monotonic clock. Triton's locks don't: the server may end, and comes back.",
          _clock_jumps, MODEL_GONE, missing=_no_faketime, spares=False),
    Fault("names can't be resolved", "The gateway asks the server that it still reaches.",
          _names_gone, TOLD, targets=THROUGH_PROXY),
    Fault("port stolen", "The start fails and names the port; the gateway takes the stranger for no server.",
          _port_stolen, GONE | {"status 502", NO_END}, spares=False),
    Fault("files edited while served", "Nothing happens until the next start.", _files_edited, NOTHING),
    Fault("started with a broken model.yaml", "The server ends by itself, and the log says what is wrong.",
          _broken_start, GONE, spares=False),
    Fault("connections cut",
          "The gateway asks another server where no token was sent, and ends streams with an error event.",
          _cut, TOLD, targets=THROUGH_PROXY),
    Fault("network slow", "Answers come later.",
          _weather(lambda chance: Weather(delay_s=chance.uniform(0.01, 0.2))), NOTHING),
    Fault("network lossy", "As connections that are cut.",
          _weather(lambda chance: Weather(cut_chance=chance.uniform(0.01, 0.2))), TOLD, targets=THROUGH_PROXY),
    Fault("network silent", "Answers come when it speaks again, or the gateway asks another server.",
          _weather(lambda chance: Weather(is_held=True)), TOLD, targets=THROUGH_PROXY),
    Fault("connections refused", "The gateway asks another server.",
          _weather(lambda chance: Weather(is_closed=True, cut_chance=0.5)), TOLD, targets=THROUGH_PROXY),
    Fault("network down", "What is open goes on when it is back; what comes meanwhile is not connected.",
          _network_down, GONE, strikes_all=True, missing=lambda: "" if shutil.which("ip") else "ip, of iproute2"),
    Fault("delay and loss by netem", "Answers come later.", _netem, NOTHING, strikes_all=True, missing=_no_netem),
)  # fmt: skip
"""In the order of the documentation."""
