"""The ranks of a launch: which have started, where, how far each is, and which have ended, by the lines they log.

Lines of TensorRT-LLM look like `[06/17/2025-16:35:04] [TRT-LLM] [RANK 0] [I] ...` from Python and
`[TensorRT-LLM][INFO] ...` from C++. The wording is that of releases 0.20 to 1.2. Lines of vLLM look like
`(EngineCore pid=71) INFO 07-01 12:00:00 [core.py:115] ...`; the wording is that of 0.24.0 to 0.33.0. Where a newer
release words a line differently, the phase before it is shown.
"""

import contextlib
import re
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deepseek_launcher import processes
from deepseek_launcher.launch_tag import LAUNCH_VARIABLE
from deepseek_launcher.processes import how_ended
from deepseek_launcher.rank import parse_event

STARTED = "starting"
"""Name of the phase before the first one of PHASES."""

# Paths without a project are TensorRT-LLM's, below tensorrt_llm/, or vLLM's, below vllm/.
PHASES = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        # Triton's core.
        ("starting tritonserver", r"Pinned memory pool is created|Unable to allocate pinned"),
        # model.py of this repository.
        ("loading the model", r"deepseek_backend INFO: loading .* on the (?:reference|simulated) engine"),
        ("importing the engine", r"deepseek_backend INFO: loading "),
        # TensorRT-LLM: __init__.py, llmapi/mpi_session.py, cpp/tensorrt_llm/runtime/utils.
        ("importing the engine", r"TensorRT-LLM version: "),
        ("starting the workers", r"rank \d+ using Mpi\w+Session|mpi_rank: \d+"),
        ("starting the workers", r"Refreshed the MPI local session"),
        # _torch/pyexecutor; _torch/models/checkpoints/hf/weight_loader.py; _torch/pyexecutor/model_engine.py.
        ("building the model", r"PyTorchConfig\(|ATTENTION RUNTIME FEATURES"),
        ("prefetching the checkpoint", r"Prefetching [\d.]+ ?GB checkpoint files"),
        ("allocating weights", r"Use [\d.]+ GB for model weights"),
        # weight_loader.py and modeling_utils.py; _torch/pyexecutor/model_loader.py.
        ("loading weights", r"Loading (?:safetensors |bin )?weights(?: in parallel| concurrently)?\b"),
        ("weights are loaded", r"Model init total -- "),
        # cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp, _torch/pyexecutor/_util.py.
        ("KV cache", r"for max tokens in paged KV cache|Estimated max memory in KV cache"),
        # _torch/pyexecutor/model_engine.py, and _torch/autotuner.py.
        ("autotuning kernels", r"Running autotuner warmup|\[Autotuner\]:? Autotuning process starts"),
        ("compiling", r"Run(?:ning)? torch\.compile warmup"),
        ("CUDA graphs", r"Creating CUDA graph instances|Run generation only CUDA graph warmup"),
        # _torch/pyexecutor/_util.py.
        ("memory profile", r"Peak memory during memory usage profiling|Setting PyTorch memory fraction"),
        # vLLM: v1/engine, v1/worker, model_executor/model_loader, its weight_utils.py, v1/worker/gpu_model_runner.py.
        ("starting the workers", r"Initializing a V1 LLM engine|Started DP Coordinator"),
        ("building the model", r"Starting to load model |Loading model from scratch"),
        ("prefetching the checkpoint", r"Prefetching checkpoint files"),
        ("loading weights", r"Loading (?:safetensors|pt|bin) checkpoint shards"),
        ("weights are loaded", r"Model loading took \S+ GiB"),
        # compilation/backends.py, v1/worker/gpu_worker.py.
        (
            "compiling",
            r"for vLLM's torch\.compile|Dynamo bytecode transform time|"
            r"Compiling a graph for|Compile and warming up model",
        ),
        # compilation/monitor.py, v1/worker/gpu_model_runner.py; gpu_worker.py, v1/core/kv_cache_utils.py; v1/worker.
        ("memory profile", r"Initial profiling/warmup run took|Profiling CUDA graph memory"),
        ("KV cache", r"Available KV cache memory|GPU KV cache size"),
        ("CUDA graphs", r"Capturing CUDA graphs|Graph capturing finished"),
        # model.py, the engines and engine_warmup.py of this repository; Triton's servers.
        ("serving the leader", r"deepseek_backend INFO: rank \d+ works for rank 0"),
        ("engine is loaded", r"deepseek_backend INFO: (?:TensorRT-LLM|vLLM) \S+ has loaded "),
        ("warm-up", r"deepseek_backend (?:INFO|WARNING): warm-up"),
        ("model is ready", r"deepseek_backend INFO: .+ is ready after "),
        ("opening ports", r"Started (?:GRPCInferenceService|HTTPService|Metrics Service) at"),
    )
)
"""Name and first line of the phases, in the order of a start. Some come twice, before and after the memory profile."""


def phase_of(line: str) -> int | None:
    """Return the index in PHASES of the phase that begins with this line; None when no phase does."""
    return next((number for number, (_, pattern) in enumerate(PHASES) if pattern.search(line)), None)


# A line with the prefix of `mpirun --tag-output` or of `srun --label`.
_TAG = re.compile(r"^\s*(?:\[\d+,(?P<mpirun>\d{1,6})\]<\w+>:|(?P<srun>\d{1,6}): ?)\s?(?P<rest>.*)$", re.DOTALL)
_RANK = re.compile(r"\[RANK (\d{1,6})\]")


def rank_of(line: str, num_ranks: int) -> int:
    """Return the rank that wrote the line; 0 where the line does not tell."""
    if num_ranks == 1:
        return 0
    own = _RANK.search(line)
    tag = _TAG.match(line)
    number = own[1] if own else (tag["mpirun"] or tag["srun"]) if tag else "0"
    return int(number) if int(number) < num_ranks else 0


HOPELESS = "Failed to preinitialize Python stub: "  # after which tritonserver waits for ever, as without model.py
_CAUSES = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"deepseek_backend CRITICAL: (.+)", "{}"),
        (r"(?:torch\.)?(?:cuda\.)?(OutOfMemoryError: .+)", "{}"),
        (r"(CUDA (?:out of memory|error).*)", "{}"),
        (r"(NCCL (?:WARN|error).*)", "{}"),
        # The last line of a traceback that one of vLLM's processes logs.
        (r"^(?:\(\w+ pid=\d+\) )?ERROR \d\d-\d\d .*?\] (?:\w+\.)*(\w*(?:Error|Exception): .+)", "{}"),
        (r"failed to load '\S+' version \d+: (.+)", "{}"),
        (r"failed to load model '\S+?': (.+)", "{}"),
        (r"error: creating server: (?!Internal - failed to load all models)(.+)", "{}"),  # the reason stands above it
        (f"{HOPELESS}(.+)", "{}"),
        (r"(error while loading shared libraries: .+)", "{}"),
        (r"(Socket '\S+' already in use)", "{}"),
        (r"deepseek-triton: (.+ can't be started: .+)", "{}"),
        # Of OpenSSH and bash, before mpirun says at length that it could not start its daemons.
        (r"^ssh: (.+)", "ssh: {}"),
        (r"^(\S+@\S+: Permission denied \(.+)", "ssh: {}"),
        (r"^(Host key verification failed)", "ssh: {}"),
        (r"(orted: command not found)", "{} on another host: Open MPI has to be there, too"),
        # Open MPI 4.1, help-orterun.txt, help-orte-rmaps-base.txt, help-mpi-runtime.txt and help-errmgr-base.txt.
        (
            r"^There are not enough slots .+ satisfy the (\d+)",
            "the hosts have fewer slots than {} ranks, as in node1:8",
        ),
        (
            r"^\w+ has detected an attempt to (run as root)",
            "mpirun doesn't {} unless OMPI_ALLOW_RUN_AS_ROOT and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM are 1",
        ),
        (r"^Executable: +(.+)", "mpirun can't find {}"),
        (r"^mpirun: Error: (.+)", "mpirun: {}"),
        (r"It looks like (\w+) failed for some reason", "MPI can't start in a rank: {} failed"),
    )
)
_LONGEST_CAUSE = 300
# vLLM's words (vllm/v1/engine/utils.py, vllm/v1/executor/multiproc_executor.py) when another process has failed: that
# one has logged the cause before.
_POINTS_ELSEWHERE = re.compile(r"See (?:root cause above|stack trace for root cause)")
# Open MPI 4.1, help-errmgr-base.txt, "node-died".
_LOST_NODE = re.compile(r"^\s*Remote daemon: \S+ on node (\S+)")


def lost_node_of(line: str) -> str | None:
    """Return that mpirun has lost a node, if the line says so. All that ranks write afterwards follows from it."""
    match = _LOST_NODE.search(line)
    return f"mpirun has lost the connection to {match[1]}: its network, or orted there" if match else None


def cause_of(line: str) -> str | None:
    """Return the cause of a failure that the line names, at most 300 characters; None without one."""
    if _POINTS_ELSEWHERE.search(line):
        return None
    for pattern, words in _CAUSES:
        if match := pattern.search(line):
            return words.format(" ".join(match[1].split())[:_LONGEST_CAUSE].rstrip(' ."'))
    return None


# Seconds that the `ended` event of a rank may be late.
_EVENT_WITHIN_S = 2
_NAMED_RANKS = 8
# Characters of a line that are searched for a phase: the engine names it at the beginning.
_READ_CHARACTERS = 4096


@dataclass
class Rank:
    """Everything known of one rank."""

    number: int
    expected_host: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts of its `started` event; empty before it."""
    alive: dict[str, Any] = field(default_factory=dict)
    """Facts of its last `alive` event."""
    furthest: int = -1
    """Index in PHASES of the latest phase that it has reached."""
    phase: str = STARTED
    phase_since_s: float = 0.0
    """Start of the phase, by time.monotonic()."""
    process: processes.Process | None = None
    """Its process, where it runs on this machine."""
    gone_since_s: float | None = None
    """Time at which its process was first missed, by time.monotonic()."""
    code: int | None = None
    """Exit code of its command; None while it runs."""

    @property
    def host(self) -> str | None:
        return self.facts.get("host") or self.expected_host

    def ending(self, *, loading: bool) -> str:
        """Return how it ended, on which host, and in which phase of a start."""
        return f"{self} {how_ended(self.code or 0)}{self.in_phase(loading=loading)}"

    def in_phase(self, *, loading: bool) -> str:
        return f" (phase: {self.phase})" if loading else ""

    def __str__(self) -> str:
        return f"rank {self.number} on {self.host}" if self.host else f"rank {self.number}"


class World:
    """The ranks of one attempt. One thread feeds it with output, line by line, and another one queries it."""

    def __init__(self, size: int, *, launch: str, ranks_per_node: int | None = None, hosts: Sequence[str] = ()) -> None:
        """`launch` is the launch's id: its ranks on this machine are also watched as processes."""
        self._lock = threading.Lock()
        each = ranks_per_node or max(1, size // len(hosts)) if hosts else size
        host_of_node = dict(enumerate(hosts))
        self._ranks = [Rank(number, host_of_node.get(number // each)) for number in range(size)]
        self._launch = launch
        self._own_host = socket.gethostname()
        self._has_events = False
        """Whether ranks send events: they don't where the command has no `supervise.py rank` in it."""

    def take(self, line: str) -> Rank | None:
        """Learn from a line of output; return the rank that has failed, if the line says so."""
        facts = parse_event(line, self._launch)
        with self._lock:
            if facts is not None:
                return self._take_event(facts)
            line = line[:_READ_CHARACTERS]
            if (number := phase_of(line)) is not None:
                rank = self._ranks[rank_of(line, len(self._ranks))]
                rank.furthest = max(rank.furthest, number)
                if rank.phase != PHASES[number][0]:
                    rank.phase, rank.phase_since_s = PHASES[number][0], time.monotonic()
            return None

    def _take_event(self, facts: dict[str, Any]) -> Rank | None:
        if facts["rank"] >= len(self._ranks):
            return None
        self._has_events = True
        rank = self._ranks[facts["rank"]]
        if facts["event"] == "started":
            rank.facts, rank.phase_since_s, rank.code = facts, time.monotonic(), None
            # Not on another machine, nor in another container that has the same host name. At a limit of open files the
            # rank's events have to be enough.
            pid, is_here = facts["pid"], facts["host"] == self._own_host
            with contextlib.suppress(OSError):
                if is_here and processes.environment_of(pid).get(LAUNCH_VARIABLE) == self._launch:
                    rank.process = processes.look_up(pid)
        elif facts["event"] == "alive":
            rank.alive = facts
        elif facts["event"] == "ended":
            rank.code = int(facts["code"])
            return rank if rank.code else None
        return None

    def gone(self, now: float, *, loading: bool) -> str | None:
        """Return a message about a rank of this machine whose process is gone and whose `ended` event has not come.

        Once mpirun ends the other ranks, it passes on no output for the whole of its odls_base_sigkill_timeout, so that
        the event can be late.
        """
        with self._lock:
            watched = [rank for rank in self._ranks if rank.process is not None and rank.code is None]
        for rank in watched:
            if rank.process is None or processes.runs(rank.process):
                continue
            rank.gone_since_s = rank.gone_since_s or now
            if now - rank.gone_since_s > _EVENT_WITHIN_S and rank.code is None:
                return f"{rank} is gone, its exit code is unknown{rank.in_phase(loading=loading)}"
        return None

    def disagreement(self) -> str | None:
        """Return a message about ranks that would serve other files than rank 0; None while they agree."""
        with self._lock:
            first = self._ranks[0].facts
            for key, what in (("repository", "model repository"), ("checkpoint", "checkpoint")):
                known = [rank for rank in self._ranks if rank.facts.get(key)]
                odd = [rank for rank in known if first.get(key) and rank.facts[key] != first[key]]
                if odd:
                    hosts = ", ".join(sorted({str(rank.host) for rank in odd}))
                    return (
                        f"the {what} on {hosts} is not that of rank 0 on {first.get('host')} "
                        f"({odd[0].facts[key]}, {first[key]}): copy it there, or mount the same"
                    )
            return None

    def laggards(self) -> str:
        """Return why it is not ready: the ranks that never started, that have ended, or that are behind the others."""
        with self._lock:
            missing = [rank for rank in self._ranks if self._has_events and not rank.facts]
            ended = [rank for rank in self._ranks if rank.code is not None]
            running = [rank for rank in self._ranks if rank not in missing and rank not in ended]
            parts = []
            if missing:
                parts.append(f"{_listed(missing)} never started")
            if ended:
                more = f" and {len(ended) - _NAMED_RANKS} more" if len(ended) > _NAMED_RANKS else ""
                parts.append(", ".join(f"{rank} {how_ended(rank.code or 0)}" for rank in ended[:_NAMED_RANKS]) + more)
            if running:
                parts.append(_progress_of_slowest(running))
            return "; ".join(parts)

    def progress(self) -> str:
        """Return one line: how many ranks have started, and how far they are."""
        with self._lock:
            num_started = sum(bool(rank.facts) for rank in self._ranks)
            counted = len(self._ranks) > 1 and self._has_events
            started = f"{num_started} of {len(self._ranks)} ranks, " if counted else ""
            read = sum(rank.alive.get("read_bytes") or 0 for rank in self._ranks)
            volume = f", {read / 2**30:.1f} GiB read" if read > 1e8 else ""
            return f"{started}{_progress_of_slowest(self._ranks)}{volume}"


def _progress_of_slowest(ranks: Sequence[Rank]) -> str:
    """Return the phase of the ranks that are furthest behind.

    Ranks that have named no phase count only when none has: most engines' ranks but 0 say little.
    """
    speaking = [rank for rank in ranks if rank.furthest >= 0] or list(ranks)
    behind = min(rank.furthest for rank in speaking)
    slowest = [rank for rank in speaking if rank.furthest == behind]
    since = min(rank.phase_since_s for rank in slowest)
    duration = f" for {time.monotonic() - since:.0f} s" if since else ""
    who = f"{_listed(slowest)}: " if len(ranks) > 1 else ""
    return f"{who}{slowest[0].phase}{duration}"


def _listed(ranks: Sequence[Rank]) -> str:
    """Return the ranks by host, as `rank 3 on node2` or `ranks 8, 9 on node2, rank 16 on node3`."""
    by_host: dict[str | None, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(rank.host, []).append(rank.number)
    parts = []
    for host, numbers in by_host.items():
        is_row = len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1
        text = f"{numbers[0]} to {numbers[-1]}" if is_row else ", ".join(map(str, numbers))
        parts.append(f"{'ranks' if len(numbers) > 1 else 'rank'} {text}{f' on {host}' if host else ''}")
    return ", ".join(parts)
