"""Variables that the user sets reach the ranks of every node: names and values, in every script that starts ranks."""

from pathlib import Path

import pytest

from deepseek_triton_build import PlanRequest, make_plan
from deepseek_triton_build.catalog import is_engine_variable, is_for_every_rank
from deepseek_triton_build.data.planned_settings import OF_ONE_NODE
from support.scripts import forwarded_by, script_runner

TWO_NODES = PlanRequest(variant="deepseek-r1", gpu="h100", num_gpus=16)
FORMATS = ("triton", "trtllm-serve", "trtllm-bench", "trtllm-eval", "quickstart")

_ENGINE = """
TRTLLM_DG_ENABLED TRTLLM_DG_JIT_DEBUG TRTLLM_DG_JIT_USE_NVCC TRTLLM_DG_JIT_DUMP_CUBIN TRTLLM_DG_CACHE_DIR
TRTLLM_ENABLE_PDL TRTLLM_USE_UCX_KVCACHE TRTLLM_NIXL_KVCACHE_BACKEND TRTLLM_EPLB_SHM_NAME TRTLLM_DEEP_EP_TOKEN_LIMIT
TRTLLM_FORCE_XQA TRTLLM_KVCACHE_TRANSFER_BUFFER_SIZE TRTLLM_MOE_DISABLE_FINALIZE_FUSION
TLLM_OVERRIDE_LAYER_NUM TLLM_LOG_LEVEL TLLM_MOE_A2A_DISPATCH_BLOCK_SIZE TLLM_AUTOTUNER_CACHE_PATH
TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL OVERRIDE_QUANT_ALGO ENABLE_PERFECT_ROUTER ENABLE_CONFIGURABLE_MOE
FORCE_DETERMINISTIC FORCE_MOE_KERNEL_DETERMINISTIC FORCE_ATTENTION_KERNEL_DETERMINISTIC FORCE_ALL_REDUCE_DETERMINISTIC
PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF TORCH_NCCL_ASYNC_ERROR_HANDLING TORCHINDUCTOR_CACHE_DIR
CUDA_HOME CUDA_LAUNCH_BLOCKING CUDA_DEVICE_MAX_CONNECTIONS CUBLAS_WORKSPACE_CONFIG NVIDIA_TF32_OVERRIDE
DG_JIT_CACHE_DIR FLASHINFER_WORKSPACE_BASE FLASHINFER_CUBIN_DIR TRITON_CACHE_DIR OMP_NUM_THREADS
NCCL_SOCKET_IFNAME NCCL_IB_HCA GLOO_SOCKET_IFNAME UCX_TLS UCX_NET_DEVICES UCC_TLS NVSHMEM_IB_GID_INDEX FI_PROVIDER
"""
"""Names from the guides to DeepSeek of TensorRT-LLM, cpp/tensorrt_llm/common/envUtils.cpp, tensorrt_llm/_torch and
tensorrt_llm/llmapi/mpi_session.py, and the documentation of PyTorch, CUDA, NCCL, UCX, NVSHMEM and libfabric."""
ALSO_PASSED_ON = ["PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN"]
_STAYING = """
CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES CUDA_VERSION NCCL_VERSION TRT_LLM_VERSION
HOME HOSTNAME TMPDIR OMPI_COMM_WORLD_RANK PMIX_RANK SLURM_PROCID SSH_CONNECTION MINE
"""
"""Names of a node's own devices, of its image or of one process: every node and every rank has others."""
READ_BY_THE_ENGINE, STAY = _ENGINE.split(), _STAYING.split()

ODD_VALUES = {
    "TRTLLM_BLANKS": "two  words ",
    "TLLM_QUOTES": """it's a "value" """,
    "PYTORCH_ALLOC_CONF": "max_split_size_mb:8192,expandable_segments:True;a=b",
    "NCCL_SHELL": "$HOME `id` $(id) * \\ # !",
    "UCX_LINES": "one\ntwo",
    "DG_EMPTY": "",
    "CUDA_HOME": "/usr/local/cuda 12",
}


def test_what_the_engine_reads_is_for_every_rank_and_what_is_of_one_node_stays_there():
    assert [name for name in READ_BY_THE_ENGINE if not (is_engine_variable(name) and is_for_every_rank(name))] == []
    assert [name for name in STAY if is_for_every_rank(name)] == []


@pytest.mark.parametrize("format", FORMATS)
def test_scripts_hand_them_to_the_other_nodes(tmp_path, format):
    file = tmp_path / "data"
    file.touch()
    values = {name: "1" for name in [*READ_BY_THE_ENGINE, *ALSO_PASSED_ON, *STAY] if name != "PATH"} | ODD_VALUES
    arguments = ["mmlu"] if format == "trtllm-eval" else []
    run = script_runner(tmp_path)
    ran = run(make_plan(TWO_NODES), format, *arguments, **values, HOSTS="a,b", DATASET=str(file), QUICKSTART=str(file))

    forwarded = forwarded_by(ran.argv)
    own = {"DEEPSEEK_TRITON_LAUNCH"} if format == "triton" else set()
    assert len(forwarded) == len(set(forwarded))
    assert set(forwarded) == {*READ_BY_THE_ENGINE, *ALSO_PASSED_ON, *ODD_VALUES, *own}
    assert {name: ran.environment[name] for name in ODD_VALUES} == ODD_VALUES


def test_the_documentation_names_what_is_left_out():
    text = Path(__file__).parents[2].joinpath("docs/generator.md").read_text(encoding="utf-8")
    assert [pattern for pattern in OF_ONE_NODE if f"`{pattern.removeprefix('*')}`" not in text] == []
