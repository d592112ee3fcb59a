"""What is written for vLLM: start.sh of a repository, serve.sh and bench.sh. The scripts run for real."""

import itertools
import json
import shlex
from dataclasses import replace

import pytest
import yaml

from deepseek_triton_build import (
    EnvironmentVariable,
    PlanRequest,
    RefusedPlanError,
    Setting,
    Workload,
    format_files,
    make_plan,
)
from deepseek_triton_build.data.vllm import VLLM_VERSIONS
from support.scripts import files_of, script_runner
from support.vllm_plans import MODEL, SETTINGS, planned, two_nodes


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return script_runner(tmp_path_factory.mktemp("vllm"))


# vllm-serve


def test_serve_gives_each_argument_as_its_flag(run):
    argv = run(planned(), "vllm-serve", "--max-num-seqs", "64").argv

    assert argv == [
        "vllm",
        "serve",
        MODEL,
        *("--host", "localhost", "--port", "8000"),
        *("--tensor-parallel-size", "8"),
        "--enable-expert-parallel",
        "--no-enable-prefix-caching",
        *("--gpu-memory-utilization", "0.95"),
        *("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}'),
        *("--cudagraph-capture-sizes", "1", "2", "4"),
        *("--hf-overrides", '{"a": "it\'s"}'),
        *("--reasoning-parser", "deepseek_r1"),
        *("--max-num-seqs", "64"),
    ]


def test_serve_and_its_benchmark_take_another_address_and_another_workload(run):
    variables = {"HOST": "0.0.0.0", "PORT": "9", "ISL": "1000", "OSL": "8000", "NUM_PROMPTS": "512"}
    measured = run(planned(), "vllm-serve", "--seed", "7", script="bench.sh", **variables).argv

    assert run(planned(), "vllm-serve", HOST="0.0.0.0", PORT="9").argv[3:7] == ["--host", "0.0.0.0", "--port", "9"]
    assert measured == shlex.split(
        f"vllm bench serve --model {MODEL} --host 0.0.0.0 --port 9 --dataset-name random --random-input-len 1000 "
        "--random-output-len 8000 --request-rate 10000 --num-prompts 512 --ignore-eos --seed 7"
    )


def test_the_benchmark_has_the_plans_workload_or_the_guides(run):
    for workload, isl, number in ((Workload(), 8000, 16), (Workload(isl=1000, osl=1000, concurrency=64), 1000, 64)):
        words = f"--random-input-len {isl} --random-output-len 1000 --request-rate 10000 --num-prompts {number}"
        plan = replace(planned(), request=replace(planned().request, workload=workload))
        assert words in shlex.join(run(plan, "vllm-serve", script="bench.sh").argv)


@pytest.mark.parametrize("version", VLLM_VERSIONS)
def test_a_model_that_only_thinks_is_asked_to_in_every_conversation(run, version):
    flag = "--default-chat-template-kwargs"
    for name, expected in (("deepseek-v3.2-speciale", ['{"thinking": true}']), ("deepseek-v3.2", [])):
        plan = make_plan(PlanRequest(variant=name, engine="vllm", vllm=version, gpu="h200", num_gpus=8))
        argv = run(plan, "vllm-serve").argv
        assert [value for key, value in itertools.pairwise(argv) if key == flag] == expected
        assert flag in plan.vllm.serve_flags


@pytest.mark.parametrize("version", VLLM_VERSIONS)
def test_every_flag_that_is_written_is_in_the_versions_record(run, version):
    plan = planned(version)
    flags = [word for word in run(plan, "vllm-serve").argv if word.startswith("--")]
    names = [flag.removeprefix("--").removeprefix("no-").replace("-", "_") for flag in flags]

    assert [name for name in names if name not in plan.vllm.arguments] == ["host", "port"]
    assert {"--host", "--port"} <= plan.vllm.serve_flags


def test_an_argument_without_a_flag_is_refused():
    plan = replace(planned(), settings=(*SETTINGS, Setting("mamba_config", {}, "asked for")))

    with pytest.raises(RefusedPlanError, match=r"^vllm serve has no flag for mamba_config; use --format triton$"):
        format_files("vllm-serve", plan, version="1")


def test_every_flag_has_its_reason_above():
    script = files_of(planned(), "vllm-serve")["serve.sh"]
    comments = " ".join(line.removeprefix("# ") for line in script.splitlines() if line.startswith("#"))

    assert "--tensor-parallel-size 8: one copy over 8 GPUs" in comments
    assert "method: the checkpoint's own draft layer; num_speculative_tokens: one draft token" in comments


# The repository


@pytest.mark.slow
def test_the_repository_has_the_record_and_the_version_in_its_stamp():
    files = files_of(planned("0.25.1"), "triton")
    manifest = json.loads(files["tensorrt_llm/deepseek-triton.json"])

    assert yaml.safe_load(files["tensorrt_llm/1/release.yaml"])["vllm"] == "0.25.1"
    assert (manifest["engine"], manifest["vllm"], manifest["release"]) == ("vllm", "0.25.1", None)
    assert files["start.sh"].splitlines()[1].endswith(", for vLLM 0.25.1")
    engines = {
        path.split("/engines/")[1].split("/")[0] for path in files if "/engines/" in path and path.count("/") > 4
    }
    assert engines & {"tensorrt_llm", "reference", "simulated"} == set()
    assert not [path for path in files if "overlay" in path]


def test_one_server_runs_under_the_supervisor_without_mpi(run):
    plan = replace(planned(), environment=(EnvironmentVariable("VLLM_USE_DEEP_GEMM", "1", "FP8 kernels"),))
    result = run(plan, "triton", "--log-verbose", "1", DEEPSEEK_TRITON_LAUNCH="0123abcd", EXIT_TIMEOUT="20")
    supervisor, guard = (index for index, word in enumerate(result.argv) if word == "--")

    assert result.argv[0] == "python3"
    assert "--ranks" not in result.argv[:supervisor]
    assert result.argv[guard - 1 : guard + 2] == ["rank", "--", "tritonserver"]
    assert "mpirun" not in result.argv
    assert result.argv[-2:] == ["--log-verbose", "1"]
    assert {"VLLM_USE_DEEP_GEMM": "1", "SPT_NOENV": "1"}.items() <= result.environment.items()
    kept = run(plan, "triton", VLLM_USE_DEEP_GEMM="0")
    assert kept.environment["VLLM_USE_DEEP_GEMM"] == "0"
    assert "VLLM_USE_DEEP_GEMM=0 is kept" in kept.error
    printed = run(plan, "triton", DRY_RUN="1", NCCL_DEBUG="INFO").output
    assert {"SPT_NOENV=1", "VLLM_USE_DEEP_GEMM=1", "NCCL_DEBUG=INFO"} <= set(printed.replace("\\\n", " ").split())


# Several nodes


ADDRESS = {"MASTER_ADDR": "10.0.0.1"}


def test_node_0_has_the_server_and_the_others_have_vllm_without_one(run):
    first = run(two_nodes(), "triton", NODE_RANK="0", **ADDRESS)
    second = run(two_nodes(), "triton", NODE_RANK="1", INTERFACE="eth0", **ADDRESS)
    after = second.argv.index("--") + 1

    assert "tritonserver" in first.argv
    assert first.argv[first.argv.index("--max-restarts") + 1] == "0"
    assert "tritonserver" not in second.argv
    assert second.argv[2:after] == ["rank", "--"]
    assert second.argv[after : after + 3] == ["vllm", "serve", MODEL]
    assert second.argv[-5:] == ["--node-rank", "1", "--master-addr", "10.0.0.1", "--headless"]
    assert second.environment["NCCL_SOCKET_IFNAME"] == "eth0"


def test_in_a_slurm_step_the_supervisor_runs_elsewhere(run):
    step = {"SLURM_STEP_NUM_TASKS": "2", **ADDRESS}
    first = run(two_nodes(), "triton", SLURM_PROCID="0", **step)

    assert first.argv[2:5] == ["rank", "--", "tritonserver"]
    assert "--headless" in run(two_nodes(), "triton", SLURM_PROCID="1", **step).argv


def test_serve_on_several_nodes(run):
    assert run(two_nodes(), "vllm-serve", NODE_RANK="1", **ADDRESS).argv[-1] == "--headless"
    first = run(two_nodes(), "vllm-serve", NODE_RANK="0", **ADDRESS).argv
    assert first[-4:] == ["--node-rank", "0", "--master-addr", "10.0.0.1"]


NUMBER = "expected 0 to 1 as NODE_RANK, the number of this node; got"
REACHED = "expected as MASTER_ADDR where the other nodes reach node 0, such as 10.0.0.1; got '"


@pytest.mark.slow
@pytest.mark.parametrize("format", ["triton", "vllm-serve"])
def test_a_node_without_number_or_address_is_refused(run, format):
    for variables, expected in (
        ({"NODE_RANK": "2", **ADDRESS}, f"{NUMBER} '2'"),
        ({"NODE_RANK": "08", **ADDRESS}, f"{NUMBER} '08'"),
        (ADDRESS, f"{NUMBER} ''"),
        ({"NODE_RANK": "0", "MASTER_ADDR": "localhost"}, REACHED),
        ({"NODE_RANK": "1"}, f"{REACHED}'"),
    ):
        result = run(two_nodes(), format, **variables)
        assert (result.code, result.argv) == (2, [])
        assert expected in result.error


@pytest.mark.slow
def test_on_several_nodes_too_a_setting_that_is_refused_ends_the_start(run):
    result = run(two_nodes(), "triton", NODE_RANK="0", EXIT_TIMEOUT="soon", **ADDRESS)
    assert (result.code, result.argv) == (2, [])
    assert "expected whole seconds as EXIT_TIMEOUT; got 'soon'" in result.error
