"""The lines of model.yaml and the environment variables of a plan, each with its reason; the variables of ranks."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

# Names of the documents and files of TensorRT-LLM that most reasons and rules rest on.
GUIDE = "TensorRT-LLM examples/models/core/deepseek_v3/README.md"
DEPLOYMENT = "TensorRT-LLM deployment guide for DeepSeek-R1"
LLM_ARGS = "TensorRT-LLM tensorrt_llm/llmapi/llm_args.py"


class _Explained:
    """A choice of a plan, which has a reason and its source."""

    reason: str
    source: str

    @property
    def comment(self) -> str:
        """The reason with its source, as generated files have it."""
        return self.comment_with({})

    def comment_with(self, footnotes: Mapping[str, int]) -> str:
        """The reason with its source, or with the number of the footnote that has it."""
        if not self.source:
            return self.reason
        note = footnotes.get(self.source)
        return f"{self.reason} ({self.source})" if note is None else f"{self.reason} [{note}]"


def footnotes(lines: Iterable[_Explained]) -> dict[str, int]:
    """Number the sources that several reasons rest on, in the order of first use."""
    uses = Counter(source for _, source in dict.fromkeys((line.reason, line.source) for line in lines) if source)
    return {source: number for number, source in enumerate((source for source in uses if uses[source] > 1), 1)}


@dataclass(frozen=True)
class Setting(_Explained):
    """One line of model.yaml."""

    key: str
    """Dotted path, such as `kv_cache_config.dtype`."""
    value: Any
    reason: str
    source: str = ""
    """The document that the reason rests on; empty for arithmetic and for the user's own choice."""


@dataclass(frozen=True)
class EnvironmentVariable(_Explained):
    """One environment variable that the server is started with."""

    name: str
    value: str
    reason: str
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class SettingsFile:
    """A YAML file that a setting names by its path, for a section that the release reads from a file."""

    name: str
    section: str
    """The section, under its canonical key."""
    settings: tuple[Setting, ...]
    """The section's settings, under canonical keys."""


@dataclass(frozen=True, kw_only=True)
class Omission:
    """A recipe's setting, or a default, that the plan leaves out, and why."""

    key: str
    value: Any
    reason: str


# mpirun gives the ranks of other nodes only the variables that it is told to give (-x). A variable that decides how the
# engine computes or communicates must not hold on some ranks only: half of the GPUs would run with a work-around and
# half without it, or a collective would wait for ever.
ENGINE_FAMILIES: Mapping[str, str] = {
    "TRTLLM_": "TensorRT-LLM (cpp/tensorrt_llm/common/envUtils.cpp)",
    "TLLM_": "TensorRT-LLM (tensorrt_llm/llmapi/mpi_session.py hands these two to its own workers, too)",
    "TRT_LLM_": "TensorRT-LLM's loading of weights (tensorrt_llm/_torch/models/modeling_utils.py)",
    "FORCE_": "TensorRT-LLM's choice of deterministic kernels (cpp/tensorrt_llm/common/envUtils.cpp)",
    "VLLM_": "vLLM (vllm/envs.py)",
    "DG_": "DeepGEMM, the Python package",
    "FLASHINFER_": "FlashInfer",
    "TRITON_": "Triton, the compiler",
    "PYTORCH_": "PyTorch's allocator",
    "TORCH": "PyTorch: TORCH_*, TORCHINDUCTOR_*, TORCHDYNAMO_*",
    "CUDA_": "CUDA and what compiles for it: CUDA_HOME, CUDA_LAUNCH_BLOCKING and so on",
    "CUBLAS_": "cuBLAS",
    "NCCL_": "NCCL",
    "GLOO_": "Gloo",
    "UCX_": "UCX",
    "UCC_": "UCC",
    "NIXL_": "NIXL, which moves KV caches between servers",
    "NVSHMEM_": "NVSHMEM, below DeepEP",
    "FI_": "libfabric",
}
"""Beginning of the names -> who reads them. What a user sets for the engine is for the whole engine."""

ENGINE_NAMES = (
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "OVERRIDE_QUANT_ALGO",
    "ENABLE_PERFECT_ROUTER",
    "ENABLE_CONFIGURABLE_MOE",
)
"""Further variables of the engine, which belong to no family. The last three are TensorRT-LLM's own."""

OF_ONE_NODE = ("*_VISIBLE_DEVICES", "*_VERSION")
"""Names in a family that say something about one node or one image, such as its GPUs. Each node has its own values."""

SURROUNDINGS = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")
"""Variables by which a rank finds programs and libraries. An ssh login on another node has other values."""

HUB_FAMILY = "HF_"
"""The Hugging Face hub: where its cache is, and the token, which is never printed."""


def is_engine_variable(name: str) -> bool:
    """Tell whether the variable is one that a user sets for the whole engine."""
    is_ours = name in ENGINE_NAMES or name.startswith(tuple(ENGINE_FAMILIES))
    return is_ours and not any(fnmatchcase(name, pattern) for pattern in OF_ONE_NODE)


def is_for_every_rank(name: str) -> bool:
    """Tell whether start.sh hands the variable to the ranks of other nodes."""
    return name in SURROUNDINGS or name.startswith(HUB_FAMILY) or is_engine_variable(name)
