"""The rendered batch script in a Slurm of two nodes, without containers; as tests/live/test_two_hosts.py, but srun
starts the ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.hosts import Host
from support.launched import Launched, last_words
from support.servers import build
from support.slurm import Slurm
from support.waiting import wait_for

Submit = Callable[..., str]


@pytest.fixture(scope="module")
def slurm(hosts: tuple[Host, Host], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    slurm = Slurm(hosts, tmp_path_factory.mktemp("slurm"))
    slurm.start()
    yield slurm
    slurm.stop()


@pytest.fixture
def submit(slurm: Slurm, launched: Launched, tmp_path: Path) -> Iterator[Submit]:
    """`launch slurm --no-container --submit`, with further options; the job's number. Variables as keywords."""
    jobs = []

    def submit_it(*options: str, **variables: str) -> str:
        where = ("slurm", "--no-container", "--log", str(tmp_path / "log"))
        job = slurm(*launched.launch(*where, *options, "--submit"), env={**launched.environment, **variables}).strip()
        jobs.append(job)
        return job

    yield submit_it
    for job in jobs:
        slurm("scancel", job)


def test_the_first_node_serves_and_an_orderly_stop_completes_the_job(
    slurm, submit, hosts, launched, tmp_path, assert_nothing_is_left
):
    ready, log = tmp_path / "ready", tmp_path / "log"
    job = submit("--ready-file", str(ready))
    wait_for(lambda: ready.exists() or not slurm.goes_on(job), lambda: slurm.explain(log))

    assert ready.exists(), slurm.explain(log)
    assert launched.generate(hosts[0])
    assert hosts[1].process("worker_node.py", rank=9)
    slurm("scancel", "--batch", "--signal=TERM", job)
    assert slurm.wait(job) == ("COMPLETED", "0:0"), slurm.explain(log)
    assert not ready.exists()
    assert_nothing_is_left()


def test_what_is_set_where_launch_runs_is_on_the_ranks_of_both_nodes(
    slurm, submit, hosts, tmp_path, assert_nothing_is_left
):
    log = tmp_path / "log"
    values = {"TRTLLM_DG_ENABLED": "0", "CUDA_HOME": "/usr/local/cuda 12.8", "NCCL_DEBUG": """it's "1" $HOME"""}
    job = submit(STANDIN_LOAD_S="600", **values)
    wait_for(lambda: log.exists() and "[RANK 9] [I] Prefetching" in log.read_text(), lambda: slurm.explain(log))

    ranks = [host.environment("worker_node.py", rank=rank) for host, rank in zip(hosts, (1, 9), strict=True)]
    slurm("scancel", job)
    slurm.wait(job)

    assert all(values.items() <= rank.items() for rank in ranks)
    assert_nothing_is_left()


def test_a_worker_that_is_killed_while_loading_is_named_and_the_job_fails(
    slurm, submit, hosts, tmp_path, assert_nothing_is_left
):
    log = tmp_path / "log"
    job = submit(STANDIN_LOAD_S="600")
    wait_for(lambda: log.exists() and "[RANK 9] [I] Prefetching" in log.read_text(), lambda: slurm.explain(log))

    os.kill(hosts[1].process("worker_node.py", rank=9), signal.SIGKILL)

    assert slurm.wait(job) == ("FAILED", "137:0"), slurm.explain(log)
    assert "rank 9 on node2 ended by signal 9 (phase: prefetching the checkpoint)" in last_words(log.read_text())
    assert_nothing_is_left()


def test_a_benchmark_is_one_job_with_its_dataset_and_a_log_of_each_rank(slurm, launched, tmp_path):
    """The programs of TensorRT-LLM are replaced by scripts that say how they were called."""
    folder = build(tmp_path / "bench", "deepseek-r1", "--gpu", "h100", "--gpus", "16", "--format", "trtllm-bench")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {
        "trtllm-bench": f'echo "$SLURM_STEP_NUM_TASKS: $*" >> {folder}/dataset.txt',
        "trtllm-llmapi-launch": 'echo "rank $SLURM_PROCID: $*"',
    }.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (programs / name).chmod(0o755)
    environment = {**launched.environment, "PATH": f"{programs}:{launched.environment['PATH']}", "IMAGE": ""}

    submit = ("sbatch", "--parsable", "--chdir", str(folder), str(folder / "bench.slurm"), "--streaming")
    job = slurm(*submit, env=environment).strip()

    assert slurm.wait(job) == ("COMPLETED", "0:0"), slurm.explain(folder / f"bench-{job}.log")
    (made,) = (folder / "dataset.txt").read_text().splitlines()
    assert made.startswith("1: --model deepseek-ai/DeepSeek-R1 prepare-dataset ")
    logs = {path.name: path.read_text() for path in folder.glob(f"bench-{job}-*.log")}
    assert logs.keys() == {f"bench-{job}-{rank}.log" for rank in range(16)}
    for rank in range(16):
        said = logs[f"bench-{job}-{rank}.log"]
        assert said.startswith(f"rank {rank}: trtllm-bench --model deepseek-ai/DeepSeek-R1 throughput ")
        assert said.endswith(" --streaming\n")
