"""tritonserver in an MPI world, and several instances in one tritonserver."""

from __future__ import annotations

import importlib
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_backend.config import parse_config
from deepseek_backend.engines.tensorrt_llm import TensorRTLLMEngine
from deepseek_backend.engines.tensorrt_llm.placement import instance_environment
from deepseek_backend.engines.tensorrt_llm.ranks import WorkerRankEnded, forget_launcher, world_size
from deepseek_backend.errors import ConfigError, EngineError
from deepseek_triton_build.catalog import RELEASES, load_release
from standin.harness import WAIT_S, MakeEngine
from standin.loading import standin

pytestmark = pytest.mark.slow

MPI = load_release("1.2.1").record["mpi"]
LLMAPI_LAUNCH = {"TLLM_SPAWN_PROXY_PROCESS": "1"}


def mpirun(rank: int, size: int) -> dict[str, str]:
    return {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size)}


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        pytest.param({}, 1, id="alone"),
        pytest.param({"OMPI_COMM_WORLD_SIZE": "8"}, 1, id="no rank"),
        pytest.param(mpirun(0, 1), 1, id="a world of one"),
        pytest.param(mpirun(3, 8), 8, id="mpirun"),
        pytest.param({"PMI_RANK": "1", "PMI_SIZE": "4"}, 4, id="PMI"),
        pytest.param({"PMIX_RANK": "1", "SLURM_STEP_NUM_TASKS": "16"}, 16, id="srun"),
        pytest.param({"PMIX_RANK": "1"}, 1, id="a size nobody tells"),
        pytest.param({**mpirun(0, 8), **LLMAPI_LAUNCH}, 1, id="trtllm-llmapi-launch"),
    ],
)
def test_only_a_world_of_tritonservers_has_ranks(environ: dict[str, str], size: int) -> None:
    assert world_size(environ, MPI) == size


def test_a_ranks_variables_are_removed_and_settings_kept() -> None:
    settings = {"OMPI_MCA_btl_tcp_if_include": "lo", "TLLM_SPAWN_PROXY_PROCESS": "1", "PATH": "/bin"}
    alone = dict(settings)
    assert forget_launcher(alone, MPI) == []
    assert alone == settings
    under_mpirun = {**settings, "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}
    forget_launcher(under_mpirun, MPI)
    assert under_mpirun == {"TLLM_SPAWN_PROXY_PROCESS": "1", "PATH": "/bin"}


@pytest.mark.parametrize("release", RELEASES)
def test_rank_0_leads_the_others(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    for name, value in mpirun(0, 4).items():
        monkeypatch.setenv(name, value)
    harness = make_engine(release, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert harness.engine._llm._session.n_workers == 4
    assert harness.run(max_tokens=3)[-1].finish_reason == "length"
    world = importlib.import_module("mpi4py.MPI").COMM_WORLD
    assert not world.released.is_set()
    harness.engine.stop()
    assert world.released.is_set(), "the workers wait for it"


def test_another_rank_works_until_the_leader_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in mpirun(1, 2).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "release.yaml").write_text(load_release("1.2.1").text)
    document = {"model": "m", "max_seq_len": 100, "tensor_parallel_size": 2}
    engine = TensorRTLLMEngine(parse_config(document, version_dir=tmp_path))
    caught: list[BaseException] = []

    def start() -> None:
        try:
            engine.start()
        except WorkerRankEnded as ended:
            caught.append(ended)

    with standin(tmp_path / "release.yaml"):
        world = importlib.import_module("mpi4py.MPI").COMM_WORLD
        thread = threading.Thread(target=start)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive(), "it works as long as the leader does"
        world.release_workers()
        thread.join(WAIT_S)
    assert str(caught[0]) == "MPI rank 1 has nothing to serve: its leader has ended"
    engine.stop()
    assert not engine.health().alive


@pytest.mark.parametrize("rank", [0, 1])
def test_a_world_of_another_size_is_refused_on_every_rank(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    for name, value in mpirun(rank, 2).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EngineError, match=r"on 2 MPI ranks, but the model needs 8 .*tensor_parallel_size"):
        make_engine(tensor_parallel_size=8)


def model_config(gpus: str | None, count: int = 1) -> dict[str, Any]:
    parameters = {} if gpus is None else {"gpu_device_ids": {"string_value": gpus}}
    return {"instance_group": [{"count": count, "kind": "KIND_CPU"}], "parameters": parameters}


@pytest.mark.parametrize(
    ("config", "name", "gpus"),
    [
        (model_config("0,1;2,3", 2), "tensorrt_llm_0_0", "0,1"),
        (model_config("0,1;2,3", 2), "tensorrt_llm_0_1", "2,3"),
        (model_config(" 4 , 5 ; 6,7 ", 2), "tensorrt_llm_0_1", "6,7"),
        (model_config("2,3"), "tensorrt_llm_0", "2,3"),
        (model_config("2,3"), "r1_7", "2,3"),
    ],
)
def test_each_instance_has_gpus_of_its_own(config: dict[str, Any], name: str, gpus: str) -> None:
    environment = instance_environment(config, name)
    assert environment == {"CUDA_VISIBLE_DEVICES": gpus, "TRTLLM_VISIBLE_DEVICES": gpus}


@pytest.mark.parametrize("config", [model_config(None), {}, {"instance_group": []}], ids=str)
def test_a_lone_instance_has_every_gpu(config: dict[str, Any]) -> None:
    assert instance_environment(config, "tensorrt_llm_0_0") == {}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (model_config(None, 2), "2 instances need the parameter gpu_device_ids"),
        (model_config("0,1", 2), "expected GPUs for 2 instances"),
        (model_config("0;1;2", 2), "expected GPUs for 2 instances"),
        (model_config("0;", 2), "at least one GPU"),
        (model_config("0,1;1,2", 2), "each GPU once"),
    ],
)
def test_gpus_that_do_not_fit_the_instances_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        instance_environment(config, "tensorrt_llm_0_0")


@given(sizes=st.lists(st.integers(1, 8), min_size=2, max_size=6))
def test_no_gpu_is_lost_or_shared(sizes: list[int]) -> None:
    gpus = iter(range(sum(sizes)))
    parts = [",".join(str(next(gpus)) for _ in range(size)) for size in sizes]
    config = model_config(";".join(parts), len(sizes))
    given_out = [instance_environment(config, f"m_0_{i}")["CUDA_VISIBLE_DEVICES"] for i in range(len(sizes))]
    assert given_out == parts


def test_the_engine_counts_the_gpus_it_was_given(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_VISIBLE_DEVICES", "2,3")
    assert make_engine().engine._llm._llm_args["gpus_per_node"] == 2
