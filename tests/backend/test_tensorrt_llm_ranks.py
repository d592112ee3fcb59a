"""tritonserver in an MPI world, and several instances in one tritonserver."""

import importlib
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_backend.config import parse_config
from deepseek_backend.engines.tensorrt_llm import TensorRTLLMEngine, loading
from deepseek_backend.errors import ConfigError, EngineError
from deepseek_triton_build.catalog import RELEASES, load_release
from standin.harness import WAIT_S
from standin.loading import standin

MPI = load_release("1.2.1").record["mpi"]
LLMAPI_LAUNCH = {"TLLM_SPAWN_PROXY_PROCESS": "1"}


def mpirun(rank, size):
    return {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size)}


WORLDS = [
    ({}, 1),
    ({"OMPI_COMM_WORLD_SIZE": "8"}, 1),  # no rank
    (mpirun(0, 1), 1),
    (mpirun(3, 8), 8),
    ({"PMI_RANK": "1", "PMI_SIZE": "4"}, 4),
    ({"PMIX_RANK": "1", "SLURM_STEP_NUM_TASKS": "16"}, 16),
    ({"PMIX_RANK": "1"}, 1),  # a size nobody tells
    ({**mpirun(0, 8), **LLMAPI_LAUNCH}, 1),
]


def test_only_a_world_of_tritonservers_has_ranks():
    assert [loading.world_size(environ, MPI) for environ, _ in WORLDS] == [size for _, size in WORLDS]


def test_a_ranks_variables_are_removed_and_settings_kept():
    settings = {"OMPI_MCA_btl_tcp_if_include": "lo", "TLLM_SPAWN_PROXY_PROCESS": "1", "PATH": "/bin"}
    alone = dict(settings)
    assert loading.forget_launcher(alone, MPI) == []
    assert alone == settings
    under_mpirun = {**settings, "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}
    loading.forget_launcher(under_mpirun, MPI)
    assert under_mpirun == {"TLLM_SPAWN_PROXY_PROCESS": "1", "PATH": "/bin"}


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_rank_0_leads_the_others(make_engine, monkeypatch, release):
    for name, value in mpirun(0, 4).items():
        monkeypatch.setenv(name, value)
    harness = make_engine(release, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert harness.engine._llm._session.n_workers == 4
    assert harness.run(max_tokens=3)[-1].finish_reason == "length"
    world = importlib.import_module("mpi4py.MPI").COMM_WORLD
    assert not world.released.is_set()
    harness.engine.stop()
    assert world.released.is_set(), "the workers wait for it"


def test_another_rank_works_until_the_leader_ends(tmp_path, monkeypatch):
    for name, value in mpirun(1, 2).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "release.yaml").write_text(load_release("1.2.1").text)
    document = {"model": "m", "max_seq_len": 100, "tensor_parallel_size": 2}
    engine = TensorRTLLMEngine(parse_config(document, version_dir=tmp_path))
    caught = []

    def start():
        try:
            engine.start()
        except loading.WorkerRankEnded as ended:
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
def test_a_world_of_another_size_is_refused_on_every_rank(make_engine, monkeypatch, rank):
    for name, value in mpirun(rank, 2).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EngineError, match=r"on 2 MPI ranks, but the model needs 8 .*tensor_parallel_size"):
        make_engine(tensor_parallel_size=8)


def model_config(gpus, count=1):
    parameters = {} if gpus is None else {"gpu_device_ids": {"string_value": gpus}}
    return {"instance_group": [{"count": count, "kind": "KIND_CPU"}], "parameters": parameters}


INSTANCES = [
    (model_config("0,1;2,3", 2), "tensorrt_llm_0_0", "0,1"),
    (model_config("0,1;2,3", 2), "tensorrt_llm_0_1", "2,3"),
    (model_config(" 4 , 5 ; 6,7 ", 2), "tensorrt_llm_0_1", "6,7"),
    (model_config("2,3"), "tensorrt_llm_0", "2,3"),
    (model_config("2,3"), "r1_7", "2,3"),
]
MISFITS = [
    (model_config(None, 2), "2 instances need the parameter gpu_device_ids"),
    (model_config("0,1", 2), "expected GPUs for 2 instances"),
    (model_config("0;1;2", 2), "expected GPUs for 2 instances"),
    (model_config("0;", 2), "at least one GPU"),
    (model_config("0,1;1,2", 2), "each GPU once"),
]


def test_each_instance_has_gpus_of_its_own_and_a_lone_one_has_all(subtests):
    for config, name, gpus in INSTANCES:
        environment = {"CUDA_VISIBLE_DEVICES": gpus, "TRTLLM_VISIBLE_DEVICES": gpus}
        assert loading.instance_environment(config, name) == environment
    for config in (model_config(None), {}, {"instance_group": []}):
        assert loading.instance_environment(config, "tensorrt_llm_0_0") == {}
    for config, message in MISFITS:
        with subtests.test(message), pytest.raises(ConfigError, match=message):
            loading.instance_environment(config, "tensorrt_llm_0_0")


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(1, 8), min_size=2, max_size=6))
def test_no_gpu_is_lost_or_shared(sizes):
    gpus = iter(range(sum(sizes)))
    parts = [",".join(str(next(gpus)) for _ in range(size)) for size in sizes]
    config = model_config(";".join(parts), len(sizes))
    given_out = [loading.instance_environment(config, f"m_0_{i}")["CUDA_VISIBLE_DEVICES"] for i in range(len(sizes))]
    assert given_out == parts


def test_the_engine_counts_the_gpus_it_was_given(make_engine, monkeypatch):
    monkeypatch.setenv("TRTLLM_VISIBLE_DEVICES", "2,3")
    assert make_engine().engine._llm._llm_args["gpus_per_node"] == 2
