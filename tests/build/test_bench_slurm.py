"""The batch script of a benchmark over several nodes, with an srun on PATH that runs the first task only."""

import os
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
SRUN = """\
#!/usr/bin/env bash
printf '%s\\n' "srun $*" >> "$RECORD"
tasks=8
while [[ "$1" == --* ]]; do
  if [[ "$1" == --ntasks=* ]]; then tasks="${1#*=}"; fi
  shift
done
SLURM_STEP_NUM_TASKS="$tasks" exec "$@"
"""
RECORDS = """\
#!/usr/bin/env bash
printf '%s\\n' "${0##*/} $*" >> "$RECORD"
for ((number = 1; number < $#; number++)); do
  if [[ "${!number}" == --output ]]; then next=$((number + 1)); touch "${!next}"; fi
done
"""


def submitted(tmp_path, request, *arguments, cwd=None, **variables):
    """Run the script as sbatch does. Returns the process, and the lines that the programs recorded."""
    folder, programs, record = tmp_path / "r1 bench", tmp_path / "bin", tmp_path / "record"
    write_repository(format_files("trtllm-bench", make_plan(request), version="1.0"), folder, force=True)
    programs.mkdir()
    for name, text in {"srun": SRUN, "trtllm-bench": RECORDS, "trtllm-llmapi-launch": RECORDS}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": "/home/me", "RECORD": str(record), **variables}
    words = ["bash", folder / "bench.slurm", *arguments]
    done = subprocess.run(words, cwd=cwd or folder, env=environment, capture_output=True, text=True)
    return done, record.read_text().splitlines() if record.exists() else []


def test_the_dataset_is_made_once_and_then_every_rank_measures(tmp_path):
    done, (prepare, make, step, bench) = submitted(
        tmp_path, GB200, "--streaming", "--warmup", "0", NUM_REQUESTS="49152"
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "r1 bench"
    assert prepare.startswith("srun --nodes=1 --ntasks=1 ")
    assert make.startswith(f"trtllm-bench --model nvidia/DeepSeek-R1-FP4 prepare-dataset --output {folder}/dataset.txt")
    assert make.endswith("--input-mean 1024 --output-mean 2048 --input-stdev 0 --output-stdev 0 --num-requests 49152")
    assert step.startswith("srun --mpi=pmix ")
    assert "--output=bench-%j-%t.log" in step
    assert bench.startswith("trtllm-llmapi-launch trtllm-bench --model nvidia/DeepSeek-R1-FP4 throughput --dataset ")
    assert bench.endswith("--streaming --warmup 0")
    assert "--num_requests 49152 --concurrency 3072" in bench


def test_a_dataset_that_is_there_is_used(tmp_path):
    (tmp_path / "own").touch()
    done, recorded = submitted(tmp_path, GB200, DATASET=str(tmp_path / "own"))
    assert done.returncode == 0, done.stderr
    assert [line.partition(" ")[0] for line in recorded] == ["srun", "trtllm-llmapi-launch"]


def test_the_container_has_this_folder_and_the_checkpoint(tmp_path):
    _, (prepare, *_) = submitted(tmp_path, GB200)
    assert "--container-image=nvcr.io#nvidia/tensorrt-llm/release:1.2.1" in prepare
    cache = "/home/me/.cache/huggingface"
    assert f"--container-mounts={tmp_path}/r1 bench:{tmp_path}/r1 bench,{cache}:{cache}" in prepare


def test_a_folder_of_weights_is_mounted(tmp_path):
    _, (prepare, *_) = submitted(tmp_path, replace(GB200, model="/models/r1"))
    assert ",/models/r1:/models/r1 " in prepare


def test_without_an_image_there_is_no_container(tmp_path):
    _, recorded = submitted(tmp_path, GB200, IMAGE="")
    assert recorded
    assert not any("--container" in line for line in recorded)


def test_from_another_folder_it_says_where_to_submit_it(tmp_path):
    done, recorded = submitted(tmp_path, GB200, cwd="/")
    assert (done.returncode, recorded) == (2, [])
    assert "submitted from its own folder" in done.stderr


@pytest.mark.parametrize(
    ("request_", "nodes", "each"),
    [
        pytest.param(GB200, 2, 4, id="gb200"),
        pytest.param(PlanRequest(variant="deepseek-v3", gpu="h100", num_gpus=16), 2, 8, id="h100"),
    ],
)
def test_the_directives_are_those_of_the_plan(request_, nodes, each):
    files = {
        file.path.as_posix(): file.content.decode()
        for file in format_files("trtllm-bench", make_plan(request_), version="1.0")
    }
    directives = [line for line in files["bench.slurm"].partition("set -euo")[0].splitlines() if "#SBATCH" in line]
    assert f"#SBATCH --nodes={nodes}" in directives
    assert f"#SBATCH --ntasks-per-node={each}" in directives
    assert f"#SBATCH --gpus-per-node={each}" in directives


def test_one_node_needs_no_job():
    plan = make_plan(PlanRequest(variant="deepseek-r1", gpu="h200", num_gpus=8))
    assert "bench.slurm" not in {file.path.as_posix() for file in format_files("trtllm-bench", plan, version="1.0")}
