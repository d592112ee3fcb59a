"""Reads out of the engine's log lines how far a start is, and why it failed.

Lines of TensorRT-LLM look like `[06/17/2025-16:35:04] [TRT-LLM] [RANK 0] [I] ...` from Python and
`[TensorRT-LLM][INFO] ...` from C++. The wording is that of releases 0.20 to 1.2. Lines of vLLM look like
`(EngineCore pid=71) INFO 07-01 12:00:00 [core.py:115] ...`; the wording is that of 0.24.0 to 0.33.0. Where a newer
release words a line differently, the phase before it is shown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """A phase of a start. Some phases come twice, before and after the engine's memory profile."""

    name: str
    pattern: re.Pattern[str]
    source: str
    """File or program that writes the line."""


def _phase(name: str, pattern: str, source: str) -> Phase:
    return Phase(name, re.compile(pattern), source)


_TRTLLM = "TensorRT-LLM tensorrt_llm"
_VLLM = "vLLM vllm"

STARTED = "starting"
"""Name of the phase before the first one of PHASES."""

PHASES = (
    _phase("starting tritonserver", r"Pinned memory pool is created|Unable to allocate pinned", "triton core"),
    _phase("importing the engine", r"deepseek_backend INFO: loading ", "model.py of this repository"),
    _phase("importing the engine", r"TensorRT-LLM version: ", f"{_TRTLLM}/__init__.py"),
    _phase("starting the workers", r"rank \d+ using Mpi\w+Session|mpi_rank: \d+", f"{_TRTLLM}/llmapi/mpi_session.py"),
    _phase("starting the workers", r"Refreshed the MPI local session", "TensorRT-LLM cpp/tensorrt_llm/runtime/utils"),
    _phase("building the model", r"PyTorchConfig\(|ATTENTION RUNTIME FEATURES", f"{_TRTLLM}/_torch/pyexecutor"),
    _phase(
        "prefetching the checkpoint",
        r"Prefetching [\d.]+ ?GB checkpoint files",
        f"{_TRTLLM}/_torch/models/checkpoints/hf/weight_loader.py",
    ),
    _phase("allocating weights", r"Use [\d.]+ GB for model weights", f"{_TRTLLM}/_torch/pyexecutor/model_engine.py"),
    _phase(
        "loading weights",
        r"Loading (?:safetensors |bin )?weights(?: in parallel| concurrently)?\b",
        f"{_TRTLLM}/_torch/models/checkpoints/hf/weight_loader.py, modeling_utils.py",
    ),
    _phase("weights are loaded", r"Model init total -- ", f"{_TRTLLM}/_torch/pyexecutor/model_loader.py"),
    _phase(
        "KV cache",
        r"for max tokens in paged KV cache|Estimated max memory in KV cache",
        "TensorRT-LLM cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp, _torch/pyexecutor/_util.py",
    ),
    _phase(
        "autotuning kernels",
        r"Running autotuner warmup|\[Autotuner\]:? Autotuning process starts",
        f"{_TRTLLM}/_torch/pyexecutor/model_engine.py, _torch/autotuner.py",
    ),
    _phase("compiling", r"Run(?:ning)? torch\.compile warmup", f"{_TRTLLM}/_torch/pyexecutor/model_engine.py"),
    _phase(
        "CUDA graphs",
        r"Creating CUDA graph instances|Run generation only CUDA graph warmup",
        f"{_TRTLLM}/_torch/pyexecutor/model_engine.py",
    ),
    _phase(
        "memory profile",
        r"Peak memory during memory usage profiling|Setting PyTorch memory fraction",
        f"{_TRTLLM}/_torch/pyexecutor/_util.py",
    ),
    _phase("starting the workers", r"Initializing a V1 LLM engine|Started DP Coordinator", f"{_VLLM}/v1/engine"),
    _phase("building the model", r"Starting to load model |Loading model from scratch", f"{_VLLM}/v1/worker"),
    _phase("prefetching the checkpoint", r"Prefetching checkpoint files", f"{_VLLM}/model_executor/model_loader"),
    _phase(
        "loading weights",
        r"Loading (?:safetensors|pt|bin) checkpoint shards",
        f"{_VLLM}/model_executor/model_loader/weight_utils.py",
    ),
    _phase("weights are loaded", r"Model loading took \S+ GiB", f"{_VLLM}/v1/worker/gpu_model_runner.py"),
    _phase(
        "compiling",
        r"for vLLM's torch\.compile|Dynamo bytecode transform time|Compiling a graph for|Compile and warming up model",
        f"{_VLLM}/compilation/backends.py, v1/worker/gpu_worker.py",
    ),
    _phase(
        "memory profile",
        r"Initial profiling/warmup run took|Profiling CUDA graph memory",
        f"{_VLLM}/compilation/monitor.py, v1/worker/gpu_model_runner.py",
    ),
    _phase(
        "KV cache",
        r"Available KV cache memory|GPU KV cache size",
        f"{_VLLM}/v1/worker/gpu_worker.py, v1/core/kv_cache_utils.py",
    ),
    _phase("CUDA graphs", r"Capturing CUDA graphs|Graph capturing finished", f"{_VLLM}/v1/worker"),
    _phase("serving the leader", r"deepseek_backend INFO: rank \d+ works for rank 0", "model.py of this repository"),
    _phase("engine is loaded", r"deepseek_backend INFO: (?:TensorRT-LLM|vLLM) \S+ has loaded ", "the engines here"),
    _phase("warm-up", r"deepseek_backend (?:INFO|WARNING): warm-up", "engine_warmup.py of this repository"),
    _phase("model is ready", r"deepseek_backend INFO: .+ is ready after ", "model.py of this repository"),
    _phase("opening ports", r"Started (?:GRPCInferenceService|HTTPService|Metrics Service) at", "triton server"),
)
"""The phases in the order of a start."""


def phase_of(line: str) -> int | None:
    """Return the index in PHASES of the phase that begins with this line; None when no phase does."""
    return next((number for number, phase in enumerate(PHASES) if phase.pattern.search(line)), None)


_TAG = re.compile(r"^\s*(?:\[\d+,(?P<mpirun>\d{1,6})\]<\w+>:|(?P<srun>\d{1,6}): ?)\s?(?P<rest>.*)$", re.DOTALL)
"""A line with the prefix of `mpirun --tag-output` or of `srun --label`."""
_RANK = re.compile(r"\[RANK (\d{1,6})\]")


def rank_of(line: str, num_ranks: int) -> int:
    """Return the rank that wrote the line; 0 where the line does not tell."""
    if num_ranks == 1:
        return 0
    own = _RANK.search(line)
    tag = _TAG.match(line)
    number = own[1] if own else (tag["mpirun"] or tag["srun"]) if tag else "0"
    return int(number) if int(number) < num_ranks else 0


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
_POINTS_ELSEWHERE = re.compile(r"See (?:root cause above|stack trace for root cause)")
"""vLLM's words (vllm/v1/engine/utils.py, vllm/v1/executor/multiproc_executor.py) when another process has failed: that
one has logged the cause before."""
_LOST_NODE = re.compile(r"^\s*Remote daemon: \S+ on node (\S+)")
"""Open MPI 4.1, help-errmgr-base.txt, "node-died"."""


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
