"""Lines that are read and messages that are written, in tables; of processes only mpirun, for its own words."""

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess

import pytest

from deepseek_launcher import command
from deepseek_launcher.attempt import End, Outcome, Restarts
from deepseek_launcher.command import option, seconds
from deepseek_launcher.processes import how_ended
from deepseek_launcher.rank import ended_line, event_line, mpi_rank, mpi_size, parse_event
from deepseek_launcher.world import PHASES, World, cause_of, lost_node_of, phase_of, rank_of
from deepseek_triton_tools.doctor.mpi import AS_ROOT
from deepseek_triton_tools.server import waiting

NAMES_HERE = {
    "loading": {"importing the engine", "loading the model"},
    "loading weights": {"loading weights", "allocating weights"},
    "allocating the KV cache": {"KV cache"},
    "autotuning": {"autotuning kernels"},
    "capturing CUDA graphs": {"CUDA graphs"},
    "warming up": {"warm-up"},
}
"""Name of a phase where `deepseek-triton` waits for a server -> its names here. Phases that are not in the table have
the same name in both. The waiting side may know fewer lines, but no line that is unknown here."""
STAMP = "[12/20/2025-04:21:37] [TRT-LLM] [I] "
CORE = "(EngineCore pid=71) INFO 07-01 12:00:00 "


PHASES_OF_LINES = [
    ("[TensorRT-LLM] TensorRT-LLM version: 1.1.0rc3", "importing the engine"),
    ("rank 0 using MpiPoolSession to spawn MPI processes", "starting the workers"),
    ("[TensorRT-LLM][INFO] Refreshed the MPI local session", "starting the workers"),
    (f"{STAMP}Prefetching 641.30GB checkpoint files.", "prefetching the checkpoint"),
    (f"{STAMP}Use 63.32 GB for model weights.", "allocating weights"),
    ("Loading safetensors weights in parallel: 100%|####| 15/15 [00:00<00:00, 81.92it/s]", "loading weights"),
    ("Loading weights: 100%|####| 801/801 [00:46<00:00, 17.29it/s]", "loading weights"),
    ("Model init total -- 49.14s", "weights are loaded"),
    ("[TensorRT-LLM][INFO] [MemUsageChange] Allocated 0.56 GiB for max tokens in paged KV cache (8224).", "KV cache"),
    (f"{STAMP}[Autotuner] Autotuning process starts ...", "autotuning kernels"),
    (f"{STAMP}Running autotuner warmup...", "autotuning kernels"),
    (f"{STAMP}Creating CUDA graph instances for 11 batch sizes.", "CUDA graphs"),
    (f"{STAMP}Run generation only CUDA graph warmup for batch size=64, draft_len=0", "CUDA graphs"),
    (f"{STAMP}Setting PyTorch memory fraction to 0.5983 (71.62 GiB)", "memory profile"),
    ("deepseek_backend INFO: loading /models/r1 on the tensorrt_llm engine", "importing the engine"),
    ("deepseek_backend INFO: loading tiny on the reference engine", "loading the model"),
    ("deepseek_backend INFO: warm-up 1 of 3: a prompt", "warm-up"),
    ("deepseek_backend INFO: /models/r1 is ready after 71.3 s", "model is ready"),
    ('I1121 15:57:29.4 15074 http_server.cc:4692] "Started HTTPService at 0.0.0.0:8000"', "opening ports"),
    (f"{CORE}[core.py:115] Initializing a V1 LLM engine (v0.24.0) with config: model='r1'", "starting the workers"),
    (f"{CORE}[gpu_model_runner.py:5161] Starting to load model /models/r1...", "building the model"),
    ("Loading safetensors checkpoint shards:  10% Completed | 16/163 [00:09<01:20, 1.8it/s]", "loading weights"),
    (f"{CORE}[default_loader.py:431] Loading weights took 91.20 seconds", "loading weights"),
    (f"{CORE}[gpu_model_runner.py:5256] Model loading took 79.6 GiB memory and 93.1 seconds", "weights are loaded"),
    (f"{CORE}[backends.py:1090] Using cache directory: /c for vLLM's torch.compile", "compiling"),
    (f"{CORE}[monitor.py:82] Initial profiling/warmup run took 3.10 s", "memory profile"),
    (f"{CORE}[gpu_worker.py:509] Available KV cache memory: 41.2 GiB", "KV cache"),
    ("Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  12%|#2        | 6/51", "CUDA graphs"),
    ("deepseek_backend INFO: vLLM 0.24.0 has loaded /models/r1", "engine is loaded"),
    (f"{STAMP}cache_transceiver is disabled", None),
    ("", None),
]


def test_phases_of_real_lines():
    found = {line: phase_of(line) for line, _ in PHASES_OF_LINES}
    assert {line: None if at is None else PHASES[at][0] for line, at in found.items()} == dict(PHASES_OF_LINES)
    for line, phase in PHASES_OF_LINES:
        waited = next((its for its, pattern in waiting._PHASES if pattern.search(line)), None)
        assert waited is None or phase in NAMES_HERE.get(waited, {waited}), line


RANKS_OF_LINES = [
    ("[1,3]<stdout>:[TRT-LLM] [I] x", 3),
    ("[1,11]<stderr>: x", 11),
    ("12: x", 12),
    (" 3: x", 3),
    ("[06/17/2025-16:35:04] [TRT-LLM] [RANK 5] [I] x", 5),
    ("0: [TRT-LLM] [RANK 7] [I] the engine's own number says more than who handed it on", 7),
    ("99: beyond the world", 0),
    ("nothing says", 0),
]


def test_the_rank_of_a_line():
    assert [(line, rank_of(line, 16)) for line, _ in RANKS_OF_LINES] == RANKS_OF_LINES
    assert {rank_of(line, 1) for line, _ in RANKS_OF_LINES} == {0}


MEMORY = "OutOfMemoryError: CUDA out of memory"
VLLM = "ERROR 07-01 12:00:00 [core.py:9]"
CAUSES = [
    ("deepseek_backend CRITICAL: the engine is dead: CUDA error.", "the engine is dead: CUDA error"),
    (f"torch.{MEMORY}. Tried 2 GiB", f"{MEMORY}. Tried 2 GiB"),
    ("E1 x] \"failed to load 'r1' version 1: Internal: no such file\"", "Internal: no such file"),
    (resolving := "ssh: Could not resolve hostname node2: Name or service not known", resolving),
    ("root@node2: Permission denied (publickey,password).", "ssh: root@node2: Permission denied (publickey,password)"),
    ("Host key verification failed.", "ssh: Host key verification failed"),
    ("bash: line 1: orted: command not found", "orted: command not found on another host"),
    (
        "There are not enough slots available in the system to satisfy the 16",
        "the hosts have fewer slots than 16 ranks",
    ),
    ("mpirun has detected an attempt to run as root.", "mpirun doesn't run as root unless OMPI_ALLOW_RUN_AS_ROOT"),
    ("Executable: trtllm-llmapi-launch", "mpirun can't find trtllm-llmapi-launch"),
    ('mpirun: Error: unknown option "--x"', 'mpirun: unknown option "--x'),
    ("[1,3]<stderr>:It looks like MPI_INIT failed for some reason; your", "MPI can't start in a rank: MPI_INIT failed"),
    (f"(Worker_TP1 pid=9) {VLLM} torch.{MEMORY}.", MEMORY),
    (f"(EngineCore pid=7) {VLLM} ValueError: Free memory on cuda:0.", "ValueError: Free memory on cuda:0"),
    (f"{VLLM} AttributeError: no '_C'", "AttributeError: no '_C'"),
    (f"(EngineCore_DP0 pid=9) {VLLM} Exception: no GPU.", "Exception: no GPU"),
    ("deepseek_backend CRITICAL: RuntimeError: Engine core initialization failed. See root cause above.", None),
    ("error: creating server: Internal - failed to load all models", None),
    ("error: creating server: Invalid argument - no such backend", "Invalid argument - no such backend"),
    ("all is well", None),
]
"""A line, and how its cause begins."""


def test_causes():
    found = [(line, (cause_of(line) or "")[: len(cause or "?")] or None) for line, cause in CAUSES]
    assert found == CAUSES
    assert not [line for line, cause in CAUSES if cause and cause_of(line).endswith(".")]


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")
def test_causes_in_what_mpirun_says():
    causes = {
        "-n 4000 true": "the hosts have fewer slots than 4000 ranks, as in node1:8",
        "-n 1 no-such-program": "mpirun can't find no-such-program",
        "--no-such-option": 'mpirun: unknown option "--no-such-option',
    }
    for arguments, cause in causes.items():
        command = ["mpirun", *arguments.split()]
        done = subprocess.run(command, env=os.environ | AS_ROOT, capture_output=True, text=True)
        assert [found for found in map(cause_of, (done.stdout + done.stderr).splitlines()) if found] == [cause]


def test_a_node_that_mpirun_has_lost():
    lost = lost_node_of("  Remote daemon: [[20113,0],1] on node node2")
    assert "has lost the connection to node2" in lost
    assert lost_node_of("all is well") is None


def test_an_event_is_found_behind_a_tag():
    line = event_line(3, "started", "0123abcd", host="node2", pid=5)
    told = {"rank": 3, "event": "started", "host": "node2", "pid": 5, "launch": "0123abcd"}
    for before in ("", "[1,3]<stderr>:", "3: "):
        assert parse_event(before + line, "0123abcd") == told
    assert " " not in line.removeprefix("deepseek-triton rank ")


WRONG_FACTS = [
    {"launch": "ffffffff"},  # a launch within this one
    {"launch": None},  # text of a user, in the engine's log
    {"rank": "1"},
    {"rank": True},
    {"rank": -1},
    {"event": "born"},
    {"event": "ended"},  # without a code
    {"event": "ended", "code": "x"},
    {"event": "ended", "code": 10**400},
    {"event": "alive", "read_bytes": "x"},
    {"event": "alive", "cpu_s": float("inf")},
    {"host": ["a"]},
    {"host": "\x1b[2J"},
    {"pid": None},
    {"repository": "aaaa[1,1]<stderr>:aaaa"},
]


def test_a_line_with_a_wrong_value_is_no_event():
    valid = {"rank": 1, "event": "started", "host": "a", "pid": 5, "launch": "0123abcd"}
    assert parse_event(f"deepseek-triton rank {json.dumps(valid)}", "0123abcd") == valid
    for facts in WRONG_FACTS:
        assert parse_event(f"deepseek-triton rank {json.dumps({**valid, **facts})}", "0123abcd") is None, facts
    for text in ("", "{", "[]", "1", "[" * 100_000):
        assert parse_event(f"deepseek-triton rank {text}", "0123abcd") is None


def test_how_a_command_ended():
    signals = {137: "ended by signal 9", 192: "ended by signal 64"}
    codes = {code: f"ended with exit code {code}" for code in (1, 128, 205, 255)} | signals
    assert {code: how_ended(code) for code in codes} == codes


ENVIRONMENTS = [
    ({}, 0, 1),
    ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "16"}, 3, 16),
    ({"SLURM_PROCID": "5", "OMPI_COMM_WORLD_RANK": "3", "SLURM_STEP_NUM_TASKS": "8"}, 5, 8),
    ({"PMIX_RANK": "2", "PMI_SIZE": "4"}, 2, 4),
    ({"PMI_RANK": ""}, 0, 1),
]


def test_rank_and_size_of_this_process():
    found = [(each, mpi_rank(each), mpi_size(each)) for each, _, _ in ENVIRONMENTS]
    assert found == ENVIRONMENTS


def test_options_of_another_command():
    command = ["tritonserver", "--a", "1", "--b=2", "--a=3", "--allow-http", "False", "--last"]
    assert [option(command, name) for name in ("--a", "--b", "--c", "--last")] == ["3", "2", None, ""]
    assert (seconds(command, "--a", 30), seconds(command, "--allow-http", 30)) == (3, 30)


FATAL = Outcome(end=End.FATAL, exit_code=1, ready_s=5)


DELAYS = [
    ("fatal", FATAL, [1, 2, 4, 8, 16, 32, 60, 60, None]),
    ("fatal", dataclasses.replace(FATAL, ready_s=700), [1, 1, 1, 1, 1, 1, 1, 1, 1]),
    ("fatal", dataclasses.replace(FATAL, ready_s=None), [None]),
    ("fatal", dataclasses.replace(FATAL, end=End.DONE), [None]),
    ("never", FATAL, [None]),
    ("always", dataclasses.replace(FATAL, ready_s=None), [1, 2]),
    ("always", dataclasses.replace(FATAL, end=End.DONE), [1, 2]),
    ("always", dataclasses.replace(FATAL, end=End.DEADLINE), [1, 2]),
    ("always", dataclasses.replace(FATAL, end=End.DISAGREEMENT), [None]),
    ("always", dataclasses.replace(FATAL, end=End.STOPPED), [None]),
]


def test_delays():
    for policy, outcome, delays in DELAYS:
        restarts = Restarts(policy, 8)
        assert [restarts.delay_s(outcome) for _ in delays] == delays, (policy, outcome)


LAUNCH = "0123abcd"


def started(rank, **facts):
    return event_line(rank, "started", LAUNCH, **{"host": f"node{rank // 2 + 1}", "pid": 1, **facts})


BEHIND = [
    ([started(0), started(1)], "ranks 2, 3 on node2 never started; ranks 0, 1 on node1: starting"),
    (
        [*map(started, range(4)), ended_line(3, LAUNCH, 137)],
        "rank 3 on node2 ended by signal 9; ranks 0, 1 on node1, rank 2 on node2: starting",
    ),
    (
        [*map(started, range(4)), *(f"[1,{n}]<stdout>:Creating CUDA graph instances" for n in (0, 1, 3)),
         "[1,2]<stdout>:Loading weights:"],
        "rank 2 on node2: loading weights",
    ),
    (["Loading weights: 3%"], "rank 0 on node1: loading weights"),
]  # fmt: skip


def test_the_ranks_that_are_behind_are_named():
    for lines, sentence in BEHIND:
        world = World(4, launch=LAUNCH, ranks_per_node=2, hosts=["node1", "node2"])
        for line in lines:
            world.take(line)
        assert world.laggards().partition(" for ")[0] == sentence


def test_a_node_that_would_serve_other_files_is_named():
    """Nodes without a checkpoint to look at agree."""
    for kind in ("repository", "checkpoint"):
        world = World(4, launch=LAUNCH)
        for rank in range(4):
            world.take(started(rank, **{kind: ("a" if rank < 3 else "b") * 16}))
        assert f"{kind} on node2 is not that of rank 0 on node1 ({'b' * 16}, {'a' * 16})" in world.disagreement()
    world = World(2, launch=LAUNCH)
    world.take(started(0, repository="a" * 16, checkpoint="b" * 16))
    world.take(started(1, repository="a" * 16, checkpoint=None))
    assert world.disagreement() is None


def test_a_null_in_a_line_is_no_number():
    world = World(1, launch=LAUNCH)
    world.take(event_line(0, "alive", LAUNCH, read_bytes=None))
    assert "starting" in world.progress()


def test_the_hashes_that_nodes_compare(tmp_path):
    checkpoint = tmp_path / "checkpoint"
    version = tmp_path / "repository/model/1"
    version.mkdir(parents=True)
    checkpoint.mkdir()
    (checkpoint / command.INDEX).write_text("{}")
    (version.parent / "config.pbtxt").touch()
    (version / "model.yaml").write_text(f'a: 1\nmodel: "{checkpoint}"  # here\n')
    repository = tmp_path / "repository"
    before = command.repository_hash(repository)

    assert command.checkpoint_hash(repository) == hashlib.sha256(b"{}").hexdigest()[:16]
    (version / "__pycache__").mkdir()
    (version / "__pycache__/model.pyc").touch()
    assert command.repository_hash(repository) == before
    (repository / "server.log").write_text("grows while the ranks come")
    assert command.repository_hash(repository) == before
    (version / "model.py").write_text("changed")
    assert command.repository_hash(repository) != before
    (checkpoint / command.INDEX).unlink()
    assert command.checkpoint_hash(repository) is None
    assert command.served_repository(["tritonserver", f"--model-repository={repository}"]) == repository
