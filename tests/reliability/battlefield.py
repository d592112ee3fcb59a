"""Two tritonservers, a gateway before both, and one before the pair of them, each of which can be killed and started
again; and the proxy through which the gateway reaches the first server.

`victim` is the server that faults strike, `bystander` the other one: nothing may happen to requests that go straight
to it.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import httpx
from bench._served import await_backend, stub_pid

from conformance.running import PROGRAM, free_port
from deepseek_backend.triton_process import NAME as GUARD_NAME
from deepseek_triton_tools.host.processes import is_running
from deepseek_triton_tools.server.server_process import ServeOptions, ServerProcess
from deepseek_triton_tools.tool_errors import ServerFailedError
from reliability.chaos_proxy import FINE, ChaosProxy
from reliability.front_end_queues import lengthen_queues
from reliability.jobs import CONTEXT, GATEWAY, GENERATION, PAIR, SERVER
from reliability.system_under_test import PACED, repository
from support.server_processes import session_members
from support.servers import change_yaml

PATIENCE_S = 90.0
_GONE_S = 40.0
"""Seconds after which nothing of a server that has ended may run. The guard gives the model's process ten to leave."""
_EXIT_TIMEOUT_S = 5
MAX_INFLIGHT = 400
"""Requests that each server takes at once."""
_MODEL = "tensorrt_llm/1/model.yaml"
HOSTS = Path("/etc/hosts")
VICTIM_HOST = "victim.test"
"""The victim's name, by which the gateway knows it; the campaign's own /etc/hosts has it."""


class FieldError(AssertionError):
    """What a fault should have done did not happen, or what it did did not heal."""


class RestartedGateway:
    """A gateway process that can be killed, and started again on the same port."""

    def __init__(self, log: Path, *options: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self._options = options
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, variables: Mapping[str, str] | None = None) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [PROGRAM, "gateway", *self._options, "--port", str(self.port), "--drain-seconds", "2"],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, env={**os.environ, **(variables or {})},
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def end(self, number: int) -> int:
        """Send the signal, and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def states(self) -> dict[str, str]:
        """Return the state of each server, by its URL; nothing where the gateway can't say."""
        try:
            [model] = _CLIENT.get(f"{self.url}/fleet").json()["models"]
        except (httpx.TransportError, ValueError, KeyError):
            return {}
        return {server["url"]: "leaving" if server["leaving"] else server["state"] for server in model["servers"]}


@dataclass
class Battlefield:
    folder: Path
    victim: ServerProcess
    bystander: ServerProcess
    victim_options: ServeOptions
    proxy: ChaosProxy
    gateway: RestartedGateway
    pair: RestartedGateway
    healthy_yaml: bytes
    model: str = ""
    num_torn: int = 0
    """Streams of faults' own clients that Triton has torn (docs/tritonserver.md)."""
    _lacks: str = ""
    shell_folder: Path = field(default=Path("/"))
    """Where small file systems of the campaign's own are mounted."""

    @property
    def urls(self) -> dict[str, str]:
        """The URL of each target, for clients of the victim."""
        return {
            SERVER: self.victim.http_url, CONTEXT: self.victim.http_url, GENERATION: self.bystander.http_url,
            GATEWAY: self.gateway.url, PAIR: self.pair.url,
        }  # fmt: skip

    @property
    def victim_runs(self) -> bool:
        return self.victim.pid is not None and self.victim.returncode is None

    @property
    def stub(self) -> int:
        return stub_pid(self.victim)

    @property
    def guard(self) -> int:
        return next(pid for pid in session_members(self.victim.pid) if _comm(pid) == GUARD_NAME)

    def start_victim(self, variables: Mapping[str, str] | None = None, *, wait: bool = True) -> None:
        """Start the victim on its ports again, with these environment variables.

        :raises FieldError: when something of the one before stays. What is looked at here is the guard's work: stop()
            would end it.
        """
        wait_until(lambda: not self._remains(), lambda: f"of a server that has ended stay {self._remains()}", _GONE_S)
        with patch.dict(os.environ, variables or {}):
            self.victim.stop()  # it has ended, and still has its ports reserved
            self.victim = ServerProcess(self.victim_options)
            self.victim.start()
        if wait:
            self.victim.wait_until_ready()

    def _remains(self) -> list[str]:
        """Return the processes of the victim's session, beside its own; none of one that could not be started."""
        if self.victim.pid is None:
            return []
        members = set(session_members(self.victim.pid)) - {self.victim.pid}
        return [f"{pid} ({_comm(pid)})" for pid in members if is_running(pid)]

    def kill_victim(self) -> int:
        """Kill the victim, and return its exit code as a shell has it."""
        if not self.victim_runs:
            return 0
        os.kill(self.victim.pid, signal.SIGKILL)
        return self.await_victim()

    def await_victim(self) -> int:
        wait_until(lambda: self.victim.returncode is not None, "the server did not end")
        return self.victim.returncode

    def see_that_all_run(self) -> None:
        """:raises FieldError: when a server or a gateway has ended."""
        all_run = {"victim": self.victim_runs, "gateway": self.gateway.runs, "pair": self.pair.runs}
        if ended := [name for name, runs in all_run.items() if not runs]:
            raise FieldError(f"ended, though the fault spares it: {', '.join(ended)}")

    def change_victim(self, **ours: object) -> None:
        change_yaml(self.victim_options.repository / _MODEL, **ours)

    def restore_victim_files(self) -> None:
        (self.victim_options.repository / _MODEL).write_bytes(self.healthy_yaml)

    def recover(self) -> None:
        """Bring everything back, and see that it answers.

        :raises FieldError: when it doesn't.
        """
        self.proxy.weather = FINE
        self.restore_victim_files()
        wait_until(self._is_whole, lambda: f"it does not come back: {self._lacks}")
        lengthen_queues(self.victim.pid)

    def _is_whole(self) -> bool:
        """Start again what has ended, and tell whether all is up and answers."""
        self._lacks = "a process had ended"
        if not self.victim_runs:
            try:
                self.start_victim()
            except ServerFailedError as error:  # a supervisor would start it again, and so does this
                self._lacks = str(error)
                return False
        for gateway in (self.gateway, self.pair):
            if not gateway.runs:
                gateway.start()
        for gateway in (self.gateway, self.pair):
            if not _all_up(states := gateway.states()):
                self._lacks = f"a gateway sees {states}"
                return False
        for name, ask in (("victim", self._ask_server), ("gateway", self._ask_gateway)):
            if not ask():
                self._lacks = f"the {name} does not answer rightly"
                return False
        return True

    def _ask_server(self) -> bool:
        body = {"text_input": "Say <answer> one two three</answer>", "max_tokens": 9}
        url = f"{self.victim.http_url}/v2/models/tensorrt_llm/generate"
        return _answered(url, body, lambda document: document["text_output"] == " one two three")

    def _ask_gateway(self) -> bool:
        body = {"model": self.model, "prompt": "Say <answer> one two three</answer>", "max_tokens": 9}
        return all(
            _answered(
                f"{gateway.url}/v1/completions",
                body,
                lambda document: document["choices"][0]["text"] == " one two three",
            )
            for gateway in (self.gateway, self.pair)
        )

    def left(self) -> dict[str, float | None]:
        """Return how many requests each server holds once there is no more load; None for one that does not run."""
        servers = {"victim": self.victim, "bystander": self.bystander}
        return {
            name: await_backend(server, lambda numbers: not numbers.left, 60).left
            if server.returncode is None
            else None
            for name, server in servers.items()
        }


_CLIENT = httpx.Client(trust_env=False, timeout=30, headers={"Connection": "close"})


def _answered(url: str, body: Mapping[str, object], is_right: Callable[[dict[str, object]], bool]) -> bool:
    try:
        answer = _CLIENT.post(url, json=body)
        return answer.status_code == 200 and is_right(answer.json())
    except httpx.TransportError:
        return False


def _all_up(states: Mapping[str, str]) -> bool:
    return bool(states) and set(states.values()) == {"up"}


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().rstrip("\n")
    except OSError:
        return ""


def wait_until(condition: Callable[[], bool], why: str | Callable[[], str], within_s: float = PATIENCE_S) -> None:
    """Wait for the condition.

    :raises FieldError: when it does not come true.
    """
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise FieldError(why if isinstance(why, str) else why())
        time.sleep(0.05)


@contextmanager
def battlefield(folder: Path, shell_folder: Path) -> Iterator[Battlefield]:
    """Start everything; stop it at the end."""
    with ExitStack() as stack:
        running, options = {}, {}
        for name in ("victim", "bystander"):
            made = repository(
                folder / name, "simulated", SERVER,
                drain_s=1, fatal_grace_s=0, hang_s=3, metrics_period_s=0.2, max_inflight=MAX_INFLIGHT,
                engine_options={**PACED, "kv_cache_tokens": MAX_INFLIGHT * 160_000},
            )  # fmt: skip
            options[name] = ServeOptions(
                repository=made, http_port="auto", grpc_port="auto", metrics_port="auto",
                exit_timeout_secs=_EXIT_TIMEOUT_S, log_file=folder / f"{name}.log",
            )  # fmt: skip
            server = ServerProcess(options[name])
            server.start()
            running[name] = server
            stack.callback(server.stop)
        for server in running.values():
            server.wait_until_ready()
            lengthen_queues(server.pid)
        victim = running["victim"]
        ports = {f"{each}_port": getattr(victim, f"{each}_port") for each in ("http", "grpc", "metrics")}
        victim_options = ServeOptions(**{**vars(options["victim"]), **ports})
        proxy = ChaosProxy(victim.http_port)
        stack.callback(proxy.stop)
        bystander = f"{running['bystander'].http_url}#metrics={running['bystander'].metrics_port}"
        through = f"http://{VICTIM_HOST}:{proxy.port}#metrics={victim.metrics_port}"
        straight = f"{victim.http_url}#metrics={victim.metrics_port}"
        access = ("--access-log", str(shell_folder / "log" / "access.jsonl"))
        gateway = RestartedGateway(folder / "gateway.log", "--server", through, "--server", bystander, *access)
        pair = RestartedGateway(folder / "pair.log", "--server", bystander, "--context-server", straight)
        field_ = Battlefield(
            folder=folder, victim=victim, bystander=running["bystander"], victim_options=victim_options, proxy=proxy,
            gateway=gateway, pair=pair, healthy_yaml=(victim_options.repository / _MODEL).read_bytes(),
            shell_folder=shell_folder,
        )  # fmt: skip
        for each in (gateway, pair):
            each.start()
            stack.callback(lambda each=each: each.end(signal.SIGKILL) if each.runs else None)
        wait_until(
            lambda: _all_up(gateway.states()) and _all_up(pair.states()), "the gateways do not see their servers"
        )
        [model] = _CLIENT.get(f"{gateway.url}/v1/models").json()["data"]
        field_.model = model["id"]
        stack.callback(lambda: field_.victim.stop())
        yield field_
