"""Plans for vLLM whose settings the tests choose, and not the planner."""

from dataclasses import replace

from deepseek_triton_build import PlanRequest, Setting, make_plan
from deepseek_triton_build.arithmetic.gpu_memory import Layout
from deepseek_triton_build.data.vllm import load_vllm

MODEL = "deepseek-ai/DeepSeek-R1-0528"
SETTINGS = (
    Setting("model", MODEL, "the weights"),
    Setting("tensor_parallel_size", 8, "one copy over 8 GPUs"),
    Setting("enable_expert_parallel", True, "whole experts"),
    Setting("enable_prefix_caching", False, "asked for"),
    Setting("gpu_memory_utilization", 0.95, "more KV cache"),
    Setting("speculative_config.method", "mtp", "the checkpoint's own draft layer"),
    Setting("speculative_config.num_speculative_tokens", 1, "one draft token"),
    Setting("cudagraph_capture_sizes", [1, 2, 4], "the batches"),
    Setting("hf_overrides", {"a": "it's"}, "a text with an apostrophe"),
    Setting("triton_config.engine", "vllm", "vLLM"),
    Setting("triton_config.decoupled", True, "streams"),
)


def planned(version="0.24.0", **changes):
    """Return a plan for eight H200 whose settings have every form that a value can have."""
    plan = make_plan(PlanRequest(variant="deepseek-r1-0528", gpu="h200", num_gpus=8))
    return replace(
        plan,
        engine="vllm",
        release=None,
        vllm=load_vllm(version),
        environment=(),
        files=(),
        **{"settings": SETTINGS, **changes},
    )


def two_nodes():
    """Return a plan for two nodes of eight."""
    layout = Layout(tensor_parallel_size=16, expert_parallel_size=16)
    values = {"tensor_parallel_size": 16}
    settings = [replace(setting, value=values.get(setting.key, setting.value)) for setting in SETTINGS]
    settings.insert(2, Setting("nnodes", 2, "two nodes of eight GPUs"))
    return planned(layout=layout, num_nodes=2, settings=tuple(settings))
