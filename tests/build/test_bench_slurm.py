"""bench.slurm runs for real, with programs on PATH in place of Slurm and TensorRT-LLM."""

import os
import shlex
import subprocess
from dataclasses import replace

import pytest

from deepseek_triton_build import PlanRequest, Workload, format_files, make_plan, write_repository

GB200 = PlanRequest(
    variant="deepseek-r1",
    gpu="gb200",
    num_gpus=8,
    profile="throughput",
    workload=Workload(isl=1024, osl=2048, concurrency=3072),
)
"""The benchmark of the README: two trays of four."""

_SRUN = """\
#!/usr/bin/env bash
printf '%q ' srun "$@" >> "$CALLS"; echo >> "$CALLS"
while [[ "$1" == -* ]]; do
  case "$1" in
    --ntasks=*) export SLURM_STEP_NUM_TASKS="${1#*=}" ;;
    --export=ALL,*) export "${1#*,}" ;;
  esac
  shift
done
exec "$@"
"""
_TRTLLM_BENCH = """\
#!/usr/bin/env bash
printf '%q ' trtllm-bench "$@" >> "$CALLS"; echo >> "$CALLS"
while [[ $# -gt 0 && "$1" != --output ]]; do shift; done
if [[ $# -gt 0 ]]; then echo made > "$2"; fi
exit "${EXIT:-0}"
"""
PROGRAMS = {"srun": _SRUN, "trtllm-bench": _TRTLLM_BENCH, "trtllm-llmapi-launch": '#!/usr/bin/env bash\nexec "$@"\n'}


@pytest.fixture
def submit(tmp_path):
    """Return a function that writes a plan and runs its bench.slurm in its folder, and returns the calls of srun and
    trtllm-bench, and the process."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in PROGRAMS.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    calls = tmp_path / "calls"

    def run(request, *arguments, folder="bench", **variables):
        place = tmp_path / folder
        write_repository(format_files("trtllm-bench", make_plan(request), version="1.0"), place, force=True)
        calls.write_text("")
        slurm = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(place), "CALLS": str(calls)}
        done = subprocess.run(
            ["bash", place / "bench.slurm", *arguments],
            env={"PATH": f"{commands}:{os.environ['PATH']}", **slurm, **variables},
            capture_output=True,
            text=True,
        )
        return [shlex.split(line) for line in calls.read_text().splitlines()], done

    return run


def test_the_dataset_is_made_once_and_the_benchmark_runs_over_both_nodes(submit, tmp_path):
    folder, data = tmp_path / "bench", tmp_path / "data.txt"
    calls, done = submit(GB200, "--warmup", "0", NUM_REQUESTS="49152", DATASET=str(data))

    assert (done.returncode, done.stderr) == (0, "")
    one, made, all_ranks, measured = calls
    container = [
        "--container-image=nvcr.io#nvidia/tensorrt-llm/release:1.2.1",
        f"--container-mounts={folder}:{folder},{folder}:{folder},{tmp_path}:{tmp_path}",
        "--no-container-mount-home",
        "bash",
        str(folder / "bench.sh"),
    ]
    one_task = ["srun", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--mpi=none", "--export=ALL,PREPARE=1"]
    assert one == [*one_task, *container]
    assert made[made.index("--num-requests") + 1] == "49152"
    assert data.read_text() == "made\n"
    report = ["--report_json", str(folder / "bench_7.json"), "--warmup", "0"]
    ranks = ["srun", "--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--mpi=pmix", "--kill-on-bad-exit=1"]
    ranks += ["--cpu-bind=none", "--export=ALL", f"--output={folder}/bench_%j_%t.srun.out"]
    assert all_ranks == [*ranks, *container, *report]
    assert measured[:4] == ["trtllm-bench", "--model", "nvidia/DeepSeek-R1-FP4", "throughput"]
    assert measured[-len(report) :] == report

    again, _ = submit(GB200, DATASET=str(data))
    assert [call[0] for call in again] == ["srun", "trtllm-bench"]


def test_a_dataset_that_was_not_finished_is_none(submit, tmp_path):
    calls, done = submit(GB200, EXIT="3")

    assert done.returncode == 3
    assert [call[0] for call in calls] == ["srun", "trtllm-bench"]
    assert not (tmp_path / "bench" / "dataset.txt").exists()


def test_folders_of_ones_own(submit, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "real.jsonl").touch()
    request = replace(GB200, model="/models/r1")
    variables = {"DATASET": f"{tmp_path}/data/real.jsonl", "LOGS": f"{tmp_path}/logs", "MOUNTS": "/more:/more"}
    (ranks, measured), done = submit(request, HF_HOME="/hub", **variables)

    assert done.returncode == 0, done.stderr
    mounts = [tmp_path / "bench", tmp_path / "logs", tmp_path / "data"]
    expected = ",".join(
        [*(f"{path}:{path}" for path in mounts), "/models/r1:/models/r1:ro", "/hub:/hub", "/more:/more"]
    )
    assert f"--container-mounts={expected}" in ranks
    assert f"--output={tmp_path}/logs/bench_%j_%t.srun.out" in ranks
    assert measured[measured.index("--dataset") + 1] == f"{tmp_path}/data/real.jsonl"


def test_no_container(submit, tmp_path):
    (ranks, _), _ = submit(GB200, folder="with a blank", IMAGE="none", DATASET=__file__)

    assert [word for word in ranks if word.startswith("--container")] == []
    assert ranks[ranks.index("bash") + 1] == str(tmp_path / "with a blank" / "bench.sh")


@pytest.mark.parametrize(
    ("folder", "variables", "message"),
    [
        ("with a blank", {}, "expected no blank, comma or colon, because pyxis mounts no such path"),
        ("bench", {"FOLDER": "/nowhere"}, "expected bench.sh in /nowhere, found none; submit from the folder of both"),
    ],
)
def test_a_folder_that_does_not_work_is_said_in_one_line(submit, folder, variables, message):
    calls, done = submit(GB200, folder=folder, **variables)

    assert (calls, done.returncode) == ([], 2)
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_one_node_needs_no_job():
    plan = make_plan(PlanRequest(variant="deepseek-r1", gpu="h200", num_gpus=8))
    assert "bench.slurm" not in {file.path.name for file in format_files("trtllm-bench", plan, version="1.0")}
