"""The rendered batch script in a Slurm of two nodes, without containers; as tests/live/test_two_hosts.py, but srun
starts the ranks."""

import dataclasses
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.hosts import Host
from support.launched import Launched, last_words
from support.servers import build, with_standin
from support.slurm import Slurm
from support.waiting import wait_for

Submit = Callable[..., str]
RANK_9_LOADS = "[RANK 9] [I] Prefetching"
READY = [f"{server}: deepseek-triton: ready" for server in ("context node1", "generation node2")]


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

    def submit_it(*options: str, repository: Path = launched.repository, **variables: str) -> str:
        words = dataclasses.replace(launched, repository=repository).launch("slurm", "--no-container", "--submit")
        given = {**launched.environment, **variables}
        jobs.append(slurm(*words, "--log", str(tmp_path / "log"), *options, env=given).strip())
        return jobs[-1]

    yield submit_it
    for job in jobs:
        slurm("scancel", job)


def wait_until(slurm: Slurm, job: str, log: Path, *said: str) -> None:
    """Until the job's log has all of this."""

    def has_all() -> bool:
        return log.exists() and all(each in log.read_text() for each in said)

    wait_for(lambda: has_all() or not slurm.goes_on(job), lambda: slurm.explain(log))
    assert has_all(), slurm.explain(log)


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_what_is_set_where_launch_runs_is_on_the_ranks_of_both_nodes(
    slurm, submit, hosts, tmp_path, assert_nothing_is_left
):
    log = tmp_path / "log"
    values = {"TRTLLM_DG_ENABLED": "0", "CUDA_HOME": "/usr/local/cuda 12.8", "NCCL_DEBUG": """it's "1" $HOME"""}
    job = submit(STANDIN_LOAD_S="600", **values)
    wait_until(slurm, job, log, RANK_9_LOADS)

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
    wait_until(slurm, job, log, RANK_9_LOADS)

    os.kill(hosts[1].process("worker_node.py", rank=9), signal.SIGKILL)

    assert slurm.wait(job) == ("FAILED", "137:0"), slurm.explain(log)
    assert "rank 9 on node2 ended by signal 9 (phase: prefetching the checkpoint)" in last_words(log.read_text())
    assert_nothing_is_left()


@pytest.mark.nightly
def test_the_benchmark_makes_its_dataset_once_and_runs_on_both_nodes(slurm, launched, tmp_path, assert_nothing_is_left):
    """A rank of the benchmark only says where it is and what it got."""
    plan = ("deepseek-r1", "--gpu", "gb200", "--gpus", "8", "--format", "trtllm-bench")
    folder, programs, logs = build(tmp_path / "bench", *plan), tmp_path / "bin", tmp_path / "logs"
    programs.mkdir()
    prepare = 'case "$*" in *prepare-dataset*) while [[ "$1" != --output ]]; do shift; done; echo made >> "$2" ;; esac'
    said = 'echo "rank $SLURM_PROCID of $SLURM_STEP_NUM_TASKS on $SLURMD_NODENAME: ${*: -3}"'
    for name, line in {"trtllm-bench": prepare, "trtllm-llmapi-launch": said}.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{line}\n")
        (programs / name).chmod(0o755)
    environment = launched.environment | {"PATH": f"{programs}:{launched.environment['PATH']}"}
    environment |= {"IMAGE": "none", "FOLDER": str(folder), "LOGS": str(logs)}

    words = ["sbatch", "--parsable", f"--output={tmp_path}/log", str(folder / "bench.slurm"), "--streaming"]
    job = slurm(*words, env=environment).strip()

    assert slurm.wait(job) == ("COMPLETED", "0:0"), slurm.explain(tmp_path / "log", *logs.iterdir())
    assert (folder / "dataset.txt").read_text() == "made\n"
    report = f"--report_json {logs}/bench_{job}.json --streaming"
    assert {path.name: path.read_text() for path in logs.iterdir()} == {
        f"bench_{job}_{rank}.srun.out": f"rank {rank} of 8 on node{1 + rank // 4}: {report}\n" for rank in range(8)
    }
    assert_nothing_is_left()


@pytest.mark.nightly
def test_a_server_below_srun_is_told_to_stop_before_srun_kills_it(slurm, launched, tmp_path, assert_nothing_is_left):
    """The script is that of a container, without pyxis' own options, which this Slurm lacks."""
    twin, log, cache = build(tmp_path / "twin", "tiny", "--engine", "simulated"), tmp_path / "log", tmp_path / "kernels"
    options = ("--image", "here", "--cache-dir", str(cache), "--log", str(log), "--python", sys.executable)
    words = dataclasses.replace(launched, repository=twin).launch("slurm", *options)
    text = slurm(*words, env=launched.environment)
    script = tmp_path / "script"
    script.write_text(re.sub(r"(?m)^  --container-image=.*\n  --container-mounts=.*\n", "", text))
    job = slurm("sbatch", "--parsable", str(script), env=launched.environment).strip()
    wait_until(slurm, job, log, "0: deepseek-triton: ready")

    slurm("scancel", "--batch", "--signal=TERM", job)

    assert slurm.wait(job) == ("COMPLETED", "0:0"), slurm.explain(log)
    assert "deepseek-triton: stopped (exit code 0)" in log.read_text()
    assert "forcing job termination" not in log.read_text()
    assert_nothing_is_left()


def pair_of_standins(folder: Path, *plan: str) -> Path:
    build(folder, "deepseek-r1", *plan, "--profile", "disagg")
    for side in ("context", "generation"):
        with_standin(folder / side)
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A context and a generation server of eight ranks each, on the stand-in for the engine."""
    return pair_of_standins(tmp_path_factory.mktemp("launched") / "a pair", "--gpu", "h200", "--gpus", "8")


_JOINED = f"""\
import sys
from types import SimpleNamespace as Server
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from support.joined import joined
context, generation = Server(http_url="http://node1:8000"), Server(http_url="http://node2:8000")
print(joined(context, generation, {{"text_input": "Why?", "sampling_param_max_tokens": 5}}).text)
"""


@pytest.mark.nightly
def test_each_server_of_a_pair_has_its_own_node(slurm, submit, pair, hosts, launched, tmp_path, assert_nothing_is_left):
    log = tmp_path / "log"
    job = submit(repository=pair)
    wait_until(slurm, job, log, *READY)

    gateway = "gateway --triton-model tensorrt_llm --context-server http://node1:8000 --server http://node2:8000"
    assert f"launch: for clients start deepseek-triton {gateway}\n" in log.read_text()
    joined = hosts[0].run(sys.executable, "-c", _JOINED, env=launched.environment)
    assert joined.returncode == 0, joined.stderr
    assert joined.stdout.strip()
    slurm("scancel", "--batch", "--signal=TERM", job)
    assert slurm.wait(job) == ("COMPLETED", "0:0"), slurm.explain(log)
    assert_nothing_is_left()


@pytest.mark.nightly
def test_sides_with_different_gpus_ask_for_nodes_of_their_own_kind(
    slurm, submit, hosts, launched, tmp_path, assert_nothing_is_left
):
    """A heterogeneous job: four GPUs for the context server, eight for the other one."""
    log = tmp_path / "log"
    mixed = pair_of_standins(tmp_path / "mixed", "--gpu", "b200", "--context-set", "num_gpus=4")
    job = submit(repository=mixed)
    wait_until(slurm, job, log, *READY)

    gpus = [
        host.environment("worker_node.py", rank=rank)["SLURM_GPUS_ON_NODE"]
        for host, rank in zip(hosts, (3, 7), strict=True)
    ]
    assert gpus == ["4", "8"]
    joined = hosts[0].run(sys.executable, "-c", _JOINED, env=launched.environment)
    assert joined.returncode == 0, joined.stderr
    slurm("scancel", "--batch", "--signal=TERM", job)
    assert slurm.wait(job) == ("COMPLETED", "0:0"), slurm.explain(log)
    assert_nothing_is_left()


@pytest.mark.nightly
def test_servers_of_one_rank_stop_in_an_orderly_way_too(slurm, submit, tmp_path, assert_nothing_is_left):
    log = tmp_path / "log"
    job = submit(repository=build(tmp_path / "twins", "tiny", "--engine", "simulated", "--profile", "disagg"))
    wait_until(slurm, job, log, *(line.replace(": ", ": 0: ", 1) for line in READY))

    slurm("scancel", "--batch", "--signal=TERM", job)

    assert slurm.wait(job) == ("COMPLETED", "0:0"), slurm.explain(log)
    assert log.read_text().count("deepseek-triton: stopped (exit code 0)") == 2
    assert_nothing_is_left()


@pytest.mark.nightly
def test_a_server_of_a_pair_that_fails_ends_the_job_with_its_code(
    slurm, submit, pair, hosts, tmp_path, assert_nothing_is_left
):
    log = tmp_path / "log"
    job = submit(repository=pair, STANDIN_LOAD_S="600")
    loading = re.compile(r"^generation node2: 1: .*\[RANK 1\] \[I\] Prefetching", re.MULTILINE)
    wait_for(
        lambda: (log.exists() and loading.search(log.read_text())) or not slurm.goes_on(job), lambda: slurm.explain(log)
    )

    os.kill(hosts[1].process("worker_node.py", rank=1), signal.SIGKILL)

    assert slurm.wait(job) == ("FAILED", "137:0"), slurm.explain(log)
    assert "generation node2: deepseek-triton: rank 1 on node2 ended by signal 9" in log.read_text()
    assert_nothing_is_left()
